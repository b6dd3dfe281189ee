"""The writing half of a build: a partition's blocks, sorted by piece, become shards that are uploaded but not published.

Runs in tasks; one row a partition goes back to the driver. A task may be repeated, run twice at once or die at any moment: its objects have
names of their own. Memory: two pieces and their sort, whatever the partition's size.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.service.merge.pieces import Piece
from tiered_index.service.merge.writing import FinishedShard, TableRun
from tiered_index.spark.build_plan import BuildPlan
from tiered_index.spark.freed_memory import between_tasks
from tiered_index.spark.metrics import Address
from tiered_index.spark.spool import Spool
from tiered_index.storage.base import Storage

__all__ = ["RESULT_SCHEMA", "PartitionResult", "write_blocks", "write_partition"]

RESULT_SCHEMA = "result binary"
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """What a partition got, and wrote. `read_checksum` is the sum that came with the blocks."""

    entries: int
    read_checksum: int
    shards: tuple[FinishedShard, ...]


def write_partition(
    batches: Iterable[pa.RecordBatch], plan: BuildPlan, address: Address, now_ms: int
) -> Iterator[pa.RecordBatch]:
    """Yield one row with the `PartitionResult` of blocks (columns piece, items, checksum; sorted by piece)."""
    with between_tasks():
        result = write_blocks(batches, plan, address, now_ms)
    yield pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})


def write_blocks(batches: Iterable[pa.RecordBatch], plan: BuildPlan, address: Address, now_ms: int) -> PartitionResult:
    """Write the shards of blocks, as `write_partition`; what was uploaded is taken back where that fails."""
    checksum = 0
    with address.open() as storage:
        writer = _PartitionWriter(plan, storage, now_ms)
        try:
            for batch in batches:
                checksum += int(_cells(batch.column("checksum"), np.dtype(">u8")).astype(np.uint64).sum(dtype=np.uint64))
                pieces = batch.column("piece").to_numpy()
                firsts = np.flatnonzero(np.diff(pieces, prepend=-1)).tolist()
                for first, stop in zip(firsts, [*firsts[1:], len(pieces)], strict=True):
                    cells = batch.column("items").slice(first, stop - first)
                    writer.add(int(pieces[first]), _cells(cells, plan.genesis.layout.schema.item))
            shards = writer.finish()
        except BaseException:
            writer.abandon()
            raise
    return PartitionResult(writer.entries, checksum % 2**64, shards)


def _cells(column: Any, dtype: np.dtype[Any]) -> Array:
    """Return what the cells of a binary column hold, one behind the other, without a copy."""
    wide = pa.types.is_large_binary(column.type)
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)[column.offset : column.offset + len(column) + 1]
    start, stop = int(offsets[0]), int(offsets[-1])
    return np.frombuffer(data, dtype, (stop - start) // dtype.itemsize, start)


class _PartitionWriter:
    """Gathers pieces and hands them to the table run of their shard."""

    def __init__(self, plan: BuildPlan, storage: Storage, now_ms: int) -> None:
        self.entries = 0
        self._plan, self._storage, self._now_ms, self._most = plan, storage, now_ms, 2 * plan.piece_items
        self._topics = dict(plan.topics)
        self._piece = -1
        self._held: list[Array] = []
        self._held_items = 0
        self._spool: Spool | None = None
        self._shard: tuple[int, int] | None = None
        # (table, shard of the table) that `_run` writes
        self._run: TableRun | None = None
        self._runs: list[TableRun] = []

    def add(self, piece: int, items: Array) -> None:
        if piece != self._piece:
            self._end_piece()
            self._piece = piece
        self.entries += len(items)
        if self._spool is not None:
            self._spool.add(items)
            return
        self._held.append(items.copy())  # the batch's memory is much larger
        self._held_items += len(items)
        if self._held_items > self._most:
            self._spool = Spool(self._plan.genesis.layout.schema.item)
            for held in self._held:
                self._spool.add(held)
            self._held, self._held_items = [], 0

    def finish(self) -> tuple[FinishedShard, ...]:
        self._end_piece()
        if self._run is not None:
            self._run.finish()
        return tuple(shard for run in self._runs for shard in run.finished)

    def abandon(self) -> None:
        if self._spool is not None:
            self._spool.close()
        for run in self._runs:
            run.abandon()

    def _end_piece(self) -> None:
        """Write the piece that has been gathered."""
        if not self._held and self._spool is None:
            return
        plan = self._plan
        index = plan.table_of(self._piece)
        table = plan.tables[index]
        number = self._piece - table.first_piece
        shard = number // table.pieces_a_shard
        if self._shard != (index, shard):
            if self._run is not None:
                self._run.finish()
            slots = table.base_slots(shard * table.pieces_a_shard, table.pieces_a_shard)
            most = (self._most + 1) * table.pieces_a_shard
            self._run = TableRun(plan.genesis, table.window, slots, self._topics, plan.sequence, most, self._storage, self._now_ms)
            self._runs.append(self._run)
            self._shard = (index, shard)
        assert self._run is not None
        low, high = table.base_slots(number, 1)
        begin_s = table.window.begin_s
        if self._spool is None:
            # joined as raw bytes: NumPy would turn the columns into native order
            items = np.concatenate([held.view(np.void) for held in self._held]).view(self._held[0].dtype)
            self._held, self._held_items = [], 0
            self._run.add(Piece(low, high, items, items["time_diff_s"].astype(np.int64) + begin_s, None))
            return
        for part, items in enumerate(self._spool.parts(self._most)):
            self._run.add(Piece(low, high, items, items["time_diff_s"].astype(np.int64) + begin_s, part))
        self._spool.close()
        self._spool = None
