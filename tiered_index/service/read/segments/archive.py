"""Reads archived segments: closed files of a source's log, which outlive the source.

After the segment's bytes the object has the CRC32 of every 16 KiB, for readers of a part. Threads: any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.format.segments.archived import PIECE_BYTES, SegmentTable
from tiered_index.format.segments.queue_offsets import QueueDirectory, decode_directory, directory_bytes
from tiered_index.format.segments.segment import ArchivedSegment
from tiered_index.service.log.state import LogState
from tiered_index.service.read.caches.store import CachedKind, Catalogs, ReadCache
from tiered_index.service.read.segments.segments import MissingCatalog, Segments
from tiered_index.storage.base import Storage
from tiered_index.types import inclusive

T = TypeVar("T")
# for the tables of segments of 64 GiB
_TABLES_BYTES = 16 << 20
# bytes that are read for a directory of queue offsets
_DIRECTORY_BYTES = 64 << 10


@dataclass(frozen=True)
class SegmentArchive:
    """The archived segments of an index, for reading.

    `state` returns the known state of the log, `refresh` reads new records first. `tables` caches tables by the
    storage's URI and the object's name; archives may share it.
    """

    storage: Storage
    state: Callable[[], LogState]
    refresh: Callable[[], LogState]
    tables: CachedKind[tuple[str, str], SegmentTable] = field(
        default_factory=lambda: ReadCache(_TABLES_BYTES).segments, kw_only=True
    )
    blocks: Catalogs = field(default_factory=lambda: ReadCache(_TABLES_BYTES).catalogs, kw_only=True)

    def holding(self, offset: int, store: str | None = None, reads: list[int] | None = None) -> list[ArchivedSegment]:
        """Return the segments that have byte `offset` of the log of `store` (None: of any store).

        The bytes of each read of a catalog are appended to `reads`.
        """

        def look(segments: Segments) -> list[ArchivedSegment]:
            stores = segments.byte_stores if store is None else (store,)
            return [segment for name in stores if (segment := segments.holding(name, offset)) is not None]

        return self.looked_up(look, reads)

    def looked_up(self, look: Callable[[Segments], T], reads: list[int] | None = None) -> T:
        """Return the result of `look` for the segments of the known state, or of a newer one.

        It calls `look` again if a record has put another catalog in the place of one. `reads` as in `segments`.
        """
        try:
            return look(self.segments(reads))
        except MissingCatalog:
            self.refresh()
            return look(self.segments(reads))

    def prefetch(self, offsets: Iterable[int], store: str | None = None, reads: list[int] | None = None) -> None:
        """Read what `holding` needs for `offsets`, several parts at the same time. It may raise its errors instead."""
        segments = self.segments(reads)
        stores = segments.byte_stores if store is None else (store,)
        with contextlib.suppress(MissingCatalog):
            segments.prefetch((name, offset) for offset in offsets for name in stores)

    def segments(self, reads: list[int] | None = None) -> Segments:
        """Return the segments of the known state. The bytes of each read of a catalog are appended to `reads`."""
        return Segments(self.state(), self.storage, self.blocks, [] if reads is None else reads)

    def read(self, segment: ArchivedSegment, position: int, length: int) -> bytes:
        """Return unchecked bytes of a segment from `position` on. Raises `ObjectNotFound`, `CorruptFile`."""
        if not 0 <= position <= position + length <= segment.size_bytes:
            raise InvalidArgument(f"bytes {inclusive(position, position + length)} are not within {segment.name}")
        return b"".join(self._range(segment, *extent) for extent in segment.ranges(position, length))

    def verified(self, segment: ArchivedSegment, position: int, length: int) -> bytes:
        """Return bytes of a segment as `read` does, but check the CRC32 of their pieces.

        One request if the segment's table is known. Raises `CorruptFile` for a piece with a different CRC32.
        """
        table = self.table(segment)
        begin, end = table.whole_pieces(position, position + length)
        # the footer of a columnar segment is known, and is elsewhere in the object
        footer_at = segment.size_bytes - len(table.footer)
        data = self.read(segment, begin, max(min(end, footer_at) - begin, 0))
        data += table.footer[max(begin - footer_at, 0) : max(end - footer_at, 0)]
        for damage in table.damage(segment.name, begin, data):
            raise damage
        return data[position - begin :][:length]

    def _range(self, segment: ArchivedSegment, position: int, length: int) -> bytes:
        try:
            with self._there(segment):
                return self.storage.get_range(segment.name, position, length)
        except InvalidArgument as error:
            problem = f"is shorter than the log says ({error})"
            raise CorruptFile(segment.name, problem, expected=segment.object_bytes) from error

    @contextlib.contextmanager
    def _there(self, segment: ArchivedSegment) -> Iterator[None]:
        """Return a context manager that raises `CorruptFile` for a missing object that the log still names."""
        try:
            yield
        except ObjectNotFound as error:
            if not Segments(self.refresh(), self.storage, self.blocks).names_object(segment.name):
                raise
            problem = (
                "the log names this segment, but the storage does not have it: restore it by `verify --deep --repair`, "
                "or give it up by `recover --lost`"
            )
            raise CorruptFile(segment.name, problem) from error

    def known_table(self, segment: ArchivedSegment) -> SegmentTable | None:
        """Return a segment's table; None: not cached."""
        return self.tables.get((self.storage.uri, segment.name))

    def table(self, segment: ArchivedSegment) -> SegmentTable:
        """Return a segment's table: the CRC32 of its pieces, and a columnar segment's footer. One request, or none.

        Raises `ObjectNotFound` (removed), and `CorruptFile` if it contradicts the log.
        """
        if (known := self.known_table(segment)) is not None:
            return known
        # a footer is checked in whole pieces; the first begins before it
        footer_at = segment.size_bytes - segment.footer_bytes
        before = footer_at % PIECE_BYTES if segment.footer_bytes else 0
        length = before + segment.object_bytes - footer_at - segment.queues_bytes
        data = self._range(segment, segment.object_bytes - length, length)
        table = SegmentTable.decode(data, segment.object_bytes, segment.name, segment.footer_bytes)
        table.check(segment.name, segment.start, segment.size_bytes, segment.crc32)
        for damage in table.damage(segment.name, footer_at - before, data[:before] + table.footer):
            raise damage
        self.tables.put((self.storage.uri, segment.name), table, table.pieces.nbytes + len(table.footer))
        return table

    def queue_offsets(self, segment: ArchivedSegment, begin: int = 0, length: int | None = None) -> bytes:
        """Return `length` unchecked bytes (None: all) of a segment's queue offsets from byte `begin` on.

        Raises the errors of `read`.
        """
        length = segment.queues_bytes - begin if length is None else length
        return self._range(segment, segment.size_bytes + begin, length) if length else b""

    def queue_directory(self, segment: ArchivedSegment) -> QueueDirectory:
        """Return the directory of a segment's queue offsets, which it must have. Raises the errors of `read`."""
        size = segment.queues_bytes
        data = self.queue_offsets(segment, max(0, size - _DIRECTORY_BYTES))
        if (length := directory_bytes(data)) > len(data):
            data = self.queue_offsets(segment, max(0, size - length))
        directory = decode_directory(data, size, segment.name)
        problem = "queue offsets are of a segment that begins elsewhere"
        CorruptFile.unless_equal(segment.name, problem, segment.start, directory.start)
        return directory
