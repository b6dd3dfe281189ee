"""Wrappers count, price and delay calls, or prefix names."""

import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.measuring import measured
from tiered_index.errors import BudgetExceeded, InvalidArgument, ObjectExists, ObjectNotFound
from tiered_index.service.read.budget import RequestStats
from tiered_index.storage.base import PAGE, ObjectInfo, Writer
from tiered_index.storage.context import sending
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage, Usage
from tiered_index.storage.opening import PrefixedStorage
from tiered_index.storage.prices import PriceTable


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
        metered.delete("a")
        metered.delete_many(str(n) for n in range(2500))
    once = ["put", "put_if_absent", "get", "get_suffix", "head", "list", "delete"]
    assert usage.requests_by_kind == dict.fromkeys(once, 1) | {"put": 2, "get_range": 3, "delete_many": 3}
    assert usage.requests == 14
    assert usage.bytes_written == 5 + 3 + 7
    assert usage.bytes_read == 5 + 2 + 5 + 4
    puts, gets = 4, 6
    assert usage.cost_usd == pytest.approx(puts * 0.005 / 1000 + gets * 0.0004 / 1000 + 16 / 2**30 * 0.09)
    assert metered.total.requests_by_kind == usage.requests_by_kind


def test_a_listing_costs_a_request_a_page() -> None:
    inner = MemoryStorage()
    for n in range(2500):
        inner.put(f"{n:04d}", b"")
    metered = MeteredStorage(inner)
    with measured() as usage:
        listing = metered.list()
        assert usage.requests == 0
        next(listing)
        assert usage.requests == 1
        assert sum(1 for _ in listing) == 2499
    assert usage.requests_by_kind == {"list": 3}
    assert usage.cost_usd == pytest.approx(3 * 0.005 / 1000)


def test_costs_have_no_errors_of_additions() -> None:
    prices = PriceTable()
    costs = [prices.cost_usd({"get": count}, 0) for count in range(1, 1000)]
    assert [repr(cost) for cost in costs] == [repr(count * 4 / 10**7) for count in range(1, 1000)]
    three, one = RequestStats(3, 0, costs[2]), RequestStats(1, 0, costs[0])
    assert ((three - one).cost_usd, RequestStats.of(three, one, one).cost_usd) == (8e-07, 2e-06)
    assert prices.cost_usd({"get": 1, "put": 1, "list": 1}, 0) == 1.04e-05


class Telling(MemoryStorage):
    """Report each request of a listing, as a client of an object store does. No request follows the last page."""

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        found = sorted(super().list(prefix, start_after=start_after), key=lambda info: info.name)
        for begin in range(0, max(1, len(found)), PAGE):
            sending()
            yield from found[begin : begin + PAGE]


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


def test_the_parts_of_an_upload_are_counted_if_the_backend_tells_of_them() -> None:
    class InParts(MemoryStorage):
        def open_writer(self, name: str) -> Writer:
            inner = super().open_writer(name)

            class Telling(Writer):
                def _write(self, data: memoryview) -> None:
                    sending()
                    inner.write(data)

                def _finish(self) -> None:
                    sending()
                    inner.close()

                def _drop(self) -> None:
                    inner.abort()

            return Telling(name)

    metered = MeteredStorage(InParts())
    with metered.open_writer("a") as writer:
        writer.write(b"first")
        writer.write(b"second")
    assert metered.total.requests_by_kind == {"write": 2, "put": 1}
    assert metered.total.bytes_written == 11


def test_a_failed_call_costs_its_request_and_no_bytes() -> None:
    metered = MeteredStorage(MemoryStorage())
    with measured() as usage:
        with pytest.raises(ObjectNotFound):
            metered.get("missing")
        metered.put("a", b"x")
        with pytest.raises(ObjectExists):
            metered.put_if_absent("a", b"yy")
    assert usage.requests_by_kind == {"get": 1, "put": 1, "put_if_absent": 1}
    assert (usage.bytes_read, usage.bytes_written) == (0, 1)


def test_lookups_at_the_same_time_are_measured_apart() -> None:
    metered = MeteredStorage(MemoryStorage())
    metered.put("a", bytes(1000))
    barrier = threading.Barrier(4)

    with ThreadPoolExecutor(8) as workers:

        def lookup(size: int) -> Usage:
            barrier.wait(30)
            with measured() as usage:
                tasks = [
                    workers.submit(contextvars.copy_context().run, metered.get_range, "a", start, size)
                    for start in range(50)
                ]
                metered.head("a")
                for task in tasks:
                    task.result()
            metered.get("a")  # this call is after the scope, so only the total counts it
            return usage

        with ThreadPoolExecutor(4) as lookups:
            usages = list(lookups.map(lookup, (1, 2, 3, 4)))
        workers.submit(metered.get, "a").result()
    for size, usage in zip((1, 2, 3, 4), usages, strict=True):
        assert usage.requests_by_kind == {"get_range": 50, "head": 1}
        assert usage.bytes_read == 50 * size
    assert metered.total.requests == 1 + 4 * 52 + 1


def test_scopes_nest_and_count_all_storages_once() -> None:
    one, two = MeteredStorage(MemoryStorage()), MeteredStorage(MeteredStorage(MemoryStorage()))
    with measured() as outer:
        one.put("a", b"1")
        with measured() as inner:
            one.put("a", b"22")
            two.put("a", b"333")
    one.put("a", b"4444")
    assert (outer.bytes_written, inner.bytes_written) == (6, 5)
    assert (outer.requests, inner.requests) == (3, 2)
    # a metered storage within another counts its own calls
    assert [storage.total.requests for storage in (one, two, two.inner) if isinstance(storage, MeteredStorage)] == [
        3,
        1,
        1,
    ]


def test_a_prefix_hides_everything_else() -> None:
    inner = MemoryStorage()
    inner.put("index/a", b"inner")
    inner.put("indexes", b"outside")
    prefixed = PrefixedStorage(inner, "index")
    prefixed.put("b", b"new")
    assert [info.name for info in prefixed.list()] == ["a", "b"]
    assert [info.name for info in prefixed.list(start_after="a")] == ["b"]
    assert inner.get("index/b") == b"new"
    assert prefixed.uri == inner.uri + "/index"
    for name in ("../indexes", "/a", ""):
        with pytest.raises(InvalidArgument):
            prefixed.get(name)
    with pytest.raises(ObjectNotFound) as caught:
        prefixed.get("missing")
    assert caught.value.name == "missing"
    with prefixed.open_writer("c") as writer:
        writer.write(b"streamed")
    assert inner.get("index/c") == b"streamed"
    with pytest.raises(InvalidArgument):
        prefixed.open_writer("../indexes")
