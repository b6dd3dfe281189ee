"""Filters at hand: whether a stored file can hold a key, told without a request.

A filter is megabytes and a probe looks at 32 bytes of it, so what lies in the local cache is read by verified pieces of
4 KiB; without a local cache whole filters are kept in memory, within its bound. A filter is worth fetching for a file
that was probed in vain `after_probes` times: by then it would have spared more requests than it costs.

Where not all filters fit, those at hand stay: one is fetched only if it throws out nothing that was of use while its
file was read in vain. One that was fetched twice all the same takes twice as many reads in vain each further time, up
to `2**_DOUBLINGS` as many. Threads: any number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_index.format.bloom import FILTER_BLOCK_BYTES, block_may_hold, block_number, block_numbers, blocks_may_hold
from tiered_index.service.cold.disk_cache import PIECE_BYTES, CacheFolder
from tiered_index.service.cold.memory_cache import ByteCache
from tiered_index.service.log.records import StoredObject

__all__ = ["Filters"]

_BLOCKS_A_PIECE = PIECE_BYTES // FILTER_BLOCK_BYTES
_WHOLE = -1
# in place of a piece's number
_DOUBLINGS = 10


@dataclass(slots=True)
class _InVain:
    """Reads in vain of one file, and when they began: as the memory and as the local cache count time."""

    keys: int
    since: int
    since_s: float


class Filters:
    """The filters of one index's stored files, as far as they are at hand; `memory` may be shared with other
    indexes.
    """

    def __init__(
        self,
        folder: CacheFolder | None,
        memory: ByteCache[tuple[str, str, int], bytes],
        index_id: str,
        after_probes: int,
    ) -> None:
        self._folder = folder
        self._memory = memory
        self._index_id = index_id
        self._after_probes = after_probes
        self._lock = threading.Lock()
        self._in_vain: dict[str, _InVain] = {}
        self._fetches: dict[str, tuple[int, int]] = {}
        # how often, and how many entries of the local cache had been found damaged by then: those are fetched anew as
        # at first
        self._too_large: set[str] = set()
        # files whose filters neither the local cache nor the memory took

    def excludes(self, stored: StoredObject, hash64: int) -> bool:
        """Return whether the file certainly doesn't hold the key of `hash64`; False where its filter is not at hand."""
        blocks = stored.filter_length // FILTER_BLOCK_BYTES
        if not blocks:
            return False
        block = self._block(stored, block_number(hash64, blocks))
        return block is not None and not block_may_hold(block, hash64)

    def excludes_many(self, stored: StoredObject, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return which of `hashes` (n) the file certainly doesn't hold; none where its filter is not at hand."""
        blocks = stored.filter_length // FILTER_BLOCK_BYTES
        nothing = np.zeros(len(hashes), bool)
        if not blocks or not len(hashes):
            return nothing
        numbers = block_numbers(hashes, blocks)
        whole = self._memory.get((self._index_id, stored.name, _WHOLE))
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

    def record_miss(self, stored: StoredObject, hash64: int, keys: int = 1) -> None:
        """Remember that the file was read in vain for `keys` keys, that of `hash64` among them, its filter not being at
        hand.
        """
        blocks = stored.filter_length // FILTER_BLOCK_BYTES
        if not blocks or stored.name in self._too_large:
            return
        if self._folder is None and not self._memory.takes(stored.filter_length):
            return
        if self._block(stored, block_number(hash64, blocks)) is not None:
            return
        with self._lock:
            seen = self._in_vain.setdefault(stored.name, _InVain(0, self._memory.now, time.time()))
            seen.keys += keys

    def claim(self, stored: StoredObject) -> bool:
        """Return whether the caller, and nobody else, is to fetch the file's filter now, for which room is held until
        `release`.

        The file was read in vain often enough, and what must go for the filter was of no use meanwhile; else they are
        counted anew.
        """
        name = stored.name
        if not self._is_due(name):
            return False
        with self._lock:
            if not self._is_due(name):
                return False
            seen = self._in_vain.pop(name)
        if self._folder is not None and self._folder.takes(stored.filter_length):
            held = self._folder.reserve(name, "filter", stored.filter_length, seen.since_s)
        else:
            held = self._memory.reserve((self._index_id, name, _WHOLE), stored.filter_length, seen.since)
        if held:
            with self._lock:
                self._fetches[name] = self._fetched(name) + 1, self._damaged
        return held

    def release(self, stored: StoredObject) -> None:
        """Say that the filter that was claimed is at hand, or can't be had."""
        if self._folder is not None:
            self._folder.release(stored.name, "filter")
        self._memory.release((self._index_id, stored.name, _WHOLE))

    def keep(self, stored: StoredObject, data: bytes) -> None:
        """Take in a file's verified filter."""
        kept = self._folder is not None and self._folder.write(stored.name, "filter", data)
        if not kept and not self._memory.put((self._index_id, stored.name, _WHOLE), data, len(data)):
            with self._lock:
                self._too_large.add(stored.name)

    def forget_unnamed(self, named: Container[str]) -> None:
        """Forget what was noted of objects that are not among `named`."""
        with self._lock:
            for noted in (self._in_vain, self._fetches):
                for name in [name for name in noted if name not in named]:
                    del noted[name]
            self._too_large = {name for name in self._too_large if name in named}

    def _is_due(self, name: str) -> bool:
        seen = self._in_vain.get(name)
        if seen is None or seen.keys < self._after_probes:
            return False
        again = min(max(0, self._fetched(name) - 1), _DOUBLINGS)
        return seen.keys >= self._after_probes << again

    def _fetched(self, name: str) -> int:
        """Return how often a filter was fetched since an entry of the local cache was last found damaged."""
        count, damaged = self._fetches.get(name, (0, 0))
        return count if damaged == self._damaged else 0

    @property
    def _damaged(self) -> int:
        return self._folder.damaged if self._folder is not None else 0

    def _block(self, stored: StoredObject, number: int) -> bytes | None:
        whole = self._memory.get((self._index_id, stored.name, _WHOLE))
        if whole is not None:
            return whole[number * FILTER_BLOCK_BYTES : (number + 1) * FILTER_BLOCK_BYTES]
        piece = self._piece(stored, number // _BLOCKS_A_PIECE)
        if piece is None:
            return None
        at = number % _BLOCKS_A_PIECE * FILTER_BLOCK_BYTES
        return piece[at : at + FILTER_BLOCK_BYTES]

    def _piece(self, stored: StoredObject, number: int) -> bytes | None:
        if self._folder is None:
            return None
        key = self._index_id, stored.name, number
        piece = self._memory.get(key)
        if piece is None:
            piece = self._folder.read_piece(stored.name, "filter", stored.filter_length, number)
            if piece is not None:
                self._memory.put(key, piece, len(piece))
        return piece


def _words(data: bytes) -> npt.NDArray[np.uint32]:
    return np.frombuffer(data, "<u4").reshape(-1, 8)
