"""An estimate of a bulk lookup's requests and bytes, for dry runs and for sharing bounds out to tasks.

Lookups are counted by object for the keys that there are. Which of an object's slot groups they meet is taken to be
random, and three standard deviations are added to the expectation, so a task hardly ever asks for more. A hot slot,
which is read in blocks, may exceed it. Pure; lookups are counted in tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.format.compacted import GROUP_BYTES
from tiered_index.format.trailer import GROUP_DTYPE
from tiered_index.spark.lookup.plan import LookupPlan, Target
from tiered_index.spark.lookup.search import WINDOW_BYTES, lots_of_lookups, request_bytes, worth_a_filter

__all__ = ["COUNTS_SCHEMA", "bounded", "count_lookups", "foreseen", "total_counts"]

COUNTS_SCHEMA = "counts binary"
# Ranges of at most 8 MiB that end with a slot group.
_SPANS_A_WINDOW = 3
Int64 = npt.NDArray[np.int64]


def count_lookups(
    batches: Iterable[pa.RecordBatch], plan: LookupPlan, column: str = "'key'"
) -> Iterator[pa.RecordBatch]:
    """Yield how many lookups of rows (topic, key, begin, end) each object may have answers for, i64 as bytes."""
    counts = np.zeros(plan.objects, np.int64)
    for lookups in lots_of_lookups(batches, plan, column):
        base_slots = plan.base_slots(lookups)
        for place, target in enumerate(_targets(plan)):
            counts[place] += np.count_nonzero(target.holds(base_slots, lookups))
    yield pa.record_batch({"counts": pa.array([counts.tobytes()], pa.binary())})


def total_counts(plan: LookupPlan, cells: Iterable[bytes]) -> Int64:
    """Return the sum of what `count_lookups` yielded (i64, n).

    For each object its lookups, in order of the tasks.
    """
    return sum((np.frombuffer(cell, np.int64) for cell in cells), np.zeros(plan.objects, np.int64))


def foreseen(plan: LookupPlan, counts: Int64) -> list[tuple[int, int]]:
    """Return about how many (requests, bytes) each task takes at most; `counts` (i64, n) are objects' lookups."""
    costs = iter([_cost(plan, target, int(count)) for target, count in zip(_targets(plan), counts, strict=True)])
    found = []
    for task in plan.tasks:
        pairs = [next(costs) for _ in task]
        found.append((sum(requests for requests, _ in pairs), sum(read for _, read in pairs)))
    return found


def bounded(plan: LookupPlan, counts: Int64, max_requests: int | None, max_bytes: int | None) -> LookupPlan:
    """Return the plan with bounds of all tasks, each task's share by what it will take; `counts` as in `foreseen`."""
    costs = foreseen(plan, counts)
    shares = [_shares(limit, [cost[kind] for cost in costs]) for kind, limit in enumerate((max_requests, max_bytes))]
    return replace(plan, limits=tuple(zip(*shares, strict=True)), max_requests=max_requests, max_bytes=max_bytes)


def _shares(limit: int | None, costs: Sequence[int]) -> list[int | None]:
    """Return shares of `limit` in proportion to `costs`, none less than its cost where the limit suffices for all."""
    total = sum(costs)
    if limit is None or not total:
        return [limit] * len(costs)
    shares = [limit * cost // total for cost in costs]
    for place in sorted(range(len(costs)), key=lambda place: -(limit * costs[place] % total))[: limit - sum(shares)]:
        shares[place] += 1
    return list(shares)


def _targets(plan: LookupPlan) -> list[Target]:
    return [target for task in plan.tasks for target in task]


def _cost(plan: LookupPlan, target: Target, asked: int) -> tuple[int, int]:
    """Return the requests and bytes of one object and `asked` lookups: directory, filter where that pays, ranges.

    A lookup meets each of n groups with equal chance, so n (1 - e^(-asked/n)) are met; one is joined to the one before
    over at most `gap` groups between.
    """
    if not asked:
        return 0, 0
    stored = target.stored
    arrays = stored.count * plan.schema.item.itemsize
    # cut groups have further records, so it may be fewer
    groups = max(1, stored.directory_length // GROUP_DTYPE.itemsize)
    size = max(GROUP_BYTES, arrays / groups)
    met = groups * -math.expm1(-asked / groups)
    most = min(asked, groups, met + 3 * math.sqrt(met))
    if arrays <= plan.settings.coalesce_gap_bytes:
        runs, read = 1.0, float(arrays) if asked > 1 else 2 * size
    else:
        gap, share = int(plan.settings.coalesce_gap_bytes // size), min(1.0, met / groups)
        apart = met * (1 - share) ** (gap + 1)
        runs = min(most, 1 + apart + 3 * math.sqrt(apart))
        passed_over = met * sum(j * share * (1 - share) ** j for j in range(gap + 1)) + 3 * math.sqrt(met) * min(
            gap, 1 / share
        )
        # a group of many slots may be twice as long as the mean one
        read = (most + 1 + passed_over) * size
    read = min(read, arrays)
    requests = 1 + math.ceil(runs) + int(_SPANS_A_WINDOW * read // WINDOW_BYTES)
    request = request_bytes(plan.settings)
    with_filter = worth_a_filter(stored, math.ceil(read) + request * math.ceil(runs), request)
    size_bytes = stored.size_bytes - stored.directory_position + math.ceil(read) + stored.filter_length * with_filter
    return requests + with_filter, size_bytes
