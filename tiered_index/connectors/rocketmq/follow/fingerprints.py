"""Fingerprints of the messages that a follower has put. They show whether the broker has rewritten its log.

After a crash a broker may cut its log and write other messages there, without a mark. A follower therefore keeps
checksums of the messages that it put: of the last message before each position that can become durable, and of all
bytes since the previous one. There are fewer of older messages. They are in `followers/<hash of the source name>.json`
in the root, and are written before their messages are put. One thread uses a `LogFingerprints`.

Every round compares the last read bytes; after a start, all bytes of the last two segments. A broker may also cut
further back: each round compares some more bytes of the two segments, from the newest range to the oldest, in a loop.

A cut leaves the bytes after it unchanged. The last fingerprint is near the log's end, so the end is found without
reading the whole segment. Readers without the root do not know the end.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from tiered_index.base.documents import Count, Crc32, Milliseconds, Place, Size, decoded, encoded
from tiered_index.connectors.rocketmq.follow.queue_ends import QueueEnds
from tiered_index.connectors.rocketmq.log.columns import IndexBatch
from tiered_index.connectors.rocketmq.log.segments import Segment, stored_bytes
from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.service.root import FOLLOWERS, Root, disk_error, disk_errors
from tiered_index.storage.disk import Disk

_POLYNOMIAL = 0xEDB88320
# Polynomials 1 and x^8; the bits are reflected: the highest is x^0.
_ONE = 1 << 31
_X8 = 1 << 23


def joined_crc(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two adjacent byte ranges from the CRC-32 of each; the second has `second_bytes` bytes.

    As zlib's `crc32_combine`: a CRC is a polynomial over GF(2) modulo a fixed one, and n further bytes multiply it by
    x^(8n).
    """
    return _times(_power(second_bytes), first) ^ second


def _times(first: int, other: int) -> int:
    """Return the product of two polynomials."""
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


@lru_cache(maxsize=256)
def _power(count: int) -> int:
    """Return x^(8 * count)."""
    power, square = _ONE, _X8
    while count:
        if count & 1:
            power = _times(power, square)
        square = _times(square, square)
        count >>= 1
    return power


FOLLOWER_VERSION = 2
# Fingerprints that are always kept
_MANY = 64
_READ_BYTES = 1 << 22
# A fingerprint is dropped if the gap that it leaves is at most this part of its distance from the newest
_SPARSE = 4
# A batch has several fingerprints: if the log was rewritten within it, it need not be read again from its begin
_PIECES, _PIECE_BYTES = 8, 1 << 16


class Verdict(Enum):
    """The present state of a message that was read earlier."""

    SAME = "same"
    # The broker deleted its segment
    GONE = "gone"
    # Other bytes are in its place, or the log ends before it
    CHANGED = "changed"


class RangeFingerprint(NamedTuple):
    """Checksums of the commit log before offset `end`: of its last message, and of the bytes [begin, end).

    `messages` counts the messages in these bytes. A skipped range has 0; `offset` and `size` are of its first bytes.
    """

    end: Place
    # The last message, its size in bytes and the CRC-32 of its stored bytes.
    offset: Place
    size: Size
    crc: Crc32
    messages: Count
    # Negative: only the last message is known.
    begin: Annotated[int, Meta(ge=-1, le=2**62)] = -1
    # CRC-32 of the bytes [begin, end).
    range_crc: Crc32 = 0

    def compare(self, segments: Sequence[Segment]) -> Verdict:
        """Compare the bytes [begin, end) with the segments of the log."""
        verdict = self.compare_last(segments)
        if verdict is not Verdict.SAME or self.begin < 0:
            return verdict
        at, crc = self.begin, 0
        while at < self.end:
            data = stored_bytes(segments, at, min(_READ_BYTES, self.end - at))
            if not data:  # deleted meanwhile, or cut short
                return Verdict.GONE if data is None else Verdict.CHANGED
            at, crc = at + len(data), zlib.crc32(data, crc)
        return Verdict.SAME if crc == self.range_crc else Verdict.CHANGED

    def compare_last(self, segments: Sequence[Segment]) -> Verdict:
        """Compare the last message with the segments of the log."""
        if segments and self.offset < segments[0].start:
            return Verdict.GONE
        data = stored_bytes(segments, self.offset, self.size)
        if data is None:
            return Verdict.GONE if segments and self.offset < segments[-1].start else Verdict.CHANGED
        return Verdict.SAME if (len(data), zlib.crc32(data)) == (self.size, self.crc) else Verdict.CHANGED


def fingerprints_of(batch: IndexBatch) -> list[RangeFingerprint]:
    """Return the fingerprints of the ranges skipped before a batch, and of the batch, ascending."""
    made = [
        # a broker that truncates its log there writes messages over it
        RangeFingerprint(
            gap.end, gap.begin, gap.size, gap.crc, 0, *((-1, 0) if gap.whole is None else (gap.begin, gap.whole))
        )
        for gap in batch.non_messages
        if gap.size
    ]
    if not batch.messages:
        return made
    size = batch.end - batch.begin
    positions = [*batch.positions.tolist(), size]
    pieces = max(1, min(_PIECES, size // _PIECE_BYTES))
    rows = {int(np.searchsorted(batch.positions, size * piece // pieces)) for piece in range(1, pieces)}
    view = memoryview(batch.data)
    begin, done = 0, 0
    for row in sorted({row for row in rows if row > 0} | {batch.messages}):
        last, end = positions[row - 1], positions[row]
        made.append(
            RangeFingerprint(
                batch.begin + end,
                batch.begin + last,
                end - last,
                zlib.crc32(view[last:end]),
                row - done,
                batch.begin + begin,
                zlib.crc32(view[begin:end]),
            )
        )
        begin, done = end, row
    return made


def _joined(earlier: RangeFingerprint, later: RangeFingerprint) -> RangeFingerprint:
    """Return one fingerprint for two successive ones. If there are bytes between them, it covers the later's bytes."""
    messages = earlier.messages + later.messages
    if earlier.begin < 0 or earlier.end != later.begin:
        return later._replace(messages=messages)
    crc = joined_crc(earlier.range_crc, later.range_crc, later.end - later.begin)
    return later._replace(messages=messages, begin=earlier.begin, range_crc=crc)


@dataclass
class LogFingerprints:
    """The fingerprints of one source, ascending, and the ranges of its log that were rewritten."""

    path: Path
    disk: Disk
    source: str
    # Set while a part of the log is put again: a restart continues there
    continue_at: int | None
    ranges: list[RangeFingerprint] = field(default_factory=list)
    # Rewritten offsets [begin, end), each with the time of its detection (epoch ms)
    rewritten: tuple[tuple[int, int, int], ...] = ()
    # The selection of indexed messages, in words; None: unknown
    selection: str | None = None
    # Store timestamp of the last message before the last range (epoch ms); None: unknown
    last_store_ms: int | None = None
    # Greatest store timestamp of all messages that were read (epoch ms), 0 before the first one; None: unknown
    greatest_store_ms: int | None = None
    # The last queue offsets before the end of the last batch
    queue_ends: QueueEnds = field(default_factory=QueueEnds)

    @classmethod
    def load(cls, root: Path, source: str, disk: Disk) -> LogFingerprints:
        """Return the stored fingerprints of a source in a root, or none. Raises `CorruptFile`."""
        path = root / FOLLOWERS / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.json"
        file = str(path)
        try:
            data = path.read_bytes()
            UnsupportedVersion.unless_read(
                file, "follower", FOLLOWER_VERSION, decoded(data, _FollowerVersion, file, "memory").follower
            )
            stored = decoded(data, _Memory, file, "memory")
            CorruptFile.unless_equal(file, "memory of another source", source, stored.source)
            times = stored.selection, stored.last_store_ms, stored.greatest_store_ms
            ends = QueueEnds(stored.queues_at, {(topic, queue): at for topic, queue, at in stored.queues})
            return cls(path, disk, source, stored.continue_at, stored.witnesses, stored.rewritten, *times, ends)
        except FileNotFoundError:
            return cls(path, disk, source, None)
        except OSError as error:
            raise disk_error(error, f"reading {file}") from error
        except UnsupportedVersion:
            raise
        except CorruptFile as error:
            problem = (
                f"not the fingerprints of {source} ({error.problem}); if you remove this file, the log is followed "
                f"unchecked from the durable position"
            )
            raise CorruptFile(file, problem) from error

    def save(self) -> None:
        """Write the fingerprints durably. Raises as `disk_error`."""
        document = {
            "follower": FOLLOWER_VERSION,
            "source": self.source,
            "witnesses": self.ranges,
            "continue_at": self.continue_at,
            "rewritten": self.rewritten,
            "queues_at": self.queue_ends.position,
            "queues": [(*queue, offset) for queue, offset in self.queue_ends.offsets.items()],
            "selection": self.selection,
            "last_store_ms": self.last_store_ms,
            "greatest_store_ms": self.greatest_store_ms,
        }
        root, what = Root(self.path.parent.parent, self.disk), f"writing {self.path}"
        with disk_errors(what):
            if not self.path.parent.is_dir():
                self.disk.make_folder(self.path.parent)
                self.disk.sync_folder(root.path)
        root.write_file(self.path, [encoded(document)], what)

    def cut(self, position: int) -> None:
        """Remove the fingerprints that end after `position`."""
        if self.ranges and self.ranges[-1].end > position:
            self.last_store_ms = None
        self.ranges = [fingerprint for fingerprint in self.ranges if fingerprint.end <= position]

    def add_rewritten(self, begin: int, end: int, now_ms: int) -> None:
        """Note that the offsets [begin, end) were rewritten; keep only the last such ranges."""
        apart = [known for known in self.rewritten if known[0] < begin or known[1] > end]
        self.rewritten = (*apart, (begin, end, now_ms))[-_MANY:]

    def rewritten_ms(self, begin: int, end: int) -> int | None:
        """Return when a part of [begin, end) was last found rewritten (epoch ms); None: never. Any thread."""
        return max((ms for low, high, ms in self.rewritten if low < end and begin < high), default=None)

    def add(self, newest: RangeFingerprint, durable: int) -> None:
        """Add the newest fingerprint, and join durable ones: the older, the fewer."""
        self.ranges.append(newest)
        settled = [fingerprint for fingerprint in self.ranges if fingerprint.end <= durable]
        if len(settled) < _MANY:
            return
        joined = settled[:1]
        for place in range(1, len(settled) - 1):
            earlier, later = settled[place], settled[place + 1]
            if later.end - joined[-1].end <= (newest.end - later.end) // _SPARSE:
                settled[place + 1] = _joined(earlier, later)
            else:
                joined.append(earlier)
        self.ranges[: len(settled)] = [*joined, settled[-1]]

    def is_changed(self, segments: Sequence[Segment], span_bytes: int, most: int | None = None) -> bool:
        """Return whether the last `span_bytes`, of the newest `most` fingerprints (None: all), differ from the log."""
        newest = reversed(self.ranges[-most:] if most else self.ranges)
        return any(
            fingerprint.compare(segments) is Verdict.CHANGED
            for fingerprint in itertools.takewhile(lambda fingerprint: self._is_within(fingerprint, span_bytes), newest)
        )

    def _is_within(self, fingerprint: RangeFingerprint, span_bytes: int) -> bool:
        return fingerprint is self.ranges[-1] or self.ranges[-1].end - fingerprint.end < span_bytes

    def last_same(self, segments: Sequence[Segment], span_bytes: int) -> RangeFingerprint | None:
        """Return the newest fingerprint before which nothing changed, within the last `span_bytes` bytes.

        Older fingerprints are compared by their last message only.
        """
        unchanged: RangeFingerprint | None = None
        for fingerprint in reversed(self.ranges):
            if not self._is_within(fingerprint, span_bytes):
                older = (known for known in reversed(self.ranges) if known.end <= fingerprint.end)
                return unchanged or next((o for o in older if o.compare_last(segments) is Verdict.SAME), None)
            verdict = fingerprint.compare(segments)
            unchanged = (
                None if verdict is Verdict.CHANGED else unchanged or (fingerprint if verdict is Verdict.SAME else None)
            )
        return unchanged

    def messages_behind(self, position: int) -> int:
        """Return the number of messages that were put after a position, by the fingerprints."""
        return sum(fingerprint.messages for fingerprint in self.ranges if fingerprint.end > position)


class _FollowerVersion(Struct):
    follower: int


class _Memory(Struct):
    source: str
    witnesses: list[RangeFingerprint]
    continue_at: Place | None
    rewritten: tuple[tuple[Place, Place, Milliseconds], ...]
    selection: str | None
    last_store_ms: Milliseconds | None
    greatest_store_ms: Milliseconds | None
    queues_at: Place
    queues: list[tuple[str, Place, Place]]

    def __post_init__(self) -> None:
        if not all(witness.begin <= witness.end >= witness.offset for witness in self.witnesses):
            raise ValueError("One of `witnesses` ends before it begins")


# Every round compares at most so many of the newest fingerprints, within the last bytes
NEAR_RANGES, NEAR_BYTES = 8, 1 << 20
# Every `FAR_ROUNDS` rounds the last `FAR_BYTES` are compared.
FAR_ROUNDS, FAR_BYTES = 32, 1 << 26
# Bytes of one step: with a round every 0.2 s, 2 GiB are compared in about seven minutes
SCRUB_BYTES = 1 << 20
_NO_BOUND = 2**63 - 1


def last_two_bytes(segments: Sequence[Segment], position: int) -> int:
    """Return how many bytes the segment of a position, and the one before it, have before the position."""
    starts = [segment.start for segment in segments if segment.start < position]
    return position - starts[-2:][0] if starts else 0


class Scrubber:
    """Compares fingerprints with the log, round by round."""

    def __init__(self) -> None:
        # Whether the next round compares all bytes of the last two segments
        self.compare_all = True
        self._rounds = 0
        # The present range, compared up to `_at`, and the CRC-32 of its bytes so far
        self._range: RangeFingerprint | None = None
        self._at, self._crc = 0, 0
        # All ranges that end after this offset are done
        self._below = _NO_BOUND

    def is_changed(self, fingerprints: LogFingerprints, position: int, segments: Sequence[Segment]) -> bool:
        """Compare a part of the bytes before `position` with the log; return whether any of them changed.

        After a change, each round compares everything until the caller resets `compare_all`.
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
        """Compare up to `SCRUB_BYTES` after offset `begin`; return whether they differ from the log."""
        if self._range is None or self._range not in fingerprints.ranges:  # it may have been joined with another
            self._range = self._next(fingerprints, begin)
            if self._range is None:
                return False
            self._at, self._crc = self._range.begin, 0
        fingerprint = self._range
        if fingerprint.begin < 0:
            return self._done(
                fingerprint, fingerprint.offset, changed=fingerprint.compare_last(segments) is Verdict.CHANGED
            )
        data = stored_bytes(segments, self._at, min(SCRUB_BYTES, fingerprint.end - self._at))
        if not data:  # deleted meanwhile, or cut short
            return self._done(fingerprint, fingerprint.begin, changed=data is not None)
        self._at, self._crc = self._at + len(data), zlib.crc32(data, self._crc)
        if self._at < fingerprint.end:
            return False
        return self._done(fingerprint, fingerprint.begin, changed=self._crc != fingerprint.range_crc)

    def _next(self, fingerprints: LogFingerprints, begin: int) -> RangeFingerprint | None:
        """Return the newest range after `begin` that is not done; if all are done, begin again with the newest."""
        ahead = [fingerprint for fingerprint in fingerprints.ranges if begin < fingerprint.end <= self._below]
        self._below = self._below if ahead else _NO_BOUND
        return next(reversed(ahead or fingerprints.ranges), None)

    def _done(self, fingerprint: RangeFingerprint, below: int, *, changed: bool) -> bool:
        self._range, self._below = None, min(below, fingerprint.end - 1)
        return changed
