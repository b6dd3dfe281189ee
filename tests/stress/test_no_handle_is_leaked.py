"""Tens of thousands of lookups over files that change their state leave no descriptor, no mapping and no thread behind.

What is opened and closed again, well or by an error at any call, is `test_cycles_leave_no_handle.py`.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.stress.census import census
from tests.stress.crew import Crew
from tests.stress.traffic import ALL, KEYS, NOW_MS, TOPICS, Source, put
from tests.support.log_records import publish
from tests.support.model import Moments
from tiered_index import IndexReader
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import Lookup

ITEMS = 40
MANY = 50
QUERY_THREADS = 2
MANY_SHARE = 0.2


def ask(index, moments, rng, seen):
    """One query, or `MANY` at once; some of the answers are checked."""
    if rng.random() < MANY_SHARE:
        asked = [Lookup(topic=rng.choice(TOPICS), key=rng.choice(KEYS), max_count=ALL) for _ in range(MANY)]
        since = [moments.moment(q.topic, q.key) for q in asked]
        answers = index.query_many(asked)
        place = rng.randrange(MANY)
        moments.check(asked[place], answers[place], since[place])
        seen["lookups"] += MANY
        return
    q = Lookup(topic=rng.choice(TOPICS), key=rng.choice(KEYS), begin_ms=NOW_MS, end_ms=NOW_MS + 10**6, max_count=20)
    since = moments.moment(q.topic, q.key)
    result = index.query(q.topic, q.key, q.begin_ms, q.end_ms, q.max_count)
    seen["lookups"] += 1
    if rng.random() < 0.1:
        moments.check(q, result, since)


def one_round(service, readers, moments, source, rng, seen, lookups):
    """Fill a few files, bring them to the storage, and have every reader look meanwhile."""
    crew, goal = Crew(seen["round"]), seen["lookups"] + lookups
    seen["round"] += 1

    def look(index, number):
        mine = random.Random(number)
        while seen["lookups"] < goal and not crew.stop.is_set():
            ask(index, moments, mine, seen)

    threads = [crew.begin(f"reader-{n}", look, index, 100 * seen["round"] + n) for n, index in enumerate(readers)]
    for _ in range(4):
        put(service, moments, source.messages(ITEMS))
        service.flush()
        if rng.random() < 0.7:
            service.seal()
        service.run_lifecycle()
    crew.wait_for(threads)
    crew.finish()


def erase(service):
    """Take every object out of the log, so that each round has as many files as the one before."""
    log = service._session.log
    publish(log, service._session.epoch, remove=tuple(log.state.objects))
    service._lifecycle.refresh()
    assert service.files() == []


def run(open_index, folder, rounds, lookups):
    storage, seen, rng = MemoryStorage(), Counter(), random.Random(5)
    seen["threads before"] = census(folder).threads
    service = open_index(
        storage_backend=storage, items=ITEMS, background=False, local_keep_s=0.0, query_threads=QUERY_THREADS
    )
    source = Source(5, 1, bad_clocks=False)
    counts = []
    with IndexReader.open(storage_backend=storage, query_threads=QUERY_THREADS, refresh_interval_s=0) as cold:
        for number in range(rounds):
            # old files go with what is known of them: each round begins anew
            erase(service)
            moments = Moments()
            one_round(service, [service, service], moments, source, rng, seen, lookups // 2)
            service.seal()
            service.run_lifecycle()
            service.run_lifecycle()
            cold.refresh()
            one_round_cold(cold, moments, seen, lookups - lookups // 2, number)
            assert {handle.place for handle in service.files()} == {"storage"}
            counts.append(census(folder))
    return counts, seen


def one_round_cold(cold, moments, seen, lookups, number):
    goal, mine = seen["lookups"] + lookups, random.Random(number)
    while seen["lookups"] < goal:
        ask(cold, moments, mine, seen)


def check(counts, seen):
    print(f"{seen['lookups']:,} lookups: {counts[0]} at first, {counts[-1]} at last")
    # from the first round on nothing grows but the pools of the two, which start a thread where none is idle: when that
    # is nobody can say; beside them are the service's own two
    assert len({(count.descriptors, count.below, count.mappings) for count in counts[1:]}) == 1, counts
    assert max(count.threads for count in counts) <= seen["threads before"] + 2 * QUERY_THREADS + 2, counts
    # one active file at most: its entries, their mapping, its journal, and the next one's reserved space
    assert counts[-1].below <= 4
    assert counts[-1].mappings <= 1


def test_lookups_leave_nothing_open(open_index, tmp_path):
    counts, seen = run(open_index, tmp_path, 4, 7_500)
    assert seen["lookups"] >= 30_000
    check(counts, seen)


@pytest.mark.slow
def test_a_million_lookups_leave_nothing_open(open_index, tmp_path):
    counts, seen = run(open_index, tmp_path, 10, 100_000)
    assert seen["lookups"] >= 1_000_000
    check(counts, seen)
