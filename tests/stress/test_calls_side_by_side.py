"""The same calls at once from several threads: flush beside flush, seal beside seal, life-cycle rounds beside each
other.
"""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from tests.stress.crew import Crew
from tests.support.batches import columns_of
from tests.support.model import Answer, ReferenceModel
from tests.support.storage_faults import FaultStorage
from tiered_index.storage.memory import MemoryStorage

ROUNDS = 15
AT_ONCE = 3
NOW_MS = 1_700_000_000_000
KEYS = tuple(f"k{number}" for number in range(9))


@pytest.fixture
def storage():
    return FaultStorage(MemoryStorage())


@pytest.fixture
def service(open_index, storage):
    return open_index(storage_backend=storage, items=20, background=False, local_keep_s=0.0)


def at_once(crew, call, times=AT_ONCE):
    """Begin `times` threads that make one call at the same moment; return their results."""
    barrier, values = threading.Barrier(times), []

    def act():
        barrier.wait(30)
        values.append(call())

    crew.wait_for([crew.begin(f"call-{number}", act) for number in range(times)])
    assert not crew.troubles, crew.troubles
    return values


def put(service, model, count, *, bad_clocks=True):
    """Put so many more messages; the times of some are years ago."""
    first = len(model.entries)
    rows = [
        ("t", n % 4, KEYS[n % 9], n, 1 + n, 5_000 if bad_clocks and n % 50 == 7 else NOW_MS + n * 7919 % 90_000)
        for n in range(first, first + count)
    ]
    for row in rows:
        model.put(*row)
    service.put_batch(columns_of(rows))


def check(service, model):
    for key in KEYS:
        found = [Answer.of(item) for item in service.query("t", key, max_count=10**6)]
        assert found == model.query("t", key, max_count=None)


def test_two_flushes_write_every_entry_once(service, eager_switches):
    model, crew = ReferenceModel(), Crew(1)
    for _ in range(ROUNDS):
        put(service, model, 50)
        at_once(crew, service.flush)
        assert service.health()["buffered_entries"] == 0
        assert sum(handle.count for handle in service.files()) == len(model.entries)
    check(service, model)


def test_two_seals_make_no_empty_file_and_lose_none(service, eager_switches):
    model, crew = ReferenceModel(), Crew(2)
    for number in range(ROUNDS):
        put(service, model, 5, bad_clocks=False)
        at_once(crew, service.seal)
        files = service.files()
        assert all(handle.sealed and handle.count for handle in files)
        assert len(files) == number + 1
    check(service, model)


def test_rounds_of_the_life_cycle_do_each_step_once(service, storage, eager_switches):
    model, crew, done = ReferenceModel(), Crew(3), Counter()
    for _ in range(ROUNDS):
        put(service, model, 70)
        service.seal()
        before = len(service.files())
        for progress in at_once(crew, service.run_lifecycle):
            done.update(compacted=progress.compacted, uploaded=progress.uploaded, retired=progress.retired)
        assert len(service.files()) == before
    assert {handle.place for handle in service.files()} == {"storage"}
    files = len(service.files())
    assert done == Counter(compacted=files, uploaded=files, retired=files)
    # one object per file, and no object without a record
    assert sorted(info.name for info in storage.list("data/")) == sorted(service.log_state.objects)
    assert len(service.log_state.objects) == files
    check(service, model)
