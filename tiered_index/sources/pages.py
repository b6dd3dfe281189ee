"""Computes the memory that pages of Parquet column chunks need, before Arrow reads them. One thread.

Arrow decompresses a page whole and decodes all rows of a batch at once. A few bytes of a file can become any number of
bytes in both steps. Arrow refuses a page that decompresses to more than its header says. The numbers of values, lengths
and rows of some pages are inside the page: this module decompresses those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.sources.footers import Chunk, struct

# Reads bytes of a file: (position, count); fewer at its end
Read = Callable[[int, int], bytes]

# Fields of `PageHeader`, the header of each kind of page in it, and the fields of these headers
_KIND, _UNPACKED, _PACKED = 1, 2, 3
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_2 = 0, 2, 3
_HEADERS = {_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_2: 8}
_VALUES, _ENCODING, _LEVELS = 1, 2, 4
_ENCODING_2, _DEFINITIONS_2, _REPETITIONS_2, _IS_COMPRESSED_2 = 4, 5, 6, 7
# Codecs and encodings by their numbers.
_CODECS = {0: "", 1: "snappy", 2: "gzip", 4: "brotli", 5: "lz4_hadoop", 6: "zstd", 7: "lz4_raw"}
_RLE, _DELTA_TEXTS = 3, 7
_NUMBERS, _DELTAS = (2, 8), (6, _DELTA_TEXTS)
# Most memory of the rows that are read at once: decompressed pages and dictionaries, and their values
DECODED_BYTES = 128 << 20
# Bytes of a header that are read at once, and the most that Arrow reads
_HEADER_BYTES, _MOST_HEADER_BYTES = 512, 16 << 20
# Arrow reads up to so many bytes after the end of a chunk, for old writers
_PADDING = 100
# Memory of a value of a list, and of a dictionary, in addition to its bytes
_VALUE_BYTES, _DICTIONARY_BYTES = 10, 16
# If the lists of a chunk need no more than this, they count as those of one row
_WHOLE_BYTES = 32 << 20
# Arrow decodes all lengths of a page at once. A page with more lengths counts as too large.
_MOST_LENGTHS, _TOO_MANY_BYTES = 1 << 22, 1 << 50


class Column(NamedTuple):
    """A column of a schema.

    It has the greatest levels of repetition and definition, and the size of a value of fixed length (else 0). Two
    fields say whether it has text or bytes, and whether Arrow may read these as dictionaries.
    """

    repetition: int
    definition: int
    is_text: bool
    is_shared: bool
    width: int


@dataclass
class Pages:
    """The pages of one column chunk: the rows [begin, end) that each page has a part of, and its bytes in memory.

    `longest` is the length of the longest text of the dictionary. Arrow can't read `coded` text as a dictionary.
    """

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    longest: int = 0
    coded: bool = False

    def add(self, begin: int, end: int, size_bytes: int) -> None:
        """Add a page."""
        self.begins.append(begin)
        self.ends.append(end)
        self.sizes.append(size_bytes)


class _Page(NamedTuple):
    kind: int
    begin: int
    unpacked: int
    packed: int
    header: dict[int, Any]

    @property
    def values(self) -> int:
        return int(self.header[_VALUES])

    @property
    def encoding(self) -> int:
        return int(self.header[_ENCODING_2 if self.kind == _DATA_PAGE_2 else _ENCODING])


def most_bytes(chunks: list[Pages], rows: int) -> int:
    """Return the most memory that a batch needs if `rows` rows are read at once, in bytes."""
    begins = np.concatenate([np.array(chunk.begins, np.int64) // rows for chunk in chunks])
    ends = np.concatenate([(np.array(chunk.ends, np.int64) - 1) // rows + 1 for chunk in chunks])
    sizes = np.concatenate([np.array(chunk.sizes, np.float64) for chunk in chunks])
    # a page counts in all batches from its first to its last
    _, at = np.unique(np.concatenate([begins, ends]), return_inverse=True)
    return int(np.cumsum(np.bincount(at, np.concatenate([sizes, -sizes]))).max(initial=0))


def chunk_pages(read: Read, chunk: Chunk, column: Column, rows: int) -> Pages:
    """Return the pages of one column chunk of a row group of `rows` rows. Raises `ValueError` for damage."""
    try:
        return _pages(_Chunk(read, chunk, column), rows)
    except (IndexError, KeyError, TypeError, OverflowError, pa.ArrowException, OSError) as error:
        raise ValueError(f"a page of column {'.'.join(chunk.path)!r} can't be read: {error!r}") from error


def _pages(chunk: _Chunk, rows: int) -> Pages:
    column = chunk.column
    found, lists = Pages(coded=column.is_text and not column.is_shared), column.repetition
    data: list[_Page] = []
    sizes: list[int] = []
    for page in chunk.pages():
        size_bytes = max(page.unpacked, page.packed)
        if page.kind == _DICTIONARY_PAGE:
            found.add(0, rows, size_bytes + _DICTIONARY_BYTES * page.values)
            found.longest = chunk.longest(page) if column.is_text else 0
        else:
            found.coded = found.coded or page.encoding in _DELTAS
            data.append(page)
            sizes.append(size_bytes + chunk.decoded_bytes(page))
    if lists and found.coded:
        # text that a page refers to by number is copied for each value
        sizes = [
            size_bytes + page.values * found.longest * (page.encoding in _NUMBERS)
            for page, size_bytes in zip(data, sizes, strict=True)
        ]
    if lists and (sum(sizes) <= _WHOLE_BYTES or not all(map(chunk.counts_rows, data))):
        found.add(0, rows, sum(sizes))
        return found
    row = 0
    for page, size_bytes in zip(data, sizes, strict=True):
        count = chunk.starts(page) if lists else page.values
        # a list may begin on the previous page
        begin = max(0, row - 1) if lists else row
        found.add(begin, max(begin + 1, row + count), size_bytes)
        row += count
    return found


class _Chunk:
    """One column chunk of a file."""

    def __init__(self, read: Read, chunk: Chunk, column: Column) -> None:
        self._read, self._chunk, self.column = read, chunk, column

    def pages(self) -> Iterator[_Page]:
        """Yield the dictionary and the data pages in the order of the file."""
        at, end = self._chunk.begin, self._chunk.begin + self._chunk.size_bytes + _PADDING
        if at < 0 or self._chunk.size_bytes < 0:
            raise ValueError("a column chunk has a negative place")
        values = 0
        while values < self._chunk.values and at < end:
            header, length = self._header(at)
            kind, unpacked, packed = (int(header[number]) for number in (_KIND, _UNPACKED, _PACKED))
            if unpacked < 0 or packed < 0:
                raise ValueError("a page has a negative size")
            at += length
            if kind in _HEADERS:
                page = _Page(kind, at, unpacked, packed, header[_HEADERS[kind]])
                is_data = kind != _DICTIONARY_PAGE
                if page.values < 0 or (not is_data and page.values > unpacked):
                    raise ValueError("a page has a wrong number of values")
                values += page.values * is_data
                yield page
            at += packed
        if values > self._chunk.values:
            raise ValueError(
                f"pages have {values:,} values of {'.'.join(self._chunk.path)!r}, and the footer says "
                f"{self._chunk.values:,}"
            )

    def _header(self, at: int) -> tuple[dict[int, Any], int]:
        size_bytes = _HEADER_BYTES
        while True:
            data = self._read(at, size_bytes)
            try:
                return struct(data)
            except (IndexError, ValueError):
                if len(data) < size_bytes or size_bytes >= _MOST_HEADER_BYTES:
                    raise
            size_bytes *= 8

    def longest(self, page: _Page) -> int:
        """Return an upper bound on the length of a text of a dictionary."""
        if page.values > _MOST_LENGTHS or not self._may_unpack(page):
            return page.unpacked
        data, at, longest = self._decompressed(self._read(page.begin, page.packed), page.unpacked), 0, 0
        for _ in range(page.values):
            length = int.from_bytes(data[at : at + 4], "little")
            longest = max(longest, length)
            at += 4 + length
        return longest

    def decoded_bytes(self, page: _Page) -> int:
        """Return the memory of a page's decoded values, in addition to the page."""
        size_bytes = page.values * (_VALUE_BYTES + self.column.width) if self.column.repetition else 0
        if page.encoding not in _DELTAS:
            return size_bytes
        if not self._may_unpack(page):
            return _TOO_MANY_BYTES
        _, data, at = self._unpacked(page)
        lengths = _Deltas(data, at)
        if page.encoding == _DELTA_TEXTS and lengths.count <= _MOST_LENGTHS:
            # the lengths of the prefixes that texts share with the previous text
            size_bytes += lengths.sum()
            lengths = _Deltas(data, lengths.at)
        return size_bytes + 8 * lengths.count if lengths.count <= _MOST_LENGTHS else _TOO_MANY_BYTES

    def counts_rows(self, page: _Page) -> bool:
        """Return whether `starts` can count the rows of a page of lists: not for lists of lists and old encodings."""
        is_old = page.kind == _DATA_PAGE and int(page.header[_LEVELS]) != _RLE
        return self.column.repetition == 1 and self._may_unpack(page) and not is_old

    def starts(self, page: _Page) -> int:
        """Return the number of rows that begin on a page of lists."""
        levels, _, _ = self._unpacked(page)
        # Writers need less than two bits a value; a damaged page with more would take long to read
        if len(levels) > page.values // 4 + 64:
            raise ValueError("a page has more levels than its values allow")
        at = done = rows = 0
        while done < page.values:
            head, at = _varint(levels, at)
            count = min((head >> 1) * 8 if head & 1 else head >> 1, page.values - done)
            if head & 1:
                bits = np.unpackbits(np.frombuffer(levels, np.uint8, -(-count // 8), at), bitorder="little")
                rows += count - int(bits[:count].sum())
            else:
                rows += count * (levels[at] == 0)
            at += head >> 1 if head & 1 else 1
            done += count
        return rows

    def _may_unpack(self, page: _Page) -> bool:
        return self._chunk.codec in _CODECS and page.unpacked <= DECODED_BYTES

    def _unpacked(self, page: _Page) -> tuple[bytes, bytes, int]:
        """Return the repetition levels of a page, its decompressed bytes, and the position of its values in them."""
        body = self._read(page.begin, page.packed)
        if page.kind == _DATA_PAGE_2:
            repetitions, definitions = (int(page.header[number]) for number in (_REPETITIONS_2, _DEFINITIONS_2))
            at = repetitions + definitions
            if min(repetitions, definitions) < 0 or at > min(len(body), page.unpacked):
                raise ValueError("levels of a page have a wrong length")
            values = body[at:]
            if page.header.get(_IS_COMPRESSED_2, True):
                values = self._decompressed(values, page.unpacked - at)
            return body[:repetitions], values, 0
        body, at, levels = self._decompressed(body, page.unpacked), 0, b""
        if self.column.repetition:
            at = 4 + int.from_bytes(body[:4], "little")
            levels = body[4:at]
        if self.column.definition:
            at += 4 + int.from_bytes(body[at : at + 4], "little")
        return levels, body, at

    def _decompressed(self, body: bytes, size_bytes: int) -> bytes:
        name = _CODECS[self._chunk.codec]
        if name == "lz4_hadoop" and size_bytes:
            return _of_hadoop(body, size_bytes)
        return pa.Codec(name).decompress(body, size_bytes, asbytes=True) if name and size_bytes else body


# lengths of a block in memory and in the file
_FRAME = Struct(">II")


def _of_hadoop(body: bytes, size_bytes: int) -> bytes:
    """Decompress LZ4 in Hadoop's frames, as Spark writes it, or without frames, as Arrow once wrote it."""
    codec, parts, at, left = pa.Codec("lz4_raw"), [], 0, size_bytes
    try:
        while at < len(body):
            unpacked, packed = _FRAME.unpack(body[at : at + 8].ljust(8, b"\xff"))
            at += _FRAME.size
            left -= unpacked
            if left < 0 or packed > len(body) - at:
                raise ValueError("no frame")
            parts.append(codec.decompress(body[at : at + packed], unpacked, asbytes=True))
            at += packed
        if not left:
            return b"".join(parts)
    except (ValueError, pa.ArrowException, OSError):
        pass
    return cast(bytes, codec.decompress(body, size_bytes, asbytes=True))


class _Deltas:
    """`count` 32-bit numbers that a page stores as differences (DELTA_BINARY_PACKED), from position `at`."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        block, self.at = _varint(data, at)
        self._parts, self.at = _varint(data, self.at)
        self.count, self.at = _varint(data, self.at)
        first, self.at = _varint(data, self.at)
        self._first = _signed(first)
        if not block or not self._parts or block % self._parts or block // self._parts % 8:
            raise ValueError("a block has a wrong number of values")
        self._part = block // self._parts

    def sum(self) -> int:
        """Return the sum of the numbers, and set `at` to their end. Raises `ValueError` for a negative number."""
        found, left = [np.array([self._first] if self.count else [], np.int64)], self.count - 1
        while left > 0:
            least, self.at = _varint(self._data, self.at)
            widths = self._data[self.at : self.at + self._parts]
            self.at += self._parts
            for width in widths:
                if left > 0:
                    found.append(self._differences(min(self._part, left), width) + _signed(least))
                    left -= len(found[-1])
            if not widths:
                raise ValueError("its numbers end too soon")
        # differences may exceed 32 bits; numbers wrap
        numbers = np.cumsum(np.concatenate(found)).astype(np.int32)
        if (numbers < 0).any():
            raise ValueError("a length is negative")
        return int(numbers.sum(dtype=np.int64))

    def _differences(self, count: int, width: int) -> npt.NDArray[np.int64]:
        if width > 32:
            raise ValueError("a number has more than 32 bits")
        size_bytes = self._part * width // 8
        bits = np.unpackbits(np.frombuffer(self._data, np.uint8, size_bytes, self.at), bitorder="little")
        self.at += size_bytes
        return bits[: count * width].reshape(count, width) @ (np.int64(1) << np.arange(width, dtype=np.int64))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] > 127:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
    return value | data[at] << shift, at + 1


def _signed(value: int) -> int:
    return value >> 1 ^ -(value & 1)
