"""The storage fails once or permanently, at any call of writer or job. No entry is lost or doubled."""

import contextlib

import pytest

from tests.support.disk_faults import SimulatedCrash
from tests.support.staging import Job, fill, found, holds, names_below, places, staged
from tests.support.storage_faults import FaultStorage
from tiered_index.errors import StorageMisconfigured, StorageUnavailable
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog

# the number of calls of each operation, by the prefix of their objects
WRITER_CALLS = {
    "staging/": {"put": 2, "head": 1, "list": 1, "list_uploads": 1, "delete": 2},
    "log/": {"get": 3, "put_if_absent": 1},
    "data/": {"head": 1, "get_range": 1},
}
# a call that only reads changes nothing before it fails
CHANGING = ("put", "put_if_absent", "delete")


def calls(counts):
    """Return (operation, prefix, number, when) of each failure of a call."""
    every = [(one, prefix, n + 1) for prefix, some in counts.items() for one, most in some.items() for n in range(most)]
    return [(*call, "before") for call in every] + [(*call, "after") for call in every if call[0] in CHANGING]


@pytest.mark.parametrize("error", [StorageUnavailable, SimulatedCrash], ids=["fails", "crash"])
@pytest.mark.parametrize(("operation", "prefix", "nth", "when"), calls(WRITER_CALLS))
def test_the_storage_fails_once_at_any_call_of_the_writer(
    open_spark, faulty, storage, clock, operation, prefix, nth, when, error
):
    """After any failure or crash the next rounds complete the work. No entry is lost or doubled."""
    index = open_spark(checkpoint_every=1000)
    fill(index, 1)
    fill(index, 2, 3)
    struck = []

    def strike(text):
        struck.append(text)
        return error(text)

    faulty.fail(operation, nth=nth, when=when, name_prefix=prefix, error=strike)

    def work(index):
        try:
            index.run_lifecycle()
        except StorageUnavailable:
            pass
        except SimulatedCrash:
            index.abandon()
            index = open_spark(checkpoint_every=1000)
        assert found(index) == [1, 2, 3]
        return index

    for _ in range(3):
        index = work(index)
        Job(storage, clock).run()
    assert struck
    index = work(index)
    index.run_lifecycle()
    assert places(index) == ["storage"] * 2
    assert index.log_state.positions == {"log": 3}
    holds(storage, clock, 1, 2, 3)
    assert names_below(storage, "data/") == sorted(index.log_state.objects)
    clock.advance(10 * 86_400)
    delete_orphans(storage, find_orphans(storage, StorageLog(storage, clock)))
    assert not staged(storage)


JOB_CALLS = {
    "staging/": {"list": 1, "get": 1, "get_range": 3},
    "data/": {"put": 1, "head": 2},
    "log/": {"put_if_absent": 1},
}
OF_ONE_FILE = {("get_range", "staging/"), ("put", "data/"), ("head", "data/")}


@pytest.mark.parametrize(("operation", "prefix", "nth", "when"), calls(JOB_CALLS))
def test_the_storage_fails_once_at_any_call_of_a_job(open_spark, faulty, storage, clock, operation, prefix, nth, when):
    index = open_spark()
    fill(index, 1)
    fill(index, 2, 3)
    index.run_lifecycle()
    faulty.fail(operation, nth=nth, when=when, name_prefix=prefix)
    if (operation, prefix) in OF_ONE_FILE:
        job = Job(faulty, clock)
        assert len(job.run()) == 1
        assert [r.left.startswith("StorageUnavailable: ") for r in job.results if r.failed] == [True]
    else:
        with pytest.raises(StorageUnavailable):
            Job(faulty, clock).run()
    index.run_lifecycle()
    assert found(index) == [1, 2, 3]
    Job(faulty, clock).run()
    index.run_lifecycle()
    assert places(index) == ["storage"] * 2 and found(index) == [1, 2, 3]
    holds(storage, clock, 1, 2, 3)
    clock.advance(2 * 86_400)
    delete_orphans(storage, find_orphans(storage, Job(storage, clock).log))
    assert names_below(storage, "data/") == sorted(index.log_state.objects)


def test_a_storage_that_is_down_holds_nothing_up_but_staging(open_spark, faulty, storage, clock):
    index = open_spark()
    fill(index, 1)
    faulty.fail("*", times=None)
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
    fill(index, 2)
    assert found(index) == [1, 2]
    faulty.clear()
    assert index.run_lifecycle().staged == 2


@pytest.mark.parametrize("operation", ["list", "list_uploads", "put"])
def test_the_host_compacts_in_time_if_the_storage_always_refuses_staging(open_spark, faulty, storage, clock, operation):
    """This applies to all files at once: the time of each begins at its seal, not after the files before it."""
    index = open_spark()
    for start in (0, 10, 20):
        fill(index, start, start + 1)
    faulty.fail(operation, name_prefix="staging/", times=None, error=StorageMisconfigured)
    for seconds, left in ((599, 3), (1, 3), (0, 0)):
        assert places(index).count("unsealed") == 3
        with contextlib.suppress(StorageMisconfigured):
            index.run_lifecycle()
        assert places(index).count("unsealed") == left, seconds
        clock.advance(seconds)
    assert places(index) == ["uploaded"] * 3 and index.log_state.positions == {"log": 21}
    holds(storage, clock, 0, 1, 10, 11, 20, 21)


@pytest.mark.parametrize("error", [StorageUnavailable, lambda text: OSError(28, text)], ids=["storage", "disk"])
def test_a_file_whose_task_fails_again_and_again_stops_no_other_one(open_spark, storage, clock, error):
    index = open_spark()
    for offset in (1, 2, 3):
        fill(index, offset)
    index.run_lifecycle()
    *others, last = (handle.file_id for handle in index.files())
    faulty = FaultStorage(storage)
    faulty.fail("get_range", name_prefix=f"staging/{last}", times=None, error=error)
    job = Job(faulty, clock)
    assert job.run() == set(others)
    assert [result.ticket.file_id for result in job.results if result.failed] == [last]
    assert Job(faulty, clock).run() == set()
    assert names_below(storage, "data/") == sorted(job.log.state.objects) and len(job.log.state.objects) == 2
    assert Job(storage, clock).run() == {last}
    index.run_lifecycle()
    holds(storage, clock, 1, 2, 3)
