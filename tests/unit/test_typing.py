"""A type checker knows the item class that a caller gives, and needs no annotation if a caller gives none."""

import subprocess
import sys
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
_PROGRAM = """
from dataclasses import dataclass
from typing import assert_type

from tiered_index import (
    AsyncIndexReader, IndexItem, IndexReader, IndexService, KeyedIndexItem, Lookup, QueryResult, column
)


@dataclass(frozen=True, kw_only=True)
class OrderItem(KeyedIndexItem):
    region: int = column(">u2")


def plain(reader: IndexReader) -> QueryResult:
    for item in reader.query("orders", "a"):
        assert_type(item, IndexItem)
    return reader.query_many([("orders", "a"), Lookup(topic="orders", key="b")])[0]


with IndexReader.open("memory://x", item_type=OrderItem, query_threads=1) as orders:
    assert_type(orders.query("orders", "a")[0], OrderItem)
    assert_type([item.region for page in orders.query_all("orders", "a") for item in page[:2]], list[int])
    assert_type(orders.query_many([("orders", "a")])[0].items, tuple[OrderItem, ...])
    plain(orders)
with IndexService.open(root="r", item_type=OrderItem) as index:
    assert_type(index.query("orders", "a")[0].region, int)
assert_type(plain(IndexReader.open("memory://x"))[0], IndexItem)
assert_type(IndexReader.open("memory://x"), IndexReader[IndexItem])
assert_type(IndexReader.open("memory://x", item_type=OrderItem), IndexReader[OrderItem])
assert_type(IndexService.open(root="r", item_type=OrderItem), IndexService[OrderItem])


async def awaited() -> None:
    async with await AsyncIndexReader.open("memory://x", item_type=OrderItem, query_threads=1) as reader:
        assert_type(reader, AsyncIndexReader[OrderItem])
        assert_type((await reader.query("orders", "a", max_requests=1))[0].region, int)
        assert_type((await reader.query_many([("orders", "a")]))[0].items, tuple[OrderItem, ...])
        assert_type([item.region async for page in reader.query_all("orders", "a") for item in page], list[int])
        await reader.query("orders", 7)
    assert_type(await AsyncIndexReader.open("memory://x"), AsyncIndexReader[IndexItem])


orders.query("orders", "a")[0].colour
IndexReader.open("memory://x", query_threads="many")
IndexService.open(root="r", slotz=1)
"""


def test_entries_of_a_subclass_and_settings_are_typed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    # use the cache that `make lint` fills
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(program)]
    checked = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    errors = [line.partition(" error: ")[2] for line in checked.stdout.splitlines() if " error: " in line]
    assert errors == [
        'Argument 2 to "query" of "AsyncIndexReader" has incompatible type "int"; expected "str"  [arg-type]',
        '"OrderItem" has no attribute "colour"  [attr-defined]',
        'Argument "query_threads" to "open" of "IndexReader" has incompatible type "str"; expected "int | None"  '
        "[arg-type]",
        'Unexpected keyword argument "slotz" for "open" of "IndexService"; did you mean "slots"?  [call-arg]',
    ], checked.stdout
