"""`df.write.format("tiered_index")` and `writeStream`: entries of a DataFrame into an index. docs/spark-sources.md.

The driver joins or creates the index and tells each task which one it is; a task writes tables of its own (`partition_tables`) and returns
what it uploaded; the driver's `commit` completes the uploads and appends one log record. Spark's commit coordinator decides nothing here:
whatever it lets be repeated, or run twice, are objects that no record names.

A micro-batch is known by the query's id, which Spark keeps in the checkpoint and hands to every task, its number, and what it holds: a
repeated one finds itself in the log. A new checkpoint is another query, which reads from the beginning, and publishes from the beginning.

Each call of Spark's comes in a Python worker of its own: `commit` and `abort` know nothing of each other but the messages. `abort` follows
a failed `commit`, too, whose record may be in the log for all that; it then has a message of every task and leaves all to `orphans`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tiered_index.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import CorruptFile, InvalidArgument, SchemaMismatch, StorageUnavailable
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.session import StorageSession
from tiered_index.service.merge.run import abandon
from tiered_index.service.merge.writing import FinishedShard
from tiered_index.service.opening import wanted_genesis
from tiered_index.spark.batch_content import BatchContent
from tiered_index.spark.build import stored_genesis
from tiered_index.spark.datasource_options import Options
from tiered_index.spark.entry_batches import EntryColumns
from tiered_index.spark.executors import StorageAddress
from tiered_index.spark.partition_tables import PartitionJob, write_tables
from tiered_index.spark.publishing import MicroBatch, publish_batch, publish_shards
from tiered_index.spark.windows import WindowScale, window_seconds
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import probe_put_if_absent

__all__ = ["STREAM_OPTIONS", "WRITE_OPTIONS", "EntryStreamWriter", "EntryWriter", "Written", "prepared"]

WRITE_OPTIONS = ("window", "maxWindows", "slots", "items", "preset", "offsetSpace")
STREAM_OPTIONS = (*WRITE_OPTIONS, "checkpointLocation")
_MAX_WINDOWS = 1_000
# of a task: each is an object
_QUERY_ID = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """What one task uploaded; of which query it is one and what the entries were, where it is one of a stream."""

    shards: tuple[FinishedShard, ...]
    query: str | None
    content: BatchContent


Messages = Sequence[WriterCommitMessage | None]


def prepared(options: Options, schema: StructType, *, probe: bool) -> tuple[PartitionJob, EntryColumns]:
    """Join the index, or create it, and return what tasks are told. Driver. Raises `InvalidArgument`, `SchemaMismatch`, as the storage."""
    address = StorageAddress(options.path)
    clock = SystemClock()
    settings, now_ms = _settings(options), clock.now_ms()
    length = window_seconds("1d" if (window := options.text("window")) is None else window)
    most = options.number("maxWindows")
    if most is not None and most < 1:
        raise InvalidArgument(f"maxWindows is how many windows a task may write, at least 1, not {most}")
    scale = WindowScale(length, now_ms // 1000 - round(settings.max_late_s), now_ms // 1000 + round(settings.max_early_s))
    with address.open() as storage:
        log = StorageLog(storage, clock)
        genesis = stored_genesis(log, settings, storage.uri)
        wanted = genesis or wanted_genesis(settings, None)
        columns = EntryColumns.of([(column.name, column.dataType.simpleString()) for column in schema], wanted.layout.schema)
        if genesis is None:
            genesis = StorageSession(storage, log, clock, settings.lease_ttl_s).join(wanted, lambda stored: wanted)
        elif probe:
            # a server that accepts two records of one number would lose one of two writes
            probe_put_if_absent(storage)
        if (items := options.number("items")) not in (None, genesis.layout.items):
            # a file's room is no part of what `check_genesis` compares: writers may choose their own
            raise SchemaMismatch(f"{storage.uri} was created with {genesis.layout.items:,} items a file, not {items:,}")
        sequence = max((stored.sequence for stored in log.state.objects.values()), default=0)
    return PartitionJob(address, genesis, scale, sequence, most or _MAX_WINDOWS, now_ms), columns


def _settings(options: Options) -> IndexConfig:
    given: dict[str, Any] = {
        "slots": options.number("slots"), "items": options.number("items"), "preset": options.text("preset"),
        "offset_space": options.text("offsetSpace"),
    }  # fmt: skip
    return IndexConfig(**{name: value for name, value in given.items() if value is not None})


class EntryWriter(DataSourceArrowWriter):
    """One write of a DataFrame: ``append``, or ``replace`` of the windows that it has."""

    def __init__(self, options: Options, schema: StructType, mode: str) -> None:
        self._job, self._columns = prepared(options, schema, probe=True)
        self._mode = mode

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write a partition. Executor."""
        return Written(write_tables(self._columns.batches(iterator), self._job).shards, None, BatchContent())

    def commit(self, messages: Messages) -> None:
        """Publish all tasks' tables. Driver. Raises `InvalidArgument` (the mode can't be), `CorruptFile`, `JobOverdue`, as the storage.

        After an error of the storage in the record's put its outcome is unknown: an ``append`` that is run again may double the entries,
        an ``overwrite`` not.
        """
        shards = _all_shards(messages)
        if shards:
            _publish(self._job, shards, lambda storage, log: publish_shards(shards, self._mode, storage, log))

    def abort(self, messages: Messages) -> None:
        """Take back what is certainly not published. Driver."""
        _abort(self._job, messages)


class EntryStreamWriter(DataSourceStreamArrowWriter):
    """The writer of one micro-batch. Spark makes it anew for each batch, and once more to commit it."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._job, self._columns = prepared(options, schema, probe=False)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write a partition. Executor."""
        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY_ID) if context is not None else None
        if not query:
            raise InvalidArgument("this Spark doesn't tell tasks which query they are of: a repeated micro-batch would be published twice")
        parts: list[BatchContent] = []

        def seen(items: Any, seconds: Any) -> None:
            parts.append(BatchContent.of(items, seconds))

        written = write_tables(self._columns.batches(iterator), self._job, seen)
        return Written(written.shards, query, BatchContent.joined(parts))

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish a micro-batch, or take back what it uploaded where it was published before. Driver. Raises as `EntryWriter.commit`.

        Where the outcome is unknown, Spark's next try with the same checkpoint finds it out: nothing is doubled.
        """
        shards = _all_shards(messages)
        if shards:
            written = [message for message in messages if isinstance(message, Written)]
            [query] = {message.query for message in written}
            batch = MicroBatch(f"spark:{query}", batchId, BatchContent.joined(message.content for message in written))
            _publish(self._job, shards, lambda storage, log: publish_batch(shards, batch, storage, log))

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - Spark's name
        """Take back what is certainly not published. Driver."""
        _abort(self._job, messages)


def _all_shards(messages: Messages) -> list[FinishedShard]:
    written = [message for message in messages if isinstance(message, Written)]
    if len(written) != len(messages):
        raise StorageUnavailable(f"{len(messages) - len(written)} of {len(messages)} tasks gave no result, so nothing is published")
    return [shard for message in written for shard in message.shards]


def _publish(job: PartitionJob, shards: Sequence[FinishedShard], publish: Callable[[Storage, StorageLog], object]) -> None:
    with job.address.open() as storage:
        log = StorageLog(storage, SystemClock())
        log.open()
        try:
            publish(storage, log)
        except (InvalidArgument, CorruptFile):
            # certainly not published; after an error of the storage that is not known, and `orphans` decides
            abandon(shards, storage)
            raise


def _abort(job: PartitionJob, messages: Messages) -> None:
    written = [message for message in messages if isinstance(message, Written)]
    if len(written) == len(messages):
        return  # a commit was tried
    with job.address.open() as storage:
        abandon([shard for message in written for shard in message.shards], storage)
