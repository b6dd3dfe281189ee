"""Entries on their way to the shards: hashed, packed as they will be stored, and cut into blocks of one piece each.

A block is one binary cell of up to 2 MiB: Spark moves few large rows instead of one an entry. Runs in tasks, one thread each. Memory: a
million entries, packed and sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.format.hashing import normal_hashes
from tiered_index.format.shard import entry_checksum
from tiered_index.service.answers.topics import TopicTable
from tiered_index.service.answers.validation import Columns, batch_columns
from tiered_index.spark.build_plan import BuildPlan

__all__ = ["BLOCK_SCHEMA", "Seen", "pack_batches"]

BLOCK_SCHEMA = "partition int, piece long, items binary, checksum binary"
Seen = Callable[[npt.NDArray[Any], npt.NDArray[np.int64]], None]
_HELD_ITEMS = 1 << 20
_BLOCK_ITEMS = 1 << 16
_ARROW = pa.schema([("partition", pa.int32()), ("piece", pa.int64()), ("items", pa.binary()), ("checksum", pa.binary())])


def pack_batches(batches: Iterable[pa.RecordBatch], plan: BuildPlan, seen: Seen | None = None) -> Iterator[pa.RecordBatch]:
    """Yield blocks of the entries in `batches` (the fields of entries, see `columns`). Raises `InvalidArgument` for bad values.

    `seen` is called once with each entry, in pieces: items (n) and their seconds (i64, n).

    `checksum` is that of all entries of a yielded batch and stands in its first row, 8 bytes, 0 in the others: sums are what is compared.
    """
    topics, schema = plan.topic_table(), plan.genesis.layout.schema
    held: list[Columns] = []
    count = 0
    for batch in batches:
        if batch.column("key").null_count:
            batch = batch.filter(pc.is_valid(batch.column("key")))
        if not len(batch):
            continue
        columns, _ = batch_columns(_with_topic_ids(batch, topics), schema, topics)
        held.append(columns)
        count += len(batch)
        if count >= _HELD_ITEMS:
            yield _blocks(held, count, plan, seen)
            held, count = [], 0
    if count:
        yield _blocks(held, count, plan, seen)


def _with_topic_ids(batch: pa.RecordBatch, topics: TopicTable) -> pa.RecordBatch:
    """Return the batch with ids by name where its own are missing."""
    at = batch.schema.get_field_index("topic_id")
    if at < 0 or not batch.column(at).null_count:
        return batch
    if batch.column(at).null_count == len(batch):
        return batch.drop_columns(["topic_id"])
    names = batch.column("topic").dictionary_encode()
    ids = pa.array([topics.assign(name) for name in names.dictionary.to_pylist()], pa.int64())
    filled = pc.coalesce(batch.column(at).cast(pa.int64()), ids.take(names.indices))
    return batch.set_column(at, "topic_id", filled)


def _blocks(held: list[Columns], count: int, plan: BuildPlan, seen: Seen | None) -> pa.RecordBatch:
    dtype = plan.genesis.layout.schema.item
    seconds = np.concatenate([columns["second"] for columns in held])
    hashes = normal_hashes(np.concatenate([columns["key_hash"] for columns in held]))
    pieces, begins = plan.pieces_of(seconds, hashes)
    items = np.empty(count, dtype)
    for name in dtype.names or ():
        items[name] = seconds - begins if name == "time_diff_s" else np.concatenate([columns[name] for columns in held])
    checksum = entry_checksum(items, seconds)
    if seen is not None:
        seen(items, seconds)
    order = np.argsort(pieces, kind="stable")
    pieces, packed = pieces[order], items[order]
    # a block ends where a piece does, and after so many items
    firsts = np.unique(np.concatenate([np.flatnonzero(np.diff(pieces, prepend=-1)), np.arange(0, count, _BLOCK_ITEMS)]))
    number = pieces[firsts]
    checksums = [checksum.to_bytes(8, "big")] + [bytes(8)] * (len(firsts) - 1)
    columns = [pa.array(plan.partition_of_piece[number]), pa.array(number), _cells(packed, firsts, count), pa.array(checksums, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=_ARROW)


def _cells(packed: npt.NDArray[np.void], firsts: npt.NDArray[np.int64], count: int) -> pa.Array:
    """Return runs of items as a binary column over their own memory; a million items of 1 KiB fit its 32-bit offsets."""
    offsets = (np.append(firsts, count) * packed.dtype.itemsize).astype(np.int32)
    return pa.BinaryArray.from_buffers(pa.binary(), len(firsts), [None, pa.py_buffer(offsets), pa.py_buffer(packed.view(np.uint8))])
