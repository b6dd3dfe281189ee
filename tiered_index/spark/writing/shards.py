"""The tasks of a build: entries packed into blocks of one piece, then each partition's pieces sorted into shards.

A block is a binary cell of up to 2 MiB of items, so that Spark moves few large rows. Shards are uploaded under new
names and not published. A piece that a hot key makes too large is cut by time on local disk (`Spool`); a second is
never divided. One thread a task. Memory: a million entries, packed and sorted, before the shuffle; two pieces and their
sort after it.
"""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.packed_numpy import UnlistedTopic
from tiered_index.format.shard import mixed_columns
from tiered_index.service.jobs.rewriting.rewrite import Piece, TableRun
from tiered_index.service.log.publication import FinishedObject
from tiered_index.service.write.validation import Columns, TopicTable, batch_columns
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.frames import (
    arrow_schema,
    broadcast,
    cells_of,
    gathered,
    large_batches,
    records_of,
    repartitioned,
    shuffles_deleted,
)
from tiered_index.spark.workers import between_tasks
from tiered_index.spark.writing.census import naming_rows
from tiered_index.spark.writing.plan import BuildPlan
from tiered_index.spark.writing.sources import Entries
from tiered_index.storage.base import Storage

_CHUNK = 1 << 17
_BINS = 1 << 20
Int64 = npt.NDArray[np.int64]


class Spool:
    """Items (structured, with `time_diff_s`) of one piece; on disk if there are more than `most`."""

    def __init__(self, dtype: np.dtype[Any], most: int) -> None:
        self._dtype, self._most, self._count = dtype, most, 0
        size = most * dtype.itemsize
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(size, prefix="tiered-index-")  # noqa: SIM115 - see `close`
        self._low, self._high = 2**31 - 1, 0

    def add(self, items: Array) -> None:
        """Append items, at least one."""
        self._low = min(self._low, int(items["time_diff_s"].min()))
        self._high = max(self._high, int(items["time_diff_s"].max()))
        self._file.write(items.data)
        self._count += len(items)

    def parts(self) -> Iterator[tuple[int | None, Array]]:
        """Yield (None, all items), or if they are too many (number, items) of ranges of seconds, newest first.

        A range has at most `most` items, more only within one second, or one 2^20th of the seconds of all items.
        """
        if self._count > self._most:
            yield from enumerate(self._cut())
        else:
            self._file.seek(0)
            items = np.frombuffer(self._file.read(), self._dtype)
            self._file.close()  # memory that the sort may need
            yield None, items

    def _cut(self) -> Iterator[Array]:
        width = -(-(self._high - self._low + 1) // _BINS)
        counts = np.zeros((self._high - self._low) // width + 1, np.int64)
        for _, bins in self._binned(width):
            counts += np.bincount(bins, minlength=len(counts))
        # a range begins behind a number of `starts` of items, and ends before the bin that would exceed `most`
        behind, starts = np.cumsum(counts), [0]
        while True:
            fitting, first = np.searchsorted(behind, [starts[-1] + self._most, starts[-1]], "right").tolist()
            if (end := max(fitting, first + 1)) >= len(behind):
                break
            starts.append(int(behind[end - 1]))
        range_of_bin, written = np.searchsorted(starts, behind - counts, "right") - 1, np.array(starts)
        with tempfile.TemporaryFile(prefix="tiered-index-") as ordered:
            for items, bins in self._binned(width):
                of = range_of_bin[bins]
                order = np.argsort(of, kind="stable")
                items, of = items.take(order), of[order]
                bounds = np.flatnonzero(np.diff(of, prepend=-1)).tolist()
                for begin, end in itertools.pairwise([*bounds, len(of)]):
                    ordered.seek(int(written[of[begin]]) * self._dtype.itemsize)
                    ordered.write(items[begin:end].tobytes())
                    written[of[begin]] += end - begin
            for begin, end in itertools.pairwise([*starts, self._count]):
                ordered.seek(begin * self._dtype.itemsize)
                yield np.frombuffer(ordered.read((end - begin) * self._dtype.itemsize), self._dtype)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def _binned(self, width: int) -> Iterator[tuple[Array, Int64]]:
        """Yield the items, and the bin of each (i64): the newest `width` seconds are bin 0."""
        self._file.seek(0)
        while data := self._file.read(_CHUNK * self._dtype.itemsize):
            items = np.frombuffer(data, self._dtype)
            yield items, (self._high - items["time_diff_s"].astype(np.int64)) // width


Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """The result of a partition; `read_checksum` is the sum of its blocks' checksums."""

    entries: int
    read_checksum: int
    shards: tuple[FinishedObject, ...]


def check_sums(what: str, results: Sequence[PartitionResult]) -> None:
    """Raise `CorruptFile` unless `what` wrote the entries that it read."""
    read = sum(result.read_checksum for result in results) % 2**64
    written = sum(shard.checksum for result in results for shard in result.shards) % 2**64
    if read != written:
        raise CorruptFile(what, "wrote other entries than it read", expected=read, found=written)


def write_shards(entries: Entries, plan: BuildPlan, address: StorageAddress, now_ms: int) -> Sequence[PartitionResult]:
    """Run a build's tasks; return the results of partitions that have entries. Driver."""
    spark = entries.frame.sparkSession
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    with broadcast(spark, plan) as shared, large_batches(spark), shuffles_deleted(spark):

        def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return pack_batches(batches, shared.value)

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return write_partition(batches, shared.value, address, now_ms)

        with entries.mapped(pack, entries.names, BLOCK_SCHEMA) as packed:
            blocks = repartitioned(packed, plan.partitions, F.col("partition")).sortWithinPartitions("piece")
            rows = blocks.drop("partition").mapInArrow(write, "result binary").collect()
    return [pickle.loads(row[0]) for row in rows]


def write_partition(
    batches: Iterable[pa.RecordBatch], plan: BuildPlan, address: StorageAddress, now_ms: int
) -> Iterator[pa.RecordBatch]:
    """Yield one row with the `PartitionResult` of blocks (`BLOCK_SCHEMA`, sorted by piece)."""
    with between_tasks():
        result = write_blocks(batches, plan, address, now_ms)
    yield pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})


def write_blocks(
    batches: Iterable[pa.RecordBatch], plan: BuildPlan, address: StorageAddress, now_ms: int
) -> PartitionResult:
    """Write the shards of blocks as `write_partition`; delete them if that fails."""
    checksum = 0
    with address.open() as storage, ExitStack() as failing:
        writer = _PartitionWriter(plan, storage, now_ms)
        failing.callback(writer.abandon)
        try:
            for batch in batches:
                checksums = records_of(batch.column("checksum"), np.dtype(">u8"))
                checksum += int(checksums.astype(np.uint64).sum(dtype=np.uint64))
                for piece, cell in zip(batch.column("piece").to_pylist(), batch.column("items"), strict=True):
                    writer.add(piece, np.frombuffer(cell.as_buffer(), plan.genesis.layout.schema.item))
            shards = writer.finish()
        except UnlistedTopic as error:
            problem = "the source changed while it was read: it has topics that were not counted"
            raise InvalidArgument(problem) from error
        failing.pop_all()
    return PartitionResult(writer.entries, checksum % 2**64, shards)


class _PartitionWriter:
    def __init__(self, plan: BuildPlan, storage: Storage, now_ms: int) -> None:
        self.entries = 0
        self._plan, self._storage, self._now_ms, self._most = plan, storage, now_ms, 2 * plan.piece_items
        self._topics = dict(plan.topics)
        self._piece = -1
        self._spool: Spool | None = None
        # (table, shard of the table) that the last run writes
        self._shard: tuple[int, int] | None = None
        self._runs: list[TableRun] = []

    def add(self, piece: int, items: Array) -> None:
        if self._spool is None or piece != self._piece:
            self._end_piece()
            self._piece, self._spool = piece, Spool(self._plan.genesis.layout.schema.item, self._most)
        self.entries += len(items)
        self._spool.add(items)

    def finish(self) -> tuple[FinishedObject, ...]:
        self._end_piece()
        for run in self._runs[-1:]:
            run.finish()
        return tuple(shard for run in self._runs for shard in run.finished)

    def abandon(self) -> None:
        if self._spool is not None:
            self._spool.close()
        for run in self._runs:
            run.abandon()

    def _end_piece(self) -> None:
        if self._spool is None:
            return
        plan = self._plan
        index = plan.table_of(self._piece)
        table = plan.tables[index]
        number = self._piece - table.first_piece
        shard = number // table.pieces_a_shard
        if self._shard != (index, shard):
            for run in self._runs[-1:]:
                run.finish()
            slots = table.base_slots(shard * table.pieces_a_shard, table.pieces_a_shard)
            most = (self._most + 1) * table.pieces_a_shard
            more = plan.sequence, most, self._storage, self._now_ms
            run = TableRun(plan.genesis, table.window, slots, self._topics, *more)
            self._runs.append(run)
            self._shard = (index, shard)
        low, high = table.base_slots(number, 1)
        for part, items in self._spool.parts():
            seconds = items["time_diff_s"].astype(np.int64) + table.window.begin_s
            self._runs[-1].add(Piece(low, high, items, seconds, part))
        self._spool.close()
        self._spool = None


BLOCK_SCHEMA = "partition int, piece long, items binary, checksum binary"
Seen = Callable[[npt.NDArray[Any], npt.NDArray[np.int64]], None]
# fewer if items are wide: a binary column has less than 2 GiB
_HELD_ITEMS, _HELD_BYTES = 1 << 20, 128 << 20
_BLOCK_ITEMS = 1 << 16
# Entries of one call of `mixed_columns`: as many as fit the processor's cache
_MIXED = 1 << 14
_ARROW = arrow_schema(BLOCK_SCHEMA)


def pack_batches(
    batches: Iterable[pa.RecordBatch], plan: BuildPlan, seen: Seen | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield blocks of the entries in `batches` (the fields of entries). Raises `InvalidArgument` for bad values.

    Calls `seen` with batches of all entries: items (n) and their seconds (i64, n).
    """
    most = min(_HELD_ITEMS, _HELD_BYTES // plan.genesis.layout.schema.item.itemsize)
    for held in gathered(_hashed(batches, plan), lambda columns: len(columns["second"]), most):
        yield _blocks(held, plan, seen)


def _hashed(batches: Iterable[pa.RecordBatch], plan: BuildPlan) -> Iterator[Columns]:
    topics, layout = TopicTable(), plan.genesis.layout
    topics.give(plan.topics)

    def hashed(batch: pa.RecordBatch) -> Columns:
        if batch.column("key").null_count:
            batch = batch.filter(pc.is_valid(batch.column("key")))
        columns, topic_ids, _ = batch_columns(_with_topic_ids(batch, topics), layout.schema, topics, layout.hash)
        if plan.queues is not None:
            names = dict(topic_ids)
            name_of: Callable[[int], str] = lambda topic_id: names.get(topic_id) or topics.name(topic_id)  # noqa: E731
            plan.queues.check_columns(columns["topic_id"], columns["queue_id"], name_of)
        return columns

    for batch in batches:
        columns = naming_rows(batch, hashed)
        if len(columns["second"]):
            yield columns


def _with_topic_ids(batch: pa.RecordBatch, topics: TopicTable) -> pa.RecordBatch:
    """Return the batch with its missing topic ids assigned by name."""
    at = batch.schema.get_field_index("topic_id")
    if at < 0 or not batch.column(at).null_count:
        return batch
    if batch.column(at).null_count == len(batch):
        return batch.drop_columns(["topic_id"])
    names = batch.column("topic").dictionary_encode()
    ids = pa.array([topics.assign(name) for name in names.dictionary.to_pylist()], pa.int64())
    filled = pc.coalesce(batch.column(at).cast(pa.int64()), ids.take(names.indices))
    return batch.set_column(at, "topic_id", filled)


def _blocks(held: list[Columns], plan: BuildPlan, seen: Seen | None) -> pa.RecordBatch:
    dtype = plan.genesis.layout.schema.item
    columns = {name: np.concatenate([some[name] for some in held]) for name in held[0]}
    seconds = columns["second"]
    pieces, begins = plan.pieces_of(seconds, normal_hashes(columns["key_hash"]))
    columns["time_diff_s"] = seconds - begins
    items = np.empty(len(seconds), dtype)
    for name in dtype.names or ():
        items[name] = columns[name]
    if seen is not None:
        seen(items, seconds)
    # NumPy sorts 16-bit numbers by counting
    order = np.argsort(pieces.astype(np.uint16) if pieces.max() < 1 << 16 else pieces, kind="stable")
    pieces = pieces[order]
    # a block ends with its piece, or after `_BLOCK_ITEMS`
    starts = np.arange(0, len(pieces), _BLOCK_ITEMS)
    firsts = np.unique(np.concatenate([np.flatnonzero(np.diff(pieces, prepend=-1)), starts]))
    number, count = pieces[firsts], len(firsts)
    # the first row has the checksum of all blocks: only sums are compared
    checksums = [_checksum(columns, seconds, dtype).to_bytes(8, "big")] + [bytes(8)] * (count - 1)
    cells = cells_of(items.take(order), firsts), pa.array(checksums, pa.binary())
    where = pa.array(plan.partition_of_piece[number]), pa.array(number)
    return pa.RecordBatch.from_arrays([*where, *cells], schema=_ARROW)


def _checksum(columns: Columns, seconds: Int64, dtype: np.dtype[Any]) -> int:
    """Return the `entry_checksum` of items, given as columns."""
    # integers are mixed by their values, others by their bytes
    told = {n: columns[n] if dtype[n].kind in "iu" else columns[n].astype(dtype[n]) for n in dtype.names or ()}
    checksum, _ = 0, told.pop("time_diff_s")
    for at in range(0, len(seconds), _MIXED):
        some = slice(at, at + _MIXED)
        checksum += int(mixed_columns((column[some] for column in told.values()), seconds[some]).sum(dtype=np.uint64))
    return checksum % 2**64
