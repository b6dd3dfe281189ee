"""Checks of archived segments: each against the log's word and its own checksums. What nobody names is a note, as with other objects.

One thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.archived import SegmentTable
from tiered_index.format.names import SEGMENTS_PREFIX
from tiered_index.service.checks.report import Progress, Report
from tiered_index.service.log_records import ArchivedSegment, LogState
from tiered_index.service.segment_archive import SegmentArchive
from tiered_index.storage.base import Storage

__all__ = ["check_segments", "note_stray_segments"]

_PIECES = 16
# read at once


def check_segments(storage: Storage, segments: Iterable[ArchivedSegment], report: Report, progress: Progress, *, deep: bool) -> None:
    """Check size and table of archived segments, with `deep` every byte. Raises `StorageError`."""
    nothing = LogState()
    archive = SegmentArchive(storage, lambda: nothing, lambda: nothing)
    for number, segment in enumerate(segments, 1):
        try:
            table = archive.table(segment)
            report.count("segments")
            if deep:
                _check_bytes(archive, segment, table, report)
        except ObjectNotFound:
            report.add(segment.name, "segment", "the log names it, the storage does not have it")
        except CorruptFile as error:
            report.add_error(segment.name, "segment", error)
        progress(number, "archived segments")


def _check_bytes(archive: SegmentArchive, segment: ArchivedSegment, table: SegmentTable, report: Report) -> None:
    whole = 0
    step = _PIECES * table.piece_bytes
    for begin in range(0, segment.size_bytes, step):
        data = memoryview(archive.read(segment, segment.start + begin, min(step, segment.size_bytes - begin)))
        whole = zlib.crc32(data, whole)
        report.count("object_bytes", len(data))
        for at in range(0, len(data), table.piece_bytes):
            piece = (begin + at) // table.piece_bytes
            found, expected = zlib.crc32(data[at : at + table.piece_bytes]), int(table.pieces[piece])
            if found != expected:
                report.add(segment.name, f"piece {piece}", f"CRC32 {found:#010x}, its table says {expected:#010x}", begin + at)
    if whole != segment.crc32:
        report.add(segment.name, "segment", f"CRC32 {whole:#010x}, the log says {segment.crc32:#010x}")


def note_stray_segments(storage: Storage, refreshed: Callable[[], LogState], report: Report) -> None:
    """Note what lies among the archived segments and isn't named by the log, which `refreshed` reads on."""
    strays = list(storage.list(SEGMENTS_PREFIX))
    named = refreshed().archive
    for info in strays:
        if info.name not in named:
            report.note(f"{info.name}: {info.size_bytes:,} bytes that the log doesn't name: an upload under way, or what a crash left")
    for handle in storage.list_uploads(SEGMENTS_PREFIX):
        report.note(f"{handle.name}: an unfinished upload, under way or left by a crash")
