"""Calls are counted and priced. No call exceeds the limits of a `Usage` or its deadline, and silence is noticed.

A refused call is neither sent nor counted. Only the time in which requests are under way is silence.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.measuring import measured
from tests.support.storage_faults import FaultStorage
from tiered_index.base.call import Call, Cancellation, active_context, check_deadline, deadline_at, remaining_s, sending
from tiered_index.base.threads import DaemonPool
from tiered_index.errors import BudgetExceeded, ObjectExists, ObjectNotFound, StorageUnavailable
from tiered_index.storage import metering
from tiered_index.storage.base import PAGE, ObjectInfo, StorageRequest
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage, Usage
from tiered_index.storage.prices import PriceTable

THREADS = 32


@pytest.fixture
def sent() -> FaultStorage:
    """A backend with an object, which counts the calls that reach it."""
    backend = MemoryStorage()
    backend.put("a", bytes(1000))
    return FaultStorage(backend)


@pytest.fixture
def metered(sent: FaultStorage) -> MeteredStorage:
    return MeteredStorage(sent)


class Yielding(Usage):
    """Let other threads run between the admission and the count of a call, so that a step that isn't atomic fails."""

    def _admit(self, call: StorageRequest) -> None:
        super()._admit(call)
        time.sleep(0)


@pytest.mark.parametrize(
    ("limits", "admitted"), [({"max_requests": 100}, 100), ({"max_bytes": 1000}, 100), ({}, THREADS * 20)]
)
def test_many_threads_never_get_more_than_the_limit(
    sent: FaultStorage, metered: MeteredStorage, limits: dict[str, int], admitted: int
) -> None:
    barrier = threading.Barrier(THREADS)
    first, second = (
        Yielding(max_requests=limits.get("max_requests"), max_bytes=limits.get("max_bytes")) for _ in range(2)
    )

    def work(worker: int) -> int:
        done = 0
        # threads take the locks in both orders, to provoke a deadlock
        order = (first, second) if worker % 2 else (second, first)
        with measured(order[0]), measured(order[1]):
            barrier.wait(30)
            for _ in range(20):
                try:
                    metered.get_range("a", worker, 10)
                except BudgetExceeded:
                    continue
                done += 1
        return done

    with ThreadPoolExecutor(THREADS) as pool:
        done = sum(pool.map(work, range(THREADS)))
    assert done == sent.calls() == admitted
    for usage in (first, second, metered.total):
        assert (usage.requests, usage.bytes_read) == (admitted, admitted * 10)


def test_every_kind_of_call_is_counted_and_priced() -> None:
    prices = PriceTable(egress_per_gib_usd=0.09)
    metered = MeteredStorage(MemoryStorage(), prices)
    with measured(Usage(prices)) as usage:
        metered.put("a", b"12345")
        metered.put_if_absent("b", memoryview(b"123"))
        metered.get("a")
        metered.get_range("a", 1, 2)
        metered.get_range("a", 1, 0)
        metered.get_range("a", 0, 2)
        metered.get_range("a", 2, 3)
        metered.get_suffix("a", 4)
        metered.head("a")
        list(metered.list())
        with metered.open_writer("c") as writer:
            writer.write(b"1234")
            writer.write(b"567")
        metered.delete_many(["a"])
        metered.delete_many(str(n) for n in range(2500))
    once = ["put", "put_if_absent", "get", "get_suffix", "head", "list"]
    assert usage.requests_by_kind == dict.fromkeys(once, 1) | {"put": 2, "get_range": 3, "delete_many": 4}
    assert usage.requests == 14
    assert usage.bytes_written == 5 + 3 + 7
    assert usage.bytes_read == 5 + 2 + 5 + 4
    puts, gets = 4, 6
    assert usage.cost_usd == pytest.approx(puts * 0.005 / 1000 + gets * 0.0004 / 1000 + 16 / 2**30 * 0.09)
    assert metered.total.requests_by_kind == usage.requests_by_kind


class Telling(MemoryStorage):
    """Report each request of a listing, as a client of an object store does. No request follows the last page."""

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        infos = sorted(super().list(prefix, start_after=start_after), key=lambda info: info.name)
        for begin in range(0, max(1, len(infos)), PAGE):
            sending()
            yield from infos[begin : begin + PAGE]


@pytest.mark.parametrize("backend", [MemoryStorage, Telling])
@pytest.mark.parametrize(("objects", "pages"), [(0, 1), (1, 1), (999, 1), (1000, 1), (1001, 2), (2000, 2), (2001, 3)])
def test_no_request_is_counted_behind_a_listings_last_page(
    backend: type[MemoryStorage], objects: int, pages: int
) -> None:
    inner = backend()
    for n in range(objects):
        inner.put(f"{n:04d}", b"")
    metered = MeteredStorage(inner)
    with measured(Usage(max_requests=pages)) as usage:
        assert len(list(metered.list())) == objects
    assert usage.requests == pages
    with measured(Usage(max_requests=pages - 1)) as usage, pytest.raises(BudgetExceeded):
        list(metered.list())
    assert usage.requests == pages - 1


def test_a_failed_call_costs_its_request_and_no_bytes() -> None:
    metered = MeteredStorage(MemoryStorage())
    metered.inner.put("a", b"x")
    with measured() as usage:
        for error, call in (
            (ObjectNotFound, lambda: metered.get("missing")),
            (ObjectNotFound, lambda: metered.get_range("missing", 0, 10)),
            (ObjectExists, lambda: metered.put_if_absent("a", b"yy")),
        ):
            with pytest.raises(error):
                call()
    assert usage.requests_by_kind == {"get": 1, "get_range": 1, "put_if_absent": 1}
    assert (usage.bytes_asked, usage.bytes_read, usage.bytes_written) == (0, 0, 0)


PATIENCE_S = 5.0


class Slow(MemoryStorage):
    """Takes the next of `steps_s` for each read, does `meanwhile`, and notes after each whether the usage is silent."""

    def __init__(self, monkeypatch):
        super().__init__("slow")
        self.now_s, self.usage, self.silent, self.meanwhile = 100.0, Usage(), [], lambda: None
        monkeypatch.setattr(metering.time, "monotonic", lambda: self.now_s)

    def wait(self, step_s):
        self.now_s += step_s
        self.silent.append(self.usage.is_silent(PATIENCE_S))

    def get_range(self, name, start, length):
        for step_s in (PATIENCE_S - 0.1, 0.2):
            self.wait(step_s)
            self.meanwhile()
        return b""

    def get(self, name):
        if name == "away":
            raise StorageUnavailable("away")
        return super().get(name)


def test_only_a_response_ends_the_silence_of_requests(monkeypatch):
    """A missing object is a response, and an error of the connection is none. Each MiB gets a second more."""
    slow = Slow(monkeypatch)
    storage = MeteredStorage(slow)

    def silences(length=10):
        slow.silent.clear()
        storage.get_range("object", 0, length)
        return slow.silent

    def ask(name, error):
        with measured(slow.usage), pytest.raises(error):
            storage.get(name)

    with measured(slow.usage):
        assert silences() == [False, True]
        # work between two requests is not silent, and the next request gets its own patience
        slow.now_s += 100
        slow.wait(0)
        assert slow.silent[-1] is False
        assert silences() == [False, True]
        for name, error, is_silent in (("none", ObjectNotFound, False), ("away", StorageUnavailable, True)):
            slow.meanwhile = lambda name=name, error=error: ask(name, error)
            assert silences() == [False, is_silent]
        slow.meanwhile = lambda: setattr(slow, "now_s", slow.now_s + 8)
        assert list(silences(16 << 20)) == [False, False]
        assert silences(8 << 20) == [False, True]


FAR_S = 3600.0


def test_a_reached_deadline_names_the_call_that_did_not_begin_and_the_nearest_one_holds() -> None:
    past, far = time.monotonic() - 1, time.monotonic() + FAR_S
    with deadline_at(far):
        assert 0 < (remaining_s() or 0) <= FAR_S
        check_deadline("reading 'object'")
    assert remaining_s() is None
    for outer, inner in ((past, far), (far, past), (past, None)):
        with deadline_at(outer), deadline_at(inner), pytest.raises(BudgetExceeded, match=r"timeout_s .*'object'"):
            check_deadline("reading 'object'")
    with deadline_at(far):
        with deadline_at(past):
            pass
        check_deadline("reading")


def test_of_several_limits_the_narrowest_holds_and_a_refusal_counts_nowhere(sent, metered):
    wide, narrow = Usage(max_requests=10, max_bytes=500), Usage(max_requests=2)
    for first, second in ((wide, narrow), (narrow, wide)):
        with measured(first), measured(second):
            metered.get_range("a", 0, 10)
    with measured(wide), measured(narrow), pytest.raises(BudgetExceeded, match="max_requests=2"):
        metered.get_range("a", 0, 10)
    assert wide.requests_by_kind == narrow.requests_by_kind == {"get_range": 2}
    # the refused call holds no bytes
    gone = Cancellation()
    with measured(wide), active_context().cancelled_by(gone).active():
        metered.get_range("a", 0, 480)
        gone.set()
        with pytest.raises(BudgetExceeded, match="was cancelled before head of 'a'"):
            metered.head("a")
    assert (wide.requests, wide.requests_left, sent.calls()) == (3, 7, 3)


def test_a_storage_that_is_bound_to_a_call_counts_and_bounds_the_requests_of_this_call_alone(sent, metered):
    usage, outer, gone = Usage(max_requests=3), Usage(), Cancellation()
    call = Call(time.monotonic() + 60, usages=(usage,)).cancelled_by(gone)
    with measured(outer):
        metered.bound(call).get_range("a", 0, 10)
        # within a request, a backend finds the deadline
        sent.meanwhile("head", lambda: left_s.append(remaining_s()))
        left_s = []
        assert metered.bound(call).head("a").size_bytes == 1000 and 50 < left_s[0] < 60 and remaining_s() is None
    assert (usage.requests, usage.bytes_read, outer.requests, metered.total.requests) == (2, 10, 0, 2)
    with pytest.raises(BudgetExceeded, match="timeout_s was reached while calling head of a"):
        metered.bound(call.until(time.monotonic() - 1)).head("a")
    metered.bound(call).bound(call).get_range("a", 0, 1)
    with pytest.raises(BudgetExceeded, match="max_requests=3"):
        metered.bound(call).head("a")
    gone.set()
    with pytest.raises(BudgetExceeded, match="was cancelled before head of 'a'"):
        metered.bound(call).head("a")
    assert (usage.requests, metered.total.requests, sent.calls()) == (3, 3, 3)


def test_a_hanging_call_gets_one_more_thread_however_often_it_is_replaced():
    """`service/cold` and `service/several` prove what else pools promise."""
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
