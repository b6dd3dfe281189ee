"""The storage fails or the process is killed, once, at any call on the way from pending to merged.

No entry is lost or doubled.
"""

import contextlib

import pytest

from tests.support.disk_faults import SimulatedCrash
from tests.support.pending import Job, fill, found, holds, merge_all, names_below, places
from tiered_index.errors import StorageMisconfigured, StorageUnavailable
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog

# the number of calls of each operation, by the prefix of their objects
WRITER_CALLS = {"data/": {"put": 2, "head": 2, "write": 2}, "log/": {"get": 3, "put_if_absent": 3}}
MERGE_CALLS = {"data/": {"put": 1, "head": 1, "get_range": 4}, "log/": {"get": 1, "put_if_absent": 1}}
# a call that only reads changes nothing before it fails
CHANGING = ("put", "put_if_absent", "delete")


def calls(counts):
    """Return (operation, prefix, number, when) of each failure of a call."""
    every = [(one, prefix, n + 1) for prefix, some in counts.items() for one, most in some.items() for n in range(most)]
    return [(*call, "before") for call in every] + [(*call, "after") for call in every if call[0] in CHANGING]


def ended(index, storage, clock):
    """Assert that the writer and merges end with each entry once, and that a sweep leaves what the log names."""
    for _ in range(2):
        Job(storage, clock).run()
        index.run_lifecycle()
    assert {*places(index)} == {"storage"} and found(index) == [1, 2, 3]
    assert index.log_state.positions == {"log": 3} and not index.log_state.pending
    holds(storage, clock, 1, 2, 3)
    clock.advance(10 * 86_400)
    delete_orphans(storage, find_orphans(storage, StorageLog(storage, clock)))
    assert names_below(storage, "data/") == sorted(index.log_state.objects)


@pytest.mark.parametrize("error", [StorageUnavailable, SimulatedCrash], ids=["fails", "crash"])
@pytest.mark.parametrize(("operation", "prefix", "nth", "when"), calls(WRITER_CALLS))
def test_the_storage_fails_once_at_any_call_of_the_writer(
    open_spark, faulty, storage, clock, operation, prefix, nth, when, error
):
    index = open_spark(checkpoint_every=1000)
    fill(index, 1)
    fill(index, 2, 3)
    struck = []

    def strike(text):
        struck.append(text)
        return error(text)

    faulty.fail(operation, nth=nth, when=when, name_prefix=prefix, error=strike)
    for _ in range(3):
        try:
            index.run_lifecycle()
        except StorageUnavailable:
            pass
        except SimulatedCrash:
            index.abandon()
            index = open_spark(checkpoint_every=1000)
        assert found(index) == [1, 2, 3]
        Job(storage, clock).run()
    assert struck
    ended(index, storage, clock)


@pytest.mark.parametrize("error", [StorageUnavailable, SimulatedCrash], ids=["fails", "crash"])
@pytest.mark.parametrize(("operation", "prefix", "nth", "when"), calls(MERGE_CALLS))
def test_the_storage_fails_once_at_any_call_of_a_merge(
    open_spark, faulty, storage, clock, operation, prefix, nth, when, error
):
    index = open_spark()
    fill(index, 1)
    fill(index, 2, 3)
    index.run_lifecycle()
    faulty.fail(operation, nth=nth, when=when, name_prefix=prefix, error=error)
    with pytest.raises(error):
        Job(faulty, clock).run()
    index.run_lifecycle()
    assert found(index) == [1, 2, 3]
    ended(index, storage, clock)


@pytest.mark.parametrize("loser", ["writer", "merge"])
@pytest.mark.parametrize("is_merged_again", [False, True])
def test_the_log_accepts_the_writer_or_the_merge(open_spark, faulty, storage, clock, loser, is_merged_again):
    """Both have their objects in the storage before the first record. The loser deletes its own."""
    index = open_spark(refresh_interval_s=10_000)
    fill(index, 1, 2, 3)
    index.run_lifecycle()
    clock.advance(601)
    job = Job(storage, clock).look().compact()
    won = []

    def merge_first():
        won.extend(job.publish())
        if is_merged_again:
            merge_all(storage, clock)

    if loser == "writer":
        faulty.meanwhile("put_if_absent", merge_first, name_prefix="log/")
    index.run_lifecycle()
    assert (won if loser == "writer" else not job.publish()) and found(index) == [1, 2, 3]
    assert bool(index._lifecycle.refresh().tables) == (loser == "writer")
    ended(index, storage, clock) if loser == "writer" else holds(storage, clock, 1, 2, 3)
    sent = {name for name in names_below(storage, "data/") if name not in index.log_state.objects}
    assert len(sent) == (0 if loser == "writer" else 1), "the pending object stays until the sweep"


def test_a_storage_that_is_down_holds_nothing_up_but_uploads(open_spark, faulty, storage, clock):
    index = open_spark()
    fill(index, 1)
    faulty.fail("*", times=None)
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
    fill(index, 2)
    assert found(index) == [1, 2]
    faulty.clear()
    assert index.run_lifecycle().pending == 2


def test_the_host_compacts_in_time_if_the_storage_always_refuses_pending_files(open_spark, faulty, storage, clock):
    """This applies to all files at once: the time of each begins at its seal, not after the files before it."""
    index = open_spark()
    for start in (0, 10, 20):
        fill(index, start, start + 1)
    faulty.fail("put", name_prefix="data/", times=None, error=StorageMisconfigured)
    for seconds, left in ((599, 3), (1, 3), (0, 0)):
        assert places(index).count("unsealed") == 3
        with contextlib.suppress(StorageMisconfigured):
            index.run_lifecycle()
        assert places(index).count("unsealed") == left, seconds
        clock.advance(seconds)
    faulty.clear()
    index.run_lifecycle()
    assert places(index) == ["uploaded"] * 3 and index.log_state.positions == {"log": 21}
    holds(storage, clock, 0, 1, 10, 11, 20, 21)
