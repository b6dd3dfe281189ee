"""Queries: many files read in parallel under one thread-safe budget, one deterministic answer.

Files are taken newest first (by greatest second). What is local is searched at once in the caller's thread, what lies in the storage by a
pool with a bounded number of searches in flight. A file is skipped only when `max_count` answers are strictly newer than its greatest
second, so the answer never depends on which thread was faster.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

from tiered_index.errors import CorruptFile, InvalidArgument, PartialAnswer, StorageUnavailable, TieredIndexError
from tiered_index.format.hashing import fingerprint, key_hash
from tiered_index.format.schema import Schema
from tiered_index.service.batch_query import Found, QueryResults, QuestionBatch, TooManyPairs, best_answers
from tiered_index.service.catalog import Catalog, Handle
from tiered_index.service.compacted_file import MissingObject
from tiered_index.service.cursor import decode_cursor, encode_cursor, query_digest
from tiered_index.service.log_records import LogState
from tiered_index.service.rows import Array, OrderKey, Question, check_schema, concatenate, first_answers, item_maker, order_key
from tiered_index.service.validation import check_key, check_range, check_topic
from tiered_index.storage.wrappers import MeteredStorage, Usage
from tiered_index.types import Explain, FileReport, IndexItem, Lookup, QueryResult

__all__ = ["LOG_RETRIES", "AnswerBudget", "Handles", "QueryEngine", "ask", "past_lost_objects"]

Handles = Callable[[int, int], Sequence[Handle]]
"""What may hold answers in an inclusive range of epoch seconds."""
_NEVER_STORED = frozenset(("buffer", "unsealed", "compacted"))
# places of which no byte lies in the storage, so nothing needs to be metered
LOG_RETRIES = 100
"""How often a lookup is begun again because objects vanish; each time the log has moved on or one more object is known to be lost."""


def ask(
    schema: Schema, topic: str, key: str, begin_ms: int | None, end_ms: int | None, max_count: int, cursor: str | None
) -> Question:
    """Return the validated question. Raises `InvalidArgument`, `InvalidCursor`."""
    check_topic(topic)
    check_key(key)
    second_min, second_max, max_count = check_range(begin_ms, end_ms, max_count)
    after = None
    if cursor is not None:
        after = decode_cursor(cursor, query_digest(topic, key, second_min, second_max), 3 + len(schema.identity_extra))
    return Question(topic, key, key_hash(topic, key), fingerprint(topic, key), second_min, second_max, max_count, after)


_FEW_ANSWERS = 4096


class AnswerBudget:
    """The answers found so far, best first, and what they make needless. Safe under threads."""

    def __init__(self, schema: Schema, max_count: int) -> None:
        self._schema = schema
        self._max_count = max_count
        self._lock = threading.Lock()
        self._rows = concatenate([], schema)
        self._fresh: list[Array] = []
        self._fresh_count = 0
        self._cutoff: int | None = None
        self.skipped = False

    def add(self, rows: Array) -> int:
        """Take in one file's rows; return how many those were."""
        if not len(rows):
            return 0
        with self._lock:
            self._fresh.append(rows)
            self._fresh_count += len(rows)
            # many answers are brought in order when they have doubled, few at once, and the first that may be enough: they may spare reads
            total = len(self._rows) + self._fresh_count
            if self._fresh_count >= len(self._rows) or total <= _FEW_ANSWERS or (self._cutoff is None and total >= self._max_count):
                self._settle()
        return len(rows)

    def _settle(self) -> None:
        # one more than asked tells a full answer from a truncated one
        rows = concatenate([self._rows, *self._fresh], self._schema)
        self._rows = first_answers(rows, self._schema, self._max_count + 1)
        self._fresh, self._fresh_count = [], 0
        if len(self._rows) >= self._max_count:
            self._cutoff = int(self._rows["second"][self._max_count - 1])

    def spares(self, second_max: int) -> bool:
        """Return whether a file with this greatest second can't change the answer any more; if so the answer counts as truncated."""
        with self._lock:
            if self._cutoff is None or second_max >= self._cutoff:
                return False
            self.skipped = True
            return True

    def answers(self) -> tuple[Array, bool]:
        """Return the first `max_count` answers, and whether there may be more."""
        with self._lock:
            if self._fresh:
                self._settle()
            return self._rows[: self._max_count], self.skipped or len(self._rows) > self._max_count


@dataclass
class _Run:
    """State of one running query or batch.

    `look` searches a file and takes in what it holds, returning how many rows that was; `spares` says by a file's greatest second
    whether it needn't be read any more.
    """

    look: Callable[[Handle], int]
    spares: Callable[[int], bool]
    reports: list[FileReport] = field(default_factory=list)
    errors: list[tuple[FileReport, TieredIndexError]] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    stop: bool = False


class QueryEngine:
    """Runs queries over handles. One per service or reader; safe under threads."""

    def __init__(
        self, schema: Schema, item_type: type[IndexItem], threads: int, storage: MeteredStorage | None
    ) -> None:
        self._schema = schema
        self._item_type = item_type
        self._make = item_maker(schema, item_type)
        self._threads = threads
        self._storage = storage
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Stop the pool; lookups under way end with an answer or `InvalidArgument`. Idempotent."""
        with self._pool_lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            # what is queued runs and finds the engine closed: a cancelled future would leave its query waiting for ever
            pool.shutdown(wait=True)

    def query(
        self,
        handles: Handles,
        topic: str,
        key: str,
        begin_ms: int | None,
        end_ms: int | None,
        max_count: int,
        cursor: str | None,
        allow_partial: bool,
        *,
        lost: frozenset[str] = frozenset(),
    ) -> QueryResult:
        """Answer one lookup over what `handles` yields for it. Arguments and errors as `IndexService.query`.

        An object that is not there raises `MissingObject` even where partial answers are allowed, since the log may have moved on;
        `lost` names those of which the caller has found out that it hasn't.
        """
        started = time.perf_counter()
        question = ask(self._schema, topic, key, begin_ms, end_ms, max_count, cursor)
        budget = AnswerBudget(self._schema, max_count)

        def look(handle: Handle) -> int:
            rows = handle.search(question)
            if len(rows):
                check_schema(rows, self._schema, handle.file_id)
            return budget.add(rows)

        run = _Run(look, budget.spares)
        self._read(run, handles(question.second_min, question.second_max), allow_partial, lost)
        rows, more = budget.answers()
        failed = tuple([report for report, _ in run.errors])
        last = order_key(rows[-1], self._schema) if more else question.after
        return QueryResult(
            items=tuple([self._make(topic, row) for row in rows.tolist()]),
            status="partial" if failed else "truncated" if more else "complete",
            cursor=_cursor(question, last) if more and last is not None else None,
            failed=failed,
            explain=_explain(run, started),
        )

    def query_many(
        self, handles: Handles, lookups: Sequence[Lookup], allow_partial: bool, *, lost: frozenset[str] = frozenset()
    ) -> QueryResults:
        """Answer many lookups; arguments and errors as `query`. Files are not skipped by budget: each is read once for all."""
        started = time.perf_counter()
        batch = QuestionBatch(lookups)
        parts: list[Found] = []

        def look(handle: Handle) -> int:
            found = handle.search_many(batch)
            if len(found.rows):
                check_schema(found.rows, self._schema, handle.file_id)
                parts.append(found)
            return len(found.rows)

        def alone(q: Lookup) -> QueryResult:
            return self.query(handles, q.topic, q.key, q.begin_ms, q.end_ms, q.max_count, q.cursor, allow_partial, lost=lost)

        run = _Run(look, lambda second_max: False)
        pages = {i: alone(q) for i, q in enumerate(lookups) if q.cursor is not None}
        if len(lookups) > len(pages):
            try:
                self._read(run, handles(int(batch.second_min.min()), int(batch.second_max.max())), allow_partial, lost)
            except TooManyPairs:
                parts.clear()
                pages = {i: alone(q) for i, q in enumerate(lookups)}
        rows, starts, more = best_answers(batch, parts, self._schema)
        failed = [report for report, _ in run.errors]
        return QueryResults(batch, rows, starts, more, failed, _explain(run, started), self._schema, self._item_type, pages)

    def _read(self, run: _Run, handles: Sequence[Handle], allow_partial: bool, lost: frozenset[str]) -> None:
        """Search the handles; raise what can't be passed over."""
        self._read_all(run, handles, allow_partial)
        for _, error in run.errors:
            if isinstance(error, MissingObject) and error.name not in lost:
                raise error
        if run.errors and not allow_partial:
            raise _error(run)

    def _read_all(self, run: _Run, handles: Sequence[Handle], allow_partial: bool) -> None:
        ordered = sorted(handles, key=lambda h: (-h.second_max, -h.sequence, h.file_id)) if len(handles) > 1 else handles
        waiting: set[Future[None]] = set()
        try:
            for handle in ordered:
                if run.errors and not allow_partial:
                    break
                if run.spares(handle.second_max):
                    run.reports.append(_report(handle, "skipped_budget"))
                elif handle.is_local:
                    self._search(run, handle)
                else:
                    if len(waiting) >= self._threads:
                        waiting = self._collect(waiting)
                    context = contextvars.copy_context()  # so that requests are counted to this query
                    waiting.add(self._submit(context, run, handle, allow_partial))
            while waiting:
                waiting = self._collect(waiting)
        finally:
            run.stop = True
            for future in waiting:
                future.cancel()

    def _collect(self, waiting: set[Future[None]]) -> set[Future[None]]:
        done, rest = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        return rest

    def _search_late(self, run: _Run, handle: Handle, allow_partial: bool) -> None:
        if run.stop or (run.errors and not allow_partial):
            return
        if self._closed:
            raise InvalidArgument("the index was closed during the lookup")
        if run.spares(handle.second_max):
            run.reports.append(_report(handle, "skipped_budget"))
        else:
            self._search(run, handle)

    def _search(self, run: _Run, handle: Handle) -> None:
        started = time.perf_counter()
        place = handle.place
        usage: Usage | None = None
        try:
            if place in _NEVER_STORED or self._storage is None:
                matched = run.look(handle)
            else:
                with self._storage.measure() as usage:
                    run.usages.append(usage)
                    matched = run.look(handle)
        except TieredIndexError as error:
            report = _report(handle, "failed", place, started, usage, error=error)
            run.reports.append(report)
            run.errors.append((report, error))
            return
        run.reports.append(_report(handle, "read", place, started, usage, matched=matched))

    def _submit(self, context: contextvars.Context, run: _Run, handle: Handle, allow_partial: bool) -> Future[None]:
        with self._pool_lock:  # so that a close comes before or after it, never in between
            if self._closed:
                raise InvalidArgument("the index was closed during the lookup")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "tiered-index-query")
            return self._pool.submit(context.run, self._search_late, run, handle, allow_partial)


def _explain(run: _Run, started: float) -> Explain:
    reports = run.reports
    if len(reports) > 1:
        reports = sorted(reports, key=lambda r: (-r.end_ms, r.file))
    return Explain(
        requests=sum([report.requests for report in reports]),
        bytes=sum([report.bytes for report in reports]),
        cost_usd=sum([usage.cost_usd for usage in run.usages]),
        elapsed_ms=(time.perf_counter() - started) * 1000,
        files_read=sum([report.outcome == "read" for report in reports]),
        files_skipped=sum([report.outcome.startswith("skipped") for report in reports]),
        files=tuple(reports),
    )


T = TypeVar("T")


def past_lost_objects(
    catalog: Catalog, refresh: Callable[[], LogState], allow_partial: bool, uri: str, ask_engine: Callable[[frozenset[str]], T]
) -> T:
    """Return what `ask_engine` answers; where an object is gone, the log is read on and the lookup begun again, a bounded number of times.

    `ask_engine` is given the names of objects that are known to be lost. Raises `CorruptFile` where one is and partial answers are not
    allowed.
    """
    lost: set[str] = set()
    for _ in range(LOG_RETRIES):
        try:
            with catalog.reading():
                return ask_engine(frozenset(lost))
        except MissingObject as error:
            lost |= check_lost(error, refresh(), allow_partial)
    raise StorageUnavailable(f"{uri}: objects kept vanishing during {LOG_RETRIES} tries of one lookup; try again")


def check_lost(error: MissingObject, state: LogState, allow_partial: bool) -> set[str]:
    """Say what an object that is not there means, given the log's state read since: return it as lost, or nothing where it was removed.

    Raises `CorruptFile` where it is lost and the caller did not allow partial answers.
    """
    if error.name not in state.objects:
        return set()
    if not allow_partial:
        raise CorruptFile(error.name, "the log names this object, but the storage does not have it") from error
    return {error.name}


def _cursor(question: Question, last: OrderKey) -> str:
    return encode_cursor(last, query_digest(question.topic, question.key, question.second_min, question.second_max))


def _report(
    handle: Handle,
    outcome: str,
    place: str | None = None,
    started: float | None = None,
    usage: Usage | None = None,
    *,
    matched: int = 0,
    error: TieredIndexError | None = None,
) -> FileReport:
    return FileReport(
        file=handle.file_id,
        place=place or handle.place,
        outcome=outcome,
        begin_ms=handle.second_min * 1000,
        end_ms=handle.second_max * 1000,
        requests=usage.requests if usage else 0,
        bytes=usage.bytes_read if usage else 0,
        elapsed_ms=(time.perf_counter() - started) * 1000 if started is not None else 0.0,
        matched=matched,
        error=str(error) if error is not None else None,
    )


def _error(run: _Run) -> TieredIndexError:
    """Return what to raise: the one error where there is one kind, so that the caller's next action is clear."""
    first = run.errors[0][1]
    if all(type(error) is type(first) for _, error in run.errors):
        return first
    if all(isinstance(error, StorageUnavailable) for _, error in run.errors):
        return first
    names = "; ".join(str(error) for _, error in run.errors)
    return PartialAnswer(f"{len(run.errors)} files could not be read: {names}", failed=tuple(report for report, _ in run.errors))
