"""A batch reads the shards of a table in parallel, within the reader's bound."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.cold_index import Recorder, in_rounds
from tests.support.merging import BASE_MS, DAY_S, HOUR_MS, Merging
from tiered_index import IndexReader, Lookup
from tiered_index.errors import CorruptFile
from tiered_index.service.jobs import merge_plan as plan_module
from tiered_index.storage.context import RequestContext
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.pools import NoThread, side_by_side

SHARDS = 8
KEYS = [f"k{number}" for number in range(200)]
ASKED = [Lookup(topic="t", key=key) for key in KEYS]


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """One table of eight shards, which are smaller than those of a real merge."""
    life = Merging(tmp_path_factory.mktemp("merge"), settings={"slots": 64})
    make = plan_module._rewrite
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "_rewrite", lambda *plan: make(*plan[:-1], _shard_bytes(plan[0], plan[2])))
        for hour in range(2):
            life.put((BASE_MS + hour * HOUR_MS + 1000 * number, key) for number, key in enumerate(KEYS))
            life.publish()
        life.later()
        life.merge(DAY_S)
    (shards,) = life.state.tables.values()
    assert len(shards) == SHARDS
    yield life
    life.close()


def _shard_bytes(state, counts):
    assert state.genesis is not None
    return -(-max(counts.values()) * state.genesis.layout.schema.item.itemsize // SHARDS)


def reader(life, storage, threads):
    recorder = Recorder(storage or life.storage)
    settings = {"block_cache_bytes": 0, "filter_after_probes": 10**6, "refresh_interval_s": 10**6}
    return recorder, IndexReader.open(storage_backend=recorder, clock=life.clock, query_threads=threads, **settings)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_shards_of_a_table_are_read_side_by_side(life, threads):
    recorder, opened = reader(life, None, threads)
    with opened:
        opened.query_many(ASKED)  # this reads the directories
        # The lookup's own thread also searches. The bound is for ranges.
        recorder.reset()
        answers = in_rounds(recorder, lambda: opened.query_many(ASKED), threads, SHARDS)
        assert answers.counts.tolist() == [2] * len(KEYS)
        assert (recorder.most_at_once, len(recorder.reads)) == (threads, SHARDS)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_fresh_reader_reads_directories_and_items_of_shards_side_by_side(life, threads):
    recorder, opened = reader(life, None, threads)
    with opened:
        answers = opened.query_many(ASKED, timeout_s=600)
        for q, answer in zip(ASKED, answers, strict=True):
            assert life.answers(answer) == life.model.query("t", q.key, max_count=None)
        assert (answers.explain.requests, len(recorder.reads)) == (2 * SHARDS, 2 * SHARDS)
        assert recorder.most_at_once <= threads
        (report,) = [report for report in answers.explain.files if report.outcome == "read"]
        assert (report.requests, report.matched) == (2 * SHARDS, 2 * len(KEYS))


def test_a_shard_that_is_damaged_fails_the_lookups_that_need_it(life):
    inner = MemoryStorage()
    for info in life.storage.list():
        inner.put(info.name, life.storage.get(info.name))
    (shards,) = life.state.tables.values()
    damaged = shards[SHARDS // 2]
    data = bytearray(inner.get(damaged.name))
    data[: damaged.trailer_position] = bytes(damaged.trailer_position)
    inner.put(damaged.name, bytes(data))
    _, opened = reader(life, inner, 4)
    with opened:
        with pytest.raises(CorruptFile) as caught:
            opened.query_many(ASKED)
        assert caught.value.file == damaged.name
        answers = opened.query_many(ASKED, allow_partial=True)
        for q, answer in zip(ASKED, answers, strict=True):
            expected = [] if answer.status == "partial" else life.model.query("t", q.key, max_count=None)
            assert life.answers(answer) == expected
        assert {answer.status for answer in answers} == {"partial", "complete"}
        assert answers.failed and all(damaged.name in str(report.error) for report in answers.failed)


def test_parts_within_parts_need_no_free_thread():
    """Parts have parts, three deep, and there are two threads.

    If a part waited for a free thread, it would wait permanently.
    """
    with ThreadPoolExecutor(2) as pool:

        def count(depth):
            return 1 if not depth else sum(side_by_side([lambda: count(depth - 1)] * 4))

        def run(depth):
            with RequestContext(submit=lambda call: pool.submit(_within, call)).active():
                return count(depth)

        def _within(call):
            with RequestContext(submit=lambda call: pool.submit(_within, call)).active():
                return call()

        asked = ThreadPoolExecutor(3)
        assert [future.result(60) for future in [asked.submit(run, 3) for _ in range(3)]] == [64] * 3
        asked.shutdown()


def test_the_first_error_ends_the_parts():
    begun = []

    def part(number):
        begun.append(number)
        if number == 1:
            raise KeyError(number)
        return number

    with ThreadPoolExecutor(1) as pool:
        held = threading.Event()
        pool.submit(held.wait, 30)
        with RequestContext(submit=pool.submit).active(), pytest.raises(KeyError):
            side_by_side([lambda number=number: part(number) for number in range(5)])
        held.set()
    assert begun == [0, 1]


def test_parts_without_a_thread_run_in_the_callers_thread():
    with ThreadPoolExecutor(1) as pool:
        left = [pool.submit, pool.submit]

        def submit(call):
            if not left:
                raise NoThread("none")
            return left.pop()(call)

        with RequestContext(submit=submit).active():
            assert side_by_side([lambda number=number: number for number in range(6)]) == list(range(6))
    assert not left
