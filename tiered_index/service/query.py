"""Queries: many files, one thread-safe budget, one deterministic answer.

A file is skipped only when `max_count` answers are strictly newer than its greatest second, so the answer never depends on which thread was
faster. `scan` reads the files, `lost_objects` says what becomes of those that are gone; what a lookup may spend is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tiered_index.errors import BudgetExceeded, PartialAnswer, StorageUnavailable, TieredIndexError
from tiered_index.format.hashing import fingerprint, key_hash
from tiered_index.format.schema import Schema
from tiered_index.service.account import Account
from tiered_index.service.answer_budget import AnswerBudget
from tiered_index.service.batch_query import QueryResults, QuestionBatch, best_answers
from tiered_index.service.catalog import Handle
from tiered_index.service.cursor import decode_cursor, encode_cursor, query_digest
from tiered_index.service.explanation import NOTHING, Spent, explain_scan, explain_together
from tiered_index.service.gathered import Gathered
from tiered_index.service.lost_objects import Lost
from tiered_index.service.rows import OrderKey, Question, check_schema, item_maker, order_key
from tiered_index.service.scan import FileReader, Scan
from tiered_index.service.validation import check_key, check_range, check_topic
from tiered_index.storage.metering import MeteredStorage
from tiered_index.types import IndexItem, Lookup, QueryResult

__all__ = ["Handles", "QueryEngine", "ask"]

Handles = Callable[[int, int], Sequence[Handle]]
"""What may hold answers in an inclusive range of epoch seconds."""


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


class QueryEngine:
    """Runs queries over handles. One per service or reader; safe under threads."""

    def __init__(
        self,
        schema: Schema,
        item_type: type[IndexItem],
        threads: int,
        storages: Sequence[MeteredStorage],
        sources: Mapping[int, str] | None = None,
    ) -> None:
        """`storages` hold the files; `sources` are the names of several indexes by their numbers (see `sources`)."""
        self._schema = schema
        self._make = item_maker(schema, item_type, sources)
        self._files = FileReader(threads, storages)

    def close(self) -> None:
        """Stop the pool; lookups under way end with an answer or `InvalidArgument`. Idempotent."""
        self._files.close()

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
        lost: Lost | None = None,
        account: Account | None = None,
        spent: Spent = NOTHING,
    ) -> QueryResult:
        """Answer one lookup over what `handles` yields for it. Arguments and errors as `IndexService.query`.

        `lost` finds out what objects mean that are not there; without it such a one raises `MissingObject` even where partial answers are
        allowed. `account` is open and holds the lookup's limits; `spent` is
        what of it went to other lookups.
        """
        started = time.perf_counter()
        question = ask(self._schema, topic, key, begin_ms, end_ms, max_count, cursor)
        budget = AnswerBudget(self._schema, max_count)

        def look(handle: Handle) -> int:
            rows = handle.search(question)
            if len(rows):
                check_schema(rows, self._schema, handle.file_id)
            return budget.add(rows)

        # what is newer than the cursor was answered on the pages before
        newest = question.second_max if question.after is None else min(question.second_max, question.after[0])
        scan = Scan(look, lambda handle: handle.excludes(question), budget.spares, budget.missing, newest, allow_partial, account)
        self._read(scan, handles(question.second_min, newest), lost)
        rows, more = budget.answers()
        failed = tuple([report for report, _ in scan.errors])
        last = order_key(rows[-1], self._schema) if more and len(rows) else question.after
        result = QueryResult(
            items=tuple([self._make(topic, row) for row in rows.tolist()]),
            status="partial" if failed else "truncated" if more else "complete",
            cursor=_cursor(question, last) if more and last is not None else None,
            failed=failed,
            explain=explain_scan(scan, started, spent),
        )
        return _affordable(scan, result)

    def query_many(
        self,
        handles: Handles,
        lookups: Sequence[Lookup],
        allow_partial: bool,
        *,
        lost: Lost | None = None,
        account: Account | None = None,
    ) -> QueryResults:
        """Answer many lookups; arguments and errors as `query`. Files are not skipped by budget: each is read once for all."""
        started = time.perf_counter()
        batch = QuestionBatch(lookups)
        gathered = Gathered(batch, self._schema)

        def look(handle: Handle) -> int:
            found = handle.search_many(batch)
            if len(found.rows):
                check_schema(found.rows, self._schema, handle.file_id)
                gathered.add(found)
            return len(found.rows)

        beside: list[Spent] = []
        short: list[BudgetExceeded] = []

        def alone(q: Lookup) -> QueryResult:
            spent = sum(beside, NOTHING)
            try:
                page = self.query(
                    handles, q.topic, q.key, q.begin_ms, q.end_ms, q.max_count, q.cursor, allow_partial,
                    lost=lost, account=account, spent=spent,
                )  # fmt: skip
            except BudgetExceeded as error:
                if not isinstance(error.result, QueryResult):
                    raise
                short.append(error)
                page = error.result
            beside.append(Spent.of(page.explain))
            return page

        scan = Scan(look, lambda handle: handle.excludes_all(batch), lambda second_max: False, lambda: 0, 0, allow_partial, account)
        pages = {i: alone(q) for i, q in enumerate(lookups) if q.cursor is not None}
        if len(lookups) > len(pages):
            self._read(scan, handles(int(batch.second_min.min()), int(batch.second_max.max())), lost)
        rows, starts, more = best_answers(batch, [gathered.found()], self._schema)
        failed = [report for report, _ in scan.errors]
        explain = explain_together(explain_scan(scan, started, sum(beside, NOTHING)), [page.explain for page in pages.values()])
        results = QueryResults(batch, rows, starts, more, failed, explain, self._schema, self._make, pages)
        if short and not scan.errors:
            raise BudgetExceeded(str(short[0]), failed=results.failed, result=results) from short[0]
        return _affordable(scan, results)

    def _read(self, scan: Scan, handles: Sequence[Handle], lost: Lost | None) -> None:
        """Search the handles; raise what can't be passed over. A spent budget is told by `_affordable`, with what was found."""
        lost = lost or Lost()
        lost.note(scan)
        self._files.read(scan, handles)
        lost.settle(scan)
        if scan.errors and scan.failed:
            raise _error(scan)


R = TypeVar("R", QueryResult, QueryResults)


def _affordable(scan: Scan, result: R) -> R:
    """Return the answer; raise it in a `BudgetExceeded` where the budget did not reach for all of it and a part was not asked for."""
    if not scan.errors or scan.allow_partial:
        return result
    report, error = scan.errors[0]
    left = len(scan.errors)
    files = f"{left} of the files it needed were" if left > 1 else f"{report.file} was"
    raise BudgetExceeded(f"{error}; {files} not read", failed=result.failed, result=result) from error


def _cursor(question: Question, last: OrderKey) -> str:
    return encode_cursor(last, query_digest(question.topic, question.key, question.second_min, question.second_max))


def _error(scan: Scan) -> TieredIndexError:
    """Return what to raise: the one error where there is one kind, so that the caller's next action is clear."""
    hard = [(report, error) for report, error in scan.errors if not isinstance(error, BudgetExceeded)]
    first = hard[0][1]
    if all(type(error) is type(first) for _, error in hard):
        return first
    if all(isinstance(error, StorageUnavailable) for _, error in hard):
        return first
    names = "; ".join(str(error) for _, error in hard)
    return PartialAnswer(f"{len(hard)} files could not be read: {names}", failed=tuple(report for report, _ in scan.errors))
