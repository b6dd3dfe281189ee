"""Nobody waits for the threads of these pools. If one cannot start, only its call fails.

A close of several pools waits once.
"""

import sys
import threading
from concurrent.futures import wait

import pytest

from tests.support.hanging import until
from tests.support.thread_limit import ThreadLimit
from tiered_index.errors import IndexClosed, StorageUnavailable
from tiered_index.storage import pools as pool_module
from tiered_index.storage.pools import Condition, DaemonPool, PoolFuture, have_ended, start_thread

NAME = "tested-pool"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A closed pool waits for its threads, even on a busy machine."""
    monkeypatch.setattr(pool_module, "_CLOSE_S", 60.0)


@pytest.fixture
def limit(monkeypatch):
    return ThreadLimit(monkeypatch)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def test_the_first_thread_cant_be_started(limit):
    pool = DaemonPool(2, NAME)
    made = []
    limit.refuse(NAME)
    with pytest.raises(StorageUnavailable, match="can't start new thread"):
        pool.submit(made.append, 1)
    pool.submit(made.append, 2).result(30)
    # the refused call did not run later
    assert made == [2]
    both = threading.Barrier(2)
    for future in [pool.submit(both.wait, 30) for _ in range(2)]:
        future.result(30)
    pool.close()
    assert not threads()


def test_no_thread_is_left_behind_a_refused_call(limit):
    pool = DaemonPool(8, NAME)
    limit.refuse(NAME, 3)
    for _ in range(3):
        with pytest.raises(StorageUnavailable):
            pool.submit(int)
    for _ in range(5):
        pool.submit(int).result(30)
    # one call at a time needs one thread, however many calls were refused before
    assert len(threads()) == 1
    pool.close()


def test_a_further_thread_cant_be_started(limit):
    pool = DaemonPool(3, NAME)
    hang = threading.Event()
    first = pool.submit(hang.wait, 30)
    limit.refuse(NAME)
    second = pool.submit(threading.current_thread)
    assert len(threads()) == 1
    # the next call starts a thread, which first runs the queued call
    third = pool.submit(threading.current_thread)
    assert second.result(30) in threads() and third.result(30) in threads()
    assert not first.done()
    hang.set()
    assert first.result(30)
    pool.close()
    assert not threads()


def test_no_thread_is_begun_while_one_is_free_and_none_is_missing():
    pool = DaemonPool(8, NAME)
    for _ in range(50):
        pool.submit(int).result(30)
    assert len(threads()) == 1
    hang = threading.Event()
    hung = [pool.submit(hang.wait, 30) for _ in range(7)]
    assert pool.submit(lambda: "ran").result(30) == "ran"
    hang.set()
    wait(hung, 30)
    pool.close()


def test_a_closed_pool_says_so():
    pool = DaemonPool(1, NAME)
    pool.close()
    pool.close()
    with pytest.raises(IndexClosed, match="closed"):
        pool.submit(int)


def test_cancelled_calls_are_counted_off():
    pool = DaemonPool(2, NAME)
    hang = threading.Event()
    hung = [pool.submit(hang.wait, 30) for _ in range(2)]
    for _ in range(5):
        assert pool.submit(int).cancel()
    hang.set()
    wait(hung, 30)
    pool.submit(int).result(30)
    assert pool._work.count(0) == 0
    pool.close()


@pytest.mark.parametrize("together", [False, True])
def test_pools_closed_together_wait_once(together, monkeypatch):
    waits = JoinClock(monkeypatch)
    hang = threading.Event()
    pools = [DaemonPool(2, NAME) for _ in range(3)]
    hung = [pool.submit(hang.wait, 30) for pool in pools for _ in range(2)]
    if together:
        until_s = pool_module.close_until_s()
        for pool in pools:
            pool.close(until_s)
    else:
        for pool in pools:
            pool.close()
    assert waits.waited_s == pytest.approx(pool_module._CLOSE_S * (1 if together else 3))
    monkeypatch.undo()
    hang.set()
    wait(hung, 30)


class JoinClock:
    """Time passes only by waits for threads, which end at once."""

    def __init__(self, monkeypatch):
        self.waited_s = 0.0
        clock = self

        class Time:
            @staticmethod
            def monotonic():
                return clock.waited_s

        def join(thread, timeout=None):
            assert timeout is not None and thread.is_alive()
            clock.waited_s += timeout

        monkeypatch.setattr(pool_module, "time", Time)
        monkeypatch.setattr(threading.Thread, "join", join)


def test_a_hanging_call_gets_one_more_thread_however_often_it_is_replaced():
    pool = DaemonPool(1, NAME)
    go_on, both = threading.Event(), threading.Barrier(2)
    hanging = pool.submit(go_on.wait, 30)
    for _ in range(3):
        pool.replace_thread(hanging)
    # the barrier would let two further threads pass
    waiting = [pool.submit(both.wait, 0.2) for _ in range(2)]
    assert all(isinstance(one.exception(30), threading.BrokenBarrierError) for one in waiting)
    go_on.set()
    assert hanging.result(30)
    pool.close()


def test_calls_that_hang_one_after_the_other_get_one_more_thread_in_all():
    pool = DaemonPool(1, NAME)
    events = [threading.Event() for _ in range(5)]
    begun = [threading.Event() for _ in events]

    def hang(number):
        begun[number].set()
        assert events[number].wait(60)

    calls = [pool.submit(hang, number) for number in range(len(events))]
    for number in range(3):
        assert begun[number].wait(60)
        pool.replace_thread(calls[number])
        assert begun[number + 1].wait(60)
        events[number].set()
        until(lambda: pool._most == 1)
    assert len(threads()) == 2
    for event in events:
        event.set()
    wait(calls, 60)
    pool.close()


def test_a_condition_runs_no_python_code_between_its_lock_and_the_block():
    """A signal's handler runs between instructions of Python code, and would leave the lock held."""
    called = []
    for condition in (Condition(), PoolFuture()._condition):
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
        with condition:
            pass
        sys.setprofile(None)
    assert called == []


def test_a_wait_for_results_ends_with_the_last_or_at_its_bound():
    ended, failed, cancelled, waits = (PoolFuture() for _ in range(4))
    ended.set_result(1)
    failed.set_exception(ValueError())
    cancelled.cancel()
    assert have_ended([ended, failed, cancelled], None)
    assert not have_ended([ended, waits], 0) and not have_ended([waits], -1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("failed", [RuntimeError("release unlocked lock"), KeyError("a thread")], ids=repr)
def test_an_interrupt_of_a_start_is_raised_as_it_is(monkeypatch, failed, error):
    """Python's own start fails to clean up, and raises another error."""

    def interrupted(thread):
        try:
            raise error
        finally:
            raise failed

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(type(error)) as raised:
        start_thread(threading.Thread())
    assert raised.value is error


def test_a_refused_start_in_a_handler_is_not_what_it_handles(limit):
    limit.refuse(NAME)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(StorageUnavailable, match="can't start new thread"):
            start_thread(threading.Thread(name=NAME))
