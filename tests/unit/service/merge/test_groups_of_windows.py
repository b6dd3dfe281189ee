"""Each task of a merge holds, reads and sends a bounded amount, for any number of windows and shards.

So tasks are groups of windows as well as ranges of slots.
"""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tests.support.batches import batch
from tests.support.cold_index import Recorder
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_MS
from tests.support.plain_files import plain_files
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index.format.packed import packed_bytes
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.jobs import merge_plan as plan
from tiered_index.service.jobs import rewrite as task_module
from tiered_index.service.jobs.merge_plan import Bounds, cut_windows
from tiered_index.service.jobs.merge_run import estimate, merge, writing_requests
from tiered_index.service.log.log import StorageLog
from tiered_index.storage import base
from tiered_index.storage.base import BufferedWriter
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.prices import PriceTable

PART = 1 << 10
# a file has 5 KiB of entries, so each window is several parts
ROWS = 160
FULL_WINDOWS = Bounds().full_windows
GIB = 1 << 30


@pytest.fixture
def tiny(tmp_path):
    """A storage whose writers send parts of `PART` bytes, with the fixture `held`."""
    return LocalStorage(tmp_path / "storage", disk=UnsyncedDisk())


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


def fill(life, days):
    """Put files that each begin an hour before a midnight, so that one job has all of them."""
    for day in range(days):
        begin = BASE_MS + day * DAY_MS - HOUR_MS
        life.put((begin + row * DAY_MS // ROWS, f"k{row % 40}") for row in range(ROWS))
        life.publish()
    life.later()


@pytest.mark.parametrize("days", [5, 40])
def test_uploads_hold_as_much_for_many_windows_as_for_few(merging, tiny, held, days):
    life = merging(storage=tiny, settings={"slots": 200})
    with plain_files():
        fill(life, days)
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
    assert (cost.shards, cost.written_bytes) == (days + 1, packed_bytes(KEYED_SCHEMA, job.entries))
    assert cost.read_bytes == (job.entries + (len(job.tasks) - 1) * ROWS) * 32
    life.check(questions=[("t", "k0"), ("t", "k39")])


def test_a_hot_key_in_many_windows_is_read_by_its_groups(merging, tiny, held):
    life = merging(storage=tiny)
    for day in range(20):
        life.put((BASE_MS + day * DAY_MS + row * DAY_MS // 90, "hot") for row in range(100))
        life.publish()
    life.later()
    (job,) = life.plan().rewrites
    assert len(job.tasks) > 1
    life.merge()
    assert max(held) <= PART * FULL_WINDOWS
    assert not life.state.files and life.windows() == [(24 * day, 24) for day in range(21)]
    life.check()


def test_the_number_of_windows_bounds_the_memory():
    """Sizes are estimates, but a writer holds at most one part."""
    _, groups = cut_windows(dict.fromkeys(range(400), 1 << 20), [(0, 399, 400 << 20)], GIB, 1)
    most = max(map(len, groups))
    assert FULL_WINDOWS < most <= 48 and most * base.PART_BYTES <= 384 << 20


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
    found, groups = cut_windows(dict.fromkeys(range(windows), size), spans, GIB, 10**6)
    assert (found, max(map(len, groups))) == (runs, most)
    assert [number for group in groups for number in group] == list(range(windows))


def test_a_file_of_many_windows_is_cut_by_slots_and_not_read_for_each():
    """Files of 640 MiB each span a year. They are read a few times, not 73 times, and shards stay large enough."""
    size = 100 * (640 << 20) // 365
    spans = [(0, 364, 640 << 20)] * 100
    runs, groups = cut_windows(dict.fromkeys(range(365), size), spans, GIB, 10**6)
    assert size // runs >= plan._LEAST_BYTES and len(groups) <= 10
    # if there are fewer slots, there are more groups
    few, many = cut_windows(dict.fromkeys(range(365), size), spans, GIB, 2)
    assert few <= 2 and len(many) > len(groups)
    assert all(first[-1] < second[0] for first, second in pairwise(many))


MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 40 * MIB])
def test_requests_of_an_upload(size):
    """A backend without parts sends one; one with parts begins and completes an upload, as costs assume."""
    recorder = Recorder(MemoryStorage())
    with recorder.open_writer("data/x/y.index") as stream:
        stream.write(bytes(size))
    assert recorder.head(stream.name).size_bytes == size
    assert [one for one in recorder.operations if one != "write"] == ["put", "head"]
    assert writing_requests(1, size) == Counter(put=1, head=1, write=0 if size <= 8 * MIB else 1 - -size // (8 * MIB))
    assert writing_requests(3, size).total() == 3 * writing_requests(1, size).total()


_SHARD = 1 << 20
# a day has more than one shard
_ENTRIES = 40_000


def test_a_directory_is_read_by_the_tasks_that_need_it(life):
    for day in range(2):
        numbers = np.arange(_ENTRIES)
        times = BASE_MS + day * DAY_MS + numbers * 1000
        keys, offsets = [f"k{number}" for number in numbers], day * _ENTRIES + numbers
        life.index.put_batch(batch(_ENTRIES, key=keys, offset=offsets, timestamp_ms=times))
        life.publish()
    life.later()
    life.merge(DAY_S, shard_bytes=_SHARD)
    shards = len(life.state.objects)
    assert shards == 4
    (job,) = life.plan(30 * DAY_S, shard_bytes=_SHARD).rewrites
    tasks = len(job.tasks)
    assert tasks >= 3 and {source for task in job.tasks for source in task.inputs} == set(job.inputs)
    readers = Counter(source.name for task in job.tasks for source in task.inputs)
    # the cuts of tasks and of shards differ, so two or three tasks read each shard
    assert max(readers.values()) < tasks
    recorder = Recorder(life.storage)
    log = StorageLog(recorder, life.clock)
    log.open()
    recorder.reset()
    merge(recorder, log, life.clock, life.options(30 * DAY_S, shard_bytes=_SHARD), threads=1)
    directories = Counter(read.name for read in recorder.reads if read.end == _size_of(job.inputs, read.name))
    assert directories == readers
    # each input needs a directory and a range, because no task has more than one piece
    expected = estimate(job, PriceTable())
    assert expected.requests["get_range"] == 2 * readers.total()
    assert len(recorder.reads) == 2 * readers.total()
    # the merge lists the log once to plan its jobs
    assert Counter(recorder.operations) == Counter(expected.requests) + Counter(list=1)
    with life.reader() as reader:
        assert [item.offset for item in reader.query("t", "k17")] == [_ENTRIES + 17, 17]


def _size_of(sources, name):
    return next(source.size_bytes for source in sources if source.name == name)
