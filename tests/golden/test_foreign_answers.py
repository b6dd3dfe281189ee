"""RocketMQ's own files, read back: every golden query gets the right answer, and the test counts each that Java answers
otherwise.

For an unsealed file, the right answers come from the rows that Java wrote (`written_rows`). For a compacted one, they
come from its items, which this module reads by hand.
"""

from __future__ import annotations

import struct
from collections import Counter

import pytest

from tests.golden import codec, naive
from tests.golden.codec import layout_of
from tests.support.compacted_files import rebuilt
from tests.support.foreign_lookups import find_compacted, find_unsealed, stored_ms
from tiered_index.errors import CorruptFile
from tiered_index.format.foreign import HEAD_SIZE, FileKind, ForeignCompacted, ForeignUnsealed, recognise
from tiered_index.format.layout import ROCKETMQ
from tiered_index.format.trailer import TAIL_SIZE

CAP_UNSEALED, CAP_COMPACTED = 512, 1024
MIN_VALUE = -(2**31)

DIFFERENCES = {
    # (case, state): the number of queries that Java answers otherwise, by reason; all other answers are equal
    ("cap_collision_hides", "unsealed"): {"cap hides older": 9},
    ("cap_collision_hides", "compacted"): {"cap hides older": 4},
    ("cap_same_key_1500", "unsealed"): {"one too many": 3, "cap": 6, "cap hides older": 3},
    ("cap_same_key_1500", "compacted"): {"cap": 2, "cap hides older": 2},
    ("exact_full", "unsealed"): {"one too many": 20},
    ("m101_1000", "unsealed"): {"one too many": 16},
    ("m5000_20000", "unsealed"): {"one too many": 35},
    ("minvalue_slots101", "compacted"): {"error": 2},
    ("minvalue_slots16", "unsealed"): {"negative hash": 2},
    ("minvalue_slots16", "compacted"): {"negative hash": 2},
    ("minvalue_slots31", "unsealed"): {"MIN_VALUE lost": 2},
    ("minvalue_slots31", "compacted"): {"MIN_VALUE lost": 2},
    ("minvalue_slots5", "unsealed"): {"MIN_VALUE lost": 2},
    ("minvalue_slots5", "compacted"): {"MIN_VALUE lost": 2},
    ("minvalue_slots5000", "compacted"): {"error": 2},
    ("one", "unsealed"): {"one too many": 1},
    ("one_slot", "unsealed"): {"one too many": 6},
    ("partial", "unsealed"): {"one too many": 7},
    ("tiny_collide", "unsealed"): {"one too many": 13},
}


def reader(data):
    """Reads ranges of bytes, and counts the calls."""
    calls = []

    def read(position, length):
        calls.append([position, length])
        return data[position : position + length]

    return read, calls


def as_found(items):
    return [naive.Found(*row) for row in items.tolist()]


def physical(data, slots):
    """Return every item of a compacted file, slot by slot, read by the specification alone, with normalised hashes."""
    items = []
    for slot in range(slots):
        position, length = struct.unpack_from(">ii", data, 28 + 8 * slot)
        assert length % 28 == 0
        for at in range(position, position + length, 28):
            key_hash, *rest = struct.unpack_from(">iiiqii", data, at)
            items.append((0 if key_hash == MIN_VALUE else key_hash, *rest))
    return items


def why_different(java, whole, max_count, cap):
    """Return None if Java's answer is the first `max_count` of the right one, else the reason for the difference."""
    if isinstance(java, dict):
        return "error"
    rows = [naive.Found(*row[:6]) for row in java]
    normal = [row._replace(key_hash=0) if row.key_hash == MIN_VALUE else row for row in rows]
    if normal == whole[:max_count]:
        return None if normal == rows else "negative hash"
    if normal == whole[: max_count + 1]:
        return "one too many"
    if len(whole) >= cap and normal == whole[:cap]:
        return "cap"
    if not set(normal) - set(whole) and whole[0].key_hash == 0:
        return "MIN_VALUE lost"
    if normal == whole[: len(normal)]:
        return "cap hides older"
    return "unexplained"


def test_unsealed(case):
    image = ForeignUnsealed(memoryview(case.unsealed), layout_of(case), case.name)
    assert image.count == case.meta["itemCount"] == len(case.written_rows)
    reasons = Counter()
    for query in case.queries:
        whole = naive.truth(case.written_rows, case.begin_ms, query)
        items = find_unsealed(image, naive.java_hash(query["topic"], query["key"]), query["begin"], query["end"])
        assert as_found(items) == whole
        if not isinstance(query["unsealed"], dict) and (java := query["unsealed"]):
            times = dict(zip(as_found(items), stored_ms(items, image.header.begin_ms).tolist(), strict=True))
            for row in java:
                key_hash = 0 if row[0] == MIN_VALUE else row[0]
                assert times[naive.Found(key_hash, *row[1:6])] == row[7]
        reasons[why_different(query["unsealed"], whole, query["maxCount"], CAP_UNSEALED)] += 1
    del reasons[None]
    assert dict(reasons) == DIFFERENCES.get((case.name, "unsealed"), {})


def test_unsealed_dump_is_everything(case):
    image = ForeignUnsealed(case.unsealed, layout_of(case), case.name)
    dumped = [row for items in image.items() for row in as_found(items)]
    assert dumped == [naive.item_of(row, case.begin_ms) for row in case.written_rows]
    if dumped:
        seconds = [row.time_diff_s for row in dumped]
        assert image.interval_ms == (case.begin_ms + 1000 * min(seconds), case.begin_ms + 1000 * max(seconds))
    else:
        assert image.interval_ms is None


def test_unsealed_chains_are_rebuilt(case):
    """The rebuilt table and entries equal those that our writer makes of the same rows."""
    image = ForeignUnsealed(case.unsealed, layout_of(case), case.name)
    table, entries = rebuilt(image)
    expected_table, expected = codec.write(case.written_rows, layout_of(case), case.begin_ms, 10**9)
    assert entries.tobytes() == expected.tobytes()
    assert (table.heads == expected_table.heads).all()
    assert all(getattr(table, name) == getattr(expected_table, name) for name in ("count", "slots_in_use", "end_ms"))


def test_compacted(case):
    read, calls = reader(case.compacted)
    if case.name == "empty":
        with pytest.raises(CorruptFile, match="the file is empty"):
            ForeignCompacted.open(read, 0, case.name)
        return
    file = ForeignCompacted.open(read, len(case.compacted), case.name)
    assert file.layout.slots == case.meta["slots"]
    assert file.header.slots_in_use == case.meta["slotCount"]
    items = physical(case.compacted, file.layout.slots)
    assert file.count == len(items)
    special = [row for row in case.written_rows if naive.java_hash(row.topic, row.key) == 0]
    stored_rows = (
        case.written_rows if case.meta["slots"] == 16 else [row for row in case.written_rows if row not in special]
    )
    assert sorted(items) == sorted(naive.item_of(row, case.begin_ms) for row in stored_rows)
    reasons = Counter()
    for query in case.queries:
        wanted = naive.java_hash(query["topic"], query["key"])
        whole = naive.truth(stored_rows, case.begin_ms, query)
        calls.clear()
        assert as_found(find_compacted(file, read, wanted, query["begin"], query["end"])) == whole
        assert 1 <= len(calls) <= 2
        reason = why_different(query["compacted"], whole, query["maxCount"], CAP_COMPACTED)
        if reason is None and wanted == 0 and stored_rows != case.written_rows:
            reason = "MIN_VALUE lost"  # both answers have the file's entries, which lack some written ones
        if reason is None:
            capped = [[position, min(length, CAP_COMPACTED * 28)] for position, length in calls]
            assert capped == query["compactedReads"]
        elif reason.startswith("cap"):
            assert calls[1][1] > CAP_COMPACTED * 28  # only a further read finds the entries that Java's cap hides
        reasons[reason] += 1
    del reasons[None]
    assert dict(reasons) == DIFFERENCES.get((case.name, "compacted"), {})


def test_compacted_dump_is_everything(case):
    if case.name == "empty":
        return
    read, _ = reader(case.compacted)
    file = ForeignCompacted.open(read, len(case.compacted), case.name)
    dumped = [tuple(row) for items in file.items(read) for row in as_found(items)]
    assert dumped == physical(case.compacted, case.meta["slots"])


def test_recognised(case):
    for data, state in ((case.unsealed, "unsealed"), (case.compacted, "compacted")):
        if not data:
            with pytest.raises(CorruptFile, match="the file is empty"):
                recognise(b"", b"", 0, case.name)
            continue
        assert recognise(data[:HEAD_SIZE], data[-TAIL_SIZE:], len(data), case.name) == FileKind(state, ROCKETMQ, False)


def test_expected_differences_name_existing_cases_and_known_reasons():
    for (name, state), reasons in DIFFERENCES.items():
        assert naive.load(name).queries
        assert state in ("unsealed", "compacted")
        assert "unexplained" not in reasons
        assert all(reasons.values())
