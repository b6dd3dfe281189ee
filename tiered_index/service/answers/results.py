"""The answers of a batch of lookups, each made when it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from tiered_index.format.schema import Schema
from tiered_index.service.answers.batch import LookupBatch
from tiered_index.service.answers.rows import Array, encode_cursor, order_key, query_digest
from tiered_index.types import Explain, FileReport, Freshness, IndexItem, ItemT, LostFile, QueryResult, Status


@dataclass(eq=False)
class QueryResults(Sequence[QueryResult[ItemT]]):
    """The answers of a batch, in the order of its lookups; each `QueryResult` is made when it is looked at. `explain`
    is that of the whole batch, also in each result, but for lookups with a cursor, which are answered alone. `failed`
    names files that could not be read, where that was allowed. `freshness` as in `QueryResult`; `unknown` are topics
    that no file has; `lost` returns what was given up for good, by the lookup's number.
    """

    batch: LookupBatch
    rows: Array
    starts: npt.NDArray[np.int64]
    more: npt.NDArray[np.bool_]
    failed: tuple[FileReport, ...]
    explain: Explain
    freshness: tuple[Freshness, ...]
    unknown: Collection[str]
    schema: Schema
    make: Callable[[str, tuple[Any, ...]], Any]
    item_type: type[IndexItem]
    pages: Mapping[int, QueryResult[ItemT]]
    lost: Callable[[int], tuple[LostFile, ...]] = lambda number: ()

    def __post_init__(self) -> None:
        self._failed = self.failed
        reports = [*self.failed, *(report for page in self.pages.values() for report in page.failed)]
        self.failed = tuple({(report.source, report.file): report for report in reports}.values())

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How many answers each lookup has (i64, n)."""
        counts = np.diff(self.starts)
        for number, page in self.pages.items():
            counts[number] = len(page)
        return counts

    @overload
    def __getitem__(self, index: int) -> QueryResult[ItemT]: ...
    @overload
    def __getitem__(self, index: slice) -> list[QueryResult[ItemT]]: ...
    def __getitem__(self, index: int | slice) -> QueryResult[ItemT] | list[QueryResult[ItemT]]:
        if isinstance(index, slice):
            return [self._result(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._result(index % len(self))

    def __iter__(self) -> Iterator[QueryResult[ItemT]]:
        return map(self._result, range(len(self)))

    def _result(self, number: int) -> QueryResult[ItemT]:
        if number in self.pages:
            return self.pages[number]
        q = self.batch.lookups[number]
        rows = self.rows[self.starts[number] : self.starts[number + 1]]
        low, high = int(self.batch.second_min[number]), int(self.batch.second_max[number])
        failed = tuple(
            report for report in self._failed if report.begin_ms // 1000 <= high and report.end_ms // 1000 >= low
        )
        more = bool(self.more[number])
        status: Status = "partial" if failed else "truncated" if more else "complete"
        cursor = (
            encode_cursor(order_key(rows[-1], self.schema), query_digest(q.topic, q.key, low, high)) if more else None
        )
        items: tuple[Any, ...] = tuple(self.make(q.topic, row) for row in rows.tolist())
        return QueryResult(
            items=items,
            status=status,
            cursor=cursor,
            failed=failed,
            explain=self.explain,
            freshness=self.freshness,
            unknown_topics=(q.topic,) if q.topic in self.unknown and not items else (),
            item_type=self.item_type,
            lost=self.lost(number),
        )
