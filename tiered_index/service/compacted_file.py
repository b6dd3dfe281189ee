"""Compacted files, wherever their bytes lie: on the local disk, in the storage, or in both.

A search asks the directory which ranges may hold the key, reads just those, checks each against its CRC32, and only then looks at an item.
A giant slot is read newest blocks first, no more of it than the page needs. A local copy that fails its check is passed over in favour of
the storage where the file is there too.

Threads: every method from any thread. Answers are copies; the map of an unlinked file dies with its last array.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, StorageUnavailable, TieredIndexError
from tiered_index.format.bloom import filter_hash
from tiered_index.format.trailer import TAIL_SIZE, Metadata, Run, Tail, Trailer, parse_trailer
from tiered_index.service.batch_query import Found, QuestionBatch
from tiered_index.service.catalog import AlwaysRead
from tiered_index.service.cold.path import ColdPath, MissingObject, check_run
from tiered_index.service.cold.spans import spans_of
from tiered_index.service.root import disk_error
from tiered_index.service.rows import Question, concatenate, first_answers, select_items
from tiered_index.service.storage_log import StoredObject
from tiered_index.storage.base import ByteRange

__all__ = ["CompactedFile", "DamagedFile", "LocalBytes", "MissingObject", "StorageBytes", "open_local", "open_stored", "read_runs"]

Array = npt.NDArray[Any]
_WINDOW_BYTES = 32 << 20
# slot groups of a batch held in memory at a time
_BATCH_BYTES = 8 << 20
# blocks of a giant slot held in memory at a time


class _Ranges(Protocol):
    """Where ranges of a file are read from; they may come back short."""

    file: str

    def read(self, ranges: list[ByteRange]) -> list[bytes | memoryview]: ...


class _Bytes(Protocol):
    """A file's bytes, verified."""

    file: str

    def trailer(self) -> Trailer: ...

    def verified(self, runs: Sequence[Run]) -> list[memoryview]: ...


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

    def verified(self, runs: Sequence[Run]) -> list[memoryview]:
        """Return each run's verified bytes. Raises `CorruptFile`."""
        return read_runs(self, runs)

    def _parse(self) -> Trailer:
        size = len(self._map)
        tail = Tail.decode(self._map[max(0, size - TAIL_SIZE) :], self.file, size)
        return parse_trailer(self._map[tail.directory_position :], self.file, size)


class StorageBytes:
    """A compacted file in the storage, read by the cold path."""

    def __init__(self, cold: ColdPath, stored: StoredObject) -> None:
        self.file = stored.name
        self.stored = stored
        self.cold = cold

    def trailer(self) -> Trailer:
        """Return the verified trailer, fetching it where it is in no cache. Raises `MissingObject`."""
        return self.cold.trailer(self.stored)

    def verified(self, runs: Sequence[Run]) -> list[memoryview]:
        """Return each run's verified bytes. Raises `CorruptFile`, `MissingObject`."""
        return self.cold.verified(self.stored, runs)

    def lacks_topic(self, topic: str) -> bool:
        """Return whether the file is known, without a request, to hold nothing of `topic`."""
        trailer = self.cold.known_trailer(self.stored)
        return trailer is not None and bool(trailer.metadata.topics) and all(name != topic for _, name in trailer.metadata.topics)


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
    source: str | None = None

    @property
    def place(self) -> str:
        """``compacted`` (local only), ``uploaded`` (a local copy of what the storage has) or ``storage``."""
        return self.folder or "storage"

    @property
    def is_local(self) -> bool:
        """Whether a search needs no request."""
        return self.local is not None

    def excludes(self, question: Question) -> str | None:
        """Return why a search would find nothing (``filter``, ``topic``), as far as that is known without a request, or None."""
        if self.local is not None or self.stored is None:
            return None
        if self.stored.cold.filters.excludes(self.stored.stored, _filter_hash(question, keyed=self.stored.cold.keyed)):
            return "filter"
        return "topic" if self.stored.lacks_topic(question.topic) else None

    def excludes_all(self, batch: QuestionBatch) -> str | None:
        """Do as `excludes` for all questions of a batch."""
        if self.local is not None or self.stored is None:
            return None
        if len(batch) and self._excluded(batch, self.stored).all():
            return "filter"
        return "topic" if all(map(self.stored.lacks_topic, batch.topics)) else None

    def search(self, question: Question) -> Array:
        """Return the first `max_count` + 1 of the rows that answer `question`, or all of them, in no order."""
        if self.local is not None:
            try:
                return _search(self.local, question)
            except (CorruptFile, StorageUnavailable):
                if self.stored is None:
                    raise
        assert self.stored is not None
        cold, stored = self.stored.cold, self.stored.stored
        if cold.learn_filter(stored) and self.excludes(question) is not None:
            return concatenate([], cold.trailer(stored).metadata.layout.schema)
        rows = _search(self.stored, question)
        if not len(rows):
            cold.filters.note_in_vain(stored, _filter_hash(question, keyed=cold.keyed))
        return rows

    def search_many(self, batch: QuestionBatch) -> Found:
        """Return the rows that answer each question, in no order; every slot group is read and checked once."""
        if self.local is not None:
            try:
                return _search_many(self.local, batch)
            except (CorruptFile, StorageUnavailable):
                if self.stored is None:
                    raise
        assert self.stored is not None
        return _search_many(self.stored, batch, self._excluded(batch, self.stored))

    def _excluded(self, batch: QuestionBatch, stored: StorageBytes) -> npt.NDArray[np.bool_]:
        """Return which questions (n) have a key that the file certainly doesn't hold, as far as its filter is at hand."""
        cold = stored.cold
        return cold.filters.excludes_many(stored.stored, batch.keyed_filter_hashes if cold.keyed else batch.plain_filter_hashes)

    def metadata(self) -> Metadata:
        """Return the file's metadata."""
        source: _Bytes | None = self.local or self.stored
        assert source is not None
        return source.trailer().metadata


def _filter_hash(question: Question, *, keyed: bool) -> int:
    return filter_hash(question.key_hash, question.fingerprint if keyed else 0)


def _search(source: _Bytes, question: Question) -> Array:
    trailer = source.trailer()
    metadata = trailer.metadata
    layout = metadata.layout
    ids: frozenset[int] | None = None
    if metadata.topics:
        ids = frozenset(topic_id for topic_id, name in metadata.topics if name == question.topic)
        if not ids:
            return concatenate([], layout.schema)
    second_max = question.second_max if question.after is None else min(question.second_max, question.after[0])
    runs = trailer.directory.runs(question.key_hash % layout.slots, question.key_hash, question.second_min, second_max)
    begin_s = metadata.begin_ms // 1000
    rows = concatenate([], layout.schema)
    for batch in _newest_first(runs, question.max_count):
        # answers that are all newer than the rest of the blocks, and one more than asked: the rest can't change the page
        if len(rows) > question.max_count and int(rows["second"][question.max_count]) > batch[0].second_max:
            break
        items = (np.frombuffer(data, layout.schema.item) for data in source.verified(batch))
        parts = [rows, *(select_items(part, begin_s, question, ids, layout.schema) for part in items)]
        rows = concatenate(parts, layout.schema)
        if len(runs) > len(batch):
            rows = first_answers(rows, layout.schema, question.max_count + 1)
    return rows


def _newest_first(runs: list[Run], max_count: int) -> Iterator[list[Run]]:
    """Yield the runs newest first, in batches that may hold as many items as asked; each batch is larger than the one before."""
    runs = sorted(runs, key=attrgetter("second_max"), reverse=True)
    wanted = max_count + 1
    start = 0
    while start < len(runs):
        stop, count, size = start, 0, 0
        while stop < len(runs) and (stop == start or (count < wanted and size + runs[stop].length <= _BATCH_BYTES)):
            count += runs[stop].count
            size += runs[stop].length
            stop += 1
        yield runs[start:stop]
        start, wanted = stop, 2 * wanted


def _search_many(source: _Bytes, batch: QuestionBatch, excluded: npt.NDArray[np.bool_] | None = None) -> Found:
    """Search a file for a batch; `excluded` (n) are the questions whose key the file certainly doesn't hold."""
    wanted = np.arange(len(batch)) if excluded is None else np.flatnonzero(~excluded)
    if not len(wanted):
        return Found(np.zeros(0, np.int64), np.zeros(0, np.int64))
    trailer = source.trailer()
    metadata = trailer.metadata
    layout = metadata.layout
    pairs = [(topic_id, name) for topic_id, name in metadata.topics if name in batch.topics]
    wanted = np.intersect1d(wanted, batch.overlapping(metadata.second_min, metadata.second_max), assume_unique=True)
    if metadata.topics:
        names = {name for _, name in pairs}
        here = np.array([topic in names for topic in batch.topics], bool)
        wanted = wanted[here[batch.topic_index[wanted]]] if len(here) else wanted
    runs: list[Run] = []
    if len(wanted):
        low, high = int(batch.second_min[wanted].min()), int(batch.second_max[wanted].max())
        runs = trailer.directory.runs_of(batch.key_hash[wanted] % layout.slots, low, high)
    begin_s = metadata.begin_ms // 1000
    found = [Found(np.zeros(0, np.int64), concatenate([], layout.schema))]
    for window in _windows(runs):
        data = b"".join(source.verified(window))
        items = np.frombuffer(data, layout.schema.item)
        places, questions = batch.join(items["key_hash"])
        picked = items[places]
        seconds = begin_s + picked["time_diff_s"].astype(np.int64)
        found.append(batch.select(picked, questions, seconds, pairs if metadata.topics else None, layout.schema))
    return Found(np.concatenate([f.questions for f in found]), np.concatenate([f.rows for f in found]))


def _windows(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Yield the runs in order, in lists of at most 32 MiB or of one run."""
    window: list[Run] = []
    size = 0
    for run in runs:
        if window and size + run.length > _WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append(run)
        size += run.length
    if window:
        yield window


def read_runs(source: _Ranges, runs: Sequence[Run]) -> list[memoryview]:
    """Return each run's verified bytes; neighbouring runs are read by one range. Raises `CorruptFile` naming the run."""
    spans = spans_of(runs, 0, 1 << 62)
    found: dict[int, memoryview] = {}
    for span, data in zip(spans, source.read([ByteRange(span.start, span.length) for span in spans]), strict=True):
        if len(data) != span.length:
            raise CorruptFile(source.file, "shorter than its directory says", offset=span.start, expected=span.length,
                              found=len(data))  # fmt: skip
        for run, piece in span.pieces(data):
            check_run(piece, run, source.file)
            found[run.offset] = piece
    return [found[run.offset] for run in runs]


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


def open_stored(cold: ColdPath, stored: StoredObject) -> CompactedFile:
    """Return the handle of a file in the storage; nothing is read yet."""
    return CompactedFile(
        file_id=stored.file_id,
        second_min=stored.second_min,
        second_max=stored.second_max,
        sequence=stored.sequence,
        count=stored.count,
        lane=stored.lane,
        stored=StorageBytes(cold, stored),
    )


class DamagedFile(AlwaysRead):
    """A local file that could not be read at recovery: its range of time is kept, and every lookup that meets it fails or says so."""

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
