"""Records of the storage's log as uploads and jobs append them, without the uploads."""

import base64
import json
import zlib
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from tiered_index.base.clock import Clock, ManualClock
from tiered_index.format.layout import NATIVE, Layout
from tiered_index.format.segments.segment import ArchivedSegment
from tiered_index.service.log.checkpoint import CHECKPOINT_VERSION
from tiered_index.service.log.log import StorageLog, publishing
from tiered_index.service.log.records import MOST_INLINE, IndexDescriptor, LogRecord, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import Segments, inline_catalog
from tiered_index.storage.base import Storage

GENESIS = IndexDescriptor("0123", Layout(NATIVE, NATIVE.schema, 7, 20), "custom")


def an_object(number: int) -> StoredObject:
    """Return a file that no storage has."""
    file_id = f"{1_700_000_000_000 + number:015d}-{number:012x}"
    return StoredObject(f"data/{file_id}/0.index", file_id, "main", number, 0, 1, 1, 100, 50, 0, 10, 10, 0)


def open_log(storage: Storage, clock: Clock | None = None) -> StorageLog:
    """Return a view of the storage's log, opened."""
    log = StorageLog(storage, clock or ManualClock())
    log.open()
    return log


def publish(
    log: StorageLog,
    epoch: int,
    add: tuple[StoredObject, ...] = (),
    *,
    remove: Collection[str] = (),
    positions: dict[str, int] | None = None,
) -> LogState:
    """Append a record of an upload. Like a job's, it can remove objects."""
    uploaded = publishing(epoch, add, positions=positions or {})

    def make(state: LogState) -> LogRecord | None:
        record = uploaded(state)
        gone = tuple(name for name in remove if name in state.objects)
        if not gone:
            return record
        return replace(record or LogRecord(0, "remove", epoch, "", 0, positions=positions or {}), remove=gone)

    return log.append("publish", epoch, make)


def record_document(data: bytes) -> dict[str, Any]:
    """Return the document of a record."""
    document: dict[str, Any] = json.loads(data.rpartition(b"\n#crc32 ")[0])
    return document


def checkpoint_document(data: bytes) -> dict[str, Any]:
    """Return the document of the state in a checkpoint, as SPEC.md section 9 describes it."""
    outer = record_document(data)
    assert list(outer) == ["version", "kind", "state"] and outer["version"] == CHECKPOINT_VERSION
    document: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(outer["state"])))
    return document


def segments_of(state: LogState, storage: Storage | None = None) -> list[ArchivedSegment]:
    """Return the archived segments of a state. Without a storage, all its catalogs are in records."""
    return list(Segments(state, storage))


def state_with(segments: Iterable[ArchivedSegment]) -> LogState:
    """Return a state with these segments."""
    rows = sorted(segments, key=lambda segment: segment.place)
    catalogs = [inline_catalog(rows[at : at + MOST_INLINE]) for at in range(0, len(rows), MOST_INLINE)]
    return LogState(catalogs={stored.name: stored for stored in catalogs})
