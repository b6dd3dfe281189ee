"""Merges beside readers, writers and other merges: nobody sees an entry missing or twice, and nobody has to stop."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.cold_index import Recorder
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_MS, Merging
from tests.support.storage_faults import FaultStorage
from tiered_index import Lookup
from tiered_index.errors import CorruptFile, InvalidArgument, StorageUnavailable
from tiered_index.service.files.compacted import CompactedFile
from tiered_index.service.files.window_table import WindowTable
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.service.merge.plan import MergeJob
from tiered_index.service.merge.run import MergeOvertaken, merge, publish
from tiered_index.service.merge.task import TaskResult, run_task


def fill(life: Merging, days: int = 2, files: int = 3, rows: int = 20) -> None:
    for day in range(days):
        for file in range(files):
            start = BASE_MS + day * DAY_MS + file * 5 * HOUR_MS
            life.put([(start + step * 60_000, key) for step in range(rows) for key in ("hot", f"k{step % 4}")])
            life.publish()
    life.later()


def sweep(life: Merging) -> int:
    """Delete what nobody names, whatever its age; return how many objects that was."""
    life.later(3)
    found = find_orphans(life.storage, life.log(), older_than_s=3600)
    delete_orphans(life.storage, found)
    return len(found.objects)


def run_all(life: Merging, job: MergeJob) -> list[TaskResult]:
    return [run_task(task, life.storage, life.clock.now_ms()) for task in job.tasks]


def test_lookups_cost_a_request_a_window_however_many_files_there_were(make_life: Callable[..., Merging]) -> None:
    costs = []
    for files in (2, 4):
        life = make_life()
        fill(life, days=3, files=files)
        for merged in (None, DAY_S, 30 * DAY_S):
            if merged:
                life.merge(merged)
            with life.reader(block_cache_bytes=0) as reader:
                reader.query("t", "hot", max_count=10**6)  # the directories
                explain = reader.query("t", "k1", max_count=10**6).explain
                in_range = reader.query("t", "k1", BASE_MS, BASE_MS + DAY_MS - 1, max_count=10**6).explain
                costs.append((files, merged, explain.requests, in_range.requests))
    assert costs == [
        (2, None, 6, 2),
        (2, DAY_S, 3, 1),
        (2, 30 * DAY_S, 1, 1),
        (4, None, 12, 4),
        (4, DAY_S, 3, 1),
        (4, 30 * DAY_S, 1, 1),
    ]


def test_a_running_reader_whose_files_are_gone_reads_the_log_again(life: Merging) -> None:
    fill(life)
    recorder = Recorder(life.storage)
    with life.reader(recorder, refresh_interval_s=10**9, block_cache_bytes=0) as reader:
        page = reader.query("t", "hot", max_count=9)
        life.merge()
        # sources are still there: the reader stands where it stood
        assert life.answers(reader.query("t", "k1", max_count=100)) == life.model.query("t", "k1", max_count=None)
        assert all(isinstance(handle, CompactedFile) for handle in reader.files())
        assert sweep(life) == 6
        rest = reader.query("t", "hot", max_count=10**6, cursor=page.cursor)
        expected = life.model.query("t", "hot", max_count=9)
        assert life.answers(page) == expected
        after = life.model.order_key_of(expected[-1])
        assert life.answers(rest) == life.model.query("t", "hot", max_count=None, after=after)
        assert all(isinstance(handle, WindowTable) for handle in reader.files())
        life.check(reader)
        life.merge(30 * DAY_S)
        assert sweep(life) == 2
        many = reader.query_many([Lookup(topic="t", key=f"k{i}", max_count=10**6) for i in range(4)])
        assert [life.answers(found) for found in many] == [
            life.model.query("t", f"k{i}", max_count=None) for i in range(4)
        ]


def test_a_writer_whose_local_copies_are_merged_away(make_life: Callable[..., Merging]) -> None:
    life = make_life(settings={"local_keep_s": 10**9})
    fill(life)
    life.put([(BASE_MS + DAY_MS + step * 1000, "hot") for step in range(5)])
    life.index.flush()
    uploaded = life.folder / "root" / "uploaded"
    assert len(list(uploaded.iterdir())) == 6
    life.merge()
    life.check(life.index)
    life.index.run_lifecycle()  # which reads the log now and then
    assert not list(uploaded.iterdir())
    assert [type(handle).__name__ for handle in life.index.files()].count("WindowTable") == 2
    assert sweep(life) == 6
    life.check(life.index)
    life.put([(BASE_MS + 9 * DAY_MS + step * 1000, f"k{step % 4}") for step in range(20)])
    life.check(life.index)
    life.publish()
    assert len(life.state.files) == 1
    life.check(life.index)
    life.check()
    life.index.close()
    life.check(life.open())


def test_a_root_that_comes_back_after_its_files_were_merged(make_life: Callable[..., Merging]) -> None:
    life = make_life(settings={"local_keep_s": 10**9})
    fill(life)
    life.index.abandon()
    life.merge()
    index = life.open()
    assert not list((life.folder / "root" / "uploaded").iterdir())
    life.check(index)
    assert sum(stored.count for stored in life.state.objects.values()) == life.messages


def test_an_upload_whose_record_came_through_unheard_is_not_published_again_after_a_merge(
    make_life: Callable[..., Merging],
) -> None:
    """The writer doesn't know that its file is in the log; by the time that it asks, a merge has consumed it."""
    for crash in (False, True):
        life = make_life()
        life.index.close()
        faulty = FaultStorage(life.storage)
        life.index = life.open(storage_backend=faulty)
        life.put([(BASE_MS + step * 1000, "k") for step in range(30)])
        life.index.seal()
        faulty.fail("put_if_absent", when="after", name_prefix="log/")
        with pytest.raises(StorageUnavailable):
            life.publish()
        faulty.clear()
        assert len(life.state.files) == 1
        life.later(30)
        life.merge()
        if crash:
            life.index.abandon()
            life.index = life.open()
        life.publish()
        life.check(life.index)
        assert sum(stored.count for stored in life.state.objects.values()) == 30
        life.close()


def test_of_two_merges_of_the_same_files_one_is_overtaken(life: Merging) -> None:
    fill(life)
    (first, second), later = life.plan().jobs, life.plan(30 * DAY_S).jobs[0]
    results = run_all(life, later)
    log = life.log()
    publish(first, run_all(life, first), life.storage, log)
    with pytest.raises(MergeOvertaken, match="3 of 6 sources"):
        publish(later, results, life.storage, life.log())
    publish(second, run_all(life, second), life.storage, log)
    assert life.windows() == [(0, 24), (24, 24)]
    assert sum(stored.count for stored in life.state.objects.values()) == life.messages
    life.check()


def test_a_merge_that_is_overtaken_plans_anew_and_leaves_nothing(life: Merging) -> None:
    fill(life)
    log = life.log()
    others: list[int] = []

    def overtake(job: MergeJob) -> Sequence[TaskResult]:
        results = run_all(life, job)
        if not others:
            others.append(life.merge().jobs)
        return results

    report = merge(life.storage, log, life.clock, life.options(), run_tasks=overtake)
    assert (others, report.jobs) == ([2], 0)
    names = {info.name for info in life.storage.list("data/")}
    assert len(names) == 6 + 2, "what the overtaken one had uploaded is gone"
    life.check()


def test_publishing_again_after_an_unknown_outcome_finds_its_own_record(life: Merging) -> None:
    fill(life, days=1)
    (job,) = life.plan().jobs
    results = run_all(life, job)
    log = life.log()
    number = publish(job, results, life.storage, log).number
    assert publish(job, results, life.storage, log).number == number
    life.check()


def test_results_that_do_not_add_up_are_not_published(life: Merging) -> None:
    fill(life, days=1)
    (job,) = life.plan().jobs
    (result,) = run_all(life, job)
    name, count = next(iter(result.read_counts.items()))
    shard = result.shards[0]
    wrong: list[tuple[str, list[Any]]] = [
        ("one result of each task", []),
        ("one result of each task", [result, result]),
        (
            "another number of entries than the log says",
            [replace(result, read_counts={**result.read_counts, name: count - 1})],
        ),
        ("another number of entries than it read", [replace(result, shards=())]),
        ("other entries than it read", [replace(result, read_checksum=result.read_checksum ^ 1)]),
        (
            "another size",
            [replace(result, shards=(replace(shard, sent=replace(shard.sent, size_bytes=5)), *result.shards[1:]))],
        ),
    ]
    number = life.state.number
    for problem, results in wrong:
        with pytest.raises(CorruptFile, match=problem):
            publish(job, results, life.storage, life.log())
        assert life.state.number == number
    publish(job, [result], life.storage, life.log())
    life.check()


def test_orphans_are_what_nobody_names_and_old_enough(life: Merging) -> None:
    fill(life)
    with pytest.raises(InvalidArgument):
        find_orphans(life.storage, life.log(), older_than_s=3599)
    life.merge()
    life.storage.put("data/stray/1.index", b"x")
    life.storage.begin_upload("data/half/1.index")
    assert find_orphans(life.storage, life.log()).objects == (), "all of it is young, or was removed just now"
    life.later(0.9)
    assert find_orphans(life.storage, life.log()).objects == ()
    life.later(0.2)
    found = find_orphans(life.storage, life.log())
    assert len(found.objects) == 7 and "data/stray/1.index" in {info.name for info in found.objects}
    assert [handle.name for handle in found.uploads] == ["data/half/1.index"]
    delete_orphans(life.storage, found)
    assert {info.name for info in life.storage.list("data/")} == set(life.state.objects)
    assert not list(life.storage.list_uploads("data/"))
    life.check()


def test_a_position_that_only_a_merged_local_copy_says_survives_a_crash(make_life: Callable[..., Merging]) -> None:
    """While a quarantined entry waits the log gets no positions, so the root's copies are what says them, merged or
    not.
    """
    life = make_life(settings={"max_late_s": DAY_S, "max_early_s": DAY_S, "local_keep_s": 10**9, "items": 20})
    life.put([(5000, "early")], source="s", source_position=1)
    life.index.flush()
    position = 1
    while not life.state.files:
        position += 1
        life.put([(BASE_MS + position * 1000, "k")], source="s", source_position=position)
        life.index.flush()
        life.index.run_lifecycle()
    assert (life.state.positions, life.index.durable_position("s")) == ({}, position)
    life.clock.advance(3700)
    life.merge(3600)
    uploaded = life.folder / "root" / "uploaded"
    for _ in range(2):
        life.clock.advance(60)
        life.index.run_lifecycle()  # which reads the log
        life.check(life.index)
        life.index.abandon()
        life.index = life.open()
        assert life.index.durable_position("s") == position
        assert len(list(uploaded.iterdir())) == 1
    life.publish()
    assert life.state.positions == {"s": position}
    life.clock.advance(60)
    life.index.run_lifecycle()
    life.index.run_lifecycle()
    life.check(life.index)
    life.index.abandon()
    life.index = life.open()
    assert life.index.durable_position("s") == position
    assert sum(stored.count for stored in life.state.objects.values()) == life.messages


def test_positions_go_on_in_the_log_after_a_merge(life: Merging) -> None:
    """A window table is no file that waits to be uploaded."""
    for position in (1, 2, 3):
        life.put([(BASE_MS + position * DAY_MS, "k")], source="s", source_position=position)
        life.publish()
        assert life.state.positions == {"s": position}
        life.later()
        life.merge()
        life.clock.advance(60)
        life.index.run_lifecycle()
