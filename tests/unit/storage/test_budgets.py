"""No call exceeds the limits of a `Usage`. A refused call is neither sent nor counted."""

import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tests.support.measuring import measured
from tiered_index.errors import BudgetExceeded, ObjectNotFound
from tiered_index.storage.base import PAGE, Call, WrapperStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage, Usage

_T = TypeVar("_T")
THREADS = 32


class Sent(WrapperStorage):
    """Count the calls that reach the backend. If `gate` is set, every call waits until it opens."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage())
        self.inner.put("a", bytes(1000))
        self.requests = 0
        self.gate: threading.Event | None = None
        self._lock = threading.Lock()

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        with self._lock:
            self.requests += call.requests
        if self.gate is not None:
            assert self.gate.wait(30)
        return act()


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def metered(sent: Sent) -> MeteredStorage:
    return MeteredStorage(sent)


def test_a_cancelled_usage_refuses_requests_whatever_its_limits(sent: Sent, metered: MeteredStorage) -> None:
    with measured(Usage()) as usage:
        metered.head("a")
        usage.cancel()
        with pytest.raises(BudgetExceeded, match="was cancelled before head of 'a'"):
            metered.head("a")
    assert (usage.requests, usage.requests_left, usage.limited, sent.requests) == (1, 0, True, 1)


def test_a_call_beyond_max_requests_is_neither_sent_nor_counted(sent: Sent, metered: MeteredStorage) -> None:
    with measured() as outer, measured(Usage(max_requests=3)) as usage, measured() as inner:
        metered.get_range("a", 0, 10)
        metered.get_range("a", 20, 10)
        with pytest.raises(BudgetExceeded, match=r"max_requests=3 .*'a' \(request 4\): raise the bound"):
            metered.delete_many(["a", *(f"b{number}" for number in range(PAGE))])
        metered.head("a")
        for refused in (lambda: metered.get("a"), lambda: list(metered.list()), lambda: metered.put("b", b"x")):
            with pytest.raises(BudgetExceeded, match="max_requests=3"):
                refused()
        assert metered.get_range("a", 0, 0) == b""  # this sends no request
    assert sent.requests == 3
    for counted in (usage, outer, inner, metered.total):
        assert counted.requests_by_kind == {"get_range": 2, "head": 1}
        assert counted.bytes_read == 20


def test_a_call_beyond_max_bytes_is_neither_sent_nor_counted(sent: Sent, metered: MeteredStorage) -> None:
    with measured(Usage(max_bytes=100)) as usage:
        metered.get_range("a", 0, 60)
        for refused in (lambda: metered.get_range("a", 0, 41), lambda: metered.get_suffix("a", 41)):
            with pytest.raises(BudgetExceeded, match=r"max_bytes=100 .*41 bytes after 60"):
                refused()
        metered.get_suffix("a", 40)
        metered.head("a")  # this reads no object
        with pytest.raises(BudgetExceeded, match="max_bytes=100"):
            metered.get_range("a", 0, 1)
    assert (sent.requests, usage.requests, usage.bytes_read) == (3, 3, 100)


def test_a_whole_object_is_counted_afterwards_and_the_next_is_refused(sent: Sent, metered: MeteredStorage) -> None:
    with measured(Usage(max_bytes=1500)) as usage:
        metered.get("a")
        metered.get("a")
        with pytest.raises(BudgetExceeded, match=r"max_bytes=1500 .*after 2000"):
            metered.get("a")
        with pytest.raises(BudgetExceeded):
            metered.head("a")
    assert (sent.requests, usage.bytes_read) == (2, 2000)
    with measured(Usage(max_bytes=1000)) as usage:
        metered.get("a")
        with pytest.raises(BudgetExceeded):  # at the limit, not over it
            metered.get("a")


def test_a_failed_call_gives_its_bytes_back_but_not_its_request(metered: MeteredStorage) -> None:
    with measured(Usage(max_requests=2, max_bytes=100)) as usage:
        with pytest.raises(ObjectNotFound):
            metered.get_range("missing", 0, 100)
        assert len(metered.get_range("a", 0, 100)) == 100
        with pytest.raises(BudgetExceeded, match="max_requests=2"):
            metered.get_range("a", 0, 0) or metered.get_range("a", 0, 1)
    assert (usage.requests, usage.bytes_read) == (2, 100)


def test_bytes_of_calls_under_way_are_held(sent: Sent, metered: MeteredStorage) -> None:
    sent.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool, measured(Usage(max_bytes=100)) as usage:
        read = pool.submit(contextvars.copy_context().run, metered.get_range, "a", 0, 90)
        while usage.requests == 0:
            assert not read.done()
        with pytest.raises(BudgetExceeded, match="after 90"):
            metered.get_range("a", 0, 11)
        assert usage.bytes_read == 0
        sent.gate.set()
        assert len(read.result()) == 90
        assert len(metered.get_range("a", 0, 10)) == 10


def test_of_several_limits_the_narrowest_holds_and_a_refusal_counts_nowhere(metered: MeteredStorage) -> None:
    wide, narrow = Usage(max_requests=10, max_bytes=500), Usage(max_requests=2)
    for scopes in ((wide, narrow), (narrow, wide)):
        with measured(scopes[0]), measured(scopes[1]):
            metered.get_range("a", 0, 10)
    with measured(wide), measured(narrow), pytest.raises(BudgetExceeded, match="max_requests=2"):
        metered.get_range("a", 0, 10)
    assert wide.requests_by_kind == narrow.requests_by_kind == {"get_range": 2}
    with measured(wide):
        metered.get_range("a", 0, 480)  # 20 + 480: the refused call holds no bytes
    with measured(narrow), pytest.raises(BudgetExceeded):
        metered.head("a")
    assert "head" not in narrow.requests_by_kind


def test_a_usage_in_scope_twice_counts_twice_and_never_passes_its_limit(sent: Sent, metered: MeteredStorage) -> None:
    usage = Usage(max_requests=3)
    with measured(usage), measured(usage):
        metered.head("a")
        with pytest.raises(BudgetExceeded):
            metered.head("a")
    assert usage.requests == 2
    assert sent.requests == 1


def test_one_limit_holds_over_several_storages() -> None:
    one, two = MeteredStorage(Sent()), MeteredStorage(Sent())
    budget = Usage(max_requests=2)
    with measured(budget):
        one.head("a")
        two.head("a")
        for storage in (one, two):
            with pytest.raises(BudgetExceeded):
                storage.head("a")
    assert (one.total.requests, two.total.requests) == (1, 1)


class Yielding(Usage):
    """Let other threads run between the admission and the count of a call, so that a step that isn't atomic fails."""

    def _admit(self, call: Call) -> None:
        super()._admit(call)
        time.sleep(0)


@pytest.mark.parametrize(
    ("limits", "admitted"), [({"max_requests": 100}, 100), ({"max_bytes": 1000}, 100), ({}, THREADS * 20)]
)
def test_many_threads_never_get_more_than_the_limit(
    sent: Sent, metered: MeteredStorage, limits: dict[str, int], admitted: int
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
    assert done == sent.requests == admitted
    for usage in (first, second, metered.total):
        assert (usage.requests, usage.bytes_read) == (admitted, admitted * 10)
