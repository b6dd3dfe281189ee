"""Lost objects: the end of the log names them, the storage does not have them; and giving them up by one log record.

From that record on answers are complete but for what such an object held, and say so for ever. Nothing else changes, so
a crash leaves the index as it was or as it should be, and repeating it is harmless. Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tiered_index.errors import InvalidArgument, ObjectNotFound
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord, LostObject, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage


def not_there(storage: Storage, objects: Iterable[StoredObject]) -> list[StoredObject]:
    """Return those that the storage does not have: a request each. Raises as the storage."""
    missing = []
    for stored in objects:
        try:
            storage.head(stored.name)
        except ObjectNotFound:
            missing.append(stored)
    return missing


def named(state: LogState, file: str) -> list[StoredObject]:
    """Return the objects of a name, of a file's id, or of a window table's."""
    return [stored for stored in state.objects.values() if file in _names(stored)]


def give_up(storage: Storage, log: StorageLog, files: Sequence[str], *, dry_run: bool = False) -> list[LostObject]:
    """Remove from the log what the storage lost of `files` (each as in `named`), unless it is a `dry_run`; return it,
    with what was given up before. Raises `InvalidArgument` where nothing of one is lost, as the storage; then nothing
    is given up.
    """
    state = log.refresh()
    missing: list[StoredObject] = []
    for file in files:
        known = named(state, file)
        gone = not_there(storage, known)
        if not gone and not any(file in _names(one) for one in state.lost.values()):
            problem = "the storage has it: nothing is lost" if known else "the log names no such object"
            raise InvalidArgument(f"--lost {file}: {problem}")
        missing += gone

    def make(state: LogState) -> LogRecord | None:
        gone = tuple({stored.name: stored for stored in missing if stored.name in state.objects}.values())
        if not gone:
            return None  # an earlier try got as far as the log, or a merge had it in time
        names = tuple(stored.name for stored in gone)
        return LogRecord(0, "remove", 0, "", 0, remove=names, lost=tuple(map(LostObject.of, gone)))

    if dry_run:
        planned = {stored.name: LostObject.of(stored) for stored in missing}
        state = replace(state, lost={**state.lost, **planned})
    else:
        state = log.append("what was lost", None, make)
    return [one for one in state.lost.values() if not set(files).isdisjoint(_names(one))]


def _names(one: StoredObject | LostObject) -> tuple[str, ...]:
    return (one.name, one.file_id) if one.shard is None else (one.name, one.file_id, one.shard.table)
