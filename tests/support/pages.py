"""Lookups by pages, one after the other by their cursors, and lookups alone or as a batch of one."""

from collections.abc import Callable, Iterator
from typing import Any

from tiered_index import IndexItem, IndexReader, Lookup, QueryResult


def pages_of(ask: Callable[..., QueryResult], *arguments: Any, **how: Any) -> Iterator[QueryResult]:
    """Yield the pages of `ask`, a `query`, to the last one."""
    cursor = None
    while True:
        page = ask(*arguments, cursor=cursor, **how)
        yield page
        if (cursor := page.cursor) is None:
            return


def items_by_pages(ask: Callable[..., QueryResult], *arguments: Any, **how: Any) -> list[IndexItem]:
    """Return the entries of all pages, repeats included."""
    return [item for page in pages_of(ask, *arguments, **how) for item in page]


def asking(index: IndexReader, topic: str, key: str, *, many: bool) -> Callable[..., QueryResult]:
    """Return a function that looks a key up within bounds: by `query`, or by a batch of one."""
    if many:
        return lambda **bounds: index.query_many([Lookup(topic=topic, key=key)], **bounds)[0]
    return lambda **bounds: index.query(topic, key, **bounds)
