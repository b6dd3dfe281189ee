"""Fault: failed writes are reported as success.

RocketMQ: golden faults 6 and 7 (the result for the caller).
RocketMQ: `putKey` of the index service tried three times, logged the error, and returned SUCCESS. A failed upload was
only an entry in the log.
Here: `put` promises the buffer, `flush` the disk, the log the storage. Each of them raises if it can't keep its
promise. `durable_position` then does not move. The entries are kept, found, and written once the fault has ended.
"""

from __future__ import annotations

import errno

import pytest

from tiered_index.errors import BackPressure, DiskFull, StorageUnavailable

T = 1_700_000_000_000
DISK_CALLS = ("create", "allocate", "pwrite", "sync", "rename", "sync_folder")


def put(life, first, last):
    for position in range(first, last + 1):
        life.put("t", 0, "k", position, timestamp_ms=T + position * 1000, source="log", source_position=position)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full disk", "broken disk"])
@pytest.mark.parametrize("operation", DISK_CALLS)
def test_a_flush_that_wrote_nothing_raises(make_life, operation, code):
    life = make_life(items=8, buffer_max_entries=12)
    put(life, 1, 5)
    life.disk.fail(operation, times=None, error=code)
    for _ in range(3):
        with pytest.raises(DiskFull if code == errno.ENOSPC else StorageUnavailable):
            life.service.flush()
        assert life.service.durable_position("log") is None
        assert life.service.health()["problems"]
        assert len(life.check("t", "k")) == 5
    put(life, 6, 12)
    with pytest.raises(BackPressure):  # the buffer is full, and drops nothing to make space
        life.service.put("t", 0, "k", 13, 10, T, source="log", source_position=13)
    assert len(life.check("t", "k")) == 12
    life.disk.clear()
    life.bring("unsealed", begin="unsealed")
    assert not life.service.health()["problems"]
    assert life.service.durable_position("log") == 12
    life.open()  # as after a crash: it is really there
    assert life.service.durable_position("log") == 12
    assert len(life.check("t", "k")) == 12
    life.bring("storage")
    assert len(life.check("t", "k")) == 12
    assert sum(stored.count for stored in life.service.log_state.objects.values()) == 12


@pytest.mark.parametrize("operation", ["pwrite", "sync"])
def test_unconfirmed_entries_are_not_promised_after_a_crash(life, operation):
    put(life, 1, 5)
    life.service.flush()
    put(life, 6, 9)
    life.disk.fail(operation, times=None)
    with pytest.raises(StorageUnavailable):
        life.service.flush()
    assert life.service.durable_position("log") == 5
    life.open()
    # entries 6 to 9 were never confirmed; the caller continues after the position
    assert life.service.durable_position("log") == 5
    found = [item.offset for item in life.service.query("t", "k")]
    assert found[-5:] == [5, 4, 3, 2, 1]
    for position in range(6, 10):
        life.service.put("t", 0, "k", position, 10, T + position * 1000, source="log", source_position=position)
    life.bring("storage", begin="unsealed")
    assert len(life.check("t", "k")) == 9
    assert life.service.durable_position("log") == 9


def test_close_raises_the_error_of_its_flush(life):
    put(life, 1, 5)
    life.disk.fail("pwrite", times=None)
    with pytest.raises(StorageUnavailable):
        life.service.close()
    life.open()
    assert life.service.durable_position("log") is None
    assert not len(life.service.query("t", "k"))
