"""What is kept in memory of stored files: one set of caches for an index, or for all indexes that are read as one.

Keys begin with the index's id, so that objects of one name in two storages are two. The bounds are of all indexes together: one that
is asked much may have nearly all of them.
Threads: any number.
"""

from __future__ import annotations

from tiered_index.format.trailer import Trailer
from tiered_index.service.cold.byte_cache import ByteCache, CacheUse

__all__ = ["Caches"]


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
