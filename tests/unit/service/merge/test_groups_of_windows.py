"""What a task of a merge holds is bounded whatever the number of windows in a job: tasks are groups of windows as well
as runs of slots.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.support.cold_index import Recorder
from tests.support.merging import BASE_MS, DAY_MS, HOUR_MS, Merging
from tests.support.plain_files import plain_files
from tiered_index.format.packed import packed_bytes
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.lifecycle.publication import SentObject, Upload
from tiered_index.service.merge import plan
from tiered_index.service.merge import task as task_module
from tiered_index.service.merge.plan import FULL_WINDOWS, cut_windows
from tiered_index.service.merge.run import estimate, merge
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.prices import PriceTable

PART = 1 << 10
ROWS = 160
# of a file, 5 KiB: each window is several parts
GIB = 1 << 30


class TinyParts(MemoryStorage):
    min_part_bytes = 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of what all uploads hold together, after each write."""
    monkeypatch.setattr(task_module, "_PART_BYTES", PART)
    monkeypatch.setattr(plan, "_HELD_BYTES", 2 * PART * FULL_WINDOWS)
    monkeypatch.setattr(task_module, "PIECE_ITEMS", 400)
    write, finish = Upload.write, Upload.finish
    by_upload: dict[int, int] = {}
    seen: list[int] = []

    def watched(self: Upload, data: bytes | memoryview) -> None:
        write(self, data)
        by_upload[id(self)] = self._held_bytes
        seen.append(sum(by_upload.values()))

    def finished(self: Upload, began_ms: int) -> SentObject:
        by_upload.pop(id(self))
        return finish(self, began_ms)

    monkeypatch.setattr(Upload, "write", watched)
    monkeypatch.setattr(Upload, "finish", finished)
    return seen


def fill(life: Merging, days: int) -> None:
    """Put files that each begin an hour before a midnight, so that all are one job."""
    for day in range(days):
        begin = BASE_MS + day * DAY_MS - HOUR_MS
        life.put((begin + row * DAY_MS // ROWS, f"k{row % 40}") for row in range(ROWS))
        life.publish()
    life.later()


@pytest.mark.parametrize("days", [5, 40])
def test_uploads_hold_as_much_for_many_windows_as_for_few(
    make_life: Callable[..., Merging], held: list[int], days: int
) -> None:
    life = make_life(storage=TinyParts(), settings={"slots": 200})
    with plain_files():
        fill(life, days)
    (job,) = life.plan().jobs
    assert len(job.windows) == days + 1
    assert all(len(task.windows) <= FULL_WINDOWS for task in job.tasks)
    recorder = Recorder(life.storage)
    report = merge(recorder, life.log(), life.clock, life.options(), threads=1)
    assert (report.entries, report.tables) == (days * ROWS, days + 1)
    # an upload holds less than two parts
    assert PART < max(held) <= 2 * PART * FULL_WINDOWS
    directories = Counter(read.name for read in recorder.reads if read.end == recorder.inner.head(read.name).size_bytes)
    # only a file that lies in two groups is read by two tasks
    assert directories.total() == days + len(job.tasks) - 1 == sum(len(task.inputs) for task in job.tasks)
    cost = estimate(job, PriceTable())
    assert (cost.shards, cost.written_bytes) == (days + 1, packed_bytes(KEYED_SCHEMA, job.entries))
    assert cost.read_bytes == (job.entries + (len(job.tasks) - 1) * ROWS) * 32
    life.check(questions=[("t", "k0"), ("t", "k39")])


def test_a_hot_key_in_many_windows_is_read_by_its_groups(make_life: Callable[..., Merging], held: list[int]) -> None:
    life = make_life(storage=TinyParts())
    for day in range(20):
        life.put((BASE_MS + day * DAY_MS + row * DAY_MS // 90, "hot") for row in range(100))
        life.publish()
    life.later()
    (job,) = life.plan().jobs
    assert len(job.tasks) > 1
    life.merge()
    assert max(held) <= 2 * PART * FULL_WINDOWS
    assert not life.state.files and life.windows() == [(24 * day, 24) for day in range(21)]
    life.check()


def test_more_windows_have_smaller_parts(life: Merging) -> None:
    """Sizes are estimates: what many windows may hold is bounded by the number of windows and the parts of their
    uploads.
    """
    _, groups = cut_windows(dict.fromkeys(range(400), 1 << 20), [(0, 399, 400 << 20)], GIB, 1)
    most = max(map(len, groups))
    assert FULL_WINDOWS < most <= 48
    fill(life, 1)
    job = life.plan().jobs[0]
    run = task_module.TableRun(job.tasks[0].descriptor, job.windows[0], (0, 11), {}, 0, 1, life.storage, 0, most)
    assert task_module._PART_BYTES * FULL_WINDOWS // most == run._part_bytes < task_module._PART_BYTES


@pytest.mark.parametrize(
    ("windows", "size", "spread", "runs", "most"),
    [
        (400, 100 << 10, 400, 1, 400),  # 40 MiB in all: no bound is needed
        (365, 24 << 20, 1, 1, 10),  # a year of 24 MiB a day, each day's file its own
        (365, GIB, 1, 1, 1),  # a full shard is a task
        (364, GIB, 2, 2, 2),  # smaller shards, and no file is read by two tasks
        (10, 4 * GIB, 1, 4, 1),
    ],
)
def test_cuts(windows: int, size: int, spread: int, runs: int, most: int) -> None:
    spans = [(first, min(windows - 1, first + spread - 1), size) for first in range(0, windows, spread)]
    found, groups = cut_windows(dict.fromkeys(range(windows), size), spans, GIB, 10**6)
    assert (found, max(map(len, groups))) == (runs, most)
    assert [number for group in groups for number in group] == list(range(windows))


def test_what_many_windows_share_is_cut_by_slots_rather_than_read_for_each() -> None:
    """Files of 640 MiB each spread over a year: read a few times, not 73 times; shards don't become tiny."""
    size = 100 * (640 << 20) // 365
    spans = [(0, 364, 640 << 20)] * 100
    runs, groups = cut_windows(dict.fromkeys(range(365), size), spans, GIB, 10**6)
    assert size // runs >= plan._LEAST_BYTES and len(groups) <= 10
    # where there are no more slots to cut, there are more groups
    few, many = cut_windows(dict.fromkeys(range(365), size), spans, GIB, 2)
    assert few <= 2 and len(many) > len(groups)
    assert all(first[-1] < second[0] for first, second in pairwise(many))
