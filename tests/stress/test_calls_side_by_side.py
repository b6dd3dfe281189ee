"""The same calls at once from several threads: flush beside flush, seal beside seal, rounds of the life cycle beside
each other.
"""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from tests.stress.crew import Crew
from tests.stress.traffic import Source, put
from tests.support.model import Moments
from tests.support.storage_faults import FaultStorage
from tiered_index.storage.memory import MemoryStorage

ROUNDS = 15
AT_ONCE = 3


@pytest.fixture
def storage():
    return FaultStorage(MemoryStorage())


@pytest.fixture
def service(open_index, storage):
    return open_index(storage_backend=storage, items=20, background=False, local_keep_s=0.0)


def at_once(crew, call, times=AT_ONCE):
    """Begin `times` threads that make one call at the same moment; return what they returned."""
    barrier, values = threading.Barrier(times), []

    def act():
        barrier.wait(30)
        values.append(call())

    crew.wait_for([crew.begin(f"call-{number}", act) for number in range(times)])
    assert not crew.troubles, crew.troubles
    return values


def test_two_flushes_write_every_entry_once(service, eager_switches):
    moments, source, crew = Moments(), Source(1, 1), Crew(1)
    for _ in range(ROUNDS):
        put(service, moments, source.messages(50))
        at_once(crew, service.flush)
        assert service.health()["buffered_entries"] == 0
        assert sum(handle.count for handle in service.files()) == len(moments.entries)
    moments.check_whole(service.query)


def test_two_seals_make_no_empty_file_and_lose_none(service, eager_switches):
    moments, source, crew = Moments(), Source(2, 1, bad_clocks=False), Crew(2)
    for number in range(ROUNDS):
        put(service, moments, source.messages(5))
        at_once(crew, service.seal)
        files = service.files()
        assert all(handle.sealed and handle.count for handle in files)
        assert len(files) == number + 1
    moments.check_whole(service.query)


def test_rounds_of_the_life_cycle_do_each_step_once(service, storage, eager_switches):
    moments, source, crew, done = Moments(), Source(3, 1), Crew(3), Counter()
    for _ in range(ROUNDS):
        put(service, moments, source.messages(70))
        service.seal()
        before = len(service.files())
        for progress in at_once(crew, service.run_lifecycle):
            done.update(compacted=progress.compacted, uploaded=progress.uploaded, retired=progress.retired)
        assert len(service.files()) == before
    assert {handle.place for handle in service.files()} == {"storage"}
    files = len(service.files())
    assert done == Counter(compacted=files, uploaded=files, retired=files)
    # one object a file, none without a record
    assert sorted(info.name for info in storage.list("data/")) == sorted(service.log_state.objects)
    assert len(service.log_state.objects) == files
    moments.check_whole(service.query)
