"""The entries of a topic that lookups leave out, as sorted arrays. The compiled core and NumPy search the same. Pure.

A `HiddenTable` has a `HiddenOf` for each topic, made when it is first asked for. An entry is hidden

- if its second is before `begin_s`: it has expired, or the topic was erased;
- if its hash and fingerprint are those of an erased key, and its second is before that of the erasure;
- if its queue was erased, and its second is before that;
- if its offset is in a range of its queue: the range is retired, or of a new reading that is not published.

Threads: any; all but the cache of a table is immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import compiled_views
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.service.log.replaced import RangeTable

Int64 = npt.NDArray[np.int64]
ALWAYS = -(2**62)
"""A second before all seconds of entries."""
SHOWN, HIDDEN, RETIRED = range(3)
"""States of entries by their queue and offset; `RETIRED` ones are hidden, too."""
# in place of a fingerprint: any
_ANY = 1 << 32
# strangers may ask for any topic
_MOST_TOPICS = 4096


class HiddenRanges(NamedTuple):
    """The hidden offsets of a queue, and those of them that are retired."""

    queue_id: int
    hidden: RangeTable
    retired: RangeTable


class ErasedKey(NamedTuple):
    """The entries of a hash and a fingerprint (None: of any) before an epoch second."""

    key_hash: int
    fingerprint: int | None
    begin_s: int


class HiddenOf:
    """The hidden entries of one topic.

    - `begin_s`: the first epoch second that is neither expired nor erased as a whole; `ALWAYS`: all seconds count.
    - `hashes` (u32, k), `fingerprints` (u64, k) and `key_begins` (i64, k): erased keys, by hash.
    - `queues` (i32, q) and `queue_begins` (i64, q): erased queues, in order.
    - `ranges`: hidden offsets, by queue.
    - `core`: this for the compiled core; None: nothing is hidden.
    """

    __slots__ = ("begin_s", "core", "fingerprints", "hashes", "key_begins", "queue_begins", "queues", "ranges")

    def __init__(
        self,
        begin_s: int = ALWAYS,
        keys: Iterable[ErasedKey] = (),
        queues: Mapping[int, int] | None = None,
        ranges: Iterable[HiddenRanges] = (),
    ) -> None:
        erased = sorted((key_hash, _ANY if print_ is None else print_, begin) for key_hash, print_, begin in keys)
        of_queues = sorted((queues or {}).items())
        self.begin_s = begin_s
        self.hashes = np.array([key_hash for key_hash, _, _ in erased], np.uint32)
        self.fingerprints = np.array([fingerprint for _, fingerprint, _ in erased], np.uint64)
        self.key_begins = np.array([begin for _, _, begin in erased], np.int64)
        self.queues = np.array([queue_id for queue_id, _ in of_queues], np.int32)
        self.queue_begins = np.array([begin for _, begin in of_queues], np.int64)
        self.ranges = tuple(sorted(ranges, key=lambda of_queue: of_queue.queue_id))

    @property
    def by_row(self) -> bool:
        """Whether an entry may be hidden by its queue or its offset."""
        return bool(len(self.queues) or self.ranges)

    def __getattr__(self, name: str) -> Any:
        """Make `core` when it is first needed: later accesses of a lookup then take no call."""
        if name != "core":
            raise AttributeError(name)
        self.core = self._in_core()
        return self.core

    def _in_core(self) -> Any:
        if not (self.begin_s > ALWAYS or len(self.hashes) or self.by_row):
            return None
        core = compiled_views()
        assert core is not None
        ranges = [(of_queue.queue_id, *of_queue.hidden.bounds, *of_queue.retired.bounds) for of_queue in self.ranges]
        keys = self.hashes, self.fingerprints, self.key_begins
        return core.HiddenOf(self.begin_s, *keys, self.queues, self.queue_begins, ranges)

    def begin_of_queue(self, queue_id: int) -> int:
        """Return the first epoch second of a queue that is neither expired nor erased as a whole."""
        begins = self.queue_begins[self.queues == queue_id]
        return max([self.begin_s, *map(int, begins)])

    def begin_of(self, key_hash: int, fingerprint: int) -> int:
        """Return the first epoch second that counts of a key."""
        return int(self.begins_of(np.array([key_hash]), np.array([fingerprint]))[0])

    def begins_of(self, hashes: npt.NDArray[Any], fingerprints: npt.NDArray[Any] | None) -> Int64:
        """Return the first epoch second that counts (i64, n) of each key.

        `hashes` (n) are normal. `fingerprints` (n); None: the entries have none.
        """
        begins = np.full(len(hashes), self.begin_s, np.int64)
        if not len(self.hashes):
            return begins
        first = np.searchsorted(self.hashes, hashes, "left")
        # the erased keys of an equal hash, one after another; there are mostly none
        met = np.flatnonzero(np.searchsorted(self.hashes, hashes, "right") > first)
        places = first[met]
        while len(met):
            of_any = self.fingerprints[places] == _ANY
            alike = of_any if fingerprints is None else of_any | (self.fingerprints[places] == fingerprints[met])
            begins[met[alike]] = np.maximum(begins[met[alike]], self.key_begins[places[alike]])
            met, places = met[places + 1 < len(self.hashes)], places[places + 1 < len(self.hashes)] + 1
            same = self.hashes[places] == hashes[met]
            met, places = met[same], places[same]
        return begins

    def states(
        self, queues: npt.NDArray[Any], offsets: npt.NDArray[Any] | None, seconds: Int64
    ) -> npt.NDArray[np.uint8]:
        """Return the state (u8, n) of entries by their queues, offsets and epoch seconds (n each).

        `offsets` None: no offset is in a range.
        """
        states = np.zeros(len(queues), np.uint8)
        for queue_id, hidden, retired in self.ranges:
            if offsets is not None:
                mine = np.flatnonzero(queues == queue_id)
                of_mine = offsets[mine].astype(np.int64)
                states[mine[hidden.holds(of_mine)]] = HIDDEN
                states[mine[hidden.holds(of_mine) & retired.holds(of_mine)]] = RETIRED
        for queue_id, begin in zip(self.queues.tolist(), self.queue_begins.tolist(), strict=True):
            states[(queues == queue_id) & (seconds < begin)] = HIDDEN
        return states

    def hides(self, items: Mapping[str, npt.NDArray[Any]] | npt.NDArray[Any], seconds: Int64) -> npt.NDArray[np.bool_]:
        """Return which entries of the topic (bool, n) are hidden: stored items, or their columns by name."""
        hidden: npt.NDArray[np.bool_] = seconds < self.begin_s
        if len(self.hashes):
            names = items if isinstance(items, Mapping) else items.dtype.names or ()
            prints = items["fingerprint"] if "fingerprint" in names else None
            hidden |= seconds < self.begins_of(normal_hashes(items["key_hash"]), prints)
        if self.by_row:
            # messages that are not yet entries have no offset, and are in no range
            offsets = items["offset"] if self.ranges else None
            hidden |= self.states(items["queue_id"], offsets, seconds) != SHOWN
        return hidden


HIDES_NOTHING = HiddenOf()


def core_of(table: HiddenTable | None, topic: str) -> Any:
    """Return what a topic hides for the compiled core; None: nothing."""
    return None if table is None else table[topic].core


class HiddenTable(dict[str, HiddenOf]):
    """The hidden entries by topic: `table[topic]` makes what it lacks by `make`."""

    def __init__(self, make: Callable[[str], HiddenOf]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, topic: str) -> HiddenOf:
        if len(self) >= _MOST_TOPICS:
            self.clear()
        made = self._make(topic)
        self[topic] = made
        return made

    def of(self, topics: Sequence[str]) -> list[HiddenOf]:
        """Return the hidden entries of each topic."""
        return [self[topic] for topic in topics]
