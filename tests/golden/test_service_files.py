"""Four files that one RocketMQ service wrote: the union over all files whose interval overlaps is always the right
answer.
"""

from __future__ import annotations

import struct
from collections import Counter
from functools import cache

import pytest

from tests.golden import naive
from tests.support.foreign_lookups import find_compacted, find_unsealed, stored_ms
from tiered_index.format.foreign import ForeignCompacted, ForeignUnsealed
from tiered_index.format.layout import ROCKETMQ, Layout

BEGINS = [1_700_000_000_000 + 100_000 * number for number in range(4)]


FILES_READ = {1: 60, 2: 12, 4: 36}  # number of files that a query needs: number of queries


@cache
def image(begin_ms, suffix):
    meta = naive.lines("tiered_service/meta.json")[0]
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, meta["slots"], meta["items"])
    return ForeignUnsealed(naive.raw(f"tiered_service/files/{begin_ms}.{suffix}.bin"), layout, str(begin_ms))


def compacted(begin_ms):
    data = naive.raw(f"tiered_service/files/{begin_ms}.compacted.bin")
    read = lambda position, length: data[position : position + length]  # noqa: E731
    return ForeignCompacted.open(read, len(data), str(begin_ms)), read


def rows_of():
    rows = {}
    for line in naive.lines("tiered_service/input.jsonl"):
        names = ("topic", "key", "topicId", "queueId", "offset", "size", "timestamp")
        row = naive.Row(*(line[name] for name in names))
        rows.setdefault(line["file"], []).append(row)
    return rows


@pytest.mark.parametrize("state", ["unsealed", "after_recover", "compacted"])
def test_every_query_over_all_overlapping_files(state):
    rows = rows_of()
    assert sorted(rows) == BEGINS
    java_missed, files_read = Counter(), Counter()
    for query in naive.lines("tiered_service/queries.jsonl"):
        wanted = naive.java_hash(query["topic"], query["key"])
        answer, read_from = [], 0
        for begin_ms in BEGINS:
            low, high = image(begin_ms, "unsealed").interval_ms
            if high < query["begin"] or low > query["end"]:
                continue
            read_from += 1
            if state == "compacted":
                file, read = compacted(begin_ms)
                items = find_compacted(file, read, wanted, query["begin"], query["end"])
            else:
                items = find_unsealed(image(begin_ms, state), wanted, query["begin"], query["end"])
            answer += [tuple(row) for row in items.tolist()]
        expected = [tuple(f) for begin_ms in BEGINS for f in naive.truth(rows[begin_ms], begin_ms, query)]
        assert answer == expected
        assert sorted(answer) == sorted(tuple(row) for row in query["allFilesResult"])
        assert len(answer) == query["trueCountAllFiles"]
        if query["missed"]:
            java_missed[query["phase"]] += 1
            assert query["javaServiceCount"] < len(answer)
        files_read[read_from] += 1
    # Java selects files by their begin alone; its answers to these queries of each phase lack entries
    assert dict(java_missed) == {"local": 16, "uploaded": 16}
    # selection by overlap reads no more files than needed: narrow ranges one, the widest all four
    assert dict(files_read) == FILES_READ


def test_interval_comes_from_entries_because_java_recovery_destroys_the_header():
    for begin_ms in BEGINS:
        before, after = image(begin_ms, "unsealed"), image(begin_ms, "after_recover")
        assert before.header.end_ms == begin_ms + 99_500
        assert after.header.end_ms == begin_ms
        assert before.interval_ms == after.interval_ms == (begin_ms, begin_ms + 99_000)
        file, read = compacted(begin_ms)
        assert file.header.end_ms == begin_ms
        times = [time for items in file.items(read) for time in stored_ms(items, file.header.begin_ms).tolist()]
        assert (min(times), max(times)) == before.interval_ms


def test_slots_come_from_the_file_not_from_configuration():
    """RocketMQ reads 32-slot files with 64 slots after a change of configuration, and fails. The file itself states the
    number.
    """
    for begin_ms in BEGINS:
        file, _ = compacted(begin_ms)
        assert file.layout.slots == 32
        data = naive.raw(f"tiered_service/files/{begin_ms}.compacted.bin")
        assert (file.header.slots_in_use,) == struct.unpack_from(">i", data, 20)
