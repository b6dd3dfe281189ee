"""Compacted files, wherever their bytes lie: on the local disk, in the storage, or in both.

A search asks the directory which ranges may hold the key, reads just those, checks each against its CRC32, and only then looks at an item.
A local copy that fails its check is passed over in favour of the storage where the file is there too.

Threads: every method from any thread. Answers are copies; the map of an unlinked file dies with its last array.
"""

from __future__ import annotations

import mmap
import threading
import zlib
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound, StorageUnavailable, TieredIndexError
from tiered_index.format.trailer import TAIL_SIZE, Metadata, Run, Tail, Trailer, parse_trailer
from tiered_index.service.batch_query import Found, QuestionBatch
from tiered_index.service.root import disk_error
from tiered_index.service.rows import Question, concatenate, select_items
from tiered_index.service.storage_log import StoredObject
from tiered_index.storage.base import ByteRange, Storage

__all__ = ["CompactedFile", "DamagedFile", "LocalBytes", "MissingObject", "StorageBytes", "open_local", "open_stored", "read_runs"]

Array = npt.NDArray[Any]
_RUNS_AT_ONCE = 512
# slot groups of a batch held in memory at a time: some 8 MiB


class MissingObject(ObjectNotFound):
    """An object that the log names is not there: it was removed by a later record, or the storage lost it."""


class _Bytes(Protocol):
    """Where a file's bytes come from."""

    file: str

    def trailer(self) -> Trailer: ...

    def read(self, ranges: list[ByteRange]) -> list[bytes | memoryview]: ...


class LocalBytes:
    """A compacted file on the local disk, mapped for reading."""

    def __init__(self, path: Path) -> None:
        self.file = str(path)
        try:
            with path.open("rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file can't be mapped
            raise CorruptFile(self.file, "empty file", offset=0) from error
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise disk_error(error, f"reading {path}") from error
        self._trailer = self._parse()

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return len(self._map)

    @property
    def data(self) -> mmap.mmap:
        """The whole file, read-only."""
        return self._map

    def trailer(self) -> Trailer:
        """Return the verified trailer."""
        return self._trailer

    def read(self, ranges: list[ByteRange]) -> list[bytes | memoryview]:
        """Return copies of the ranges."""
        return [self._map[r.start : r.start + r.length] for r in ranges]

    def _parse(self) -> Trailer:
        size = len(self._map)
        tail = Tail.decode(self._map[max(0, size - TAIL_SIZE) :], self.file, size)
        return parse_trailer(self._map[tail.directory_position :], self.file, size)


class StorageBytes:
    """A compacted file in the storage. Its directory and metadata come by one exact range, once."""

    def __init__(self, storage: Storage, stored: StoredObject) -> None:
        self.file = stored.name
        self.stored = stored
        self._storage = storage
        self._lock = threading.Lock()
        self._trailer: Trailer | None = None
        self._fetch: Future[Trailer] | None = None

    def trailer(self) -> Trailer:
        """Return the verified trailer, fetching it the first time. Raises `MissingObject`."""
        if self._trailer is not None:
            return self._trailer
        with self._lock:
            fetch, mine = self._fetch, self._fetch is None
            if fetch is None:
                fetch = self._fetch = Future()
        if mine:
            # lookups that come meanwhile wait for this one request and share its outcome, an error included
            try:
                self._trailer = self._fetch_trailer()
            except BaseException as error:
                with self._lock:
                    self._fetch = None
                fetch.set_exception(error)
                raise
            fetch.set_result(self._trailer)
        return fetch.result()

    def _fetch_trailer(self) -> Trailer:
        start = self.stored.directory_position
        data = self._get([ByteRange(start, self.stored.size_bytes - start)])[0]
        trailer = parse_trailer(data, self.file, self.stored.size_bytes)
        if trailer.metadata.file_id != self.stored.file_id or trailer.metadata.count != self.stored.count:
            raise CorruptFile(self.file, "object is not the file that the log names", expected=self.stored.file_id,
                              found=trailer.metadata.file_id)  # fmt: skip
        return trailer

    def read(self, ranges: list[ByteRange]) -> list[bytes | memoryview]:
        """Return the ranges, one request each. Raises `MissingObject`."""
        return list(self._get(ranges))

    def _get(self, ranges: list[ByteRange]) -> list[bytes]:
        try:
            return self._storage.get_ranges(self.file, ranges)
        except ObjectNotFound as error:
            raise MissingObject(self.file, self._storage.uri) from error
        except InvalidArgument as error:  # our own ranges lie within what the log says
            raise CorruptFile(self.file, f"shorter than the log says ({error})", expected=self.stored.size_bytes) from error


@dataclass
class CompactedFile:
    """A compacted file as queries see it. `local` and `stored` are its bytes; the local ones are preferred.

    `folder` is the local copy's, or None; a copy in ``uploaded`` has no `stored` only while the storage could not be asked.
    """

    file_id: str
    second_min: int
    second_max: int
    sequence: int
    count: int
    lane: str
    folder: str | None = None
    local: LocalBytes | None = None
    stored: StorageBytes | None = None

    @property
    def place(self) -> str:
        """``compacted`` (local only), ``uploaded`` (a local copy of what the storage has) or ``storage``."""
        return self.folder or "storage"

    @property
    def is_local(self) -> bool:
        """Whether a search needs no request."""
        return self.local is not None

    def search(self, question: Question) -> Array:
        """Return the rows that answer `question`, in no order."""
        if self.local is not None:
            try:
                return _search(self.local, question)
            except (CorruptFile, StorageUnavailable):
                if self.stored is None:
                    raise
        assert self.stored is not None
        return _search(self.stored, question)

    def search_many(self, batch: QuestionBatch) -> Found:
        """Return the rows that answer each question, in no order; every slot group is read and checked once."""
        if self.local is not None:
            try:
                return _search_many(self.local, batch)
            except (CorruptFile, StorageUnavailable):
                if self.stored is None:
                    raise
        assert self.stored is not None
        return _search_many(self.stored, batch)

    def metadata(self) -> Metadata:
        """Return the file's metadata."""
        source: _Bytes | None = self.local or self.stored
        assert source is not None
        return source.trailer().metadata


def _search(source: _Bytes, question: Question) -> Array:
    trailer = source.trailer()
    metadata = trailer.metadata
    layout = metadata.layout
    ids: frozenset[int] | None = None
    if metadata.topics:
        ids = frozenset(topic_id for topic_id, name in metadata.topics if name == question.topic)
        if not ids:
            return concatenate([], layout.schema)
    runs = trailer.directory.runs(question.key_hash % layout.slots, question.key_hash, question.second_min, question.second_max)
    begin_s = metadata.begin_ms // 1000
    parts = [
        select_items(np.frombuffer(data, layout.schema.item), begin_s, question, ids, layout.schema)
        for data in read_runs(source, runs)
    ]
    return concatenate(parts, layout.schema)


def _search_many(source: _Bytes, batch: QuestionBatch) -> Found:
    trailer = source.trailer()
    metadata = trailer.metadata
    layout = metadata.layout
    pairs = [(topic_id, name) for topic_id, name in metadata.topics if name in batch.topics]
    wanted = batch.overlapping(metadata.second_min, metadata.second_max)
    if metadata.topics:
        names = {name for _, name in pairs}
        here = np.array([topic in names for topic in batch.topics], bool)
        wanted = wanted[here[batch.topic_index[wanted]]] if len(here) else wanted
    runs: list[Run] = []
    if len(wanted):
        low, high = int(batch.second_min[wanted].min()), int(batch.second_max[wanted].max())
        runs = trailer.directory.runs_of(batch.key_hash[wanted] % layout.slots, low, high)
    found = [Found(np.zeros(0, np.int64), concatenate([], layout.schema))]
    begin_s = metadata.begin_ms // 1000
    for start in range(0, len(runs), _RUNS_AT_ONCE):
        data = b"".join(read_runs(source, runs[start : start + _RUNS_AT_ONCE]))
        items = np.frombuffer(data, layout.schema.item)
        places, questions = batch.join(items["key_hash"])
        picked = items[places]
        seconds = begin_s + picked["time_diff_s"].astype(np.int64)
        found.append(batch.select(picked, questions, seconds, pairs if metadata.topics else None, layout.schema))
    return Found(np.concatenate([f.questions for f in found]), np.concatenate([f.rows for f in found]))


def read_runs(source: _Bytes, runs: list[Run]) -> list[memoryview]:
    """Return each run's verified bytes; neighbouring runs are read by one range. Raises `CorruptFile` naming the run."""
    ranges: list[ByteRange] = []
    for run in runs:
        if ranges and ranges[-1].start + ranges[-1].length == run.offset:
            ranges[-1] = ByteRange(ranges[-1].start, ranges[-1].length + run.length)
        else:
            ranges.append(ByteRange(run.offset, run.length))
    verified = []
    blocks = iter(zip(ranges, source.read(ranges), strict=True)) if ranges else iter(())
    where, data = ByteRange(0, 0), memoryview(b"")
    for run in runs:
        if not where.start <= run.offset < where.start + where.length:
            where, raw = next(blocks)
            data = memoryview(raw)
            if len(data) != where.length:
                raise CorruptFile(source.file, "shorter than its directory says", offset=where.start, expected=where.length,
                                  found=len(data))  # fmt: skip
        piece = data[run.offset - where.start : run.offset - where.start + run.length]
        if (found := zlib.crc32(piece)) != run.crc32:
            raise CorruptFile(source.file, "items do not match their CRC32", offset=run.offset, expected=run.crc32, found=found)
        verified.append(piece)
    return verified


def open_local(path: Path, stored: StorageBytes | None = None) -> CompactedFile:
    """Open a compacted file on the local disk. Raises `CorruptFile`, `FileNotFoundError`."""
    local = LocalBytes(path)
    metadata = local.trailer().metadata
    if metadata.file_id != path.stem:
        raise CorruptFile(str(path), "file says another id than its name", expected=path.stem, found=metadata.file_id)
    sequence = int(metadata.more.get("sequence", 0))
    return CompactedFile(
        file_id=metadata.file_id,
        second_min=metadata.second_min,
        second_max=metadata.second_max,
        sequence=sequence,
        count=metadata.count,
        lane=metadata.lane,
        folder=path.parent.name,
        local=local,
        stored=stored,
    )


def open_stored(storage: Storage, stored: StoredObject) -> CompactedFile:
    """Return the handle of a file in the storage; nothing is read yet."""
    return CompactedFile(
        file_id=stored.file_id,
        second_min=stored.second_min,
        second_max=stored.second_max,
        sequence=stored.sequence,
        count=stored.count,
        lane=stored.lane,
        stored=StorageBytes(storage, stored),
    )


class DamagedFile:
    """A local file that could not be read at recovery: its range of time is kept, and every lookup that meets it fails or says so."""

    is_local = True

    def __init__(self, file_id: str, place: str, second_min: int, second_max: int, error: TieredIndexError) -> None:
        self.file_id = file_id
        self.place = place
        self.second_min = second_min
        self.second_max = second_max
        self.sequence = 0
        self.lane = "main"
        self.error = error

    def search(self, question: Question) -> Array:
        """Raise the error that made the file unreadable."""
        raise self.error.with_traceback(None)  # else each lookup would lengthen the trace of the one before

    def search_many(self, batch: QuestionBatch) -> Found:
        """Raise the error that made the file unreadable."""
        raise self.error.with_traceback(None)
