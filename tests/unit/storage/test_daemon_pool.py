"""A call that hangs gets one more thread. `service/cold` and `service/several` prove what else pools promise."""

import threading

from tiered_index.storage.pools import DaemonPool


def test_a_hanging_call_gets_one_more_thread_however_often_it_is_replaced():
    pool = DaemonPool(1, "tested-pool")
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
