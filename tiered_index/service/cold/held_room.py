"""Room that a bounded cache holds for a value on its way, so that what is fetched side by side isn't promised the same bytes twice.

A value that is asked for may push out only what was of no use while it was waited for. Threads: those that hold the cache's lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

__all__ = ["HeldRoom"]

K = TypeVar("K")


class HeldRoom(Generic[K]):
    """Bytes that are held, by key; those who hold room count each other's as taken, the cache itself doesn't."""

    def __init__(self) -> None:
        self._held: dict[K, int] = {}

    def hold(self, key: K, size_bytes: int, free_bytes: float, used: Iterable[tuple[float, int]], since: float) -> bool:
        """Hold `size_bytes` until `release`, if there are as many free, or would be without entries last used before `since`.

        `used` has (time of last use, bytes) of the cache's entries, the one used longest ago first. Return whether the room is held.
        """
        needed = sum(self._held.values()) + size_bytes - free_bytes
        for when, freed in used:
            if needed <= 0 or when >= since:
                break
            needed -= freed
        if needed > 0:
            return False
        self._held[key] = size_bytes
        return True

    def release(self, key: K) -> None:
        """Let go of what is held for `key`, if anything is."""
        self._held.pop(key, None)
