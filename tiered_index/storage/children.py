"""The storages one step below a storage: what `uri/child` names, for each child that holds something.

Of object stores these are the first parts of the objects' names; a folder or a memory storage below another one is a storage of its own.
A wrapper is taken for an object store, whatever it wraps.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiered_index.storage.base import ObjectInfo, Storage
from tiered_index.storage.delegation import PAGE
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.wrappers import PrefixedStorage

__all__ = ["child_storages"]


def child_storages(storage: Storage) -> Iterator[Storage]:
    """Yield the children of `storage` in order of name. Lazy.

    Costs an object store a listing for each page of 1,000 objects, at most one a child and one for every 1,000 objects beside them.
    """
    if isinstance(storage, LocalStorage | MemoryStorage):
        yield from storage.children()
    else:
        for name in _first_parts(storage):
            yield PrefixedStorage(storage, name)


def _first_parts(storage: Storage) -> Iterator[str]:
    part: str | None = None
    listing: Iterator[ObjectInfo] | None = storage.list()
    while listing is not None:
        page, listing = enumerate(listing, 1), None
        for number, info in page:
            first, slash, _ = info.name.partition("/")
            if slash and first != part:
                part = first
                yield part
            if slash and number % PAGE == 0:
                # the next page may hold more of the same: go on behind it. "0" is the character after "/"
                listing = storage.list("", start_after=f"{part}0")
                break
