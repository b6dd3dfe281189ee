"""The answers of a batch of lookups, each made on first use, and the totals of the pages of one answer."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import Schema
from tiered_index.service.read.answers.batch import Answers, LookupBatch
from tiered_index.service.read.answers.rows import AnswerForm, AnswerRows, encode_cursor, order_key, query_digest
from tiered_index.storage.prices import rounded_usd
from tiered_index.types import (
    Answer,
    Explain,
    FilePlace,
    FileReport,
    Freshness,
    IndexItem,
    ItemT,
    Provenance,
    QueryResult,
    Status,
    describe_places,
    freshness_of,
    to_pandas,
    with_places,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from tiered_index.service.read.answers.merged import RowSources


AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(eq=False, repr=False)
class QueryResults(Sequence[QueryResult[ItemT]]):
    """The answers of a batch, in the order of its lookups. Each `QueryResult` is made on first use.

    - `explain` covers the whole batch, also in each result. `make_explain` returns it.
    - `failed` names the files that could not be read, with `allow_partial`.
    - `freshness`: see `QueryResult`. `unknown` has the topics that no file has.
    - `provenance` is `Logs.provenance`; None: nothing is lost and nothing is hidden.
    - `replaced` has the number of replaced rows of each answer (i64, n); None: there is none.
    - `lacking` has the numbers of the lookups that a failed file may have answered, by the file's source and name. A
      damaged file concerns the lookups that need its damaged parts; a missing one, all lookups of its time range.
    - `sources` has the indexes of the rows; None: one index was read.
    """

    batch: LookupBatch
    answers: Answers
    failed: tuple[FileReport, ...]
    make_explain: Callable[[], Explain]
    freshness: tuple[Freshness, ...]
    unknown: Collection[str]
    schema: Schema
    form: AnswerForm
    provenance: Callable[..., Provenance] | None = None
    replaced: npt.NDArray[np.int64] | None = None
    lacking: Mapping[tuple[str | None, str], Collection[int]] = field(default_factory=dict)
    sources: RowSources | None = None

    def __post_init__(self) -> None:
        self.rows, self.starts, self.more, _ = self.answers
        self.freshness = freshness_of(self.freshness, self.batch.topics)

    @cached_property
    def explain(self) -> Explain:
        """The cost of the batch."""
        return self.make_explain()

    def _numbers_of(self, number: int) -> tuple[int, int, int, int, bool]:
        """Return begin and end of the rows of an answer, its inclusive range, and whether there are more rows."""
        if self.batch.is_one:
            # the lists of the only answer would take five times as long
            return 0, len(self.rows), self.batch.first[2], int(self.batch.range_ends[0]), bool(self.more[0])
        return self._numbers[number]

    @cached_property
    def _numbers(self) -> list[tuple[int, int, int, int, bool]]:
        """`_numbers_of` for each answer."""
        starts, batch = self.starts.tolist(), self.batch
        bounds = (batch.second_min.tolist(), batch.range_ends.tolist(), self.more.tolist())
        return list(zip(starts[:-1], starts[1:], *bounds, strict=True))

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def item_type(self) -> type[IndexItem]:
        """The class of the items."""
        return self.form.item_type

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """The number of entries of each answer (i64, n)."""
        return np.diff(self.starts)

    def counts_of_topics(self) -> dict[str, int]:
        """Return the number of entries of each topic."""
        counts = np.zeros(len(self.batch.topics), np.int64)
        np.add.at(counts, self.batch.topic_index, self.counts)
        return dict(zip(self.batch.topics, counts.tolist(), strict=True))

    @property
    def is_plain(self) -> npt.NDArray[np.bool_]:
        """The answers (bool, n) that are complete and have only entries: no loss, no unknown topic."""
        if self.failed or self.provenance is not None:
            return np.zeros(len(self), bool)
        plain = ~self.more
        if self.unknown:
            unknown = np.array([topic in self.unknown for topic in self.batch.topics], bool)
            plain &= ~unknown[self.batch.topic_index] | (np.diff(self.starts) > 0)
        return plain

    def to_arrow(self) -> pa.Table:
        """Return all entries as one Arrow table, by lookup and in answer order. It builds no item objects.

        The first column is `lookup` (int32, the lookup's number, from 0), then come the columns of
        `QueryResult.to_arrow` for a topic without files. If a topic has files there are `file` and `row`, too. Raises
        `InvalidArgument` if the entries of an older index have a column `lookup`.
        """
        # loaded when used, as in `table_of`
        import pyarrow as pa

        if (clash := self.schema.clashing(("lookup",))) is not None:
            raise InvalidArgument(
                f"the index's entries have a column {clash!r}, which the table of answers needs for itself"
            )
        counts, topics = np.diff(self.starts), self.batch.topics
        table = self.form.table(topics[0] if topics else "", self.rows, self._sources_of(0, len(self.rows)))
        if len(topics) > 1:
            named = pa.array(topics, pa.string()).take(pa.array(np.repeat(self.batch.topic_index, counts)))
            table = table.set_column(table.column_names.index("topic"), "topic", named)
        if (places := self._places) is not None:
            others = [name for name in table.column_names if name not in ("topic", "timestamp_ms", "source")]
            table = with_places(table, places, others)
        return table.add_column(0, "lookup", pa.array(np.repeat(np.arange(len(counts), dtype=np.int32), counts)))

    def to_pandas(self) -> pd.DataFrame:
        """Return `to_arrow` as a pandas DataFrame. Raises `ConfigError` without pandas (extra `pandas`)."""
        return to_pandas(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return `to_arrow` as a stream of Arrow's C data interface, for DuckDB, Polars and other libraries."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    @cached_property
    def _places(self) -> list[FilePlace | None] | None:
        """The place of each row; None: no topic has files."""
        of_files = {number: topic for number, topic in enumerate(self.batch.topics) if self.form.has_files(topic)}
        if not of_files:
            return None
        numbers = np.repeat(self.batch.topic_index, self.counts)
        all_places: list[FilePlace | None] = [None] * len(self.rows)
        sources = self._sources_of(0, len(self.rows))
        for number, topic in of_files.items():
            rows_of_topic = np.flatnonzero(numbers == number)
            numbers_of_rows = rows_of_topic.tolist()
            named = None if sources is None else [sources[row] for row in numbers_of_rows]
            places = self.form.places_of(topic, self.rows[rows_of_topic], named)
            for row, place in zip(numbers_of_rows, places or (), strict=places is not None):
                all_places[row] = place
        return all_places

    def __repr__(self) -> str:
        return f"<QueryResults of {len(self):,} lookups: {int(self.counts.sum()):,} items>"

    def item_documents(self, begin: int = 0, end: int | None = None) -> list[list[dict[str, Any]]]:
        """Return the entries of the answers from `begin` to before `end`, as `to_dict` does, without making items."""
        chosen = range(len(self))[begin:end]
        if not self.form.only_stores:
            # a class of the caller may define its fields and `to_dict` in any way
            of_lookups = [self[number] for number in chosen]
            all_documents = [[item.to_dict() for item in result.items] for result in of_lookups]
            for result, of_items in zip(of_lookups, all_documents, strict=True):
                describe_places(of_items, result.places)
            return all_documents
        starts = self.starts[chosen.start : chosen.stop + 1]
        named = map(self.batch.topics.__getitem__, self.batch.topic_index[chosen.start : chosen.stop].tolist())
        topics = list(chain.from_iterable(map(repeat, named, np.diff(starts).tolist())))
        first, last = int(starts[0]), int(starts[-1])
        documents = self.form.documents(topics, self.rows[first:last], self._sources_of(first, last))
        if (places := self._places) is not None:
            describe_places(documents, places[first:last])
        return [documents[start:stop] for start, stop in pairwise((starts - starts[0]).tolist())]

    @overload
    def __getitem__(self, index: int) -> QueryResult[ItemT]: ...
    @overload
    def __getitem__(self, index: slice) -> list[QueryResult[ItemT]]: ...
    def __getitem__(self, index: int | slice) -> QueryResult[ItemT] | list[QueryResult[ItemT]]:
        if isinstance(index, slice):
            return [self._result(i) for i in range(*index.indices(len(self)))]
        count = len(self)
        if not -count <= index < count:
            raise IndexError(index)
        return self._result(index % count)

    def __iter__(self) -> Iterator[QueryResult[ItemT]]:
        return map(self._result, range(len(self)))

    def failed_of(self, number: int) -> tuple[FileReport, ...]:
        """Return the files that could not be read and may have entries of one answer."""
        if not self.failed:
            return ()
        low, high = self.batch.second_min[number], self.batch.second_max[number]
        return tuple(
            [
                report
                for report in self.failed
                if report.begin_ms // 1000 <= high
                and report.end_ms // 1000 >= low
                and ((only := self.lacking.get((report.source, report.file))) is None or number in only)
            ]
        )

    def _result(self, number: int) -> QueryResult[ItemT]:
        topic = self.batch.topics[self.batch.topic_index[number]]
        start, stop, low, high, more = self._numbers_of(number)
        rows = self.rows[start:stop]
        failed = self.failed_of(number)
        status: Status = "partial" if failed else "truncated" if more else "complete"
        cursor = None
        if more:
            end = order_key(rows[-1], self.schema)
            if self.sources is not None:
                end = (*end, self.sources.number_of(stop - 1))
            cursor = encode_cursor(end, query_digest(topic, self.batch.lookups[number].key, low, high))
        return AnswerRows(topic, rows, self.form, lambda: self.explain, self._sources_of(start, stop)).result(
            status=status, cursor=cursor, failed=failed, seen=self._seen_of(number), item_type=self.item_type
        )

    def _sources_of(self, start: int, stop: int) -> list[str] | None:
        """Return the URI of the index of each row from `start` to before `stop`; None: one index was read."""
        return None if self.sources is None else self.sources.between(start, stop)

    def _seen_of(self, number: int) -> Provenance:
        batch, topic = self.batch, self.batch.topics[self.batch.topic_index[number]]
        start, stop, low, high, _ = self._numbers_of(number)
        unknown = (topic,) if topic in self.unknown and start == stop and number not in batch.after else ()
        freshness = self.freshness if len(batch.topics) == 1 else freshness_of(self.freshness, (topic,))
        if self.provenance is None:
            return Provenance(freshness, unknown)
        hashes = [int(under.key_hash[number]) for under in (batch, batch.under("mask")[0])]
        known = {
            "key": batch.lookups[number].key,
            "replaced": 0 if self.replaced is None else int(self.replaced[number]),
        }
        return self.provenance(freshness, unknown, topic, low, high, *hashes, **known)

    @property
    def seen(self) -> Provenance:
        """The provenance of all answers together."""
        seen = Provenance(self.freshness, tuple([topic for topic in self.batch.topics if topic in self.unknown]))
        every = map(self._seen_of, range(len(self))) if self.provenance is not None else ()
        return functools.reduce(Provenance.joined, every, seen)


_SUMMED = ("requests", "bytes", "cost_usd", "elapsed_ms", "folded_entries", "message_requests", "message_bytes")


class PageTotals:
    """The totals of the pages of one answer so far, for `query --all` and for streams of the service. One thread."""

    def __init__(self) -> None:
        self.count = 0
        self.is_partial = False
        self.failed: dict[tuple[str | None, str], FileReport] = {}
        # those of messages only once there are lookups of messages; a missing one is 0
        self.costs: dict[str, Any] = Counter(dict.fromkeys(_SUMMED[:-2], 0))
        self._seen = Provenance()

    def add(self, page: AnswerT) -> AnswerT:
        """Count a page, and return it with the provenance of all pages so far."""
        self._seen = self._seen.joined(page.seen)
        self.count += len(page)
        self.is_partial = self.is_partial or page.status == "partial"
        self.failed |= {(report.source, report.file): report for report in page.failed}
        for name in _SUMMED:
            if (cost := getattr(page.explain, name)) is not None:
                self.costs[name] += cost
        return replace(page, seen=self._seen)

    def status_of(self, last: Answer) -> str:
        """Return the status of all pages together. `last` is the last page."""
        return "partial" if self.is_partial else last.status

    def document(self, last: Answer, costs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Return the last line of an NDJSON stream, about all pages. `costs` are added to its `explain`."""
        return {
            "status": self.status_of(last),
            "count": self.count,
            **more,
            "failed": [report.to_dict() for report in self.failed.values()],
            "explain": {**self.costs, "cost_usd": rounded_usd(self.costs["cost_usd"]), **(costs or {})},
            **last.provenance(),
        }
