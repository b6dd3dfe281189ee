"""From a DataFrame of messages to one of entries: which column each field is, and whether its type fits.

Runs on the driver; reads nothing. Columns are built of Spark's own expressions, so no Python runs on executors.

| field | needed as |
|---|---|
| `topic` | text |
| `key` | text, or a list of text: one entry for each different key; where there is neither, a column `keys` |
| `queue_id`, `offset`, `size`, optionally `topic_id` | integers |
| `timestamp_ms` | integers of epoch milliseconds, or a timestamp |

and the further columns of the index's schema. A row without key makes no entry, one without `topic_id` gets an id by
its topic's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import Schema
from tiered_index.spark.build.log_sources import SKIPPED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["FIELDS", "check_kind", "entry_frame", "hash_key"]

# What every message has; `topic_id` is optional.
FIELDS = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_TIMES = (*_INTEGERS, "timestamp", "timestamp_ntz")
_TEXT, _LIST = ("string",), ("string", "array<string>")
_KINDS = {
    "topic": (_TEXT, "text is"),
    "key": (_LIST, "text or a list of text is"),
    "queue_id": (_INTEGERS, "integers are"),
    "offset": (_INTEGERS, "integers are"),
    "size": (_INTEGERS, "integers are"),
    "topic_id": (_INTEGERS, "integers are"),
    "timestamp_ms": (_TIMES, "integers (epoch milliseconds) or a timestamp are"),
}


def entry_frame(frame: DataFrame, columns: Mapping[str, str | Column], schema: Schema) -> DataFrame:
    """Return the fields of entries, one row an entry (its key null where a message has none).

    `columns` say which column of `frame` a field is, where it isn't called the same; a `Column` (``lit("orders")``)
    stands for itself. Raises `InvalidArgument` naming the column and what was expected.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    wanted = [*FIELDS, *(column.name for column in schema.caller_columns)]
    if unknown := [name for name in columns if name not in (*wanted, "topic_id")]:
        raise InvalidArgument(
            f"columns: {unknown[0]!r} is no field of an entry; these are {', '.join((*wanted, 'topic_id'))}"
        )
    if "topic_id" in columns or "topic_id" in frame.columns:
        wanted.append("topic_id")
    selected = []
    for field in wanted:
        source: Any = columns.get(field, field)
        if isinstance(source, str):
            if field == "key" and source == "key" and "key" not in frame.columns and "keys" in frame.columns:
                source = "keys"
            if source not in frame.columns:
                named = f"{source!r} ({field})" if source != field else f"{source!r}"
                raise InvalidArgument(
                    f"column {named} is missing; the source has {', '.join(frame.columns) or 'no columns'}"
                )
            source = F.col(f"`{source.replace('`', '``')}`")
        selected.append(source.alias(field))
    if SKIPPED in frame.columns:
        selected.append(F.col(SKIPPED))
    entries = frame.select(*selected)
    for name in wanted:
        check_kind(name, entries.schema[name].dataType.simpleString(), columns.get(name, name))
    if entries.schema["key"].dataType.simpleString() != "string":
        entries = entries.withColumn("key", F.explode_outer(F.array_compact(F.array_distinct("key"))))
    return entries


def check_kind(field: str, found: str, given: object) -> None:
    """Raise `InvalidArgument` where Spark's type `found` can't be that of `field`.

    `given` is what the user calls the column.
    """
    kinds, expected = _KINDS.get(field, ((), ""))
    if kinds and found not in kinds:
        named = f"{given!r} ({field})" if isinstance(given, str) and given != field else f"{field!r}"
        raise InvalidArgument(f"column {named} is {found}; {expected} needed")


_MIN_VALUE = 1 << 31


def hash_key(topic: Column | str, key: Column | str) -> Column:
    """Return `tiered_index.hash_key` of two text columns (or names of columns) as an int column.

    Null where either is null.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    # the fold's functions name nothing outside of them: Spark would evaluate that again for every code unit
    units = F.regexp_extract_all(
        F.hex(F.encode(F.concat(topic, F.lit("#"), key), "UTF-16BE")), F.lit("(.{4})"), F.lit(1)
    )

    def add(value: Any, unit: Any) -> Any:
        return (value * 31 + F.conv(unit, 16, 10).cast("bigint")).bitwiseAND(F.lit(0xFFFFFFFF))

    def absolute(value: Any) -> Any:
        # abs() of Integer.MIN_VALUE is itself in Java; as the format demands it becomes 0
        return F.when(value < _MIN_VALUE, value).when(value == _MIN_VALUE, 0).otherwise((1 << 32) - value).cast("int")

    return F.aggregate(units, F.lit(0).cast("bigint"), add, absolute)
