"""Caches of stored files within bounds of bytes: verified blocks, directories and filters.

Keys begin with the index's id, so that several indexes share the bounds. Filters lie in the disk cache, read by
verified pieces of 4 KiB, or without one whole in memory. A **miss** is a lookup that read a file for a key that it
doesn't hold, its filter in no cache; at `after_probes` misses one thread fetches the filter. One for which the caches
would have to evict is fetched only once misses have read as many bytes as it has: needless bytes at most double.
Objects never change under a name, so a verified block is used although its object was deleted since. Threads: any
number.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tiered_index.format.archived import SegmentTable
from tiered_index.format.bloom import (
    FILTER_BLOCK_BYTES,
    block_may_hold,
    block_number,
    block_numbers,
    blocks_may_hold,
    filter_hash,
)
from tiered_index.format.compacted import GROUP_BYTES
from tiered_index.format.trailer import Trailer
from tiered_index.service.cold.disk_cache import PIECE_BYTES, CacheFolder
from tiered_index.service.log.records import StoredObject

_BLOCKS_A_PIECE = PIECE_BYTES // FILTER_BLOCK_BYTES
# in place of a piece's number
_WHOLE = -1
# what a miss reads, about
_MISS_BYTES = GROUP_BYTES
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The use of a cache so far: hits, misses and evictions, and its present entries and bytes."""

    hits: int
    misses: int
    evictions: int
    entries: int
    size_bytes: int
    max_bytes: int


class ByteCache(Generic[K, V]):
    """Holds values up to `max_bytes` (0: none), none of more than half of it, which would evict most others."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # value, bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._size_bytes = self._hits = self._misses = self._evictions = 0

    def get(self, key: K, *, counts_miss: bool = True) -> V | None:
        """Return the value, or None. Without `counts_miss` the caller asks again where there is none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += counts_miss
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return entry[0]

    def takes(self, size_bytes: int) -> bool:
        """Return whether a value of `size_bytes` would be kept."""
        return size_bytes * 2 <= self._max_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Return whether as much is free."""
        return self._size_bytes + size_bytes <= self._max_bytes

    def put(self, key: K, value: V, size_bytes: int) -> bool:
        """Keep `value`, which takes `size_bytes`, and evict for it; return whether it is kept."""
        if not self.takes(size_bytes):
            return False
        with self._lock:
            old = self._entries.pop(key, None)
            self._size_bytes += size_bytes - (old[1] if old is not None else 0)
            self._entries[key] = value, size_bytes
            while self._size_bytes > self._max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self._size_bytes -= freed
                self._evictions += 1
        return True

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._entries.clear()
            self._size_bytes = 0

    def use(self) -> CacheUse:
        """Return the counters at one moment."""
        with self._lock:
            return CacheUse(
                self._hits, self._misses, self._evictions, len(self._entries), self._size_bytes, self._max_bytes
            )


class Caches:
    """Verified blocks by (index, object, offset), directories by (index, object), filters by (index, object, piece)."""

    def __init__(self, block_cache_bytes: int, directory_cache_bytes: int) -> None:
        self.blocks: ByteCache[tuple[str, str, int], bytes] = ByteCache(block_cache_bytes)
        self.directories: ByteCache[tuple[str, str], Trailer] = ByteCache(directory_cache_bytes)
        self.filters: ByteCache[tuple[str, str, int], bytes] = ByteCache(directory_cache_bytes // 2)
        # tables of archived segments, by storage and object: 256 KiB for a segment of 1 GiB
        self.segments: ByteCache[tuple[str, str], SegmentTable] = ByteCache(directory_cache_bytes // 4)

    def use(self) -> dict[str, CacheUse]:
        """Return how they were used: ``blocks``, ``directories``, ``filters``."""
        return {"blocks": self.blocks.use(), "directories": self.directories.use(), "filters": self.filters.use()}

    def clear(self) -> None:
        """Drop everything."""
        for cache in (self.blocks, self.directories, self.filters, self.segments):
            cache.clear()


@dataclass(eq=False)
class Filters:
    """The cached filters of one index's stored files; `memory` may be shared with other indexes."""

    folder: CacheFolder | None
    memory: ByteCache[tuple[str, str, int], bytes]
    index_id: str
    after_probes: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _misses: dict[str, int] = field(default_factory=dict)
    _missed_bytes: int = 0
    _fetching: dict[str, int] = field(default_factory=dict)  # bytes of filters that are being fetched
    false_positives: int = 0
    """Searches that found nothing though the filter let them."""
    kept: int = 0
    """How many filters have come into memory."""

    def excludes(self, stored: StoredObject, key_hash: int, fingerprint: int) -> bool:
        """Return whether the file certainly doesn't hold a key; False where its filter is in no cache. `filter_hash`
        says what the numbers are.
        """
        blocks = stored.filter_length // FILTER_BLOCK_BYTES
        if not blocks:
            return False
        whole = self.memory.get((self.index_id, stored.name, _WHOLE))
        if whole is None and self.folder is None:
            return False
        hash64 = filter_hash(key_hash, fingerprint)
        block = self._block(stored, block_number(hash64, blocks), whole)
        return block is not None and not block_may_hold(block, hash64)

    def excludes_many(self, stored: StoredObject, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return which of `hashes` (n) the file certainly doesn't hold; none where its filter is in no cache."""
        blocks = stored.filter_length // FILTER_BLOCK_BYTES
        nothing = np.zeros(len(hashes), bool)
        if not blocks or not len(hashes):
            return nothing
        numbers = block_numbers(hashes, blocks)
        whole = self.memory.get((self.index_id, stored.name, _WHOLE))
        if whole is not None:
            return ~blocks_may_hold(_words(whole)[numbers], hashes)
        pieces, place = np.unique(numbers // _BLOCKS_A_PIECE, return_inverse=True)
        found = []
        for piece in pieces.tolist():
            data = self._piece(stored, piece)
            if data is None:
                return nothing
            found.append(data.ljust(PIECE_BYTES, b"\0"))
        words = _words(b"".join(found))
        return ~blocks_may_hold(words[place * _BLOCKS_A_PIECE + numbers % _BLOCKS_A_PIECE], hashes)

    def record_miss(self, stored: StoredObject, hash64: int) -> None:
        """Count a miss of the key of `hash64`: a false positive where the filter is in a cache."""
        if not self.fits(stored):
            return
        whole = self.memory.get((self.index_id, stored.name, _WHOLE))
        if self._block(stored, block_number(hash64, stored.filter_length // FILTER_BLOCK_BYTES), whole) is not None:
            with self._lock:
                self.false_positives += 1
            return
        with self._lock:
            self._misses[stored.name] = self._misses.get(stored.name, 0) + 1
            self._missed_bytes += _MISS_BYTES

    def is_due(self, stored: StoredObject) -> bool:
        """Return whether the file had as many misses as make it worth while to fetch its filter."""
        return self._misses.get(stored.name, 0) >= self.after_probes

    def begin_fetch(self, stored: StoredObject) -> bool:
        """Return whether the caller, and nobody else, is to fetch the file's filter now and then call `end_fetch`."""
        name, length = stored.name, stored.filter_length
        with self._lock:
            if name in self._fetching or not self.is_due(stored):
                return False
            if not self._cache_of(length).has_room(length + sum(self._fetching.values())):
                if self._missed_bytes < length:
                    return False
                self._missed_bytes -= length
            self._fetching[name] = length
            return True

    def end_fetch(self, stored: StoredObject) -> None:
        """Count the file's misses from 0 again: its filter was fetched, or could not be."""
        with self._lock:
            self._misses.pop(stored.name, None)
            self._fetching.pop(stored.name, None)

    def fits(self, stored: StoredObject) -> bool:
        """Return whether the file has a filter and a cache would keep it."""
        return stored.filter_length > 0 and self._cache_of(stored.filter_length).takes(stored.filter_length)

    def keep(self, stored: StoredObject, data: bytes) -> bool:
        """Take in a file's verified filter; return whether a cache keeps it."""
        kept = self.folder is not None and self.folder.write(stored.name, "filter", data)
        return kept or self.adopt(stored, data)

    def adopt(self, stored: StoredObject, data: bytes) -> bool:
        """Take in a file's verified filter in memory alone, as of a summary; return whether it is kept."""
        kept = self.memory.put((self.index_id, stored.name, _WHOLE), data, len(data))
        # after the filter: who sees the number finds it
        self.kept += 1
        return kept

    def whole(self, stored: StoredObject) -> bytes | None:
        """Return a file's filter where it is in memory."""
        return self.memory.get((self.index_id, stored.name, _WHOLE), counts_miss=False)

    def has(self, stored: StoredObject) -> bool:
        """Return whether the whole filter is in a cache; what is in the disk cache is verified."""
        if self.memory.get((self.index_id, stored.name, _WHOLE)) is not None:
            return True
        return self.folder is not None and self.folder.read(stored.name, "filter", stored.filter_length) is not None

    def forget_unnamed(self, named: Container[str]) -> None:
        """Forget the misses of objects that are not among `named`."""
        with self._lock:
            self._misses = {name: count for name, count in self._misses.items() if name in named}

    def _cache_of(self, length: int) -> CacheFolder | ByteCache[tuple[str, str, int], bytes]:
        return self.folder if self.folder is not None and self.folder.takes(length) else self.memory

    def _block(self, stored: StoredObject, number: int, whole: bytes | None) -> bytes | None:
        if whole is not None:
            return whole[number * FILTER_BLOCK_BYTES : (number + 1) * FILTER_BLOCK_BYTES]
        piece = self._piece(stored, number // _BLOCKS_A_PIECE)
        if piece is None:
            return None
        at = number % _BLOCKS_A_PIECE * FILTER_BLOCK_BYTES
        return piece[at : at + FILTER_BLOCK_BYTES]

    def _piece(self, stored: StoredObject, number: int) -> bytes | None:
        if self.folder is None:
            return None
        key = self.index_id, stored.name, number
        piece = self.memory.get(key)
        if piece is None:
            piece = self.folder.read_piece(stored.name, "filter", stored.filter_length, number)
            if piece is not None:
                self.memory.put(key, piece, len(piece))
        return piece


def _words(data: bytes) -> npt.NDArray[np.uint32]:
    return np.frombuffer(data, "<u4").reshape(-1, 8)
