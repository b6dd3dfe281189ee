"""Index against source: one outer join of the ranges that `matching` finds to differ.

Driver only. An entry whose stored second is wrong may be inside the bounds of time on one side only, where it looks
*missing* or *extra*: at most `MOST_SOUGHT` of a kind are searched again, by identity, outside of the bounds (`paired`).
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
from tiered_index.spark.audit.pairing import KINDS, Halves, Hidden, Told, cut, halves, pack, pair
from tiered_index.spark.audit.ranges import Ranges, Sides
from tiered_index.spark.lookup.plan import Target

MOST_SOUGHT = 10_000
SOUGHT = KINDS[:2]
# Entries of a range, about, and how many ranges there are at least.
_RANGE, _LEAST_RANGES = 1 << 17, 8


def paired(
    told: Told, sides: Sides, objects: Sequence[StoredObject], seconds: tuple[int, int]
) -> tuple[Counter[str], list[dict[str, Any]], frozenset[str]]:
    """Return the counts and the rows of what was `told` of a range of seconds, wrong ones where the other half lies
    outside of it, and what else was unread.
    """
    counts = Counter(dict(zip(KINDS, told.counts, strict=False)))
    identities = sorted({cell for table in told.sought for cell in table["identity"].to_pylist()})
    rule = joint_rule(stored.hash for stored in objects)
    picked = Picked.outside(seconds, identities, sides.schema, rule, sides.expired)
    ranges = Ranges.of(0, 1, _LEAST_RANGES, sides.cores)
    there = _that_may_hold(objects, picked, sides.base)
    found: Halves = sides.met(there, picked, ranges, partial(pack, schema=sides.schema), cut, halves, Halves.joined)
    others: dict[bytes, list[dict[str, Any]]] = {}
    finds: dict[bytes, list[dict[str, Any]]] = {}
    for row in (row for table in found.rows for row in table.to_pylist()):
        (others if row["said"] is not None else finds).setdefault(row["identity"], []).append(row)
    for rows, value in ((others, "said"), (finds, "held")):
        for alone in rows.values():
            alone.sort(key=lambda row: row[value])
    told_rows: list[dict[str, Any]] = []
    for kind, table in zip(SOUGHT, told.sought, strict=True):
        for row in table.to_pylist():
            identity, place = row["identity"], row["place"]
            mine = others.get(identity, [])
            if mine and row["key"] is None:
                row |= {name: mine[0][name] for name in ("topic", "key")}
            halves_of, value = (finds.get(identity, []), "held") if kind == "missing" else (mine, "said")
            if place < len(halves_of):
                row |= {value: halves_of[place][value]}
                if kind == "missing":
                    row["object"] = halves_of[place]["object"]
                counts[kind] -= 1
                counts["wrong"] += 1
                told_rows.append(row | {"kind": "wrong"})
            else:
                told_rows.append(row | {"kind": kind})
    # those that were sought are told as they are now
    known = {(row["identity"], row["rank"]) for row in told_rows}
    for kind, table in zip(KINDS, told.listed, strict=True):
        rest = (row | {"kind": kind} for row in table.to_pylist())
        told_rows += [row for row in rest if kind not in SOUGHT or (row["identity"], row["rank"]) not in known]
    return counts, told_rows, found.unread


def _that_may_hold(objects: Sequence[StoredObject], picked: Picked, base: int) -> list[StoredObject]:
    """Return the objects with entries outside of the bounds and slots of what is picked."""
    assert picked.hashes is not None
    slots = np.unique(picked.hashes % base)
    beyond = [stored for stored in objects if stored.second_min < picked.first or stored.second_max > picked.last]
    bounds = [(target.base_low, target.base_high) for target in (Target.of(stored, base) for stored in beyond)]
    lows, highs = np.searchsorted(slots, np.array(bounds, np.int64).reshape(-1, 2)).T
    return [stored for stored, holds in zip(beyond, lows < highs, strict=True) if holds]


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

    `unproven` entries of the source may have lain in damaged objects. `source_entries` and `index_entries` are how many
    different entries were compared. `unsought` are those reported as missing or extra that were not searched outside of
    the bounds: their other half may lie there, and they would be wrong ones. The index stores `repeated` entries more
    often than the source has them, which is no difference: lookups answer each once.
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
            said.append(f"{_entries(self.unproven)} of the source may have lain in damaged objects: unproven")
        if self.unsought:
            why = "told as missing or extra were not sought outside of the bounds: they may be wrong ones"
            said.append(f"{_entries(self.unsought)} {why}")
        if self.repeated:
            said.append(
                f"{_entries(self.repeated)} of the index stand there more than once, as where an append was repeated: "
                "lookups answer each once"
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
    bounded = seconds != ALL_TIME
    targets = {stored.name: Target.of(stored, sides.base) for stored in objects}
    hidden = Hidden(targets, frozenset(bad | matched.unread), sides.base, rule)
    sought = MOST_SOUGHT if bounded else 0
    # some of what is told may turn out to be wrong ones
    most = most_listed + sought if most_listed else 0
    meet = partial(pair, hidden=hidden, schema=sides.schema, most=most, sought=sought)
    ranges = Ranges.of(sum(matched.differing.values()), _RANGE, _LEAST_RANGES, sides.cores)
    packed = partial(pack, schema=sides.schema)
    told: Told = sides.met(within, replace(picked, ranges=differs), ranges, packed, cut, meet, Told.joined)
    if len(told.unread) > 1:
        raise StorageUnavailable("objects were removed while they were compared: run the audit again")
    counts, unsought, further = Counter(dict(zip(KINDS, told.counts, strict=False))), 0, frozenset[str]()
    if bounded and any(counts[kind] for kind in SOUGHT):
        unsought = sum(max(0, counts[kind] - MOST_SOUGHT) for kind in SOUGHT)
        counts, rows, further = paired(told, sides, objects, seconds)
    else:
        rows = [row | {"kind": k} for k, table in zip(KINDS, told.listed, strict=True) for row in table.to_pylist()]
    identities, fields = entries.identity_dtype(sides.schema), entries.value_dtype(sides.schema)
    rows.sort(key=_in_order)
    first = [row for kind in KINDS for row in [row for row in rows if row["kind"] == kind][:most_listed]]
    listed = [_difference(row, identities, fields) for row in first]
    listed.sort(key=lambda d: (KINDS.index(d.kind), d.topic or "", d.key or "", d.queue_id, d.offset))
    unread = matched.unread | further | frozenset[str]().union(*told.unread)
    found = {kind: counts[kind] for kind in KINDS}
    whole = Differences(found, tuple(listed), told.counts[-1], *compared, unsought, matched.repeated)
    return whole, unread


def _in_order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what rows are told by: topic and key, what is unknown first, then identity and values."""
    names = [(row[name] is not None, row[name] or "") for name in ("topic", "key")]
    return *names, row["identity"], row["said"] or b"", row["held"] or b""


def _difference(row: dict[str, Any], identities: np.dtype[Any], fields: np.dtype[Any]) -> Difference:
    def side(name: str) -> dict[str, Any] | None:
        if row[name] is None:
            return None
        topic = row[f"{name}_topic"]
        return _fields(row[name], fields) | ({} if topic is None else {"topic": topic})

    identity = _fields(row["identity"], identities)
    place = identity["key_hash"], identity["queue_id"], identity["offset"]
    return Difference(row["kind"], row["topic"], row["key"], *place, side("said"), side("held"), row["object"])


def _fields(packed: bytes, dtype: np.dtype[Any]) -> dict[str, Any]:
    return dict(zip(dtype.names or (), np.frombuffer(packed, dtype)[0].item(), strict=True))
