"""Nobody waits for the threads of these pools. If one cannot start, only its call fails.

A close of several pools waits once.
"""

import threading

import pytest

from tests.support.thread_limit import ThreadLimit
from tiered_index.errors import IndexClosed, StorageUnavailable
from tiered_index.storage.pools import DaemonPool, PoolFuture, have_ended, start_thread

NAME = "tested-pool"


@pytest.fixture
def limit(monkeypatch):
    return ThreadLimit(monkeypatch)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def test_the_first_thread_cant_be_started(limit):
    pool = DaemonPool(2, NAME)
    done = []
    limit.refuse(NAME)
    with pytest.raises(StorageUnavailable, match="can't start new thread"):
        pool.submit(done.append, 1)
    pool.submit(done.append, 2).result(30)
    # the refused call did not run later
    assert done == [2]
    both = threading.Barrier(2)
    for future in [pool.submit(both.wait, 30) for _ in range(2)]:
        future.result(30)
    pool.close()
    assert not threads()


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


def test_a_closed_pool_says_so():
    pool = DaemonPool(1, NAME)
    pool.close()
    pool.close()
    with pytest.raises(IndexClosed, match="closed"):
        pool.submit(int)


def test_a_hanging_call_gets_one_more_thread_however_often_it_is_replaced():
    pool = DaemonPool(1, NAME)
    go_on, both = threading.Event(), threading.Barrier(2)
    hanging = pool.submit(go_on.wait, 30)
    for _ in range(3):
        pool.replace_thread(hanging)
    # the barrier would let two further threads pass
    waiting = [pool.submit(both.wait, 0.2) for _ in range(2)]
    assert all(isinstance(future.exception(30), threading.BrokenBarrierError) for future in waiting)
    go_on.set()
    assert hanging.result(30)
    pool.close()


def test_a_wait_for_results_ends_with_the_last_or_at_its_bound():
    ended, failed, cancelled, waits = (PoolFuture() for _ in range(4))
    ended.set_result(1)
    failed.set_exception(ValueError())
    cancelled.cancel()
    assert have_ended([ended, failed, cancelled], None)
    assert not have_ended([ended, waits], 0) and not have_ended([waits], -1)


def test_a_refused_start_in_a_handler_is_not_what_it_handles(limit):
    limit.refuse(NAME)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(StorageUnavailable, match="can't start new thread"):
            start_thread(threading.Thread(name=NAME))
