"""Uploads: a compacted file is sent under a name of its own, then one log record publishes it.

An upload may be repeated after any failure. A file that may have been published unheard (by an earlier process, or by a
try whose outcome is unknown) is looked up in the log's records first: a merge may have removed it since. What waited
for the log for most of a day is sent anew, for `orphans` may be about to sweep it. One thread at a time: the life
cycle's round.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tiered_index.clock import Clock
from tiered_index.errors import ObjectNotFound, StorageError, StorageUnavailable, TieredIndexError, WriterFenced
from tiered_index.format.names import COMPACTED, DATA_PREFIX, UPLOADED, data_name, data_prefix
from tiered_index.service.catalog.catalog import Catalog
from tiered_index.service.cold.path import ColdPath
from tiered_index.service.files.compacted import CompactedFile, StorageBytes, open_local, verify_runs, verify_tables
from tiered_index.service.lifecycle.local_copies import Removals, durable_positions, has_newer_positions
from tiered_index.service.lifecycle.pending_uploads import MAX_AGE_S, age_s_of, check_age, stored_file
from tiered_index.service.log.log import fenced
from tiered_index.service.log.records import StoredObject
from tiered_index.service.log.session import StorageSession
from tiered_index.service.log.state import LogState
from tiered_index.service.root.root import Deletions, Root, disk_error
from tiered_index.storage.base import Storage

__all__ = ["Uploads"]


class _Sent(NamedTuple):
    name: str
    began_ms: int


class Uploads:
    """The uploads of one root.

    `recovered` are the ids of files that an earlier process began: it may have published them unheard.
    """

    def __init__(
        self,
        root: Root,
        catalog: Catalog,
        session: StorageSession,
        cold: ColdPath,
        deletions: Deletions,
        clock: Clock,
        *,
        part_bytes: int,
        refresh: Callable[[], object],
        recovered: Iterable[str],
    ) -> None:
        """`refresh` reads the log and shows what it says."""
        self._root = root
        self._catalog = catalog
        self._session = session
        self._cold = cold
        self._deletions = deletions
        self._clock = clock
        self._part_bytes = part_bytes
        self._refresh = refresh
        self._outcome_unknown = set(recovered)
        self._removals = Removals(session.log)
        self._sent: dict[str, _Sent] = {}  # file id -> object that was uploaded whole and is not known to be in the log

    def upload(self, file: CompactedFile) -> None:
        """Publish a compacted file, unless the log has it already, and move it to ``uploaded``.

        Raises what the storage raises, `CorruptFile` (the local file does not verify), `WriterFenced`. It may be
        repeated.
        """
        assert file.local is not None
        storage, epoch = self._session.storage, self._session.epoch
        verify_tables(file)
        verify_runs(file)
        trailer = file.local.trailer()
        # an attempt that reached the storage but, as far as we heard, not the log is published under the name that it
        # has
        sent = self._sent.get(file.file_id)
        if sent is not None and age_s_of(sent.began_ms, self._clock) >= MAX_AGE_S:
            # never deleted, since its record may still arrive
            del self._sent[file.file_id]
            self._outcome_unknown.add(file.file_id)
            sent = None
        now_ms = self._clock.now_ms()
        name = sent.name if sent is not None else data_name(file.file_id, secrets.token_hex(8))
        stored = stored_file(name, trailer, file.local.size_bytes, now_ms)
        state = self._session.log.refresh()
        if state.epoch > epoch:
            raise fenced(storage.uri, state.epoch, epoch)
        known = state.object_of(file.file_id)
        may_be_gone = known is None and (sent is not None or file.file_id in self._outcome_unknown)
        if may_be_gone and file.file_id in self._removals.files(state, _log_number(file)):
            self._let_go(file)
            return
        if known is None:
            self._session.log.check_end()
            try:
                if sent is None:
                    self._send(storage, name, memoryview(file.local.data))
                size = storage.head(name).size_bytes
                if size != stored.size_bytes:
                    raise StorageUnavailable(
                        f"{storage.uri}: {name} has {size:,} bytes after its upload, not {stored.size_bytes:,}"
                    )
            except TieredIndexError as error:
                if sent is None:
                    # the error that counts is the upload's; an orphan costs only space
                    with contextlib.suppress(StorageError):
                        storage.delete(name)
                elif isinstance(error, ObjectNotFound):
                    # sent anew next time; never deleted, since its record may still arrive
                    del self._sent[file.file_id]
                raise
            self._sent[file.file_id] = sent or _Sent(name, now_ms)
            try:
                known = self._publish(file, stored)
            except WriterFenced:
                # decided: it never was published and never will be
                if self._session.log.state.object_of(file.file_id) is None:
                    with contextlib.suppress(StorageError):
                        storage.delete(name)
                raise
            if known is None:
                self._let_go(file)
                return
        if known.name != name and file.file_id in self._sent:
            # a job was first, so that no record of ours can arrive any more
            with contextlib.suppress(StorageError):
                storage.delete(name)
        target = self._move(file)
        self._sent.pop(file.file_id, None)
        self._outcome_unknown.discard(file.file_id)
        if known == replace(stored, name=known.name, published_ms=known.published_ms):
            self._cold.keep(known, file.local.data)  # else another version's compaction: its bytes are not these
        self._catalog.put(open_local(target, StorageBytes(self._cold, known)))

    def mark_outcome_unknown(self, file_id: str) -> None:
        """Take note that others may publish a file from now on."""
        self._outcome_unknown.add(file_id)

    def _publish(self, file: CompactedFile, stored: StoredObject) -> StoredObject | None:
        """Append the record, unless others were first; return what the log has, None where a merge has removed it
        since.
        """
        log = self._session.log
        before = _log_number(file)
        removed = partial(self._removals.files, after=before) if file.file_id in self._outcome_unknown else _none
        positions = durable_positions(file, self._catalog.all())
        check = partial(check_age, stored.name, self._sent[file.file_id].began_ms, self._clock, self._session.storage)
        return log.publish(self._session.epoch, (stored,), positions=positions, removed=removed, check=check).object_of(
            file.file_id
        )

    def _move(self, file: CompactedFile) -> Path:
        """Move a file to ``uploaded``, durably; return where it is."""
        source, target = self._root.index_path(COMPACTED, file.file_id), self._root.index_path(UPLOADED, file.file_id)
        try:
            if source.exists():
                self._root.disk.publish(source, target)
            else:  # an earlier try moved it, but could not make that durable
                self._root.disk.sync_folder(target.parent)
                self._root.disk.sync_folder(source.parent)
        except OSError as error:
            raise disk_error(error, f"moving {source} to {target}") from error
        return target

    def _let_go(self, file: CompactedFile) -> None:
        """Drop a file that is in the log no more: an earlier try, or a job, published it and a merge has removed it
        since.

        What it was merged into is shown first. The local copy stays, as an uploaded one, while it is the last to say a
        source's position.
        """
        log = self._session.log
        self._refresh()
        log.append_positions(self._session.epoch, durable_positions(file, self._catalog.all()))
        self._sent.pop(file.file_id, None)
        self._outcome_unknown.discard(file.file_id)
        if has_newer_positions(file, log.state.positions):
            target = self._move(file)
            self._catalog.put(open_local(target))
            return
        path = self._root.index_path(COMPACTED, file.file_id)
        self._catalog.remove(file.file_id, lambda: self._deletions.unlink([path]))

    def _send(self, storage: Storage, name: str, data: memoryview) -> None:
        part = max(self._part_bytes, storage.min_part_bytes)
        if len(data) <= part:
            storage.put(name, data)
            return
        handle = storage.begin_upload(name)
        try:
            starts = range(0, len(data), part)
            parts = [storage.upload_part(handle, i + 1, data[start : start + part]) for i, start in enumerate(starts)]
            storage.complete_upload(handle, parts)
        except TieredIndexError:
            with contextlib.suppress(StorageError):  # recovery and `orphans` abort what is left
                storage.abort_upload(handle)
            raise

    def sweep_attempts(self, file_ids: set[str]) -> int:
        """Delete what unfinished uploads of this root's own files left in the storage; return how many objects and
        uploads that was.
        """
        storage = self._session.storage
        swept = 0
        named = set(self._session.log.refresh().objects)
        for file_id in sorted(file_ids):
            for info in list(storage.list(data_prefix(file_id))):
                if info.name not in named:
                    storage.delete(info.name)
                    swept += 1
        if file_ids:
            for handle in list(storage.list_uploads(DATA_PREFIX)):
                if handle.name.split("/")[1] in file_ids:
                    storage.abort_upload(handle)
                    swept += 1
        return swept


def _log_number(file: CompactedFile) -> int:
    """Return the number of a record before any that names the file; 0, the log's beginning, for files of older
    versions.
    """
    return int(file.metadata().more.get("log_number", 0))


def _none(state: LogState) -> Container[str]:
    return ()
