"""From a DataFrame of keys to lookups: the fields' columns, their types, and a count of the rows. Driver only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import InvalidArgument
from tiered_index.service.answers.rows import check_topic
from tiered_index.spark.build.sources import column_of, shown_column
from tiered_index.spark.executors import cells_of
from tiered_index.spark.lookup.plan import LookupPlan, lookups_of, times_of
from tiered_index.types import MAX_TIMESTAMP_MS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_FIELDS = ("topic", "key", "begin_ms", "end_ms")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_MAX_TOPICS = 1_000_000


@dataclass(frozen=True)
class KeysCensus:
    """The rows to look up and those skipped, counted, with their topics and (inclusive) range of seconds."""

    rows: int
    topics: tuple[str, ...]
    seconds: tuple[int, int]
    skipped_null: int


@dataclass(frozen=True)
class Keys:
    """Rows and their four fields as columns; `given` are no columns of the frame, `names` are for errors."""

    frame: DataFrame
    fields: Mapping[str, Any]
    given: Mapping[str, Any]
    names: Mapping[str, str]

    def census(self, *, skip_null: bool) -> KeysCensus:
        """Count. Raises `InvalidArgument` naming a column that has nulls, unless such rows are skipped."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        topic, key, begin, end = (self.fields[name] for name in _FIELDS)
        topics = self.frame.groupBy(topic.alias("topic")).agg(
            F.count_if(key.isNull()).alias("keyless"),
            F.count_if(key.isNotNull()).alias("rows"),
            F.min(F.coalesce(begin, F.lit(0))).alias("low"),
            F.max(F.coalesce(end, F.lit(MAX_TIMESTAMP_MS))).alias("high"),
        )
        rows = topics.limit(_MAX_TOPICS + 1).collect()
        if len(rows) > _MAX_TOPICS:
            raise InvalidArgument(f"the keys have more than {_MAX_TOPICS:,} topics")
        without_topic = sum(row["keyless"] + row["rows"] for row in rows if row["topic"] is None)
        without_key = sum(row["keyless"] for row in rows if row["topic"] is not None)
        for name, count in (("topic", without_topic), ("key", without_key)):
            if count and not skip_null:
                has = f"column {self.names[name]} has {count:,} null{'s' * (count > 1)}"
                raise InvalidArgument(f"{has}; a value is needed in every row (or skip_null)")
        kept = [row for row in rows if row["topic"] is not None and row["rows"]]
        for row in kept:
            check_topic(row["topic"])
        low, high = min((row["low"] for row in kept), default=0), max((row["high"] for row in kept), default=0)
        count, names = sum(row["rows"] for row in kept), tuple(sorted(row["topic"] for row in kept))
        return KeysCensus(count, names, (low // 1000, high // 1000), without_topic + without_key)

    def column(self, name: str) -> Any:
        """Return a field as a column of what `with_lookup` returns."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        return F.col(name) if name in self.given else self.fields[name]

    def whole(self) -> DataFrame:
        """Return the rows that have a topic and a key."""
        return self.frame.where(self.fields["topic"].isNotNull() & self.fields["key"].isNotNull())

    def fields_only(self) -> DataFrame:
        """Return (topic, key, begin, end) of the rows that have a topic and a key."""
        return self.whole().select(*(self.fields[name].alias(f"_{name}") for name in _FIELDS))

    def with_lookup(self, plan: LookupPlan, name: str) -> DataFrame:
        """Return the rows with the record of their lookup, as column `name`."""
        from pyspark.sql.pandas.functions import arrow_udf

        places, keyed, column = plan.places, plan.schema.keyed, self.names["key"]

        def packed(*arrays: pa.Array) -> pa.Array:
            # Spark may ask for rows, too, that it leaves out afterwards
            whole = pc.and_(pc.is_valid(arrays[0]), pc.is_valid(arrays[1]))
            topic, key, begin, end = (array.filter(whole) for array in arrays)
            lookups = lookups_of(topic, key, begin, end, places, keyed=keyed, column=column)
            cells = cells_of(lookups, np.arange(len(lookups)))
            there = whole.to_numpy(zero_copy_only=False)
            return cells if there.all() else cells.take(pa.array(np.cumsum(there) - 1, mask=~there))

        make: Any = arrow_udf  # whose declared overloads ask for what it infers
        lookup = make(packed, "binary")(*(self.fields[field] for field in _FIELDS))
        given = [column.alias(field) for field, column in self.given.items()]
        return self.whole().select("*", *given, lookup.alias(name))


def keys_of(frame: DataFrame, columns: Mapping[str, str | Column], taken: Sequence[str]) -> Keys:
    """Return the rows of `frame` as keys. Raises `InvalidArgument` naming the column and what was expected.

    `columns` say which column a field is, or are column expressions themselves; `taken` are names of answers.
    """
    from pyspark.sql import Column
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    if frame.isStreaming:
        raise InvalidArgument("the keys are a stream; look up each of its batches (foreachBatch)")
    if unknown := [name for name in columns if name not in _FIELDS]:
        raise InvalidArgument(f"columns: {unknown[0]!r} is no field of a lookup; these are {', '.join(_FIELDS)}")
    fields: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for name in _FIELDS:
        source: Any = columns.get(name, name)
        if isinstance(source, str):
            if source not in frame.columns and name in ("begin_ms", "end_ms") and name not in columns:
                fields[name] = F.lit(None).cast("bigint")
            else:
                fields[name] = column_of(frame, name, source, "the keys have")
        elif not isinstance(source, Column):
            raise InvalidArgument(f"columns: {name} is the name of a column or a Column, not {source!r}")
        else:
            fields[name] = source
            if name not in frame.columns:
                given[name] = source
    there = [*frame.columns, *given]
    lower = [name.lower() for name in there]
    if twice := [name for name in there if lower.count(name.lower()) > 1]:
        raise InvalidArgument(f"the keys have two columns {twice[0]!r}")
    here = frame.select(*(column.alias(name) for name, column in fields.items())).schema
    names: dict[str, str] = {}
    for name in _FIELDS:
        found = here[name].dataType.simpleString()
        named = names[name] = shown_column(name, columns.get(name))
        if name in ("topic", "key"):
            if found != "string":
                raise InvalidArgument(f"column {named} is {found}; text is needed")
        elif found == "timestamp":
            fields[name] = F.unix_millis(fields[name])
        elif found in _INTEGERS:
            fields[name] = fields[name].cast("bigint")
        elif found == "string":
            fields[name] = _times(fields[name], named)
        else:
            wanted = "integers (epoch milliseconds), a timestamp with time zone, or text of either"
            raise InvalidArgument(f"column {named} is {found}; {wanted} are needed")
    names_taken = {name.lower() for name in taken}
    if clash := [name for name in there if name.lower() in names_taken]:
        of_answers = "of the keys has the name of a column of answers"
        raise InvalidArgument(f"column {clash[0]!r} {of_answers}; give it another one")
    return Keys(frame, fields, given, names)


def _times(texts: Any, named: str) -> Any:
    from pyspark.sql.pandas.functions import arrow_udf

    def parsed(values: pa.Array) -> pa.Array:
        return times_of(values, named)

    make: Any = arrow_udf  # whose declared overloads ask for what it infers
    return make(parsed, "bigint")(texts)
