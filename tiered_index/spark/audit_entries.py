"""Entries as an audit compares them: those that a source has, and those that stored objects hold, as rows of one shape. Runs in tasks.

`identity` and `value` are an entry's bytes: what it is (key's hashes, queue, offset, further identity columns), and what may be wrong about
it (second, size, further columns). Memory: a batch of the source, or 8 MiB of items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.hashing import normal_hashes
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import Run
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.log_records import StoredObject
from tiered_index.service.topics import TopicTable
from tiered_index.service.validation import batch_columns
from tiered_index.storage.base import Storage

__all__ = ["ENTRY_SCHEMA", "identity_dtype", "source_entries", "stored_entries", "value_dtype"]

ENTRY_SCHEMA = "side int, identity binary, value binary, topic string, key string, object string"
"""`side`: 0 of the source, 1 of the index; the source's rows have topic and key, the index's the object's name."""
_ARROW = pa.schema([
    ("side", pa.int32()), ("identity", pa.binary()), ("value", pa.binary()), ("topic", pa.string()), ("key", pa.string()),
    ("object", pa.string()),
])  # fmt: skip
_WINDOW_BYTES = 8 << 20
_Range = tuple[int, int]


def identity_dtype(schema: Schema) -> np.dtype[Any]:
    """Return the fields of an entry's identity."""
    keyed = [("fingerprint", ">u4")] if schema.keyed else []
    further = [(c.name, c.dtype) for c in schema.caller_columns if c.identity]
    return np.dtype([("key_hash", ">i4"), *keyed, ("queue_id", ">i4"), ("offset", ">i8"), *further])


def value_dtype(schema: Schema) -> np.dtype[Any]:
    """Return the fields of what else an entry says."""
    return np.dtype([("second", ">i8"), ("size", ">i4"), *((c.name, c.dtype) for c in schema.caller_columns if not c.identity)])


def source_entries(batches: Iterable[pa.RecordBatch], schema: Schema, seconds: _Range) -> Iterator[pa.RecordBatch]:
    """Yield a source's entries (the fields of entries, see `columns`) within an inclusive range of seconds. Raises `InvalidArgument`."""
    for whole in batches:
        batch = whole.filter(pc.is_valid(whole.column("key")))
        names = [name for name in batch.schema.names if name != "topic_id"]
        batch = batch.select(names)  # topics are told apart by the hash, whatever number they have
        columns, _ = batch_columns(batch, schema, TopicTable()) if len(batch) else ({}, [])
        if not columns:
            continue
        columns = columns | {"key_hash": normal_hashes(columns["key_hash"])}
        kept = np.flatnonzero((columns["second"] >= seconds[0]) & (columns["second"] <= seconds[1]))
        if len(kept):
            taken = {name: values[kept] for name, values in columns.items()}
            yield _batch(0, taken, schema, batch.column("topic").take(kept), batch.column("key").take(kept), None)


def stored_entries(stored: StoredObject, storage: Storage, schema: Schema, seconds: _Range) -> Iterator[pa.RecordBatch]:
    """Yield the entries that an object holds, those within an inclusive range of seconds.

    What is damaged or gone is passed over: checks tell of it. Raises `StorageError`.
    """
    settings = ColdSettings(query_threads=4, block_cache_bytes=0, coalesce_gap_bytes=0)
    with closing(ColdPath(storage, keyed=schema.keyed, settings=settings)) as cold:
        try:
            trailer = cold.trailer(stored)
        except (CorruptFile, ObjectNotFound):
            return
        begin_s = trailer.metadata.begin_ms // 1000
        for run in _windows(trailer.directory.all_runs()):
            for data in _readable(cold, stored, run):
                items = np.frombuffer(data, schema.item)
                times = items["time_diff_s"].astype(np.int64) + begin_s
                kept = (times >= seconds[0]) & (times <= seconds[1])
                columns: dict[str, Any] = {name: items[name][kept] for name in items.dtype.names or ()}
                columns |= {"second": times[kept], "key_hash": normal_hashes(items["key_hash"][kept])}
                if len(columns["second"]):
                    yield _batch(1, columns, schema, None, None, stored.name)


def _windows(runs: list[Run]) -> Iterator[list[Run]]:
    window: list[Run] = []
    for run in runs:
        if window and run.offset + run.length - window[0].offset > _WINDOW_BYTES:
            yield window
            window = []
        window.append(run)
    if window:
        yield window


def _readable(cold: ColdPath, stored: StoredObject, runs: list[Run]) -> list[memoryview]:
    """Return the runs that are as they should be."""
    try:
        return cold.verified(stored, runs)
    except (CorruptFile, ObjectNotFound):
        if len(runs) == 1:
            return []
    return [data for run in runs for data in _readable(cold, stored, [run])]


def _batch(
    side: int, columns: dict[str, Any], schema: Schema, topic: pa.Array | None, key: pa.Array | None, name: str | None
) -> pa.RecordBatch:
    count = len(columns["second"])
    none = pa.nulls(count, pa.string())
    texts = [none if values is None else values.cast(pa.string()) for values in (topic, key)]
    objects = none if name is None else pa.array([name] * count, pa.string())
    return pa.RecordBatch.from_arrays(
        [pa.array(np.full(count, side, np.int32)), _packed(columns, identity_dtype(schema)), _packed(columns, value_dtype(schema)),
         *texts, objects], schema=_ARROW,
    )  # fmt: skip


def _packed(columns: dict[str, Any], dtype: np.dtype[Any]) -> pa.Array:
    """Return fields of each row side by side, as binary."""
    count = len(columns["second"])
    rows: npt.NDArray[np.void] = np.empty(count, dtype)
    for name in dtype.names or ():
        rows[name] = columns[name]
    offsets = (np.arange(count + 1) * dtype.itemsize).astype(np.int32)
    return pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(rows.view(np.uint8))])
