"""`tiered-index recover`: recovers a root after a crash, and gives up objects that the storage lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiered_index.base.clock import SystemClock
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.cli.output import counted
from tiered_index.cli.session import Session, open_stored_index
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    RootBehind,
    StorageBehind,
    StorageUnavailable,
    UnsupportedVersion,
)
from tiered_index.format.names import COMPACTED, UPLOADED, data_prefix
from tiered_index.service.anew import BegunAnew, begin_anew
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.lost import give_up, named
from tiered_index.service.jobs.verify_report import Missing
from tiered_index.service.log.records import ArchivedSegment, LostObject, LostRange, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.compacted import DamagedFile, open_local, verify_runs, verify_tables
from tiered_index.service.read.inventory import describe_handle
from tiered_index.service.reader import IndexReader
from tiered_index.service.root import Root, RootLock
from tiered_index.service.root.files import FileList
from tiered_index.service.write.appenders import MAIN
from tiered_index.storage.disk import Disk
from tiered_index.types import inclusive


def recover(session: Session, *, lost: list[str] | None, dry_run: bool, takes_over: bool) -> int:
    """Recover a root after a crash, a restore or a loss."""
    config = session.config(background=False)
    if lost:
        if takes_over:
            raise InvalidArgument("leave --take-over out: --lost needs no lease")
        return _give_up(session, config, lost, dry_run=dry_run)
    if dry_run:
        raise InvalidArgument("--dry-run needs --lost NAME: without --lost, recover gives up nothing")
    if config.root is None:
        raise ConfigError("no root is given: pass --root DIR")
    if Root(config.root, Disk()).read_marker() is None:
        if config.storage is None:
            raise NotAnIndex(f"{config.root} holds no tiered index: pass --storage URI to begin the root again")
        # raises `NotAnIndex` if the storage has none: recovery creates no index
        IndexReader.open(config=config.changed(root=None)).close()
    begun: BegunAnew | None = None
    unlisted = _forget_list(Root(config.root, Disk()))
    try:
        opened = IndexService(config, takes_over=takes_over)
    except (StorageBehind, RootBehind):
        begun = begin_anew(config, takes_over=takes_over)
        opened = IndexService.open(config)
    with opened as index:
        handles = index.files()
        damaged = [handle for handle in handles if isinstance(handle, DamagedFile)]
        health = index.health()
        document: dict[str, Any] = {
            "index_id": index.index_id,
            "status": "damaged" if damaged or (begun and begun.kept) else "recovered",
            "begun_anew": begun,
            "storage": "reached" if health["writer_epoch"] else "not reached",
            "notes": [*unlisted, *_notes(begun), *index.recovery_notes],
            "files": health["files"],
            "sources": index.durable_positions(),
            "problems": [*(str(handle.error) for handle in damaged), *health["problems"]],
            "damaged": [describe_handle(handle) for handle in damaged],
        }
    session.out.show(document, without=("begun_anew", "notes", "problems", "damaged"))
    for note in document["notes"]:
        session.out.line(f"recovered: {note}")
    for problem in document["problems"]:
        session.out.line(f"problem: {problem}")
    if damaged:
        session.out.remark(f"to print the repairs, run `tiered-index verify --deep --repair --root {config.root}`")
    if document["storage"] != "reached":
        session.out.remark("the storage did not answer: run it again when it does")
    if document["status"] == "damaged":
        return CorruptFile.exit_code
    return 0 if document["storage"] == "reached" else StorageUnavailable.exit_code


def _forget_list(root: Root) -> list[str]:
    """Delete the root's list of files if it can't be read; return a note about it."""
    if root.read_marker() is None:
        return []
    lock = RootLock(root)
    try:
        damage = FileList(root).forget()
    finally:
        lock.release()
    if damage is None:
        return []
    return [f"{damage.file} was damaged and is written again: files that were deleted before now go unnoticed"]


def _notes(begun: BegunAnew | None) -> list[str]:
    if begun is None:
        return []
    notes = [
        f"the root was started again: {counted(begun.entries, 'entry', 'entries')} of {counted(begun.sent, 'file')} "
        f"were put in again, {counted(begun.stored, 'file')} were in the storage"
    ]
    if begun.lacks_expiries:
        notes.append(
            "the storage lacks an expiry that the root knows, which may have replaced erasures: repeat these, or run "
            "`tiered-index expire`"
        )
    return notes + [
        f"{file_id}: its entries were not put in again, and {begun.left} keeps its files: {why}"
        for file_id, why in begun.kept.items()
    ]


def _give_up(session: Session, config: IndexConfig, files: list[str], *, dry_run: bool) -> int:
    with open_stored_index(config) as index:
        state = index.log.state
        for file in files:
            for stored in named(state, file):
                _check_copy(config, file, stored)
        gone = _gone(config, files, state)
        lost = give_up(index.storage, index.log, files, gone, dry_run=dry_run)
        missing = [stored for stored in lost if isinstance(stored, ArchivedSegment)]
        unlisted = [stored for stored in lost if isinstance(stored, LostObject) and stored.is_of_catalog]
        given_up = [Missing.of(s) for s in lost if isinstance(s, LostObject) and not s.is_of_catalog]
        log_number = index.log.state.number
    document: dict[str, Any] = {"status": "planned" if dry_run else "given up", "lost": given_up}
    if missing:
        document["segments"] = [
            {"object": segment.name, "store": segment.store, "offsets": inclusive(segment.start, segment.end)}
            for segment in missing
        ]
    if unlisted:
        document["lost_segments"] = sum(stored.count for stored in unlisted)
        document["catalogs"] = [_of_catalog(stored.range, stored.count) for stored in unlisted if stored.range]
    session.out.show(document | {"log_number": log_number}, most=len(given_up) + len(missing) + len(unlisted))
    if dry_run:
        session.out.remark("nothing was changed: run it without --dry-run to give it up")
    return 0


def _of_catalog(lost: LostRange, segments: int) -> dict[str, Any]:
    """Describe what a lost catalog had of one store."""
    offsets = inclusive(lost.begin, lost.end)
    return {"object": lost.catalog, "store": lost.source, "offsets": offsets, "segments": segments}


def _gone(config: IndexConfig, files: list[str], state: LogState) -> dict[str, LostObject]:
    """Return by file id those of `files` that the root lists but neither its folders nor the log have."""
    if config.root is None:
        return {}
    gone = {}
    for file_id, file in FileList(Root(config.root, Disk())).gone().items():
        if file_id in files and state.object_of(file_id) is None:
            # a file that was open when it was listed has no times: those that a writer accepts, or any
            until_ms = SystemClock().now_ms() + round(config.max_early_s * 1000)
            anything = (0, (until_ms if file.lane == MAIN else MAX_TIMESTAMP_MS) // 1000)
            name = f"{data_prefix(file_id)}unpublished"
            gone[file_id] = LostObject(name, file_id, *(file.seconds or anything), max(1, file.count))
    return gone


def _check_copy(config: IndexConfig, file: str, stored: StoredObject) -> None:
    """Raise `InvalidArgument` if the root has a whole copy of an object's file."""
    if config.root is not None:
        root = Root(config.root, Disk())
        for path in (root.index_path(state, stored.file_id) for state in (COMPACTED, UPLOADED)):
            if path.exists() and _is_whole(path):
                raise InvalidArgument(
                    f"--lost {file}: the root has a copy, {path}. To restore the object from it, run `tiered-index "
                    f"verify --deep --repair --yes --root {config.root}`"
                )


def _is_whole(path: Path) -> bool:
    """Return whether a local file may restore its object: it is undamaged, or of another version."""
    try:
        file = open_local(path)
        try:
            verify_tables(file)
            verify_runs(file)
        finally:
            file.let_go()
    except CorruptFile as error:
        return isinstance(error, UnsupportedVersion)
    return True
