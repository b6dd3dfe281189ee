"""Repairs of `verify`'s findings: each damaged or missing object is replaced by a good copy.

A good copy of a file is the root's file, another upload of the same object, or the object of a copied index; of a
catalog, that of a copied index. A copy of an archived segment is also a file of its source, and is used only if its
bytes have the segment's CRC32 in the log. If messages of the segment were erased, its source and earlier uploads still
have them: a `SourceOfSegments` says how they are overwritten, and the result, too, must have that CRC32. An object
without a good copy stays: its undamaged groups answer until somebody gives it up by name (`lost.py`).

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from msgspec import structs

from tiered_index.errors import CorruptFile, InvalidArgument, ObjectArchived, ObjectNotFound
from tiered_index.format.foreign import Read
from tiered_index.format.names import COMPACTED, UPLOADED, data_name, data_prefix, store_prefix
from tiered_index.format.trailer import TAIL_SIZE
from tiered_index.format.verify import WindowedRead
from tiered_index.service.jobs.rewriting.job import Rewrite, TaskResult, replace_input
from tiered_index.service.jobs.rewriting.whole import defects, is_bad, trailer_of
from tiered_index.service.jobs.segments.catalogs import CatalogRewrite, CatalogTask
from tiered_index.service.jobs.segments.erase_segments import Patch, RestoreTask, SegmentRewrite, patched
from tiered_index.service.jobs.segments.ranges import store_ranges
from tiered_index.service.jobs.verify_report import Progress, Report
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.publication import FinishedObject, abandon, send_object, stored_file
from tiered_index.service.log.records import ArchivedSegment, StoredCatalog, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.compacted import CompactedFile, DamagedFile
from tiered_index.service.read.files.root_view import RootView, has_whole_unsealed
from tiered_index.service.read.segments.segments import Segments
from tiered_index.service.root import Root, RootLock
from tiered_index.storage.base import Storage, Writer
from tiered_index.types import no_progress

Action = Literal["restore", "drop"]
_WINDOW_BYTES = 8 << 20
_STEP_BYTES = 16 << 20


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
class Copy:
    """Possible bytes of a file or a segment, called `name` in reports. `read` returns bytes by position and length."""

    name: str
    size_bytes: int
    read: Read

    @classmethod
    def of_segment(cls, storage: Storage, name: str, called: str, segment: ArchivedSegment) -> Copy:
        """Return the copy of a segment in an object of a storage."""

        def read(position: int, length: int) -> bytes:
            return b"".join(storage.get_range(name, *extent) for extent in segment.ranges(position, length))

        return cls(called, segment.size_bytes, read)

    def pieces(self, length: int) -> Iterator[bytes]:
        """Yield the bytes, `length` at a time."""
        for position in range(0, self.size_bytes, length):
            yield self.read(position, min(length, self.size_bytes - position))

    def crc32(self, patches: Iterable[Patch] = ()) -> int | None:
        """Return the CRC32 of the bytes with `patches` applied; None if bytes are missing."""
        crc32 = read_bytes = 0
        with contextlib.suppress(ObjectNotFound, InvalidArgument, FileNotFoundError):
            for data in patched(self.pieces(_STEP_BYTES), patches):
                crc32, read_bytes = zlib.crc32(data, crc32), read_bytes + len(data)
        return crc32 if read_bytes == self.size_bytes else None

    def replacing(self, segment: ArchivedSegment, patches: Iterable[Patch] = ()) -> SegmentRewrite:
        """Return the rewrite that sends this copy, with `patches` applied, in the place of a segment."""

        def pieces(part_bytes: int) -> Iterator[bytes]:
            sent = 0
            for data in patched(self.pieces(part_bytes), patches):
                sent = zlib.crc32(data, sent)
                yield data
            CorruptFile.unless_equal(self.name, "changed while it was read", segment.crc32, sent)

        return SegmentRewrite("repair", "a repair of a segment", (segment,), (RestoreTask(segment, pieces),))


@dataclass(frozen=True)
class ReplaceTask:
    """Sends the bytes of a copy as a new object in place of `old`, and reads all back."""

    old: StoredObject
    copy: Copy
    number: int = 0

    def run(self, storage: Storage, now_ms: int, progress: Callable[[int], None] = no_progress) -> TaskResult:
        """Send the object. Raises `CorruptFile` if it does not verify. After an error it is deleted."""

        def fill(stream: Writer) -> None:
            for window in self.copy.pieces(_WINDOW_BYTES):
                stream.write(window)

        old, name = self.old, data_name(self.old.file_id, secrets.token_hex(8))
        sent = send_object(storage, name, fill, now_ms)
        try:
            again, size = partial(storage.get_range, name), sent.size_bytes
            if (problem := _problem_of(old, Copy(name, size, again))) is not None:
                raise CorruptFile(name, f"sent to repair {old.name}, but it does not verify: {problem}")
            new = _described(old, name, again, size, now_ms)
            # the tails have the checksums of everything else
            read_sum, sent_sum = (zlib.crc32(read(size - TAIL_SIZE, TAIL_SIZE)) for read in (self.copy.read, again))
        except BaseException:
            abandon([sent], storage)
            raise
        progress(new.count)
        return TaskResult(0, {old.name: new.count}, read_sum, (FinishedObject(new, sent, sent_sum),))


class SourceOfSegments(Protocol):
    """Where archived segments come from: it knows their bytes."""

    def lacks(self) -> str | None:
        """Return why it restores no segment of the index, for a user who has named it; None: it may."""

    def copies(self, segment: ArchivedSegment) -> Iterator[Copy]:
        """Yield the copies of a segment that the source itself has."""

    def erasures(self, segment: ArchivedSegment, copy: Copy) -> Iterator[Iterable[Patch]]:
        """Yield possible erasures in a copy of the source's bytes, as patches; the caller checks the CRC32."""


@dataclass(frozen=True)
class Repairs:
    """Repairs one index.

    `local` has the root's compacted files, `standby` is the storage of a copy of the index, and `source` knows the
    archived segments. `progress` gets the number of finished repairs, and the name of the present object.
    """

    storage: Storage
    log: StorageLog
    root: Root | None = None
    local: Mapping[str, CompactedFile] | None = None
    standby: Storage | None = None
    progress: Progress = no_progress
    source: SourceOfSegments | None = None

    def run(self, report: Report, *, yes: bool) -> list[Repair]:
        """Repair the findings of a deep `report` and return the repairs. Without `yes` only plan them.

        Adds a note to the report for a copy that is archived or can't be used. Repairs before an error are permanent.
        Raises `LockHeld` if a writer has the root, `StorageUnavailable`, and `CorruptFile` if a new object does not
        verify.
        """
        reported = {defect.file for defect in report.findings if defect.part != "copy"}
        reported |= {missing.object for missing in report.missing}
        bad, done = set[str](), list[Repair]()
        tables = [stored for name, stored in self.log.refresh().range_objects.items() if name in reported]
        for table in [table for table in tables if is_bad(self.storage, table)]:
            # the replay of the log has its ranges
            if yes:
                store_ranges(self.log, None, [table.name])
            written = (name for name, stored in self.log.state.range_objects.items() if stored.store == table.store)
            done.append(Repair(table.name, "restore", "the log", next(written, None) if yes else None))
        for named in self._named(reported):
            self.progress(len(done), named.name)
            if is_bad(self.storage, named):
                bad.add(named.name)
                for copy, rewrite in self._replacements(named, report):
                    fresh = replace_input(rewrite, self.log) if yes else []
                    name = next((sent.name for result in fresh for sent in result.sent), None)
                    done.append(Repair(named.name, "restore", copy, name))
                    break
        for defect in report.findings:
            if defect.part == "checkpoint":
                if yes:
                    self.storage.delete_many([defect.file])
                done.append(Repair(defect.file, "drop"))
        return done + self._repair_root(reported, bad, yes=yes)

    def _named(self, reported: set[str]) -> Iterator[StoredObject | ArchivedSegment | StoredCatalog]:
        """Yield the reported objects: catalogs before the segments that they name."""
        yield from [stored for name, stored in self.log.refresh().catalogs.items() if name in reported]
        yield from Segments(self.log.refresh(), self.storage).named(reported)
        yield from [stored for name, stored in self.log.state.objects.items() if name in reported]

    def _replacements(
        self, named: StoredObject | ArchivedSegment | StoredCatalog, report: Report
    ) -> Iterator[tuple[str, Rewrite]]:
        """Yield rewrites that replace an object by a good copy, each with the name of the copy."""
        if isinstance(named, ArchivedSegment):
            yield from self._of_segment(named, report)
        elif isinstance(named, StoredCatalog):
            yield from self._of_catalog(named, report)
        else:
            for copy in self._copies(named):
                with _archived_is_noted(report, copy.name):
                    if _problem_of(named, copy) is None:
                        yield copy.name, Rewrite("repair", "a repair", (named,), (ReplaceTask(named, copy),))

    def _of_catalog(self, stored: StoredCatalog, report: Report) -> Iterator[tuple[str, Rewrite]]:
        """As `_replacements`: the catalogs of a copied index have the same names."""
        if self.standby is None:
            return
        copy = f"{self.standby.uri}: {stored.name}"
        with _archived_is_noted(report, copy):
            if not is_bad(self.standby, stored):
                rows = Segments(LogState(catalogs={stored.name: stored}), self.standby)
                task, generation = CatalogTask(0, self.log, None, rows.all), stored.generation or 0
                yield copy, CatalogRewrite("repair", "a repair of a catalog", (stored,), (task,), generation)

    def _of_segment(self, segment: ArchivedSegment, report: Report) -> Iterator[tuple[str, Rewrite]]:
        """As `_replacements`. It adds a note to the report if nothing shows what was erased from a copy."""
        original: Copy | None = None
        for copy in self._copies(segment):
            crc32: int | None = None
            with _archived_is_noted(report, copy.name):
                crc32 = copy.crc32()
            if crc32 == segment.crc32:
                yield copy.name, copy.replacing(segment)
            elif segment.columns is None and segment.source is not None and crc32 == segment.source[0]:
                original = original or copy
        if original is None:
            return
        for patches in self.source.erasures(segment, original) if self.source is not None else ():
            if original.crc32(patches) == segment.crc32:
                yield f"{original.name}, erased messages left out", original.replacing(segment, patches)
        report.note(
            f"{segment.name} is not restored from {original.name}: the log and the damaged object do not show exactly "
            f"which of its messages were erased. Pass --from with a copy of the index that has the segment"
        )

    def _copies(self, named: StoredObject | ArchivedSegment) -> Iterator[Copy]:
        """Yield possible copies: the root's, other uploads, the objects of a copied index, and those of the source."""
        if isinstance(named, ArchivedSegment):
            prefix = f"{store_prefix(named.store)}{named.start:020d}/"
        else:
            prefix = data_prefix(named.file_id)
            file = (self.local or {}).get(named.file_id) if named.shard is None else None
            if file is not None and file.local is not None:
                data = file.local.data
                yield Copy(file.local.file, len(data), lambda position, length: data[position : position + length])
        for storage in filter(None, (self.storage, self.standby)):
            for info in list(own_objects(storage, prefix)):
                called = info.name if storage is self.storage else f"{storage.uri}: {info.name}"
                if isinstance(named, ArchivedSegment) and called != named.name:
                    yield Copy.of_segment(storage, info.name, called, named)
                elif called != named.name:
                    yield Copy(called, info.size_bytes, partial(storage.get_range, info.name))
        if isinstance(named, ArchivedSegment) and self.source is not None:
            yield from self.source.copies(named)

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


@contextlib.contextmanager
def _archived_is_noted(report: Report, copy: str) -> Iterator[None]:
    """Return a context manager that notes a copy which is archived, in place of raising `ObjectArchived`."""
    try:
        yield
    except ObjectArchived as error:
        report.note(f"{copy} could replace a damaged object, but can't be read: {error}")


def _problem_of(stored: StoredObject, copy: Copy) -> str | None:
    """Return why a copy can't replace `stored`; None: it is whole and matches the record."""
    try:
        read = WindowedRead(copy.read, copy.size_bytes)
        problems = defects(structs.replace(stored, name=copy.name), read, copy.size_bytes, "sequence")
    except (CorruptFile, InvalidArgument, ObjectNotFound) as error:
        return str(error)
    return problems[0].problem if problems else None


def _described(old: StoredObject, name: str, read: Read, size: int, now_ms: int) -> StoredObject:
    """Return the log's description of an object that replaces `old`."""
    described = stored_file(name, trailer_of(read, name, size), size, now_ms, old.origin)
    return structs.replace(described, generation=old.generation)
