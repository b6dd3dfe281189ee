"""The pages of several indexes as one page. Any thread.

Equal positions in the logs of two brokers are two messages, so entries of two indexes are never one answer: pages are
only put in one order. At equal places the number of the index decides, which is a digest of the index's id. So order
and cursors depend neither on the order in which indexes are given, nor on which others there are. Only cursors of
several indexes have this number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_index.format.schema import Schema
from tiered_index.service.read.answers.batch import Answers, LookupBatch, MatchAccumulator
from tiered_index.service.read.answers.replaced_rows import Page, PageEnds, rows_of_pages
from tiered_index.service.read.answers.rows import OrderKey, concatenate

Int64 = npt.NDArray[np.int64]


class FoundInIndex(NamedTuple):
    """What a lookup indexes in the index with a number and a URI, with the replaced rows that it met."""

    number: int
    uri: str
    answers: MatchAccumulator
    replaced: Sequence[Page]


class RowSources(NamedTuple):
    """The indexes of the rows of an answer: `of_rows` (i64, n) has the places in `uris` and `numbers`."""

    uris: Sequence[str]
    numbers: Sequence[int]
    of_rows: Int64

    def between(self, start: int, stop: int) -> list[str]:
        """Return the URI of the index of each row from `start` to before `stop`."""
        return list(map(self.uris.__getitem__, self.of_rows[start:stop].tolist()))

    def number_of(self, row: int) -> int:
        """Return the number of a row's index."""
        return self.numbers[int(self.of_rows[row])]


class MergedAnswers(NamedTuple):
    """The answers of a batch by several indexes, and the number of replaced rows on each page (i64, n; None: none)."""

    answers: Answers
    sources: RowSources
    replaced: Int64 | None


def index_number(index_id: str) -> int:
    """Return the number (63 bits) of an index in cursors of several indexes."""
    return int.from_bytes(hashlib.blake2b(index_id.encode(), digest_size=8).digest(), "big") >> 1


def order_within_index(after: OrderKey, number: int) -> OrderKey:
    """Return an order key of several indexes as one of the index with a number, which then has no column for it.

    At that place, an index comes after it whose number is greater. For such an index the key begins one step earlier.
    """
    *place, column, last = after
    return (*place, column - 1 if number > last else column)


def merged(batch: LookupBatch, indexes: Sequence[FoundInIndex], schema: Schema) -> MergedAnswers:
    """Return the first rows of each lookup, at most its `max_count`, of all indexes."""
    # the sort is stable, so the number decides at equal places
    indexes = sorted(indexes, key=lambda index: index.number)
    ordered = [index.answers.ordered() for index in indexes]
    firsts = [rows.first(batch.max_count + 1) for rows in ordered]
    lookups = np.concatenate([first.lookups for first in firsts])
    rows = concatenate([first.rows for first in firsts], schema)
    of_rows = np.repeat(np.arange(len(firsts)), [len(first.rows) for first in firsts])
    names = *reversed(schema.identity_extra), "queue_id"
    order = np.lexsort([*(rows[name] for name in names), ~rows["offset"], -rows["second"], lookups])
    counts = np.bincount(lookups, minlength=len(batch))
    more = (counts > batch.max_count) | any(index.answers.skipped for index in indexes)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.minimum(counts, batch.max_count))))
    lookups = lookups[order]
    order = order[np.arange(len(order)) - (np.cumsum(counts) - counts)[lookups] < batch.max_count[lookups]]
    answers = Answers(rows.take(order), starts, more, 0)
    sources = RowSources([index.uri for index in indexes], [index.number for index in indexes], of_rows[order])
    ends = answers.page_ends
    last = sources.of_rows.take(starts[1:] - 1, mode="clip") if more.any() else starts[1:]
    folded, replaced = 0, np.zeros(len(batch), np.int64)
    for place, index in enumerate(indexes):
        within = PageEnds(ends.more, ends.last, last < place)
        folded += ordered[place].folded(within)
        if index.replaced:
            replaced += np.bincount(rows_of_pages(index.replaced, within, schema)[0], minlength=len(batch))
    return MergedAnswers(answers._replace(folded=folded), sources, replaced if replaced.any() else None)
