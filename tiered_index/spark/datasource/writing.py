"""`df.write.format("tiered_index")` and `writeStream`: write a DataFrame's entries into an index. docs/spark-data.md.

A task writes a small table for each window of its entries, and returns its uploads; `commit` completes the uploads and
appends one log record. Spark makes each call in another Python worker, so `commit` and `abort` share only the messages.
Spark calls `abort` also after a failed `commit`, whose record may be in the log: it then has a message of every task,
and deletes nothing (`orphans` does later). One thread a task; memory as in a build's partition.
"""

from __future__ import annotations

import itertools
import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tiered_index.base.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.connectors.files.rows.columns import each_key
from tiered_index.errors import CorruptFile, InvalidArgument, NotAnIndex, SchemaMismatch, StorageUnavailable
from tiered_index.format.schema import Schema
from tiered_index.format.topic_documents import connectors_in
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import FinishedObject, SentObject, abandon
from tiered_index.service.log.records import IndexDescriptor, Origin
from tiered_index.service.log.session import StorageSession, check_descriptor
from tiered_index.service.opening import wanted_descriptor
from tiered_index.service.write.owned import SourceQueues, names_of
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.datasource.options import DataSourceOptions
from tiered_index.spark.frames import arrow_schema, arrow_type_of
from tiered_index.spark.writing.build import abandoned_if_refused, publish_batch, publish_tables, stored_genesis
from tiered_index.spark.writing.census import CENSUS_COLUMNS, HAS_KEY, Census, WindowScale, census_of
from tiered_index.spark.writing.plan import plan_build
from tiered_index.spark.writing.positions import BatchContent, MicroBatch
from tiered_index.spark.writing.shards import (
    BLOCK_SCHEMA,
    PartitionResult,
    Seen,
    check_sums,
    pack_batches,
    write_blocks,
)
from tiered_index.spark.writing.sources import check_fields, check_there, default_column, wanted_fields
from tiered_index.storage.base import Storage
from tiered_index.storage.probe import probe_put_if_absent

CheckedT = TypeVar("CheckedT")


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """The columns of a frame by the fields that they have: their own names, except `keys` for `key`."""

    of_fields: Mapping[str, str]

    @classmethod
    def of(cls, kinds: Mapping[str, pa.DataType], schema: Schema) -> EntryColumns:
        """Return the fields of a frame with these columns. Raises `InvalidArgument`, which names the wrong column."""
        there = [*kinds]
        columns = {field: default_column(field, there) for field in wanted_fields({}, there, schema)}
        for field, name in columns.items():
            check_there(field, name, there, "the DataFrame has")
        if unknown := [name for name in there if name not in columns.values()]:
            fields = ", ".join(dict.fromkeys((*columns, "topic_id")))
            raise InvalidArgument(
                f"column {unknown[0]!r} is not a field of an entry; these are {fields}: rename or drop it"
            )
        check_fields({field: kinds[name] for field, name in columns.items()}, columns)
        return cls(columns)

    def batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the entries of each batch that have a key, with the columns in the fields' order."""
        for batch in batches:
            entries = pa.RecordBatch.from_pydict({field: batch.column(name) for field, name in self.of_fields.items()})
            if pa.types.is_list(entries.column("key").type) or pa.types.is_large_list(entries.column("key").type):
                rows, keys = each_key(entries.column("key"))
                at = entries.schema.get_field_index("key")
                entries = entries.drop_columns(["key"]).take(pa.array(rows)).add_column(at, "key", keys)
            elif entries.column("key").null_count:
                entries = entries.filter(pc.is_valid(entries.column("key")))
            if len(entries):
                yield entries


@dataclass(frozen=True, slots=True)
class PartitionJob:
    """The arguments of every task of a write."""

    address: StorageAddress
    genesis: IndexDescriptor
    scale: WindowScale
    sequence: int
    max_windows: int
    now_ms: int
    # "writer" for a stream: builds do not replace its entries
    origin: Origin = "build"
    queues: SourceQueues | None = None
    """As of `BuildPlan`."""


def write_tables(entries: Iterable[pa.RecordBatch], job: PartitionJob, seen: Seen | None = None) -> PartitionResult:
    """Write the tables of `entries` (fields of entries with keys); `seen` as in `pack_batches`.

    Raises `InvalidArgument` for bad values, the storage's errors; before that it deletes its uploads if it can.
    """
    # without names, because Spark kills workers: the system deletes them
    with tempfile.TemporaryFile(prefix="tiered-index-") as packed:
        with tempfile.TemporaryFile(prefix="tiered-index-") as copy:
            census = _census_and_copy(entries, copy, job)
            if not census.entries:
                return PartitionResult(0, 0, ())
            more = {"sequence": job.sequence, "max_windows": job.max_windows}
            plan = plan_build(census, job.genesis, job.scale, "auto", 1, **more, origin=job.origin, queues=job.queues)
            with (
                pa.ipc.open_stream(_mapped(copy)) as batches,
                pa.ipc.new_file(packed, arrow_schema(BLOCK_SCHEMA)) as writer,
            ):
                for batch in pack_batches(batches, plan, seen):
                    writer.write_batch(batch)
        result = write_blocks(_by_piece(packed), plan, job.address, job.now_ms)
    written = sum(shard.stored.count for shard in result.shards)
    what, wrong = "a task's tables", "wrote another number of entries than it read"
    try:
        if written != census.entries:
            raise CorruptFile(what, wrong, expected=census.entries, found=written)
        check_sums(what, [result])
    except CorruptFile:
        with job.address.open() as storage:
            abandon([shard.sent for shard in result.shards], storage)
        raise
    return result


def _mapped(file: IO[bytes]) -> pa.Buffer:
    """Return the bytes of a file that is not empty, in a map."""
    file.flush()
    return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _census_and_copy(entries: Iterable[pa.RecordBatch], copy: IO[bytes], job: PartitionJob) -> Census:
    batches = iter(entries)
    first = next(batches, None)
    if first is None:
        return Census()
    looked_at = [name for name in CENSUS_COLUMNS if name in first.schema.names]
    with pa.ipc.new_stream(copy, first.schema) as writer:

        def counted() -> Iterator[pa.RecordBatch]:
            for batch in itertools.chain([first], batches):
                writer.write_batch(batch)
                yield batch.select(looked_at).append_column(HAS_KEY, pc.is_valid(batch.column("key")))

        return census_of(counted(), job.scale, job.max_windows)


def _by_piece(packed: IO[bytes]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the file by piece, one row in each batch."""
    blocks = pa.ipc.open_file(_mapped(packed)).read_all()
    for row in np.argsort(blocks["piece"].to_numpy(), kind="stable").tolist():
        yield from blocks.slice(row, 1).to_batches()


WRITE_OPTIONS = ("window", "maxWindows", "slots", "items", "preset", "hash", "offsetSpace")
STREAM_OPTIONS = (*WRITE_OPTIONS, "checkpointLocation")
# Most windows of a task; each is an object.
_MAX_WINDOWS = 1_000
_QUERY_ID = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """The uploads of one task; for a stream also the query, the content of the entries, and the tasks' descriptor."""

    shards: tuple[FinishedObject, ...]
    query: str | None
    content: BatchContent
    genesis: IndexDescriptor | None = None


@dataclass(frozen=True, slots=True)
class RefusedRows(WriterCommitMessage):
    """The problem of a task's rows."""

    problem: str


Messages = Sequence[WriterCommitMessage | None]
Write = Callable[[Any, Iterator[pa.RecordBatch]], WriterCommitMessage]


def refusing_at_the_driver(write: Write) -> Write:
    """Return a method `write` that returns `InvalidArgument` to the driver, whose commit raises it.

    If the task failed, Spark would repeat it in vain, and print its traces before the sentence.
    """

    @wraps(write)
    def told(writer: Any, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        try:
            return write(writer, batches)
        except InvalidArgument as error:
            for _ in batches:
                pass  # Spark passes all rows
            return RefusedRows(str(error))

    return told


def prepared(options: DataSourceOptions, schema: StructType, *, streams: bool) -> tuple[PartitionJob, EntryColumns]:
    """Join the index; return the arguments of tasks, and the fields of entries. See `joined_index`."""
    kinds = {column.name: arrow_type_of(column.dataType) for column in schema}
    return joined_index(options, partial(EntryColumns.of, kinds), streams=streams)


def joined_index(
    options: DataSourceOptions, checked: Callable[[Schema], CheckedT], *, streams: bool = False
) -> tuple[PartitionJob, CheckedT]:
    """Join the index; return the arguments of tasks, and `checked` of its schema. Driver.

    A missing index is created, except for a stream: its first commit creates it, and later ones must find it. Raises
    `InvalidArgument`, `SchemaMismatch`, and the errors of `checked` before it creates an index.
    """
    address = StorageAddress(options.path)
    clock = SystemClock()
    layout: dict[str, Any] = {name: options.number(name) for name in ("slots", "items")}
    layout |= {name: options.text(name) for name in ("preset", "hash")} | {"offset_space": options.text("offsetSpace")}
    settings = IndexConfig(**{name: value for name, value in layout.items() if value is not None})
    now_ms = clock.now_ms()
    window = options.text("window")
    scale = WindowScale.of("1d" if window is None else window, settings, now_ms)
    most = options.number("maxWindows")
    if most is not None and most < 1:
        raise InvalidArgument(f"maxWindows is how many windows a task may write, at least 1, not {most}")
    with address.open() as storage:
        log = StorageLog(storage, clock)
        genesis = stored_genesis(log, settings, storage.uri)
        wanted = genesis or wanted_descriptor(settings, None)
        columns = checked(wanted.layout.schema)
        if genesis is None and not streams:
            genesis = _created(storage, log, wanted)
        elif not streams:
            # a server that accepts two records of one number would lose one of two writes
            probe_put_if_absent(storage)
        genesis = genesis or wanted
        if (items := options.number("items")) not in (None, genesis.layout.items):
            # `check_descriptor` does not compare `items`, which writers may choose
            raise SchemaMismatch(f"{storage.uri} was created with {genesis.layout.items:,} items a file, not {items:,}")
        sequence = max((stored.sequence for stored in log.state.objects.values()), default=0)
        queues = SourceQueues.of(names_of(log.state), connectors_in(log.state.documents))
    return PartitionJob(address, genesis, scale, sequence, most or _MAX_WINDOWS, now_ms, queues=queues), columns


def _created(storage: Storage, log: StorageLog, wanted: IndexDescriptor) -> IndexDescriptor:
    """Create the index, or join it if another writer has created it meanwhile."""
    return StorageSession(storage, log, SystemClock(), IndexConfig().lease_ttl_s, lambda stored: wanted).join()


class EntryWriter(DataSourceArrowWriter):
    """One write of a DataFrame; mode ``append``, or ``replace`` for the windows that it has."""

    def __init__(self, options: DataSourceOptions, schema: StructType, mode: str) -> None:
        self._job, self._columns = prepared(options, schema, streams=False)
        self._mode = mode

    @refusing_at_the_driver
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write a partition. Executor."""
        return Written(write_tables(self._columns.batches(iterator), self._job).shards, None, BatchContent())

    def commit(self, messages: Messages) -> None:
        """Publish all tasks' tables. Driver. Raises `InvalidArgument` (the mode), `CorruptFile`, `JobOverdue`.

        After an error of the record's put the outcome is unknown: a second ``append`` may publish entries twice.
        """
        shards = all_shards(messages)
        if shards:
            sent = [shard.sent for shard in shards]
            publish_written(self._job, sent, lambda log: publish_tables(shards, self._mode, log))

    def abort(self, messages: Messages) -> None:
        """Delete the uploads that are certainly not published. Driver."""
        abort_writes(self._job, messages)


# before Spark 4.1 there is none, and `EntrySource` raises
_StreamWriter: Any = getattr(datasource, "DataSourceStreamArrowWriter", object)


class EntryStreamWriter(_StreamWriter):  # type: ignore[misc]
    """The writer of one micro-batch. Spark creates one for each batch, and another one to commit it."""

    def __init__(self, options: DataSourceOptions, schema: StructType) -> None:
        job, self._columns = prepared(options, schema, streams=True)
        self._job = replace(job, origin="writer")

    @refusing_at_the_driver
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write a partition. Executor."""
        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY_ID) if context is not None else None
        if not query:
            raise InvalidArgument(
                "this Spark does not tell tasks the id of their query: a repeated micro-batch would be published twice"
            )
        parts: list[BatchContent] = []
        seen: Seen = lambda items, seconds: parts.append(BatchContent.of(items, seconds))  # noqa: E731
        written = write_tables(self._columns.batches(iterator), self._job, seen)
        return Written(written.shards, query, BatchContent.joined(parts), self._job.genesis)

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish a micro-batch; if it was published before, delete its uploads. Driver.

        Raises as `EntryWriter.commit`; the next try with the same checkpoint resolves an unknown outcome.
        """
        shards = all_shards(messages)
        written = [message for message in messages if isinstance(message, Written)]
        # the first batch is recorded even if it is empty, so that the index knows the checkpoint
        if shards or (written and not batchId):
            [query] = {message.query for message in written}
            batch = MicroBatch(f"spark:{query}", batchId, BatchContent.joined(message.content for message in written))
            # this writer was made after the tasks, perhaps for an index that was created meanwhile
            job = replace(self._job, genesis=written[0].genesis or self._job.genesis)
            sent = [shard.sent for shard in shards]
            publish_written(job, sent, lambda log: publish_batch(shards, batch, log), batch)

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - Spark's name
        """Delete the uploads that are certainly not published. Driver."""
        abort_writes(self._job, messages)


def all_shards(messages: Messages) -> list[FinishedObject]:
    """Return the tables of all tasks.

    Raises `InvalidArgument` with the problem of a task's rows: Spark calls `abort` then, which deletes uploads.
    `StorageUnavailable` if a task gave no result.
    """
    for message in messages:
        if isinstance(message, RefusedRows):
            raise InvalidArgument(message.problem)
    written = [message for message in messages if isinstance(message, Written)]
    if len(written) != len(messages):
        raise StorageUnavailable(
            f"{len(messages) - len(written)} of {len(messages)} tasks gave no result, so nothing is published"
        )
    return [shard for message in written for shard in message.shards]


def publish_written(
    job: PartitionJob,
    sent: Sequence[SentObject],
    publish: Callable[[StorageLog], object],
    batch: MicroBatch | None = None,
) -> None:
    """Let `publish` append a record to the log, and delete the objects `sent` if it refuses."""
    with job.address.open() as storage:
        log = StorageLog(storage, SystemClock())
        with abandoned_if_refused(sent, log):
            try:
                log.open()
            except NotAnIndex:
                if batch is None:
                    raise
                batch.check_known(log.state, storage.uri)
                _created(storage, log, job.genesis)
            if batch is not None:
                batch.check_known(log.state, storage.uri)
            assert log.state.genesis is not None
            # another writer may have created the index since the tasks began
            check_descriptor(log.state.genesis, structs.replace(job.genesis, index_id=""), storage.uri)
            publish(log)


def abort_writes(job: PartitionJob, messages: Messages) -> None:
    """Delete the uploads of tasks that are certainly not published."""
    written = [message for message in messages if isinstance(message, Written)]
    if len(written) == len(messages):
        return  # `commit` was called, and its record may be in the log
    with job.address.open() as storage:
        abandon([shard.sent for message in written for shard in message.shards], storage)
