"""Marks: the rows after which a file may end, because all entries of a message or batch are before them.

A kill between two files then leaves no part of a message, which its source would send again. Threads: the caller's.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from tiered_index.service.log.records import max_positions

_MARK = struct.Struct("=qqq")


class Marks:
    """The ends of messages and batches of sources, in order, and each one's source and position.

    An end is a number of rows: all rows of the message are before it. `positions` are the greatest of each source.
    The compiled core's `PutRows` adds marks, too, by the same attributes.
    """

    __slots__ = ("numbers", "positions", "sources")

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        # the number of each source
        self.sources: dict[str, int] = {}
        # of each message its end, the number of its source, and its position
        self.numbers = bytearray()

    def add(self, end: int, source: str, position: int) -> None:
        """Add the end of a message, which must not be smaller than the last one."""
        self.numbers += _MARK.pack(end, self.sources.setdefault(source, len(self.sources)), position)
        self.positions[source] = max(position, self.positions.get(source, position))

    def extend(self, marks: Marks, first_row: int) -> None:
        """Add the marks of rows that come after these, from `first_row` on."""
        if marks.numbers:
            numbers = marks._table().copy()
            numbers[:, 0] += first_row
            known = [self.sources.setdefault(source, len(self.sources)) for source in marks.sources]
            numbers[:, 1] = np.array(known)[numbers[:, 1]]
            self.numbers += numbers.tobytes()
            self.positions = max_positions(self.positions, marks.positions)

    def among(self, are_taken: npt.NDArray[np.bool_]) -> Marks:
        """Return the marks among the rows that are taken (one boolean a row)."""
        taken, numbers = Marks(), self._table().copy()
        numbers[:, 0] = np.concatenate([[0], np.cumsum(are_taken)])[numbers[:, 0]]
        taken.sources, taken.positions = self.sources, self.positions
        taken.numbers += numbers.tobytes()
        return taken

    def end_at(self, row: int) -> int:
        """Return the greatest end up to `row`, or 0."""
        ends = self._table()[:, 0]
        number = int(np.searchsorted(ends, row, "right"))
        return int(ends[number - 1]) if number else 0

    def end_after(self, row: int) -> int | None:
        """Return the smallest end after `row`."""
        ends = self._table()[:, 0]
        number = int(np.searchsorted(ends, row, "right"))
        return int(ends[number]) if number < len(ends) else None

    def positions_at(self, row: int) -> dict[str, int]:
        """Return the greatest position of each source that has a message whose end is at most `row`."""
        numbers = self._table()
        _, of_sources, positions = numbers[: np.searchsorted(numbers[:, 0], row, "right")].T
        return {
            source: int(positions[of_sources == number].max())
            for source, number in self.sources.items()
            if (of_sources == number).any()
        }

    def _table(self) -> npt.NDArray[np.int64]:
        # a copy, because they can't grow while NumPy sees them
        return np.frombuffer(bytes(self.numbers), np.int64).reshape(-1, 3)
