"""Reads rows of linked files again, by their entries: a block of a text, or a row of a Parquet file.

A row that was archived is read from its copy, otherwise from its file.

The bytes of a file are checked against the CRC32 of its blocks, noted when it was indexed. The keys are taken from the
row again, and the topic if it is a field. So a row is the one that was indexed, or the answer names the file and says
that it is gone or was changed. An entry at whose offset no row of its topic begins gets neither bytes nor a file. A
compressed text is decompressed from the restart point before the row, if there is one. Threads: any.
"""

from __future__ import annotations

import contextlib
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Self, cast

from tiered_index.base.call import check_deadline
from tiered_index.base.encoding import MAX_BODY_BYTES, BodyFormat, show_bytes
from tiered_index.base.kernels import crc32
from tiered_index.base.locks import call_lock
from tiered_index.base.threads import each
from tiered_index.connectors.archive.columns import record_at
from tiered_index.connectors.documents import every_document, key_rules
from tiered_index.connectors.files.listing import LinkedFiles, SourceFile, as_it_is
from tiered_index.connectors.files.rows.batch import RowFile
from tiered_index.connectors.files.rows.columns import MAX_ROW_BYTES
from tiered_index.connectors.files.rows.forms import rows_of_form
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.files.rows.places import CheckedFile, File, LocalFile, StoredFile
from tiered_index.connectors.files.rows.restart import RESTARTED, RestartedText, point_before
from tiered_index.connectors.files.rows.table import TABLES, ColumnsFile
from tiered_index.connectors.files.rows.text import (
    BLOCK_BYTES,
    SUM_BYTES,
    NdjsonFile,
    TextFile,
    decompressed,
    read_text,
)
from tiered_index.connectors.files.rows.values import rows_as_json
from tiered_index.errors import BudgetExceeded, CorruptFile, InvalidArgument, ObjectNotFound, StorageError
from tiered_index.format.names import linked_store, rows_store
from tiered_index.format.segments.segment import LOST, LinkedSegment
from tiered_index.service.index import IndexService
from tiered_index.service.read.answers.messages import Fetched, Search
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.places import file_place
from tiered_index.service.reader import IndexReader
from tiered_index.types import FilePlace, IndexItem

_SKIP_BYTES = 1 << 20
# of a packed file, from its last restart point on
_RESTARTED_BYTES = 2 << 20
# of a row: a line is refused when a block is behind so many bytes of it
_MOST_BYTES = MAX_ROW_BYTES + BLOCK_BYTES
# files whose header or footer is kept
_KEPT = 256


@dataclass(frozen=True)
class FileRow:
    """A row of a file, which came back.

    - `topic`: the topic of its entries.
    - `file`: the URI of the file.
    - `row`: the number of the row, from 0; of a text, the byte at which its line begins, after decompression.
    - `timestamp_ms`: its time, epoch milliseconds by whole seconds.
    - `text`: the line of NDJSON; of CSV, Parquet and Arrow the row as a JSON object.
    - `line`: the number of the line of a text, from 1; None: not known.
    """

    topic: str
    file: str
    row: int
    timestamp_ms: int
    text: bytes
    line: int | None = None

    def to_dict(self, body: BodyFormat = "text", max_body_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
        """Return it JSON-ready, its text as the body, as `show_bytes` does."""
        return {
            "topic": self.topic,
            "file": self.file,
            "row": self.row,
            **({} if self.line is None else {"line": self.line}),
            "timestamp_ms": self.timestamp_ms,
            "body_bytes": len(self.text),
            **show_bytes(self.text, body),
        }

    def body(self, max_bytes: int) -> bytes:
        """Return its text."""
        return self.text

    @property
    def size(self) -> int:
        """The bytes of its text."""
        return len(self.text)

    @property
    def compression(self) -> None:
        """None: a row is its text."""

    def plain_bytes(self, max_bytes: int) -> int:
        """Return `size`."""
        return self.size

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts beside the row: the URI of the file."""
        return (self.file,)


class _Changed(Exception):
    """The file is not as it was when it was indexed."""


class _NoRow(Exception):
    """No row of the entry's topic begins at its offset, or it has another size: the entry is not of this file."""


def _hide(search: Search, topic: str) -> None:
    """Note that an entry has no row of its topic, without the name of a file, which may be another topic's."""
    assert search.item is not None
    search.read_from = search.file_place = None
    search.problems.append(f"no row of topic {topic!r} is at offset {search.item.offset:,}")


def _is_topic(mapping: RowMapping, member: Any, topic: str) -> bool:
    """Return whether a row has a topic, by the member at the path of its topic."""
    with contextlib.suppress(InvalidArgument):
        return mapping.topic_of(member) == topic
    return False


def _has_first_bytes(now: SourceFile, segment: LinkedSegment) -> bool:
    """Return whether a text that is being read has its first bytes, if they are known, perhaps with more behind it."""
    if segment.blocks is None or segment.position or "+" in segment.format:
        return False
    length, (first, *_) = segment.blocks
    return now.size_bytes >= segment.length and crc32(now.part(0, length)) == first


class FileRows:
    """The rows of the files of topics: a `MessageSource` for the `messages` of a reader or an index.

        with FileRows(reader) as rows:
            for found in reader.messages("orders", "4711", source=rows):
                print(found.message.text if found.message else found.problem)

    Each `Fetched.message` is a `FileRow`, or None if the file was changed or is gone: `problem` says so. Any thread may
    call its methods. Close it to close the storages of the files; it does not close the reader.
    """

    def __init__(self, index: IndexReader[Any] | IndexService[Any], *, threads: int | None = None) -> None:
        self._index = index
        self._threads = threads or index.config.query_threads
        self._files = LinkedFiles(index.config)
        self._lock = call_lock()
        # by the store of a log, and the path of the topic
        self._mappings: dict[tuple[str, str | None], RowMapping | None] = {}
        self._opened: OrderedDict[tuple[str, str, str, bool], RowFile] = OrderedDict()

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return what became of each of `items`, in their order. Errors of files are in the answers."""
        searches = [Search(item=item) for item in items]
        each(searches, lambda search: self._settle(search, topic, key), self._threads)
        return [search.outcome(partial(search.missing, "missing", damaged=search.damaged)) for search in searches]

    def close(self) -> None:
        """Close the storages of the files. Idempotent."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _archives(self) -> Mapping[str | None, SegmentArchive]:
        return self._index.segment_archives

    def _settle(self, search: Search, topic: str, key: str) -> None:
        item = search.item
        assert item is not None
        if self._is_archived(search, item, topic, key):
            return
        try:
            segment = self._segment(search, topic, item)
            if segment is None:
                archive, store = self._archives[item.source], linked_store(topic, item.queue_id)
                lost = archive.segments().given_up(store, item.offset)
                search.problems.append(
                    f"no file of topic {topic!r} has offset {item.offset:,}" if lost is None else lost.reason
                )
                return
            search.read_from, search.file_place = segment.uri, file_place(segment, item.offset)
            check_deadline(f"reading {segment.uri}")
            self._take(search, segment, self._files.file(segment.uri, segment.size_bytes), topic, key)
        except _NoRow:
            _hide(search, topic)
        except _Changed:
            search.problems.append(f"{search.read_from} has changed since it was indexed")
        except (InvalidArgument, ObjectNotFound) as error:
            search.is_refused = isinstance(error.__cause__, PermissionError)
            search.problems.append(f"{search.read_from} is gone, or can't be opened: {error}")
        except (CorruptFile, StorageError, BudgetExceeded) as error:
            search.note(error)

    def _is_archived(self, search: Search, item: IndexItem, topic: str, key: str) -> bool:
        """Look for the archived copy of a row. Return whether there is one; `search` has it then."""
        archive, store = self._archives[item.source], rows_store(linked_store(topic, item.queue_id))
        try:
            record = record_at(archive, store, item.offset, search)
        except (CorruptFile, StorageError, BudgetExceeded) as error:
            # the file may still have it
            search.note(error)
            return False
        if record is None or not len(record.row):
            return False
        (row,) = record.row.to_pylist()
        if row["topic"] != topic:
            _hide(search, topic)
            return True
        search.file_place = FilePlace(row["file"], row["row"], "byte" if item.size else "row")
        message = FileRow(topic, row["file"], row["row"], item.timestamp_ms, row["text"], row["line"])
        search.settle(search.fetched("archived", message=message, carries_key=key in row["keys"]))
        return True

    def _segment(self, search: Search, topic: str, item: IndexItem) -> LinkedSegment | None:
        archive, store = self._archives[item.source], linked_store(topic, item.queue_id)
        reads = list[int]()
        segment = archive.looked_up(lambda segments: segments.segment(store, item.offset), reads)
        search.charge(reads)
        return segment if isinstance(segment, LinkedSegment) else None

    def _take(self, search: Search, segment: LinkedSegment, file: LocalFile | StoredFile, topic: str, key: str) -> None:
        """Read and judge the row of an entry. Raises `_NoRow`, `_Changed`, `ObjectNotFound`."""
        item = search.item
        assert item is not None
        position, line = file_place(segment, item.offset).row, None
        if segment.etag == LOST:
            raise _Changed
        try:
            if segment.format in TABLES:
                text, members_by = self._columns(search, segment, file, position)
            else:
                rows = self._rows(search, segment, file)
                assert isinstance(rows, TextFile), "by its format"
                text, line = self._text_again(search, segment, file, rows, position, item.size)
                members_by = partial(rows.members_of, text)
                text = rows.shown_line(text, position)
            carries = self._carries(segment, topic, key, members_by)
        except InvalidArgument as error:
            if isinstance(error.__cause__, OSError):
                # the file can't be opened
                raise
            raise _Changed from error
        if segment.is_open:
            search.problems.append(f"{segment.uri} is still being read, so the row has no checksum yet")
        row = FileRow(topic, segment.uri, position, item.timestamp_ms, text, line)
        search.settle(search.fetched("local", message=row, carries_key=carries))

    def _carries(
        self, segment: LinkedSegment, topic: str, key: str, members_of: Callable[[RowMapping], Sequence[Any]]
    ) -> bool:
        """Return whether a row carries a key, by all paths of keys that are known.

        Raises `_NoRow` if the field with the topics of the segment's rows has another one, and `InvalidArgument`.
        """
        for again in (False, True):
            if (mapping := self._mapping(segment, again=again)) is None:
                return True
            members, count = members_of(mapping), len(mapping.keys)
            # the time is behind the keys, and the topic behind the time
            if mapping.topic is not None and not _is_topic(mapping, members[count + 1], topic):
                raise _NoRow
            if mapping.has_key(members[:count], key):
                return True
        return False

    def _columns(
        self, search: Search, segment: LinkedSegment, file: LocalFile | StoredFile, number: int
    ) -> tuple[bytes, Callable[[RowMapping], Sequence[Any]]]:
        """Return a row of a file with columns as JSON, and a function that returns its keys."""
        place: File = file
        if segment.blocks is not None and not segment.is_open:
            place = CheckedFile(file, segment.size_bytes, *segment.blocks)
        else:
            # not all of it was read, so there are no checksums
            now = as_it_is(file)
            search.requests += isinstance(file, StoredFile)
            if not now.is_same(segment.size_bytes, segment.etag):
                raise _Changed
        opened = self._rows(search, segment, place)
        assert isinstance(opened, ColumnsFile), "by its format"
        row = opened.row(number)
        search.requests += isinstance(file, StoredFile)
        return rows_as_json(row)[0], partial(opened.members_of, row)

    def _rows(self, search: Search, segment: LinkedSegment, file: File) -> RowFile:
        """Return the rows of a segment's file, with its header or footer, which is read once."""
        name = segment.uri, segment.etag, segment.format, isinstance(file, CheckedFile)
        with self._lock:
            if name in self._opened:
                self._opened.move_to_end(name)
                return self._opened[name]
        opened = rows_of_form(file, segment.format, segment.size_bytes)
        is_stored = isinstance(file.file if isinstance(file, CheckedFile) else file, StoredFile)
        search.requests += is_stored and not isinstance(opened, NdjsonFile)
        with self._lock:
            self._opened[name] = opened
            while len(self._opened) > _KEPT:
                self._opened.popitem(last=False)
        return opened

    def _text_again(
        self, search: Search, segment: LinkedSegment, file: LocalFile | StoredFile, rows: TextFile, at: int, size: int
    ) -> tuple[bytes, int | None]:
        """As `_text`, once more from the begin of a packed file: if it was packed again, no restart point fits.

        If it is damaged now, the text before the damage is read again.
        """
        try:
            return self._text(search, segment, file, rows, at, size)
        except _Changed:
            if segment.format.rpartition("+")[2] not in RESTARTED:
                raise
        try:
            return self._text(search, segment, file, rows, at, size, is_restarted=False)
        except CorruptFile as error:
            # it is no longer packed, or packed in another form
            raise _Changed from error

    def _text(
        self,
        search: Search,
        segment: LinkedSegment,
        file: LocalFile | StoredFile,
        rows: TextFile,
        position: int,
        size: int,
        *,
        is_restarted: bool = True,
    ) -> tuple[bytes, int | None]:
        """Return the bytes of a line, from the blocks that have it, and its number. Raises as `_take`.

        The bytes before and behind the line are read, too, because they show that it is a whole row.
        """
        _, _, compression = segment.format.partition("+")
        size_bytes, sums = segment.blocks or (SUM_BYTES, ())
        at, behind_at = position - segment.position, position - segment.position + size
        if position < rows.begin or not 0 < size <= _MOST_BYTES or behind_at > segment.length:
            raise _NoRow
        first, end = max(at - 1, 0) // size_bytes, behind_at // size_bytes + 1
        begin, behind = first * size_bytes, min(end * size_bytes, segment.length)
        has_sums = bool(sums) and not segment.is_open
        if not has_sums:
            # not all of it was read, so there are no checksums: its first bytes tell it from another text
            now = as_it_is(file)
            search.requests += isinstance(file, StoredFile)
            if not (now.is_same(segment.size_bytes, segment.etag) or _has_first_bytes(now, segment)):
                raise _Changed
            first = end
            begin, behind = max(at - 1, 0), min(behind_at + 1, segment.length)
        # one ranged read of a text that is not packed
        try:
            with self._opened_text(search, segment, file, begin, is_restarted=is_restarted) as (handle, left):
                if compression:
                    while left and (piece := read_text(file, handle, compression, min(left, _SKIP_BYTES))):
                        left -= len(piece)
                        check_deadline(f"decompressing {segment.uri}")
                data = read_text(file, handle, compression or None, behind - begin)
        except CorruptFile as error:
            if not is_restarted:
                raise
            raise _Changed from error
        if isinstance(file, StoredFile):
            search.requests += 1
            search.bytes += len(data)
        if len(data) < (behind if has_sums else behind_at) - begin:
            raise _Changed
        for number in range(first, min(end, len(sums))):
            block = data[(number - first) * size_bytes : (number - first + 1) * size_bytes]
            if crc32(block) != sums[number]:
                raise _Changed
        line, text = None, data[at - begin : behind_at - begin]
        # a segment begins and ends with a row; bytes that are 0 may be before one
        before = data[: at - begin].rstrip(b"\0")
        is_begin = not before or before.endswith(b"\n")
        if not (is_begin and data[behind_at - begin :][:1] in (b"", b"\n") and rows.is_one_row(text)):
            raise _NoRow if has_sums else _Changed
        if segment.lines is not None:
            line = segment.lines[0] + sum(segment.lines[1][:first]) + data.count(b"\n", 0, at - begin) + 1
        return text, line

    @contextlib.contextmanager
    def _opened_text(
        self, search: Search, segment: LinkedSegment, file: LocalFile | StoredFile, begin: int, *, is_restarted: bool
    ) -> Iterator[tuple[IO[bytes], int]]:
        """Yield the text of a file, and the number of its next bytes that are before byte `begin` of a segment."""
        _, _, compression = segment.format.partition("+")
        position = segment.position + begin
        if not compression:
            with file.ranges() as handle:
                handle.seek(position)
                yield handle, 0
            return
        restart = None
        if compression in RESTARTED and is_restarted:
            item = search.item
            assert item is not None
            # a row is read without them, too
            with contextlib.suppress(ObjectNotFound, CorruptFile):
                restart = point_before(self._archives[item.source], segment.store, segment.start + begin, search)
        if restart is None:
            # the quicker way gives no text of a piece with damage
            with decompressed(file, compression, to_damage=not is_restarted) as handle:
                yield handle, position
            return
        point, next_bit = restart
        first_bytes = _RESTARTED_BYTES if next_bit is None else (next_bit - point.bit) // 8 + SUM_BYTES
        with file.ranges() as handle:
            raw = handle if point.window else cast(IO[bytes], io.BufferedReader(cast(Any, handle), first_bytes))
            yield cast(IO[bytes], RestartedText(raw, point, first_bytes, compression)), position - point.position

    def _mapping(self, segment: LinkedSegment, *, again: bool = False) -> RowMapping | None:
        """Return the paths of the keys and of the topic of a segment's rows; None: the keys are not known.

        `again`: a later run may have added a key. Raises `_NoRow` if the topic is a field, and its path is not known.
        """
        store, topic_field = segment.store, segment.topic_field
        if (store, topic_field) not in self._mappings or again:
            # those of all indexes, which may have the same log
            described = (known for known in every_document(self._index) if known.facts.get("store") == store)
            keys = sorted(key_rules(described))
            self._mappings[store, topic_field] = RowMapping(keys, "@", topic=topic_field) if keys else None
        mapping = self._mappings[store, topic_field]
        if segment.topic is None and (mapping is None or mapping.topic is None):
            raise _NoRow
        return mapping
