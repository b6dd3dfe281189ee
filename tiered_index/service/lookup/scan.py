"""A pass over files: newest first, local ones in the caller's thread, stored ones side by side.

A file is skipped when the answer can't change by it any more, or when its cached filter or topic table exclude it.
`_Pace` says how many stored files are searched at once. `MissingObjects` decides what a missing object means: removed
by a later record of the log, or lost. Threads: one scan belongs to one lookup; the pool is shared by all lookups of an
index.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    IndexClosed,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.service.catalog.catalog import Catalog, Handle, Reading
from tiered_index.service.cold.path import MissingObject, lost_error
from tiered_index.service.files.view import ViewNote
from tiered_index.service.log.state import LogState
from tiered_index.service.lookup.budget import NOTHING, LookupBudget, RequestStats
from tiered_index.service.threads import DaemonPool, NoThread
from tiered_index.storage.context import UNBOUNDED, RequestContext, request_context
from tiered_index.storage.metering import Usage
from tiered_index.storage.prices import PriceTable
from tiered_index.types import FileReport

# requests of a search in a file whose directory is in no cache
_REQUESTS = 2
# cores, and lookups of a batch that are worth another one
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_LOOKUPS_A_PART = 500
# stored files that are searched at first
_FIRST_FILES = 2
# files whose filters are asked at once
_LOOK_AHEAD = 32
LOG_RETRIES = 100
"""How often a lookup starts again because objects vanish; each time the log has moved on."""
# refuses every request, and so never counts one: all lookups share it
_NO_REQUESTS = Usage(max_requests=0)
_REFUSING = UNBOUNDED.counting(_NO_REQUESTS)
F = TypeVar("F")
L = TypeVar("L")
T = TypeVar("T")


class FileNote(NamedTuple):
    """The outcome of a lookup for one file. Its report is made on first use."""

    file: str
    place: str
    outcome: str
    second_min: int
    second_max: int
    source: str | None
    elapsed_s: float = 0.0
    matched: int = 0
    spent: RequestStats = NOTHING
    error: str | None = None

    @classmethod
    def of_view(cls, note: ViewNote, prices: PriceTable) -> FileNote:
        """Return the note of a file in a view, which is not timed by itself."""
        label, outcome, rows, spent = note
        cost = NOTHING if spent is None else RequestStats(*spent, prices.cost_usd({"get_range": spent[0]}, spent[1]))
        interval = label.second_min, label.second_max
        # as of a search in the storage that made no request
        place = "cache" if outcome == "read" and spent is None and label.place == "storage" else label.place
        return cls(label.file_id, place, outcome, *interval, label.source, matched=rows, spent=cost)

    def report(self) -> FileReport:
        """Return the note as `explain` shows it."""
        return FileReport(
            file=self.file,
            place=self.place,
            outcome=self.outcome,
            begin_ms=self.second_min * 1000,
            end_ms=self.second_max * 1000,
            requests=self.spent.requests,
            bytes=self.spent.bytes,
            cost_usd=self.spent.cost_usd,
            elapsed_ms=self.elapsed_s * 1000,
            source=self.source,
            matched=self.matched,
            error=self.error,
        )


@dataclass(slots=True)
class Scan:
    """One pass over the files of a lookup.

    - `look` searches a file, keeps its rows and returns their number.
    - `excludes` returns the reason why a file needs no search, or None.
    - `can_skip` says whether a file with this greatest second can't change the answer any more.
    - `missing` returns the number of answers that are missing before a file can be skipped; 0: none.
    - `newest` is the last second that an answer may have.
    - `outdated` has the reports of earlier passes of the lookup.
    """

    look: Callable[[Handle], int]
    allow_partial: bool
    budget: LookupBudget | None
    excludes: Callable[[Handle], str | None] = lambda _: None
    can_skip: Callable[[int], bool] = lambda _: False
    missing: Callable[[], int] = lambda: 0
    newest: int = 0
    notes: list[FileNote] = field(default_factory=list)
    errors: list[tuple[FileReport, TieredIndexError]] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    outdated: Sequence[FileReport] = ()
    stop: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    # gets each search that ends in another thread
    done: queue.SimpleQueue[Future[None]] | None = None

    @property
    def failed(self) -> bool:
        """Whether an unreadable file ends the lookup; a spent budget doesn't."""
        return not self.allow_partial and any(not isinstance(error, BudgetExceeded) for _, error in self.errors)

    def remaining_s(self) -> float | None:
        """Return the seconds left to the lookup; None: no bound."""
        return self.budget.remaining_s() if self.budget is not None else None

    def note(
        self,
        handle: Handle,
        outcome: str,
        place: str,
        started: float | None = None,
        matched: int = 0,
        spent: RequestStats = NOTHING,
        error: TieredIndexError | None = None,
    ) -> None:
        """Note what was done with a file, and its error."""
        elapsed_s = time.perf_counter() - started if started is not None else 0.0
        interval = handle.second_min, handle.second_max
        said = None if error is None else str(error)
        note = FileNote(handle.file_id, place, outcome, *interval, handle.source, elapsed_s, matched, spent, said)
        self.notes.append(note)
        if error is not None:
            self.errors.append((note.report(), error))


class _Search:
    """The search of one file. Its thread or the impatient lookup ends it; the first to do so makes its report."""

    def __init__(self, scan: Scan, handle: Handle) -> None:
        self.scan = scan
        self.handle = handle
        self.place, self.is_local = handle.place, handle.is_local
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
            spent = NOTHING if usage is None or not usage.used else RequestStats.of_usage(usage)
            cached = outcome == "read" and not self.is_local and usage is not None and spent is NOTHING
            place = "cache" if cached else self.place
            self.scan.note(self.handle, outcome, place, self.started, matched, spent, error)

    def end_late(self) -> None:
        self.end("failed", error=BudgetExceeded(f"timeout_s was reached before {self.handle.file_id} was read"))


class _Pace:
    """The number of stored files that one scan searches at once, as far as answers can spare the search of later files.

    The two newest files come first: where the key is frequent, they have the whole answer. The answers that a file had
    then tell how many files hold those that are missing. Each file that had none makes it four times as many, up to a
    file for each missing answer, and then twice as many. So a rare key costs a round trip more. It costs none where
    filters exclude at least half of the files.
    """

    def __init__(self, scan: Scan, ordered: Sequence[Handle]) -> None:
        self._scan = scan
        self._ordered = ordered
        self._reasons: list[str | None] = []
        self._stored = self._excluded = 0
        self._searched = self._matched = 0
        self._width = self._fast = 1

    def excluded(self, place: int) -> str | None:
        """Return why the stored file at `place` needs no search; None: it needs one."""
        reasons = self._reasons
        while len(reasons) <= place:
            handle, reason = self._ordered[len(reasons)], None
            if not handle.is_local:
                reason = self._scan.excludes(handle)
                self._stored += 1
                if reason is not None:
                    self._excluded += 1
            reasons.append(reason)
        return reasons[place]

    def room(self, missing: int, under_way: int) -> int:
        """Return how many searches may run at once while `missing` answers are missing."""
        if self._searched:
            estimate = -(-missing * self._searched // self._matched) if self._matched else 0
            return max(self._width, min(self._fast, missing), estimate)
        if under_way < _FIRST_FILES:
            return min(_FIRST_FILES, missing)
        # looked at while the first requests travel
        self.excluded(min(len(self._reasons) + _LOOK_AHEAD, len(self._ordered)) - 1)
        return missing if 2 * self._excluded >= self._stored else _FIRST_FILES

    def note(self, ended: Sequence[_Search]) -> None:
        """Adjust the pace to the results of the searches that ended."""
        found = [search.matched or 0 for search in ended]
        self._searched, self._matched = len(found), sum(found)
        if without := found.count(0):
            self._width *= 2
            self._fast = max(_FIRST_FILES, self._fast) * 4**without


class FileReader:
    """Scans files with a bounded number of searches in the storage at once. One per index; safe under threads."""

    def __init__(self, threads: int, prices: PriceTable) -> None:
        self._threads = threads
        self._prices = prices
        self._pool = DaemonPool(threads, "tiered-index-query")
        self._closed = False

    def close(self, until_s: float | None = None) -> None:
        """Stop the pool; running lookups end with an answer or `IndexClosed`. As `DaemonPool.close`."""
        # queued searches run and find the engine closed: a cancelled one would leave its lookup waiting permanently
        self._closed = True
        self._pool.close(until_s)

    def in_parts(self, find: Callable[[int, int], T], count: int) -> list[T]:
        """Return `find(start, stop)` for all of `count` lookups: of the parts of a large batch, which run side by side
        where `find` lets other threads run.
        """
        parts = max(1, min(_CORES, self._threads, count // _LOOKUPS_A_PART))
        ends = [count * number // parts for number in range(parts + 1)]
        futures: list[tuple[tuple[int, int], Future[T] | None]] = []
        for span in itertools.pairwise(ends[1:]):
            try:
                futures.append((span, self._pool.submit(find, *span)))
            except NoThread:
                futures.append((span, None))
        found = [find(*ends[:2])]
        for span, future in futures:
            # no thread had time for it
            found.append(find(*span) if future is None or future.cancel() else future.result())
        return found

    def read(self, scan: Scan, handles: Sequence[Handle]) -> None:
        """Search those of `handles` that need it. `scan` then has a report of each file looked at, and every error."""
        ordered = (
            sorted(handles, key=lambda h: (-h.second_max, -h.sequence, h.file_id)) if len(handles) > 1 else handles
        )
        searching: dict[Future[None], _Search] = {}
        pace = _Pace(scan, ordered)
        timed = scan.budget is not None and scan.budget.deadline_s is not None
        try:
            for place, handle in enumerate(ordered):
                if scan.errors and scan.failed:
                    break
                # before the first one is read there are no answers
                if handle is not ordered[0] and scan.can_skip(handle.second_max):
                    scan.note(handle, "skipped_budget", handle.place)
                    continue
                if timed and scan.remaining_s() == 0:
                    _Search(scan, handle).end_late()
                    continue
                if handle.is_local:
                    if _look(scan, handle):
                        continue
                    if not timed:
                        self._search(_Search(scan, handle))
                        continue
                excluded = pace.excluded(place)
                if excluded is not None:
                    scan.note(handle, f"skipped_{excluded}", handle.place)
                    continue
                if handle is ordered[-1] and not searching and not timed:
                    self._search(_Search(scan, handle))  # the only one: nobody to share the work with
                    continue
                newest = min(scan.newest, ordered[0].second_max)
                while True:
                    missing = 0 if handle.second_max >= newest else scan.missing()
                    room = self._threads
                    if missing:
                        room = min(room, pace.room(missing, len(searching)))
                    if len(searching) < room and _affordable(scan, handle, searching.values()):
                        break
                    if not (ended := self._collect(scan, searching)):
                        break
                    pace.note(ended)
                    if scan.can_skip(handle.second_max):
                        break
                if scan.can_skip(handle.second_max):
                    scan.note(handle, "skipped_budget", handle.place)
                    continue
                search = _Search(scan, handle)
                if timed and scan.remaining_s() == 0:
                    search.end_late()
                    continue
                try:
                    future = self._pool.submit(self._search_needed, search)
                except NoThread as error:
                    if not timed:
                        self._search(search)
                    else:
                        search.end("failed", error=error)
                    continue
                searching[future] = search
                scan.done = scan.done or queue.SimpleQueue()
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
        """Wait until a search ends, and return all that have. When the time is up, give all up and return none."""
        ended: list[_Search] = []
        assert scan.done is not None
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
            raise IndexClosed("the index was closed during the lookup")
        if scan.can_skip(search.handle.second_max):
            search.end("skipped_budget")
        else:
            self._search(search)

    def _search(self, search: _Search) -> None:
        deadline_s, usages, listeners, submit = request_context.get()
        if not search.is_local:
            submit = self._pool.submit  # a local file has no parts for other threads
        usage = Usage(self._prices)
        search.count(usage)
        token = request_context.set(RequestContext(deadline_s, (*usages, (None, usage)), listeners, submit))
        try:
            search.matched = search.scan.look(search.handle)
        except TieredIndexError as error:
            search.end("failed", error=error)
            return
        finally:
            request_context.reset(token)
        search.end("read", matched=search.matched)


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


def _look(scan: Scan, handle: Handle) -> bool:
    """Search a local file in the caller's thread, with nobody to race with; return False where that needs a request."""
    started = time.perf_counter()
    try:
        if handle.asks_storage:
            context = request_context.get()
            token = request_context.set(_REFUSING if context is UNBOUNDED else context.counting(_NO_REQUESTS))
            try:
                matched = scan.look(handle)
            finally:
                request_context.reset(token)
        else:
            matched = scan.look(handle)
    except TieredIndexError as error:
        if handle.asks_storage and isinstance(error, BudgetExceeded):
            return False
        scan.note(handle, "failed", handle.place, started, error=error)
    else:
        interval, elapsed_s = (handle.second_min, handle.second_max), time.perf_counter() - started
        scan.notes.append(FileNote(handle.file_id, handle.place, "read", *interval, handle.source, elapsed_s, matched))
    return True


class _MovedOn(Exception):
    """Internal: the log no longer names an object that a pass over the files has missed."""


@dataclass(eq=False)
class MissingObjects:
    """The missing objects of one lookup, and its passes that were given up. Threads: one lookup's.

    A later record may have removed a missing object, or the storage has lost it. At the end of a pass the log of each
    storage that lacks objects is read on. If it still names all of them, the pass counts, and they could not be read.
    Otherwise the lookup starts again over the present files, and reports the cost of the earlier passes.
    """

    read_log: Callable[[str], LogState]  # reads on the log of a storage, by its URI, and applies it to its catalog
    allow_partial: bool
    prices: PriceTable
    # the passes of the present try: their cost is reported if it is given up
    scans: list[Scan] = field(default_factory=list)
    # reports of the earlier tries
    outdated: Sequence[FileReport] = ()
    _known: dict[tuple[str, str], TieredIndexError] = field(default_factory=dict)
    _reported: bool = False
    # the usage of reading logs, if any was read, and the part that `log_since` has returned in the present try
    usage: Usage | None = None
    _reported_stats: RequestStats = NOTHING

    def log_since(self) -> RequestStats:
        """Return what reading logs for this lookup has cost since the last call of the present try."""
        before, self._reported_stats = (
            self._reported_stats,
            NOTHING if self.usage is None else RequestStats.of_usage(self.usage),
        )
        return self._reported_stats - before

    def run(
        self,
        catalogs: Sequence[Catalog],
        answer: Callable[[F, L, bool, MissingObjects, LookupBudget | None], T],
        files: F,
        lookup: L,
        budget: LookupBudget | None,
    ) -> T:
        """Return the result of `answer`, which starts again if the log has removed an object. Raises as `resolve`."""
        uri = ""
        for _ in range(LOG_RETRIES):
            try:
                with Reading(catalogs[0]) if len(catalogs) == 1 else _reading(catalogs):
                    return answer(files, lookup, self.allow_partial, self, budget)
            except _MovedOn as moved_on:
                uri = str(moved_on)
                notes = [note for scan in self.scans for note in scan.notes if note.spent.requests]
                given_up = [note._replace(outcome="outdated", matched=0).report() for note in notes]
                self.outdated = (*self.outdated, *given_up)
                self.scans = []
                self._reported, self._reported_stats = False, NOTHING
        raise StorageUnavailable(f"{uri}: objects kept vanishing during {LOG_RETRIES} tries of one lookup; try again")

    def resolve(self, scan: Scan) -> None:
        """Replace the error of each missing object by the log's finding. Raises `CorruptFile`, as reading the log."""
        if self.outdated and not self._reported:
            self._reported, scan.outdated = True, self.outdated
        if not scan.errors:
            return
        unknown: dict[str, list[MissingObject]] = {}
        for _, error in scan.errors:
            if isinstance(error, MissingObject) and (error.uri, error.name) not in self._known:
                unknown.setdefault(error.uri, []).append(error)
        moved_on = [uri for uri, errors in unknown.items() if self._were_removed(uri, errors)]
        if moved_on:
            raise _MovedOn(moved_on[0])
        for number, (report, error) in enumerate(scan.errors):
            if isinstance(error, MissingObject):
                meant = self._known[error.uri, error.name]
                scan.errors[number] = (replace(report, error=str(meant)), meant)

    def _were_removed(self, uri: str, missing: Sequence[MissingObject]) -> bool:
        """Read the log on; return whether it has removed any of a storage's missing objects, and note the others."""
        meant: TieredIndexError | None = None
        try:
            self.usage = self.usage or Usage(self.prices)
            with request_context.get().counting(self.usage).active():
                state = self.read_log(uri)
        except BudgetExceeded as spent:
            meant = spent
        except (StorageError, CorruptFile) as unread:
            if not self.allow_partial:
                raise
            meant = unread  # nobody knows what became of it
        if meant is not None:
            self._known |= {(uri, error.name): meant for error in missing}
            return False
        lost = [error for error in missing if error.name in state.objects]
        if lost and not self.allow_partial:
            raise lost_error(lost[0].name) from lost[0]
        self._known |= {(uri, error.name): error for error in lost}
        return len(lost) < len(missing)


@contextlib.contextmanager
def _reading(catalogs: Sequence[Catalog]) -> Iterator[None]:
    with contextlib.ExitStack() as reading:
        for catalog in catalogs:
            reading.enter_context(catalog.reading())
        yield
