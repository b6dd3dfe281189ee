"""What a micro-batch holds, as a number that is the same whenever the same rows come again, whatever tasks and tables they were cut into.

A checksum of a shard is not that: a topic's id may be a neighbouring one where two names of a task have the same CRC. Ids are left out
here; an entry's hash is of topic and key. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.format.shard import entry_checksum

__all__ = ["BatchContent"]


@dataclass(frozen=True, slots=True)
class BatchContent:
    """How many entries, and the sum (u64) of a mix of each."""

    entries: int = 0
    checksum: int = 0

    @classmethod
    def of(cls, items: npt.NDArray[Any], seconds: npt.NDArray[np.int64]) -> BatchContent:
        """Return the content of items (n) of these seconds (n)."""
        told = [name for name in items.dtype.names or () if name != "topic_id"]
        return cls(len(items), entry_checksum(items[told], seconds))

    @classmethod
    def joined(cls, parts: Iterable[BatchContent]) -> BatchContent:
        """Return the content of all parts together."""
        known = list(parts)
        return cls(sum(part.entries for part in known), sum(part.checksum for part in known) % 2**64)
