"""Reads one index file for commands, from the local disk or a storage, by its kind.

Compacted files and shards have a trailer, unsealed files a journal, RocketMQ's own files neither. Bytes are read by
ranges. One thread; memory: a piece of items at a time; unsealed files are mapped whole.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.cli.session import Session, open_stored_index, storage_uri
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    ObjectNotFound,
    StorageMisconfigured,
    TieredIndexError,
)
from tiered_index.format.foreign import HEAD_SIZE, ForeignCompacted, ForeignUnsealed, Read, read_exactly, recognise
from tiered_index.format.journal import Journal, parse_journal
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.layout import HEADER_SIZE, SLOT_SIZE, Layout, read_header
from tiered_index.format.names import INDEX_SUFFIX, JOURNAL_SUFFIX, SHORT_ID, STATES, file_id_of
from tiered_index.format.trailer import TAIL_SIZE, Tail, Trailer, parse_trailer
from tiered_index.format.verify import Finding, WindowedRead, verify_compacted, verify_shard
from tiered_index.service.read.files.cold_path import missing_error
from tiered_index.service.read.files.spans import check_run
from tiered_index.service.read.files.unsealed import verified_entries
from tiered_index.service.root import disk_error
from tiered_index.storage.base import Storage, check_name
from tiered_index.storage.disk import absolute_path, map_file

# The id of a file or a window table, or the end of one
_ID = re.compile(rf"(?:[0-9]{{15}}-)?[0-9a-f]{{{SHORT_ID},16}}")


@dataclass(frozen=True)
class OpenedFile:
    """One file: `name` is its path or its object's name; `path` and `map` are None for an object."""

    name: str
    size_bytes: int
    read: Read
    path: Path | None = None
    map: mmap.mmap | None = None


@contextlib.contextmanager
def opened(session: Session, file: str) -> Iterator[OpenedFile]:
    """Yield the bytes of a path, a file id or an object's name.

    Raises `InvalidArgument`, `StorageUnavailable`, and `CorruptFile` if the object of an id is missing.
    """
    config, uri = session.config(), None
    with contextlib.suppress(ConfigError):
        uri = storage_uri(config)
    named, path = file, Path(file)
    if _ID.fullmatch(file) and not _is_there(path):
        file = _place_of(config, uri, file)
        path = Path(file)
    if path.name.endswith(JOURNAL_SUFFIX):
        path = path.with_suffix(INDEX_SUFFIX)
    if _is_there(path):
        if path.is_dir():
            raise InvalidArgument(f"{path} is a folder: give a file in it")
        yield _path_bytes(path)
        return
    if uri is None:
        raise InvalidArgument(f"no file {file} (an object's name needs --storage, a file's id --storage or --root)")
    with contextlib.closing(config.open_storage(uri)) as storage:
        yield _object_bytes(storage, check_name(file), is_in_log=file != named)


def _place_of(config: IndexConfig, uri: str | None, file: str) -> str:
    """Return the path or the object's name of a file id, or of the end of one; `file` itself if there is none.

    Raises `InvalidArgument` for several ids or a table of several objects, and as `open_stored_index`.
    """
    places: dict[str, list[str]] = {}
    if config.root is not None:
        for folder in (config.root / state for state in STATES):
            for path in folder.glob(f"*{file}{INDEX_SUFFIX}") if _is_there(folder) else ():
                if (file_id := file_id_of(path.name)) is not None:
                    places[file_id] = [str(path)]
    if not places and uri is not None:
        with open_stored_index(config) as index:
            for stored in index.log.state.objects.values():
                file_id = stored.shard.table if stored.shard is not None else stored.file_id
                if file_id.endswith(file):
                    places.setdefault(file_id, []).append(stored.name)
    if len(places) > 1:
        raise InvalidArgument(f"{len(places)} files' ids end in {file}: give one of {', '.join(sorted(places))}")
    names = next(iter(places.values()), [file])
    if len(names) > 1:
        raise InvalidArgument(f"{file} is a table of {len(names)} objects: give one of {', '.join(sorted(names))}")
    return names[0]


def _is_there(path: Path) -> bool:
    """Return whether a file exists at `path`, which may be an object's name that no file can have."""
    try:
        return absolute_path(path).exists()
    except StorageMisconfigured:
        raise
    except ConfigError:
        return False


def _path_bytes(path: Path) -> OpenedFile:
    try:
        with path.open("rb") as handle:
            size = path.stat().st_size
            data = map_file(handle.fileno(), path.parent) if size else None
    except OSError as error:
        raise disk_error(error, f"reading {path}") from error

    def read(position: int, length: int) -> bytes:
        return data[position : position + length] if data is not None else b""

    return OpenedFile(str(path), size, read, path, data)


def _object_bytes(storage: Storage, name: str, *, is_in_log: bool) -> OpenedFile:
    try:
        size = storage.head(name).size_bytes
    except ObjectNotFound as error:
        if is_in_log:
            raise missing_error(name) from error
        raise InvalidArgument(
            f"{name} is neither a local file nor an object in {storage.uri}; `tiered-index files` lists the names"
        ) from error
    return OpenedFile(
        name, size, lambda position, length: storage.get_range(name, position, min(length, size - position))
    )


Array = npt.NDArray[Any]
_PIECE_ITEMS = 1 << 16


class Contents(ABC):
    """The contents of one file. Its items' `time_diff_s` count from `begin_ms`.

    `checksummed`: whether the file has checksums. `hash`: a text about the hash rule if the file does not state it.
    """

    kind: str
    checksummed = True
    hash: str | None = None

    def __init__(self, file: OpenedFile, layout: Layout, begin_ms: int, topics: Sequence[tuple[int, str]] = ()) -> None:
        self._file = file
        self.layout = layout
        self.begin_ms = begin_ms
        self.topics = list(topics)

    def describe(self) -> dict[str, Any]:
        """Return header, layout and metadata of the file, for JSON."""
        header, schema = read_header(self._file.read(0, HEADER_SIZE), self._file.name), self.layout.schema
        return {
            "kind": self.kind,
            "header": {**header._asdict(), "magic": f"{header.magic:#010x}"},
            "layout": {
                "preset": self.layout.preset.name,
                "hash": self.hash or self.layout.hash,
                "schema": schema.name,
                "slots": self.layout.slots,
                "items": self.layout.items,
                "item_bytes": schema.item.itemsize,
            },
            **self._details(),
        }

    @abstractmethod
    def _details(self) -> dict[str, Any]: ...

    @abstractmethod
    def items(self) -> Iterator[Array]:
        """Yield the items piece by piece; verify them if the file has checksums. Raises `CorruptFile`."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Return the problems of the file."""


def contents_of(file: OpenedFile, config: IndexConfig) -> Contents:
    """Return the contents of `file`; `config` has the geometry for an unsealed file without a journal.

    Raises `CorruptFile`, and `InvalidArgument` if that geometry is missing.
    """
    kind = recognise(
        file.read(0, min(HEAD_SIZE, file.size_bytes)),
        file.read(max(0, file.size_bytes - TAIL_SIZE), min(TAIL_SIZE, file.size_bytes)),
        file.size_bytes,
        file.name,
    )
    if kind.has_trailer:
        return _Compacted(file, is_shard=kind.state == "shard")
    if kind.state == "compacted":
        return _Foreign(file, ForeignCompacted.open(file.read, file.size_bytes, file.name))
    journal_path = file.path.with_suffix(JOURNAL_SUFFIX) if file.path is not None else None
    if journal_path is not None and journal_path.exists():
        journal = parse_journal(journal_path.read_bytes(), str(journal_path))
        if journal is None:
            raise CorruptFile(str(journal_path), "the journal has no first record: its index file was never begun")
        return _Unsealed(file, journal)
    if config.slots is None or config.items is None:
        raise InvalidArgument(
            f"{file.name} is unsealed and has no journal: give its geometry, --set slots=N --set items=N"
        )
    data: Any = file.map if file.map is not None else file.read(0, file.size_bytes)
    layout = Layout(kind.preset, kind.preset.schema, config.slots, config.items)
    return _Foreign(file, ForeignUnsealed(data, layout, file.name))


class _Compacted(Contents):
    """A compacted file or a shard of a window table: the directory of its trailer has the CRC32 of every array.

    A shard has no slot table, only its directory has the positions of slots.
    """

    def __init__(self, file: OpenedFile, *, is_shard: bool) -> None:
        self.kind = "shard" if is_shard else "compacted"
        self._verify = verify_shard if is_shard else verify_compacted
        self.file = file.name
        size = file.size_bytes
        tail = Tail.decode(file.read(size - TAIL_SIZE, TAIL_SIZE), file.name, size)
        self._trailer: Trailer = parse_trailer(
            file.read(tail.directory_position, size - tail.directory_position), file.name, size
        )
        meta = self._trailer.metadata
        super().__init__(file, meta.layout, meta.begin_ms // 1000 * 1000, meta.topics)

    def _details(self) -> dict[str, Any]:
        groups, meta, tail = self._trailer.directory.groups, self._trailer.metadata, self._trailer.tail
        used = groups["length"][groups["count"] > 0]
        plain = ("lane", "offset_space", "writer", "slots_in_use", "slot_base")
        return {
            "metadata": {
                "file_id": meta.file_id,
                "count": meta.count,
                "begin_ms": meta.second_min * 1000,
                "end_ms": meta.second_max * 1000,
                **{name: getattr(meta, name) for name in plain},
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
                **(self._longest_slot() if self.kind == "compacted" else {}),
            },
        }

    def _longest_slot(self) -> dict[str, int]:
        if self._trailer.metadata.packing is not None:  # a packed file has no slot table
            hashes = np.concatenate([normal_hashes(items["key_hash"]) for items in self.items()])
            lengths = np.bincount(self._trailer.metadata.slot_map.slots_of(hashes))
        else:
            table = np.frombuffer(self._file.read(HEADER_SIZE, SLOT_SIZE * self.layout.slots), ">i4").reshape(-1, 2)
            lengths = table[:, 1] // self.layout.schema.item.itemsize
        return {"longest_slot_items": int(lengths.max()), "longest_slot": int(lengths.argmax())}

    def items(self) -> Iterator[Array]:
        read = self._forward_read()
        for run in self._trailer.directory.all_runs():
            data = memoryview(read_exactly(read, run.offset, run.length, self.file))
            check_run(data, run, self.file)
            yield self._trailer.metadata.items_of(data, run.count, self.file)

    def findings(self) -> list[Finding]:
        return self._verify(self._forward_read(), self._file.size_bytes, self.file)

    def _forward_read(self) -> Read:
        return self._file.read if self._file.map is not None else WindowedRead(self._file.read, self._file.size_bytes)


class _Unsealed(Contents):
    """An unsealed file with its journal, which has the CRC32 of every batch."""

    kind = "unsealed"

    def __init__(self, file: OpenedFile, journal: Journal) -> None:
        if file.map is None:
            raise CorruptFile(file.name, "empty file", offset=0)
        super().__init__(file, journal.layout, journal.begin_ms // 1000 * 1000, sorted(journal.topics.items()))
        self._journal, self._map = journal, file.map

    def _details(self) -> dict[str, Any]:
        journal = self._journal
        begin_s, end_s = journal.seconds or (None, None)
        return {
            "journal": {
                **{name: getattr(journal, name) for name in ("file_id", "count", "sealed")},
                "batches": len(journal.batches),
                "begin_ms": begin_s * 1000 if begin_s is not None else None,
                "end_ms": end_s * 1000 if end_s is not None else None,
                **{name: getattr(journal, name) for name in ("lane", "offset_space", "sequence", "created_ms")},
                "topics": [list(pair) for pair in self.topics],
                "source_positions": journal.positions,
            }
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


class _Foreign(Contents):
    """A file of RocketMQ's own, without checksums: only its structure is checked. The caller gives its table."""

    checksummed = False
    hash = "abs (RocketMQ up to 5.5.0) or mask (from 5.5.1 on): the file does not say"

    def __init__(self, file: OpenedFile, table: ForeignCompacted | ForeignUnsealed) -> None:
        super().__init__(file, table.layout, table.header.begin_ms)
        self._table = table
        self.kind = "compacted without trailer" if isinstance(table, ForeignCompacted) else "unsealed without journal"

    def _details(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {"count": self._table.count}
        if isinstance(self._table, ForeignUnsealed):
            metadata["begin_ms"], metadata["end_ms"] = self._table.interval_ms or (None, None)
        return {"metadata": metadata}

    def items(self) -> Iterator[Array]:
        if isinstance(self._table, ForeignUnsealed):
            return self._table.items()
        return self._table.items(WindowedRead(self._file.read, self._file.size_bytes))

    def findings(self) -> list[Finding]:
        try:
            for _ in self.items():
                pass
        except TieredIndexError as error:
            return [Finding("structure", str(error))]
        return []
