"""`IndexService`: the writer of an index. It accepts entries, moves them to the storage and answers lookups.

```
put ─> write buffer ─flush─> unsealed ─seal─> ─compact─> compacted ─upload─> uploaded ─retire─> storage only
```
Durability: `put` returns when the entries are in the write buffer and searchable. They survive a crash when `flush` has
returned, or `flush_interval_s` later. They survive the loss of the machine when they are uploaded. After a crash, read
each source again from its `durable_position`.

Threads: a flusher and a life-cycle worker run rounds (unless `background` is off). One worker reads the log and one
archives segments; their first call starts them.

If you forget to close an index, garbage collection closes it with a `ResourceWarning`, or `atexit` closes it. Neither
happens if the process is killed, ends by `os._exit`, or is a child of `multiprocessing`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from tiered_index.clock import Clock, SystemClock
from tiered_index.config import IndexConfig, checked_config
from tiered_index.errors import BudgetExceeded, IndexClosed, InvalidArgument, InvalidCursor, TieredIndexError
from tiered_index.format.archived import footer_bytes_of
from tiered_index.format.hashing import HashRule
from tiered_index.format.schema import Schema
from tiered_index.kernels import compiled_views
from tiered_index.retention import NOTHING, Expired
from tiered_index.service.answers.validation import (
    batch_columns,
    check_keys,
    check_number,
    check_position,
    column_defaults,
    message_row,
)
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.files.compacted import DamagedFile
from tiered_index.service.files.view import About, LocalView, Viewed, WholeView
from tiered_index.service.lifecycle.lifecycle import Progress
from tiered_index.service.lifecycle.segment_archive import (
    QueuesOf,
    ReadSegment,
    SegmentArchive,
    SegmentUploads,
    SourceSegment,
)
from tiered_index.service.log.reads import bounds_of_root, reads_in
from tiered_index.service.log.records import LostObject
from tiered_index.service.log.state import LogState
from tiered_index.service.lookup.budget import LookupLimits
from tiered_index.service.lookup.lookups import NO_LIMITS, Lookups, config_of
from tiered_index.service.lookup.scan import Files
from tiered_index.service.opening import Parts, open_parts
from tiered_index.service.threads import FORKED, NoThread, Worker
from tiered_index.service.writing.buffer import BufferedChunk
from tiered_index.spelling import is_plain
from tiered_index.storage.base import Storage
from tiered_index.storage.context import NO_WAIT, UNBOUNDED, remaining_s, request_context
from tiered_index.storage.disk import Disk
from tiered_index.storage.metering import MeteredStorage
from tiered_index.tracing import is_traced
from tiered_index.types import Freshness, ItemT, OpenedT, QueryResult, TopicBounds, shortened

if TYPE_CHECKING:
    from tiered_index.config import IndexSettings
    from tiered_index.service.lookup.export import Export

# Estimated memory of one buffered row of a put, without its key
_ROW_BYTES = 160
# Most files of a lookup that does not wait, because each takes time for its report
_FILES_NOW = 500
# Longest wait for an interrupted opening, or for the close of a forgotten index, to release the root
_PATIENCE_S = 5.0
# Longest wait of a close for a storage request of a worker
_STORAGE_PATIENCE_S = 1.0
_NO_ABOUT: About = (), ()
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
    ) -> None:
        """Open an index; prefer `open`.

        `clock`, `disk` and `storage` replace the real ones in tests. `begins_anew` and `takes_over` are for `recover`
        (see `open_parts`).
        """
        self.config = config = checked_config(config)
        self._defaults = column_defaults(config.item_type)
        self._closed = False
        # true in a forked child, which owns nothing of the service
        self._is_foreign = False
        # remaining steps of closing; None: closing has not begun
        self._closing: list[Callable[[], object]] | None = None
        self._trouble: list[Exception] = []
        # Rounds begin only after opening. The workers hold no reference to the service, so one that was never closed
        # can be garbage-collected.
        opened = self._opened = list[Parts]()
        rounds = config.background
        # both pauses delay the publication of an entry
        share = 8 if config.seal_after_s < 1 else 4
        flush_s, round_s = (
            min(pause_s, config.seal_after_s / share)
            for pause_s in (config.flush_interval_s, config.lifecycle_interval_s)
        )
        self._writer = Worker("flusher", partial(_flush, opened) if rounds else None, flush_s)
        self._rounds = Worker("lifecycle", partial(_live, opened) if rounds else None, round_s)
        # separate threads, started on first use, so that neither a lookup nor a flush waits for an upload
        self._log_reader, self._archiver = Worker("log"), Worker("archive")
        try:
            parts = partial(open_parts, self.config, clock or SystemClock(), disk or Disk(), storage)
            self._writer.call(partial(self._open, partial(parts, begins_anew=begins_anew, takes_over=takes_over)))
            if rounds:
                self._rounds.start()
        except BaseException:  # also for an interrupt, because the root must not stay locked
            self._closed = True
            # an opening that still runs is closed at its end, if the worker is not stopped before
            if self._writer.finish(self._close, _PATIENCE_S):
                self._writer.stop(_PATIENCE_S)
            raise
        _open_ones.add(self)

    def __del__(self) -> None:
        # `_closed` is missing if `__init__` refused its arguments
        if getattr(self, "_closed", True) or self._writer.is_foreign or sys.is_finalizing():
            return
        try:
            warnings.warn(f"unclosed index {self!r}", ResourceWarning, stacklevel=2, source=self)
        finally:
            self._close_soon()

    def _close_soon(self) -> None:
        """Close without raising, and wait at most `_PATIENCE_S`; not at all in a worker thread of the service."""
        self._closed = True
        own = threading.current_thread().name in {f"tiered-index-{one.name}" for one in (self._writer, self._rounds)}
        with contextlib.suppress(IndexClosed, NoThread):
            self._writer.finish(self._close, 0.0 if own else _PATIENCE_S)
        for error in self._trouble:
            _log.warning("closing %r: %s", self, error)

    def _open(self, open_all: Callable[[], Parts]) -> None:
        self._opened.append(open_all())
        (parts,) = self._opened
        self._marker = parts.marker
        self._schema: Schema = parts.layout.schema
        self._rule = parts.layout.hash
        self._session = parts.session
        self._storage = parts.storage
        self._notes = parts.notes
        self._catalog = parts.catalog
        self._catalogs, self._prices, self._cold_paths = (parts.catalog,), parts.storage.prices, (parts.cold,)
        self._topics = parts.topics
        self._buffer = parts.buffer
        self._flusher = parts.flusher
        # positions, and the bounds of topics by them
        self._behind_at: tuple[object, TopicBounds | None] = (None, None)
        self._lifecycle = parts.lifecycle
        self._engine = parts.engine
        self._segments = SegmentUploads(parts.session, self.config.upload_part_bytes)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
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
        **settings: Unpack[IndexSettings],
    ) -> IndexService[OpenedT]:
        """Open an index for writing. Create it if it does not exist, and recover after a crash.

        Give an `IndexConfig`, or settings by name: `root`, `storage` and other fields of `IndexConfig`, such as
        `seal_after_s=600`. docs/settings.md lists all. The environment supplies settings that you do not give, unless
        `environment` is false.

        Raises `ConfigError`, `NotAnIndex`, `SchemaMismatch`, `LockHeld` (another writer has the root or the index),
        `StorageUnavailable` (a new root needs its storage), `CorruptFile`.
        """
        config = config_of(config, environment, settings, root=root, storage=storage, item_type=item_type)
        made = cast(type[IndexService[OpenedT]], cls)
        return made(config, clock=clock, disk=disk, storage=storage_backend)

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
        call), `BackPressure` (slow down and repeat it), `WriterFenced`, `IndexClosed`. Any thread.
        """
        if self._closed or self._is_foreign or self._session.fenced is not None:
            self._check_writable()
        if (
            topic_id is None
            and source is None
            and source_position is None
            and not extra
            and self._buffer.open.add(topic, queue_id, keys, offset, size, timestamp_ms)
        ):
            # the common case: `add` has made the same checks
            return 1
        checked = check_keys(keys)
        topic, queue_id, offset, size, second, more = message_row(
            topic, queue_id, offset, size, timestamp_ms, extra, self._schema, self._defaults
        )
        source, source_position = check_position(source, source_position)
        agree = None
        if topic_id is None:
            topic_id = self._topics.assign(topic)
        else:
            # `agree` runs inside the append: a call that back-pressure refuses must not bind an id to a topic
            topic_id = check_number("topic_id", topic_id)
            agree = partial(self._topics.give, [(topic_id, topic)])
        size_bytes = sum(_ROW_BYTES + len(key) for key in checked)
        self._buffer.append_rows(
            checked, (topic_id, queue_id, offset, size, second, *more), size_bytes, source, source_position, agree
        )
        return len(checked)

    def put_batch(self, columns: Any, source: str | None = None, source_position: int | None = None) -> int:
        """Index a batch of entries. Return their number.

        `columns` is an Arrow RecordBatch or Table, a data frame of pandas or Polars, another object with
        `__arrow_c_stream__`, or a dict of arrays. It has one row per entry. Its columns are topic, queue_id, key,
        offset, size (bytes), timestamp_ms, optionally topic_id, and the further columns of the schema. A time is epoch
        milliseconds, or a timestamp of Arrow, NumPy or Python (UTC if it has no zone). In place of key the batch may
        have key_hash, and fingerprint if the schema has it, as `export` gives them.

        `source_position` becomes durable with the whole batch. The call is accepted whole or refused whole. After an
        error an Arrow stream is used up: give a new one. Errors and threads: see `put`.
        """
        self._check_writable()
        source, source_position = check_position(source, source_position)
        batch, given = batch_columns(columns, self._schema, self._topics, self._rule, self._defaults)
        positions = {source: source_position} if source is not None and source_position is not None else {}
        if len(batch["second"]) or positions:
            agree = partial(self._topics.give, given) if given else None
            self._buffer.append_columns(batch, sum(values.nbytes for values in batch.values()), positions, agree)
        return len(batch["second"])

    def flush(self) -> None:
        """Wait until all entries put so far are durable on the local disk.

        Raises `DiskFull`, `StorageUnavailable`, `IndexClosed`. Any thread.
        """
        self._check_open()
        self._writer.call(self._flusher.run_once)

    def seal(self) -> None:
        """Flush, then close the active files to further entries. The life cycle compacts and uploads them.

        Raises as `flush`. Any thread.
        """
        self._check_open()
        self._writer.call(self._flusher.seal)

    def run_lifecycle(self) -> Progress:
        """Run one round of the life cycle: compact and upload all sealed files. Raises the round's first error."""
        self._check_open()
        return self._rounds.call(self._lifecycle.run_once)

    def archive(
        self,
        store: str,
        start: int,
        size_bytes: int,
        read: ReadSegment,
        modified_ms: int | None = None,
        rewritten_ms: int | None = None,
        queues: QueuesOf | None = None,
    ) -> bool:
        """Upload a closed segment of a source's log unless it is archived already. Return whether it was uploaded.

        The segment is the bytes [start, start + size_bytes) of the log. `read(position, length)` returns its bytes; a
        thread of the service calls it. `queues()` returns the queue offsets to archive with the segment; a copy without
        them is replaced.

        An archived segment is compared with its copy: the first MiB, or all of it if `modified_ms` (the last change of
        the segment's file, epoch milliseconds) is missing or not before the upload. `rewritten_ms` is the time at which
        the source's log was found to be rewritten within this segment: an older copy that differs is replaced by one
        log record.

        Raises `CorruptFile` if the segment differs from its copy or overlaps another one, `StorageUnavailable` (repeat
        the call), `WriterFenced`.
        """
        self._check_open()
        given = SourceSegment(store, start, size_bytes, read, modified_ms, rewritten_ms, queues)
        return self._archiver.call(partial(self._segments.archive, given))

    def record_ranges(self, lost: Sequence[LostObject]) -> None:
        """Record ranges of a source that were skipped or rewritten, so that answers name them. Idempotent.

        Raises `StorageUnavailable` (repeat the call), `WriterFenced`.
        """
        self._check_open()
        self._log_reader.call(partial(self._session.record_ranges, tuple(lost)))

    def archive_columns(self, store: str, start: int, count: int, file: bytes) -> bool:
        """Upload records of a source's log unless they are archived already. Return whether they were uploaded.

        `file` is a Parquet file of the records with numbers [`start`, `start + count`). If a segment begins at
        `start`, nothing changes: ask `segment_archive` for the next number.

        Raises `CorruptFile` if the numbers overlap those of another segment, `StorageUnavailable` (repeat the call),
        `WriterFenced`.
        """
        self._check_open()
        columns = count, footer_bytes_of(file)

        def read(position: int, length: int) -> bytes:
            return file[position : position + length]

        given = SourceSegment(store, start, len(file), read, columns=columns)
        return self._archiver.call(partial(self._segments.archive, given))

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

    # Reading

    def query_nowait(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 64,
        cursor: str | None = None,
    ) -> QueryResult[ItemT] | None:
        """Return the answer of `query` if it is in memory; None: call `query`.

        The call takes microseconds, so an event loop may make it. The system may have to read a part of a local file
        from the disk. The call also returns None in these cases:

        - The buffer has an entry of the key, or some thousands of entries.
        - The buffer has entries, and the index is of preset ``rocketmq``.
        - The buffer has entries, and no file in the range has the topic.
        - The list of files has changed since the last `query`.
        - The index has more than 500 files.
        - A stored file may have entries, and no cache has its part.
        - Entries have expired or were erased, or the storage's log can't be read.
        - `query` would raise an error.
        - The compiled core is missing, or spans are recorded.

        Arguments: see `query`. Any thread.
        """
        # in a copy: an interrupt can't keep the context for later calls
        return copy_context().run(self._now, topic, key, begin_ms, end_ms, max_count, cursor)

    def _now(
        self, topic: str, key: str, begin_ms: int | None, end_ms: int | None, max_count: int, cursor: str | None
    ) -> QueryResult[ItemT] | None:
        request_context.set(NO_WAIT)
        engine = self._engine
        if engine.plain is None or is_traced() or not is_plain(key) or (whole := self._whole_view(topic, key)) is None:
            return None
        view, about, has_topics = whole
        if len(view.labels) > _FILES_NOW:
            return None
        if cursor is None:
            find = engine.plain.find
            return find(  # type: ignore[no-any-return]
                view.core, about, topic, key, begin_ms, end_ms, max_count, has_topics
            )
        with contextlib.suppress(InvalidArgument, InvalidCursor):
            return engine.page(whole, engine.prepare(topic, key, begin_ms, end_ms, max_count, cursor))
        return None

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
        return self._session.expired

    @property
    def recovery_notes(self) -> tuple[str, ...]:
        """The actions of the recovery when this service was opened, one line each."""
        return self._notes

    @property
    def storage(self) -> MeteredStorage:
        """The storage, metered."""
        return self._storage

    @property
    def segment_archive(self) -> SegmentArchive:
        """The archived segments, for reading."""
        return SegmentArchive(
            self._storage,
            lambda: self._session.log.state,
            partial(self._read_log, self._storage.uri),
            tables=self._cold_paths[0].caches.segments,
        )

    def files(self) -> list[Handle]:
        self._check_open()
        return sorted(self._catalog.all(), key=lambda handle: (handle.sequence, handle.file_id))

    def health(self) -> dict[str, Any]:
        """Return a JSON-ready summary of buffer, disk and files. `problems` lists all present errors.

        - `unpublished` counts files, and entries in them and in the buffer, that a reader of the storage does not see
          yet.
        - These count since the service was opened: `put_entries`, `refused_puts` (by back-pressure),
          `quarantined_entries`, `folded_entries` (see `Explain`, at each lookup), `steps` of the life cycle,
          `failed_rounds` of the workers.
        - `position_age_s` is the time since each durable position moved.
        - `lease_left_s` is the time until the lease ends unless it is renewed (None: no lease).

        In a forked child it has only `index_id` and `problems`.
        """
        if self._writer.is_foreign:
            return {"index_id": self.index_id, "problems": [f"process: {FORKED}"]}
        (parts,) = self._opened
        return parts.health((self._writer, self._rounds))

    def close(self) -> None:
        """Flush, stop the workers, and release lease and lock. Raise the first error after everything is released.

        Idempotent. An interrupted call completes on the worker thread; the next call waits for it.
        """
        self._closed = True
        if self._writer.is_foreign:
            # a forked child owns nothing of this service
            return
        try:
            self._writer.call(self._close)
        except IndexClosed:
            if self._closing != []:
                raise
        self._writer.stop()
        if self._trouble:
            trouble, self._trouble = self._trouble, []
            raise trouble[0]

    def abandon(self) -> None:
        """Release everything without flushing, as a crash would. For tests and for fenced writers."""
        self._closed = True
        with contextlib.suppress(IndexClosed):
            self._writer.call(self._abandon)
        self._writer.stop()

    def _close(self) -> None:
        if self._closing is None and self._opened:
            (parts,) = self._opened
            self._closing = [
                parts.buffer.close,
                # before the wait for a round, which may last longer than the process is allowed to
                parts.flusher.run_once,
                self._stop_rounds,
                parts.flusher.end,
                *(appender.close for appender in parts.appenders),
                parts.lifecycle.close,
                *parts.releases(keep_reserve=False),
            ]
        self._go_on_closing()

    def _abandon(self) -> None:
        if self._closing != [] and self._opened:
            (parts,) = self._opened
            self._closing = [
                self._stop_rounds,
                parts.flusher.end,
                parts.lifecycle.end,
                *parts.releases(keep_reserve=True),
            ]
        self._go_on_closing()
        self._trouble = []

    def _go_on_closing(self) -> None:
        """Run the remaining steps of closing, and collect their errors. No flush begins after it."""
        while self._closing:
            try:
                self._closing[0]()
            except Exception as error:  # noqa: BLE001 - `close` raises it after lock and files are released
                self._trouble.append(error)
                if isinstance(error, MemoryError):
                    with contextlib.suppress(Exception):
                        # retried here, because there is no later round
                        self._closing[0]()
            del self._closing[0]
        self._writer.stop()

    def _stop_rounds(self) -> None:
        self._rounds.stop()
        for worker in (self._log_reader, self._archiver):
            worker.stop(_STORAGE_PATIENCE_S)

    def _log_states(self) -> Sequence[LogState]:
        return [self._session.log.state]

    def _ready(self) -> Files:
        return Files(self._handles, self._freshness(), self._viewed)

    _begin = _ready

    def _freshness(self) -> tuple[Freshness, ...]:
        """Return the freshness of a fenced writer, which doesn't see what its successor publishes, or of topics whose
        source is behind. Otherwise nothing.
        """
        error, bounds = self._session.fenced, self._behind()
        if error is None and bounds is None:
            return ()
        uri, state = self._session.storage.uri, self._session.log.state
        known = Freshness(source=uri, as_of_ms=state.as_of_ms, positions=state.positions, bounds=bounds)
        return (known if error is None else replace(known, not_asked=str(error), bounds=state.bounds),)

    def _behind(self) -> TopicBounds | None:
        """Return the bounds of topics whose source is behind; None: no source is."""
        positions, (known, bounds) = self._flusher.positions, self._behind_at
        if known is not positions:
            bounds = bounds_of_root(reads_in(positions))
            self._behind_at = positions, bounds
        return bounds

    def _handles(self, second_min: int, second_max: int) -> Sequence[Handle]:
        """Return the handles of all files and buffered chunks that may have entries in the inclusive seconds.

        The buffer is read before the catalog, so that an entry that is flushed meanwhile is seen at least once. Raises
        `IndexClosed` if the index was closed meanwhile, because closing empties the catalog.
        """
        found = self._buffered(second_min, second_max)
        found += self._catalog.overlapping(second_min, second_max)
        if (error := self._session.log_error) is not None:
            found.append(DamagedFile("log", "storage", error))
        self._check_open()
        return found

    def _whole_view(self, topic: str, key: str) -> WholeView | None:
        if compiled_views() is None:
            return None
        # the buffer first, so that an entry that is flushed meanwhile is in the view
        is_alone = self._buffer.is_empty
        if not is_alone and not (self._schema.keyed and self._buffer.lacks(topic, key)):
            return None
        view, session = self._catalog.present_view, self._session
        # after the view, because closing empties the catalog, and a read of the log changes both
        if self._closed or self._is_foreign or session.log_error is not None or session.expired is not NOTHING:
            return None
        if view is None:
            return None
        about = _NO_ABOUT
        if session.fenced is not None or session.log.state.lost or self._behind() is not None:
            about = self._freshness(), [(None, one) for one in session.log.state.lost.values()]
        context = request_context.get()
        return view if context is UNBOUNDED or context is NO_WAIT else view.local, about, is_alone

    def _viewed(self, second_min: int, second_max: int, stored: bool) -> Viewed:
        """Return the handles of `_handles` that are not in a view, and a view of the catalog (None: there is none)."""
        # `_handles` then raises for a closed index
        if compiled_views() is None or self._closed:
            return (), None
        found = self._buffered(second_min, second_max)
        view = self._catalog.view(partial(LocalView, self._schema, stored=True))
        if not stored:
            view = view.local
        if (error := self._session.log_error) is not None:
            found.append(DamagedFile("log", "storage", error))
        return (found, view) if not self._closed else ((), None)

    def _buffered(self, second_min: int, second_max: int) -> list[Handle]:
        found: list[Handle] = []
        for chunk in self._buffer.snapshot():
            if chunk.count:
                buffered = BufferedChunk(chunk, self._topics, self._schema, self._rule)
                if buffered.second_min <= second_max and buffered.second_max >= second_min:
                    found.append(buffered)
        return found

    def _read_log(self, uri: str) -> LogState:
        if (left_s := remaining_s()) is None:
            return self._log_reader.call(self._lifecycle.refresh)
        read: list[LogState] = []
        # half of the time, as in a reader
        if not self._log_reader.finish(lambda: read.append(self._lifecycle.refresh()), max(0.0, left_s / 2)):
            raise BudgetExceeded(f"timeout_s was reached while reading the log of {uri}")
        return read[0]

    def _check_writable(self) -> None:
        self._check_open()
        if self._session.fenced is not None:
            raise self._session.fenced.with_traceback(None)

    def _check_process(self, limits: LookupLimits = NO_LIMITS) -> None:
        if self._is_foreign:
            raise IndexClosed(FORKED)


def _disown() -> None:
    for service in list(_open_ones):
        service._is_foreign = True


os.register_at_fork(after_in_child=_disown)


def _flush(opened: list[Parts]) -> None:
    for parts in opened:
        parts.flusher.run_once()


def _live(opened: list[Parts]) -> None:
    for parts in opened:
        parts.lifecycle.run_once()


_open_ones: weakref.WeakSet[IndexService[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for service in list(_open_ones):
        if not service._closed and not service._writer.is_foreign:
            # flush first, because the other steps of closing may wait for a storage
            with contextlib.suppress(TieredIndexError):
                service.flush()
            service._close_soon()
