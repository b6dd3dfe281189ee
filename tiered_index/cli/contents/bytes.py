"""The bytes of one file: on the local disk or in a storage, read by ranges. One thread."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiered_index.cli.session import Session
from tiered_index.errors import ConfigError, InvalidArgument, ObjectNotFound, StorageMisconfigured
from tiered_index.format.foreign import Read
from tiered_index.format.names import INDEX_SUFFIX, JOURNAL_SUFFIX, STATES, file_id_of
from tiered_index.service.root.root import disk_error
from tiered_index.storage.base import Storage, check_name
from tiered_index.storage.disk import absolute_path
from tiered_index.storage.opening import open_storage

__all__ = ["FileBytes", "object_bytes", "opened", "path_bytes"]


@dataclass(frozen=True)
class FileBytes:
    """One file: `name` is its path or its object's name; `path` is None for an object. `read` returns exactly what is asked for."""

    name: str
    size_bytes: int
    read: Read
    path: Path | None = None
    map: mmap.mmap | None = None


@contextlib.contextmanager
def opened(session: Session, file: str) -> Iterator[FileBytes]:
    """Yield the bytes of `file`: a path, a file id in the root, or an object's name in the storage.

    Raises `InvalidArgument` where there is none, `StorageUnavailable`.
    """
    config = session.config()
    path = Path(file)
    if config.root is not None and file_id_of(file + INDEX_SUFFIX) is not None and not _is_there(path):
        found = [config.root / state / (file + INDEX_SUFFIX) for state in reversed(STATES)]
        path = next((candidate for candidate in found if _is_there(candidate)), path)
    if path.name.endswith(JOURNAL_SUFFIX):
        path = path.with_suffix(INDEX_SUFFIX)
    if _is_there(path):
        if path.is_dir():
            raise InvalidArgument(f"{path} is a folder: give a file in it")
        yield path_bytes(path)
        return
    if config.storage is None:
        raise InvalidArgument(f"no file {file} (an object's name needs --storage, a file's id --root)")
    with contextlib.closing(open_storage(config.storage, options=config.s3)) as storage:
        yield object_bytes(storage, check_name(file))


def _is_there(path: Path) -> bool:
    """Return whether a file is called so; the name of an object may be one that no file can have."""
    try:
        return absolute_path(path).exists()
    except StorageMisconfigured:
        raise
    except ConfigError:
        return False


def path_bytes(path: Path) -> FileBytes:
    """Return the bytes of a local file, mapped."""
    try:
        with path.open("rb") as handle:
            size = path.stat().st_size
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else None
    except OSError as error:
        raise disk_error(error, f"reading {path}") from error

    def read(position: int, length: int) -> bytes:
        return data[position : position + length] if data is not None else b""

    return FileBytes(str(path), size, read, path, data)


def object_bytes(storage: Storage, name: str) -> FileBytes:
    """Return the bytes of an object."""
    try:
        size = storage.head(name).size_bytes
    except ObjectNotFound as error:
        raise InvalidArgument(f"neither a local file nor an object in {storage.uri}: {name}") from error
    return FileBytes(name, size, lambda position, length: storage.get_range(name, position, min(length, size - position)))
