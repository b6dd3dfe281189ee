"""Index against source: one outer join of the ranges that `matching` finds to differ.

Driver only. An entry whose stored second is wrong may be inside the bounds of time on one side only. It is *missing* or
*extra* then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tiered_index.errors import StorageUnavailable
from tiered_index.format.hashing import joint_rule
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.audit import entries
from tiered_index.spark.audit.entries import ALL_TIME, Picked
from tiered_index.spark.audit.matching import match
from tiered_index.spark.audit.pairing import KINDS, Hidden, Told, cut, pack, pair
from tiered_index.spark.audit.ranges import Ranges, Sides
from tiered_index.spark.lookup.plan import Target

# Entries of a range, about, and how many ranges there are at least.
_RANGE, _LEAST_RANGES = 1 << 17, 8


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that index and source disagree about; `key_hash` as stored, but `folded_hashes` where the index has
    files of both hash rules.

    `kind` is ``missing`` (from the index), ``extra`` (the source has none) or ``wrong`` (both have one, with other
    values). `expected` are the source's values, `found` the index's: second, size, further columns, and the topic where
    the two name different ones. `key` is known where the source has it, `topic` also where the index names it.
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

    `unproven` entries of the source may be in damaged objects. `source_entries` and `index_entries` are how many
    different entries were compared. `unsought` entries are missing or extra between the bounds of the comparison. The
    other side may have them outside of the bounds, with a wrong second. The index stores `repeated` entries more often
    than the source has them, which is no difference: lookups answer each once.
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
        """How many differences there are."""
        return sum(self.counts.values())

    @property
    def remarks(self) -> list[str]:
        """What the counts leave open, in words."""
        said = []
        if self.unproven:
            said.append(f"{_entries(self.unproven)} of the source may be in damaged objects: unproven")
        if self.unsought:
            why = "are missing or extra between the bounds: outside of them nothing was compared"
            said.append(f"{_entries(self.unsought)} {why}")
        if self.repeated:
            said.append(
                f"{_entries(self.repeated)} of the index are there more than once, as after a repeated append: "
                f"lookups answer each once"
            )
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
    rule = joint_rule(stored.hash for stored in objects)
    picked = Picked(*seconds, rule=rule, expired=sides.expired)
    matched, differs = match(sides, within, picked)
    compared = matched.source, matched.index
    if not matched.differing:
        same = Differences(dict.fromkeys(KINDS, 0), (), 0, *compared, repeated=matched.repeated)
        return same, matched.unread
    targets = {stored.name: Target.of(stored, sides.base) for stored in objects}
    hidden = Hidden(targets, frozenset(bad | matched.unread), sides.base, rule)
    meet = partial(pair, hidden=hidden, schema=sides.schema, most=most_listed)
    ranges = Ranges.of(sum(matched.differing.values()), _RANGE, _LEAST_RANGES, sides.cores)
    packed = partial(pack, schema=sides.schema)
    told: Told = sides.met(within, replace(picked, ranges=differs), ranges, packed, cut, meet, Told.joined)
    if len(told.unread) > 1:
        raise StorageUnavailable("objects were removed while they were compared: run the audit again")
    identities, fields = entries.identity_dtype(sides.schema), entries.value_dtype(sides.schema)
    listed = [
        _difference(kind, row, identities, fields)
        for kind, table in zip(KINDS, told.listed, strict=True)
        for row in table.to_pylist()
    ]
    listed.sort(key=lambda d: (KINDS.index(d.kind), d.topic or "", d.key or "", d.queue_id, d.offset))
    unread = matched.unread.union(*told.unread)
    found = dict(zip(KINDS, told.counts, strict=False))
    unsought = found["missing"] + found["extra"] if seconds != ALL_TIME else 0
    whole = Differences(found, tuple(listed), told.counts[-1], *compared, unsought, matched.repeated)
    return whole, unread


def _difference(kind: str, row: dict[str, Any], identities: np.dtype[Any], fields: np.dtype[Any]) -> Difference:
    def side(name: str) -> dict[str, Any] | None:
        if row[name] is None:
            return None
        topic = row[f"{name}_topic"]
        return _fields(row[name], fields) | ({} if topic is None else {"topic": topic})

    identity = _fields(row["identity"], identities)
    place = identity["key_hash"], identity["queue_id"], identity["offset"]
    return Difference(kind, row["topic"], row["key"], *place, side("said"), side("held"), row["object"])


def _fields(packed: bytes, dtype: np.dtype[Any]) -> dict[str, Any]:
    return dict(zip(dtype.names or (), np.frombuffer(packed, dtype)[0].item(), strict=True))
