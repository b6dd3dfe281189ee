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
from tests.stress.ledger import Ledger
from tests.stress.traffic import Source, look, write
from tiered_index import IndexReader, IndexService
from tiered_index.errors import TieredIndexError
from tiered_index.storage.disk import Disk
from tiered_index.storage.memory import MemoryStorage

ITEMS = 20
FAST = {"items": ITEMS, "flush_interval_s": 0.002, "lifecycle_interval_s": 0.004, "local_keep_s": 0.0}


def settle(service: IndexService) -> None:
    """Bring everything to the storage."""
    service.seal()
    service.run_lifecycle()
    service.run_lifecycle()
    assert {handle.place for handle in service.files()} == {"storage"}


def run(
    service: IndexService, ledger: Ledger, seed: int, messages: int, *, largest: int = 3 * ITEMS, bounded: bool = False
) -> Counter:
    """Run all kinds of threads until two writers have put `messages` each; return what was done."""
    seen = Counter(readers=2)
    crew = Crew(seed)

    def flush(rng: random.Random) -> None:
        service.flush()
        crew.stop.wait(rng.random() * 0.01)

    def live(rng: random.Random) -> None:
        if rng.random() < 0.3:
            service.seal()
        places = {handle.place for handle in service.files()}
        done = service.run_lifecycle()
        seen["retired"] += done.retired
        places |= {handle.place for handle in service.files()}
        seen["places"] = max(seen["places"], len(places))
        crew.stop.wait(rng.random() * 0.02)

    for number in range(2):
        crew.repeat(f"reader-{number}", look, service, ledger, random.Random(seed + number), seen)
    crew.repeat("flush", flush, random.Random(seed + 10))
    crew.repeat("life", live, random.Random(seed + 11))
    writers = [
        crew.begin(
            f"writer-{number}",
            lambda n: write(
                service, ledger, Source(seed, n), messages, crew.stop, largest=largest, seen=seen, bounded=bounded
            ),
            number,
        )
        for number in (1, 2)
    ]
    crew.wait_for(writers)
    crew.finish()
    assert service.health()["problems"] == []
    return seen


def check_everywhere(service: IndexService, ledger: Ledger, **storage: object) -> None:
    """The same answers from the running service, from the storage alone, and from a fresh start."""
    assert ledger.check_whole(service.query) > 0
    settle(service)
    ledger.check_whole(service.query)
    service.close()
    with IndexReader.open(**storage, query_threads=2) as reader:
        assert sum(handle.count for handle in reader.files()) >= ledger.entries
        ledger.check_whole(reader.query)


@pytest.mark.parametrize(
    ("kind", "preset", "messages", "least"), [("memory", "native", 1100, 150), ("file", "rocketmq", 600, 50)]
)
def test_answers_are_right_at_every_moment(open_index, tmp_path, kind, preset, messages, least):
    seed = {"memory": 11, "file": 12}[kind]
    storage = {"storage_backend": MemoryStorage()} if kind == "memory" else {"storage": f"file://{tmp_path}/store"}
    service, ledger = open_index(preset=preset, **storage, **FAST), Ledger()
    seen = run(service, ledger, seed, messages)
    rolls = max(handle.sequence for handle in service.files())
    print(f"seed {seed}: {rolls} files, {dict(seen)}")
    assert rolls >= least
    assert min(seen[kind] for kind in ("whole", "some", "pages", "many")) >= 10
    assert seen["places"] >= 2
    assert seen["pushed back"] == 0
    check_everywhere(service, ledger, **storage)


def test_a_small_buffer_pushes_back_and_loses_nothing(open_index):
    """Puts are refused whole, and nothing but `BackPressure` is raised."""
    storage = {"storage_backend": MemoryStorage()}
    service, ledger = open_index(buffer_max_entries=40, **storage, **FAST), Ledger()
    seen = run(service, ledger, 13, 800, bounded=True)
    print(f"seed 13: {dict(seen)}")
    assert seen["pushed back"] > 0
    check_everywhere(service, ledger, **storage)


def test_answers_are_right_when_threads_switch_all_the_time(open_index, eager_switches):
    storage = {"storage_backend": MemoryStorage()}
    service, ledger = open_index(**storage, **FAST), Ledger()
    seen = run(service, ledger, 14, 500)
    print(f"seed 14: {dict(seen)}")
    check_everywhere(service, ledger, **storage)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("preset", ["native", "rocketmq"])
def test_answers_are_right_at_every_moment_for_long(open_index, tmp_path, preset, seed):
    """With the real disk and its syncs."""
    storage = {"storage": f"file://{tmp_path}/store"}
    service, ledger = open_index(preset=preset, disk=Disk(), **storage, **FAST), Ledger()
    seen = run(service, ledger, 100 + seed, 4_000, largest=10 * ITEMS)
    rolls = max(handle.sequence for handle in service.files())
    print(f"seed {100 + seed}: {rolls} files, {dict(seen)}")
    assert rolls >= 500
    check_everywhere(service, ledger, **storage)


def test_a_put_never_fails_while_the_life_cycle_does(open_index, monkeypatch):
    """Compaction and upload stand still: puts and answers go on."""
    storage = MemoryStorage()
    service, ledger = open_index(storage_backend=storage, background=False, local_keep_s=0.0), Ledger()

    def fails(*arguments: object) -> None:
        raise TieredIndexError("out of order")

    monkeypatch.setattr(service._lifecycle, "_compact", fails)
    seen: Counter[str] = Counter()
    crew, rng = Crew(15), random.Random(15)
    write(service, ledger, Source(15, 1), 1500, crew.stop, largest=100, seen=seen)
    service.flush()
    with pytest.raises(TieredIndexError, match="out of order"):
        service.run_lifecycle()
    for _ in range(30):
        look(service, ledger, rng, seen)
    assert {handle.place for handle in service.files()} == {"unsealed"}
    monkeypatch.undo()
    ledger.check_whole(service.query)
    settle(service)
    ledger.check_whole(service.query)
