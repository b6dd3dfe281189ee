"""Runs as columns of a directory are the runs that they were made of, and are read in the same windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_index.format.trailer import Run, RunTable
from tiered_index.service.files.search import scan_runs


def table_of(runs: list[Run]) -> RunTable:
    """Return the runs by columns."""
    fields = [[getattr(run, name) for run in runs] for name in ("offset", "length", "crc32", "count")]
    return RunTable(np.array(fields, np.int64))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=12),
    window_bytes=st.integers(1, 30),
    gap_bytes=st.integers(0, 2),
)
def test_windows_are_those_of_single_runs(lengths: list[tuple[int, int]], window_bytes: int, gap_bytes: int) -> None:
    runs, end = [], 28
    for number, (gap, length) in enumerate(lengths):
        runs.append(Run(end + gap, length, 2**32 - 1 - number, number))
        end += gap + length
    source: Any = None

    def windows(given: Any) -> list[list[Run]]:
        read = scan_runs(source, given, window_bytes, gap_bytes=gap_bytes, read=lambda _, window: np.array(len(window)))
        return [list(window) for window, _ in read]

    table = table_of(runs)
    assert list(table) == [table[at] for at in range(len(table))] == runs
    assert windows(table) == windows(runs)


def test_a_place_behind_the_last_run_is_no_run() -> None:
    with pytest.raises(IndexError):
        table_of([Run(0, 1, 2, 3)])[1]
