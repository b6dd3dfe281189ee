"""Pending files of one root: with ``compaction = "spark"`` sealed files are uploaded as they are, for merges.

```
sealed ─upload─> named as pending in the log ─a merge─> in a table ─adopt─> local copy gone
                 └── compact_timeout_s ─> compacted and uploaded by this host; the log accepts the first of both
```
The local copy answers until other objects have the entries and the log has their source positions. Any process may
repeat every step. A file is uploaded only after its seal is durable. Files of the quarantine are compacted here,
because no merge may give them a window of plausible times. Threads: the life cycle's round.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiered_index.service.jobs.pending import send_sealed
from tiered_index.service.life.context import LifecycleContext, Progress, has_newer_positions, sealed_form
from tiered_index.service.life.same_file import is_in
from tiered_index.service.log.identity import other_file
from tiered_index.service.log.publication import Unpublished
from tiered_index.service.log.records import LogRecord, PendingFile, StoredObject, max_positions
from tiered_index.service.log.state import LogState
from tiered_index.service.read.compacted import CompactedFile, StorageBytes, open_stored
from tiered_index.service.read.unsealed import UnsealedFile
from tiered_index.service.write.appenders import QUARANTINE


class PendingFiles:
    """The sealed files of one root that others compact."""

    def __init__(self, context: LifecycleContext) -> None:
        self._context = context
        self._enabled = context.config.compaction == "spark"
        self._timeout_ms = context.config.compact_timeout_s * 1000
        self._since_ms: dict[str, int] = {}  # begin of each sealed file's time-out
        self._unpublished = Unpublished[str, PendingFile]()

    def waits(self, file: UnsealedFile) -> bool:
        """Return whether a sealed file must not be compacted here, because a job does or did it."""
        if file.published or self._state.object_of(file.file_id) is not None:
            return True
        since_ms = self._since_ms.get(file.file_id)
        # the absolute difference, so that a clock that is set back can't make a file wait permanently
        overdue = since_ms is not None and abs(self._context.clock.now_ms() - since_ms) >= self._timeout_ms
        return self._is_for_jobs(file) and not overdue

    def begin_clocks(self, files: Iterable[UnsealedFile]) -> None:
        """Start the time-out of each new sealed file, so that its wait ends even if steps fail."""
        now_ms, begun, self._since_ms = self._context.clock.now_ms(), self._since_ms, {}
        for file in files:
            waiting = self._state.pending_of(file.file_id)
            uploaded_ms = now_ms if waiting is None else waiting.published_ms
            self._since_ms[file.file_id] = begun.get(file.file_id, uploaded_ms)

    def tend(self, file: UnsealedFile, progress: Progress) -> None:
        """Take the next step for a sealed file, and count it in `progress`. Idempotent.

        Raises `RootBehind`, and the errors of the storage.
        """
        if file.published:
            return
        if (stored := self._state.object_of(file.file_id)) is not None:
            # it was compacted elsewhere
            file.published = is_in(file.path, file.journal, StorageBytes(self._context.cold, stored))
        elif (waiting := self._state.pending_of(file.file_id)) is not None:
            self._note_pending(file, waiting)
        elif file.file_id in self._context.outcome_unknown and self._is_elsewhere(file, self._state):
            self._context.check_moved(file)
            file.published = True
        elif self._is_for_jobs(file):
            self._upload(file, progress)
        progress.adopted += file.published

    def finish(self) -> None:
        """Append source positions of files that jobs compacted, and drop local copies."""
        files, session = self._context.files, self._context.session
        waiting = [file for file in files.unsealed if file.published]
        if not (waiting or self._enabled):
            return
        published: list[CompactedFile | UnsealedFile] = [*waiting, *files.copies]
        positions: dict[str, int] = {}
        # only of published files: other positions are part of the records that publish their files
        for file in [file for file in published if has_newer_positions(file, session.log.state.positions)]:
            positions = max_positions(positions, files.durable_positions(file))
        logged = session.log.append_positions(session.epoch, positions).positions
        needed = files.needed(logged)
        for uploaded in waiting:
            if uploaded.file_id not in needed:
                self._release(uploaded)

    @property
    def _state(self) -> LogState:
        return self._context.session.log.state

    def _is_for_jobs(self, file: UnsealedFile) -> bool:
        return self._enabled and file.ended and file.lane != QUARANTINE

    def _is_elsewhere(self, file: UnsealedFile, state: LogState) -> bool:
        """Return whether a record has moved a file's entries to other objects."""
        return file.file_id in self._context.moved_files(state, file.journal.log_number)

    def _upload(self, file: UnsealedFile, progress: Progress) -> None:
        """Send a sealed file as it is, unless an earlier try has, and append the record that names it as pending."""
        context, file_id = self._context, file.file_id
        session = context.session
        # checks that this is still the index's storage
        session.log.check_end()
        waiting, publication = self._unpublished.sent(
            file_id, lambda: send_sealed(session, sealed_form(file), file.entries())
        )
        context.outcome_unknown.add(file_id)
        before_ms = context.files.put_before_ms(file, context.clock.now_ms())

        def holder(state: LogState) -> StoredObject | None:
            return state.object_of(file_id) or state.pending_of(file_id)

        def make(state: LogState) -> LogRecord | None:
            if holder(state) is not None or self._is_elsewhere(file, state):
                return None
            return LogRecord(0, "pending", session.epoch, "", 0, pending=(waiting,), put_before_ms=before_ms)

        state = publication.record("a pending file", make, holder)
        self._unpublished.forget(file_id)
        if state.pending_of(file_id) == waiting:
            self._note_pending(file, waiting)
            self._since_ms[file_id] = waiting.published_ms
            progress.pending += 1

    def _note_pending(self, file: UnsealedFile, waiting: PendingFile) -> None:
        self._context.outcome_unknown.add(file.file_id)
        expected, actual = (waiting.count, waiting.sequence), (file.count, file.sequence)
        if expected != actual:
            raise other_file(str(file.path), waiting.name, expected, actual)
        file.pending = True

    def _release(self, file: UnsealedFile) -> None:
        """Replace the local copy by the stored file in the catalog. It is deleted when no lookup uses it."""
        stored = self._state.object_of(file.file_id)
        if stored is not None:
            self._context.catalog.put(open_stored(self._context.cold, stored), lambda: self._context.drop(file))
        else:
            self._context.refresh()  # shows the table into which it was merged
            self._context.catalog.remove(file.file_id, lambda: self._context.drop(file))
