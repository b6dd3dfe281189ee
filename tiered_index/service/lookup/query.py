"""Lookups over many files: prepare, search, and one deterministic answer with its cost and its missing files.

A file is skipped only when `max_count` answers are strictly newer than its greatest second, so the answer never depends
on which thread was faster. `scan` reads the files. A spent budget stops requests only: local files are still searched,
and `BudgetExceeded` carries the partial answer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from tiered_index.errors import BudgetExceeded, PartialAnswer, StorageUnavailable, TieredIndexError
from tiered_index.format.hashing import HASH_RULES, HashRule, lookup_numbers
from tiered_index.format.metadata import NamedStats, TopicStats
from tiered_index.format.schema import Schema
from tiered_index.kernels import compiled_views
from tiered_index.retention import NOTHING as NOTHING_EXPIRED
from tiered_index.retention import Expired
from tiered_index.service.answers.batch import Damage, LookupBatch, MatchAccumulator, best_answers
from tiered_index.service.answers.results import AnswerForm, QueryResults
from tiered_index.service.answers.rows import (
    AnswerRows,
    Array,
    OrderKey,
    PreparedLookup,
    check_key,
    check_range,
    check_schema,
    check_topic,
    decode_cursor,
    encode_cursor,
    order_key,
    query_digest,
)
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.cold.path import MissingObject
from tiered_index.service.files.view import About, BatchNotes, LocalView, Noted, Partly, reports_of
from tiered_index.service.log.records import LostObject
from tiered_index.service.lookup.budget import NOTHING, RequestStats, TopK, add_up
from tiered_index.service.lookup.scan import FileNote, FileReader, LookupRun, Scan
from tiered_index.storage.prices import PriceTable
from tiered_index.types import (
    MAX_KEY_UNITS,
    MAX_TIMESTAMP_MS,
    MAX_TOPIC_UNITS,
    Explain,
    FileReport,
    Freshness,
    IndexItem,
    Lookup,
    Provenance,
    QueryResult,
    TopicsResult,
    TopicSummary,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from tiered_index._views import Answers, ViewRows

# of a view that makes no requests
_NO_PRICES = PriceTable()
R = TypeVar("R", QueryResult[Any], QueryResults[Any], TopicsResult)


class Logs(NamedTuple):
    """The parts that answers lack by the logs of indexes, each with the URI of its index; None where one is read."""

    lost: Sequence[tuple[str | None, LostObject]] = ()
    expired: Sequence[tuple[str | None, Expired]] = ()

    @classmethod
    def of(cls, indexes: Iterable[tuple[str | None, Mapping[str, LostObject], Expired]]) -> Logs:
        """Return the record of what was given up, and what has expired, of each index."""
        told = [one for one in indexes if one[1] or (one[2] is not NOTHING_EXPIRED and one[2])]
        if not told:
            return NO_LOGS
        lost = [(source, one) for source, given_up, _ in told for one in given_up.values()]
        return cls(lost, [(source, gone) for source, _, gone in told if gone])

    def provenance(
        self,
        freshness: tuple[Freshness, ...],
        unknown_topics: tuple[str, ...],
        topic: str | None,
        second_min: int,
        second_max: int,
        *hashes: int,
    ) -> Provenance:
        """Return the provenance of an answer of inclusive epoch seconds: of `topic` and the hashes of a key, or of
        all topics and keys.
        """
        if not self.lost and not self.expired:
            return Provenance(freshness, unknown_topics)
        lost = [one.told(source) for source, one in self.lost if one.concerns(second_min, second_max, *hashes)]
        times = [one.latest_ms if topic is None else one.before_ms(topic) for _, one in self.expired]
        # of several indexes the latest; 0: nothing has expired, though entries may be older than the epoch
        expired_before_ms = max([ms for ms in times if ms and ms // 1000 > second_min], default=None)
        return Provenance(freshness, unknown_topics, tuple(lost), expired_before_ms)


NO_LOGS = Logs()


@dataclass(eq=False)
class QueryEngine:
    """Runs lookups over handles of one index, or of several (`sources`: names by number). Safe under threads."""

    schema: Schema
    item_type: type[IndexItem]
    threads: int
    prices: PriceTable
    sources: Mapping[int, str] | None = None
    # asked after the handles, which show no later record of a log than this
    logs: Callable[[], Logs] = lambda: NO_LOGS

    def __post_init__(self) -> None:
        self.form = AnswerForm(self.schema, self.item_type, self.sources)
        self._files = FileReader(self.threads, self.prices)
        # entries that lookups folded though their content differs, counted at each lookup
        self.folded = 0
        self._counted: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        # of lookups that one view answers whole; None: the compiled core is missing
        self.plain: Answers | None = None
        if (core := compiled_views()) is not None:
            fields = ViewFields(self.schema, self.form, self.item_type, self.prices)
            bounds = MAX_TOPIC_UNITS // 2, MAX_KEY_UNITS // 2, MAX_TIMESTAMP_MS
            self.plain = core.Answers(QueryResult, fields, *bounds)

    def read_of(self, sources: Mapping[int, str]) -> None:
        """Answer of these indexes from now on; call it before their files are seen."""
        self.form = AnswerForm(self.schema, self.item_type, sources)
        self.sources = sources

    def order_key(self, item: IndexItem) -> OrderKey:
        """Return where an entry that was answered is in the order."""
        more: list[int] = []
        names = self.schema.identity_extra
        if self.sources is not None:
            names = names[:-1]
            more = [number for number, source in self.sources.items() if source == item.source]
        return (
            item.timestamp_ms // 1000,
            item.offset,
            item.queue_id,
            *(int(getattr(item, name)) for name in names),
            *more,
        )

    def close(self, until_s: float | None = None) -> None:
        """As `FileReader.close`."""
        self._files.close(until_s)

    def prepare(
        self, topic: str, key: str, begin_ms: int | None, end_ms: int | None, max_count: int, cursor: str | None
    ) -> PreparedLookup:
        """Return the validated lookup. Raises `InvalidArgument`, `InvalidCursor`."""
        check_topic(topic)
        check_key(key)
        second_min, second_max, max_count = check_range(begin_ms, end_ms, max_count)
        after = None
        if cursor is not None:
            digest = query_digest(topic, key, second_min, second_max)
            after = decode_cursor(cursor, digest, 3 + len(self.schema.identity_extra))
        return PreparedLookup(topic, key, *lookup_numbers(topic, key), second_min, second_max, max_count, after)

    def query(self, run: LookupRun, lookup: PreparedLookup, elsewhere: RequestStats = NOTHING) -> QueryResult[Any]:
        """Answer one lookup; `elsewhere` is spent already. Errors as `IndexService.query`."""
        started = time.perf_counter()
        top = TopK(self.schema, lookup.max_count)
        # by index and hash rule, where something has expired
        kept: dict[tuple[str | None, HashRule], list[PreparedLookup]] = {}

        def look(handle: Handle) -> int:
            matched = 0
            for one in kept.get((handle.source, handle.hash)) or lookup.under(handle.hash):
                if one.second_min > one.second_max:
                    continue
                rows = handle.search(one)
                if len(rows):
                    check_schema(rows, self.schema, handle.file_id)
                    if one.key_hash != lookup.key_hash:
                        rows["key_hash"] = lookup.key_hash
                    matched += top.add(rows)
            return matched

        def excludes(handle: Handle) -> str | None:
            first, *more = lookup.under(handle.hash)
            reason = handle.excludes(first)
            return reason if not more or all(map(handle.excludes, more)) else None

        # what is newer than the cursor was answered on the pages before
        newest = lookup.second_max if lookup.after is None else min(lookup.second_max, lookup.after[0])
        files, viewed = run.files, None
        handles, view = files.viewed(lookup.second_min, lookup.second_max)
        logs = self.logs()
        if view is not None and not logs.expired and (viewed := view.find(lookup)) is not None:
            handles = [*handles, *view.left(viewed)]
            top.add(np.frombuffer(viewed.rows, self.schema.row))
            top.skipped = viewed.skipped
        else:
            handles = files.handles(lookup.second_min, newest)
            logs = self.logs()
            for source, gone in logs.expired:
                for rule in HASH_RULES:
                    kept[source, rule] = [one.without(gone) for one in lookup.under(rule)]
        scan = Scan(look, excludes, top, newest)
        self._read(run, scan, handles)
        rows, more = top.answers()
        failed = tuple([report for report, _ in scan.errors])
        unknown = () if len(rows) or lookup.after is not None else _unknown((lookup.topic,), handles, viewed)
        last = order_key(rows[-1], self.schema) if more and len(rows) else lookup.after
        cursor = None
        if more and last is not None:
            cursor = encode_cursor(last, query_digest(lookup.topic, lookup.key, lookup.second_min, lookup.second_max))
        told = _explain(run, scan, started, elsewhere, top.folded and self._fold(top.folded), viewed)
        freshness = files.seen(handles)
        seen = Provenance(freshness, unknown)
        if logs is not NO_LOGS:
            asked = lookup.second_min, lookup.second_max, lookup.key_hash, lookup.masked_hash
            seen = logs.provenance(freshness, unknown, lookup.topic, *asked)
        result: QueryResult[Any] = AnswerRows(lookup.topic, rows, self.form, told).result(
            status="partial" if failed else "truncated" if more else "complete",
            cursor=cursor,
            failed=failed,
            seen=seen,
            item_type=self.item_type,
        )
        return _within_budget(run, scan, result)

    def page(self, view: LocalView, about: About, lookup: PreparedLookup) -> QueryResult[Any] | None:
        """Answer a lookup whose files one view has whole; None: the caller has to search some of them."""
        found = view.find(lookup)
        if self.plain is None or found is None or found.has_left:
            return None
        return self.plain.answer(found, lookup.key, lookup.second_max, about)  # type: ignore[no-any-return]

    def query_many(self, run: LookupRun, lookups: Sequence[Lookup]) -> QueryResults[Any]:
        """Answer many lookups; arguments and errors as `query`. No file is skipped for the answers of others."""
        started = time.perf_counter()
        files = run.files
        batch = LookupBatch(lookups, allow_partial=run.allow_partial)
        matches = MatchAccumulator(batch, self.schema)
        # by file, where only some lookups need what could not be read of it
        lacking: dict[tuple[str | None, str], set[int]] = {}
        kept: dict[tuple[str | None, HashRule], list[LookupBatch]] = {}
        # of files that a view has searched for the other lookups
        partly: dict[int, Partly] = {}

        def look(handle: Handle) -> int:
            damage: list[Damage] = []
            some, matched = partly.get(id(handle), (None, 0))
            asked = batch if some is None else batch.only(some)
            for one in kept.get((handle.source, handle.hash)) or asked.under(handle.hash):
                found = handle.search_many(one)
                if len(found.rows):
                    check_schema(found.rows, self.schema, handle.file_id)
                    if one.key_hash is not batch.key_hash:
                        found.rows["key_hash"] = batch.key_hash[found.lookups]
                    matches.add(found)
                matched += len(found.rows)
                damage += found.damage
            if damage:
                lacking[handle.source, handle.file_id] = {at for places, _ in damage for at in places.tolist()}
                # the log tells whether a missing object was removed or lost, so this error comes first
                raise min([error for _, error in damage], key=lambda error: not isinstance(error, MissingObject))
            return matched

        def excludes(handle: Handle) -> str | None:
            reasons = [handle.excludes_all(one) for one in batch.under(handle.hash)]
            return reasons[0] if all(reasons) else None

        # a lookup with a cursor is answered by itself
        pages, short = self._pages(run, {number: lookups[number] for number in batch.continued})
        scan = Scan(look, excludes)
        handles: Sequence[Handle] = ()
        noted: BatchNotes | None = None
        logs = NO_LOGS
        if len(lookups) > len(pages):
            within = int(batch.second_min.min()), int(batch.second_max.max())
            # a call of the core has no deadline
            beside, view = ((), None) if run.is_timed else files.viewed(*within)
            logs = self.logs()
            if view is None or logs.expired:
                handles = needed = files.handles(*within)
                logs = self.logs()
                for source, gone in logs.expired:
                    # of all rules: what takes the place of an object that is gone may have another one
                    for rule in HASH_RULES:
                        kept[source, rule] = [one.without(gone) for one in batch.under(rule)]
            else:
                viewed = view.find_many(batch, self._files.in_parts)
                noted = viewed.noted
                for found in viewed.matches:
                    matches.add(found)
                partly = {id(viewed.left[place]): some for place, some in viewed.partly.items()}
                handles, needed = [*beside, *viewed.seen], [*beside, *viewed.left]
            self._read(run, scan, needed)
        rows, starts, more = best_answers(batch, [matches.found()], self.schema, matches.fold)
        alone = [page.explain for page in pages.values()]
        told = _explain(run, scan, started, RequestStats.of(*alone), self._fold(matches.folded), noted)

        def explain() -> Explain:
            found = told()
            return add_up([found, *alone], (), found.elapsed_ms) if alone else found

        results = QueryResults(
            batch=batch,
            rows=rows,
            starts=starts,
            more=more,
            failed=tuple([report for report, _ in scan.errors]),
            told=explain,
            freshness=files.seen(handles),
            unknown=frozenset(_unknown(batch.topics, handles)),
            schema=self.schema,
            form=self.form,
            pages=pages,
            provenance=None if logs is NO_LOGS else logs.provenance,
            lacking=lacking,
        )
        if short is not None and not scan.errors:
            raise BudgetExceeded(str(short), failed=results.failed, result=results) from short
        return _within_budget(run, scan, results)

    def _pages(
        self, run: LookupRun, lookups: Mapping[int, Lookup]
    ) -> tuple[dict[int, QueryResult[Any]], BudgetExceeded | None]:
        """Return the answers of lookups, one by one, and the first one's error that the budget did not reach for."""
        pages: dict[int, QueryResult[Any]] = {}
        short: BudgetExceeded | None = None
        for number, one in lookups.items():
            elsewhere = RequestStats.of(*(page.explain for page in pages.values()))
            asked = self.prepare(one.topic, one.key, one.begin_ms, one.end_ms, one.max_count, one.cursor)
            try:
                pages[number] = self.query(run, asked, elsewhere)
            except BudgetExceeded as error:
                if not isinstance(error.result, QueryResult):
                    raise
                short = short or error
                pages[number] = error.result
        return pages, short

    def topics(self, run: LookupRun, handles: Sequence[Handle], second_min: int, second_max: int) -> TopicsResult:
        """List the topics of files that overlap the inclusive epoch seconds; errors as `query`."""
        started = time.perf_counter()
        logs = self.logs()
        expired = dict(logs.expired)
        sums: dict[str, TopicSummary] = {}
        adding = threading.Lock()

        def look(handle: Handle) -> int:
            of_topics: dict[str, list[TopicStats | None]] = {}
            gone = expired.get(handle.source, NOTHING_EXPIRED)
            for name, stats in handle.topic_stats():
                if stats is None or stats.second_max >= gone.begin_of(name):
                    of_topics.setdefault(name, []).append(stats)
            with adding:
                for name, several in of_topics.items():
                    sums[name] = _summary(sums.get(name, TopicSummary(topic=name)), several)
            return len(of_topics)

        scan = Scan(look)
        self._read(run, scan, handles)
        failed = tuple([report for report, _ in scan.errors])
        result = TopicsResult(
            topics=tuple(sums[name] for name in sorted(sums)),
            status="partial" if failed else "complete",
            failed=failed,
            explain=_explain(run, scan, started, NOTHING, 0)(),
            seen=logs.provenance(run.files.seen(handles), (), None, second_min, second_max),
        )
        return _within_budget(run, scan, result)

    def file_stats(self, run: LookupRun, handles: Sequence[Handle]) -> list[tuple[Handle, NamedStats]]:
        """Return what each file holds of each topic; errors as `query`."""
        found: list[tuple[Handle, NamedStats]] = []

        def look(handle: Handle) -> int:
            found.append((handle, handle.topic_stats()))
            return 1

        self._read(run, Scan(look), handles)
        return found

    def count(self, kind: str, status: str) -> None:
        """Count a lookup that has ended."""
        with self._lock:
            self._counted[kind, status] += 1

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how many lookups have ended, by kind and status."""
        with self._lock:
            counted = self._counted.copy()
        if self.plain is not None:
            counted.update({("query", "complete"): self.plain.complete, ("query", "truncated"): self.plain.truncated})
        # without statuses that there were none of
        return +counted

    def _fold(self, count: int) -> int:
        if count:
            with self._lock:
                self.folded += count
        return count

    def _read(self, run: LookupRun, scan: Scan, handles: Sequence[Handle]) -> None:
        """Search the handles; raise what can't be passed over, except a spent budget (see `_within_budget`)."""
        self._files.read(run, scan, handles)
        if scan.errors:
            run.resolve(scan)
        if scan.errors and run.fails(scan):
            error = _error(scan)
            # an error that is kept by a frame of its own trace keeps all that the frames name, maps among it
            scan.errors.clear()
            try:
                raise error
            finally:
                del error


class ViewFields:
    """Makes the fields of answers that one view has whole, when they are looked at. Their `about` is an `About`."""

    def __init__(self, schema: Schema, form: AnswerForm, item_type: type[IndexItem], prices: PriceTable) -> None:
        self._schema, self._form, self._item_type, self._prices = schema, form, item_type, prices

    def field(self, found: ViewRows, name: str) -> Any:
        """As `LaterFields.field`."""
        match name:
            case "items":
                form = self._form
                return found.items(form.item_type) if form.is_plain else form.items(found.topic, self._rows(found))
            case "status":
                return "truncated" if found.has_more else "complete"
            case "cursor":
                return self._cursor(found) if found.has_more else None
            case "failed":
                return ()
            case "explain":
                return _explained((), (), NOTHING, found.elapsed_ms, 0, found, self._prices)
            case "seen":
                freshness, lost = found.about
                unknown = () if found.knows_topic or len(found) else _unknown((found.topic,), (), found)
                interval = found.second_min, found.second_max
                return Logs(lost).provenance(freshness, unknown, None, *interval, found.key_hash, found.masked_hash)
            case "item_type":
                return self._item_type
        raise AttributeError(name)

    def table(self, found: ViewRows) -> pa.Table:
        """As `LaterFields.table`."""
        return self._form.table(found.topic, self._rows(found))

    def _rows(self, found: ViewRows) -> Array:
        return np.frombuffer(found.rows, self._schema.row)[: found.max_count]

    def _cursor(self, found: ViewRows) -> str:
        digest = query_digest(found.topic, found.key, found.second_min, found.second_max)
        return encode_cursor(order_key(self._rows(found)[-1], self._schema), digest)


def _explain(
    run: LookupRun, scan: Scan, started: float, elsewhere: RequestStats, folded: int, viewed: Noted | None = None
) -> Callable[[], Explain]:
    """Return what tells what a pass did since `started`; what it spent beyond files and `elsewhere` went to the log."""
    # counted now: a search that was given up may still make a request
    total, elapsed_s = run.spent() - elsewhere, time.perf_counter() - started
    return partial(_explained, tuple(scan.notes), scan.outdated, total, elapsed_s * 1000, folded, viewed)


def _explained(
    notes: Sequence[FileNote],
    outdated: Sequence[FileReport],
    total: RequestStats,
    elapsed_ms: float,
    folded: int,
    viewed: Noted | None = None,
    prices: PriceTable = _NO_PRICES,
) -> Explain:
    reports = [*(note() for note in notes), *outdated]
    if viewed is not None:
        reports += reports_of(viewed, prices)
    if len(reports) > 1:
        reports = sorted(reports, key=lambda r: (-r.end_ms, r.file))
    stats = RequestStats.of(*reports)
    if total.requests > stats.requests:
        reports = [*reports, (total - stats).of_log()]
        stats = total
    return Explain(
        requests=stats.requests,
        bytes=stats.bytes,
        cost_usd=stats.cost_usd,
        elapsed_ms=elapsed_ms,
        files_read=sum([report.outcome == "read" for report in reports]),
        files_skipped=sum([report.outcome.startswith("skipped") for report in reports]),
        folded_entries=folded,
        files=tuple(reports),
    )


def _unknown(topics: Sequence[str], handles: Sequence[Handle], viewed: Noted | None = None) -> tuple[str, ...]:
    """Return which of the topics none of the files has, nor a view; none where the topics of a file are not known."""
    if viewed is not None and (viewed.knows_topic or (not handles and not reports_of(viewed, _NO_PRICES))):
        return ()
    unknown = tuple(topics) if handles or viewed is not None else ()
    for handle in handles:
        if not unknown or (names := handle.known_topics) is None:
            return ()
        unknown = tuple([topic for topic in unknown if topic not in names])
    return unknown


def _summary(before: TopicSummary, stats: Sequence[TopicStats | None]) -> TopicSummary:
    """Return a topic's summary with what one more file, of several ids or shards, says of it."""
    said = [one for one in stats if one is not None]
    begins = [one.second_min * 1000 for one in said] + [ms for ms in (before.begin_ms,) if ms is not None]
    ends = [one.second_max * 1000 for one in said] + [ms for ms in (before.end_ms,) if ms is not None]
    return TopicSummary(
        topic=before.topic,
        entries=before.entries + sum(one.entries for one in said),
        bytes=before.bytes + sum(one.bytes for one in said),
        begin_ms=min(begins, default=None),
        end_ms=max(ends, default=None),
        uncounted_files=before.uncounted_files + (len(said) < len(stats)),
    )


def _within_budget(run: LookupRun, scan: Scan, result: R) -> R:
    """Return the answer; raise `BudgetExceeded` with it where the budget was spent and partial answers are refused."""
    if not scan.errors or run.allow_partial:
        return result
    report, error = scan.errors[0]
    left = len(scan.errors)
    files = f"{left} of the files it needed were" if left > 1 else f"{report.file} was"
    raise BudgetExceeded(f"{error}; {files} not read", failed=result.failed, result=result) from error


def _error(scan: Scan) -> TieredIndexError:
    """Return what to raise: the one error where there is one kind, so that the caller's next action is clear."""
    hard = [(report, error) for report, error in scan.errors if not isinstance(error, BudgetExceeded)]
    first = hard[0][1]
    one_kind = all(type(error) is type(first) for _, error in hard)
    if one_kind or all(isinstance(error, StorageUnavailable) for _, error in hard):
        return first
    names = "; ".join(str(error) for _, error in hard)
    return PartialAnswer(
        f"{len(hard)} files could not be read: {names}", failed=tuple(report for report, _ in scan.errors)
    )
