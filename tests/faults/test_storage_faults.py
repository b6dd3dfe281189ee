"""The storage fails at every call: before it acts, after it acted (the response is lost), or permanently.

No entry is lost or doubled.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index.errors import StorageError, StorageUnavailable

STEP = 4


def live(world, storage):
    """Run the scenario. A caller would see storage errors, and continue after them."""
    try:
        world.open(storage=storage)
    except StorageError:
        storage.clear()
        world.open(storage=storage)
    for step in world.script():
        with contextlib.suppress(StorageError):
            step()


def finish(world, storage, *, orphans=0):
    """Heal the storage, and check that every file is published once, and that a reader of only the storage finds
    all.
    """
    storage.clear()
    if not world.service.health()["writer_epoch"]:
        world.service.run_lifecycle()  # it opened without the storage; only the log can show that answers are complete
    world.do("check publish run_lifecycle check")
    world.check_stored()
    stored = world.service.log_state.objects.values()
    assert sum(o.count for o in stored) == len(world.model.entries)
    assert world.service.log_state.positions == {"log": world.position}
    world.service.close()
    world.do("open check tidy")
    left = [o for o in world.storage.list("data/") if o.name not in world.service.log_state.objects]
    assert len(left) <= orphans
    world.service.close()


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        # short runs strike a quarter of the calls, different ones for each kind; long runs strike each
        pytest.param(kind, first, marks=pytest.mark.slow if first != number else ())
        for number, kind in enumerate(("before", "after", "for good")) for first in range(STEP)
    ],
)  # fmt: skip
def test_a_failing_call_loses_nothing(make_world, kind, first):
    struck = 0
    for number in range(1 + first, 400, STEP):
        world = make_world()
        storage = FaultStorage(world.storage)
        times, when = None if kind == "for good" else 1, "after" if kind == "after" else "before"
        storage.fail("*", nth=number, times=times, when=when)
        try:
            live(world, storage)
            if storage.calls() < number:
                break
            struck += 1
            # after a permanent failure, one attempt may be left as an orphan
            finish(world, storage, orphans=kind == "for good")
        except BaseException as error:
            error.add_note(f"call {number} fails {kind}")
            raise
    assert struck > 10


def test_a_known_root_starts_while_the_storage_is_down(make_world):
    world = make_world()
    world.do("open 9 flush")
    world.service.close()
    storage = FaultStorage(world.storage)
    storage.fail("*", times=None)
    service = world.open(storage=storage)
    world.do("5 flush")
    with pytest.raises(StorageUnavailable):
        service.run_lifecycle()
    # the answer reports that it does not know the storage's entries
    with pytest.raises(StorageUnavailable):
        service.query("orders", "a")
    result = service.query("orders", "a", max_count=1000, allow_partial=True)
    assert result.status == "partial"
    assert [report.file for report in result.failed] == ["log"]
    assert len(result) == len(world.model.query("orders", "a", max_count=None))
    storage.clear()
    world.do("publish check")
    finish(world, storage)
