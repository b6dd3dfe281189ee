"""Reads rows of linked files again, by their entries: a block of a text, or a row of a Parquet file.

The bytes of a text are checked against the CRC32 of its blocks, noted when it was indexed. The keys are taken from the
row again. So a row is the one that was indexed, or the answer names the file and says that it is gone or was changed. A
compressed text is decompressed from its begin. Threads: any.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tiered_index.config import IndexConfig
from tiered_index.encoding import MAX_BODY_BYTES, BodyFormat, json_text, show_bytes
from tiered_index.errors import BudgetExceeded, CorruptFile, InvalidArgument, ObjectNotFound, StorageError
from tiered_index.format.names import linked_store
from tiered_index.format.segment import LinkedSegment
from tiered_index.kernels import crc32
from tiered_index.service.jobs.segment_archive import SegmentArchive
from tiered_index.service.read.messages import Fetched, Search
from tiered_index.service.read.segments import MissingCatalog
from tiered_index.sources.linked import QUEUE, keys_name
from tiered_index.sources.listing import SourceFile, reopened
from tiered_index.sources.rows import (
    SUM_BYTES,
    CsvFile,
    NdjsonFile,
    ParquetFile,
    RowMapping,
    decompressed,
    open_rows,
    read_text,
)
from tiered_index.spelling import other_spellings
from tiered_index.storage.context import check_deadline
from tiered_index.storage.pools import each
from tiered_index.types import IndexItem

_SKIP_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRow:
    """A row of a file: its text, or a row of columns as JSON. `position` is a byte of the text, or a row's number."""

    topic: str
    file: str
    position: int
    timestamp_ms: int
    text: bytes

    def to_dict(self, body: BodyFormat = "text", max_body_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
        """Return it JSON-ready, its text as the body, as `show_bytes` does."""
        return {
            "topic": self.topic,
            "file": self.file,
            "position": self.position,
            "timestamp_ms": self.timestamp_ms,
            "body_bytes": len(self.text),
            **show_bytes(self.text, body),
        }


class _Changed(Exception):
    """The file is not as it was when it was indexed."""


@dataclass
class LinkedRows:
    """The rows of entries of files: a `MessageSource`.

    - `archives`: as `IndexReader.segment_archives`.
    - `positions`: the names of the indexes' positions, which have the paths of keys.
    """

    archives: Mapping[str | None, SegmentArchive]
    config: IndexConfig
    positions: Collection[str]
    threads: int = 8

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return what became of each of `items`, in their order. Errors of files are in the answers."""
        searches = [Search(item=item) for item in items]
        each(searches, lambda search: self._settle(search, topic, key), self.threads)
        return [search.outcome(partial(search.missing, "missing", damaged=search.damaged)) for search in searches]

    def _settle(self, search: Search, topic: str, key: str) -> None:
        item = search.item
        assert item is not None
        try:
            segment = self._segment(search, topic, item)
            if segment is None:
                search.problems.append(f"no file of topic {topic!r} has offset {item.offset:,}")
                return
            search.read_from = segment.uri
            check_deadline(f"reading {segment.uri}")
            search.requests += 1
            with reopened(segment.uri, self.config) as listed:
                self._take(search, segment, listed, topic, key)
        except _Changed:
            search.problems.append(f"{search.read_from} has changed since it was indexed")
        except (InvalidArgument, ObjectNotFound) as error:
            search.problems.append(f"{search.read_from} is gone, or can't be opened: {error}")
        except (CorruptFile, StorageError, BudgetExceeded) as error:
            search.problems.append(str(error))
            search.damaged = search.damaged or isinstance(error, CorruptFile)
            search.error = None if isinstance(error, CorruptFile) else error

    def _segment(self, search: Search, topic: str, item: IndexItem) -> LinkedSegment | None:
        archive, store = self.archives[item.source], linked_store(topic, item.queue_id)
        reads = list[int]()
        try:
            segment = archive.segments(reads).segment(store, item.offset)
        except MissingCatalog:
            # a record has put another catalog in its place
            archive.refresh()
            segment = archive.segments(reads).segment(store, item.offset)
        search.charge(reads)
        return segment if isinstance(segment, LinkedSegment) else None

    def _take(self, search: Search, segment: LinkedSegment, listed: SourceFile, topic: str, key: str) -> None:
        """Read and judge the row of an entry. Raises `_Changed`."""
        item = search.item
        assert item is not None
        position = item.offset - segment.start + segment.position
        mapping = self._mapping(topic)
        try:
            if segment.format == "parquet":
                if not listed.is_same(segment.size_bytes, segment.etag):
                    raise _Changed
                file = open_rows(listed.file, listed.size_bytes, listed.head())
                assert isinstance(file, ParquetFile)
                row = file.row(position)
                search.requests += 1
                text, members = (
                    json_text(row, compact=True).encode(),
                    [] if mapping is None else file.members_of(row, mapping),
                )
            else:
                text = self._text(search, segment, listed, position, item.size)
                kind = CsvFile if segment.format.startswith("csv") else NdjsonFile
                _, _, compression = segment.format.partition("+")
                rows = kind(listed.file, compression or None, listed.size_bytes)
                members = [] if mapping is None else rows.members_of(text, mapping)[:-1]
            keys = {key} if mapping is None else {*mapping.keys_of(members)}
        except InvalidArgument as error:
            raise _Changed from error
        row_found = FileRow(topic, segment.uri, position, item.timestamp_ms, text)
        carries = not {key, *other_spellings(key)}.isdisjoint(keys)
        search.settle(search.fetched("local", message=row_found, carries_key=carries))

    def _text(self, search: Search, segment: LinkedSegment, listed: SourceFile, position: int, size: int) -> bytes:
        """Return the bytes of a line, from the blocks that have it. Raises `_Changed`, `CorruptFile`."""
        _, _, compression = segment.format.partition("+")
        size_bytes, sums = segment.blocks or (SUM_BYTES, ())
        at = position - segment.position
        first, end = at // size_bytes, (at + size - 1) // size_bytes + 1
        begin, behind = first * size_bytes, min(end * size_bytes, segment.length)
        if segment.is_open or not sums:
            # not all of it has been read: there are no checksums yet
            first = end
            begin, behind = at, at + size
        with decompressed(listed.file, compression or None) as handle:
            if compression:
                left = segment.position + begin
                while left and (piece := read_text(listed.file, handle, compression, min(left, _SKIP_BYTES))):
                    left -= len(piece)
            else:
                handle.seek(segment.position + begin)
            data = read_text(listed.file, handle, compression or None, behind - begin)
        search.requests += 1
        search.bytes += len(data)
        if len(data) != behind - begin:
            raise _Changed
        for number in range(first, end):
            block = data[(number - first) * size_bytes : (number - first + 1) * size_bytes]
            if crc32(block) != sums[number]:
                raise _Changed
        return data[at - begin : at - begin + size]

    def _mapping(self, topic: str) -> RowMapping | None:
        """Return the paths of the keys of a topic; None: they are not known."""
        prefix = keys_name(topic, "")
        paths = [name.removeprefix(prefix) for name in self.positions if name.startswith(prefix)]
        return RowMapping(paths, "@") if paths else None


def has_rows(archives: Mapping[str | None, SegmentArchive], topic: str) -> bool:
    """Return whether a topic has files in one of the indexes."""
    store = linked_store(topic, QUEUE)
    return any(store in archive.state().listed_logs for archive in archives.values())
