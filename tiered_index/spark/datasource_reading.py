"""The reading half of the data source: a task's parts of objects, verified, as Arrow record batches. Runs in tasks.

A scan gives every stored entry once, a lookup every stored entry that its keys find: entries are not made one by identity, as `query`
does. An entry that several of the keys find (Java's hashes collide, and only some schemas have a fingerprint) is given for each.
Memory: the directory of one object at a time, 8 MiB of items and what Arrow makes of them. One thread and those of the cold path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.clock import SystemClock
from tiered_index.errors import CorruptFile, InvalidArgument, SchemaMismatch, StorageUnavailable
from tiered_index.format.hashing import normal_hashes
from tiered_index.format.trailer import Metadata, Run, Trailer
from tiered_index.service.answers.batch import QuestionBatch, TooManyPairs
from tiered_index.service.cold.path import ColdPath, ColdSettings, MissingObject
from tiered_index.service.log.log import StorageLog
from tiered_index.spark.datasource_filters import EARLIEST, LATEST, Selection
from tiered_index.spark.datasource_plan import ObjectPart, TaskPlan, hashes_of, questions_for
from tiered_index.storage.base import Storage

__all__ = ["read_task"]

_WINDOW_BYTES = 8 << 20
_BATCH_ROWS = 1 << 16
Array = npt.NDArray[Any]


def read_task(plan: TaskPlan, storage: Storage, wanted: Any) -> Iterator[pa.RecordBatch]:
    """Yield a task's entries as batches of the Arrow schema `wanted`.

    Raises `StorageUnavailable` where an object was removed after the read was planned, `CorruptFile`, `SchemaMismatch`, what the storage
    raises.
    """
    # what is read is read once
    cold = ColdPath(storage, keyed=plan.schema.keyed, settings=ColdSettings(query_threads=8, block_cache_bytes=0))
    try:
        for part in plan.parts:
            try:
                yield from _read_part(cold, part, plan, wanted)
            except MissingObject as error:
                raise _gone(error, plan, storage) from error
    finally:
        cold.close()


def _gone(error: MissingObject, plan: TaskPlan, storage: Storage) -> Exception:
    """Tell an object that a later record removed from one that was lost."""
    state = StorageLog(storage, SystemClock()).open()
    if error.name in state.objects:
        return CorruptFile(error.name, "the log names this object, but the storage does not have it")
    return StorageUnavailable(
        f"{error.uri}: {error.name} was removed (merged, replaced or expired) after this read was planned at log position "
        f"{plan.log_number}; load the index again and run it again"
    )


def _read_part(cold: ColdPath, part: ObjectPart, plan: TaskPlan, wanted: Any) -> Iterator[pa.RecordBatch]:
    trailer = cold.trailer(part.stored)
    metadata, selection = trailer.metadata, plan.selection
    if metadata.layout.schema != plan.schema:
        raise SchemaMismatch(f"{part.stored.name} stores {metadata.layout.schema.name} entries, the index {plan.schema.name}")
    names = {name for _, name in metadata.topics}
    if metadata.topics and selection.topics is not None and not names & selection.topics:
        return
    batch: QuestionBatch | None = None
    if selection.keys is not None:
        batch = questions_for(selection, _topics_here(part, names, selection))
        runs = _runs_of(trailer, batch.key_hash, selection)
    elif selection.hashes is not None:
        runs = _runs_of(trailer, hashes_of(selection), selection)
    else:
        runs = _share(trailer, part, selection)
    for items in _windows(cold, part, runs, plan.schema.item):
        for start in range(0, len(items), _BATCH_ROWS):
            rows = items[start : start + _BATCH_ROWS]
            for columns in [_scanned(rows, metadata, selection)] if batch is None else _found(rows, metadata, batch, plan):
                if len(columns["offset"]):
                    yield _arrow(columns, metadata, wanted)


def _topics_here(part: ObjectPart, names: set[str], selection: Selection) -> set[str] | frozenset[str]:
    """Return the topics in which keys are looked for in an object."""
    if names:
        return names if selection.topics is None else names & selection.topics
    if selection.topics is None:
        raise InvalidArgument(f"{part.stored.name} doesn't name its topics, and a key is hashed with its topic: give the topic, too")
    return selection.topics


def _runs_of(trailer: Trailer, hashes: Array, selection: Selection) -> list[Run]:
    low, high = trailer.metadata.slot_range
    slots = trailer.metadata.slot_map.slots_of(hashes)
    return trailer.directory.runs_of(slots[(slots >= low) & (slots < high)], selection.second_min, selection.second_max)


def _share(trailer: Trailer, part: ObjectPart, selection: Selection) -> list[Run]:
    """Return the runs that begin in this part's share of the bytes: each is in one share."""
    runs = trailer.directory.all_runs()
    ends = np.cumsum([run.length for run in runs], dtype=np.int64)
    total = int(ends[-1]) if len(runs) else 0
    begins = ends - [run.length for run in runs]
    low, high = total * part.number // part.parts, total * (part.number + 1) // part.parts
    first, last = np.searchsorted(begins, [low, high]).tolist()
    return [run for run in runs[first:last] if run.second_min <= selection.second_max and run.second_max >= selection.second_min]


def _windows(cold: ColdPath, part: ObjectPart, runs: Sequence[Run], dtype: np.dtype[Any]) -> Iterator[Array]:
    """Yield the items of runs, about 8 MiB at a time."""
    reached = itertools.accumulate(run.length for run in runs)
    for _, window in itertools.groupby(zip(runs, reached, strict=True), lambda one: (one[1] - 1) // _WINDOW_BYTES):
        yield np.frombuffer(b"".join(cold.verified(part.stored, [run for run, _ in window])), dtype)


def _scanned(items: Array, metadata: Metadata, selection: Selection) -> dict[str, Any]:
    """Return the columns of the items that a selection without keys takes, in native order."""
    seconds = items["time_diff_s"].astype(np.int64) + metadata.begin_ms // 1000
    hashes = normal_hashes(items["key_hash"])
    kept = np.ones(len(items), np.bool_)
    if selection.second_min > EARLIEST or selection.second_max < LATEST:
        kept &= (seconds >= selection.second_min) & (seconds <= selection.second_max)
    if selection.hashes is not None:
        kept &= np.isin(hashes, hashes_of(selection))
    if selection.topics is not None:
        kept &= np.isin(items["topic_id"], [topic_id for topic_id, name in metadata.topics if name in selection.topics])
    columns = {name: items[name][kept] for name in items.dtype.names or ()}
    return {**columns, "key_hash": hashes[kept], "second": seconds[kept]}


def _found(items: Array, metadata: Metadata, batch: QuestionBatch, plan: TaskPlan) -> Iterator[dict[str, Any]]:
    """Yield the columns of the items that answer questions; items are halved where they make too many pairs."""
    try:
        places, questions = batch.join(items["key_hash"])
    except TooManyPairs:
        yield from _found(items[: len(items) // 2], metadata, batch, plan)
        yield from _found(items[len(items) // 2 :], metadata, batch, plan)
        return
    picked = items[places]
    seconds = metadata.begin_ms // 1000 + picked["time_diff_s"].astype(np.int64)
    pairs = [(topic_id, name) for topic_id, name in metadata.topics if name in batch.topics] if metadata.topics else None
    found = batch.select(picked, questions, seconds, pairs, plan.schema)
    asked = found.questions.tolist()
    columns = {name: found.rows[name] for name in found.rows.dtype.names or ()}
    yield {**columns, "topic": [batch.lookups[q].topic for q in asked], "key": [batch.lookups[q].key for q in asked]}


def _arrow(columns: dict[str, Any], metadata: Metadata, wanted: Any) -> pa.RecordBatch:
    arrays = [_array(columns, metadata, field.name, field.type) for field in wanted]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _array(columns: dict[str, Any], metadata: Metadata, name: str, kind: Any) -> Any:
    count = len(columns["offset"])
    if name == "timestamp":
        return pa.array(columns["second"] * 1_000_000).cast(kind)
    if name == "topic" and "topic" not in columns:
        ids = np.array([topic_id for topic_id, _ in metadata.topics], np.int64)
        order = np.argsort(ids)
        at = np.searchsorted(ids[order], columns["topic_id"].astype(np.int64))
        known = at < len(ids)
        known[known] = ids[order][at[known]] == columns["topic_id"][known]
        texts = pa.array([metadata.topics[i][1] for i in order.tolist()], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(at.astype(np.int32), mask=~known), texts).cast(kind)
    if name not in columns:
        return pa.nulls(count, kind)  # the key, where none is asked for
    values = columns[name]
    if isinstance(values, list) or values.dtype.kind == "S":
        return pa.array(list(values), kind)
    native = pa.array(values.astype(values.dtype.newbyteorder("="), copy=False))
    # Arrow makes decimals of 64 unsigned bits by way of text only
    return native.cast(pa.string()).cast(kind) if pa.types.is_decimal(kind) else native.cast(kind)
