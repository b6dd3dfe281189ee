"""A sweep beside staging deletes objects that no ticket can need, and keeps all others."""

import pytest

from tests.support.staging import Job, fill, holds, merge_all, staged
from tests.support.storage_faults import FaultStorage
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans


def test_orphans_do_not_include_staged_objects(open_spark, storage, clock):
    index = open_spark(compact_timeout_s=10**9)
    fill(index, 1)
    fill(index, 2)
    index.run_lifecycle()
    storage.put("staging/000000000000000-000000000000/aa.entries", b"nobody asks for this")
    storage.begin_upload("staging/000000000000000-000000000000/bb.entries")
    log = Job(storage, clock).log

    def orphans():
        return find_orphans(storage, log, older_than_s=3600)

    assert not orphans().objects
    clock.advance(3601)
    assert [info.name[-10:] for info in orphans().objects] == ["aa.entries"] and len(orphans().uploads) == 1
    job = Job(storage, clock).look()
    job.compact(job.tickets[0].file_id).publish()
    index.abandon()
    files = {info.name.split("/")[1] for info in orphans().objects}
    assert files == {"000000000000000-000000000000", job.tickets[0].file_id}
    merge_all(storage, clock)
    delete_orphans(storage, orphans())
    assert {name.split("/")[1] for name in staged(storage)} == {job.tickets[1].file_id}


@pytest.mark.parametrize("moment", ["find", "delete"])
def test_orphans_leave_objects_that_get_a_new_ticket_meanwhile(open_spark, stage, storage, clock, moment):
    """The host was away for days.

    It returns while the sweep reads its old ticket, or after the sweep has judged the ticket.
    """
    index = stage(1, 2, 3, compact_timeout_s=10**7)
    index.abandon()
    clock.advance(5 * 86400)
    came_back = []

    def come_back():
        if not came_back:
            came_back.append(open_spark(compact_timeout_s=10**7))
            came_back[0].run_lifecycle()

    log = Job(storage, clock).log
    if moment == "delete":
        log.claim_epoch()  # another writer has taken over, so the ticket is of a fenced writer
    racing = FaultStorage(storage)
    if moment == "find":
        racing.meanwhile("get", come_back, name_prefix="staging/")
    orphans = find_orphans(racing, log)
    assert len(orphans.objects) == (2 if moment == "delete" else 0)
    come_back()
    asked = set(staged(storage))
    deleted = delete_orphans(storage, orphans)
    assert not deleted.objects and set(staged(storage)) == asked
    assert len((job := Job(storage, clock)).run()) == 1 and not job.reasons
    holds(storage, clock, 1, 2, 3)


def test_tickets_of_a_fenced_writer_cost_no_more_from_day_to_day_and_are_swept(open_spark, stage, storage, clock):
    index = stage(1)
    index.abandon()
    log = Job(storage, clock).log
    log.claim_epoch()
    faulty = FaultStorage(storage)
    costs = []
    for number in range(3):
        for step in range(10):
            log.append_positions(log.state.epoch, {"x": 10 * number + step})
        before = faulty.calls("get")
        assert Job(faulty, clock).look().left
        costs.append(faulty.calls("get") - before)
    assert costs == [2, 2, 2], "the job reads a checkpoint and the ticket"
    assert not find_orphans(storage, log).objects
    clock.advance(86_401)
    before = faulty.calls("get")
    assert len(find_orphans(faulty, log).objects) == 2
    assert faulty.calls("get") - before == 1
    delete_orphans(storage, find_orphans(storage, log))
    assert not staged(storage)
    again = open_spark()  # nothing is lost, because its host has the file
    assert again.run_lifecycle().staged == 1
    Job(storage, clock).run()
    holds(storage, clock, 1)
