"""Opens a writer: lock the root, join and claim the index in the storage, recover, and assemble the parts.

Joining creates the index, or checks it against the configuration. Claiming takes a new writer epoch, which fences older
writers. A known root can start without its storage; files then wait locally. An error undoes the finished steps.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypedDict

from msgspec.structs import replace

from tiered_index.base.call import active_context
from tiered_index.base.clock import Clock, StepHealth
from tiered_index.base.threads import DaemonPool, close_until_s
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    ConfigError,
    DiskFull,
    InvalidArgument,
    NotAnIndex,
    StorageError,
    StorageMisconfigured,
    TieredIndexError,
    without_frames,
)
from tiered_index.format.compacted import BLOCK_BYTES
from tiered_index.format.layout import PRESETS, Layout
from tiered_index.format.names import COMPACTED, UNSEALED
from tiered_index.format.schema import Schema
from tiered_index.format.topic_documents import newest_documents
from tiered_index.service.life.context import LifecycleContext
from tiered_index.service.life.lifecycle import Lifecycle
from tiered_index.service.life.merge_worker import MergeHealth, MergeWorker
from tiered_index.service.life.recovery import Recovered, recover_root
from tiered_index.service.life.rounds import Rounds
from tiered_index.service.log.identity import check_recovered
from tiered_index.service.log.kept import KeptLog
from tiered_index.service.log.log import LIST_EVERY_S, StorageLog
from tiered_index.service.log.records import IndexDescriptor, max_positions
from tiered_index.service.log.session import StorageSession, check_descriptor
from tiered_index.service.log.state import LogState
from tiered_index.service.read.caches.disk import CacheFolder, DiskCache
from tiered_index.service.read.files.cold_path import ColdPath, ColdSettings
from tiered_index.service.read.files.compacted import CompactedFile, DamagedFile
from tiered_index.service.read.files.snapshot import Catalog, Handle
from tiered_index.service.read.files.unsealed import UnsealedFile
from tiered_index.service.read.query import QueryEngine
from tiered_index.service.read.segments.places import RowPlaces
from tiered_index.service.root import CACHE, SENT, Marker, Root, RootLock, allow_many_files, disk_errors
from tiered_index.service.root.files import FileList, ListedFile
from tiered_index.service.root.seen import SeenFile
from tiered_index.service.write.appenders import MAIN, QUARANTINE, Appender, AppenderContext
from tiered_index.service.write.buffer import WriteBuffer
from tiered_index.service.write.flusher import Flusher
from tiered_index.service.write.validation import TopicTable
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk
from tiered_index.storage.metering import MeteredStorage

# Small, because a wrong clock, which sends everything to quarantine, must not cost a second file of full size
_QUARANTINE_ITEMS = 1 << 16
# a request that is under way for longer is a problem
_LATE_S = 5.0
# threads of an opening, besides the caller's
_WRITES_AT_ONCE = 3
_log = logging.getLogger(__name__)


class UnpublishedHealth(TypedDict):
    """Files, and entries in them and in the buffer, that a reader of the storage does not see yet."""

    files: int
    entries: int


class ChildHealth(TypedDict):
    """The part of `WriterHealth` that a forked child knows: `index_id`, and `problems`, all present errors."""

    index_id: str
    problems: list[str]


class WriterHealth(ChildHealth, total=False):
    """The summary of a writer by `IndexService.health`, which explains its keys. JSON-ready.

    - `writer_epoch`, `fenced`: the writer's number, and whether a later one has replaced it.
    - `buffered_entries`, `buffered_bytes`, `local_bytes`: what the buffer and the local files hold.
    - `files`: number of files by state.
    """

    writer_epoch: int
    fenced: bool
    buffered_entries: int
    buffered_bytes: int
    quarantined_entries: int
    folded_entries: int
    local_bytes: int
    files: dict[str, int]
    unpublished: UnpublishedHealth
    put_entries: int
    refused_puts: int
    steps: dict[str, StepHealth]
    merge: MergeHealth
    lease_left_s: float | None
    position_age_s: dict[str, float]
    failed_rounds: dict[str, int]


class Parts:
    """The parts of an open index, after recovery.

    It is long to make them, because each gets those that were made before it.
    """

    def __init__(
        self,
        config: IndexConfig,
        clock: Clock,
        root: Root,
        lock: RootLock,
        storage: MeteredStorage,
        session: StorageSession,
        cold: ColdPath,
        marker: Marker,
        layout: Layout,
        recovered: Recovered,
        files: FileList,
        places: RowPlaces,
    ) -> None:
        self.lock, self.storage, self.session, self.cold, self.clock = lock, storage, session, cold, clock
        self._files = files
        # the ids of files that only the root has, after so many changes of the catalog
        self._unpublished, self._changes = set[str](), -1
        self._opened_s = clock.monotonic_s()
        self.marker, self.layout, self.notes = marker, layout, tuple(recovered.notes)
        catalog, topics = self.catalog, self.topics = Catalog(), TopicTable()
        catalog.show(session.log.state)
        bounds = config.buffer_max_entries, config.buffer_max_bytes
        self.buffer = WriteBuffer(layout.schema, topics, *bounds, layout.hash, self._held_up)
        context = self._context = AppenderContext(
            root,
            catalog,
            topics,
            clock,
            marker.offset_space,
            itertools.count(recovered.next_sequence),
            partial(self._admit, config.disk_max_bytes),
            log=session.log,
            deletions=recovered.deletions,
            list_files=self.list_files,
        )
        small = replace(layout, items=min(layout.items, _QUARANTINE_ITEMS))
        main = Appender(MAIN, layout, context)
        quarantine = Appender(QUARANTINE, small, context)
        # positions of the log, or of the root's copy of it, count even if the claim failed
        positions = max_positions(recovered.positions, session.kept_positions)
        positions = max_positions(positions, session.log.state.positions)
        topics.learn(newest_documents(session.kept_documents, recovered.documents))
        topics.learn(session.log.state.documents)
        session.log.documents = lambda: topics.documents
        if positions and not session.claimed:
            # the next files of this root hold these positions: report a restore of the storage before this record
            session.log.identity.note(session.log.state)
        self.flusher = Flusher(self.buffer, main, quarantine, clock, config.max_late_s, config.max_early_s, positions)
        # an earlier process may have published these files
        begun = {file.file_id for file in recovered.unsealed} | {file.file_id for file in recovered.compacted}
        life = LifecycleContext(root, catalog, session, cold, config, clock, self.flusher, recovered.deletions, begun)
        session.log.advanced = life.follow
        self.lifecycle = Lifecycle(life, recovered.damaged, recovered.journals)
        self.merger = MergeWorker(
            life,
            config.merge_tiers(layout.preset),
            is_busy=self._is_busy,
            put_entries=lambda: self.buffer.taken_entries,
        )
        self.appenders = (quarantine, main)
        # of rounds, which a call in the same thread must not begin again
        self.round_locks = (self.flusher.lock, self.lifecycle.lock, self.merger.lock, session.log.append_lock)
        self._adopt(recovered)
        self.engine = QueryEngine(
            layout.schema,
            config.item_type or layout.schema.item_type(),
            config.query_threads,
            config.prices,
            places=places,
        )

    def _admit(self, bound: int | None, size_bytes: int) -> None:
        """Raise `DiskFull` if local files of `size_bytes` more, and a compaction of one, would exceed `bound`."""
        if bound is None:
            return
        used, spare = self.lifecycle.local_bytes(), self.lifecycle.compaction_bytes()
        if used + size_bytes + spare > bound:
            raise DiskFull(
                f"local files take {used:,} bytes; {size_bytes:,} more, and {spare:,} for a compaction, would exceed "
                f"disk_max_bytes = {bound:,}: wait for uploads and retirement, or raise the bound",
                number=used,
                bound=bound,
            )

    def _adopt(self, recovered: Recovered) -> None:
        """Show the files that the root has, and go on writing the unsealed ones."""
        handles: list[Handle] = [*recovered.compacted, *recovered.uploaded, *recovered.damaged]
        for handle in handles:
            self.catalog.put(handle)
        for appender in self.appenders:
            own = [file for file in recovered.unsealed if file.lane == appender.name]
            appender.adopt(own, goes_on=self.session.claimed)
        try:
            active = [appender.active.journal for appender in self.appenders if appender.active is not None]
            self.topics.give(pair for journal in active for pair in journal.topics.items())
        except InvalidArgument:
            # the active files bind one id to two topics: each keeps its own topic table, and the next files start empty
            self.flusher.roll()

    def list_files(self) -> None:
        """Write the list of files that the root must have, if it has changed. Raises typed errors of the disk."""
        self._files.note(self._listed)

    def _listed(self) -> dict[str, ListedFile]:
        changed = self.catalog.changed_since(self._changes)
        if changed.is_all:
            self._unpublished.clear()
        for file_id, handle in changed.handles.items():
            is_there = handle is not None and handle.place in (UNSEALED, COMPACTED)
            (self._unpublished.add if is_there else self._unpublished.discard)(file_id)
        self._changes = changed.changes
        listed: dict[str, ListedFile] = {}
        for handle in filter(None, map(self.catalog.get, self._unpublished)):
            seconds = handle.second_min, handle.second_max
            if isinstance(handle, UnsealedFile):
                listed[handle.file_id] = ListedFile(handle.lane, handle.count, seconds if handle.sealed else None)
            elif isinstance(handle, CompactedFile) and handle.folder == COMPACTED:
                listed[handle.file_id] = ListedFile(handle.lane, handle.count, seconds)
            elif (
                isinstance(handle, DamagedFile)
                and handle.place in (UNSEALED, COMPACTED)
                and (damaged := self._files.damaged(handle.file_id, handle.place, handle.lane)) is not None
            ):
                listed[handle.file_id] = damaged
        return listed

    def releases(self, until_s: float, *, keep_reserve: bool) -> list[Callable[[], object]]:
        """Return the steps that close everything. They wait for lookups until `until_s` at most.

        `keep_reserve` leaves the reserved next file, as a crash would.
        """

        def close_pools() -> None:
            pools_until_s = min(close_until_s(), until_s)
            self.engine.close(pools_until_s)
            self.cold.close(pools_until_s)

        def release_files() -> None:
            for handle in self.catalog.all():
                if isinstance(handle, UnsealedFile):
                    handle.release()
            for appender in self.appenders:
                if appender.active is not None:
                    appender.active.release()
                appender.release_reserve(keep=keep_reserve)
                appender.active = None

        return [close_pools, release_files, self.catalog.clear, self.lock.release, self.storage.close]

    def health(self, workers: Sequence[Rounds]) -> WriterHealth:
        """Return the summary of `IndexService.health`."""
        buffered, handles = self.buffer.size, self.catalog.all()
        own = [
            h
            for h in handles
            # a copy in `uploaded` is published, even if the storage is unavailable
            if isinstance(h, UnsealedFile)
            or (isinstance(h, CompactedFile) and h.stored is None and h.folder != "uploaded")
        ]
        return {
            "index_id": self.marker.index_id,
            "writer_epoch": self.session.epoch,
            "fenced": self.session.fenced is not None,
            "buffered_entries": buffered,
            "buffered_bytes": self.buffer.size_bytes,
            "quarantined_entries": self.flusher.quarantined,
            "folded_entries": self.engine.folded,
            "local_bytes": self.lifecycle.local_bytes(),
            "files": dict(Counter(handle.place for handle in handles)),
            "unpublished": {"files": len(own), "entries": buffered + sum(handle.count for handle in own)},
            "put_entries": self.buffer.taken_entries,
            "refused_puts": self.buffer.refused,
            "steps": {
                name: step.to_dict()
                for name, step in {
                    "seal": self._context.seals,
                    **self.lifecycle.times,
                    "merge": self.merger.times,
                }.items()
            },
            "merge": self.merger.health(),
            "lease_left_s": self.session.lease_left_s,
            "position_age_s": self._position_ages_s(),
            "failed_rounds": {worker.name: worker.failed_rounds for worker in workers},
            "problems": [f"{name}: {problem}" for name, problem in self.problems(workers)],
        }

    def _is_busy(self) -> bool:
        """Return whether a flush, a compaction or an upload runs."""
        times = self.lifecycle.times
        return self.flusher.is_flushing or times["compact"].is_running or times["upload"].is_running

    def _held_up(self) -> DiskFull | None:
        """Return the error if the disk is full for the flusher. Its reason is `storage` if uploads fail, too."""
        error = self.flusher.error
        if not isinstance(error, DiskFull):
            return None
        failed = [
            error_of_step
            for error_of_step in list(self.lifecycle.errors.values())
            if isinstance(error_of_step, StorageError)
        ]
        away = failed[0] if failed else self.session.log_error
        if away is None:
            return error
        return DiskFull(
            f"{error}, and the storage fails: {away}", reason="storage", number=error.number, bound=error.bound
        )

    def problems(self, workers: Iterable[Rounds]) -> list[tuple[str, object]]:
        """Return what `health` lists, with the name of the origin of each."""
        return [*self.errors(workers), *(("storage", late) for late in self.late_requests(_LATE_S))]

    def late_requests(self, patience_s: float) -> list[str]:
        """Return what is said if requests have been under way for longer than `patience_s`: the oldest is named."""
        late = self.storage.late(patience_s)
        if not late:
            return []
        age_s, call = late[0]
        more = f", and {len(late) - 1} more" if len(late) > 1 else ""
        return [f"{call.operation} of {call.name!r} has been under way for {age_s:.0f} s{more}"]

    def _position_ages_s(self) -> dict[str, float]:
        """Return the seconds since each source's durable position moved, at most since the opening."""
        now_s, moved_s = self.clock.monotonic_s(), self.flusher.moved_s
        return {source: now_s - moved_s.get(source, self._opened_s) for source in self.flusher.positions}

    def errors(self, workers: Iterable[Rounds]) -> list[tuple[str, BaseException]]:
        """Return every present error, with the name of its origin."""
        errors: list[tuple[str, BaseException | None]] = [
            ("flush", self.flusher.error),
            *((f"{appender.name} files", appender.trouble) for appender in self.appenders),
            ("put", self.buffer.refusal),
            *self.lifecycle.errors.items(),
            *((f"merge of {window}", error) for window, error in list(self.merger.errors.items())),
            *((handle.file_id, handle.error) for handle in self.catalog.all() if isinstance(handle, DamagedFile)),
            ("log", self.session.log_error or self.session.mixed),
            # typed errors are reported at their origin; any other error of a worker is a defect
            *((worker.name, worker.error) for worker in workers if not isinstance(worker.error, TieredIndexError)),
            ("writer", self.session.fenced),
        ]
        return [(name, error) for name, error in errors if error is not None]


def open_parts(
    undo: contextlib.ExitStack,
    config: IndexConfig,
    clock: Clock,
    disk: Disk,
    backend: Storage | None,
    places: RowPlaces,
    *,
    begins_anew: bool = False,
    takes_over: bool = False,
) -> Parts:
    """Open or create an index for writing. Raises the errors of `IndexService.open`. `undo` gets what to release.

    It is long, because each step leaves something to release, and needs the one before it.
    `places` finds the files of entries.
    `begins_anew`: even if files of the root are set aside. `takes_over`: even if another writer has the lease.
    """
    if config.root is None:
        raise ConfigError("root is not set: a writer needs a folder for its local files")
    if config.raise_file_limit:
        allow_many_files()
    root = Root(config.root, disk)
    marker = root.read_marker()
    uri = config.storage or (marker.storage if marker is not None else None)
    if backend is None and uri is None:
        raise ConfigError("storage is not set: give a URI such as s3://bucket/prefix or file:///dir")
    known = IndexDescriptor(marker.index_id, marker.layout, marker.offset_space) if marker is not None else None
    wanted = wanted_descriptor(config, known)
    if known is not None:
        check_descriptor(known, wanted, str(root.path))
    storage = MeteredStorage(backend or config.open_storage(uri), config.prices)
    undo.callback(storage.close)
    root.make_folders()
    lock = RootLock(root)
    undo.callback(lock.release)
    with disk_errors(f"looking at {root.path}"):
        for sent in root.path.glob(f"{SENT}-????????"):
            shutil.rmtree(sent, ignore_errors=True)
    if not begins_anew:
        check_recovered(root)
    root_id = marker.root_id if marker is not None else secrets.token_hex(8)
    seen = SeenFile(root)
    seen.read()
    log = StorageLog(storage, clock, checkpoint_every=config.checkpoint_every, root_id=root_id, seen=seen)
    if config.seal_after_s < 1:
        log.lists_every_s = LIST_EVERY_S
    index_id, describe = marker.index_id if marker is not None else "", partial(wanted_descriptor, config)
    session = StorageSession(storage, log, clock, config.lease_ttl_s, describe, index_id, lock.place)
    kept_log = KeptLog(root)

    def before_deletions() -> None:
        log.rely()
        kept_log.keep(log.state)

    arguments = config, root, session, marker, wanted, uri or storage.uri, root_id, begins_anew, takes_over
    with _side_by_side(config):
        marker, layout, state = _join(*arguments, before_deletions)
    undo.callback(_release, session)
    folder = CacheFolder(DiskCache(config.cache_dir or root.path / CACHE, config.cache_max_bytes), marker.index_id)
    cold = ColdPath(storage, keyed=layout.schema.keyed, settings=ColdSettings.of(config), folder=folder)
    undo.callback(cold.close)
    files = FileList(root)
    recovered = recover_root(root, cold, state, layout, files, _renewal(session))
    undo.callback(recovered.let_go)
    parts = Parts(config, clock, root, lock, storage, session, cold, marker, layout, recovered, files, places)

    def before_later_deletions() -> None:
        before_deletions()
        parts.list_files()

    recovered.deletions.before = before_later_deletions
    parts.list_files()
    if state is not None:
        parts.lifecycle.tend_damaged()
        # jobs may have removed files from the log since the recovery: the next round deletes their local copies
        parts.lifecycle.show()
    return parts


def wanted_descriptor(config: IndexConfig, stored: IndexDescriptor | None) -> IndexDescriptor:
    """Return the descriptor that an index must have: by `config`, else by `stored` (None: new), else by the preset.

    Raises `ConfigError` for a column of a new index that has the name of a field of answers. It also raises it for
    entries that no block can hold, and for a fingerprint of another type than `>u4`.
    """
    if stored is None:
        geometry = config.geometry()
        if (clash := geometry.schema.clashing()) is not None:
            raise ConfigError(
                f"{geometry.schema.name}.{clash} has the name of a field of answers, which it would hide: "
                "rename the column"
            )
        _check_fingerprint(geometry.schema)
        if (size := geometry.schema.item.itemsize) > BLOCK_BYTES:
            raise ConfigError(
                f"an entry of {geometry.schema.name} has {size:,} bytes, but a file's blocks have {BLOCK_BYTES:,}: "
                "declare narrower columns"
            )
        return IndexDescriptor("", geometry, config.offset_space)
    given_names = config.given
    layout = stored.layout
    preset = PRESETS[config.preset] if "preset" in given_names else layout.preset
    schema = layout.schema if preset == layout.preset else preset.schema
    if config.item_type is not None:
        schema = Schema.of(config.item_type)
    _check_fingerprint(schema)
    offset_space = config.offset_space if "offset_space" in given_names else stored.offset_space
    slots = layout.slots if config.slots is None else config.slots
    items = layout.items if config.items is None else config.items
    rule = layout.hash if config.hash is None else config.hash
    return IndexDescriptor(stored.index_id, Layout(preset, schema, slots, items, rule), offset_space)


def _check_fingerprint(schema: Schema) -> None:
    """Raise `ConfigError` for a column of this name that no writer can fill."""
    if not schema.keyed and any(c.name == "fingerprint" for c in schema.extra):
        raise ConfigError(
            f"{schema.name}.fingerprint must have the type '>u4', because it is computed from keys: rename the column"
        )


def _join(
    config: IndexConfig,
    root: Root,
    session: StorageSession,
    marker: Marker | None,
    wanted: IndexDescriptor,
    uri: str,
    root_id: str,
    begins_anew: bool,
    takes_over: bool,
    before_deletions: Callable[[], None],
) -> tuple[Marker, Layout, LogState | None]:
    """Join the index in the storage and claim it. A known root may start while the storage is unavailable.

    `before_deletions` is called if it was claimed.
    """
    known, layout = marker, wanted.layout
    try:
        descriptor = session.join(begins_anew=begins_anew)
        layout = wanted_descriptor(config, descriptor).layout
        if marker is None or marker.storage != uri:
            # before the claim, because log records name the root, and its files belong to this storage from now on
            marker = Marker(descriptor.index_id, root_id, layout, descriptor.offset_space, uri)
            root.write_file(root.marker_path, [marker.encode()], f"writing {root.marker_path}")
        session.claim(waits=True, takes_over=takes_over, beside=before_deletions)
    except NotAnIndex as error:
        if known is None:
            raise
        # a memory storage with the same URI in another process is another storage
        ended = ", which ended with its process" if known.storage.startswith("memory://") else ""
        raise NotAnIndex(
            f"{error}, and root {root.path} belongs to another storage: index {known.index_id} in {known.storage}"
            f"{ended}. Give the root its own storage, or make a new index with another root"
        ) from error
    except (StorageError, DiskFull) as error:
        if known is None or marker is None or isinstance(error, StorageMisconfigured):
            raise
        session.log_error = without_frames(error)
        kept_state = _kept_log(root, known)
        session.kept_expired, session.kept_positions = kept_state.expired, kept_state.positions
        session.kept_documents = kept_state.documents
        _log.warning("starting without the storage; files stay local until it answers: %s", str(error))
        return marker, layout, None
    return marker, layout, session.log.state


@contextlib.contextmanager
def _side_by_side(config: IndexConfig) -> Iterator[None]:
    """Run independent reads and writes of the block side by side: an opening mostly waits for syncs."""
    if not config.background:
        yield
        return
    with (
        contextlib.closing(DaemonPool(_WRITES_AT_ONCE, "tiered-index-open")) as pool,
        active_context().with_threads(pool.submit).active(),
    ):
        yield


def _renewal(session: StorageSession) -> Callable[[], None]:
    """Return a function that renews the lease if it is due. After an error that is left to the life cycle."""
    is_over = False

    def renew() -> None:
        nonlocal is_over
        if not is_over and session.is_renewal_due:
            try:
                # never in a folder that is not mounted, or in the storage of another index
                session.log.check_end()
                session.renew()
            except TieredIndexError as error:
                _log.warning("the lease was not renewed; the life cycle tries again: %s", error)
                is_over = True

    return renew


def _release(session: StorageSession) -> None:
    """Release the lease of a writer that could not be opened. An error is harmless: the lease would expire."""
    with contextlib.suppress(StorageError, DiskFull):
        session.release()


def _kept_log(root: Root, marker: Marker) -> LogState:
    """Return the root's copy of the log; an empty state if it can't be read."""
    state = KeptLog(root).read()
    if state is None or state.genesis is None or state.genesis.index_id != marker.index_id:
        return LogState()
    return state
