"""`tiered-index files`: every file of an index, its state and its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from tiered_index.cli.output import counted, human_bytes, human_count, states
from tiered_index.cli.session import Session, command
from tiered_index.cli.times import format_time, human_duration
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.files.compacted import CompactedFile, DamagedFile
from tiered_index.service.files.window_table import WindowTable
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.reader import IndexReader
from tiered_index.service.reading.root_view import UnsealedView

_PARTIAL = 6


@command
def files(session: Session) -> int:
    """List every file and window table: state, lane, interval, entries, bytes and where it lies; then what is archived.

    Exit code 6 where one can't be read.

    [bold]Examples[/bold]

      tiered-index files --storage s3://bucket/index

      tiered-index files --root /data/index --json
    """
    with IndexReader.open(config=session.config()) as reader:
        listed = [describe_handle(handle) for handle in reader.files()]
        genesis, number, archived = reader.genesis, reader.log_state.number, reader.archived()
    broken = [file for file in listed if file["error"] is not None]
    totals: dict[str, Any] = {
        "files": len(listed),
        "entries": sum(file["entries"] or 0 for file in listed),
        "bytes": sum(file["bytes"] or 0 for file in listed),
        "by_state": dict(Counter(file["state"] for file in listed)),
    }
    status = "partial" if broken else "complete"
    session.out.answer(
        {
            "index_id": genesis.index_id,
            "log_number": number,
            "status": status,
            "files": listed,
            "totals": totals,
            "archived": [segment.to_json() for segment in archived],
        }
    )
    session.out.table(
        ("file", "state", "lane", "from", "to", "entries", "bytes", "place"), map(_row, listed), right="entries bytes"
    )
    session.out.line(
        f"{counted(len(listed), 'file')} ({states(totals['by_state']) or 'none'}), "
        f"{counted(totals['entries'], 'entry', 'entries')}, {human_bytes(totals['bytes'])}"
    )
    for store, segments in groupby(archived, key=lambda segment: segment.store):
        session.out.line(f"archived of {store}: {_archived(list(segments))}")
    return _PARTIAL if broken else 0


def describe_handle(handle: Handle) -> dict[str, Any]:
    """Return what is known of a file without reading its entries, JSON-ready."""
    entries: int | None = None
    size_bytes: int | None = None
    path: str | None = None
    stored_as: str | None = None
    error: str | None = None
    table: dict[str, Any] | None = None
    if isinstance(handle, CompactedFile):
        entries = handle.count
        if handle.local is not None:
            path, size_bytes = handle.local.file, handle.local.size_bytes
        if handle.stored is not None:
            stored_as, size_bytes = handle.stored.stored.name, handle.stored.stored.size_bytes
    elif isinstance(handle, UnsealedView):
        entries, path, size_bytes = handle.count, str(handle.path), handle.journal.layout.unsealed_size
    elif isinstance(handle, WindowTable):
        entries, size_bytes = handle.count, sum(stored.size_bytes for stored in handle.shards)
        table = {
            "begin_ms": handle.begin_s * 1000,
            "window_s": handle.window_s,
            "slots": handle.slots.slots,
            "shards": [stored.name for stored in handle.shards],
        }
    elif isinstance(handle, DamagedFile):
        error = str(handle.error)
    return {
        "file_id": handle.file_id,
        "state": handle.place,
        "lane": handle.lane,
        "sequence": handle.sequence,
        "begin_ms": handle.second_min * 1000,
        "end_ms": handle.second_max * 1000,
        "entries": entries,
        "bytes": size_bytes,
        "path": path,
        "object": stored_as,
        "table": table,
        "error": error,
    }


def _row(file: dict[str, Any]) -> tuple[object, ...]:
    table = file["table"]
    window = table and f"window of {human_duration(table['window_s'])}, {counted(len(table['shards']), 'shard')}"
    return (
        file["file_id"],
        file["state"],
        file["lane"],
        format_time(file["begin_ms"]),
        format_time(file["end_ms"]),
        None if file["entries"] is None else human_count(file["entries"]),
        None if file["bytes"] is None else human_bytes(file["bytes"]),
        file["error"] or file["path"] or file["object"] or window,
    )


def _archived(segments: Sequence[ArchivedSegment]) -> str:
    """Return how much is archived of a store, and where segments are missing between others."""
    gaps = [later.start for one, later in pairwise(segments) if one.end < later.start]
    note = f", with {counted(len(gaps), 'gap')}, the last one before {gaps[-1]:,}" if gaps else ""
    return (
        f"{counted(len(segments), 'segment')}, {human_bytes(sum(s.size_bytes for s in segments))}, "
        f"offsets {segments[0].start:,} to {segments[-1].end:,}{note}"
    )
