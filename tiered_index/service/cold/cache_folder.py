"""The local cache of directories and filters: one folder with a bound in bytes, verified whenever something is read from it.

```
folder/<index id>/<object name, "/" written as ",">.trailer|.filter
entry := (piece of 4,096 bytes, the last one shorter; CRC32 of it) ...
```
Objects never change under one name, so an entry is never stale. Each CRC32 starts from one over index, object, kind and piece number:
an entry that was copied, cut or swapped fails like one with a flipped bit. What fails is deleted and fetched anew; an entry is a copy, so
no trouble of this folder is a lookup's error. The entries used longest ago go first.

Threads and processes: any number may share a folder; entries appear whole, by a rename.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tiered_index.storage.disk import TEMPORARY_PREFIX

__all__ = ["PIECE_BYTES", "CacheFolder", "Kind"]

Kind = Literal["trailer", "filter"]
PIECE_BYTES = 4096
"""Bytes under one CRC32: a probe of a filter reads one piece."""
_CRC_BYTES = 4
_TOUCH_S = 60.0
# an entry's time of use is brought up to date this often
_LEFTOVER_S = 3600.0
# a temporary file this old is a crash's
_SLACK = 0.9
# a full cache is emptied down to this part of its bound, so that not every new entry looks at all of them
_COUNTED_AFTER = 32
# one part in so many of the bound may be added before all is counted again, since others add to the folder, too
_log = logging.getLogger(__name__)


class CacheFolder:
    """The entries of one index in a folder that several may share. `read_only`: another process keeps it, nothing is changed."""

    def __init__(self, folder: Path, index_id: str, max_bytes: int, *, read_only: bool = False) -> None:
        self.folder = folder
        self._mine = folder / "".join(c if c.isalnum() or c in "-_" else "_" for c in index_id)
        self._index_id = index_id
        self._max_bytes = max_bytes
        self._read_only = read_only
        self._lock = threading.Lock()
        self._size_bytes = self._uncounted_bytes = 0
        self._counted = False
        self._touched: dict[Path, float] = {}
        self._told: set[str] = set()
        self.damaged = 0
        """Entries that were found not to match their CRC32."""

    def read(self, name: str, kind: Kind, length: int) -> bytes | None:
        """Return an object's entry of `length` bytes, verified, or None."""
        pieces = []
        try:
            with self._path(name, kind).open("rb") as handle:
                if os.fstat(handle.fileno()).st_size != _stored_bytes(length):
                    self._damaged(name, kind, "another length than the log says")
                    return None
                for number, piece_length in _pieces(length):
                    piece = self._checked(name, kind, number, handle.read(piece_length + _CRC_BYTES))
                    if piece is None:
                        self._damaged(name, kind, f"piece {number} does not match its CRC32")
                        return None
                    pieces.append(piece)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell("read", error)
            return None
        self._touch(self._path(name, kind))
        return b"".join(pieces)

    def read_piece(self, name: str, kind: Kind, length: int, number: int) -> bytes | None:
        """Return piece `number` (from 0) of an entry of `length` bytes, verified, or None."""
        piece_length = min(PIECE_BYTES, length - number * PIECE_BYTES)
        path = self._path(name, kind)
        try:
            with path.open("rb", buffering=0) as handle:
                if os.fstat(handle.fileno()).st_size != _stored_bytes(length):
                    self._damaged(name, kind, "another length than the log says")
                    return None
                data = os.pread(handle.fileno(), piece_length + _CRC_BYTES, number * (PIECE_BYTES + _CRC_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell("read", error)
            return None
        piece = self._checked(name, kind, number, data)
        if piece is None:
            self._damaged(name, kind, f"piece {number} does not match its CRC32")
            return None
        self._touch(path)
        return piece

    def write(self, name: str, kind: Kind, data: bytes | memoryview) -> bool:
        """Keep an entry; where the disk does not take it, it is not kept. Return whether it is."""
        size = _stored_bytes(len(data))
        if self._read_only or not len(data) or size > self._max_bytes:
            return False
        path = self._path(name, kind)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        try:
            self._mine.mkdir(mode=0o755, parents=True, exist_ok=True)
            with temporary.open("xb") as handle:
                for number, length in _pieces(len(data)):
                    piece = bytes(data[number * PIECE_BYTES : number * PIECE_BYTES + length])
                    handle.write(piece + zlib.crc32(piece, self._seed(name, kind, number)).to_bytes(_CRC_BYTES, "big"))
            replaced = path.stat().st_size if path.exists() else 0
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._tell("write", error)
            return False
        self._make_room(size - replaced)
        return True

    def _path(self, name: str, kind: Kind) -> Path:
        return self._mine / f"{name.replace('/', ',')}.{kind}"  # a comma is in no object's name

    def _seed(self, name: str, kind: Kind, number: int) -> int:
        return zlib.crc32(f"{self._index_id}\n{name}\n{kind}\n{number}".encode())

    def _checked(self, name: str, kind: Kind, number: int, data: bytes) -> bytes | None:
        piece = data[:-_CRC_BYTES]
        return piece if zlib.crc32(piece, self._seed(name, kind, number)).to_bytes(_CRC_BYTES, "big") == data[-_CRC_BYTES:] else None

    def _damaged(self, name: str, kind: Kind, problem: str) -> None:
        path = self._path(name, kind)
        with self._lock:
            self.damaged += 1
        _log.warning("cache entry %s passed over: %s", path, problem)
        if not self._read_only:
            with contextlib.suppress(OSError):
                path.unlink()

    def _tell(self, what: str, error: OSError) -> None:
        """Say once of each kind that the folder is of no use; lookups go on without it."""
        text = f"{what}: {error.strerror}"
        with self._lock:
            new = text not in self._told
            self._told.add(text)
        if new:
            _log.warning("the cache %s is not used to %s (%s)", self.folder, what, error)

    def _touch(self, path: Path) -> None:
        now = time.monotonic()
        if self._read_only or now - self._touched.get(path, -_TOUCH_S) < _TOUCH_S:
            return
        self._touched[path] = now
        with contextlib.suppress(OSError):
            os.utime(path)

    def _make_room(self, gained: int) -> None:
        with self._lock:
            self._size_bytes += gained
            self._uncounted_bytes += abs(gained)
            if self._counted and self._size_bytes <= self._max_bytes and self._uncounted_bytes * _COUNTED_AFTER <= self._max_bytes:
                return
            entries = sorted(self._entries())
            self._size_bytes, self._uncounted_bytes, self._counted = sum(size for _, size, _ in entries), 0, True
            if self._size_bytes <= self._max_bytes:
                return
            for _, size, path in entries:
                if self._size_bytes <= self._max_bytes * _SLACK:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    self._touched.pop(Path(path), None)
                    self._size_bytes -= size

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yield (time of use, bytes, path) of every index's entries, and delete what crashes left."""
        for index in _scan(self.folder):
            if not index.is_dir(follow_symlinks=False):
                continue
            for entry in _scan(Path(index.path)):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(TEMPORARY_PREFIX):
                        if status.st_mtime < time.time() - _LEFTOVER_S:
                            os.unlink(entry.path)
                    elif entry.name.endswith((".trailer", ".filter")):
                        yield status.st_mtime, status.st_size, entry.path


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _pieces(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, PIECE_BYTES):
        yield start // PIECE_BYTES, min(PIECE_BYTES, length - start)


def _stored_bytes(length: int) -> int:
    return length + _CRC_BYTES * -(-length // PIECE_BYTES)
