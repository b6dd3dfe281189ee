"""An upload whose log record had an unknown outcome was deleted when the next attempt failed. The record arrived later,
and the log named an object that was gone. A root did not know its own record if that arrived after a second attempt.
"""

from concurrent.futures import Future

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.filled import merge_all
from tests.support.log_records import GENESIS
from tests.support.storage_faults import LateRecords
from tiered_index.base.call import active_context
from tiered_index.base.clock import ManualClock
from tiered_index.errors import ObjectNotFound, StorageUnavailable
from tiered_index.service.log.log import StorageLog
from tiered_index.service.root import Root
from tiered_index.service.root.seen import SeenFile
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000


@pytest.fixture
def waiting(open_index, storage):
    """A service whose one file was fully sent, and whose record is still in flight."""
    late = LateRecords(storage)
    service = open_index(storage_backend=late, local_keep_s=1e9)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    late.delayed = True
    with pytest.raises(StorageUnavailable):
        service.run_lifecycle()
    late.delayed = False
    return service, late


def test_it_is_there_when_its_record_arrives(waiting, storage, open_reader):
    service, late = waiting
    (name,) = [info.name for info in storage.list("data/")]
    for _ in range(3):
        late.fail("head", name_prefix="data/")
        with pytest.raises(StorageUnavailable):
            service.run_lifecycle()
        assert storage.head(name)
    late.arrive()
    service.run_lifecycle()
    assert [handle.place for handle in service.files()] == ["uploaded"]
    assert [o.name for o in service.log_state.objects.values()] == [name]
    assert not service.health()["problems"]
    result = open_reader().query("t", "k")
    assert (result.status, [item.offset for item in result]) == ("complete", [1])


def test_an_upload_that_the_storage_seems_to_lack_is_sent_again_and_not_deleted(waiting, storage, open_reader):
    service, late = waiting
    (name,) = [info.name for info in storage.list("data/")]
    late.fail("head", error=ObjectNotFound, name_prefix="data/")
    service.run_lifecycle()
    (published,) = service.log_state.objects
    assert published != name and {info.name for info in storage.list("data/")} == {published, name}
    assert not service.health()["problems"]
    assert [item.offset for item in open_reader().query("t", "k")] == [1]


def test_a_second_upload_is_deleted_when_the_record_of_the_first_arrives(waiting, storage, open_reader):
    service, late = waiting
    (name,), first = [info.name for info in storage.list("data/")], late.held
    late.fail("head", error=ObjectNotFound, name_prefix="data/")
    late.delayed = True
    with pytest.raises(StorageUnavailable):
        service.run_lifecycle()
    late.delayed = False
    assert len(list(storage.list("data/"))) == 2 and late.held != first
    storage.put_if_absent(*first)
    service.run_lifecycle()
    assert [*service.log_state.objects] == [info.name for info in storage.list("data/")] == [name]
    assert [item.offset for item in open_reader().query("t", "k")] == [1]


@pytest.mark.parametrize("restarts", ["no", "after the merge", "without the storage"])
def test_a_file_whose_record_arrived_and_that_was_merged_is_not_published_again(
    waiting, storage, clock, open_index, open_reader, restarts
):
    service, late = waiting
    if restarts != "no":
        service.abandon()
    late.arrive()
    if restarts == "without the storage":
        late.fail("*", times=None)
        service = open_index(storage_backend=late)
    clock.advance(2 * 86_400)
    assert merge_all(storage, clock).sources == 1
    late.clear()
    if restarts == "after the merge":
        service = open_index(storage_backend=late)
    service.run_lifecycle()
    assert not service.log_state.files
    assert open_reader().topics().topics[0].entries == 1
    assert [handle.place for handle in service.files()] == ["storage"]


@pytest.mark.parametrize("attempts", [2, 5])
def test_a_root_knows_each_of_its_attempts_after_a_restart(waiting, storage, open_index, attempts):
    service, late = waiting
    first = late.held
    late.delayed = True
    for _ in range(attempts - 1):
        with pytest.raises(StorageUnavailable):
            service.run_lifecycle()
        assert late.held != first
    service.abandon()
    storage.put_if_absent(*first)
    service = open_index()
    service.run_lifecycle()
    assert not service.health()["problems"]
    assert len(service.query("t", "k")) == 1
    assert len(service.log_state.objects) == 1


def test_the_room_of_a_note_is_never_too_small_for_the_attempts_of_an_outage(tmp_path):
    """A longer note would write over the other one, which a crash in the middle of a write leaves."""
    seen = SeenFile(Root(tmp_path, FaultDisk()))
    tokens = [f"{number:016x}" for number in range(50)]
    for token in tokens:
        seen.note(10**15, "f" * 32, token)
    last = SeenFile(Root(tmp_path, FaultDisk())).read()
    assert last == seen.last and last.attempts == tokens[-16:]
    assert seen.path.stat().st_size == 1024


def test_a_claim_notes_no_record_that_is_not_durable_yet(tmp_path):
    class Unsettled(MemoryStorage):
        def settle(self, name):
            raise StorageUnavailable("the sync failed")

    storage, seen = Unsettled(), SeenFile(Root(tmp_path, FaultDisk()))
    StorageLog(storage, ManualClock()).create(GENESIS)
    log = StorageLog(storage, ManualClock(), root_id="root", seen=seen)

    def at_once(part):
        """Run a part as a thread that is quicker than all others."""
        ended = Future()
        try:
            ended.set_result(part())
        except StorageUnavailable as error:
            ended.set_exception(error)
        return ended

    with active_context().with_threads(at_once).active():
        log.open()
        with pytest.raises(StorageUnavailable, match="sync failed"):
            log.claim_epoch()
    # after a power cut the storage may have lost the record
    assert seen.last.number == 0
