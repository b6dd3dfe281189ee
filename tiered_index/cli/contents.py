"""One index file for commands: its bytes, on the local disk or in a storage, and what each kind of file holds.

Compacted files and shards have a trailer, unsealed files a journal, RocketMQ's own neither. Each kind tells what it is
(`describe`), yields its items, verified by trailer or journal where it has one (`items`), and finds its defects
(`findings`). Bytes are read by ranges. One thread; memory: a piece of items at a time, for unsealed files the whole
file's map.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tiered_index.cli.session import Session
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    ObjectNotFound,
    StorageMisconfigured,
    TieredIndexError,
)
from tiered_index.format.foreign import HEAD_SIZE, ForeignCompacted, ForeignUnsealed, Read, recognise
from tiered_index.format.journal import Journal, parse_journal
from tiered_index.format.layout import HEADER_SIZE, SLOT_SIZE, Header, Layout, read_header
from tiered_index.format.names import INDEX_SUFFIX, JOURNAL_SUFFIX, STATES, file_id_of
from tiered_index.format.trailer import TAIL_SIZE, Tail, Trailer, parse_trailer
from tiered_index.format.verify import Finding, WindowedRead, verify_compacted, verify_shard
from tiered_index.service.files.compacted import read_runs
from tiered_index.service.files.unsealed import verified_entries
from tiered_index.service.root.root import disk_error
from tiered_index.storage.base import ByteRange, Storage, check_name
from tiered_index.storage.disk import absolute_path
from tiered_index.storage.opening import open_storage

__all__ = ["Array", "Contents", "FileBytes", "contents_of", "opened"]


@dataclass(frozen=True)
class FileBytes:
    """One file: `name` is its path or its object's name; `path` is None for an object.

    `read` returns exactly what is asked for.
    """

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
        yield _path_bytes(path)
        return
    if config.storage is None:
        raise InvalidArgument(f"no file {file} (an object's name needs --storage, a file's id --root)")
    with contextlib.closing(open_storage(config.storage, options=config.s3)) as storage:
        yield _object_bytes(storage, check_name(file))


def _is_there(path: Path) -> bool:
    """Return whether a file is called so; the name of an object may be one that no file can have."""
    try:
        return absolute_path(path).exists()
    except StorageMisconfigured:
        raise
    except ConfigError:
        return False


def _path_bytes(path: Path) -> FileBytes:
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


def _object_bytes(storage: Storage, name: str) -> FileBytes:
    """Return the bytes of an object."""
    try:
        size = storage.head(name).size_bytes
    except ObjectNotFound as error:
        raise InvalidArgument(f"neither a local file nor an object in {storage.uri}: {name}") from error
    return FileBytes(
        name, size, lambda position, length: storage.get_range(name, position, min(length, size - position))
    )


Array = npt.NDArray[Any]
_PIECE_RUNS = 64
_PIECE_ITEMS = 1 << 16


class Contents(Protocol):
    """One file, opened.

    `begin_ms` is what its items' `time_diff_s` count from; `checksummed`: whether its bytes prove themselves.
    """

    layout: Layout
    begin_ms: int
    topics: list[tuple[int, str]]
    checksummed: bool

    def describe(self) -> dict[str, Any]: ...

    def items(self) -> Iterator[Array]: ...

    def findings(self) -> list[Finding]: ...


def contents_of(file: FileBytes, slots: int | None = None, items: int | None = None) -> Contents:
    """Return what is in `file`; `slots` and `items` are the geometry of an unsealed file without a journal.

    Raises `CorruptFile`, `InvalidArgument` where the geometry is needed.
    """
    kind = recognise(
        file.read(0, min(HEAD_SIZE, file.size_bytes)),
        file.read(max(0, file.size_bytes - TAIL_SIZE), min(TAIL_SIZE, file.size_bytes)),
        file.size_bytes,
        file.name,
    )
    if kind.state == "shard":
        return _Shard(file)
    if kind.has_trailer:
        return _Compacted(file)
    if kind.state == "compacted":
        return _Bare(file)
    journal_path = file.path.with_suffix(JOURNAL_SUFFIX) if file.path is not None else None
    if journal_path is not None and journal_path.exists():
        journal = parse_journal(journal_path.read_bytes(), str(journal_path))
        if journal is None:
            raise CorruptFile(str(journal_path), "journal without its first record: the file beside it was never begun")
        return _Unsealed(file, journal)
    if slots is None or items is None:
        raise InvalidArgument(f"{file.name} is unsealed and has no journal: give its geometry with --slots and --items")
    return _BareUnsealed(file, Layout(kind.preset, kind.preset.schema, slots, items))


def _describe_header(header: Header) -> dict[str, Any]:
    return {**header._asdict(), "magic": f"{header.magic:#010x}"}


def _describe_layout(layout: Layout) -> dict[str, Any]:
    schema = layout.schema
    return {
        "preset": layout.preset.name,
        "schema": schema.name,
        "slots": layout.slots,
        "items": layout.items,
        "item_bytes": schema.item.itemsize,
    }


class _Compacted:
    """A compacted file with a trailer: every array has its CRC32 in the directory."""

    checksummed = True
    _kind = "compacted"

    def __init__(self, file: FileBytes) -> None:
        self._file = file
        self.file = file.name
        size = file.size_bytes
        tail = Tail.decode(file.read(size - TAIL_SIZE, TAIL_SIZE), file.name, size)
        self._trailer: Trailer = parse_trailer(
            file.read(tail.directory_position, size - tail.directory_position), file.name, size
        )
        self._meta = self._trailer.metadata
        self.layout = self._meta.layout
        self.begin_ms = self._meta.begin_ms // 1000 * 1000
        self.topics = list(self._meta.topics)

    def trailer(self) -> Trailer:
        return self._trailer

    def read(self, ranges: list[ByteRange]) -> list[bytes | memoryview]:
        return [self._file.read(r.start, r.length) for r in ranges]

    def describe(self) -> dict[str, Any]:
        header = read_header(self._file.read(0, HEADER_SIZE), self.file)
        groups, meta, tail = self._trailer.directory.groups, self._meta, self._trailer.tail
        used = groups["length"][groups["count"] > 0]
        return {
            "kind": self._kind,
            "header": _describe_header(header),
            "layout": _describe_layout(self.layout),
            "metadata": {
                "file_id": meta.file_id,
                "count": meta.count,
                "begin_ms": meta.second_min * 1000,
                "end_ms": meta.second_max * 1000,
                "lane": meta.lane,
                "offset_space": meta.offset_space,
                "writer": meta.writer,
                "slots_in_use": meta.slots_in_use,
                "slot_base": meta.slot_base,
                "slot_range": list(meta.slot_range),
                "topics": [list(pair) for pair in meta.topics],
                "source_positions": meta.source_positions,
                **meta.more,
            },
            "trailer": {
                "position": tail.position,
                "filter_bytes": tail.filter_length,
                "directory_bytes": tail.directory_length,
                "metadata_bytes": tail.metadata_length,
            },
            "directory": {
                "groups": len(groups),
                "groups_in_use": len(used),
                "blocks": len(self._trailer.directory.blocks),
                "group_bytes_median": int(np.median(used)) if len(used) else 0,
                "group_bytes_max": int(used.max()) if len(used) else 0,
                **self._longest_slot(),
            },
        }

    def _longest_slot(self) -> dict[str, int]:
        table = np.frombuffer(self._file.read(HEADER_SIZE, SLOT_SIZE * self.layout.slots), ">i4").reshape(-1, 2)
        lengths = table[:, 1] // self.layout.schema.item.itemsize
        return {"longest_slot_items": int(lengths.max()), "longest_slot": int(lengths.argmax())}

    def items(self) -> Iterator[Array]:
        runs = self._trailer.directory.all_runs()
        for start in range(0, len(runs), _PIECE_RUNS):
            for data in read_runs(self, runs[start : start + _PIECE_RUNS]):
                yield np.frombuffer(data, self.layout.schema.item)

    def findings(self) -> list[Finding]:
        return verify_compacted(self._forward_read(), self._file.size_bytes, self.file)

    def _forward_read(self) -> Read:
        return self._file.read if self._file.map is not None else WindowedRead(self._file.read, self._file.size_bytes)


class _Shard(_Compacted):
    """A shard of a window table: it has no slot table, its directory alone says where a slot lies."""

    _kind = "shard"

    def _longest_slot(self) -> dict[str, int]:
        return {}

    def findings(self) -> list[Finding]:
        return verify_shard(self._forward_read(), self._file.size_bytes, self.file)


class _Unsealed:
    """An unsealed file beside its journal, which has a CRC32 of every batch."""

    checksummed = True

    def __init__(self, file: FileBytes, journal: Journal) -> None:
        if file.map is None:
            raise CorruptFile(file.name, "empty file", offset=0)
        self._file, self._journal, self._map = file, journal, file.map
        self.layout = journal.layout
        self.begin_ms = journal.begin_ms // 1000 * 1000
        self.topics = sorted(journal.topics.items())

    def describe(self) -> dict[str, Any]:
        journal = self._journal
        begin_s, end_s = journal.seconds or (None, None)
        return {
            "kind": "unsealed",
            "header": _describe_header(read_header(self._file.read(0, HEADER_SIZE), self._file.name)),
            "layout": _describe_layout(self.layout),
            "journal": {
                "file_id": journal.file_id,
                "count": journal.count,
                "batches": len(journal.batches),
                "sealed": journal.sealed,
                "begin_ms": begin_s * 1000 if begin_s is not None else None,
                "end_ms": end_s * 1000 if end_s is not None else None,
                "lane": journal.lane,
                "offset_space": journal.offset_space,
                "sequence": journal.sequence,
                "created_ms": journal.created_ms,
                "topics": [list(pair) for pair in self.topics],
                "source_positions": journal.positions,
            },
        }

    def items(self) -> Iterator[Array]:
        entries = verified_entries(self._map, self._journal, self._file.name)
        for start in range(0, len(entries), _PIECE_ITEMS):
            yield entries[start : start + _PIECE_ITEMS]

    def findings(self) -> list[Finding]:
        try:
            verified_entries(self._map, self._journal, self._file.name)
        except CorruptFile as error:
            return [Finding("entries", str(error), error.offset)]
        return []


class _Bare:
    """A compacted RocketMQ file without a trailer: its structure can be checked, its bytes have no checksum."""

    checksummed = False

    def __init__(self, file: FileBytes) -> None:
        self._file = file
        self._read = WindowedRead(file.read, file.size_bytes)
        self._bare = ForeignCompacted.open(file.read, file.size_bytes, file.name)
        self.layout, self.begin_ms = self._bare.layout, self._bare.header.begin_ms
        self.topics: list[tuple[int, str]] = []

    def describe(self) -> dict[str, Any]:
        bare = self._bare
        return {
            "kind": "compacted without trailer",
            "header": _describe_header(bare.header),
            "layout": _describe_layout(self.layout),
            "metadata": {"count": bare.count},
        }

    def items(self) -> Iterator[Array]:
        return self._bare.items(self._read)

    def findings(self) -> list[Finding]:
        return _structure(self.items())


class _BareUnsealed:
    """An unsealed file without a journal, whose geometry the caller knows."""

    checksummed = False

    def __init__(self, file: FileBytes, layout: Layout) -> None:
        data: Any = file.map if file.map is not None else file.read(0, file.size_bytes)
        self._table = ForeignUnsealed(data, layout, file.name)
        self.layout, self.begin_ms = layout, self._table.header.begin_ms
        self.topics: list[tuple[int, str]] = []

    def describe(self) -> dict[str, Any]:
        begin_ms, end_ms = self._table.interval_ms or (None, None)
        return {
            "kind": "unsealed without journal",
            "header": _describe_header(self._table.header),
            "layout": _describe_layout(self.layout),
            "metadata": {"count": self._table.count, "begin_ms": begin_ms, "end_ms": end_ms},
        }

    def items(self) -> Iterator[Array]:
        return self._table.items()

    def findings(self) -> list[Finding]:
        return _structure(self.items())


def _structure(pieces: Iterator[Array]) -> list[Finding]:
    """Return what reading all items of a file without checksums finds."""
    try:
        for _ in pieces:
            pass
    except TieredIndexError as error:
        return [Finding("structure", str(error))]
    return []
