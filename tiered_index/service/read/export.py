"""Exports: every entry of topics and a time range, once, as Arrow batches as of one log position.

Objects that the log names are read from the storage, or from a local copy that verifies. Flushed entries of other local
files are included. An entry has hashes of its key, not the key. Memory: the directory of one object, a window of 8 MiB
of its items, and one Arrow batch. Threads: one for each export. Writers and lookups may run meanwhile; a writer deletes
no local file that an open export may read.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.base.documents import encoded
from tiered_index.errors import CorruptFile, InvalidArgument, StorageUnavailable
from tiered_index.format.keys.arrow import array_of, topic_names
from tiered_index.format.keys.hashing import HashRule, assigned_topic_id, joint_rule, normal_hashes
from tiered_index.format.schema import Schema
from tiered_index.format.shard import entry_checksum
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.cold_path import ColdPath, ColdSettings, MissingObject, lost_error
from tiered_index.service.read.files.compacted import CompactedFile, DamagedFile, StorageBytes, verify_runs
from tiered_index.service.read.files.file_search import FileBytes, scan_runs
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.files.unsealed import UnsealedEntries
from tiered_index.storage.base import Storage

Array = npt.NDArray[Any]
Items = tuple[Array, int, Mapping[int, str]]
"""Items or entries (structured, n), the second to which their times are relative, and topic names by id."""
METADATA = b"tiered_index"
"""Key of the Arrow schema's metadata with the JSON description of an export."""
EXPORT_VERSION = 1
_WINDOW_BYTES = 8 << 20
_BATCH_ROWS = 1 << 16
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class ExportRange:
    """Entries of `topics` and `queues` (None: all) within inclusive epoch seconds; the defaults are beyond all."""

    topics: frozenset[str] | None = None
    second_min: int = -(2**62)
    second_max: int = 2**62
    queues: tuple[int, ...] | None = None

    def overlaps(self, second_min: int, second_max: int) -> bool:
        """Return whether an inclusive interval overlaps the range."""
        return second_min <= self.second_max and second_max >= self.second_min

    def selected(self, items: Array, begin_s: int, names: Mapping[int, str], expired: Expired) -> tuple[Array, Array]:
        """Return the items of the range that have not `expired`, and their epoch seconds (i64); as `Items`."""
        seconds = items["time_diff_s"].astype(np.int64) + begin_s
        is_wanted = (seconds >= self.second_min) & (seconds <= self.second_max)
        is_wanted &= expired.keeps(items, seconds, names)
        if self.topics is not None:
            is_wanted &= np.isin(
                items["topic_id"], [topic_id for topic_id, name in names.items() if name in self.topics]
            )
        if self.queues is not None:
            is_wanted &= np.isin(items["queue_id"], self.queues)
        return (items, seconds) if is_wanted.all() else (items[is_wanted], seconds[is_wanted])


@dataclass(frozen=True)
class _File:
    """One file that may have entries of the range."""

    name: str
    second_min: int
    count: int
    hash: HashRule
    read: Callable[[], Iterator[Items]]


class Export(Iterator[pa.RecordBatch]):
    """An iterator of Arrow batches with a row per entry, in any order. Close it, or use it as a context manager.

    - Columns: topic (text), topic_id, queue_id, offset, size, timestamp_ms (int64, by whole
      seconds), key_hash, and the extra columns of the schema. Numbers have their stored width (half floats: float32),
      bytes are binary, text columns are strings.
    - `entries` and `checksum` (u64, see `entries_checksum`) cover the batches so far.
    - `most_entries` bounds the number of entries.
    - `log_number` is the position of the storage's log.
    - `known_topics` are the topics of the files that were read so far.
    - `not_asked` says why the storage was not read; None: it was. `missing` then has the objects that are only in the
      storage, and are left out.

    A batch raises `CorruptFile` or `StorageUnavailable` if a file can't be read, and `IndexClosed` if the index was
    closed meanwhile: an export is whole or fails. An export is read once: after an error or `close`, and for a second
    Arrow stream, it raises `InvalidArgument`. DuckDB, Polars and pyarrow can read it through `__arrow_c_stream__`.
    """

    def __init__(
        self,
        wanted: ExportRange,
        schema: Schema,
        state: LogState,
        handles: Sequence[Handle],
        storage: Storage,
        check_open: Callable[[], None],
        read_log: Callable[[str], LogState],
        held: contextlib.ExitStack,
        not_asked: str | None = None,
    ) -> None:
        """Begin an export; use `Lookups.export`. `held` keeps the files unchanged, and is closed with the export."""
        self._wanted, self._state = wanted, state
        self.not_asked = not_asked
        self.missing: list[str] = []
        self.entry_schema = schema
        self._check_open, self._read_log, self._held = check_open, read_log, held
        settings = ColdSettings(query_threads=4, cache_slot_groups=False, coalesce_gap_bytes=0)
        self._cold = ColdPath(storage, keyed=schema.keyed, settings=settings)
        held.callback(self._cold.close)
        self._files = sorted(self._chosen(handles), key=lambda file: (file.second_min, file.name))
        assert state.genesis is not None
        self.most_entries = sum(file.count for file in self._files)
        self.log_number = state.number
        self.hash = joint_rule(file.hash for file in self._files) if self._files else state.genesis.layout.hash
        layout = {**state.genesis.layout.to_json(), "hash": self.hash}
        about = {
            "version": EXPORT_VERSION,
            "index_id": state.genesis.index_id,
            "log_number": state.number,
            "offset_space": state.genesis.offset_space,
            "layout": layout,
        }
        self.schema = export_schema(schema).with_metadata({METADATA: encoded(about)})
        self.entries = self.checksum = 0
        self.known_topics: set[str] = set()
        self._batches = self._all()
        self._is_closed = self._is_whole = False
        # an export that is garbage-collected must not keep a writer from deleting files
        weakref.finalize(self, held.close)

    def __next__(self) -> pa.RecordBatch:
        try:
            self._check_open()
            if not self._is_whole:
                self._check_readable()
            batch = next(self._batches)
        except BaseException as error:  # also for the end of the iteration and for an interrupt
            self._is_whole = isinstance(error, StopIteration)
            self.close()
            if not isinstance(error, MissingObject):
                raise
            if error.name in self._read_log(error.uri).objects:
                raise lost_error(error.name) from error
            raise StorageUnavailable(
                f"{error.name} was merged away and deleted since the export began: begin the export again"
            ) from error
        self.entries += len(batch)
        self.checksum = (self.checksum + entries_checksum(batch, self.entry_schema)) & _MASK
        return batch

    def close(self) -> None:
        """Release the files. Idempotent."""
        self._is_closed = True
        self._batches.close()
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the batches as an Arrow stream. Raises `InvalidArgument` for an export that was read or closed."""
        self._check_readable()
        return pa.RecordBatchReader.from_batches(self.schema, self).__arrow_c_stream__(requested_schema)

    def _check_readable(self) -> None:
        # the end of an iteration would look like a whole export
        if self._is_closed:
            raise InvalidArgument("the export was read to its end or closed: begin another export")

    def _chosen(self, handles: Sequence[Handle]) -> Iterator[_File]:
        """Yield the files that have the entries, each entry once. Raises the error of a file that can't be read."""
        files, copies = self._state.files, dict[str, CompactedFile]()
        for handle in handles:
            if isinstance(handle, DamagedFile):
                raise handle.error.with_traceback(None)
            # stored objects come from the log's state below, and the buffer was flushed before
            if isinstance(handle, CompactedFile):
                if handle.local is None:
                    continue
                if handle.file_id in files:
                    copies[handle.file_id] = handle
                # without the storage, the root's copy of the log may be older than the upload. No table of merged
                # files is exported then, so each local copy is
                elif self.not_asked is not None or not handle.is_left_over(files):
                    yield self._file(handle, handle.count, partial(self._of, handle.local))
            elif isinstance(handle, UnsealedEntries) and handle.file_id not in files:
                items, begin_s, names = handle.snapshot()
                yield self._file(handle, len(items), partial(iter, [(items, begin_s, names)]))
        for stored in self._state.objects.values():
            if not self._wanted.overlaps(stored.second_min, stored.second_max):
                continue
            copy = copies.get(stored.file_id) if stored.shard is None else None
            if copy is None and self.not_asked is not None:
                self.missing.append(stored.name)
                continue
            read = partial(self._of, StorageBytes(self._cold, stored)) if copy is None else partial(self._of_copy, copy)
            yield _File(stored.name, stored.second_min, stored.count, stored.hash, read)

    def _file(self, handle: Handle, count: int, read: Callable[[], Iterator[Items]]) -> _File:
        return _File(handle.file_id, handle.second_min, count, handle.hash, read)

    def _of_copy(self, copy: CompactedFile) -> Iterator[Items]:
        assert copy.local is not None
        source: FileBytes = copy.local
        try:
            verify_runs(copy)  # the whole file, before its first entry
        except (CorruptFile, StorageUnavailable):
            source = StorageBytes(self._cold, self._state.files[copy.file_id])
        return self._of(source)

    def _of(self, source: FileBytes) -> Iterator[Items]:
        trailer, wanted = source.trailer(), self._wanted
        metadata = trailer.metadata
        if wanted.topics is not None:
            self.known_topics |= metadata.topic_names
            if not metadata.topic_names & wanted.topics:
                return
        runs = [run for run in trailer.directory.all_runs() if wanted.overlaps(run.second_min, run.second_max)]
        names = dict(metadata.topics)
        for _, items in scan_runs(source, runs, _WINDOW_BYTES):
            yield items, metadata.begin_ms // 1000, names

    def _all(self) -> Generator[pa.RecordBatch]:
        for file in self._files:
            for items, begin_s, names in file.read():
                self.known_topics.update(names.values())
                for start in range(0, len(items), _BATCH_ROWS):
                    batch = self._batch(items[start : start + _BATCH_ROWS], begin_s, names)
                    if len(batch):
                        yield batch
            # otherwise it has the directories of thousands of objects at the end
            self._cold.caches.clear()

    def _batch(self, items: Array, begin_s: int, names: Mapping[int, str]) -> pa.RecordBatch:
        return entry_batch(*self._wanted.selected(items, begin_s, names, self._state.expired), names, self.schema)


def entry_batch(items: Array, seconds: Array, names: Mapping[int, str], schema: Any) -> pa.RecordBatch:
    """Return items (n) and their seconds (n) as a batch of a schema: columns of items, topics and times by name."""
    arrays = []
    for field in schema:
        if field.name == "topic":
            arrays.append(topic_names(items["topic_id"], names))
        elif field.name == "timestamp_ms":
            arrays.append(pa.array(seconds * 1000))
        elif pa.types.is_timestamp(field.type):  # an own column, which may be called `timestamp`, never is
            arrays.append(pa.array(seconds * 1_000_000).cast(field.type))
        elif field.name == "key_hash":
            arrays.append(pa.array(normal_hashes(items["key_hash"])))
        else:
            arrays.append(array_of(items[field.name], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def export_schema(schema: Schema) -> Any:
    """Return the Arrow schema of exported entries of a schema."""
    fields = {"topic": pa.string(), "topic_id": pa.int32(), "queue_id": pa.int32(), "offset": pa.int64()}
    fields |= {"size": pa.int32(), "timestamp_ms": pa.int64(), "key_hash": pa.int32()}
    for column in schema.extra:
        dtype = np.dtype(column.dtype)
        # few programs know half floats
        kind = np.dtype("f4") if dtype.str == ">f2" else dtype.newbyteorder("=")
        is_bytes = dtype.kind == "S"
        fields[column.name] = pa.string() if column.is_text else pa.binary() if is_bytes else pa.from_numpy_dtype(kind)
    return pa.schema(fields)


def entries_checksum(batch: pa.RecordBatch, schema: Schema) -> int:
    """Return the sum (u64) of a mixed hash of each exported entry: equal for the same entries in any order.

    It covers all columns except topic_id, which differs between files; it covers the topic's name.
    """
    items = np.zeros(len(batch), schema.item)
    for name in schema.item.names or ():
        if name not in ("topic_id", "time_diff_s"):
            column = batch.column(name)
            if items.dtype[name].kind == "S":
                # NumPy encodes no text beyond ASCII
                items[name] = column.cast(pa.binary()).to_pylist()
            else:
                items[name] = column.to_numpy(zero_copy_only=False)
    topics = batch.column("topic").dictionary_encode()
    # the last one is that of rows without a topic
    ids = np.array([*map(assigned_topic_id, topics.dictionary.to_pylist()), 0], np.int32)
    items["topic_id"] = ids[topics.indices.fill_null(len(ids) - 1).to_numpy(zero_copy_only=False)]
    return entry_checksum(items, batch.column("timestamp_ms").to_numpy(zero_copy_only=False) // 1000)


def topics_of(topics: str | Iterable[str] | None) -> list[str] | None:
    """Return the topics of an argument; None: all. Raises `InvalidArgument` for anything except text."""
    if topics is None or isinstance(topics, str):
        return None if topics is None else [topics]
    try:
        return list(topics)
    except TypeError as error:
        raise InvalidArgument(f"topics must be text or an iterable of text, not {topics!r:.80}") from error
