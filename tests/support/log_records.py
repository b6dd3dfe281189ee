"""Records of the storage's log as uploads and jobs append them, without the uploads."""

import base64
import json
import zlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tiered_index.clock import Clock, ManualClock
from tiered_index.format.layout import NATIVE, Layout
from tiered_index.service.log.columns import columns_of
from tiered_index.service.log.log import StorageLog, publishing
from tiered_index.service.log.records import IndexDescriptor, LogRecord, StoredObject, encode_document
from tiered_index.service.log.state import LogState
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
        gone = tuple(name for name in remove if name in state.objects or name in state.archive)
        if not gone:
            return record
        return replace(record or LogRecord(0, "remove", epoch, "", 0, positions=positions or {}), remove=gone)

    return log.append("publish", epoch, make)


def checkpoint_document(data: bytes) -> dict[str, Any]:
    """Return the document of the state in a checkpoint, as SPEC.md section 9 describes it."""
    outer = json.loads(data.rpartition(b"\n#crc32 ")[0])
    assert list(outer) == ["version", "kind", "state"] and outer["version"] == 7
    document: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(outer["state"])))
    return document


def earlier_checkpoint(state: LogState, base: LogState | None = None, *, rows: bool = True) -> bytes:
    """Return a checkpoint as versions before 7 wrote it.

    It has documents or rows, and only the changes since the checkpoint of `base` if that is given.
    """
    known = dict(base.objects) | dict(base.archive) if base is not None else {}
    objects = [stored for stored in state.objects.values() if known.get(stored.name) is not stored]
    document = checkpoint_document(state.encode()) | columns_of(objects)
    if segments := [segment.to_json() for segment in state.archive.values() if known.get(segment.name) is not segment]:
        document["archive"] = segments
    else:
        document.pop("archive", None)
    # no earlier version wrote it
    assert not any(document["objects"].pop("generation"))
    if rows:
        document["objects"] = list(zip(*document["objects"].values(), strict=True))
    else:
        del document["tables"]
        document["objects"] = [stored.to_json() for stored in objects]
    if base is not None:
        present = {**state.objects, **state.archive}
        removed = [name for name, before in known.items() if present.get(name) is not before]
        document["since"] = {"number": base.number, "digest": base.digest, "removed": removed}
    kind = "checkpoint" if base is None else "changes"
    return encode_document({"version": 6 if rows else 4, "kind": kind, **document})
