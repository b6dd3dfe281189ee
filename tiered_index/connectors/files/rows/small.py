"""Reads small texts together: one parse of the rows of many files, each of which has few.

A parse of one row costs about as much as one of a thousand. Memory: some blocks. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import crc32
from tiered_index.connectors.files.rows.batch import BYTE_ORDER_MARK, RowBatch
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.files.rows.places import HeldFile
from tiered_index.connectors.files.rows.text import (
    BLOCK_BYTES,
    SUM_BYTES,
    CsvFile,
    TextBlock,
    TextFile,
    decompressed,
    read_text,
)
from tiered_index.errors import CorruptFile
from tiered_index.format.segments.segment import Times, times_of

T = TypeVar("T")
_MOST_BYTES = SUM_BYTES
"""The most text of a small file: it has one checksum."""


@dataclass(frozen=True)
class SmallText:
    """A text whose rows are read from memory: all of it, with a newline at its end, behind which nothing is held back.

    `header_bytes` are those before its first row.
    """

    file: TextFile
    text: bytes
    header_bytes: int

    @property
    def form(self) -> tuple[object, ...]:
        """What texts that are read together have in common."""
        columns = (*self.file.header, self.file.delimiter, self.file.quote) if isinstance(self.file, CsvFile) else ()
        return self.file.kind, columns, tuple(self.file.partition.items())


@dataclass(frozen=True)
class SmallReading:
    """What the reading of one small text found, as `RowReading` and `LinkedSegment` have it."""

    rows: int
    times: Times | None
    end: int
    blocks: tuple[int, tuple[int, ...]]
    lines: tuple[int, tuple[int, ...]]
    has_keys: tuple[bool, ...]
    """Whether a row has a key, for each path of keys."""


def small_text(rows: object, most_bytes: int) -> SmallText | None:
    """Return a text of at most `most_bytes` whose rows can be read with those of others; None: it is read by itself."""
    most_bytes = min(most_bytes, _MOST_BYTES)
    if not isinstance(rows, TextFile) or not isinstance(rows.file, HeldFile):
        return None
    text = rows.file.data
    if rows.compression is not None:
        try:
            with decompressed(rows.file, rows.compression) as handle:
                text = read_text(rows.file, handle, rows.compression, most_bytes + 1)
        except CorruptFile:
            return None
    if not text or len(text) > most_bytes or text.startswith(BYTE_ORDER_MARK):
        return None
    cut = text.rfind(b"\n") + 1
    if (last := text[cut:]) and not (last.strip() and (rows.compression is not None or rows.is_complete(last))):
        return None
    return SmallText(rows, text, rows.begin)


def gathered(files: Iterable[tuple[T, object, int]]) -> Iterator[tuple[list[T], list[SmallText]]]:
    """Yield neighbouring files whose texts are read together, with these texts; another file alone, without a text.

    `files` has the rows of each file, or why it has none, and the most bytes of a text that is read with others.
    """
    group, texts, size_bytes = list[T](), list[SmallText](), 0
    for file, rows, most_bytes in files:
        small = small_text(rows, most_bytes)
        if texts and (small is None or small.form != texts[-1].form or size_bytes >= BLOCK_BYTES):
            yield group, texts
            group, texts, size_bytes = [], [], 0
        if small is None:
            yield [file], []
        else:
            group.append(file)
            texts.append(small)
            size_bytes += len(small.text)
    if texts:
        yield group, texts


def read_together(
    texts: Sequence[SmallText], starts: npt.NDArray[np.int64], mapping: RowMapping
) -> tuple[RowBatch, list[SmallReading]] | None:
    """Return the rows of texts of one form at their offsets, and what was found in each text.

    `starts` (i64, m) are the offsets of the first bytes of the texts. None: some row must be read by itself.
    """
    pieces = [small.text[small.header_bytes :] for small in texts]
    lines = b"".join(piece if piece.endswith(b"\n") or not piece else piece + b"\n" for piece in pieces)
    sizes = np.array([len(piece) + (not piece.endswith(b"\n") and piece != b"") for piece in pieces], np.int64)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    newlines = np.flatnonzero(np.frombuffer(lines, np.uint8) == 10)
    block = TextBlock(0, lines, newlines, 0)
    row_starts, row_sizes = block.places()
    batch = texts[0].file.batch(block, row_starts, row_sizes, mapping)
    if batch is None:
        return None
    headers = np.array([small.header_bytes for small in texts], np.int64)
    owners = np.searchsorted(ends, batch.positions, "right")
    offsets = batch.positions + (starts + headers - begins)[owners]
    rows = np.diff(np.searchsorted(row_starts, np.append(begins, len(lines)))).tolist()
    first, last = np.searchsorted(batch.positions, begins), np.searchsorted(batch.positions, ends)
    # of a row with a key by two paths it is not known which one has it
    valid = [np.cumsum(column.is_valid().to_numpy(zero_copy_only=False)) for column in batch.keys]
    counts = [np.concatenate([np.zeros(1, np.int64), each]) for each in valid]
    have_keys = np.array([each[last] > each[first] for each in counts]).T | batch.has_repeated_keys
    readable = [
        SmallReading(
            count,
            times_of(batch.times_ms[low:high]),
            len(small.text),
            (SUM_BYTES, (crc32(small.text),)),
            (0, (small.text.count(b"\n"),)),
            tuple(has_keys),
        )
        for small, count, low, high, has_keys in zip(
            texts, rows, first.tolist(), last.tolist(), have_keys.tolist(), strict=True
        )
    ]
    return replace(batch, positions=offsets), readable
