"""Checks of a storage: every log record and checkpoint, then every object that the log names, against the log and against local copies.

Objects nobody names are notes: a running upload looks the same as what a crash left. A pool of threads asks about objects.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tiered_index.errors import CorruptFile, NotAnIndex, ObjectNotFound
from tiered_index.format.names import CHECKPOINT_PREFIX, DATA_PREFIX, LOG_PREFIX, log_name, number_of
from tiered_index.format.verify import WindowedRead, verify_compacted, verify_shard
from tiered_index.service.checks.report import Progress, Report
from tiered_index.service.checks.segments import check_segments, note_stray_segments
from tiered_index.service.checks.tables import RecordCheck, check_shard_record, check_tables
from tiered_index.service.cold.path import ColdPath
from tiered_index.service.compacted_file import CompactedFile
from tiered_index.service.log_records import LogRecord, LogState, StoredObject
from tiered_index.storage.base import Storage

__all__ = ["CheckObjects", "check_object", "check_storage"]

_TRAILER = ("file", "tail", "directory")
# parts of a file without which no trailer can be read
_LOCAL_FIELDS = ("count", "second_min", "second_max", "lane", "sequence")


CheckObjects = Callable[[LogState], None]
"""Checks the objects and archived segments of a state of the log, and adds to the report what it finds."""


def check_storage(
    storage: Storage,
    local: dict[str, CompactedFile],
    report: Report,
    progress: Progress,
    *,
    deep: bool,
    threads: int,
    check_objects: CheckObjects | None = None,
) -> LogState | None:
    """Check a storage against itself and against the compacted files of a root; return the log's state where it can be believed.

    `check_objects` checks the objects elsewhere. Raises `NotAnIndex`, `StorageError`.
    """
    state = _check_log(storage, report)
    if state is None:
        return None
    check_tables(state, report)
    if check_objects is not None:
        check_objects(state)
    else:
        stored = list(state.objects.values())
        with ThreadPoolExecutor(1 if deep else threads, "tiered-index-verify") as pool:
            checks = pool.map(lambda one: check_object(storage, one, local.get(one.file_id), report, deep=deep), stored)
            for number, _ in enumerate(checks, 1):
                progress(number, "objects")
        check_segments(storage, state.archive.values(), report, progress, deep=deep)
    _check_strays(storage, state, report)
    note_stray_segments(storage, lambda: _refreshed(storage, state), report)
    known = {o.file_id for o in state.objects.values()}
    for file in local.values():
        if file.folder == "uploaded" and file.file_id not in known:
            report.note(f"{file.file_id}: a local copy in uploaded/ that the log doesn't name; the next start drops it")
    return state


def check_object(storage: Storage, stored: StoredObject, local: CompactedFile | None, report: Report, *, deep: bool) -> None:
    """Check one object that the log names, and its local copy where there is one. Raises `StorageError`."""
    _ObjectCheck(storage, report, deep).check(stored, local)


def _check_log(storage: Storage, report: Report) -> LogState | None:
    """Fold the whole log from record 1, comparing each checkpoint on the way; return the last state, or None where it breaks."""
    checkpoints = {}
    for info in storage.list(CHECKPOINT_PREFIX):
        try:
            checkpoints[number_of(info.name)] = info.name
        except CorruptFile as error:
            report.add_error(info.name, "checkpoint", error)
    state, records = LogState(), RecordCheck(report)
    try:
        for info in storage.list(LOG_PREFIX):
            if number_of(info.name) != state.number + 1:
                raise CorruptFile(info.name, f"record {state.number + 1} is missing before it", expected=state.number + 1)
            record, before = _next_record(storage, state), state
            state = state.apply(record, info.name)
            records.check(record, before)
            report.count("log_records")
            if state.number in checkpoints:
                _check_checkpoint(storage, checkpoints.pop(state.number), state, report)
    except CorruptFile as error:
        report.add_error(error.file, "log", error)
        return None
    if not state.number:
        raise NotAnIndex(f"{storage.uri} holds no tiered index (no {LOG_PREFIX} records)")
    state = _refreshed(storage, state)
    for number, name in checkpoints.items():
        if number > state.number:
            report.add(name, "checkpoint", f"it says record {number}, the log ends at {state.number}")
    return state


def _next_record(storage: Storage, state: LogState) -> LogRecord:
    name = log_name(state.number + 1)
    return LogRecord.decode(storage.get(name), name)


def _refreshed(storage: Storage, state: LogState) -> LogState:
    while True:
        try:
            state = state.apply(_next_record(storage, state), log_name(state.number + 1))
        except ObjectNotFound:
            return state


def _check_checkpoint(storage: Storage, name: str, state: LogState, report: Report) -> None:
    try:
        if LogState.decode(storage.get(name), name) != state:
            report.add(name, "checkpoint", f"it contradicts log records 1 to {state.number}")
    except ObjectNotFound:
        return  # the writer keeps the newest ones only
    except CorruptFile as error:
        report.add_error(name, "checkpoint", error)
    report.count("checkpoints")


class _ObjectCheck:
    def __init__(self, storage: Storage, report: Report, deep: bool) -> None:
        self._storage = storage
        self._report = report
        self._deep = deep

    def check(self, stored: StoredObject, local: CompactedFile | None) -> None:
        name, report = stored.name, self._report
        try:
            size = self._storage.head(name).size_bytes
            report.count("objects")
            if size != stored.size_bytes:
                report.add(name, "object", f"it has {size:,} bytes, the log says {stored.size_bytes:,}")
                return
            if not self._deep or self._check_bytes(stored, local):
                self._check_trailer(stored)
        except ObjectNotFound:
            report.add(name, "object", "the log names it, the storage does not have it")
        except CorruptFile as error:
            report.add_error(name, "object", error)
        if local is not None:
            self._check_local(stored, local)

    def _check_trailer(self, stored: StoredObject) -> None:
        trailer = ColdPath(self._storage).trailer(stored)
        meta, tail = trailer.metadata, trailer.tail
        found = (
            meta.second_min, meta.second_max, meta.lane, tail.position, tail.filter_length, tail.directory_length, tail.metadata_length,
        )  # fmt: skip
        said = (
            stored.second_min, stored.second_max, stored.lane, stored.trailer_position, stored.filter_length, stored.directory_length,
            stored.metadata_length,
        )  # fmt: skip
        if found != said:
            self._report.add(stored.name, "object", f"its trailer says {found}, the log says {said}")
        if stored.shard is not None:
            check_shard_record(stored, meta, self._report)
        elif "slot_map" in meta.more:
            self._report.add(stored.name, "object", "it is a shard of a window table, the log says it is a file of its own")

    def _check_bytes(self, stored: StoredObject, local: CompactedFile | None) -> bool:
        """Check every byte; return whether the trailer is sound, so that it can be compared with the log."""
        size, name = stored.size_bytes, stored.name
        mirror = local.local.data if local is not None and local.local is not None and local.local.size_bytes == size else None
        different: list[int] = []

        def compare(start: int, window: bytes) -> None:
            if mirror is not None and mirror[start : start + len(window)] != window:
                different.append(start)

        read = WindowedRead(lambda position, length: self._storage.get_range(name, position, length), size, compare)
        found = (verify_shard if stored.shard is not None else verify_compacted)(read, size, name)
        self._report.add_all(name, found)
        read.finish()
        self._report.count("object_bytes", size)
        if mirror is not None:
            self._report.count("compared_bytes", size)
        if different:
            self._report.add(name, "copy", "the object and its local copy differ", min(different))
        return not any(finding.part in _TRAILER for finding in found)

    def _check_local(self, stored: StoredObject, local: CompactedFile) -> None:
        assert local.local is not None
        found = (*(getattr(local, field) for field in _LOCAL_FIELDS), local.local.size_bytes)
        said = (*(getattr(stored, field) for field in _LOCAL_FIELDS), stored.size_bytes)
        if found != said:
            self._report.add(local.local.file, "copy", f"the local copy says {found}, the log says {said}")


def _check_strays(storage: Storage, state: LogState, report: Report) -> None:
    strays = [info for info in storage.list(DATA_PREFIX) if info.name not in state.objects]
    named = _refreshed(storage, state).objects
    for info in strays:
        if info.name not in named:
            report.note(f"{info.name}: {info.size_bytes:,} bytes that the log doesn't name: an upload under way, or what a crash left")
    for handle in storage.list_uploads(DATA_PREFIX):
        report.note(f"{handle.name}: an unfinished upload, under way or left by a crash")
