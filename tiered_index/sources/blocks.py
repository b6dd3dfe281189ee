"""The text of bzip2 and xz, with restart points: each block is decompressed without what is before it.

A block of bzip2 begins at any bit, behind a magic number of 48 bits. It is given to the library behind the header of a
stream. Its text comes as a whole once the decompressor has all of its bits, so a magic number among the bits of a block
has no text since the one before it, and is no begin. The blocks of xz are found by the lengths in the chunks of LZMA2.
One thread uses a text.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import IO, Any

# most text that a decompressor gives at a time, and packed bytes that are read at a time
_PIECE_TEXT_BYTES = 1 << 20
_PIECE_BYTES = 32 << 10
# a block of bzip2 has at most 900,000 bytes, before bytes that are repeated are written out
_EARLY_BYTES = 1 << 20
_BLOCK, _END, _MAGIC_BITS = 0x314159265359, 0x177245385090, 48
# the header of a stream with blocks of any size
_STREAM = b"BZh9"
_XZ = b"\xfd7zXZ\0"
_XZ_HEADER_BYTES = 12
# bytes of the check behind a block, by the flags of its stream; most common first
_CHECK_BYTES = {4: 8, 1: 4, 10: 32, 0: 0}
_LZMA2, _DELTA = 0x21, 3
_MOST_HEADER_BYTES = 1024
# `xz -9` has 64 MiB
_MOST_DICTIONARY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class RestartPoint:
    """A place of a packed text: `position` in the text, and `bit` in the file.

    `window` is the text before it, compressed by zlib; empty if it needs none.
    """

    position: int
    bit: int
    window: bytes = b""


class BlockedText:
    """The text of a file of any number of streams, from its begin, or from the bit `begin` of a stream or block on.

    `points` has a block in each `spacing_bytes` of text. Raises `EOFError`, `OSError` and `LZMAError` for damage.
    Memory: some MiB, and what the library needs.
    """

    def __init__(self, raw: IO[bytes], compression: str, spacing_bytes: int, begin: int = 0) -> None:
        self._raw, self._spacing_bytes = raw, spacing_bytes
        self.points: list[RestartPoint] = []
        self._text_bytes = self._last = 0
        self._unpacker: Any = None
        self._make: Callable[[], Any] = bz2.BZ2Decompressor if compression == "bzip2" else _xz_unpacker
        self._magic = b"BZh" if compression == "bzip2" else _XZ
        # the first bytes of the stream
        self._head, self._is_ended = self._magic, False
        raw.seek(begin // 8)
        head = raw.read(len(_XZ)) if begin else b""
        raw.seek(begin // 8)
        if not begin or head.startswith((b"BZh", _XZ)):
            self._texts = self._of_bzip2() if compression == "bzip2" else self._of_xz()
        else:
            self._texts = self._of_bzip2_block(begin) if compression == "bzip2" else self._of_xz_blocks()
        self._ready, self._at = b"", 0

    def read(self, size: int) -> bytes:
        """Return the next bytes of the text, at most `size`; empty at its end."""
        if self._at == len(self._ready):
            self._ready, self._at = next(self._texts, b""), 0
        data = self._ready[self._at : self._at + size]
        self._at += len(data)
        return data

    def _unpacked(self, data: bytes) -> Iterator[bytes]:
        """Yield the text of the next bytes of the file, all that it has."""
        while data and not self._is_ended:
            if self._unpacker is None:
                if not (data := data.lstrip(b"\0")):
                    return
                self._unpacker, self._head = self._make(), b""
            self._head = (self._head + data[: len(self._magic)])[: len(self._magic)]
            while not self._unpacker.eof:
                try:
                    text = bytes(self._unpacker.decompress(data, _PIECE_TEXT_BYTES))
                except (OSError, lzma.LZMAError) as error:
                    if "emory" in str(error):
                        most = f"{_MOST_DICTIONARY_BYTES >> 20} MiB"
                        raise lzma.LZMAError(
                            f"its dictionary has more than {most}: pack it again by `xz -9`"
                        ) from error
                    if not self._text_bytes or self._head == self._magic:
                        raise
                    # what is behind the last stream, and is none, is ignored, as by the programs
                    self._is_ended, self._unpacker = True, None
                    return
                if not text and not data:
                    return
                data = b""
                self._text_bytes += len(text)
                if text:
                    yield text
            data, self._unpacker = self._unpacker.unused_data, None

    def _check_whole(self) -> None:
        if self._unpacker is not None:
            raise EOFError("it is cut off")

    def _note(self, bit: int) -> None:
        if self._text_bytes and self._text_bytes - self._last >= self._spacing_bytes - _EARLY_BYTES:
            self.points.append(RestartPoint(self._text_bytes, bit))
            self._last = self._text_bytes

    def _pieces(self) -> Iterator[bytes]:
        return iter(lambda: self._raw.read(_PIECE_BYTES), b"")

    def _of_bzip2(self) -> Iterator[bytes]:
        last = -1
        for part, bit, _ in _parts_of_bzip2(self._pieces(), [(_BLOCK, False)]):
            yield from self._unpacked(part)
            if bit is not None and self._text_bytes > last:
                last = self._text_bytes
                self._note(bit)
        self._check_whole()

    def _of_bzip2_block(self, begin: int) -> Iterator[bytes]:
        """Yield the text from a block on. The end of its stream has a checksum of all blocks, and is left out."""
        self._unpacker, last = self._make(), -1
        self._unpacker.decompress(_STREAM)
        magics = [(_BLOCK, False), (_END, True)]
        for part, bit, is_end in _parts_of_bzip2(_shifted(self._pieces(), begin % 8), magics):
            yield from self._unpacked(part)
            if bit is None or self._text_bytes == last:
                continue
            last = self._text_bytes
            if is_end:
                self._unpacker = None
                # the checksum has 32 bits, and the next stream begins at a whole byte
                self._raw.seek((begin + bit + _MAGIC_BITS + 32 + 7) // 8)
                yield from self._of_bzip2()
                return
        self._check_whole()

    def _of_xz(self) -> Iterator[bytes]:
        for at, header, data in _XzParts(self._raw).parsed(in_block=False):
            if header and _filters_of(header) is not None:
                self._note(at * 8)
            yield from self._unpacked(header + data)
        self._check_whole()

    def _of_xz_blocks(self) -> Iterator[bytes]:
        """Yield the text from a block on, without the checks behind blocks."""
        for _, header, data in _XzParts(self._raw).parsed(in_block=True):
            if header:
                self._check_whole()
                if (filters := _filters_of(header)) is None:
                    raise lzma.LZMAError("it has a block with unknown filters")
                self._unpacker = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)
            elif self._unpacker is not None:
                yield from self._unpacked(data)
        self._check_whole()


def _xz_unpacker() -> lzma.LZMADecompressor:
    # beside its dictionary it needs little
    return lzma.LZMADecompressor(memlimit=_MOST_DICTIONARY_BYTES + (8 << 20))


def _forms(magic: int) -> Iterator[tuple[int, bytes, int, int, int, int]]:
    """Yield a magic number behind 0 to 7 bits: its whole bytes, and a mask and a value for the bytes around them."""
    yield 0, magic.to_bytes(6), 0, 0, 0, 0
    for bits in range(1, 8):
        window = (magic << (8 - bits)).to_bytes(7)
        yield bits, window[1:6], 0xFF >> bits, window[0], 0xFF << (8 - bits) & 0xFF, window[6]


_FORMS = {magic: [*_forms(magic)] for magic in (_BLOCK, _END)}


def _places(data: bytes, magic: int) -> Iterator[int]:
    """Yield the bits at which a magic number begins."""
    for bits, whole, first_mask, first, last_mask, last in _FORMS[magic]:
        at = data.find(whole)
        while at >= 0:
            begin, end = at - (bits > 0), at + len(whole)
            if not bits or (
                begin >= 0 and end < len(data) and data[begin] & first_mask == first and data[end] & last_mask == last
            ):
                yield begin * 8 + bits
            at = data.find(whole, at + 1)


def _parts_of_bzip2(
    pieces: Iterator[bytes], magics: list[tuple[int, bool]]
) -> Iterator[tuple[bytes, int | None, bool]]:
    """Yield the bytes of pieces in parts, each with the bit of the magic number in whose last byte it ends, or None.

    `magics` has numbers, and the value to yield with each.
    """
    tail, begin = b"", 0
    for piece in pieces:
        data, cut = tail + piece, len(tail)
        places = sorted((bit, is_end) for magic, is_end in magics for bit in _places(data, magic))
        for bit, is_end in places:
            if (end := (bit + _MAGIC_BITS + 7) // 8) > len(tail):
                yield data[cut:end], (begin - len(tail)) * 8 + bit, is_end
                cut = end
        yield data[cut:], None, False
        begin += len(piece)
        tail = data[-_MAGIC_BITS // 8 :]


def _shifted(pieces: Iterator[bytes], bits: int) -> Iterator[bytes]:
    """Yield bytes without their first `bits` (0 to 7), and without those of the last byte, which is not whole."""
    carried = b""
    for piece in pieces:
        data = carried + piece
        # a byte more before them, for the bits that go
        yield (int.from_bytes(data) << bits).to_bytes(len(data) + 1)[1 : len(data)]
        carried = data[-1:]


def _filters_of(header: bytes) -> list[dict[str, int]] | None:
    """Return the filters that the header of a block of xz names; None: not all of them are known."""
    try:
        flags, at = header[1], 2
        for mask in (0x40, 0x80):
            at = _number(header, at)[1] if flags & mask else at
        filters = list[dict[str, int]]()
        for _ in range((flags & 3) + 1):
            name, at = _number(header, at)
            size, at = _number(header, at)
            properties, at = header[at : at + size], at + size
            if name == _LZMA2 and size == 1 and properties[0] <= 40:
                bits = properties[0]
                dictionary = 2**32 - 1 if bits == 40 else (2 | bits & 1) << bits // 2 + 11
                if dictionary > _MOST_DICTIONARY_BYTES:
                    return None
                filters.append({"id": lzma.FILTER_LZMA2, "dict_size": dictionary})
            elif name == _DELTA and size == 1:
                filters.append({"id": lzma.FILTER_DELTA, "dist": properties[0] + 1})
            else:
                return None
    except IndexError:
        return None
    return filters


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, seven bits a byte, and the position behind it. Raises `IndexError`."""
    number = shift = 0
    while data[at] & 0x80:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | data[at] << shift, at + 1


class _XzParts:
    """The bytes of a file of xz in parts, from the begin of a stream or of a block on."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._held, self._taken = raw, b"", raw.tell()

    def parsed(self, *, in_block: bool) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield the position of each part, and then the header of a block, or bytes between two of them."""
        check_bytes: int | None = None
        while True:
            if not in_block:
                if (flags := (yield from self._to_stream())) is None:
                    return
                check_bytes = _CHECK_BYTES.get(flags & 15)
            in_block = False
            # a zero begins the index, which is behind the last block
            while (size := self._peeked(1)) not in (b"", b"\0"):
                yield self._taken, self._take(size[0] * 4 + 4), b""
                begin = self._taken
                while self._peeked(1) not in (b"", b"\0"):
                    yield self._taken, b"", self._take(_chunk_bytes(self._peeked(5)))
                yield self._taken, b"", self._take(1 + -(self._taken + 1 - begin) % 4)
                check_bytes = self._check_bytes() if check_bytes is None else check_bytes
                if check_bytes is None:
                    break
                yield self._taken, b"", self._take(check_bytes)

    def _to_stream(self) -> Generator[tuple[int, bytes, bytes], None, int | None]:
        """Yield the bytes up to the next stream and its header. Return its flags; None: there is no further stream."""
        while True:
            data = self._peeked(_PIECE_BYTES)
            at = data.find(_XZ)
            while at >= 0 and not _is_xz_header(data[at : at + _XZ_HEADER_BYTES]):
                at = data.find(_XZ, at + 1)
            if at >= 0:
                yield self._taken, b"", self._take(at + _XZ_HEADER_BYTES)
                return data[at + 7]
            is_end = len(data) < _PIECE_BYTES
            yield self._taken, b"", self._take(len(data) if is_end else len(data) - _XZ_HEADER_BYTES)
            if is_end:
                return None

    def _check_bytes(self) -> int | None:
        """Return the bytes of the check before the header of the next block; None: there is no further block."""
        behind = self._peeked(max(_CHECK_BYTES.values()) + _MOST_HEADER_BYTES)
        for size in _CHECK_BYTES.values():
            header = behind[size : size + behind[size] * 4 + 4] if len(behind) > size and behind[size] else b""
            if header and zlib.crc32(header[:-4]) == int.from_bytes(header[-4:], "little"):
                return size
        return None

    def _peeked(self, size: int) -> bytes:
        while len(self._held) < size and (more := self._raw.read(max(size - len(self._held), _PIECE_BYTES))):
            self._held += more
        return self._held[:size]

    def _take(self, size: int) -> bytes:
        data = self._peeked(size)
        self._held, self._taken = self._held[size:], self._taken + len(data)
        return data


def _is_xz_header(data: bytes) -> bool:
    """Return whether bytes from the magic number of a stream on are its whole header."""
    return len(data) == _XZ_HEADER_BYTES and zlib.crc32(data[6:8]) == int.from_bytes(data[8:], "little")


def _chunk_bytes(head: bytes) -> int:
    """Return the bytes of a chunk of LZMA2 by its first five; of one that is damaged, any number."""
    if head[0] >= 0x80:
        return 5 + (head[0] >= 0xC0) + int.from_bytes(head[3:5]) + 1
    return 3 + int.from_bytes(head[1:3]) + 1
