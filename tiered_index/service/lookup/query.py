"""Lookups over many files: prepare, search, and make one deterministic answer with its cost and missing files.

A file is skipped only if `max_count` answers are strictly newer than its greatest second. So the answer does not depend
on the order of threads. `scan` reads the files. A spent budget only stops requests: local files are still searched, and
`BudgetExceeded` has the partial answer.
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
from tiered_index.service.files.view import Noted, Partly, WholeView, reports_of
from tiered_index.service.log.records import LostObject
from tiered_index.service.lookup.budget import NOTHING, RequestStats, TopK, add_up
from tiered_index.service.lookup.scan import FileNote, FileReader, Indexes, LookupRun, Scan, reports_of_pass
from tiered_index.spelling import is_plain, other_spellings
from tiered_index.storage.context import UNBOUNDED, request_context
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
    freshness_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from tiered_index._views import Answers, ViewRows

# for a view, which makes no requests
_NO_PRICES = PriceTable()
A = TypeVar("A", PreparedLookup, LookupBatch)
Kept = dict[tuple[str | None, HashRule], list[A]]
"""The lookups by index and hash rule, if an index has expired entries."""
R = TypeVar("R", QueryResult[Any], QueryResults[Any], TopicsResult)


class Logs(NamedTuple):
    """Lost objects and expired entries by the logs of indexes, with the URI of each index (None: only one index)."""

    lost: Sequence[tuple[str | None, LostObject]] = ()
    expired: Sequence[tuple[str | None, Expired]] = ()

    @classmethod
    def of(cls, indexes: Iterable[tuple[str | None, Mapping[str, LostObject], Expired]]) -> Logs:
        """Make it from the URI, the lost objects and the expired entries of each index."""
        told = [one for one in indexes if one[1] or (one[2] is not NOTHING_EXPIRED and one[2])]
        if not told:
            return NO_LOGS
        lost = [(source, one) for source, given_up, _ in told for one in given_up.values()]
        return cls(lost, [(source, gone) for source, _, gone in told if gone])

    def kept(self, asked: A) -> Kept[A]:
        """Return lookups without expired entries."""
        # for all rules, because an object that replaces a removed one may have another rule
        return {
            (source, rule): [one.without(gone) for one in asked.under(rule)]
            for source, gone in self.expired
            for rule in HASH_RULES
        }

    def provenance(
        self,
        freshness: tuple[Freshness, ...],
        unknown_topics: tuple[str, ...],
        topic: str | None,
        second_min: int,
        second_max: int,
        *hashes: int,
    ) -> Provenance:
        """Return the provenance of an answer for inclusive epoch seconds.

        It is for `topic` and the hashes of a key, or for all topics (None) and keys (no hashes).
        """
        if not self.lost and not self.expired:
            return Provenance(freshness, unknown_topics)
        asked = second_min, second_max, *hashes
        lost = [one.told(source) for source, one in self.lost if one.concerns(*asked, topic=topic)]
        times = [one.latest_ms if topic is None else one.before_ms(topic) for _, one in self.expired]
        # the latest of several indexes; 0 means that nothing has expired, because entries may be older than the epoch
        expired_before_ms = max([ms for ms in times if ms and ms // 1000 > second_min], default=None)
        return Provenance(freshness, unknown_topics, tuple(lost), expired_before_ms)


NO_LOGS = Logs()


@dataclass(eq=False)
class QueryEngine:
    """Runs lookups over handles of one index, or of several `indexes` (`sources`: names by number). Any thread."""

    schema: Schema
    item_type: type[IndexItem]
    threads: int
    prices: PriceTable
    sources: Mapping[int, str] | None = None
    indexes: Indexes | None = None
    # called after the handles are read, so that its state is not earlier than theirs
    logs: Callable[[], Logs] = lambda: NO_LOGS

    def __post_init__(self) -> None:
        self.form = AnswerForm(self.schema, self.item_type, self.sources)
        self._files = FileReader(self.threads, self.prices, self.indexes)
        # number of entries that lookups folded although their content differs, counted for each lookup
        self.folded = 0
        self._counted: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        # answers lookups that need only a view; None: there is no compiled core
        self.plain: Answers | None = None
        if (core := compiled_views()) is not None:
            fields = ViewFields(self.schema, self.form, self.item_type, self.prices)
            bounds = MAX_TOPIC_UNITS // 2, MAX_KEY_UNITS // 2, MAX_TIMESTAMP_MS
            self.plain = core.Answers(QueryResult, fields, *bounds)

    def read_of(self, sources: Mapping[int, str]) -> None:
        """Set the indexes by number. Call it before lookups see files of a new one."""
        self.form = AnswerForm(self.schema, self.item_type, sources)
        self.sources = sources

    def order_key(self, item: IndexItem) -> OrderKey:
        """Return the order key of an entry of an answer."""
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
        """See `FileReader.close`."""
        self._files.close(until_s)

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
            after = decode_cursor(cursor, digest, 3 + len(self.schema.identity_extra))
        first, *others = [
            PreparedLookup(topic, each, *lookup_numbers(topic, each), second_min, second_max, max_count, after)
            for each in ((key,) if is_plain(key) else (key, *other_spellings(key)))
        ]
        return first._replace(others=tuple(others)) if others else first

    def query(self, run: LookupRun, lookup: PreparedLookup, elsewhere: RequestStats = NOTHING) -> QueryResult[Any]:
        """Answer one lookup. `elsewhere` is the cost before it. Raises the errors of `IndexService.query`."""
        started = time.perf_counter()
        top = TopK(self.schema, lookup.max_count)
        kept: Kept[PreparedLookup] = {}

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
                    if self.schema.keyed and one.fingerprint != lookup.fingerprint:
                        rows["fingerprint"] = lookup.fingerprint
                    matched += top.add(rows)
            return matched

        def excludes(handle: Handle) -> str | None:
            first, *more = lookup.under(handle.hash)
            reason = handle.excludes(first)
            return reason if not more or all(map(handle.excludes, more)) else None

        # entries newer than the cursor are on earlier pages
        newest = lookup.second_max if lookup.after is None else min(lookup.second_max, lookup.after[0])
        files, viewed = run.files, None
        handles, view = files.viewed(lookup.second_min, lookup.second_max, False)
        logs = self.logs()
        is_in_view = not (logs.expired or lookup.others)
        if view is not None and is_in_view and (viewed := view.find(lookup)) is not None:
            handles = [*handles, *view.left(viewed)]
            top.add(np.frombuffer(viewed.rows, self.schema.row))
            top.skipped = viewed.skipped
        else:
            handles = files.handles(lookup.second_min, newest)
            logs = self.logs()
            kept = logs.kept(lookup)
        scan = Scan(look, excludes, top, newest, viewed=viewed)
        self._read(run, scan, handles)
        rows, more = top.answers()
        failed = tuple([report for report, _ in scan.errors])
        unknown = () if len(rows) or lookup.after is not None else _unknown((lookup.topic,), handles, viewed)
        last = order_key(rows[-1], self.schema) if more and len(rows) else lookup.after
        cursor = None
        if more and last is not None:
            cursor = encode_cursor(last, query_digest(lookup.topic, lookup.key, lookup.second_min, lookup.second_max))
        told = _explain(run, scan, started, elsewhere, top.folded and self._fold(top.folded))
        freshness = freshness_of(files.seen(handles), (lookup.topic,))
        seen = Provenance(freshness, unknown)
        if logs is not NO_LOGS:
            hashes = [each for one in (lookup, *lookup.others) for each in (one.key_hash, one.masked_hash)]
            seen = logs.provenance(freshness, unknown, lookup.topic, lookup.second_min, lookup.second_max, *hashes)
        result: QueryResult[Any] = AnswerRows(lookup.topic, rows, self.form, told).result(
            status="partial" if failed else "truncated" if more else "complete",
            cursor=cursor,
            failed=failed,
            seen=seen,
            item_type=self.item_type,
        )
        return _within_budget(run, scan, result)

    def page(self, whole: WholeView, lookup: PreparedLookup) -> QueryResult[Any] | None:
        """Answer a lookup from a view. None: the caller has to search some files."""
        if lookup.others:
            return None
        view, about, has_topics = whole
        found = view.find(lookup)
        if self.plain is None or found is None or found.has_left:
            return None
        return self.plain.answer(  # type: ignore[no-any-return]
            found, lookup.key, lookup.second_max, about, has_topics
        )

    def query_many(self, run: LookupRun, lookups: Sequence[Lookup]) -> QueryResults[Any]:
        """Answer many lookups. Raises the errors of `query`. Unlike for `query`, newer answers don't skip files."""
        started = time.perf_counter()
        files = run.files
        batch = LookupBatch(lookups, allow_partial=run.allow_partial)
        matches = MatchAccumulator(batch, self.schema)
        # by file: the lookups that need its unreadable parts
        lacking: dict[tuple[str | None, str], set[int]] = {}
        kept: Kept[LookupBatch] = {}
        # files that a view has searched for some of the lookups
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
                    if self.schema.keyed and one.fingerprint is not batch.fingerprint:
                        found.rows["fingerprint"] = batch.fingerprint[found.lookups]
                    matches.add(found)
                matched += len(found.rows)
                damage += found.damage
            if damage:
                lacking[handle.source, handle.file_id] = {at for places, _ in damage for at in places.tolist()}
                # a missing object first, because the log has to be read for it
                raise min([error for _, error in damage], key=lambda error: not isinstance(error, MissingObject))
            return matched

        def excludes(handle: Handle) -> str | None:
            reasons = [handle.excludes_all(one) for one in batch.under(handle.hash)]
            return reasons[0] if all(reasons) else None

        # lookups with a cursor are answered one by one
        pages, short = self._pages(run, {number: lookups[number] for number in batch.continued})
        scan = Scan(look, excludes)
        handles: Sequence[Handle] = ()
        logs = NO_LOGS
        if len(lookups) > len(pages):
            within = int(batch.second_min.min()), int(batch.second_max.max())
            # the core neither counts requests nor bounds them, and has no deadline
            stored = run.budget is None and request_context.get() is UNBOUNDED
            beside, view = ((), None) if run.is_timed else files.viewed(*within, stored)
            logs = self.logs()
            if view is None or logs.expired or batch.others:
                handles = needed = files.handles(*within)
                logs = self.logs()
                kept = logs.kept(batch)
            else:
                viewed = view.find_many(batch, self._files.in_parts, stored=stored)
                scan.viewed = viewed.noted
                for found in viewed.matches:
                    matches.add(found)
                partly = {id(viewed.left[place]): some for place, some in viewed.partly.items()}
                handles, needed = [*beside, *viewed.seen], [*beside, *viewed.left]
            self._read(run, scan, needed)
        rows, starts, more = best_answers(batch, [matches.found()], self.schema, matches.fold)
        alone = [page.explain for page in pages.values()]
        told = _explain(run, scan, started, RequestStats.of(*alone), self._fold(matches.folded))

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
        """Return the answers of lookups, one by one, and the first budget error."""
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
        """Return the topics of files that overlap the inclusive epoch seconds. Raises the errors of `query`."""
        started = time.perf_counter()
        logs = self.logs()
        expired = dict(logs.expired)
        sums: dict[str, TopicSummary] = {}
        adding = threading.Lock()

        def look(handle: Handle) -> int:
            of_topics: dict[str, list[TopicStats | None]] = {}
            gone = expired.get(handle.source, NOTHING_EXPIRED)
            for name, stats in handle.topic_stats():
                begin_s = max(second_min, gone.begin_of(name))
                if stats is None or (stats.second_max >= begin_s and stats.second_min <= second_max):
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
            seen=logs.provenance(freshness_of(run.files.seen(handles), sums), (), None, second_min, second_max),
        )
        return _within_budget(run, scan, result)

    def file_stats(self, run: LookupRun, handles: Sequence[Handle]) -> list[tuple[Handle, NamedStats]]:
        """Return the topic stats of each file. Raises the errors of `query`."""
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

    def _read(self, run: LookupRun, scan: Scan, handles: Sequence[Handle]) -> None:
        """Search the handles. Raises errors that fail the lookup, except a spent budget (see `_within_budget`)."""
        self._files.read(run, scan, handles)
        if scan.errors:
            run.resolve(scan)
        if scan.errors and run.fails(scan):
            error = _error(scan)
            # break the cycle of error, traceback and frame, which would keep memory maps open
            scan.errors.clear()
            try:
                raise error
            finally:
                del error


class ViewFields:
    """Makes the fields of answers of a view on first access. Their `about` is an `About`."""

    def __init__(self, schema: Schema, form: AnswerForm, item_type: type[IndexItem], prices: PriceTable) -> None:
        self._schema, self._form, self._item_type, self._prices = schema, form, item_type, prices
        self.plain_items = form.in_core

    def field(self, found: ViewRows, name: str) -> Any:
        """See `LaterFields.field`."""
        match name:
            case "items":
                return self._form.items(found.topic, self._rows(found))
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
                freshness = freshness_of(freshness, (found.topic,))
                unknown = () if found.knows_topic or len(found) else _unknown((found.topic,), (), found)
                interval = found.second_min, found.second_max
                hashes = found.key_hash, found.masked_hash
                return Logs(lost).provenance(freshness, unknown, found.topic, *interval, *hashes)
            case "item_type":
                return self._item_type
        raise AttributeError(name)

    def table(self, found: ViewRows) -> pa.Table:
        """See `LaterFields.table`."""
        return self._form.table(found.topic, self._rows(found))

    def _rows(self, found: ViewRows) -> Array:
        return np.frombuffer(found.rows, self._schema.row)[: found.max_count]

    def _cursor(self, found: ViewRows) -> str:
        digest = query_digest(found.topic, found.key, found.second_min, found.second_max)
        return encode_cursor(order_key(self._rows(found)[-1], self._schema), digest)


def _explain(run: LookupRun, scan: Scan, started: float, elsewhere: RequestStats, folded: int) -> Callable[[], Explain]:
    """Return a function that makes the `Explain` of a pass. Cost besides files and `elsewhere` is that of the log."""
    # counted now, because an abandoned search may still make a request
    total, elapsed_s = run.spent() - elsewhere, time.perf_counter() - started
    return partial(
        _explained, tuple(scan.notes), scan.outdated, total, elapsed_s * 1000, folded, scan.viewed, run.prices
    )


def _explained(
    notes: Sequence[FileNote],
    outdated: Sequence[FileReport],
    total: RequestStats,
    elapsed_ms: float,
    folded: int,
    viewed: Noted | None = None,
    prices: PriceTable = _NO_PRICES,
) -> Explain:
    reports = [*reports_of_pass(notes, viewed, prices), *outdated]
    if viewed is not None and viewed.spent_by:
        # no usage has the reads of the core
        reads, sizes = (sum(each) for each in zip(*viewed.spent_by.values(), strict=True))
        total = RequestStats.of(total, RequestStats(reads, sizes, prices.cost_usd({"get_range": reads}, sizes)))
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
    """Return the topics that no file and no view has. Empty if the topics of a file are not known."""
    if viewed is not None and (viewed.knows_topic or (not handles and not reports_of(viewed, _NO_PRICES))):
        return ()
    unknown = tuple(topics) if handles or viewed is not None else ()
    for handle in handles:
        if not unknown or (names := handle.known_topics) is None:
            return ()
        unknown = tuple([topic for topic in unknown if topic not in names])
    return unknown


def _summary(before: TopicSummary, stats: Sequence[TopicStats | None]) -> TopicSummary:
    """Add one more file to a topic's summary. `stats` are those of its ids or shards."""
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
    """Return the answer, or raise `BudgetExceeded` with it if files were not read and it may not be partial."""
    if not scan.errors or run.allow_partial:
        return result
    report, error = scan.errors[0]
    left = len(scan.errors)
    files = f"{left} of the files it needed were" if left > 1 else f"{report.file} was"
    raise BudgetExceeded(
        f"{error}; {files} not read: allow_partial returns the rest", failed=result.failed, result=result
    ) from error


def _error(scan: Scan) -> TieredIndexError:
    """Return the error to raise: the first one if all are of one kind, otherwise a `PartialAnswer`."""
    hard = [(report, error) for report, error in scan.errors if not isinstance(error, BudgetExceeded)]
    first = hard[0][1]
    one_kind = all(type(error) is type(first) for _, error in hard)
    if one_kind or all(isinstance(error, StorageUnavailable) for _, error in hard):
        return first
    names = "; ".join(str(error) for _, error in hard)
    return PartialAnswer(
        f"{len(hard)} files could not be read: {names}", failed=tuple(report for report, _ in scan.errors)
    )
