"""The life cycle of files in the background: seal by age, compact, upload, retire, delete.

`run_once` is one round. Each step is idempotent. An old form of a file is deleted only after the new form serves reads.
A file that others may have published is first looked up in the log, because a merge may have removed it since. Threads:
any. A lock that no reader or writer takes serialises rounds.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from tiered_index.base.clock import StepTimes
from tiered_index.base.process import give_back
from tiered_index.errors import (
    BackPressure,
    CorruptFile,
    DiskFull,
    IndexClosed,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
    WriterFenced,
    without_frames,
)
from tiered_index.format.journal import Journal
from tiered_index.format.names import COMPACTED, STATES, UNSEALED, UPLOADED, data_name
from tiered_index.service.jobs.expiry import KnownStats, record_expiry
from tiered_index.service.jobs.orphans import sweep
from tiered_index.service.jobs.segments.ranges import drop_ranges, file_of, store_ranges
from tiered_index.service.life.context import (
    DamagedCopies,
    LifecycleContext,
    Progress,
    check_size,
    has_newer_positions,
    sealed_form,
)
from tiered_index.service.life.same_file import check_same
from tiered_index.service.life.trusted_time import TrustedTime
from tiered_index.service.log.expired import NOTHING
from tiered_index.service.log.log import fenced, publishing
from tiered_index.service.log.publication import Publication, Unpublished, stored_file
from tiered_index.service.log.reads import READ_PREFIX
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.compacted import (
    CompactedFile,
    DamagedFile,
    StorageBytes,
    open_local,
    open_stored,
    verify_runs,
    verify_tables,
)
from tiered_index.service.read.files.snapshot import Snapshot
from tiered_index.service.read.files.unsealed import UnsealedFile
from tiered_index.service.read.files.window_table import WindowTable
from tiered_index.service.root import disk_error, disk_errors
from tiered_index.service.write.appenders import QUARANTINE
from tiered_index.storage.base import PART_BYTES, Bytes, Writer
from tiered_index.storage.disk import taken_bytes

_log = logging.getLogger(__name__)
_EXPIRE_EVERY_S = 60
_SWEEP_EVERY_S = 86400
# after an error
_SWEEP_AGAIN_S = 3600


class Lifecycle:
    """The life cycle of one root's files. `errors` has the last error of each file, until its step succeeds."""

    def __init__(
        self, context: LifecycleContext, damaged: Iterable[DamagedFile], journals: Mapping[str, Journal]
    ) -> None:
        """Make it with the `damaged` files and `journals` of a `Recovered`."""
        self._context = context
        self.lock = threading.RLock()
        self._refreshed_s = context.clock.monotonic_s()
        self._damaged = DamagedCopies(context, damaged, journals)
        self._unpublished = Unpublished[str, str]()  # names of objects, by file id
        self.refresh, self.show = context.refresh, context.show
        self._failed: dict[str, TieredIndexError] = {}  # errors of this round
        self.errors: dict[str, TieredIndexError] = {}
        self.times = {name: StepTimes(context.clock) for name in ("compact", "upload", "retire", "expire")}
        self._closed = False
        self.made_room: Callable[[], None] = lambda: None
        """Called after local copies were deleted because the disk is full."""
        self._is_away = context.session.log_error is not None
        # times of the next expiry and sweep. Without a rule no sweep follows the opening, as it lists the whole storage
        self._expire_s, now_s = 0.0, context.clock.monotonic_s()
        self._sweep_s = now_s if context.config.retention.any else now_s + _SWEEP_AGAIN_S
        self._topic_stats = KnownStats(context.cold)
        self._time = TrustedTime(context.session.storage, context.clock)
        # the snapshot and the state whose replaced ranges were tended
        self._tended: tuple[Snapshot, LogState] | None = None
        self._expired = NOTHING  # as in the copy of the log in the root

    def run_once(self) -> Progress:
        """Run one round. Raises the first error after every file had its turn."""
        progress, errors = self._round()
        if errors:
            raise errors[0]  # raised here, because the kept error's traceback must not refer to files
        return progress

    def _round(self) -> tuple[Progress, list[TieredIndexError]]:
        with self.lock:
            if self._closed:
                raise IndexClosed("the index is closed: open it again")
            self._failed = {}
            progress = Progress()
            self._context.flusher.roll_older_than(self._context.config.seal_after_s)
            self._roll_without_room()
            has_root = self._step("root", self._context.root.check)
            sealed = self._sealed()
            for file in sealed:
                # filters before the first compaction, which takes longer and also reports damage
                self._step(f"the filter of {file.file_id}", partial(_make_filter, file))
                self._renew_meanwhile()
            for file in sealed if has_root else ():
                if self._step(file.file_id, partial(self._compact, file), "compact"):
                    progress.compacted += 1
                    # each, because `disk_max_bytes` has room for one compaction
                    self._free_disk()
                self._renew_meanwhile()
            if progress.compacted:
                # a compaction frees arrays as large as its file
                give_back()
            if self._step("storage", self._claim) and has_root:
                self._step("damaged", self._damaged.tend)
                for ready in self._ready():
                    if self._step(ready.file_id, partial(self._upload, ready), "upload"):
                        progress.uploaded += 1
                        if self._lacks_room:
                            self._retire_old(progress)
                    elif not _is_damage(self._failed[ready.file_id], ready):
                        # stop, because files are published in order of sequence. A damaged file waits alone: records
                        # of later files then state no positions.
                        break
                    self._renew()
                self._step("positions", self._publish_reads)
                self._step("expiry", self._expire, "expire")
                self._step("replaced ranges", self._tend_ranges)
                self._step("the root's copy of the log", partial(self._note_log, has_deleted=progress.compacted > 0))
                self._step("sweep", self._sweep)
                self._retire_old(progress)
            self._context.files.follow()
            if has_root:
                self._context.deletions.again()
                self._free_disk()
            self._tell_storage()
            self._failed |= self._context.deletions.errors()
            self.errors = self._failed
            return progress, list(self.errors.values())

    def _roll_without_room(self) -> None:
        """Seal the active files if a flush found the disk full and no other file can free space."""
        if isinstance(self._context.flusher.error, DiskFull) and not (
            self._sealed() or self._ready() or self._retirable(lacks_room=True)
        ):
            self._context.flusher.roll()

    def _tell_storage(self) -> None:
        """Log once that the storage is unavailable, and once that it is back."""
        failed = {} if "root" in self._failed else self._failed
        error = next((failure for failure in failed.values() if isinstance(failure, StorageUnavailable)), None)
        if (error is not None) != self._is_away:
            self._is_away = error is not None
            uri = self._context.session.storage.uri
            if error is not None:
                _log.warning("the storage %s does not answer; files stay local until it does: %s", uri, error)
            else:
                _log.info("the storage %s is back", uri)

    def tend_damaged(self) -> None:
        """Drop damaged files that were published. Rounds repeat it after an error."""
        with self.lock:
            self._step("damaged", self._damaged.tend)

    def end(self) -> None:
        """Make `run_once` raise `IndexClosed` from now on."""
        with self.lock:
            self._closed = True
            self._context.end()

    def hurry(self) -> None:
        """End a running round before its next step."""
        self._closed = True

    def close(self) -> None:
        """Run waiting disposals and release the lease. An unavailable or full storage is only logged."""
        with self.lock:
            self._closed = True
            self._context.end()
            try:
                self._context.root.check()
            except TieredIndexError as error:
                _log.warning("replaced files were not deleted; the next start tries again: %s", error)
            else:
                self._context.catalog.reclaim()
            try:
                self._context.session.release()
            except (StorageError, DiskFull) as error:
                _log.warning("the lease was not released and will expire by itself: %s", error)

    def local_bytes(self) -> int:
        """Return the bytes of the root's files on disk."""
        return sum(sum(self._sizes(state)) for state in STATES)

    def compaction_bytes(self) -> int:
        """Return the most bytes that a compaction writes before it deletes the file that it compacts."""
        return max(self._sizes(UNSEALED), default=0)

    def _sizes(self, state: str) -> Iterator[int]:
        root = self._context.root
        with contextlib.suppress(OSError):  # the step that needs the folder raises
            for name in root.disk.names(root.folder(state)):
                with contextlib.suppress(FileNotFoundError):
                    yield taken_bytes((root.folder(state) / name).stat())

    def _step(self, name: str, step: Callable[[], None], kind: str | None = None) -> bool:
        if self._closed:
            raise IndexClosed("the index was closed during the round")
        try:
            step() if kind is None else self.times[kind].run(step)
        except TieredIndexError as error:
            if isinstance(error, WriterFenced):
                if self._context.session.fenced is None:
                    _log.warning("this writer was fenced: %s", error)
                self._context.session.fenced = error
            self._failed[name] = self.errors[name] = without_frames(error)
            return False
        except MemoryError:  # it is no fault of this file, and others would need memory, too
            raise
        except Exception as error:  # noqa: BLE001 - other files must have their turn; the round raises the typed error
            _log.exception("a step of the life cycle failed unexpectedly: %s", name)
            what = f"a step of the life cycle of {name}"
            self._failed[name] = self.errors[name] = (
                disk_error(error, what)
                if isinstance(error, OSError)
                else TieredIndexError(f"{what} failed: {type(error).__name__}: {error}")
            )
            return False
        self.errors.pop(name, None)
        return True

    def _renew(self) -> None:
        """Renew the lease between two steps, because a round can take longer than its time to live."""
        session = self._context.session

        def renew() -> None:
            # never in a folder that is not mounted, or in the storage of another index
            session.log.check_end()
            session.renew()

        if "lease" not in self._failed and session.is_renewal_due:
            self._step("lease", renew)

    def _renew_meanwhile(self) -> None:
        """Renew the lease during work on local files, which doesn't wait for a storage that is unavailable."""
        if not self._is_away:
            self._renew()

    def _claim(self) -> None:
        context, session = self._context, self._context.session
        if session.fenced is not None:
            raise session.fenced
        if not session.claimed or session.log_error is not None:
            if not session.claimed:
                session.join()
                if context.config.storage is not None:
                    # before the claim, as at the start
                    context.root.name_storage(context.config.storage)
                session.claim()
            state = self.refresh()
            context.flusher.topics.learn(state.documents)
            context.flusher.learn(state.positions)
            session.log_error = None
        self._time.learn(session.log.state)
        self._time.follow_wall()
        if context.clock.monotonic_s() - self._refreshed_s >= context.config.refresh_interval_s:
            state = self.refresh()
            self._refreshed_s = context.clock.monotonic_s()
            if state.epoch > session.epoch:  # checked here, too, in case there is nothing to publish
                raise fenced(session.storage.uri, state.epoch, session.epoch)
        session.renew()

    def _publish_reads(self) -> None:
        """Publish how far topics were read, if answers from the storage need it and no entry waits to be published.

        The record of a file publishes it otherwise. A source may pass records that have no entry.
        """
        context, session = self._context, self._context.session
        state, positions = session.log.state, context.flusher.positions
        readings = [
            (store, reading) for store, ranges in state.expired.replaced.stores.items() for reading in ranges.readings
        ]
        # a new reading of a file may end with rows that have no entry
        if any(reading.end <= positions.get(store, 0) for store, reading in readings) and context.files.is_published:
            state = session.log.append_positions(session.epoch, positions)
        as_of_ms, reads = state.as_of_ms or 0, state.reads
        if state.bounds is None or min(state.bounds.read_before_ms.values()) >= as_of_ms:
            return
        further = [name for name, at in reads.items() if at < as_of_ms and positions.get(name, at) > at]
        # the files after the positions: they have every entry before these
        if any(name.startswith(READ_PREFIX) for name in further) and context.files.is_published:
            session.log.append_positions(session.epoch, positions)

    def _tend_ranges(self) -> None:
        """Drop the replaced ranges of which no file has an entry, and write many into an object."""
        context, session = self._context, self._context.session
        snapshot, state = context.catalog.snapshot, session.log.state
        tended = self._tended
        is_same = tended is not None and tended[0] is snapshot and tended[1] is state
        if not state.expired.replaced or is_same:
            return
        local: list[tuple[int, int, int]] = []
        # those of the storage, too: the catalog may show objects that the newest record has removed
        for handle in context.catalog.all():
            if isinstance(handle, WindowTable):
                local += map(file_of, handle.shards)
            elif handle.second_min <= handle.second_max:
                local.append((0, handle.second_min, handle.second_max))
        drop_ranges(session.log, session.epoch, local)
        store_ranges(session.log, session.epoch)
        self._tended = snapshot, state

    def _expire(self) -> None:
        """At intervals, record the expiry by the retention setting."""
        context, session, rule = self._context, self._context.session, self._context.config.retention
        state = session.log.state
        # without anything that could expire, a clock that is wrong now would only hide later entries
        is_new = not (state.objects or state.catalogs or state.expiry_ms)
        if rule.any and not is_new and (now_s := context.clock.monotonic_s()) >= self._expire_s:
            now_ms = self._time.now_ms(state)
            # a new root reads the topics of all old objects, which takes longer than the lease lives if there are many
            stats = self._topic_stats.of(rule, state, now_ms, self._renew)
            record_expiry(session.log, rule, now_ms, session.epoch, stats)
            context.refresh()
            self._expire_s = now_s + _EXPIRE_EVERY_S

    def _note_log(self, *, has_deleted: bool) -> None:
        """Write the root's copy of the log, which is used while the storage is unavailable, if more has expired.

        `has_deleted`: also because this round has deleted files before it published their other forms.
        """
        if has_deleted or self._context.session.expired is not self._expired:
            self._context.deletions.before()
            self._expired = self._context.session.expired

    def _sweep(self) -> None:
        """At intervals, delete objects that were removed long enough ago. Merges remove objects, too.

        A storage's clock that is wrong once must not make a running upload an orphan.
        """
        session, now_s = self._context.session, self._context.clock.monotonic_s()
        if now_s >= self._sweep_s and "expiry" not in self._failed:
            # not in the next round again, because a sweep lists the whole storage
            self._sweep_s = now_s + _SWEEP_AGAIN_S
            self._time.check_storage()
            # it lists the whole log, which takes longer than the lease lives in an index of years
            sweep(session.storage, session.log, self._context.config.retention.grace_s, beat=self._renew)
            self._sweep_s = now_s + _SWEEP_EVERY_S

    def _sealed(self) -> list[UnsealedFile]:
        return [file for file in self._context.files.unsealed if file.sealed]

    def _ready(self) -> list[CompactedFile]:
        return sorted(self._context.files.compacted, key=lambda file: file.lane != QUARANTINE)

    @property
    def _lacks_room(self) -> bool:
        """Whether a flush or a compaction found the disk full."""
        return any(isinstance(error, BackPressure) for error in (self._context.flusher.error, *self._failed.values()))

    def _retire_old(self, progress: Progress) -> None:
        """Delete the local copies of `_retirable`, and tell the flusher if that makes room for it."""
        lacks_room, retired = self._lacks_room, progress.retired
        retirable = self._retirable(lacks_room=lacks_room)
        # only while the log still has the record that published the files
        if not retirable or not self._step("log", self._context.session.log.check_end):
            return
        for old in retirable:
            progress.retired += self._step(old.file_id, partial(self._retire, old), "retire")
            self._renew()
        if lacks_room and progress.retired > retired:
            self._free_disk()
            self.made_room()

    def _free_disk(self) -> None:
        """Delete the local files that other forms have replaced, unless a lookup still reads them."""
        # a mapped file keeps its space on the disk
        self._context.files.follow()
        self._context.catalog.reclaim(self._renew_meanwhile)

    def _retirable(self, *, lacks_room: bool) -> list[CompactedFile]:
        """Return the local copies to delete: those kept long enough, and the oldest beyond the bound in bytes.

        If a flush or compaction found the disk full, the oldest are deleted early, to free space for one file. A copy
        stays if it has a source position that neither the log nor newer local files have.
        """
        files, state, config = self._context.files, self._context.session.log.state, self._context.config
        bound, before_ms = config.local_keep_bytes, self._context.clock.now_ms() - config.local_keep_s * 1000
        old, total = files.copies_before(before_ms), files.copies_bytes
        wanted = files.copies[-1].metadata().layout.unsealed_size if lacks_room and files.copies else 0
        needed: set[str] | None = None
        chosen = []
        for file in files.copies:
            is_tight = wanted > 0 or (bound is not None and total > bound)
            if not old and not is_tight:
                break
            if file.stored is None or file.file_id not in state.files:
                continue
            is_old = file.stored.stored.published_ms <= before_ms
            old -= is_old
            if not is_old and not is_tight:
                continue
            if has_newer_positions(file, state.positions):
                needed = files.needed(state.positions) if needed is None else needed
                if file.file_id in needed:
                    continue
            assert file.local is not None
            chosen.append(file)
            total -= file.local.size_bytes
            wanted -= file.local.size_bytes
        return chosen

    def _compact(self, file: UnsealedFile) -> None:
        root = self._context.root
        target = root.index_path(COMPACTED, file.file_id)
        pieces = sealed_form(file).compacted(file.entries(), file.filter_bytes)
        root.write_file(target, self._renewing(pieces), f"compacting {file.path}")
        self._context.catalog.put(open_local(target), lambda: self._context.drop(file))

    def _renewing(self, pieces: Iterable[Bytes]) -> Iterator[Bytes]:
        for piece in pieces:
            self._renew_meanwhile()
            yield piece

    def _upload(self, file: CompactedFile) -> None:
        """Publish a compacted file, unless the log has it, and move it to ``uploaded``. Idempotent."""
        local, file_id = file.local, file.file_id
        assert local is not None
        verify_tables(file)
        verify_runs(file)
        context, session, now_ms = self._context, self._context.session, self._context.clock.now_ms()
        # otherwise it can't have been published, and no refresh is needed
        may_be_there = file_id in context.outcome_unknown
        state = session.refreshed() if may_be_there else session.log.state
        # checks that this is still the index's storage, for a twelfth of the cost of a listing
        session.log.check_end()
        known = state.object_of(file_id)
        removed = partial(context.moved_files, after=_log_number(file))
        sent = self._unpublished.get(file_id)
        if known is not None:
            if sent is not None:
                sent[1].resolve(state)
        elif may_be_there and file_id in removed(state):
            self._let_go(file)
            return
        else:
            send = partial(self._send, file_id, memoryview(local.data))
            name, publication = sent = self._unpublished.sent(file_id, send)
            context.outcome_unknown.add(file_id)
            stored = stored_file(name, local.trailer(), local.size_bytes, now_ms)
            positions = context.files.durable_positions(file)
            gone: Callable[[LogState], set[str]] = removed if may_be_there else lambda state: set()
            before_ms = context.files.put_before_ms(file, now_ms)
            make = publishing(session.epoch, (stored,), positions=positions, put_before_ms=before_ms, removed=gone)
            state = publication.record("publish", make, lambda state: state.object_of(file_id))
            known = state.object_of(file_id)
            if known is None:
                self._let_go(file)
                return
        if sent is None or known.name != sent[0]:
            check_same(file, StorageBytes(context.cold, known))
        # durable first, because each later start relies on a file in `uploaded` being published
        session.log.rely()
        target = self._move(file)
        _log.info("uploaded %s: %d entries, %d bytes as %s", file_id, file.count, known.size_bytes, known.name)
        if known == stored_file(known.name, local.trailer(), local.size_bytes, known.published_ms):
            context.cold.keep(known, local.data)  # only if the bytes are the same
        try:
            moved = open_local(target, StorageBytes(context.cold, known))
        except FileNotFoundError:
            _log.warning("%s was deleted; the storage has the file", target)
            moved = open_stored(context.cold, known)
        context.catalog.put(moved)
        # last, because a file that could not be moved and opened must be looked up in the log again
        self._end(file_id)

    def _send(self, file_id: str, data: memoryview) -> tuple[str, Publication]:
        """Send a file. Return the object's name with its publication."""
        session = self._context.session

        def fill(stream: Writer) -> None:
            for start in range(0, len(data), PART_BYTES):
                stream.write(data[start : start + PART_BYTES])
                self._renew()

        name = data_name(file_id, secrets.token_hex(8))
        return name, Publication.send(session.log, name, fill, session.epoch)

    def _end(self, file_id: str) -> None:
        self._unpublished.forget(file_id)
        self._context.outcome_unknown.discard(file_id)

    def _move(self, file: CompactedFile) -> Path:
        """Move a file to ``uploaded``, durably. Return its new path."""
        root = self._context.root
        before, after = root.index_path(COMPACTED, file.file_id), root.index_path(UPLOADED, file.file_id)
        with disk_errors(f"moving {before} to {after}"):
            if before.exists():
                root.disk.publish(before, after)
            else:  # an earlier try moved it, but could not make that durable
                root.disk.sync_folder(after.parent)
                root.disk.sync_folder(before.parent)
        return after

    def _let_go(self, file: CompactedFile) -> None:
        """Drop a file that a record has removed, unless it has a source position beyond the log's."""
        context = self._context
        context.check_moved(file)
        context.refresh()
        logged = context.append_positions(file)
        copy = None
        if has_newer_positions(file, logged):
            target = self._move(file)
            try:
                copy = open_local(target)
            except FileNotFoundError:
                _log.warning("%s was deleted; a record has removed the file", target)
        # after the move, because a file that could not be moved must be looked up in the log again
        self._end(file.file_id)
        if copy is not None:
            context.catalog.put(copy)
            return
        # an earlier try may have moved it
        paths = [context.root.index_path(state, file.file_id) for state in (COMPACTED, UPLOADED)]
        context.catalog.remove(file.file_id, lambda: context.deletions.unlink(paths))

    def _retire(self, file: CompactedFile) -> None:
        assert file.stored is not None
        stored = file.stored.stored
        check_size(self._context.session.storage, stored, "its local copy")
        self._context.catalog.put(open_stored(self._context.cold, stored), self._context.dispose(file.file_id))
        _log.info("retired the local copy of %s: %d bytes", file.file_id, stored.size_bytes)


def _is_damage(error: TieredIndexError, file: CompactedFile) -> bool:
    """Return whether an error states damage of `file` or of its object, not of the log."""
    # names of both have the id, and names in the log do not
    return type(error) is CorruptFile and file.file_id in error.file


def _make_filter(file: UnsealedFile) -> None:
    with contextlib.suppress(CorruptFile):  # the compaction reports it
        file.make_filter()


def _log_number(file: CompactedFile) -> int:
    """Return the number of a record before all that name the file; 0 if there was none."""
    return int(file.metadata().more.get("log_number", 0))
