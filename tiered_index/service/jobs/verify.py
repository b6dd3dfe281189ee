"""Checks of a root, whose writer may be running, of a storage: its log, and every object that the log names, and of an
index with both.

Objects that no record names are only notes, because a running upload looks like the rest of a crash. A pool of threads
checks objects; everything else runs in one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from tiered_index.base.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    NotAnIndex,
    ObjectArchived,
    ObjectNotFound,
    RootBehind,
    StorageBehind,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.format.names import (
    CATALOG_PREFIX,
    CHECKPOINT_PREFIX,
    COMPACTED,
    DATA_PREFIX,
    INDEX_SUFFIX,
    JOURNAL_SUFFIX,
    LOG_PREFIX,
    RANGES_PREFIX,
    SEGMENTS_PREFIX,
    STATES,
    UNSEALED,
    UPLOADED,
    checkpoint_of,
    file_id_of,
    log_name,
    number_of,
)
from tiered_index.format.segments.segment import Segment
from tiered_index.format.verify import verify_compacted
from tiered_index.service.jobs.copying import COPY_OF
from tiered_index.service.jobs.orphans import unnamed
from tiered_index.service.jobs.rewriting.whole import LENGTHS, Named, defects_of, kind_of, object_bytes
from tiered_index.service.jobs.segments.ranges import droppable
from tiered_index.service.jobs.verify_report import Missing, Progress, Report
from tiered_index.service.log.identity import RootBeside
from tiered_index.service.log.log import Checkpoints, StorageLog, has_hole, own_objects
from tiered_index.service.log.publication import stored_file, unlike
from tiered_index.service.log.range_objects import whole_record
from tiered_index.service.log.records import (
    ArchivedSegment,
    LogRecord,
    LostObject,
    StoredCatalog,
    StoredObject,
    StoredRanges,
)
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.cold_path import ColdPath
from tiered_index.service.read.files.compacted import CompactedFile, DamagedFile
from tiered_index.service.read.files.root_view import RootView, UnsealedView
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import Segments
from tiered_index.service.root import Root, disk_errors
from tiered_index.service.root.files import LIST, FileList
from tiered_index.storage.base import ObjectInfo, Storage
from tiered_index.storage.disk import TEMPORARY_PREFIX, Disk


@dataclass
class _RecordCheck:
    """Checks the log's records in order.

    Tables are added and removed as a whole, except for lost and repaired shards. A merge adds as many entries as it
    removes, and a merge of catalogs as many segments. Other records remove no catalog, unless they give it up.
    """

    report: Report
    seen: set[str] = field(default_factory=set)

    def check(self, record: LogRecord, before: LogState) -> None:
        """Check the next record. `before` is the state before it."""
        add = partial(self.report.add, log_name(record.number))
        if record.kind != "copy" and (problem := _problem_of_catalogs(record, before)) is not None:
            add("catalogs", problem)
        if record.kind == "repair":
            lost_entries = sum(lost.count for lost in record.lost)
            replaced = [o for o in map(before.objects.get, record.remove) if o is not None]
            said, put = [[(o.file_id, o.count, o.shard) for o in objects] for objects in (replaced, record.add)]
            if said != [(file_id, count + lost_entries, shard) for file_id, count, shard in put]:
                add("repair", f"it replaces {said} by {put}, but says that {lost_entries:,} entries are lost")
            return
        inputs = map(before.objects.get, record.remove)
        removed, fresh = [stored for stored in inputs if stored is not None], [*record.add]
        if record.kind == "copy":
            # repairs of the source replaced these
            repaired = {(o.file_id, o.shard) for o in removed} & {(o.file_id, o.shard) for o in fresh}
            counts = [
                sum(stored.count for stored in objects if (stored.file_id, stored.shard) in repaired)
                for objects in (removed, fresh)
            ]
            # by the file alone: a lost part of a shard has only some of its slots
            files = {file_id for file_id, _ in repaired}
            lost_now = (lost for lost in record.lost if lost.name not in before.lost)
            counts.append(sum(lost.count for lost in lost_now if lost.file_id in files))
            if counts[0] != counts[1] + counts[2]:
                add("repair", "it replaces {:,} entries by {:,}, but says that {:,} are lost".format(*counts))
            others = [[o for o in objects if (o.file_id, o.shard) not in repaired] for objects in (removed, fresh)]
            removed, fresh = others
        added = {stored.shard.table for stored in fresh if stored.shard is not None}
        for table in sorted(added & self.seen):
            add("table", f"adds shards to table {table}, which an earlier record added")
        self.seen |= added
        gone = {stored.name for stored in removed}
        gone_alone = {lost.name for lost in record.lost}
        tables = {
            stored.shard.table for stored in removed if stored.shard is not None and stored.name not in gone_alone
        }
        for table in sorted(tables):
            left = [stored.name for stored in before.tables[table] if stored.name not in gone]
            if left:
                add("table", f"removes only a part of table {table}: {len(left)} of its shards remain, {left[0]} first")
        if record.dropped:
            # a record of this state may drop them: its writer has also asked the files of its root
            may = droppable(before)
            for store, ranges in record.dropped.items():
                if not set(ranges) <= set(may.get(store, ())):
                    add("drop", f"it drops replaced ranges of {store}, of which objects may still have entries")
        if record.kind in ("merge", "migrate"):
            lost, gained = sum(stored.count for stored in removed), sum(stored.count for stored in record.add)
            if lost != gained + record.left_out:
                left_out = f" and leave out {record.left_out:,} expired ones" if record.left_out else ""
                add("merge", f"its sources had {lost:,} entries, but the tables that it adds have {gained:,}{left_out}")
            if record.left_out and before.expired.hidden is None:
                add("merge", f"it leaves out {record.left_out:,} entries, but nothing had expired by then")


def _problem_of_catalogs(record: LogRecord, before: LogState) -> str | None:
    """Return the problem if a record of a state removes other segments of catalogs than it may; None: there is none."""
    catalogs = [before.catalogs[name] for name in record.remove if name in before.catalogs]
    added, removed = (sum(stored.rows.count for stored in listed) for listed in (record.catalogs, catalogs))
    if record.kind == "catalogs":
        most = sum(1 for stored in catalogs for _ in before.retired_in(stored))
        if removed != added + record.left_out:
            return f"it merges {removed:,} segments into {added:,}, and leaves out {record.left_out:,}"
        if record.left_out > most and not before.expired.segments:
            return f"it leaves out {record.left_out:,} segments, but {most:,} were retired and none had expired"
        return None
    if record.kind == "link":
        is_short = added < removed - record.left_out
        return (
            f"it replaces {removed:,} segments by {added:,}, and leaves out {record.left_out:,}" if is_short else None
        )
    if lacking := _left_out(record, before):
        return f"it removes {lacking} without a catalog that has it"
    catalogs = [stored for stored in catalogs if stored.data is None]
    if record.kind == "repair" and catalogs:
        is_same = [stored.rows.logs for stored in catalogs] == [stored.rows.logs for stored in record.catalogs]
        return None if is_same else "it replaces a catalog by one with other segments"
    given_up = {lost.range.catalog for lost in record.lost if lost.range is not None}
    retired, expired = before.retired, before.expired.segments
    for stored in catalogs:
        if stored.name not in given_up and (record.kind != "remove" or LostObject.of_catalog(stored, retired, expired)):
            return f"it removes {stored.name} without a catalog that has its segments"
    return None


def _left_out(record: LogRecord, before: LogState) -> str | None:
    """Return a segment that a record removes with a catalog that is no object, and neither adds nor retires."""
    gone = replace(before, catalogs={name: before.catalogs[name] for name in record.remove if name in before.catalogs})
    gone = replace(gone, catalogs={stored.name: stored for stored in gone.inline})
    added = Segments(LogState(catalogs={stored.name: stored for stored in record.catalogs if stored.data is not None}))
    known = {segment.name for segment in (*added.all(), *record.retire)}
    return next((segment.name for segment in Segments(gone).all() if segment.name not in known), None)


def _check_tables(state: LogState, report: Report) -> None:
    """Check that the shards of each table have one window and slot map, and that their slots don't overlap."""
    for table, shards in state.tables.items():
        report.count("tables")
        ordered = sorted(shards, key=lambda stored: (*_range(stored), -stored.second_max))
        first = ordered[0].part
        for stored in ordered:
            shard, add = stored.part, partial(report.add, stored.name, "table")
            if (shard.slots, shard.begin_s, shard.window_s) != (first.slots, first.begin_s, first.window_s):
                add(f"its window or slot map differs from that of {ordered[0].name} of table {table}")
            if not 0 <= shard.slot_low < shard.slot_high <= shard.slots.slots:
                add(f"slots {_range(stored)} are not among the {shard.slots.slots} of its map")
            if not shard.begin_s <= stored.second_min <= stored.second_max < shard.begin_s + shard.window_s:
                add(f"its seconds {stored.second_min}..{stored.second_max} are outside its window")
        reached = ordered[0]
        for stored in ordered[1:]:
            low, high = _range(reached)
            # parts of a giant slot have the same range, and different times
            parts = _range(stored) == (low, high) and stored.second_max < reached.second_min
            if stored.part.slot_low < high and not parts:
                report.add(stored.name, "table", f"its slots overlap those of {reached.name} of table {table}")
            reached = max(
                reached, stored, key=lambda shard_object: (shard_object.part.slot_high, -shard_object.second_max)
            )


def _range(stored: StoredObject) -> tuple[int, int]:
    shard = stored.part
    return shard.slot_low, shard.slot_high


_NOT_THERE = "the log names it, the storage does not have it"


def segments_in_order(storage: Storage, state: LogState, report: Report) -> Iterator[ArchivedSegment]:
    """Yield the archived segments but those of damaged catalogs. Add a finding for each that overlaps another."""
    before: Segment | None = None
    catalogs, last = dict(state.catalogs), ("", -1)
    while True:
        resumed = last
        try:
            for segment in Segments(replace(state, catalogs=dict(catalogs)), storage).all():
                if segment.place <= resumed:
                    continue  # yielded before a catalog showed its damage
                last = segment.place
                if before is not None and before.store == segment.store and segment.start < before.end:
                    report.add(segment.name, "segment", f"its offsets overlap those of {before.name}")
                if before is None or before.store != segment.store or before.end < segment.end:
                    before = segment
                if isinstance(segment, ArchivedSegment):
                    yield segment
            return
        except CorruptFile as error:
            # which its check has reported, or a merge has removed it meanwhile
            report.note(f"{error.file}: segments that only it lists were not checked")
            if catalogs.pop(error.file, None) is None:
                return


# most shards that are read for a table's topics
_ASKED = 8

_DELETED = (
    "objects were deleted without a log record. If a life-cycle rule of the bucket deletes them, remove the rule, and "
    "delete old entries with `tiered-index expire`"
)
"""The note about missing objects."""

CheckObjects = Callable[[LogState], None]
"""Checks the objects and archived segments of a state of the log, and adds findings to the report."""


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
    """Check a storage against itself and `local`. Return the state of its log; None: the log is damaged.

    Raises `NotAnIndex` and `StorageError`.
    """
    state = _check_log(storage, report)
    if state is None:
        return None
    _check_tables(state, report)

    def check(named: Named) -> None:
        try:
            local_file = local.get(named.file_id) if isinstance(named, StoredObject) else None
            check_object(storage, named, local_file, report, deep=deep)
        except StorageError as error:
            # this one alone can't be read, if the storage still answers
            next(own_objects(storage, LOG_PREFIX), None)
            report.unchecked.append((named.name, error))

    for catalog in state.catalogs.values():
        if catalog.data is None:
            check(catalog)
    for table in state.range_objects.values():
        check(table)
    if check_objects is not None:
        check_objects(state)
    else:
        with ThreadPoolExecutor(1 if deep else threads, "tiered-index-verify") as pool:
            for number, _ in enumerate(pool.map(check, state.objects.values()), 1):
                progress(number, "objects")
        for number, segment in enumerate(segments_in_order(storage, state, report), 1):
            check(segment)
            progress(number, "archived segments")
    _take_back_removed(storage, state, report)
    _name_topics(storage, state, report)
    if report.missing:
        report.note(_DELETED)
    report.lost += [Missing.of(lost) for lost in state.lost.values() if lost.lacks_entries]
    try:
        for prefix in (DATA_PREFIX, SEGMENTS_PREFIX, CATALOG_PREFIX, RANGES_PREFIX):
            _note_strays(storage, state, report, prefix)
    except CorruptFile as error:
        report.add_error(error.file, "log", error)
    known = {o.file_id for o in state.objects.values()}
    for file in local.values():
        if file.folder == "uploaded" and file.file_id not in known:
            report.note(f"{file.file_id}: a local copy in uploaded/ that the log doesn't name")
    return state


def _take_back_removed(storage: Storage, state: LogState, report: Report) -> None:
    """Take back findings about missing objects that records have removed meanwhile: a sweep may delete them."""
    missing = {defect.file for defect in report.findings if defect.problem == _NOT_THERE}
    after = _log_at(storage, state).refresh(by_number=True) if missing else state
    segments = Segments(after, storage)
    removed = {name for name in missing if not (after.names(name) or segments.names_object(name))}
    report.findings[:] = [defect for defect in report.findings if defect.file not in removed]
    report.missing[:] = [lacking for lacking in report.missing if lacking.object not in removed]
    for name in sorted(removed):
        gone = StorageUnavailable(f"{name} was removed from the log during the check: run it again")
        report.unchecked.append((name, gone))


def _name_topics(storage: Storage, state: LogState, report: Report) -> None:
    """Add topics to the missing objects of window tables: those of other shards of the table."""
    gone = {lacking.object for lacking in report.missing}
    # once for each table, which may lack thousands of shards
    topics: dict[str, set[str]] = {}
    for table in {lacking.file for lacking in report.missing}:
        beside = [stored for stored in state.tables.get(table, ()) if stored.name not in gone]
        for stored in beside[:_ASKED]:
            with contextlib.suppress(CorruptFile, StorageError):
                names = ColdPath(storage).trailer(stored).metadata.topics
                topics.setdefault(table, set()).update(name for _, name in names)
    for place, lacking in enumerate(report.missing):
        if lacking.file in topics:
            report.missing[place] = replace(lacking, topics=tuple(sorted(topics[lacking.file])))


def check_object(storage: Storage, named: Named, local: CompactedFile | None, report: Report, *, deep: bool) -> None:
    """Check one object that the log names, and its local copy if there is one. Raises `StorageError`.

    Without `deep` only the sizes and the end of it are read; of a catalog or a table of ranges always all.
    """
    name, kind = named.name, kind_of(named)
    try:
        if deep or isinstance(named, StoredCatalog | StoredRanges):
            _check_bytes(storage, named, local, report)
        elif (size := storage.head(name).size_bytes) != object_bytes(named):
            report.add(name, kind, f"it has {size:,} bytes, the log says {object_bytes(named):,}")
        elif isinstance(named, ArchivedSegment):
            nothing = LogState()
            SegmentArchive(storage, lambda: nothing, lambda: nothing).table(named)
        else:
            _check_trailer(storage, named, report)
        report.count(f"{kind}s")
    except ObjectNotFound:
        report.add(name, kind, _NOT_THERE)
        if isinstance(named, StoredObject):
            report.missing.append(Missing.of(named, local))
    except ObjectArchived as error:
        report.unchecked.append((name, error))
    except CorruptFile as error:
        report.count(f"{kind}s")
        report.add_error(name, kind, error)
    if local is not None and isinstance(named, StoredObject):
        _check_local(named, local, report)


def _check_log(storage: Storage, report: Report) -> LogState | None:
    """Replay the whole log, and compare each checkpoint with it. Return the last state; None: the log is damaged."""
    own = partial(own_objects, storage, foreign=partial(_note_foreign, report=report))
    checkpoints: dict[int, list[str]] = {}
    for info in own(CHECKPOINT_PREFIX):
        checkpoints.setdefault(checkpoint_of(info.name)[0], []).append(info.name)
    records = _RecordCheck(report)
    given_up: dict[tuple[str, int], int] = {}
    listed = list(own(LOG_PREFIX))
    if listed and has_hole(listed, number_of(listed[0].name)):
        listed = list(own_objects(storage, LOG_PREFIX))
    state: LogState | None = LogState()
    if listed and number_of(listed[0].name) > 1:
        report.add(
            listed[0].name,
            "log",
            "the records before it are missing. If a life-cycle rule of the bucket deletes them, remove the rule; "
            "then use `tiered-index copy`, which copies the index as of its newest checkpoint",
        )
        state = _checkpoint_behind(storage, checkpoints, number_of(listed[0].name) - 1)
    try:
        for info in listed:
            if state is None:
                return None
            if number_of(info.name) <= state.number:
                continue
            expected = state.number + 1
            CorruptFile.unless_equal(
                info.name, f"record {expected} is missing before it", expected, number_of(info.name)
            )
            try:
                record, before = whole_record(storage, LogRecord.decode(storage.get(info.name), info.name)), state
            except ObjectArchived as error:
                report.unchecked.append((info.name, error))
                state = _checkpoint_behind(storage, checkpoints, number_of(info.name))
                continue
            state = state.apply(record, info.name)
            records.check(record, before)
            if record.kind == "remove":
                given_up |= dict.fromkeys([segment.place for segment in record.retire], record.number)
            report.count("log_records")
            for name in checkpoints.pop(state.number, ()):
                _check_checkpoint(storage, name, state, report)
    except CorruptFile as error:
        report.add_error(error.file, "log", error)
        return None
    if state is None:
        return None
    if not state.number:
        raise NotAnIndex(f"{storage.uri} holds no tiered index (no {LOG_PREFIX} records)")
    state = _log_at(storage, state).refresh(by_number=True)
    _note_given_up(storage, state, given_up, report)
    _note_catalogs(state, report)
    for number, names in checkpoints.items():
        for name in names if number > state.number else ():
            report.add(name, "checkpoint", f"it is of record {number}, but the log ends at {state.number}")
    return state


def _note_catalogs(state: LogState, report: Report) -> None:
    """Note the catalogs that were given up, unless all their segments have expired since then."""
    lost: dict[str, list[int]] = {}
    for lost_object in state.lost.values():
        lacking = lost_object.range
        if lacking is None or lacking.catalog is None:
            continue
        if lacking.end > state.expired.segments.get(lacking.source, 0):
            lost.setdefault(lacking.catalog, []).append(lost_object.count)
    for name, counts in lost.items():
        report.note(f"{name} was given up: messages of up to {sum(counts):,} segments of {len(counts):,} logs are lost")


def _checkpoint_behind(storage: Storage, checkpoints: Mapping[int, list[str]], number: int) -> LogState | None:
    """Return the newest state in a checkpoint of record `number` or later; None: none can be read."""
    for at, names in sorted(checkpoints.items(), reverse=True):
        for name in names if at >= number else ():
            with contextlib.suppress(CorruptFile, ObjectNotFound, ObjectArchived):
                return Checkpoints(storage).state_of(name)
    return None


def _note_given_up(storage: Storage, state: LogState, given_up: dict[tuple[str, int], int], report: Report) -> None:
    """Note the archived segments that records gave up, by place, unless they expired or were archived again."""
    for (store, start), at in given_up.items():
        if start >= state.expired.segments.get(store, 0) and Segments(state, storage).at(store, start) is None:
            report.note(f"record {at} gave up the archived segment of {store} at offset {start:,}: messages are lost")


def _log_at(storage: Storage, state: LogState) -> StorageLog:
    log = StorageLog(storage, SystemClock())
    log.advance(state)
    return log


def _check_checkpoint(storage: Storage, name: str, state: LogState, report: Report) -> None:
    digest = checkpoint_of(name)[1]
    try:
        if Checkpoints(storage).state_of(name) != state or not state.digest.startswith(digest):
            report.add(
                name,
                "checkpoint",
                f"it contradicts log records 1 to {state.number}: it is damaged, or from another history of the index",
            )
    except ObjectNotFound:
        return  # the writer keeps only the newest ones
    except CorruptFile as error:
        report.add_error(name, "checkpoint", error)
    report.count("checkpoints")


def _check_trailer(storage: Storage, stored: StoredObject, report: Report) -> None:
    trailer = ColdPath(storage).trailer(stored)
    described = stored_file(stored.name, trailer, stored.size_bytes, stored.published_ms, stored.origin)
    if (problem := unlike(stored, described, *LENGTHS)) is not None:
        report.add(stored.name, "object", f"its trailer says {problem}")


def _check_bytes(storage: Storage, named: Named, local: CompactedFile | None, report: Report) -> None:
    """Check every byte, also against the local copy."""
    copy = local.local if local is not None else None
    mirror = copy.data if copy is not None and copy.size_bytes == object_bytes(named) else None
    different: list[int] = []
    read_bytes = 0

    def compare(start: int, window: bytes) -> None:
        nonlocal read_bytes
        read_bytes += len(window)
        if mirror is not None and (copied := mirror[start : start + len(window)]) != window:
            unequal = np.frombuffer(copied, np.uint8) != np.frombuffer(window, np.uint8)
            different.append(start + int(np.argmax(unequal)))

    report.add_all(named.name, defects_of(storage, named, compare, *LENGTHS))
    size = min(read_bytes, object_bytes(named))
    report.count("object_bytes", size)
    if mirror is not None:
        report.count("compared_bytes", size)
    if different:
        report.add(named.name, "copy", "the object and its local copy differ", min(different))


def _check_local(stored: StoredObject, local: CompactedFile, report: Report) -> None:
    assert local.local is not None
    described = stored_file(stored.name, local.local.trailer(), local.local.size_bytes, stored.published_ms)
    if (problem := unlike(stored, described, "sequence", "size_bytes")) is not None:
        report.add(local.local.file, "copy", f"the local copy says {problem}")


def _note_strays(storage: Storage, state: LogState, report: Report, prefix: str) -> None:
    """Note the objects below `prefix` that the log does not name. A damaged catalog may name any segment.

    Raises `CorruptFile` if the log was damaged, or went back in time, since `state`.
    """
    log = _log_at(storage, state)
    listing = own_objects(storage, prefix, foreign=partial(_note_foreign, report=report))
    try:
        strays = unnamed(log, [listing], state)
    except CorruptFile as error:
        if error.file not in {*state.catalogs, *log.state.catalogs}:
            raise
        return  # the check of the catalog has reported it
    for info in strays:
        report.note(
            f"{info.name}: {info.size_bytes:,} bytes that the log does not name: of a job that runs, the "
            f"rest of a crash, or an object that expired or was merged"
        )


def _note_foreign(info: ObjectInfo, report: Report) -> None:
    report.note(f"{info.name}: {info.size_bytes:,} bytes that do not belong to an index: ignored")


def check_root(root: Root, report: Report, progress: Progress) -> dict[str, CompactedFile]:
    """Check every file of `root`. Return its compacted files by id, for comparison with the storage."""
    _check_names(root, report)
    files = FileList(root)
    try:
        files.check()
    except CorruptFile as error:
        report.add(str(files.path), LIST, error.problem)
    local: dict[str, CompactedFile] = {}
    reported = {Path(defect.file).stem for defect in report.findings}
    for number, handle in enumerate(RootView(root).look().handles, 1):
        # `_check_names` reports a listed file without its journal, and a damaged list is reported above
        if not (isinstance(handle, DamagedFile) and handle.file_id in {*reported, LIST}):
            _check_file(root, handle, report)
        if isinstance(handle, CompactedFile):
            local[handle.file_id] = handle
        progress(number, handle.file_id)
    return local


def _check_names(root: Root, report: Report) -> None:
    for state in STATES:
        with disk_errors(f"listing {root.folder(state)}"):
            names = root.disk.names(root.folder(state))
        for name in names:
            path = root.folder(state) / name
            if name.startswith(TEMPORARY_PREFIX):
                report.note(f"{path}: unfinished work, or reserved by a running writer; the next start deletes it")
            elif file_id_of(name) is None or (name.endswith(JOURNAL_SUFFIX) and state != UNSEALED):
                report.note(f"{path}: not a file of this index")
            elif (
                state == UNSEALED
                and name.endswith(INDEX_SUFFIX)
                and not path.with_suffix(JOURNAL_SUFFIX).exists()
                # a writer deletes the journal and then this file, once the root has the next form
                and not any(root.index_path(later, path.stem).exists() for later in (COMPACTED, UPLOADED))
                and path.exists()
            ):
                report.add(str(path), "journal", "its journal is missing")


def _check_file(root: Root, handle: Handle, report: Report) -> None:
    report.count("files")
    if isinstance(handle, DamagedFile):
        report.add_error(f"{root.folder(handle.place)}/{handle.file_id}", "file", handle.error)
    elif isinstance(handle, UnsealedView):
        try:
            report.count("bytes", handle.entries().nbytes)
            handle.check_length()
        except TieredIndexError as error:
            report.add_error(str(handle.path), "entries", error)
    elif isinstance(handle, CompactedFile) and handle.local is not None:
        data, size = handle.local.data, handle.local.size_bytes
        report.count("bytes", size)
        findings = verify_compacted(
            lambda position, length: data[position : position + length], size, handle.local.file
        )
        report.add_all(handle.local.file, findings)


def check_index(
    config: IndexConfig,
    report: Report,
    of_files: Progress,
    of_objects: Progress,
    *,
    deep: bool,
    storage: Storage | None = None,
) -> tuple[dict[str, CompactedFile], bool]:
    """Check the root and the storage that `config` names, and add findings to `report`. It changes nothing.

    With `storage` that one is read, which the caller has opened and closes, in place of the one that `config` names.
    Return the root's compacted files by id, and whether repairs may append to the log: it can be read, and it is the
    log that the root has seen, or that of a copy. If `deep`, every byte of every object is read. Parts that the storage
    could not return are in `report.unchecked`. Raises `NotAnIndex`, and `ConfigError` if `config` names neither.
    """
    local: dict[str, CompactedFile] = {}
    state, beside, marker, is_behind = None, None, None, False
    uri = config.storage if storage is None else storage.uri
    root = Root(config.root, Disk()) if config.root is not None else None
    if root is not None:
        marker = root.read_marker()
        if marker is None:
            raise NotAnIndex(f"{config.root} holds no tiered index")
        uri = uri or marker.storage
        # read before the log, because a running writer notes each record that it appends
        beside = RootBeside(root)
        local = check_root(root, report, of_files)
    if uri is None:
        raise ConfigError("nothing to verify: give a root, a storage, or both")
    with contextlib.ExitStack() as opened:
        checked = storage or opened.enter_context(contextlib.closing(config.open_storage(uri)))
        try:
            state = check_storage(checked, local, report, of_objects, deep=deep, threads=config.query_threads)
            if state is not None and root is not None and beside is not None and marker is not None:
                _excuse_missing(root, state, report)
                if state.genesis is not None and state.genesis.index_id == marker.index_id:
                    is_behind = _is_behind(checked, state, beside, report)
                # a copy of the index has a log of its own
                elif state.genesis is not None and COPY_OF + marker.index_id not in state.positions:
                    other, own = state.genesis.index_id, marker.index_id
                    report.add(uri, "log", f"it is of index {other}, and the root {root.path} of {own}")
                    is_behind = True
        except StorageError as error:
            report.unchecked.append((uri, error))
    return local, state is not None and not is_behind


def _is_behind(storage: Storage, state: LogState, beside: RootBeside, report: Report) -> bool:
    """Return whether storage or root went back in time. If so, add a finding."""
    log = _log_at(storage, state)
    try:
        beside.check(log.identity, log.state)
    except (StorageBehind, RootBehind) as error:
        report.add_error(error.file, "log", error)
        return True
    return False


def _excuse_missing(root: Root, state: LogState, report: Report) -> None:
    """Remove findings about files that the root lists but does not have, if the log names them or gave them up."""
    known = state.files.keys() | {lost.file_id for lost in state.lost.values()}
    try:
        excused = {f"{root.folder(UNSEALED)}/{file_id}" for file_id in FileList(root).gone().keys() & known}
    except CorruptFile:
        return  # no file is known to be missing
    report.findings = [defect for defect in report.findings if defect.file not in excused]
