"""Staging: with ``compaction = "spark"`` sealed files are sent to the storage, and jobs compact and publish them.

```
sealed ─stage─> staged object, then its ticket ─a job─> in the log ─adopt─> local copy and staged object gone
                └── compact_timeout_s ─> compacted and uploaded by this host; the log accepts the first of both
```
The local copy answers until the log has the file and its source positions. Any process may repeat every step. A file
is staged only after its seal is durable. Threads: the life cycle's round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from tiered_index.errors import CorruptFile, ObjectNotFound, StorageUnavailable
from tiered_index.format.names import COMPACTED, STAGING_PREFIX, TICKET_SUFFIX
from tiered_index.service.files.compacted import CompactedFile, DamagedFile, open_stored
from tiered_index.service.files.unsealed import UnsealedFile
from tiered_index.service.lifecycle.context import LifecycleContext, check_size, has_newer_positions, sealed_form
from tiered_index.service.lifecycle.publication import Publication, abort_uploads
from tiered_index.service.lifecycle.staged import Ticket, send_entries
from tiered_index.service.log.log import own_objects
from tiered_index.service.log.records import StoredObject, max_positions
from tiered_index.storage.base import ObjectInfo


@dataclass(frozen=True, slots=True)
class _Staged:
    """A file whose object is in the storage. `unnamed` is its publication until a ticket names it."""

    ticket: Ticket
    unnamed: Publication | None


class Staging:
    """The staged files of one root."""

    def __init__(self, context: LifecycleContext) -> None:
        self._context = context
        self._enabled = context.config.compaction == "spark"
        self._timeout_ms = context.config.compact_timeout_s * 1000
        self._resumed = False
        self._since_ms: dict[str, int] = {}  # begin of each sealed file's time-out
        self._staged: dict[str, _Staged] = {}
        self._published: dict[str, UnsealedFile] = {}
        self._leftovers: list[str] = []
        self.staged = 0
        self.adopted = 0

    def waits(self, file: UnsealedFile) -> bool:
        """Return whether a sealed file must not be compacted here, because a job does or did it."""
        if file.published or self._context.session.log.state.object_of(file.file_id) is not None:
            return True
        since_ms = self._since_ms.get(file.file_id)
        # the absolute difference, so that a clock that is set back can't make a file wait permanently
        overdue = since_ms is not None and abs(self._context.clock.now_ms() - since_ms) >= self._timeout_ms
        return self._enabled and file.ended and not overdue

    def begin_clocks(self, files: Iterable[UnsealedFile]) -> None:
        """Start the time-out of each new sealed file, so that its wait ends even if steps fail."""
        now_ms = self._context.clock.now_ms()
        self._since_ms = {file.file_id: self._since_ms.get(file.file_id, now_ms) for file in files}

    def tend(self, file: UnsealedFile) -> None:
        """Take the next step for a sealed file. Raises `CorruptFile`, and the errors of the storage. Idempotent."""
        if file.published:
            return
        stored = self._context.session.log.state.object_of(file.file_id)
        if stored is not None:
            self._adopt(file, stored)
            return
        if not (self._enabled and file.ended):
            return
        if not self._resumed:
            self._resume()
        if file.file_id in self._context.outcome_unknown and file.file_id in self._context.session.log.removed_files(
            self._context.session.log.state, file.journal.log_number
        ):
            self._take_as_published(file)
            return
        self._stage(file)

    def ask_for(self, damaged: Collection[str]) -> list[str]:
        """Return the ids in `damaged` that are staged, and renew their tickets once. Raises storage errors."""
        if damaged and not self._resumed:
            self._resume()
        return [file_id for file_id in damaged if file_id in self._staged]

    def finish(self) -> None:
        """Append source positions of files that jobs published, drop local copies, and delete staged objects."""
        if self._published or self._enabled:
            files, session = self._context.files, self._context.session
            published: list[CompactedFile | UnsealedFile] = [file for file in files.unsealed if file.published]
            published += files.kept
            positions: dict[str, int] = {}
            # only of published files: other positions are part of the records that publish their files
            for file in [file for file in published if has_newer_positions(file, session.log.state.positions)]:
                positions = max_positions(positions, files.durable_positions(file))
            logged = session.log.append_positions(session.epoch, positions).positions
            needed = files.needed(logged)
            for kept in sorted(self._published.values(), key=lambda kept: kept.sequence):
                if kept.file_id not in needed:
                    self._release(kept)
        self._sweep()

    def _stage(self, file: UnsealedFile) -> None:
        """Send the entries and put the ticket, unless that is done. An overdue object without ticket is sent again."""
        known, session, file_id = self._staged.get(file.file_id), self._context.session, file.file_id
        if known is not None and known.unnamed is None:
            return
        session.log.check_end()
        if known is None or known.unnamed is None or known.unnamed.is_overdue:
            config = self._context.config
            sealed = sealed_form(file)
            ticket, publication = send_entries(session, sealed, file.entries(), config.upload_part_bytes)
            if known is None:
                self._since_ms[file_id] = ticket.staged_ms
            else:
                self._leftovers.append(known.ticket.object)
            self._staged[file_id] = known = _Staged(ticket, publication)
        self._context.outcome_unknown.add(file_id)
        session.storage.put(known.ticket.name, known.ticket.encode())
        self._staged[file_id] = _Staged(known.ticket, None)
        self.staged += 1

    def _adopt(self, file: UnsealedFile, stored: StoredObject) -> None:
        """Adopt a job's object, if its size and trailer fit the log and the local file."""
        storage = self._context.session.storage
        try:
            check_size(storage, stored, "the local file")
        except ObjectNotFound as error:
            self._context.refresh()
            if self._context.session.log.state.object_of(file.file_id) == stored:
                raise StorageUnavailable(
                    f"{storage.uri}: the log names {stored.name}, but the storage does not have it; {file.path} is kept"
                ) from error
            return  # merged since: the next round sees it
        metadata = self._context.cold.trailer(stored).metadata
        expected, found = (file.file_id, file.count), (metadata.file_id, metadata.count)
        CorruptFile.unless_equal(stored.name, "object differs from the sealed file, which is kept", expected, found)
        self._take_as_published(file)

    def _take_as_published(self, file: UnsealedFile) -> None:
        file.published = True
        self._published[file.file_id] = file
        self.adopted += 1

    def _release(self, file: UnsealedFile) -> None:
        """Replace the local copy by the stored file in the catalog. It is deleted when no lookup uses it."""
        stored = self._context.session.log.state.object_of(file.file_id)
        if stored is not None:
            self._context.catalog.put(open_stored(self._context.cold, stored), lambda: self._context.drop(file))
        else:
            self._context.refresh()  # shows the table into which it was merged
            self._context.catalog.remove(file.file_id, lambda: self._context.drop(file))
        del self._published[file.file_id]

    def _sweep(self) -> None:
        """Delete tickets and staged objects of files that are published and have no local form to compact."""
        for file_id, staged in list(self._staged.items()):
            handle = self._context.catalog.get(file_id)
            if not (
                isinstance(handle, UnsealedFile | DamagedFile)
                or (isinstance(handle, CompactedFile) and handle.folder == COMPACTED)
            ):
                self._leftovers += [staged.ticket.name, staged.ticket.object]
                del self._staged[file_id]
        while self._leftovers:
            self._context.session.storage.delete(self._leftovers[0])
            del self._leftovers[0]

    def _resume(self) -> None:
        """Find objects that an earlier process of this root staged: renew tickets of waiting files, note leftovers."""
        storage, state = self._context.session.storage, self._context.session.log.state
        by_file: dict[str, list[ObjectInfo]] = {}
        for info in list(own_objects(storage, STAGING_PREFIX)):
            by_file.setdefault(info.name.split("/")[1], []).append(info)
        kinds = UnsealedFile | CompactedFile | DamagedFile
        mine = {handle.file_id: handle for handle in self._context.catalog.all() if isinstance(handle, kinds)}
        leftovers: list[str] = []
        for file_id, infos in by_file.items():
            file = mine.get(file_id)
            if file is None and state.object_of(file_id) is None:
                continue
            keep: set[str] = set()
            waits = isinstance(file, DamagedFile) or (isinstance(file, UnsealedFile) and file.ended)
            if waits and state.object_of(file_id) is None:
                # only sealed files are staged, so a ticket covers all entries even if the local count is unknown
                keep = self._renew(file_id, file.count if isinstance(file, UnsealedFile) else None, infos)
            leftovers += sorted(
                (info.name for info in infos if info.name not in keep),
                key=lambda name: not name.endswith(TICKET_SUFFIX),
            )
        abort_uploads(storage, STAGING_PREFIX, lambda name: name.split("/")[1] in mine)
        self._leftovers += leftovers
        self._resumed = True

    def _renew(self, file_id: str, count: int | None, infos: list[ObjectInfo]) -> set[str]:
        """Put a ticket of this epoch for a staged object, with the same age. Return the names to keep."""
        sizes = {info.name: info.size_bytes for info in infos}
        for name in sorted((name for name in sizes if name.endswith(TICKET_SUFFIX)), reverse=True):
            with contextlib.suppress(CorruptFile):
                ticket = replace(
                    Ticket.decode(self._context.session.storage.get(name), name), epoch=self._context.session.epoch
                )
                if sizes.get(ticket.object) != ticket.size_bytes or (count is not None and ticket.count != count):
                    continue
                self._context.outcome_unknown.add(file_id)
                self._context.session.storage.put(ticket.name, ticket.encode())
                self._staged[file_id] = _Staged(ticket, None)
                self._since_ms[file_id] = ticket.staged_ms
                return {ticket.name, ticket.object}
        return set()
