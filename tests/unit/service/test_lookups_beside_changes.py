"""Threads look up while files grow, are sealed, compacted, uploaded, retired and merged.

Each answer has all entries that were put before the lookup began, and no entry that was not put. Threads change often,
so most often while a view is made or dropped.
"""

import threading

import tiered_index
from tests.support.core import compiled_core
from tests.support.hanging import Crew
from tiered_index.service.read.files.snapshot import ALWAYS, Snapshot

T_MS = 1_700_000_000_000
ROUNDS = 24
THREADS = 3
MOST = 10_000


class Lookups:
    """Looks up singly and in batches; `answered` counts the turns."""

    def __init__(self, index, put):
        self.index, self.put, self.answered = index, put, threading.Semaphore(0)

    def turns(self, stop):
        while not stop.is_set():
            self.turn()

    def turn(self):
        self.check(lambda: self.index.query("t", "k", max_count=MOST))
        self.check(lambda: self.index.query_many([("t", "k"), ("t", "no")], max_count=MOST)[0])
        first = self.put[0]
        begin_ms = T_MS + first * 1_000
        self.check(lambda: self.index.query("t", "k", begin_ms, max_count=MOST), first)
        assert not self.index.query("t", "no").items
        self.answered.release()

    def check(self, look, first=0):
        acknowledged = self.put[0]
        answer = look()
        offsets = [item.offset for item in answer]
        assert answer.status == "complete"
        assert offsets == list(range(first + len(offsets) - 1, first - 1, -1))
        assert acknowledged <= first + len(offsets) <= self.put[1]


def test_each_answer_has_what_was_put_before_it(open_index, tmp_path, eager_switches):
    compiled_core()
    uri = (tmp_path / "storage").as_uri()
    index = open_index(storage_backend=None, storage=uri, local_keep_s=0, items=128, max_late_s=10**9)
    # the numbers of entries that were acknowledged, and that were begun
    put = [0, 0]
    crew, lookups = Crew(), [Lookups(index, put) for _ in range(THREADS)]
    for looker in lookups:
        crew.begin(looker.turns, crew.stop)
    try:
        for number in range(ROUNDS):
            for _ in range(1 + number % 5):
                put[1] += 3
                for offset in range(put[1] - 3, put[1]):
                    index.put("t", 0, "k", offset, 1, T_MS + offset * 1_000)
                index.put(f"topic {number}", 0, "other", put[1], 1, T_MS)
                put[0] = put[1]
                if number % 2:
                    index.flush()
            if number % 3 == 0:
                index.seal()
            if number % 4 == 0:
                index.run_lifecycle()
            if number % 8 == 6:
                # the files in the storage become window tables
                tiered_index.merge(uri, window="1h")
            if number % 8 == 7:
                for looker in lookups:
                    assert crew.stop.is_set() or looker.answered.acquire(timeout=60)
    finally:
        crew.finish()
    assert [item.offset for item in index.query("t", "k", max_count=MOST)] == list(range(put[1] - 1, -1, -1))


def test_a_state_of_the_log_and_its_files_are_one_snapshot(open_index, tmp_path, monkeypatch):
    """Another process merges. The writer reads the record before its next one, and nothing asks it to show files."""
    uri = (tmp_path / "storage").as_uri()
    index = open_index(storage_backend=None, storage=uri, local_keep_s=0, background=False)
    for offset in range(3):
        index.put("t", 0, "k", offset, 1, T_MS + offset * 1_000)
        index.seal()
        index.run_lifecycle()
    index.run_lifecycle()
    tiered_index.merge(uri, window="1h")
    snapshots, catalog = [], index._catalog
    real = Snapshot.__init__

    def made(snapshot, *arguments):
        real(snapshot, *arguments)
        snapshots.append(snapshot)

    monkeypatch.setattr(Snapshot, "__init__", made)
    index.publish_positions({"s": 7})
    assert snapshots[-1] is catalog.snapshot and index.log_state.positions["s"] == 7
    assert {file.file_id for file in index.files()} == set(index.log_state.tables) != set()
    for snapshot in snapshots:
        shown = {handle.file_id for handle in snapshot.overlapping(*ALWAYS)}
        assert shown == snapshot.state.files.keys() | snapshot.state.tables.keys()
