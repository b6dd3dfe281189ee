"""One task's entries as tables of its own: a small one for each window it met, uploaded and not published.

```
batches ─> counted, kept on local disk ─> plan ─> hashed, packed into blocks on local disk ─> by window and piece: sorted, written, uploaded
```
The plan, which a build makes on the driver for all tasks, is the task's own here, so no task waits for another and nothing is shuffled.
Names of tables and objects are unique to the attempt. Memory: that of packing and writing a build's partition. Threads: one a task.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import CorruptFile
from tiered_index.service.log.records import Genesis
from tiered_index.service.merge.run import abandon
from tiered_index.spark.build_plan import BuildPlan, plan_build
from tiered_index.spark.census import CENSUS_COLUMNS, Census, count_batches
from tiered_index.spark.metrics import Address
from tiered_index.spark.packing import Seen, pack_batches
from tiered_index.spark.shards import PartitionResult, write_blocks
from tiered_index.spark.windows import WindowScale

__all__ = ["PartitionJob", "write_tables"]


@dataclass(frozen=True, slots=True)
class PartitionJob:
    """What every task of a write is told."""

    address: Address
    genesis: Genesis
    scale: WindowScale
    sequence: int
    max_windows: int
    now_ms: int


def write_tables(entries: Iterable[pa.RecordBatch], job: PartitionJob, seen: Seen | None = None) -> PartitionResult:
    """Write the tables of `entries` (fields of entries, each with a key). Raises `InvalidArgument` for bad values, what the storage raises.

    `seen` is called as by `pack_batches`. Nothing that was uploaded is left where it fails, as far as the storage lets it be taken back.
    """
    with tempfile.TemporaryDirectory(prefix="tiered-index-") as folder:
        kept, blocks = Path(folder) / "entries", Path(folder) / "blocks"
        census = _kept(entries, kept, job)
        if not census.entries:
            return PartitionResult(0, 0, ())
        plan = plan_build(census, job.genesis, job.scale, shards="auto", parallelism=1, sequence=job.sequence, max_windows=job.max_windows)
        pieces = _packed(kept, blocks, plan, seen)
        kept.unlink()
        result = write_blocks(_by_piece(blocks, pieces), plan, job.address, job.now_ms)
    try:
        _check(result, census)
    except CorruptFile:
        with job.address.open() as storage:
            abandon(result.shards, storage)
        raise
    return result


def _check(result: PartitionResult, census: Census) -> None:
    written = sum(shard.stored.count for shard in result.shards)
    if written != census.entries:
        raise CorruptFile("a task's tables", "wrote another number of entries than it read", expected=census.entries, found=written)
    checksum = sum(shard.checksum for shard in result.shards) % 2**64
    if checksum != result.read_checksum:
        raise CorruptFile("a task's tables", "wrote other entries than it read", expected=result.read_checksum, found=checksum)


def _kept(entries: Iterable[pa.RecordBatch], path: Path, job: PartitionJob) -> Census:
    """Write the batches to a file and return their census."""
    writer: pa.RecordBatchStreamWriter | None = None

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal writer
        for batch in entries:
            if writer is None:
                writer = pa.ipc.new_stream(str(path), batch.schema)
            writer.write_batch(batch)
            looked_at = batch.select([name for name in CENSUS_COLUMNS if name in batch.schema.names])
            yield looked_at.append_column("has_key", pc.is_valid(batch.column("key")))

    try:
        return Census.of([[row.column(0)[0].as_py()] for row in count_batches(counted(), job.scale, job.max_windows)])
    finally:
        if writer is not None:
            writer.close()


def _packed(kept: Path, path: Path, plan: BuildPlan, seen: Seen | None) -> list[list[int]]:
    """Write the blocks of the entries in `kept` to a file; return the piece of each row of each of its batches."""
    pieces: list[list[int]] = []
    with pa.memory_map(str(kept)) as source, pa.ipc.open_stream(source) as batches, pa.OSFile(str(path), "wb") as sink:
        writer: pa.RecordBatchFileWriter | None = None
        for batch in pack_batches(batches, plan, seen):
            writer = writer or pa.ipc.new_file(sink, batch.schema)
            writer.write_batch(batch)
            pieces.append(batch.column("piece").to_pylist())
        if writer is not None:
            writer.close()
    return pieces


def _by_piece(path: Path, pieces: list[list[int]]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the file, one a batch, in order of their pieces."""
    batch_of = np.repeat(np.arange(len(pieces)), [len(rows) for rows in pieces])
    row_of = np.concatenate([np.arange(len(rows)) for rows in pieces])
    order = np.argsort(np.concatenate([np.array(rows, np.int64) for rows in pieces]), kind="stable")
    with pa.memory_map(str(path)) as source:
        blocks = pa.ipc.open_file(source)
        batches = [blocks.get_batch(number) for number in range(blocks.num_record_batches)]
        for number, row in zip(batch_of[order].tolist(), row_of[order].tolist(), strict=True):
            yield batches[number].slice(row, 1)
