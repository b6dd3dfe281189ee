"""Reads the broker's classic index files, and imports their entries into an index.

```
header, 40 bytes: i64 begin (ms), i64 end (ms), i64 begin offset, i64 end offset,
                  i32 slots in use, i32 count (one more than entries)
slots x i32: index of the newest entry
items x 20 bytes: i32 key hash, i64 commit log offset, i32 seconds since begin,
                  i32 index of the previous entry of the slot
```

Entry 0 is unused, so a file of n items has n - 1 entries. The geometry is not stored: the broker's default is 5,000,000
slots and 20,000,000 items; `infer_geometry` finds others. The names of files are the times at which they were made
(RocketMQ's `IndexFile`, `IndexHeader`).

The import reads the log from the first entry of a file to its last, and puts the keys whose hash an entry has. An entry
is dropped and counted if its message is missing or hidden, or has no key of that hash. The source is `classic:FOLDER`.
Its position is the commit log offset before which all entries were handled. It stays before the last message while
further keys of that message may follow, because the broker writes them one by one.

One thread uses a `ClassicImport`; any thread reads a file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.rocketmq.follow.dispatcher import check_one_store
from tiered_index.rocketmq.log.columns import IndexBatch, Selection, decode_index_columns
from tiered_index.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.rocketmq.log.layout import tag_key
from tiered_index.rocketmq.log.segments import local_errors, pread
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.index import IndexService

HEADER_BYTES = 40
SLOT_BYTES = 4
# One entry; packed, big-endian.
ENTRY = np.dtype([("key_hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
ENTRY_BYTES = ENTRY.itemsize

_header = struct.Struct(">4q2i")
_NAME_DIGITS = 17


class Geometry(NamedTuple):
    """The numbers of slots and items of a file."""

    slots: int
    items: int

    @property
    def entries_at(self) -> int:
        """Byte position of entry 0."""
        return HEADER_BYTES + SLOT_BYTES * self.slots

    @property
    def file_bytes(self) -> int:
        """Size of every file of this geometry."""
        return self.entries_at + ENTRY_BYTES * self.items


class ClassicHeader(NamedTuple):
    """The header's fields in their order; times in epoch milliseconds."""

    begin_ms: int
    end_ms: int
    begin_offset: int
    end_offset: int
    slots_in_use: int
    # One more than there are entries; never below 1.
    index_count: int


def decode_header(data: bytes, file: str = "index file") -> ClassicHeader:
    """Return the header in the first 40 bytes of `data`. Raises `CorruptFile` if it is cut short or invalid."""
    if len(data) < HEADER_BYTES:
        raise CorruptFile(file, "the header is cut short", offset=len(data), expected=HEADER_BYTES, found=len(data))
    header = ClassicHeader(*_header.unpack_from(data))
    header = header._replace(index_count=max(header.index_count, 1))
    if header.slots_in_use < 0 or header.begin_offset < 0 or header.end_offset < 0:
        raise CorruptFile(file, "the header holds a negative count or offset", offset=0)
    return header


def infer_geometry(data: bytes | bytearray, file: str = "index file") -> Geometry:
    """Return the geometry of a file by its contents: the one with which each slot's newest entry belongs to the slot.

    For a file without entries, it returns the broker's ratio of one slot to four items. Raises `CorruptFile` if no
    geometry fits. It tries the slot counts that fit the size and for which the first entry has the header's begin
    offset.
    """
    header = decode_header(bytes(data[:HEADER_BYTES]), file)
    room = len(data) - HEADER_BYTES
    usual = Geometry(room // 84, room // 84 * 4)
    if usual.slots and usual.file_bytes == len(data) and _fits(data, usual, header):
        return usual
    first_slots = room // SLOT_BYTES % 5 or 5
    # 4 * slots + 20 * items is the room: possible slot counts differ by 5, and their first entries' positions by 20
    # bytes
    most = (room - 2 * ENTRY_BYTES) // SLOT_BYTES
    if room % SLOT_BYTES == 0 and most >= first_slots:
        begin = HEADER_BYTES + SLOT_BYTES * first_slots + ENTRY_BYTES
        offsets = np.frombuffer(data, ENTRY, (most - first_slots) // 5 + 1, begin)["offset"]
        for place in np.flatnonzero(offsets == header.begin_offset).tolist():
            slots = first_slots + 5 * place
            geometry = Geometry(slots, (room - SLOT_BYTES * slots) // ENTRY_BYTES)
            if header.index_count > 1 and _fits(data, geometry, header):
                return geometry
    raise CorruptFile(
        file, f"no geometry fits a file of {len(data):,} bytes and its {header.index_count - 1:,} entries"
    )


def _fits(data: bytes | bytearray, geometry: Geometry, header: ClassicHeader) -> bool:
    """Return whether each slot's newest entry belongs to the slot, as in a file of this geometry."""
    if header.index_count > geometry.items:
        return False
    items = np.frombuffer(data, ENTRY, geometry.items - 1, geometry.entries_at + ENTRY_BYTES)
    heads = np.frombuffer(data, ">i4", geometry.slots, HEADER_BYTES).astype(np.int64)
    if heads.min() < 0 or heads.max() >= geometry.items:
        return False
    # the broker may have put more entries since the header was read: go back to the ones before them
    while len(late := np.flatnonzero(heads >= header.index_count)):
        before = items["previous"][heads[late] - 1].astype(np.int64)
        if ((before < 0) | (before >= heads[late])).any():
            return False
        heads[late] = before
    used = np.flatnonzero(heads)
    if not (header.index_count > 1) <= len(used) <= header.slots_in_use < header.index_count:
        return False
    if (items["key_hash"][heads[used] - 1] % geometry.slots != used).any():
        return False
    # brokers before mid-2020 counted a slot for each entry; then all entries have to prove the geometry
    return len(used) == header.slots_in_use or _are_chains(_entries(data, geometry, header), geometry.slots)


def _are_chains(entries: npt.NDArray[np.void], slots: int) -> bool:
    """Return whether each entry names the one before it in its slot, or 0."""
    slot = entries["key_hash"].astype(np.int64) % slots
    order = np.argsort(slot, kind="stable")
    before = np.zeros(len(order), np.int64)
    before[1:] = np.where(slot[order[1:]] == slot[order[:-1]], order[:-1] + 1, 0)
    return bool((entries["previous"][order] == before).all())


def _entries(data: bytes | bytearray, geometry: Geometry, header: ClassicHeader) -> npt.NDArray[np.void]:
    return np.frombuffer(data, ENTRY, header.index_count - 1, geometry.entries_at + ENTRY_BYTES)


def classic_file_names(folder: Path) -> list[str]:
    """Return the names of the index files in a folder, oldest first; a missing folder is empty."""
    with local_errors(folder):
        try:
            entries = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        except FileNotFoundError:
            return []
    return sorted(name for name in entries if len(name) == _NAME_DIGITS and name.isascii() and name.isdecimal())


def read_entries(path: Path) -> npt.NDArray[np.void]:
    """Return all entries (`ENTRY`, n) of an index file in order of insertion. Raises `CorruptFile`."""
    with local_errors(path):
        size_bytes = path.stat().st_size
    data = pread(path, min(size_bytes, 2**31), 0)
    return _entries(data, infer_geometry(data, str(path)), decode_header(data, str(path)))


Int64 = npt.NDArray[np.int64]
# Most offsets of missing messages that are named
_NAMED = 100


@dataclass
class ClassicImport:
    """One import and its counts. `put` is used in place of `index.put_batch`, to wait during back-pressure."""

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
    # Messages that are in no segment or can't be read; `missing_offsets` has the first of them
    missing: int = 0
    missing_offsets: list[int] = field(default_factory=list)
    hidden: int = 0
    # Entries whose message has no key of their hash.
    mismatched: int = 0

    def __post_init__(self) -> None:
        if not classic_file_names(self.folder):
            raise InvalidArgument(f"{self.folder} holds no classic index file (named by 17 digits)")
        check_one_store(self.index, self.store.source, restart=self.restart)
        self.position = 0 if self.restart else self.index.durable_position(self.source) or 0
        # a broker indexes messages of every topic, and since 5.4 also their tags
        everything = Selection(topics=("*",), tags=True)
        self._reader = CommitLogReader(self.store.commitlog, selection=everything)
        # The last message that was counted as missing or hidden: the next file may also have keys of it
        self._judged = -1
        self._last = -1
        self._last_hashes: set[int] = set()  # of the entries seen of the message at `_last`
        # whether an entry of a tag was taken: then the last message's may follow
        self._has_tags = False

    @property
    def source(self) -> str:
        """The name under which the index keeps the position."""
        return f"classic:{self.folder.resolve()}"

    @property
    def end_offset(self) -> int:
        """The offset of the last entry of the newest file."""
        return self._header(classic_file_names(self.folder)[-1]).end_offset

    def run(self) -> Iterator[int]:
        """Import all entries; yield the position from time to time. Raises `CorruptFile` and the errors of `put`."""
        for name in classic_file_names(self.folder):
            try:
                # an empty file has no geometry
                entries = read_entries(self.folder / name) if self._header(name).index_count > 1 else None
            except FileNotFoundError:
                continue  # the broker has deleted it, and before it the messages of its entries
            if entries is not None:
                yield from self._file(entries)
            del entries  # before the next file is read
            self.files += 1
        if self._last >= 0 and self._is_settled():
            self._advance(self._last + 1)
            yield self.position

    def _is_settled(self) -> bool:
        """Return whether no further entry of the last message can have a new key."""
        if self._judged == self._last:
            return True
        try:
            message = self._reader.read(self._last)
        except (CorruptFile, InvalidArgument):
            return False  # deleted since
        keys = message.lookup_keys if self._has_tags else message.index_keys
        hashed, _ = hash_batch(
            [message.topic], np.zeros(len(keys), np.int64), code_units(pa.array(keys, pa.large_string()))
        )
        return set(hashed.tolist()) <= self._last_hashes

    def _advance(self, position: int) -> None:
        self.put(decode_index_columns(b"", position).columns, self.source, position)
        self.position = position

    def _header(self, name: str) -> ClassicHeader:
        path = self.folder / name
        return decode_header(pread(path, HEADER_BYTES, 0), str(path))

    def _file(self, entries: npt.NDArray[np.void]) -> Iterator[int]:
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
        """Yield the readable batches of the log from offset `first` to the batch that has `last`."""
        try:
            for batch in self._reader.batches(first, skip_corrupt=True, skip_missing=True):
                yield batch
                if batch.end > last:
                    return
        except MissingOffsets:  # the log ends before
            return

    def _take(self, batch: IndexBatch, offsets: Int64, hashes: Int64, last: int) -> Int64:
        """Put the keys that have an entry; return the offsets of entries without such a key."""
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
            self._has_tags = self._has_tags or pc.any(pc.starts_with(picked.column("key"), tag_key(""))).as_py()
            self.entries += self.put(picked, self.source, min(batch.end, last))
            self.position = min(batch.end, last)
        return offsets[~np.isin(want, have)]

    def _judge(self, offsets: Int64) -> None:
        """Count dropped entries by reason."""
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
