"""The messages of the entries in an answer, read each time that the DataFrame is used. Driver; `_read` in tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tiered_index.base.encoding import MAX_BODY_BYTES, json_text
from tiered_index.config import IndexConfig
from tiered_index.connectors.read_again import MessageSources
from tiered_index.connectors.registry import CONNECTORS
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.messages import Fetched, FoundMessage, MessageSource
from tiered_index.service.reader import IndexReader
from tiered_index.spark.frames import gathered
from tiered_index.spark.lookup.keys import LOOKUP
from tiered_index.types import IndexItem

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Value of `messages` for what the index's storage and its files have.
ARCHIVE = "archive"
MESSAGE_COLUMNS = ("message_state", "message_body", "message_tags", "message_properties", "message_problem")
_TYPES = (pa.string(), pa.binary(), pa.string(), pa.map_(pa.string(), pa.string()), pa.string())
_MESSAGE = pa.schema(list(zip(MESSAGE_COLUMNS, _TYPES, strict=True)))
# Stored bytes of the messages that are fetched at once, and plain bytes of the bodies in one batch, about
_MESSAGE_BYTES, _LEAST_BYTES = 16 << 20, 1 << 10
_ENTRY = ("topic_id", "queue_id", "offset", "size", "timestamp_ms", "key_hash")


def check_place(messages: str, state: LogState) -> None:
    """Raise `ConfigError` if messages can't be read at an address, or not those of an index with this state."""
    if messages == ARCHIVE:
        if not (state.documents or state.listed_logs or state.given_up or state.expired.segments):
            raise ConfigError(
                f"messages is {ARCHIVE!r}, but the index has no archived messages, and none of its topics was "
                "ingested from RocketMQ, Kafka, files or another source"
            )
        return
    spec = CONNECTORS.of_address(messages)
    if spec.claims is None:
        raise ConfigError(
            f"messages is {ARCHIVE!r}, the folder of a RocketMQ store, or the address of brokers such as kafka://..., "
            f"not {messages!r}"
        )
    assert state.genesis is not None
    if spec.offset_space not in (None, space := state.genesis.offset_space):
        raise ConfigError(
            f"the index's offsets are in {space!r}, and messages of {spec.title} are found by offsets in "
            f"{spec.offset_space!r}"
        )
    try:
        with _places(messages):
            pass
    except InvalidArgument as error:
        raise ConfigError(f"messages: {error}") from error


@contextlib.contextmanager
def _places(messages: str) -> Iterator[dict[str, Any]]:
    """Yield the place that an address names, by its connector, for `MessageSources`. Raises as `Connector.place`."""
    if messages == ARCHIVE:
        yield {}
        return
    name = CONNECTORS.of_address(messages).name
    place = CONNECTORS.connector(name).place(None, messages)
    try:
        yield {name: place}
    finally:
        if (close := getattr(place, "close", None)) is not None:
            close()


def with_messages(
    answers: DataFrame, topic: Column, key: Column, messages: str, config: IndexConfig, allow_partial: bool
) -> DataFrame:
    """Return the rows of `answers` (one for each entry) with `MESSAGE_COLUMNS`, which are null without an entry.

    `message_state` is that of `Fetched`, or ``other_key`` for a message of another key with the same hash. A read error
    fails the job; with `allow_partial` the message is ``missing``, and `message_problem` has the reason.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    def fetch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with IndexReader.open(config=config, environment=False) as reader, _places(messages) as places:
            with closing(MessageSources(reader, config, places)) as sources:
                yield from message_batches(batches, sources.of, allow_partial=allow_partial)

    keyed = answers.withColumn(LOOKUP, F.struct(topic.alias("topic"), key.alias("key")))
    return keyed.mapInArrow(fetch, StructType([*answers.schema.fields, *from_arrow_schema(_MESSAGE).fields]))


def message_batches(
    batches: Iterable[pa.RecordBatch], source_of: Callable[[str], MessageSource], *, allow_partial: bool
) -> Iterator[pa.RecordBatch]:
    """Yield rows with the messages of their entries, in order, in place of `LOOKUP`. Raises as `_row`.

    `source_of` returns the source of the messages of a topic.
    """
    for batch in batches:
        without_lookup = batch.drop_columns([LOOKUP])
        sizes = [max(_LEAST_BYTES, size or 0) for size in batch.column("size").to_pylist()]
        start = 0
        for held in gathered(range(len(batch)), sizes.__getitem__, _MESSAGE_BYTES):
            fetched = _fetched(source_of, batch.slice(held[0], len(held)))
            rows = (_row(message, allow_partial=allow_partial) for message in fetched)
            for some in gathered(rows, lambda row: len(row.get("message_body") or b""), _MESSAGE_BYTES):
                part = without_lookup.slice(start, len(some))
                columns = pa.RecordBatch.from_pylist(list(map(dict, some)), _MESSAGE)
                names = [*without_lookup.schema.names, *MESSAGE_COLUMNS]
                yield pa.RecordBatch.from_arrays([*part.columns, *columns.columns], names)
                start += len(some)


def _fetched(source_of: Callable[[str], MessageSource], rows: pa.RecordBatch) -> list[Fetched | None]:
    """Return the fetched message of each row, None for a row without an entry; rows of one key are read together."""
    fetched: list[Fetched | None] = [None] * len(rows)
    places: dict[tuple[str, str], list[int]] = {}
    for place, lookup in enumerate(rows.column(LOOKUP).to_pylist()):
        if rows.column("offset")[place].is_valid:
            places.setdefault((lookup["topic"], lookup["key"]), []).append(place)
    entries = rows.select(_ENTRY)
    for (topic, key), at in places.items():
        items = [IndexItem(topic=topic, **entry) for entry in entries.take(at).to_pylist()]
        for place, message in zip(at, source_of(topic).fetch(items, topic, key), strict=True):
            fetched[place] = message
    return fetched


def _row(fetched: Fetched | None, *, allow_partial: bool) -> Mapping[str, Any]:
    if fetched is None:
        return {}
    if fetched.error is not None and fetched.message is None and not allow_partial:
        raise fetched.error
    row: dict[str, Any] = {"message_state": fetched.state, "message_problem": fetched.problem}
    message = fetched.message
    if not fetched.carries_key:
        row["message_state"] = "other_key"
    elif message is not None:
        properties = getattr(message, "properties", None)
        row["message_tags"] = getattr(message, "tags", None)
        row["message_properties"] = None if properties is None else list(properties.items())
        try:
            row["message_body"] = _body(message)
        except CorruptFile as error:
            # its producer sent it so: no other place has a better one
            row["message_problem"] = str(error)
    return row


def _body(message: FoundMessage) -> bytes:
    """Return the body of a message; of one without a body its document, as JSON. Raises `CorruptFile`."""
    if (body := getattr(message, "body", None)) is None:
        return json_text(message.to_dict()).encode()
    plain: bytes = body(MAX_BODY_BYTES)
    return plain
