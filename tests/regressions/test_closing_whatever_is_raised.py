"""An error of a foreign type ended `close` at the step that raised it. The root's lock was held until the process
ended, so that no process could open the root again.
"""

from __future__ import annotations

import time
from threading import Event

import pytest

from tests.stress.census import census
from tests.support.disk_faults import FaultDisk
from tests.support.hanging import until
from tiered_index.errors import IndexClosed
from tiered_index.service.life.lifecycle import Progress

NOW_MS = 1_700_000_000_000


class ScantDisk(FaultDisk):
    """A disk whose syncs raise `MemoryError` while `scant`."""

    scant = False

    def sync(self, descriptor):
        if self.scant:
            raise MemoryError("no memory to sync")
        super().sync(descriptor)


def check_reopened(open_index):
    service = open_index()
    result = service.query("t", "k")
    offsets = [item.offset for item in result]
    assert result.status == "complete"
    assert offsets in ([1], [2, 1])
    service.put("t", 0, "k", 3, 1, NOW_MS)
    service.flush()
    assert [item.offset for item in service.query("t", "k")] == [3, *offsets]
    service.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("buffered", [False, True])
def test_a_flush_or_a_close_of_files_without_memory(open_index, tmp_path, background, buffered):
    disk = ScantDisk()
    service = open_index(disk=disk, background=background)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.flush()
    if buffered:
        service.put("t", 0, "k", 2, 1, NOW_MS)
    disk.scant = True
    with pytest.raises(MemoryError, match="no memory to sync"):
        service.close()
    disk.scant = False
    assert census(tmp_path).below == 0
    service.close()  # a second close does nothing
    with pytest.raises(IndexClosed):
        service.put("t", 0, "k", 9, 1, NOW_MS)
    check_reopened(open_index)


STEPS = {
    "flush": lambda service: (service._flusher, "run_once"),
    "end of flushes": lambda service: (service._flusher, "end"),
    "main files": lambda service: (service._flusher.main, "close"),
    "quarantine files": lambda service: (service._flusher.quarantine, "close"),
    "life cycle": lambda service: (service._lifecycle, "close"),
    "lease": lambda service: (service._session, "release"),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
@pytest.mark.parametrize("error", [MemoryError("none"), RuntimeError("none"), OSError(5, "none")], ids=repr)
def test_any_step_may_fail(open_index, tmp_path, monkeypatch, step, error):
    service = open_index()
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.flush()
    service.run_lifecycle()  # takes the lease
    target, name = step(service)

    def fail(*arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(target, name, fail)
        with pytest.raises(type(error)) as raised:
            service.close()
    assert raised.value is error
    assert census(tmp_path).below == 0
    check_reopened(open_index)


def test_of_several_errors_the_first_is_raised(open_index, monkeypatch):
    service = open_index()
    errors = [MemoryError("first"), RuntimeError("second")]

    def fail(number):
        raise errors[number]

    with monkeypatch.context() as patch:
        patch.setattr(service._flusher, "run_once", lambda: fail(0))
        patch.setattr(service._lifecycle, "close", lambda: fail(1))
        with pytest.raises(MemoryError, match="first"):
            service.close()
    open_index().close()


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_no_round_begins_behind_a_close(open_index, monkeypatch, caplog, end):
    """A flush that was due at that moment warned that the index was closed."""
    index = open_index(background=True, flush_interval_s=0.005)
    release = index._parts.lock.release

    def wait_and_release():
        time.sleep(0.1)
        release()

    monkeypatch.setattr(index._parts.lock, "release", wait_and_release)
    # the probe of the new storage warns of the clock of the tests
    caplog.clear()
    getattr(index, end)()
    assert not caplog.records


def test_a_close_flushes_before_it_waits_for_a_round(open_index, monkeypatch, beside):
    """A process that was killed during that wait lost the entries of its write buffer."""
    index, waits, ends = open_index(), Event(), Event()
    monkeypatch.setattr(index._lifecycle._pending, "begin_clocks", lambda files: (waits.set(), ends.wait(60)))
    running = beside(index.run_lifecycle)
    assert waits.wait(60)
    index.put("t", 0, "k", 1, 1, NOW_MS, "s", 1)
    closing = beside(index.close)
    try:
        until(lambda: index.durable_position("s") == 1, within_s=5)
        assert not closing.ended(0)
    finally:
        ends.set()
    assert running() == Progress() and closing() is None
