"""`IndexService`: the engine. Puts go to a buffer, a flusher moves them to files, a life cycle compacts and uploads those, queries see all.

```
put ─> write buffer ─flush─> unsealed ─seal─> ─compact─> compacted ─upload─> uploaded ─retire─> storage only
```
Durability: `put` returns when the entries are in the write buffer and searchable; they survive a crash once `flush` has returned, or
`flush_interval_s` later, and the loss of the machine once uploaded. `durable_position` says where each source must be continued.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tiered_index.clock import Clock, SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    BackPressure,
    ConfigError,
    InvalidArgument,
    StorageError,
    StorageMisconfigured,
    TieredIndexError,
)
from tiered_index.format.layout import Layout
from tiered_index.format.schema import Schema
from tiered_index.service.buffer import Chunk, WriteBuffer, later_positions
from tiered_index.service.catalog import Catalog, Handle
from tiered_index.service.compacted_file import MissingObject
from tiered_index.service.flusher import Flusher
from tiered_index.service.lanes import MAIN, QUARANTINE, Lane, LaneContext
from tiered_index.service.lifecycle import Lifecycle, Progress, show_stored
from tiered_index.service.log_records import Genesis, LogState
from tiered_index.service.query import LOG_RETRIES, QueryEngine, check_lost
from tiered_index.service.recovery import Recovered, recover_root
from tiered_index.service.root import Marker, Root, RootLock
from tiered_index.service.rows import Array, Question, rows_of_columns
from tiered_index.service.session import StorageSession, check_genesis
from tiered_index.service.storage_log import StorageLog
from tiered_index.service.topics import TopicTable
from tiered_index.service.unsealed_file import UnsealedFile
from tiered_index.service.validation import batch_columns, check_keys, check_position, message_row
from tiered_index.service.workers import Worker
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk
from tiered_index.storage.opening import open_storage
from tiered_index.storage.wrappers import MeteredStorage
from tiered_index.types import Lookup, QueryResult

__all__ = ["IndexService"]

_QUARANTINE_ITEMS = 1 << 16
_ROW_BYTES = 160
# what a buffered row of one put costs beside its key, estimated
_log = logging.getLogger(__name__)


class IndexService:
    """One writer's index: open it with `IndexService.open`, close it or use it as a context manager.

    Threads: every public method from any thread. Only one service may have a root open, and only one root may write an index.
    """

    def __init__(
        self, config: IndexConfig, *, clock: Clock | None = None, disk: Disk | None = None, storage: Storage | None = None
    ) -> None:
        """Open an index; prefer `IndexService.open`. `clock`, `disk` and `storage` stand in for the real ones in tests."""
        if config.root is None:
            raise ConfigError("root is not set: a writer needs a folder for its local files")
        self.config = config
        self._clock = clock or SystemClock()
        self._closed = False
        self._close_lock = threading.Lock()
        self._root = Root(config.root, disk or Disk())
        marker = self._root.read_marker()
        uri = config.storage or (marker.storage if marker is not None else None)
        if storage is None and uri is None:
            raise ConfigError("storage is not set: give a URI such as s3://bucket/prefix or file:///dir")
        layout = _layout(config, marker)
        self._storage = MeteredStorage(storage if storage is not None else open_storage(str(uri), options=config.s3))
        with contextlib.ExitStack() as undo:
            undo.callback(self._storage.close)
            self._root.make_folders()
            lock = RootLock(self._root)
            undo.callback(lock.release)
            log = StorageLog(self._storage, self._clock, checkpoint_every=config.checkpoint_every)
            self._session = StorageSession(self._storage, log, self._clock, config.lease_ttl_s)
            marker, state = self._join(marker, layout, str(uri or self._storage.uri))
            self._marker = marker
            self._layout = layout
            self._schema: Schema = layout.schema
            self._recovered = recover_root(self._root, self._storage, state)
            self._build(self._recovered)
            undo.callback(self._lanes_discard)
            if self._session.claimed:
                self._lifecycle.sweep_attempts({file.file_id for file in self._recovered.compacted})
                show_stored(self._catalog, log.state, self._storage, lambda _: None)
            self._lock = lock
            self._workers: list[Worker] = []
            if config.background:
                self._workers = [
                    Worker("flusher", self._flusher.run_once, config.flush_interval_s),
                    Worker("lifecycle", self._lifecycle.run_once, config.lifecycle_interval_s),
                ]
                for worker in self._workers:
                    worker.start()
            undo.pop_all()

    @classmethod
    def open(
        cls,
        config: IndexConfig | None = None,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        storage_backend: Storage | None = None,
        **settings: Any,
    ) -> IndexService:
        """Open an index for writing, creating it where there is none, and recover what a crash left.

        Give an `IndexConfig`, or settings by name (`root`, `storage`, ...). Raises `ConfigError`, `NotAnIndex`, `SchemaMismatch`,
        `LockHeld` (another writer has the root or the index), `StorageUnavailable` (a new root needs its storage), `CorruptFile`.
        """
        if config is not None and settings:
            raise InvalidArgument("give a config or settings by name, not both")
        return cls(config or IndexConfig.load(**settings), clock=clock, disk=disk, storage=storage_backend)

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
        """Index one message under each of `keys` (text or an iterable of text, each once); return how many entries that made.

        `offset` is the message's position in the index's offset space, `size` its bytes, `timestamp_ms` its store time in epoch
        milliseconds (kept to the second). `source_position` becomes durable with the message. `topic_id` is assigned where not given;
        `extra` are the schema's further columns by name. The call is accepted whole or refused whole and never waits for a disk:
        `InvalidArgument` (fix it), `BackPressure` (slow down and repeat it).
        """
        self._check_writable()
        checked = check_keys(keys)
        topic, queue_id, offset, size, second, more = message_row(topic, queue_id, offset, size, timestamp_ms, extra, self._schema)
        source, source_position = check_position(source, source_position)
        if topic_id is None:
            topic_id = self._topics.assign(topic)
        else:
            self._topics.give([(_topic_id(topic_id), topic)])
        rows = [(topic, key, topic_id, queue_id, offset, size, second, *more) for key in checked]
        self._buffer.append_rows(rows, sum(_ROW_BYTES + len(key) for key in checked), source, source_position)
        return len(rows)

    def put_batch(self, columns: Any, source: str | None = None, source_position: int | None = None) -> int:
        """Index a batch: an Arrow RecordBatch or Table, or a dict of arrays; return how many entries that made.

        Columns: topic, queue_id, key, offset, size, timestamp_ms (one row an entry), optionally topic_id, and the schema's further ones.
        `source_position` becomes durable with the whole batch. Accepted whole or refused whole; errors as `put`.
        """
        self._check_writable()
        source, source_position = check_position(source, source_position)
        batch, size_bytes = batch_columns(columns, self._schema, self._topics)
        positions = {source: source_position} if source is not None and source_position is not None else {}
        if len(batch["second"]) or positions:
            self._buffer.append_columns(batch, size_bytes, positions)
        return len(batch["second"])

    def flush(self) -> None:
        """Return when everything put before the call is durable on the local disk. Raises `DiskFull`, `StorageUnavailable`."""
        self._check_open()
        self._flusher.flush()

    def seal(self) -> None:
        """Flush, then close the active files to further entries, so that the life cycle takes them on."""
        self._check_open()
        self._flusher.seal()

    def run_lifecycle(self) -> Progress:
        """Run one round of the life cycle now: everything sealed is compacted and uploaded when it returns. Raises its first error."""
        self._check_open()
        return self._lifecycle.run_once()

    def durable_position(self, source: str) -> int | None:
        """Return the greatest position of `source` before which everything is durable, or None for an unknown source."""
        return self._flusher.positions.get(source)

    # Reading

    def query(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 64,
        cursor: str | None = None,
        allow_partial: bool = False,
    ) -> QueryResult:
        """Return the newest `max_count` messages of `topic` that carry `key`, stored in the inclusive range [begin_ms, end_ms].

        The range is compared by whole seconds. Buffered, unsealed, compacted and uploaded entries answer alike. `cursor` continues
        a truncated answer. Raises `InvalidArgument`, `InvalidCursor`; where a file can't be read `StorageUnavailable`,
        `CorruptFile` or `PartialAnswer`, or with `allow_partial` the status is ``partial`` and `failed` names it.
        """
        self._check_open()
        lost: set[str] = set()
        for _ in range(LOG_RETRIES):
            try:
                with self._catalog.reading():
                    return self._engine.query(
                        self._handles, topic, key, begin_ms, end_ms, max_count, cursor, allow_partial, lost=frozenset(lost)
                    )
            except MissingObject as error:
                lost |= check_lost(error, self._lifecycle.refresh(), allow_partial)
        raise StorageUnavailable(f"{self._storage.uri}: objects kept vanishing during {LOG_RETRIES} tries of one lookup; try again")

    def query_many(self, lookups: Iterable[Lookup], allow_partial: bool = False) -> list[QueryResult]:
        """Answer many lookups, in their order; arguments and errors as `query`."""
        return [
            self.query(q.topic, q.key, q.begin_ms, q.end_ms, q.max_count, q.cursor, allow_partial) for q in lookups
        ]

    # State

    @property
    def index_id(self) -> str:
        """Identity of the index, fixed when it was created."""
        return self._marker.index_id

    @property
    def recovery_notes(self) -> tuple[str, ...]:
        """What recovery dropped or moved when this service was opened, one line each."""
        return tuple(self._recovered.notes)

    @property
    def storage(self) -> MeteredStorage:
        """The storage, metered."""
        return self._storage

    @property
    def log_state(self) -> LogState:
        """The storage's log as far as it was read."""
        return self._session.log.state

    def files(self) -> list[Handle]:
        """Return the handles of all files, buffered entries not among them."""
        return sorted(self._catalog.all(), key=lambda handle: (handle.sequence, handle.file_id))

    def health(self) -> dict[str, Any]:
        """Return a JSON-ready summary: buffer, disk, files by state, and every present trouble under ``problems`` (empty when well)."""
        states: dict[str, int] = {}
        for handle in self._catalog.all():
            states[handle.place] = states.get(handle.place, 0) + 1
        problems = [f"{worker_name}: {error}" for worker_name, error in self._errors()]
        return {
            "index_id": self.index_id,
            "writer_epoch": self._session.epoch,
            "fenced": self._session.fenced is not None,
            "buffered_entries": self._buffer.size,
            "buffered_bytes": self._buffer.size_bytes,
            "quarantined_entries": self._flusher.quarantined,
            "local_bytes": self._lifecycle.local_bytes(),
            "files": states,
            "problems": problems,
        }

    def close(self) -> None:
        """Flush, stop the workers, release lease and lock. Idempotent; an error of the last flush is raised after all is released."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        for worker in self._workers:
            worker.stop()
        trouble: list[TieredIndexError] = []
        for step in (self._flusher.flush, *(lane.active.close for lane in self._lanes if lane.active is not None), self._lifecycle.close):
            try:
                step()
            except TieredIndexError as error:
                trouble.append(error)
        self._release()
        if trouble:
            raise trouble[0]

    def abandon(self) -> None:
        """Let go of everything without flushing: what is left is what a crash would leave. For tests and for fenced writers."""
        with self._close_lock:
            self._closed = True
        for worker in self._workers:
            worker.stop()
        self._release(keep_reserve=True)

    def __enter__(self) -> IndexService:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Inside

    def _release(self, *, keep_reserve: bool = False) -> None:
        self._engine.close()
        for handle in self._catalog.all():
            if isinstance(handle, UnsealedFile):
                handle.release()
        for lane in self._lanes:
            if lane.active is not None:
                lane.active.release()
            if keep_reserve:
                lane.forget_reserve()
            else:
                lane.discard_reserve()
        self._lock.release()
        self._storage.close()

    def _lanes_discard(self) -> None:
        for lane in self._lanes:
            lane.discard_reserve()
            if lane.active is not None:
                lane.active.release()

    def _join(self, marker: Marker | None, layout: Layout, uri: str) -> tuple[Marker, LogState | None]:
        """Join the index in the storage and claim it; a root that is known may start while the storage is down."""
        wanted = Genesis(marker.index_id if marker is not None else "", layout, self.config.offset_space)
        if marker is not None:
            check_genesis(Genesis(marker.index_id, marker.layout, marker.offset_space), wanted, str(self._root.path))
        try:
            genesis = self._session.join(wanted)
            root_id = marker.root_id if marker is not None else secrets.token_hex(8)
            self._session.claim(root_id)
        except StorageError as error:
            if marker is None or isinstance(error, StorageMisconfigured):
                raise
            _log.warning("starting without the storage, files wait locally: %s", error)
            return marker, None
        if marker is None or marker.storage != uri:
            marker = Marker(genesis.index_id, root_id, genesis.layout, genesis.offset_space, uri)
            self._root.write_marker(marker)
        return marker, self._session.log.state

    def _build(self, recovered: Recovered) -> None:
        config = self.config
        self._catalog = Catalog()
        self._topics = TopicTable()
        self._buffer = WriteBuffer(self._schema, config.buffer_max_entries, config.buffer_max_bytes)
        context = LaneContext(
            self._root, self._catalog, self._topics, self._clock, config.offset_space, itertools.count(recovered.next_sequence), self._admit
        )
        small = Layout(self._layout.preset, self._schema, self._layout.slots, min(self._layout.items, _QUARANTINE_ITEMS))
        main = Lane(MAIN, self._layout, context, reserves=True)
        quarantine = Lane(QUARANTINE, small, context, reserves=False)
        self._lanes = (quarantine, main)
        self._flusher = Flusher(
            self._buffer, main, quarantine, self._clock, max_late_s=config.max_late_s, max_early_s=config.max_early_s
        )
        self._flusher.positions = later_positions(recovered.positions, {})
        recovered_handles: list[Handle] = [*recovered.compacted, *recovered.uploaded, *recovered.damaged]
        for handle in recovered_handles:
            self._catalog.put(handle)
        for lane in self._lanes:
            lane.adopt([file for file in recovered.unsealed if file.lane == lane.name])
        try:
            self._topics.give(pair for lane in self._lanes if lane.active is not None for pair in lane.active.topics.items())
        except InvalidArgument:
            # ids were given anew since: each file keeps its own table, and the next ones begin with an empty one
            self._flusher.roll()
        self._lifecycle = Lifecycle(
            self._root, self._catalog, self._flusher, self._session, config, self._clock, self._marker.root_id
        )
        self._engine = QueryEngine(self._schema, config.item_type or self._schema.item_type(), config.query_threads, self._storage)

    def _admit(self, size_bytes: int) -> None:
        bound = self.config.disk_max_bytes
        if bound is not None and (used := self._lifecycle.local_bytes()) + size_bytes > bound:
            raise BackPressure(
                f"the local files take {used:,} bytes; {size_bytes:,} more would pass disk_max_bytes = {bound:,}: "
                "uploads or retirement must make room first"
            )

    def _handles(self, question: Question) -> Sequence[Handle]:
        """Return what may hold answers. The buffer is looked at before the files, so that an entry on its way is met at least once."""
        ids = self._topics.ids(question.topic)
        buffered = [
            _Buffered(chunk, ids, self._schema) for chunk in self._buffer.snapshot() if chunk.count
        ]
        hits = [b for b in buffered if b.second_min <= question.second_max and b.second_max >= question.second_min]
        return [*hits, *self._catalog.overlapping(question.second_min, question.second_max)]

    def _errors(self) -> list[tuple[str, Exception]]:
        errors: list[tuple[str, Exception]] = []
        if self._flusher.error is not None:
            errors.append(("flush", self._flusher.error))
        errors += list(self._lifecycle.errors.items())
        if self._session.fenced is not None:
            errors.append(("writer", self._session.fenced))
        return errors

    def _check_writable(self) -> None:
        self._check_open()
        if self._session.fenced is not None:
            raise self._session.fenced

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("the index is closed")


class _Buffered:
    """A chunk of the write buffer as a handle."""

    file_id = "buffer"
    place = "buffer"
    lane = MAIN
    is_local = True

    def __init__(self, chunk: Chunk, topic_ids: frozenset[int], schema: Schema) -> None:
        self._columns = chunk.columns()
        self._topic_ids = topic_ids
        self._schema = schema
        seconds = self._columns["second"]
        self.second_min, self.second_max = int(np.min(seconds)), int(np.max(seconds))
        self.sequence = 2**62

    def search(self, question: Question) -> Array:
        return rows_of_columns(self._columns, question, self._topic_ids, self._schema)


def _layout(config: IndexConfig, marker: Marker | None) -> Layout:
    """Return the geometry of new files: what the configuration sets, else what the root was created with, else the preset's."""
    if marker is None:
        return config.layout()
    given = config.model_fields_set
    stored = marker.layout
    preset = config.preset if "preset" in given else stored.preset.name
    item_type = config.item_type or (stored.schema.item_type() if preset == stored.preset.name else None)
    return config.model_copy(
        update={
            "preset": preset,
            "item_type": item_type,
            "slots": config.slots or stored.slots,
            "items": config.items or stored.items,
        }
    ).layout()


def _topic_id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) < 2**31:
        raise InvalidArgument(f"topic_id must be an integer in 0..2**31-1, not {value!r:.80}")
    return int(value)

