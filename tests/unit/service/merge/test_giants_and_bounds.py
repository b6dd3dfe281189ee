"""A merge of one hot key needs bounded memory: pieces are small for any window, and a giant slot has several shards."""

from itertools import groupby, pairwise

import pytest

from tests.support.changes import replace
from tests.support.cold_index import Recorder
from tests.support.merging import BASE_MS, HOUR_MS
from tiered_index.errors import CorruptFile
from tiered_index.service.jobs import rewrite as task_module
from tiered_index.service.jobs.job import publish
from tiered_index.service.jobs.merge_plan import plan_merge, plan_rewrite
from tiered_index.service.jobs.merge_run import merge
from tiered_index.storage.memory import MemoryStorage

PIECE = 200
SOME = [("t", "hot"), ("t", "k1"), ("t", "k22")]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(task_module, "PIECE_ITEMS", PIECE)


def parts_of(life):
    """Return the shards of the tables by their slots. Each list is newest first."""
    shards = [
        (s.shard.table, s.shard.slot_low, s.shard.slot_high, -s.second_max, s.name, s)
        for s in life.state.objects.values()
        if s.shard
    ]
    return [[row[-1] for row in group] for _, group in groupby(sorted(shards), key=lambda row: row[:3])]


def fill_hot(life, files=3, hot=600, others=100):
    for number in range(files):
        start = BASE_MS + number * HOUR_MS
        life.put([(start + step * 7000, "hot") for step in range(hot)])
        life.put([(start + step * 20_000, f"k{step % 23}") for step in range(others)])
        life.publish()
    life.later()


def test_a_hot_key_has_several_parts_and_a_page_reads_only_the_newest(life):
    fill_hot(life)
    life.merge()
    parts = max(parts_of(life), key=len)
    assert len(parts) >= 5
    for newer, older in pairwise(parts):
        assert newer.second_min > older.second_max
    life.check(questions=SOME)
    recorder = Recorder(life.storage)
    with life.reader(recorder, block_cache_bytes=0) as reader:
        reader.query("t", "hot", max_count=10**6)  # this reads the directories
        for reads, max_count in ((1, 5), (len(parts), 10**6)):
            recorder.reset()
            found = reader.query("t", "hot", max_count=max_count)
            assert life.answers(found) == life.model.query("t", "hot", max_count=max_count)
            assert len({read.name for read in recorder.reads}) == reads
    # the next tier merges the parts, and writes parts again
    life.merge(30 * 86400)
    assert len(max(parts_of(life), key=len)) >= 5
    life.check(questions=SOME)


def test_a_table_of_two_origins_is_damage(life):
    fill_hot(life)
    life.merge()
    state = life.state
    one, *others = max(parts_of(life), key=len)
    assert one.shard is not None and others
    another = replace(one, shard=replace(one.shard, origin="build"))
    with pytest.raises(CorruptFile, match="objects of two origins"):
        plan_rewrite(replace(state, objects=state.objects | {one.name: another}), {one.name})


def test_one_second_is_never_divided(life):
    life.put([(BASE_MS + 1000, "hot")] * (3 * PIECE))
    life.put([(BASE_MS + 5000 + step * 1000, "hot") for step in range(3 * PIECE)])
    life.publish()
    life.later()
    life.merge()
    assert len(max(parts_of(life), key=len)) > 1
    life.check()


def test_pieces_and_their_writes_stay_small(merging, monkeypatch):
    """With twice the entries, pieces have the same size, and so has what a task hands over at once."""
    held = []
    write = task_module.Writer.write

    def watched(self, data):
        write(self, data)
        held.append(len(data))

    monkeypatch.setattr(task_module.Writer, "write", watched)
    largest = []
    for files in (3, 6):
        life = merging(MemoryStorage())
        fill_hot(life, files)
        pieces = []
        held.clear()
        report = merge(life.storage, life.log(), life.clock, life.options(), threads=1, progress=pieces.append)
        assert sum(pieces) == report.entries == files * 700
        assert any(stored.size_bytes > 4 << 9 for stored in life.state.objects.values())
        life.check(questions=[("t", "hot"), ("t", "k1")])
        largest.append((max(pieces), max(held)))
    assert all(piece <= 3 * PIECE and bytes_ < 100 * 3 * PIECE for piece, bytes_ in largest)


@pytest.mark.parametrize("hours", [4, 300])
def test_a_window_may_get_many_more_entries_than_its_share(life, hours):
    """A plan assumes that entries are spread evenly over a file's seconds. Here nearly all are in one window."""
    middle = hours // 2
    life.put([(BASE_MS, "first"), (BASE_MS + hours * HOUR_MS, "last")])
    life.put([(BASE_MS + middle * HOUR_MS + step * 1000, f"k{step}") for step in range(2500)])
    life.publish()
    life.later()
    assert max(window.entries for window in life.plan(3600).rewrites[0].windows) <= 2502 // hours
    life.merge(3600)
    assert life.windows() == [(0, 1), (middle, 1), (hours, 1)]
    life.check(questions=[("t", key) for key in ("first", "last", "k0", "k7", "k2499")])


def test_pieces_of_many_small_files_are_as_small(merging):
    """Each file is one slot group, which begins at slot 0 and covers all slots."""
    life = merging(settings={"slots": 64})
    for number in range(20):
        life.put([(BASE_MS + number * HOUR_MS + step * 1000, f"k{number}-{step}") for step in range(60)])
        life.publish()
    life.later()
    pieces = []
    merge(life.storage, life.log(), life.clock, life.options(), threads=1, progress=pieces.append)
    assert sum(pieces) == 1200
    assert max(pieces) <= 2 * PIECE and len(pieces) >= 5
    assert all(len(parts) == 1 for parts in parts_of(life)), "no slot counts as giant"


def test_shards_are_cut_by_slots_and_each_holds_its_own(life, monkeypatch):
    monkeypatch.setattr(task_module, "PIECE_ITEMS", 1 << 20)
    fill_hot(life, hot=30, others=600)
    plan = life.plan(shard_bytes=1 << 20)
    assert len(plan.rewrites[0].tasks) == 1
    # plans make no shards of less than 1 MiB, so this test cuts the plan itself
    job = plan.rewrites[0]
    tasks = tuple(
        replace(job.tasks[0], number=n, base_low=low, base_high=high)
        for n, (low, high) in enumerate([(0, 3), (3, 7), (7, 11)])
    )
    cut = replace(job, tasks=tasks)
    log = life.log()
    results = [task.run(life.storage, life.clock.now_ms()) for task in reversed(tasks)]
    publish(cut, results, log)
    ranges = sorted((s.shard.slot_low, s.shard.slot_high) for s in log.state.objects.values() if s.shard)
    slots = job.windows[0].slots
    assert ranges == [slots.slots_of_base(0, 3), slots.slots_of_base(3, 7), slots.slots_of_base(7, 11)]
    life.check(questions=SOME)


def test_a_sparse_window_does_not_make_the_pieces_of_a_large_one_coarse(merging):
    """One window has one late entry, and another has a hundred million.

    The slots of each window limit the pieces of both.
    """
    life = merging(settings={"slots": 100_000})
    life.put([(BASE_MS, "k"), (BASE_MS + 23 * HOUR_MS, "k")])
    life.publish()
    life.put([(BASE_MS + 23 * HOUR_MS, "k"), (BASE_MS + 25 * HOUR_MS, "late")])
    life.publish()
    life.later()
    state = life.state
    large, small = state.objects.values()
    many = replace(state, objects={large.name: replace(large, count=100_000_000, size_bytes=2**40), small.name: small})
    (job,) = plan_merge(many, life.options(shard_bytes=1 << 30), now_s=life.clock.now_ms() // 1000).rewrites
    first, second = job.windows
    assert (first.entries, second.entries) == (100_000_001, 1)
    assert first.slots.split > 100
    assert 100_000_000 // second.slots.slots < 1 << 18
