"""The check of a whole index: the files of its root, and the log and objects of its storage."""

from __future__ import annotations

import contextlib

from tiered_index.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError, CorruptFile, NotAnIndex, RootBehind, StorageBehind, StorageError
from tiered_index.format.names import UNSEALED
from tiered_index.service.checks.checks import check_root, check_storage
from tiered_index.service.checks.report import Progress, Report
from tiered_index.service.files.compacted import CompactedFile
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.service.root import Root
from tiered_index.service.root.files import FileList
from tiered_index.service.root.seen import Seen, SeenFile
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk


def check_index(
    config: IndexConfig, report: Report, of_files: Progress, of_objects: Progress, *, deep: bool
) -> tuple[dict[str, CompactedFile], bool]:
    """Check the root and the storage that `config` names, and add findings to `report`. It changes nothing.

    Return the root's compacted files by id, and whether repairs may append to the log: it can be read, and it is the
    log that the root has seen. If `deep`, every byte of every object is read. Parts that the storage could not return
    are in `report.unchecked`. Raises `NotAnIndex`, and `ConfigError` if `config` names neither.
    """
    local: dict[str, CompactedFile] = {}
    state, seen, marker, is_behind = None, None, None, False
    uri, root = config.storage, Root(config.root, Disk()) if config.root is not None else None
    if root is not None:
        marker = root.read_marker()
        if marker is None:
            raise NotAnIndex(f"{config.root} holds no tiered index")
        uri = uri or marker.storage
        # read before the log, because a running writer notes each record that it appends
        seen = SeenFile(root).read()
        local = check_root(root, report, of_files)
    if uri is None:
        raise ConfigError("nothing to verify: neither a root nor a storage is named")
    with contextlib.closing(config.open_storage(uri)) as storage:
        try:
            state = check_storage(storage, local, report, of_objects, deep=deep, threads=config.query_threads)
            if state is not None and root is not None and marker is not None:
                _excuse_missing(root, state, report)
                # a copy of the index has a log of its own
                if state.genesis is not None and state.genesis.index_id == marker.index_id:
                    is_behind = _is_behind(storage, state, seen, root, marker.root_id, report)
        except StorageError as error:
            report.unchecked.append((uri, error))
    return local, state is not None and not is_behind


def _is_behind(storage: Storage, state: LogState, seen: Seen | None, root: Root, root_id: str, report: Report) -> bool:
    """Return whether the storage's log differs from the log that the root has `seen`, or the root is older than its own
    records. If so, add a finding.
    """
    log = StorageLog(storage, SystemClock())
    log.advance(state)
    try:
        if seen is not None:
            log.check_seen(seen)
        log.check_own(root_id, SeenFile(root).read())
    except (StorageBehind, RootBehind) as error:
        report.add_error(error.file, "log", error)
        return True
    return False


def _excuse_missing(root: Root, state: LogState, report: Report) -> None:
    """Remove findings about files that the root lists but does not have, if the log names them or gave them up."""
    known = state.files.keys() | {one.file_id for one in state.lost.values()}
    try:
        excused = {f"{root.folder(UNSEALED)}/{file_id}" for file_id in FileList(root).gone().keys() & known}
    except CorruptFile:
        return  # no file is known to be missing
    report.findings = [one for one in report.findings if one.file not in excused]
