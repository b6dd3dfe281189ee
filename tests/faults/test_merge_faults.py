"""The storage fails at every call of a merge, before or after the call acts, once or permanently.

The index then has the state before the merge or the one after it.
"""

from collections.abc import Callable
from typing import Literal

import pytest

from tests.support.cold_index import Recorder
from tests.support.log_records import open_log
from tests.support.merging import BASE_MS, DAY_MS, HOUR_MS, Merging
from tests.support.storage_faults import FaultStorage
from tiered_index.base.clock import ManualClock
from tiered_index.errors import CorruptFile, ObjectNotFound, StorageUnavailable
from tiered_index.service.jobs.merge_run import merge
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.storage.memory import MemoryStorage

WRITING = ("put", "put_if_absent", "write", "head", "delete_many")
READING = ("get", "get_range")
SLOW = pytest.mark.slow
QUESTIONS = [("t", "hot"), ("t", "k1")]
When = Literal["before", "after"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Merging:
    """An index of two days in several files, whose writer is closed."""
    clock = ManualClock(BASE_MS)
    life = Merging(tmp_path_factory.mktemp("source"), MemoryStorage(clock=clock), clock=clock)
    for day in range(2):
        for hour in (1, 20):
            start = BASE_MS + day * DAY_MS + hour * HOUR_MS
            steps = range(40 if day else 3)
            life.put([(start + step * 1000 * 60, key) for step in steps for key in ("hot", f"k{step % 3}")])
            life.publish()
    life.later()
    life.index.close()
    return life


def merge_through(life: Merging, fault: Callable[[FaultStorage], None] = lambda _: None) -> FaultStorage:
    """Merge through a storage that gets `fault` once the log is open."""
    faulty = FaultStorage(life.storage)
    log = open_log(faulty, life.clock)
    fault(faulty)
    merge(faulty, log, life.clock, life.options(), threads=1)
    return faulty


def reads_of_tasks(life: Merging) -> int:
    """Return the number of range reads before the last record."""
    recorder = Recorder(life.storage)
    merge(recorder, open_log(recorder, life.clock), life.clock, life.options(), threads=1)
    last = max(at for at, operation in enumerate(recorder.operations) if operation == "put_if_absent")
    return recorder.operations[:last].count("get_range")


def sweep_and_check(life: Merging) -> None:
    """Sweep, then check: exactly the objects that the log names exist, and every answer is right."""
    life.later(3)
    delete_orphans(life.storage, find_orphans(life.storage, life.log()))
    state = life.state
    assert {info.name for info in life.storage.list("data/")} == set(state.objects)
    assert sum(stored.count for stored in state.objects.values()) == life.messages
    life.check(questions=QUESTIONS)


def test_an_object_that_is_gone_before_its_record_is_not_published(make_life: Callable[[], Merging]) -> None:
    life = make_life()
    before = life.log().state
    with pytest.raises(ObjectNotFound):
        merge_through(life, lambda faulty: faulty.fail("head", error=ObjectNotFound))
    assert life.log().state == before
    sweep_and_check(life)


@pytest.mark.parametrize(
    ("when", "lasting"),
    [
        pytest.param(when, lasting, id=f"{when}-{'for good' if lasting else 'once'}", marks=marks)
        # short runs: the response of one call is lost, or all calls from one on fail; long runs: the others, too
        for when, lasting, marks in (
            ("before", True, ()), ("after", False, ()), ("before", False, SLOW), ("after", True, SLOW)
        )
    ],
)  # fmt: skip
@pytest.mark.parametrize("operation", [*WRITING[:4], *READING])
def test_the_old_state_or_the_new_one(
    make_life: Callable[[], Merging], operation: str, when: When, lasting: bool
) -> None:
    counted = merge_through(make_life()).calls(operation)
    life = make_life()
    whole = {name: stored.count for name, stored in life.state.objects.items()}
    outcomes = set()
    for nth in sorted({1, 2, (counted + 1) // 2, counted}):
        before = life.state
        try:
            times = None if lasting else 1
            merge_through(life, lambda it, nth=nth, times=times: it.fail(operation, nth=nth, times=times, when=when))
            outcomes.add("merged")
        except StorageUnavailable:
            outcomes.add("failed")
        state = life.state
        # each of the two jobs is published as a whole or not at all
        published = state.number - before.number
        assert published in (0, 1, 2)
        old = [name for name in before.files if name in state.files]
        assert len(old) == len(before.files) - 2 * published
        assert sum(stored.count for stored in state.objects.values()) == sum(whole.values()) == life.messages
        life.check(questions=QUESTIONS[1:])
        if not state.files:
            sweep_and_check(life)
            life = make_life()
    assert "failed" in outcomes or operation in ("put", "get")
    sweep_and_check(life)
    life.merge()
    sweep_and_check(life)
    assert not life.state.files


def test_a_merge_that_fails_deletes_its_uploads(make_life: Callable[[], Merging]) -> None:
    life = make_life()
    before = {info.name for info in life.storage.list("data/")}
    nth = reads_of_tasks(make_life())
    with pytest.raises(StorageUnavailable):
        merge_through(life, lambda it: it.fail("get_range", nth=nth))
    state = life.state
    assert {info.name for info in life.storage.list("data/")} == before | set(state.objects)


def test_the_first_error_counts_not_that_of_deleting_objects(make_life: Callable[[], Merging]) -> None:
    life = make_life()

    def fail(faulty: FaultStorage) -> None:
        faulty.fail("write", nth=2, times=None, error=lambda text: StorageUnavailable("the part: " + text))
        faulty.fail("delete_many", times=None)

    with pytest.raises(StorageUnavailable, match="the part"):
        merge_through(life, fail)
    sweep_and_check(life)


@pytest.mark.parametrize("mode", ["wrong", "short", "long"])
def test_a_source_that_answers_wrongly_is_never_merged(
    make_life: Callable[[], Merging], mode: Literal["wrong", "short", "long"]
) -> None:
    """One wrong read is a bad transfer, and repeated. If all are wrong, the file is corrupt and nothing changes."""
    life = make_life()
    number = life.state.number
    with pytest.raises(CorruptFile):
        merge_through(life, lambda it: it.corrupt("get_range", mode=mode, nth=3, times=None))
    assert life.state.number == number
    merge_through(life, lambda it: it.corrupt("get_range", mode=mode, nth=3))
    sweep_and_check(life)
