"""A file counts as sealed only when its seal is written.

A round of the life cycle once came before that. It compacted the file and closed its descriptors during the seal. Then
the seal wrote to None, or to the file that got the number next.
"""

from __future__ import annotations

import threading

from tests.stress.crew import Crew
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000


class HeldDisk(UnsyncedDisk):
    """A disk that delays the next sync of the sealing thread."""

    def __init__(self):
        self.armed, self.entered, self.go_on = False, threading.Event(), threading.Event()

    def sync(self, descriptor):
        if self.armed and threading.current_thread().name == "stress-sealer":
            self.armed = False
            self.entered.set()
            assert self.go_on.wait(30)


def test_a_round_that_meets_a_seal_under_way_leaves_the_file_alone(open_index, monkeypatch):
    disk, crew = HeldDisk(), Crew(1)
    service = open_index(storage_backend=MemoryStorage(), disk=disk, background=False)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.flush()
    sealed = service._lifecycle._sealed

    def after_the_seal_began():
        # the round has looked for old files; before it looks for sealed ones, another thread seals
        disk.armed = True
        crew.begin("sealer", service.seal)
        assert disk.entered.wait(30)
        return sealed()

    monkeypatch.setattr(service._lifecycle, "_sealed", after_the_seal_began)
    service.run_lifecycle()
    monkeypatch.undo()
    disk.go_on.set()
    crew.finish()  # used to raise TypeError: the descriptor was closed
    service.run_lifecycle()
    assert [item.offset for item in service.query("t", "k")] == [1]
    assert [handle.place for handle in service.files()] == ["uploaded"]
