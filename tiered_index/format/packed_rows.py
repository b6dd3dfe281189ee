"""Rows of columns whose values lie bit by bit behind one another, each column of a run as wide as its values need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
# bits of a column that are read or written at once: with 7 before them they are in 8 bytes
_AT_ONCE = 56
_MASK = 2**64 - 1
Place = tuple[int, Sequence[int], Sequence[int], int, int]
"""Where rows are: the bit of row 0, the widths of its columns, what is added to each, the first row, the one behind."""


def bytes_of(bits: int) -> int:
    """Return how many bytes hold so many bits."""
    return -(-bits // 8)


class _Column:
    """A column of the rows of several runs, each of which begins at one of `starts`, the end last."""

    def __init__(self, values: Array, starts: Int64) -> None:
        self._values, self._starts = values, starts.tolist()
        self._least = np.minimum.reduceat(values, starts[:-1])
        bounds = zip(self._least.tolist(), np.maximum.reduceat(values, starts[:-1]).tolist(), strict=True)
        # of each run the bits that its values need, and the smallest one
        self.about = [((most - least).bit_length(), least) for least, most in bounds]

    def above(self, run: int) -> UInt64:
        """Return by how much each of a run's values (u64, n) is above the smallest one."""
        part: Array = self._values[self._starts[run] : self._starts[run + 1]] - self._least[run]
        return part.view(np.uint64)


class PackedRows:
    """Columns of the rows of several runs, each of which begins at one of `starts`, the end last."""

    def __init__(self, columns: Sequence[Array], starts: Int64) -> None:
        self.columns = [_Column(values, starts) for values in columns]
        self._starts = starts.tolist()

    def packed(self, run: int) -> bytes:
        """Return a run's rows, as `BitReader` reads them."""
        start, stop = self._starts[run : run + 2]
        about = [column.about[run] for column in self.columns]
        widths = [width for width, _ in about]
        bits, n = sum(widths), stop - start
        if not bits:
            return b""
        stride = bytes_of(bits) + 8
        rows = np.zeros((n, stride), np.uint8)
        at = 0
        for column, width in zip(self.columns, widths, strict=True):
            if width:
                values = column.above(run)
                # at most so many bits at once
                for low in range(0, width, _AT_ONCE):
                    part = values if width <= _AT_ONCE else values >> np.uint64(low) & np.uint64((1 << _AT_ONCE) - 1)
                    where = np.ndarray((n,), "<u8", rows, at + low >> 3, (stride,))
                    where |= part << np.uint64(at + low & 7)
                at += width
        return np.packbits(np.unpackbits(rows, axis=1, count=bits, bitorder="little"), bitorder="little").tobytes()


class BitReader:
    """Packed data as one long little-endian number, of which rows of columns are read."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = bytes(data) + bytes(8)  # 8 bytes can be read from each byte on
        self._from = np.ndarray((len(data) + 1,), "<u8", self.data, 0, (1,))

    def column(self, at: int, row_bits: int, width: int, rows: int) -> UInt64:
        """Return a column (u64, `rows`) of `width` bits, of which the first row begins at bit `at`."""
        if not width:
            return np.zeros(rows, np.uint64)
        if width > _AT_ONCE:
            high = self.column(at + _AT_ONCE, row_bits, width - _AT_ONCE, rows)
            return self.column(at, row_bits, _AT_ONCE, rows) | high << np.uint64(_AT_ONCE)
        bytes_, shifts = _places(row_bits, at & 7, max(512, 1 << (rows - 1).bit_length()))
        column = self._from[at >> 3 :].take(bytes_[:rows])
        column >>= shifts[:rows]
        column &= np.uint64((1 << width) - 1)
        return column

    def columns(self, at: int, widths: Sequence[int], least: Sequence[int], start: int, stop: int) -> list[UInt64]:
        """Return the columns (u64, n each) of rows [start, stop), `least` added; row 0 begins at bit `at`."""
        row_bits = sum(widths)
        at += start * row_bits
        columns = []
        for width, smallest in zip(widths, least, strict=False):
            column = self.column(at, row_bits, width, stop - start)
            column += np.uint64(smallest & _MASK)
            columns.append(column)
            at += width
        return columns

    def row(self, at: int, widths: Sequence[int], number: int) -> list[int]:
        """Return one row; row 0 begins at bit `at`."""
        row_bits = sum(widths)
        at += number * row_bits
        value = int.from_bytes(self.data[at >> 3 : at + row_bits + 7 >> 3], "little") >> (at & 7)
        values = []
        for width in widths:
            values.append(value & (1 << width) - 1)
            value >>= width
        return values


def unpacked(loops: ModuleType, parts: Iterable[tuple[BitReader, Place]]) -> UInt64:
    """Return the columns (u64, columns x n) of several runs' rows, as `BitReader.columns` returns those of one."""
    given = list(parts)
    columns = np.empty((len(given[0][1][1]), sum(stop - start for _, (*_, start, stop) in given)), np.uint64)
    to = 0
    for bits, (at, widths, least, start, stop) in given:
        smallest = np.array([value & _MASK for value in least], np.uint64)
        packed = np.frombuffer(bits.data, np.uint8)
        loops.unpack_bits(packed, at, np.array(widths, np.int64), smallest, start, stop, columns, to)
        to += stop - start
    return columns


@lru_cache(256)
def _places(row_bits: int, first: int, rows: int) -> tuple[Int64, UInt64]:
    """Return in which byte (n) each row begins, and at which of its bits, where row 0 begins at bit `first`."""
    begins = np.arange(rows) * row_bits + first
    return begins >> 3, (begins & 7).astype(np.uint64)
