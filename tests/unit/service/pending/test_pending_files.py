"""With ``compaction = "spark"`` the writer uploads sealed files as they are, and merges compact them.

These tests do not use Spark.
"""

import pytest

from tests.support.batches import batch
from tests.support.pending import Job, T, fill, found, holds, merge_all, names_below, pending, places
from tiered_index import IndexReader
from tiered_index.errors import BackPressure
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.types import no_progress


def test_a_file_is_uploaded_as_it_is_merged_elsewhere_and_adopted(open_spark, storage, clock, tmp_path):
    """Until then no reader of the storage, no position and no freshness counts its entries."""
    index = open_spark()
    fill(index, 1, 2, 3)
    done = index.run_lifecycle()
    assert (done.pending, done.compacted, done.uploaded) == (1, 0, 0)
    assert places(index) == ["unsealed"] and found(index) == [1, 2, 3]
    state = index.log_state
    assert not state.objects and [one.file_id for one in state.pending.values()] == [index.files()[0].file_id]
    assert (state.positions, state.newest_ms, state.as_of_ms) == ({}, None, None)
    assert names_below(storage, "data/") == [*state.pending]
    assert not index.run_lifecycle().any()
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        assert not found(reader)
    assert len(Job(storage, clock).run()) == 1
    holds(storage, clock, 1, 2, 3)
    assert index.log_state.positions == {}
    done = index.run_lifecycle()
    assert (done.adopted, done.uploaded) == (1, 0)
    state = index.log_state
    assert places(index) == ["storage"] and found(index) == [1, 2, 3]
    assert (state.positions, state.as_of_ms) == ({"log": 3}, T - 1000)
    assert not state.pending and not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    assert not index.run_lifecycle().any()


def test_answers_are_complete_only_up_to_the_begin_of_a_pending_file(open_spark, storage, clock):
    """A merge of a later file does not say that the entries of the earlier one are there."""
    index = open_spark()
    begun_s = clock.now_ms() // 1000
    fill(index, 1)
    clock.advance(3600)
    index.put("t", 0, "k0", 9, 1, (begun_s + 3600) * 1000, source="log", source_position=9)
    index.seal()
    index.run_lifecycle()
    first, second = (handle.file_id for handle in index.files())
    assert Job(storage, clock).run(second) == {second}
    index.run_lifecycle()
    state = index.log_state
    assert (state.newest_ms, state.as_of_ms) == ((begun_s + 3600) * 1000, begun_s * 1000) and state.positions == {}
    assert Job(storage, clock).run() == {first}
    index.run_lifecycle()
    assert index.log_state.as_of_ms == index.log_state.newest_ms and index.log_state.positions == {"log": 9}


@pytest.mark.parametrize("preset", ["native", "rocketmq"])
def test_a_merge_takes_pending_files_beside_others_whatever_their_age(open_spark, storage, clock, preset):
    index = open_spark(preset=preset, items=200)
    for offset in range(1, 40):
        message = (f"t{offset % 3}", offset % 5, ["a", f"k{offset}"], offset, 7, clock.now_ms() - offset)
        index.put(*message, source="log", source_position=offset)
        if offset % 7 == 0:
            index.flush()
    index.seal()
    index.run_lifecycle()
    before = [[*index.query(f"t{n}", "a", max_count=100)] for n in range(3)]
    merged = merge_all(storage, clock)
    assert merged.sources == 1 and merged.entries == 78
    fill(index, 50)
    index.run_lifecycle()
    merge_all(storage, clock)
    index.run_lifecycle()
    assert set(places(index)) == {"storage"} and not index.log_state.pending
    assert [[*index.query(f"t{n}", "a", max_count=100)] for n in range(3)] == before
    report = Report()
    check_storage(storage, {}, report, no_progress, deep=True, threads=1)
    assert not report.findings


def test_after_its_time_the_host_compacts_by_itself_and_the_merge_deletes_its_objects(upload, storage, clock):
    index = upload(1)
    (waiting,) = index.log_state.pending
    clock.advance(599)
    assert not index.run_lifecycle().any()
    job = Job(storage, clock).look().compact()
    clock.advance(1)
    done = index.run_lifecycle()
    assert (done.compacted, done.uploaded) == (1, 1)
    assert places(index) == ["uploaded"] and not index.log_state.pending
    assert job.publish() == set()
    # the removed object stays for readers of the log, until a sweep after the grace
    assert names_below(storage, "data/") == sorted([*index.log_state.objects, waiting])
    holds(storage, clock, 1)
    assert Job(storage, clock).run() == set()


def test_no_file_waits_permanently_after_a_clock_was_set_back(upload, clock):
    index = upload(1)
    clock._now_ms -= 5_000_000
    assert index.run_lifecycle().compacted == 1


def test_a_restart_sends_nothing_again_and_keeps_the_time_out(open_spark, upload, storage, clock):
    index = upload(1)
    objects = names_below(storage, "data/")
    clock.advance(300)
    index.abandon()
    index = open_spark()
    assert not index.run_lifecycle().any() and names_below(storage, "data/") == objects
    clock.advance(300)
    assert index.run_lifecycle().compacted == 1
    assert not index.log_state.pending


def test_a_restart_as_local_compacts_pending_files_and_lets_go_of_merged_ones(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1)
    fill(index, 2)
    index.run_lifecycle()
    _, second = (handle.file_id for handle in index.files())
    Job(storage, clock).run(second)
    index.abandon()
    index = open_spark(compaction="local")
    index.run_lifecycle()
    assert found(index) == [1, 2] and index.log_state.positions == {"log": 2}
    assert sorted(places(index)) == ["storage", "uploaded"] and not index.log_state.pending
    holds(storage, clock, 1, 2)


@pytest.mark.parametrize("compaction", ["local", "spark"])
def test_another_root_merges_pending_files_of_a_lost_one_only_if_it_compacts_files(
    open_index, upload, storage, clock, compaction
):
    upload(1, 2).abandon()
    clock.advance(61)
    other = open_index("other", compaction=compaction, merge="1d", refresh_interval_s=0)
    other.run_lifecycle()
    other.run_merge()
    assert found(other) == ([1, 2] if compaction == "local" else [])
    assert bool(pending(storage, clock)) == (compaction == "spark")


def test_a_file_that_is_not_sealed_durably_is_compacted_here(open_spark, storage, clock):
    """After a restart the file would accept entries beyond the end that a merge has read."""
    index = open_spark()
    fill(index, 1, seal=False)
    index.flush()
    (file,) = index.files()
    file.failed = True
    index.seal()
    done = index.run_lifecycle()
    assert (done.pending, done.compacted, done.uploaded) == (0, 1, 1)
    holds(storage, clock, 1)


def test_a_bound_on_the_disk_pushes_back_until_merges_make_room(open_spark, storage, clock):
    index = open_spark(disk_max_bytes=3_000, items=20)
    with pytest.raises(BackPressure):
        for offset in range(200):
            fill(index, offset)
    assert len(index.files()) > 1
    index.run_lifecycle()
    Job(storage, clock).run()
    index.run_lifecycle()
    index.flush()
    fill(index, 500)
    assert 500 in found(index)


def test_positions_never_run_ahead_of_an_older_file(open_spark, storage, clock, tmp_path):
    index = open_spark()
    fill(index, 1)
    fill(index, 2)
    fill(index, 3)
    index.run_lifecycle()
    first, second, third = (handle.file_id for handle in index.files())
    Job(storage, clock).run(third)
    index.run_lifecycle()
    # only the last file has position 3, so its local copy stays, though the storage has its entries
    assert index.log_state.positions == {}
    assert [handle.place for handle in index.files() if handle.is_local] == ["unsealed"] * 3
    Job(storage, clock).run(first)
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 1}
    index.abandon()
    index = open_spark()
    assert index.durable_position("log") == 3 and found(index) == [1, 2, 3]
    index.run_lifecycle()
    Job(storage, clock).run(second)
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 3}
    assert {handle.place for handle in index.files()} == {"storage"}
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    holds(storage, clock, 1, 2, 3)


def test_a_file_of_the_quarantine_is_compacted_here_and_positions_wait_for_it(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1, seal=False)
    index.put("t", 0, "k0", 9, 1, 5_000, source="log", source_position=9)
    index.seal()
    done = index.run_lifecycle()
    assert (done.pending, done.compacted, done.uploaded) == (1, 1, 1)
    assert [one.lane for one in index.log_state.objects.values()] == ["quarantine"]
    assert index.log_state.positions == {}
    Job(storage, clock).run()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 9}
    holds(storage, clock, 1, 9)


def test_a_large_file_is_uploaded_in_pieces(open_spark, faulty, storage, clock):
    index = open_spark(items=300_000)
    before = faulty.calls("write")
    count = 300_000 - 1
    index.put_batch(batch(count, key=[f"k{n % 1000}" for n in range(count)], timestamp_ms=T))
    index.seal()
    index.run_lifecycle()
    # 10.3 MiB in pieces of 1 MiB, and the document
    assert faulty.calls("write") - before == 12
    assert len(Job(storage, clock).run()) == 1
    index.run_lifecycle()
    assert len(index.query("t", "k7", max_count=1000)) == 300


def test_a_checkpoint_has_the_pending_files(upload, storage, clock):
    state = upload(1, 2).log_state
    assert type(state).decode(state.encode(), "checkpoint").pending == state.pending
    log = StorageLog(storage, clock)
    assert log.open().pending == state.pending
