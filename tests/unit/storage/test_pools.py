"""A pool starts threads without its lock, because a new thread may run a finalizer that uses the pool."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from tests.support.hanging import beside
from tiered_index.base import threads
from tiered_index.base.threads import DaemonPool, NoThread, PoolFuture, have_ended
from tiered_index.errors import NestedCall
from tiered_index.storage import obstores


@pytest.fixture
def in_new_thread(monkeypatch):
    """Return a function that makes a new thread call something before it counts as started, as the collector may."""
    before, calls = threading.Thread._set_native_id, []

    def begun(thread):
        before(thread)
        if thread.name.startswith("tiered-index") and calls:
            calls.pop()()

    monkeypatch.setattr(threading.Thread, "_set_native_id", begun)
    return calls.append


def test_a_new_thread_submits_a_call_before_it_is_started(in_new_thread):
    pool, inner = DaemonPool(2, "tiered-index-test"), []
    in_new_thread(lambda: inner.append(pool.submit(str, 1).result(60)))
    assert beside(lambda: pool.submit(str, 2).result(60))() == "2"
    assert inner == ["1"]
    pool.close()


def test_a_new_thread_lists_before_it_is_started(in_new_thread, monkeypatch):
    monkeypatch.setattr(obstores, "_loop", None)
    inner = []
    in_new_thread(lambda: inner.append(obstores._running_loop(asyncio)))
    loop = beside(lambda: obstores._running_loop(asyncio))()
    assert inner == [loop] and loop.is_running()
    loop.call_soon_threadsafe(loop.stop)


def test_calls_that_wait_for_a_thread_end_if_it_cannot_be_started(monkeypatch):
    pool, waiting = DaemonPool(1, "tiered-index-test"), []

    def fail(thread):
        # as another caller may, while this one starts the thread
        waiting.append(pool.submit(str, 1))
        raise NoThread("no thread")

    with monkeypatch.context() as patch:
        patch.setattr(threads, "start_thread", fail)
        with pytest.raises(NoThread):
            pool.submit(str, 2)
    with pytest.raises(NoThread):
        waiting[0].result(0)
    assert pool.submit(str, 3).result(60) == "3"
    pool.close()


def test_a_call_waits_for_the_other_thread_if_no_more_can_be_started(monkeypatch):
    pool, go = DaemonPool(2, "tiered-index-test"), threading.Event()
    pool.submit(go.wait, 60)

    def fail(thread):
        raise NoThread("no thread")

    with monkeypatch.context() as patch:
        patch.setattr(threads, "start_thread", fail)
        second = pool.submit(str, 2)
        pool.replace_thread(Future())
    go.set()
    assert second.result(60) == "2"
    pool.close()


def test_an_interrupt_while_a_thread_is_started_cancels_the_call(monkeypatch):
    pool = DaemonPool(1, "tiered-index-test")

    def interrupt(thread):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threads, "start_thread", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(pytest.fail, "it was cancelled")
    assert pool.submit(str, 3).result(60) == "3"
    pool.close()


class Waiting:
    """An argument whose finalizer submits a call to the pool and waits for it, as a lookup does."""

    def __init__(self, pool, ends):
        self.pool, self.ends = pool, ends

    def __del__(self):
        try:
            self.ends.append(have_ended([self.pool.submit(str, 1)], 60))
        except NestedCall as error:
            self.ends.append(error)


@pytest.mark.parametrize("most", [1, 2])
def test_a_finalizer_between_two_calls_of_a_thread_does_not_wait_for_that_thread(most):
    pool, ends, go_on = DaemonPool(most, "tiered-index-test"), [], threading.Event()
    # the thread drops the argument after the call, because `submit` has returned
    ending = pool.submit(lambda _: go_on.wait(60), Waiting(pool, ends))
    go_on.set()
    assert ending.result(60)
    # the same thread runs the next calls
    assert pool.submit(str, 2).result(60) == "2"
    assert [type(end) for end in ends] == [NestedCall]
    pool.close()


def test_a_callback_at_the_end_of_a_call_does_not_wait_for_its_thread():
    pool, ends, go_on = DaemonPool(1, "tiered-index-test"), [], threading.Event()
    ending = pool.submit(go_on.wait, 60)

    def wait_again(_):
        try:
            ends.append(have_ended([pool.submit(str, 1)], 60))
        except NestedCall as error:
            ends.append(error)

    ending.add_done_callback(wait_again)
    go_on.set()
    assert ending.result(60) and pool.submit(str, 2).result(60) == "2"
    assert [type(end) for end in ends] == [NestedCall]
    pool.close()


def test_a_thread_that_is_about_to_run_a_call_does_not_wait_for_it():
    pool, outer, ends = DaemonPool(1, "tiered-index-test"), PoolFuture(), []

    def begin():
        # as a finalizer may, before the pool's thread is in `run`
        try:
            ends.append(have_ended([outer], 60))
        except NestedCall as error:
            ends.append(error)
        outer.run(lambda: 3)

    with outer._condition:
        outer.runner = pool.submit(begin)
    assert outer.result(60) == 3
    assert [type(end) for end in ends] == [NestedCall]
    pool.close()
