"""Each task of a merge holds, reads and sends a bounded amount, for any number of windows, and for a hot key."""

from collections import Counter
from itertools import pairwise

import pytest

from tests.support.cold_index import Recorder
from tests.support.merging import BASE_MS, DAY_MS, HOUR_MS
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index.format.packed import packed_bytes
from tiered_index.format.schema import ROCKETMQ_SCHEMA
from tiered_index.service.jobs.merge_run import estimate, merge, writing_requests
from tiered_index.service.jobs.rewriting import merge_plan as plan
from tiered_index.service.jobs.rewriting import rewrite as task_module
from tiered_index.service.jobs.rewriting.merge_plan import Bounds, cut_windows
from tiered_index.storage import base
from tiered_index.storage.base import BufferedWriter
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.prices import PriceTable

SOME = [("t", "hot"), ("t", "k1"), ("t", "k22")]


def most_parts(life):
    """Return the shards of the slots that have most of them, the newest first."""
    by_slots = {}
    for stored in [stored for stored in life.state.objects.values() if stored.shard]:
        by_slots.setdefault((stored.shard.table, stored.shard.slot_low), []).append(stored)
    return sorted(max(by_slots.values(), key=len), key=lambda stored: -stored.second_max)


def test_a_hot_key_has_several_parts_and_a_page_reads_only_the_newest(life, monkeypatch):
    monkeypatch.setattr(task_module, "PIECE_ITEMS", 200)
    for number in range(3):
        start = BASE_MS + number * HOUR_MS
        life.put([(start + step * 7000, "hot") for step in range(600)])
        life.put([(start + step * 20_000, f"k{step % 23}") for step in range(100)])
        life.publish()
    life.later()
    life.merge()
    parts = most_parts(life)
    assert len(parts) >= 5
    for newer, older in pairwise(parts):
        assert newer.second_min > older.second_max
    life.check(questions=SOME)
    recorder = Recorder(life.storage)
    with life.reader(recorder, cache_slot_groups=False) as reader:
        reader.query("t", "hot", max_count=10**6)  # this reads the directories
        for reads, max_count in ((1, 5), (len(parts), 10**6)):
            recorder.reset()
            answer = reader.query("t", "hot", max_count=max_count)
            assert life.answers(answer) == life.model.query("t", "hot", max_count=max_count)
            assert len({read.name for read in recorder.reads}) == reads
    # the next tier merges the parts, and writes parts again
    life.merge(30 * 86400)
    assert len(most_parts(life)) >= 5
    life.check(questions=SOME)


PART = 1 << 10
# a file has 5 KiB of entries, so each window is several parts
ROWS = 160
FULL_WINDOWS = Bounds().full_windows
GIB = 1 << 30


@pytest.fixture
def held(monkeypatch):
    """Return the list of the bytes that all writers hold together, after each write."""
    monkeypatch.setattr(base, "PART_BYTES", PART)
    monkeypatch.setattr(plan, "_HELD_BYTES", PART * FULL_WINDOWS)
    monkeypatch.setattr(task_module, "PIECE_ITEMS", 400)
    write, close = BufferedWriter.write, BufferedWriter.close
    by_writer = {}
    seen = []

    def watched(self, data):
        write(self, data)
        by_writer[id(self)] = len(self._held)
        seen.append(sum(by_writer.values()))

    def closed(self):
        by_writer.pop(id(self), None)
        close(self)

    monkeypatch.setattr(BufferedWriter, "write", watched)
    monkeypatch.setattr(BufferedWriter, "close", closed)
    return seen


@pytest.mark.parametrize("days", [5, 40])
def test_uploads_hold_as_much_for_many_windows_as_for_few(merging, tmp_path, held, days):
    """The files each begin an hour before a midnight, so that one job has all of them."""
    life = merging(
        storage=LocalStorage(tmp_path / "storage", disk=UnsyncedDisk()), preset="rocketmq", settings={"slots": 200}
    )
    for day in range(days):
        begin = BASE_MS + day * DAY_MS - HOUR_MS
        life.put((begin + row * DAY_MS // ROWS, f"k{row % 40}") for row in range(ROWS))
        life.publish()
    life.later()
    (job,) = life.plan().rewrites
    assert len(job.windows) == days + 1
    assert all(len(task.windows) <= FULL_WINDOWS for task in job.tasks)
    recorder = Recorder(life.storage)
    report = merge(recorder, life.log(), life.clock, life.options(), threads=1)
    assert (report.entries, report.tables) == (days * ROWS, days + 1)
    assert 0 < max(held) <= PART * FULL_WINDOWS
    directories = Counter(read.name for read in recorder.reads if read.end == recorder.inner.head(read.name).size_bytes)
    # two tasks read a file only if it is in two groups
    assert directories.total() == days + len(job.tasks) - 1 == sum(len(task.inputs) for task in job.tasks)
    cost = estimate(job, PriceTable())
    assert (cost.shards, cost.written_bytes) == (days + 1, packed_bytes(ROCKETMQ_SCHEMA, job.entries))
    assert cost.read_bytes == (job.entries + (len(job.tasks) - 1) * ROWS) * 28
    life.check(questions=[("t", "k0"), ("t", "k39")])


@pytest.mark.parametrize(
    ("windows", "size", "spread", "runs", "most"),
    [
        (400, 100 << 10, 400, 1, 400),  # only 40 MiB: no bound is needed;
        (365, 24 << 20, 1, 1, 10),  # a year of 24 MiB per day, in a file per day;
        (365, GIB, 1, 1, 1),  # a full shard is a task;
        (364, GIB, 2, 2, 2),  # smaller shards, and no file is read by two tasks
        (10, 4 * GIB, 1, 4, 1),
    ],
)
def test_cuts(windows, size, spread, runs, most):
    spans = [(first, min(windows - 1, first + spread - 1), size) for first in range(0, windows, spread)]
    run_count, groups = cut_windows(dict.fromkeys(range(windows), size), spans, GIB, 10**6)
    assert (run_count, max(map(len, groups))) == (runs, most)
    assert [number for group in groups for number in group] == list(range(windows))


@pytest.mark.parametrize("size", [1, 8 << 20, (8 << 20) + 1, 40 << 20])
def test_requests_of_an_upload(size):
    """A backend without parts sends one; one with parts begins and completes an upload, as costs assume."""
    recorder = Recorder(MemoryStorage())
    with recorder.open_writer("data/x/y.index") as stream:
        stream.write(bytes(size))
    assert recorder.head(stream.name).size_bytes == size
    assert [operation for operation in recorder.operations if operation != "write"] == ["put", "head"]
    assert writing_requests(1, size) == Counter(put=1, head=1, write=0 if size <= 8 << 20 else 1 - -size // (8 << 20))
    assert writing_requests(3, size).total() == 3 * writing_requests(1, size).total()
