"""Calls inside a call: a finalizer that the collector runs, or a signal handler, calls the index in the same thread.

The inner call works, or raises `NestedCall`. It never waits for the call that it interrupts, which works in any case.
"""

import gc
import itertools
import sys
import threading
from concurrent.futures import _base
from pathlib import Path

import pytest

import tiered_index
from tests.support.batches import batch
from tests.support.hanging import beside, stacks
from tiered_index.errors import IndexClosed, NestedCall
from tiered_index.storage.base import WrapperStorage

T = 1_700_000_000_000
PACKAGE = str(Path(tiered_index.__file__).parent)
WAITS = {threading.__file__, _base.__file__}


def put(index, number):
    index.put("t", 0, ["k", f"k{number}"], number, 1, T + number * 1000, source="s", source_position=number)


def outer_calls(index, reader):
    """Call everything that takes a lock, and check what it returns."""
    put(index, 1)
    index.put_batch(batch(3, topic="t", key="k", offset=range(2, 5), timestamp_ms=T))
    assert len(index.query("t", "k")) == 4
    index.flush()
    assert index.durable_position("s") == 1
    put(index, 5)
    index.seal()
    index.run_lifecycle()
    put(index, 6)
    assert [len(answer.items) for answer in index.query_many([("t", "k"), ("t", "k5")])] == [6, 1]
    assert index.topics() and index.files() and index.health()["problems"] == []
    reader.refresh()
    # an inner call may have published the rest
    assert len(reader.query("t", "k")) in (5, 6)


class Inner:
    """Calls of others, one after the other. `seen` has what they did."""

    def __init__(self, index, reader):
        self.calls = [
            lambda: index.query("t", "other"),
            lambda: reader.query("t", "other"),
            lambda: index.put("other", 0, "k", 1, 1, T),
            lambda: index.put("other", 0, ["k"], 2, 1, T, source="o", source_position=2),
            lambda: index.put_batch(batch(1, topic="other", key="k", timestamp_ms=T)),
            index.flush,
            index.health,
            index.run_lifecycle,
            reader.refresh,
        ]
        self.seen, self.unexpected, self.count, self.is_over = set(), [], 0, False

    def __call__(self):
        number = self.count % len(self.calls)
        self.count += 1
        try:
            self.calls[number]()
            self.seen.add((number, "worked"))
        except NestedCall:
            self.seen.add((number, "refused"))
        except BaseException as error:  # noqa: BLE001 - the test shows it
            self.unexpected.append((number, repr(error)))

    def check(self):
        assert not self.unexpected
        numbers = set(range(len(self.calls)))
        assert {number for number, result in self.seen if result == "worked"} == numbers
        assert any(result == "refused" for _, result in self.seen)


class Finalized:
    """A cycle whose finalizer makes a call, and the next such cycle."""

    def __init__(self, inner):
        self.inner, self.itself = inner, self

    def __del__(self):
        if not self.inner.is_over:
            self.inner()
            Finalized(self.inner)


@pytest.fixture
def inner(open_index, storage, clock):
    index = open_index()
    index.flush()
    index.run_lifecycle()
    with tiered_index.IndexReader.open(storage_backend=storage, clock=clock, query_threads=2) as reader:
        yield Inner(index, reader), index, reader


def run_beside(act):
    """Run it in a thread, so that a call that hangs fails the test."""
    call = beside(act)
    assert call.ended(120), f"a call hangs: {stacks()}"
    if call.error is not None:
        raise call.error


def test_finalizers_call_the_index_at_each_collection(inner):
    inner, index, reader = inner
    thresholds = gc.get_threshold()
    # so that a collection looks only at what is made from now on
    gc.freeze()

    def act():
        gc.set_threshold(1, 1, 1)
        try:
            Finalized(inner)
            outer_calls(index, reader)
        finally:
            inner.is_over = True
            gc.set_threshold(*thresholds)

    try:
        run_beside(act)
    finally:
        gc.unfreeze()
    inner.check()


def test_handlers_call_the_index_at_each_line(inner):
    """A trace function is called where a signal handler can be, without tracing of its own calls.

    The inner call comes at each line under a lock, of waits for other threads, and at each 23rd of the others.
    """
    inner, index, reader = inner
    locks, lines = [*index._locks, *reader._locks], itertools.count()

    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) and file not in WAITS:
            return None
        if event == "line" and (next(lines) % 23 == 0 or file in WAITS or any(lock._is_owned() for lock in locks)):
            inner()
        return trace

    def act():
        sys.settrace(trace)
        try:
            outer_calls(index, reader)
        finally:
            sys.settrace(None)

    run_beside(act)
    inner.check()


def test_a_handler_that_raises_the_error_has_interrupted_the_call(open_index):
    """Its change may be half made, so the index must be closed, as after Ctrl-C."""
    index = open_index()

    def trace(frame, event, _):
        if event == "line" and frame.f_code.co_name == "append_rows" and index._buffer.lock._is_owned():
            sys.settrace(None)
            index.query("t", "k")
        return trace

    sys.settrace(trace)
    with pytest.raises(NestedCall, match="signal handler"):
        put(index, 1)
    sys.settrace(None)
    with pytest.raises(IndexClosed, match="interrupt"):
        put(index, 2)
    index.close()


class CallingStorage(WrapperStorage):
    """Calls `act` in the first request of an operation, as a finalizer that the collector runs there."""

    def __init__(self, inner, operation, act):
        super().__init__(inner)
        self.operation, self.act, self.results = operation, act, []

    def _around(self, call, act):
        if call.operation == self.operation and self.act is not None:
            inner, self.act = self.act, None
            try:
                self.results.append(inner())
            except NestedCall as refused:
                self.results.append(refused)
        return act()


def test_a_finalizer_in_the_fetch_of_a_directory_looks_up_in_the_same_file(open_index, storage, clock):
    with open_index() as index:
        put(index, 1)
        index.seal()
        index.run_lifecycle()
    calling = CallingStorage(storage, "get_range", lambda: len(reader.query("t", "k")))
    with tiered_index.IndexReader.open(storage_backend=calling, clock=clock, query_threads=2) as reader:
        run_beside(lambda: calling.results.append(len(reader.query("t", "k"))))
        assert calling.results == [1, 1]


def test_a_finalizer_in_a_read_of_the_log_does_not_wait_for_that_read(open_index, storage, clock):
    """The thread that reads the log runs it."""
    with open_index() as index:
        put(index, 1)
        index.seal()
        index.run_lifecycle()
    calling = CallingStorage(storage, "", None)
    with tiered_index.IndexReader.open(storage_backend=calling, clock=clock, refresh_interval_s=0) as reader:
        read = reader._views[0]._read_due

        def read_twice():
            # before the read takes its lock
            try:
                calling.results.append(len(reader.query("t", "k")))
            except NestedCall as refused:
                calling.results.append(type(refused))
            read()

        reader._views[0]._read_due = read_twice
        run_beside(lambda: calling.results.append(len(reader.query("t", "k"))))
        assert calling.results == [NestedCall, 1]


def test_an_archive_within_an_archive_is_refused(open_index):
    index = open_index()
    index.flush()
    index.run_lifecycle()
    refused = []

    def read(position, length):
        with pytest.raises(NestedCall) as error:
            index.archive("other", 0, 1, lambda position, length: b"x")
        refused.append(error.value)
        return b"x" * length

    run_beside(lambda: index.archive("log", 0, 100, read))
    assert refused and not index.archive("log", 0, 100, lambda position, length: b"x" * length)
