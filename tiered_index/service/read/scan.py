"""A pass over files: newest first, local ones in the caller's thread, stored ones in parallel.

A file is skipped if it can't change the answer, or its cached filter or topic table excludes the key. `_Pace` decides
how many stored files are searched at the same time. `LookupRun` decides whether a later log record has removed a
missing object, or whether it is lost. Threads: a scan belongs to one lookup; all lookups of an index share the pool.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from tiered_index.base.call import Call, Cancellation
from tiered_index.base.threads import DaemonPool, NoThread, side_by_side
from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    FolderDenied,
    IndexClosed,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.service.log.hidden import HiddenTable
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.budget import NOTHING, LookupBudget, RequestStats
from tiered_index.service.read.answers.logs import NO_LOGS, Logs
from tiered_index.service.read.file_scans import FileNote, Scan
from tiered_index.service.read.files.cold_path import MissingObject, lost_error
from tiered_index.service.read.files.file_view import About, LocalView, Noted, excluded_by, reports_of, with_reads_of
from tiered_index.service.read.files.snapshot import Catalog, Handle
from tiered_index.storage.metering import Usage
from tiered_index.storage.prices import PriceTable
from tiered_index.types import FileReport, Freshness

if TYPE_CHECKING:
    from tiered_index.base._views import ViewRows

# estimated requests and bytes of a search in a file whose directory is not cached
_REQUESTS = 2
_BYTES = 256 << 10
# cores, and least lookups of a batch for each core
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_LOOKUPS_A_PART = 500
# stored files that are searched first
_FIRST_FILES = 2
# files whose filters are tested together
_LOOK_AHEAD = 32
# objects are deleted a day after a record has removed them, so a lookup meets a missing one once; with `--grace 0` it
# starts again until it has the time to read its objects, for at most so long after the first one
_RESTARTS_S = 30.0
T = TypeVar("T")


def reports_of_pass(
    notes: Sequence[FileNote], viewed: Noted | None, prices: PriceTable, source: str | None = None
) -> list[FileReport]:
    """Return the reports of files: those that were searched, and those that a view has searched.

    `source`: the URI of their index if it is one of several.
    """
    reports = [note() for note in notes]
    if viewed is not None:
        reports = with_reads_of(viewed, reports, prices) + reports_of(viewed, prices)
    return reports if source is None else [replace(report, source=source) for report in reports]


@dataclass(slots=True, eq=False)
class LookupFiles:
    """The snapshot of an index as one lookup sees it, to its end.

    - `listed` returns the files of the snapshot in an inclusive range of epoch seconds.
    - `beside`: what else is searched: buffered entries, and a file that fails, for a log that could not be read.
    - `view` searches all files of the snapshot; None: there is no compiled core, or the files have just changed.
    - `freshness`: of storages that are read without a root, of a fenced writer, and of topics that a source has read.
    - `logs`: the entries that answers lack by the logs. `hidden`: what the only log hides, by topic (None: nothing).
    - `states`: the state of the log; none if it was not read.
    - `not_asked`: why a root was read without its storage; None: it was not.
    - `has_topics`: without `beside`, these are all topics of the index.
    - `catalog`, and the `mark` of its snapshot, for `held`.
    """

    listed: Callable[[int, int], Sequence[Handle]]
    beside: Sequence[Handle] = ()
    view: LocalView | None = None
    freshness: tuple[Freshness, ...] = ()
    logs: Logs = NO_LOGS
    states: Sequence[LogState] = ()
    not_asked: str | None = None
    has_topics: bool = True
    catalog: Catalog | None = None
    mark: object = None
    about: About = field(init=False)
    hidden: HiddenTable | None = field(init=False)

    def __post_init__(self) -> None:
        # here, because a warm lookup takes less time than a property
        self.about, self.hidden = (self.freshness, self.logs), self.logs.hidden

    def handles(self, second_min: int, second_max: int) -> list[Handle]:
        """Return all that may have answers in an inclusive range of epoch seconds."""
        return [*self.beside_within(second_min, second_max), *self.listed(second_min, second_max)]

    def beside_within(self, second_min: int, second_max: int) -> list[Handle]:
        """Return those of `beside` that may have answers in an inclusive range of epoch seconds."""
        return [handle for handle in self.beside if handle.second_min <= second_max and handle.second_max >= second_min]

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Keep the files until the block ends, and yield whether they are still those of the present snapshot."""
        if self.catalog is None:
            yield False
            return
        with self.catalog.reading() as snapshot:
            yield snapshot.mark is self.mark


class Begun(NamedTuple):
    """A lookup that a view has answered in part: its files, and the rows of those that need no further search."""

    files: LookupFiles
    rows: ViewRows


class _FileSearch:
    """The search of one file. Its thread or the lookup ends it; the first of both makes its report."""

    def __init__(self, run: LookupRun, scan: Scan, handle: Handle) -> None:
        self.run, self.scan = run, scan
        self.handle = handle
        self.place = handle.place
        self.usage: Usage | None = None
        self.cancellation = Cancellation()
        self.started = time.perf_counter()
        self.matched: int | None = None
        self._ended = False

    def end(self, outcome: str, *, matched: int = 0, error: TieredIndexError | None = None) -> None:
        with self.scan.lock:
            if self._ended:
                return
            self._ended = True
            # before the requests are counted
            self.cancellation.set()
            usage = self.usage
            spent = NOTHING if usage is None else RequestStats.of_usage(usage)
            # a stored file that needed no request
            cached = outcome == "read" and self.place == "storage" and usage is not None and not usage.used
            place = "cache" if cached else self.place
            self.scan.note(self.handle, outcome, place, self.started, matched, spent, error)

    def end_late(self) -> None:
        self.end("failed", error=BudgetExceeded(f"timeout_s was reached before {self.handle.file_id} was read"))


class _Pace:
    """Decides how many stored files one scan searches at the same time, so that answers can skip later files.

    The two newest files come first, because for a frequent key they have the whole answer. Their number of answers then
    gives an estimate of the files that are needed. Each file without an answer multiplies the number by four, up to a
    file for each missing answer, and then by two. So a rare key costs one more round trip; none if filters exclude at
    least half of the files.
    """

    def __init__(self, scan: Scan, ordered: Sequence[Handle]) -> None:
        self._scan = scan
        self._ordered = ordered
        # the last second of any answer in these files
        self.newest = min(scan.newest, ordered[0].second_max) if ordered else 0
        self._reasons: list[str | None] = []
        # as in `excluded`; a view has excluded some before
        self._stored = self._excluded = 0 if scan.viewed is None else excluded_by(scan.viewed)
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
        """Return how many searches may run at the same time while `missing` answers are missing."""
        if self._searched:
            estimate = -(-missing * self._searched // self._matched) if self._matched else 0
            return max(self._width, min(self._fast, missing), estimate)
        if under_way < _FIRST_FILES:
            return min(_FIRST_FILES, missing)
        # test filters while the first requests are under way
        self.excluded(min(len(self._reasons) + _LOOK_AHEAD, len(self._ordered)) - 1)
        return missing if 2 * self._excluded >= self._stored else _FIRST_FILES

    def note(self, ended: Sequence[_FileSearch]) -> None:
        """Adjust the pace to the results of the searches that ended."""
        counts = [search.matched or 0 for search in ended]
        self._searched, self._matched = len(counts), sum(counts)
        if without := counts.count(0):
            self._width *= 2
            self._fast = max(_FIRST_FILES, self._fast) * 4**without


class FileReader:
    """Scans the files of an index, with a bounded number of parallel searches in the storage. Any thread."""

    def __init__(self, threads: int, prices: PriceTable) -> None:
        self._threads = threads
        self._prices = prices
        self._pool = DaemonPool(threads, "tiered-index-query")
        self._closed = False

    def close(self, until_s: float | None = None) -> None:
        """Stop the pool. Running lookups end with an answer or `IndexClosed`. See `DaemonPool.close`."""
        # queued searches still run, and notice the close: a cancelled one would make its lookup wait permanently
        self._closed = True
        self._pool.close(until_s)

    def in_parts(self, call: Call, find: Callable[[int, int], T], count: int) -> list[T]:
        """Return the results of `find(start, stop)` for all parts of `count` lookups. The parts run in parallel."""
        parts = max(1, min(_CORES, self._threads, count // _LOOKUPS_A_PART))
        ends = [count * number // parts for number in range(parts + 1)]
        parts_of_call = call.with_threads(self._pool.submit)
        return side_by_side([partial(find, *part) for part in itertools.pairwise(ends)], parts_of_call)

    def read(self, run: LookupRun, scan: Scan, handles: Sequence[Handle]) -> None:
        """Search the handles that need it. `scan` then has a report of each file, and every error."""
        ordered = (
            sorted(handles, key=lambda h: (-h.second_max, -h.sequence, h.file_id)) if len(handles) > 1 else handles
        )
        searching: dict[Future[None], _FileSearch] = {}
        pace: _Pace | None = None
        timed = run.budget.is_timed
        try:
            for place, handle in enumerate(ordered):
                if scan.errors and run.fails(scan):
                    break
                # there are no answers before the first file is read
                if place and scan.can_skip(handle.second_max):
                    scan.note(handle, "skipped_budget", handle.place)
                    continue
                if timed and run.budget.remaining_s() == 0:
                    _FileSearch(run, scan, handle).end_late()
                    continue
                if handle.is_local:
                    if (damaged := _look(scan, handle, run.call)) is None:
                        continue
                    handle = damaged
                elif excluded := (pace := pace or _Pace(scan, ordered)).excluded(place):
                    scan.note(handle, f"skipped_{excluded}", handle.place)
                    continue
                if not (timed or searching) and place == len(ordered) - 1:
                    # the only stored file, so no thread is needed
                    self._search(_FileSearch(run, scan, handle))
                else:
                    pace = pace or _Pace(scan, ordered)
                    self._wait_for_turn(run, scan, pace, handle, searching)
                    self._begin(_FileSearch(run, scan, handle), searching)
            while searching and not all(scan.can_skip(search.handle.second_max) for search in searching.values()):
                if not self._collect(run, scan, searching):
                    break
        finally:
            scan.stop = True
            for future, search in searching.items():
                # its request may be under way, but the lookup does not wait for it
                future.cancel()
                search.end("skipped_budget")

    def _wait_for_turn(
        self, run: LookupRun, scan: Scan, pace: _Pace, handle: Handle, searching: dict[Future[None], _FileSearch]
    ) -> None:
        """Wait until one more search may begin, or is no longer needed."""
        while True:
            missing = 0 if handle.second_max >= pace.newest else scan.missing()
            room = min(self._threads, pace.room(missing, len(searching))) if missing else self._threads
            under_way = len(searching)
            # or another whole search, so that directories alone don't use up the budget
            if under_way < room and (
                not under_way or run.budget.affords(_REQUESTS * (under_way + 1), _BYTES * (under_way + 1))
            ):
                return
            if not (ended := self._collect(run, scan, searching)):
                return
            pace.note(ended)
            if scan.can_skip(handle.second_max):
                return

    def _begin(self, search: _FileSearch, searching: dict[Future[None], _FileSearch]) -> None:
        """Search a file in another thread, if it is still needed and there is time."""
        run, scan = search.run, search.scan
        if scan.can_skip(search.handle.second_max):
            search.end("skipped_budget")
        elif run.budget.is_timed and run.budget.remaining_s() == 0:
            search.end_late()
        else:
            try:
                future = self._pool.submit(self._search_needed, search)
            except NoThread as error:
                if run.budget.is_timed:
                    search.end("failed", error=error)
                else:
                    self._search(search)
                return
            searching[future] = search
            scan.done = scan.done or queue.SimpleQueue()
            future.add_done_callback(scan.done.put)

    def _collect(self, run: LookupRun, scan: Scan, searching: dict[Future[None], _FileSearch]) -> list[_FileSearch]:
        """Wait until a search ends, and return all that have ended. If the time is up, end all and return none."""
        ended: list[_FileSearch] = []
        while searching and not ended:
            ended = self._ended(scan, searching, run.budget.remaining_s())
            if not ended and run.budget.remaining_s() == 0:
                for search in searching.values():
                    search.end_late()
                searching.clear()
        return ended

    def _ended(self, scan: Scan, searching: dict[Future[None], _FileSearch], wait_s: float | None) -> list[_FileSearch]:
        """Wait until a search ends, and return all that have ended."""
        ended: list[_FileSearch] = []
        assert scan.done is not None
        with contextlib.suppress(queue.Empty):
            # a queue, because `wait` takes the locks of all futures each time
            future = scan.done.get(timeout=wait_s)
            while True:
                future.result()
                ended.append(searching.pop(future))
                future = scan.done.get_nowait()
        return ended

    def _search_needed(self, search: _FileSearch) -> None:
        """Search a file, in a thread of the pool, unless it is no longer needed."""
        scan = search.scan
        if scan.stop or (scan.errors and search.run.fails(scan)):
            return
        if self._closed:
            raise IndexClosed("the index was closed during the lookup")
        if scan.can_skip(search.handle.second_max):
            search.end("skipped_budget")
        else:
            self._search(search)

    def _search(self, search: _FileSearch) -> None:
        search.usage = usage = Usage(self._prices)
        call = search.run.call.counting(usage).cancelled_by(search.cancellation).with_threads(self._pool.submit)
        try:
            search.matched = search.scan.look(search.handle, call)
        except TieredIndexError as error:
            search.end("failed", error=error)
            return
        search.end("read", matched=search.matched)


def _look(scan: Scan, handle: Handle, call: Call) -> Handle | None:
    """Search a local file in the caller's thread. Return the file in the storage if the local copy is damaged."""
    started = time.perf_counter()
    try:
        matched = scan.look(handle, call)
    except TieredIndexError as error:
        if isinstance(error, CorruptFile | StorageUnavailable) and (fallback := handle.fallback) is not None:
            return fallback
        scan.note(handle, "failed", handle.place, started, error=error)
    else:
        scan.note(handle, "read", handle.place, started, matched)
    return None


@dataclass(eq=False)
class LookupRun:
    """One call for one index: its files, its bounds, its cost, and the objects that it did not find.

    Threads: one lookup's. `source`: the URI of the index if it is one of several.

    A later record may have removed a missing object, or the storage lost it. At the end of a pass, new log records of
    each storage that lacks objects are read. If the log still names all objects, the pass counts, and the objects are
    reported as unreadable. Otherwise the lookup starts again with the present files, and reports the cost of earlier
    passes.
    """

    take: Callable[[], contextlib.AbstractContextManager[LookupFiles]]
    """Takes the present snapshots for one try, which keep their files until the block ends."""
    allow_partial: bool
    budget: LookupBudget
    call: Call
    prices: PriceTable
    read_log: Callable[[str, Call], LogState]  # reads new records of the log of a storage, by URI, into its catalog
    searches: FileReader
    source: str | None = None
    begun: Begun | None = None
    """The first try continues it, if its files are still the present ones."""
    files: LookupFiles = field(init=False)
    """The snapshots of the present try."""
    _known: dict[tuple[str, str], TieredIndexError] = field(default_factory=dict)

    def fails(self, scan: Scan) -> bool:
        """Return whether an unreadable file fails the lookup. A spent budget and a `FolderDenied` don't."""
        mild = BudgetExceeded, FolderDenied
        return not self.allow_partial and any(not isinstance(error, mild) for _, error in scan.errors)

    def run(self, search: Callable[[LookupRun], Pass[ScanT]]) -> Pass[ScanT]:
        """Return the pass of `search`, repeated if the log has removed an object. Raises the errors of `_moved_on`.

        It is repeated once at least, and within `_RESTARTS_S` of the first missing object.
        """
        until_s: float | None = None
        outdated: list[FileReport] = []
        while True:
            with contextlib.ExitStack() as held:
                if self.begun is None or not held.enter_context(self.begun.files.held()):
                    self.begun = None
                    self.files = held.enter_context(self.take())
                else:
                    self.files = self.begun.files
                index_pass = search(self)
                uri = self._moved_on(index_pass.scan)
            scan, self.begun = index_pass.scan, None
            if uri is None:
                scan.outdated = outdated
                return index_pass
            now_s = time.monotonic()
            if until_s is None:
                until_s = now_s + _RESTARTS_S
            elif now_s >= until_s:
                raise StorageUnavailable(
                    f"{uri}: a log record removed an object during a lookup, and did so again and again for "
                    f"{_RESTARTS_S:g} s: try again"
                )
            given_up = reports_of_pass(scan.notes, scan.viewed, self.prices, self.source)
            outdated += [replace(report, outcome="outdated", matched=0) for report in given_up if report.requests]

    def _moved_on(self, scan: Scan) -> str | None:
        """Return the URI of a storage whose log has removed a missing object; None: the pass counts.

        The log is read for each object that is missing. If it still has them, their errors become those of lost
        objects. Raises `CorruptFile` for them if the answer may not be partial, and the log's errors.
        """
        unknown: dict[str, list[MissingObject]] = {}
        for _, error in scan.errors:
            if isinstance(error, MissingObject) and (error.uri, error.name) not in self._known:
                unknown.setdefault(error.uri, []).append(error)
        if moved_on := [uri for uri, errors in unknown.items() if self._were_removed(uri, errors)]:
            return moved_on[0]
        for number, (report, error) in enumerate(scan.errors):
            if isinstance(error, MissingObject):
                meant = self._known[error.uri, error.name]
                scan.errors[number] = (replace(report, error=str(meant)), meant)
        return None

    def _were_removed(self, uri: str, missing: Sequence[MissingObject]) -> bool:
        """Read new log records. Return whether they removed any of the missing objects, and note the others."""
        meant: TieredIndexError | None = None
        try:
            state = self.read_log(uri, self.call)
        except BudgetExceeded as spent:
            meant = spent
        except (StorageError, CorruptFile) as unread:
            if not self.allow_partial:
                raise
            meant = unread  # unknown whether they were removed or lost
        if meant is not None:
            self._known |= {(uri, error.name): meant for error in missing}
            return False
        lost = [error for error in missing if error.name in state.objects]
        if lost and not self.allow_partial:
            raise lost_error(lost[0].name) from lost[0]
        self._known |= {(uri, error.name): error for error in lost}
        return len(lost) < len(missing)


ScanT = TypeVar("ScanT", bound=Scan)


@dataclass(slots=True)
class Pass(Generic[ScanT]):
    """The result of a lookup in one index, whose `run` has ended.

    `unknown`: the topics of the lookup that no file of the index has; None: it has no file in range.
    """

    run: LookupRun
    scan: ScanT
    unknown: tuple[str, ...] | None = None

    @property
    def errors(self) -> list[tuple[FileReport, TieredIndexError]]:
        """The files that could not be read, and why."""
        source = self.run.source
        return [
            (report if source is None else replace(report, source=source), error) for report, error in self.scan.errors
        ]


SearchAll: TypeAlias = "Callable[[Callable[[LookupRun], Pass[ScanT]]], Sequence[Pass[ScanT]]]"
"""Takes the search of one index. Returns a pass for each index, at least one."""
