"""RocketMQ's own files, read back: every entry that its code wrote, and those that its compaction kept.

The package only reads and verifies such files. Lookups in them have the answers that RocketMQ's own code gave, but for
its known faults, which are counted. The index answers golden queries in `test_faults_of_rocketmq` and
`test_exported_files`.
"""

import struct
from collections import Counter, defaultdict

import pytest

from tests.golden import naive
from tests.golden.codec import layout_of
from tests.support.compacted_files import reader
from tests.support.foreign_lookups import find_compacted, find_unsealed, stored_ms
from tiered_index.errors import CorruptFile
from tiered_index.format.foreign import HEAD_SIZE, FileKind, ForeignCompacted, ForeignUnsealed, recognise
from tiered_index.format.layout import ROCKETMQ, Layout
from tiered_index.format.trailer import TAIL_SIZE

MIN_VALUE = -(2**31)
CAPS = {"unsealed": 512, "compacted": 1024}

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
    ("minvalue_slots5", "unsealed"): {"MIN_VALUE lost": 2},
    ("minvalue_slots5000", "compacted"): {"error": 2},
    ("one", "unsealed"): {"one too many": 1},
    ("one_slot", "unsealed"): {"one too many": 6},
    ("partial", "unsealed"): {"one too many": 7},
    ("tiny_collide", "unsealed"): {"one too many": 13},
}


def why_different(java, whole, max_count, cap):
    """Return None if Java's answer is the first `max_count` of the whole one, else the reason for the difference."""
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
    return "cap hides older" if normal == whole[: len(normal)] else "unexplained"


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


def test_an_unsealed_file_has_every_row_that_java_wrote(case):
    image = ForeignUnsealed(case.unsealed, layout_of(case), case.name)
    assert image.count == case.meta["itemCount"]
    rows = [naive.Found(*row) for items in image.items() for row in items.tolist()]
    assert rows == [naive.item_of(row, case.begin_ms) for row in case.written_rows]
    if rows:
        seconds = [row.time_diff_s for row in rows]
        assert image.interval_ms == (case.begin_ms + 1000 * min(seconds), case.begin_ms + 1000 * max(seconds))
    else:
        assert image.interval_ms is None


def test_a_compacted_file_has_every_row_that_java_kept(case):
    if case.name == "empty":
        with pytest.raises(CorruptFile, match="the file is empty"):
            ForeignCompacted.open(reader(b""), 0, case.name)
        return
    read = reader(case.compacted)
    file = ForeignCompacted.open(read, len(case.compacted), case.name)
    assert (file.layout.slots, file.header.slots_in_use) == (case.meta["slots"], case.meta["slotCount"])
    items = physical(case.compacted, file.layout.slots)
    assert file.count == len(items)
    assert [tuple(row) for part in file.items(read) for row in part.tolist()] == items
    assert sorted(items) == sorted(naive.item_of(row, case.begin_ms) for row in compacted_rows(case))


def compacted_rows(case):
    """Return the rows that Java's compaction kept: it loses the hash of Integer.MIN_VALUE, except in slot 0."""
    return [row for row in case.written_rows if case.meta["slots"] == 16 or naive.java_hash(row.topic, row.key)]


@pytest.mark.parametrize("state", ["unsealed", "compacted"])
def test_lookups_have_the_answers_of_java_but_for_its_known_faults(case, state):
    if case.name == "empty" and state == "compacted":
        return
    reasons = Counter()
    image, read = ForeignUnsealed(case.unsealed, layout_of(case), case.name), reader(case.compacted)
    rows = defaultdict(list)
    for row in case.written_rows if state == "unsealed" else compacted_rows(case):
        rows[naive.java_hash(row.topic, row.key)].append(row)
    for query in case.queries:
        wanted = naive.java_hash(query["topic"], query["key"]), query["begin"], query["end"]
        if state == "unsealed":
            items = find_unsealed(image, *wanted)
        else:
            items = find_compacted(ForeignCompacted.open(read, len(case.compacted), case.name), read, *wanted)
        whole = [naive.Found(*item) for item in items.tolist()]
        assert whole == naive.truth(rows[wanted[0]], case.begin_ms, query)
        reasons[why_different(query[state], whole, query["maxCount"], CAPS[state])] += 1
        times = dict(zip(whole, stored_ms(items, image.header.begin_ms).tolist(), strict=True))
        for key_hash, *row in [] if isinstance(query[state], dict) else query[state]:
            assert times[naive.Found(0 if key_hash == MIN_VALUE else key_hash, *row[:5])] == row[6]
    del reasons[None]
    assert dict(reasons) == DIFFERENCES.get((case.name, state), {})


def test_recognised(case):
    for data, state in ((case.unsealed, "unsealed"), (case.compacted, "compacted")):
        if data:
            kind = recognise(data[:HEAD_SIZE], data[-TAIL_SIZE:], len(data), case.name)
            assert kind == FileKind(state, ROCKETMQ, False)


@pytest.mark.parametrize("begin_ms", [1_700_000_000_000 + 100_000 * number for number in range(4)])
def test_the_interval_comes_from_entries_because_java_recovery_destroys_the_header(begin_ms):
    """Files that one RocketMQ service wrote. Their slots come from the files, not from a configuration."""
    (meta,) = naive.lines("tiered_service/meta.json")
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, meta["slots"], meta["items"])
    before, after = (
        ForeignUnsealed(naive.raw(f"tiered_service/files/{begin_ms}.{state}.bin"), layout, state)
        for state in ("unsealed", "after_recover")
    )
    assert (before.header.end_ms, after.header.end_ms) == (begin_ms + 99_500, begin_ms)
    assert before.interval_ms == after.interval_ms == (begin_ms, begin_ms + 99_000)
    data = naive.raw(f"tiered_service/files/{begin_ms}.compacted.bin")
    file = ForeignCompacted.open(reader(data), len(data), "compacted")
    in_use = int.from_bytes(data[20:24], "big")
    assert (file.header.end_ms, file.layout.slots, file.header.slots_in_use) == (begin_ms, 32, in_use)
    times = [time for items in file.items(reader(data)) for time in stored_ms(items, begin_ms).tolist()]
    assert (min(times), max(times)) == before.interval_ms
