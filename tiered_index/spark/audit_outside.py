"""What an audit of a part of the time finds beyond it: the other half of an entry whose stored second is wrong. Driver only.

Index and source are compared within bounds, so an entry whose second is inside on one side and outside on the other looks *missing* or
*extra*. What does so is sought once more, by its identity, outside of the bounds on both sides; there, what both sides have goes out, and
the other side's rest pairs with it: the entry is *wrong*. No difference is added, and what is outside on both sides is never told.

Nothing is read where nothing is missing or extra. Otherwise that is the source, and of objects with entries outside of the bounds the slot
groups of the identities that are sought, of which there are `MOST_SOUGHT` of a kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from tiered_index.service.log.records import StoredObject
from tiered_index.spark.audit_entries import Picked
from tiered_index.spark.audit_sides import Sides, unread_of
from tiered_index.spark.kept import kept
from tiered_index.spark.lookup_plan import Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["MOST_SOUGHT", "SOUGHT", "left_out", "paired"]

MOST_SOUGHT = 10_000
SOUGHT = ("missing", "extra")


def left_out(counts: Mapping[str, int]) -> int:
    """Return how many differences of the kinds that are sought are too many."""
    return sum(max(0, counts.get(kind, 0) - MOST_SOUGHT) for kind in SOUGHT)


@contextmanager
def paired(
    differing: DataFrame, counts: Mapping[str, int], sides: Sides, objects: Sequence[StoredObject], seconds: tuple[int, int]
) -> Iterator[tuple[DataFrame, frozenset[str]]]:
    """Yield the differences, those whose other half lies outside of `seconds` as wrong ones, and the objects that could not be read whole.

    Raises `InvalidArgument`, what the storage raises.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    kinds = [kind for kind in SOUGHT if counts.get(kind)]
    first = [differing.where(F.col("kind") == kind).orderBy("identity", "place").limit(MOST_SOUGHT) for kind in kinds]
    identities = sorted({bytes(row[0]) for rows in first for row in rows.select("identity").collect()})
    picked = Picked.outside(seconds, identities, sides.schema)
    with sides.met(_that_may_hold(objects, picked, sides.base), picked) as rows:
        alone = rows.where(F.col("unread").isNull() & ((F.col("source") == 0) != (F.col("index") == 0)))
        none = F.lit(None).cast("string")
        halves = alone.groupBy("identity").agg(
            F.sort_array(F.collect_list(F.when(F.col("source") > 0, F.struct("value", "second", none.alias("topic"))))).alias("others"),
            F.sort_array(F.collect_list(F.when(F.col("index") > 0, F.struct("value", "second", none.alias("topic"), "object"))))
            .alias("finds"),
            F.first("topic", ignorenulls=True).alias("other_topic"), F.first("key", ignorenulls=True).alias("other_key"),
        )  # fmt: skip
        missing, extra = F.col("kind") == "missing", F.col("kind") == "extra"
        both = differing.join(halves, "identity", "left")
        said = F.when(extra, F.get("others", F.col("place"))).otherwise(F.col("said"))
        held = F.when(missing, F.get("finds", F.col("place"))).otherwise(F.col("held"))
        told = both.select(
            "identity", F.coalesce("topic", "other_topic").alias("topic"), F.coalesce("key", "other_key").alias("key"), "place",
            said.alias("said"), held.alias("held"),
            F.when((missing | extra) & said.isNotNull() & held.isNotNull(), "wrong").otherwise(F.col("kind")).alias("kind"),
        )  # fmt: skip
        with kept(told):
            yield told, unread_of(rows)


def _that_may_hold(objects: Sequence[StoredObject], picked: Picked, base: int) -> list[StoredObject]:
    """Return the objects with entries outside of the bounds and slots of what is picked."""
    assert picked.hashes is not None
    slots = np.unique(picked.hashes % base)

    def holds(target: Target) -> bool:
        low, high = np.searchsorted(slots, (target.base_low, target.base_high))
        return bool(low < high)

    beyond = [stored for stored in objects if stored.second_min < picked.first or stored.second_max > picked.last]
    return [stored for stored in beyond if holds(Target.of(stored, base))]
