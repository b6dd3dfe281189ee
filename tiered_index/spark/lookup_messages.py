"""The messages behind the entries of a bulk lookup, joined as columns: from a RocketMQ store's folder, else from archived segments.

Runs in tasks, where the answers are: each reads the messages of its own entries, key by key, as `messages` of a reader does. Nothing is
read before the DataFrame is used, and it is read again each time that it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tiered_index.clock import SystemClock
from tiered_index.errors import ConfigError
from tiered_index.rocketmq.archive.found_message import FoundRocketmqMessage
from tiered_index.rocketmq.archive.message_source import RocketmqMessages
from tiered_index.service.lifecycle.segment_archive import SegmentArchive
from tiered_index.service.log.log import StorageLog
from tiered_index.service.lookup.messages import Fetched
from tiered_index.spark.executors import StorageAddress
from tiered_index.types import IndexItem

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["ARCHIVE", "MESSAGE_COLUMNS", "check_place", "with_messages"]

ARCHIVE = "archive"
"""Stands for the segments that the index's storage keeps, and no folder."""
MESSAGE_COLUMNS = ("message_state", "message_body", "message_tags", "message_properties", "message_problem")
_TYPE = "struct<message_state:string,message_body:binary,message_tags:string,message_properties:map<string,string>,message_problem:string>"
_ARROW = pa.struct([
    ("message_state", pa.string()), ("message_body", pa.binary()), ("message_tags", pa.string()),
    ("message_properties", pa.map_(pa.string(), pa.string())), ("message_problem", pa.string()),
])  # fmt: skip
_ITEM = ("topic_id", "queue_id", "offset", "size", "timestamp_ms", "key_hash")


def check_place(messages: str, offset_space: str) -> None:
    """Raise `ConfigError` where an index's offsets are no places in a commit log, or there is no such folder."""
    if offset_space != "commitlog":
        raise ConfigError(f"the index's offsets are in {offset_space!r}: messages are found by places in a commit log")
    if messages != ARCHIVE and not (Path(messages) / "commitlog").is_dir():
        raise ConfigError(f"messages is {ARCHIVE!r} or the folder of a RocketMQ store, and {messages} has no commitlog/")


def with_messages(
    answers: DataFrame, topic: Column, key: Column, messages: str, address: StorageAddress, *, allow_partial: bool
) -> DataFrame:
    """Return the rows of `answers` (one an entry) with `MESSAGE_COLUMNS`, null where there is no entry.

    `message_state` is that of `Fetched`, or ``other_key`` for a message of another key whose hash is equal. A place that can't be asked
    fails the job, unless the answer may be partial: then it is ``missing``, and `message_problem` says why.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
    from pyspark.sql.pandas.functions import arrow_udf

    def fetch(parts: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        with ExitStack() as opened:
            source = _open(messages, address, opened)
            for topics, keys, *columns in parts:
                values = [column.to_pylist() for column in columns]
                found = _fetched(source, topics.to_pylist(), keys.to_pylist(), values)
                yield pa.array([_row(one, allow_partial=allow_partial) for one in found], _ARROW)

    fetch.__annotations__ = {"parts": Iterator[tuple[pa.Array, ...]], "return": Iterator[pa.Array]}
    make: Any = arrow_udf  # whose declared overloads ask for what it infers
    message = make(fetch, _TYPE)
    joined = answers.withColumn("_message", message(topic, key, *(F.col(name) for name in _ITEM)))
    return joined.select(*(F.col(f"`{name.replace('`', '``')}`") for name in answers.columns), "_message.*")


def _open(messages: str, address: StorageAddress, opened: ExitStack) -> RocketmqMessages:
    storage = opened.enter_context(address.open())
    log = StorageLog(storage, SystemClock())
    log.open()
    archive = SegmentArchive(storage, lambda: log.state, log.refresh)
    return RocketmqMessages(None if messages == ARCHIVE else Path(messages), archive)


def _fetched(source: RocketmqMessages, topics: list[str], keys: list[str], values: list[list[Any]]) -> list[Fetched | None]:
    """Return what became of each row's entry, in order; None for a row without one. Rows of one key are asked for together."""
    found: list[Fetched | None] = [None] * len(topics)
    places: dict[tuple[str, str], list[int]] = {}
    for place, pair in enumerate(zip(topics, keys, strict=True)):
        if values[2][place] is not None:
            places.setdefault(pair, []).append(place)
    for (topic, key), rows in places.items():
        items = [IndexItem(topic=topic, **{name: column[row] for name, column in zip(_ITEM, values, strict=True)}) for row in rows]
        for row, one in zip(rows, source.fetch(items, topic, key), strict=True):
            found[row] = one
    return found


def _row(one: Fetched | None, *, allow_partial: bool) -> dict[str, Any] | None:
    if one is None:
        return None
    if one.error is not None and one.message is None and not allow_partial:
        raise one.error
    row: dict[str, Any] = {"message_state": one.state, "message_problem": one.problem}
    message = one.message
    if not one.carries_key:
        row["message_state"] = "other_key"
    elif isinstance(message, FoundRocketmqMessage):
        row |= {"message_body": message.body(), "message_tags": message.tags, "message_properties": list(message.properties.items())}
    return row
