"""When lookups fetch the filters of stored files, and what these exclude.

Filters are whole in memory, and also in the disk cache, from which one read brings a filter back. One of more than a
quarter of the memory for all caches is not read.

A **miss** is a search of a file that found nothing while its filter was not in memory. After `after_probes` misses one
thread fetches the filter. A filter that might take the place of others, or of directories, is fetched only after misses
have read as many bytes as it has. So useless bytes at most double. Threads: any number.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

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
from tiered_index.service.log.records import StoredObject
from tiered_index.service.read.caches.disk import CacheFolder
from tiered_index.service.read.caches.store import ReadCache

# estimated bytes that a miss reads
_MISS_BYTES = GROUP_BYTES


@dataclass(eq=False)
class Filters:
    """The cached filters of one index's stored files; `memory` may be shared with other indexes."""

    folder: CacheFolder | None
    memory: ReadCache
    index_id: str
    after_probes: int
    _lock: Lock = field(default_factory=call_lock)
    _misses: dict[str, int] = field(default_factory=dict)
    _missed_bytes: int = 0
    _fetching: dict[str, int] = field(default_factory=dict)  # bytes of filters that are being fetched
    false_positives: int = 0
    """Number of searches that found nothing although a cached filter allowed them."""

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

    def excludes_many(
        self, stored: StoredObject, hashes: npt.NDArray[np.uint64], *, again: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Return which of `hashes` (n) the file certainly lacks; none if its filter is not at hand.

        `again`: the lookup has asked before, and may have fetched the filter since.
        """
        held = self._at_hand(stored, again=again) if len(hashes) else None
        if held is None:
            return np.zeros(len(hashes), bool)
        words = np.frombuffer(held, "<u4").reshape(-1, 8)
        return ~blocks_may_hold(words[block_numbers(hashes, len(words))], hashes)

    def record_miss(self, stored: StoredObject) -> None:
        """Count a miss, or a false positive if the file's filter is at hand."""
        if not self.fits(stored):
            return
        is_mistaken = self._at_hand(stored, again=True) is not None
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
        """Return whether the file has a filter of at most a quarter of the memory for caches."""
        return stored.filter_length > 0 and self.memory.filters.takes(stored.filter_length)

    def wants(self, stored: StoredObject) -> bool:
        """Return whether the file has a filter that no cache has, and that would not evict others."""
        return self.fits(stored) and self._has_room(stored.filter_length) and self.whole(stored) is None

    def keep(self, stored: StoredObject, data: bytes) -> bool:
        """Cache a file's verified filter, in memory and on disk. Return whether it is in memory."""
        if self.folder is not None:
            self.folder.write(stored.name, "filter", data)
        return self.memory.filters.put((self.index_id, stored.name), data, len(data))

    def whole(self, stored: StoredObject) -> bytes | None:
        """Return a file's verified filter, and keep it in memory; None: no cache has it, or it does not fit."""
        key = self.index_id, stored.name
        held = self.memory.filters.peek(key)
        if held is None and self.folder is not None and self.fits(stored):
            held = self.folder.read(stored.name, "filter", stored.filter_length)
            if held is not None:
                self.memory.filters.put(key, held, len(held))
        return held

    def forget_unnamed(self, named: Container[str]) -> None:
        """Forget the misses of objects that are not in `named`."""
        with self._lock:
            self._misses = {name: count for name, count in self._misses.items() if name in named}

    def _at_hand(self, stored: StoredObject, *, again: bool = False) -> bytes | None:
        """Return a file's filter from memory, or from the disk cache if that evicts no other one from memory.

        `again`: the lookup's use of the filter is noted already.
        """
        if not stored.filter_length:
            return None
        key, filters = (self.index_id, stored.name), self.memory.filters
        held = filters.peek(key) if again else filters.get(key)
        return held if held is not None or not self.memory.has_room(stored.filter_length) else self.whole(stored)

    def _has_room(self, length: int) -> bool:
        """Return whether a filter of `length` bytes would evict nothing from memory and disk."""
        on_disk = self.folder is None or not self.folder.takes(length) or self.folder.has_room(length)
        return on_disk and self.memory.has_room(length)
