"""Compacted files in memory: reading and verification."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tiered_index.format.keys.bloom import FilterBuilder
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
