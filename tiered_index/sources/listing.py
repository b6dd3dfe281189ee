"""Lists the files that sources name: files, folders, globs and prefixes, on the local disk and in storages. One thread.

Each file has a stamp, which differs if another file is at its place, or if it was written to.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote

from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.kernels import crc32
from tiered_index.sources.places import LocalFile, StoredFile, local_path, opened_place, readings
from tiered_index.sources.table_folders import check_no_tables, table_error, table_folder
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import beside

HEAD_BYTES = 64 << 10
"""The first bytes of a file, which are a part of its identity."""
_WILD = re.compile(r"[*\[]")
# schemes whose storages are buckets: one storage reads all objects of a bucket
_BUCKETS = ("s3", "gs", "az")
# parts of names that are no data, such as _SUCCESS
_HIDDEN = (".", "_")


@dataclass(frozen=True)
class PinnedFile(LocalFile):
    """A local file of one device and inode. `open` raises `FileMoved` if another file has its name."""

    place: str

    def open(self) -> IO[bytes]:
        try:
            handle = super().open()
        except InvalidArgument as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise FileMoved(str(error)) from error
            raise
        assert isinstance(handle, io.BufferedReader)
        if _place_of(os.fstat(handle.fileno())) != self.place:
            handle.close()
            raise FileMoved(f"{self.path} is another file now")
        return handle

    ranges = ahead = open


class FileMoved(InvalidArgument):
    """A file that was listed has no longer its name."""


def _place_of(status: os.stat_result) -> str:
    return f"{status.st_dev}-{status.st_ino}"


@dataclass(frozen=True)
class SourceFile:
    """A file or an object.

    - `uri` names it; a local file has a URI, too.
    - `place` tells apart files that may have the same name one after the other.
    - `stamp` changes when it is written to.
    """

    file: LocalFile | StoredFile
    uri: str
    size_bytes: int
    place: str
    stamp: str

    def head(self, size_bytes: int = HEAD_BYTES) -> bytes:
        """Return the first bytes. Raises the storage's errors, `InvalidArgument` for a file that can't be opened."""
        return self.part(0, size_bytes)

    def part(self, position: int, length: int) -> bytes:
        """Return `length` bytes from `position` on, fewer at the end. Raises as `head`."""
        with self.file.ranges() as handle:
            handle.seek(position)
            return handle.read(min(length, max(0, self.size_bytes - position)))

    def etag(self, head: bytes) -> str:
        """Return what identifies the content beside its size; `head` are the first bytes."""
        return f"{self.stamp}-{crc32(head[:HEAD_BYTES]):08x}"

    def is_same(self, size_bytes: int, etag: str) -> bool:
        """Return whether the file had this size and identity, by its stamp."""
        return self.size_bytes == size_bytes and etag.rpartition("-")[0] == self.stamp


def local_file(path: Path) -> SourceFile:
    """Return a local file. Raises `InvalidArgument` if it can't be examined, or if its name is not UTF-8."""
    try:
        status = path.stat()
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from error
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{path}: the name is not UTF-8, so no URI can name the file: rename it") from error
    place = _place_of(status)
    return SourceFile(PinnedFile(path, place), path.as_uri(), status.st_size, place, f"{place}-{status.st_mtime_ns}")


def stored_file(file: StoredFile, modified_ms: int) -> SourceFile:
    """Return an object of a storage."""
    return SourceFile(file, file.uri, file.size_bytes, file.uri, str(modified_ms))


def as_it_is(file: LocalFile | StoredFile) -> SourceFile:
    """Return a file as it is now. Raises `InvalidArgument`, `ObjectNotFound`, the storage's errors."""
    if isinstance(file, LocalFile):
        return local_file(file.path)
    info = file.storage.head(file.name)
    return stored_file(replace(file, size_bytes=info.size_bytes), info.modified_ms)


class LinkedFiles:
    """Opens files by the URIs of their segments, without a request. Threads: any. Close it to close the storages.

    `opened` opens a storage by its URI; None: by the configuration.
    """

    def __init__(self, config: IndexConfig, opened: Callable[[str], Storage] | None = None) -> None:
        self._config = config
        self._opened = opened or partial(config.open_storage, any_names=True)
        self._lock = threading.Lock()
        self._storages: dict[str, Storage] = {}

    def file(self, uri: str, size_bytes: int) -> LocalFile | StoredFile:
        """Return the file at a URI as one of `size_bytes`, whether it is there or not. Raises `ConfigError`."""
        if (path := local_path(uri)) is not None:
            return LocalFile(path)
        place, mark, parameters = beside(uri, self._config.storage).partition("?")
        scheme, separator, rest = place.partition("://")
        folder, _, name = rest.partition("/") if scheme in _BUCKETS else rest.rpartition("/")
        return StoredFile(
            uri, self._storage(f"{scheme}{separator}{folder}{mark}{parameters}"), unquote(name), size_bytes
        )

    def _storage(self, uri: str) -> Storage:
        with self._lock:
            if (storage := self._storages.get(uri)) is None:
                storage = self._storages[uri] = MeteredStorage(self._opened(uri), self._config.prices)
            return storage

    def close(self) -> None:
        """Close the storages. Idempotent."""
        with self._lock:
            storages, self._storages = self._storages, {}
        for storage in storages.values():
            storage.close()


@contextlib.contextmanager
def reopened(uri: str, config: IndexConfig) -> Iterator[SourceFile]:
    """Yield the file at the URI of a segment as it is now. Raises as `as_it_is`."""
    with contextlib.closing(LinkedFiles(config)) as files:
        yield as_it_is(files.file(uri, 0))


@contextlib.contextmanager
def listed_files(sources: Sequence[str], config: IndexConfig, *, may_lack: bool = False) -> Iterator[list[SourceFile]]:
    """Yield the files of sources, each once, sorted by URI. Their storages are open within the block.

    Raises `InvalidArgument` for a source without a file that has data, unless it `may_lack` files, or is a local file
    beside sources with data; for the folder of a table, or a local folder or glob within one; the storage's errors.
    """
    with contextlib.ExitStack() as stack:
        files_by_uri, empty = dict[str, SourceFile](), list[str]()
        for source in sources:
            path = local_path(source)
            files = _local(path, source, may_lack=may_lack) if path is not None else _stored(stack, source, config)
            if not files and path is not None and path.is_file():
                empty.append(source)  # perhaps of a glob that the shell expanded
            elif not files and not may_lack:
                raise InvalidArgument(f"{source}: no file that has data; names that begin with . or _ are left out")
            files_by_uri.update((each.uri, each) for each in files)
        if empty and not files_by_uri and not may_lack:
            raise InvalidArgument(f"{empty[0]}: no file that has data")
        yield [files_by_uri[uri] for uri in sorted(files_by_uri)]


def check_exists(source: str) -> None:
    """Raise `InvalidArgument` if a source is the path of no file or folder, and no glob."""
    path = local_path(source)
    if path is not None and not path.exists() and not _WILD.search(str(path)) and "?" not in str(path):
        raise InvalidArgument(f"{path}: No such file or directory")


def _local(path: Path, source: str, *, may_lack: bool = False) -> list[SourceFile]:
    if path.is_file():
        return [each for each in _there([path], may_lack=may_lack) if each.size_bytes]
    if path.is_dir():
        paths = list(_below(path))
        _check_no_table(source, (each.relative_to(path).as_posix() for each in paths))
        check_no_tables(path.parents)
        paths = [each for each in paths if not _is_hidden(each.relative_to(path).as_posix())]
    else:
        if not may_lack:
            check_exists(source)
        _check_readable(path)
        # not `Path.glob`, whose ** at the end finds folders only
        names = filter(partial(_names, str(path)), glob.iglob(str(path), recursive=True))  # noqa: PTH207
        paths = [Path(name) for name in names]
        check_no_tables({folder for each in paths for folder in each.parents})
    return [each for each in _there(filter(Path.is_file, paths), may_lack=may_lack) if each.size_bytes]


def _below(folder: Path) -> Iterator[Path]:
    """Yield the paths of the files below a folder. Raises `InvalidArgument` for a folder that can't be read."""

    def refuse(error: OSError) -> None:
        raise InvalidArgument(f"{error.filename}: {error.strerror}") from error

    for above, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(above) / name for name in names)


def _check_readable(pattern: Path) -> None:
    """Raise `InvalidArgument` for a folder that a glob must look into and can't. `glob` passes it silently."""
    parts = pattern.parts
    wild = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    for at in range(wild, len(parts)):
        for folder in glob.iglob(str(Path(*parts[:at])), recursive=True):  # noqa: PTH207
            if not os.path.isdir(folder):  # noqa: PTH112 - `Path.is_dir` raises for a folder above that can't be read
                continue
            if parts[at] == "**":
                for _ in _below(Path(folder)):
                    pass
                continue
            try:
                os.scandir(folder).close()
                os.stat(f"{folder}/.")  # noqa: PTH116 - raises if the folder's files can't be reached
            except OSError as error:
                raise InvalidArgument(f"{folder}: {error.strerror}") from error


def _there(paths: Iterable[Path], *, may_lack: bool) -> Iterator[SourceFile]:
    """Yield the local files. One that was deleted meanwhile raises `InvalidArgument`, unless it `may_lack`."""
    for path in paths:
        try:
            yield local_file(path)
        except InvalidArgument:
            if not may_lack or path.exists():
                raise


def _names(pattern: str, name: str) -> bool:
    """Return whether a glob names a file, which is hidden only if the glob says so."""
    return not _is_hidden(name.rpartition("/")[2]) or _is_hidden(pattern.rpartition("/")[2])


def _is_hidden(name: str) -> bool:
    # `_day=1` is a partition
    return any(part.startswith(_HIDDEN) and not (part[0] == "_" and "=" in part) for part in name.split("/"))


def _check_no_table(source: str, names: Iterable[str]) -> None:
    if (folder := table_folder(names)) is not None:
        raise table_error(source, folder)


def _stored(stack: contextlib.ExitStack, source: str, config: IndexConfig) -> list[SourceFile]:
    source = beside(source, config.storage)
    place, mark, parameters = source.partition("?")
    wild = _WILD.search(place)
    if wild is None and not place.endswith("/"):
        with contextlib.suppress(InvalidArgument):
            opened = stack.enter_context(opened_place(source, config))
            assert isinstance(opened, StoredFile)
            return [stored_file(opened, opened.storage.head(opened.name).modified_ms)]
    folder, _, rest = (place if wild is None else place[: wild.start()]).rpartition("/")
    if folder.endswith(("/", ":")):  # the bucket alone
        folder, rest = place, ""
    for uri in readings(folder):
        storage = stack.enter_context(contextlib.closing(config.open_storage(uri + mark + parameters, any_names=True)))
        infos = list(storage.list(unquote(rest)))
        _check_no_table(place, (info.name for info in infos))
        pattern = None if wild is None else _pattern(place[len(folder) + 1 :])
        if wild is None and rest and any(info.name.startswith(f"{rest}/") for info in infos):
            # a folder, not all that begins with its name
            infos = [info for info in infos if info.name.startswith(f"{rest}/")]
        files = [
            stored_file(
                StoredFile(quote(f"{unquote(uri)}/{info.name}", safe=":/=+@"), storage, info.name, info.size_bytes),
                info.modified_ms,
            )
            for info in infos
            if info.size_bytes
            and (
                not _is_hidden(info.name)
                if pattern is None
                else pattern.fullmatch(info.name) and _names(place, info.name)
            )
        ]
        if files:
            return files
    return []


def _pattern(text: str) -> re.Pattern[str]:
    """Return the regular expression of a glob: ``**`` is any number of folders."""
    parts = re.split(r"(\*\*/|\*\*|\*|\[[^\]]+\])", text)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    written = [part if part.startswith("[") else known.get(part) or re.escape(part) for part in parts]
    return re.compile("".join(written), re.DOTALL)
