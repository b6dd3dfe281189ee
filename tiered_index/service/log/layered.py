"""A mapping whose copy takes the same short time however many entries it has.

A copy shares the entries, and has its own changes to them. After many changes, a copy takes all entries.
Threads: as a dict.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import ItemsView, Iterator, MutableMapping, ValuesView
from typing import Any, TypeVar

V = TypeVar("V")
# a copy takes all entries after so many changes, or twice the square root of the number of entries if that is more
_FEWEST = 256
_NONE: Any = object()


class Layered(MutableMapping[str, V]):
    """A mapping over `entries`, which must not change any more.

    An entry whose value is replaced moves to the end. Else the order is that of a dict.
    """

    __slots__ = ("_added", "_entries", "_gone")

    def __init__(self, entries: dict[str, V]) -> None:
        self._entries = entries
        # keys of entries that were removed or replaced
        self._gone: set[str] = set()
        self._added: dict[str, V] = {}

    def copied(self) -> Layered[V]:
        """Return a copy."""
        changes = len(self._gone) + len(self._added)
        if changes > max(_FEWEST, 2 * math.isqrt(len(self._entries))):
            return Layered(dict(self.items()))
        copy = Layered(self._entries)
        copy._gone, copy._added = self._gone.copy(), self._added.copy()
        return copy

    def __getitem__(self, key: str) -> V:
        if (found := self._added.get(key, _NONE)) is not _NONE:
            return found  # type: ignore[no-any-return]
        if key in self._gone:
            raise KeyError(key)
        return self._entries[key]

    def __setitem__(self, key: str, value: V) -> None:
        if key in self._entries:
            self._gone.add(key)
        self._added.pop(key, None)
        self._added[key] = value

    def __delitem__(self, key: str) -> None:
        if self._added.pop(key, _NONE) is not _NONE:
            return
        if key in self._gone or key not in self._entries:
            raise KeyError(key)
        self._gone.add(key)

    def __contains__(self, key: object) -> bool:
        return key in self._added or (key in self._entries and key not in self._gone)

    def __len__(self) -> int:
        return len(self._entries) - len(self._gone) + len(self._added)

    def __iter__(self) -> Iterator[str]:
        gone = self._gone
        return itertools.chain(
            (key for key in self._entries if key not in gone) if gone else self._entries, self._added
        )

    def __repr__(self) -> str:
        return repr(dict(self))

    def values(self) -> _Values[V]:
        """As `dict.values`."""
        return _Values(self)

    def items(self) -> _Items[V]:
        """As `dict.items`."""
        return _Items(self)


class _Items(ItemsView[str, V]):
    _mapping: Layered[V]

    def __iter__(self) -> Iterator[tuple[str, V]]:
        return zip(self._mapping, self._mapping.values(), strict=True)


class _Values(ValuesView[V]):
    _mapping: Layered[V]

    def __iter__(self) -> Iterator[V]:
        layered = self._mapping
        entries, gone = layered._entries, layered._gone
        kept = (value for key, value in entries.items() if key not in gone) if gone else entries.values()
        return itertools.chain(kept, layered._added.values())

    def __reversed__(self) -> Iterator[V]:
        layered = self._mapping
        gone = layered._gone
        kept = (value for key, value in reversed(layered._entries.items()) if key not in gone)
        return itertools.chain(reversed(layered._added.values()), kept)


Entries = dict[str, V] | Layered[V]
"""A dict that does not change any more, or a layered mapping."""


def layered(entries: Entries[V]) -> Layered[V]:
    """Return a copy of `entries`."""
    return entries.copied() if isinstance(entries, Layered) else Layered(entries)
