"""Functions for Spark's columns. Built of Spark's own expressions: no Python runs on executors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["hash_key"]

_MIN_VALUE = 1 << 31


def hash_key(topic: Column | str, key: Column | str) -> Column:
    """Return `tiered_index.hash_key` of two text columns (or names of columns) as an int column; null where either is null."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    # the fold's functions name nothing outside of them: Spark would evaluate that again for every code unit
    units = F.regexp_extract_all(F.hex(F.encode(F.concat(topic, F.lit("#"), key), "UTF-16BE")), F.lit("(.{4})"), F.lit(1))

    def add(value: Any, unit: Any) -> Any:
        return (value * 31 + F.conv(unit, 16, 10).cast("bigint")).bitwiseAND(F.lit(0xFFFFFFFF))

    def absolute(value: Any) -> Any:
        # abs() of Integer.MIN_VALUE is itself in Java; as the format demands it becomes 0
        return F.when(value < _MIN_VALUE, value).when(value == _MIN_VALUE, 0).otherwise((1 << 32) - value).cast("int")

    return F.aggregate(units, F.lit(0).cast("bigint"), add, absolute)
