"""The stored files that suite `cold` asks: every file holds some keys that all have, and its own; each covers an hour
of its own.

One thread, but for copying.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.cli.bench.messages import START_MS, batch, key_array, keys_of
from tiered_index.cli.bench.setting import Setting, UnsyncedDisk, require
from tiered_index.errors import InvalidArgument
from tiered_index.format.layout import Layout
from tiered_index.storage.base import Storage
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.opening import open_storage

__all__ = ["StoredFiles", "check_storage", "copied", "make_files"]

_SHARED = 1 << 41
# numbers of the keys that every file holds; the messages' own are far below
_HOUR_MS = 3_600_000
_HOUR = _HOUR_MS * 10
# message numbers of an hour
_AT_ONCE = 50
_COPIES = 8


@dataclass(frozen=True)
class StoredFiles:
    """`count` files of `layout` in the folder `objects`; `cache` is the writer's local cache of their directories and
    filters.
    """

    layout: Layout
    count: int
    objects: Path
    cache: Path

    @property
    def shared(self) -> int:
        """How many keys every file holds."""
        return min(64, self.layout.capacity // 4)

    def begin_ms(self, files: int) -> int:
        """Return where the range of the `files` newest ones begins."""
        return START_MS + (self.count - files) * _HOUR_MS

    def key_in_all(self, number: int) -> str:
        """Return one of the keys that every file holds."""
        return keys_of(np.array([_SHARED + number % self.shared]))[0]

    def key_in_one(self, file: int, number: int) -> str:
        """Return one of the keys that only file `file` (0: the oldest) holds."""
        own = self.layout.capacity - self.shared
        return keys_of(np.array([file * own + number % own]))[0]

    def own_keys(self, numbers: npt.NDArray[np.int64]) -> list[str]:
        """Return keys that one file each holds, by their numbers below `count` * (capacity - `shared`)."""
        return keys_of(numbers)

    def rows(self, file: int) -> pa.RecordBatch:
        """Return a file's messages."""
        own = self.layout.capacity - self.shared
        keys = np.concatenate([_SHARED + np.arange(self.shared), file * own + np.arange(own)])
        return batch(file * _HOUR + np.arange(self.layout.capacity), key_array(keys))


def make_files(setting: Setting, layout: Layout, count: int, folder: Path) -> StoredFiles:
    """Put, compact and upload `count` files of `layout` to a storage of folders; nothing is synced."""
    made = StoredFiles(layout, count, folder / "storage", folder / "root" / "cache")
    disk = UnsyncedDisk()
    at_once = max(1, min(_AT_ONCE, 2_000_000 // layout.capacity))
    storage = LocalStorage(made.objects, disk=disk)
    with replace(setting, layout=layout).open(folder, disk=disk, storage=storage, local_keep_s=0) as index:
        for first in range(0, count, at_once):
            for file in range(first, min(first + at_once, count)):
                index.put_batch(made.rows(file))
                index.flush()
            index.run_lifecycle()
        require([file.place for file in index.files()], ["storage"] * count, "states of the files")
    return made


def check_storage(uri: str) -> None:
    """Raise `InvalidArgument` for a storage that this suite doesn't read from."""
    if not uri.startswith(("s3://", "file://")):
        raise InvalidArgument("bench cold reads from an s3:// or file:// storage")


@contextlib.contextmanager
def copied(files: StoredFiles, uri: str, parallel_reads: int) -> Iterator[Storage]:
    """Copy the objects below a fresh prefix of the storage `uri`, and delete them at the end."""
    before, mark, query = uri.partition("?")
    source = LocalStorage(files.objects)
    with (
        open_storage(
            f"{before.rstrip('/')}/tiered-index-bench-{secrets.token_hex(6)}{mark}{query}",
            parallel_reads=parallel_reads,
        ) as target,
        ThreadPoolExecutor(_COPIES) as pool,
    ):
        try:
            for _ in pool.map(lambda info: target.put(info.name, source.get(info.name)), list(source.list())):
                pass
            yield target
        finally:
            target.delete_many([info.name for info in list(target.list())])
