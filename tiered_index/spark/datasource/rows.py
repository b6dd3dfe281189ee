"""`df.write.format("tiered_index")` of rows of Parquet files that stay where they are. docs/files.md.

The DataFrame has the columns of the files and Spark's `_metadata`, which says the file and the number of each row. The
driver lists the files of option `files` and gives each a range of offsets; tasks write tables as for entries, and the
commit publishes them with the segments of the files by one record. So the index is that of `ingest`. One thread a task.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from tiered_index.base.clock import SystemClock
from tiered_index.base.documents import typed
from tiered_index.config import IndexConfig
from tiered_index.connectors.files.linked import joined_times
from tiered_index.connectors.files.listing import LinkedFiles, as_it_is, listed_files
from tiered_index.connectors.files.rows.batch import RowBatch, RowFile
from tiered_index.connectors.files.rows.columns import has_items
from tiered_index.connectors.files.rows.mapping import KEY_TYPE
from tiered_index.connectors.files.rows.places import sums_of
from tiered_index.connectors.files.rows.table import ColumnsFile, Way, rows_of_columns, way_of
from tiered_index.connectors.files.rows.text import SUM_BYTES
from tiered_index.errors import InvalidArgument
from tiered_index.format.segments.segment import LinkedSegment, TimeRule, Times
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import SentObject
from tiered_index.service.read.segments.segments import Segments
from tiered_index.spark.datasource.options import DataSourceOptions
from tiered_index.spark.datasource.writing import (
    EntryWriter,
    Written,
    all_shards,
    joined_index,
    publish_written,
    refusing_at_the_driver,
    write_tables,
)
from tiered_index.spark.frames import arrow_schema_of
from tiered_index.spark.writing.linked import FilePlan, RowsOfFiles, check_own_columns, publish_files
from tiered_index.spark.writing.positions import BatchContent

OF_ROWS = ("topic", "keys", "time", "timeUnit", "timeZone", "files")
"""The options of rows of files; `files` says that it is a write of rows."""
_METADATA, _PATH, _ROW = "_metadata", "file_path", "row_index"


@dataclass(frozen=True, slots=True)
class WrittenRows(Written):
    """The uploads of one task, and of each file that it has rows of the times of its entries."""

    times: dict[str, Times | None] = field(default_factory=dict)
    topics: frozenset[str] = frozenset()
    unit: str | None = None
    has_zoneless: bool = False


def _place(uri: str) -> str:
    """Return the same text for all spellings of a file's URI, those of Hadoop included."""
    scheme, mark, rest = unquote(uri).partition(":")
    scheme = {"s3a": "s3", "s3n": "s3", "abfss": "az"}.get(scheme, scheme)
    return f"{scheme}:/{rest.lstrip('/')}" if mark else f"file:/{uri.lstrip('/')}"


class RowWriter(EntryWriter):
    """One write of a DataFrame with the rows of files."""

    def __init__(self, options: DataSourceOptions, schema: StructType) -> None:
        self._rows = _rows_of(options)
        mapping = self._rows.mapping()
        kinds = arrow_schema_of(schema)
        ways = [way_of(kinds, path, mapping) for _, path in mapping.names]
        if lacking := [name for name, way in zip(mapping.names, ways, strict=True) if way is None]:
            shown = mapping.shown(lacking)
            raise InvalidArgument(f"the DataFrame has no column for {shown}; it has {', '.join(kinds.names)}")
        self._ways = [way for way in ways if way is not None]
        if _METADATA not in kinds.names and not {_PATH, _ROW} <= {*kinds.names}:
            raise InvalidArgument(
                f"the DataFrame says no file and row: select the column {_METADATA} of spark.read.parquet, too"
            )
        job, _ = joined_index(options, check_own_columns)
        # the entries are those of a source
        self._job = replace(job, queues=None)
        config = IndexConfig(storage=options.path)
        with self._job.address.open() as storage, listed_files([options.text("files") or ""], config) as files:
            log = StorageLog(storage, SystemClock())
            log.open()
            with_all = self._rows.with_keys_of(log.state.positions)
            if further := [key for key in with_all.keys if key not in self._rows.keys]:
                raise InvalidArgument(
                    f"{further[0]} is a key of this topic, too: name it in the option keys, or end it by "
                    f"`tiered-index ingest ... --drop-key {further[0]}`"
                )
            wanted = self._rows.mapping().given
            self._rows = self._rows.with_times_of(log.state)
            plan = FilePlan.of(self._rows, Segments(log.state, storage), files, config, wanted=wanted)
            plan.state_known(log)
        if others := [segment.uri for _, rows, segment in plan.new if rows.format != "parquet"]:
            raise InvalidArgument(f"{others[0]} is no Parquet file: index it by `spark build --topic`")
        self._offsets = plan.offsets
        # what each new segment replaces, by its first offset
        self._replaced = {segment.start: plan.replaced([segment]) for _, _, segment in plan.new}
        new = {_place(segment.uri): segment.to_json() for _, _, segment in plan.new}
        self._segments: dict[str, Any | None] = {_place(listed.uri): new.get(_place(listed.uri)) for listed in files}
        # Spark reads numbers from the names of folders, where 007 is another key than 7
        self._partitions = {_place(segment.uri): rows.partition for _, rows, segment in plan.new}
        # Spark gives all times the zone UTC, and a key is the text of the time in the file, which may have no zone
        count = len(mapping.keys) + (self._rows.zone is not None)
        self._kinds: dict[str, dict[str, pa.DataType]] = {
            _place(segment.uri): _kinds_in_file(rows, self._ways[:count]) for _, rows, segment in plan.new
        }

    @refusing_at_the_driver
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        """Write a partition. Executor."""
        mapping, times, topics = self._rows.mapping(), dict[str, Times | None](), set[str]()
        segments = {
            place: typed(document, LinkedSegment) for place, document in self._segments.items() if document is not None
        }

        def entries() -> Iterator[pa.RecordBatch]:
            for batch in iterator:
                for place, table, positions in self._by_file(batch):
                    if (segment := segments.get(place)) is None:
                        continue
                    table = _with_times_of(_with_texts_of(table, self._partitions[place]), self._kinds[place])
                    rows: RowBatch = rows_of_columns(table, self._ways, mapping, positions)
                    if rows.bad:
                        raise InvalidArgument(f"{segment.uri}, {rows.bad[0].where}: {rows.bad[0].problem}")
                    times[place] = joined_times(times.get(place), rows.times)
                    columns = self._rows.columns(rows, segment.start - segment.position)
                    topics.update(columns["topic"].unique().to_pylist())
                    if rows.entries:
                        yield pa.RecordBatch.from_pydict(columns)

        written = write_tables(entries(), self._job)
        unit = mapping.unit if mapping.has_numbers else None
        of_rows = times, frozenset(topics), unit, mapping.has_zoneless
        return WrittenRows(written.shards, None, BatchContent(), None, *of_rows)

    def _by_file(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.Table, Any]]:
        """Yield the rows of each file, with their numbers. Raises `InvalidArgument` for another file."""
        table = pa.Table.from_batches([batch])
        if _METADATA in batch.schema.names:
            paths, numbers = (pc.struct_field(batch.column(_METADATA), name) for name in (_PATH, _ROW))
        else:
            paths, numbers = batch.column(_PATH), batch.column(_ROW)
        coded = paths.dictionary_encode()
        codes = coded.indices.to_numpy(zero_copy_only=False)
        for code, path in enumerate(coded.dictionary.to_pylist()):
            if (place := _place(path)) not in self._segments:
                raise InvalidArgument(f"{path} is not among the option files: name all files of the DataFrame")
            at = pa.array(np.flatnonzero(codes == code))
            yield place, table.take(at), numbers.take(at).to_numpy(zero_copy_only=False).astype(np.int64)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish all tasks' tables and the segments of their files. Driver.

        Raises `InvalidArgument` if a file changed, or if another run has indexed files of the topic meanwhile.
        """
        shards = all_shards(messages)
        written = [message for message in messages if isinstance(message, WrittenRows)]
        sent: list[SentObject] = [shard.sent for shard in shards]

        def publish(log: StorageLog) -> None:
            has_zoneless = any(message.has_zoneless for message in written)
            rows = self._rows.with_times_read({message.unit for message in written}, has_zoneless=has_zoneless)
            zone = (rows.zone or "UTC") if has_zoneless else None
            segments = self._finished(written, (rows.time, rows.unit, zone))
            if segments and shards:
                topics = {topic for message in written for topic in message.topics}
                replaced = [old for segment in segments for old in self._replaced[segment.start]]
                publish_files(shards, sent, segments, rows, topics, self._offsets, log, replaced)

        publish_written(self._job, sent, publish)

    def _finished(self, written: Sequence[WrittenRows], rule: TimeRule) -> list[LinkedSegment]:
        """Return the segments of the files that have rows, whose times are read by a rule.

        Raises `InvalidArgument` for a file that changed.
        """
        made = []
        with contextlib.closing(LinkedFiles(IndexConfig(storage=self._job.address.uri))) as files:
            for place, document in self._segments.items():
                if document is None or not any(place in message.times for message in written):
                    continue
                segment, times = typed(document, LinkedSegment), None
                file = files.file(segment.uri, segment.size_bytes)
                blocks = SUM_BYTES, sums_of(file, SUM_BYTES, 0, segment.size_bytes)
                now = as_it_is(file)
                if not now.is_same(segment.size_bytes, segment.etag):
                    raise InvalidArgument(f"{segment.uri} was changed while it was indexed: write again")
                for message in written:
                    times = joined_times(times, message.times.get(place))
                facts: dict[str, Any] = {"rows": segment.length, "times": times, "blocks": blocks, "time_rule": rule}
                made.append(structs.replace(segment, is_open=False, **facts))
        return made


def _kinds_in_file(rows: RowFile, ways: Sequence[Way]) -> dict[str, pa.DataType]:
    """Return the types of a file's columns that have keys or the time."""
    assert isinstance(rows, ColumnsFile)
    names = {name for way in ways for name in way.names[: None if way.is_expression else 1]}
    return {name: rows.schema.field(name).type for name in names & {*rows.schema.names}}


def _with_texts_of(table: pa.Table, partition: Mapping[str, str]) -> pa.Table:
    """Return rows with the values of a partition as the folders name them."""
    for name, value in partition.items():
        if (at := table.schema.get_field_index(name)) >= 0:
            table = table.set_column(at, name, pa.repeat(pa.scalar(value, KEY_TYPE), len(table)))
    return table


def _with_times_of(table: pa.Table, kinds: Mapping[str, pa.DataType]) -> pa.Table:
    """Return rows whose times have the zones that they have in types of their file, by column."""
    for name, kind in kinds.items():
        at = table.schema.get_field_index(name)
        if (wanted := _with_zones_of(table.column(at).type, kind)) != table.column(at).type:
            table = table.set_column(at, name, table.column(at).cast(wanted, safe=False))
    return table


def _with_zones_of(kind: pa.DataType, stored: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and pa.types.is_timestamp(stored):
        return stored
    if pa.types.is_struct(kind) and pa.types.is_struct(stored):
        kinds = {member.name: member.type for member in stored}
        members = ((member, kinds.get(member.name, member.type)) for member in kind)
        return pa.struct([member.with_type(_with_zones_of(member.type, of_file)) for member, of_file in members])
    if pa.types.is_list(kind) and has_items(stored):
        return pa.list_(kind.value_field.with_type(_with_zones_of(kind.value_type, stored.value_type)))
    return kind


def _rows_of(options: DataSourceOptions) -> RowsOfFiles:
    """Return the fields of rows by the options. Raises `InvalidArgument`."""
    topic, keys = options.text("topic"), options.text("keys")
    if topic is None or keys is None:
        raise InvalidArgument("the option files needs topic and keys, such as topic=orders, keys=order_id")
    is_list = keys.lstrip().startswith('["')
    paths = tuple(json.loads(keys)) if is_list else tuple(part.strip() for part in keys.split(","))
    path = topic.removeprefix("field:") if topic.startswith("field:") else None
    unit, zone = options.text("timeUnit"), options.text("timeZone")
    time = options.text("time") or "timestamp"
    topics = topic if path is None else None, path
    return RowsOfFiles(paths, time, None if unit == "auto" else unit, *topics, zone=zone)
