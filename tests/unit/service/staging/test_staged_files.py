"""With ``compaction = "spark"`` the writer stages sealed files, jobs compact and publish them, and the writer adopts
them.

These tests do not use Spark.
"""

from collections import Counter

import pytest

from tests.support.batches import batch
from tests.support.staging import Job, T, fill, found, holds, names_below, places, staged
from tiered_index import IndexReader
from tiered_index.errors import BackPressure
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.memory import MemoryStorage


def test_a_file_is_staged_compacted_elsewhere_and_adopted(open_spark, storage, clock, tmp_path):
    index = open_spark()
    fill(index, 1, 2, 3)
    done = index.run_lifecycle()
    assert (done.staged, done.compacted, done.uploaded) == (1, 0, 0)
    assert places(index) == ["unsealed"] and found(index) == [1, 2, 3]
    (file,) = index.files()
    names = staged(storage)
    assert {name.rpartition(".")[2] for name in names} == {"ticket", "entries"}
    assert all(name.startswith(f"staging/{file.file_id}/") for name in names)
    assert not index.run_lifecycle().any()
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        assert not found(reader)
    assert Job(storage, clock).run() == {file.file_id}
    holds(storage, clock, 1, 2, 3)
    assert index.log_state.positions == {}
    done = index.run_lifecycle()
    assert (done.adopted, done.uploaded) == (1, 0)
    assert places(index) == ["storage"] and found(index) == [1, 2, 3]
    assert index.log_state.positions == {"log": 3}
    assert not staged(storage)
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    assert not index.run_lifecycle().any()


@pytest.mark.parametrize("preset", ["native", "rocketmq"])
def test_a_job_makes_the_bytes_that_the_writer_would_make(open_spark, storage, clock, tmp_path, preset):
    """The file has several batches, topics and a predecessor. A second index compacts the same root locally."""
    index = open_spark(preset=preset, items=200)
    fill(index, 1)
    for offset in range(2, 40):
        message = (f"t{offset % 3}", offset % 5, ["a", f"k{offset}"], offset, 7, T + offset * 700)
        index.put(*message, source="log", source_position=offset)
        if offset % 7 == 0:
            index.flush()
    index.seal()
    index.run_lifecycle()
    (job := Job(storage, clock)).run()
    made = {stored.file_id: storage.get(stored.name) for stored in job.log.state.objects.values()}
    index.abandon()
    (tmp_path / "root").rename(tmp_path / "again")
    local = open_spark("again", compaction="local")
    assert sorted(made) == [handle.file_id for handle in local.files()]
    for handle in local.files():
        local._lifecycle._compact(handle)
    for handle in local.files():
        assert bytes(handle.local.data) == made[handle.file_id]


def test_after_its_time_the_host_compacts_by_itself(stage, storage, clock):
    index = stage(1)
    clock.advance(599)
    assert not index.run_lifecycle().any()
    (job := Job(storage, clock)).look().compact()
    clock.advance(1)
    done = index.run_lifecycle()
    assert (done.compacted, done.uploaded) == (1, 1)
    assert places(index) == ["uploaded"] and not staged(storage)
    # the job was too late, so it deletes its upload
    assert job.publish() == set() and job.reasons == ["is in the log already"]
    assert names_below(storage, "data/") == list(index.log_state.objects)
    holds(storage, clock, 1)
    assert Job(storage, clock).run() == set()


def test_no_file_waits_permanently_after_a_clock_was_set_back(stage, clock):
    index = stage(1)
    clock._now_ms -= 5_000_000
    assert index.run_lifecycle().compacted == 1


def test_a_restart_renews_tickets_and_keeps_their_time(open_spark, stage, faulty, storage, clock):
    index = stage(1)
    (entries,) = (name for name in staged(storage) if name.endswith(".entries"))
    clock.advance(300)
    index.abandon()
    index = open_spark()
    puts = faulty.calls("put")
    index.run_lifecycle()
    names = staged(storage)
    assert entries in names and len(names) == 2
    assert faulty.calls("put") - puts <= 2, "the restart sends a ticket, and no entries"
    job = Job(storage, clock).look()
    assert [ticket.epoch for ticket in job.tickets] == [2] and not job.reasons
    clock.advance(300)
    assert index.run_lifecycle().compacted == 1
    assert not staged(storage)


def test_a_restart_as_local_compacts_staged_files_and_adopts_published_ones(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1)
    fill(index, 2)
    index.run_lifecycle()
    job = Job(storage, clock).look()
    job.compact(job.tickets[1].file_id).publish()
    index.abandon()
    index = open_spark(compaction="local")
    done = index.run_lifecycle()
    assert (done.compacted, done.uploaded, done.adopted) == (1, 1, 1)
    assert found(index) == [1, 2] and index.log_state.positions == {"log": 2}
    index.run_lifecycle()
    assert sorted(places(index)) == ["storage", "uploaded"]
    holds(storage, clock, 1, 2)


def test_a_file_that_is_not_sealed_durably_is_compacted_here(open_spark, storage, clock):
    """After a restart the file would accept entries beyond the end that a job has read."""
    index = open_spark()
    fill(index, 1, seal=False)
    index.flush()
    (file,) = index.files()
    file.failed = True
    index.seal()
    done = index.run_lifecycle()
    assert (done.staged, done.compacted, done.uploaded) == (0, 1, 1)
    holds(storage, clock, 1)


def test_a_bound_on_the_disk_pushes_back_until_jobs_make_room(open_spark, storage, clock):
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
    Job(storage, clock).look().compact(third).publish()
    index.run_lifecycle()
    # only the last file has position 3, so its local copy stays, though the storage has the file
    assert index.log_state.positions == {}
    assert [handle.place for handle in index.files()] == ["unsealed"] * 3
    Job(storage, clock).look().compact(first).publish()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 1}
    assert [handle.place for handle in index.files()] == ["storage", "unsealed", "unsealed"]
    index.abandon()
    index = open_spark()
    assert index.durable_position("log") == 3
    index.run_lifecycle()
    Job(storage, clock).look().compact(second).publish()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 3}
    assert [handle.place for handle in index.files()] == ["storage"] * 3
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    holds(storage, clock, 1, 2, 3)


def test_positions_wait_for_quarantine(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1, seal=False)
    index.put("t", 0, "k0", 9, 1, 5_000, source="log", source_position=9)
    index.seal()
    index.run_lifecycle()
    main = next(handle.file_id for handle in index.files() if handle.lane == "main")
    Job(storage, clock).look().compact(main).publish()
    index.run_lifecycle()
    assert index.log_state.positions == {}
    Job(storage, clock).run()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 9}
    holds(storage, clock, 1, 9)


class Told(WrapperStorage):
    """Count requests for staged and published objects, by operation and folder."""

    def __init__(self, inner):
        super().__init__(inner)
        self.counts = Counter()

    def _around(self, call, act):
        if call.operation not in ("list", "list_uploads") and call.name.startswith(("staging/", "data/")):
            self.counts[call.operation] += call.requests
        return act()


def test_the_cost_of_a_small_file_beyond_the_local_path(open_spark, clock):
    """docs/spark-cluster.md has these figures."""

    def spent(folder, mode):
        told = Told(MemoryStorage(clock=clock))
        index = open_spark(folder, storage_backend=told, compaction=mode)
        fill(index, 1, 2, 3)
        index.run_lifecycle()
        if mode == "spark":
            Job(told, clock).run()
        index.run_lifecycle()
        counts = Counter(told.counts)
        assert len(index.log_state.files) == 1 and found(index) == [1, 2, 3]
        return counts

    local = spent("local", "local")
    assert local == {"put": 1, "head": 1}
    more = spent("spark", "spark") - local
    assert more["put"] == 2 and more["head"] == 2 and more["delete"] == 2
    assert more["get"] == 1 and more["get_range"] + more["get_suffix"] == 3
    assert set(more) <= {"put", "head", "delete", "get", "get_range", "get_suffix"}


def test_a_large_file_is_staged_in_parts(open_spark, faulty, storage, clock):
    index = open_spark(items=300_000, upload_part_bytes=5 << 20)
    # the probe of a new index uploads an object, too
    begun, parts = faulty.calls("begin_upload"), faulty.calls("upload_part")
    count = 300_000 - 1
    index.put_batch(batch(count, key=[f"k{n % 1000}" for n in range(count)], timestamp_ms=T))
    index.seal()
    index.run_lifecycle()
    assert (faulty.calls("begin_upload") - begun, faulty.calls("upload_part") - parts) == (1, 2)
    assert not list(storage.list_uploads())
    assert len(Job(storage, clock).run()) == 1
    index.run_lifecycle()
    assert len(index.query("t", "k7", max_count=1000)) == 300
