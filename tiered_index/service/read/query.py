"""Lookups over many files: prepare, search, and make one deterministic answer with its cost and missing files.

Each index is searched in a pass of its own; `several_query` makes an answer of the passes of several. A file is skipped
only if `max_count` answers of its index are strictly newer than its greatest second. So the answer does not depend on
the order of threads. `scan` reads the files. A spent budget only stops requests: local files are still searched, and
`BudgetExceeded` has the partial answer.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from tiered_index.base.call import Call
from tiered_index.base.kernels import compiled_views
from tiered_index.base.locks import call_lock
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import BudgetExceeded, FolderDenied, PartialAnswer, StorageUnavailable, TieredIndexError
from tiered_index.format.keys.hashing import lookup_numbers
from tiered_index.format.metadata import NamedStats, TopicStats
from tiered_index.format.schema import Schema
from tiered_index.service.log.expired import NOTHING as NOTHING_EXPIRED
from tiered_index.service.read.answers.batch import Answers, LookupBatch
from tiered_index.service.read.answers.budget import NOTHING, RequestStats
from tiered_index.service.read.answers.logs import NO_LOGS, Logs
from tiered_index.service.read.answers.replaced_rows import PageEnds, rows_of_pages
from tiered_index.service.read.answers.results import QueryResults
from tiered_index.service.read.answers.rows import (
    AnswerForm,
    Array,
    OrderKey,
    PreparedLookup,
    check_key,
    check_range,
    check_topic,
    cursor_after,
    decode_cursor,
    query_digest,
)
from tiered_index.service.read.file_scans import LookupScan, StatsScan
from tiered_index.service.read.files.file_view import About, Noted, Why, reports_of
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.scan import FileReader, LookupFiles, LookupRun, Pass, ScanT, SearchAll, reports_of_pass
from tiered_index.storage.prices import PriceTable
from tiered_index.types import (
    MAX_KEY_UNITS,
    MAX_TOPIC_UNITS,
    Explain,
    FileReport,
    IndexItem,
    Lookup,
    Provenance,
    QueryResult,
    TopicsResult,
    TopicSummary,
    freshness_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from tiered_index.base._views import Answers as PlainAnswers
    from tiered_index.base._views import ViewRows
    from tiered_index.service.read.answers.merged import RowSources
    from tiered_index.service.read.segments.places import RowPlaces

# for a view, which makes no requests
_NO_PRICES = PriceTable()
R = TypeVar("R", QueryResult[Any], QueryResults[Any], TopicsResult)


@dataclass(eq=False)
class QueryEngine:
    """Runs lookups over files of one index. Any thread.

    `schema` is that of the files. `places` finds the files and rows of entries.
    """

    schema: Schema
    item_type: type[IndexItem]
    threads: int
    prices: PriceTable
    places: RowPlaces | None = None

    def __post_init__(self) -> None:
        self.form = AnswerForm(self.schema, self.item_type, self.places)
        self.files = FileReader(self.threads, self.prices)
        # number of entries that lookups folded although their content differs, counted for each lookup
        self.folded = 0
        self._counted: Counter[tuple[str, str]] = Counter()
        self._lock = call_lock()
        # answers lookups that need only a view; None: there is no compiled core
        self.plain: PlainAnswers | None = None
        if (core := compiled_views()) is not None:
            fields = ViewFields(self.schema, self.form, self.item_type, self.prices)
            bounds = MAX_TOPIC_UNITS // 2, MAX_KEY_UNITS // 2, MAX_TIMESTAMP_MS
            self.plain = core.Answers(QueryResult, fields, *bounds)

    def order_key(self, item: IndexItem) -> OrderKey:
        """Return the order key of an entry of an answer."""
        extra = [int(getattr(item, name)) for name in self.schema.identity_extra]
        return (item.timestamp_ms // 1000, item.offset, item.queue_id, *extra)

    def close(self, until_s: float | None = None) -> None:
        """See `FileReader.close`."""
        self.files.close(until_s)

    def prepare(
        self, topic: str, key: str, begin_ms: int | None, end_ms: int | None, max_count: int, cursor: str | None
    ) -> PreparedLookup:
        """Return the validated lookup. Raises `InvalidArgument` and `InvalidCursor`."""
        topic = check_topic(topic)
        check_key(key)
        second_min, second_max, max_count = check_range(begin_ms, end_ms, max_count)
        after = None
        if cursor is not None:
            digest = query_digest(topic, key, second_min, second_max)
            after = decode_cursor(cursor, digest, self._order_columns)
        return PreparedLookup(topic, key, *lookup_numbers(topic, key), second_min, second_max, max_count, after)

    @property
    def _order_columns(self) -> int:
        return 3 + len(self.schema.identity_extra)

    def query(self, search_all: SearchAll[LookupScan], lookup: PreparedLookup) -> QueryResult[Any]:
        """Answer one lookup. Raises as `IndexService.query`."""
        passes, results = self._results(search_all, LookupBatch.of_one(lookup))
        return _within_budget(passes, results[0])

    def _batch_for(self, run: LookupRun, batch: LookupBatch) -> LookupBatch:
        """Return the batch for the index of `run`."""
        return batch

    def _paged(
        self, passes: Sequence[Pass[LookupScan]], batch: LookupBatch
    ) -> tuple[Answers, RowSources | None, npt.NDArray[np.int64] | None]:
        """Return the pages of a batch, the indexes of their rows (None: one index), and the number of replaced rows.

        That is for each lookup (i64, n); None: there is none.
        """
        [index_pass] = passes
        answers, parts = index_pass.scan.answers.answers(), index_pass.scan.replaced.parts()
        if not parts:
            return answers, None, None
        lookups, _ = rows_of_pages(parts, answers.page_ends, self.schema)
        return answers, None, np.bincount(lookups, minlength=len(batch))

    def _end_before(
        self, topic: str, key: str, begin_ms: int | None, end_ms: int | None, max_count: int, cursor: str
    ) -> OrderKey | None:
        """Return the end of the page before if the core supports it; None: the caller has to decode the cursor."""
        core = compiled_views()
        assert core is not None
        parts: tuple[str, OrderKey] | None = core.cursor_parts(cursor, self._order_columns)
        if parts is None or self.schema.identity_extra or type(topic) is not str or type(key) is not str:
            return None
        second_min, second_max, _ = check_range(begin_ms, end_ms, max_count)
        digest, after = parts
        return after if digest == query_digest(topic, key, second_min, second_max) else None

    def at_once(
        self,
        files: LookupFiles,
        topic: str,
        key: str,
        begin_ms: int | None,
        end_ms: int | None,
        max_count: int,
        cursor: str | None,
        call: Call,
    ) -> QueryResult[Any] | ViewRows | None:
        """Answer a lookup by one call of the core, or return its rows if there is a rest that the core did not search.

        `files` have a view, and nothing beside it may have the key. None: the caller has to check the arguments, or to
        search all files. If there is a cursor it may raise `InvalidArgument`.
        """
        if self.plain is None or (view := files.view) is None:
            return None
        after = None
        if cursor is not None:
            after = self._end_before(topic, key, begin_ms, end_ms, max_count, cursor)
            if after is None:
                return None
        return self.plain.find(  # type: ignore[no-any-return]
            view.core, files.about, topic, key, begin_ms, end_ms, max_count, files.has_topics, after, files.hidden, call
        )

    def query_many(
        self, search_all: SearchAll[LookupScan], lookups: Sequence[Lookup], allow_partial: bool
    ) -> QueryResults[Any]:
        """Answer many lookups. Raises the errors of `query`. Unlike for `query`, newer answers don't skip files."""
        batch = LookupBatch(lookups, allow_partial=allow_partial, order_columns=self._order_columns)
        return _within_budget(*self._results(search_all, batch))

    def _results(
        self, search_all: SearchAll[LookupScan], batch: LookupBatch
    ) -> tuple[Sequence[Pass[LookupScan]], QueryResults[Any]]:
        """Search all files of all indexes. Raises errors that fail the call."""

        def search(run: LookupRun) -> Pass[LookupScan]:
            scan = LookupScan(self.schema, self._batch_for(run, batch))
            handles = self._search(run, scan) if len(batch) else ()
            if batch.is_one and (scan.answers.has_rows or batch.after):
                return Pass(run, scan, ())
            return Pass(run, scan, unknown_in(batch.topics, handles, scan.viewed if batch.is_one else None))

        passes = _unfailed(search_all(search))
        (answers, sources, replaced), (freshness, logs) = self._paged(passes, batch), _about(passes)
        return passes, QueryResults(
            batch=batch,
            answers=answers,
            failed=tuple([report for index_pass in passes for report, _ in index_pass.errors]),
            make_explain=_explain(passes, self._fold(answers.folded)),
            freshness=freshness,
            unknown=frozenset(unknown_to_all([index_pass.unknown for index_pass in passes])),
            schema=self.schema,
            form=self.form,
            sources=sources,
            provenance=logs.provenance if logs.lost or logs.expired else None,
            replaced=replaced,
            lacking={
                (index_pass.run.source, file): numbers
                for index_pass in passes
                for file, numbers in index_pass.scan.lacking.items()
            },
        )

    def _search(self, run: LookupRun, scan: LookupScan) -> Sequence[Handle]:
        """Search all files for the batch of `scan`. Raises errors that fail the call.

        Return the files in range, but those in a view only for many lookups: the notes of one say if it has the topic.
        """
        batch, files, budget = scan.batch, run.files, run.budget
        scan.hidden = files.hidden
        within = batch.first[2:] if batch.is_one else (int(batch.second_min.min()), int(batch.second_max.max()))
        beside = files.beside_within(*within)
        why: Why | None = None
        if compiled_views() is None:
            why = Why.NO_CORE
        elif not batch.is_one and budget.is_timed:
            # the search of many lookups may miss the deadline
            why = Why.BOUNDS
        if why is not None or files.view is None:
            handles = files.listed(*within)
            scan.why = dict.fromkeys([handle.file_id for handle in handles], why or Why.NEW_FILES)
            run.searches.read(run, scan, [*beside, *handles])
            return [*beside, *handles]
        if run.begun is not None:
            viewed = files.view.of_rows(run.begun.rows)
        else:
            viewed = files.view.find(
                batch,
                partial(run.searches.in_parts, run.call),
                stored=budget.is_free,
                hidden=scan.hidden,
                call=run.call,
            )
        scan.take(viewed)
        for reads, size_bytes in viewed.noted.spent_by.values():
            # made without a metered storage
            budget.usage.count_ranges(reads, size_bytes)
        run.searches.read(run, scan, [*beside, *(rest.handle for rest in viewed.rest)])
        return [*beside, *viewed.seen]

    def topics(
        self,
        search_all: SearchAll[StatsScan],
        handles_of: Callable[[LookupRun], Sequence[Handle]],
        second_min: int,
        second_max: int,
    ) -> TopicsResult:
        """Return the topics of files that overlap the inclusive epoch seconds. Raises the errors of `query`."""

        def search(run: LookupRun) -> Pass[StatsScan]:
            scan = StatsScan(second_min, second_max, dict(run.files.logs.expired).get(run.source, NOTHING_EXPIRED))
            run.searches.read(run, scan, handles_of(run))
            return Pass(run, scan)

        passes = _unfailed(search_all(search))
        freshness, logs = _about(passes)
        sums: dict[str, TopicSummary] = {}
        for _, stats in [stats for index_pass in passes for stats in index_pass.scan.stats]:
            for name, of_topic in stats:
                sums[name] = _summary(name, sums.get(name), of_topic)
        failed = tuple([report for index_pass in passes for report, _ in index_pass.errors])
        result = TopicsResult(
            topics=tuple(sums[name] for name in sorted(sums)),
            status="partial" if failed else "complete",
            failed=failed,
            explain=_explain(passes, 0)(),
            seen=logs.provenance(freshness_of(freshness, sums), (), None, second_min, second_max),
        )
        return _within_budget(passes, result)

    def file_stats(
        self,
        search_all: SearchAll[StatsScan],
        handles_of: Callable[[LookupRun], Sequence[Handle]],
        second_min: int,
        second_max: int,
    ) -> list[tuple[Handle, NamedStats]]:
        """Return the topic stats of each file of one index. Raises the errors of `query`."""

        def search(run: LookupRun) -> Pass[StatsScan]:
            scan = StatsScan(second_min, second_max)
            run.searches.read(run, scan, handles_of(run))
            return Pass(run, scan)

        [index_pass] = _unfailed(search_all(search))
        if index_pass.errors:
            # also after a bound: the sums could not say which files they leave out
            report, error = index_pass.errors[0]
            raise BudgetExceeded(f"{error}; {report.file} was not read", failed=(report,)) from error
        return index_pass.scan.stats

    def count(self, kind: str, status: str) -> None:
        """Count a lookup that has ended."""
        with self._lock:
            self._counted[kind, status] += 1

    def counts(self) -> Counter[tuple[str, str]]:
        """Return the number of lookups that have ended, by kind and status."""
        with self._lock:
            counted = self._counted.copy()
        if self.plain is not None:
            counted.update({("query", "complete"): self.plain.complete, ("query", "truncated"): self.plain.truncated})
        # without zeros
        return +counted

    def _fold(self, count: int) -> int:
        if count:
            with self._lock:
                self.folded += count
        return count


class ViewFields:
    """Makes the fields of answers of a view on first access. Their `about` is an `About`."""

    def __init__(self, schema: Schema, form: AnswerForm, item_type: type[IndexItem], prices: PriceTable) -> None:
        self._schema, self._form, self._item_type, self._prices = schema, form, item_type, prices
        self.plain_items = form.in_core

    def field(self, rows: ViewRows, name: str) -> Any:
        """See `LaterFields.field`."""
        match name:
            case "items":
                return self._form.items(rows.topic, self._rows(rows))
            case "places":
                # before the rows become an array
                has_files = self._form.has_files(rows.topic)
                return self._form.places_of(rows.topic, self._rows(rows)) if has_files else None
            case "status":
                return "truncated" if rows.has_more else "complete"
            case "cursor":
                return self._cursor(rows) if rows.has_more else None
            case "failed":
                return ()
            case "explain":
                return explained([reports_of(rows, self._prices)], NOTHING, rows.elapsed_ms, 0)
            case "seen":
                freshness, logs = rows.about
                freshness = freshness_of(freshness, (rows.topic,))
                unknown = () if rows.knows_topic or len(rows) else unknown_in((rows.topic,), (), rows) or ()
                if logs is NO_LOGS:
                    return Provenance(freshness, unknown)
                interval = rows.second_min, rows.second_max
                hashes = rows.key_hash, rows.masked_hash
                replaced = self._replaced(rows)
                return logs.provenance(
                    freshness, unknown, rows.topic, *interval, *hashes, key=rows.key, replaced=replaced
                )
            case "item_type":
                return self._item_type
        raise AttributeError(name)

    def table(self, rows: ViewRows) -> pa.Table:
        """See `LaterFields.table`."""
        return self._form.table(rows.topic, self._rows(rows))

    def _rows(self, rows: ViewRows) -> Array:
        return np.frombuffer(rows.rows, self._schema.row)[: rows.max_count]

    def _replaced(self, rows: ViewRows) -> int:
        """Return the number of retired rows on the page."""
        if not (data := rows.retired):
            return 0
        retired = np.frombuffer(data, self._schema.row)
        ends = PageEnds(np.array([rows.has_more]), self._rows(rows)[-1:])
        return len(rows_of_pages([(np.zeros(len(retired), np.int64), retired)], ends, self._schema)[1])

    def _cursor(self, rows: ViewRows) -> str:
        arguments = rows.key, rows.topic, rows.second_min, rows.second_max
        return cursor_after(self._rows(rows), self._schema, *arguments)


def _unfailed(passes: Sequence[Pass[ScanT]]) -> Sequence[Pass[ScanT]]:
    """Return passes. Raises errors that fail the lookup, except a spent budget (see `_within_budget`)."""
    for index_pass in passes:
        if index_pass.scan.errors and index_pass.run.fails(index_pass.scan):
            error = _error([report_and_error for index_pass in passes for report_and_error in index_pass.errors])
            # break the cycle of error, traceback and frame, which would keep memory maps open
            for failed_pass in passes:
                failed_pass.scan.errors.clear()
            try:
                raise error
            finally:
                del error
    return passes


def _about(passes: Sequence[Pass[Any]]) -> About:
    """Return the freshness and the logs of the files of all passes."""
    parts = [index_pass.run.files.about for index_pass in passes]
    if len(parts) == 1:
        return parts[0]
    return tuple([seen for freshness, _ in parts for seen in freshness]), Logs.joined([logs for _, logs in parts])


def unknown_to_all(of_indexes: Sequence[tuple[str, ...] | None]) -> tuple[str, ...]:
    """Return the topics that no file of any index has. `of_indexes`: those of each (None: it has no file in range)."""
    unknown = [topics for topics in of_indexes if topics is not None]
    return tuple([topic for topic in unknown[0] if all(topic in topics for topics in unknown)]) if unknown else ()


def _explain(passes: Sequence[Pass[Any]], folded: int) -> Callable[[], Explain]:
    """Return a function that makes the `Explain` of passes. Cost besides files is that of the log."""
    budget = passes[0].run.budget
    # counted now, because an abandoned search may still make a request
    total, elapsed_ms = budget.spent(), (time.perf_counter() - budget.begun) * 1000
    # not the passes, which hold files
    noted = [
        (tuple(index_pass.scan.notes), index_pass.scan.viewed, index_pass.run.prices, index_pass.run.source)
        for index_pass in passes
    ]
    outdated = [report for index_pass in passes for report in index_pass.scan.outdated]
    return lambda: explained([*itertools.starmap(reports_of_pass, noted), outdated], total, elapsed_ms, folded)


def explained(parts: Sequence[Sequence[FileReport]], total: RequestStats, elapsed_ms: float, folded: int) -> Explain:
    """Return the `Explain` of the reports of indexes, with the cost of their logs if `total` is more than theirs."""
    reports = [report for part in parts for report in part]
    if len(reports) > 1:
        reports = sorted(reports, key=lambda r: (-r.end_ms, r.file))
    # in one pass, since most lookups read one file
    made_requests, read, cached, skipped = 0, 0, 0, 0
    for report in reports:
        made_requests += report.requests
        if report.outcome == "read":
            read += 1
            cached += report.place == "cache"
        elif report.outcome.startswith("skipped"):
            skipped += 1
    stats = RequestStats.of(*reports) if made_requests else NOTHING
    if total.requests > stats.requests:
        reports = [*reports, (total - stats).of_log()]
        stats = total
    return Explain.of(
        requests=stats.requests,
        bytes=stats.bytes,
        cost_usd=stats.cost_usd,
        elapsed_ms=elapsed_ms,
        files_read=read,
        files_cached=cached,
        files_skipped=skipped,
        folded_entries=folded,
        files=tuple(reports),
    )


def unknown_in(topics: Sequence[str], handles: Sequence[Handle], viewed: Noted | None = None) -> tuple[str, ...] | None:
    """Return the topics that no file and no view has. Empty if the topics of a file are not known.

    None: there is no file.
    """
    if viewed is not None and viewed.knows_topic:
        return ()
    if not handles and (viewed is None or not reports_of(viewed, _NO_PRICES)):
        return None
    unknown = tuple(topics)
    for handle in handles:
        if not unknown or (names := handle.known_topics) is None:
            return ()
        unknown = tuple([topic for topic in unknown if topic not in names])
    return unknown


def _summary(topic: str, before: TopicSummary | None, stats: TopicStats) -> TopicSummary:
    """Return the summary of a topic with the stats of one more file."""
    begin_ms, end_ms = stats.second_min * 1000, stats.second_max * 1000
    if before is None:
        return TopicSummary(
            topic=topic, entries=stats.entries, bytes_of_entries=stats.bytes, begin_ms=begin_ms, end_ms=end_ms
        )
    return TopicSummary(
        topic=topic,
        entries=before.entries + stats.entries,
        bytes_of_entries=before.bytes_of_entries + stats.bytes,
        begin_ms=min(before.begin_ms, begin_ms),
        end_ms=max(before.end_ms, end_ms),
    )


def _within_budget(passes: Sequence[Pass[Any]], result: R) -> R:
    """Return the answer, or raise `BudgetExceeded` with it if files were not read and it may not be partial."""
    if passes[0].run.allow_partial or not result.failed:
        return result
    errors = [report_and_error for index_pass in passes for report_and_error in index_pass.errors]
    over = [(report, error) for report, error in errors if not isinstance(error, FolderDenied)]
    if not over:
        return result
    report, error = over[0]
    left = len(over)
    files = f"{left} of the files it needed were" if left > 1 else f"{report.file} was"
    raise BudgetExceeded(
        f"{error}; {files} not read: allow_partial returns the rest", failed=result.failed, result=result
    ) from error


def _error(errors: Sequence[tuple[FileReport, TieredIndexError]]) -> TieredIndexError:
    """Return the error to raise: the first one if all are of one kind, otherwise a `PartialAnswer`."""
    hard = [(report, error) for report, error in errors if not isinstance(error, BudgetExceeded | FolderDenied)]
    first = hard[0][1]
    one_kind = all(type(error) is type(first) for _, error in hard)
    if one_kind or all(isinstance(error, StorageUnavailable) for _, error in hard):
        return first
    names = "; ".join(str(error) for _, error in hard)
    return PartialAnswer(f"{len(hard)} files could not be read: {names}", failed=tuple(report for report, _ in errors))
