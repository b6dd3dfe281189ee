"""What a follower compares of its log behind its position, to find that it was rewritten. One thread.

Every round compares what was read last, and a start everything of the last two segments. A broker may also cut further
back, so each round compares some more bytes of the two, from the newest range to the oldest, and begins again.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from tiered_index.rocketmq.follow.fingerprints import LogFingerprints, RangeFingerprint, Verdict
from tiered_index.rocketmq.log.segments import Segment, stored_bytes

# Every round compares the newest fingerprints, so many of the last so many bytes at most.
NEAR_RANGES, NEAR_BYTES = 8, 1 << 20
# Every `FAR_ROUNDS` rounds the last `FAR_BYTES` are compared.
FAR_ROUNDS, FAR_BYTES = 32, 1 << 26
# Read in one step: 2 GiB are compared once in some seven minutes of rounds every 0.2 s.
SCRUB_BYTES = 1 << 20
_NO_BOUND = 2**63 - 1


def last_two_bytes(segments: Sequence[Segment], position: int) -> int:
    """Return how many bytes the segment of a position, and the one before it, have before the position."""
    starts = [segment.start for segment in segments if segment.start < position]
    return position - starts[-2:][0] if starts else 0


class Scrubber:
    """Compares fingerprints with the log, round by round."""

    def __init__(self) -> None:
        # Whether the next round compares all of the last two segments.
        self.compare_all = True
        self._rounds = 0
        # The range that is being read, up to `_at`, with the CRC-32 of its bytes up to there.
        self._range: RangeFingerprint | None = None
        self._at, self._crc = 0, 0
        # Everything from here on is done.
        self._below = _NO_BOUND

    def is_changed(self, fingerprints: LogFingerprints, position: int, segments: Sequence[Segment]) -> bool:
        """Compare a round's part of what lies before `position`; return whether any of it differs from the log.

        After that everything is compared, until somebody says that it needn't.
        """
        if not fingerprints.ranges:
            return False
        self._rounds += 1
        both = last_two_bytes(segments, position)
        span, most = (FAR_BYTES, None) if self._rounds % FAR_ROUNDS == 0 else (NEAR_BYTES, NEAR_RANGES)
        if self.compare_all:
            span, most = both, None
        changed = fingerprints.is_changed(segments, span, most)
        self.compare_all = changed or self.step(fingerprints, position - both, segments)
        return self.compare_all

    def step(self, fingerprints: LogFingerprints, begin: int, segments: Sequence[Segment]) -> bool:
        """Compare at most `SCRUB_BYTES` of what lies behind offset `begin`; return whether it differs from the log."""
        if self._range is None or self._range not in fingerprints.ranges:  # it may have become one with another
            self._range = self._next(fingerprints, begin)
            if self._range is None:
                return False
            self._at, self._crc = self._range.begin, 0
        one = self._range
        if one.begin < 0:
            return self._done(one, one.offset, changed=one.compare_last(segments) is Verdict.CHANGED)
        data = stored_bytes(segments, self._at, min(SCRUB_BYTES, one.end - self._at))
        if not data:  # deleted meanwhile, or cut short
            return self._done(one, one.begin, changed=data is not None)
        self._at, self._crc = self._at + len(data), zlib.crc32(data, self._crc)
        if self._at < one.end:
            return False
        return self._done(one, one.begin, changed=self._crc != one.range_crc)

    def _next(self, fingerprints: LogFingerprints, begin: int) -> RangeFingerprint | None:
        """Return the newest range that isn't done yet, the newest of all once those behind `begin` are."""
        ahead = [one for one in fingerprints.ranges if begin < one.end <= self._below]
        self._below = self._below if ahead else _NO_BOUND
        return next(reversed(ahead or fingerprints.ranges), None)

    def _done(self, one: RangeFingerprint, below: int, *, changed: bool) -> bool:
        self._range, self._below = None, min(below, one.end - 1)
        return changed
