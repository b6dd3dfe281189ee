"""``compaction = "spark"``: sealed files are staged, jobs compact and publish them, and the writer takes them over.
Without Spark here.
"""

import pytest

from tests.support.staging import Job, T, fill, found, holds, names_below, places, staged
from tiered_index import IndexConfig, IndexReader
from tiered_index.errors import BackPressure, ConfigError


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
    """Several batches, topics and a predecessor; the same root lives twice."""
    index = open_spark(preset=preset, items=200)
    fill(index, 1)
    for offset in range(2, 40):
        index.put(
            f"t{offset % 3}",
            offset % 5,
            ["a", f"k{offset}"],
            offset,
            7,
            T + offset * 700,
            source="log",
            source_position=offset,
        )
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
    # the job was late: it takes back what it sent
    assert job.publish() == set() and job.reasons == ["is in the log already"]
    assert names_below(storage, "data/") == list(index.log_state.objects)
    holds(storage, clock, 1)
    assert Job(storage, clock).run() == set()


def test_a_clock_that_is_put_back_makes_no_file_wait_for_good(stage, clock):
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
    assert faulty.calls("put") - puts <= 2, "a ticket, and no entries"
    job = Job(storage, clock).look()
    assert [ticket.epoch for ticket in job.tickets] == [2] and not job.reasons
    clock.advance(300)
    assert index.run_lifecycle().compacted == 1
    assert not staged(storage)


def test_a_restart_as_local_compacts_what_was_staged_and_adopts_what_was_published(open_spark, storage, clock):
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
    """After a restart it would go on where a job had seen its end."""
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


def test_settings_that_can_not_be():
    with pytest.raises(ConfigError, match="compaction"):
        IndexConfig(compaction="elsewhere")
    with pytest.raises(ConfigError, match="compact_timeout_s"):
        IndexConfig(compact_timeout_s=0)
