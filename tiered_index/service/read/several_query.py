"""Lookups in several indexes: each index is searched in a pass of its own, and the pages are merged. Any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tiered_index.service.read.answers.batch import Answers, LookupBatch
from tiered_index.service.read.answers.merged import FoundInIndex, RowSources, index_number, merged, order_within_index
from tiered_index.service.read.answers.rows import OrderKey
from tiered_index.service.read.query import LookupScan, QueryEngine
from tiered_index.service.read.scan import LookupRun, Pass
from tiered_index.types import IndexItem


class SeveralEngine(QueryEngine):
    """Runs lookups over files of several indexes of one schema. Cursors have one more column: `index_number`."""

    # by URI
    _numbers: Mapping[str, int] = {}

    def read_of(self, indexes: Mapping[str, str]) -> None:
        """Set the ids of indexes by their URIs. Call it before lookups see files of a new one."""
        self._numbers = {uri: index_number(index_id) for uri, index_id in indexes.items()}

    def order_key(self, item: IndexItem) -> OrderKey:
        """As `QueryEngine.order_key`, with the number of the entry's index."""
        assert item.source is not None
        return (*super().order_key(item), self._numbers[item.source])

    @property
    def _order_columns(self) -> int:
        return super()._order_columns + 1

    def _number_of(self, run: LookupRun) -> int:
        # an index that is not open has no number, and no entries
        return self._numbers.get(run.source or "", 0)

    def _batch_for(self, run: LookupRun, batch: LookupBatch) -> LookupBatch:
        number = self._number_of(run)
        return batch.after_keys(lambda after: order_within_index(after, number))

    def _paged(
        self, passes: Sequence[Pass[LookupScan]], batch: LookupBatch
    ) -> tuple[Answers, RowSources | None, npt.NDArray[np.int64] | None]:
        indexes = [
            FoundInIndex(
                self._number_of(index_pass.run),
                index_pass.run.source or "",
                index_pass.scan.answers,
                index_pass.scan.replaced.parts(),
            )
            for index_pass in passes
        ]
        return merged(batch, indexes, self.schema)
