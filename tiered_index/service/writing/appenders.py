"""Appenders: each writes a sequence of unsealed files. The last one accepts entries.

It continues in a fresh file where the present one is full, where a timestamp's difference would not fit 32 bits, and
where an append failed. Whatever was raised, at whatever line, the next write begins by letting go of a file that
accepts no more (`_end`): nothing else has to be undone. Threads: the flusher's only, except for `active`, which anyone
may read.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.clock import Clock, StepTimes
from tiered_index.errors import DiskFull, TieredIndexError
from tiered_index.format.journal import Journal
from tiered_index.format.layout import ROCKETMQ, Layout
from tiered_index.format.names import UNSEALED, new_file_id
from tiered_index.service.answers.validation import Columns, TopicTable
from tiered_index.service.catalog.catalog import Catalog
from tiered_index.service.files.unsealed import Reserve, UnsealedFile, entries_ahead, first_bytes
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import max_positions
from tiered_index.service.root import Deletions, Root, disk_error

MAIN, QUARANTINE = "main", "quarantine"
_log = logging.getLogger(__name__)
# entries of one append: bounds the memory of a flush to some 40 MiB
_BATCH = 1 << 19


@dataclass
class Run:
    """Rows that an appender must write; `done` of them are durable. `positions` become durable with the last one, and
    a file that is begun has the `known` ones.
    """

    columns: Columns
    positions: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    done: int = 0

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.columns["second"])


@dataclass
class AppenderContext:
    """The shared parts of one root's appenders. `admit` raises `DiskFull`; `list_files` notes in the root which files
    the catalog has.
    """

    root: Root
    catalog: Catalog
    topics: TopicTable
    clock: Clock
    offset_space: str
    sequence: itertools.count[int]
    admit: Callable[[int], None]
    log: StorageLog
    deletions: Deletions
    list_files: Callable[[], None]

    def __post_init__(self) -> None:
        self.seals = StepTimes(self.clock)


@dataclass(eq=False)
class Appender:
    """One sequence of files. The main one has the next one's space taken ahead, and each of its files begins with the
    durable positions of all sources, so that the newest one has them all, whatever becomes of older files.
    """

    name: str
    layout: Layout
    context: AppenderContext
    active: UnsealedFile | None = None
    trouble: TieredIndexError | None = None  # why the next file has no space yet
    _reserve: Reserve | None = None
    _carried: dict[str, int] = field(default_factory=dict)
    _last: tuple[str, int] | None = None  # the file before, and its durable entries
    _given_up: list[UnsealedFile] = field(default_factory=list)

    def write(self, run: Run) -> None:
        """Make the remaining rows durable. Raises typed errors; a repeated call continues."""
        self.context.root.check()  # a folder that was deleted, or another in its place, confirms nothing
        total = run.count
        tried = False
        while run.done < total or run.positions:
            file = self._writable(run)
            stop = self._fitting(file, run)
            if stop == run.done and run.done < total:
                self._end(file)  # it has no room for this time difference
                continue
            piece = {name: values[run.done : stop] for name, values in run.columns.items()}
            last = stop == total
            self._make_room(file, stop - run.done)
            try:
                self._append(file, piece, run.positions if last else {})
            except OSError as error:
                _log.warning("%s takes no more entries: %s", file.path, error)
                self._end(file)
                if tried:
                    raise disk_error(error, f"writing {file.path}") from error
                # space for one more try is reserved, or asked for now; a second failure is the caller's
                tried = True
                continue
            tried = False
            run.done = stop
            if file.table.free == 0:
                self._end(file)
            if last:
                return

    def _append(self, file: UnsealedFile, piece: Columns, positions: dict[str, int]) -> None:
        names = [(topic_id, self.context.topics.name(topic_id)) for topic_id in _distinct(piece["topic_id"])]
        file.append(piece, names, max_positions(self._carried, positions))
        self._show(file)
        self._carried = {}
        while self._given_up:
            self._given_up[-1].discard(self.context.deletions)
            self._given_up.pop()

    def _show(self, file: UnsealedFile) -> None:
        """Let lookups see a file's entries."""
        if self.context.catalog.get(file.file_id) is not None:
            self.context.catalog.extend(file)
        elif file.count:
            self.context.catalog.put(file)
            self.context.list_files()

    def _fitting(self, file: UnsealedFile, run: Run) -> int:
        """Return where the rows that this file can take end."""
        stop = min(run.done + file.table.free, run.done + _BATCH, run.count)
        differences = run.columns["second"][run.done : stop] - file.table.begin_ms // 1000
        outside = np.flatnonzero((differences > 2**31 - 1) | (differences < -(2**31)))
        return run.done + int(outside[0]) if outside.size else stop

    def _writable(self, run: Run) -> UnsealedFile:
        if self.active is not None:
            if self.active.accepts:
                return self.active
            self._end(self.active)
        self.context.root.check()  # another index may be where this root was
        first_s = int(run.columns["second"][run.done]) if run.done < run.count else self.context.clock.now_ms() // 1000
        begin_ms = first_s * 1000
        if self.layout.preset is ROCKETMQ:
            begin_ms = self._free_begin(begin_ms)
        self._carried = max_positions(self._carried, run.known)
        reserve, self._reserve = self._reserve or self._take_space(), None
        try:
            journal = Journal(
                new_file_id(begin_ms),
                self.layout,
                begin_ms,
                self.name,
                next(self.context.sequence),
                self.context.offset_space,
                self.context.clock.now_ms(),
                self._last,
                log_number=self.context.log.state.number,
            )
            self.active = UnsealedFile.begin(self.context.root, reserve, journal)
        except BaseException as error:  # whatever it is, the space is given back
            reserve.discard()
            if not isinstance(error, OSError):
                raise
            raise disk_error(error, f"beginning a file in {self.context.root.path}") from error
        return self.active

    def _free_begin(self, begin_ms: int) -> int:
        """Return the first begin, by whole seconds from `begin_ms` on, of no other file: RocketMQ names files by it."""
        files = {handle.file_id for handle in self.context.catalog.all()}
        files |= {path.stem for path in self.context.root.folder(UNSEALED).iterdir()}
        taken = {file_id.partition("-")[0] for file_id in files}
        while f"{begin_ms:015d}" in taken:
            begin_ms += 1000
        return begin_ms

    def show(self) -> None:
        """Let RocketMQ see the active file's entries (`UnsealedFile.show`); a failure is logged and tried again."""
        if self.active is not None and self.layout.preset is ROCKETMQ:
            try:
                self.active.show(self.context.clock.now_ms())
            except OSError as error:
                _log.warning("%s: RocketMQ can't see the newest entries: %s", self.active.path, error)

    def _take_space(self) -> Reserve:
        size_bytes = first_bytes(self.layout)
        self.context.admit(size_bytes)
        try:
            return Reserve(self.context.root, self.layout)
        except OSError as error:
            raise disk_error(error, f"reserving {size_bytes:,} bytes in {self.context.root.path}") from error

    def _make_room(self, file: UnsealedFile, count: int) -> None:
        """Have disk space for `count` more entries; where there is none, raise a typed error: the file stays."""
        if lacking := file.lacking(count):
            self.context.admit(lacking)
            try:
                file.allocate(lacking)
            except OSError as error:
                raise disk_error(error, f"reserving {lacking:,} bytes for {file.path}") from error

    def reserve_next(self) -> None:
        """Take space ahead once a file is in use, off the path of writes: a step of it, and the beginning of the next
        file. A failure is retried.
        """
        if self.name == MAIN and (self.active is not None or self.trouble is not None):
            try:
                if self.active is not None and self.active.accepts:
                    self._make_room(self.active, entries_ahead(self.layout))
                if self._reserve is None:
                    self._reserve = self._take_space()
            except TieredIndexError as error:
                is_bound = isinstance(error, DiskFull) and error.bound is not None
                # the bound that was set is no trouble: a write that it refuses raises it, and uploads may make room
                if self.trouble is None:
                    level = logging.DEBUG if is_bound else logging.WARNING
                    _log.log(level, "no space for the next file yet: %s", error)
                self.trouble = None if is_bound else error
            else:
                self.trouble = None

    def roll(self) -> None:
        """Seal the active file, if there is one with entries."""
        if self.active is not None and (self.active.count or self.active.failed):
            self._end(self.active)

    def _end(self, file: UnsealedFile) -> None:
        """Seal the active file, or give it up: its positions go to the next before it is deleted. May be repeated."""
        if file.count:
            self._show(file)
            self._last = (file.file_id, file.count)
            try:
                self.context.seals.run(file.seal)
            except TieredIndexError as error:
                _log.warning("%s is sealed in memory only: %s", file.path, error)
            else:
                _log.info("sealed %s: %d entries", file.file_id, file.count)
        else:
            self._carried = max_positions(self._carried, file.positions)
            file.let_go()
            if not file.positions:
                file.discard(self.context.deletions)
            elif file not in self._given_up:
                self._given_up.append(file)
        self.active = None

    def close(self) -> None:
        """Write header and slot table of the active file, and close it; reading continues."""
        if self.active is not None:
            self.active.close()

    def adopt(self, files: list[UnsealedFile], *, goes_on: bool) -> None:
        """Take over recovered files, by sequence: the newest continues if it accepts entries hashed as those to come,
        others are sealed or given up. `goes_on`: the log was read, so that no other copy of this root has published it.
        """
        for file in files:
            if file.count:
                self.context.catalog.put(file)
        for file in files:
            self.active = file
            if file is not files[-1] or not goes_on or not file.accepts or file.layout.hash != self.layout.hash:
                self._end(file)

    def release_reserve(self, *, keep: bool) -> None:
        """Give back what was taken ahead; `keep` leaves its file behind, as a crash would."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            (reserve.abandon if keep else reserve.discard)()


def _distinct(values: npt.NDArray[Any]) -> list[int]:
    if len(values) and values.min() == values.max():
        return [int(values[0])]
    return np.unique(values).tolist()  # type: ignore[no-any-return]
