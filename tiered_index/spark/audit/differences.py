"""Index against source: what `matching` finds to differ is brought together, and unmatched entries are differences.

Driver only. An entry whose stored second is wrong may be inside the bounds of time on one side only, where it looks
*missing* or *extra*: at most `MOST_SOUGHT` of a kind are searched again, by identity, outside of the bounds (`paired`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tiered_index.errors import StorageUnavailable
from tiered_index.format.hashing import HashRule, joint_rule
from tiered_index.format.schema import Schema
from tiered_index.retention import NOTHING, Expired
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.audit import entries
from tiered_index.spark.audit.entries import ALL_TIME, Picked
from tiered_index.spark.audit.matching import match
from tiered_index.spark.build.sources import Entries
from tiered_index.spark.executors import StorageAddress, broadcast
from tiered_index.spark.lookup.plan import Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Off by default: then a kept DataFrame has all partitions of spark.sql.shuffle.partitions (200), and each is a task of
# every job that reads it.
_COALESCE = "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning"


@contextmanager
def kept(frame: DataFrame) -> Iterator[DataFrame]:
    """Yield `frame`, which is made once and kept until the block ends; the session's setting changes for a moment."""
    settings = frame.sparkSession.conf
    before = settings.get(_COALESCE)
    settings.set(_COALESCE, "true")
    try:
        frame.persist()
    finally:
        settings.set(_COALESCE, before or "false")
    try:
        yield frame
    finally:
        frame.unpersist()


@dataclass(frozen=True, slots=True)
class Sides:
    """A source's entries and an index's storage; `base` is how many slots the index's files have. What has `expired` is
    on neither side.
    """

    entries: Entries
    address: StorageAddress
    schema: Schema
    base: int
    expired: Expired = NOTHING

    @contextmanager
    def met(self, stored: Sequence[StoredObject], picked: Picked) -> Iterator[DataFrame]:
        """Yield a row for each different picked entry, counted in `source` and `index`, and each `unread` object."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        spark, schema, address = self.entries.frame.sparkSession, self.schema, self.address
        with broadcast(spark, (list(stored), picked)) as shared:

            def of_source(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                return entries.rows(entries.source_entries(batches, schema, shared.value[1]), schema)

            def of_index(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                objects, wanted = shared.value
                with closing(address.open()) as storage:
                    for batch in batches:
                        for number in batch.column(0).to_pylist():
                            parts = entries.stored_entries(objects[number], storage, schema, wanted)
                            yield from entries.rows(parts, schema)

            both = self.entries.mapped(of_source, entries.compared_fields(self.entries), entries.ENTRY_SCHEMA)
            if stored:
                numbers = spark.range(0, len(stored), 1, len(stored))
                both = both.unionAll(numbers.mapInArrow(of_index, entries.ENTRY_SCHEMA))
            in_source, in_index = F.col("side") == entries.SOURCE, F.col("side") == entries.INDEX
            # a topic is a part of the key's hash; what an index's table says must agree with it, or no look-up finds
            # the entry
            rows = both.groupBy(
                "identity", "value", F.when(F.col("side") == entries.UNREAD, F.col("object")).alias("unread")
            ).agg(
                F.count_if(in_source).alias("source"),
                F.count_if(in_index).alias("index"),
                F.first("second").alias("second"),
                F.min(F.when(in_source, F.col("topic"))).alias("topic"),
                F.max(F.when(in_source, F.col("topic"))).alias("last_topic"),
                F.min(F.when(in_index, F.col("topic"))).alias("found_topic"),
                F.max(F.when(in_index, F.col("topic"))).alias("last_found"),
                F.first("key", ignorenulls=True).alias("key"),
                F.min("object").alias("object"),
            )
            with kept(rows):
                yield rows


def unread_of(rows: DataFrame) -> frozenset[str]:
    """Return the objects of which something is unread."""
    return frozenset(row[0] for row in rows.where("unread IS NOT NULL").select("unread").collect())


MOST_SOUGHT = 10_000
SOUGHT = ("missing", "extra")


@contextmanager
def paired(
    differing: DataFrame,
    counts: Mapping[str, int],
    sides: Sides,
    objects: Sequence[StoredObject],
    seconds: tuple[int, int],
) -> Iterator[tuple[DataFrame, frozenset[str]]]:
    """Yield the differences, wrong ones where the other half lies outside of `seconds`, and what else was unread."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    kinds = [kind for kind in SOUGHT if counts.get(kind)]
    first = [differing.where(F.col("kind") == kind).orderBy("identity", "place").limit(MOST_SOUGHT) for kind in kinds]
    identities = sorted({bytes(row[0]) for rows in first for row in rows.select("identity").collect()})
    rule = joint_rule(stored.hash for stored in objects)
    picked = Picked.outside(seconds, identities, sides.schema, rule, sides.expired)
    with sides.met(_that_may_hold(objects, picked, sides.base), picked) as rows:
        alone = rows.where(F.col("unread").isNull() & ((F.col("source") == 0) != (F.col("index") == 0)))
        none = F.lit(None).cast("string")
        other = F.struct("value", "second", none.alias("topic"))
        find = F.struct("value", "second", none.alias("topic"), "object")
        halves = alone.groupBy("identity").agg(
            F.sort_array(F.collect_list(F.when(F.col("source") > 0, other))).alias("others"),
            F.sort_array(F.collect_list(F.when(F.col("index") > 0, find))).alias("finds"),
            F.first("topic", ignorenulls=True).alias("other_topic"),
            F.first("key", ignorenulls=True).alias("other_key"),
        )
        missing, extra = F.col("kind") == "missing", F.col("kind") == "extra"
        both = differing.join(halves, "identity", "left")
        said = F.when(extra, F.get("others", F.col("place"))).otherwise(F.col("said"))
        held = F.when(missing, F.get("finds", F.col("place"))).otherwise(F.col("held"))
        wrong = (missing | extra) & said.isNotNull() & held.isNotNull()
        told = both.select(
            "identity",
            F.coalesce("topic", "other_topic").alias("topic"),
            F.coalesce("key", "other_key").alias("key"),
            "place",
            said.alias("said"),
            held.alias("held"),
            F.when(wrong, "wrong").otherwise(F.col("kind")).alias("kind"),
        )
        with kept(told):
            yield told, unread_of(rows)


def _that_may_hold(objects: Sequence[StoredObject], picked: Picked, base: int) -> list[StoredObject]:
    """Return the objects with entries outside of the bounds and slots of what is picked."""
    assert picked.hashes is not None
    slots = np.unique(picked.hashes % base)
    beyond = [stored for stored in objects if stored.second_min < picked.first or stored.second_max > picked.last]
    bounds = [(target.base_low, target.base_high) for target in (Target.of(stored, base) for stored in beyond)]
    lows, highs = np.searchsorted(slots, np.array(bounds, np.int64).reshape(-1, 2)).T
    return [stored for stored, holds in zip(beyond, lows < highs, strict=True) if holds]


KINDS = ("missing", "extra", "wrong")
_UNPROVEN = "unproven"
# The largest limit that Spark takes.
_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that index and source disagree about; `key_hash` as stored, but `folded_hashes` where the index has
    files of both hash rules.

    `kind` is ``missing`` (from the index), ``extra`` (the source has none) or ``wrong`` (both have one, with other
    values). `expected` are the source's values, `found` the index's: second, size, further columns, and the topic where
    the two name different ones. `topic` and `key` are known where the source has it.
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
    """All differences, counted, and the first of each kind.

    `unproven` entries of the source may have lain in damaged objects. `source_entries` and `index_entries` are how many
    different entries were compared. `unsought` are those reported as missing or extra that were not searched outside of
    the bounds: their other half may lie there, and they would be wrong ones.
    """

    counts: dict[str, int]
    listed: tuple[Difference, ...]
    unproven: int
    source_entries: int
    index_entries: int
    unsought: int = 0

    @property
    def findings(self) -> int:
        """How many differences there are."""
        return sum(self.counts.values())

    @property
    def remarks(self) -> list[str]:
        """What the counts leave open, in words."""
        said = []
        if self.unproven:
            said.append(f"{_entries(self.unproven)} of the source may have lain in damaged objects: unproven")
        if self.unsought:
            why = "told as missing or extra were not sought outside of the bounds: they may be wrong ones"
            said.append(f"{_entries(self.unsought)} {why}")
        return said

    @property
    def unlisted(self) -> dict[str, int]:
        """How many differences of each kind are counted and not listed, where any are."""
        left = Counter(self.counts) - Counter(one.kind for one in self.listed)
        return {kind: left[kind] for kind in KINDS if left[kind]}


def _entries(count: int) -> str:
    return f"{count:,} {'entry' if count == 1 else 'entries'}"


def compare(
    sides: Sides, objects: Sequence[StoredObject], seconds: tuple[int, int], bad: Set[str], most_listed: int
) -> tuple[Differences, frozenset[str]]:
    """Return the differences within an inclusive range of seconds, and the objects that could not be read whole.

    `objects` are all of the index. Entries of the source that unread ones, or those named in `bad`, would hold may have
    lain there. Raises `InvalidArgument`, what the storage raises, `StorageUnavailable` where Spark lost rows and an
    object could not be read again.
    """
    within = [stored for stored in objects if stored.second_max >= seconds[0] and stored.second_min <= seconds[1]]
    with ExitStack() as until_told:
        rule = joint_rule(stored.hash for stored in objects)
        picked = Picked(*seconds, rule=rule, expired=sides.expired)
        matched = match(sides.entries, within, sides.address, sides.schema, picked)
        compared = matched.source, matched.index
        if matched.differing is not None and not len(matched.differing):
            return Differences(dict.fromkeys(KINDS, 0), (), 0, *compared), matched.unread
        rows = until_told.enter_context(sides.met(within, replace(picked, digests=matched.differing)))
        read_again = unread_of(rows)
        unread, further, unsought = matched.unread | read_again, frozenset[str](), 0
        damaged = [Target.of(o, sides.base) for o in objects if o.name in bad | unread]
        values = rows.where("unread IS NULL")
        differing = until_told.enter_context(kept(_differing(values, damaged, sides.base, rule)))
        counts = _counted(differing)
        if seconds != ALL_TIME and any(counts[kind] for kind in SOUGHT):
            unsought = sum(max(0, counts[kind] - MOST_SOUGHT) for kind in SOUGHT)
            differing, further = until_told.enter_context(paired(differing, counts, sides, objects, seconds))
            counts = _counted(differing)
        ordered = differing.orderBy("topic", "key", "identity", "said", "held")
        first: list[Any] = []
        for kind in KINDS if most_listed else ():
            if counts[kind]:
                first += ordered.where(ordered["kind"] == kind).limit(min(most_listed, _MOST_ROWS)).collect()
        if unread_of(rows) != read_again:
            raise StorageUnavailable("objects were removed while they were compared: run the audit again")
    identities, fields = entries.identity_dtype(sides.schema), entries.value_dtype(sides.schema)
    listed = [_difference(row, identities, fields) for row in first]
    listed.sort(key=lambda d: (KINDS.index(d.kind), d.topic or "", d.key or "", d.queue_id, d.offset))
    found = {kind: counts[kind] for kind in KINDS}
    return Differences(found, tuple(listed), counts[_UNPROVEN], *compared, unsought), unread | further


def _counted(differing: DataFrame) -> Counter[str]:
    return Counter({row["kind"]: row["count"] for row in differing.groupBy("kind").count().collect()})


def _differing(values: DataFrame, damaged: Sequence[Target], base: int, rule: HashRule) -> DataFrame:
    """Return a row, what is `said` by the source and `held` by the index, for each difference and unproven entry."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    in_both = (F.col("source") > 0) & (F.col("index") > 0)
    misplaced = in_both & F.expr("found_topic IS NOT NULL AND (found_topic != topic OR last_found != last_topic)")
    none = F.lit(None).cast("string")
    alone = values.where(~in_both | misplaced)
    said = F.struct("value", "second", F.when(misplaced, F.col("topic")).otherwise(none).alias("topic"))
    wrong_topic = F.when(F.col("found_topic") != F.col("topic"), F.col("found_topic")).otherwise(F.col("last_found"))
    held = F.struct("value", "second", F.when(misplaced, wrong_topic).otherwise(none).alias("topic"), "object")
    parts = alone.groupBy("identity").agg(
        F.sort_array(F.collect_list(F.when(F.col("source") > 0, said))).alias("expected"),
        F.sort_array(F.collect_list(F.when(F.col("index") > 0, held))).alias("found"),
        F.first("topic", ignorenulls=True).alias("topic"),
        F.first("key", ignorenulls=True).alias("key"),
    )
    pairs = parts.select("*", F.posexplode(F.arrays_zip("expected", "found")).alias("at", "pair"))
    # the place among those of its identity that have no like
    place = "at - least(size(expected), size(found)) AS place"
    pairs = pairs.selectExpr("identity", "topic", "key", place, "pair.expected AS said", "pair.found AS held")
    kind = F.when(F.col("said").isNull(), "extra").when(F.col("held").isNotNull(), "wrong").otherwise("missing")
    pairs = pairs.withColumn("kind", kind)
    if not damaged:
        return pairs
    hash_hex = F.hex(F.substring("identity", 1, 4))  # the first field, and never negative
    hashed = F.conv(hash_hex, 16, 10).cast("long")
    places = [hashed % base, (F.lit(2**31) - hashed) % base] if rule == "both" else [hashed % base]
    spans = F.broadcast(
        values.sparkSession.createDataFrame(_joined(damaged), "first long, last long, slot_low long, slot_high long")
    )
    hidden = (
        (F.col("kind") == "missing")
        & F.col("said.second").between(F.col("first"), F.col("last"))
        & reduce(operator.or_, [(where >= F.col("slot_low")) & (where < F.col("slot_high")) for where in places])
    )
    unproven = pairs.join(spans, hidden, "left_semi").withColumn("kind", F.lit(_UNPROVEN))
    return pairs.join(spans, hidden, "left_anti").unionByName(unproven)


def _joined(damaged: Sequence[Target]) -> list[tuple[int, int, int, int]]:
    """Return (first second, last, base slots from, to), joined where ranges of the same slots meet."""
    joined: list[tuple[int, int, int, int]] = []
    ranges = [(t.base_low, t.base_high, t.stored.second_min, t.stored.second_max) for t in damaged]
    for low, high, first, last in sorted(ranges):
        before = joined[-1] if joined else None
        if before is not None and before[2:] == (low, high) and first <= before[1] + 1:
            joined[-1] = (before[0], max(before[1], last), low, high)
        else:
            joined.append((first, last, low, high))
    return joined


def _difference(row: Any, identities: np.dtype[Any], fields: np.dtype[Any]) -> Difference:
    def side(values: Any) -> dict[str, Any]:
        topic = {} if values["topic"] is None else {"topic": values["topic"]}
        return _fields(values["value"], fields) | topic

    identity = _fields(row["identity"], identities)
    place = identity["key_hash"], identity["queue_id"], identity["offset"]
    expected, found = (None if row[name] is None else side(row[name]) for name in ("said", "held"))
    name = None if row["held"] is None else row["held"]["object"]
    return Difference(row["kind"], row["topic"], row["key"], *place, expected, found, name)


def _fields(packed: bytes, dtype: np.dtype[Any]) -> dict[str, Any]:
    return dict(zip(dtype.names or (), np.frombuffer(packed, dtype)[0].item(), strict=True))
