"""Repairs of `verify`'s findings: each damaged or missing object is restored from a good copy, or given up by name.

A good copy is the root's file, another upload of the same object, or the object of a copied index. If there is none,
the parts of the object that still verify are salvaged. The rest is lost, and the log says so permanently.

Every byte of a new object is read back. Then one log record replaces the bad object by the new one, unless it was
merged or removed meanwhile. So a crash leaves the old or the new state, and it is safe to repeat a repair while the
writer, readers and jobs run. In a root, whose lock is taken, damaged copies are fetched again. One thread.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound, UnsupportedVersion
from tiered_index.format.names import COMPACTED, UPLOADED, data_name, data_prefix
from tiered_index.format.verify import WindowedRead, verify_compacted, verify_shard
from tiered_index.service.checks.checks import check_object
from tiered_index.service.checks.report import Missing, Progress, Report
from tiered_index.service.checks.salvage import salvage, trailer_of
from tiered_index.service.files.compacted import CompactedFile, DamagedFile, open_local, verify_runs, verify_tables
from tiered_index.service.lifecycle.orphans import record_lost
from tiered_index.service.lifecycle.publication import Publication, Upload, stored_file, unlike
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.records import LogRecord, LostObject, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.reading.root_view import RootView
from tiered_index.service.root import Root, RootLock
from tiered_index.storage.base import Storage
from tiered_index.types import no_progress

Action = Literal["restore", "salvage", "fetch", "recompact", "drop", "give up"]
_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Repair:
    """One repair of `object`: an object, a local file or a checkpoint.

    - ``restore`` sends a good copy, ``salvage`` the parts of the object that verify. ``give up`` removes the object.
    - ``fetch`` replaces a local file by its object. ``recompact`` deletes it: the next start compacts the file again.
    - ``drop`` deletes a checkpoint.

    `source` names the good bytes, and `replaced_by` the new object. `missing` describes the entries that answers lack
    permanently.
    """

    object: str
    action: Action
    source: str | None = None
    replaced_by: str | None = None
    missing: Missing | None = None


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
        found = {one.file for one in report.findings if one.part != "copy"} | {one.object for one in report.missing}
        bad = [stored for name, stored in state.objects.items() if name in found and self._is_bad(stored)]
        done: list[Repair] = []
        for stored in bad:
            self.progress(len(done), stored.name)
            if (repaired := self._restored(stored, yes=yes)) is not None:
                done.append(repaired)
            elif (rest := salvage(self.storage, stored)) is not None:
                name = self._put_in_place(stored, rest.pieces(), rest.kept, rest.lost) if yes else None
                done.append(Repair(stored.name, "salvage", stored.name, name, rest.missing))
            else:
                done.append(self._give_up(stored, report, yes=yes))
        for one in report.findings:
            if one.part == "checkpoint":
                if yes:
                    self.storage.delete(one.file)
                done.append(Repair(one.file, "drop"))
        return done + self._repair_root(found, {stored.name for stored in bad}, yes=yes)

    def _is_bad(self, stored: StoredObject) -> bool:
        """Read an object again and return whether it is damaged. An object of a newer version is not."""
        again = Report()
        check_object(self.storage, stored, None, again, deep=True)
        if not again.findings:
            return False
        try:
            trailer_of(partial(self.storage.get_range, stored.name), stored.name, stored.size_bytes)
        except UnsupportedVersion:
            return False
        except (CorruptFile, InvalidArgument, ObjectNotFound):
            pass
        return True

    # good copies

    def _restored(self, stored: StoredObject, *, yes: bool) -> Repair | None:
        for source, size, read in self._copies(stored):
            if _is_copy(stored, source, size, read):
                name = None
                if yes:
                    name = self._put_in_place(stored, _windows(size, read))
                return Repair(stored.name, "restore", source, name)
        return None

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

    def _put_in_place(
        self,
        old: StoredObject,
        pieces: Iterable[bytes | memoryview],
        wanted: StoredObject | None = None,
        lost: LostObject | None = None,
    ) -> str | None:
        """Send an object, verify it, and append the record that replaces `old` by it. Return its name.

        Return None if `old` was merged or removed meanwhile. The object must be like `wanted`, by default like `old`.
        `lost` describes the entries that it lacks. After an error the object is deleted again.
        """

        def fill(upload: Upload) -> None:
            for piece in pieces:
                upload.write(piece)

        sent_as = data_name(old.file_id, secrets.token_hex(8))
        publication = Publication.send(self.log, sent_as, fill)
        name, size, began_ms = publication.sent.name, publication.sent.size_bytes, publication.sent.began_ms
        with publication.undone():
            trailer = trailer_of(partial(self.storage.get_range, name), name, size)
            new = stored_file(name, trailer, size, began_ms, old.origin)
            again = Report()
            check_object(self.storage, new, None, again, deep=True)
            problem = again.findings[0].problem if again.findings else unlike(wanted or old, new, "sequence")
            if problem is not None:
                raise CorruptFile(name, f"sent to repair {old.name}, but it does not verify: {problem}")

        def make(state: LogState) -> LogRecord | None:
            if name in state.objects or old.name not in state.objects:
                return None
            gone = () if lost is None else (lost,)
            return LogRecord(0, "repair", 0, "", 0, add=(new,), remove=(old.name,), lost=gone)

        return name if name in publication.record("a repair", make).objects else None

    # objects without a good copy

    def _give_up(self, stored: StoredObject, report: Report, *, yes: bool) -> Repair:
        told = [one for one in report.missing if one.object == stored.name]
        missing = told[0] if told else Missing.of(stored)
        if yes:
            record_lost(self.log, [stored])
        return Repair(stored.name, "give up", missing=missing)

    # the root

    def _repair_root(self, found: set[str], bad: set[str], *, yes: bool) -> list[Repair]:
        """Fetch damaged copies of whole objects, and delete damaged compacted files that have an unsealed form."""
        if self.root is None:
            return []
        # without a request: if one failed now, the finished repairs would not be reported
        state = self.log.state
        done: list[Repair] = []
        handles = RootView(self.root).look()
        with contextlib.ExitStack() as held:
            for handle in handles:
                path = self.root.index_path(handle.place, handle.file_id)
                names = {str(path), f"{self.root.folder(handle.place)}/{handle.file_id}"}
                if not isinstance(handle, DamagedFile | CompactedFile) or not names & found:
                    continue
                stored = state.files.get(handle.file_id)
                unsealed = self.root.journal_path(handle.file_id).exists() and handle.place == COMPACTED
                if stored is not None and handle.place in (COMPACTED, UPLOADED) and stored.name not in bad:
                    repair = Repair(str(path), "fetch", stored.name)
                elif unsealed:
                    repair = Repair(str(path), "recompact", str(self.root.journal_path(handle.file_id)))
                else:
                    continue
                if yes and not done:
                    held.callback(RootLock(self.root).release)
                if yes and repair.action == "recompact":
                    self.root.disk.unlink(path)  # the next start compacts it again
                elif yes and stored is not None:
                    read = partial(self.storage.get_range, stored.name)
                    self.root.write_file(path, _windows(stored.size_bytes, read), f"fetching {path}")
                    file = open_local(path)
                    verify_tables(file)
                    verify_runs(file)
                    file.let_go()
                done.append(repair)
        return done


def _is_copy(stored: StoredObject, name: str, size: int, read: Callable[[int, int], bytes]) -> bool:
    """Return whether a copy is whole and matches the record of `stored`."""
    check = verify_compacted if stored.shard is None else verify_shard
    try:
        if check(WindowedRead(read, size, lambda start, window: None), size, name):
            return False
        trailer = trailer_of(read, name, size)
    except (CorruptFile, InvalidArgument, ObjectNotFound):
        return False
    return unlike(stored, stored_file(name, trailer, size, 0, stored.origin), "sequence") is None


def _windows(size: int, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
    for start in range(0, size, _WINDOW_BYTES):
        yield read(start, min(_WINDOW_BYTES, size - start))
