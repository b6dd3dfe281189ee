"""What many slots must be read for together: every match, no run twice, and of a giant slot only the blocks of the
right time.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from tiered_index.format.compacted import Compaction
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout
from tiered_index.format.trailer import parse_trailer

COUNT = 40_000
WANTED = np.array([45, 7, 5, 85, 7])
# 5, 45 and 85 share a slot, 7 has one of ordinary size


@pytest.fixture(scope="module", params=[NATIVE, ROCKETMQ], ids=lambda preset: preset.name)
def giant(request, make):
    """A file with a slot that is far longer than a block; one entry a second."""
    preset = request.param
    layout = Layout(preset, preset.schema, 40, COUNT + 1)
    rng = np.random.default_rng(1)
    hashes = np.concatenate([np.full(20_000, 5), np.full(10_000, 45), rng.integers(0, 10_000, 10_000)]).astype(np.int32)
    rng.shuffle(hashes)
    times = make.begin_ms + 1000 * np.arange(COUNT)
    table, entries = make.entries(layout, hashes, times, make.columns(rng, preset.schema, COUNT))
    compaction = Compaction(entries, layout, make.begin_ms, table.end_ms)
    return layout, b"".join(bytes(piece) for piece in compaction.pieces(**make.about)), entries


def matches(items, low, high):
    return int(
        (np.isin(items["key_hash"], WANTED) & (items["time_diff_s"] >= low) & (items["time_diff_s"] <= high)).sum()
    )


def test_every_match_is_read_once_and_blocks_are_left_out_by_time(giant, make):
    layout, data, entries = giant
    directory = parse_trailer(data, "f", len(data)).directory
    base = make.begin_ms // 1000
    edges = [int(block[name]) - base for block in directory.blocks for name in ("second_min", "second_max")]
    ranges = [(edge, edge) for edge in edges] + [(0, COUNT), (5_000, 5_100), (COUNT, 2**40), (-10, -1)]
    lengths = []
    for low, high in ranges:
        runs = directory.runs_of(WANTED % layout.slots, base + low, base + high)
        assert [run.offset for run in runs] == sorted({run.offset for run in runs})
        assert all(zlib.crc32(data[run.offset : run.offset + run.length]) == run.crc32 for run in runs)
        items = np.concatenate([np.frombuffer(data, layout.schema.item, run.count, run.offset) for run in runs])
        assert matches(items, low, high) == matches(entries, low, high)
        lengths.append(len(runs))
    assert lengths[-4] == len(directory.blocks) + 1
    assert lengths[-1] == 1  # the ordinary slot has no times to tell
