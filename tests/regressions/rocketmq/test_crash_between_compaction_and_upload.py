"""Fault: a crash between compaction and upload spoils the next file.

RocketMQ #7222.
RocketMQ: the broker stopped after a file had been compacted and before its upload had ended. After the restart, the
next file to write to was not initialised properly. A failed compaction released nothing.
Here: after a restart at any point between the two, every file continues from its state. Entries are found once, the
next file begins empty, the upload happens once, and nothing is left over.
"""

from __future__ import annotations

import pytest

from tests.support.disk_faults import SimulatedCrash
from tiered_index.errors import StorageUnavailable

T = 1_700_000_000_000
SLOW = pytest.mark.slow


def put(life, first, last):
    for number in range(first, last + 1):
        life.put("t", 0, f"k{number % 3}", number, timestamp_ms=T + number * 1000, source="log", source_position=number)


def check(life):
    for key in ("k0", "k1", "k2"):
        assert life.check("t", key)


def goes_on(life, last):
    """Check that everything is there after the restart.

    The test finds further entries with it, through every state, and all of them are published once.
    """
    check(life)
    put(life, last + 1, last + 10)
    life.service.flush()
    check(life)
    life.service.seal()
    life.bring("storage", begin="uploaded")
    check(life)
    objects = life.service.log_state.objects
    assert sum(stored.count for stored in objects.values()) == len(life.model.entries)
    assert {info.name for info in life.storage.list("data/")} == set(objects)
    assert life.service.log_state.positions == {"log": last + 10}
    life.open()
    check(life)
    assert not [path for path in life.root.glob("*/*") if path.suffix in (".index", ".journal")]


@pytest.mark.parametrize("active", [0, 4], ids=["no active file", "an active file"])
@pytest.mark.parametrize(
    "fault",
    [
        {"operation": "put", "name_prefix": "data/"},
        {"operation": "put", "name_prefix": "data/", "when": "after"},
        {"operation": "head", "name_prefix": "data/"},
        {"operation": "put_if_absent", "name_prefix": "log/"},
        {"operation": "put_if_absent", "name_prefix": "log/", "when": "after"},
    ],
    ids=str,
)
def test_the_process_dies_while_the_upload_is_stuck(make_life, fault, active):
    life = make_life(items=6)
    put(life, 1, 10)
    life.service.seal()
    put(life, 11, 10 + active)
    life.service.flush()
    life.state = "unsealed"
    life.storage.fail(times=None, **fault)
    with pytest.raises(StorageUnavailable):
        life.service.run_lifecycle()
    # a request whose response was lost has acted, and the process died before it could retry
    life.storage.clear()
    life.open()
    goes_on(life, 10 + active)


@pytest.mark.parametrize(
    ("nth", "after"),
    [
        # the state after the first call is the state before the next one; long runs test all
        pytest.param(nth, after, id=f"{nth}-{'after' if after else 'before'}", marks=marks)
        for nth, after, marks in ((1, False, ()), (2, True, ()), (1, True, SLOW), (2, False, SLOW))
    ],
)
@pytest.mark.parametrize("operation", ["create", "pwrite", "sync", "rename", "sync_folder", "unlink"])
def test_the_process_dies_at_a_write_of_the_round(make_life, operation, nth, after):
    life = make_life(items=6)
    put(life, 1, 10)
    life.service.seal()
    put(life, 11, 13)
    life.service.flush()
    life.state = "unsealed"
    life.disk.crash(operation, nth=nth, after=after)
    with pytest.raises(SimulatedCrash):
        life.service.run_lifecycle()
    life.open()
    goes_on(life, 13)


def test_a_compaction_that_failed_leaves_nothing_and_is_made_again(life):
    put(life, 1, 10)
    life.bring("unsealed")
    life.service.seal()
    for operation in ("create", "pwrite", "sync", "rename"):
        life.disk.fail(operation)
        with pytest.raises(StorageUnavailable):
            life.service.run_lifecycle()
        assert {file.place for file in life.service.files()} == {"unsealed"}
        assert not list((life.root / "compacted").iterdir())
        check(life)
    goes_on(life, 10)
