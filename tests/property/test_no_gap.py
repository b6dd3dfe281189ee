"""Threads put, flush, seal and run the life cycle while others look: an entry that was put is found from then on, in
every moment.
"""

from __future__ import annotations

import random
import sys
import threading

import pytest

from tests.support.disk_faults import FaultDisk
from tiered_index import IndexService
from tiered_index.errors import BackPressure
from tiered_index.storage.memory import MemoryStorage

PUTS = 30_000
NOW_MS = 1_700_000_000_000


@pytest.fixture
def eager_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class _Race:
    def __init__(self, service):
        self.service = service
        self.written = 0  # messages 0 .. written - 1 have been put
        self.stop = threading.Event()
        self.troubles = []

    def put(self):
        rng = random.Random(1)
        while self.written < PUTS and not self.stop.is_set():
            number = self.written
            # seconds go up and down, so that intervals of files overlap and grow at both ends
            timestamp_ms = NOW_MS + 1000 * rng.randrange(500)
            try:
                if number % 50 == 0:
                    columns = {
                        "topic": ["t"],
                        "queue_id": [0],
                        "key": [f"k{number % 7}"],
                        "offset": [number],
                        "size": [1],
                    }
                    self.service.put_batch(columns | {"timestamp_ms": [timestamp_ms]})
                else:
                    self.service.put("t", 0, f"k{number % 7}", number, 1, timestamp_ms)
            except BackPressure:
                continue
            self.written = number + 1

    def look(self, number):
        rng = random.Random(number)
        while self.written < PUTS and not self.stop.is_set():
            before = self.written
            key = rng.randrange(7)
            result = self.service.query("t", f"k{key}", max_count=10**6)
            found = [item.offset for item in result]
            missing = set(range(key, before, 7)) - set(found)
            if result.status != "complete" or missing or len(found) != len(set(found)):
                self.troubles.append((key, before, sorted(missing)[:5], result.status))
                return

    def flush(self):
        while self.written < PUTS and not self.stop.is_set():
            self.service.flush()

    def live(self):
        rng = random.Random(2)
        while self.written < PUTS and not self.stop.is_set():
            if rng.random() < 0.3:
                self.service.seal()
            self.service.run_lifecycle()

    def guarded(self, work, *args):
        try:
            work(*args)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            self.troubles.append(error)
        finally:
            if self.troubles:
                self.stop.set()


def test_an_entry_is_found_in_every_moment(tmp_path, eager_switches):
    settings = {
        "slots": 7,
        "items": 400,
        "background": False,
        "local_keep_s": 0,
        "query_threads": 2,
        "buffer_max_entries": 300,
    }
    with IndexService.open(
        root=tmp_path / "root", storage_backend=MemoryStorage(), disk=FaultDisk(), **settings
    ) as service:
        race = _Race(service)
        works = [(race.put,), (race.look, 1), (race.look, 2), (race.flush,), (race.live,)]
        threads = [threading.Thread(target=race.guarded, args=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not race.troubles, race.troubles[0]
        assert race.written == PUTS
        assert {item.offset for item in service.query("t", "k3", max_count=10**6)} == set(range(3, PUTS, 7))
