"""Checks of a root: every file in its folders, as far as its journal or trailer covers it. The writer may be at work
beside. One thread.
"""

from __future__ import annotations

from tiered_index.errors import TieredIndexError
from tiered_index.format.names import INDEX_SUFFIX, JOURNAL_SUFFIX, STATES, UNSEALED, file_id_of
from tiered_index.format.verify import verify_compacted
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.checks.report import Progress, Report
from tiered_index.service.files.compacted import CompactedFile, DamagedFile
from tiered_index.service.reading.root_view import RootView, UnsealedView
from tiered_index.service.root.root import Root
from tiered_index.storage.disk import TEMPORARY_PREFIX

__all__ = ["check_root"]


def check_root(root: Root, report: Report, progress: Progress) -> dict[str, CompactedFile]:
    """Check every file of `root`; return the handles of its compacted files by id, for comparison with the storage."""
    _check_names(root, report)
    local: dict[str, CompactedFile] = {}
    for number, handle in enumerate(RootView(root).look(), 1):
        _check_file(root, handle, report)
        if isinstance(handle, CompactedFile):
            local[handle.file_id] = handle
        progress(number, handle.file_id)
    return local


def _check_names(root: Root, report: Report) -> None:
    for state in STATES:
        for name in root.disk.names(root.folder(state)):
            path = root.folder(state) / name
            if name.startswith(TEMPORARY_PREFIX):
                report.note(f"{path}: half-made work, or space reserved by a running writer; the next start drops it")
            elif file_id_of(name) is None or (name.endswith(JOURNAL_SUFFIX) and state != UNSEALED):
                report.note(f"{path}: not a file of this index")
            elif (
                state == UNSEALED
                and name.endswith(INDEX_SUFFIX)
                and not path.with_suffix(JOURNAL_SUFFIX).exists()
                and path.exists()
            ):
                # looked at again, because a writer deletes the two one after the other
                report.add(str(path), "journal", "its journal is missing")


def _check_file(root: Root, handle: Handle, report: Report) -> None:
    report.count("files")
    if isinstance(handle, DamagedFile):
        report.add_error(f"{root.folder(handle.place)}/{handle.file_id}", "file", handle.error)
    elif isinstance(handle, UnsealedView):
        try:
            report.count("bytes", handle.entries().nbytes)
        except TieredIndexError as error:
            report.add_error(str(handle.path), "entries", error)
    elif isinstance(handle, CompactedFile) and handle.local is not None:
        data, size = handle.local.data, handle.local.size_bytes
        report.count("bytes", size)
        findings = verify_compacted(
            lambda position, length: data[position : position + length], size, handle.local.file
        )
        report.add_all(handle.local.file, findings)
