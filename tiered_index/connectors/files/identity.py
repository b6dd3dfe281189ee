"""What a file is: the text that it holds. Tells whether a file has the rows that the log knows of one.

The size, the ETag, the device and the inode of a file, and its time of change, are hints: a file with equal hints is
not read. Otherwise its content decides:

- Of a text, the log has the CRC32 of each block of its decompressed bytes. If the first block is another one, it is
  another log. If a later block is, the text before that block is the same, and its rows keep their offsets.
- A text that has grown is read at its first and its last known block. A text of the same size is read as a whole,
  because an edit may be anywhere; of gzip with one member, the CRC32 and the length at its end say the same.
- Of Parquet and Arrow, the log has the CRC32 of each block of the file, and one of the first and the last bytes until
  these are read. A file with another block is another table.

One thread.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import struct
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import IO, Any, NamedTuple

import numpy as np

from tiered_index.base.kernels import crc32
from tiered_index.connectors.files.listing import HEAD_BYTES, SourceFile
from tiered_index.connectors.files.rows.arrow import FILE_MAGIC, STREAM_MAGIC
from tiered_index.connectors.files.rows.forms import PARQUET_MAGIC, rows_of_form
from tiered_index.connectors.files.rows.mapping import RowRule
from tiered_index.connectors.files.rows.places import HeldFile, LocalFile, StoredFile
from tiered_index.connectors.files.rows.table import TABLES
from tiered_index.connectors.files.rows.text import (
    BLOCK_BYTES,
    BlockSums,
    TextBlocks,
    TextFile,
    compression_of,
    decompressed,
    text_before_damage,
)
from tiered_index.format.segments.segment import LOST, LinkedSegment, Times

# of gzip: CRC32 and length of the text, modulo 2**32
_TRAILER = struct.Struct("<II")
_POLYNOMIAL = 0xEDB88320
_ALL = 1 << 62

_SUFFIX = re.compile(r"(\.(gz|bz2|xz|zst|\d+|old|bak)|[.-]\d{4}-?\d\d-?\d\d([-_.T]?\d\d(-?\d\d)*)?|~)$")
_BACKUP = re.compile(r"(\.bak|~)$")


class Block(NamedTuple):
    """A block of a known text: where it begins, its bytes, and their CRC32."""

    begin: int
    length: int
    crc32: int


class OldOffsets(NamedTuple):
    """Offsets [start, end) of rows that a new reading replaces, and the times of their segment."""

    start: int
    end: int
    times: Times | None


@dataclass(eq=False)
class KnownFile:
    """What the log knows of a file: its segments by position, each of which counts up to the begin of the next one.

    `durable` is the offset before which all rows of the log are durable. So a segment whose reading was interrupted
    counts up to there. A segment with a lesser position than the end of those before it was read anew from there on.
    """

    segments: list[LinkedSegment]
    durable: int = _ALL

    def set_segments(self, segments: Sequence[LinkedSegment]) -> None:
        """Put other segments in the place of these."""
        self.segments = list(segments)
        self.__dict__.pop("blocks", None)

    @property
    def last(self) -> LinkedSegment:
        """The newest segment, which has the URI, the size and the hints of the file."""
        return self.segments[-1]

    @property
    def uri(self) -> str:
        """The URI of the file."""
        return self.last.uri

    @property
    def is_lost(self) -> bool:
        """Whether no file has its text any more, as far as is known."""
        return self.last.etag == LOST

    @property
    def is_table(self) -> bool:
        """Whether it is a file with columns."""
        return self.last.format in TABLES

    @property
    def inode(self) -> str | None:
        """The device and the inode of a local file."""
        is_local = self.uri.startswith("file:") and not self.is_lost
        return self.last.etag.rpartition("-")[0] if is_local else None

    def is_read_otherwise(self, wanted: RowRule) -> bool:
        """Return whether its rows were read in another way than the wanted one."""
        return any(map(wanted.is_other, self.segments))

    @property
    def unfinished(self) -> list[LinkedSegment]:
        """The segments that a run has not finished: they are open, or not all of their rows are durable."""
        return [segment for segment in self.segments if segment.is_open or segment.end > self.durable]

    def parts(self) -> Iterator[tuple[LinkedSegment, int]]:
        """Yield the segments, each with the position before which its rows count: those that are read, or known."""
        for segment, following in itertools.zip_longest(self.segments, self.segments[1:]):
            length = segment.length
            if segment.is_open:
                length = max(0, min(segment.end, self.durable) - segment.start)
            end = segment.position + length
            yield segment, end if following is None else min(end, following.position)

    def offsets(self) -> Iterator[tuple[int, int]]:
        """Yield the offsets [start, end) of the rows that count, for each segment."""
        for segment, end in self.parts():
            shift = segment.start - segment.position
            yield segment.start, max(segment.start, end + shift)

    @property
    def end(self) -> int:
        """The position before which its rows are indexed, or will be without a look at what follows."""
        return max((end for _, end in self.parts()), default=0)

    @property
    def durable_end(self) -> int:
        """The position before which its rows are durable."""
        return min(
            (max(segment.position, self.durable - segment.start + segment.position) for segment in self.unfinished),
            default=self.end,
        )

    @cached_property
    def blocks(self) -> list[Block]:
        """The known blocks of the text from its first byte on, up to one that is not known.

        The last block of a segment that was cut reaches into the next segment.
        """
        blocks, reached = list[Block](), 0
        for segment, end in [] if self.is_table else self.parts():
            if segment.blocks is None or segment.position > reached:
                if end > reached:
                    break
                continue
            blocks += _blocks_of(segment, end)
            reached = max(reached, *(block.begin + block.length for block in blocks[-1:]), 0)
        return blocks

    def has_hints(self, listed: SourceFile) -> bool:
        """Return whether a file has the size and the hints that this one had."""
        return listed.is_same(self.last.size_bytes, self.last.etag)

    def segment_at(self, position: int) -> LinkedSegment:
        """Return the segment that has a position."""
        return next(segment for segment in reversed(self.segments) if segment.position <= position)

    def offsets_from(self, position: int) -> list[OldOffsets]:
        """Return the offsets of the rows from a position on, with those that are reserved for further ones."""
        ranges = list[OldOffsets]()
        for segment, following in itertools.zip_longest(self.segments, self.segments[1:]):
            shift, end = segment.start - segment.position, segment.position + segment.length
            begin = max(position, segment.position)
            end = end if following is None else min(end, following.position)
            if begin < end:
                ranges.append(OldOffsets(begin + shift, end + shift, segment.times))
        return ranges


def _blocks_of(segment: LinkedSegment, end: int) -> Iterator[Block]:
    """Yield the known blocks of a segment of a text that begin before a position, but always the first one."""
    length, sums = segment.blocks or (1, ())
    # a reading that was interrupted has only the sum of the first bytes
    covered = length if segment.is_open else segment.length
    for number, crc in enumerate(sums):
        if (begin := number * length) < max(1, end - segment.position):
            yield Block(segment.position + begin, min(length, covered - begin), crc)


def _blocks_of_table(segment: LinkedSegment) -> Iterator[Block]:
    """Yield the blocks of a file with columns; none if they are not known."""
    length, sums = segment.blocks or (1, ())
    for number, crc in enumerate(sums):
        yield Block(number * length, min(length, segment.size_bytes - number * length), crc)


def has_rows(listed: SourceFile, segment: LinkedSegment, end: int) -> bool:
    """Return whether a file has the rows of a segment before position `end`, whatever it has elsewhere.

    Raises as `what_is`.
    """
    content = Content(listed)
    if segment.format in TABLES:
        return segment.blocks is not None and content.is_table_of(segment)
    blocks = list(_blocks_of(segment, end))
    return bool(blocks) and content.same_until(blocks)[0] == blocks[-1].begin + blocks[-1].length >= end


@dataclass(frozen=True, slots=True)
class Same:
    """The file has the known rows, and none behind them. `is_part`: it has only the first ones of them.

    `is_damaged`: it can't be read as a whole, as is known.
    """

    is_part: bool = False
    is_damaged: bool = False


@dataclass(frozen=True, slots=True)
class Grown:
    """The file has the known rows, and perhaps others from `position` on, the end of what is indexed."""

    position: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The file has the known rows before `position`, the begin of a row. From there on it is read anew.

    `is_known`: it has all that is known of the rows, because the run that read the rest was killed.
    """

    position: int
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class Other:
    """The file has other rows."""


Verdict = Same | Grown | Cut | Other


def what_is(listed: SourceFile, known: KnownFile) -> Verdict:
    """Return what a file is, compared with a known one, by its content alone.

    Raises the storage's errors, `InvalidArgument` for a file that can't be opened.
    """
    content = Content(listed)
    if known.is_table != (content.table_format is not None):
        return Other()
    if known.end == 0:
        return Grown(0)
    if known.is_table:
        blocks = known.last.blocks
        if known.last.format != content.table_format:
            return Other()
        if blocks is None or (blocks[0] == known.last.size_bytes and blocks == content.first_digest):
            # a run was killed in its midst: it is read again as a whole
            return Cut(0, is_known=blocks is not None)
        if not content.is_table_of(known.last):
            return Other()
        return Grown(known.end) if known.unfinished else Same(is_damaged=known.last.damage is not None)
    return _what_text_is(content, known)


def _what_text_is(content: Content, known: KnownFile) -> Verdict:
    blocks, end = known.blocks, known.end
    if not blocks:
        # a run was killed in its midst
        return Cut(0)
    first, last = blocks[0], blocks[-1]
    if not content.has_block(first):
        return Other()
    # the blocks may go on behind the rows that are indexed
    reached = last.begin + last.length
    size_bytes = content.listed.size_bytes
    if content.compression is None and size_bytes > reached >= end and content.has_block(last):
        return Grown(end)
    if content.is_member_of(blocks, end):
        return Same()
    same_end, is_at_end, has_more = content.same_until(blocks)
    if same_end == reached:
        if reached >= end:
            was_damaged = known.last.damage is not None
            if has_more or reached > end or (content.is_damaged and not was_damaged):
                # the reading also says why a packed file is damaged behind its rows
                return Grown(end)
            return Same(is_damaged=content.is_damaged or (was_damaged and content.compression is None))
        # the rest was read by a run that was killed, or of a file that has gone meanwhile
        return Cut(content.row_begin(known, same_end), is_known=True)
    if is_at_end:
        return Same(is_part=True)
    return Cut(content.row_begin(known, same_end)) if same_end < end else Grown(end)


class Content:
    """The content of a file, which is read as far as it is asked for. Memory: a block, and the first 64 KiB."""

    def __init__(self, listed: SourceFile) -> None:
        self.listed = listed
        self.is_damaged = False
        """Whether a read of the text has ended before damage."""

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB of the file as it is stored."""
        return self.listed.head()

    @cached_property
    def compression(self) -> str | None:
        """The compression of a text; None: it has none."""
        return compression_of(self.head)

    @property
    def table_format(self) -> str | None:
        """The format of a file with columns; None: it is a text."""
        if self.head.startswith(PARQUET_MAGIC):
            return "parquet"
        return "arrow" if self.head.startswith((FILE_MAGIC, STREAM_MAGIC)) else None

    def is_table_of(self, segment: LinkedSegment) -> bool:
        """Return whether it is the content of a segment of a file with columns, which has blocks."""
        if self.listed.size_bytes != segment.size_bytes or self.table_format is None:
            return False
        return self.same_until(_blocks_of_table(segment))[0] == segment.size_bytes

    @property
    def first_digest(self) -> tuple[int, tuple[int]]:
        """What is known of a file with columns while it is read."""
        return first_digest(self.listed.file, self.listed.size_bytes)

    def first_bytes(self, size: int) -> bytes:
        """Return the first bytes of the text, fewer if it ends or is damaged there. Raises as `what_is`."""
        if self.compression is None and size <= HEAD_BYTES:
            return self.head[:size]
        with self.text() as handle:
            return self._read(handle, size)[0]

    @contextlib.contextmanager
    def text(self) -> Iterator[IO[bytes]]:
        """Yield the text, for reads from its begin on by `_read`."""
        file, compression = self.listed.file, self.compression
        with file.ahead() if compression is None else decompressed(file, compression, to_damage=True) as handle:
            yield handle

    def _read(self, handle: IO[bytes], size: int) -> tuple[bytes, bool]:
        """Return the next bytes of the text, fewer at its end or before damage, and whether a packed text is damaged.

        Raises `InvalidArgument` if the disk does not give those of another text.
        """
        data, damage = text_before_damage(self.listed.file, handle, self.compression, size)
        if damage is not None and self.compression is None:
            raise damage
        self.is_damaged = damage is not None
        return data, self.is_damaged

    def packed_format(self, text_format: str) -> str:
        """Return the format of a segment of a text, packed as this file is."""
        kind = text_format.partition("+")[0]
        return kind if self.compression is None else f"{kind}+{self.compression}"

    def has_block(self, block: Block) -> bool:
        """Return whether the text has a block. Of a packed text it must be the first one."""
        if self.compression is None:
            data = self.head if block.begin == 0 and block.length <= len(self.head) else b""
            data = data[: block.length] or self.listed.part(block.begin, block.length)
        else:
            assert block.begin == 0
            with self.text() as handle:
                data, _ = self._read(handle, block.length)
        return len(data) == block.length and crc32(data) == block.crc32

    def is_member_of(self, blocks: list[Block], end: int) -> bool:
        """Return whether the end of a file of gzip says that it is one member with a known text, and nothing else."""
        if self.compression != "gzip" or (combined := crc32_of(blocks, end)) is None:
            return False
        trailer = self.listed.part(max(0, self.listed.size_bytes - _TRAILER.size), _TRAILER.size)
        return len(trailer) == _TRAILER.size and _TRAILER.unpack(trailer) == (combined, end & 0xFFFFFFFF)

    def same_until(self, blocks: Iterable[Block]) -> tuple[int, bool, bool]:
        """Compare the text with blocks in order, up to the first other one.

        Return the end of the blocks that it has, whether it ends in the midst of the next one, and whether it goes on
        behind all of them. A packed text that is damaged ends there.
        """
        same_end, data, begin, is_damaged = 0, b"", 0, False
        with self.text() as handle:
            for block in blocks:
                while begin + len(data) < block.begin:
                    begin += len(data)
                    data, is_damaged = self._read(handle, min(BLOCK_BYTES, block.begin - begin))
                    if not data:
                        return same_end, True, is_damaged
                # of a segment that was cut, the last block reaches into the next one
                data, begin = data[block.begin - begin :], block.begin
                if (lacking := block.length - len(data)) > 0:
                    more, is_damaged = self._read(handle, lacking)
                    data += more
                if len(data) < block.length:
                    return same_end, not data or is_damaged, is_damaged
                if crc32(data[: block.length]) != block.crc32:
                    return same_end, False, False
                same_end = block.begin + block.length
            return same_end, False, bool(self._read(handle, 1)[0])

    def row_begin(self, known: KnownFile, position: int) -> int:
        """Return the begin of the row that has the byte before a position; the position itself if a row begins there.

        The text up to the position must be the known one.
        """
        segment = known.segment_at(position)
        if position == segment.position:
            return position
        rows = rows_of_form(self.listed.file, self.packed_format(segment.format), self.listed.size_bytes)
        assert isinstance(rows, TextFile), "a text"
        # a packed text may be damaged behind the position
        text = TextBlocks(rows, segment.position, position, goes_on=True)
        for _ in text.read():
            pass
        return text.end

    def facts_of(self, begin: int, length: int) -> dict[str, Any]:
        """Return `blocks` and `lines` of a segment of the text."""
        sums, lines_before, at = BlockSums(), 0, 0
        with self.text() as handle:
            while at < begin + length:
                size = min(BLOCK_BYTES, begin - at if at < begin else begin + length - at)
                data, _ = self._read(handle, size)
                if not data:
                    break
                newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
                if at < begin:
                    lines_before += len(newlines)
                else:
                    sums.update(data, newlines)
                at += len(data)
        return {"blocks": sums.blocks, "lines": (lines_before, sums.lines)}

    def texts(self) -> Generator[bytes]:
        """Yield the text in pieces. A packed text that is damaged ends there."""
        with self.text() as handle:
            while piece := self._read(handle, BLOCK_BYTES)[0]:
                yield piece


def is_earlier(backup: SourceFile, edited: SourceFile) -> bool:
    """Return whether most of the first lines of a text are among those of another one: then it was edited since.

    Raises as `what_is`.
    """
    contents = Content(backup), Content(edited)
    if any(content.table_format for content in contents):
        return False
    before, after = ({*content.first_bytes(BLOCK_BYTES).splitlines()} for content in contents)
    return 2 * len(before & after) > len(before)


def begins_with(longer: SourceFile, shorter: SourceFile) -> bool:
    """Return whether the text of a file begins with the whole text of another one, as far as that can be read.

    Files with columns are such if they are equal. Raises as `what_is`.
    """
    long, short = Content(longer), Content(shorter)
    is_table = long.table_format or short.table_format
    if is_table and (long.table_format != short.table_format or longer.size_bytes != shorter.size_bytes):
        return False
    are_plain = long.compression is short.compression is None
    if are_plain and not (shorter.size_bytes <= longer.size_bytes and long.head.startswith(short.head)):
        return False
    has_text, held, at = False, b"", 0
    with contextlib.closing(long.texts()) as pieces:
        for piece in short.texts():
            while len(held) - at < len(piece):
                if not (more := next(pieces, b"")):
                    return False
                held, at = held[at:] + more, 0
            if held[at : at + len(piece)] != piece:
                return False
            has_text, at = True, at + len(piece)
    return has_text


def first_digest(file: LocalFile | StoredFile, size_bytes: int) -> tuple[int, tuple[int]]:
    """Return the size and a CRC32 of the first and the last 64 KiB of a file. Raises the storage's errors."""
    with file.ranges() as handle:
        head = handle.read(min(HEAD_BYTES, size_bytes))
        handle.seek(max(0, size_bytes - HEAD_BYTES))
        return size_bytes, (crc32(handle.read(min(HEAD_BYTES, size_bytes)), crc32(head)),)


def first_text(file: LocalFile | StoredFile, head: bytes, compression: str) -> bytes:
    """Return the first bytes of the text of a packed file, as far as its first bytes `head` have them."""
    with decompressed(HeldFile(file, head), compression, to_damage=True) as handle:
        return text_before_damage(file, handle, compression, HEAD_BYTES)[0]


def crc32_of(blocks: Iterable[Block], end: int) -> int | None:
    """Return the CRC32 of a text with blocks up to `end`; None: they are not one after the other, or end elsewhere.

    The CRC32 of two texts is that of the first one with as many zero bytes behind it as the second one has, xor that of
    the second one. Zero bytes are a linear function on the bits of a CRC32.
    """
    combined = reached = 0
    for block in blocks:
        if block.begin != reached:
            return None
        combined = _product(_zeros(block.length), combined) ^ block.crc32
        reached = block.begin + block.length
    return combined if reached == end else None


_Matrix = tuple[int, ...]


def _product(matrix: _Matrix, vector: int) -> int:
    product = 0
    for row in matrix:
        if not vector:
            break
        if vector & 1:
            product ^= row
        vector >>= 1
    return product


@lru_cache(1024)
def _zeros(length: int) -> _Matrix:
    """Return the function of `length` zero bytes on a CRC32: the image of each of its bits."""
    if length == 0:
        return tuple(1 << bit for bit in range(32))
    half = _zeros(length // 2)
    matrix = tuple(_product(half, row) for row in half)
    return tuple(_product(_ONE_ZERO, row) for row in matrix) if length % 2 else matrix


def _one_zero() -> _Matrix:
    matrix: _Matrix = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    for _ in range(3):
        matrix = tuple(_product(matrix, row) for row in matrix)
    return matrix


_ONE_ZERO = _one_zero()


def names_before(name: str) -> list[str]:
    """Return the names that a file had before it was packed or rotated: `name` without its last suffixes, one by one.

    ``app.log.1.gz`` gives ``app.log.1`` and ``app.log``.
    """
    names = list[str]()
    while (suffix := _SUFFIX.search(name)) is not None and suffix.start():
        names.append(name := name[: suffix.start()])
    return names


def backed_up(uri: str) -> str | None:
    """Return the URI of a file of which an editor or `sed` has made the one at a URI, by its name; None: it is none."""
    return uri[: suffix.start()] if (suffix := _BACKUP.search(uri)) is not None else None


def first_name(uri: str) -> str:
    """Return the name that a file had before all rotations."""
    name = uri[uri.rfind("/") + 1 :]
    return [name, *names_before(name)][-1]
