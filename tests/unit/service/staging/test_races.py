"""Jobs, hosts, merges and other writers run at once. A file is published exactly once."""

import pytest

from tests.support.rounds import compact_only
from tests.support.staging import Job, fill, found, holds, merge_all, names_below, places, staged
from tiered_index.errors import WriterFenced
from tiered_index.service.lifecycle.publication import MAX_AGE_S, JobOverdue


def overdue(open_spark, clock, **settings):
    """Return an index with a staged file that no job has compacted in time. The host's next round compacts it."""
    index = open_spark(refresh_interval_s=10_000, **settings)
    fill(index, 1)
    index.run_lifecycle()
    clock.advance(601)
    return index


def test_two_jobs_publish_a_file_once(stage, storage, clock):
    stage(1)
    one, two = Job(storage, clock).look().compact(), Job(storage, clock).look().compact()
    assert len(one.publish()) == 1 and two.publish() == set()
    assert names_below(storage, "data/") == list(one.log.state.objects)
    holds(storage, clock, 1)


def test_a_repeated_publication_deletes_nothing(stage, storage, clock):
    stage(1)
    job = Job(storage, clock).look().compact()
    assert len(job.publish()) == 1 and len(job.publish()) == 1
    holds(storage, clock, 1)


def test_a_compaction_that_took_too_long_is_not_published(stage, storage, clock):
    stage(1, compact_timeout_s=10**7)
    job = Job(storage, clock).look().compact()
    clock.advance(MAX_AGE_S)
    with pytest.raises(JobOverdue, match="a compaction began"):
        job.publish()
    assert not names_below(storage, "data/")
    assert len(Job(storage, clock).run()) == 1
    holds(storage, clock, 1)


def test_a_job_that_is_first_wins_over_the_hosts_upload(open_spark, faulty, storage, clock):
    index = overdue(open_spark, clock)
    compact_only(index, faulty)
    Job(storage, clock).run()
    index.run_lifecycle()
    assert places(index) == ["uploaded"] and found(index) == [1]
    assert index.log_state.positions == {"log": 1}
    assert names_below(storage, "data/") == list(index.log_state.objects) and not staged(storage)
    holds(storage, clock, 1)


@pytest.mark.parametrize("merged", [False, True])
def test_a_job_that_takes_the_very_log_number_wins(open_spark, faulty, storage, clock, merged):
    index = overdue(open_spark, clock)
    job = Job(storage, clock).look().compact()

    published = []

    def sneak():
        published.extend(job.publish())
        if merged:
            merge_all(storage, clock)

    faulty.meanwhile("put_if_absent", sneak, name_prefix="log/")
    index.run_lifecycle()
    index.run_lifecycle()
    assert len(published) == 1 and found(index) == [1]
    assert index.log_state.positions == {"log": 1}
    assert len(index.log_state.objects) == 1 and bool(index.log_state.tables) == merged
    holds(storage, clock, 1)
    if not merged:
        assert names_below(storage, "data/") == list(index.log_state.objects)


@pytest.mark.parametrize("when", ["staged", "compacted", "restarted"])
def test_a_published_and_merged_file_is_not_published_again(open_spark, stage, faulty, storage, clock, when):
    index = stage(1, 2)
    late = Job(storage, clock).look().compact()
    if when == "compacted":
        clock.advance(601)
        compact_only(index, faulty)
    Job(storage, clock).run()
    assert merge_all(storage, clock).sources == 1
    assert late.publish() == set() and late.reasons == ["was published and merged meanwhile"]
    assert Job(storage, clock).run() == set()
    if when == "restarted":
        index.abandon()
        index = open_spark()
    index.run_lifecycle()
    assert found(index) == [1, 2]
    assert set(places(index)) == {"storage"}
    assert index.log_state.positions == {"log": 2}
    assert not index.log_state.files
    if when != "restarted":  # after a restart no writer knows the staged objects, so only `orphans` deletes them
        assert not staged(storage)
    holds(storage, clock, 1, 2)
    index.abandon()
    index = open_spark()
    assert found(index) == [1, 2] and index.durable_position("log") == 2


def test_nothing_of_a_fenced_writer_is_published(open_spark, stage, storage, clock):
    index = stage(1)
    job = Job(storage, clock).look().compact()
    clock.advance(61)
    other = open_spark("other")
    fill(other, 2)
    other.run_lifecycle()
    assert job.publish() == set()
    assert "epoch 1, the log's is 2" in job.reasons[0]
    again = Job(storage, clock)
    assert again.run() == {other.files()[0].file_id}
    assert len(again.reasons) == 1 and "epoch 1" in again.reasons[0]
    with pytest.raises(WriterFenced):
        index.run_lifecycle()
    assert [handle.place for handle in index.files() if handle.is_local] == ["unsealed"]
    holds(storage, clock, 2)
    # its host returns: it writes a new ticket for the staged file, and does not send the file again
    index.abandon()
    other.close()
    clock.advance(61)
    (sent,) = (name for name in staged(storage) if name == job.tickets[0].object)
    index = open_spark()
    index.run_lifecycle()
    # the other host did not sweep the staged copy of its published file, and this one has deleted it
    assert [name for name in staged(storage) if name.endswith(".entries")] == [sent]
    Job(storage, clock).run()
    index.run_lifecycle()
    holds(storage, clock, 1, 2)
    assert not staged(storage)
