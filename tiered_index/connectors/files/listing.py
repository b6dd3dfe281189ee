"""Lists the files that sources name: files, folders, globs and prefixes, on the local disk and in storages. One thread.

Each file has a stamp: its ETag, or its place and its time of change. A file with the same stamp and size is not read.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote

from tiered_index.base.locks import call_lock
from tiered_index.config import IndexConfig
from tiered_index.connectors.files.globs import Glob, is_hidden, wildcard_at
from tiered_index.connectors.files.rows.places import (
    LocalFile,
    StoredFile,
    local_path,
    opened_place,
    readings,
    split_object,
)
from tiered_index.connectors.files.table_folders import check_no_tables, table_error, table_folder
from tiered_index.errors import InvalidArgument
from tiered_index.storage.base import ObjectInfo, Storage, list_whole
from tiered_index.storage.buckets import NotListable
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import beside, split_parameters

HEAD_BYTES = 64 << 10
"""The first bytes of a file, which show its form."""


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
    - `stamp` changes when it is written to. It may change without that, so it proves only that a file is the same.
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
            try:
                handle.seek(position)
                return handle.read(min(length, max(0, self.size_bytes - position)))
            except OSError as error:
                raise InvalidArgument(f"{self.uri} can't be read: {error.strerror}") from error

    def is_same(self, size_bytes: int, stamp: str) -> bool:
        """Return whether the file had this size and this stamp: then it was not written to since then."""
        return self.size_bytes == size_bytes and self.stamp == stamp


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


def stored_file(file: StoredFile, info: ObjectInfo) -> SourceFile:
    """Return an object of a storage. An ETag says more than a time: the same bytes that are put again may have it."""
    stamp = str(info.modified_ms) if info.etag is None else info.etag
    return SourceFile(replace(file, size_bytes=info.size_bytes), file.uri, info.size_bytes, file.uri, stamp)


def as_it_is(file: LocalFile | StoredFile) -> SourceFile:
    """Return a file as it is now. Raises `InvalidArgument`, `ObjectNotFound`, the storage's errors."""
    if isinstance(file, LocalFile):
        return local_file(file.path)
    return stored_file(file, file.storage.head(file.name))


def is_listed(listed: SourceFile) -> bool:
    """Return whether a storage that does not have an object still lists it. Raises the storage's errors."""
    file = listed.file
    return isinstance(file, StoredFile) and any(info.name == file.name for info in file.storage.list(file.name))


class LinkedFiles:
    """Opens files by the URIs of their segments, without a request. Threads: any. Close it to close the storages.

    `opened` opens a storage by its URI; None: by the configuration.
    """

    def __init__(self, config: IndexConfig, opened: Callable[[str], Storage] | None = None) -> None:
        self._config = config
        self._opened = opened or partial(config.open_storage, any_names=True)
        self._lock = call_lock()
        self._storages: dict[str, Storage] = {}

    def file(self, uri: str, size_bytes: int) -> LocalFile | StoredFile:
        """Return the file at a URI as one of `size_bytes`, whether it is there or not. Raises `ConfigError`."""
        if (path := local_path(uri)) is not None:
            return LocalFile(path)
        place, mark, parameters = beside(uri, self._config.storage).partition("?")
        folder, name = split_object(place)
        return StoredFile(uri, self._storage(folder + mark + parameters), unquote(name), size_bytes)

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


@dataclass
class Unlisted:
    """What sources have beside the files that are listed.

    - `empty`: the sources without a file that has data.
    - `missing`: those of them that are the path of no file or folder.
    - `vanished`: the number of files that were deleted while they were listed.
    - `unnamed`: the local files that no URI can name, and the sources that can't be listed, with the reason.
    """

    empty: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    vanished: int = 0
    unnamed: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def listed_files(
    sources: Sequence[str], config: IndexConfig, *, may_lack: bool = False, unlisted: Unlisted | None = None
) -> Iterator[list[SourceFile]]:
    """Yield the files of sources, each once, sorted by URI. Their storages are open within the block.

    `unlisted` gets what is left out. Raises `InvalidArgument` if no source has a file that has data, unless they
    `may_lack` files; if all are local paths that are not there; for the folder of a table, or a local folder or glob
    within one; without `unlisted` for a file that no URI can name; the storage's errors.
    """
    with contextlib.ExitStack() as stack:
        files_by_uri, left_out = dict[str, SourceFile](), Unlisted(missing=missing_paths(sources, may_lack=may_lack))
        refusal: NotListable | None = None
        for source in sources:
            path = local_path(source)
            try:
                files = _stored(stack, source, config) if path is None else _local(path, source, left_out)
            except NotListable as error:
                left_out.unnamed[source] = str(error)
                refusal = refusal or error
                continue
            if not files:
                left_out.empty.append(source)
            files_by_uri.update((each.uri, each) for each in files)
        if unlisted is not None:
            unlisted.empty, unlisted.missing = left_out.empty, left_out.missing
            unlisted.vanished, unlisted.unnamed = left_out.vanished, left_out.unnamed
        if left_out.unnamed and (unlisted is None or not files_by_uri):
            if refusal is not None:
                raise refusal
            raise InvalidArgument(next(iter(left_out.unnamed.values())))
        if left_out.empty and not files_by_uri and not may_lack:
            path, hidden = local_path(left_out.empty[0]), "; names that begin with . or _ are left out"
            is_file = path is not None and path.is_file()
            raise InvalidArgument(f"{left_out.empty[0]}: no file that has data{'' if is_file else hidden}")
        yield [files_by_uri[uri] for uri in sorted(files_by_uri)]


def missing_paths(sources: Sequence[str], *, may_lack: bool = False) -> list[str]:
    """Return the sources that are the path of no file or folder, and no glob.

    Raises `InvalidArgument` if no other source is given, unless they `may_lack` files.
    """
    paths = [(source, local_path(source)) for source in sources if wildcard_at(source) is None]
    missing = [(source, path) for source, path in paths if path is not None and not path.exists()]
    if missing and len(missing) == len(sources) and not may_lack:
        raise InvalidArgument(f"{missing[0][1]}: No such file or directory")
    return [source for source, _ in missing]


def _local(path: Path, source: str, left_out: Unlisted) -> list[SourceFile]:
    folders = set[Path]()
    if path.is_file():
        return [each for each in _there([path], left_out) if each.size_bytes]
    if path.is_dir():
        glob, folders = Glob.below(path), {path}
    else:
        glob = _local_glob(path, source)
    paths = list(glob.paths())
    folders |= {each.parent for each in paths}
    check_no_tables({above for folder in folders for above in (folder, *folder.parents)})
    return [each for each in _there(paths, left_out) if each.size_bytes]


def _local_glob(path: Path, source: str) -> Glob:
    """Return the glob of a path, or of a `file://` URI, whose escapes are no wildcards."""
    _, separator, rest = source.partition("://")
    if not separator:
        return Glob.of(str(path))
    names = rest.partition("/")[2].split("/")
    return Glob.of("/".join(["", *(name for name in names if name not in {"", "."})]), is_escaped=True)


def _there(paths: Iterable[Path], left_out: Unlisted) -> Iterator[SourceFile]:
    """Yield the local files that are there and that a URI can name."""
    for path in paths:
        try:
            yield local_file(path)
        except InvalidArgument as error:
            if not isinstance(error.__cause__, OSError):
                left_out.unnamed[str(path)] = str(error)
            elif isinstance(error.__cause__, FileNotFoundError):
                left_out.vanished += 1
            else:
                raise


def _stored(stack: contextlib.ExitStack, source: str, config: IndexConfig) -> list[SourceFile]:
    place, parameters = split_parameters(beside(source, config.storage))
    wild = wildcard_at(place)
    if wild is None and not place.endswith("/"):
        with contextlib.suppress(InvalidArgument):
            opened = stack.enter_context(opened_place(source, config))
            assert isinstance(opened, StoredFile)
            return [stored_file(opened, opened.storage.head(opened.name))]
    for reading in readings(place):
        named = reading[: wildcard_at(reading)]
        folder = split_object(named)[0] if named.count("/") > len("//") else named
        pattern = reading[len(folder) + 1 :]
        glob = None if wild is None else Glob.of(pattern, is_escaped=True)
        storage = config.open_storage(folder + parameters, any_names=True)
        stack.enter_context(contextlib.closing(storage))
        infos = list(list_whole(storage, unquote(pattern[: wildcard_at(pattern)])))
        if (metadata := table_folder(info.name for info in infos)) is not None:
            raise table_error(place, metadata)
        files = [
            stored_file(
                StoredFile(quote(f"{unquote(folder)}/{info.name}", safe=":/=+@"), storage, info.name, info.size_bytes),
                info,
            )
            for info in _named(infos, unquote(pattern), glob)
            if info.size_bytes
        ]
        if files:
            return files
    return []


def _named(infos: Sequence[ObjectInfo], name: str, glob: Glob | None) -> Sequence[ObjectInfo]:
    """Return the objects that a source names: one object, a folder, a prefix or a glob."""
    if glob and (named := [info for info in infos if info.name == name]):
        return named
    # a folder, not all that begins with its name
    below = [info for info in infos if name and name[-1] != "/" and info.name.startswith(f"{name}/")]
    if glob and not below:
        return [info for info in infos if glob.matches(info.name)]
    # the source names the part that it ends in itself
    is_folder = not name or name.endswith("/")
    parts = ((info, info.name[len(name) :]) for info in below or infos)
    return [info for info, part in parts if not is_hidden(part if is_folder else part.partition("/")[2])]
