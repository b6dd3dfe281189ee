"""Caches of stored files, each with a bound in bytes: verified blocks, directories and filters.

Keys begin with the index's id, so that several indexes share the bounds. Filters are whole in memory, and also in the
disk cache, from which one read brings a filter back. One of more than a quarter of the memory for filters is not read.

A **miss** is a search of a file that found nothing while its filter was not in memory. After `after_probes` misses one
thread fetches the filter. A filter that would evict others is fetched only after misses have read as many bytes as it
has. So useless bytes at most double. Objects never change under a name, so a cached block is valid even after its
object was deleted. Threads: any number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tiered_index.base.locks import Lock, call_lock
from tiered_index.format.compacted import GROUP_BYTES
from tiered_index.format.keys.bloom import (
    FILTER_BLOCK_BYTES,
    block_may_hold,
    block_number,
    block_numbers,
    blocks_may_hold,
    filter_hash,
)
from tiered_index.format.segments.archived import SegmentTable
from tiered_index.format.trailer import Trailer
from tiered_index.service.log.records import StoredObject
from tiered_index.service.read.caches.disk import CacheFolder

# estimated bytes that a miss reads
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
    """An LRU cache of up to `max_bytes` (0: nothing). A value of more than 1 / `least` of that is not kept."""

    def __init__(self, max_bytes: int, *, least: int = 2) -> None:
        self._max_bytes, self._least = max_bytes, least
        self._lock = call_lock()
        # value, bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._size_bytes = self._hits = self._misses = self._evictions = 0

    def get(self, key: K, *, counts_miss: bool = True) -> V | None:
        """Return the value; None: not cached. If `counts_miss` is false, a miss is not counted."""
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
        return size_bytes * self._least <= self._max_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` are free."""
        return self._size_bytes + size_bytes <= self._max_bytes

    def put(self, key: K, value: V, size_bytes: int) -> bool:
        """Cache `value`, which takes `size_bytes`, and evict others for it. Return whether it is kept."""
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


GroupCache = ByteCache[tuple[str, str, int], bytes]


class Caches:
    """Verified blocks by (index, object, offset), directories and filters by (index, object)."""

    def __init__(self, block_cache_bytes: int, directory_cache_bytes: int) -> None:
        self.blocks: ByteCache[tuple[str, str, int], bytes] = ByteCache(block_cache_bytes)
        self.directories: ByteCache[tuple[str, str], Trailer] = ByteCache(directory_cache_bytes)
        # each of several filters must fit, because a filter is of use in many lookups
        self.filters: ByteCache[tuple[str, str], bytes] = ByteCache(directory_cache_bytes // 2, least=4)
        # tables of archived segments, by storage and object: 256 KiB for a segment of 1 GiB
        self.segments: ByteCache[tuple[str, str], SegmentTable] = ByteCache(directory_cache_bytes // 4)
        # groups of catalogs, by storage, object and position
        self.catalogs: GroupCache = ByteCache(directory_cache_bytes // 4)

    def use(self) -> dict[str, CacheUse]:
        """Return the use of the caches ``blocks``, ``directories`` and ``filters``."""
        return {"blocks": self.blocks.use(), "directories": self.directories.use(), "filters": self.filters.use()}

    def clear(self) -> None:
        """Drop everything."""
        for cache in (self.blocks, self.directories, self.filters, self.segments, self.catalogs):
            cache.clear()


@dataclass(eq=False)
class Filters:
    """The cached filters of one index's stored files; `memory` may be shared with other indexes."""

    folder: CacheFolder | None
    memory: ByteCache[tuple[str, str], bytes]
    index_id: str
    after_probes: int
    _lock: Lock = field(default_factory=call_lock)
    _misses: dict[str, int] = field(default_factory=dict)
    _missed_bytes: int = 0
    _fetching: dict[str, int] = field(default_factory=dict)  # bytes of filters that are being fetched
    false_positives: int = 0
    """Number of searches that found nothing although a cached filter allowed them."""
    cached_count: int = 0
    """Number of filters that were put into the caches."""

    def excludes(self, stored: StoredObject, key_hash: int, fingerprint: int) -> bool:
        """Return whether the file certainly lacks a key. False if its filter is not at hand.

        `key_hash` and `fingerprint`: see `filter_hash`.
        """
        held = self._at_hand(stored)
        if held is None:
            return False
        hash64 = filter_hash(key_hash, fingerprint)
        at = block_number(hash64, len(held) // FILTER_BLOCK_BYTES) * FILTER_BLOCK_BYTES
        return not block_may_hold(held[at : at + FILTER_BLOCK_BYTES], hash64)

    def excludes_many(self, stored: StoredObject, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return which of `hashes` (n) the file certainly lacks; none if its filter is not at hand."""
        held = self._at_hand(stored) if len(hashes) else None
        if held is None:
            return np.zeros(len(hashes), bool)
        words = np.frombuffer(held, "<u4").reshape(-1, 8)
        return ~blocks_may_hold(words[block_numbers(hashes, len(words))], hashes)

    def record_miss(self, stored: StoredObject) -> None:
        """Count a miss, or a false positive if the file's filter is at hand."""
        if not self.fits(stored):
            return
        is_mistaken = self._at_hand(stored) is not None
        with self._lock:
            if is_mistaken:
                self.false_positives += 1
                return
            self._misses[stored.name] = self._misses.get(stored.name, 0) + 1
            self._missed_bytes += _MISS_BYTES

    def is_due(self, stored: StoredObject) -> bool:
        """Return whether the file had enough misses to fetch its filter."""
        return self._misses.get(stored.name, 0) >= self.after_probes

    def begin_fetch(self, stored: StoredObject) -> bool:
        """Return whether the caller, as the only one, should fetch the file's filter now and then call `end_fetch`."""
        name, length = stored.name, stored.filter_length
        with self._lock:
            if name in self._fetching or not self.is_due(stored):
                return False
            if not self._has_room(length + sum(self._fetching.values())):
                if self._missed_bytes < length:
                    return False
                self._missed_bytes -= length
            self._fetching[name] = length
            return True

    def end_fetch(self, stored: StoredObject) -> None:
        """Reset the file's misses after the fetch of its filter, also if it failed."""
        with self._lock:
            self._misses.pop(stored.name, None)
            self._fetching.pop(stored.name, None)

    def fits(self, stored: StoredObject) -> bool:
        """Return whether the file has a filter of at most a quarter of the memory for filters."""
        return stored.filter_length > 0 and self.memory.takes(stored.filter_length)

    def wants(self, stored: StoredObject) -> bool:
        """Return whether the file has a filter that no cache has, and that would not evict others."""
        return self.fits(stored) and self._has_room(stored.filter_length) and self.whole(stored) is None

    def keep(self, stored: StoredObject, data: bytes) -> bool:
        """Cache a file's verified filter, in memory and on disk. Return whether it is in memory."""
        if self.folder is not None:
            self.folder.write(stored.name, "filter", data)
        is_kept = self.memory.put((self.index_id, stored.name), data, len(data))
        # after the filter, so that a thread that sees the number finds the filter
        self.cached_count += 1
        return is_kept

    def whole(self, stored: StoredObject) -> bytes | None:
        """Return a file's verified filter, and keep it in memory; None: no cache has it, or it does not fit."""
        key = self.index_id, stored.name
        held = self.memory.get(key, counts_miss=False)
        if held is None and self.folder is not None and self.fits(stored):
            held = self.folder.read(stored.name, "filter", stored.filter_length)
            if held is not None:
                self.memory.put(key, held, len(held))
        return held

    def forget_unnamed(self, named: Container[str]) -> None:
        """Forget the misses of objects that are not in `named`."""
        with self._lock:
            self._misses = {name: count for name, count in self._misses.items() if name in named}

    def _at_hand(self, stored: StoredObject) -> bytes | None:
        """Return a file's filter from memory, or from the disk cache if that evicts no other one from memory."""
        if not stored.filter_length:
            return None
        held = self.memory.get((self.index_id, stored.name))
        return held if held is not None or not self.memory.has_room(stored.filter_length) else self.whole(stored)

    def _has_room(self, length: int) -> bool:
        """Return whether a filter of `length` bytes would evict nothing from memory and disk."""
        on_disk = self.folder is None or not self.folder.takes(length) or self.folder.has_room(length)
        return on_disk and self.memory.has_room(length)
