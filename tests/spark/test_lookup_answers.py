"""Bulk lookups answer as a reader does, whatever the files. They run in this process, task by task.

The tests count requests, and script faults.
"""

from __future__ import annotations

import functools
import random
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pytest

from tests.rocketmq.messages import message
from tests.spark.looked_up import answers_in, looked_up
from tests.support.cold_index import Recorder
from tests.support.merging import BASE_MS, DAY_MS, HOUR_MS, Merging, RegionItem
from tests.support.storage_faults import FaultStorage
from tests.support.stored_messages import compress
from tiered_index import Lookup, hash_key
from tiered_index.errors import InvalidArgument, StorageMisconfigured, StorageUnavailable
from tiered_index.format.hashing import key_hash
from tiered_index.service.jobs import merge_plan as plan_module
from tiered_index.service.jobs import rewrite as task_module
from tiered_index.service.read.messages import Fetched
from tiered_index.spark.lookup import answers, messages
from tiered_index.spark.lookup.answers import times_of
from tiered_index.spark.lookup.keys import LOOKUP

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
    monkeypatch.setattr(plan_module, "_rewrite", lambda *given, job=plan_module._rewrite: job(*given[:-1], 1 << 14))


@pytest.fixture(params=["native"])
def life(request, first, tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    made = first(request.param).copied(tmp_path / "life")
    yield made
    made.close()


of_each_kind = pytest.mark.parametrize("life", KINDS, indirect=True)


def lookups_in(made, *, max_count=64):
    names = [*sorted(made.questions), ("t", "nobody"), ("nowhere", "k1"), ("t", "xAa"), ("other", "xBB")]
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
        for lookup, result, told in zip(lookups, answered, found, strict=True):
            assert told == (result.status, entries_of(result), None), lookup
        for lookup, result in list(zip(lookups, answered, strict=True))[::9]:
            one = reader.query(lookup.topic, lookup.key, lookup.begin_ms, lookup.end_ms, lookup.max_count)
            assert entries_of(one) == entries_of(result)


def answers_of(made, storage=None, **options):
    return answers_in(storage or made.storage, made.state.genesis.layout.schema, **options)


@of_each_kind
@pytest.mark.parametrize("max_count", [3, 10_000])
def test_answers_equal_a_readers(life, max_count, monkeypatch):
    """Also in calls of few lookups, whose number follows that of their entries."""
    monkeypatch.setattr(answers, "_ENTRIES", 100)
    monkeypatch.setattr(answers, "_FEWEST", 3)
    monkeypatch.setattr(answers, "_MOST", 50)
    lookups = lookups_in(life, max_count=max_count)
    assert len(lookups) > 100
    check(life, looked_up(answers_of(life, max_count=max_count), lookups), lookups)


def test_rows_without_topic_or_key_have_no_answer(life):
    lookups = [Lookup(topic=t, key=k) for t, k in (("t", "k1"), (None, "k1"), ("t", None), ("t", "k2"), (None, None))]
    found = looked_up(answers_of(life, skip_null=True), lookups)
    assert [status for status, _, _ in found] == ["complete", "skipped", "skipped", "complete", "skipped"]
    check(life, [found[0], found[3]], [lookups[0], lookups[3]])
    for number, named in ((1, "topic"), (2, "key")):
        with pytest.raises(InvalidArgument, match=f"column '{named}' has nulls"):
            looked_up(answers_of(life), lookups[number : number + 1])


@pytest.mark.parametrize("preset", ["native", "rocketmq"])
def test_a_key_is_found_in_every_spelling(tmp_path, preset):
    """Keys of bytes: as their digits, as the text of earlier versions, and text that looks like digits."""
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
    check(made, looked_up(answers_of(made), lookups), lookups)
    with made.reader() as reader:
        counts = {lookup.key: len(reader.query("t", lookup.key)) for lookup in lookups}
    # the text of a number is found by its digits, with those that have digits; upper and lower case are the same bytes
    assert counts[number] == counts["0x000000000000002a"] == 7 and counts["0xFF"] > counts["0xff"] > 0
    assert counts["0x7F78"] == counts["\x7fx"] > 0 == counts["none"]
    made.close()


def test_rows_in_the_order_of_slots_read_no_byte_twice(life, monkeypatch):
    """Each call reads its own slot groups. A file's directory is read once by a task."""
    monkeypatch.setattr(answers, "_FEWEST", 10)
    monkeypatch.setattr(answers, "_MOST", 10)
    slots = life.state.genesis.layout.slots
    lookups = sorted(
        {Lookup(topic=t, key=k) for t, k in life.questions}, key=lambda one: hash_key(one.topic, one.key) % slots
    )
    recorder = Recorder(life.storage)
    task = answers_of(life, recorder)
    check(life, looked_up(task, lookups), lookups)
    objects = life.state.objects
    directories = [read.name for read in recorder.reads if read.start == objects[read.name].directory_position]
    assert sorted(directories) == sorted(objects)
    assert sum(isinstance(name, tuple) for name in task.spent.value) > 3
    assert task.spent.value["requests"] == len(recorder.operations)


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
        looked_up(answers_of(life, storage), lookups)
    found = looked_up(answers_of(life, storage, allow_partial=True), lookups)
    with life.reader() as reader:
        whole = reader.query_many(lookups)
        for lookup, result, (status, entries, why) in zip(lookups, whole, found, strict=True):
            low, high = (lookup.begin_ms or 0) // 1000, (lookup.end_ms or 2**60) // 1000
            if low <= stored.second_max and high >= stored.second_min:
                assert (status, why) == ("partial", [{"file": stored.file_id, "error": str(error)}])
            else:
                assert (status, entries, why) == (result.status, entries_of(result), None)


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


def test_messages_are_fetched_and_returned_in_bounded_parts(monkeypatch):
    monkeypatch.setattr(messages, "_MESSAGE_BYTES", 10_000)
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

    lookup = pa.StructArray.from_arrays([pa.array([text] * 50) for text in ("TopicA", "k")], ["topic", "key"])
    entries = {name: pa.array([1_000 if name == "size" else n for n in range(50)]) for name in messages._ENTRY}
    rows = pa.record_batch({LOOKUP: lookup, "id": pa.array(range(50)), **entries})
    found = list(messages.message_batches([rows], Source(), allow_partial=False))
    rows = [row for part in found for row in part.to_pylist()]
    assert [row["id"] for row in rows] == list(range(50))
    assert max(asked) == 10 and len(found) > 5
    lengths = [20_000 if n % 10 == 3 else 900 for n in range(50)]
    assert [len(row["message_body"] or b"") for row in rows] == [*lengths[:7], 0, *lengths[8:]]
    assert [n for n, row in enumerate(rows) if row["message_problem"]] == [7]
    assert "zlib body" in rows[7]["message_problem"] and rows[7]["message_state"] == "archived"
