"""Calls that a type checker knows: `make lint` checks this file, and no program runs it.

A type checker knows the item class that a caller gives, and needs no annotation if a caller gives none. A comment
`type: ignore` states an error that the checker must find, because it reports comments without an error.
"""

from dataclasses import dataclass
from typing import assert_type

from tiered_index import (
    AsyncIndexReader,
    IndexItem,
    IndexReader,
    IndexService,
    KeyedIndexItem,
    Lookup,
    QueryResult,
    WriterHealth,
    column,
)


@dataclass(frozen=True, kw_only=True)
class OrderItem(KeyedIndexItem):
    region: int = column(">u2")


def plain(reader: IndexReader) -> QueryResult:
    for item in reader.query("orders", "a"):
        assert_type(item, KeyedIndexItem)
        assert_type(item.fingerprint, int)
    return reader.query_many([("orders", "a"), Lookup(topic="orders", key="b")])[0]


def typed() -> None:
    with IndexReader.open("memory://x", item_type=OrderItem, query_threads=1) as orders:
        assert_type(orders.query("orders", "a")[0], OrderItem)
        assert_type([item.region for page in orders.query_all("orders", "a") for item in page[:2]], list[int])
        assert_type(orders.query_many([("orders", "a")])[0].items, tuple[OrderItem, ...])
        plain(orders)
        _ = orders.query("orders", "a")[0].colour  # type: ignore[attr-defined]
    with IndexService.open(root="r", item_type=OrderItem) as index:
        assert_type(index.health(), WriterHealth)
        assert_type(index.health()["problems"], list[str])
        assert_type(index.health()["merge"]["last_ms"], int | None)
        _ = index.health()["problem"]  # type: ignore[typeddict-item]
        assert_type(index.query("orders", "a")[0].region, int)
    assert_type(plain(IndexReader.open("memory://x"))[0], KeyedIndexItem)
    assert_type(IndexReader.open("memory://x"), IndexReader[KeyedIndexItem])
    rocketmq = IndexService.open(root="r", preset="rocketmq", item_type=IndexItem)
    _ = rocketmq.query("orders", "a")[0].fingerprint  # type: ignore[attr-defined]
    assert_type(IndexReader.open("memory://x", item_type=OrderItem), IndexReader[OrderItem])
    assert_type(IndexService.open(root="r", item_type=OrderItem), IndexService[OrderItem])
    IndexReader.open("memory://x", query_threads="many")  # type: ignore[arg-type]
    IndexService.open(root="r", slotz=1)  # type: ignore[call-arg]


async def awaited() -> None:
    async with await AsyncIndexReader.open("memory://x", item_type=OrderItem, query_threads=1) as reader:
        assert_type(reader, AsyncIndexReader[OrderItem])
        assert_type((await reader.query("orders", "a", max_requests=1))[0].region, int)
        assert_type((await reader.query_many([("orders", "a")]))[0].items, tuple[OrderItem, ...])
        assert_type([item.region async for page in reader.query_all("orders", "a") for item in page], list[int])
        await reader.query("orders", 7)  # type: ignore[arg-type]
    assert_type(await AsyncIndexReader.open("memory://x"), AsyncIndexReader[KeyedIndexItem])
