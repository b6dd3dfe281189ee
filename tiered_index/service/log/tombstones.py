"""Tombstones: the erased entries of an index, as the log states them. Pure.

A tombstone is a predicate with a bound in time, like a horizon. It hides the entries of its topic (and of its key or
queue) with second s if s * 1000 < `before_ms`. It also hides such entries that are put later. A key is represented by
its hashes, and by its fingerprint if the index has fingerprints. No tombstone of a `Tombstones` covers another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from tiered_index.base.documents import Int32, Milliseconds
from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.hashing import lookup_numbers, normal_hashes

MOST_TOMBSTONES = 4096
"""Most tombstones of one index: each checkpoint has them all."""
ALWAYS = -(2**62)
"""A second before all seconds of entries."""


class Tombstone(Struct, frozen=True):
    """The erased entries of `topic` before `before_ms` (epoch milliseconds, in whole seconds).

    - `queue_id`: only those of a queue. None: of all queues.
    - `hashes`: only those of the key with these hashes, by the rules abs and mask. Empty: of all keys.
    - `fingerprint`: that of the key. None: the index has no fingerprints.
    """

    topic: str
    before_ms: Annotated[Milliseconds, Meta(multiple_of=1000)]
    queue_id: Int32 | None = None
    hashes: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(max_length=2)] = ()
    fingerprint: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None

    def __post_init__(self) -> None:
        if self.hashes and self.queue_id is not None:
            raise ValueError("A tombstone has a key and a queue")

    @classmethod
    def of(
        cls, topic: str, before_ms: int, *, key: str | None = None, queue_id: int | None = None, keyed: bool = True
    ) -> Tombstone:
        """Return the tombstone of a topic, or of a key or a queue in it. `before_ms` is rounded up to a whole second.

        `keyed`: whether the index has fingerprints. Raises `InvalidArgument` for a key together with a queue.
        """
        before_ms = -(-before_ms // 1000) * 1000
        if key is None:
            return cls(topic, before_ms, queue_id)
        if queue_id is not None:
            raise InvalidArgument("erase a key or a queue of a topic, not both at once")
        absolute, masked, fingerprint = lookup_numbers(topic, key)
        hashes = (absolute,) if absolute == masked else (absolute, masked)
        return cls(topic, before_ms, None, hashes, fingerprint if keyed else None)

    def covers(self, other: Tombstone) -> bool:
        """Return whether this tombstone hides all entries that `other` hides."""
        return (
            self.topic == other.topic
            and self.before_ms >= other.before_ms
            and self.queue_id in (None, other.queue_id)
            and (not self.hashes or (self.hashes == other.hashes and self.fingerprint in (None, other.fingerprint)))
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        known = {"queue_id": self.queue_id, "fingerprint": self.fingerprint}
        return {
            "topic": self.topic,
            "before_ms": self.before_ms,
            **({"hashes": list(self.hashes)} if self.hashes else {}),
            **{name: value for name, value in known.items() if value is not None},
        }


@dataclass(frozen=True)
class Tombstones(Sequence[Tombstone]):
    """The tombstones of an index at a position of its log."""

    stones: tuple[Tombstone, ...] = ()

    def __len__(self) -> int:
        return len(self.stones)

    def __getitem__(self, index: Any) -> Any:
        return self.stones[index]

    @cached_property
    def topics(self) -> Mapping[str, TopicTombstones]:
        """The tombstones of each topic, by name."""
        by_name: dict[str, TopicTombstones] = {}
        for stone in self.stones:
            by_name.setdefault(stone.topic, TopicTombstones()).add(stone)
        return by_name

    @cached_property
    def hashes(self) -> npt.NDArray[np.int32]:
        """The hashes (i32, n) of all erased keys, in order."""
        return np.unique(np.array([h for stone in self.stones for h in stone.hashes], np.int32))

    def joined(self, others: Iterable[Tombstone]) -> Tombstones:
        """Return the tombstones of both, without those that another one covers."""
        stones = list(self.stones)
        for stone in others:
            # only tombstones of the same topic can cover each other
            mine = [known for known in stones if known.topic == stone.topic]
            if not any(known.covers(stone) for known in mine):
                stones = [known for known in stones if not stone.covers(known)]
                stones.append(stone)
        return Tombstones(tuple(stones)) if tuple(stones) != self.stones else self

    def hides(
        self,
        items: Mapping[str, npt.NDArray[Any]] | npt.NDArray[Any],
        seconds: npt.NDArray[Any],
        topics: Mapping[int, str],
    ) -> npt.NDArray[np.bool_]:
        """Return which entries (bool, n) are hidden.

        `items` are stored items or their columns by name, `seconds` (n) their epoch seconds, `topics` the name of each
        topic id.
        """
        hidden = np.zeros(len(seconds), np.bool_)
        ids = items["topic_id"]
        likely = np.flatnonzero(np.isin(normal_hashes(items["key_hash"]), self.hashes)) if len(self.hashes) else ()
        if len(likely):
            self._hide_keys(hidden, likely, items, seconds, topics)
        for topic_id in np.unique(ids).tolist():
            of_topic = self.topics.get(topics.get(topic_id, ""))
            if of_topic is None or not (of_topic.queues or of_topic.begin > ALWAYS):
                continue
            mine = ids == topic_id
            hidden |= mine & (seconds < of_topic.begin)
            for queue_id, begin in of_topic.queues.items():
                hidden |= mine & (items["queue_id"] == queue_id) & (seconds < begin)
        return hidden

    def _hide_keys(
        self, hidden: npt.NDArray[np.bool_], likely: Any, items: Any, seconds: Any, topics: Mapping[int, str]
    ) -> None:
        """Set `hidden` for the entries at the places `likely` that a tombstone of a key hides."""
        hashes, ids, times = normal_hashes(items["key_hash"][likely]), items["topic_id"][likely], seconds[likely]
        met = set(np.unique(hashes).tolist())
        for stone in [stone for stone in self.stones if not met.isdisjoint(stone.hashes)]:
            named = [topic_id for topic_id in np.unique(ids).tolist() if topics.get(topic_id) == stone.topic]
            is_hidden = np.isin(hashes, stone.hashes) & np.isin(ids, named) & (times < stone.before_ms // 1000)
            if stone.fingerprint is not None:
                is_hidden &= items["fingerprint"][likely] == stone.fingerprint
            hidden[likely[is_hidden]] = True


class TopicTombstones:
    """The tombstones of one topic.

    Hidden are entries before the epoch second `begin`. `queues` and `keys` (by hash) have a second of their own.
    """

    def __init__(self) -> None:
        self.begin = ALWAYS
        self.queues: dict[int, int] = {}
        self.keys: dict[int, list[tuple[int | None, int]]] = {}

    def add(self, stone: Tombstone) -> None:
        """Add a tombstone of the topic."""
        second = stone.before_ms // 1000
        for key_hash in stone.hashes:
            self.keys.setdefault(key_hash, []).append((stone.fingerprint, second))
        if stone.queue_id is not None:
            self.queues[stone.queue_id] = max(second, self.queues.get(stone.queue_id, ALWAYS))
        elif not stone.hashes:
            self.begin = max(self.begin, second)

    def begin_of(self, key_hash: int, fingerprint: int) -> int:
        """Return the epoch second before which the entries of a key are hidden."""
        of_key = self.keys.get(key_hash)
        if of_key is None:
            return self.begin
        return max([self.begin, *(second for known, second in of_key if known in (None, fingerprint))])
