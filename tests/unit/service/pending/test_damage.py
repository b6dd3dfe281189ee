"""Damaged local copies and pending objects are reported, never trusted, and replaced if another copy exists."""

import pytest
from msgspec import structs

from tests.support.damage import flip, flip_object
from tests.support.pending import Job, fill, found, holds, merge_all, names_below, pending, places
from tiered_index.errors import CorruptFile, ObjectNotFound, RootBehind, StorageUnavailable, WriterFenced
from tiered_index.service.jobs.copying import Copier
from tiered_index.service.jobs.lost import give_up
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import no_progress


def damage(file):
    """Flip a bit of the second entry of an unsealed file."""
    flip(file.path, file.layout.entry_position(2))


@pytest.mark.parametrize("journal", [True, False], ids=["", "no journal"])
@pytest.mark.parametrize("down", [False, True], ids=["", "down"])
def test_a_damaged_local_copy_of_a_merged_file_is_dropped(
    open_spark, upload, faulty, storage, clock, tmp_path, down, journal
):
    """This holds if the storage is down at the start, too.

    The journal has the file's position, so the source need not resend.
    """
    index = upload(1, 2, 3)
    (file,) = index.files()
    index.abandon()
    Job(storage, clock).run()
    damage(file)
    if not journal:
        file.journal_path.unlink()
    if down:
        faulty.fail("*", times=None)
    index = open_spark()
    if down:
        with pytest.raises((CorruptFile, StorageUnavailable)):
            found(index)
        faulty.clear()
    index.run_lifecycle()
    assert found(index) == [1, 2, 3] and set(places(index)) == {"storage"}
    # without a journal no local file has the positions
    assert index.log_state.positions == ({"log": 3} if journal else {})
    assert not list((tmp_path / "root" / "unsealed").glob(f"{file.file_id}*"))
    holds(storage, clock, 1, 2, 3)


@pytest.mark.parametrize("journal", [True, False], ids=["", "no journal"])
def test_a_pending_object_replaces_a_damaged_local_copy(open_spark, upload, storage, clock, tmp_path, journal):
    index = upload(1, 2, 3)
    (file,) = index.files()
    index.abandon()
    damage(file)
    if not journal:
        file.journal_path.unlink()
    index = open_spark()
    assert index.durable_position("log") == (3 if journal else None)
    with pytest.raises(CorruptFile):
        found(index)
    index.run_lifecycle()
    assert Job(storage, clock).run() == {file.file_id}
    index.run_lifecycle()
    assert found(index) == [1, 2, 3] and set(places(index)) == {"storage"}
    assert index.log_state.positions == ({"log": 3} if journal else {})
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    holds(storage, clock, 1, 2, 3)


@pytest.mark.parametrize("part", ["entries", "document"])
def test_a_damaged_pending_object_is_never_merged_and_its_writer_compacts_the_file(upload, storage, clock, part):
    index = upload(1, 2, 3)
    (waiting,) = index.log_state.pending.values()
    flip_object(storage, waiting.name, waiting.trailer_position - 1 if part == "entries" else waiting.size_bytes - 20)
    with pytest.raises(CorruptFile, match="CRC32"):
        Job(storage, clock).run()
    assert names_below(storage, "data/") == [waiting.name]
    report = Report()
    check_storage(storage, {}, report, no_progress, deep=True, threads=1)
    assert [one.file for one in report.findings] == [waiting.name]
    clock.advance(600)
    assert index.run_lifecycle().uploaded == 1
    holds(storage, clock, 1, 2, 3)


@pytest.mark.parametrize("harm", ["damage", "loss"])
def test_a_copy_restores_a_pending_object_which_is_then_merged(upload, storage, clock, harm):
    index = upload(1, 2, 3)
    (waiting,) = index.log_state.pending.values()
    target = MemoryStorage(clock=clock)
    made = Copier(storage, target, clock)
    made.open()
    made.run_once()
    flip_object(storage, waiting.name, 9) if harm == "damage" else storage.delete(waiting.name)
    # the root is lost with the object
    index.abandon()
    report = Report()
    check_storage(storage, {}, report, no_progress, deep=True, threads=1)
    repairs = Repairs(storage, Job(storage, clock).log, standby=target)
    (planned,) = repairs.run(report, yes=False)
    assert (planned.object, planned.source) == (waiting.name, f"{target.uri}: {waiting.name}")
    (done,) = repairs.run(report, yes=True)
    assert pending(storage, clock) == [done.replaced_by] and done.replaced_by != waiting.name
    assert Job(storage, clock).run() == {waiting.file_id}
    holds(storage, clock, 1, 2, 3)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_lost_pending_object_is_given_up_and_sent_again_from_its_local_copy(
    open_spark, upload, storage, clock, is_open
):
    index = upload(1, 2, 3)
    (waiting,) = index.log_state.pending.values()
    storage.delete(waiting.name)
    with pytest.raises(ObjectNotFound):
        Job(storage, clock).run()
    if not is_open:
        index.abandon()
    assert [one.name for one in give_up(storage, Job(storage, clock).log, [waiting.file_id])] == [waiting.name]
    if not is_open:
        index = open_spark()
    index.run_lifecycle()
    assert found(index) == [1, 2, 3] or not is_open
    assert Job(storage, clock).run() == {waiting.file_id}
    holds(storage, clock, 1, 2, 3)


def test_another_copy_of_the_root_with_other_entries_is_refused(open_spark, upload, storage, clock, tmp_path):
    index = upload(1, 2, 3)
    (file,) = index.files()
    (waiting,) = index.log_state.pending.values()
    index.log_state.pending[waiting.name] = structs.replace(waiting, count=2)
    with pytest.raises(RootBehind, match=waiting.name):
        index.run_lifecycle()
    assert file.path.exists()


def test_a_fenced_writer_uploads_nothing_and_its_pending_files_stay(open_spark, upload, storage, clock):
    """Their entries were accepted before another writer took over."""
    index = upload(1)
    clock.advance(61)
    other = open_spark("other")
    fill(other, 2)
    other.run_lifecycle()
    fill(index, 3)
    with pytest.raises(WriterFenced):
        index.run_lifecycle()
    assert len(Job(storage, clock).run()) == 2
    holds(storage, clock, 1, 2)


def test_a_sweep_keeps_pending_objects_and_deletes_those_of_earlier_versions(upload, storage, clock):
    index = upload(1, compact_timeout_s=10**9)
    storage.put("staging/000000000000000-000000000000/aa.entries", b"an earlier version put this")
    storage.put(f"staging/000000000000000-000000000000/{1:020d}.ticket", b"and this")
    clock.advance(3601)
    orphans = find_orphans(storage, Job(storage, clock).log, older_than_s=3600)
    assert [info.name.split("/")[0] for info in orphans.objects] == ["staging"] * 2
    delete_orphans(storage, orphans)
    merge_all(storage, clock)
    index.run_lifecycle()
    holds(storage, clock, 1)
