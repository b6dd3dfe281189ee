"""Readers without local state over the measured files: the block cache is off, so that a fresh key is a fresh read. One
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiered_index.cli.bench.cold.files import StoredFiles
from tiered_index.cli.bench.messages import TOPIC
from tiered_index.cli.bench.setting import require
from tiered_index.config import IndexConfig
from tiered_index.service.files.compacted import CompactedFile, StorageBytes
from tiered_index.service.reader import IndexReader
from tiered_index.storage.base import Storage

__all__ = ["NO_FILTERS", "open_reader", "stored_files", "warm"]

NO_FILTERS = 1 << 30
"""As `filter_after_probes`: never fetch one."""


def open_reader(storage: Storage, cache: Path | None = None, **settings: Any) -> IndexReader:
    """Open a reader of the index in `storage`.

    With the writer's `cache` its filters are at hand, without it they never are.
    """
    config = IndexConfig.load(
        block_cache_bytes=0, filter_after_probes=NO_FILTERS, refresh_interval_s=1e9, cache_dir=cache, **settings
    )
    return IndexReader.open(config=config, storage_backend=storage)


def warm(reader: IndexReader, files: StoredFiles) -> None:
    """Make every directory known."""
    require(
        len(reader.query(TOPIC, files.key_in_all(0), max_count=files.count)) >= files.count,
        True,
        "answers of all files",
    )


def stored_files(reader: IndexReader) -> list[StorageBytes]:
    """Return the files in the storage, newest first."""
    handles = [handle for handle in reader.files() if isinstance(handle, CompactedFile)]
    return [handle.stored for handle in _newest_first(handles) if handle.stored is not None]


def _newest_first(handles: Sequence[CompactedFile]) -> list[CompactedFile]:
    return sorted(handles, key=lambda handle: -handle.second_max)
