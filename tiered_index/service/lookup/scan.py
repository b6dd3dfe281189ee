"""A pass over files: newest first, local ones in the caller's thread, stored ones side by side.

A file is skipped when the answer can't change by it any more, or when its cached filter or topic table exclude it. As
many stored files are searched at once as answers are missing, and twice as many after each that held none; once none is
missing, or a file reaches to the newest second an answer may have, as many as the bound allows. Threads: one scan
belongs to one lookup; the pool is shared by all lookups of an index.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tiered_index.errors import BudgetExceeded, InvalidArgument, TieredIndexError
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.lookup.budget import LookupBudget
from tiered_index.service.threads.pool import DaemonPool, NoThread
from tiered_index.storage.context import active_context
from tiered_index.storage.metering import PriceTable, Usage
from tiered_index.types import FileReport

# requests of a search in a file whose directory is in no cache
_REQUESTS = 2


@dataclass
class Scan:
    """One pass. `look` searches a file and takes in its rows, returning how many; `excludes` says why a file needn't be
    searched; `can_skip` whether files of a greatest second can't change the answer any more; `missing` how many answers
    are missing before it can skip any, 0 where none are; `newest` is the last second that an answer may have.
    `outdated` are the reports of earlier passes of the lookup.
    """

    look: Callable[[Handle], int]
    excludes: Callable[[Handle], str | None]
    can_skip: Callable[[int], bool]
    missing: Callable[[], int]
    newest: int
    allow_partial: bool
    budget: LookupBudget | None = None
    reports: list[FileReport] = field(default_factory=list)
    errors: list[tuple[FileReport, TieredIndexError]] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    outdated: Sequence[FileReport] = ()
    stop: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: queue.SimpleQueue[Future[None]] = field(default_factory=queue.SimpleQueue)

    @property
    def failed(self) -> bool:
        """Whether a file could not be read and that ends the lookup; a spent budget doesn't."""
        return not self.allow_partial and any(not isinstance(error, BudgetExceeded) for _, error in self.errors)

    def remaining_s(self) -> float | None:
        """Return the seconds left to the lookup; None: no bound."""
        return self.budget.remaining_s() if self.budget is not None else None

    def report(
        self,
        handle: Handle,
        outcome: str,
        *,
        place: str | None = None,
        started: float | None = None,
        usage: Usage | None = None,
        matched: int = 0,
        error: TieredIndexError | None = None,
    ) -> None:
        """Add the report of a file, and its error."""
        report = FileReport(
            file=handle.file_id,
            place=place or handle.place,
            outcome=outcome,
            begin_ms=handle.second_min * 1000,
            end_ms=handle.second_max * 1000,
            requests=usage.requests if usage is not None else 0,
            bytes=usage.bytes_asked if usage is not None else 0,
            cost_usd=usage.cost_usd if usage is not None else 0.0,
            elapsed_ms=(time.perf_counter() - started) * 1000 if started is not None else 0.0,
            source=handle.source,
            matched=matched,
            error=str(error) if error is not None else None,
        )
        self.reports.append(report)
        if error is not None:
            self.errors.append((report, error))


class _Search:
    """The search of one file. Whoever ends it first, its thread or the lookup that can't wait, makes its report."""

    def __init__(self, scan: Scan, handle: Handle) -> None:
        self.scan = scan
        self.handle = handle
        self.place = handle.place
        limited = scan.budget is not None and scan.budget.limits.max_bytes is not None
        self.expected_bytes = handle.search_bytes if limited else 0
        self.usage: Usage | None = None
        self.started = time.perf_counter()
        self.matched: int | None = None
        self._ended = False

    def count(self, usage: Usage) -> None:
        """Count the requests by `usage`, which refuses them once the search has ended."""
        with self.scan.lock:
            self.usage = usage
            if self._ended:
                usage.max_requests = 0
        self.scan.usages.append(usage)

    def end(self, outcome: str, *, matched: int = 0, error: TieredIndexError | None = None) -> None:
        with self.scan.lock:
            if self._ended:
                return
            self._ended = True
            usage = self.usage
            if usage is not None:
                usage.max_requests = 0
            cached = outcome == "read" and not self.handle.is_local and usage is not None and not usage.requests
            self.scan.report(
                self.handle,
                outcome,
                place="cache" if cached else self.place,
                started=self.started,
                usage=usage,
                matched=matched,
                error=error,
            )

    def end_late(self) -> None:
        self.end("failed", error=BudgetExceeded(f"timeout_s was reached before {self.handle.file_id} was read"))


class FileReader:
    """Scans files with a bounded number of searches in the storage at once. One per index; safe under threads."""

    def __init__(self, threads: int, prices: PriceTable) -> None:
        self._threads = threads
        self._prices = prices
        self._pool = DaemonPool(threads, "tiered-index-query")
        self._closed = False

    def close(self, until_s: float | None = None) -> None:
        """Stop the pool; running lookups end with an answer or `InvalidArgument`. As `DaemonPool.close`."""
        # what is queued runs and finds the engine closed: a cancelled future would leave its lookup waiting for ever
        self._closed = True
        self._pool.close(until_s)

    def read(self, scan: Scan, handles: Sequence[Handle]) -> None:
        """Search what must be searched of `handles`; `scan` then has a report of each that was met, and every error."""
        ordered = (
            sorted(handles, key=lambda h: (-h.second_max, -h.sequence, h.file_id)) if len(handles) > 1 else handles
        )
        searching: dict[Future[None], _Search] = {}
        width = 1
        newest = min(scan.newest, ordered[0].second_max) if ordered else 0
        try:
            for handle in ordered:
                if scan.errors and scan.failed:
                    break
                if scan.can_skip(handle.second_max):
                    scan.report(handle, "skipped_budget")
                    continue
                if scan.budget is not None and scan.remaining_s() == 0:
                    _Search(scan, handle).end_late()
                    continue
                if handle.is_local:
                    if not handle.asks_storage:
                        _look(scan, handle)
                        continue
                    if scan.remaining_s() is None:
                        self._search(_Search(scan, handle))
                        continue
                    if self._search_local_copy(_Search(scan, handle)):
                        continue
                excluded = scan.excludes(handle)
                if excluded is not None:
                    scan.report(handle, f"skipped_{excluded}")
                    continue
                if handle is ordered[-1] and not searching and scan.remaining_s() is None:
                    self._search(_Search(scan, handle))  # the only one: nobody to share the work with
                    continue
                while True:
                    missing = 0 if handle.second_max >= newest else scan.missing()
                    room = min(self._threads, max(width, missing)) if missing else self._threads
                    if len(searching) < room and _affordable(scan, handle, searching.values()):
                        break
                    if not (ended := self._collect(scan, searching)):
                        break
                    if any(search.matched == 0 for search in ended):
                        width *= 2
                    if scan.can_skip(handle.second_max):
                        break
                if scan.can_skip(handle.second_max):
                    scan.report(handle, "skipped_budget")
                    continue
                search = _Search(scan, handle)
                if scan.budget is not None and scan.remaining_s() == 0:
                    search.end_late()
                    continue
                try:
                    future = self._pool.submit(self._search_needed, search)
                except NoThread as error:
                    if scan.remaining_s() is None:
                        self._search(search)
                    else:
                        search.end("failed", error=error)
                    continue
                searching[future] = search
                future.add_done_callback(scan.done.put)
            while searching and not all(scan.can_skip(search.handle.second_max) for search in searching.values()):
                if not self._collect(scan, searching):
                    break
        finally:
            scan.stop = True
            for future, search in searching.items():
                # its request may be under way; nobody waits for it any more
                future.cancel()
                search.end("skipped_budget")

    def _collect(self, scan: Scan, searching: dict[Future[None], _Search]) -> list[_Search]:
        """Wait for a search to end and return those that did; none where the time is up: all that run are given up."""
        ended: list[_Search] = []
        try:
            # a queue, not `wait`, which takes the locks of all futures for each that ends and holds up others
            future = scan.done.get(timeout=scan.remaining_s())
            while True:
                future.result()
                ended.append(searching.pop(future))
                future = scan.done.get_nowait()
        except queue.Empty:
            pass
        if not ended:
            for search in searching.values():
                search.end_late()
            searching.clear()
        return ended

    def _search_needed(self, search: _Search) -> None:
        """Search a file, in a thread of the pool, unless it is no longer needed."""
        scan = search.scan
        if scan.stop or (scan.errors and scan.failed):
            return
        if self._closed:
            raise InvalidArgument("the index was closed during the lookup")
        if scan.can_skip(search.handle.second_max):
            search.end("skipped_budget")
        else:
            self._search(search)

    def _search(self, search: _Search) -> None:
        usage, context = Usage(self._prices), active_context()
        if not search.handle.is_local:  # which has no parts
            context = context.with_threads(self._pool.submit)
        try:
            search.count(usage)
            with context.counting(usage).active():
                search.matched = search.scan.look(search.handle)
        except TieredIndexError as error:
            search.end("failed", error=error)
            return
        search.end("read", matched=search.matched)

    def _search_local_copy(self, search: _Search) -> bool:
        """Search a local copy in the caller's thread; return False where that needs a request: it may take too long."""
        try:
            with active_context().counting(Usage(max_requests=0)).active():
                search.matched = search.scan.look(search.handle)
        except BudgetExceeded:
            return False
        except TieredIndexError as error:
            search.end("failed", error=error)
            return True
        search.end("read", matched=search.matched)
        return True


def _affordable(scan: Scan, handle: Handle, searching: Collection[_Search]) -> bool:
    """Return whether the budget allows one more search, items included, lest directories of many files use it up."""
    if scan.budget is None or not searching:
        return True
    usage = scan.budget.usage
    requests, size = usage.requests_left, usage.bytes_left
    if requests is not None:
        promised = sum(max(0, _REQUESTS - (search.usage.requests if search.usage else 0)) for search in searching)
        if requests - promised < _REQUESTS:
            return False
    if size is not None:
        promised = sum(
            max(0, search.expected_bytes - (search.usage.bytes_asked if search.usage else 0)) for search in searching
        )
        if size - promised < handle.search_bytes:
            return False
    return True


def _look(scan: Scan, handle: Handle) -> None:
    """Search a file without a byte in the storage, in the caller's thread: no request, nobody to race with."""
    started = time.perf_counter()
    try:
        matched = scan.look(handle)
    except TieredIndexError as error:
        scan.report(handle, "failed", started=started, error=error)
    else:
        scan.report(handle, "read", started=started, matched=matched)
