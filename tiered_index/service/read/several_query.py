"""Lookups in several indexes: each index is searched by itself, and the pages are merged. Any thread.

If the compiled core can answer in each index, it does so one after another; the fields of the answer are then made on
first access. Otherwise each index is searched in a pass of its own (see `several`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.call import Call
from tiered_index.base.kernels import compiled_views
from tiered_index.service.read.answers.batch import Answers, LookupBatch, MatchAccumulator, Matches
from tiered_index.service.read.answers.budget import NOTHING
from tiered_index.service.read.answers.logs import Logs
from tiered_index.service.read.answers.merged import FoundInIndex, RowSources, index_number, merged, order_within_index
from tiered_index.service.read.answers.results import QueryResults
from tiered_index.service.read.answers.rows import Array, OrderKey
from tiered_index.service.read.file_scans import LookupScan
from tiered_index.service.read.query import QueryEngine, explained, unknown_in, unknown_to_all
from tiered_index.service.read.scan import LookupFiles, LookupRun, Pass, reports_of_pass
from tiered_index.types import IndexItem, QueryResult

if TYPE_CHECKING:
    import pyarrow as pa

    from tiered_index.base._views import ViewRows

# up to this number, the items are made at once: a first access takes longer than making a few
_AT_ONCE = 16


class SeveralEngine(QueryEngine):
    """Runs lookups over files of several indexes of one schema. Cursors have one more column: `index_number`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # by URI, the least first
        self._numbers: Mapping[str, int] = {}
        # it would count each index as a lookup
        self._in_each, self.plain = self.plain, None

    def read_of(self, indexes: Mapping[str, str]) -> None:
        """Set the ids of indexes by their URIs. Call it before lookups see files of a new one."""
        numbers = sorted([(index_number(index_id), uri) for uri, index_id in indexes.items()])
        self._numbers = {uri: number for number, uri in numbers}

    def order_key(self, item: IndexItem) -> OrderKey:
        """As `QueryEngine.order_key`, with the number of the entry's index."""
        assert item.source is not None
        return (*super().order_key(item), self._numbers[item.source])

    @property
    def _order_columns(self) -> int:
        return super()._order_columns + 1

    def number_of(self, uri: str | None) -> int:
        """Return the number of an index. One that is not open has none, and no entries."""
        return self._numbers.get(uri or "", 0)

    def at_once(  # type: ignore[override]
        self,
        files_of: Mapping[str, LookupFiles],
        topic: str,
        key: str,
        begin_ms: int | None,
        end_ms: int | None,
        max_count: int,
        cursor: str | None,
        call: Call,
    ) -> QueryResult[Any] | None:
        """Answer a lookup by a call of the core for each index; None: the core can't.

        It may raise `InvalidArgument`.
        """
        numbers = self._numbers
        # an index may appear meanwhile
        if self._in_each is None or len(files_of) != len(numbers):
            return None
        rows_of, after, within = self._in_each.rows, None, None
        if cursor is not None:
            after = self._end_before(topic, key, begin_ms, end_ms, max_count, cursor)
            if after is None:
                return None
        uris: list[str] = []
        parts: list[ViewRows] = []
        count, has_more = 0, False
        for uri, number in numbers.items():
            if after is not None:
                within = order_within_index(after, number)
            files = files_of[uri]
            if (view := files.view) is None:
                return None
            bounds = begin_ms, end_ms, max_count, within
            rows = rows_of(view.core, files.about, topic, key, *bounds, files.hidden, call)
            if rows is None or rows.has_left:
                return None
            uris.append(uri)
            parts.append(rows)
            count += len(rows)
            has_more = has_more or rows.has_more
        status = "truncated" if has_more or count > max_count else "complete"
        later = MergedRows(self, list(files_of), uris, parts, (topic, key, begin_ms, end_ms, max_count, cursor))
        self.count("query", status)
        result: QueryResult[Any] = object.__new__(QueryResult)
        fields = result.__dict__
        fields["_later"], fields["status"] = later, status
        if count <= _AT_ONCE and self.form.in_core is not None:
            fields["items"] = later.field("items")
        return result

    def _batch_for(self, run: LookupRun, batch: LookupBatch) -> LookupBatch:
        number = self.number_of(run.source)
        return batch.after_keys(lambda after: order_within_index(after, number))

    def _paged(
        self, passes: Sequence[Pass[LookupScan]], batch: LookupBatch
    ) -> tuple[Answers, RowSources | None, npt.NDArray[np.int64] | None]:
        indexes = [
            FoundInIndex(
                self.number_of(index_pass.run.source),
                index_pass.run.source or "",
                index_pass.scan.answers,
                index_pass.scan.replaced.parts(),
            )
            for index_pass in passes
        ]
        return merged(batch, indexes, self.schema)


class MergedRows:
    """The rows that the core found in several indexes (`uris`) for a lookup: the `LaterFields` of its answer.

    `uris` are in order of the indexes' numbers, `indexes` has the same in the order of the reader.
    """

    __slots__ = ("_engine", "_indexes", "_lookup", "_parts", "_result", "_uris")

    def __init__(
        self, engine: SeveralEngine, indexes: list[str], uris: list[str], parts: list[ViewRows], lookup: tuple[Any, ...]
    ) -> None:
        self._engine, self._indexes, self._uris, self._parts, self._lookup = engine, indexes, uris, parts, lookup
        self._result: QueryResult[Any] | None = None

    def field(self, name: str) -> Any:
        """See `LaterFields.field`."""
        if name == "items" and (form := self._engine.form.in_core) is not None:
            core = compiled_views()
            assert core is not None
            return core.merged_items(self._parts, self._uris, form, self._lookup[4])
        return getattr(self._answer(), name)

    def documents(self) -> None:
        """See `LaterFields.documents`."""

    def table(self) -> pa.Table:
        """See `LaterFields.table`."""
        return self._answer().__dict__["_later"].table()

    def _answer(self) -> QueryResult[Any]:
        """Return the answer as that of passes."""
        if self._result is None:
            self._result = self._made()
        return self._result

    def _made(self) -> QueryResult[Any]:
        engine = self._engine
        lookup = engine.prepare(*self._lookup)
        batch, schema = LookupBatch.of_one(lookup), engine.schema
        indexes, freshness, logs, unknown = [], [], [], []
        by_uri = dict(zip(self._uris, self._parts, strict=True))
        for uri in self._indexes:
            rows = by_uri[uri]
            answers = MatchAccumulator(batch, schema)
            answers.add(_matches(np.frombuffer(rows.rows, schema.row)))
            answers.skipped = rows.skipped
            retired = rows.retired
            replaced = [_matches(np.frombuffer(retired, schema.row))[:2]] if retired else ()
            indexes.append(FoundInIndex(engine.number_of(uri), uri, answers, replaced))
            seen, log = rows.about
            freshness += seen
            logs.append(log.of_source(uri))
            is_known = rows.knows_topic or len(rows) > 0
            unknown.append(() if is_known else unknown_in((lookup.topic,), (), rows))
        answers_of_all, sources, replaced_of_all = merged(batch, indexes, schema)
        reports = [reports_of_pass((), by_uri[uri], engine.prices, uri) for uri in self._indexes]
        elapsed_ms = sum([rows.elapsed_ms for rows in self._parts])
        joined = Logs.joined(logs)
        return QueryResults[Any](
            batch=batch,
            answers=answers_of_all,
            failed=(),
            make_explain=lambda: explained(reports, NOTHING, elapsed_ms, 0),
            freshness=tuple(freshness),
            unknown=frozenset(unknown_to_all(unknown)),
            schema=schema,
            form=engine.form,
            sources=sources,
            provenance=joined.provenance if joined.lost or joined.expired else None,
            replaced=replaced_of_all,
        )[0]


def _matches(rows: Array) -> Matches:
    return Matches(np.zeros(len(rows), np.int64), rows)
