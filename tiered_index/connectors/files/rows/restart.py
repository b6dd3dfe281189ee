"""Restart points of packed text: places from which it is decompressed again without what is before them.

A point of gzip is the begin of a block of Deflate. It needs the 32 KiB of text before it, the window, because a block
may repeat them. The begin of a member of gzip or of a frame of zstd needs none. Bzip2 and xz have no points. No library
notes blocks of gzip without a second decompression, so `PackedText` finds them by their headers. It takes a place only
if decompressing from there with the window gives the same text. One thread uses a text.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.base.kernels import compressed, gzip_error, inflater
from tiered_index.connectors.archive.columns import ArchiveFormat, group_rows
from tiered_index.connectors.archive.erasure import may_have
from tiered_index.connectors.files.rows.streams import StreamedText
from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.names import POINTS, points_store
from tiered_index.format.segments.archived import footer_bytes_of
from tiered_index.format.segments.columnar import NUMBER, byte_lengths, row_group_before
from tiered_index.service.jobs.erase import EraseRequest
from tiered_index.service.jobs.segments.erase_segments import FoundMessages
from tiered_index.service.jobs.segments.uploads import send_segment
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import SentObject
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.answers.messages import Search
from tiered_index.service.read.segments.archive import SegmentArchive

SPACING_BYTES = 4 << 20
"""About the most text between two points."""
WINDOW_BYTES = 32 << 10
# a block is looked for from so many bytes of text before the spacing is full
_EARLY_BYTES = 512 << 10
# compressed bytes that are read at a time: they may have 1,000 times as many bytes of text
_PIECE_BYTES = 32 << 10
# most pieces in which a block is looked for, and the bytes of one look
_PIECES, _LOOK_BYTES = 4, 8 << 10
# most text of these pieces
_MOST_HELD_BYTES = 16 << 20
# text that is so many times as long as its packed bytes is read again sooner than a place in it is proved
_MOST_RATIO = 256
# least bytes of text that must be the same
_PROOF_BYTES = 1 << 10
_RESTARTED_BYTES = 1 << 20
_SCHEMA = pa.schema({NUMBER: pa.int64(), "position": pa.int64(), "bit": pa.int64(), "window": pa.binary()})


def _window_bytes(points: pa.Table) -> npt.NDArray[np.int64]:
    return byte_lengths(points, ["window"])


# no text of these is compressed: windows are, by zlib
_FORMAT = ArchiveFormat("restart points", "tiered_index.points", 1, _SCHEMA, text_bytes=_window_bytes)
# CRC32 and length behind the last block of a member
_TRAILER_BYTES = 8
_GZIP = 31
_DEFLATE = -15
# the order of the lengths of codes in the header of a block does not matter: their sum does
_CODES = np.arange(19, dtype=np.uint64)
_WEIGHTS = np.array([0, 64, 32, 16, 8, 4, 2, 1], np.int64)


_INFLATER_ERRORS = zlib.error, gzip_error
RESTARTED = ("gzip", "zstd")
"""The compressions that have restart points."""


# of zstd (RFC 8878): the magic numbers of a frame, and of one that is skipped, with any low four bits in place of 0
_FRAME, _SKIPPED_FRAME = 0xFD2FB528, 0x184D2A50
# what is read before damage is found by reads of so many bytes, the largest first
_STEPS_BYTES = 64 << 10, 256, 1
# packed bytes that are decompressed together, up to the end of their last frame
_FRAMES_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RestartPoint:
    """A place of a packed text: `position` in the text, and `bit` in the file.

    `window` is the text before it, compressed by zlib; empty if it needs none.
    """

    position: int
    bit: int
    window: bytes = b""


class PackedText:
    """The text of a file of gzip of any number of members, from its begin, with restart points.

    Raises `zlib.error`, `EOFError`, `OSError` and `gzip_error` for damage, behind the text before it. Memory: the text
    of some pieces.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._begin = raw, raw.tell()
        # the packed bytes before the present member, and the error behind the text that is ready
        self._member_at = 0
        self._error: Exception | None = None
        self.points: list[RestartPoint] = []
        self._inflater: Any = inflater(_GZIP)
        # in a member
        self._is_begun = False
        self._ready, self._at = b"", 0
        # the bytes of the file and of the text so far
        self._packed_bytes = self._text_bytes = 0
        self._last = 0
        # the last text, and while a block is looked for the pieces with their text
        self._tail, self._held, self._looked = b"", b"", 0
        self._pieces = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes of the text, at most `size`; empty at its end."""
        while self._at == len(self._ready):
            if self._error is not None:
                raise self._error
            if not (piece := self._raw.read(_PIECE_BYTES)):
                if self._is_begun:
                    raise EOFError("it is cut off")
                return b""
            self._ready, self._at = self._inflated(piece), 0
        data = self._ready[self._at : self._at + size]
        self._at += len(data)
        return data

    def _inflated(self, piece: bytes) -> bytes:
        texts = list[bytes]()
        while piece:
            if not self._is_begun:
                rest = piece.lstrip(b"\0")
                self._packed_bytes += len(piece) - len(rest)
                if not (piece := rest):
                    break
                if self._text_bytes - self._last >= SPACING_BYTES - _EARLY_BYTES:
                    self._note(RestartPoint(self._text_bytes, self._packed_bytes * 8))
                self._inflater, self._is_begun, self._member_at = inflater(_GZIP), True, self._packed_bytes
            try:
                text = bytes(self._inflater.decompress(piece))
            except _INFLATER_ERRORS as error:
                self._error = error
                return b"".join([*texts, self._before_damage(piece)])
            is_end = self._inflater.eof
            rest = self._inflater.unused_data if is_end else b""
            # some of the rest may be of an earlier piece
            self._packed_bytes += len(piece) - len(rest)
            self._text_bytes += len(text)
            texts.append(text)
            if is_end:
                # its last block has no text behind it that proves a place
                self._forget(b"")
                self._is_begun = False
            else:
                self._look(piece, text)
            piece = rest
        return texts[0] if len(texts) == 1 else b"".join(texts)

    def _before_damage(self, piece: bytes) -> bytes:
        """Return the text of a damaged piece before its damage: the member is decompressed again up to there."""
        self._raw.seek(self._begin + self._member_at)
        again, left, texts = inflater(_GZIP), self._packed_bytes - self._member_at, list[bytes]()
        with contextlib.suppress(*_INFLATER_ERRORS):
            while left and (before := self._raw.read(min(left, _PIECE_BYTES))):
                again.decompress(before)
                left -= len(before)
            for at in range(len(piece)):
                texts.append(bytes(again.decompress(piece[at : at + 1])))
        return b"".join(texts)

    def _note(self, point: RestartPoint) -> None:
        self.points.append(point)
        self._last = point.position

    def _forget(self, tail: bytes) -> None:
        self._tail, self._held, self._looked, self._pieces = tail, b"", 0, 0

    def _look(self, piece: bytes, text: bytes) -> None:
        """Look for the begin of a block in the last pieces, if a point is due."""
        if self._text_bytes - self._last < SPACING_BYTES - _EARLY_BYTES:
            self._tail = (self._tail + text)[-WINDOW_BYTES:] if len(text) < WINDOW_BYTES else text[-WINDOW_BYTES:]
            return
        if len(text) > max(WINDOW_BYTES, _MOST_RATIO * len(piece)):
            self._forget(text[-WINDOW_BYTES:])
            return
        self._held += piece
        self._tail += text
        self._pieces += 1
        begin = (self._packed_bytes - len(self._held)) * 8
        for bit in self._candidates():
            if (behind := self._proved(bit)) is not None:
                self._note(RestartPoint(self._text_bytes - behind, begin + bit, compressed(self._window(behind))))
                self._forget(self._tail[-WINDOW_BYTES:])
                return
        if self._pieces == _PIECES or len(self._tail) > _MOST_HELD_BYTES:
            # looked for again after as much text as a look begins early
            self._last += _EARLY_BYTES
            self._forget(self._tail[-WINDOW_BYTES:])

    def _candidates(self) -> Iterator[int]:
        """Yield the bits of the held pieces that may begin a block, and were not looked at."""
        while self._looked < len(self._held) - 2 * _PROOF_BYTES:
            end = min(self._looked + _LOOK_BYTES, len(self._held) - 2 * _PROOF_BYTES)
            bits = block_begins(self._held[self._looked : end + 16], end - self._looked) + 8 * self._looked
            self._looked = end
            yield from bits.tolist()

    def _proved(self, bit: int) -> int | None:
        """Return the bytes of text behind a bit of the held pieces, if a block begins there; else None."""
        packed = _led_in(self._held[bit // 8 :], bit % 8)
        try:
            # without its window it has other bytes, but as many
            length = len(self._inflated_again(packed, bytes(WINDOW_BYTES)))
            if length < _PROOF_BYTES or length + WINDOW_BYTES > len(self._tail):
                return None
            text = self._inflated_again(packed, self._window(length))
        except zlib.error:
            return None
        return length if text == self._tail[len(self._tail) - length :] else None

    def _inflated_again(self, packed: bytes, window: bytes) -> bytes:
        return zlib.decompressobj(_DEFLATE, window).decompress(packed, len(self._tail))

    def _window(self, length: int) -> bytes:
        end = len(self._tail) - length
        return self._tail[max(0, end - WINDOW_BYTES) : end]


class _Frames:
    """The bytes of frames of zstd, for a decompressor that ends behind some of them. It leaves out skipped frames.

    `begin` is the position of the last frame, relative to where the file was. Bytes that are no frame are given as
    they are, so that the decompressor refuses them.
    """

    closed = False

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._taken = raw, 0
        self._chunks = self._parsed()
        self._ready = b""
        # of frames since `go_on`
        self._bytes, self._is_behind = 0, False
        self.begin = 0

    def go_on(self) -> bool:
        """Give further frames, and return whether there are some."""
        self._bytes, self._is_behind = 0, False
        self._ready = next(filter(None, self._chunks), b"")
        return bool(self._ready)

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; empty behind a frame that ends the run, or at the file's end."""
        while not (self._ready or self._is_behind):
            chunk = next(self._chunks, b"")
            self._is_behind = chunk == b"" or (chunk is None and self._bytes >= _FRAMES_BYTES)
            self._ready = chunk or b""
        data, self._ready = self._ready[:size], self._ready[size:]
        self._bytes += len(data)
        return data

    def close(self) -> None:
        """Do nothing: the file is the caller's."""

    def _parsed(self) -> Iterator[bytes | None]:
        """Yield the bytes of frames by header and block, and None behind each frame."""
        while True:
            self.begin = self._taken
            if not (magic := self._take(4)):
                return
            if int.from_bytes(magic, "little") & ~15 == _SKIPPED_FRAME:
                left = int.from_bytes(self._take(4), "little")
                while left and (skipped := self._take(min(left, _RESTARTED_BYTES))):
                    left -= len(skipped)
                continue
            if int.from_bytes(magic, "little") != _FRAME:
                yield magic
                yield from iter(lambda: self._take(_FRAMES_BYTES), b"")
                return
            described = self._take(1)
            flags = described[0] if described else 0
            is_single = flags >> 5 & 1
            # window, dictionary and length of the text
            header_bytes = 1 - is_single + (0, 1, 2, 4)[flags & 3] + (is_single, 2, 4, 8)[flags >> 6]
            yield magic + described + self._take(header_bytes)
            is_last = False
            while not is_last:
                header = self._take(3)
                number = int.from_bytes(header, "little")
                # a block of one byte that is repeated has the number of repeats for its length
                yield header + self._take(1 if number >> 1 & 3 == 1 else number >> 3)
                is_last = bool(number & 1) or len(header) < 3
            if flags >> 2 & 1:
                yield self._take(4)
            yield None

    def _take(self, size: int) -> bytes:
        """Return the next bytes of the file, fewer only at its end."""
        data = self._raw.read(size)
        while len(data) < size and (more := self._raw.read(size - len(data))):
            data += more
        self._taken += len(data)
        return data


class FramedText:
    """The text of a file of any number of frames of zstd, from its begin, with restart points: frames need no window.

    Raises `OSError` for damage, behind the text before it. Memory: some blocks.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._begin = raw, raw.tell()
        self._frames, self._text_bytes, self._last = _Frames(raw), 0, 0
        # the place and the text of the frames that are read, and the error behind the text before damage
        self._frames_at = self._of_frames = 0
        self._error: OSError | None = None
        self._unpacked: Any = None
        self.points: list[RestartPoint] = []

    def read(self, size: int) -> bytes:
        """Return the next bytes of the text, at most `size`; empty at its end."""
        while True:
            if self._error is not None:
                raise self._error
            if self._unpacked is None:
                if not self._frames.go_on():
                    return b""
                self._frames_at, self._of_frames = self._begin + self._frames.begin, 0
                if self._text_bytes - self._last >= SPACING_BYTES - _EARLY_BYTES:
                    self._last = self._text_bytes
                    self.points.append(RestartPoint(self._text_bytes, self._frames.begin * 8))
                self._unpacked = pa.CompressedInputStream(pa.PythonFile(self._frames, "r"), "zstd")
            try:
                data = bytes(self._unpacked.read(size))
            except OSError as error:
                data, self._error = self._before_damage(), error
            if data:
                self._text_bytes += len(data)
                self._of_frames += len(data)
                return data
            self._unpacked = None

    def _before_damage(self) -> bytes:
        """Return the text before the damage that a read has met: it gives no part of what it was asked for."""
        pieces = list[bytes]()
        for step in _STEPS_BYTES:
            self._raw.seek(self._frames_at)
            frames = _Frames(self._raw)
            frames.go_on()
            unpacked, left = pa.CompressedInputStream(pa.PythonFile(frames, "r"), "zstd"), self._of_frames
            left += sum(map(len, pieces))
            with contextlib.suppress(OSError):
                while left:
                    left -= len(unpacked.read(min(left, _STEPS_BYTES[0])))
                while piece := unpacked.read(step):
                    pieces.append(piece)
        return b"".join(pieces)


PointedText: TypeAlias = PackedText | FramedText
"""The text of a packed file with restart points."""


def packed_text(raw: IO[bytes], compression: str) -> PointedText | StreamedText:
    """Return the text of a file from where it is on: its begin, or the begin of a member or frame."""
    if compression in RESTARTED:
        return FramedText(raw) if compression == "zstd" else PackedText(raw)
    return StreamedText(raw, compression)


def block_begins(data: bytes, length: int) -> npt.NDArray[np.int64]:
    """Return the bits of the first `length` bytes at which a block with codes of its own may begin.

    `data` has 16 bytes more, fewer at the end. Such a header has 17 bits of numbers, and then the lengths of up to 19
    codes in 3 bits each. The codes are complete: 2**-length adds up to 1. Memory: 100 bytes for each bit.
    """
    units = np.frombuffer(data + bytes(16), np.uint8)
    # the 64 bits from each byte on: of a bit of the byte on, 57 of them
    words = np.zeros(len(units) - 8, np.uint64)
    for at in range(8):
        words |= units[at : at + len(words)].astype(np.uint64) << np.uint64(8 * at)
    begins = []
    for bit in range(8):
        heads = words[:length] >> np.uint64(bit)
        is_head = (heads & np.uint64(7)) == 4
        is_head &= ((heads >> np.uint64(3)) & np.uint64(31)) <= 29
        is_head &= ((heads >> np.uint64(8)) & np.uint64(31)) <= 29
        places = np.flatnonzero(is_head)
        counts = ((heads[places] >> np.uint64(13)) & np.uint64(15)).astype(np.int64) + 4
        behind = 8 * places + bit + 17
        codes = words[behind // 8] >> (behind % 8).astype(np.uint64)
        lengths = ((codes[:, None] >> (_CODES * np.uint64(3))) & np.uint64(7)).astype(np.int64)
        lengths[_CODES.astype(np.int64) >= counts[:, None]] = 0
        is_complete = _WEIGHTS[lengths].sum(axis=1) == 128
        begins.append(8 * places[is_complete] + bit)
    return np.sort(np.concatenate(begins))


def _bits(*fields: tuple[int, int]) -> tuple[int, int]:
    """Return fields of (value, number of bits) as one, the first field in the lowest bits."""
    value = count = 0
    for field, bits in fields:
        value, count = value | field << count, count + bits
    return value, count


# A block without text of 10 bits: fixed codes and the end's code. Another one of 93 bits, with codes of its own: only
# the end's code and one distance. Their lengths are written by codes for "length 1" and for "n zeros", of 1 bit each.
_EVEN = _bits((0b010, 3), (0, 7))
_ODD = _bits(
    *((0b100, 3), (0, 5), (0, 5), (15, 4)),
    *((1 if at in (2, 17) else 0, 3) for at in range(19)),
    *((1, 1), (127, 7), (1, 1), (107, 7), (0, 1), (0, 1), (0, 1)),
)


def _lead_in(bit: int) -> tuple[int, int]:
    odd = [_ODD] if bit % 2 else []
    return _bits(*odd, *[_EVEN] * ((bit - _ODD[1] * len(odd)) % 8 // 2))


_LEAD_INS = [_lead_in(bit) for bit in range(8)]


def _led_in(data: bytes, bit: int) -> bytes:
    """Return a stream of Deflate from a bit (0 to 7) of the first byte on, behind blocks without text in its place.

    So all bytes stay where they are: blocks that are not compressed begin at whole bytes.
    """
    value, count = _LEAD_INS[bit]
    value |= (data[0] >> bit << bit) << (count - bit)
    return value.to_bytes(count // 8 + 1, "little") + data[1:]


class RestartedText:
    """The text of a file from a restart point on. If it has a window, `first_bytes` are read at first, then 1 MiB each.

    Raises as `PackedText`.
    """

    def __init__(self, raw: IO[bytes], point: RestartPoint, first_bytes: int, compression: str = "gzip") -> None:
        self._raw, self._at, self._bit = raw, point.bit // 8, point.bit % 8
        raw.seek(self._at)
        self._next_bytes, self._left, self._is_begun = first_bytes, b"", False
        window = zlib.decompress(point.window) if point.window else b""
        self._inflater = zlib.decompressobj(_DEFLATE, window)
        # of members behind that of the block, or from one on that begins at the point
        self._members = None if window else packed_text(raw, compression)

    def read(self, size: int) -> bytes:
        """Return the next bytes of the text, at most `size`; empty at its end."""
        while self._members is None:
            text = self._inflater.decompress(self._left, size)
            # at the end, they are unused
            self._left = b"" if self._inflater.eof else self._inflater.unconsumed_tail
            if text:
                return text
            if self._inflater.eof:
                self._raw.seek(self._at - len(self._inflater.unused_data) + _TRAILER_BYTES)
                self._members = PackedText(self._raw)
            elif not (piece := self._raw.read(self._next_bytes)):
                raise EOFError("it is cut off")
            else:
                self._at += len(piece)
                self._left += piece if self._is_begun else _led_in(piece, self._bit)
                self._next_bytes, self._is_begun = _RESTARTED_BYTES, True
        return self._members.read(size)


def encode_points(points: Sequence[tuple[int, RestartPoint]]) -> bytes:
    """Return the archived file of points, each with the offset of its text."""
    rows = [{NUMBER: offset, "position": at.position, "bit": at.bit, "window": at.window} for offset, at in points]
    return _FORMAT.encode(pa.Table.from_pylist(rows, _SCHEMA))


def taken_points(points: list[RestartPoint], begin: int, end: int, shift: int) -> list[tuple[int, RestartPoint]]:
    """Return the points of a text before offset `end`, and remove all but the last: it is for later offsets, too.

    Each has its offset, its position and `shift`. Of the points up to offset `begin`, the last one is at `begin`.
    """
    offsets = [(max(begin, point.position + shift), point) for point in points if point.position + shift < end]
    if begin >= end or not offsets:
        return []
    del points[: len(offsets) - 1]
    return [*dict(offsets).items()]


def send_points(
    log: StorageLog, store: str, begin: int, end: int, points: Sequence[tuple[int, RestartPoint]]
) -> tuple[ArchivedSegment, SentObject]:
    """Send the points of offsets [`begin`, `end`) of a log of files, for a job, whose record names them.

    Raises as `send_segment`.
    """
    file = encode_points(points)

    def pieces(size: int) -> Iterator[bytes]:
        return (file[at : at + size] for at in range(0, len(file), size))

    columns, place = (end - begin, footer_bytes_of(file)), (points_store(store), begin)
    segment, publication = send_segment(log, place, len(file), pieces, b"", columns=columns)
    return segment, publication.sent


def point_before(
    archive: SegmentArchive, store: str, offset: int, search: Search
) -> tuple[RestartPoint, int | None] | None:
    """Return the last restart point of a log of files before an offset, and the bit of the next point if it is known.

    None: there is none. `search` is charged. Raises `ObjectNotFound` (removed), `CorruptFile`, the storage's errors.
    """
    reads = list[int]()
    segment = next(iter(archive.holding(offset, points_store(store), reads)), None)
    search.charge(reads)
    if segment is None:
        return None
    rows = group_rows(archive, segment, partial(row_group_before, number=offset), search).rows
    if rows is None:
        return None
    at = int(np.searchsorted(rows[NUMBER].to_numpy(), offset, side="right")) - 1
    row, *after = rows.slice(at, 2).to_pylist()
    return RestartPoint(row["position"], row["bit"], row["window"]), after[0]["bit"] if after else None


def has_points(segment: ArchivedSegment) -> bool:
    """Return whether an archived segment has restart points."""
    return segment.store.startswith(POINTS)


def windows_to_erase(request: EraseRequest, archive: SegmentArchive, segment: ArchivedSegment) -> FoundMessages:
    """Return points without those that have windows, because a window may have a row of the request."""
    if not may_have(segment.store, request):
        return FoundMessages()
    try:
        table = _FORMAT.read(archive, segment).records
    except (CorruptFile, ObjectNotFound) as error:
        return FoundMessages(problem=str(error))
    points = [
        (row[NUMBER], RestartPoint(row["position"], row["bit"])) for row in table.to_pylist() if not row["window"]
    ]
    return FoundMessages(file=encode_points(points)) if len(points) < len(table) else FoundMessages()
