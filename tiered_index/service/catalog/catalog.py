"""The catalog: which file handles lookups see, and when replaced ones are disposed of.

A change of state inserts the successor before it removes the predecessor, so a lookup meets at least one of them. What
a removed handle needed is disposed of after every lookup that began before; a lookup announces itself by one dictionary
entry. Threads: `reading` and `overlapping` from any thread without a lock; changes under an internal lock.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tiered_index.format.hashing import HashRule
from tiered_index.format.metadata import NamedStats
from tiered_index.service.answers.batch import LookupBatch, Matches
from tiered_index.service.answers.rows import Array, PreparedLookup
from tiered_index.service.catalog.skiplist import Node, TimeRangeSkipList
from tiered_index.service.threads import synchronized
from tiered_index.types import Freshness

V = TypeVar("V")
# seconds
_EVER = 1 << 62


def unmap(mapping: mmap.mmap) -> None:
    """Close a mapping; one that an array still is over ends with its last array."""
    with contextlib.suppress(BufferError):
        mapping.close()


class Handle(Protocol):
    """A file as lookups see it. Seconds are inclusive; `second_max` may grow while the file is unsealed. `is_local`: a
    search needs no request; `asks_storage`: it may make some, where the local copy is damaged.
    """

    @property
    def file_id(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def second_min(self) -> int: ...
    @property
    def second_max(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def asks_storage(self) -> bool: ...
    @property
    def lane(self) -> str: ...
    @property
    def source(self) -> str | None: ...
    @property
    def known_topics(self) -> Collection[str] | None:
        """The names of the file's topics, or of some of them; None where a request would be needed."""

    @property
    def hash(self) -> HashRule:
        """How its entries' keys are hashed: lookups are asked `under` it."""

    def excludes(self, lookup: PreparedLookup) -> str | None:
        """Return why a search would find nothing (``filter``, ``topic``), as far as known for no request, or None."""

    def excludes_all(self, batch: LookupBatch) -> str | None:
        """Do as `excludes` for all lookups of a batch."""

    def search(self, lookup: PreparedLookup) -> Array:
        """Return the rows that answer `lookup`, the first `max_count` + 1 at least, unordered; raises typed errors."""

    def search_many(self, batch: LookupBatch) -> Matches:
        """Return the rows that answer each lookup of a batch, unordered; errors as `search`."""

    def topic_stats(self) -> NamedStats:
        """Return what the file holds of each topic; errors as `search`."""

    def let_go(self) -> None:
        """Close what is mapped: nobody searches it any more. Idempotent."""


@dataclass(slots=True)
class FileLabel:
    """The description of a file in answers, which outlive the file's mapping."""

    file_id: str
    place: str
    source: str | None
    second_min: int
    second_max: int


def label_of(handle: Handle) -> FileLabel:
    """Return the label of a file as it is now."""
    return FileLabel(handle.file_id, handle.place, handle.source, handle.second_min, handle.second_max)


class LocalHandle:
    """Base of handles whose search makes no request."""

    is_local = True
    asks_storage = False
    source: str | None = None
    hash: HashRule = "abs"

    @property
    def known_topics(self) -> Collection[str] | None:
        """As `Handle.known_topics`."""
        return None

    def excludes(self, lookup: PreparedLookup) -> str | None:
        """Return None: search it."""
        return None

    def excludes_all(self, batch: LookupBatch) -> str | None:
        """Return None: search it."""
        return None

    def let_go(self) -> None:
        """Do nothing: nothing is mapped."""


class RootOnly(list[Handle]):
    """The files that may hold answers as far as a root knows, whose storage did not answer; `freshness` says so."""

    def __init__(self, found: Iterable[Handle], freshness: Freshness) -> None:
        super().__init__(found)
        self.freshness = freshness


class Reading:
    """One lookup's announcement (see `Catalog.reading`)."""

    __slots__ = ("_catalog",)

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __enter__(self) -> None:
        # one atomic operation each; the generation is read first, so a removal in between waits longer
        self._catalog._readers[self] = self._catalog._generation

    def __exit__(self, *exc: object) -> None:
        catalog = self._catalog
        catalog._readers.pop(self, None)
        if catalog._cleared:
            catalog._let_go()


class Catalog:
    """The handles of one index in one process."""

    def __init__(self) -> None:
        self._list: TimeRangeSkipList[Handle] = TimeRangeSkipList()
        self._nodes: dict[str, Node[Handle]] = {}
        self._lock = threading.Lock()
        self._readers: dict[Reading, int] = {}
        self._generation = 0
        self._disposals: list[tuple[int, Callable[[], None]]] = []
        self._cleared: list[Handle] = []
        # the result of `view`; None: the handles have changed since
        # the result of `view`, and how many changes had come before it
        self._view: tuple[int, Any] | None = None
        self._changes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def reading(self) -> Reading:
        """While it is entered, nothing that was in the catalog at entry is disposed of."""
        return Reading(self)

    def overlapping(self, second_min: int, second_max: int) -> list[Handle]:
        """Return the handles whose interval overlaps the inclusive range, each file once, in its later state."""
        generation = self._generation
        handles = self._overlapping(second_min, second_max)
        if generation != self._generation:
            # a table may have come where this look had been, and a file it was made of gone before the look was there
            with self._lock:
                handles = self._overlapping(second_min, second_max)
        return handles

    def _overlapping(self, second_min: int, second_max: int) -> list[Handle]:
        handles = [node.value for node in self._list.overlapping(second_min, second_max) if node.value is not None]
        # of two nodes of one file the younger is behind its predecessor
        return handles if len(handles) < 2 else list({handle.file_id: handle for handle in handles}.values())

    def view(self, make: Callable[[list[Handle]], V]) -> V:
        """Return `make(handles)`, which is called again only after the handles have changed. Any thread. It waits for
        the lock only if a change comes during the call.
        """
        view: V | None = self.present_view
        if view is not None:
            return view
        changes = self._changes
        with self.reading():
            view = make(self._overlapping(-_EVER, _EVER))
            if changes != self._changes:
                # as in `overlapping`
                with self._lock:
                    changes, view = self._changes, make(self._overlapping(-_EVER, _EVER))
        self._view = changes, view
        if changes != self._changes:
            # nobody would use it: it need not keep its files
            self._view = None
        return view

    @property
    def present_view(self) -> Any:
        """The result of `view`, unless the handles have changed since."""
        kept = self._view
        # a view may be kept just after a change made it old
        return kept[1] if kept is not None and kept[0] == self._changes else None

    @property
    def changes(self) -> int:
        """How often a handle came or went: as long as it is the same, `all` returns the same handles."""
        return self._changes

    def _changed(self) -> None:
        self._changes += 1
        self._view = None

    @synchronized
    def all(self) -> list[Handle]:
        """Return every handle, newest begin first."""
        return [node.value for node in self._nodes.values() if node.value is not None]

    def get(self, file_id: str) -> Handle | None:
        """Return the handle of a file, or None."""
        node = self._nodes.get(file_id)
        return node.value if node is not None else None

    @synchronized
    def put(self, handle: Handle, dispose: Callable[[], None] | None = None) -> None:
        """Add a handle, or replace the one of the same file; `dispose` runs when no lookup can still use that one."""
        old = self._nodes.get(handle.file_id)
        begin = handle.second_min if old is None else min(handle.second_min, old.begin)
        self._nodes[handle.file_id] = self._list.insert(begin, max(begin, handle.second_max), handle)
        if old is not None:
            self._list.remove(old)
        self._changed()
        self._retire(dispose)

    @synchronized
    def extend(self, handle: Handle) -> None:
        """Bring the interval of a handle that has grown up to date."""
        old = self._nodes[handle.file_id]
        begin, end = min(old.begin, handle.second_min), max(old.end, handle.second_max)
        if (begin, end) != (old.begin, old.end):
            self._nodes[handle.file_id] = self._list.insert(begin, end, handle)
            self._list.remove(old)

    @synchronized
    def remove(self, file_id: str, dispose: Callable[[], None] | None = None) -> None:
        """Take a file out, if it is there; `dispose` as in `put`."""
        node = self._nodes.pop(file_id, None)
        if node is None:
            return
        self._list.remove(node)
        self._changed()
        self._retire(dispose)

    @synchronized
    def clear(self, beside: Iterable[Handle] = ()) -> None:
        """Close every handle, and those `beside` the catalog, once no lookup runs; nothing is disposed of."""
        self._cleared += [*beside, *(node.value for node in self._nodes.values() if node.value is not None)]
        self._list = TimeRangeSkipList()
        self._nodes = {}
        self._changed()
        self._disposals = []
        self._let_go()

    def reclaim(self) -> int:
        """Run the disposals that wait for no lookup any more; return how many still wait."""
        with self._lock:
            oldest = min(list(self._readers.values()), default=self._generation + 1)
            ready = [dispose for generation, dispose in self._disposals if generation < oldest]
            self._disposals = [(generation, dispose) for generation, dispose in self._disposals if generation >= oldest]
            waiting = len(self._disposals)
        for dispose in ready:
            dispose()
        return waiting

    def _let_go(self) -> None:
        # who announces itself from here on finds nothing; the later of two that come at once finds less
        if not self._readers:
            cleared, self._cleared = self._cleared, []
            for handle in cleared:
                handle.let_go()

    def _retire(self, dispose: Callable[[], None] | None) -> None:
        # queries that announce themselves from here on carry the next generation
        if dispose is not None:
            self._disposals.append((self._generation, dispose))
        self._generation += 1
