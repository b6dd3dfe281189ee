"""The catalog: the file handles that lookups see, and the disposal of replaced handles.

A change inserts the new handle before it removes the old one, so a lookup sees at least one of them. The resources of a
removed handle are disposed of after the end of every lookup that began before the removal. A lookup announces itself by
a dictionary entry. Threads: any thread may call `reading` and `overlapping`, without a lock. Changes take a lock.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from tiered_index.format.hashing import HashRule
from tiered_index.format.metadata import NamedStats
from tiered_index.service.answers.batch import LookupBatch, Matches
from tiered_index.service.answers.rows import Array, PreparedLookup
from tiered_index.service.catalog.skiplist import Node, TimeRangeSkipList
from tiered_index.types import Freshness

V = TypeVar("V")
# most changes whose files are kept
_CHANGES_KEPT = 1_000
# seconds of a range of all times
_EVER = 1 << 62


def unmap(mapping: mmap.mmap) -> None:
    """Close a memory map. A map that arrays still use is closed with its last array."""
    with contextlib.suppress(BufferError):
        mapping.close()


class Handle(Protocol):
    """A file for lookups. Seconds are inclusive; `second_max` may grow while the file is unsealed.

    `is_local`: a search needs no request. `asks_storage`: a search may still need requests, because the local copy may
    be damaged.
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
        """The names of the file's topics, or of some of them; None if that needs a request."""

    @property
    def hash(self) -> HashRule:
        """The hash rule of its keys, for `PreparedLookup.under`."""

    def excludes(self, lookup: PreparedLookup) -> str | None:
        """Return why a search would find nothing (``filter``, ``topic``); None: it may find some. No request."""

    def excludes_all(self, batch: LookupBatch) -> str | None:
        """Return why a search would find nothing for all lookups of a batch, as `excludes` does."""

    def search(self, lookup: PreparedLookup) -> Array:
        """Return rows that answer `lookup`, at least the first `max_count` + 1, in any order. Raises typed errors."""

    def search_many(self, batch: LookupBatch) -> Matches:
        """Return the rows that answer each lookup of a batch, in any order. Raises the errors of `search`."""

    def topic_stats(self) -> NamedStats:
        """Return the stats of each topic of the file. Raises the errors of `search`."""

    def let_go(self) -> None:
        """Close memory maps. Call it when no lookup uses the handle. Idempotent."""


@dataclass(slots=True)
class FileLabel:
    """The description of a file in answers, which is valid after the file is closed."""

    file_id: str
    place: str
    source: str | None
    second_min: int
    second_max: int


def label_of(handle: Handle) -> FileLabel:
    """Return the present label of a file."""
    return FileLabel(handle.file_id, handle.place, handle.source, handle.second_min, handle.second_max)


class LocalHandle:
    """Base class of handles whose search needs no request."""

    is_local = True
    asks_storage = False
    source: str | None = None
    hash: HashRule = "abs"

    @property
    def known_topics(self) -> Collection[str] | None:
        """Return None: not known."""
        return None

    def excludes(self, lookup: PreparedLookup) -> str | None:
        """Return None: the file has to be searched."""
        return None

    def excludes_all(self, batch: LookupBatch) -> str | None:
        """Return None: the file has to be searched."""
        return None

    def let_go(self) -> None:
        """Do nothing, because there is no memory map."""


class RootOnly(list[Handle]):
    """The files of a root whose storage is unavailable, or that lacks records of some topics. `freshness` says so."""

    def __init__(self, found: Iterable[Handle], freshness: Freshness) -> None:
        super().__init__(found)
        self.freshness = freshness


class Reading:
    """The announcement of one lookup (see `Catalog.reading`)."""

    __slots__ = ("_catalog",)

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __enter__(self) -> None:
        # two atomic operations; the generation is read first, so a removal in between only waits longer
        self._catalog._readers[self] = self._catalog._generation

    def __exit__(self, *exc: object) -> None:
        catalog = self._catalog
        catalog._readers.pop(self, None)
        if catalog._cleared:
            catalog._let_go()


class Changed(NamedTuple):
    """Handles of a catalog that have changed, by file id; None: the file is gone. `changes`: the number of changes so
    far. `is_all`: these are all handles, since it is not known any more which have changed.
    """

    changes: int
    handles: dict[str, Handle | None]
    is_all: bool


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
        # the number of changes before the call of `view`, and its result; None: the handles have changed since
        self._view: tuple[int, Any] | None = None
        self._changes = 0
        # the files of the last changes
        self._changed_files: deque[str] = deque(maxlen=_CHANGES_KEPT)

    def reading(self) -> Reading:
        """Return a context manager. Inside it, no handle that was in the catalog at entry is disposed of."""
        return Reading(self)

    def overlapping(self, second_min: int, second_max: int) -> list[Handle]:
        """Return the handles whose interval overlaps the inclusive range, each file once, in its latest state."""
        generation = self._generation
        handles = self._overlapping(second_min, second_max)
        if generation != self._generation:
            # without the lock, the search may have missed a new table, and the removed file that it was made of
            with self._lock:
                handles = self._overlapping(second_min, second_max)
        return handles

    def _overlapping(self, second_min: int, second_max: int) -> list[Handle]:
        handles = [node.value for node in self._list.overlapping(second_min, second_max) if node.value is not None]
        # of two nodes of one file, the newer one is behind the older
        return handles if len(handles) < 2 else list({handle.file_id: handle for handle in handles}.values())

    def view(self, make: Callable[[list[Handle]], V]) -> V:
        """Return `make(handles)`, cached until the handles change. Any thread.

        It waits for the lock only if a change happens during the call.
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
            # nobody would use it, and it would keep its files open
            self._view = None
        return view

    @property
    def present_view(self) -> Any:
        """The result of `view`, unless the handles have changed since."""
        kept = self._view
        # `view` may store an outdated view just after a change
        return kept[1] if kept is not None and kept[0] == self._changes else None

    def changed_since(self, changes: int) -> Changed:
        """Return the handles that have changed since there were `changes`; -1: all handles."""
        with self._lock:
            count = self._changes - changes
            is_all = changes < 0 or count > len(self._changed_files)
            files = self._nodes if is_all else itertools.islice(reversed(self._changed_files), count)
            return Changed(self._changes, {file_id: self.get(file_id) for file_id in files}, is_all)

    def _changed(self, file_id: str | None) -> None:
        self._changes += 1
        self._view = None
        if file_id is not None:
            self._changed_files.append(file_id)
        else:
            self._changed_files.clear()

    def all(self) -> list[Handle]:
        """Return all handles, newest begin first."""
        with self._lock:
            return [node.value for node in self._nodes.values() if node.value is not None]

    def get(self, file_id: str) -> Handle | None:
        """Return the handle of a file; None: there is none."""
        node = self._nodes.get(file_id)
        return node.value if node is not None else None

    def put(self, handle: Handle, dispose: Callable[[], None] | None = None) -> None:
        """Add a handle, or replace the handle of its file. `dispose` runs when no lookup can use the old handle."""
        with self._lock:
            old = self._nodes.get(handle.file_id)
            begin = handle.second_min if old is None else min(handle.second_min, old.begin)
            self._nodes[handle.file_id] = self._list.insert(begin, max(begin, handle.second_max), handle)
            if old is not None:
                self._list.remove(old)
            self._changed(handle.file_id)
            self._retire(dispose)

    def extend(self, handle: Handle) -> None:
        """Update the interval of a handle that has grown."""
        with self._lock:
            old = self._nodes[handle.file_id]
            begin, end = min(old.begin, handle.second_min), max(old.end, handle.second_max)
            if begin == old.begin:
                if end > old.end:
                    self._list.extend(old, end)
            else:
                self._nodes[handle.file_id] = self._list.insert(begin, end, handle)
                self._list.remove(old)

    def remove(self, file_id: str, dispose: Callable[[], None] | None = None) -> None:
        """Remove a file, if it is there. `dispose`: see `put`."""
        with self._lock:
            node = self._nodes.pop(file_id, None)
            if node is None:
                return
            self._list.remove(node)
            self._changed(file_id)
            self._retire(dispose)

    def clear(self, beside: Iterable[Handle] = ()) -> None:
        """Close all handles, and those in `beside`, when no lookup runs. Disposals are dropped."""
        with self._lock:
            self._cleared += [*beside, *(node.value for node in self._nodes.values() if node.value is not None)]
            self._list = TimeRangeSkipList()
            self._nodes = {}
            self._changed(None)
            self._disposals = []
            self._let_go()

    def reclaim(self) -> None:
        """Run the disposals that no lookup blocks."""
        with self._lock:
            oldest = min(list(self._readers.values()), default=self._generation + 1)
            ready = [dispose for generation, dispose in self._disposals if generation < oldest]
            self._disposals = [(generation, dispose) for generation, dispose in self._disposals if generation >= oldest]
        for dispose in ready:
            dispose()

    def _let_go(self) -> None:
        # later lookups find an empty catalog; of two threads here, the second finds nothing to close
        if not self._readers:
            cleared, self._cleared = self._cleared, []
            for handle in cleared:
                handle.let_go()

    def _retire(self, dispose: Callable[[], None] | None) -> None:
        # later lookups have the next generation
        if dispose is not None:
            self._disposals.append((self._generation, dispose))
        self._generation += 1
