"""Index against source: both sides' entries meet in one shuffle, and what has no like on the other side is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered_index.errors import StorageUnavailable
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.audit_entries import ALL_TIME, Picked, identity_dtype, value_dtype
from tiered_index.spark.audit_outside import SOUGHT, left_out, paired
from tiered_index.spark.audit_sides import Sides, unread_of
from tiered_index.spark.kept import kept
from tiered_index.spark.lookup_plan import Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["KINDS", "Compared", "Difference", "Differences", "compare"]

KINDS = ("missing", "extra", "wrong")
_UNPROVEN = "unproven"
_MOST_ROWS = 2**31 - 1
# what Spark takes for a limit


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that index and source disagree about.

    `kind` is ``missing`` (from the index), ``extra`` (the source has none) or ``wrong`` (both have one, with other values). `expected` are
    the source's values, `found` the index's: second, size, further columns, and the topic where the two name different ones. `topic` and
    `key` are known where the source has it.
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
    """All differences, counted, and the first of each kind; `unproven` entries of the source may have lain in damaged objects.

    `source_entries` and `index_entries` are how many different entries were compared. `unsought` are those told as missing or extra that
    were not sought outside of the bounds: their other half may lie there, and they be wrong ones.
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
            said.append(f"{_entries(self.unsought)} told as missing or extra were not sought outside of the bounds: they may be wrong ones")
        return said

    @property
    def unlisted(self) -> dict[str, int]:
        """How many differences of each kind are counted and not listed, where any are."""
        left = Counter(self.counts) - Counter(one.kind for one in self.listed)
        return {kind: left[kind] for kind in KINDS if left[kind]}


def _entries(count: int) -> str:
    return f"{count:,} {'entry' if count == 1 else 'entries'}"


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison that is under way: `unread` names objects of which something could not be read."""

    rows: DataFrame
    unread: frozenset[str]
    sides: Sides
    objects: Sequence[StoredObject]
    seconds: tuple[int, int]

    def told(self, damaged: Sequence[Target], most_listed: int) -> tuple[Differences, frozenset[str]]:
        """Return the differences, and what else was unread. Entries of the source that `damaged` would hold may have lain there.

        Raises `StorageUnavailable` where Spark lost rows, and an object could not be read again.
        """
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        values = self.rows.where("unread IS NULL")
        totals = values.agg(F.count_if(F.col("source") > 0).alias("source"), F.count_if(F.col("index") > 0).alias("index")).first()
        assert totals is not None
        with ExitStack() as until_told:
            differing = until_told.enter_context(kept(_differing(values, damaged, self.sides.base)))
            counts, unread, unsought = _counted(differing), frozenset[str](), 0
            if self.seconds != ALL_TIME and any(counts[kind] for kind in SOUGHT):
                unsought = left_out(counts)
                differing, unread = until_told.enter_context(paired(differing, counts, self.sides, self.objects, self.seconds))
                counts = _counted(differing)
            rows = _first_of_each(differing, counts, most_listed)
        if unread_of(self.rows) != self.unread:
            raise StorageUnavailable("objects were removed while they were compared: run the audit again")
        identities, fields = identity_dtype(self.sides.schema), value_dtype(self.sides.schema)
        listed = [_difference(row, identities, fields) for row in rows]
        listed.sort(key=lambda d: (KINDS.index(d.kind), d.topic or "", d.key or "", d.queue_id, d.offset))
        found = {kind: counts[kind] for kind in KINDS}
        told = Differences(found, tuple(listed), counts[_UNPROVEN], int(totals["source"]), int(totals["index"]), unsought)
        return told, unread


@contextmanager
def compare(sides: Sides, objects: Sequence[StoredObject], seconds: tuple[int, int]) -> Iterator[Compared]:
    """Bring both sides' entries within an inclusive range of seconds together, until the block ends; `objects` are all of the index.

    Raises `InvalidArgument`, what the storage raises.
    """
    within = [stored for stored in objects if stored.second_max >= seconds[0] and stored.second_min <= seconds[1]]
    with sides.met(within, Picked(*seconds)) as rows:
        yield Compared(rows, unread_of(rows), sides, objects, seconds)


def _counted(differing: DataFrame) -> Counter[str]:
    return Counter({row["kind"]: row["count"] for row in differing.groupBy("kind").count().collect()})


def _first_of_each(differing: DataFrame, counts: Mapping[str, int], most_listed: int) -> list[Any]:
    ordered = differing.orderBy("topic", "key", "identity", "said", "held")
    kinds = [kind for kind in KINDS if counts[kind] and most_listed]
    return [row for kind in kinds for row in ordered.where(ordered["kind"] == kind).limit(min(most_listed, _MOST_ROWS)).collect()]


def _differing(values: DataFrame, damaged: Sequence[Target], base: int) -> DataFrame:
    """Return a row for each difference, and for each entry that is unproven: what was `said` by the source and `held` by the index."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    in_both = (F.col("source") > 0) & (F.col("index") > 0)
    misplaced = in_both & F.col("found_topic").isNotNull() & (
        (F.col("found_topic") != F.col("topic")) | (F.col("last_found") != F.col("last_topic"))
    )  # fmt: skip
    none = F.lit(None).cast("string")
    alone = values.where(~in_both | misplaced)
    said = F.struct("value", "second", F.when(misplaced, F.col("topic")).otherwise(none).alias("topic"))
    wrong_topic = F.when(F.col("found_topic") != F.col("topic"), F.col("found_topic")).otherwise(F.col("last_found"))
    held = F.struct("value", "second", F.when(misplaced, wrong_topic).otherwise(none).alias("topic"), "object")
    parts = alone.groupBy("identity").agg(
        F.sort_array(F.collect_list(F.when(F.col("source") > 0, said))).alias("expected"),
        F.sort_array(F.collect_list(F.when(F.col("index") > 0, held))).alias("found"),
        F.first("topic", ignorenulls=True).alias("topic"), F.first("key", ignorenulls=True).alias("key"),
    )  # fmt: skip
    pairs = parts.select("*", F.posexplode(F.arrays_zip("expected", "found")).alias("at", "pair"))
    # the place among those of its identity that have no like
    place = F.col("at") - F.least(F.size("expected"), F.size("found"))
    pairs = pairs.select(
        "identity", "topic", "key", place.alias("place"), F.col("pair.expected").alias("said"), F.col("pair.found").alias("held")
    )
    kind = F.when(F.col("said").isNull(), "extra").when(F.col("held").isNotNull(), "wrong").otherwise("missing")
    pairs = pairs.withColumn("kind", kind)
    if not damaged:
        return pairs
    hash_hex = F.hex(F.substring("identity", 1, 4))  # the first field, and never negative
    where = F.conv(hash_hex, 16, 10).cast("long") % base
    spans = F.broadcast(values.sparkSession.createDataFrame(_joined(damaged), "first long, last long, slot_low long, slot_high long"))
    hidden = (
        (F.col("kind") == "missing") & F.col("said.second").between(F.col("first"), F.col("last"))
        & (where >= F.col("slot_low")) & (where < F.col("slot_high"))
    )  # fmt: skip
    unproven = pairs.join(spans, hidden, "left_semi").withColumn("kind", F.lit(_UNPROVEN))
    return pairs.join(spans, hidden, "left_anti").unionByName(unproven)


def _joined(damaged: Sequence[Target]) -> list[tuple[int, int, int, int]]:
    """Return (first second, last, base slots from, to): inclusive seconds, those of the same slots that meet made one."""
    joined: list[tuple[int, int, int, int]] = []
    for low, high, first, last in sorted((t.base_low, t.base_high, t.stored.second_min, t.stored.second_max) for t in damaged):
        before = joined[-1] if joined else None
        if before is not None and before[2:] == (low, high) and first <= before[1] + 1:
            joined[-1] = (before[0], max(before[1], last), low, high)
        else:
            joined.append((first, last, low, high))
    return joined


def _difference(row: Any, identities: np.dtype[Any], fields: np.dtype[Any]) -> Difference:
    identity = _fields(row["identity"], identities)
    expected, found = (_side(row[side], fields) for side in ("said", "held"))
    place = identity["key_hash"], identity["queue_id"], identity["offset"]
    name = None if row["held"] is None else row["held"]["object"]
    return Difference(row["kind"], row["topic"], row["key"], *place, expected, found, name)


def _side(side: Any, fields: np.dtype[Any]) -> dict[str, Any] | None:
    if side is None:
        return None
    topic = {} if side["topic"] is None else {"topic": side["topic"]}
    return _fields(side["value"], fields) | topic


def _fields(packed: bytes, dtype: np.dtype[Any]) -> dict[str, Any]:
    row = np.frombuffer(packed, dtype)[0]
    return {name: value.item() if hasattr(value := row[name], "item") else value for name in dtype.names or ()}
