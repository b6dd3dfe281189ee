"""Bulk lookups answer as a reader does, whatever the files. They run in this process, task by task.

The tests count requests, and script faults.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.rocketmq.messages import message
from tests.spark.looked_up import SETTINGS, held, looked_up, plan_of
from tests.support.batches import batch
from tests.support.cold_index import Recorder
from tests.support.merging import BASE_MS, DAY_MS, HOUR_MS, Merging, RegionItem
from tests.support.plain_files import plain_files
from tests.support.storage_faults import FaultStorage
from tests.support.stored_messages import compress
from tiered_index import Lookup
from tiered_index.errors import InvalidArgument, StorageMisconfigured, StorageUnavailable
from tiered_index.format.hashing import java_string_hash, key_hash
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.service.lookup.messages import Fetched
from tiered_index.service.merge import plan as plan_module
from tiered_index.service.merge import task as task_module
from tiered_index.spark.lookup import answers, packing, search
from tiered_index.spark.lookup import plan as lookup_plan
from tiered_index.spark.lookup.plan import LOOKUP, PackedBatch, distinct, lookups_of, places_of, routes, times_of

KINDS: dict[str, tuple[str, Any]] = {
    "native": ("native", None),
    "rocketmq": ("rocketmq", None),
    "further columns": ("native", RegionItem),
}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A function that makes an index of each kind, once."""
    return functools.cache(lambda kind: made_first(tmp_path_factory.mktemp("first"), *KINDS[kind]))


def made_first(folder, preset, item_type):
    """Files, tables of shards and of parts of a giant slot, a giant key, a quarantine file, keys with equal hashes."""
    made = Merging(folder, preset=preset, item_type=item_type, settings={"max_late_s": 40 * 86_400})
    rng = random.Random(7)

    def rows(begin_ms, count, keys):
        return [(begin_ms + rng.randrange(DAY_MS), f"k{rng.randrange(keys)}") for _ in range(count)]

    made.put(rows(BASE_MS, 900, 60))
    made.put([(BASE_MS + n * 1000, "giant") for n in range(1500)])
    made.publish()
    made.put(rows(BASE_MS, 200, 60), topic="other")
    made.publish()
    made.later(3)
    with pytest.MonkeyPatch.context() as patched:
        small_pieces(patched)
        made.merge()
    (shards,) = made.state.tables.values()
    ranges = {(stored.shard.slot_low, stored.shard.slot_high) for stored in shards}
    assert 1 < len(ranges) < len(shards)
    for day in range(3, 6):
        made.put(rows(BASE_MS + day * DAY_MS, 150, 60))
        # keys with one hash: topics and keys differ, but "Aa" and "BB" have equal Java hashes
        assert key_hash("t", "xAa") == key_hash("t", "xBB")
        made.put([(BASE_MS + day * DAY_MS, "xAa"), (BASE_MS + day * DAY_MS + 5, "xBB")])
        made.put([(BASE_MS + day * DAY_MS + 9, "xAa")], topic="other")
        made.publish()
    made.put([(BASE_MS - 400 * DAY_MS, "k1"), (BASE_MS - 401 * DAY_MS, "late")])
    made.publish()
    made.index.close()
    return made


def small_pieces(monkeypatch):
    monkeypatch.setattr(task_module, "PIECE_ITEMS", 200)
    monkeypatch.setattr(plan_module, "_job", lambda *given, job=plan_module._job: job(*given[:-1], 1 << 14))


@pytest.fixture(params=["native"])
def life(request, first, tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    made = first(request.param).copied(tmp_path / "life")
    yield made
    made.close()


of_each_kind = pytest.mark.parametrize("life", KINDS, indirect=True)


def merged_and_swept(life):
    life.later()
    life.merge(30 * 86_400)
    life.later(3)
    delete_orphans(life.storage, find_orphans(life.storage, life.log()))


def lookups_in(made, *, max_count=64):
    names = [*sorted(made.asked), ("t", "nobody"), ("nowhere", "k1"), ("t", "xAa"), ("other", "xBB")]
    ranges = [*made.ranges(), (BASE_MS + HOUR_MS, BASE_MS + 5 * HOUR_MS), (BASE_MS - 500 * DAY_MS, BASE_MS)]
    # a range that ends where a file begins
    begin_ms, end_ms = BASE_MS + 4 * DAY_MS - 2000, BASE_MS + 4 * DAY_MS
    edge = Lookup(topic="t", key="xAa", begin_ms=begin_ms, end_ms=end_ms, max_count=max_count)
    return [edge] + [
        Lookup(topic=t, key=k, begin_ms=b, end_ms=e, max_count=max_count)
        for number, (t, k) in enumerate(names)
        for b, e in (ranges if number % 5 == 0 else ranges[number % 7 : number % 7 + 1])
    ]


def entries_of(result):
    return [{n: v for n, v in asdict(item).items() if n not in ("topic", "source")} for item in result.items]


def check(made, found, lookups):
    with made.reader() as reader:
        answered = reader.query_many(lookups)
        for lookup, result in zip(lookups, answered, strict=True):
            status, entries, failed = found.of(lookup)
            assert (status, entries, failed) == (result.status, entries_of(result), None), lookup
        for lookup, result in list(zip(lookups, answered, strict=True))[::9]:
            one = reader.query(lookup.topic, lookup.key, lookup.begin_ms, lookup.end_ms, lookup.max_count)
            assert entries_of(one) == entries_of(result)


@of_each_kind
@pytest.mark.parametrize("max_count", [3, 10_000])
def test_answers_equal_a_readers(life, max_count):
    lookups = lookups_in(life, max_count=max_count)
    assert len(lookups) > 100
    plan = plan_of(life.state, lookups, max_count=max_count)
    assert len(plan.tasks) > 2
    found = looked_up(life.storage, plan, [*lookups, *lookups[:20]])
    check(life, found, lookups)
    # equal rows are one question
    assert len(found.answers) <= len(lookups)


@of_each_kind
def test_answers_of_small_pieces(life, monkeypatch):
    """These do not change an answer: windows of a run, rows passed on at once, batches with too many pairs, filters at
    any price.
    """
    monkeypatch.setattr(search, "_WINDOW_BYTES", 1)
    monkeypatch.setattr(search, "_CHUNK", 16)
    monkeypatch.setattr(search, "_ALONE", 0)
    monkeypatch.setattr(search, "_FILTER_SHARE", 0)
    monkeypatch.setattr("tiered_index.service.answers.batch.PAIRS_AT_A_TIME", 20)
    monkeypatch.setattr(search, "_HELD_ROWS", 5)
    monkeypatch.setattr(search, "_BLOCK_LOOKUPS", 13)
    monkeypatch.setattr(packing, "_LOT_ROWS", 10)
    monkeypatch.setattr(answers, "_HELD_ROWS", 10)
    monkeypatch.setattr(answers, "_BATCH_ROWS", 7)
    monkeypatch.setattr(lookup_plan, "_LOOKUPS_A_PARTITION", 9)
    monkeypatch.setattr(lookup_plan, "_LEAST_A_PARTITION", 1)
    lookups = lookups_in(life, max_count=20)
    plan = plan_of(life.state, lookups, max_count=20)
    assert plan.partitions > 3 * plan.answerers > 3
    found = looked_up(life.storage, plan, lookups, batch_rows=11)
    check(life, found, lookups)


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("preset", ["native", "rocketmq"])
def test_a_key_is_found_in_every_spelling(tmp_path, monkeypatch, preset, is_held):
    """Keys of bytes: as their digits, as the text of earlier versions, and text that looks like digits."""
    monkeypatch.setattr(search, "_ALONE", 0 if is_held else 4)
    made = Merging(tmp_path, preset=preset)
    number, invalid = "\0\0\0\0\0\0\0*", "0xff"
    keys = [number, "0x000000000000002a", invalid, "0xFF", "ab", "0x6162", "0x0A", "\n", "\x7fx", "order-1"]
    for day, group in enumerate((keys, keys[::2], keys[::-1])):
        made.put([(BASE_MS + day * DAY_MS + n * 1000, key) for n, key in enumerate(group)])
        made.publish()
    made.later(3)
    made.merge()
    made.put([(BASE_MS + 5 * DAY_MS + n * 1000, key) for n, key in enumerate(keys)])
    made.publish()
    lookups = [Lookup(topic="t", key=key) for key in [*keys, "0x0a", "0x7F78", "0x7f78", "none", "0x00"]]
    plan = plan_of(made.state, lookups)
    found = looked_up(made.storage, held(plan, lookups) if is_held else plan, lookups)
    check(made, found, lookups)
    with made.reader() as reader:
        counts = {lookup.key: len(reader.query("t", lookup.key)) for lookup in lookups}
    # the text of a number is found by its digits, with those that have digits; upper and lower case are the same bytes
    assert counts[number] == counts["0x000000000000002a"] == 7 and counts["0xFF"] > counts["0xff"] > 0
    assert counts["0x7F78"] == counts["\x7fx"] > 0 == counts["none"]
    made.close()


def test_many_lookups_of_few_entries_take_the_filter_first(life, monkeypatch):
    lookups = lookups_in(life, max_count=20)
    plan = plan_of(life.state, lookups, max_count=20)
    searched, runs_of = [], search._runs_of

    def noted(trailer, batch):
        searched.append(len(batch))
        return runs_of(trailer, batch)

    monkeypatch.setattr(search, "_runs_of", noted)
    monkeypatch.setattr(search, "_MANY_PER_ENTRY", 0)
    sums = []
    for many in (len(lookups) + 1, 1):
        monkeypatch.setattr(search, "_MANY", many)
        searched.clear()
        check(life, looked_up(life.storage, plan, lookups), lookups)
        sums.append(sum(searched))
    assert sums[1] < sums[0]


@of_each_kind
def test_lookups_that_the_driver_holds(life, monkeypatch):
    """Blocks name the lookups by their places. Answers, and the files that could not be read, are the same."""
    monkeypatch.setattr(answers, "_BATCH_ROWS", 7)
    monkeypatch.setattr(lookup_plan, "_LOOKUPS_A_PARTITION", 9)
    monkeypatch.setattr(lookup_plan, "_LEAST_A_PARTITION", 1)
    lookups = lookups_in(life, max_count=20)
    plan = held(plan_of(life.state, lookups, max_count=20), [*lookups, *lookups[:20]])
    assert plan.partitions > 3 and len(plan.asked) <= len(lookups)
    check(life, looked_up(life.storage, plan, lookups), lookups)
    storage, stored = faulty(life, StorageUnavailable("no answer"))
    partial = looked_up(storage, held(plan_of(life.state, lookups, allow_partial=True), lookups), lookups)
    expected = looked_up(storage, plan_of(life.state, lookups, allow_partial=True), lookups)
    assert [partial.of(lookup) for lookup in lookups] == [expected.of(lookup) for lookup in lookups]
    assert "partial" in {partial.of(lookup)[0] for lookup in lookups}
    life.storage.delete(stored.name)
    with pytest.raises(StorageUnavailable, match=r"was removed.*look up again"):
        looked_up(life.storage, plan, lookups, accepted=True)


def test_keys_are_counted_and_packed_in_lots(monkeypatch):
    monkeypatch.setattr(packing, "_LOT_ROWS", 4)
    monkeypatch.setattr(packing, "_FEW", 3)
    monkeypatch.setattr(packing, "_ASKED_ROWS", 2)
    rows = [("b", "k1"), ("b", "k1"), ("a", None), ("b", "k2"), (None, "k"), ("a", "k3"), ("c", "k4"), ("c", "k5")]
    none = pa.nulls(len(rows), pa.int64())
    topics, keys = (pa.array(column, pa.string()) for column in zip(*rows, strict=True))
    batch = pa.record_batch([topics, keys, none, pa.array([5_000] * len(rows))], ["t", "k", "b", "e"])
    parts = [batch.slice(0, 3), batch.slice(3, 3), batch.slice(6)]
    # two tasks that read the topics in different orders
    packed = [made for task in (parts[:2], parts[1:]) for made in packing.pack_keys(task, keyed=True, column="'key'")]
    lots = [lot for made in packed for lot in made.to_pylist()]
    # many lookups are in rows of bounded size after their report
    asked = [lot for lot in lots if lot["asked"] is not None]
    assert [len(lot["asked"]) // LOOKUP.itemsize for lot in asked] == [2, 2]
    assert all(len(lot["topics"]) <= 2 and lot["few"] is lot["rows"] is None for lot in asked)
    reports = [lot for lot in lots if lot["asked"] is None]
    assert [(lot["rows"], lot["topicless"], lot["keyless"]) for lot in reports] == [(4, 1, 1), (4, 1, 0)]
    assert [lot["few"] is None for lot in reports] == [False, True]
    census = packing.census_of(reports, {"topic": "'topic'", "key": "'key'"}, skip_null=True)
    assert (census.rows, census.topics, census.seconds, census.skipped_null) == (8, ("a", "b", "c"), (0, 5), 3)
    given = [lot if lot["few"] is not None else {"topics": lot["topics"], "asked": lot["asked"]} for lot in lots]
    held_ = replace(census, lookups=packing.lookups_in(given, census.topics))
    whole = batch.filter(pc.and_(topics.is_valid(), keys.is_valid()))
    expected = lookups_of(*whole.columns, {"a": 0, "b": 1, "c": 2}, keyed=True)
    assert held_.asked(()).tolist() == distinct(expected).tolist()
    expected["second_min"][expected["topic"] == 1] = 3
    assert held_.asked((0, 3, 0)).tolist() == distinct(expected).tolist()
    with pytest.raises(InvalidArgument, match="column 'topic' has 2 nulls"):
        packing.census_of(reports, {"topic": "'topic'", "key": "'key'"}, skip_null=False)


def test_partitions_bound_memory_and_tasks_that_answer_are_few(life):
    for rows, parallelism, max_count, partitions, answerers in (
        (0, 2, 64, 1, 1),
        (3, 2, 64, 1, 1),
        (32_000, 2, 64, 4, 4),
        (1_000_000, 2, 64, 125, 4),
        (1_000_000, 64, 64, 125, 125),
        (1_000_000, 2, 1_000, 1_909, 4),
        (100_000, 2, 2**31 - 2, 1_000, 4),
        (200_000_000, 8, 64, 10_000, 200),
    ):
        given = {"rows": rows, "parallelism": parallelism, "max_count": max_count}
        plan = plan_of(life.state, [Lookup(topic="t", key="k")], **given)
        assert (plan.partitions, plan.answerers) == (partitions, answerers), (rows, parallelism, max_count)


def test_ranges_of_one_key_are_of_many_partitions():
    questions = np.zeros(1_000, LOOKUP)
    questions["java_hash"], questions["second_min"] = 7, 1_700_000_000
    questions["second_max"] = 1_700_000_000 + np.arange(1_000)
    often = np.bincount(routes(questions, 20), minlength=20)
    assert often.min() > 20 and often.max() < 100
    questions["second_min"] += np.arange(1_000)
    assert np.bincount(routes(questions, 20), minlength=20).max() < 100


def test_each_object_is_opened_once_and_ranges_are_read_once(life):
    lookups = lookups_in(life)
    recorder = Recorder(life.storage)
    plan = plan_of(life.state, lookups)
    found = looked_up(recorder, plan, lookups)
    objects = life.state.objects
    directories = [read.name for read in recorder.reads if read.start == objects[read.name].directory_position]
    assert sorted(directories) == sorted(objects)
    assert found.requests == len(recorder.reads) == len(recorder.operations)
    assert sum(report.bytes_read for report in found.reports) == recorder.delivered
    # cut slots read their few keys separately; without them, no byte is read twice
    for name in (name for name, stored in objects.items() if stored.count < 1000):
        reads = sorted((read for read in recorder.reads if read.name == name), key=lambda read: read.start)
        assert all(first.end <= second.start for first, second in itertools.pairwise(reads))


def test_only_files_in_range_and_slots_that_are_asked_are_read(life):
    recorder = Recorder(life.storage)
    lookup = Lookup(topic="t", key="k3", begin_ms=BASE_MS + 3 * DAY_MS, end_ms=BASE_MS + 4 * DAY_MS - 1)
    found = looked_up(recorder, plan_of(life.state, [lookup]), [lookup])
    (name,) = {read.name for read in recorder.reads}
    assert (life.state.objects[name].shard, len(recorder.reads)) == (None, 2)
    check(life, found, [lookup])


def put_at_once(made, times_ms, keys, first=1):
    """Put entries at the places that `Merging.put` gives, in one batch, and none into the model."""
    numbers = range(first, first + len(keys))
    columns = {"queue_id": [n % 3 for n in numbers], "size": [n % 50 for n in numbers], "timestamp_ms": times_ms}
    columns["offset"] = [n % 10 if n % 7 == 0 else n for n in numbers]
    made.index.put_batch(batch(len(keys), key=keys, **columns))


def test_neighbours_are_one_range_where_the_gap_allows_it(tmp_path):
    # packed items are small, so that few of them would be in one group
    made = Merging(tmp_path, settings={"slots": 5_000, "items": 50_000})
    put_at_once(made, range(BASE_MS, BASE_MS + 6_000), [f"k{n}" for n in range(6_000)])
    with plain_files():
        made.publish()
    lookups = [Lookup(topic="t", key=f"k{n}") for n in range(0, 6_000, 40)]
    requests = []
    for gap in (0, 1 << 20):
        recorder = Recorder(made.storage)
        settings = type(SETTINGS)(query_threads=2, coalesce_gap_bytes=gap)
        check(made, looked_up(recorder, plan_of(made.state, lookups, settings=settings), lookups), lookups)
        requests.append(len(recorder.reads))
    assert requests[0] > requests[1] == 2
    made.close()


def test_a_filter_is_read_where_it_spares_more(tmp_path):
    made = Merging(tmp_path, settings={"slots": 20_000, "items": 50_000})
    put_at_once(made, range(BASE_MS, BASE_MS + 20_000), [f"k{n}" for n in range(20_000)])
    made.publish()
    (stored,) = made.state.objects.values()
    absent = [Lookup(topic="t", key=f"absent{n}") for n in range(2_000)]
    recorder = Recorder(made.storage)
    looked_up(recorder, plan_of(made.state, absent), absent)
    assert recorder.reads[1].start == stored.trailer_position and recorder.reads[1].length == stored.filter_length
    # a filter passes about 1 in 100 absent keys; without it, the task would have read nearly every slot group
    assert recorder.delivered < stored.trailer_position / 2
    few = Recorder(made.storage)
    looked_up(few, plan_of(made.state, absent[:1]), absent[:1])
    assert [read.start == stored.trailer_position for read in few.reads] == [False] * 2
    made.close()


def test_a_hot_key_is_read_newest_first(tmp_path):
    made = Merging(tmp_path, settings={"items": 50_000})
    put_at_once(made, range(BASE_MS, BASE_MS + 30_000_000, 1000), ["hot"] * 30_000)
    made.publish()
    lookup = Lookup(topic="t", key="hot", max_count=5)
    recorder = Recorder(made.storage)
    found = looked_up(recorder, plan_of(made.state, [lookup], max_count=5), [lookup])
    check(made, found, [lookup])
    (stored,) = made.state.objects.values()
    assert recorder.delivered < stored.size_bytes / 2
    made.close()


@pytest.mark.parametrize("allow_partial", [False, True])
def test_blocks_that_are_made_again_are_never_short(life, allow_partial):
    """Spark lost the results of tasks, and repeats these after objects were removed. This is an error, not an answer
    that lacks entries.
    """
    lookups = lookups_in(life)
    plan = plan_of(life.state, lookups, allow_partial=allow_partial)
    check(life, looked_up(life.storage, plan, lookups), lookups)
    check(life, looked_up(life.storage, plan, lookups, accepted=True), lookups)
    merged_and_swept(life)
    with pytest.raises(StorageUnavailable, match=r"was removed.*look up again"):
        looked_up(life.storage, plan, lookups, accepted=True)


def test_errors_while_blocks_are_made_again_are_named(life):
    lookups = lookups_in(life)
    plan = plan_of(life.state, lookups, allow_partial=True)
    whole = looked_up(life.storage, plan, lookups)
    assert not any(report.failed for report in whole.reports)
    storage, stored = faulty(life, StorageUnavailable("no answer"))
    again = looked_up(storage, plan, lookups, accepted=True)
    assert {status for status, _, _ in again.answers.values()} >= {"partial"}
    for question, (status, entries, failed) in again.answers.items():
        named = failed == [{"file": stored.file_id, "error": "no answer"}]
        assert named or (status, entries) == whole.answers[question][:2]


def faulty(made, error):
    """A storage with one file that can't be read, and that file."""
    name = next(name for name, stored in made.state.objects.items() if stored.shard is None)
    storage = FaultStorage(made.storage)
    storage.fail("get_range", error=lambda text: error, times=None, name_prefix=name)
    return storage, made.state.objects[name]


@pytest.mark.parametrize(
    "error", [StorageMisconfigured("403 denied"), StorageUnavailable("no answer")], ids=["denied", "down"]
)
def test_a_file_that_cannot_be_read_fails_or_is_named(life, error):
    lookups = lookups_in(life)
    storage, stored = faulty(life, error)
    with pytest.raises(type(error)):
        looked_up(storage, plan_of(life.state, lookups), lookups)
    found = looked_up(storage, plan_of(life.state, lookups, allow_partial=True), lookups)
    (failed,) = {pair for report in found.reports for pair in report.failed}
    assert failed == (stored.file_id, str(error))
    with life.reader() as reader:
        whole = reader.query_many(lookups)
        for lookup, result in zip(lookups, whole, strict=True):
            status, entries, why = found.of(lookup)
            low, high = (lookup.begin_ms or 0) // 1000, (lookup.end_ms or 2**60) // 1000
            if low <= stored.second_max and high >= stored.second_min:
                assert (status, why) == ("partial", [{"file": stored.file_id, "error": str(error)}])
            else:
                assert (status, entries, why) == (result.status, entries_of(result), None)


def test_questions_hold_what_a_batch_does():
    lookups = [Lookup(topic=t, key=k, begin_ms=1500, end_ms=None) for t in ("t", "ü") for k in ("a", "😀", "x" * 999)]
    columns = [[q.topic for q in lookups], [q.key for q in lookups]]
    found = plan_columns(*columns)
    assert found["java_hash"].tolist() == [java_string_hash(f"{q.topic}#{q.key}") for q in lookups]
    assert set(found["second_min"].tolist()) == {1}
    batch = PackedBatch(found, ["ü", "t"], 3)
    assert batch.key_hash.tolist() == [key_hash(q.topic, q.key) for q in lookups]
    assert [batch.topics[i] for i in batch.topic_index] == columns[0]
    assert batch.part(found["topic"] == 0).topics == ["ü"]
    with pytest.raises(InvalidArgument, match="column 'key': the key '' of topic 't' is 0 "):
        plan_columns(["ü", "t"], ["k", ""])
    with pytest.raises(InvalidArgument, match=r"'x{40}\.\.\.' of topic 'ü' is 32,768 .*1\.\.32,767"):
        plan_columns(["t", "ü"], ["k", "x" * 32_768])
    with pytest.raises(InvalidArgument, match="is new"):
        plan_columns(["unseen"], ["k"])
    wrong = pa.array([b"a\xe2\x82", b"\xacb"], pa.binary()).view(pa.string())
    times = pa.nulls(2, pa.int64())
    with pytest.raises(InvalidArgument, match="a key has bytes that are not UTF-8"):
        lookups_of(pa.array(["t", "t"]), wrong, times, times, {"t": 0}, keyed=True)


HOURS = 30


def of_hours(made, count):
    """One file per hour, and lookups: of many keys, of one key, and of one key in two distant hours."""
    for hour in range(HOURS):
        begin_ms, keys = BASE_MS + hour * HOUR_MS, [f"k{(hour * 7 + n) % 50}" for n in range(count)]
        put_at_once(made, range(begin_ms, begin_ms + count * 1000, 1000), keys, first=1 + hour * count)
        made.publish()
    begins = [BASE_MS + hour * HOUR_MS for hour in (0, HOURS - 1)]
    return {
        "many": [Lookup(topic="t", key=f"k{n}") for n in range(50)],
        "one": [Lookup(topic="t", key="k1")],
        "two hours": [Lookup(topic="t", key="k1", begin_ms=begin, end_ms=begin + HOUR_MS - 1) for begin in begins],
        "nothing": [Lookup(topic="t", key="k1", begin_ms=0, end_ms=1000)],
    }


@pytest.mark.parametrize("gap", [0, pytest.param(1 << 18, marks=pytest.mark.long)])
def test_a_key_takes_two_requests_of_each_file_in_its_range(tmp_path, gap):
    made = Merging(tmp_path)
    settings = type(SETTINGS)(query_threads=2, coalesce_gap_bytes=gap, block_cache_bytes=0)
    files = {"one": HOURS, "two hours": 2, "nothing": 0}
    for name, lookups in of_hours(made, 300).items():
        plan, recorder = plan_of(made.state, lookups, settings=settings), Recorder(made.storage)
        assert len(plan.tasks) < HOURS
        check(made, looked_up(recorder, plan, lookups), lookups)
        assert name not in files or len(recorder.reads) == 2 * files[name]
    made.close()


def test_times_of_text():
    at = "2023-11-14T22:13:20Z"
    texts = pa.array([at, None, "1700000000000", "2023-11-15 06:13:20+08:00", at])
    times = [1_700_000_000_000, None, *[1_700_000_000_000] * 3]
    assert times_of(texts, "'since' (begin_ms)", end=False).to_pylist() == times
    assert times_of(texts.slice(1, 1), "'begin_ms'", end=False).to_pylist() == [None]
    assert times_of(pa.array(["2023-11-14"]), "'end_ms'", end=True).to_pylist() == [1_700_006_399_999]
    # a truncated text is invalid, too
    for text in ("yesterday", "", "1e3", "--5", "2023-11-14" + " " * 60 + "x"):
        with pytest.raises(InvalidArgument, match=rf"column 'since' \(begin_ms\): '{text[:10]}.* is neither"):
            times_of(pa.array(["0", text]), "'since' (begin_ms)", end=False)


def plan_columns(topics, keys):
    bound = pa.array([1500] * len(keys), pa.int64())
    none = pa.array([None] * len(keys), pa.int64())
    return lookups_of(pa.array(topics), pa.array(keys), bound, none, {"ü": 0, "t": 1}, keyed=True)


@pytest.mark.parametrize("seed", range(40))
def test_questions_once_and_where_they_stand(seed):
    """Some questions have equal hashes and fingerprints, and differ in topic or range; some are equal."""
    none, rng = np.zeros(0, LOOKUP), np.random.default_rng(seed)
    assert len(distinct(none)) == len(places_of(none, none)) == 0
    questions = np.zeros(int(rng.integers(1, 80)), LOOKUP)
    with pytest.raises(InvalidArgument, match="the keys change"):
        places_of(none, questions)
    for name in LOOKUP.names:
        questions[name] = rng.integers(0, int(rng.choice([1, 2, 3, 2**31 - 1])), len(questions))
    questions["java_hash"] *= int(rng.choice([1, -1]))
    once = distinct(questions)
    assert len(once) == len(set(questions.tolist())) and set(once.tolist()) == set(questions.tolist())
    assert once.tolist() == distinct(rng.permutation(questions)).tolist()
    assert (np.diff(once["java_hash"].astype(np.uint32).astype(np.int64)) >= 0).all()
    places = places_of(once, questions)
    assert places.dtype == np.int64 and once[places].tolist() == questions.tolist()
    raw = f"V{LOOKUP.itemsize}"
    for name in LOOKUP.names:
        # a question that no row asked, before, among or after the others
        other = questions[:1].copy()
        other[name] += 1
        if other.tolist()[0] not in set(questions.tolist()):
            with pytest.raises(InvalidArgument, match="the keys change"):
                places_of(once, np.concatenate((questions.view(raw), other.view(raw))).view(LOOKUP))


def test_messages_are_fetched_and_returned_in_bounded_parts(monkeypatch):
    monkeypatch.setattr(answers, "_MESSAGE_BYTES", 10_000)
    packed, flag = compress(b"x" * 20_000, "zlib")
    # one can't be decompressed
    bodies = [(packed, flag) if n % 10 == 3 else (b"y" * 900, 0) for n in range(50)]
    bodies[7] = packed[:-5], flag
    asked = []

    class Source:
        def fetch(self, items, topic, key):
            asked.append(len(items))
            given = [(item, *bodies[item.offset]) for item in items]
            return [Fetched(item=i, state="archived", message=message(body=b, sys_flag=f)) for i, b, f in given]

    texts = [pa.array([text] * 50) for text in ("TopicA", "k")]
    entries = [pa.array([1_000 if name == "size" else n for n in range(50)]) for name in answers._ENTRY.names]
    found = list(answers.message_arrays([(*texts, *entries)], Source(), allow_partial=False))
    rows = [row for part in found for row in part.to_pylist()]
    assert max(asked) == 10 and len(found) > 5
    lengths = [20_000 if n % 10 == 3 else 900 for n in range(50)]
    assert [len(row["message_body"] or b"") for row in rows] == [*lengths[:7], 0, *lengths[8:]]
    assert [n for n, row in enumerate(rows) if row["message_problem"]] == [7]
    assert "zlib body" in rows[7]["message_problem"] and rows[7]["message_state"] == "archived"


def test_the_lookups_of_a_lot_are_a_batch_for_each_task(life):
    lookups = lookups_in(life)
    plan = plan_of(life.state, lookups)
    texts = [pa.array([getattr(q, name) for q in lookups], pa.string()) for name in ("topic", "key")]
    rows = pa.record_batch([*texts, *[pa.nulls(len(lookups), pa.int64())] * 2], ["t", "k", "b", "e"])
    packed = list(packing.pack_lookups(packing.pack_keys([rows], keyed=True, column="'key'"), plan))
    assert len(packed) == len(plan.tasks) > 2 and {len(batch) for batch in packed} == {1}
