"""Few ranges instead of many: runs that lie close together are fetched by one request.

A request costs as much time as some hundred KiB, so a gap below `gap_bytes` is read and thrown away rather than paid for by a request.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from tiered_index.format.trailer import Run

__all__ = ["Span", "spans_of"]


@dataclass
class Span:
    """One range to fetch, and the runs that lie in it, in order of offset."""

    start: int
    length: int
    runs: list[Run] = field(default_factory=list)

    def pieces(self, data: bytes | memoryview) -> Iterator[tuple[Run, memoryview]]:
        """Yield each run with its bytes out of the span's `data`."""
        view = memoryview(data)
        for run in self.runs:
            at = run.offset - self.start
            yield run, view[at : at + run.length]


def spans_of(runs: Iterable[Run], gap_bytes: int, max_bytes: int) -> list[Span]:
    """Return spans that cover `runs` (each once, not overlapping), in order of offset.

    Runs at most `gap_bytes` apart share a span unless it would pass `max_bytes`; only a run longer than that makes a longer one.
    """
    spans: list[Span] = []
    for run in sorted(runs, key=attrgetter("offset")):
        end = run.offset + run.length
        if spans:
            last = spans[-1]
            if run.offset - (last.start + last.length) <= gap_bytes and end - last.start <= max_bytes:
                last.length = end - last.start
                last.runs.append(run)
                continue
        spans.append(Span(run.offset, run.length, [run]))
    return spans
