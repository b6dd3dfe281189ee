"""Plans that `python -m tests.benchmarks spark-lookup` compares: the used one reads what a lookup reads, the others
what is counted by hand.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from tests.benchmarks import plans
from tests.benchmarks.messages import TOPIC, key_in_one
from tests.benchmarks.plans import SLOT, UNITS, PlanCost, plan_costs, questions_for, ranges_of
from tests.spark.looked_up import SETTINGS, looked_up, plan_of
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, Merging
from tests.support.plain_files import plain_files
from tiered_index import Lookup
from tiered_index.format.compacted import BLOCK_BYTES, GROUP_BYTES
from tiered_index.format.hashing import key_hash, key_hashes
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.cold import path as cold_path
from tiered_index.service.merge import plan as plan_module
from tiered_index.spark.lookup import search
from tiered_index.spark.lookup.plan import LOOKUP, distinct, lookups_of
from tiered_index.storage.prices import PriceTable

COUNT = 9_000
HELD = [f"k{n}" for n in range(0, COUNT, 30)]
ABSENT = [f"absent{n}" for n in range(200)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two shards of a table, whose slots are finer or coarser than a file's, and a plain file; most keys are in one of
    them, some in both.
    """
    job = plan_module._job
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "_job", lambda *given, **more: job(*given[:-1], 1 << 17, **more))
        made = Merging(tmp_path_factory.mktemp("plans"), settings={"slots": 5_000, "items": 50_000})
        made.put([(BASE_MS + n, f"k{n}") for n in range(COUNT)])
        made.publish()
        made.later(3)
        made.merge(DAY_S)
        made.put([(BASE_MS + 3 * DAY_MS + n, f"k{n}") for n in range(COUNT - 1_000, 2 * COUNT)])
        with plain_files():
            made.publish()
    kinds = [stored.shard is None for stored in made.state.objects.values()]
    assert len(kinds) > 2 and kinds.count(True) == 1
    yield made
    made.close()


def asked(keys):
    count = len(keys)
    none = pa.nulls(count, pa.int64())
    return distinct(lookups_of(pa.array(["t"] * count), pa.array(keys), none, none, {"t": 0}, keyed=True))


def settings_of(gap):
    return type(SETTINGS)(query_threads=2, coalesce_gap_bytes=gap, block_cache_bytes=0)


@pytest.mark.parametrize("keys", [HELD[::150], HELD, HELD + ABSENT], ids=["few", "many", "and absent ones"])
@pytest.mark.parametrize("gap", [0, 20_000, 256 << 10])
@pytest.mark.parametrize("limits", [None, (60_000, 40_000)])
def test_the_used_plan_is_what_a_lookup_reads(made, monkeypatch, keys, gap, limits):
    if limits is not None:
        for module, name, value in (
            (search, "WINDOW_BYTES", limits[0]),
            (plans, "WINDOW_BYTES", limits[0]),
            (cold_path, "MAX_SPAN_BYTES", limits[1]),
            (plans, "MAX_SPAN_BYTES", limits[1]),
        ):
            monkeypatch.setattr(module, name, value)
    (costs,) = plan_costs(made.storage, made.state, [asked(keys)], settings_of(gap))
    used = costs[0]
    assert (used.unit, used.gap_bytes, [plan.used for plan in costs].count(True)) == (GROUP_BYTES, gap, 1)
    lookups = [Lookup(topic="t", key=key) for key in keys]
    found = looked_up(made.storage, plan_of(made.state, lookups, settings=settings_of(gap)), lookups)
    assert used.opening_requests + used.requests == found.requests
    assert used.opening_bytes + used.read_bytes == sum(report.bytes_read for report in found.reports)
    if not gap:
        # of more than one range an object and a filter of the largest, or without filters of the file and two shards
        objects = len(made.state.objects)
        assert (used.requests > objects, used.opening_requests) == (
            (True, objects + 1) if len(keys) > 2 else (False, 3)
        )


def test_units_and_gaps_read_the_more_the_larger_they_are(made):
    (costs,) = plan_costs(made.storage, made.state, [asked(HELD)], settings_of(0))
    by_plan = {(plan.unit, plan.gap_bytes): plan for plan in costs}
    gaps = sorted({gap for _, gap in by_plan})
    assert gaps == [0, *plans.GAPS[1:]] and len(costs) == len(UNITS) * len(gaps)
    for gap in gaps:
        row = [by_plan[unit, gap] for unit in UNITS]
        assert all(a.read_bytes <= b.read_bytes and a.requests >= b.requests for a, b in itertools.pairwise(row))
        # a directory of smaller units is larger
        assert all(a.opening_bytes > b.opening_bytes for a, b in itertools.pairwise(row))
    assert [by_plan[unit, 0].read_bytes for unit in UNITS] == sorted({by_plan[unit, 0].read_bytes for unit in UNITS})
    for unit in UNITS:
        column = [by_plan[unit, gap] for gap in gaps]
        assert all(a.read_bytes <= b.read_bytes and a.requests >= b.requests for a, b in itertools.pairwise(column))


def read_by_hand(made, keys, size, gap):
    """Return requests and bytes of ranges, object by object and item by item, where no filter is asked."""
    requests = total = 0
    for stored in made.state.objects.values():
        data = made.storage.get(stored.name)
        trailer = parse_trailer(data, stored.name, len(data))
        schema, slot_map = trailer.metadata.layout.schema, trailer.metadata.slot_map
        hashes: list[int] = []
        begins: list[int] = []
        for run in trailer.directory.all_runs():
            items = trailer.metadata.items_of(data[run.offset : run.offset + run.length], run.count, stored.name)
            hashes += items["key_hash"].tolist()
            begins += [run.offset + run.length * number // run.count for number in range(run.count)]
        begins.append(stored.trailer_position)
        slots = [slot_map.slot_of(value) for value in hashes]
        lengths = Counter(slots)
        units: list[list[int]] = []  # start, end, first slot
        stretch, last = -1, -1
        for number, slot in enumerate(slots):
            at = begins[number]
            if slot != last:
                before, stretch, last = stretch, number * schema.item.itemsize // max(size, 1), slot
                if size == SLOT or before != stretch or lengths[slot] * schema.item.itemsize >= size:
                    units.append([at, at, slot])
            units[-1][1] = begins[number + 1]
        if size != SLOT:
            units[0][2] = int(trailer.directory.groups["first_slot"][0])
        met = set()
        for key in keys:
            wanted = slot_map.slot_of(key_hash("t", key))
            if stored.shard is not None and not stored.shard.slot_low <= wanted < stored.shard.slot_high:
                continue
            place = bisect_right(units, wanted, key=lambda unit: unit[2]) - 1
            if place >= 0 and (size != SLOT or units[place][2] == wanted):
                met.add(place)
        end = -1
        for place in sorted(met):
            start, stop = units[place][:2]
            requests += end < 0 or start - end > gap
            total += stop - (end if end >= 0 and start - end <= gap else start)
            end = stop
    return requests, total


@pytest.mark.parametrize("unit", UNITS)
def test_units_are_counted_as_by_hand(made, monkeypatch, unit):
    monkeypatch.setattr(plans, "worth_a_filter", lambda *_: False)
    keys = HELD[::4] + ABSENT[:20]
    (costs,) = plan_costs(made.storage, made.state, [asked(keys)], settings_of(0))
    for plan in costs:
        if plan.unit == unit and plan.gap_bytes in (0, 4096):
            assert (plan.requests, plan.read_bytes) == read_by_hand(made, keys, unit, plan.gap_bytes)
            assert plan.opening_requests == len(made.state.objects)


def test_several_numbers_of_keys_are_counted_at_once(made):
    settings = settings_of(0)
    both = plan_costs(made.storage, made.state, [asked(HELD), asked(HELD[:3])], settings)
    assert both == [
        *plan_costs(made.storage, made.state, [asked(HELD)], settings),
        *plan_costs(made.storage, made.state, [asked(HELD[:3])], settings),
    ]
    assert both[0][0].read_bytes > both[1][0].read_bytes > 0


def test_a_slot_that_is_cut_into_blocks_is_refused(tmp_path):
    giant = Merging(tmp_path, settings={"items": 10_000})
    giant.put([(BASE_MS + n, "giant") for n in range(BLOCK_BYTES // 32 + 1)])
    giant.publish()
    with pytest.raises(RuntimeError, match="blocks: 1, not 0"):
        plan_costs(giant.storage, giant.state, [asked(["giant"])], settings_of(0))
    giant.close()


def test_ranges_are_joined_and_cut():
    starts, ends = np.array([0, 100, 210, 500]), np.array([100, 200, 300, 600])
    assert [ranges_of(starts, ends, gap) for gap in (0, 10, 199, 200)] == [(3, 390), (2, 400), (2, 400), (1, 600)]
    assert ranges_of(starts[:0], ends[:0], 10) == (0, 0)
    long = np.arange(3, dtype=np.int64) * cold_path.MAX_SPAN_BYTES
    assert ranges_of(long, long + cold_path.MAX_SPAN_BYTES, 0) == (3, 3 * cold_path.MAX_SPAN_BYTES)


def test_cost_follows_from_requests_and_bytes():
    many = PlanCost(SLOT, 0, used=False, requests=64_000, read_bytes=1 << 30)
    assert many.seconds == pytest.approx(30.0)
    assert many.usd(PriceTable()) == pytest.approx((64 * 0.0004, 0.09))
    assert many.usd(PriceTable(egress_per_gib_usd=0.02))[1] == pytest.approx(0.02)
    few = PlanCost(SLOT, 0, used=False, requests=64, read_bytes=1_000_000_000)
    assert few.seconds == pytest.approx(10.0)


def test_questions_are_those_of_messages():
    questions = questions_for(np.array([5, 7, 5]), keyed=True)
    assert questions.dtype == LOOKUP and len(questions) == 2
    assert set(key_hashes(questions["java_hash"], "abs").tolist()) == {key_hash(TOPIC, key_in_one(n)) for n in (5, 7)}
    assert (questions["second_min"] == 0).all() and (questions["fingerprint"] > 0).all()
