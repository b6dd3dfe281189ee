"""Reads a `commitlog/` folder, also while a broker writes it, from any position to its present end.

Segments are read a chunk at a time, so memory is bounded by the chunk or the longest message. A message longer than a
chunk is read if its head and its lengths agree and it has at most `MAX_MESSAGE_BYTES` (128 MiB). The only state is the
last list of segments: batches list the folder again, single messages only if that list lacks their segment. Any thread
may call. Bytes that can't be read are never skipped without a report:

| found      | what happens |
|---|---|
| zeros in the segment that is being written | the end, for now (`End.OPEN`) |
| zeros there at `hole_at`, followed by something readable | damage, as below |
| half a message there, followed by nothing readable | the end, for now (`End.TORN`): being written, or torn |
| half a message there, followed only by older messages | the same: the broker cut its log and will overwrite them |
| anything else that is no message | damage: `CorruptFile`, or skipped to the next readable message |
| a position without a segment | `MissingOffsets`, or skipped to the next segment (see `batches`) |
| a position after the end of the log | `MissingOffsets`: the log was cut or made again |

Fingerprints (`follow/fingerprints.py`) detect a log that was rewritten before a position.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tiered_index.connectors.rocketmq.log.columns import (
    ALL_TOPICS,
    IndexBatch,
    NonMessage,
    Selection,
    SkippedRange,
    decode_index_columns,
)
from tiered_index.connectors.rocketmq.log.layout import BLANK_BYTES, BLANK_MAGIC, MIN_MESSAGE_BYTES
from tiered_index.connectors.rocketmq.log.message import (
    HEAD_BYTES,
    Message,
    check_head,
    check_tail,
    decode_message,
    peek_topic,
)
from tiered_index.connectors.rocketmq.log.segments import End, Segment, candidates, list_segments, segment_at
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.types import inclusive

T = TypeVar("T")
# Listings of the folder before a segment that can't be opened counts as missing
_ATTEMPTS = 3
# The lengths of a longer message are checked before it is read
_UNCHECKED_BYTES = 1 << 16
_HEAD_OF_DAMAGE = 1 << 12
_BEHIND_DAMAGE = 1 << 16
_PIECE = 1 << 22


_BETWEEN = (
    "missing in the middle of the log: give the other folder of storePathCommitLog by --commitlog, or pass "
    "--skip-corrupt if there is none"
)


class MissingOffsets(CorruptFile):
    """Commit log offsets [`begin`, `end`) are in no file: deleted before they were read, or never written.

    `is_between`: files before and after them are there. A broker deletes its oldest files, so these are elsewhere.
    """

    def __init__(self, folder: str, problem: str, begin: int, end: int, *, is_between: bool = False) -> None:
        super().__init__(folder, f"{problem}: commit log offsets {inclusive(begin, end)}")
        self.begin = begin
        self.end = end
        self.is_between = is_between


@dataclass(frozen=True)
class CommitLogReader:
    """Reads the segments in `folder`.

    `chunk_bytes` are read and decoded at a time. `check_crc` compares every body with its CRC while reading batches.
    The comparison takes a fourth of the time for bodies of 256 bytes, and half of it for bodies of 4 KiB. Single
    messages are always checked. `selection` selects the messages that have entries in the batches.
    """

    folder: Path
    chunk_bytes: int = 1 << 24
    check_crc: bool = False
    selection: Selection = ALL_TOPICS
    # The segments of a log that doesn't change, in place of those in the folder.
    fixed: tuple[Segment, ...] | None = None
    # The last list of the folder: listing hundreds of segments costs more than reading a message
    _looked: tuple[Segment, ...] = field(default=(), init=False, repr=False, compare=False)

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments, oldest first; none for an empty or missing folder."""
        return list_segments(self.folder) if self.fixed is None else self.fixed

    def begin_offset(self) -> int | None:
        """Return the first offset that can still be read, or None for an empty log."""
        segments = self.segments()
        return segments[0].start if segments else None

    # one message

    def read(self, offset: int, size: int | None = None) -> Message:
        """Return the message at a commit log offset; check its CRC and physical offset.

        `size`, if known, saves a read. Raises `MissingOffsets` if no segment has the offset, `CorruptFile` if no such
        message begins there.
        """
        if (known := segment_at(self._looked, offset)) is not None:
            # the segment may have changed since: list the folder again before raising an error
            with contextlib.suppress(FileNotFoundError, CorruptFile):
                return _read_within(known, offset, size)
        return self._of_segment(offset, lambda segment: _read_within(segment, offset, size))

    def topic_at(self, offset: int) -> str | None:
        """Return the topic of the message that begins at an offset; None if none does. Both need the same reads.

        Raises `MissingOffsets` if no segment has the offset.
        """
        return self._of_segment(offset, lambda segment: _topic_within(segment, offset))

    def _of_segment(self, offset: int, act: Callable[[Segment], T]) -> T:
        """Return `act(segment)` for the segment that has an offset; try again if it is deleted meanwhile."""
        for _ in range(_ATTEMPTS):
            segment = self._segment_of(offset)
            with contextlib.suppress(FileNotFoundError):
                return act(segment)
        raise self._missing("the segment was deleted", offset, segment.end)

    def _missing(self, problem: str, begin: int, end: int) -> MissingOffsets:
        return MissingOffsets(str(self.folder), problem, begin, end)

    def _segment_of(self, offset: int) -> Segment:
        """Return the segment that has an offset. Raises `MissingOffsets` with the missing range."""
        if offset < 0:
            raise InvalidArgument(f"a commit log offset is not negative: {offset}")
        segments = self.segments()
        object.__setattr__(self, "_looked", segments)
        if (segment := segment_at(segments, offset)) is not None:
            return segment
        if segments and segments[0].start < offset < segments[-1].start:
            # a list that is made while the broker deletes its oldest files may have one of them, and lack later ones
            segments = self.segments()
            if (segment := segment_at(segments, offset)) is not None:
                return segment
        for segment in segments:
            if offset < segment.start and segment is not segments[0]:
                raise MissingOffsets(str(self.folder), _BETWEEN, offset, segment.start, is_between=True)
            if offset < segment.start:
                raise self._missing("deleted before they were read", offset, segment.start)
        raise self._missing("after the end of the log", segments[-1].end if segments else 0, offset)

    # all messages from a position on

    def batches(
        self,
        position: int | None = None,
        *,
        skip_corrupt: bool = False,
        skip_missing: bool = False,
        hole_at: int | None = None,
        newest_ms: int | None = None,
        segments: tuple[Segment, ...] | None = None,
    ) -> Iterator[IndexBatch]:
        """Yield the entries of all messages from `position` (None: the begin) to the end of the written log.

        Each batch continues where the last one ended. The last one has the `state` `End.OPEN`, `End.TORN`, or
        `End.SEGMENT` if the next segment does not exist yet; continue from its `end` later. An empty log yields
        nothing.

        Raises `CorruptFile` at the first damage and `MissingOffsets` at the first gap, after everything before it was
        yielded. With `skip_corrupt` and `skip_missing`, the next batch has the range in `skipped` instead. A gap with
        segments before and after it is damage: only `skip_corrupt` skips it. Zeros at
        `hole_at` are damage if something readable follows them. `newest_ms` is the store timestamp (epoch ms) of the
        message before `position`. `segments` is a known list of segments; the folder is listed again for others.
        A single reading may see messages that are only partly written: the last one, or earlier ones with holes of
        zeros, also in keys. `messages` reads twice; a follower does so with `tail.stable_part`.

        This is one long loop: each kind of end and of damage decides where the next read begins.
        """
        segments = self.segments() if segments is None else segments
        if not segments and not position:
            return
        at = segments[0].start if position is None else position
        skipped: list[SkippedRange] = []
        non_messages: list[NonMessage] = []
        vanished = 0
        chunk = self.chunk_bytes
        while True:
            try:
                segment = self._next_segment(at, segments)
            except MissingOffsets as error:
                if not (skip_corrupt if error.is_between else skip_missing) or error.begin < at:
                    raise
                gap = SkippedRange(error.begin, error.end, error.problem, error.file, True, error.is_between)
                skipped.append(gap)
                at = error.end
                continue
            if segment is None:
                nothing = decode_index_columns(b"", at)
                yield replace(nothing, state=End.SEGMENT, skipped=tuple(skipped), non_messages=tuple(non_messages))
                return
            try:
                batch = self._decode(segment, at, chunk)
                readable, damaged = None, None
                newest_ms = newest_ms if batch.last_store_ms is None else batch.last_store_ms
                if batch.state in (End.OPEN, End.DAMAGED):
                    batch, readable = self._judge(segment, batch, hole_at, newest_ms)
                if skip_corrupt and batch.damage is not None:
                    damaged = self._read_damage(segment, batch.end, segment.end if readable is None else readable)
                    batch = batch if damaged is not None else replace(batch, state=End.MORE, damage=None)
            except FileNotFoundError:
                segments = ()
                vanished += 1
                if vanished == _ATTEMPTS:
                    raise self._missing("deleted while they were read", at, segment.end) from None
                continue
            vanished = 0
            chunk = min(self.chunk_bytes, 2 * chunk)
            at = batch.end
            over = batch.state in (End.OPEN, End.TORN)
            if batch.messages or over:
                yield replace(batch, skipped=tuple(skipped), non_messages=tuple(non_messages))
                skipped, non_messages = [], []
            if over:
                return
            if (damage := batch.damage) is not None:
                if damaged is None:
                    # the error keeps this frame: remove the batch and the error from it
                    del batch
                    try:
                        raise damage
                    finally:
                        del damage
                at = segment.end if readable is None else readable
                # more damage may follow: read small chunks
                chunk = min(self.chunk_bytes, _BEHIND_DAMAGE)
                skipped.append(SkippedRange(batch.end, at, damage.problem, str(segment.path)))
                non_messages.append(damaged)
            elif batch.state is End.SEGMENT:
                if at < segment.end:
                    head = (segment.end - at).to_bytes(4, "big") + BLANK_MAGIC
                    non_messages.append(NonMessage(at, segment.end, BLANK_BYTES, zlib.crc32(head), None))
                at = segment.end

    def messages(
        self,
        position: int | None = None,
        end: int | None = None,
        *,
        skip_corrupt: bool = False,
        skip_missing: bool = False,
        closed: bool = False,
    ) -> Iterator[Message]:
        """Yield every message that begins at `position` or later and before `end`, also hidden ones.

        Raises as `batches`, and always checks bodies. It is correct while a broker writes: a message with zeros in its
        properties is read a second time, when everything before the bytes seen later is written. At the end of a live
        log, a last message with zeros in its properties is left out, because it may be half written. Set `closed` if
        the log has no writer or was seen to reach `end`: then nothing is left out, and a log that ends before `end` is
        `MissingOffsets`.
        """
        reader = self if self.check_crc else replace(self, check_crc=True)
        reached = position or 0
        for batch in reader.batches(position, skip_corrupt=skip_corrupt, skip_missing=skip_missing):
            for row, at in enumerate(batch.positions.tolist(), 1):
                if end is not None and batch.begin + at >= end:
                    return
                message = decode_message(
                    batch.data, at, file=str(self.folder), physical_offset=batch.begin + at, check_crc=False
                )
                if b"\0" in message.raw_properties:
                    if not closed and row == batch.messages and batch.state in (End.OPEN, End.TORN):
                        return
                    with contextlib.suppress(MissingOffsets):  # deleted meanwhile, so it was complete
                        message = self.read(message.physical_offset)
                yield message
            reached = batch.end
            if end is not None and reached >= end:
                return
        if closed and end is not None and not skip_corrupt:
            raise self._missing("the log was cut after they were seen", reached, end)

    def _next_segment(self, at: int, known: tuple[Segment, ...]) -> Segment | None:
        """Return the segment at a position, from `known` or a new list; None if the log ends there."""
        if (segment := segment_at(known, at)) is not None:
            return segment
        segments = self.segments()
        if segments and at == segments[-1].end:
            return None
        return self._segment_of(at)

    def _decode(self, segment: Segment, offset: int, chunk: int) -> IndexBatch:
        """Decode `chunk` bytes, or more if the first message is longer."""
        at = offset - segment.start
        while True:
            data = segment.read(min(chunk, segment.file_size - at), at)
            batch = decode_index_columns(
                data,
                offset,
                file=str(segment.path),
                file_offset=at,
                segment_bytes=segment.end - segment.start - at,
                check_crc=self.check_crc,
                selection=self.selection,
            )
            if batch.state is not End.MORE or batch.messages:
                return batch
            left, has_head = segment.file_size - at, len(data) >= HEAD_BYTES
            # the file ends here, though its segment doesn't
            if (
                len(data) >= left
                or len(data) < min(chunk, left)
                or (has_head and int.from_bytes(data[:4], "big") > left)
            ):
                problem = CorruptFile(str(segment.path), "the segment ends within a message", offset=at)
                return replace(batch, state=End.DAMAGED, damage=problem)
            if not has_head:
                chunk = max(HEAD_BYTES, chunk + 1)
                continue
            try:
                chunk = max(_claimed(segment, at, offset, at_once=chunk), chunk + 1)
            except CorruptFile as error:
                # the traceback would keep the bytes in memory
                return replace(batch, state=End.DAMAGED, damage=error.with_traceback(None))

    def _judge(
        self, segment: Segment, batch: IndexBatch, hole_at: int | None, newest_ms: int | None
    ) -> tuple[IndexBatch, int | None]:
        """Decide whether a batch ends at a live log's end or at damage.

        Return the batch with its state, and the next readable offset.
        """
        later = [other for other in self.segments() if other.start > segment.start]
        written_behind = segment.is_closed or any(other.read(BLANK_BYTES, 0).strip(b"\0") for other in later)
        zeros = batch.state is End.OPEN
        if zeros and not written_behind and batch.end != hole_at:
            return batch, None
        readable = self._readable_behind(segment, batch.end - segment.start)
        if not written_behind and (readable is None or self._is_old(segment, readable, newest_ms)):
            return batch if zeros else replace(batch, state=End.TORN, damage=None), None
        if zeros:
            where = "in the next segment" if written_behind else f"at commit log offset {readable}"
            problem = CorruptFile(str(segment.path), f"zeros inside the log {where}", offset=batch.end - segment.start)
            batch = replace(batch, state=End.DAMAGED, damage=problem)
        # The place may have been read before the broker finished it. Now more is written after it, so it is final.
        if self._is_message(segment, batch.end):
            return replace(batch, state=End.MORE, damage=None), None
        return batch, readable

    def _is_message(self, segment: Segment, offset: int) -> bool:
        """Return whether a message, or the final blank, begins at an offset."""
        again = self._decode(segment, offset, min(self.chunk_bytes, _BEHIND_DAMAGE))
        return bool(again.messages) or again.state in (End.MORE, End.SEGMENT)

    def _read_damage(self, segment: Segment, begin: int, end: int) -> NonMessage | None:
        """Return checksums of the offsets [begin, end) of a segment, as far as its file reaches.

        None if `begin` has a message by now. The order of the reads matters: a later write changes these bytes, and an
        earlier write shows as a message at `begin`.
        """
        at, size, first, whole = begin, min(end - begin, _HEAD_OF_DAMAGE), 0, 0
        while at < end and (data := segment.read(min(end - at, _PIECE), at - segment.start)):
            first = first if at > begin else zlib.crc32(data[:size])
            at, whole = at + len(data), zlib.crc32(data, whole)
        return None if self._is_message(segment, begin) else NonMessage(begin, at, min(size, at - begin), first, whole)

    def _is_old(self, segment: Segment, offset: int, newest_ms: int | None) -> bool:
        """Return whether messages at an offset are older than `newest_ms`: left by a cut, which zeroes nothing."""
        if newest_ms is None:
            return False
        for chunk in (min(self.chunk_bytes, _BEHIND_DAMAGE), self.chunk_bytes):  # a small chunk usually suffices
            last_ms = self._decode(segment, offset, chunk).last_store_ms
            if last_ms is None or last_ms >= newest_ms:
                return False
        return True

    def _readable_behind(self, segment: Segment, at: int) -> int | None:
        """Return the first offset after byte `at` where a whole, checked message or the final blank begins."""
        following, step = at + 1, max(min(self.chunk_bytes, _BEHIND_DAMAGE), 8 * MIN_MESSAGE_BYTES)
        while following < segment.file_size:
            data = segment.read(step + MIN_MESSAGE_BYTES, following)
            window, following = following, following + step
            step = max(min(2 * step, self.chunk_bytes), 8 * MIN_MESSAGE_BYTES)
            if data == bytes(len(data)):  # most of a live segment; comparing is much faster than searching
                continue
            for place in candidates(data, segment.start + window, segment_bytes=segment.end - segment.start - window):
                offset = segment.start + window + place
                if data[place + 4 : place + 8] == BLANK_MAGIC:
                    return offset
                try:
                    self.read(offset)
                except CorruptFile:
                    continue
                return offset
        return None


def _read_within(segment: Segment, offset: int, size: int | None) -> Message:
    """Return the message at an offset of a segment. Raises `CorruptFile`, `FileNotFoundError`."""
    at = offset - segment.start
    length = size if size is not None and size <= _UNCHECKED_BYTES else _claimed(segment, at, offset)
    data = segment.read(length, at)
    return decode_message(data, file=str(segment.path), file_offset=at, physical_offset=offset, size=size)


def _topic_within(segment: Segment, offset: int) -> str | None:
    at = offset - segment.start
    head, left = segment.read(HEAD_BYTES, at), segment.file_size - at
    return peek_topic(head, left, offset, lambda begin, size: segment.read(size, at + begin))


def _claimed(segment: Segment, at: int, offset: int, *, at_once: int = _UNCHECKED_BYTES) -> int:
    """Return the size of the message at byte `at`. Check its lengths if it is longer than `at_once`."""
    file = str(segment.path)
    claim = check_head(
        segment.read(HEAD_BYTES, at), segment.file_size - at, file=file, file_offset=at, physical_offset=offset
    )
    if claim.size > at_once:
        tail = segment.read(claim.size - claim.tail_at, at + claim.tail_at)
        check_tail(claim, tail, file=file, file_offset=at)
    return claim.size
