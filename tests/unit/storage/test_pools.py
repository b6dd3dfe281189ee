"""A pool starts threads without its lock, because a new thread may run a finalizer that uses the pool."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from tests.support.hanging import beside
from tiered_index.base import threads
from tiered_index.base.threads import DaemonPool, NoThread
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
