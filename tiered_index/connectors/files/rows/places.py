"""The bytes of a source: a local file, an object of a storage, or standard input. One thread."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import select
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast
from urllib.parse import quote, unquote, urlsplit

from tiered_index.base.kernels import crc32
from tiered_index.base.threads import DaemonPool
from tiered_index.config import IndexConfig
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.storage import disk
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import beside, split_parameters

# Extensions of file names
CSV, PARQUET = (".csv", ".csv.gz"), (".parquet",)
NDJSON = (".ndjson", ".jsonl", ".json", ".ndjson.gz", ".jsonl.gz", ".json.gz")
STDIN = "-"
# Schemes whose storages are buckets
_BUCKETS = ("s3", "gs", "az")
# Least bytes of one request
_BUFFER_BYTES = 1 << 20
# Bytes of a request that reads ahead, and most requests of a file at the same time
_PIECE_BYTES, _AHEAD = 4 << 20, 4
# Longest time to gather a block from stdin
_MOMENT_S = 0.2


@dataclass(frozen=True)
class LocalFile:
    """One file of the local disk. Raises `InvalidArgument` if it can't be opened."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def open(self) -> AbstractContextManager[IO[bytes]]:
        """Return the bytes, seekable."""
        try:
            return self.path.open("rb")
        except OSError as error:
            raise InvalidArgument(f"{self.path}: {error.strerror}") from error

    ranges = ahead = open


class ObjectReader(io.RawIOBase):
    """An object of `size_bytes` as a file: each read is one ranged request. One thread at a time."""

    def __init__(self, storage: Storage, name: str, size_bytes: int) -> None:
        super().__init__()
        self._storage, self._name, self._size_bytes = storage, name, size_bytes
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read, without a request."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence])
        return self._at

    def readinto(self, buffer: object) -> int:
        """Read into `buffer`, up to the end of the object; return the byte count. Errors: `Storage.get_range`."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        length = min(len(view), max(0, self._size_bytes - self._at))
        part = self._storage.get_range(self._name, self._at, length) if length else b""
        view[: len(part)] = part
        self._at += len(part)
        return len(part)


class ReadAhead(ObjectReader):
    """An object that is read from a position on: the next pieces are read at the same time.

    A seek begins anew. Memory: `_AHEAD` pieces of `_PIECE_BYTES`. One thread at a time, in addition to its own.
    """

    def __init__(self, storage: Storage, name: str, size_bytes: int) -> None:
        super().__init__(storage, name, size_bytes)
        self._pool = DaemonPool(_AHEAD, "tiered-index-ahead")
        self._asked = 0
        self._pieces = deque[Future[bytes]]()
        self._rest = memoryview(b"")

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        before = self._at
        if super().seek(offset, whence) != before:
            self._forget()
            self._asked = self._at
        return self._at

    def readinto(self, buffer: object) -> int:
        """Read into `buffer`, up to the end of a piece; return the byte count. Errors: `Storage.get_range`."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        if not self._rest and len(view):
            while len(self._pieces) < _AHEAD and self._asked < self._size_bytes:
                length = min(_PIECE_BYTES, self._size_bytes - self._asked)
                self._pieces.append(self._pool.submit(self._storage.get_range, self._name, self._asked, length))
                self._asked += length
            if self._pieces:
                self._rest = memoryview(self._pieces.popleft().result())
        length = min(len(view), len(self._rest))
        view[:length], self._rest = self._rest[:length], self._rest[length:]
        self._at += length
        return length

    def _forget(self) -> None:
        for piece in self._pieces:
            piece.cancel()
        self._pieces.clear()
        self._rest = memoryview(b"")

    def close(self) -> None:
        """Forget the pieces. Requests that have begun are not waited for. Idempotent."""
        if not self.closed:
            self._forget()
            self._pool.close(time.monotonic())
        super().close()


@dataclass(frozen=True)
class StoredFile:
    """One object; `uri` names it, without parameters."""

    uri: str
    storage: Storage
    name: str
    size_bytes: int

    def __str__(self) -> str:
        return self.uri

    def open(self) -> AbstractContextManager[IO[bytes]]:
        """Return the bytes, seekable, buffered for sequential reads."""
        return io.BufferedReader(ObjectReader(self.storage, self.name, self.size_bytes), _BUFFER_BYTES)

    def ahead(self) -> AbstractContextManager[IO[bytes]]:
        """Return the bytes, seekable, for a read from a position to the end, whose next pieces are read meanwhile."""
        return io.BufferedReader(ReadAhead(self.storage, self.name, self.size_bytes), _BUFFER_BYTES)

    def ranges(self) -> AbstractContextManager[IO[bytes]]:
        """Return the bytes, seekable; each read is one request."""
        return cast(IO[bytes], ObjectReader(self.storage, self.name, self.size_bytes))


@dataclass(frozen=True)
class HeldFile:
    """A small file or object that was read as a whole: `data` are its bytes."""

    file: LocalFile | StoredFile
    data: bytes

    def __str__(self) -> str:
        return str(self.file)

    def open(self) -> AbstractContextManager[IO[bytes]]:
        """Return the bytes, seekable."""
        return io.BytesIO(self.data)

    ranges = ahead = open


@dataclass(frozen=True)
class CheckedFile:
    """A file whose blocks of `block_bytes` have these CRC32s. A read raises `InvalidArgument` if it has other bytes.

    So no byte is used that was not there when the file was summed up, whatever was written to it since then.
    """

    file: LocalFile | StoredFile
    size_bytes: int
    block_bytes: int
    sums: tuple[int, ...]

    def __str__(self) -> str:
        return str(self.file)

    def open(self) -> AbstractContextManager[IO[bytes]]:
        """Return the bytes, seekable, buffered for sequential reads."""
        buffer_bytes = _BUFFER_BYTES if isinstance(self.file, StoredFile) else self.block_bytes
        return io.BufferedReader(_CheckedReader(self), buffer_bytes)

    def ranges(self) -> AbstractContextManager[IO[bytes]]:
        """Return the bytes, seekable; each read is one request for whole blocks."""
        return cast(IO[bytes], _CheckedReader(self))

    ahead = open


class _CheckedReader(io.RawIOBase):
    """The bytes of a `CheckedFile`. The last block of a read is kept for the next one. One thread at a time."""

    def __init__(self, checked: CheckedFile) -> None:
        super().__init__()
        self._checked, self._at = checked, 0
        self._opened = contextlib.ExitStack()
        self._handle = self._opened.enter_context(checked.file.ranges())
        # the number of the block that is kept, and its bytes
        self._kept = -1, b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read, without a request."""
        begins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._checked.size_bytes}
        self._at = max(0, offset + begins[whence])
        return self._at

    def readinto(self, buffer: object) -> int:
        """Read into `buffer`, up to the end of the file; return the byte count. Raises as `CheckedFile`."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        length, block_bytes = min(len(view), max(0, self._checked.size_bytes - self._at)), self._checked.block_bytes
        if not length:
            return 0
        first, end = self._at // block_bytes, (self._at + length - 1) // block_bytes + 1
        begin, number, data = self._at - first * block_bytes, *self._kept
        if number == first:
            part = data[begin : begin + length]
            view[: len(part)] = part
            self._at += len(part)
            return len(part) + (self.readinto(view[len(part) : length]) if len(part) < length else 0)
        blocks = memoryview(self._read(first, end))
        view[:length] = blocks[begin : begin + length]
        self._kept = end - 1, bytes(blocks[(end - 1 - first) * block_bytes :])
        self._at += length
        return length

    def _read(self, first: int, end: int) -> bytes:
        """Return the bytes of blocks [`first`, `end`), after they are compared."""
        checked, begin = self._checked, first * self._checked.block_bytes
        length = min(end * checked.block_bytes, checked.size_bytes) - begin
        try:
            self._handle.seek(begin)
            data = self._handle.read(length)
        except OSError as error:
            raise InvalidArgument(f"{checked} can't be read: {error.strerror}") from error
        sums = [crc32(data[at : at + checked.block_bytes]) for at in range(0, len(data), checked.block_bytes)]
        if len(data) != length or (*sums,) != checked.sums[first:end]:
            raise InvalidArgument(f"{checked} has changed since it was indexed")
        return data

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._opened.close()
        super().close()


def sums_of(file: LocalFile | StoredFile | HeldFile, block_bytes: int, begin: int, end: int) -> tuple[int, ...]:
    """Return the CRC32 of each block of the bytes from `begin`, the begin of a block, to `end` or the file's end.

    Raises `InvalidArgument` and the storage's errors.
    """
    sums = list[int]()
    with file.ahead() as handle:
        try:
            handle.seek(begin)
            while begin < end and (block := handle.read(min(block_bytes, end - begin))):
                sums.append(crc32(block))
                begin += len(block)
        except OSError as error:
            raise InvalidArgument(f"{file} can't be read: {error.strerror}") from error
    return tuple(sums)


class Stdin:
    """Standard input, gzipped or not. It is read once and can't be continued."""

    def __init__(self) -> None:
        if sys.stdin is None:
            raise InvalidArgument("stdin is closed")
        raw = cast(io.BufferedReader, sys.stdin.buffer)
        # else a pause of the writer would pass for the end of the stream
        os.set_blocking(raw.fileno(), True)
        # read1, so that gzip does not wait for a whole buffer
        packed = cast(IO[bytes], SimpleNamespace(read=raw.read1))
        # the first line, if it was looked at
        self._begun = b""
        self._stream: Any = gzip.GzipFile(fileobj=packed, mode="rb") if raw.peek(2)[:2] == b"\x1f\x8b" else raw

    def __str__(self) -> str:
        return "stdin"

    def open(self) -> AbstractContextManager[IO[bytes]]:
        """Return the one stream; it stays open."""
        return contextlib.nullcontext(cast(IO[bytes], self))

    def read(self, size_bytes: int) -> bytes:
        """Return the bytes that arrive within a moment, up to `size_bytes`; empty only at the end."""
        if self._begun:
            begun, self._begun = self._begun[:size_bytes], self._begun[size_bytes:]
            return begun
        until_s = time.monotonic() + _MOMENT_S
        with self._unzipping():
            pieces = [self._stream.read1(size_bytes)]
            left = size_bytes - len(pieces[0])
            while pieces[-1] and left and select.select([sys.stdin], [], [], max(0, until_s - time.monotonic()))[0]:
                pieces.append(self._stream.read1(left))
                left -= len(pieces[-1])
        return b"".join(pieces)

    def head(self) -> bytes:
        """Return the first bytes without consuming them; empty at the end of the stream."""
        with self._unzipping():
            return self._begun or bytes(self._stream.peek(1))

    def first_line(self, most_bytes: int) -> bytes:
        """Return the first line, or its first `most_bytes`, without consuming it. It waits for the line's end."""
        with self._unzipping():
            self._begun = self._begun or bytes(self._stream.readline(most_bytes))
        return self._begun

    @contextlib.contextmanager
    def _unzipping(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError, zlib.error) as error:
            raise CorruptFile(str(self), f"damaged gzip file: {error}") from error


File = LocalFile | StoredFile | HeldFile | CheckedFile
Place = File | Stdin


def local_path(source: str) -> Path | None:
    """Return the absolute path of a path or a `file://` URI, None for any other source. Raises `ConfigError`."""
    if source == STDIN:
        return None
    if source.startswith("file://"):
        # a file has no parameters: these are characters of its name
        return disk.local_path(urlsplit(source.replace("?", "%3F").replace("#", "%23")), "file:///dir/file")
    return None if "://" in source else disk.absolute_path(source)


@contextlib.contextmanager
def opened_place(source: str, config: IndexConfig) -> Iterator[Place]:
    """Yield the file, object or stdin that `source` names. Raises `InvalidArgument` and the storage's errors.

    A URI without parameters takes those of the index's storage, if it has the same scheme.
    """
    source = beside(source, config.storage)
    path = local_path(source)
    if path is not None:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InvalidArgument(f"{path} is a pipe or a device, which is read only once: give - and < {path}")
        yield LocalFile(path)
        return
    if source == STDIN:
        yield Stdin()
        return
    place, parameters = split_parameters(source)
    folder, name = split_object(place)
    if not name or name.endswith("/") or folder.endswith(("/", ":")):
        raise InvalidArgument(f"{place} is not a file: give the URI of a file, such as s3://bucket/day.ndjson")
    for uri in readings(place):
        folder, name = split_object(uri)
        with contextlib.closing(config.open_storage(folder + parameters, any_names=True)) as storage:
            try:
                size_bytes = storage.head(unquote(name)).size_bytes
            except ObjectNotFound:
                continue
            # one name of the source, however its URI was written
            yield StoredFile(quote(unquote(uri), safe=":/=+@"), storage, unquote(name), size_bytes)
            return
    raise InvalidArgument(f"{place}: no such object")


def split_object(uri: str) -> tuple[str, str]:
    """Return the URI of an object's storage, and the object's name there. One storage reads all objects of a bucket."""
    scheme, separator, rest = uri.partition("://")
    folder, _, name = rest.partition("/") if scheme in _BUCKETS else rest.rpartition("/")
    return f"{scheme}{separator}{folder}", name


def readings(uri: str) -> list[str]:
    """Return the URIs that a URI without parameters may mean: `%3A` is an escape of `:`, or part of a name."""
    return list(dict.fromkeys([uri, uri.replace("%", "%25")]))
