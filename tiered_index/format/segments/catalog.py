"""Catalogs: objects that list segments, by log and first offset. SPEC.md section 9. Pure.

A catalog has groups of rows, a directory and a tail. A group is found by the directory, which a log record repeats, so
that a reader finds a segment by one ranged read. Groups and directory are JSON documents with a list for each field,
compressed, each with a CRC32.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Annotated, Any

from msgspec import Meta, Struct

from tiered_index.base.documents import Count, Crc32, Milliseconds, Place, Size, checks, decoded, encoded, unpacked
from tiered_index.base.kernels import crc32
from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.format.names import store_prefix
from tiered_index.format.segments.archived import segment_object_bytes
from tiered_index.format.segments.segment import ArchivedSegment, LinkedSegment, Segment, Text, TimeRule, Times

CATALOG_MAGIC = b"TIXCATA\n"
CATALOG_VERSION = 3
GROUP_ROWS = 512
"""Most rows of a group: about 20 KiB, the unit of a read."""
# 0 magic | 8 version | 12 bytes of the directory | 16 segments | 24 CRC32 of the directory | 28 CRC32 of bytes 0..27
_TAIL = struct.Struct(">8sIIQII")
TAIL_BYTES = _TAIL.size
# most bytes of a decompressed group or directory
_MOST_BYTES = 1 << 28


_prefix = lru_cache(4096)(store_prefix)


class LogRows(Struct, frozen=True, array_like=True):
    """The facts of a catalog about all its segments of one log. `first_ms` and `last_ms` are of `published_ms`."""

    store: str
    start: Place
    end: Count
    count: Annotated[int, Meta(ge=1)]
    object_bytes: Count
    first_ms: Milliseconds
    last_ms: Milliseconds
    is_columnar: bool
    """Whether offsets are numbers of records, not bytes: of the first segment."""
    queues: Count
    """The number of segments with queue offsets."""
    linked: Count
    """The number of linked segments."""


class Group(Struct, frozen=True, array_like=True):
    """The place of a group of rows. Its first row is the segment at `start` of log number `log`."""

    log: Count
    start: Place
    position: Size
    length: Annotated[int, Meta(ge=1, le=2**31)]
    crc32: Crc32
    rows: Annotated[int, Meta(ge=1, le=2**20)]


class CatalogDirectory(Struct, frozen=True, dict=True):
    """The directory of a catalog: its logs, sorted by store, and its groups, in order."""

    logs: tuple[LogRows, ...]
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.logs or not self.groups or sum(group.rows for group in self.groups) != self.count:
            raise ValueError("a directory of a catalog does not add up")
        if [log.store for log in self.logs] != sorted({log.store for log in self.logs}):
            raise ValueError("logs of a catalog are not sorted")
        if any(log.start >= log.end for log in self.logs):
            raise ValueError("a log of a catalog is empty")
        if any(group.log >= len(self.logs) for group in self.groups):
            raise ValueError("a group of a catalog begins with an unknown log")
        if any(place >= after for place, after in itertools.pairwise(self.places)):
            raise ValueError("groups of a catalog are not sorted")

    @cached_property
    def count(self) -> int:
        """The number of segments."""
        return sum(log.count for log in self.logs)

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """The place of each group's first row: number of its log, and first offset."""
        return [(group.log, group.start) for group in self.groups]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each log, by store."""
        return {log.store: number for number, log in enumerate(self.logs)}

    def group_of(self, store: str, offset: int) -> int:
        """Return the number of the group that has the last segment of `store` that begins at `offset` or before.

        If there is none, it is the group before.
        """
        return max(bisect_right(self.places, (self.numbers[store], offset)) - 1, 0)

    def encode(self) -> bytes:
        """Return the compressed document."""
        return _packed({"logs": self.logs, "groups": self.groups})

    @classmethod
    def decode(cls, data: bytes, file: str) -> CatalogDirectory:
        """Return the directory in `data`. Raises `CorruptFile`."""
        what = "the directory of a catalog"
        return decoded(unpacked(data, _MOST_BYTES, file, what), cls, file, what)


class _Rows(Struct, kw_only=True):
    """The rows of a group as stored: a list for each field. A list is missing if all its values are the default."""

    log: list[Count]
    gap: list[Annotated[int, Meta(ge=0, le=2**62)]]
    length: list[Count] = []
    name: list[Text]
    size: list[Size]
    published: list[Milliseconds]
    crc32: list[Crc32] = []
    head: list[Crc32] = []
    extra: list[Annotated[int, Meta(ge=-(2**44), le=2**44)]] = []
    source: list[tuple[Crc32, Crc32] | None] = []
    footer: list[Annotated[int, Meta(ge=0, le=2**31)]] = []
    rows: list[Count | None] = []
    times: list[Times | None] = []
    format: list[str] = []
    etag: list[str] = []
    position: list[Place] = []
    blocks: list[tuple[Annotated[int, Meta(ge=1, le=2**44)], tuple[Crc32, ...]] | None] = []
    is_open: list[bool] = []
    lines: list[tuple[Count, tuple[Count, ...]] | None] = []
    topic_field: list[str | None] = []
    damage: list[tuple[Text, Place, Crc32] | None] = []
    time_rule: list[TimeRule | None] = []


_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("length", "crc32", "head", "extra", "footer", "position"), 0),
    **dict.fromkeys(("source", "rows", "times", "blocks", "lines", "topic_field", "damage", "time_rule")),
    **dict.fromkeys(("format", "etag"), ""),
    "is_open": False,
}
_REQUIRED = ("log", "gap", "name", "size", "published")


def encode_group(segments: Sequence[Segment], numbers: dict[str, int]) -> bytes:
    """Return the bytes of a group of `segments`, sorted by place. `numbers` has the number of each log."""
    rows: dict[str, list[Any]] = {name: [] for name in (*_REQUIRED, *_DEFAULTS)}
    last: tuple[str, int] | None = None
    for segment in segments:
        before = last[1] if last is not None and last[0] == segment.store else 0
        values = dict(_DEFAULTS, log=numbers[segment.store], gap=segment.start - before, size=segment.size_bytes)
        values |= {"published": segment.published_ms, "rows": segment.rows, "times": segment.times}
        values |= _of_archived(segment) if isinstance(segment, ArchivedSegment) else _of_linked(segment)
        for name, column in rows.items():
            column.append(values[name])
        last = segment.store, segment.end
    return _packed(
        {n: column for n, column in rows.items() if n in _REQUIRED or any(value != _DEFAULTS[n] for value in column)}
    )


def _of_archived(segment: ArchivedSegment) -> dict[str, Any]:
    count, footer = segment.columns or (0, 0)
    prefix = f"{_prefix(segment.store)}{segment.start:020d}/"
    attempt = segment.name.removeprefix(prefix)
    return {
        "name": segment.name if "/" in attempt else attempt,
        "length": count,
        "crc32": segment.crc32,
        "head": segment.head_crc32,
        "extra": segment.object_bytes - segment_object_bytes(segment.size_bytes),
        "source": segment.source,
        "footer": footer,
    }


def _of_linked(segment: LinkedSegment) -> dict[str, Any]:
    return {
        "name": segment.uri,
        "length": segment.length,
        "format": segment.format,
        "etag": segment.etag,
        "position": segment.position,
        "blocks": segment.blocks,
        "is_open": segment.is_open,
        "lines": segment.lines,
        "topic_field": segment.topic_field,
        "damage": segment.damage,
        "time_rule": segment.time_rule,
    }


class CatalogRows:
    """The rows of one verified group."""

    def __init__(self, rows: _Rows, logs: Sequence[LogRows], file: str) -> None:
        self._rows, self._logs, self._file = rows, logs, file
        count = len(rows.log)
        for name in (*_REQUIRED, *_DEFAULTS):
            column = getattr(rows, name)
            if not column and name in _DEFAULTS:
                setattr(rows, name, [_DEFAULTS[name]] * count)
            elif len(column) != count:
                raise ValueError(f"`{name}` has {len(column)} values for {count} rows")
        self.places: list[tuple[int, int]] = []
        """Number of the log and first offset of each row."""
        last = (-1, 0)
        for number, gap, length, size in zip(rows.log, rows.gap, rows.length, rows.size, strict=True):
            if number >= len(logs) or number < last[0]:
                raise ValueError("rows of a catalog are not sorted by log")
            start = gap + (last[1] if number == last[0] else 0)
            self.places.append((number, start))
            last = number, start + (length or size)

    def __len__(self) -> int:
        return len(self.places)

    def before(self, log: int, offset: int) -> int:
        """Return the number of rows that begin at `offset` of a log or before it."""
        return bisect_right(self.places, (log, offset))

    def row(self, at: int) -> Segment:
        """Return the segment in row `at`. Raises `CorruptFile`."""
        with checks(self._file, "a row of a catalog"):
            return self._row(at)

    def _row(self, at: int) -> Segment:
        rows, (number, start) = self._rows, self.places[at]
        store, name, size, times = self._logs[number].store, rows.name[at], rows.size[at], rows.times[at]
        if rows.format[at]:
            return LinkedSegment(
                name, store, start, rows.length[at], rows.format[at], size, rows.etag[at], rows.published[at],
                rows.position[at], rows.rows[at], times, rows.blocks[at], rows.is_open[at],
                rows.lines[at], rows.topic_field[at], rows.damage[at], rows.time_rule[at],
            )  # fmt: skip
        if "/" not in name:
            name = f"{_prefix(store)}{start:020d}/{name}"
        columns = (rows.length[at], rows.footer[at]) if rows.footer[at] else None
        return ArchivedSegment(
            name, store, start, size, rows.crc32[at], rows.head[at], segment_object_bytes(size) + rows.extra[at],
            rows.published[at], rows.source[at], columns, rows.rows[at], times,
        )  # fmt: skip

    def of_log(self, log: int, offset: int) -> Iterator[Segment]:
        """Yield the segments of log number `log`, from the last that begins at `offset` or before. Raises as `row`."""
        first = max(self.before(log, offset) - 1, bisect_right(self.places, (log, -1)))
        for at in range(first, bisect_right(self.places, (log + 1, -1))):
            yield self.row(at)

    def segments(self) -> list[Segment]:
        """Return all segments. Raises `CorruptFile`."""
        with checks(self._file, "a row of a catalog"):
            return [self._row(at) for at in range(len(self))]


def decode_group(data: bytes, group: Group, logs: Sequence[LogRows], file: str) -> CatalogRows:
    """Return the rows of a group, after a check of its CRC32 and its first place. Raises `CorruptFile`."""
    actual = crc32(data)
    if (len(data), actual) != (group.length, group.crc32):
        problem = "a group of a catalog does not match its CRC32"
        raise CorruptFile(file, problem, offset=group.position, expected=group.crc32, found=actual)
    what = "a group of a catalog"
    stored = decoded(unpacked(data, _MOST_BYTES, file, what), _Rows, file, what, offset=group.position)
    with checks(file, what, offset=group.position):
        rows = CatalogRows(stored, logs, file)
        if len(rows) != group.rows or rows.places[0] != (group.log, group.start):
            raise ValueError("a group of a catalog has other rows than its directory says")
    return rows


class CatalogLogs:
    """The facts of a directory about segments that arrive sorted by place."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """The number of each log, by store."""
        self._logs: list[list[Any]] = []
        self._last: tuple[str, int] | None = None

    def add(self, segment: Segment) -> None:
        """Add the next segment. Raises `CorruptFile` if it is not behind the one before, or has no offset."""
        store, start, end = segment.store, segment.start, segment.end
        if self._last is not None and (store, start) < self._last:
            raise CorruptFile(segment.name, "overlaps the segment before it, or is not sorted: run `verify`")
        if start >= end:
            raise CorruptFile(segment.name, "is a segment without an offset")
        self._last = store, end
        if store not in self.numbers:
            self.numbers[store] = len(self._logs)
            first_ms = segment.published_ms
            columnar = isinstance(segment, LinkedSegment) or segment.columns is not None
            self._logs.append([store, start, end, 0, 0, first_ms, first_ms, columnar, 0, 0])
        log = self._logs[-1]
        log[2], log[3], log[4] = end, log[3] + 1, log[4] + segment.object_bytes
        log[5], log[6] = min(log[5], segment.published_ms), max(log[6], segment.published_ms)
        if isinstance(segment, LinkedSegment):
            log[9] += 1
        elif segment.queues_bytes:
            log[8] += 1

    def rows(self) -> tuple[LogRows, ...]:
        """Return the logs, in order."""
        return tuple(LogRows(*log) for log in self._logs)


class CatalogWriter:
    """Writes a catalog of segments that arrive sorted by place. `write` gets its bytes. Memory: one group."""

    def __init__(self, write: Callable[[bytes], object], group_rows: int = GROUP_ROWS) -> None:
        self._write, self._group_rows = write, group_rows
        self._logs = CatalogLogs()
        self._groups: list[Group] = []
        self._waiting: list[Segment] = []
        self._size_bytes = 0

    def add(self, segment: Segment) -> None:
        """Add the next segment. Raises the `CorruptFile` of `CatalogLogs.add`."""
        self._logs.add(segment)
        self._waiting.append(segment)
        if len(self._waiting) >= self._group_rows:
            self._send()

    def _send(self) -> None:
        first, data = self._waiting[0], encode_group(self._waiting, self._logs.numbers)
        place = self._logs.numbers[first.store], first.start
        self._groups.append(Group(*place, self._size_bytes, len(data), crc32(data), len(self._waiting)))
        self._write(data)
        self._size_bytes += len(data)
        self._waiting.clear()

    def finish(self) -> CatalogDirectory:
        """Write the rest, directory and tail. Return the directory. There must be a segment."""
        if self._waiting:
            self._send()
        directory = CatalogDirectory(self._logs.rows(), tuple(self._groups))
        data = directory.encode()
        tail = _TAIL.pack(CATALOG_MAGIC, CATALOG_VERSION, len(data), directory.count, crc32(data), 0)[:-4]
        self._write(data + tail + crc32(tail).to_bytes(4, "big"))
        return directory


def end_bytes(data: bytes, file: str) -> int:
    """Return the bytes of directory and tail of a catalog, whose last bytes `data` has. Raises `CorruptFile`."""
    return _tail_of(data, file)[0] + TAIL_BYTES


def decode_end(data: bytes, file: str) -> CatalogDirectory:
    """Return the directory in the last bytes of a catalog, which `data` has. Raises `CorruptFile`."""
    length, count, expected = _tail_of(data, file)
    directory = data[-TAIL_BYTES - length : -TAIL_BYTES]
    if len(directory) != length or crc32(directory) != expected:
        problem = "the directory of a catalog does not match its CRC32"
        raise CorruptFile(file, problem, expected=expected, found=crc32(directory))
    decoded_directory = CatalogDirectory.decode(directory, file)
    CorruptFile.unless_equal(file, "a catalog has another number of segments", count, decoded_directory.count)
    return decoded_directory


def _tail_of(data: bytes, file: str) -> tuple[int, int, int]:
    """Return the bytes of the directory, the number of segments, and the directory's CRC32."""
    tail = data[-TAIL_BYTES:]
    if len(tail) < TAIL_BYTES or crc32(tail[:-4]).to_bytes(4, "big") != tail[-4:]:
        raise CorruptFile(file, "the tail of a catalog does not match its CRC32")
    magic, version, length, count, expected, _ = _TAIL.unpack(tail)
    if magic != CATALOG_MAGIC:
        raise CorruptFile(file, "wrong magic of a catalog", expected=CATALOG_MAGIC, found=magic)
    UnsupportedVersion.unless_read(file, "catalog", CATALOG_VERSION, version)
    return length, count, expected


def _packed(document: dict[str, Any]) -> bytes:
    return zlib.compress(encoded(document), 6)
