"""Files of a storage as pyarrow reads them: a read-only file whose reads are ranged GETs. Used by the driver and inside tasks."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tiered_index.errors import InvalidArgument
from tiered_index.spark.metrics import SourceAccess
from tiered_index.storage.base import Storage

__all__ = ["StoredFile"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One object: how and where its storage is opened, and its name there."""

    access: SourceAccess
    uri: str
    name: str

    @classmethod
    def find(cls, uri: str, access: SourceAccess, kind: Callable[[str], str]) -> list[StoredFile]:
        """Return the object that `uri` names, or those below it that have a `kind`. Raises `InvalidArgument` where there is none."""
        place, mark, parameters = uri.partition("?")
        if kind(place):
            folder, _, name = place.rpartition("/")
            return [cls(access, folder + mark + parameters, name)]
        with access.address(uri).open() as storage:
            names = [info.name for info in storage.list() if kind(info.name) and not info.name.rpartition("/")[2].startswith(("_", "."))]
        if not names:
            raise InvalidArgument(f"{uri} has no Parquet or NDJSON file")
        return [cls(access, uri, name) for name in names]

    @contextmanager
    def open(self) -> Iterator[io.RawIOBase]:
        """Yield the object as a file. Raises what the storage raises."""
        with self.access.address(self.uri).open() as storage:
            yield _Ranges(storage, self.name, storage.head(self.name).size_bytes)


class _Ranges(io.RawIOBase):
    """Reads by `get_range`."""

    def __init__(self, storage: Storage, name: str, size_bytes: int) -> None:
        super().__init__()
        self._storage, self._name, self._size_bytes = storage, name, size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size_bytes - self._at)
        length = left if size is None or size < 0 else min(size, left)
        data = self._storage.get_range(self._name, self._at, length) if length else b""
        self._at += length
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)
