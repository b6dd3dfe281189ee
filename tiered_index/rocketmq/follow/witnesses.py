"""Fingerprints of the messages that a follower has put, by which it notices that the log was rewritten.

After a crash of its host a broker may truncate messages that others have read already, and write others in their place.
Nothing in the log says so, and nothing is zeroed: messages that were read may stand behind the cut as they were, with
others written before them. `LogFingerprints` holds the last message before each position that can become durable, with
a checksum of everything since the one before. The older they are, the fewer are kept. By them the place up to which the
log is unchanged can be found.

They are kept in `followers/<hash of the source name>.json` in the index's root, written before the messages that they
describe are put: whichever position is durable after a crash has its fingerprint. One thread uses a `LogFingerprints`.

`joined_crc` is the CRC-32 of two adjacent byte ranges from the CRC-32 of each: a CRC is a polynomial over GF(2) modulo
a fixed one, and n bytes behind multiply it by x^(8n). Source: zlib's `crc32_combine`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import zlib
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tiered_index.documents import (
    COUNT,
    CRC32,
    MILLISECONDS,
    SIZE,
    Malformed,
    Optional,
    checked,
    integer,
    list_of,
    load,
    nullable,
    record,
    text,
    tuple_of,
)
from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.log.columns import Passed
from tiered_index.rocketmq.log.commitlog import Fingerprint
from tiered_index.rocketmq.log.segments import Segment, list_segments, pread
from tiered_index.service.root.root import FOLLOWERS, disk_error
from tiered_index.storage.disk import TEMPORARY_PREFIX, Disk

__all__ = ["LogFingerprints", "RangeFingerprint", "Verdict", "joined_crc", "stored_bytes"]

_POLYNOMIAL = 0xEDB88320
# Polynomials 1 and x^8; the bits are reflected: the highest is x^0.
_ONE = 1 << 31
_X8 = 1 << 23


def joined_crc(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of a byte range with CRC `first` and the `second_bytes` bytes with CRC `second` behind it."""
    return _times(_power(second_bytes), first) ^ second


def _times(one: int, other: int) -> int:
    """Return the product of two polynomials."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
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


_VERSION = 1
_MANY = 64
_CHUNK = 1 << 22
# A fingerprint is dropped where the gap that it leaves is at most this part of its distance from the newest.
_SPARSE = 4
_POSITION = integer(0, 2**62)


class Verdict(Enum):
    """What became of a message that was read."""

    SAME = "same"
    # Its segment is deleted, as brokers do with old ones: nothing is known.
    GONE = "gone"
    # Something else is in its place, or the log ends before it.
    CHANGED = "changed"


class RangeFingerprint(NamedTuple):
    """The last message before position `end`, and what was put since the fingerprint before.

    `messages` counts those of the bytes [begin, end). What was skipped has fingerprints without messages: `offset` and
    `size` are of its first bytes.
    """

    end: int
    offset: int
    size: int
    # CRC-32 of its stored bytes.
    crc: int
    messages: int
    # Negative: only the last message is remembered.
    begin: int = -1
    # CRC-32 of the bytes [begin, end).
    stretch: int = 0

    @classmethod
    def of(cls, end: int, offset: int, data: bytes, messages: int) -> RangeFingerprint:
        """Return the fingerprint whose stored bytes are `data`."""
        return cls(end, offset, len(data), zlib.crc32(data), messages)

    @classmethod
    def of_passed(cls, passed: Passed) -> RangeFingerprint:
        """Return the fingerprint of what was skipped: a broker that truncates its log there writes messages over it."""
        begin, stretch = (-1, 0) if passed.whole is None else (passed.begin, passed.whole)
        return cls(passed.end, passed.begin, passed.size, passed.crc, 0, begin, stretch)

    @property
    def fingerprint(self) -> Fingerprint:
        """What identifies the message."""
        return Fingerprint(self.offset, self.size, self.crc)

    def look_whole(self, folder: Path, segments: tuple[Segment, ...] | None = None) -> Verdict:
        """Compare every byte that is remembered with what is in the commit log now.

        `segments` are those of the folder, where they are known.
        """
        segments = list_segments(folder) if segments is None else segments
        verdict = self.look(folder, segments)
        if verdict is not Verdict.SAME or self.begin < 0:
            return verdict
        at, crc = self.begin, 0
        while at < self.end:
            data = stored_bytes(folder, at, min(_CHUNK, self.end - at), segments)
            if not data:  # deleted meanwhile, or cut short
                return Verdict.GONE if data is None else Verdict.CHANGED
            at, crc = at + len(data), zlib.crc32(data, crc)
        return Verdict.SAME if crc == self.stretch else Verdict.CHANGED

    def look(self, folder: Path, segments: tuple[Segment, ...] | None = None) -> Verdict:
        """Compare the last message with what is in the commit log now."""
        segments = list_segments(folder) if segments is None else segments
        if segments and self.offset < segments[0].start:
            return Verdict.GONE
        data = stored_bytes(folder, self.offset, self.size, segments)
        if data is None:
            return Verdict.GONE if segments and self.offset < segments[-1].start else Verdict.CHANGED
        return (
            Verdict.SAME
            if Fingerprint(self.offset, len(data), zlib.crc32(data)) == self.fingerprint
            else Verdict.CHANGED
        )


def _witness(value: Any) -> RangeFingerprint:
    """Check a fingerprint: a list of its numbers, of which the last two were not always there."""
    if not isinstance(value, list) or not len(_WITNESS) - 2 <= len(value) <= len(_WITNESS):
        raise Malformed(f"a list of {len(_WITNESS) - 2} to {len(_WITNESS)} numbers", value)
    witness = RangeFingerprint(*(check(number) for check, number in zip(_WITNESS, value, strict=False)))
    if not witness.begin <= witness.end >= witness.offset:
        raise Malformed("a stretch of a log", value)
    return witness


_WITNESS = (_POSITION, _POSITION, SIZE, CRC32, COUNT, integer(-1, 2**62), CRC32)
_TRAIL = record(
    lambda follower, **fields: tuple(fields.values()),
    follower=integer(_VERSION, _VERSION),
    source=text(),
    witnesses=list_of(_witness),
    continue_at=nullable(_POSITION),
    rewritten=Optional(list_of(tuple_of(_POSITION, _POSITION, MILLISECONDS)), ()),
)


def stored_bytes(folder: Path, offset: int, size: int, segments: tuple[Segment, ...] | None = None) -> bytes | None:
    """Return the bytes [offset, offset + size) of the commit log.

    Fewer where the segment ends before, None where no segment has them. `segments` are those of the folder, where they
    are known.
    """
    for segment in list_segments(folder) if segments is None else segments:
        if segment.start <= offset < segment.end:
            try:
                return pread(segment.path, min(size, segment.end - offset), offset - segment.start)
            except FileNotFoundError:
                return None
    return None


def _joined(one: RangeFingerprint, later: RangeFingerprint) -> RangeFingerprint:
    """Return two fingerprints that follow each other as one.

    What lies between segments isn't remembered, so then only the later's bytes.
    """
    messages = one.messages + later.messages
    if one.begin < 0 or one.end != later.begin:
        return later._replace(messages=messages)
    return later._replace(
        messages=messages, begin=one.begin, stretch=joined_crc(one.stretch, later.stretch, later.end - later.begin)
    )


@dataclass
class LogFingerprints:
    """The fingerprints of one source, ascending.

    `continue_at` is set while a part of the log is put again: a restart begins there.

    `rewritten` are the offsets [begin, end) that were found to be others than were read, each with the time of that in
    epoch milliseconds.
    """

    path: Path
    source: str
    disk: Disk
    witnesses: list[RangeFingerprint] = field(default_factory=list)
    continue_at: int | None = None
    rewritten: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def load(cls, root: Path, source: str, disk: Disk) -> LogFingerprints:
        """Return what is kept in a root, no fingerprints where there is nothing. Raises `CorruptFile`."""
        trail = cls(root / FOLLOWERS / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.json", source, disk)
        try:
            document = load(trail.path.read_bytes(), str(trail.path), "memory")
            said, witnesses, trail.continue_at, trail.rewritten = checked(_TRAIL, document, str(trail.path), "memory")
            if said != source:
                raise CorruptFile(str(trail.path), "memory of another source", expected=source, found=said)
            trail.witnesses = list(witnesses)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise disk_error(error, f"reading {trail.path}") from error
        except CorruptFile as error:
            problem = (
                f"not the memory of {source} ({error.problem}); without this file the log is followed "
                f"unchecked from the durable position"
            )
            raise CorruptFile(str(trail.path), problem) from error
        return trail

    def save(self) -> None:
        """Write the fingerprints durably. Raises as `disk_error` says."""
        document = {
            "follower": _VERSION,
            "source": self.source,
            "witnesses": self.witnesses,
            "continue_at": self.continue_at,
            "rewritten": self.rewritten,
        }
        temporary = self.path.parent / (TEMPORARY_PREFIX + secrets.token_hex(8))
        try:
            if not self.path.parent.is_dir():
                self.disk.make_folder(self.path.parent)
                self.disk.sync_folder(self.path.parent.parent)
            self.disk.write_file(temporary, [json.dumps(document).encode()])
            self.disk.publish(temporary, self.path)
        except OSError as error:
            raise disk_error(error, f"writing {self.path}") from error

    def cut(self, position: int) -> None:
        """Forget what lies behind a position."""
        self.witnesses = [witness for witness in self.witnesses if witness.end <= position]

    def note_rewritten(self, begin: int, end: int, now_ms: int) -> None:
        """Remember that the offsets [begin, end) are others now; the oldest such ranges are forgotten."""
        apart = [known for known in self.rewritten if known[0] < begin or known[1] > end]
        self.rewritten = (*apart, (begin, end, now_ms))[-_MANY:]

    def rewritten_ms(self, begin: int, end: int) -> int | None:
        """Return when some of the offsets [begin, end) were last found to be others; any thread may ask."""
        return max((ms for low, high, ms in self.rewritten if low < end and begin < high), default=None)

    def add(self, witness: RangeFingerprint, durable: int) -> None:
        """Add the newest fingerprint.

        Those at or before the durable position become fewer with their distance from the newest.
        """
        self.witnesses.append(witness)
        settled = [w for w in self.witnesses if w.end <= durable]
        if len(settled) < _MANY:
            return
        kept = settled[:1]
        for place in range(1, len(settled) - 1):
            one, later = settled[place], settled[place + 1]
            if later.end - kept[-1].end <= (witness.end - later.end) // _SPARSE:
                settled[place + 1] = _joined(one, later)
            else:
                kept.append(one)
        self.witnesses[: len(settled)] = [*kept, settled[-1]]

    def is_changed(
        self, folder: Path, span: int, many: int | None = None, segments: tuple[Segment, ...] | None = None
    ) -> bool:
        """Return whether anything remembered of the last `span` bytes is changed.

        With `many`, only the `many` newest fingerprints within them are compared.
        """
        segments = list_segments(folder) if segments is None else segments
        newest = reversed(self.witnesses[-many:] if many else self.witnesses)
        return any(
            w.look_whole(folder, segments) is Verdict.CHANGED
            for w in itertools.takewhile(lambda w: self._within(w, span), newest)
        )

    def _within(self, witness: RangeFingerprint, span: int) -> bool:
        return witness is self.witnesses[-1] or self.witnesses[-1].end - witness.end < span

    def last_same(self, folder: Path, span: int) -> RangeFingerprint | None:
        """Return the newest fingerprint before which, as far as the last `span` bytes go, nothing is changed.

        Older ones are compared by their message.
        """
        found: RangeFingerprint | None = None
        for witness in reversed(self.witnesses):
            if not self._within(witness, span):
                return found or next(
                    (w for w in reversed(self.witnesses) if w.end <= witness.end and w.look(folder) is Verdict.SAME),
                    None,
                )
            verdict = witness.look_whole(folder)
            found = None if verdict is Verdict.CHANGED else found or (witness if verdict is Verdict.SAME else None)
        return found

    def messages_behind(self, position: int) -> int:
        """Return how many messages were put behind a position, by the fingerprints."""
        return sum(w.messages for w in self.witnesses if w.end > position)
