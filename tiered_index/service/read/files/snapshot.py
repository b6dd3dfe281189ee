"""The catalog: the snapshots that lookups take, and the disposal of replaced handles.

All snapshots share one skip list. Each node has the generations of snapshots that have it, so a change makes a new
snapshot without a copy. A node leaves the list, and its resources are disposed of, after the end of every lookup that
may have taken an earlier snapshot. A lookup announces itself by a dictionary entry. Threads: any thread may call
`reading` and read a snapshot, without a lock. Changes take a lock.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from tiered_index.base.call import Call
from tiered_index.base.locks import call_lock
from tiered_index.format.keys.hashing import HashRule
from tiered_index.format.metadata import NamedStats
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.batch import LookupBatch, Matches
from tiered_index.service.read.files.skiplist import Node, TimeRangeSkipList

V = TypeVar("V")
# most changes whose files are kept
_CHANGES_KEPT = 1_000
ALWAYS = -(1 << 62), 1 << 62
"""The seconds of a range of all times."""


def unmap(mapping: mmap.mmap) -> None:
    """Close a memory map. A map that arrays still use is closed with its last array."""
    with contextlib.suppress(BufferError):
        mapping.close()


class Handle(Protocol):
    """A file for lookups. Seconds are inclusive; `second_max` may grow while the file is unsealed.

    `is_local`: a search needs no request.
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
    def fallback(self) -> Handle | None:
        """The file in the storage, to search if the local copy is damaged; None: there is no other copy."""

    @property
    def lane(self) -> str: ...
    @property
    def known_topics(self) -> Collection[str] | None:
        """The names of the file's topics, or of some of them; None if that needs a request."""

    @property
    def hash(self) -> HashRule:
        """The hash rule of its keys, for `LookupBatch.under`."""

    def excludes(self, batch: LookupBatch) -> str | None:
        """Return why a search would find nothing (``time``, ``filter``, ``topic``); None: it may find some.

        It needs no request.
        """

    def search(self, batch: LookupBatch, call: Call) -> Matches:
        """Return the rows that answer each lookup, at least the first `max_count` + 1, in any order.

        Its requests are those of `call`. Raises typed errors.
        """

    def topic_stats(self, call: Call) -> NamedStats:
        """Return the stats of each topic of the file. Raises the errors of `search`."""

    def let_go(self) -> None:
        """Close memory maps. Call it when no lookup uses the handle. Idempotent."""


@dataclass(slots=True)
class FileLabel:
    """The description of a file in answers, which is valid after the file is closed."""

    file_id: str
    place: str
    second_min: int
    second_max: int


def label_of(handle: Handle) -> FileLabel:
    """Return the present label of a file."""
    return FileLabel(handle.file_id, handle.place, handle.second_min, handle.second_max)


class LocalHandle:
    """Base class of handles whose search needs no request."""

    is_local = True
    fallback: Handle | None = None
    hash: HashRule = "abs"

    @property
    def known_topics(self) -> Collection[str] | None:
        """Return None: not known."""
        return None

    def excludes(self, batch: LookupBatch) -> str | None:
        """Return None: the file has to be searched."""
        return None

    def let_go(self) -> None:
        """Do nothing, because there is no memory map."""


class Snapshot:
    """One index at one moment: the state of its log, its files in order of time, and the compiled view over them.

    Immutable. A catalog makes one for each change, and swaps it by one assignment. A lookup takes one, once, by
    `Catalog.reading`, and works on it to the end. Only the interval of a file that accepts entries grows.

    `as_of_s` says how old it is: the time at which the read of the log began, by the clock's `monotonic_s`. A writer's
    snapshot is never old (infinity).

    `overlapping(second_min, second_max)` returns the handles whose interval overlaps the inclusive range, each file
    once. `present_view` is the result of `view`, or for a reader of a root its own view; None: it was not made yet.
    `whole` is for the owner of the catalog: its files for lookups, kept as long as the snapshot. They know it by its
    `mark`, because a cycle would keep the maps of its files open.
    """

    __slots__ = ("as_of_s", "mark", "overlapping", "present_view", "state", "whole")

    def __init__(
        self, listed: TimeRangeSkipList[Handle], generation: int, state: LogState, as_of_s: float, view: Any = None
    ) -> None:
        self.overlapping = partial(_overlapping, listed, generation)
        self.state, self.as_of_s, self.present_view = state, as_of_s, view
        self.whole: Any = None
        self.mark = object()

    def view(self, make: Callable[[list[Handle]], V]) -> V:
        """Return `make(handles)` for all handles. It is made once."""
        view: V | None = self.present_view
        if view is None:
            self.present_view = view = make(self.overlapping(*ALWAYS))
        return view

    def forget_view(self) -> None:
        """Let the next lookup make the view again."""
        self.present_view = self.whole = None


def _overlapping(listed: TimeRangeSkipList[Handle], generation: int, second_min: int, second_max: int) -> list[Handle]:
    return [
        node.value
        for node in listed.overlapping(second_min, second_max)
        if node.since <= generation < node.until and node.value is not None
    ]


class Reading:
    """The announcement of one lookup (see `Catalog.reading`)."""

    __slots__ = ("_catalog",)

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __enter__(self) -> Snapshot:
        # atomic operations; the generation is read first, so a removal in between only waits longer
        catalog = self._catalog
        catalog._readers[self] = catalog._generation
        return catalog.snapshot

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
    """The handles of one index in one process, and the present snapshot of them."""

    def __init__(self) -> None:
        self._list: TimeRangeSkipList[Handle] = TimeRangeSkipList()
        self._nodes: dict[str, Node[Handle]] = {}
        # reentrant, for `changing`
        self.lock = call_lock()
        self._readers: dict[Reading, int] = {}
        self._generation = 0
        self._is_changing = False
        # nodes that only snapshots of earlier generations have, oldest first
        self._dead: deque[Node[Handle]] = deque()
        self._disposals: list[tuple[int, Callable[[], None]]] = []
        self._cleared: list[Handle] = []
        self._changes = 0
        # the files of the last changes
        self._changed_files: deque[str] = deque(maxlen=_CHANGES_KEPT)
        self.snapshot = Snapshot(self._list, 0, LogState(), math.inf)
        """The present snapshot. Lookups take it by `reading`."""

    def reading(self) -> Reading:
        """Return a context manager that yields the present snapshot.

        Inside it, the snapshot has all its files, and no handle of it is disposed of.
        """
        return Reading(self)

    def show(self, state: LogState, as_of_s: float = math.inf) -> None:
        """Make a snapshot of the same files with another state of the log."""
        with self.lock:
            self.snapshot = Snapshot(self._list, self._generation, state, as_of_s, self.snapshot.present_view)

    @contextlib.contextmanager
    def changing(self, state: LogState, as_of_s: float) -> Iterator[None]:
        """Make one snapshot of all changes of the block and `state`. Other changes wait meanwhile, lookups don't.

        After an error the snapshot has the earlier state, and the changes so far.
        """
        with self.lock:
            before, known, self._is_changing = self._changes, self.snapshot, True
            shown = known.state, known.as_of_s
            try:
                yield
                shown = state, as_of_s
            finally:
                self._is_changing = False
                if self._changes != before:
                    self._swap(*shown)
                else:
                    self.show(*shown)

    def changed_since(self, changes: int) -> Changed:
        """Return the handles that have changed since there were `changes`; -1: all handles."""
        with self.lock:
            count = self._changes - changes
            is_all = changes < 0 or count > len(self._changed_files)
            files = self._nodes if is_all else itertools.islice(reversed(self._changed_files), count)
            return Changed(self._changes, {file_id: self.get(file_id) for file_id in files}, is_all)

    def all(self) -> list[Handle]:
        """Return all handles, newest begin first."""
        with self.lock:
            return [node.value for node in self._nodes.values() if node.value is not None]

    def get(self, file_id: str) -> Handle | None:
        """Return the handle of a file; None: there is none."""
        node = self._nodes.get(file_id)
        return node.value if node is not None else None

    def put(self, handle: Handle, dispose: Callable[[], None] | None = None) -> None:
        """Add a handle, or replace the handle of its file. `dispose` runs when no lookup can use the old handle."""
        with self.lock:
            self._insert(handle, handle.second_min, max(handle.second_min, handle.second_max))
            self._changed(handle.file_id, dispose)

    def extend(self, handle: Handle) -> None:
        """Update the interval of a handle that has grown."""
        with self.lock:
            old = self._nodes[handle.file_id]
            begin, end = min(old.begin, handle.second_min), max(old.end, handle.second_max)
            if begin == old.begin:
                if end > old.end:
                    self._list.extend(old, end)
            else:
                self._insert(handle, begin, end)
                # a view has no intervals of files that accept entries
                self._swap(view=self.snapshot.present_view)

    def remove(self, file_id: str, dispose: Callable[[], None] | None = None) -> None:
        """Remove a file, if it is there. `dispose`: see `put`."""
        with self.lock:
            node = self._nodes.pop(file_id, None)
            if node is None:
                return
            self._bury(node)
            self._changed(file_id, dispose)

    def clear(self, beside: Iterable[Handle] = ()) -> None:
        """Close all handles, and those in `beside`, when no lookup runs. Disposals are dropped."""
        with self.lock:
            self._cleared += [*beside, *(node.value for node in self._nodes.values() if node.value is not None)]
            self._list, self._nodes = TimeRangeSkipList(), {}
            self._dead.clear()
            self._changed_files.clear()
            self._disposals = []
            self._changes += 1
            self._swap()
            self._let_go()

    def reclaim(self, beat: Callable[[], object] = lambda: None) -> None:
        """Run the disposals that no lookup blocks, and call `beat` after each: they may take long. One thread."""
        with self.lock:
            oldest = self._oldest()
            self._unlink(oldest)
            ready = [disposal for disposal in self._disposals if disposal[0] <= oldest]
        for disposal in ready:
            with self.lock:
                # the others stay if `beat` raises
                self._disposals.remove(disposal)
            disposal[1]()
            beat()

    def _insert(self, handle: Handle, begin: int, end: int) -> None:
        """Add a handle, from the next generation on, in place of the one of its file."""
        old = self._nodes.get(handle.file_id)
        self._nodes[handle.file_id] = self._list.insert(begin, end, handle, self._generation + 1)
        if old is not None:
            self._bury(old)

    def _bury(self, node: Node[Handle]) -> None:
        node.until = self._generation + 1
        self._dead.append(node)

    def _changed(self, file_id: str, dispose: Callable[[], None] | None) -> None:
        self._changes += 1
        self._changed_files.append(file_id)
        if dispose is not None:
            self._disposals.append((self._generation + 1, dispose))
        if not self._is_changing:
            self._swap()

    def _swap(self, state: LogState | None = None, as_of_s: float | None = None, view: Any = None) -> None:
        """Make the snapshot of the next generation. None: as in the present one."""
        now, generation = self.snapshot, self._generation + 1
        shown = now.state if state is None else state, now.as_of_s if as_of_s is None else as_of_s
        self.snapshot = Snapshot(self._list, generation, *shown, view)
        # after the snapshot, so that no lookup announces a later generation than it takes
        self._generation = generation
        self._unlink(self._oldest())

    def _oldest(self) -> int:
        """Return the generation of the oldest snapshot that a lookup may have. Later lookups have the present one."""
        return min(list(self._readers.values()), default=self._generation)

    def _unlink(self, oldest: int) -> None:
        while self._dead and self._dead[0].until <= oldest:
            self._list.remove(self._dead.popleft())

    def _let_go(self) -> None:
        # later lookups find an empty catalog; of two threads here, the second finds nothing to close
        if not self._readers:
            cleared, self._cleared = self._cleared, []
            for handle in cleared:
                handle.let_go()
