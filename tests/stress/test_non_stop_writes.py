"""Writes that never stop: threads put, flush, seal and run the life cycle beside the background workers while others
look.

Every answer during the run holds what was acknowledged before it and nothing that was not put; at the end every key
answers as the model.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.stress.crew import Crew
from tests.stress.traffic import KINDS, Source, look, write
from tests.support.model import Moments
from tiered_index import IndexReader, IndexService
from tiered_index.errors import TieredIndexError
from tiered_index.storage.disk import Disk
from tiered_index.storage.memory import MemoryStorage

ITEMS = 20
FAST = {"items": ITEMS, "flush_interval_s": 0.002, "lifecycle_interval_s": 0.004, "local_keep_s": 0.0}
# lookups of each kind that a reader makes at least
LEAST = 10


def settle(service: IndexService) -> None:
    """Bring everything to the storage."""
    service.seal()
    service.run_lifecycle()
    service.run_lifecycle()
    assert {handle.place for handle in service.files()} == {"storage"}


def run(
    service: IndexService,
    moments: Moments,
    seed: int,
    messages: int,
    *,
    largest: int = 3 * ITEMS,
    bounded: bool = False,
) -> None:
    """Run two threads of each kind, until the writers have put `messages` each and the readers have seen enough."""
    crew = Crew(seed)

    def flush(rng: random.Random) -> None:
        service.flush()
        crew.stop.wait(rng.random() * 0.01)

    def live(rng: random.Random) -> None:
        if rng.random() < 0.3:
            service.seal()
        service.run_lifecycle()
        crew.stop.wait(rng.random() * 0.02)

    def read(rng: random.Random) -> None:
        seen: Counter[str] = Counter()
        while not crew.stop.is_set() or (min(seen[kind] for kind in KINDS) < LEAST and not crew.troubles):
            look(service, moments, rng, seen)

    def put(number: int) -> None:
        write(service, moments, Source(seed, number), messages, crew.stop, largest=largest, bounded=bounded)

    for number in range(2):
        crew.begin(f"reader-{number}", read, random.Random(seed + number))
        crew.repeat(f"flush-{number}", flush, random.Random(seed + 10 + number))
        crew.repeat(f"life-{number}", live, random.Random(seed + 20 + number))
    crew.wait_for([crew.begin(f"writer-{number}", put, number) for number in (1, 2)])
    crew.finish()
    assert service.health()["problems"] == []


def check_everywhere(service: IndexService, moments: Moments, **storage: object) -> None:
    """The same answers from the running service, and from the storage alone, which holds each entry as often as it was
    put.
    """
    assert moments.check_whole(service.query) > 0
    settle(service)
    moments.check_whole(service.query)
    service.close()
    with IndexReader.open(**storage, query_threads=2) as reader:
        assert sum(handle.count for handle in reader.files()) == len(moments.entries)
        moments.check_whole(reader.query)


@pytest.mark.parametrize(("kind", "preset", "messages"), [("memory", "native", 1100), ("file", "rocketmq", 600)])
def test_answers_are_right_at_every_moment(open_index, tmp_path, eager_switches, kind, preset, messages):
    storage = {"storage_backend": MemoryStorage()} if kind == "memory" else {"storage": f"file://{tmp_path}/store"}
    service, moments = open_index(preset=preset, **storage, **FAST), Moments()
    run(service, moments, 11, messages)
    check_everywhere(service, moments, **storage)


def test_a_small_buffer_pushes_back_and_loses_nothing(open_index):
    """Puts are refused whole, and nothing but `BackPressure` is raised."""
    storage = {"storage_backend": MemoryStorage()}
    service, moments = open_index(buffer_max_entries=40, **storage, **FAST), Moments()
    run(service, moments, 13, 800, bounded=True)
    check_everywhere(service, moments, **storage)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("preset", ["native", "rocketmq"])
def test_answers_are_right_at_every_moment_for_long(open_index, tmp_path, preset, seed):
    """With the real disk and its syncs."""
    storage = {"storage": f"file://{tmp_path}/store"}
    service, moments = open_index(preset=preset, disk=Disk(), **storage, **FAST), Moments()
    run(service, moments, 100 + seed, 4_000, largest=10 * ITEMS)
    check_everywhere(service, moments, **storage)


def test_a_put_never_fails_while_the_life_cycle_does(open_index, monkeypatch):
    """Compaction and upload stand still: puts and answers go on."""
    storage = MemoryStorage()
    service, moments = open_index(storage_backend=storage, background=False, local_keep_s=0.0), Moments()

    def fails(*arguments: object) -> None:
        raise TieredIndexError("out of order")

    monkeypatch.setattr(service._lifecycle, "_compact", fails)
    crew, rng, seen = Crew(15), random.Random(15), Counter[str]()
    write(service, moments, Source(15, 1), 1500, crew.stop, largest=100)
    service.flush()
    with pytest.raises(TieredIndexError, match="out of order"):
        service.run_lifecycle()
    for _ in range(30):
        look(service, moments, rng, seen)
    assert {handle.place for handle in service.files()} == {"unsealed"}
    monkeypatch.undo()
    moments.check_whole(service.query)
    settle(service)
    moments.check_whole(service.query)
