"""The storages one step below a storage: what `uri/child` names, for each child that holds something.

Of object stores these are the first parts of the objects' names; a folder or a memory storage below another one is a storage of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiered_index.storage.base import Storage
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.wrappers import PrefixedStorage

__all__ = ["child_storages"]


def child_storages(storage: Storage) -> Iterator[Storage]:
    """Yield the children of `storage` in order of name. Lazy; costs an object store one listing a child and one more."""
    if isinstance(storage, LocalStorage | MemoryStorage):
        yield from storage.children()
    else:
        for name in _first_parts(storage):
            yield PrefixedStorage(storage, name)


def _first_parts(storage: Storage) -> Iterator[str]:
    after = ""
    while (first := next(iter(storage.list("", start_after=after)), None)) is not None:
        part, slash, _ = first.name.partition("/")
        if slash:
            yield part
        # "0" is the character after "/": whatever lies below the part sorts before it
        after = f"{part}0" if slash else first.name
