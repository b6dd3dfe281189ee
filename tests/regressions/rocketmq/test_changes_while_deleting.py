"""Fault: a list is changed while another thread iterates over it.

RocketMQ #9069; #9371 is the same fault of readers during a deletion.
RocketMQ: the thread that builds the index read the list of messages while another thread added to it and released it.
Under load this raised ConcurrentModificationException, and messages were missing from the index. A reader of a deleted
file met a null pointer.
Here: puts, flushes, lookups and the deletion of files run at the same time. Each lookup sees every file in one of its
states.
"""

from __future__ import annotations

import pytest

from tests.support.disk_faults import FaultDisk
from tiered_index.errors import StorageUnavailable
from tiered_index.service.read.skiplist import TimeRangeSkipList

T = 1_700_000_000_000


def numbers(answers):
    return sorted(answer.offset for answer in answers)


def test_puts_in_the_middle_of_a_flush(life, monkeypatch):
    """An entry that is put while the flusher writes its batch is neither lost nor written twice."""
    count = iter(range(10, 1000))
    for number in range(10):
        life.put("t", 0, "k", number, timestamp_ms=T + number * 1000)
    syncs = []

    def act() -> None:
        number = next(count)
        life.put("t", 0, "k", number, timestamp_ms=T + number * 1000)
        life.put_batch([("t", 0, "k", 1000 + number, 10, T + number * 1000)])
        assert len(life.check("t", "k", max_count=5000)) == len(life.model.entries)
        syncs.append(number)

    sync = FaultDisk.sync

    def interrupted(disk, descriptor):
        sync(disk, descriptor)
        if disk is life.disk and len(syncs) < 12:
            act()

    with monkeypatch.context() as patch:
        patch.setattr(FaultDisk, "sync", interrupted)
        life.service.flush()
        life.service.flush()
    assert len(syncs) > 3
    life.bring("unsealed", begin="unsealed")
    for _ in life.through():
        assert len(life.check("t", "k", max_count=5000)) == len(life.model.entries)
    assert sum(stored.count for stored in life.service.log_state.objects.values()) == len(life.model.entries)


@pytest.mark.parametrize("state", ["unsealed", "compacted", "uploaded"])
def test_files_deleted_while_a_lookup_reads_them(make_life, beside, state):
    """A lookup has its list of files and waits for the newest two, in the storage. Meanwhile all other files lose their
    local form.
    """
    life = make_life(items=4, query_threads=1)
    for number in range(6):
        life.put("t", 0, "k", number, timestamp_ms=T + (100 + number) * 1000)
    life.bring("storage")
    for number in range(6, 18):
        life.put("t", 0, "k", number, timestamp_ms=T + number * 1000)
    life.service.seal()
    if state == "compacted":
        life.storage.fail("put", name_prefix="data/", times=None)
        with pytest.raises(StorageUnavailable):
            life.service.run_lifecycle()
        life.storage.clear()
    if state == "uploaded":
        life.service.run_lifecycle()
    local = [file for file in life.service.files() if file.is_local]
    assert [file.place for file in local] == [state] * 4
    expected = numbers(life.model.query("t", "k"))
    hang = life.storage.hang("get_range", name_prefix="data/")
    call = beside(lambda: life.service.query("t", "k", max_count=1000))
    assert hang.entered.wait(60)
    for _ in range(2):
        life.service.run_lifecycle()
        life.clock.advance(100_000)
    life.service.run_lifecycle()
    life.put("t", 0, "later", 99, timestamp_ms=T)
    assert not any(file.is_local for file in life.service.files())
    hang.release.set()
    assert call.ended()
    assert call.error is None
    assert (call.value.status, numbers(call.value)) == ("complete", expected)
    assert {report.file for report in call.value.explain.files if report.place == state} == {
        file.file_id for file in local
    }
    # the files that waited for the lookup are deleted now
    life.service.run_lifecycle()
    assert not list(life.root.glob("compacted/*")) + list(life.root.glob("uploaded/*"))
    life.check("t", "k")


def test_a_lookup_between_any_two_changes_of_the_list(make_life, monkeypatch):
    """The test inspects the list of files after each single change by a flush or a life-cycle round."""
    life = make_life(items=4, local_keep_s=0)
    looks = []

    def look() -> None:
        result = life.service.query("t", "k", max_count=1000)
        assert numbers(result) == list(range(len(life.model.entries)))
        looks.append(result.status)

    def looked_at(act):
        def changed(*args):
            outcome = act(*args)
            look()
            return outcome

        return changed

    for name in ("insert", "remove"):
        monkeypatch.setattr(TimeRangeSkipList, name, looked_at(getattr(TimeRangeSkipList, name)))
    for number in range(20):
        life.put("t", 0, "k", number, timestamp_ms=T + number * 37 % 50 * 1000)
        if number % 2:
            life.service.flush()
    life.service.seal()
    life.service.run_lifecycle()
    # a file appeared, grew, was compacted, uploaded and retired
    assert len(looks) > 5 * len(life.service.files())
    assert set(looks) == {"complete"}
    assert not any(file.is_local for file in life.service.files())
