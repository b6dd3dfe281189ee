"""A reader opens a root while a file changes its state. It leaves no objects that only the garbage collector could
free.

Each open used to leave mappings and descriptors in a cycle of an error and its frame.
"""

from __future__ import annotations

import gc

import pytest

from tests.stress.census import census
from tiered_index import IndexReader
from tiered_index.service.read.root_view import RootView
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000
LOOKS = 40


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_repeated_views_of_a_root_keep_nothing(open_index, tmp_path, monkeypatch, no_collector):
    storage = MemoryStorage()
    service = open_index(storage_backend=storage, items=16, background=False, local_keep_s=0.0)
    real = RootView._view
    moves = []

    def move_then_view(view, file_id, reads):
        if moves:
            moves.pop()()
        return real(view, file_id, reads)

    monkeypatch.setattr(RootView, "_view", move_then_view)
    with IndexReader.open(root=tmp_path / "root", storage_backend=storage, query_threads=2) as reader:
        for number in range(LOOKS):
            for place in range(20):
                service.put("t", 0, "k", 20 * number + place, 1, NOW_MS)
            service.flush()
            moves.append(service.run_lifecycle)
            assert len(reader.query("t", "k", max_count=10**6)) == 20 * (number + 1)
            assert not moves
        local = sum(handle.place != "storage" for handle in service.files())
        # the reader's mappings, and the writer's own: entries, mapping and journal of each, and the reserve
        assert census(tmp_path, collect=False).below <= 4 * local + 1 + 2 * 2
