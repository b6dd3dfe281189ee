"""Where a merge is cut into tasks: runs of base slots, and groups of neighbouring windows, so that a task holds a bounded amount. Pure.

A task holds two parts of an upload for each window that it writes, and 8 bytes an entry. A source that lies in several groups of windows
is read by a task of each; more runs of slots mean more shards, each smaller. Sizes are estimates, the numbers of windows are not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

__all__ = ["FULL_WINDOWS", "cut_windows"]

FULL_WINDOWS = 8
"""Windows of one task whose uploads have parts of full size; of more windows the parts are smaller."""
_MOST_WINDOWS = 48
# of a task: with the smallest parts (5 MiB) they hold 480 MiB, however wrong the estimates are
_HELD_BYTES = FULL_WINDOWS * (32 << 20)
# what the uploads of a task may hold; where all that there is is less, windows need not be counted
_MOST_READ = 1.5
# times that a byte of the sources is read, on average, before there are more runs of slots
_LEAST_BYTES = 4 << 20
# of a shard, on average, that is made to read less

Span = tuple[int, int, int]
"""First and last window of a source, and its bytes."""


def cut_windows(sizes: Mapping[int, int], spans: Sequence[Span], shard_bytes: int, most_runs: int) -> tuple[int, list[list[int]]]:
    """Return the number of runs of slots, at most `most_runs`, and the groups of windows; each run and group is a task.

    `sizes` are bytes by number of window.
    """
    runs = min(most_runs, -(-max(sizes.values()) // shard_bytes))
    groups = _groups(sizes, runs, shard_bytes)
    least = len(sizes) * _LEAST_BYTES
    while _read(groups, spans) > _MOST_READ and 2 * runs <= most_runs and sum(sizes.values()) >= 2 * runs * least:
        runs *= 2
        groups = _groups(sizes, runs, shard_bytes)
    return runs, groups


def _groups(sizes: Mapping[int, int], runs: int, shard_bytes: int) -> list[list[int]]:
    if sum(sizes.values()) <= runs * _HELD_BYTES:
        return [sorted(sizes)]
    groups: list[list[int]] = []
    held = 0
    for number, size in sorted(sizes.items()):
        held += size // runs
        most = shard_bytes if groups and len(groups[-1]) < FULL_WINDOWS else min(shard_bytes, _HELD_BYTES)
        if not groups or held > most or len(groups[-1]) == _MOST_WINDOWS:
            groups.append([])
            held = size // runs
        groups[-1].append(number)
    return groups


def _read(groups: Sequence[Sequence[int]], spans: Sequence[Span]) -> float:
    """Return how often a byte of the sources is read, on average."""
    begins = [group[0] for group in groups]
    read = sum(size * (bisect_right(begins, last) - max(0, bisect_right(begins, first) - 1)) for first, last, size in spans)
    return read / max(1, sum(size for _, _, size in spans))
