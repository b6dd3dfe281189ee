"""Goes through all that was read of the last segments, some bytes a round, and begins again: nothing that was rewritten stays unnoticed.

Every round compares what was read last, and a start compares everything; but a broker may cut deeper, and write where no round looks. To
compare all of it at once takes seconds of reading, so that it is done little by little, from the newest stretch to the oldest.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from tiered_index.rocketmq.segments import Segment
from tiered_index.rocketmq.witnesses import Trail, Verdict, Witness, stored_bytes

__all__ = ["PATROL_BYTES", "Patrol"]

PATROL_BYTES = 1 << 20
"""Read in one round: 2 GiB are compared once in some seven minutes of rounds every 0.2 s."""
_ABOVE = 2**63 - 1


class Patrol:
    """Where it is. One thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._witness: Witness | None = None
        """The one whose stretch is being read, up to `_at`, with the CRC-32 `_crc`."""
        self._at, self._crc = 0, 0
        self._below = _ABOVE
        """Everything from here on is done."""

    def step(self, trail: Trail, begin: int, segments: tuple[Segment, ...] | None = None) -> bool:
        """Compare some more of what the trail remembers behind offset `begin`; return whether it turned out to be changed.

        `segments` are those of the folder, where they are known.
        """
        if self._witness is None or self._witness not in trail.witnesses:  # it may have become one with another
            self._witness = self._next(trail, begin)
            if self._witness is None:
                return False
            self._at, self._crc = self._witness.begin, 0
        witness = self._witness
        if witness.begin < 0:
            return self._done(witness, witness.offset, changed=witness.look(self._folder, segments) is Verdict.CHANGED)
        data = stored_bytes(self._folder, self._at, min(PATROL_BYTES, witness.end - self._at), segments)
        if not data:  # deleted meanwhile, or cut short
            return self._done(witness, witness.begin, changed=data is not None)
        self._at, self._crc = self._at + len(data), zlib.crc32(data, self._crc)
        if self._at < witness.end:
            return False
        return self._done(witness, witness.begin, changed=self._crc != witness.stretch)

    def _next(self, trail: Trail, begin: int) -> Witness | None:
        """Return the newest witness that isn't done yet, the newest of all once those behind `begin` are."""
        ahead = [witness for witness in trail.witnesses if begin < witness.end <= self._below]
        self._below = _ABOVE if not ahead else self._below
        return next(reversed(ahead or trail.witnesses), None)

    def _done(self, witness: Witness, below: int, *, changed: bool) -> bool:
        self._witness, self._below = None, min(below, witness.end - 1)
        return changed
