"""Our own compacted files of the golden inputs, in both presets, answer the golden queries through their trailer."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from tests.golden import codec, naive
from tests.support.foreign_lookups import stored_ms
from tiered_index.format.foreign import HEAD_SIZE, FileKind, recognise
from tiered_index.format.layout import NATIVE, ROCKETMQ
from tiered_index.format.trailer import TAIL_SIZE, parse_trailer
from tiered_index.format.verify import verify_compacted


@pytest.fixture(params=[ROCKETMQ, NATIVE], ids=["rocketmq", "native"])
def preset(request):
    return request.param


def test_queries_through_the_trailer(case, preset):
    rows = case.wanted_rows
    if not rows:
        assert case.name == "empty"
        return
    data = codec.compacted(rows, preset, case.meta["slots"], case.begin_ms)
    trailer = parse_trailer(data, case.name, len(data))
    item = preset.schema.item
    for query in case.queries:
        wanted = naive.java_hash(query["topic"], query["key"])
        answer = []
        seconds = query["begin"] // 1000, query["end"] // 1000
        runs = trailer.directory.runs_of(np.array([wanted % case.meta["slots"]]), *seconds)
        for run in runs:
            part = data[run.offset : run.offset + run.length]
            assert zlib.crc32(part) == run.crc32
            items = np.frombuffer(part, item)
            assert len(items) == run.count
            times = stored_ms(items, trailer.metadata.begin_ms)
            answer += items[
                (items["key_hash"] == wanted) & (times >= query["begin"]) & (times <= query["end"])
            ].tolist()
        expected = naive.truth(rows, case.begin_ms, query)
        if preset is NATIVE:
            # within a hash: second descending, offset descending, queue ascending, then as inserted
            oldest_first = list(reversed(expected))
            expected = sorted(oldest_first, key=lambda f: (-f.time_diff_s, -f.offset, f.queue_id))
        assert [naive.Found(*row[:6]) for row in answer] == expected
        assert len(runs) <= 1 or any(group["blocks"] for group in trailer.directory.groups)


def test_verified_and_recognised(case, preset):
    if case.name == "empty":
        return
    data = codec.compacted(case.wanted_rows, preset, case.meta["slots"], case.begin_ms)
    assert verify_compacted(lambda position, length: data[position : position + length], len(data), case.name) == []
    assert recognise(data[:HEAD_SIZE], data[-TAIL_SIZE:], len(data), case.name) == FileKind("compacted", preset, True)


def test_native_fingerprints_are_the_keys():
    """m5000_20000 has thousands of distinct keys. Their stored fingerprints distinguish all keys of one hash."""
    from tiered_index.format.hashing import fingerprint, key_hash

    case = naive.load("m5000_20000")
    data = codec.compacted(case.wanted_rows, NATIVE, case.meta["slots"], case.begin_ms)
    trailer = parse_trailer(data, case.name, len(data))
    items = np.frombuffer(data, NATIVE.schema.item, trailer.metadata.count, trailer.metadata.layout.items_position)
    stored = set(zip(items["key_hash"].tolist(), items["fingerprint"].tolist(), strict=True))
    keys = {(row.topic, row.key) for row in case.rows}
    assert stored == {(key_hash(*key), fingerprint(*key)) for key in keys}
    assert len(stored) == len(keys)
