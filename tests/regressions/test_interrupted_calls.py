"""An interrupt in a call that writes ends the use of the index, until it is closed and opened again.

Durable entries and their positions stay. Lookups may be interrupted.
"""

from __future__ import annotations

import threading

import pytest

from tests.support.batches import columns_of
from tests.support.disk_faults import FaultDisk
from tests.support.hanging import until
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.errors import IndexClosed
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000
ROWS = [("t", 0, "k", 2, 1, NOW_MS)]
WRITES = {
    "put": (lambda it: it.put("t", 0, "k", 2, 1, NOW_MS, "s", 2), lambda it: (it._buffer, "append_rows")),
    "put_batch": (lambda it: it.put_batch(columns_of(ROWS), "s", 2), lambda it: (it._buffer, "append_columns")),
    "flush": (lambda it: it.flush(), lambda it: (it._flusher.main, "reserve_next")),
    "seal": (lambda it: it.seal(), lambda it: (it._flusher.main, "roll")),
    "run_lifecycle": (lambda it: it.run_lifecycle(), lambda it: (it._lifecycle, "_sealed")),
    "archive": (lambda it: it.archive("l", 0, 1, lambda at, size: b"1"), lambda it: (it._session, "refreshed")),
    "record_ranges": (lambda it: it.record_ranges([]), lambda it: (it._session, "record_ranges")),
}


def raising(error):
    def act(*args, **named):
        raise error

    return act


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), ValueError("of a signal's handler")], ids=repr)
@pytest.mark.parametrize("call", WRITES)
def test_a_further_call_says_what_to_do(open_index, monkeypatch, call, error):
    if call == "archive" and isinstance(error, ValueError):
        error = SystemExit()
    act, place = WRITES[call]
    index = open_index()
    index.put("t", 0, "k", 1, 1, NOW_MS, "s", 1)
    index.flush()
    with monkeypatch.context() as patched:
        patched.setattr(*place(index), raising(error))
        with pytest.raises(type(error)):
            act(index)
    for further in (*(act for act, _ in WRITES.values()), lambda it: it.query("t", "k"), lambda it: it.topics()):
        with pytest.raises(IndexClosed, match=r"an interrupt ended .*: close the index and open it again"):
            further(index)
    assert any("interrupt" in problem for problem in index.health()["problems"])
    index.close()
    with pytest.raises(IndexClosed, match="the index is closed"):
        index.query("t", "k")
    index = open_index()
    assert [item.offset for item in index.query("t", "k")] == [1]
    assert index.durable_position("s") == 1


def test_errors_of_a_source_are_no_interrupts(open_index):
    index = open_index()
    with pytest.raises(OSError, match="gone"):
        index.archive("l", 0, 1, raising(OSError("gone")))
    assert index.archive("l", 0, 1, lambda at, size: b"1")


def test_lookups_are_interrupted_and_go_on(open_index, monkeypatch):
    storage = MemoryStorage()
    index = open_index(storage_backend=storage, local_keep_s=0)
    index.put("t", 0, "k", 1, 1, NOW_MS)
    index.seal()
    index.run_lifecycle()
    index.put("t", 0, "k", 2, 1, NOW_MS)
    with IndexReader.open(storage_backend=storage) as reader:
        for asked, expected in ((index, [2, 1]), (reader, [1])):
            for place in (asked._engine, "query"), (asked, "_begin"):
                with monkeypatch.context() as patched:
                    patched.setattr(*place, raising(KeyboardInterrupt()))
                    with pytest.raises(KeyboardInterrupt):
                        asked.query("t", "k", max_requests=9)
            assert [item.offset for item in asked.query("t", "k")] == expected


def test_a_close_after_an_interrupt_does_not_wait_for_a_storage(open_index, monkeypatch, beside):
    """Without an interrupt it waits, since the life cycle ends by itself."""
    storage, answers = FaultStorage(MemoryStorage()), threading.Event()
    index = open_index(storage_backend=storage, background=True, lifecycle_interval_s=0.01)
    waits = threading.Event()
    monkeypatch.setattr(index._lifecycle._pending, "begin_clocks", lambda files: (waits.set(), answers.wait(120)))
    until(waits.is_set)
    with monkeypatch.context() as patched:
        patched.setattr(index._buffer, "append_rows", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            index.put("t", 0, "k", 1, 1, NOW_MS, "s", 1)
    closing = beside(index.close)
    try:
        assert closing.ended(60) and closing.error is None
        open_index(storage_backend=storage, disk=FaultDisk()).close()
    finally:
        answers.set()


def test_an_interrupted_close_ends_the_rounds(open_index, monkeypatch):
    """They would run as long as the process, and each would fail."""
    index = open_index(background=True, lifecycle_interval_s=0.01)
    stop, raised = index._stop_threads, [KeyboardInterrupt()]
    monkeypatch.setattr(index, "_stop_threads", lambda *until: raising(raised.pop())() if raised else stop(*until))
    with pytest.raises(KeyboardInterrupt):
        index.close()
    until(lambda: not any(rounds._thread.is_alive() for rounds in (index._flushes, index._rounds)))


@pytest.mark.parametrize("step", ["run_once", "end"])
def test_an_interrupted_close_releases_the_root(open_index, monkeypatch, step):
    index = open_index()
    with monkeypatch.context() as patched:
        patched.setattr(index._flusher, step, raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            index.close()
    open_index().close()
