"""A job changes an index by rewrites: tasks write the contents of some objects again, one log record replaces these.

```
plan(state) ─> rewrites, each: tasks run ─> objects and proof ─ check ─> one record adds the objects, removes the inputs
     ^                              └─ an input went meanwhile, or the record was too late for one: deletes its objects
     └───────────────────────────────────────────────┘ bounded
```
A merge, an erasure with bytes, the replacement of a damaged object, a merge of catalogs and a link of files are jobs.
Objects are files and tables of entries, archived segments and catalogs. Tasks run in threads, on Spark's executors or
one after the other beside a writer: a `Workers` function decides. Each attempt of a task sends objects under new names,
so a task may be repeated, run twice at once or stop at any moment. Objects that no record names are orphans, and a
`Publication` refuses objects that a sweep may have deleted. A job without tasks (tombstones, horizons, given up
objects) is one call of `StorageLog.append`, which plans again for each state. Threads: any; several jobs at once are
safe, because the log accepts only one of them for an input.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from tiered_index.base.clock import Clock
from tiered_index.base.process import give_back
from tiered_index.errors import CorruptFile, ObjectNotFound, RootBehind, StorageBehind, TieredIndexError, without_frames
from tiered_index.service.jobs.rewriting.whole import Named, not_there
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import FinishedObject, Publication, SentObject, abandon
from tiered_index.service.log.records import ArchivedSegment, LogRecord, StoredCatalog, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import MissingCatalog, Segments, names_object
from tiered_index.storage.base import Storage
from tiered_index.types import no_progress

_log = logging.getLogger(__name__)
# rounds of a job in which another job removed an input
_TRIES = 10


class JobOvertaken(TieredIndexError):
    """Another job has removed an input; this job changed nothing. Plan again."""

    exit_code = 3


class InputsLost(CorruptFile):
    """The log names inputs (`names`) that the storage does not have. The rewrite changed nothing."""

    def __init__(self, names: set[str]) -> None:
        more = f", nor {len(names) - 1} more inputs of this job" if len(names) > 1 else ""
        super().__init__(
            min(names),
            f"the log names this object, but the storage does not have it{more}: `tiered-index verify --deep --repair` "
            f"restores it from a copy, --skip-lost (skip_lost=True) merges the rest, and `recover --lost` gives it up",
        )
        self.names = names


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The objects of a task, and the proof: entries read per input, and those left out because they had expired.

    Checksums are sums of `entry_checksum`; of a replacement, those of the tails, which have all other checksums.
    Segments and catalogs were read back, or are proven by `Rewrite.check_proof`.
    """

    number: int
    read_counts: dict[str, int]
    read_checksum: int
    objects: tuple[FinishedObject, ...]
    expired: int = 0
    expired_checksum: int = 0
    segments: tuple[tuple[ArchivedSegment, SentObject], ...] = ()
    catalogs: tuple[tuple[StoredCatalog, SentObject], ...] = ()

    @property
    def sent(self) -> list[SentObject]:
        """All objects of the task."""
        listed = (*self.segments, *self.catalogs)
        return [*(made.sent for made in self.objects), *(sent for _, sent in listed)]


class Task(Protocol):
    """A part of a rewrite, which changes nothing that readers see. Executors get it pickled."""

    @property
    def number(self) -> int:
        """The number of the task in its rewrite, from 0."""

    def run(self, storage: Storage, now_ms: int, progress: Callable[[int], None] = no_progress) -> TaskResult:
        """Send the objects. `progress` gets numbers of entries, and may raise. After an error there are no objects."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Inputs that one log record of `kind` removes, and the tasks whose objects it adds. `title` is for messages.

    This class rewrites files and tables of entries; others override `replaced`, `check_proof` and `record`.
    """

    kind: str
    title: str
    inputs: tuple[Named, ...]
    tasks: Sequence[Task]

    @property
    def of_entries(self) -> list[StoredObject]:
        """The inputs with entries."""
        return [named for named in self.inputs if isinstance(named, StoredObject)]

    @property
    def entries(self) -> int:
        """Entries to read; those that have not expired are written."""
        return sum(stored.count for stored in self.of_entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of the inputs with entries."""
        return sum(stored.size_bytes for stored in self.of_entries)

    def replaced(self, results: Sequence[TaskResult]) -> Sequence[Named]:
        """Return the inputs that the record removes. Without any, and without new objects, there is no record."""
        return self.inputs

    def check_proof(self, results: Sequence[TaskResult]) -> None:
        """Raise `CorruptFile` unless each task has a result, and each entry of inputs was written or had expired."""
        numbers = sorted(result.number for result in results)
        if numbers != [task.number for task in self.tasks]:
            raise CorruptFile(self.title, "not one result of each task", expected=len(self.tasks), found=numbers)
        for stored in self.of_entries:
            read = sum(result.read_counts.get(stored.name, 0) for result in results)
            problem = f"{self.title} read another number of entries than the log says"
            CorruptFile.unless_equal(stored.name, problem, stored.count, read)
        objects = [made for result in results for made in result.objects]
        written = sum(made.stored.count for made in objects) + sum(result.expired for result in results)
        CorruptFile.unless_equal(self.title, "wrote another number of entries than it read", self.entries, written)
        read_sum, written_sum = sum(result.read_checksum for result in results), sum(made.checksum for made in objects)
        written_sum += sum(result.expired_checksum for result in results)
        CorruptFile.unless_equal(self.title, "wrote other entries than it read", read_sum % 2**64, written_sum % 2**64)

    def record(self, segments: Segments, results: Sequence[TaskResult]) -> LogRecord:
        """Return the record for the state of `segments`. Raises `JobOvertaken` if an input of it went."""
        names = tuple(named.name for named in self.inputs)
        if gone := [name for name in names if name not in segments.state.objects]:
            raise JobOvertaken(f"{len(gone)} of {len(names)} inputs were removed from the log, {gone[0]} first")
        add = tuple(made.stored for result in results for made in result.objects)
        left_out = sum(result.expired for result in results)
        return LogRecord(0, self.kind, 0, "", 0, add, names, left_out=left_out)


R = TypeVar("R", bound=Rewrite)
Workers = Callable[[R], Iterable[TaskResult]]
"""Runs the tasks of a rewrite, and returns or yields their results."""


@dataclass(frozen=True)
class Job(Generic[R]):
    """A job in the index of `log`.

    - `plan` takes a state and the names of lost objects, and returns the rewrites, which may run in any order.
    - `epoch` is the writer's, which publishes no more once it is fenced; None: a job, which is never fenced.
    - `skips_lost`: plan again without lost objects, instead of raising `InputsLost`.
    - `repeats`: plan again after rewrites were published, until a plan is empty.
    """

    log: StorageLog
    plan: Callable[[LogState, Container[str]], Iterable[R]]
    workers: Workers[R]
    epoch: int | None = None
    skips_lost: bool = False
    repeats: bool = False

    def run(self) -> list[tuple[R, list[TaskResult]]]:
        """Plan, run and publish. Return the published rewrites with their results. Raises as `outcomes`."""
        return list(self.outcomes())

    def outcomes(self) -> Iterator[tuple[R, list[TaskResult]]]:
        """Plan, run and publish. Yield each rewrite with its results after its publication.

        Raises `JobOvertaken` if others were faster again and again, and as `carry_out`. Published rewrites stay. The
        error of a damaged or lost input is raised after all other rewrites, an error of the log at once.
        """
        lost: set[str] = set()
        damage: CorruptFile | None = None
        # the inputs of rewrites that found damage: further plans leave them
        damaged: set[tuple[str, ...]] = set()
        is_overtaken = False
        for _ in range(_TRIES):
            is_done, is_overtaken = True, False
            try:
                for rewrite in self.plan(self.log.refresh(), lost):
                    names = tuple(named.name for named in rewrite.inputs)
                    if names in damaged:
                        continue
                    try:
                        results = self.carry_out(rewrite)
                    except JobOvertaken:
                        is_overtaken = True
                        continue
                    except (MissingCatalog, StorageBehind, RootBehind):
                        raise
                    except CorruptFile as error:
                        if self.skips_lost and isinstance(error, InputsLost):
                            lost |= error.names
                            is_overtaken = True
                        else:
                            self.log.refresh()  # raises its own damage
                            damage = damage or without_frames(error)
                            damaged.add(names)
                        continue
                    is_done = False
                    yield rewrite, results
            except MissingCatalog as error:
                # a merge was faster, or the catalog is lost
                if error.file in self.log.refresh().catalogs:
                    raise
                is_overtaken = True
            if not is_overtaken and (is_done or not self.repeats):
                break
        if damage is not None:
            raise damage
        if is_overtaken:
            raise JobOvertaken(
                f"{self.log.storage.uri}: another job published first, {_TRIES} times in a row; try again later"
            )

    def carry_out(self, rewrite: R) -> list[TaskResult]:
        """Run the tasks of a rewrite and publish it. Return the results.

        Raises `InputsLost`, the errors of tasks and workers, after which the objects are deleted, and as `publish`.
        """
        results: list[TaskResult] = []
        try:
            for result in self.workers(rewrite):
                results.append(result)
        except BaseException as error:
            abandon([sent for result in results for sent in result.sent], self.log.storage)
            if isinstance(error, ObjectNotFound):
                self._check_inputs(rewrite)
            raise
        publish(rewrite, results, self.log, self.epoch)
        return results

    def _check_inputs(self, rewrite: R) -> None:
        """Raise `InputsLost` or `JobOvertaken` if the storage lacks an input."""
        missing = {named.name for named in not_there(self.log.storage, rewrite.inputs)}
        state, is_named = self.log.refresh() if missing else self.log.state, names_object(self.log.storage)
        if lost := {name for name in missing if is_named(state, name)}:
            raise InputsLost(lost) from None
        if missing:
            where = f"{self.log.storage.uri}: {min(missing)}"
            raise JobOvertaken(f"{where} is gone, and the log no longer names it") from None


def publish(rewrite: Rewrite, results: Sequence[TaskResult], log: StorageLog, epoch: int | None = None) -> LogState:
    """Check the proof of a rewrite and append its record, if it changes anything. Return the log's state.

    `epoch` is that of a writer. Raises `CorruptFile` (wrong results), `JobOvertaken`, `JobOverdue`, or for a writer
    `StorageUnavailable`, and `WriterFenced`. After the last three a job's objects are deleted, unless a record may
    still name them.
    """
    sent = [stored for result in results for stored in result.sent]
    is_named = names_object(log.storage)
    publication = Publication(log, sent, epoch, is_named)
    rewrite.check_proof(results)
    publication.check()
    replaced = rewrite.replaced(results)
    if not (replaced or sent):
        return log.state

    def make(state: LogState) -> LogRecord | None:
        if any(is_named(state, stored.name) for stored in sent) or not (
            sent or any(is_named(state, stored.name) for stored in replaced)
        ):
            return None  # an earlier try appended the record
        return replace(rewrite.record(Segments(state, log.storage), results), epoch=epoch or 0)

    try:
        state = publication.record(rewrite.title, make)
    except JobOvertaken:
        # a writer's objects are kept after other errors, and another plan makes objects of its own
        publication.resolve(log.state)
        raise
    added = ", ".join(sorted(stored.name for stored in sent)) or "none"
    logged = rewrite.title, len(replaced), rewrite.entries, added
    _log.info("carried out %s of %d objects with %d entries; new objects: %s", *logged)
    return state


def replace_input(rewrite: Rewrite, log: StorageLog) -> list[TaskResult]:
    """Carry out the rewrite of one input, unless a record has removed it: then there are no results."""
    is_named = names_object(log.storage)

    def planned(state: LogState, lost: Container[str]) -> Sequence[Rewrite]:
        return [rewrite] * is_named(state, rewrite.inputs[0].name)

    return [result for _, results in Job(log, planned, in_turn(log)).run() for result in results]


def in_turn(log: StorageLog) -> Workers[Any]:
    """Return workers of this thread, which run one task after the other."""
    return lambda rewrite: (task.run(log.storage, log.clock.now_ms()) for task in rewrite.tasks)


def in_threads(
    storage: Storage, clock: Clock, threads: int, progress: Callable[[int], None] = no_progress
) -> Workers[Rewrite]:
    """Return workers of this process, which run `threads` tasks at once."""

    def run(rewrite: Rewrite) -> Sequence[TaskResult]:
        futures: list[Future[TaskResult]] = []
        with ThreadPoolExecutor(threads, "tiered-index-job") as pool:
            try:
                for task in rewrite.tasks:  # not a comprehension: a submit may fail after earlier ones
                    futures.append(pool.submit(task.run, storage, clock.now_ms(), progress))
                results = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                done = [future for future in futures if not future.cancelled() and future.exception() is None]
                abandon([sent for future in done for sent in future.result().sent], storage)
                raise
        give_back()
        return results

    return run
