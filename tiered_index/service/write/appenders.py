"""Appenders: each writes a sequence of unsealed files; the last one accepts entries.

An appender begins a new file if the current one is full, or if a timestamp's difference does not fit 32 bits. It also
does so after a failed append. After any error, the next write first ends a file that accepts no more entries (`_end`);
nothing else must be undone. Threads: only the flusher's; any thread may read `active`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.clock import Clock, StepTimes
from tiered_index.errors import DiskFull, TieredIndexError
from tiered_index.format.journal import Journal, documents_in_records, fit_record, in_records
from tiered_index.format.layout import ROCKETMQ, Layout
from tiered_index.format.names import UNSEALED, new_file_id
from tiered_index.format.topic_documents import Documents, Revision, missing_documents
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import max_positions
from tiered_index.service.read.files.snapshot import Catalog
from tiered_index.service.read.files.unsealed import Reserve, UnsealedFile, entries_ahead, first_bytes
from tiered_index.service.root import Deletions, Root, disk_error, disk_errors
from tiered_index.service.write.marks import Marks
from tiered_index.service.write.validation import Columns, TopicTable

MAIN, QUARANTINE = "main", "quarantine"
_log = logging.getLogger(__name__)
# entries of one append: bounds the memory of a flush to about 40 MiB
_BATCH = 1 << 19
# the bytes by which a journal may grow before room for it is sought again
_JOURNAL_STEP = 1 << 12
# the most records of a journal without entries: then another file takes over its positions
_POSITIONS = 1 << 12


@dataclass
class FlushRun:
    """Rows that an appender must write; the first `done` are durable.

    `positions` become durable with the last row, and those of `marks` with the rows before them. A new file begins with
    the positions `known`.
    """

    columns: Columns
    positions: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    marks: Marks = field(default_factory=Marks)
    done: int = 0

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.columns["second"])

    @cached_property
    def interval(self) -> tuple[int, int]:
        """The smallest and the greatest second of the rows, of which there is at least one."""
        seconds = self.columns["second"]
        return int(seconds.min()), int(seconds.max())


@dataclass
class AppenderContext:
    """The shared parts of one root's appenders.

    `admit` raises `DiskFull`. `list_files` writes the catalog's files to the root's list.
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
    """Writes one sequence of files.

    The main appender reserves the next file's space in advance. Each of its files begins with the durable positions of
    all sources, so the newest file alone has all positions.
    """

    name: str
    layout: Layout
    context: AppenderContext
    active: UnsealedFile | None = None
    trouble: TieredIndexError | None = None  # the error that prevents space for the next file
    _reserve: Reserve | None = None
    _carried: dict[str, int] = field(default_factory=dict)
    _last: tuple[str, int] | None = None  # the previous file and its durable entries
    _given_up: list[UnsealedFile] = field(default_factory=list)
    # the length of the active file's journal when room for more of it was last found
    _journal_bytes: int = 0
    # the active file, and the documents that it or the log has
    _documented: tuple[str, int] = "", 0

    def write(self, run: FlushRun) -> None:
        """Make the remaining rows durable. Raises typed errors; a repeated call continues."""
        self.context.root.check()  # entries in a deleted or replaced folder are not durable
        total = run.count
        tried = False
        while run.done < total or run.positions:
            file = self._writable(run)
            stop = _whole_messages(file, run, self._fitting(file, run))
            if stop == run.done and run.done < total:
                self._end(file)  # this time difference, or a message that another file has room for, does not fit
                continue
            stop, names = self._named(file, run, stop)
            piece = {name: values[run.done : stop] for name, values in run.columns.items()}
            last = stop == total
            positions = run.positions if last else run.marks.positions_at(stop)
            self._make_room(file, stop - run.done)
            try:
                interval = run.interval if stop - run.done == total > 0 else None
                self._append(file, piece, names, positions, interval)
            except OSError as error:
                _log.warning("an append to %s failed, so its successor takes the next entries: %s", file.path, error)
                self._end(file)
                if tried:
                    raise disk_error(error, f"writing {file.path}") from error
                # one more try, in a new file; a second failure is raised
                tried = True
                continue
            tried = False
            run.done, run.known = stop, max_positions(run.known, positions)
            if file.table.free == 0:
                self._end(file)
            if last:
                return

    def _append(
        self,
        file: UnsealedFile,
        piece: Columns,
        names: list[tuple[int, str]],
        positions: dict[str, int],
        interval: tuple[int, int] | None,
    ) -> None:
        since = self._documented[1] if self._documented[0] == file.file_id else 0
        changed, count = self.context.topics.documents_since(since)
        *before, carried = in_records(self._carried)
        *earlier, documents = documents_in_records(self._lacking(file, names, changed))
        nothing = {name: values[:0] for name, values in piece.items()}
        for part in before:
            file.append(nothing, [], part)
        for described in earlier:
            file.append(nothing, [], {}, documents=described)
        file.append(piece, names, max_positions(carried, positions), interval, documents)
        self._documented = file.file_id, count
        self._show(file)
        self._carried = {}
        while self._given_up:
            self._given_up[-1].discard(self.context.deletions)
            self._given_up.pop()

    def _lacking(self, file: UnsealedFile, names: list[tuple[int, str]], changed: Documents) -> dict[str, Revision]:
        """Return the documents that a file lacks: of its topics, and the `changed` ones that the log lacks, too."""
        stored, topics = file.journal.documents, self.context.topics
        lacking = missing_documents(missing_documents(changed, self.context.log.state.documents), stored)
        for topic_id, topic in names:
            if topic_id not in file.journal.topics:
                lacking |= missing_documents(topics.document(topic), stored)
        return lacking

    def _show(self, file: UnsealedFile) -> None:
        """Make a file's entries visible to lookups."""
        if self.context.catalog.get(file.file_id) is not None:
            self.context.catalog.extend(file)
        elif file.count:
            self.context.catalog.put(file)
            self.context.list_files()

    def _fitting(self, file: UnsealedFile, run: FlushRun) -> int:
        """Return the end of the rows that this file can take."""
        stop = min(run.done + file.table.free, run.done + _BATCH, run.count)
        begin_s = file.table.begin_ms // 1000
        if not run.count or (run.interval[1] - begin_s < 2**31 and run.interval[0] - begin_s >= -(2**31)):
            return stop
        differences = run.columns["second"][run.done : stop] - begin_s
        wrong = np.flatnonzero((differences >= 2**31) | (differences < -(2**31)))
        return run.done + int(wrong[0]) if len(wrong) else stop

    def _named(self, file: UnsealedFile, run: FlushRun, stop: int) -> tuple[int, list[tuple[int, str]]]:
        """Return the end of the rows before `stop` whose new topics fit one journal record, and the rows' topics."""
        while True:
            ids = _distinct(run.columns["topic_id"][run.done : stop])
            names = [(topic_id, self.context.topics.name(topic_id)) for topic_id in ids]
            if stop - run.done <= 1 or fit_record(pair for pair in names if pair[0] not in file.journal.topics):
                return stop, names
            stop = run.done + (stop - run.done) // 2

    def _writable(self, run: FlushRun) -> UnsealedFile:
        if self.active is not None:
            if self.active.accepts:
                return self.active
            self._end(self.active)
        self.context.root.check()  # another index may have replaced this root
        first_s = int(run.columns["second"][run.done]) if run.done < run.count else self.context.clock.now_ms() // 1000
        begin_ms = first_s * 1000
        if self.layout.preset is ROCKETMQ:
            begin_ms = self._free_begin(begin_ms)
        self._carried = max_positions(self._carried, run.known)
        reserve, self._reserve = self._reserve or self._take_space(), None
        with contextlib.ExitStack() as undo, disk_errors(f"beginning a file in {self.context.root.path}"):
            undo.callback(reserve.discard)  # give the space back after any error
            journal = Journal(
                new_file_id(begin_ms),
                self.layout,
                begin_ms,
                self.name,
                next(self.context.sequence),
                self.context.offset_space,
                self.context.clock.now_ms(),
                self._last,
                log_number=self.context.log.known_number,
            )
            file = UnsealedFile.begin(self.context.root, reserve, journal)
            undo.pop_all()  # before the file is used, because an interrupt between the two lines closes it
            self.active = file
        return file

    def _free_begin(self, begin_ms: int) -> int:
        """Return the first free begin, in whole seconds from `begin_ms` on: RocketMQ names files by their begin."""
        files = {handle.file_id for handle in self.context.catalog.all()}
        files |= {path.stem for path in self.context.root.folder(UNSEALED).iterdir()}
        taken = {file_id.partition("-")[0] for file_id in files}
        while f"{begin_ms:015d}" in taken:
            begin_ms += 1000
        return begin_ms

    def show(self) -> None:
        """Make the active file's entries visible to RocketMQ (`UnsealedFile.show`). A failure is logged and retried."""
        if self.active is not None and self.layout.preset is ROCKETMQ:
            try:
                self.active.show(self.context.clock.now_ms())
            except OSError as error:
                _log.warning("%s: RocketMQ can't see the newest entries yet: %s", self.active.path, error)

    def _take_space(self) -> Reserve:
        size_bytes = first_bytes(self.layout)
        self.context.admit(size_bytes)
        with disk_errors(f"reserving {size_bytes:,} bytes in {self.context.root.path}"):
            return Reserve(self.context.root, self.layout)

    def _make_room(self, file: UnsealedFile, count: int) -> None:
        """Allocate disk space for `count` more entries. Raises a typed error if there is none; the file stays."""
        grown, lacking = file.journal.valid_length - self._journal_bytes, file.lacking(count)
        if lacking or not 0 <= grown < _JOURNAL_STEP:
            self.context.admit(lacking + _JOURNAL_STEP)
            self._journal_bytes = file.journal.valid_length
        if lacking:
            with disk_errors(f"reserving {lacking:,} bytes for {file.path}"):
                file.allocate(lacking)

    def reserve_next(self) -> None:
        """Reserve space outside of writes, if a file is in use: for more of its entries, and for the next file's begin.

        A failure is retried.
        """
        if self.name == MAIN and (self.active is not None or self.trouble is not None):
            try:
                if self.active is not None and self.active.accepts:
                    self._make_room(self.active, entries_ahead(self.layout))
                if self._reserve is None:
                    self._reserve = self._take_space()
            except TieredIndexError as error:
                is_bound = isinstance(error, DiskFull) and error.bound is not None
                # the configured bound is no trouble: a refused write raises it, and uploads may free space
                if self.trouble is None:
                    level = logging.DEBUG if is_bound else logging.WARNING
                    _log.log(level, "no space for the next file yet: %s", error)
                self.trouble = None if is_bound else error
            else:
                self.trouble = None

    def roll(self) -> None:
        """Seal the active file, if it has entries. Without entries, give it up if its journal is long."""
        if self.active is not None and (
            self.active.count or self.active.failed or len(self.active.journal.batches) > _POSITIONS
        ):
            self._end(self.active)

    def _end(self, file: UnsealedFile) -> None:
        """Seal the active file; without entries, give it up. May be repeated.

        A file that is given up is deleted after the next file has its positions.
        """
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
            self._carried = max_positions(self._carried, file.journal.positions)
            file.let_go()
            if not file.journal.positions:
                file.discard(self.context.deletions)
            elif file not in self._given_up:
                self._given_up.append(file)
        self.active = None

    def close(self) -> None:
        """Write the header and slot table of the active file, and close it. Lookups can still read it."""
        if self.active is not None:
            self.active.close()

    def adopt(self, files: list[UnsealedFile], *, goes_on: bool) -> None:
        """Take over recovered files, by sequence. The newest continues if it can; others are sealed or given up.

        It can't if it accepts no entries or has another hash rule. `goes_on`: the log was read; no other copy of this
        root has published the file.
        """
        for file in files:
            if file.count:
                self.context.catalog.put(file)
        for file in files:
            self.active = file
            if file is not files[-1] or not goes_on or not file.accepts or file.layout.hash != self.layout.hash:
                self._end(file)

    def release_reserve(self, *, keep: bool) -> None:
        """Give the reserved space back; `keep` leaves its file, as a crash would."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            (reserve.abandon if keep else reserve.discard)()


def _whole_messages(file: UnsealedFile, run: FlushRun, stop: int) -> int:
    """Return the end of the rows up to `stop` that this file takes, so that it ends with a whole message if it is full.

    A kill before the next file has the rest would leave a part of a message, which its source sends again.
    """
    if stop == run.count or stop - run.done == _BATCH:
        return stop
    if (end := run.marks.end_at(stop)) > run.done:
        return end
    following = run.marks.end_after(stop)
    fits_another = following is not None and following - run.done <= file.layout.capacity
    return run.done if file.count and fits_another else stop


def _distinct(values: npt.NDArray[Any]) -> list[int]:
    if len(values) and values.min() == values.max():
        return [int(values[0])]
    return np.unique(values).tolist()  # type: ignore[no-any-return]
