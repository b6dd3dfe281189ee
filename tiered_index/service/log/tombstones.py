"""Tombstones: the erased entries of an index, as the log states them. Pure.

A tombstone is a predicate with a bound in time, like a horizon. It hides the entries of its topic (and of its key or
queue) with second s if s * 1000 < `before_ms`. It also hides such entries that are put later. A key is represented by
its hashes, and by its fingerprint if the index has fingerprints. No tombstone of a `Tombstones` covers another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from tiered_index.base.documents import Int32, Milliseconds
from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.hashing import lookup_numbers

MOST_TOMBSTONES = 4096
"""Most tombstones of one index: each checkpoint has them all."""


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
