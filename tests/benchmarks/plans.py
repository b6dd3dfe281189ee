"""What a bulk lookup reads of an index, and what it would read were the unit that is checked and read another one, or
the gap.

A lookup reads slot groups of 16 KiB, the unit that has a checksum. A hypothetical unit is cut by the same rule at other
sizes: it has whole slots, and a new one begins with the slot whose array begins in another stretch of so many bytes,
and with each slot of that size or more. `SLOT` is a unit of one slot each. Where slots lie is taken from the stored
items, so figures are counted, not estimated. All plans get the same: what is left of the questions after the
filters that the lookup fetches.

Not in a plan's requests and bytes are those for directories and filters, which are told apart: one request each an
object. The directory of other units is taken to be as the present one, 32 bytes a unit. Of an object that is asked more
than a million questions the lookup reads neighbours of its lots' borders twice; that is not counted. Objects with a
slot so large that it is cut into blocks are refused. One thread; reads every object once, 32 MiB at a time. Memory: 16
bytes a slot of one object, and some 100 a question.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tests.benchmarks.machine.setting import require
from tests.benchmarks.messages import TOPIC, key_in_one
from tiered_index.format.bloom import FILTER_BLOCK_BYTES, block_numbers, blocks_may_hold, filter_hashes
from tiered_index.format.compacted import GROUP_BYTES
from tiered_index.format.hashing import key_hashes, normal_hashes
from tiered_index.format.trailer import GROUP_DTYPE, Trailer, parse_trailer
from tiered_index.service.cold.path import MAX_SPAN_BYTES, ColdSettings
from tiered_index.service.log.records import StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.spark.lookup.plan import Target, distinct, lookups_of
from tiered_index.spark.lookup.search import WINDOW_BYTES, request_bytes, worth_a_filter
from tiered_index.storage.base import Storage
from tiered_index.storage.prices import PriceTable

__all__ = [
    "BYTES_A_SECOND",
    "EGRESS_PER_GIB_USD",
    "GAPS",
    "IN_FLIGHT",
    "REQUEST_S",
    "SLOT",
    "UNITS",
    "PlanCost",
    "plan_costs",
    "questions_for",
    "ranges_of",
]

SLOT = 0
UNITS = (SLOT, 512, 4 << 10, GROUP_BYTES)
"""Bytes of the units that are compared; the last one is what is stored."""
GAPS = (0, 4 << 10, 64 << 10)
"""Bytes between two units up to which they are read as one range, beside those that the settings say."""
REQUEST_S, IN_FLIGHT, BYTES_A_SECOND = 0.030, 64, 100_000_000
"""The model of time: how long a request takes, how many travel at once, and how many bytes arrive a second."""
EGRESS_PER_GIB_USD = 0.09
"""What bytes cost that leave the region, where the settings' prices have none: Amazon S3's list price to the internet.
"""
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlanCost:
    """What one plan reads: `requests` and `read_bytes` are of ranges, `opening_...` of directories and filters. `used`:
    by the lookup.
    """

    unit: int
    gap_bytes: int
    used: bool
    requests: int = 0
    read_bytes: int = 0
    opening_requests: int = 0
    opening_bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long the ranges take by the model: what requests or what bytes take, whichever is more."""
        return max(self.requests * REQUEST_S / IN_FLIGHT, self.read_bytes / BYTES_A_SECOND)

    def usd(self, prices: PriceTable) -> tuple[float, float]:
        """Return the price of the ranges' requests, and of their bytes where these leave the region."""
        leaving = replace(prices, egress_per_gib_usd=prices.egress_per_gib_usd or EGRESS_PER_GIB_USD)
        return prices.cost_usd({"get_range": self.requests}, 0), leaving.cost_usd({}, self.read_bytes)

    def plus(self, requests: int, read_bytes: int, opening_requests: int, opening_bytes: int) -> PlanCost:
        """Return the plan with what it reads of one more object."""
        return replace(
            self,
            requests=self.requests + requests,
            read_bytes=self.read_bytes + read_bytes,
            opening_requests=self.opening_requests + opening_requests,
            opening_bytes=self.opening_bytes + opening_bytes,
        )


@dataclass(frozen=True)
class _Units:
    """The units of one object, in order of slot: the first slot of each (n), and its bytes [start, end)."""

    size: int
    first_slots: Int64
    starts: Int64
    ends: Int64

    def met(self, slots: Int64) -> tuple[Int64, Int64]:
        """Return the bytes [start, end) of the units that hold any of `slots`, each unit once, in order of position."""
        found = np.zeros(len(self.starts), bool)
        index = np.searchsorted(self.first_slots, slots, "right") - 1
        # of single slots only those that hold anything are there
        exact = self.first_slots[index] == slots if self.size == SLOT else np.ones(len(slots), bool)
        found[index[exact & (index >= 0)]] = True
        found &= self.ends > self.starts
        return self.starts[found], self.ends[found]


def questions_for(numbers: Int64, *, keyed: bool) -> Array:
    """Return the questions for the keys of messages `numbers` (n), without a range of time."""
    keys = pa.array(map(key_in_one, numbers.tolist()), pa.string(), size=len(numbers))
    none = pa.nulls(len(keys), pa.int64())
    topics = pa.array([TOPIC] * len(keys), pa.string())
    return distinct(lookups_of(topics, keys, none, none, {TOPIC: 0}, keyed=keyed))


def plan_costs(
    storage: Storage, state: LogState, batches: Sequence[Array], settings: ColdSettings
) -> list[list[PlanCost]]:
    """Return for each of `batches`, different questions about a topic that all objects have, what each plan reads; the
    used one first.

    Raises `RuntimeError` where an object has a slot that is cut into blocks.
    """
    assert state.genesis is not None
    base = state.genesis.layout.slots
    gaps = sorted({*GAPS, settings.coalesce_gap_bytes})
    plans = [
        PlanCost(unit, gap, (unit, gap) == (GROUP_BYTES, settings.coalesce_gap_bytes)) for unit in UNITS for gap in gaps
    ]
    costs = [sorted(plans, key=lambda plan: not plan.used) for _ in batches]
    for stored in state.objects.values():
        target = Target.of(stored, base)
        here = [
            questions[target.holds([np.abs(questions["java_hash"].astype(np.int64)) % base], questions)]
            for questions in batches
        ]
        if not any(map(len, here)):
            continue
        trailer = _trailer(storage, stored)
        units = _units_of(storage, stored, trailer)
        for place, questions in enumerate(here):
            if len(questions):
                costs[place] = _with_object(costs[place], storage, stored, trailer, units, questions, settings)
    return costs


def _with_object(
    plans: Iterable[PlanCost],
    storage: Storage,
    stored: StoredObject,
    trailer: Trailer,
    units: dict[int, _Units],
    questions: Array,
    settings: ColdSettings,
) -> list[PlanCost]:
    """Return the plans with what they read of one object for `questions` (at least one)."""
    key_hash = key_hashes(questions["java_hash"], trailer.metadata.layout.hash)
    slots = trailer.metadata.slot_map.slots_of(key_hash)
    starts, ends = units[GROUP_BYTES].met(slots)
    request = request_bytes(settings)
    near, added = _joined(starts, ends, settings.coalesce_gap_bytes)
    filtered = worth_a_filter(stored, int(added.sum()) + request * int((~near).sum()), request)
    if filtered:
        hashes = filter_hashes(key_hash, questions["fingerprint"] if trailer.metadata.layout.schema.keyed else None)
        words = np.frombuffer(
            storage.get_range(stored.name, stored.trailer_position, stored.filter_length), "<u4"
        ).reshape(-1, 8)
        slots = slots[blocks_may_hold(words[block_numbers(hashes, stored.filter_length // FILTER_BLOCK_BYTES)], hashes)]
    beside = stored.size_bytes - stored.directory_position - stored.directory_length + filtered * stored.filter_length
    empty_directory = stored.directory_length - len(trailer.directory.groups) * GROUP_DTYPE.itemsize
    met = {size: of_size.met(slots) for size, of_size in units.items()}
    return [
        plan.plus(
            *ranges_of(*met[plan.unit], plan.gap_bytes),
            1 + filtered,
            beside + empty_directory + len(units[plan.unit].starts) * GROUP_DTYPE.itemsize,
        )
        for plan in plans
    ]


def ranges_of(starts: Int64, ends: Int64, gap: int) -> tuple[int, int]:
    """Return how many ranges the lookup asks for to read the bytes [starts, ends) (n each, in order), and their bytes.

    As it does, units are taken in windows of 16 MiB, gaps included; in a window, those at most `gap` apart are one
    range of at most 8 MiB.
    """
    count = len(starts)
    if not count:
        return 0, 0
    near, added = _joined(starts, ends, gap)
    begins = ~near
    reached = np.cumsum(added)
    for place in _cuts(reached, reached - added, 0, count, WINDOW_BYTES):
        begins[place] = True
    firsts = np.flatnonzero(begins)
    stops = np.append(firsts[1:], count)
    for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True):
        if ends[stop - 1] - starts[first] > MAX_SPAN_BYTES:
            for place in _cuts(ends, starts, first, stop, MAX_SPAN_BYTES):
                begins[place] = True
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts[1:], count) - 1
    return len(firsts), int((ends[lasts] - starts[firsts]).sum())


def _joined(starts: Int64, ends: Int64, gap: int) -> tuple[npt.NDArray[np.bool_], Int64]:
    """Return which units (bool, n) join the one before, and how many bytes each adds to what is read, the gap before it
    included.
    """
    near = np.zeros(len(starts), bool)
    between = starts[1:] - ends[:-1]
    near[1:] = between <= gap
    added = ends - starts
    added[1:] += np.where(near[1:], between, 0)
    return near, added


def _cuts(ends: Int64, starts: Int64, first: int, stop: int, most: int) -> Iterator[int]:
    """Yield where [first, stop) is cut so that each part, from its first start to its last end, has at most `most`
    bytes, or one unit.
    """
    while True:
        first = max(first + 1, int(np.searchsorted(ends[:stop], starts[first] + most, "right")))
        if first >= stop:
            return
        yield first


def _trailer(storage: Storage, stored: StoredObject) -> Trailer:
    start = stored.directory_position
    trailer = parse_trailer(
        storage.get_range(stored.name, start, stored.size_bytes - start), stored.name, stored.size_bytes
    )
    require(int((trailer.directory.groups["blocks"] > 0).sum()), 0, f"slots of {stored.name} that are cut into blocks")
    return trailer


def _units_of(storage: Storage, stored: StoredObject, trailer: Trailer) -> dict[int, _Units]:
    """Return the units of an object by their size; those of 16 KiB are the directory's groups."""
    groups = trailer.directory.groups
    slots, firsts = _slots_of(storage, stored, trailer)
    starts = positions_of(trailer, firsts)
    ends = np.append(starts[1:], stored.trailer_position)
    # where items would be if they were not packed decides where units begin
    unpacked = np.append(firsts, stored.count) * trailer.metadata.layout.schema.item.itemsize
    units = {SLOT: _Units(SLOT, slots, starts, ends)}
    for size in UNITS[1:-1]:
        cut = np.diff(unpacked[:-1] // size, prepend=-1) != 0
        cut |= np.diff(unpacked) >= size
        begins = starts[cut]
        units[size] = _Units(size, slots[cut], begins, np.append(begins[1:], stored.trailer_position))
        # the first one has the empty slots before it, too
        units[size].first_slots[0] = groups["first_slot"][0]
    offsets = groups["offset"].astype(np.int64)
    units[GROUP_BYTES] = _Units(GROUP_BYTES, groups["first_slot"].astype(np.int64), offsets, offsets + groups["length"])
    return units


def positions_of(trailer: Trailer, items: Int64) -> Int64:
    """Return where items (their numbers, n) begin; of packed ones, as if all of a run were of one length."""
    runs = trailer.directory.all_runs()
    counts = np.cumsum([0, *(run.count for run in runs)])
    return np.interp(items, counts, [*(run.offset for run in runs), trailer.tail.position]).astype(np.int64)


def _slots_of(storage: Storage, stored: StoredObject, trailer: Trailer) -> tuple[Int64, Int64]:
    """Return the slots of an object that hold items (i64, n), in order, and the numbers of their first items."""
    slot_map = trailer.metadata.slot_map
    parts: list[tuple[Int64, Int64]] = []
    last, count = -1, 0
    for run in trailer.directory.all_runs():
        data = storage.get_range(stored.name, run.offset, run.length)
        hashes = normal_hashes(trailer.metadata.items_of(data, run.count, stored.name)["key_hash"])
        slots = slot_map.slots_of(hashes)
        firsts = np.flatnonzero(np.diff(slots, prepend=last))
        parts.append((slots[firsts], count + firsts))
        last, count = int(slots[-1]), count + run.count
    found = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
    return found[0], found[1]
