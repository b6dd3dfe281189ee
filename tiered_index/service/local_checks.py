"""Checks of a local compacted file's bytes, before its predecessor goes or its object is believed. Threads: any."""

from __future__ import annotations

import zlib

from tiered_index.errors import CorruptFile
from tiered_index.format.layout import HEADER_SIZE
from tiered_index.service.compacted_file import CompactedFile, read_runs

__all__ = ["verify_runs", "verify_tables"]

_VERIFY_RUNS = 256


def verify_runs(file: CompactedFile) -> None:
    """Check every array of a local compacted file against its CRC32. Raises `CorruptFile`."""
    assert file.local is not None
    runs = file.local.trailer().directory.all_runs()
    for start in range(0, len(runs), _VERIFY_RUNS):
        read_runs(file.local, runs[start : start + _VERIFY_RUNS])


def verify_tables(file: CompactedFile) -> None:
    """Check header, slot table and filter of a local compacted file, which lookups in it do without. Raises `CorruptFile`."""
    assert file.local is not None
    trailer = file.local.trailer()
    metadata, tail = trailer.metadata, trailer.tail
    parts = (
        ("header", 0, HEADER_SIZE, metadata.header_crc32),
        ("slot table", HEADER_SIZE, metadata.layout.items_position, metadata.slots_crc32),
        ("filter", tail.position, tail.directory_position, tail.filter_crc32),
    )
    for name, start, stop, expected in parts:
        with memoryview(file.local.data) as whole, whole[start:stop] as piece:
            found = zlib.crc32(piece)
        if found != expected:
            raise CorruptFile(file.local.file, f"{name} does not match its CRC32", offset=start, expected=expected, found=found)
