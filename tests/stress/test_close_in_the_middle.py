"""`close()` while puts, flushes, seals, life-cycle rounds and lookups are under way.

Each of them ends well or says that the index is closed; what was acknowledged is durable when `close` returns; nothing
stays open, and the root can be opened at once.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest

from tests.stress.census import census
from tests.stress.crew import Crew
from tests.stress.traffic import Source, look, put
from tests.support.model import Moments
from tiered_index import IndexReader, IndexService
from tiered_index.errors import BackPressure, IndexClosed
from tiered_index.storage.disk import TEMPORARY_PREFIX
from tiered_index.storage.memory import MemoryStorage

MESSAGES = 400


def until_closed(act, ends):
    """Repeat `act`; the only error it may end with is that the index is closed."""
    while True:
        try:
            act()
        except IndexClosed as error:
            assert "closed" in str(error)
            ends.append(act)
            return
        except BackPressure:
            continue


class Writer:
    """Puts `MESSAGES` messages; those that were refused because of the close are never acknowledged."""

    def __init__(self, service, moments, seed, pause):
        self.service, self.moments, self.pause = service, moments, pause
        self.source, self.left = Source(seed, 1), MESSAGES

    def put(self):
        if self.left <= 0:
            self.pause(0.001)
        messages = self.source.messages(1 if self.source.rng.random() < 0.7 or self.left <= 0 else 30)
        self.left -= len(messages)
        put(self.service, self.moments, messages)


def close_in_the_middle(folder, disk, seed, *, background):
    storage, moments, crew, seen, ends = MemoryStorage(), Moments(), Crew(seed), Counter(), []
    settings = {
        "root": folder / "root",
        "storage_backend": storage,
        "disk": disk,
        "slots": 7,
        "items": 16,
        "query_threads": 2,
        "local_keep_s": 0.0,
        "buffer_max_entries": 300,
        "flush_interval_s": 0.002,
        "lifecycle_interval_s": 0.002,
    }
    with contextlib.ExitStack() as undo:
        service = IndexService.open(background=background, **settings)
        undo.callback(service.abandon)
        works = {
            "writer": Writer(service, moments, seed, crew.stop.wait).put,
            "flush-1": service.flush,
            "flush-2": service.flush,
            "seal": service.seal,
            "life-1": service.run_lifecycle,
            "life-2": service.run_lifecycle,
            "reader": lambda: look(service, moments, random.Random(seen["lookups"]), seen),
        }
        threads = [crew.begin(name, until_closed, act, ends) for name, act in works.items()]
        crew.stop.wait(random.Random(seed).random() * 0.1)
        crew.wait_for([crew.begin(f"close-{number}", service.close) for number in range(2)])
        assert service.health()["buffered_entries"] == 0
        # a put may have returned whose writer has not noted it yet
        crew.wait_for(threads)
        with IndexService.open(background=False, **settings) as again:
            moments.check_whole(again.query)
        crew.finish()
        assert len(ends) == len(works), "everybody was told"
    with IndexService.open(background=False, **settings) as again:
        again.seal()
        again.run_lifecycle()
    assert not list((folder / "root").rglob(TEMPORARY_PREFIX + "*"))
    with IndexReader.open(storage_backend=storage, query_threads=2) as reader:
        moments.check_whole(reader.query)


@pytest.mark.parametrize("background", [True, False], ids=["workers", "by hand"])
def test_close_in_the_middle_of_everything(tmp_path, disk, eager_switches, background):
    before = None
    for seed in range(6):
        close_in_the_middle(tmp_path / str(seed), disk, seed, background=background)
        after = census(tmp_path)
        assert (after.below, after.threads) == (0, 0)
        assert before is None or after.descriptors == before.descriptors
        before = after


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False], ids=["workers", "by hand"])
def test_close_in_the_middle_of_everything_many_times(tmp_path, disk, eager_switches, background):
    acknowledged = [
        close_in_the_middle(tmp_path / str(seed), disk, seed, background=background) for seed in range(100, 180)
    ]
    print(f"acknowledged before the close: {min(acknowledged)} to {max(acknowledged)} entries")
    assert max(acknowledged) > 100
    left = census(tmp_path)
    assert (left.below, left.threads) == (0, 0)
