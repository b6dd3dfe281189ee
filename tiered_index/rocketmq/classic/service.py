"""The broker's classic index as a whole: its files, and the import of their entries into an index.

Files are sorted by their names, the times they were made. A new one inherits end offset and end timestamp of the one
before it, and a message below the newest end offset is ignored (RocketMQ's `IndexService`).

The import reads the log from the first entry of a file to its last, and puts those keys whose hash an entry has. An
entry is dropped, and counted, where its message is missing, hidden, or has no key of that hash. The source is
`classic:FOLDER`, its position the commit log offset before which every entry was handled; it stays before the last
message while further keys of that one may come, since the broker writes them one by one.

One thread writes to a `ClassicIndex`, or uses a `ClassicImport`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.rocketmq.classic.file import (
    DEFAULT_GEOMETRY,
    HEADER_BYTES,
    ClassicHeader,
    ClassicIndexFile,
    Geometry,
    decode_header,
    infer_geometry,
)
from tiered_index.rocketmq.follow.dispatcher import check_one_store
from tiered_index.rocketmq.log.columns import IndexBatch, decode_index_columns
from tiered_index.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.rocketmq.log.layout import TRANSACTION_MASK, TRANSACTION_ROLLBACK
from tiered_index.rocketmq.log.segments import local_errors, pread
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.index import IndexService


@dataclass(slots=True)
class ClassicIndex:
    """Index files in the order of their names; `geometry` is that of files made here, and `new_name` names them."""

    geometry: Geometry = DEFAULT_GEOMETRY
    files: list[ClassicIndexFile] = field(default_factory=list)
    new_name: Callable[[], str] = lambda: "index file"

    def put(
        self, topic: str, uniq_key: str | None, keys: str | None, offset: int, store_ms: int, sys_flag: int
    ) -> None:
        """Index one message as the broker does (`buildIndex`).

        `keys` is the KEYS property as it stands. Rolled-back messages are left out, prepared ones aren't, and a key
        that equals the unique key or another one is put again: RocketMQ's bytes depend on it.
        """
        newest = self._writable()
        if offset >= newest.header.end_offset and sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK:
            for key in ([] if uniq_key is None else [uniq_key]) + [key for key in (keys or "").split(" ") if key]:
                if not newest.put_key(f"{topic}#{key}", offset, store_ms):
                    newest = self._writable()
                    newest.put_key(f"{topic}#{key}", offset, store_ms)

    def _writable(self) -> ClassicIndexFile:
        """Return the newest file, or a new one where it is full."""
        newest = self.files[-1] if self.files else None
        if newest is not None and not newest.is_full:
            return newest
        inherited = {} if newest is None else {"end_offset": newest.header.end_offset, "end_ms": newest.header.end_ms}
        made = ClassicIndexFile.create(self.geometry, file=self.new_name(), **inherited)
        self.files.append(made)
        return made


def classic_file_names(folder: Path) -> list[str]:
    """Return the names of the index files in a folder, oldest first; a missing folder is empty."""
    with local_errors(folder):
        try:
            entries = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        except FileNotFoundError:
            return []
    return sorted(name for name in entries if name.isascii() and name.isdecimal())


def load_classic_index(
    folder: Path, geometry: Geometry | None = None, *, names: Iterable[str] | None = None
) -> ClassicIndex:
    """Read the index files of a folder (`names`: some) whole. Raises `CorruptFile`, `StorageMisconfigured`."""
    files = []
    for name in classic_file_names(folder) if names is None else sorted(names):
        path = folder / name
        with local_errors(path):
            size_bytes = path.stat().st_size
        data = pread(path, min(size_bytes, 2**31), 0)
        files.append(ClassicIndexFile(data, geometry or infer_geometry(data, str(path)), file=str(path)))
    return ClassicIndex(geometry or (files[-1].geometry if files else DEFAULT_GEOMETRY), files)


Int64 = npt.NDArray[np.int64]
_NAME_DIGITS = 17
# At most so many offsets of missing messages are named.
_NAMED = 100


@dataclass
class ClassicImport:
    """One import and its counts. `put` stands in for `index.put_batch`, to wait out back-pressure."""

    index: IndexService
    folder: Path
    store: StoreDirectory
    put: Callable[[Any, str, int], int]
    restart: bool = False
    position: int = 0
    files: int = 0
    # Entries in the files from the position on.
    read: int = 0
    # Entries put: each key of a message once.
    entries: int = 0
    # Messages that are in no segment, or can't be read there; `missing_offsets` names the first of them.
    missing: int = 0
    missing_offsets: list[int] = field(default_factory=list)
    hidden: int = 0
    # Entries whose message has no key of their hash.
    mismatched: int = 0

    def __post_init__(self) -> None:
        if not self._names():
            raise InvalidArgument(f"{self.folder} holds no classic index file (named by 17 digits)")
        check_one_store(self.index, self.store.source, restart=self.restart)
        self.position = 0 if self.restart else self.index.durable_position(self.source) or 0
        self._reader = CommitLogReader(self.store.commitlog)
        # the last message that was counted as missing or hidden; the next file may have keys of it, too
        self._judged = -1
        self._last = -1
        self._last_hashes: set[int] = set()  # of the entries seen of the message at `_last`

    @property
    def source(self) -> str:
        """The name under which the index keeps the position."""
        return f"classic:{self.folder.resolve()}"

    @property
    def end_offset(self) -> int:
        """The offset of the last entry of the newest file."""
        return self._header(self._names()[-1]).end_offset

    def run(self) -> Iterator[int]:
        """Import everything, yielding the position now and then. Raises `CorruptFile`, and what `put` raises."""
        for name in self._names():
            if self._header(name).index_count > 1:  # an empty one says nothing, not even its geometry
                (file,) = load_classic_index(self.folder, names=[name]).files
                yield from self._file(file)
            self.files += 1
        if self._last >= 0 and self._is_settled():
            self._advance(self._last + 1)
            yield self.position

    def _is_settled(self) -> bool:
        """Return whether no further entry of the last message can give anything."""
        if self._judged == self._last:
            return True
        try:
            message = self._reader.read(self._last)
        except (CorruptFile, InvalidArgument):
            return False  # deleted since
        keys = message.index_keys
        hashed, _ = hash_batch(
            [message.topic], np.zeros(len(keys), np.int64), code_units(pa.array(keys, pa.large_string()))
        )
        return set(hashed.tolist()) <= self._last_hashes

    def _advance(self, position: int) -> None:
        self.put(decode_index_columns(b"", position).columns, self.source, position)
        self.position = position

    def _names(self) -> list[str]:
        return [name for name in classic_file_names(self.folder) if len(name) == _NAME_DIGITS]

    def _header(self, name: str) -> ClassicHeader:
        path = self.folder / name
        return decode_header(pread(path, HEADER_BYTES, 0), str(path))

    def _file(self, file: ClassicIndexFile) -> Iterator[int]:
        entries = file.entries()
        offsets, hashes = entries["offset"].astype(np.int64), entries["key_hash"].astype(np.int64)
        new = offsets >= self.position
        offsets, hashes = offsets[new], hashes[new]
        if not len(offsets):
            return
        order = np.lexsort((hashes, offsets))
        offsets, hashes = offsets[order], hashes[order]
        self.read += len(offsets)
        last = int(offsets[-1])
        known = self._last_hashes if last == self._last else set()
        self._last, self._last_hashes = last, known | set(hashes[offsets == last].tolist())
        unmatched: list[Int64] = []
        done = 0
        for batch in self._batches(int(offsets[0]), last):
            low, high = np.searchsorted(offsets, (batch.begin, batch.end))
            unmatched += [offsets[done:low], self._take(batch, offsets[low:high], hashes[low:high], last)]
            done = int(high)
            yield self.position
        self._judge(np.concatenate([*unmatched, offsets[done:]]))
        # a message's further keys may be in the next file
        self._advance(last)

    def _batches(self, first: int, last: int) -> Iterator[IndexBatch]:
        """Yield the readable batches of the log from an entry's offset on to the one that has the last."""
        try:
            for batch in self._reader.batches(first, skip_corrupt=True, skip_missing=True):
                yield batch
                if batch.end > last:
                    return
        except MissingOffsets:  # the log ends before
            return

    def _take(self, batch: IndexBatch, offsets: Int64, hashes: Int64, last: int) -> Int64:
        """Put the keys that entries have; return the offsets of entries that no key has."""
        columns = batch.columns
        topics = columns.column("topic")
        names, keys = topics.dictionary.to_pylist(), columns.column("key")
        if not len(columns) or not len(offsets):
            return offsets
        hashed, _ = hash_batch(names, topics.indices.to_numpy().astype(np.int64), code_units(keys))
        at = columns.column("offset").to_numpy()
        # (offset, hash) as one number: a batch has less than 2**31 bytes
        have = (at - batch.begin) << 32 | hashed.astype(np.int64)
        want = (offsets - batch.begin) << 32 | hashes
        picked = columns.filter(pa.array(np.isin(have, want)))
        if len(picked):
            self.entries += self.put(picked, self.source, min(batch.end, last))
            self.position = min(batch.end, last)
        return offsets[~np.isin(want, have)]

    def _judge(self, offsets: Int64) -> None:
        """Count why entries are dropped."""
        distinct, counts = np.unique(offsets, return_counts=True)
        for offset, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            try:
                message = self._reader.read(offset)
            except (CorruptFile, InvalidArgument):
                if offset == self._judged:
                    continue
                self._judged = offset
                self.missing += 1
                if len(self.missing_offsets) < _NAMED:
                    self.missing_offsets.append(offset)
                continue
            if message.is_visible:
                self.mismatched += count
            elif offset != self._judged:
                self._judged = offset
                self.hidden += 1
