"""Spans: the ranges of a file that are fetched, each with the runs in it, and the check of the runs' bytes. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from tiered_index.base.kernels import crc32
from tiered_index.errors import CorruptFile
from tiered_index.format.trailer import Run

MAX_SPAN_BYTES = 8 << 20
"""The longest range of one read. Longer ranges are cut and read in parallel."""


@dataclass
class Span:
    """One range to fetch, and the runs in it, in order of offset."""

    start: int
    length: int
    runs: list[Run] = field(default_factory=list)

    @property
    def gap_bytes(self) -> int:
        """The number of bytes that no run has."""
        return self.length - sum([run.length for run in self.runs])

    def pieces(self, data: bytes | memoryview) -> Iterator[tuple[Run, memoryview]]:
        """Yield each run with its bytes in the span's `data`."""
        view = memoryview(data)
        for run in self.runs:
            at = run.offset - self.start
            yield run, view[at : at + run.length]


def spans_of(runs: Iterable[Run], gap_bytes: int, max_bytes: int) -> list[Span]:
    """Return spans that cover `runs` (each once, not overlapping), in order of offset.

    Runs at most `gap_bytes` apart share a span, because a request takes as long as reading some hundred KiB. A span has
    at most `max_bytes`, unless a run is longer.
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


def cut_spans(spans: Sequence[Span], cuts: int) -> list[Span]:
    """Return spans of the same runs, cut at the `cuts` largest gaps in them."""
    gaps = [
        (after.offset - before.offset - before.length, number, place)
        for number, span in enumerate(spans)
        for place, (before, after) in enumerate(itertools.pairwise(span.runs), 1)
    ]
    places: dict[int, list[int]] = {number: [0] for number in range(len(spans))}
    for _, number, place in sorted(heapq.nlargest(cuts, gaps), key=itemgetter(2)):
        places[number].append(place)
    parts = [
        spans[number].runs[start:stop]
        for number, starts in places.items()
        for start, stop in itertools.pairwise([*starts, len(spans[number].runs)])
    ]
    return [Span(runs[0].offset, runs[-1].offset + runs[-1].length - runs[0].offset, runs) for runs in parts]


def whole_runs(
    pieces: Iterable[tuple[Run, memoryview]], file: str, damaged: dict[int, CorruptFile] | None
) -> Iterator[tuple[Run, memoryview]]:
    """Yield the runs that match their CRC32, with their bytes. `damaged`: see `ColdPath.verified`."""
    for run, piece in pieces:
        try:
            check_run(piece, run, file)
        except CorruptFile as error:
            if damaged is None:
                raise
            damaged[run.offset] = error
        else:
            yield run, piece


def check_run(piece: memoryview, run: Run, file: str) -> None:
    """Raise `CorruptFile` if a run's bytes do not match its CRC32."""
    if (actual := crc32(piece)) != run.crc32:
        raise CorruptFile(file, "items do not match their CRC32", offset=run.offset, expected=run.crc32, found=actual)
