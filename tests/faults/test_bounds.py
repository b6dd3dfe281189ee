"""The bounds of buffer and disk: a put over a bound is refused whole, and `health` has the reason.

Puts continue as soon as a flush or an upload has freed space.
"""

from __future__ import annotations

import pickle

import pytest

from tests.support.batches import batch
from tests.support.hanging import until
from tests.support.storage_faults import FaultStorage
from tiered_index.errors import BackPressure, DiskFull, StorageUnavailable

BUDGET = 60_000


def columns(first, count):
    return batch(count, topic="orders", key="a", offset=range(first, first + count))


@pytest.mark.parametrize("bound", [{"buffer_max_entries": 10}, {"buffer_max_bytes": 1700}])
def test_a_call_that_would_pass_the_buffers_bound_is_refused_whole(make_world, bound):
    world = make_world()
    service = world.open(**bound)
    for number in range(8):
        service.put("orders", 0, "a", number, 1, 1_700_000_000_000, source="log", source_position=number)
    state = service.health()["buffered_entries"], service.health()["buffered_bytes"]
    for call in (
        lambda: service.put("orders", 0, ["a", "b", "c"], 100, 1, 1_700_000_000_000, source="log", source_position=100),
        lambda: service.put("new topic", 0, ["a", "b", "c"], 100, 1, 1_700_000_000_000, topic_id=7),
        lambda: service.put_batch(columns(100, 100), source="log", source_position=200),
    ):
        with pytest.raises(BackPressure, match="write buffer") as refused:
            call()
        assert (refused.value.reason, type(refused.value)) == ("buffer", BackPressure)
        assert refused.value.number <= refused.value.bound
    assert (service.health()["buffered_entries"], service.health()["buffered_bytes"]) == state
    service.put("orders", 0, "a", 8, 1, 1_700_000_000_000)  # entries that still fit are accepted
    assert [item.offset for item in service.query("orders", "a", max_count=1000)] == list(range(8, -1, -1))
    assert not service.query("orders", "b")
    service.flush()
    assert service.durable_position("log") == 7
    # an empty buffer accepts a call of any size
    assert service.put_batch(columns(100, 100), source="log", source_position=200) == 100
    service.flush()
    assert service.durable_position("log") == 200
    assert len(service.query("orders", "a", max_count=1000)) == 109
    service.put("other", 0, "a", 1, 1, 1_700_000_000_000, topic_id=7)  # the refused call did not assign the id


@pytest.mark.parametrize("settings", [{"local_keep_s": 0}, {}], ids=["none kept", "kept by default"])
def test_the_disks_bound_is_kept_and_uploads_make_room(make_world, settings):
    world = make_world()
    storage = FaultStorage(world.storage)
    world.settings |= {"items": 100}
    del world.settings["local_keep_s"]
    service = world.open(storage=storage, disk_max_bytes=BUDGET, buffer_max_entries=60, **settings)
    storage.fail("*", times=None)
    with pytest.raises(DiskFull, match="write buffer") as refused:
        for _ in range(400):
            world.put(5)
            try:
                service.flush()
            except DiskFull as error:
                assert "disk_max_bytes" in str(error)
                assert (error.reason, error.bound) == ("disk", BUDGET) and error.number > BUDGET / 2
    error = refused.value
    assert (error.reason, error.bound) == ("disk", BUDGET) and error.number > BUDGET / 2
    assert "disk_max_bytes" in str(error)
    assert any("disk_max_bytes" in problem for problem in service.health()["problems"])
    assert BUDGET / 2 < service.health()["local_bytes"] <= BUDGET * 1.2  # journals grow beside their files
    with pytest.raises(StorageUnavailable):
        service.run_lifecycle()
    # known now: no upload can free space
    with pytest.raises(DiskFull, match="the storage fails: ") as refused:
        world.put(20)
    assert (refused.value.reason, refused.value.bound) == ("storage", BUDGET)
    assert vars(pickle.loads(pickle.dumps(refused.value))) == vars(refused.value)
    world.check()
    assert service.health()["buffered_entries"] > 50
    storage.clear()
    service.run_lifecycle()
    world.flush()
    for _ in range(40):  # more than the bound allows
        refused = 0
        world.put(15)
        while True:
            try:
                service.run_lifecycle()
                world.flush()
                break
            except BackPressure:
                refused += 1
                assert refused < 10, service.health()
    assert service.health()["problems"] == []
    world.check()
    assert bool(service.health()["files"].get("uploaded")) == (not settings)  # only as many files as necessary retire
    assert service.health()["local_bytes"] <= BUDGET * 1.2
    world.come_back()


def test_health_says_that_puts_are_pushed_back_until_there_is_room(make_world):
    service = make_world().open(buffer_max_entries=10)
    service.put("orders", 0, "a", 1, 1, 1_700_000_000_000)
    assert service.health()["problems"] == []
    with pytest.raises(BackPressure):
        service.put_batch(columns(2, 50))
    (problem,) = service.health()["problems"]
    assert problem.startswith("put: the write buffer holds 1 entries")
    service.flush()
    assert service.health()["problems"] == []


def test_health_reports_an_unexpected_error_of_a_worker(make_world, monkeypatch):
    """An unexpected error must be reported, too."""
    service = make_world().open(background=True, flush_interval_s=0.005)
    monkeypatch.setattr(service._flusher, "_run_round", lambda: {}["a defect"])
    service.put("orders", 0, "a", 1, 1, 1_700_000_000_000)
    until(lambda: service.health()["problems"])
    assert service.health()["problems"] == ["flusher: 'a defect'"]
    monkeypatch.undo()
    service.flush()
