"""The protocol of a peer: a store in its own folder that takes batches of entries, durably, and finds them by key.

One thread uses it. A peer's library is imported when the peer is made, so that the others run without it.
"""

import importlib.metadata
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.benchmarks.peers.data import hash_of, pairs_of

CACHE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
"""The cache of each peer that has its own, a quarter of the memory. The others have the page cache."""


class Peer(ABC):
    """A store in `folder` that will hold about `entries` entries.

    `small`: with buffers so small that compaction runs while `entries` are written.
    """

    name: str
    modules: tuple[str, ...] = ()
    """The modules that must be importable."""
    tells_keys_apart = True
    """Whether answers have only the key's entries. Otherwise they can have those of other keys with an equal hash."""
    survives_reading = True
    """Whether it keeps writing after lookups, so that a crash then interrupts a write."""

    def __init__(self, folder: Path, entries: int, small: bool = False) -> None:
        self.folder = folder
        self.entries = entries
        self.small = small

    @classmethod
    def missing(cls) -> str | None:
        """Return the reason why the peer can't run here, or None."""
        modules = [f"Python module {name}" for name in cls.modules if importlib.util.find_spec(name) is None]
        return ", ".join(modules) + " not installed" if modules else None

    @classmethod
    def version(cls) -> str:
        distributions = importlib.metadata.packages_distributions()
        names = [distributions[module][0] for module in cls.modules]
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)

    @abstractmethod
    def open(self) -> None:
        """Open the store, or make it. Recovers what a crash left."""

    def prepare(self, entries: pa.RecordBatch) -> Any:
        """Return a batch as `put_batch` takes it: the driver's share of writing."""
        return entries

    @abstractmethod
    def put_batch(self, prepared: Any) -> None:
        """Store a prepared batch; durable when this returns."""

    @abstractmethod
    def lookup(self, key: str) -> Any:
        """Return a key's entries, every column decoded."""

    @abstractmethod
    def lookup_many(self, keys: list[str]) -> Any:
        """Return the entries of many keys, by the batch interface if there is one; every column decoded."""

    @abstractmethod
    def settle(self) -> None:
        """Finish every compaction, so that the store has its final form."""

    @abstractmethod
    def close(self) -> None:
        """Close the store."""

    @abstractmethod
    def stored_bytes(self) -> int:
        """Return the number of bytes that hold the settled entries."""

    def reader(self) -> "Peer | None":
        """Return another way to look up in the settled store, not opened yet. It is measured separately."""
        return None

    def offsets(self, answer: Any) -> list[int]:
        """Return the offsets in the result of `lookup`. Not timed."""
        return [row[0] for row in answer]

    def offsets_by_key(self, keys: Sequence[str], answer: Any) -> list[list[int]]:
        """Return the offsets of each key in the result of `lookup_many`. Not timed."""
        offsets: dict[int, list[int]] = {hash_of(key): [] for key in keys}
        for key, offset in pairs_of(answer):
            offsets[key].append(offset)
        return [offsets[hash_of(key)] for key in keys]
