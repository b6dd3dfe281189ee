"""What readers cache in memory of stored files, with one bound in bytes.

A value that was used once since it came is dropped before one that was used again: a **segmented LRU**. `_once` has the
former, `_again` the latter; both are in order of their last use. `_again` has at most three quarters of the bytes. A
value moves there by pushing back those used longest ago, unless one of these was used more often; its number of uses is
halved then. So lookups over all files replace what other lookups over all files have brought.

The compiled core searches a stored file by the directory and the filter that this has. It does not call this for each
lookup; it counts the `uses` of the file (`LocalFile.uses`). This looks at the count when it would drop a value, or move
one back. When it drops a value, the core no longer has it either, and the searches that still run free the memory.

A value never changes under its key.

`Filters` decides when lookups fetch the filters of stored files. They are whole in memory, and also in the disk cache,
from which one read brings a filter back. One of more than a quarter of the memory for all caches is not read. A
**miss** is a search of a file that found nothing while its filter was not in memory. After `after_probes` misses one
thread fetches the filter. A filter that might take the place of others, or of directories, is fetched only after misses
have read as many bytes as it has. So useless bytes at most double. Threads: any number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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

if TYPE_CHECKING:
    from tiered_index.base._views import LocalFile

# a value of more than 1 / 4 of the bytes is not cached, so that each fits beside those that were used again
_LARGEST = 4
# estimated bytes that a miss reads
_MISS_BYTES = GROUP_BYTES
# those that were used again have at most 3 / 4 of the bytes
_AGAIN = 3, 4
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The use of one kind of cached values so far: hits, misses and evictions, and its present entries and bytes."""

    hits: int
    misses: int
    evictions: int
    entries: int
    size_bytes: int


class _Entry:
    """A cached value. `seen_uses` is `file.uses` when this was last looked at."""

    __slots__ = "file", "is_again", "key", "kind", "seen_uses", "size_bytes", "uses", "value"

    def __init__(self, kind: CachedKind[Any, Any], key: Any, value: Any, size_bytes: int) -> None:
        self.kind, self.key, self.value, self.size_bytes = kind, key, value, size_bytes
        self.is_again = False
        self.file: LocalFile | None = None
        self.uses = self.seen_uses = 0


class CachedKind(Generic[K, V]):
    """The cached values of one kind, by key."""

    def __init__(self, cache: ReadCache, name: str) -> None:
        self.name = name
        self._cache = cache
        self._entries: dict[K, _Entry] = {}
        self.size_bytes = self.hits = self.misses = self.evictions = 0

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._entries)

    def get(self, key: K, *, counts_miss: bool = True) -> V | None:
        """Return the value, and note its use; None: not cached. Without `counts_miss` the caller asks once more."""
        with self._cache.lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += counts_miss
                return None
            self.hits += 1
            entry.uses += 1
            self._cache.move_up(entry)
            value: V = entry.value
            return value

    def peek(self, key: K) -> V | None:
        """Return the value, as another part of a lookup that has noted its use; None: not cached."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def takes(self, size_bytes: int) -> bool:
        """Return whether a value of `size_bytes` would be cached."""
        return size_bytes * _LARGEST <= self._cache.max_bytes

    def put(self, key: K, value: V, size_bytes: int) -> bool:
        """Cache `value`, which takes `size_bytes`, unless there is one. Return whether the key has a value."""
        if not self.takes(size_bytes):
            return False
        cache = self._cache
        with cache.lock:
            if key in self._entries:
                return True
            dropped = cache.make_room(size_bytes)
            entry = self._entries[key] = _Entry(self, key, value, size_bytes)
            self.size_bytes += size_bytes
            cache.add(entry)
        # without the lock, because other code may run when a value goes
        del dropped
        return True

    def attach(self, key: K, value: V, file: LocalFile) -> bool:
        """Note that the core searches `file` by a value from now on. Return false if the value is no longer cached."""
        with self._cache.lock:
            entry = self._entries.get(key)
            if entry is None or entry.value is not value:
                return False
            self.hits += 1
            entry.uses += 1
            self._cache.move_up(entry)
            before, entry.file, entry.seen_uses = entry.file, file, file.uses
            if before is not None and before is not file:
                # a file of the same name that an earlier opening of the index made
                self.detach(before)
            return True

    def detach(self, file: LocalFile) -> None:
        """Take the value from the core's file."""
        file.close()

    def drop(self, entry: _Entry) -> None:
        """Forget a value. The caller has the lock."""
        del self._entries[entry.key]
        self.size_bytes -= entry.size_bytes
        if entry.file is not None:
            self.was_used(entry)
            self.detach(entry.file)

    def was_used(self, entry: _Entry) -> bool:
        """Count the uses by the core since the last call. Return whether there were any. The caller has the lock."""
        if entry.file is None or (uses := entry.file.uses - entry.seen_uses) == 0:
            return False
        entry.seen_uses += uses
        entry.uses += uses
        self.hits += uses
        return True

    def use(self) -> CacheUse:
        """Return the counters at one moment."""
        with self._cache.lock:
            for entry in self._entries.values():
                if self.was_used(entry):
                    self._cache.move_up(entry)
            return CacheUse(self.hits, self.misses, self.evictions, len(self._entries), self.size_bytes)


class _Filters(CachedKind[tuple[str, str], bytes]):
    """Filters. The core can search a file without its filter."""

    def detach(self, file: LocalFile) -> None:
        """Take the filter from the core's file."""
        file.with_filter(None)


class ReadCache:
    """All cached values, of at most `max_bytes` together (0: nothing).

    - `directories`, `filters`: by index and object.
    - `slot_groups`: verified slot groups and blocks, by index, object and offset.
    - `segments`: tables of archived segments, by storage and object: 256 KiB for a segment of 1 GiB.
    - `catalogs`: groups of catalogs, by storage, object and position.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.lock = call_lock()
        self._once: OrderedDict[_Entry, None] = OrderedDict()
        self._again: OrderedDict[_Entry, None] = OrderedDict()
        self._size_bytes = self._again_bytes = 0
        self.directories: CachedKind[tuple[str, str], Trailer] = CachedKind(self, "directories")
        self.filters: CachedKind[tuple[str, str], bytes] = _Filters(self, "filters")
        self.slot_groups: CachedKind[tuple[str, str, int], bytes] = CachedKind(self, "slot_groups")
        self.segments: CachedKind[tuple[str, str], SegmentTable] = CachedKind(self, "segments")
        self.catalogs: Catalogs = CachedKind(self, "catalogs")

    @property
    def size_bytes(self) -> int:
        """The bytes of all values."""
        return self._size_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` fit beside all directories and filters, which lookups of many keys use."""
        return self.directories.size_bytes + self.filters.size_bytes + size_bytes <= self.max_bytes

    def use(self) -> dict[str, CacheUse]:
        """Return the use of each kind, by name."""
        return {kind.name: kind.use() for kind in self._kinds()}

    def clear(self) -> None:
        """Drop everything."""
        with self.lock:
            dropped = [*self._once, *self._again]
            for entry in dropped:
                entry.kind.drop(entry)
            self._once.clear()
            self._again.clear()
            self._size_bytes = self._again_bytes = 0

    def _kinds(self) -> Iterable[CachedKind[Any, Any]]:
        return self.directories, self.filters, self.slot_groups, self.segments, self.catalogs

    # the methods below are for the kinds, which have the lock

    def add(self, entry: _Entry) -> None:
        """Add a new value, for which there is room."""
        self._once[entry] = None
        self._size_bytes += entry.size_bytes

    def move_up(self, entry: _Entry) -> None:
        """Move a value that was used to its new place."""
        if entry.is_again:
            self._again.move_to_end(entry)
            return
        while (self._again_bytes + entry.size_bytes) * _AGAIN[1] > self.max_bytes * _AGAIN[0]:
            oldest = next(iter(self._again))
            oldest.kind.was_used(oldest)
            if oldest.uses > entry.uses:
                oldest.uses //= 2
                self._again.move_to_end(oldest)
                self._once.move_to_end(entry)
                return
            del self._again[oldest]
            self._once[oldest] = None
            oldest.is_again, oldest.uses = False, 0
            self._again_bytes -= oldest.size_bytes
        del self._once[entry]
        self._again[entry] = None
        entry.is_again = True
        self._again_bytes += entry.size_bytes

    def make_room(self, size_bytes: int) -> list[_Entry]:
        """Drop values until there is room for `size_bytes`, at most a quarter of all. Return them."""
        dropped = []
        chances = len(self._once)
        while self._size_bytes + size_bytes > self.max_bytes:
            entry = next(iter(self._once))
            chances -= 1
            if chances >= 0 and entry.kind.was_used(entry):
                self.move_up(entry)
                continue
            del self._once[entry]
            self._size_bytes -= entry.size_bytes
            entry.kind.evictions += 1
            entry.kind.drop(entry)
            dropped.append(entry)
        return dropped


Catalogs = CachedKind[tuple[str, str, int], bytes]


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
