"""`IndexService`: the writer of an index. It accepts entries, moves them to the storage and answers lookups.

```
put ─> write buffer ─flush─> unsealed ─seal─> ─compact─> compacted ─upload─> uploaded ─retire─> storage only
```
Durability: `put` returns when the entries are in the write buffer and searchable. They survive a crash when `flush` has
returned, or `flush_interval_s` later. They survive the loss of the machine when they are uploaded. After a crash, read
each source again from its `durable_position`.

Threads: a flusher, a life-cycle worker and a merge worker run rounds (unless `background` is off). Calls that write run
in the caller's thread, each under the lock of what it changes. If an interrupt ends one of them, further calls raise
`IndexClosed`: close the index and open it again. Lookups may be interrupted.

If you forget to close an index, garbage collection closes it with a `ResourceWarning`, or `atexit` closes it. Neither
happens if the process is killed, ends by `os._exit`, or is a child of `multiprocessing`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from tiered_index.base.call import Call, active_context
from tiered_index.base.clock import Clock, SteadyClock, SystemClock
from tiered_index.base.kernels import compiled_views
from tiered_index.base.locks import check_not_nested, collecting, is_held_elsewhere, is_held_here
from tiered_index.base.threads import DaemonPool, ThreadedCall, close_until_s, have_ended
from tiered_index.config import IndexConfig, checked_config
from tiered_index.errors import BudgetExceeded, CloseTimeout, IndexClosed, InvalidArgument, NestedCall, TieredIndexError
from tiered_index.format.keys.hashing import HashRule
from tiered_index.format.names import queue_of_log
from tiered_index.format.schema import Schema
from tiered_index.format.segments.archived import footer_bytes_of
from tiered_index.format.segments.segment import LinkedSegment, Times
from tiered_index.format.topic_documents import (
    DocumentOf,
    Documents,
    TopicDocument,
    newest_documents,
    newest_of,
    revised,
)
from tiered_index.service.hooks import Hooks, PositionHook, ProblemHook
from tiered_index.service.jobs.segments.uploads import MessagesOf, QueuesOf, ReadSegment, SegmentUploads, SourceSegment
from tiered_index.service.life.context import Progress
from tiered_index.service.life.merge_worker import LONGEST_PAUSE_S, ROUND_S, Merged
from tiered_index.service.life.rounds import Rounds
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.reads import bounds_of_root, reads_in
from tiered_index.service.log.records import ArchivedSegment, LostObject
from tiered_index.service.log.replaced import Replacement
from tiered_index.service.log.state import LogState
from tiered_index.service.opening import Parts, WriterHealth, open_parts
from tiered_index.service.read.answers.logs import Logs
from tiered_index.service.read.answers.rows import check_topic
from tiered_index.service.read.files.compacted import DamagedFile
from tiered_index.service.read.files.file_view import LocalView
from tiered_index.service.read.files.snapshot import Handle, Snapshot
from tiered_index.service.read.lookups import Lookups, config_of, opened_ones
from tiered_index.service.read.scan import LookupFiles
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.places import RowPlaces, alive
from tiered_index.service.write.buffer import BufferedChunk
from tiered_index.service.write.owned import SourceQueues, check_position_name, is_of_source, names_of
from tiered_index.service.write.validation import (
    TopicTable,
    batch_columns,
    check_keys,
    check_number,
    check_position,
    column_defaults,
    message_row,
)
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk
from tiered_index.storage.metering import MeteredStorage
from tiered_index.types import Freshness, ItemT, OpenedT, TopicBounds, shortened

if TYPE_CHECKING:
    from tiered_index.config import IndexSettings
    from tiered_index.service.read.export import Export

# Estimated memory of one buffered row of a put, without its key
_ROW_BYTES = 160
# Longest wait for the close of a forgotten index
_PATIENCE_S = 5.0
# Longest wait for each of three: a flush, a round of the life cycle, its last requests; unless the close is a usual one
_STOP_PATIENCE_S = 2.0
_LOCK_POLL_S = 0.002
# the longest pause of a worker after an error of the storage once a request has succeeded
_BACK_PAUSE_S = 2.0
T = TypeVar("T")
_log = logging.getLogger(__name__)


class IndexService(Lookups[ItemT]):
    """The writer of an index, which also answers lookups. Open it with `IndexService.open`.

    Close it, or use it as a context manager. Any thread may call its public methods. A root has one writer at a time,
    and an index has one root with a writer at a time.
    """

    def __init__(
        self,
        config: IndexConfig,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        storage: Storage | None = None,
        begins_anew: bool = False,
        takes_over: bool = False,
        hooks: Hooks | None = None,
    ) -> None:
        """Open an index; prefer `open`. It is long, because lookups get the parts as attributes of their own.

        `clock`, `disk` and `storage` replace the real ones in tests. `begins_anew` and `takes_over` are for `recover`
        (see `open_parts`).
        """
        hooks = hooks or Hooks()
        self.config = config = checked_config(config)
        # also here: CPython finds an attribute of the object faster than the default of the class
        self._refused, self._locks = None, []
        self._defaults = column_defaults(config.item_type)
        # remaining steps of closing; None: the index is open and closing has not begun
        self._closing: list[Callable[[], object]] | None = []
        # of these, the last, which wait for nothing
        self._releases: list[Callable[[], object]] = []
        # one close at a time; a signal handler may close an index while its thread does
        self._ending = threading.RLock()
        self._trouble: list[BaseException] = []
        # both pauses delay the publication of an entry
        share = 8 if config.seal_after_s < 1 else 4
        flush_s, round_s = (
            min(pause_s, config.seal_after_s / share)
            for pause_s in (config.flush_interval_s, config.lifecycle_interval_s)
        )
        with contextlib.ExitStack() as undo:
            this = weakref.ref(self)
            places = RowPlaces(
                lambda: alive(this)._log_states(),
                lambda: alive(this).segment_archives,
                lambda topic: alive(this).topic_document(topic),
            )
            arguments = config, SteadyClock(clock or SystemClock()), disk or Disk(), storage, places
            opening = partial(open_parts, undo, *arguments, begins_anew=begins_anew, takes_over=takes_over)
            # in a copy: an interrupted opening can't leave its context, which has its threads, to later calls
            with collecting(self._locks):
                parts = self._parts = copy_context().run(opening)
                # reads the log for lookups, which have deadlines and may be interrupted
                self._log_reader = DaemonPool(1, "tiered-index-log")
            self._marker = parts.marker
            self._schema: Schema = parts.layout.schema
            self._rule = parts.layout.hash
            self._session = parts.session
            self._storage = parts.storage
            self._notes = parts.notes
            self._catalog = parts.catalog
            self._prices, self._cold_paths = parts.storage.prices, (parts.cold,)
            self._topics = parts.topics
            # names of positions that sources have put here, and the log's state by which `_queues` were found
            self._source_names = set[str]()
            self._queues, self._queues_at = SourceQueues(), cast(LogState | None, None)
            self._buffer = parts.buffer
            self._flusher = parts.flusher
            known, connectors = parts.flusher.positions, parts.topics.connectors
            self._source_names.update(name for name in known if is_of_source(name, connectors))
            self._queues_of_sources()
            # positions, and the bounds of topics by them
            self._reads_at: tuple[object, dict[str, int], TopicBounds | None] = (None, {}, None)
            self._lifecycle = parts.lifecycle
            self._engine = parts.engine
            self._segments = SegmentUploads(parts.session)
            # the threads hold no reference to the service, so one that was never closed can be garbage-collected
            flush, run_round = partial(_flush_round, parts, hooks, this), partial(_life_round, parts, hooks)
            self._hooks = hooks
            self._flushes = Rounds("flusher", flush, flush_s)
            self._rounds = Rounds("lifecycle", run_round, round_s)
            self._merges = Rounds("merge", lambda: parts.merger.run_once(), ROUND_S, longest_pause_s=LONGEST_PAUSE_S)
            self._workers = (
                (self._flushes, self._rounds, self._merges) if parts.merger.tiers else (self._flushes, self._rounds)
            )
            # these hold no reference to the service, either
            parts.storage.is_back = partial(_hasten, self._workers, _BACK_PAUSE_S)
            parts.lifecycle.made_room = partial(_hasten, [self._flushes], 0.0)
            for rounds in self._workers if config.background else ():
                undo.callback(rounds.stop)
                rounds.start()
            self._closing = None
            opened_ones.add(self)
            undo.pop_all()

    def __del__(self) -> None:
        # `_closing` is missing if `__init__` refused its arguments
        if not self._is_left_open() or sys.is_finalizing():
            return
        try:
            if self._closing is None:
                warnings.warn(f"unclosed index {self!r}", ResourceWarning, stacklevel=2, source=self)
        finally:
            # in a thread of its own, because a collection may run while this one holds a lock of the index
            closing = threading.Thread(target=self._close_soon, name="tiered-index-close", daemon=True)
            closing.start()
            closing.join(0.0 if any(rounds.is_own_thread for rounds in self._workers) else _PATIENCE_S)

    def _is_left_open(self) -> bool:
        return getattr(self, "_closing", []) != [] and self._refused != IndexClosed.FORKED

    def _close_soon(self) -> None:
        """Close without raising, and without a long wait for a storage."""
        if self._refuse_as_closed():
            try:
                self._go_on_closing(_STOP_PATIENCE_S)
            except CloseTimeout as late:
                # another call closes it, and `atexit` has others to close
                _log.warning("closing %r: %s", self, late)
        for error in self._trouble:
            _log.warning("closing %r: %s", self, error)

    def __repr__(self) -> str:
        state = "open" if self._refused is None else "closed"
        return shortened(f"<{type(self).__name__} {state}: {self.config.root}, storage {self.config.storage}>")

    @classmethod
    def open(
        cls,
        config: IndexConfig | None = None,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        storage_backend: Storage | None = None,
        root: str | Path | None = None,
        storage: str | None = None,
        item_type: type[OpenedT] | None = None,
        environment: bool = True,
        on_durable: PositionHook | None = None,
        on_published: PositionHook | None = None,
        on_problem: ProblemHook | None = None,
        **settings: Unpack[IndexSettings],
    ) -> IndexService[OpenedT]:
        """Open an index for writing. Create it if it does not exist, and recover after a crash.

        Give an `IndexConfig`, or settings by name: `root`, `storage` and other fields of `IndexConfig`, such as
        `seal_after_s=600`. docs/reference.md lists all. The environment supplies settings that you do not give, unless
        `environment` is false. With preset `rocketmq` give `item_type=IndexItem`, so that type checkers expect no
        `fingerprint`.

        The workers call the hooks, between their rounds and without a lock: `on_durable(source, position)` when the
        entries up to a position are on the disk, `on_published(source, position)` when they are in the storage, and
        `on_problem(problem)` when `health` has a new one. `close` tells the last positions. An error of a hook is
        logged.

        Raises `ConfigError`, `NotAnIndex`, `SchemaMismatch`, `LockHeld` (another writer has the root or the index),
        `StorageUnavailable` (a new root needs its storage), `CorruptFile`.
        """
        config = config_of(config, environment, settings, root=root, storage=storage, item_type=item_type)
        made = cast(type[IndexService[OpenedT]], cls)
        hooks = Hooks(on_durable, on_published, on_problem)
        return made(config, clock=clock, disk=disk, storage=storage_backend, hooks=hooks)

    def warm_up(self) -> None:
        """Load what the first `put_batch` and the first lookup need, so that these don't wait for it (0.2 to 0.9 s).

        It changes nothing. Any thread. Raises `IndexClosed`.
        """
        self._check_open()
        # plain lists load the most
        row = {"topic": "t", "queue_id": 0, "key": "k", "offset": 0, "size": 1, "timestamp_ms": 0}
        columns = {name: [value] for name, value in row.items()}
        batch_columns(columns, self._schema, TopicTable(), self._rule, self._defaults)
        self.query("t", "k", max_count=1)

    # Writing

    def put(
        self,
        topic: str,
        queue_id: int,
        keys: str | Iterable[str],
        offset: int,
        size: int,
        timestamp_ms: int,
        source: str | None = None,
        source_position: int | None = None,
        *,
        topic_id: int | None = None,
        **extra: Any,
    ) -> int:
        """Index one message under each of `keys`. Return the number of entries.

        - `keys` is a text or an iterable of texts; each different one makes an entry.
        - `offset` is the message's position in the index's offset space, `size` its bytes.
        - `timestamp_ms` is its store time in epoch milliseconds, kept by whole seconds.
        - `source_position` becomes durable with the message.
        - `topic_id` is assigned if you do not give it.
        - `extra` are further columns of the schema by name.

        The identity of an entry is (topic, queue_id, offset) and the schema's identity columns. If entries of one key
        have the same identity, only the newest is in the answer, so you can put a message again. Within a second the
        greatest `size` wins, not the last put. A message without a position needs a unique number as `offset`, or an
        identity column (`column(identity=True)`): otherwise it hides earlier entries.

        The call is accepted whole or refused whole, and never waits for a disk. Raises `InvalidArgument` (fix the
        call), `BackPressure` (slow down and repeat it), `WriterFenced`, `IndexClosed`; `OwnedBySource`, an
        `InvalidArgument`, for a queue or a position that a source owns which the index follows, and for queue 2**31-1,
        which is for rows of files. Any thread.
        """
        if self._refused is not None or self._session.fenced is not None:
            self._check_writable()
        try:
            if topic_id is None and not extra:
                add = self._buffer.open.add
                if entries := add(topic, queue_id, keys, offset, size, timestamp_ms, source, source_position):
                    # the common case: `add` has made the same checks
                    return entries
        except BaseException as error:
            self._interrupted(error)
            raise
        check_not_nested(self._locks)
        checked = check_keys(keys)
        topic, queue_id, offset, size, second, more = message_row(
            topic, queue_id, offset, size, timestamp_ms, extra, self._schema, self._defaults
        )
        source, source_position = check_position(source, source_position)
        if source is not None:
            check_position_name(source, self._topics.connectors)
        self._queues_of_sources().check(topic, queue_id)
        agree = None
        if topic_id is None:
            topic_id = self._topics.assign(topic)
        else:
            # `agree` runs inside the append: a call that back-pressure refuses must not bind an id to a topic
            topic_id = check_number("topic_id", topic_id)
            agree = partial(self._topics.give, [(topic_id, topic)])
        size_bytes = sum(_ROW_BYTES + len(key) for key in checked)
        row = topic_id, queue_id, offset, size, second, *more
        try:
            self._buffer.append_rows(checked, row, size_bytes, source, source_position, agree)
        except BaseException as error:
            self._interrupted(error)
            raise
        return len(checked)

    def put_batch(self, columns: Any, source: str | None = None, source_position: int | None = None) -> int:
        """Index a batch of entries. Return their number.

        `columns` is an Arrow RecordBatch or Table, a data frame of pandas or Polars, another object with
        `__arrow_c_stream__`, or a dict of arrays. It has one row per entry. Its columns are topic, queue_id, key,
        offset, size (bytes), timestamp_ms, optionally topic_id, and the further columns of the schema. A time is epoch
        milliseconds, or a timestamp of Arrow, NumPy or Python (UTC if it has no zone). In place of key the batch may
        have key_hash, and fingerprint if the schema has it, as `export` gives them. If key is a tuple of Arrow arrays,
        the batch has one row per message, with an entry for each key that is not null.

        `source_position` becomes durable with the whole batch. The call is accepted whole or refused whole. After an
        error an Arrow stream is used up: give a new one. Errors and threads: see `put`.
        """
        return self._put_columns(columns, source, source_position, of_source=False)

    def put_source_batch(
        self,
        columns: Any,
        source: str | None = None,
        source_position: int | None = None,
        *,
        document: DocumentOf | None = None,
    ) -> int:
        """Index a batch of entries of a source that this index follows, as `put_batch`. For connectors.

        The queues and the name of the position may be the source's own, which `put` and `put_batch` refuse.
        `document` returns the document of each topic of the batch, as `describe_topics` takes it; None: it has none.
        """
        return self._put_columns(columns, source, source_position, of_source=True, document=document)

    def _put_columns(
        self,
        columns: Any,
        source: str | None,
        source_position: int | None,
        *,
        of_source: bool,
        document: DocumentOf | None = None,
    ) -> int:
        self._check_writable()
        source, source_position = check_position(source, source_position)
        if source is not None and not of_source:
            check_position_name(source, self._topics.connectors)
        checked = batch_columns(columns, self._schema, self._topics, self._rule, self._defaults)
        batch, topic_ids = checked.columns, checked.topic_ids
        if of_source:
            if document is not None:
                described = {topic: document(topic) for topic in checked.topics}
                self._topics.describe({topic: made for topic, made in described.items() if made is not None})
            # the documents say which positions are those of connectors
            self._note_source(source)
        else:
            known_ids = dict(topic_ids)
            self._queues_of_sources().check_columns(
                batch["topic_id"],
                batch["queue_id"],
                lambda topic_id: known_ids.get(topic_id) or self._topics.name(topic_id),
            )
        positions = {source: source_position} if source is not None and source_position is not None else {}
        if len(batch["second"]) or positions:
            agree = partial(self._topics.give, topic_ids) if topic_ids else None
            size_bytes = sum(values.nbytes for values in batch.values())
            try:
                self._buffer.append_columns(batch, size_bytes, positions, agree)
            except BaseException as error:
                self._interrupted(error)
                raise
        return len(batch["second"])

    def flush(self) -> None:
        """Wait until all entries put so far are durable on the local disk.

        Raises `DiskFull`, `StorageUnavailable`, `IndexClosed`. Any thread.
        """
        self._write(lambda: self._flusher.run_once())

    def seal(self) -> None:
        """Flush, then close the active files to further entries. The life cycle compacts and uploads them.

        Raises as `flush`. Any thread.
        """
        self._write(self._flusher.seal)

    def run_lifecycle(self) -> Progress:
        """Run one round of the life cycle: compact and upload all sealed files. Raises the round's first error."""
        return self._write(lambda: self._lifecycle.run_once())

    def run_merge(self) -> Merged:
        """Run one round of merges: finished windows become window tables, as the setting `merge` says.

        Return what this round merged. Raises the round's first error. The call rests between pieces of work.
        """
        return self._write(lambda: self._parts.merger.run_once())

    def archive(
        self,
        store: str,
        start: int,
        size_bytes: int,
        read: ReadSegment,
        modified_ms: int | None = None,
        rewritten_ms: int | None = None,
        queues: QueuesOf | None = None,
        messages: MessagesOf | None = None,
    ) -> bool:
        """Upload a closed segment of a source's log unless it is archived already. Return whether it was uploaded.

        The segment is the bytes [start, start + size_bytes) of the log. `read(position, length)` returns its bytes.
        `queues()` returns the queue offsets to archive with the segment; a copy without them is replaced. `messages()`
        returns the number of its messages, and their smallest and greatest time (epoch ms); None for unknown ones.

        An archived segment is compared with its copy: the first MiB, or all of it if `modified_ms` (the last change of
        the segment's file, epoch milliseconds) is missing or not before the upload. `rewritten_ms` is the time at which
        the source's log was found to be rewritten within this segment: an older copy that differs is replaced by one
        log record.

        Raises `CorruptFile` if the segment differs from its copy or overlaps another one, `StorageUnavailable` (repeat
        the call), `WriterFenced`.
        """
        segment = SourceSegment(store, start, size_bytes, read, modified_ms, rewritten_ms, queues, messages=messages)
        # `read`, `queues` and `messages` are the caller's, and may raise any error
        return self._write_segments(partial(self._segments.archive, segment), Exception)

    def record_ranges(self, lost: Sequence[LostObject]) -> None:
        """Record ranges of a source that were skipped or rewritten, so that answers name them. Idempotent.

        Raises `StorageUnavailable` (repeat the call), `WriterFenced`.
        """
        self._write(partial(self._session.record_ranges, tuple(lost)))

    def publish_positions(self, positions: Mapping[str, int]) -> None:
        """Publish durable positions of which no entry waits for its upload, at once. Idempotent.

        Raises `StorageUnavailable` (repeat the call), `WriterFenced`.
        """
        self._write(partial(self._session.publish_positions, dict(positions)))

    def archive_columns(self, store: str, start: int, count: int, file: bytes) -> bool:
        """Upload records of a source's log unless they are archived already. Return whether they were uploaded.

        `file` is a Parquet file of the records with numbers [`start`, `start + count`). If a segment begins at
        `start`, nothing changes: ask `segment_archive` for the next number.

        Raises `CorruptFile` if the numbers overlap those of another segment, `StorageUnavailable` (repeat the call),
        `WriterFenced`.
        """
        return self.send_columns(store, start, count, file) and self.name_columns([(store, start)]) == 1

    def send_columns(
        self,
        store: str,
        start: int,
        count: int,
        file: bytes,
        rows: int | None = None,
        times: Times | None = None,
        copied: ArchivedSegment | None = None,
    ) -> bool:
        """Upload records as `archive_columns` does, but add no log record: `name_columns` does. Raises the same.

        `rows` is the number of records, `times` their smallest and greatest time (epoch ms); None: unknown. `copied`:
        the segment of another index that they are from. The time of its upload, and whether records of it were erased,
        stay known.
        """
        columns = count, footer_bytes_of(file)

        def read(position: int, length: int) -> bytes:
            return file[position : position + length]

        segment = SourceSegment(store, start, len(file), read, columns=columns, messages=lambda: (rows, times))
        return self._write_segments(partial(self._segments.send, segment, copied))

    def name_columns(self, places: Sequence[tuple[str, int]]) -> int:
        """Add the records of all objects that `send_columns` uploaded to the archive, by one log record.

        `places` has the `store` and the `start` of each. Returns how many were added. Until then nothing reads them; a
        later writer deletes those of a process that ended. Raises as `archive_columns`.
        """
        return self._write_segments(partial(self._segments.name_sent, places))

    def replace_columns(self, known: ArchivedSegment, file: bytes, rows: int, times: Times | None) -> bool:
        """Put other columns of the same records in the place of those of an archived segment, by one log record.

        Return false if another record was first: then the segment is another one, or gone. `file`, `rows` and `times`
        as in `send_columns`. Raises as `archive_columns`.
        """
        assert known.columns is not None, "a segment of records"
        columns = known.columns[0], footer_bytes_of(file)

        def read(position: int, length: int) -> bytes:
            return file[position : position + length]

        about: dict[str, Any] = {"columns": columns, "messages": lambda: (rows, times)}
        source = SourceSegment(known.store, known.start, len(file), read, **about)
        return self._write_segments(partial(self._segments.replace, source, known))

    def link(
        self,
        added: Sequence[LinkedSegment] = (),
        finished: Sequence[LinkedSegment] = (),
        gone: Sequence[tuple[str, int]] = (),
        replaced: Sequence[Replacement] = (),
    ) -> None:
        """Add files of someone else to the log, in place of copies of their messages.

        - `added`: segments that begin behind all others of their store, sorted. Add a file before you put its entries.
        - `finished`: segments that replace those of the same store and start.
        - `gone`: store and start of segments to remove, because they have no entry.
        - `replaced`: new readings of files. Announce each with its open segment, and again with the true `new_end` when
          the segment is finished. The old rows stay answers until the position of their store has reached `new_end` in
          the storage's log, so put that position only after the last entry of the new reading. From then on the new
          rows are answers instead.

        The index never changes the files. Raises `StorageUnavailable` (repeat the call), `WriterFenced`,
        `InvalidArgument` for a place that has no segment.
        """
        self._write_segments(partial(self._segments.link, added, finished, gone, replaced))
        self._queues_of_sources()

    def _note_source(self, source: str | None) -> None:
        """Remember the position of a source, before which its queues are not known by the log."""
        if source is not None and source not in self._source_names and is_of_source(source, self._topics.connectors):
            self._source_names.add(source)
            self._queues_at = None
            if (queue := queue_of_log(source)) is not None:
                self._topics.check_puts_of(queue[:1])

    def _queues_of_sources(self) -> SourceQueues:
        """Return the queues that sources own, by the log's present state and the positions that were put here."""
        state = self._session.log.state
        if state is not self._queues_at:
            queues = SourceQueues.of(names_of(state) | self._source_names, self._topics.connectors)
            self._topics.check_puts_of(queues.of_topics)
            self._queues, self._queues_at = queues, state
        return self._queues

    def export(
        self,
        topics: str | Iterable[str] | None = None,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        *,
        allow_partial: bool = False,
    ) -> Export:
        """Flush, then export the entries as `IndexReader.export` does.

        Raises `WriterFenced` if a newer writer has fenced this one: it doesn't see what the newer one publishes.
        """
        self.flush()
        self._check_writable()
        return super().export(topics, begin_ms, end_ms, allow_partial=allow_partial)

    def describe_topics(self, topics: Iterable[str], document: TopicDocument) -> None:
        """Note which connector writes the entries of topics, and what it says of them.

        Call it before the first entry of a topic is put, and when the document changes: it becomes durable with the
        next entry or position, and published with the next file. The same document again is no change. Positions whose
        names begin with the connector's and a colon are then only those of `put_source_batch`. Raises
        `InvalidArgument`, also if another connector wrote a topic, `WriterFenced`, `IndexClosed`. Any thread.
        """
        self._check_writable()
        self._topics.describe({check_topic(topic): document for topic in topics})

    def learn_documents(self, documents: Documents) -> None:
        """Take over the documents of topics of files that are put in again: the newest of each topic counts."""
        self._topics.learn(documents)

    def topic_documents(self) -> dict[str, TopicDocument]:
        """As `IndexReader.topic_documents`."""
        self._check_process()
        return revised(newest_documents(self._session.log.state.documents, self._topics.documents))

    def documents_of_indexes(self) -> dict[str | None, dict[str, TopicDocument]]:
        """As `IndexReader.documents_of_indexes`."""
        return {None: self.topic_documents()}

    def documents_of_topic(self, topic: str) -> dict[str | None, TopicDocument]:
        """As `IndexReader.documents_of_topic`."""
        document = self.topic_document(topic)
        return {} if document is None else {None: document}

    def topic_document(self, topic: str) -> TopicDocument | None:
        """As `IndexReader.topic_document`."""
        self._check_process()
        return newest_of(topic, [self._session.log.state.documents, self._topics.document(topic)])

    def durable_position(self, source: str) -> int | None:
        """Return the greatest position of `source` before which all entries are durable. None: unknown source."""
        if not isinstance(source, str):
            raise InvalidArgument(f"source must be text, not {source!r:.80}")
        self._check_process()
        return self._flusher.positions.get(str.__str__(source))

    def durable_positions(self) -> dict[str, int]:
        """Return the durable position of every source of this index."""
        self._check_process()
        return dict(self._flusher.positions)

    # State

    @property
    def index_id(self) -> str:
        """The id of the index, fixed when it was created."""
        return self._marker.index_id

    @property
    def hash_rule(self) -> HashRule:
        """The hash rule of new entries."""
        return self._rule

    @property
    def expired(self) -> Expired:
        """The expired and erased entries, as the storage's log states them."""
        self._check_process()
        return self._session.expired

    @property
    def clock(self) -> Clock:
        """The clock of the index: beyond a minute, a change of the wall clock needs the storage's clock to agree."""
        return self._parts.clock

    @property
    def recovery_notes(self) -> tuple[str, ...]:
        """The actions of the recovery when this service was opened, one line each."""
        return self._notes

    @property
    def storage(self) -> MeteredStorage:
        """The storage, metered."""
        self._check_process()
        return self._storage

    @property
    def segment_archive(self) -> SegmentArchive:
        """The archived segments, for reading."""
        return SegmentArchive(
            self.storage,
            lambda: self._session.log.state,
            lambda: self._read_log(self._storage.uri, active_context()),
            tables=self._cold_paths[0].caches.segments,
            blocks=self._cold_paths[0].caches.catalogs,
        )

    @property
    def segment_archives(self) -> Mapping[str | None, SegmentArchive]:
        """The archived segments by the `source` of entries, as `IndexReader.segment_archives`: None is the only one."""
        return {None: self.segment_archive}

    def files(self) -> list[Handle]:
        self._check_open()
        return sorted(self._catalog.all(), key=lambda handle: (handle.sequence, handle.file_id))

    def health(self) -> WriterHealth:
        """Return a JSON-ready summary of buffer, disk and files. `problems` lists all present errors.

        - `unpublished` counts files, and entries in them and in the buffer, that a reader of the storage does not see
          yet.
        - These count since the service was opened: `put_entries`, `refused_puts` (by back-pressure),
          `quarantined_entries`, `folded_entries` (see `Explain`, at each lookup), `steps` of the life cycle,
          `failed_rounds` of the workers.
        - `merge` says when windows were last merged, how many wait, and the reasons of those that are left.
        - `position_age_s` is the time since each durable position moved.
        - `lease_left_s` is the time until the lease ends unless it is renewed (None: no lease).

        In a forked child it has only `index_id` and `problems`.
        """
        if self._refused == IndexClosed.FORKED:
            return {"index_id": self.index_id, "problems": [f"process: {self._refused}"]}
        check_not_nested(self._locks)
        summary = self._parts.health(self._workers)
        if self._refused == IndexClosed.INTERRUPTED:
            summary["problems"].append(f"writer: {self._refused}")
        return summary

    def __exit__(self, *exc: object) -> None:
        try:
            self.close()
        except CloseTimeout as late:
            if exc[1] is None:
                raise
            # the error of the block says more
            _log.warning("closing %r: %s", self, late)

    def close(self, timeout_s: float = 10.0) -> None:
        """Flush, stop the workers, and release lease and lock. Raise the first error after everything is released.

        The waits for other threads and for the storage take at most `timeout_s` together, 2 seconds after an interrupt
        in a call that writes. `CloseTimeout` names what had not ended by then: a file that was not uploaded is uploaded
        at the next start, and a lease that was not released ends by itself. Idempotent. An interrupt of this call ends
        the present step; the other steps follow.
        """
        is_interrupted = self._refused == IndexClosed.INTERRUPTED
        if not self._refuse_as_closed():
            return
        self._go_on_closing(min(timeout_s, _STOP_PATIENCE_S) if is_interrupted else timeout_s)
        if not any(isinstance(error, CloseTimeout) for error in self._trouble):
            # of the last flush and upload; no worker runs any more
            self._hooks.tell_durable(self._parts.flusher.positions)
            self._hooks.tell_published(self._session.log.state.positions)
        if self._trouble:
            trouble, self._trouble = self._trouble, []
            raise trouble[0]

    def abandon(self) -> None:
        """Release everything without flushing, as a crash would. For tests and for fenced writers."""
        if not self._refuse_as_closed():
            return
        if self._closing == []:
            return
        parts = self._parts
        with self._ending:
            self._closing = [
                partial(self._stop_threads, math.inf),
                parts.flusher.end,
                parts.lifecycle.end,
                *parts.releases(math.inf, keep_reserve=True),
            ]
            self._run_closing()
            self._trouble = []

    def _steps(self, until_s: float) -> list[Callable[[], object]]:
        """Return the steps of closing. They wait until `until_s` (`time.monotonic()`)."""
        parts = self._parts
        # threads first: an interrupt may have ended the step that waits for them
        self._releases = [partial(self._stop_threads, -math.inf), *parts.releases(until_s, keep_reserve=False)]
        return [
            parts.buffer.close,
            # before the wait for a round, which may last longer than the process is allowed to
            partial(self._flush_in_time, parts.flusher.run_once, until_s),
            partial(self._stop_threads, until_s),
            partial(self._flush_in_time, parts.flusher.end, until_s),
            *(appender.close for appender in parts.appenders),
            partial(self._end_in_time, until_s),
            *self._releases,
        ]

    def _go_on_closing(self, timeout_s: float) -> None:
        """Run the steps of closing, or the remaining ones of an earlier call, and collect their errors."""
        until_s = time.monotonic() + timeout_s
        if not self._ending.acquire(timeout=_timeout(until_s)):
            raise CloseTimeout(f"another call had not closed {self!r} within {timeout_s:g} s")
        try:
            held = self._held_locks(until_s) if self._closing is None else []
            if held:
                self._closing = self._steps_without_files(until_s)
                self._trouble.append(
                    self._files_left(f"another thread holds {', '.join(held)}, perhaps since an interrupt")
                )
            if self._closing is None:
                self._closing = self._steps(until_s)
            self._run_closing()
        finally:
            self._ending.release()

    def _steps_without_files(self, until_s: float) -> list[Callable[[], object]]:
        """Return the steps that leave the files as they are, and locked, since a thread may still write to them."""
        return [partial(self._stop_threads, until_s), partial(self._end_in_time, until_s)]

    def _files_left(self, reason: str) -> CloseTimeout:
        return CloseTimeout(
            f"{reason}: {self.config.root} stays locked until the process ends, and the entries in the write buffer "
            "are not on the disk"
        )

    def _flush_in_time(self, act: Callable[[], object], until_s: float) -> None:
        """Call a method of the flusher. If a write to the disk does not end until `until_s`, leave the files."""
        if any(map(is_held_here, (*self._locks, *self._parts.round_locks))):
            # since an interrupt, or by the call whose handler this is: another thread would wait for it
            act()
            return
        call = ThreadedCall(act, "tiered-index-close")
        try:
            call.join(until_s)
        finally:
            if call.is_running:
                self._closing = [*(self._closing or [])[:1], *self._steps_without_files(until_s)]
                self._trouble.append(self._files_left("a write to the disk has not ended"))

    def _held_locks(self, until_s: float) -> list[str]:
        """Return the names of locks that other threads hold until `until_s`. Without these nothing can be closed."""
        locks = {"the write buffer": self._buffer.lock, "the flusher": self._flusher.lock}
        locks |= {"the list of files": self._catalog.lock}
        while True:
            locks = {name: lock for name, lock in locks.items() if is_held_elsewhere(lock)}
            if not locks or time.monotonic() >= until_s:
                return [*locks]
            time.sleep(_LOCK_POLL_S)

    def _run_closing(self) -> None:
        with self._ending:
            while self._closing:
                step = self._closing[0]
                try:
                    step()
                except BaseException as error:  # noqa: BLE001 - `close` raises it after lock and files are released
                    self._trouble.append(error)
                    if isinstance(error, MemoryError) or (step in self._releases and not isinstance(error, Exception)):
                        with contextlib.suppress(Exception):
                            # retried here, because there is no later round, and the root must not stay locked
                            step()
                # a signal handler may have closed the index meanwhile
                if self._closing and self._closing[0] is step:
                    del self._closing[0]

    def _stop_threads(self, until_s: float) -> None:
        """Stop the rounds and close the pools. Wait for those that run until `until_s`."""
        # first, because the end of a round is no failure then
        self._merges.stop(0.0)
        self._parts.merger.stop()
        # a request of a merge may hang, and a merge that stops at any moment loses nothing
        self._merges.stop(min(_STOP_PATIENCE_S, _timeout(until_s)))
        self._flushes.stop(_timeout(until_s))
        # the rest of the time is for the lease
        self._rounds.stop(_timeout(until_s) / 2)
        pools_until_s = min(close_until_s(), until_s)
        self._log_reader.close(pools_until_s)
        self._segments.close(pools_until_s)

    def _end_in_time(self, until_s: float) -> None:
        """Close the life cycle. Its last round and its requests may hang: then it is left to a thread of its own."""
        ending = ThreadedCall(self._lifecycle.close, "tiered-index-close")
        ending.join(time.monotonic() + _timeout(until_s) / 2)
        # a round that still runs ends before its next step
        self._lifecycle.hurry()
        ending.join(until_s)
        if ending.is_running:
            waits = self._parts.late_requests(0.0) or ["a request"]
            raise CloseTimeout(
                f"the storage does not answer ({waits[0]}): what is not uploaded is uploaded after the next start, and "
                f"another writer can start once the lease has ended (within {self.config.lease_ttl_s:g} s)"
            )

    def _write(self, act: Callable[[], T], expected: type[Exception] = TieredIndexError) -> T:
        """Return the result of a call that writes. After another error than an `expected` one, refuse further calls."""
        self._check_open()
        check_not_nested(self._parts.round_locks)
        try:
            # in a copy: CPython may crash if a finalizer sets a variable of the context that the interrupted call sets
            return copy_context().run(act)
        except BaseException as error:
            if not isinstance(error, expected) or isinstance(error, MemoryError | NestedCall):
                self._interrupted(error)
            raise

    def _write_segments(self, act: Callable[[], T], expected: type[Exception] = TieredIndexError) -> T:
        """Return the result of a call that archives or links, as `_write`."""
        check_not_nested([self._segments.lock])
        return self._write(act, expected)

    def _interrupted(self, error: BaseException) -> None:
        """Refuse further calls after an error that is not one of ours, since a change may be half made.

        `NestedCall` is that of a signal handler: a call that is itself refused as nested raises it before its work.
        """
        if self._refused is None and (not isinstance(error, TieredIndexError) or isinstance(error, NestedCall)):
            self._refused = IndexClosed.INTERRUPTED

    def _log_states(self) -> Sequence[LogState]:
        # of the lookups' snapshot: the log may be ahead of it for a moment
        return [self._catalog.snapshot.state]

    def _begin(self, call: Call) -> float:
        return 0.0  # a writer's snapshots are never old

    @contextlib.contextmanager
    def _taking(self, begun_s: float, call: Call) -> Iterator[LookupFiles]:
        # the buffer first, so that an entry that is flushed meanwhile is seen at least once
        chunks = self._buffer.snapshot()
        with self._catalog.reading() as snapshot:
            # after the snapshot, because closing empties the catalog
            self._check_open()
            error, files = self._session.log_error, self._files_of(snapshot)[2]
            form = self._topics, self._schema, self._rule
            beside: list[Handle] = [BufferedChunk(chunk, *form) for chunk in chunks if chunk.count]
            if error is not None:
                beside.append(DamagedFile("log", "storage", error))
            yield replace(files, beside=beside) if beside else files

    def _freshness(self, state: LogState) -> tuple[Freshness, ...]:
        """Return the freshness of a fenced writer, which doesn't see what its successor publishes, or of topics that a
        source has read up to some time. Otherwise nothing.
        """
        error, (_, bounds) = self._session.fenced, self._reads
        if error is None and bounds is None:
            return ()
        uri = self._session.storage.uri
        known = Freshness(source=uri, as_of_ms=state.as_of_ms, positions=state.positions, bounds=bounds)
        return (known if error is None else replace(known, not_asked=str(error), bounds=state.bounds),)

    @property
    def _reads(self) -> tuple[dict[str, int], TopicBounds | None]:
        """The positions that say how much was read, and the bounds of topics by them; None: there are none."""
        positions, (known, reads, bounds) = self._flusher.positions, self._reads_at
        if known is not positions:
            reads = reads_in(positions)
            bounds = bounds_of_root(reads)
            self._reads_at = positions, reads, bounds
        return reads, bounds

    def _files_now(self, topic: str, key: str) -> LookupFiles | None:
        # the buffer first, so that an entry that is flushed meanwhile is in the view
        is_alone = self._buffer.is_empty
        if not is_alone and not (self._schema.keyed and self._buffer.lacks(topic, key)):
            return None
        snapshot, session = self._catalog.snapshot, self._session
        # after the snapshot, because closing empties the catalog
        if snapshot.present_view is None or self._refused is not None or session.log_error is not None:
            return None
        known = snapshot.whole
        if known is None or known[0] is not self._flusher.positions or known[1] is not session.fenced:
            known = self._files_of(snapshot)
        files: LookupFiles = known[2 if is_alone else 3]
        return files

    def _files_of(self, snapshot: Snapshot) -> tuple[Any, Any, LookupFiles, LookupFiles]:
        """Return the files of a snapshot, alone and beside a buffer without the key, after what they depend on.

        They are made once for a snapshot, the positions, and the error of a fenced writer.
        """
        positions, fenced, state = self._flusher.positions, self._session.fenced, snapshot.state
        known: tuple[Any, Any, LookupFiles, LookupFiles] | None = snapshot.whole
        if known is None or known[0] is not positions or known[1] is not fenced:
            logs = Logs.of([(None, state.lacking_with(self._reads[0]), self._session.expired_by(state))])
            view = None if compiled_views() is None else snapshot.view(partial(LocalView, self._schema))
            facts: dict[str, Any] = {"freshness": self._freshness(state), "logs": logs, "states": [state]}
            facts |= {"view": view, "catalog": self._catalog, "mark": snapshot.mark}
            beside_buffer = LookupFiles(snapshot.overlapping, has_topics=False, **facts)
            known = positions, fenced, LookupFiles(snapshot.overlapping, **facts), beside_buffer
            if view is not None:
                snapshot.whole = known
        return known

    def _read_log(self, uri: str, call: Call) -> LogState:
        left_s = call.remaining_s()
        # half of the time, as in a reader
        reading = self._log_reader.submit(partial(call.run, self._lifecycle.refresh))
        if not have_ended([reading], None if left_s is None else left_s / 2):
            raise BudgetExceeded(f"timeout_s was reached while reading the log of {uri}")
        return reading.result()

    def _check_writable(self) -> None:
        self._check_open()
        if self._session.fenced is not None:
            raise self._session.fenced.with_traceback(None)


def _flush_round(parts: Parts, hooks: Hooks, index: weakref.ref[IndexService[Any]]) -> None:
    try:
        parts.flusher.run_once()
    finally:
        hooks.tell_durable(parts.flusher.positions)
        opened = index()
        workers = () if opened is None else opened._workers
        del opened
        # here, because the life cycle's worker waits for a storage that hangs
        hooks.tell_problems(lambda: parts.problems(workers))


def _life_round(parts: Parts, hooks: Hooks) -> None:
    try:
        parts.lifecycle.run_once()
    finally:
        hooks.tell_published(parts.session.log.state.positions)


def _timeout(until_s: float) -> float:
    """Return the time-out of a wait until `until_s` (`time.monotonic()`)."""
    return min(max(0.0, until_s - time.monotonic()), threading.TIMEOUT_MAX)


def _hasten(workers: Sequence[Rounds], pause_s: float) -> None:
    for rounds in workers:
        rounds.hasten(pause_s)


@atexit.register
def _close_all() -> None:
    left = [index for index in list(opened_ones) if isinstance(index, IndexService) and index._is_left_open()]
    for service in left:
        # flush first, because the other steps of closing may wait for a storage
        with contextlib.suppress(Exception):
            service._flusher.run_once()
    for service in left:
        service._close_soon()
