"""Damaged local copies, staged objects, tickets and published objects are reported and never trusted.

They are repaired if another copy of the file exists.
"""

import pytest

from tests.support.damage import flip, flip_object
from tests.support.staging import Job, fill, found, holds, merge_all, names_below, places, staged
from tiered_index.errors import CorruptFile, StorageUnavailable


def damage(file):
    """Flip a bit of the second entry of an unsealed file."""
    flip(file.path, file.layout.entry_position(2))


@pytest.mark.parametrize("journal", [True, False], ids=["", "no journal"])
@pytest.mark.parametrize("down", [False, True], ids=["", "down"])
@pytest.mark.parametrize("merged", [False, True], ids=["published", "merged"])
def test_a_damaged_local_copy_of_a_published_file_is_dropped(
    open_spark, stage, faulty, storage, clock, tmp_path, merged, down, journal
):
    """This holds if the storage is down at the start, too.

    The journal has the file's position, so the source need not resend.
    """
    index = stage(1, 2, 3)
    (file,) = index.files()
    index.abandon()
    Job(storage, clock).run()
    if merged:
        merge_all(storage, clock)
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
    else:
        assert found(index) == [1, 2, 3]
        assert index.durable_position("log") == (3 if journal else None)
    index.run_lifecycle()
    assert found(index) == [1, 2, 3] and set(places(index)) == {"storage"}
    # without a journal no local file has the positions
    expected = {"log": 3} if journal else {}
    assert index.log_state.positions == expected
    fill(index, 4)
    index.run_lifecycle()
    Job(storage, clock).run()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 4}
    assert not list((tmp_path / "root" / "unsealed").glob(f"{file.file_id}*"))
    assert merged or not staged(storage), "only `orphans` deletes staged objects of files that were merged before"
    holds(storage, clock, 1, 2, 3, 4)


def test_the_position_of_a_damaged_copy_waits_for_an_older_file(open_spark, storage, clock, tmp_path):
    index = open_spark()
    fill(index, 1)
    fill(index, 2, 3)
    index.run_lifecycle()
    first, second = index.files()
    index.abandon()
    Job(storage, clock).look().compact(second.file_id).publish()
    damage(second)
    for _ in range(2):
        index = open_spark()
        index.run_lifecycle()
        assert found(index) == [1, 2, 3] and index.durable_position("log") == 3
        assert index.log_state.positions == {}
        assert list((tmp_path / "root" / "unsealed").glob(f"{second.file_id}*"))
        index.abandon()
    index = open_spark()
    index.run_lifecycle()
    assert Job(storage, clock).run() == {first.file_id}
    index.run_lifecycle()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 3}
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    holds(storage, clock, 1, 2, 3)


@pytest.mark.parametrize("merged", [False, True], ids=["published", "merged"])
@pytest.mark.parametrize("journal", [True, False], ids=["", "no journal"])
def test_a_staged_object_replaces_a_damaged_local_copy(open_spark, stage, storage, clock, tmp_path, journal, merged):
    index = stage(1, 2, 3)
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
    if merged:
        merge_all(storage, clock)
    index.run_lifecycle()
    assert found(index) == [1, 2, 3] and set(places(index)) == {"storage"}
    assert index.log_state.positions == ({"log": 3} if journal else {})
    assert not staged(storage) and not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    holds(storage, clock, 1, 2, 3)


def test_a_damaged_file_without_another_copy_is_kept_and_reported(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1, 2, 3)
    (file,) = index.files()
    index.abandon()
    damage(file)
    for _ in range(2):
        index = open_spark()
        index.run_lifecycle()
        with pytest.raises(CorruptFile):
            found(index)
        assert index.durable_position("log") is None, "the source may send it again"
        assert file.path.exists() and file.journal_path.exists()
        index.abandon()


@pytest.mark.parametrize(("mode", "lasting"), [("wrong", False), ("wrong", True), ("short", True)])
def test_damage_of_a_staged_file_stops_no_other_one(open_spark, faulty, storage, clock, mode, lasting):
    index = open_spark()
    fill(index, 1)
    fill(index, 2)
    index.run_lifecycle()
    first, second = (handle.file_id for handle in index.files())
    faulty.corrupt("get_range", mode=mode, name_prefix=f"staging/{first}", times=None if lasting else 1)
    job = Job(faulty, clock)
    assert job.run() == ({second} if lasting else {first, second})
    assert [result.corrupt for result in job.results if result.left] == [True] * lasting
    faulty.clear()
    clock.advance(601)
    index.run_lifecycle()
    holds(storage, clock, 1, 2)


def test_a_flipped_bit_among_staged_entries_is_found(stage, storage, clock):
    stage(1, 2, 3)
    job = Job(storage, clock).look()
    (ticket,) = job.tickets
    flip_object(storage, ticket.object, ticket.entries_bytes - 1)
    assert job.compact().publish() == set() and job.results[0].corrupt and "do not match their CRC32" in job.reasons[0]
    assert not names_below(storage, "data/")


def test_a_damaged_ticket_is_reported(stage, storage, clock):
    stage(1)
    (name,) = (name for name in staged(storage) if name.endswith(".ticket"))
    storage.put(name, storage.get(name)[:-1])
    job = Job(storage, clock)
    assert job.run() == set() and job.left[0].corrupt and name in job.reasons[0]


def test_a_staged_object_that_is_gone_is_left(stage, storage, clock):
    stage(1)
    job = Job(storage, clock).look()
    storage.delete(job.tickets[0].object)
    assert job.compact().publish() == set() and "gone" in job.reasons[0]
    assert not names_below(storage, "data/")


def test_an_object_of_another_size_is_not_believed(stage, storage, clock):
    index = stage(1)
    Job(storage, clock).run()
    (name,) = names_below(storage, "data/")
    whole = storage.get(name)
    storage.put(name, whole[:-1])
    with pytest.raises(CorruptFile, match="kept"):
        index.run_lifecycle()
    assert places(index) == ["unsealed"] and found(index) == [1]
    storage.put(name, whole)
    index.run_lifecycle()
    assert places(index) == ["storage"] and found(index) == [1]
