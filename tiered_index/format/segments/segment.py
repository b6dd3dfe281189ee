"""A segment: a range of offsets of one log, and the file that has its messages. SPEC.md section 9. Pure.

An archived segment is an object of the index. A linked segment is a file of someone else, which no index ever changes
or deletes. The segments of one log never overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from tiered_index.base.documents import Count, Crc32, Milliseconds, Place, Size
from tiered_index.format.names import SEGMENTS_PREFIX, topic_of_store
from tiered_index.format.segments.archived import queues_bytes_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DATA_PART = r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]{0,127}"
"""A part of an object's name. Records can only name objects below the prefix of their kind."""
SegmentName = Annotated[str, Meta(pattern=rf"\A{SEGMENTS_PREFIX[:-1]}(/{DATA_PART}){{1,4}}\Z")]
Times = tuple[Milliseconds, Milliseconds]
"""The smallest and the greatest time of the messages, epoch milliseconds, inclusive."""
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
Offsets = Annotated[int, Meta(ge=1, le=2**62)]
"""A number of offsets."""
_MOST_MS = 2**52
MOST_TEXT_RATIO = 4096
"""The most times that the text of a packed file may be as long as the file."""
Footer = Annotated[int, Meta(ge=1, le=2**31)]
LOST = "lost"
"""The hints of a linked segment whose text no file has any more: another log has its file's name."""


def times_of(times_ms: npt.NDArray[np.int64]) -> Times | None:
    """Return the smallest and the greatest of times (epoch ms, i64, n). None: there are none, or none can be stored."""
    if not len(times_ms):
        return None
    first, last = int(times_ms.min()), int(times_ms.max())
    return (first, last) if first >= -_MOST_MS and last <= _MOST_MS else None


class Stored(Struct, frozen=True):
    """Base class of stored documents: fields in order, without those with default values."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        names, defaults = self.__struct_fields__, self.__struct_defaults__
        required = len(names) - len(defaults)
        document = {name: getattr(self, name) for name in names[:required]}
        for name, default in zip(names[required:], defaults, strict=True):
            if (value := getattr(self, name)) != default:
                document[name] = value
        return {name: value.to_json() if hasattr(value, "to_json") else value for name, value in document.items()}


class ArchivedSegment(Stored, frozen=True):
    """A closed segment of a source's log, kept as one object: [start, end) of the log of `store`.

    The segment has these bytes of the log. A columnar segment is a Parquet file of records instead: start and end are
    record numbers. Its footer is at the end of the object, after the checksums of its pieces.
    """

    name: SegmentName
    store: str
    start: Place
    size_bytes: Size
    crc32: Crc32
    head_crc32: Crc32
    """CRC32 of the first 1 MiB, which distinguishes stores."""
    object_bytes: Size
    """Size of the object: the segment, optional queue offsets, the checksums of its pieces, and a tail."""
    published_ms: Milliseconds
    """The time before the segment was read, by the writer's clock."""
    source: tuple[Crc32, Crc32] | None = None
    """`crc32` and `head_crc32` of the source's file, if messages of the segment were erased."""
    columns: tuple[Offsets, Footer] | None = None
    """The number of record numbers and the footer's bytes of a columnar segment; None: not columnar."""
    rows: Count | None = None
    """The number of messages; None: not known."""
    times: Times | None = None
    """The times of the messages; None: not known."""

    def __post_init__(self) -> None:
        if self.size_bytes > self.object_bytes:
            raise ValueError(f"`object_bytes` is {self.object_bytes}, less than {self.size_bytes}")
        if self.footer_bytes > self.size_bytes:
            raise ValueError(f"`columns` has a footer of more than {self.size_bytes} bytes")

    @property
    def kind(self) -> Literal["archived"]:
        """The kind: an object of the index."""
        return "archived"

    @property
    def format(self) -> str:
        """The format of the segment's bytes."""
        return "commitlog" if self.columns is None else "parquet"

    @property
    def end(self) -> int:
        """The offset after the last byte, or the number after the last record."""
        return self.start + (self.size_bytes if self.columns is None else self.columns[0])

    @property
    def topic(self) -> str | None:
        """The topic of all messages of the segment; None: it may have messages of many topics."""
        return None if self.columns is None else topic_of_store(self.store)

    @property
    def footer_bytes(self) -> int:
        """The bytes of a columnar segment's footer, at its end; 0: not columnar."""
        return 0 if self.columns is None else self.columns[1]

    @property
    def queues_bytes(self) -> int:
        """The bytes of queue offsets in the object; 0: it has none."""
        return queues_bytes_of(self.size_bytes, self.object_bytes)

    def ranges(self, position: int, length: int) -> list[tuple[int, int]]:
        """Return the object's ranges (start, length) with the segment's `length` bytes from `position` on."""
        footer_at = self.size_bytes - self.footer_bytes
        before = max(min(length, footer_at - position), 0)
        moved = position + before + self.object_bytes - self.size_bytes
        return [part for part in ((position, before), (moved, length - before)) if part[1]]

    @property
    def place(self) -> tuple[str, int]:
        """Store and start offset, which identify the segment."""
        return self.store, self.start


TimeRule = tuple[Text, Text | None, Text | None]
"""The path of the time of a row, the unit of times that are numbers, and the zone of those that have none.

None: no such time was read.
"""


class LinkedSegment(Stored, frozen=True):
    """A file of someone else, or a part of it, as the offsets [start, start + length) of the log of `store`.

    An offset is `start` and the position behind `position`: a byte of the decompressed file, or a row of one with
    columns. While the file `is_open`, it is still being read, and `length` is a bound that is reserved.
    """

    uri: Text
    store: str
    start: Place
    length: Offsets
    format: Text
    """The format and, after ``+``, the compression, such as ``ndjson+gzip``."""
    size_bytes: Size
    """The size of the file as it is stored."""
    etag: Text
    """Hints that the file was not written to: its ETag, or its device, inode and time of change; or `LOST`."""
    published_ms: Milliseconds
    """The time before the file was read, by the reading host's clock."""
    position: Place = 0
    rows: Count | None = None
    times: Times | None = None
    blocks: tuple[Annotated[int, Meta(ge=1, le=2**44)], tuple[Crc32, ...]] | None = None
    """The bytes of a block, and the CRC32 of each block as it was read; None: not known.

    They are blocks of the segment's text after decompression, of a file with columns those of the whole file. While a
    text is open, it may have the first block alone.
    """
    is_open: bool = False
    lines: tuple[Count, tuple[Count, ...]] | None = None
    """The number of lines of the text before the segment, and of line ends in each of `blocks`; None: not known."""
    topic_field: str | None = None
    """The path of the field that has the topic of a row; None: the store's topic is that of all rows."""
    damage: tuple[Text, Place, Crc32] | None = None
    """Why not all of the file was read, the position of the first row that was not, and a checksum of the options.

    If no row was read, the segment has one offset, which no entry has.
    """
    time_rule: TimeRule | None = None
    """How the times of its rows were read; None: not known."""

    def __post_init__(self) -> None:
        if self.lines is not None and (self.blocks is None or len(self.lines[1]) != len(self.blocks[1])):
            raise ValueError(f"`lines` has {len(self.lines[1])} numbers, but not as many as `blocks`")
        if self.end >= 1 << 63:
            raise ValueError(f"`length` is {self.length}: the end does not fit 63 bits")
        if self.blocks is not None and (len(self.blocks[1]) - 1) * self.blocks[0] > self.size_bytes * MOST_TEXT_RATIO:
            raise ValueError(f"`blocks` has {len(self.blocks[1])} checksums, too many for {self.size_bytes} bytes")

    @property
    def kind(self) -> Literal["linked"]:
        """The kind: a file of someone else."""
        return "linked"

    @property
    def name(self) -> str:
        """The URI of the file."""
        return self.uri

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self.start + self.length

    @property
    def is_unread(self) -> bool:
        """Whether no row of the file could be read."""
        return self.damage is not None and self.rows == 0

    @property
    def object_bytes(self) -> int:
        """The bytes that the index stores for it: none."""
        return 0

    @property
    def topic(self) -> str | None:
        """The topic of all messages of the segment; None: it may have messages of many topics."""
        return topic_of_store(self.store)

    @property
    def place(self) -> tuple[str, int]:
        """Store and start offset, which identify the segment."""
        return self.store, self.start


Segment = ArchivedSegment | LinkedSegment
