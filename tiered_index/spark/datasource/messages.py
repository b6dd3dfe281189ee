"""`format("rocketmq_commitlog")`: a commit log's messages as rows of a batch. docs/spark-data.md.

A segment is a partition. Every complete message is a row, also one that consumers don't see; checksums of bodies are
checked. One thread. `tiered-index ingest --follow` follows a log that grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.files.rows.places import local_path
from tiered_index.connectors.rocketmq.archive.archive import ArchivedLog
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import TAGS, index_keys
from tiered_index.connectors.rocketmq.log.message import Message
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.datasource.entries import require_columns
from tiered_index.spark.datasource.options import DataSourceOptions, TaskPartition
from tiered_index.spark.frames import arrow_schema, arrow_schema_of, gathered
from tiered_index.spark.writing.log_sources import Stretch, archived_stretches, check_gaps, local_stretches, opened

_OPTIONS = ("body", "skipCorrupt", "store")

_COLUMNS = (
    "topic string, queue_id int, queue_offset long, physical_offset long, store_size int, store_timestamp timestamp, "
    "born_timestamp timestamp, visible boolean, keys array<string>, tags string, properties map<string,string>"
)
_ARCHIVE = "archive:"


@dataclass(frozen=True, slots=True)
class MessageSettings:
    """The checked options: `body` is ``plain``, ``stored`` (perhaps compressed) or ``none``; a local log has no
    `archive`, the URI of a storage.
    """

    path: str
    body: str
    skip_corrupt: bool
    store: str | None
    archive: str | None
    columns: StructType

    @classmethod
    def of(cls, format_name: str, texts: Mapping[str, str]) -> MessageSettings:
        """Return the settings of a user's options. Raises `InvalidArgument`, `ConfigError`."""
        options = DataSourceOptions(format_name, texts, _OPTIONS)
        body = options.choice("body", ("plain", "stored", "none"))
        columns = from_arrow_schema(arrow_schema(_COLUMNS + (", body binary" if body != "none" else "")))
        skips = options.choice("skipCorrupt", ("false", "true")) == "true"
        path = options.path
        stored = path.startswith(_ARCHIVE) or local_path(path) is None
        archive = StorageAddress(path.removeprefix(_ARCHIVE)).uri if stored else None
        return cls(path, body, skips, options.text("store"), archive, columns)

    @property
    def folder(self) -> Path:
        """The local folder of segments. Raises `InvalidArgument` if the path is no folder."""
        folder = local_path(self.path)
        if folder is None or not folder.is_dir():
            raise InvalidArgument(f"{folder or self.path}: no such folder")
        return _commit_log(folder)


def _commit_log(folder: Path) -> Path:
    return folder if folder.name == "commitlog" and not (folder / "commitlog").is_dir() else folder / "commitlog"


# A message counts as at least 2 KiB, so a batch has at most 4,096.
_BATCH_BYTES, _LEAST_MESSAGE = 8 << 20, 2 << 10


class MessageReader(DataSourceReader):
    """Plans and reads the log up to its end at the time of planning."""

    def __init__(self, settings: MessageSettings, schema: StructType) -> None:
        self._settings, self._schema = settings, schema

    def partitions(self) -> list[InputPartition]:
        """Return one partition for each segment. Raises `MissingOffsets` for a gap, except with skipCorrupt. Driver."""
        require_columns(self._schema, self._settings.columns, f"the commit log in {self._settings.path}")
        stretches = _stretches(self._settings)
        if not self._settings.skip_corrupt:
            check_gaps(self._settings.path, stretches)
        return list(map(TaskPartition, stretches))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a segment's messages. Executor."""
        if isinstance(partition, TaskPartition):  # Spark makes another kind if there are no partitions
            yield from read_stretch(partition.value, self._settings, self._schema)


def _stretches(settings: MessageSettings) -> list[Stretch]:
    if settings.archive is not None:
        return archived_stretches(settings.archive, settings.store, StorageAddress)
    folder = settings.folder
    if not folder.is_dir():
        raise InvalidArgument(f"{folder.parent} is not a RocketMQ store: it has no commitlog/")
    return local_stretches(folder)


def read_stretch(stretch: Stretch, settings: MessageSettings, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield a range's messages as batches.

    Raises `CorruptFile` except with skipCorrupt, `MissingOffsets` for a cut log.
    """
    with opened(stretch, StorageAddress, skip_corrupt=settings.skip_corrupt) as reader:
        wanted = arrow_schema_of(schema)
        own = require_columns(schema, settings.columns, settings.path).names
        messages = _messages(reader, stretch, skip_corrupt=settings.skip_corrupt)
        rows = ((message, _body(message, settings) if "body" in own else None) for message in messages)
        for held in gathered(rows, _row_bytes, _BATCH_BYTES):
            yield _arrow(held, wanted, own)


def _body(message: Message, settings: MessageSettings) -> bytes | None:
    """Return the wanted body; with skipCorrupt None for one that can't be decompressed."""
    try:
        return message.raw_body if settings.body == "stored" else message.body()
    except CorruptFile:
        if not settings.skip_corrupt:
            raise
        return None


def _row_bytes(row: tuple[Message, bytes | None]) -> int:
    message, body = row
    return max(message.size, len(body or b""), _LEAST_MESSAGE)


def _messages(reader: CommitLogReader, stretch: Stretch, *, skip_corrupt: bool) -> Iterator[Message]:
    """Yield the messages that start in a range, without those in damaged pieces of an archived segment."""
    damaged = reader.damaged if isinstance(reader, ArchivedLog) else []
    skipped = {"skip_corrupt": skip_corrupt, "skip_missing": skip_corrupt}
    for message in reader.messages(stretch.begin, stretch.end, **skipped):
        begin, end = message.physical_offset, message.physical_offset + message.size
        if not any(begin < piece.end and end > piece.begin for piece in damaged):
            yield message


def _arrow(rows: list[tuple[Message, bytes | None]], wanted: Any, own: list[str]) -> pa.RecordBatch:
    """Return messages and bodies as a batch of the schema `wanted`; `own` are this module's names of its columns."""
    messages = [message for message, _ in rows]
    parsed = {"keys", "tags", "properties"} & set(own)
    properties = [message.properties for message in messages] if parsed else []
    arrays = []
    for column, name in zip(wanted, own, strict=True):
        if name in parsed:
            values: list[Any] = [_OF_PROPERTIES[name](message_properties) for message_properties in properties]
        elif name == "body":
            values = [body for _, body in rows]
        else:
            values = list(map(_OF_MESSAGES.get(name, attrgetter(name)), messages))
        in_us = pa.types.is_timestamp(column.type)
        arrays.append(pa.array(values, pa.int64()).cast(column.type) if in_us else pa.array(values, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


# Columns that are not attributes of a message
_OF_MESSAGES: dict[str, Callable[[Message], Any]] = {
    "store_size": lambda m: m.size,
    "store_timestamp": lambda m: m.store_ms * 1000,
    # null for a time outside the calendar: the producer's clock may be wrong
    "born_timestamp": lambda m: m.born_ms * 1000 if 0 <= m.born_ms <= MAX_TIMESTAMP_MS else None,
    "visible": lambda m: m.is_visible,
}
_OF_PROPERTIES: dict[str, Callable[[dict[str, str]], Any]] = {
    "keys": lambda properties: list(index_keys(properties)),
    "tags": lambda properties: properties.get(TAGS),
    "properties": lambda properties: list(properties.items()),
}


class CommitLogDataSource(DataSource):
    """`format("rocketmq_commitlog")` for `spark.read`: messages as rows."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "rocketmq_commitlog"

    def schema(self) -> StructType:
        """Return the columns of a message."""
        return self._settings().columns

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        return MessageReader(self._settings(), schema)

    def _settings(self) -> MessageSettings:
        return MessageSettings.of(self.name(), dict(self.options))
