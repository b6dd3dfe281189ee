"""A cache in memory with a bound in bytes: what was used longest ago goes first.

Values are immutable (bytes, parsed tables), so a caller may keep what it got after it was thrown out. Threads: any
number, one lock held for a few dictionary steps.

What is kept in memory of stored files: one set of caches for an index, or for all indexes that are read as one.

Keys begin with the index's id, so that objects of one name in two storages are two. The bounds are of all indexes
together: one that is asked much may have nearly all of them. Threads: any number.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from tiered_index.format.trailer import Trailer

__all__ = ["ByteCache", "CacheUse", "Caches"]

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How a cache was used so far: look-ups that found and missed, entries thrown out, and what it holds now."""

    hits: int
    misses: int
    evictions: int
    entries: int
    size_bytes: int
    max_bytes: int


class ByteCache(Generic[K, V]):
    """Holds values up to `max_bytes` (0: none). A value larger than half of the bound is not kept: it would throw out
    most others.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # value, bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._size_bytes = self._hits = self._misses = self._evictions = 0

    def get(self, key: K) -> V | None:
        """Return the value, or None where it is not there."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
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
        """Keep `value`, which takes `size_bytes`, and throw out what must go for it; return whether it is kept."""
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
        """Let go of everything."""
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

    def use(self) -> dict[str, CacheUse]:
        """Return how they were used: ``blocks``, ``directories``, ``filters``."""
        return {"blocks": self.blocks.use(), "directories": self.directories.use(), "filters": self.filters.use()}

    def clear(self) -> None:
        """Let go of everything."""
        for cache in (self.blocks, self.directories, self.filters):
            cache.clear()
