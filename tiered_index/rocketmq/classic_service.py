"""The broker's classic index as a whole: its files in order, lookups over them, and what a dispatched message adds. Source: `IndexService`.

Files are named by the time they were made (yyyyMMddHHmmssSSS) and sorted by name. A new file inherits end offset and end timestamp of the
one before it, and a message below the newest end offset is ignored, so that dispatching again after a restart adds nothing twice.
Pure but for `load_classic_index`; one thread writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tiered_index.rocketmq.classic_index import DEFAULT_GEOMETRY, ClassicIndexFile, Geometry, infer_geometry
from tiered_index.rocketmq.layout import TRANSACTION_MASK, TRANSACTION_ROLLBACK
from tiered_index.rocketmq.segments import local_errors, pread

__all__ = ["MAX_COUNT", "ClassicAnswer", "ClassicIndex", "load_classic_index"]

MAX_COUNT = 64
"""The broker's bound of a lookup (`maxMsgsNumBatch`)."""


class ClassicAnswer(NamedTuple):
    """What the broker answers: commit log offsets, newest first, and how far its newest file reaches."""

    offsets: list[int]
    last_ms: int
    last_offset: int


@dataclass(slots=True)
class ClassicIndex:
    """Index files in the order of their names; `geometry` is that of files made here, and `new_name` names them."""

    geometry: Geometry = DEFAULT_GEOMETRY
    files: list[ClassicIndexFile] = field(default_factory=list)
    new_name: Callable[[], str] = lambda: "index file"

    def query(self, topic: str, key: str, max_count: int = MAX_COUNT, begin_ms: int = 0, end_ms: int = 2**63 - 1) -> ClassicAnswer:
        """Return what the broker answers (`queryOffset`), bounds and early stops included; the range is inclusive.

        Raises `CorruptFile` where Java would not end.
        """
        found: list[int] = []
        limit = min(max_count, MAX_COUNT)
        for file in reversed(self.files):
            if file.is_time_matched(begin_ms, end_ms):
                file.select_offsets(found, f"{topic}#{key}", limit, begin_ms, end_ms)
            if file.header.begin_ms < begin_ms or len(found) >= limit:
                break
        newest = self.files[-1].header if self.files else None
        return ClassicAnswer(found, newest.end_ms if newest else 0, newest.end_offset if newest else 0)

    def find(self, topic: str, key: str, begin_ms: int = 0, end_ms: int = 2**63 - 1) -> list[int]:
        """Return every offset under the key's hash in the inclusive range, newest file and entry first: no bound, no file left out.

        Keys of one hash aren't told apart here; who reads the messages does that. Raises `CorruptFile`.
        """
        return [offset for file in reversed(self.files) for offset in file.find(f"{topic}#{key}", begin_ms, end_ms)]

    def put(self, topic: str, uniq_key: str | None, keys: str | None, offset: int, store_ms: int, sys_flag: int) -> None:
        """Index one message as the broker does (`buildIndex`).

        `keys` is the KEYS property as it stands. Rolled-back messages are left out, prepared ones aren't, and a key that equals the
        unique key or another one is put again: RocketMQ's bytes depend on it.
        """
        newest = self._writable()
        if offset >= newest.header.end_offset and sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK:
            for key in ([] if uniq_key is None else [uniq_key]) + [key for key in (keys or "").split(" ") if key]:
                if not newest.put_key(f"{topic}#{key}", offset, store_ms):
                    newest = self._writable()
                    newest.put_key(f"{topic}#{key}", offset, store_ms)

    def _writable(self) -> ClassicIndexFile:
        """Return the newest file, or a new one where it is full."""
        newest = self.files[-1] if self.files else None
        if newest is not None and not newest.is_full:
            return newest
        inherited = {} if newest is None else {"end_offset": newest.header.end_offset, "end_ms": newest.header.end_ms}
        made = ClassicIndexFile.create(self.geometry, file=self.new_name(), **inherited)
        self.files.append(made)
        return made


def classic_file_names(folder: Path) -> list[str]:
    """Return the names of the index files in a folder, oldest first; a missing folder is empty."""
    with local_errors(folder):
        try:
            entries = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        except FileNotFoundError:
            return []
    return sorted(name for name in entries if name.isascii() and name.isdecimal())


def load_classic_index(
    folder: Path, geometry: Geometry | None = None, *, names: Iterable[str] | None = None, valid_until_ms: int | None = None
) -> ClassicIndex:
    """Return the index files of a folder, read into memory (420 MB each by default; `names` chooses some) for reading.

    Without `geometry` each file's own contents say it. `valid_until_ms` leaves out the files that the broker deletes after a crash: those
    that end behind it (the checkpoint's `index_ms`). Raises `CorruptFile` naming the file, and `StorageMisconfigured` without permission.
    """
    files = []
    for name in classic_file_names(folder) if names is None else sorted(names):
        path = folder / name
        with local_errors(path):
            size_bytes = path.stat().st_size
        data = pread(path, min(size_bytes, 2**31), 0)
        file = ClassicIndexFile(data, geometry or infer_geometry(data, str(path)), file=str(path))
        if valid_until_ms is None or file.header.end_ms <= valid_until_ms:
            files.append(file)
    return ClassicIndex(geometry or (files[-1].geometry if files else DEFAULT_GEOMETRY), files)
