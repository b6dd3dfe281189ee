"""Queries: many files, one thread-safe budget, one deterministic answer.

A file is skipped only when `max_count` answers are strictly newer than its greatest second, so the answer never depends
on which thread was faster. `scan` reads the files, `MissingObjects` says what becomes of those that are gone; what a
lookup may spend is decided here.

What a lookup says of itself: each file and what it cost, and what went to the storage's log. Pure; one thread.

Objects that the log names and the storage doesn't have: what that means for a lookup.

A later record may have removed them, or the storage lost them. One pass over the files finds all that it misses; then
the log is read on, once for each storage. Where it still names all of them the pass stands, and they are what could not
be read. Where it doesn't, the lookup is begun again over the files that there are now; what the passes before have cost
stays on its account, file by file. Threads: one lookup's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    PartialAnswer,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.format.hashing import fingerprint, key_hash
from tiered_index.format.schema import Schema
from tiered_index.service.answers.batch import LookupBatch, QueryResults, best_answers
from tiered_index.service.answers.matches import MatchAccumulator
from tiered_index.service.answers.rows import (
    OrderKey,
    PreparedLookup,
    check_schema,
    decode_cursor,
    encode_cursor,
    item_maker,
    order_key,
    query_digest,
)
from tiered_index.service.answers.validation import check_key, check_range, check_topic
from tiered_index.service.catalog.catalog import Catalog, Handle
from tiered_index.service.cold.path import MissingObject
from tiered_index.service.log.state import LogState
from tiered_index.service.lookup.budget import LookupBudget, TopK
from tiered_index.service.lookup.scan import FileReader, Scan
from tiered_index.storage.metering import PriceTable
from tiered_index.types import Explain, FileReport, IndexItem, Lookup, QueryResult

__all__ = [
    "LOG_RETRIES",
    "NOTHING",
    "Handles",
    "MissingObjects",
    "QueryEngine",
    "RequestStats",
    "explain_scan",
    "explain_together",
    "past_lost_objects",
    "prepare_lookup",
]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What lookups cost."""

    requests: int
    bytes: int
    cost_usd: float

    @classmethod
    def of(cls, explain: Explain | FileReport) -> RequestStats:
        """Return what a lookup cost by its own account of it, or what one file did."""
        return cls(explain.requests, explain.bytes, explain.cost_usd)

    def __add__(self, other: RequestStats) -> RequestStats:
        return RequestStats(self.requests + other.requests, self.bytes + other.bytes, self.cost_usd + other.cost_usd)

    def __sub__(self, other: RequestStats) -> RequestStats:
        return RequestStats(self.requests - other.requests, self.bytes - other.bytes, self.cost_usd - other.cost_usd)


NOTHING = RequestStats(0, 0, 0.0)


def explain_scan(scan: Scan, started: float, elsewhere: RequestStats = NOTHING) -> Explain:
    """Return what a lookup did since `started`; what its account says beyond its files, those of passes that were given
    up among them, and `elsewhere` went to the log."""
    # the account first: a search that nobody waits for any more may still make a request
    account = NOTHING
    if scan.account is not None:
        usage = scan.account.usage
        # what a read that was given up has asked for may still come
        account = RequestStats(usage.requests, usage.bytes_asked, usage.cost_usd) - elsewhere
    spent = NOTHING
    if scan.usages:
        spent = RequestStats(
            sum([usage.requests for usage in scan.usages]),
            sum([usage.bytes_asked for usage in scan.usages]),
            sum([usage.cost_usd for usage in scan.usages]),
        )
    reports = scan.reports
    if scan.outdated:
        reports = [*reports, *scan.outdated]
        spent = sum(map(RequestStats.of, scan.outdated), spent)
    if len(reports) > 1:
        reports = sorted(reports, key=lambda r: (-r.end_ms, r.file))
    if account.requests > spent.requests:
        log = account - spent
        reports = [
            *reports,
            FileReport(
                file="log",
                place="storage",
                outcome="refreshed",
                begin_ms=0,
                end_ms=0,
                requests=log.requests,
                bytes=log.bytes,
                cost_usd=log.cost_usd,
            ),
        ]
        spent = account
    return Explain(
        requests=spent.requests,
        bytes=spent.bytes,
        cost_usd=spent.cost_usd,
        elapsed_ms=(time.perf_counter() - started) * 1000,
        files_read=sum([report.outcome == "read" for report in reports]),
        files_skipped=sum([report.outcome.startswith("skipped") for report in reports]),
        files=tuple(reports),
    )


def explain_together(explain: Explain, alone: Sequence[Explain]) -> Explain:
    """Return what a batch did, its lookups that were asked alone among it."""
    if not alone:
        return explain
    spent = sum(map(RequestStats.of, alone), RequestStats.of(explain))
    return replace(
        explain,
        requests=spent.requests,
        bytes=spent.bytes,
        cost_usd=spent.cost_usd,
        files_read=explain.files_read + sum([one.files_read for one in alone]),
        files_skipped=explain.files_skipped + sum([one.files_skipped for one in alone]),
        files=explain.files + tuple([report for one in alone for report in one.files]),
    )


LOG_RETRIES = 100
"""How often a lookup is begun again because objects vanish; each time the log has moved on."""
T = TypeVar("T")


class _MovedOn(Exception):
    """Internal: the log doesn't name an object any more that a pass over the files has missed."""


class MissingObjects:
    """What one lookup knows of objects that are not there, and of its passes that were given up.

    `read_log` reads on the log of a storage, by its URI; without it the first object that is missing is the lookup's
    error.
    """

    def __init__(self, read_log: Callable[[str], LogState] | None = None, *, allow_partial: bool = False) -> None:
        self._read_log = read_log
        self._allow_partial = allow_partial
        self._known: dict[tuple[str, str], TieredIndexError] = {}
        self._scans: list[Scan] = []
        self._outdated: list[FileReport] = []
        self._told = False

    def note(self, scan: Scan) -> None:
        """Remember a scan that is about to begin, for what it costs should it be in vain."""
        self._scans.append(scan)

    def settle(self, scan: Scan) -> None:
        """Put in place of each object that a scan has missed what that means.

        Where the lookup can't afford to read the log, the object's file is one that its budget did not reach for.
        Raises `CorruptFile` where one is lost and partial answers are not allowed, and what keeps the log from being
        read.
        """
        if self._outdated and not self._told:
            self._told, scan.outdated = True, self._outdated
        unknown: dict[str, list[MissingObject]] = {}
        for _, error in scan.errors:
            if isinstance(error, MissingObject) and (error.uri, error.name) not in self._known:
                unknown.setdefault(error.uri, []).append(error)
        moved_on = [uri for uri, errors in unknown.items() if self._look_up(uri, errors)]
        if moved_on:
            raise _MovedOn(moved_on[0])
        for number, (report, error) in enumerate(scan.errors):
            if isinstance(error, MissingObject):
                meant = self._known[error.uri, error.name]
                scan.errors[number] = (replace(report, error=str(meant)), meant)

    def _look_up(self, uri: str, missing: Sequence[MissingObject]) -> bool:
        """Find out what it means that objects of a storage are not there; return whether the log has removed any."""
        if self._read_log is None:
            raise missing[0]
        meant: TieredIndexError | None = None
        try:
            state = self._read_log(uri)
        except BudgetExceeded as spent:
            meant = spent
        except (StorageError, CorruptFile) as unread:
            if not self._allow_partial:
                raise
            meant = unread  # nobody knows what became of it
        if meant is not None:
            self._known |= {(uri, error.name): meant for error in missing}
            return False
        lost = [error for error in missing if error.name in state.objects]
        if lost and not self._allow_partial:
            raise CorruptFile(lost[0].name, "the log names this object, but the storage does not have it") from lost[0]
        self._known |= {(uri, error.name): error for error in lost}
        return len(lost) < len(missing)

    def begin_again(self) -> None:
        """Give up what was scanned since the last time."""
        reports = [report for scan in self._scans for report in scan.reports if report.requests]
        self._outdated += [replace(report, outcome="outdated", matched=0) for report in reports]
        self._scans = []
        self._told = False


def past_lost_objects(
    catalogs: Sequence[Catalog],
    read_log: Callable[[str], LogState],
    allow_partial: bool,
    ask_engine: Callable[[MissingObjects], T],
) -> T:
    """Return what `ask_engine` answers; where the log has removed an object, the lookup is begun again, a bounded
    number of times.

    `read_log` reads on the log of a storage, by its URI, and shows it in its catalog. Raises as
    `MissingObjects.settle`.
    """
    lost = MissingObjects(read_log, allow_partial=allow_partial)
    uri = ""
    for _ in range(LOG_RETRIES):
        try:
            with catalogs[0].reading() if len(catalogs) == 1 else _reading(catalogs):
                return ask_engine(lost)
        except _MovedOn as moved_on:
            uri = str(moved_on)
            lost.begin_again()
    raise StorageUnavailable(f"{uri}: objects kept vanishing during {LOG_RETRIES} tries of one lookup; try again")


@contextlib.contextmanager
def _reading(catalogs: Sequence[Catalog]) -> Iterator[None]:
    with contextlib.ExitStack() as reading:
        for catalog in catalogs:
            reading.enter_context(catalog.reading())
        yield


Handles = Callable[[int, int], Sequence[Handle]]
"""What may hold answers in an inclusive range of epoch seconds."""


def prepare_lookup(
    schema: Schema, topic: str, key: str, begin_ms: int | None, end_ms: int | None, max_count: int, cursor: str | None
) -> PreparedLookup:
    """Return the validated lookup. Raises `InvalidArgument`, `InvalidCursor`."""
    check_topic(topic)
    check_key(key)
    second_min, second_max, max_count = check_range(begin_ms, end_ms, max_count)
    after = None
    if cursor is not None:
        after = decode_cursor(cursor, query_digest(topic, key, second_min, second_max), 3 + len(schema.identity_extra))
    return PreparedLookup(
        topic, key, key_hash(topic, key), fingerprint(topic, key), second_min, second_max, max_count, after
    )


class QueryEngine:
    """Runs queries over handles. One per service or reader; safe under threads."""

    def __init__(
        self,
        schema: Schema,
        item_type: type[IndexItem],
        threads: int,
        prices: PriceTable,
        sources: Mapping[int, str] | None = None,
    ) -> None:
        """`sources` are the names of several indexes by their numbers (see `sources`)."""
        self._schema = schema
        self._make = item_maker(schema, item_type, sources)
        self._files = FileReader(threads, prices)

    def close(self, until_s: float | None = None) -> None:
        """As `FileReader.close`."""
        self._files.close(until_s)

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
        lost: MissingObjects | None = None,
        account: LookupBudget | None = None,
        spent: RequestStats = NOTHING,
    ) -> QueryResult:
        """Answer one lookup over what `handles` yields for it. Arguments and errors as `IndexService.query`.

        `lost` finds out what objects mean that are not there; without it such a one raises `MissingObject` even where
        partial answers are allowed. `account` is open and holds the lookup's limits; `spent` is what of it went to
        other lookups.
        """
        started = time.perf_counter()
        lookup = prepare_lookup(self._schema, topic, key, begin_ms, end_ms, max_count, cursor)
        budget = TopK(self._schema, max_count)

        def look(handle: Handle) -> int:
            rows = handle.search(lookup)
            if len(rows):
                check_schema(rows, self._schema, handle.file_id)
            return budget.add(rows)

        # what is newer than the cursor was answered on the pages before
        newest = lookup.second_max if lookup.after is None else min(lookup.second_max, lookup.after[0])
        scan = Scan(
            look,
            lambda handle: handle.excludes(lookup),
            budget.can_skip,
            budget.missing,
            newest,
            allow_partial,
            account,
        )
        self._read(scan, handles(lookup.second_min, newest), lost)
        rows, more = budget.answers()
        failed = tuple([report for report, _ in scan.errors])
        last = order_key(rows[-1], self._schema) if more and len(rows) else lookup.after
        result = QueryResult(
            items=tuple([self._make(topic, row) for row in rows.tolist()]),
            status="partial" if failed else "truncated" if more else "complete",
            cursor=_cursor(lookup, last) if more and last is not None else None,
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
        lost: MissingObjects | None = None,
        account: LookupBudget | None = None,
    ) -> QueryResults:
        """Answer many lookups; arguments and errors as `query`. Files are not skipped by budget: each is read once for
        all.
        """
        started = time.perf_counter()
        batch = LookupBatch(lookups)
        gathered = MatchAccumulator(batch, self._schema)

        def look(handle: Handle) -> int:
            found = handle.search_many(batch)
            if len(found.rows):
                check_schema(found.rows, self._schema, handle.file_id)
                gathered.add(found)
            return len(found.rows)

        beside: list[RequestStats] = []
        short: list[BudgetExceeded] = []

        def alone(q: Lookup) -> QueryResult:
            spent = sum(beside, NOTHING)
            try:
                page = self.query(
                    handles,
                    q.topic,
                    q.key,
                    q.begin_ms,
                    q.end_ms,
                    q.max_count,
                    q.cursor,
                    allow_partial,
                    lost=lost,
                    account=account,
                    spent=spent,
                )
            except BudgetExceeded as error:
                if not isinstance(error.result, QueryResult):
                    raise
                short.append(error)
                page = error.result
            beside.append(RequestStats.of(page.explain))
            return page

        scan = Scan(
            look,
            lambda handle: handle.excludes_all(batch),
            lambda second_max: False,
            lambda: 0,
            0,
            allow_partial,
            account,
        )
        pages = {i: alone(q) for i, q in enumerate(lookups) if q.cursor is not None}
        if len(lookups) > len(pages):
            self._read(scan, handles(int(batch.second_min.min()), int(batch.second_max.max())), lost)
        rows, starts, more = best_answers(batch, [gathered.found()], self._schema)
        failed = [report for report, _ in scan.errors]
        explain = explain_together(
            explain_scan(scan, started, sum(beside, NOTHING)), [page.explain for page in pages.values()]
        )
        results = QueryResults(batch, rows, starts, more, failed, explain, self._schema, self._make, pages)
        if short and not scan.errors:
            raise BudgetExceeded(str(short[0]), failed=results.failed, result=results) from short[0]
        return _affordable(scan, results)

    def _read(self, scan: Scan, handles: Sequence[Handle], lost: MissingObjects | None) -> None:
        """Search the handles; raise what can't be passed over. A spent budget is told by `_affordable`, with what was
        found.
        """
        lost = lost or MissingObjects()
        lost.note(scan)
        self._files.read(scan, handles)
        lost.settle(scan)
        if scan.errors and scan.failed:
            raise _error(scan)


R = TypeVar("R", QueryResult, QueryResults)


def _affordable(scan: Scan, result: R) -> R:
    """Return the answer; raise it in a `BudgetExceeded` where the budget did not reach for all of it and a part was not
    asked for.
    """
    if not scan.errors or scan.allow_partial:
        return result
    report, error = scan.errors[0]
    left = len(scan.errors)
    files = f"{left} of the files it needed were" if left > 1 else f"{report.file} was"
    raise BudgetExceeded(f"{error}; {files} not read", failed=result.failed, result=result) from error


def _cursor(lookup: PreparedLookup, last: OrderKey) -> str:
    return encode_cursor(last, query_digest(lookup.topic, lookup.key, lookup.second_min, lookup.second_max))


def _error(scan: Scan) -> TieredIndexError:
    """Return what to raise: the one error where there is one kind, so that the caller's next action is clear."""
    hard = [(report, error) for report, error in scan.errors if not isinstance(error, BudgetExceeded)]
    first = hard[0][1]
    if all(type(error) is type(first) for _, error in hard):
        return first
    if all(isinstance(error, StorageUnavailable) for _, error in hard):
        return first
    names = "; ".join(str(error) for _, error in hard)
    return PartialAnswer(
        f"{len(hard)} files could not be read: {names}", failed=tuple(report for report, _ in scan.errors)
    )
