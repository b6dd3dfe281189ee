"""Uploads: a compacted file is sent under a name of its own, then one log record publishes it.

An upload may be repeated after any failure. A file that may have been published unheard is looked up in the log's
records first: a merge may have removed it since. What waited for the log for most of a day is sent anew, for `orphans`
may be about to sweep it. One thread at a time: the life cycle's round.
"""

from __future__ import annotations

import secrets
from collections.abc import Container
from functools import partial
from pathlib import Path

from tiered_index.format.names import COMPACTED, DATA_PREFIX, UPLOADED, data_name, data_prefix
from tiered_index.service.files.compacted import CompactedFile, StorageBytes, open_local, verify_runs, verify_tables
from tiered_index.service.lifecycle.publication import Publication, stored_file
from tiered_index.service.lifecycle.root_files import RootFiles, durable_positions, has_newer_positions
from tiered_index.service.log.log import publishing
from tiered_index.service.log.state import LogState
from tiered_index.service.root.root import disk_error

__all__ = ["Uploads"]


class Uploads:
    """The uploads of one root."""

    def __init__(self, files: RootFiles) -> None:
        self._files = files
        self._publications: dict[str, Publication] = {}  # by file id; what is not known to be in the log

    def upload(self, file: CompactedFile) -> None:
        """Publish a compacted file, unless the log has it, and move it to ``uploaded``; may be repeated. Raises as the
        storage, `CorruptFile` (the local file does not verify), `WriterFenced`.
        """
        local, file_id = file.local, file.file_id
        assert local is not None
        verify_tables(file)
        verify_runs(file)
        files, session, now_ms = self._files, self._files.session, self._files.clock.now_ms()
        # an attempt that reached the storage but, as far as we heard, not the log is published under its name
        publication = self._publications.get(file_id)
        if publication is not None and publication.is_overdue:
            self._forget(file_id)
            publication = None
        state = session.refreshed()
        known = state.object_of(file_id)
        may_be_gone = publication is not None or file_id in files.outcome_unknown
        # a record before any that names the file; 0, the log's beginning, for files of older versions
        removed = partial(files.removals.files, after=int(file.metadata().more.get("log_number", 0)))
        if known is None and may_be_gone and file_id in removed(state):
            self._let_go(file)
            return
        if known is not None:
            if publication is not None:
                publication.settle(state)
        else:
            session.log.check_end()
            publication = self._sent(file_id, memoryview(local.data))
            stored = stored_file(publication.sent.name, local.trailer(), local.size_bytes, now_ms)
            positions = durable_positions(file, files.catalog.all())
            checked = removed if may_be_gone else _none
            make = publishing(session.epoch, (stored,), positions=positions, removed=checked)
            state = publication.record("publish", make, lambda state: state.object_of(file_id))
            known = state.object_of(file_id)
            if known is None:
                self._let_go(file)
                return
        target = self._move(file)
        self._end(file_id)
        if known == stored_file(known.name, local.trailer(), local.size_bytes, known.published_ms):
            files.cold.keep(known, local.data)  # else another version's compaction: its bytes are not these
        files.catalog.put(open_local(target, StorageBytes(files.cold, known)))

    def _sent(self, file_id: str, data: memoryview) -> Publication:
        """Return the publication of a file as sent now, or by an earlier try."""
        session, publication = self._files.session, self._publications.get(file_id)
        if publication is not None:
            if publication.is_whole():
                return publication
            self._forget(file_id)
        name, part_bytes = data_name(file_id, secrets.token_hex(8)), self._files.config.upload_part_bytes
        self._publications[file_id] = publication = Publication.send(
            session, name, lambda upload: upload.write(data), part_bytes, part_bytes
        )
        return publication

    def _forget(self, file_id: str) -> None:
        """Forget what was sent; it is never deleted, since its record may still arrive."""
        del self._publications[file_id]
        self._files.outcome_unknown.add(file_id)

    def _end(self, file_id: str) -> None:
        self._publications.pop(file_id, None)
        self._files.outcome_unknown.discard(file_id)

    def _move(self, file: CompactedFile) -> Path:
        """Move a file to ``uploaded``, durably; return where it is."""
        root = self._files.root
        before, after = root.index_path(COMPACTED, file.file_id), root.index_path(UPLOADED, file.file_id)
        try:
            if before.exists():
                root.disk.publish(before, after)
            else:  # an earlier try moved it, but could not make that durable
                root.disk.sync_folder(after.parent)
                root.disk.sync_folder(before.parent)
        except OSError as error:
            raise disk_error(error, f"moving {before} to {after}") from error
        return after

    def _let_go(self, file: CompactedFile) -> None:
        """Drop a file that a record has removed since. What it was merged into is shown first; the local copy stays, as
        an uploaded one, while it alone has a source's position.
        """
        files = self._files
        files.refresh()
        said = files.append_positions(file)
        self._end(file.file_id)
        if has_newer_positions(file, said):
            files.catalog.put(open_local(self._move(file)))
            return
        path = files.root.index_path(COMPACTED, file.file_id)
        files.catalog.remove(file.file_id, lambda: files.deletions.unlink([path]))

    def sweep_attempts(self, file_ids: set[str]) -> int:
        """Delete what unfinished uploads of these files left in the storage; return how many objects and uploads."""
        storage = self._files.session.storage
        swept = 0
        named = set(self._files.session.log.refresh().objects)
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


def _none(state: LogState) -> Container[str]:
    return ()
