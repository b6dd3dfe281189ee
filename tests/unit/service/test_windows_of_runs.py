"""Runs are read in windows: all of them, in order, and none is longer than asked with the gaps that are read."""

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered_index.format.trailer import Run
from tiered_index.service.files.search import scan_runs


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=12),
    window_bytes=st.integers(1, 30),
    gap_bytes=st.integers(0, 2),
)
def test_windows_fit(lengths: list[tuple[int, int]], window_bytes: int, gap_bytes: int) -> None:
    runs, end = [], 28
    for number, (gap, length) in enumerate(lengths):
        runs.append(Run(end + gap, length, 2**32 - 1 - number, number))
        end += gap + length
    source: Any = None
    read = scan_runs(source, runs, window_bytes, gap_bytes=gap_bytes, read=lambda _, window: np.array(len(window)))
    windows = [list(window) for window, _ in read]
    assert [run for window in windows for run in window] == runs
    for number, window in enumerate(windows):
        following = windows[number + 1][:1] if number + 1 < len(windows) else []
        gaps = [after.offset - run.offset - run.length for run, after in itertools.pairwise([*window, *following])]
        read_gaps = [gap if gap <= gap_bytes else 0 for gap in gaps]
        size = sum(run.length for run in window) + sum(read_gaps[: len(window) - 1])
        assert len(window) == 1 or size <= window_bytes
        if following:
            assert size + read_gaps[-1] + following[0].length > window_bytes
