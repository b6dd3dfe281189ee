"""The writer's own merges: finished windows become window tables in the background.

`run_once` merges all windows that are due, in order of time. A job has the entries of few windows, and a record of the
writer's epoch publishes it: a fenced writer publishes nothing. A killed process leaves orphans only.

Then it joins small archived segments (`joining.py`), in the same way.

Bounds: about 256 MiB, and half a core. Between pieces of work a merge waits for flushes, compactions and uploads, and
while entries are put it works a tenth of the time. It leaves tables of builds, and windows above `merge_max_entries`.

Threads: any. A lock that nothing else takes serialises rounds. `stop` ends the running round at its next piece.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from tiered_index.base.clock import StepTimes
from tiered_index.base.process import give_back
from tiered_index.base.units import human_duration
from tiered_index.errors import (
    CorruptFile,
    DiskFull,
    IndexClosed,
    ObjectArchived,
    StorageError,
    TieredIndexError,
    WriterFenced,
    without_frames,
)
from tiered_index.service.jobs.rewriting.job import Job, JobOvertaken, TaskResult
from tiered_index.service.jobs.rewriting.merge_plan import (
    USUAL,
    Bounds,
    MergeOptions,
    MergePlan,
    MergeRewrite,
    plan_merge,
)
from tiered_index.service.jobs.segments.catalogs import MOST_WAITING, merge_catalogs
from tiered_index.service.jobs.segments.joining import JoinResult, JoinRewrite, joins_due
from tiered_index.service.life.context import LifecycleContext
from tiered_index.service.read.segments.segments import MissingCatalog, Segments

MIN_AGE_S = 3600
"""A window is merged once it ended this many seconds ago, as by the command."""
ROUND_S = 60.0
"""The pause between rounds."""
LONGEST_PAUSE_S = 3600.0
"""The longest pause after rounds that failed: each reads its inputs again."""
# a window that another job merged, or that failed, waits so long
_WAIT_S = 3600.0
# of the wall time: work while nothing is put, and while entries are put
_SHARE, _SHARE_OF_PUTS = 0.5, 0.1
# a busy writer is looked at again after so long; also the longest time to notice `stop` while resting
_LOOK_S = 0.05
# entries in memory at a time: a thread of a put waits while NumPy works on them
_PIECE_ITEMS = 1 << 16
# of its entries before packing; a shard holds 8 bytes for each entry while it is written
_SHARD_BYTES = 256 << 20
# the caller's part of memory beside the streams: directories, a piece, hashes of a shard
_DIRECTORY_BYTES, _HELD_BYTES = 32 << 20, 64 << 20
_BY_A_JOB = "run `tiered-index merge`"
# between two looks at the archived segments, with new ones and without
_JOIN_S, _WAIT_OLD_S = 600.0, 6 * 3600.0
# the name of the archived segments in errors
_SEGMENTS = "archived segments"
# the name of the catalogs of segments in errors
_CATALOGS = "catalogs of segments"
# windows that health names
_MOST_NAMED = 20
_log = logging.getLogger(__name__)

Window = tuple[int, int]
"""Length and begin of a window in seconds."""


class LeftWindow(TypedDict):
    """A window or object that the writer leaves unmerged, and why."""

    window: str
    reason: str


class MergeHealth(TypedDict):
    """The summary of a writer's merges by `IndexService.health`."""

    tiers: list[str]
    jobs: int
    sources: int
    entries: int
    lost_to_others: int
    last_ms: int | None
    waiting_windows: int
    left: list[LeftWindow]
    left_windows: int


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a round: published jobs, and the objects and entries that they merged."""

    jobs: int = 0
    sources: int = 0
    entries: int = 0


class MergeWorker:
    """Merges windows of `tiers` (lengths in seconds, the shortest first; none: nothing is merged).

    `is_busy` says whether a flush, a compaction or an upload runs. `put_entries` returns the number of entries that
    were ever put. `sleep` and `monotonic_s` replace those of `time` in tests: a merge rests in real time.
    """

    def __init__(
        self,
        context: LifecycleContext,
        tiers: Sequence[int],
        *,
        is_busy: Callable[[], bool],
        put_entries: Callable[[], int],
        sleep: Callable[[float], object] = time.sleep,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context, self.tiers = context, tuple(tiers)
        self._is_busy, self._put_entries = is_busy, put_entries
        self._sleep, self._monotonic_s = sleep, monotonic_s
        self.min_age_s = MIN_AGE_S
        self.bounds = Bounds(
            entries=context.config.merge_max_entries,
            directory_bytes=_DIRECTORY_BYTES,
            full_windows=1,
            windows=6,
            held_bytes=_HELD_BYTES,
            leaves_builds=True,
            piece_items=_PIECE_ITEMS,
            readers=1,
        )
        self.lock = threading.RLock()
        self._is_stopping = False
        self.times = StepTimes(context.clock)
        self.total = Merged()
        self.last_ms: int | None = None
        """The time of the last published job, epoch milliseconds; None: none since the index was opened."""
        self.lost_to_others = 0
        """Jobs that another merge was faster with."""
        self.errors: dict[str, TieredIndexError] = {}
        """The last error of each window that failed, and of the catalogs, until they are merged."""
        # windows that another job merged or that failed: they wait until this monotonic time, for this reason
        self._until_s: dict[Window, tuple[float, str]] = {}
        self.segments_joined = 0
        """The archived segments that are parts of others now."""
        # the catalogs and the monotonic time of the last look at the archived segments, and joins of too few whole ones
        self._joined_in: frozenset[str] = frozenset()
        self._join_looked_s = float("-inf")
        self._passed: set[tuple[str, ...]] = set()
        # the last plan of each tier
        self._planned: dict[int, MergePlan] = {}
        # work and rest of the running job
        self._worked_since_s, self._put_before = 0.0, 0

    def stop(self) -> None:
        """End the running round at its next piece, and refuse further ones. Idempotent."""
        self._is_stopping = True

    def run_once(self) -> Merged:
        """Merge all windows that are due. Raises the first error after each window had its turn.

        It does nothing while the writer has no epoch: the storage is unavailable, or the writer is fenced.
        """
        with self.lock:
            self._check_running()
            session = self._context.session
            if not self.tiers or not session.claimed or session.log_error is not None:
                return Merged()
            before = self.total
            try:
                failures = [error for window_s in self.tiers for error in self._run_tier(window_s)]
                failures += self._join_segments()
                try:
                    merge_catalogs(session.log, session.epoch, least=MOST_WAITING)
                    self.errors.pop(_CATALOGS, None)
                except CorruptFile as error:
                    self.errors[_CATALOGS] = without_frames(error)
                    failures.append(error)
                except (StorageError, DiskFull) as error:
                    self.errors[_CATALOGS] = without_frames(error)
                    raise
            except WriterFenced as error:
                session.fenced = session.fenced or without_frames(error)
                raise
            finally:
                give_back()
            if failures:
                raise failures[0]
            now = self.total
            return Merged(now.jobs - before.jobs, now.sources - before.sources, now.entries - before.entries)

    def health(self) -> MergeHealth:
        """Return a JSON-ready summary. `waiting_windows` are over, and not merged yet. `left` names some that stay.

        Times are epoch milliseconds.
        """
        left = self._left()
        return {
            "tiers": [human_duration(window_s) for window_s in self.tiers],
            "jobs": self.total.jobs,
            "sources": self.total.sources,
            "entries": self.total.entries,
            "lost_to_others": self.lost_to_others,
            "last_ms": self.last_ms,
            "waiting_windows": sum(len(planned.begins) for planned in list(self._planned.values())),
            "left": [{"window": name, "reason": why} for name, why in left[:_MOST_NAMED]],
            "left_windows": len(left),
        }

    def _left(self) -> list[tuple[str, str]]:
        """Return the windows and objects that are left, with the reasons."""
        left = [(_name(window), why) for window, (_, why) in list(self._until_s.items())]
        for window_s, planned in list(self._planned.items()):
            for begin_s, entries in planned.too_large:
                why = f"its {entries:,} entries are more than merge_max_entries = {self.bounds.entries:,}"
                left.append((_name((window_s, begin_s)), f"{why}: {_BY_A_JOB}"))
            left += [(name, why) for name, why in planned.left if why not in USUAL]
        return left

    def _run_tier(self, window_s: int) -> list[TieredIndexError]:
        """Merge the windows of one length. Return the errors of windows that now wait."""
        context, failures = self._context, list[TieredIndexError]()
        options = MergeOptions(window_s=window_s, min_age_s=self.min_age_s, shard_bytes=_SHARD_BYTES)
        while True:
            now_s = context.clock.monotonic_s()
            self._until_s = {window: until for window, until in self._until_s.items() if until[0] > now_s}
            waits = {begin_s for length_s, begin_s in self._until_s if length_s == window_s}
            state, clock_s = context.session.log.state, context.clock.now_ms() // 1000
            # one each time, because a merge may write a small table that the next one merges
            planned = plan_merge(state, options, now_s=clock_s, bounds=self.bounds, waits=waits, most=1)
            self._planned[window_s] = planned
            due = {_name((window_s, begin_s)) for begin_s in planned.begins}
            self.errors = {n: e for n, e in self.errors.items() if n in due or not n.startswith(_prefix(window_s))}
            if not planned.rewrites:
                return failures
            (rewrite,) = planned.rewrites
            failures += self._merge(rewrite, (window_s, rewrite.windows[0].begin_s))

    def _merge(self, rewrite: MergeRewrite, window: Window) -> list[TieredIndexError]:
        """Carry out one rewrite. Return its error if the window now waits.

        Other errors of the storage and the disk are raised, because they concern all windows.
        """
        name, session = _name(window), self._context.session
        job: Job[MergeRewrite] = Job(session.log, lambda *_: (rewrite,), self._tasks, session.epoch)
        try:
            self.times.run(lambda: job.carry_out(rewrite))
        except JobOvertaken as error:
            self.lost_to_others += 1
            self._wait(window, "another job was faster: the window is looked at again within an hour")
            _log.info("another job has merged %s; it is looked at again in an hour: %s", name, error)
        except (IndexClosed, WriterFenced):
            raise
        except TieredIndexError as error:
            self.errors[name] = without_frames(error)
            # an object in an archive such as Glacier concerns its window only
            if isinstance(error, StorageError | DiskFull) and not isinstance(error, ObjectArchived):
                raise
            self._wait(window, f"it is tried again within an hour: {error}")
            _log.warning("%s was not merged; it is tried again in an hour: %s", name, error)
            return [error]
        else:
            self._check_running()
            self._context.show()
            self.errors.pop(name, None)
            total = self.total
            self.total = Merged(total.jobs + 1, total.sources + len(rewrite.inputs), total.entries + rewrite.entries)
            self.last_ms = self._context.clock.now_ms()
        return []

    def _join_segments(self) -> list[TieredIndexError]:
        """Join the archived segments that are due. Return the error of a damaged catalog.

        Errors of the storage and the disk are raised.
        """
        session, clock = self._context.session, self._context.clock
        state, looked_s = session.log.state, clock.monotonic_s() - self._join_looked_s
        # without new segments some are due because of their age
        if looked_s < (_WAIT_OLD_S if self._joined_in == state.catalogs.keys() else _JOIN_S):
            return []
        self._join_looked_s = clock.monotonic_s()
        job: Job[JoinRewrite] = Job(session.log, lambda *_: (), self._tasks, session.epoch)
        try:
            for rewrite in joins_due(Segments(state, session.storage), clock.now_ms()):
                if (names := tuple(named.name for named in rewrite.inputs)) in self._passed:
                    continue
                joined = self._join(job, rewrite)
                if not joined:
                    self._passed.add(names)
                self.segments_joined += joined
        except MissingCatalog as error:
            # a merge of catalogs was faster, unless the log still names it
            if error.file not in session.log.refresh().catalogs:
                return []
            self.errors[_SEGMENTS] = without_frames(error)
            return [error]
        except CorruptFile as error:
            self.errors[_SEGMENTS] = without_frames(error)
            return [error]
        self.errors.pop(_SEGMENTS, None)
        self._joined_in = frozenset(state.catalogs)
        return []

    def _join(self, job: Job[JoinRewrite], rewrite: JoinRewrite) -> int:
        """Carry out one join. Return the number of segments that are parts of another one now."""
        try:
            results = job.carry_out(rewrite)
        except JobOvertaken as error:
            self.lost_to_others += 1
            _log.info("another job has changed segments that were to be joined: %s", error)
            return 0
        joined = 0
        for result in results:
            assert isinstance(result, JoinResult)
            joined += len(result.joined)
            for name, problem in result.damaged:
                _log.warning("an archived segment is damaged, and was not joined: %s: %s", name, problem)
        return joined

    def _tasks(self, rewrite: MergeRewrite | JoinRewrite) -> Iterator[TaskResult]:
        """Run the tasks one after the other, at rest while the writer works."""
        context = self._context
        context.root.check()
        # never in a folder that is not mounted, or in the storage of another index
        context.session.log.check_end()
        for task in rewrite.tasks:
            self._begin_piece()
            yield task.run(context.session.storage, context.clock.now_ms(), self._rest)
        self._check_running()

    def _wait(self, window: Window, why: str) -> None:
        self._until_s[window] = self._context.clock.monotonic_s() + _WAIT_S, why

    def _check_running(self) -> None:
        if self._is_stopping:
            raise IndexClosed("the index was closed during the merge")

    def _begin_piece(self) -> None:
        """Wait until the writer has no other work. Raises `IndexClosed`."""
        self._check_running()
        while self._is_busy():
            self._sleep(_LOOK_S)
            self._check_running()
        self._put_before, self._worked_since_s = self._put_entries(), self._monotonic_s()

    def _rest(self, _: int) -> None:
        """Rest after a piece of work, in proportion to its time, and begin the next one."""
        worked_s = self._monotonic_s() - self._worked_since_s
        share = _SHARE if self._put_entries() == self._put_before else _SHARE_OF_PUTS
        left_s = worked_s * (1 / share - 1)
        while left_s > 0:
            self._sleep(min(left_s, _LOOK_S))
            self._check_running()
            left_s -= _LOOK_S
        self._begin_piece()


def _name(window: Window) -> str:
    """Return a window as health names it, such as ``1d from 2023-11-14T00:00:00Z``."""
    length_s, begin_s = window
    return f"{_prefix(length_s)}{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(begin_s))}"


def _prefix(length_s: int) -> str:
    return f"{human_duration(length_s)} from "
