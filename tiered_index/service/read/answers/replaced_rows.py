"""Counts the rows that match lookups of a batch, but that newer readings of their files have replaced.

A row counts once for a lookup, and only on the page of the answer that it would be on. Memory: about 50 bytes for each
such row up to the end of the page. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_index.base.locks import call_lock
from tiered_index.format.schema import Schema
from tiered_index.service.read.answers.rows import Array, are_after, concatenate, repeats

Int64 = npt.NDArray[np.int64]
Page = tuple[Int64, Array]
"""Rows (n) by their lookups (n)."""
# rows that are held before those behind the pages are dropped
_HELD_ROWS = 1 << 16


class PageEnds(NamedTuple):
    """For each lookup, whether there are answers behind its page, and the last answer of the page if so.

    `or_at`: whether rows at the place of that answer are behind it, too; None: they never are.
    """

    more: npt.NDArray[np.bool_]
    last: Array
    or_at: npt.NDArray[np.bool_] | None = None


class ReplacedRows:
    """The replaced rows that were met so far. `page_ends` returns the ends of pages by the answers so far."""

    def __init__(self, schema: Schema, page_ends: Callable[[], PageEnds]) -> None:
        self._schema, self._page_ends = schema, page_ends
        self._lock = call_lock()
        self._parts: list[Page] = []
        self._count, self._most = 0, _HELD_ROWS

    def add(self, lookups: Int64, rows: Array) -> None:
        """Add rows (n) that match `lookups` (n)."""
        with self._lock:
            self._parts.append((lookups, rows))
            self._count += len(rows)
            if self._count > self._most:
                self._parts = [rows_of_pages(self._parts, self._page_ends(), self._schema)]
                self._count = len(self._parts[0][1])
                self._most = max(_HELD_ROWS, 2 * self._count)

    def parts(self) -> list[Page]:
        """Return the rows."""
        with self._lock:
            return list(self._parts)


def rows_of_pages(parts: Sequence[Page], page_ends: PageEnds, schema: Schema) -> Page:
    """Return the rows of all parts that are not behind the page of their lookup, each once for a lookup, in any order.

    A row may be there at two times, one on the page and one behind it. Then it counts.
    """
    parts = [
        (lookups[shown], rows[shown])
        for lookups, rows in parts
        for shown in [on_pages(lookups, rows, page_ends, schema)]
    ]
    return _distinct(parts, schema)


def _distinct(parts: Sequence[Page], schema: Schema) -> Page:
    """Return the rows of all parts, each identity once for a lookup, in any order."""
    rows = concatenate([rows for _, rows in parts], schema)
    lookups = np.concatenate([np.zeros(0, np.int64), *(lookups for lookups, _ in parts)])
    if len(rows) > 1:
        columns = [lookups, *(rows[name] for name in ("queue_id", "offset", *schema.identity_extra))]
        is_first = np.ones(len(rows), bool)
        is_first[repeats(columns)[0]] = False
        lookups, rows = lookups[is_first], rows[is_first]
    return lookups, rows


def on_pages(lookups: Int64, rows: Array, page_ends: PageEnds, schema: Schema) -> npt.NDArray[np.bool_]:
    """Return which rows (n) are not behind the page of their lookup (n)."""
    more, last, or_at = page_ends
    on_page = ~more[lookups]
    if len(behind := np.flatnonzero(~on_page)):
        owners = lookups[behind]
        columns = tuple(last[name][owners] for name in ("second", "offset", "queue_id", *schema.identity_extra))
        on_page[behind] = ~are_after(rows[behind], columns, schema, None if or_at is None else or_at[owners])
    return on_page
