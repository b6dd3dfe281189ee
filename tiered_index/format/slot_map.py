"""Slots of window tables: the index's base slots, split for large windows and joined for small ones.

With Q = (2**31 - 1) div base + 1 the *rank* of a hash is (hash mod base) * Q + (hash div base). The slots of every map
rise with the rank, so all files and tables of an index have their entries in one order, and tables are merged without a
shuffle. Pure. SPEC.md section 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.documents import integer, record
from tiered_index.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Maps hashes to slots: a base slot is split into `split`, or `join` neighbours become one; one of the two is 1."""

    base: int
    split: int = 1
    join: int = 1

    def __post_init__(self) -> None:
        if self.base < 1 or self.split < 1 or self.join < 1 or (self.split > 1 and self.join > 1):
            raise ConfigError(f"no slot map: base {self.base}, split {self.split}, join {self.join}")
        if self.split > self.quotients:
            raise ConfigError(f"{self.base} base slots can be split by {self.quotients} at most, not by {self.split}")

    @property
    def quotients(self) -> int:
        """Q: how many different hashes a base slot can hold, at most."""
        return (2**31 - 1) // self.base + 1

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return self.base * self.split if self.join == 1 else -(-self.base // self.join)

    def slots_of(self, hashes: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the slots (i64, n) of normal hashes (n), i.e. 0 to 2**31 - 1."""
        above, base_slot = np.divmod(hashes.astype(np.int64), self.base)
        if self.join > 1:
            return base_slot // self.join
        return base_slot if self.split == 1 else base_slot * self.split + above * self.split // self.quotients

    def slot_of(self, key_hash: int) -> int:
        """Return the slot of one normal hash."""
        above, base_slot = divmod(key_hash, self.base)
        if self.join > 1:
            return base_slot // self.join
        return base_slot * self.split + above * self.split // self.quotients

    def ranks_of(self, hashes: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the ranks (i64, n) of normal hashes (n)."""
        above, base_slot = np.divmod(hashes.astype(np.int64), self.base)
        return base_slot * self.quotients + above

    def slots_of_base(self, low: int, high: int) -> tuple[int, int]:
        """Return the half-open range of slots that hold the base slots [low, high); joined slots may hold others."""
        if self.join > 1:
            return low // self.join, -(-high // self.join)
        return low * self.split, high * self.split

    def to_json(self) -> dict[str, Any]:
        """Return the map as stored."""
        return {"base": self.base, "split": self.split, "join": self.join}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> SlotMap:
        """Return the map that `to_json` described. Raises `Malformed`, `ConfigError` for one that can't be."""
        return _READ(document)

    @classmethod
    def for_count(cls, base: int, count: int, per_slot: int = 4) -> SlotMap:
        """Return the map that gives `count` entries about `per_slot` a slot."""
        wanted = max(1, count // per_slot)
        if wanted >= base:
            return cls(base, split=min(wanted // base, (2**31 - 1) // base + 1))
        # powers of two, so that every border of the largest `join` is one of all
        return cls(base, join=1 << (base // wanted).bit_length() - 1)


_READ = record(SlotMap, base=integer(1, 2**28), split=integer(1, 2**31), join=integer(1, 2**28))
