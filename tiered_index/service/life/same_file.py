"""Compares a local file with a later form of it or its published one, before the local file counts as the same.

Two copies of a root can put different entries into one file. Equal tails mean equal bytes, because the tail has the
CRC32 of the directory, which has the CRC32 of all runs. If tails differ, another version or a job may have compacted
the same entries: then both files are read, and hashes of their entries are compared. An unsealed file may be an earlier
state of the other one, which then has each of its entries. Any thread.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, RootBehind, StorageError
from tiered_index.format.journal import Journal
from tiered_index.format.shard import entry_hashes
from tiered_index.service.log.identity import other_file
from tiered_index.service.read.files.compacted import CompactedFile, StorageBytes
from tiered_index.service.read.files.file_search import FileBytes, scan_runs
from tiered_index.service.read.files.snapshot import unmap
from tiered_index.service.read.files.unsealed import verified_entries

_WINDOW_BYTES = 4 << 20
_HASHED_AT_ONCE = 1 << 16
_log = logging.getLogger(__name__)


def check_same(file: CompactedFile, later: FileBytes) -> None:
    """Raise `RootBehind` if the published file, or a later copy, has other entries than a local compacted one.

    Raises the errors of reading both files.
    """
    local = file.local
    assert local is not None
    if file.count == _count(later):
        if local.trailer().tail == later.trailer().tail or _checksum(local) == _checksum(later):
            return
        raise _others(local.file, f"{file.count} other entries", later)
    raise _others(local.file, f"{file.count} entries", later)


def is_in(path: Path, journal: Journal, later: FileBytes) -> bool:
    """Return whether an unsealed file may be dropped, because a later form has all its entries, or it is damaged.

    False if the later form can't be read. Raises `RootBehind` if the later form lacks an entry.
    """
    if journal.count > _count(later):
        raise _others(str(path), f"{journal.count} entries", later)
    if not journal.count:
        return True
    try:
        with path.open("rb") as handle:
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            entries = verified_entries(data, journal, str(path))
            # without `previous`, which only an unsealed entry has
            items = entries[list(journal.layout.schema.item.names or ())]
            parts = (items[at : at + _HASHED_AT_ONCE] for at in range(0, len(items), _HASHED_AT_ONCE))
            hashes = np.concatenate([_hashes(part, journal.begin_ms // 1000) for part in parts])
            del entries, items, parts
        finally:
            unmap(data)
    except (CorruptFile, ValueError, FileNotFoundError) as error:
        _log.debug("%s can't be compared with %s: %s", path, later.file, error)
        return True
    try:
        has_all = _has_all(later, hashes)
    except (CorruptFile, StorageError) as error:
        _log.warning("%s is kept: %s can't be read: %s", path, later.file, error)
        return False
    if not has_all:
        raise _others(str(path), f"{journal.count} other entries", later)
    return True


def _count(source: FileBytes) -> int:
    return source.stored.count if isinstance(source, StorageBytes) else source.trailer().metadata.count


def _has_all(source: FileBytes, hashes: npt.NDArray[np.uint64]) -> bool:
    """Return whether a file has an entry for each hash, counting equal ones. Memory: 16 bytes per hash."""
    wanted, left = np.unique(hashes, return_counts=True)
    for part in _hashes_of(source):
        values, counts = np.unique(part, return_counts=True)
        # the first place with a hash that is not smaller
        at = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
        is_wanted = wanted[at] == values
        left[at[is_wanted]] -= counts[is_wanted]
    return bool((left <= 0).all())


def _checksum(source: FileBytes) -> int:
    return sum(int(hashes.sum(dtype=np.uint64)) for hashes in _hashes_of(source)) % 2**64


def _hashes_of(source: FileBytes) -> Iterator[npt.NDArray[np.uint64]]:
    trailer = source.trailer()
    begin_s, runs = trailer.metadata.begin_ms // 1000, trailer.directory.all_runs()
    for _, items in scan_runs(source, runs, _WINDOW_BYTES):
        yield _hashes(items, begin_s)


def _hashes(items: npt.NDArray[Any], begin_s: int) -> npt.NDArray[np.uint64]:
    seconds: npt.NDArray[np.int64] = items["time_diff_s"].astype(np.int64) + begin_s
    return entry_hashes(items, seconds)


def _others(where: str, content: str, later: FileBytes) -> RootBehind:
    return other_file(where, later.file, f"{_count(later)} entries", content)
