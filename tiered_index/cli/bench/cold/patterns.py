"""Other ways to read the same files: RocketMQ's, and nothing but the ranges.

RocketMQ's tiered `IndexStoreFile` reads a slot's 8 bytes and then its array, one after the other, of every file in the
range; there is no filter, and an array is not checked. How many files it asks at once is its provider's matter, so both
are measured: one after another, and as many side by side as we have reads under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from tiered_index.cli.bench.cold.network import RawGet
from tiered_index.format.compacted import bare_slot_run
from tiered_index.format.hashing import key_hash, normal_hashes
from tiered_index.format.layout import HEADER_SIZE, SLOT_SIZE, Layout
from tiered_index.format.trailer import Run
from tiered_index.service.files.compacted import StorageBytes
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import PriceTable

__all__ = ["Spent", "as_rocketmq", "raw_ranges", "runs_of"]

_PRICES = PriceTable()


@dataclass
class Spent:
    """What a way of reading took."""

    found: int = 0
    requests: int = 0
    bytes: int = 0
    cost_usd: float = 0.0

    @classmethod
    def of_gets(cls, found: int, requests: int, read: int) -> Spent:
        """Return what `requests` GETs cost."""
        return cls(found, requests, read, _PRICES.cost_usd({"get_range": requests}, read))


def runs_of(files: Sequence[StorageBytes], topic: str, key: str) -> list[tuple[str, Run]]:
    """Return the ranges that hold a key's slot, of each file whose slot group isn't empty."""
    hash31 = key_hash(topic, key)
    found = []
    for file in files:
        trailer = file.trailer()
        slot = hash31 % trailer.metadata.layout.slots
        found += [(file.stored.name, run) for run in trailer.directory.runs(slot, hash31, 0, 1 << 62)]
    return found


def raw_ranges(pool: Executor, get: RawGet, runs: Sequence[tuple[str, Run]]) -> Spent:
    """Read ranges side by side, as plain GETs of which the slowest counts."""
    if len(runs) == 1:
        ((name, run),) = runs
        return Spent.of_gets(0, 1, len(get(name, run.offset, run.length)))
    bodies = list(pool.map(lambda item: len(get(item[0], item[1].offset, item[1].length)), runs))
    return Spent.of_gets(0, len(bodies), sum(bodies))


def as_rocketmq(
    pool: Executor | None, storage: Storage, layout: Layout, files: Sequence[StorageBytes], topic: str, key: str
) -> Spent:
    """Look a key up as RocketMQ does; without a pool one file after another."""
    hash31 = key_hash(topic, key)
    slot = hash31 % layout.slots

    def look(file: StorageBytes) -> Spent:
        name, size = file.stored.name, file.stored.size_bytes
        slot_item = storage.get_range(name, HEADER_SIZE + SLOT_SIZE * slot, SLOT_SIZE)
        position, length = bare_slot_run(slot_item, layout, name, size, slot)
        if not length:
            return Spent(0, 1, SLOT_SIZE)
        items = np.frombuffer(storage.get_range(name, position, length), layout.schema.item)
        return Spent(int(np.count_nonzero(normal_hashes(items["key_hash"]) == hash31)), 2, SLOT_SIZE + length)

    spent = list((pool.map if pool is not None and len(files) > 1 else map)(look, files))
    return Spent.of_gets(sum(s.found for s in spent), sum(s.requests for s in spent), sum(s.bytes for s in spent))
