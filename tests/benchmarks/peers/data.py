"""The entries that every peer gets, the right answers, and a peer's row of an entry.

An entry's number n defines the entry, and messages are those of the machine's suites. With m entries per key, entry n
has key n modulo entries/m, so that a key's entries are as far apart in time as possible. This module is pure.

A peer keys its rows by 64 bits in place of the key's text, as this index does. They are Python's own `hash` (SipHash,
in C), a cheap hash, so that the driver's share stays small. Processes that share a folder need the same
``PYTHONHASHSEED``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tests.benchmarks.messages import absent_keys, batch, key_array, keys_of

ROW = np.dtype(
    [("key", ">i8"), ("offset", ">i8"), ("queue_id", ">i4"), ("topic_id", ">i4"), ("size", ">i4"), ("second", ">i4")]
)
"""A peer's row of an entry: 32 bytes, also the base of amplification."""
KEY_BYTES = 8


@dataclass(frozen=True)
class Data:
    """`entries` entries, `per_key` of each key. `per_key` divides `entries`."""

    entries: int
    per_key: int

    @property
    def keys(self) -> int:
        """The number of distinct keys."""
        return self.entries // self.per_key

    def batches(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield all entries in order of time, `rows` at a time."""
        for start in range(0, self.entries, rows):
            numbers = np.arange(start, min(start + rows, self.entries))
            yield batch(numbers, key_array(numbers % self.keys))

    def drawn(self, count: int, seed: int) -> npt.NDArray[np.int64]:
        """Return the numbers of `count` keys that exist, different ones while there are enough."""
        return np.random.default_rng(seed).permutation(self.keys)[:count]

    def expected(self, key_number: int) -> list[int]:
        """Return the offsets of a key's entries, ascending."""
        return [(key_number + at * self.keys) * 1000 for at in range(self.per_key)]

    texts = staticmethod(keys_of)
    absent = staticmethod(absent_keys)


def hash_of(key: str) -> int:
    """Return a key's 64 bits, signed."""
    return hash(key)


def packed(entries: pa.RecordBatch) -> npt.NDArray[Any]:
    """Return the rows (`ROW`) of a batch of entries of one topic, sorted by key: a tree's neighbours together."""
    rows = np.zeros(len(entries), ROW)
    rows["key"] = np.fromiter(map(hash, entries["key"].to_pylist()), np.int64, len(entries))
    for name in ("offset", "queue_id", "size"):
        rows[name] = entries[name].to_numpy()
    rows["second"] = entries["timestamp_ms"].to_numpy() // 1000
    return rows[np.argsort(rows["key"], kind="stable")]


def native_table(entries: pa.RecordBatch) -> pa.Table:
    """Return the rows of `packed` as a table, in the machine's byte order."""
    rows = packed(entries)
    return pa.table({name: rows[name].astype(rows.dtype[name].newbyteorder("=")) for name in ROW.names or ()})


def pairs_of(rows: Any) -> list[tuple[int, int]]:
    """Return (key's hash, offset) of rows, an array of `ROW` or tuples that begin with both."""
    if isinstance(rows, np.ndarray):
        return list(zip(rows["key"].tolist(), rows["offset"].tolist(), strict=True))
    return [(row[0], row[1]) for row in rows]
