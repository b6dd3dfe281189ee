"""`query_many` gives the answers of `query`, lookup by lookup, in every state of the files."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import batch
from tests.support.cold_index import Recorder
from tests.support.model import Answer, ReferenceModel
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.base.clock import ManualClock
from tiered_index.errors import CorruptFile, InvalidArgument, InvalidCursor
from tiered_index.format import compacted
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.read.answers import batch as batches
from tiered_index.service.read.files import file_search as search
from tiered_index.storage.base import Storage
from tiered_index.storage.memory import MemoryStorage

T = 1_700_000_000_000
NAMES = ("second", "offset", "queue_id")
SMALL = {"slots": 3, "items": 1500, "max_early_s": 10**9, "clock": ManualClock(T)}


def put(index: IndexService, first: int, stop: int, topic: str, rng: random.Random) -> None:
    numbers = np.arange(first, stop)
    keys = ["hot" if i % 4 == 0 else f"k{i % 150}" for i in numbers.tolist()]
    columns = {"queue_id": [rng.randrange(3) for _ in keys], "offset": numbers, "timestamp_ms": T + numbers * 300}
    index.put_batch(batch(len(keys), topic=topic, key=keys, size=10, **columns))


def lookups(rng: random.Random, count: int) -> list[Lookup]:
    drawn = []
    for _ in range(count):
        topic = rng.choice(["t", "t", "t", "u", "nowhere"])
        key = rng.choice([f"k{rng.randrange(160)}", f"k{rng.randrange(160)}", "hot", "absent", "ключ"])
        begin = T + rng.randrange(-5_000, 1_300_000)
        limits = rng.choice([None, begin]), rng.choice([None, begin + rng.randrange(400_000)])
        drawn.append(Lookup(topic, key, *limits, rng.choice([1, 2, 7, 64, 10_000])))
    return drawn


def assert_same(index: IndexService | IndexReader, questions: list[Lookup]) -> None:
    answers = index.query_many(questions)
    assert len(answers) == len(questions)
    assert answers.counts.tolist() == [len(answer) for answer in answers]
    for q, answer in zip(questions, answers, strict=True):
        alone = index.query(q.topic, q.key, q.begin_ms, q.end_ms, q.max_count, q.cursor)
        assert answer.items == alone.items, q
        if alone.status == "complete":
            assert answer.status == "complete" and answer.cursor is None, q
        elif answer.status == "truncated":  # a batch reads every file, so it may know that no entry follows
            assert answer.cursor == alone.cursor, q
        else:
            rest = index.query(q.topic, q.key, q.begin_ms, q.end_ms, q.max_count, alone.cursor)
            assert rest.items == () and rest.status == "complete", q


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch join few pairs at a time, and cut rows early."""
    monkeypatch.setattr(batches, "PAIRS_AT_A_TIME", 20)
    monkeypatch.setattr(batches, "_FEWEST", 3)


def opened(folder: Path, storage: Storage, **settings: Any) -> IndexService:
    return IndexService.open(root=folder / "root", storage_backend=storage, background=False, **settings)


@pytest.fixture(params=["native", "rocketmq"])
def index(request: pytest.FixtureRequest, tmp_path: Path):
    """An index with files in every state, and entries in the buffer."""
    rng = random.Random(5)
    clock = ManualClock(T + 3_600_000)
    settings = {"preset": request.param, "slots": 64, "items": 1200, "local_keep_s": 100}
    with opened(tmp_path, MemoryStorage(), clock=clock, **settings) as service:
        put(service, 0, 2000, "t", rng)
        service.seal()
        service.run_lifecycle()
        clock.advance(200)
        service.run_lifecycle()  # these have no local copy any more
        put(service, 2000, 2600, "u", rng)
        put(service, 2400, 3000, "t", rng)
        service.seal()
        service.run_lifecycle()
        put(service, 2900, 3900, "t", rng)
        service.flush()
        put(service, 3900, 4100, "t", rng)
        put(service, 10, 60, "t", rng)  # the same messages again
        assert {"storage", "uploaded", "unsealed"} <= set(service.health()["files"])
        yield service


@pytest.mark.usefixtures("small_pieces")
def test_answers_of_small_pieces(index: IndexService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few pairs at a time, rows cut at once, windows of one group: no answer changes, for any reader."""
    monkeypatch.setattr(batches, "_HELD_ROWS", 5)
    monkeypatch.setattr(search, "_WINDOW_BYTES", 1)
    assert_same(index, lookups(random.Random(3), 200))
    many = itertools.product(range(0, 1_300_000, 50_000), (1, 20, 5000))
    assert_same(index, [Lookup(topic="t", key="hot", max_count=count, begin_ms=T + at) for at, count in many])
    for root in (None, index.config.root):
        with IndexReader.open(root=root, storage_backend=index.storage) as reader:
            assert_same(reader, lookups(random.Random(2), 150))
    with pytest.raises(InvalidCursor):
        index.query_many([Lookup(topic="t", key="k7", cursor=index.query("t", "hot", max_count=1).cursor)])


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("gap_bytes", [0, 700])
@pytest.mark.parametrize("preset", ["native", "rocketmq"])
def test_cut_slots_equal_single_queries_and_are_read_once(
    preset: str, gap_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index has blocks of a few items, times in disorder, many entries of one second, and repeated places."""
    monkeypatch.setattr(compacted, "BLOCK_BYTES", 320)
    rng = np.random.default_rng(7)
    storage = Recorder(MemoryStorage())
    settings = {"preset": preset, "local_keep_s": 0, **SMALL}
    with opened(tmp_path, storage, **settings) as service:
        for count, spread_s in ((1000, 400), (800, 3), (500, 100_000)):
            columns = {"queue_id": rng.integers(0, 2, count), "size": rng.integers(0, 9, count)}
            columns["key"] = [f"k{n}" for n in rng.choice(5, count, p=[0.6, 0.2, 0.1, 0.05, 0.05])]
            columns["offset"] = rng.integers(0, 200, count)
            times = T + np.arange(count) * 20 * (spread_s // 30) + rng.integers(0, spread_s * 1000, count)
            service.put_batch(batch(count, timestamp_ms=times, **columns))
            service.seal()
        for _ in range(3):
            service.run_lifecycle()
        assert {handle.place for handle in service.files()} == {"storage"}
    cold = {"cache_slot_groups": False, "filter_after_probes": 10**6, "coalesce_gap_bytes": gap_bytes}
    with IndexReader.open(storage_backend=storage, query_threads=2, **cold) as reader:
        reader.query_many([Lookup(topic="t", key="k0")])
        for number in range(6):
            questions = []
            for _ in range(rng.integers(1, 12)):
                begin = T + int(rng.integers(-10_000, 400_000))
                limits = (begin, begin + int(rng.integers(0, 100_000))) if rng.random() < 0.5 else (None, None)
                questions.append(Lookup("t", f"k{rng.integers(0, 7)}", *limits, int(rng.choice([1, 3, 20, 5000]))))
            storage.reset()
            reader.query_many(questions)
            ranges = sorted((read.name, read.start, read.end) for read in storage.reads)
            for (name, _, end), (following, start, _) in itertools.pairwise(ranges):
                assert name != following or start >= end, number
            assert_same(reader, questions)


def test_a_lost_object_fails_the_batch_or_is_named(index: IndexService) -> None:
    name = next(iter(index.log_state.objects))
    lost = index.log_state.objects[name]
    with IndexReader.open(storage_backend=index.storage) as reader:
        index.storage.delete_many([name])
        questions = [Lookup(topic="t", key="k7"), Lookup(topic="t", key="k7", begin_ms=(lost.second_max + 1) * 1000)]
        with pytest.raises(CorruptFile, match=name):
            reader.query_many(questions)
        touched, untouched = reader.query_many(questions, allow_partial=True)
    assert touched.status == "partial" and [report.file for report in touched.failed] == [lost.file_id]
    assert untouched.status == "complete"


def test_a_batch_refuses_and_answers_as_single_lookups_do(index: IndexService) -> None:
    times = [None, -(2**70), 0, T, T + 2999, 253_402_300_800_000, 2**63, 2**70]
    for begin_ms, end_ms, max_count in itertools.product(times, times, [True, 0, 1, 2, 2**31, 2**63, 2**70]):
        question = {"begin_ms": begin_ms, "end_ms": end_ms, "max_count": max_count}
        outcomes: list[Any] = []
        for several in (False, True):
            try:
                questions = [Lookup(topic="t", key="k1"), Lookup(topic="t", key="k7", **question)]
                result = index.query_many(questions)[1] if several else index.query("t", "k7", **question)
                outcomes.append((result.status, result.items, result.cursor))
            except InvalidArgument as error:
                outcomes.append(str(error))
        alone, batched = outcomes
        assert alone == batched or (isinstance(alone, str) and alone in batched), question
    assert list(index.query_many([])) == []


def test_a_large_answer_of_many_files_is_the_models_to_its_border(tmp_path: Path) -> None:
    """Answers of many files are sorted when their number has doubled, not after each file."""
    model, rng, rows = ReferenceModel(), random.Random(3), 6000
    offsets = list(range(rows - 500)) + [rng.randrange(rows - 500) for _ in range(500)]  # some messages were put twice
    rng.shuffle(offsets)
    with opened(tmp_path, MemoryStorage(), slots=7, items=400, local_keep_s=0, clock=ManualClock(T)) as service:
        for begin in range(0, rows, 1500):
            piece = offsets[begin : begin + 1500]
            times = [T + offset * 7 % 1000 * 1000 for offset in piece]
            columns = batch(len(piece), queue_id=[offset % 3 for offset in piece], offset=piece, timestamp_ms=times)
            service.put_batch(columns)
            for row in zip(*columns.values(), strict=True):
                model.put(*row)
            if begin < rows - 1500:
                service.flush()
            if begin == 1500:
                service.run_lifecycle()
        assert {handle.place for handle in service.files()} == {"storage", "unsealed"}
        wanted = model.query("t", "k", max_count=None)
        for max_count in (512, 513, len(wanted) - 1, len(wanted), len(wanted) + 1):
            result = service.query("t", "k", max_count=max_count)
            assert [Answer.of(item) for item in result] == wanted[:max_count]
            assert result.status == ("complete" if max_count >= len(wanted) else "truncated")


rows_of_a_part = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)), max_size=6
)


@given(parts=st.lists(rows_of_a_part, max_size=2), most=st.integers(1, 3))
def test_rows_come_in_answer_order_and_once_however_they_are_found(parts: list[Any], most: int) -> None:
    matches = []
    for part in parts:
        rows = np.zeros(len(part), KEYED_SCHEMA.row)
        owners, *values = np.array(part, np.int64).reshape(-1, 4).T
        for name, column in zip(NAMES, values, strict=True):
            rows[name] = column
        matches.append(batches.Matches(owners, rows))
    ordered = batches.OrderedRows(2, matches, KEYED_SCHEMA)
    first, counts = ordered.first(np.full(2, most)), ordered.counts
    answers = list(zip(*(first.rows[name].tolist() for name in NAMES), strict=True))
    for owner in range(2):
        newest: dict[tuple[int, int], int] = {}
        for _, second, offset, queue in (row for part in parts for row in part if row[0] == owner):
            newest[offset, queue] = max(second, newest.get((offset, queue), 0))
        expected = sorted(((-second, -offset, queue) for (offset, queue), second in newest.items()))
        here = [answer for answer, of in zip(answers, first.lookups.tolist(), strict=True) if of == owner]
        assert [(-second, -offset, queue) for second, offset, queue in here] == expected[:most]
        assert counts[owner] == len(expected)
