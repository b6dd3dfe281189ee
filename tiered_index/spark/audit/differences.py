"""Joins the entries of index and source in the `ranges` that differ, by Spark.

An entry with a wrong second may be within the bounds on one side only. It is then *missing* or *extra*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.hashing import HashRule, joint_rule
from tiered_index.format.schema import Schema, text_of
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.audit.entries import ALL_TIME, INDEX, SOURCE, Picked, Sides, identity_dtype, packed, value_dtype
from tiered_index.spark.audit.ranges import SUMS, Part, Ranges, Unread, sums_of
from tiered_index.spark.frames import arrow_function, arrow_schema, cells_of, cleaned_up, one_row, records_of
from tiered_index.spark.workers import between_tasks

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KINDS = ("missing", "extra", "wrong")
# A missing entry that may have been in a damaged object.
_UNPROVEN = "unproven"
_ROWS = "side int, identity binary, value binary, topic string, key string, object string"
_ARROW = arrow_schema(_ROWS)
# About the number of entries that one task joins
_PARTITION_ROWS = 1 << 18
# Spark's greatest limit
_MOST_LISTED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that differs between index and source.

    `kind` is ``missing`` (not in the index), ``extra`` (not in the source) or ``wrong`` (other values). `expected` has
    the source's values, `found` the index's: second, size, further columns, and the topic if it differs. `key` is known
    if the source has it, `topic` also if the index has it. `key_hash` is the stored hash, or one of `folded_hashes` if
    the index has files of both hash rules.
    """

    kind: str
    topic: str | None
    key: str | None
    key_hash: int
    queue_id: int
    offset: int
    expected: dict[str, Any] | None
    found: dict[str, Any] | None
    object: str | None


@dataclass(frozen=True, slots=True)
class Differences:
    """The counts of all differences, and a list of the first of each kind.

    `unproven` entries of the source may be in damaged objects. `source_entries` and `index_entries` are the numbers of
    entries that were compared, each as often as its side has it. `unsought` entries are missing or extra within the
    bounds; the other side may have them outside of the bounds, with a wrong second. `repeated` entries are more often
    in the index than in the source, which is no difference: lookups return each once.
    """

    counts: dict[str, int]
    listed: tuple[Difference, ...]
    unproven: int
    source_entries: int
    index_entries: int
    unsought: int = 0
    repeated: int = 0

    @property
    def findings(self) -> int:
        """The number of differences."""
        return sum(self.counts.values())

    @property
    def remarks(self) -> list[str]:
        """Texts about entries that could not be compared."""
        said = []
        if self.unproven:
            said.append(f"{_entries(self.unproven)} of the source may be in damaged objects: unproven")
        if self.unsought:
            why = "are missing or extra between the bounds: outside of them nothing was compared"
            said.append(f"{_entries(self.unsought)} {why}")
        if self.repeated:
            said.append(
                f"the index has {_entries(self.repeated)} more than once, as after a repeated append: "
                f"lookups return each once"
            )
        if not (self.source_entries or self.index_entries or self.unproven):
            said.append("nothing was compared: neither side has an entry within the bounds")
        return said


def _entries(count: int) -> str:
    return f"{count:,} {'entry' if count == 1 else 'entries'}"


def compare(
    sides: Sides, objects: Sequence[StoredObject], seconds: tuple[int, int], bad: Set[str], most_listed: int
) -> tuple[Differences, frozenset[str]]:
    """Return the differences within an inclusive range of seconds, and the objects that could not be read whole.

    `objects` are all objects of the index. Missing entries that may be in unread or `bad` objects are unproven. Raises
    `InvalidArgument`, also if the source changed meanwhile, and the storage's errors.
    """
    from pyspark import StorageLevel
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    within = [stored for stored in objects if stored.second_max >= seconds[0] and stored.second_min <= seconds[1]]
    rule, schema = joint_rule(stored.hash for stored in objects), sides.schema
    picked = Picked(*seconds, rule=rule, expired=sides.expired)
    ranges = Ranges.of(within, max(sides.entries.rows, sum(side_range.count for side_range in within)))
    sums, missed = _sums(sides, within, picked, ranges)
    unread = set(missed)
    differ = (sums[SOURCE] != sums[INDEX]).any(axis=0)
    counts: dict[str, int] = {}
    listed: list[Difference] = []
    repeated = 0
    if differ.any():

        def make(parts: Iterator[Part | Unread]) -> Iterator[pa.RecordBatch]:
            return _rows(parts, schema)

        ranges = ranges.marking(differ)
        chosen = [stored for stored in within if ranges.may_differ(stored)]
        of_source, of_index = (int(side[0][differ].sum()) for side in sums)
        partitions = max(sides.cores, (of_source + of_index) // _PARTITION_ROWS)
        with ExitStack() as ending:
            rows = ending.enter_context(sides.rows(chosen, replace(picked, among=ranges), make, _ROWS))
            values = _values(rows.repartition(partitions, "identity")).persist(StorageLevel.MEMORY_AND_DISK)
            ending.enter_context(cleaned_up(values.unpersist))
            unread.update(row[0] for row in values.where("identity IS NULL").select("object").collect())
            values = values.where("identity IS NOT NULL")
            more = F.greatest(F.lit(0), F.col("in_index") - F.greatest(F.col("in_source"), F.lit(1)))
            seen = values.agg(*(F.coalesce(F.sum(column), F.lit(0)) for column in ("in_source", "in_index", more)))
            [(source_again, index_again, repeated)] = seen.collect()
            if not unread and (source_again, index_again) != (of_source, of_index):
                raise InvalidArgument("the source changed while it was compared: use a copy that does not change")
            damaged = [stored for stored in objects if stored.name in bad | unread]
            alone = _with_kinds(_pairs(values), damaged, rule, schema)
            counts = {row[0]: row[1] for row in alone.groupBy("kind").count().collect()}
            for kind in (kind for kind in KINDS if most_listed and counts.get(kind)):
                first = alone.where(F.col("kind") == kind).orderBy("topic", "key", "identity", "rank")
                listed += [_difference(row, schema) for row in first.limit(min(most_listed, _MOST_LISTED)).collect()]
    listed.sort(key=lambda d: (KINDS.index(d.kind), d.topic or "", d.key or "", d.queue_id, d.offset))
    by_kind = {kind: counts.get(kind, 0) for kind in KINDS}
    unsought = by_kind["missing"] + by_kind["extra"] if seconds != ALL_TIME else 0
    compared = counts.get(_UNPROVEN, 0), int(sums[SOURCE][0].sum()), int(sums[INDEX][0].sum())
    return Differences(by_kind, tuple(listed), *compared, unsought, repeated), frozenset(unread)


def _sums(
    sides: Sides, objects: Sequence[StoredObject], picked: Picked, ranges: Ranges
) -> tuple[npt.NDArray[np.int64], frozenset[str]]:
    """Return the entries and digests of each range (i64, sides x 3 x ranges), and the objects not read whole."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    kinds = identity_dtype(sides.schema), value_dtype(sides.schema)
    names = [(name, kind[name]) for kind in kinds for name in kind.names or ()]

    def add_up(parts: Iterator[Part | Unread]) -> Iterator[pa.RecordBatch]:
        with between_tasks():
            yield from sums_of(parts, ranges, names)

    with sides.rows(objects, picked, add_up, SUMS) as rows:
        sums = [F.sum(name) for name in ("entries", "low", "high")]
        sums_by_range = rows.groupBy("side", "range").agg(*sums, F.collect_set("unread")).collect()
    made = np.zeros((2, 3, len(ranges)), np.int64)
    unread: set[str] = set()
    for side, number, entries, low, high, names_of in sums_by_range:
        if number < 0:
            unread.update(names_of)
        else:
            made[side, :, number] = entries, low, high
    return made, frozenset(unread)


def _rows(parts: Iterable[Part | Unread], schema: Schema) -> Iterator[pa.RecordBatch]:
    """Yield the entries of parts as rows; an unread object has a row without identity."""
    for part in parts:
        if isinstance(part, Unread):
            yield one_row(_ARROW, INDEX, None, part.name.encode(), None, None, part.name)
        else:
            count = len(part.columns["second"])
            each, none = np.arange(count), pa.nulls(count, pa.string())
            columns = [
                pa.array(np.full(count, part.side, np.int32)),
                *(cells_of(packed(part.columns, kind(schema)), each) for kind in (identity_dtype, value_dtype)),
                part.topics.cast(pa.string()),
                none if part.keys is None else part.keys.cast(pa.string()),
                pa.array([part.name] * count, pa.string()),
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=_ARROW)


def _values(rows: DataFrame) -> DataFrame:
    """Return the values of each identity, with the number of entries of either side. `rows` are of `_ROWS`."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    of_source = F.col("side") == SOURCE
    told, held = F.when(of_source, F.col("topic")), F.when(~of_source, F.col("topic"))
    return rows.groupBy("identity", "value").agg(
        F.count_if(of_source).alias("in_source"),
        F.count_if(~of_source).alias("in_index"),
        *(F.min(told).alias("topic"), F.max(told).alias("last_topic")),
        *(F.min(held).alias("held_topic"), F.max(held).alias("last_held")),
        *(F.min("key").alias("key"), F.min("object").alias("object")),
    )


def _pairs(values: DataFrame) -> DataFrame:
    """Return pairs of the source's and the index's differing values for each identity, both in order.

    `values` are of `_values`. `topic` and `key` are the source's, if it has the identity. An entry that one side has
    more often is no difference.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    in_source, in_index = F.col("in_source") > 0, F.col("in_index") > 0
    topic, held_topic, last_held = F.col("topic"), F.col("held_topic"), F.col("last_held")
    in_both = in_source & in_index
    # a topic is a part of the key's hash: no lookup finds an entry whose file has another topic for it
    misplaced = in_both & last_held.isNotNull() & ((held_topic != topic) | (last_held != F.col("last_topic")))
    named = F.when(held_topic.eqNullSafe(topic), last_held).otherwise(held_topic)
    said = F.struct("value", F.when(misplaced, topic).alias("wrong"), topic.alias("topic"), "key")
    stored = F.struct("value", F.when(misplaced, named).alias("wrong"), named.alias("topic"), "object")
    sides = (
        values.where(~in_both | misplaced)
        .groupBy("identity")
        .agg(
            F.sort_array(F.collect_list(F.when(in_source, said))).alias("said"),
            F.sort_array(F.collect_list(F.when(in_index, stored))).alias("held"),
        )
    )
    first = F.get("said", F.lit(0)).alias("first")
    laid = sides.select("identity", first, F.posexplode(F.arrays_zip("said", "held")).alias("rank", "pair"))
    names = F.coalesce("first.topic", "pair.held.topic").alias("topic"), F.col("first.key").alias("key")
    return laid.select("identity", "rank", *names, "pair.said", "pair.held")


def _with_kinds(pairs: DataFrame, damaged: Sequence[StoredObject], rule: HashRule, schema: Schema) -> DataFrame:
    """Return the pairs with their kind of difference."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    identity, value = identity_dtype(schema), value_dtype(schema)

    def hidden(identities: pa.Array, values: pa.Array) -> pa.Array:
        cells = records_of(identities, identity), records_of(values, value)
        return pa.array(may_hold(damaged, rule, cells[0]["key_hash"], cells[1]["second"]))

    missing: Column = F.lit("missing")
    if damaged:
        said = F.coalesce(F.col("said.value"), F.lit(bytes(value.itemsize)))
        lost = arrow_function(hidden, "boolean")(F.col("identity"), said)
        missing = F.when(lost, F.lit(_UNPROVEN)).otherwise(missing)
    extra = F.when(F.col("said").isNull(), "extra")
    return pairs.withColumn("kind", extra.when(F.col("held").isNotNull(), "wrong").otherwise(missing))


def may_hold(
    damaged: Sequence[StoredObject], rule: HashRule, hashes: npt.NDArray[Any], seconds: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    """Return whether a damaged object may have an entry with each of these hashes and seconds (n each; bool, n)."""
    either = [hashes.astype(np.int64)]
    if rule == "both":
        # the other one of two hashes that are folded into one
        either.append(-either[0] & 2**31 - 1)
    hidden = np.zeros(len(hashes), np.bool_)
    for stored in damaged:
        inside = (seconds >= stored.second_min) & (seconds <= stored.second_max)
        if (shard := stored.shard) is not None:
            slots = [shard.slots.slots_of(folded.astype(np.int32)) for folded in either]
            inside &= np.logical_or.reduce([(slot >= shard.slot_low) & (slot < shard.slot_high) for slot in slots])
        hidden |= inside
    return hidden


def _difference(row: Any, schema: Schema) -> Difference:
    identity = _fields(row["identity"], identity_dtype(schema), schema)

    def side(name: str) -> dict[str, Any] | None:
        joined = row[name]
        if joined is None:
            return None
        value = _fields(joined["value"], value_dtype(schema), schema)
        return value | ({} if joined["wrong"] is None else {"topic": joined["wrong"]})

    place = identity["key_hash"], identity["queue_id"], identity["offset"]
    held = row["held"]
    names = row["kind"], row["topic"], row["key"]
    return Difference(*names, *place, side("said"), side("held"), None if held is None else held["object"])


def _fields(cell: bytes, dtype: np.dtype[Any], schema: Schema) -> dict[str, Any]:
    values = zip(dtype.names or (), np.frombuffer(cell, dtype)[0].item(), strict=True)
    return {name: text_of(value) if name in schema.text_columns else value for name, value in values}
