"""Repairs of `verify`'s findings: each damaged or missing object is replaced by a good copy.

A good copy is the root's file, another upload of the same object, or the object of a copied index. An object without a
good copy stays: its undamaged groups answer until somebody gives it up by name (`lost.py`).

A replacement is a `Job` of one task, which reads every byte of the new object back. Its record replaces the bad object,
unless this was merged or removed meanwhile. So a crash leaves the old or the new state, and it is safe to repeat a
repair while the writer, readers and jobs run. In a root, whose lock is taken, damaged copies are deleted, as the start
of a writer does with those that it can't open.
Threads: one.
"""

from __future__ import annotations

import contextlib
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec import structs

from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.format.foreign import Read
from tiered_index.format.names import COMPACTED, UPLOADED, data_name, data_prefix
from tiered_index.format.trailer import TAIL_SIZE
from tiered_index.format.verify import WindowedRead
from tiered_index.service.jobs.job import Rewrite, TaskResult, replace_input
from tiered_index.service.jobs.verify_report import Progress, Report
from tiered_index.service.jobs.whole import defects, is_bad, trailer_of
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.publication import FinishedObject, abandon, send_object, stored_file
from tiered_index.service.log.records import PendingFile, StoredObject
from tiered_index.service.read.compacted import CompactedFile, DamagedFile
from tiered_index.service.read.root_view import RootView, has_whole_unsealed
from tiered_index.service.root import Root, RootLock
from tiered_index.storage.base import Storage, Writer
from tiered_index.types import no_progress

Action = Literal["restore", "drop"]
_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Repair:
    """One repair of `object`: an object, a local file or a checkpoint.

    - ``restore`` sends a good copy as a new object.
    - ``drop`` deletes a checkpoint, or a local file that the storage has, or that the next start compacts again.

    `source` names the good bytes, and `replaced_by` the new object.
    """

    object: str
    action: Action
    source: str | None = None
    replaced_by: str | None = None


@dataclass(frozen=True)
class ReplaceTask:
    """Sends the `size` bytes of a copy, which `read` returns, as a new object in place of `old`, and reads all back."""

    old: StoredObject
    size: int
    read: Read
    number: int = 0

    def run(self, storage: Storage, now_ms: int, progress: Callable[[int], None] = no_progress) -> TaskResult:
        """Send the object. Raises `CorruptFile` if it does not verify. After an error it is deleted."""

        def fill(stream: Writer) -> None:
            for window in _windows(self.size, self.read):
                stream.write(window)

        old, name = self.old, data_name(self.old.file_id, secrets.token_hex(8))
        sent = send_object(storage, name, fill, now_ms)
        try:
            again, size = partial(storage.get_range, name), sent.size_bytes
            if (problem := _problem_of(old, name, size, again)) is not None:
                raise CorruptFile(name, f"sent to repair {old.name}, but it does not verify: {problem}")
            new = _described(old, name, again, size, now_ms)
            # the tails have the checksums of everything else
            read_sum, sent_sum = (zlib.crc32(read(size - TAIL_SIZE, TAIL_SIZE)) for read in (self.read, again))
        except BaseException:
            abandon([sent], storage)
            raise
        progress(new.count)
        return TaskResult(0, {old.name: new.count}, read_sum, (FinishedObject(new, sent, sent_sum),))


@dataclass(frozen=True)
class Repairs:
    """Repairs one index.

    `local` has the root's compacted files, and `standby` is the storage of a copy of the index. `progress` gets the
    number of finished repairs, and the name of the present object.
    """

    storage: Storage
    log: StorageLog
    root: Root | None = None
    local: Mapping[str, CompactedFile] | None = None
    standby: Storage | None = None
    progress: Progress = no_progress

    def run(self, report: Report, *, yes: bool) -> list[Repair]:
        """Repair the findings of a deep `report` and return the repairs. Without `yes` only plan them.

        Repairs before an error are permanent. Raises `LockHeld` if a writer has the root, `StorageUnavailable`, and
        `CorruptFile` if a new object does not verify.
        """
        state = self.log.refresh()
        reported = {defect.file for defect in report.findings if defect.part != "copy"}
        reported |= {missing.object for missing in report.missing}
        bad = [stored for name, stored in state.inputs.items() if name in reported and is_bad(self.storage, stored)]
        done: list[Repair] = []
        for stored in bad:
            self.progress(len(done), stored.name)
            if (restored := self._restored(stored, yes=yes)) is not None:
                done.append(restored)
        for defect in report.findings:
            if defect.part == "checkpoint":
                if yes:
                    self.storage.delete_many([defect.file])
                done.append(Repair(defect.file, "drop"))
        return done + self._repair_root(reported, {stored.name for stored in bad}, yes=yes)

    def _restored(self, stored: StoredObject, *, yes: bool) -> Repair | None:
        for source, size, read in self._copies(stored):
            if _problem_of(stored, source, size, read) is None:
                return Repair(stored.name, "restore", source, self._replaced(stored, size, read) if yes else None)
        return None

    def _replaced(self, stored: StoredObject, size: int, read: Read) -> str | None:
        """Replace an object by a copy. Return the new name; None: it was merged or removed meanwhile."""
        rewrite = Rewrite("repair", "a repair", (stored,), (ReplaceTask(stored, size, read),))
        return next((made.stored.name for result in replace_input(rewrite, self.log) for made in result.objects), None)

    def _copies(self, stored: StoredObject) -> Iterator[tuple[str, int, Callable[[int, int], bytes]]]:
        """Yield possible copies: the name, the size, and a function that reads the copy."""
        if stored.shard is None and (file := (self.local or {}).get(stored.file_id)) is not None and file.local:
            data = file.local.data
            yield file.local.file, len(data), lambda position, length: data[position : position + length]
        for info in list(own_objects(self.storage, data_prefix(stored.file_id))):
            if info.name != stored.name:
                yield info.name, info.size_bytes, partial(self.storage.get_range, info.name)
        if self.standby is not None:
            for info in list(own_objects(self.standby, data_prefix(stored.file_id))):
                yield f"{self.standby.uri}: {info.name}", info.size_bytes, partial(self.standby.get_range, info.name)

    def _repair_root(self, reported: set[str], bad: set[str], *, yes: bool) -> list[Repair]:
        """Delete damaged copies of whole objects, and damaged compacted files that have a whole unsealed form."""
        if self.root is None:
            return []
        # without a request: if one failed now, the finished repairs would not be reported
        state = self.log.state
        done: list[Repair] = []
        handles = RootView(self.root).look().handles
        with contextlib.ExitStack() as held:
            for handle in handles:
                path = self.root.index_path(handle.place, handle.file_id)
                names = {str(path), f"{self.root.folder(handle.place)}/{handle.file_id}"}
                if not isinstance(handle, DamagedFile | CompactedFile) or not names & reported:
                    continue
                stored = state.files.get(handle.file_id)
                if stored is not None and handle.place in (COMPACTED, UPLOADED) and stored.name not in bad:
                    source = stored.name
                elif handle.place == COMPACTED and has_whole_unsealed(self.root, handle.file_id):
                    source = str(self.root.journal_path(handle.file_id))
                else:
                    continue
                if yes and not done:
                    held.callback(RootLock(self.root).release)
                if yes:
                    self.root.disk.unlink(path)
                done.append(Repair(str(path), "drop", source))
        return done


def _problem_of(stored: StoredObject, name: str, size: int, read: Read) -> str | None:
    """Return why a copy can't replace `stored`; None: it is whole and matches the record."""
    try:
        read = WindowedRead(read, size)
        problems = defects(structs.replace(stored, name=name), read, size, "sequence")
    except (CorruptFile, InvalidArgument, ObjectNotFound) as error:
        return str(error)
    return problems[0].problem if problems else None


def _described(old: StoredObject, name: str, read: Read, size: int, now_ms: int) -> StoredObject:
    """Return the log's description of an object that replaces `old`."""
    if isinstance(old, PendingFile):
        return structs.replace(old, name=name, published_ms=now_ms)
    return stored_file(name, trailer_of(read, name, size), size, now_ms, old.origin)


def _windows(size: int, read: Read) -> Iterator[bytes]:
    for start in range(0, size, _WINDOW_BYTES):
        yield read(start, min(_WINDOW_BYTES, size - start))
