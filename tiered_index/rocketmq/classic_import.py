"""Lifting a directory of classic index files into an index: their entries, completed by the messages in the commit log.

A classic entry holds a hash, a commit log offset and a time difference; topic, key, queue and size are the message's. So the log is read
from the first entry of a file to its last, and those keys of the messages found there are put whose hash an entry has. An entry is dropped,
and counted, where its message is missing, hidden (prepared: no consumer ever saw it), or has no key of that hash.

The source is `classic:FOLDER`, its position the commit log offset before which every entry was looked at. It stays before the last message
while further keys of that one may come, since the broker writes them one by one. Files are taken in the order of their names, one in memory
at a time. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.rocketmq.classic_index import HEADER_BYTES, ClassicHeader, ClassicIndexFile, decode_header
from tiered_index.rocketmq.classic_service import classic_file_names, load_classic_index
from tiered_index.rocketmq.commitlog import CommitLogReader, MissingOffsets
from tiered_index.rocketmq.dispatcher import check_one_store
from tiered_index.rocketmq.index_columns import IndexBatch
from tiered_index.rocketmq.segments import pread
from tiered_index.rocketmq.store import StoreDirectory
from tiered_index.service.index import IndexService

__all__ = ["ClassicImport"]

Int64 = npt.NDArray[np.int64]
_NAME_DIGITS = 17
_NAMED = 100
# so many offsets of missing messages are told by name


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
    read: int = 0
    """Entries in the files from the position on."""
    entries: int = 0
    """Entries put: each key of a message once."""
    missing: int = 0
    """Messages that are in no segment, or can't be read there; `missing_offsets` names the first of them."""
    missing_offsets: list[int] = field(default_factory=list)
    hidden: int = 0
    mismatched: int = 0
    """Entries whose message has no key of their hash."""

    def __post_init__(self) -> None:
        if not self._names():
            raise InvalidArgument(f"{self.folder} holds no classic index file (named by 17 digits)")
        check_one_store(self.index, self.store.source, restart=self.restart)
        self.position = 0 if self.restart else self.index.durable_position(self.source) or 0
        self._reader = CommitLogReader(self.store.commitlog)
        self._judged = -1  # the last message that was counted as missing or hidden; the next file may have keys of it, too
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
        """Import everything, yielding the position now and then. Raises `CorruptFile` naming an index file, and what `put` raises."""
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
        hashed, _ = hash_batch([message.topic], np.zeros(len(keys), np.int64), code_units(pa.array(keys, pa.large_string())))
        return set(hashed.tolist()) <= self._last_hashes

    def _advance(self, position: int) -> None:
        self.put(pa.RecordBatch.from_pydict(_NOTHING), self.source, position)
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
        """Yield the batches of the log from an entry's offset on to the one that has the last; what can't be read is passed over."""
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


# by `nulls`: `array` imports pandas where it is there, and every command would wait for that
_NOTHING: dict[str, Any] = {
    "topic": pa.nulls(0, pa.string()), "queue_id": pa.nulls(0, pa.int32()), "key": pa.nulls(0, pa.large_string()),
    "offset": pa.nulls(0, pa.int64()), "size": pa.nulls(0, pa.int32()), "timestamp_ms": pa.nulls(0, pa.int64()),
}  # fmt: skip
