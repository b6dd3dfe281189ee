"""Compacted files in memory: reading and verification."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.support.foreign_lookups import stored_ms
from tiered_index.format.bloom import FilterBuilder
from tiered_index.format.foreign import ForeignUnsealed
from tiered_index.format.hashing import normal_hashes
from tiered_index.format.layout import NATIVE, Layout
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.format.verify import Finding, verify_compacted

SMALL = Layout(NATIVE, NATIVE.schema, 5, 20)


def reader(data: bytes) -> Callable[[int, int], bytes]:
    """Return the function (position, length) -> bytes of a file."""
    return lambda position, length: data[position : position + length]


def verify(data: bytes, **more: Any) -> list[Finding]:
    """Return the findings of `verify_compacted` in a file of that name."""
    return verify_compacted(reader(data), len(data), "file", **more)


def parts(findings: Iterable[Finding]) -> set[str]:
    """Return the parts of the file that the findings name."""
    return {finding.part for finding in findings}


def unsealed_image(table: UnsealedTable, entries: np.ndarray) -> bytes:
    """Return the whole unsealed file of `entries` (entry 1 first): header, slots, unused entry 0, entries, zeros."""
    body = bytes(table.layout.schema.entry.itemsize) + entries.tobytes()
    return b"".join((table.header().pack(), *table.slot_pieces(), body)).ljust(table.layout.unsealed_size, b"\0")


def built_filter(hashes: np.ndarray) -> bytes:
    """Return a filter of `hashes` (u64, n; repeats count once)."""
    builder = FilterBuilder(np.empty(len(hashes), np.uint64))
    builder.add(hashes)
    return builder.build()


def rebuilt(image: ForeignUnsealed) -> tuple[UnsealedTable, np.ndarray]:
    """Return the table and the entries of a foreign file, as this project's writer would make them."""
    table = UnsealedTable(image.layout, image.header.begin_ms)
    columns = {name: image.entries[name] for name in image.layout.schema.item.names or ()}
    times = stored_ms(image.entries, image.header.begin_ms)
    batch = table.prepare(normal_hashes(image.entries["key_hash"]), times, columns)
    table.commit(batch)
    table.end_ms = max(table.end_ms, image.header.end_ms) if image.count else 0
    return table, batch.entries
