"""The journal of an unsealed file: its durable entries, topics with their documents, and source positions. SPEC.md 7.

Each record is one write and one sync, after the entries that it describes. So a crash can tear only the last record.
Pure.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict

from tiered_index.base.documents import Count, Crc32, FileId, Milliseconds, Seconds, decoded, encoded
from tiered_index.errors import CorruptFile, InvalidArgument, UnsupportedVersion
from tiered_index.format.layout import Layout
from tiered_index.format.metadata import Positions, Predecessor, Topics
from tiered_index.format.schema import read_schema
from tiered_index.format.topic_documents import (
    NO_DOCUMENTS,
    Documents,
    Revision,
    StoredDocuments,
    documents_in,
    in_parts,
    newest_documents,
    stored_documents,
)

_MAGIC = b"TIXJRNL\n"
JOURNAL_VERSION = 3
_START = struct.Struct(">8sI")
_FRAME = struct.Struct(">II")
_MAX_RECORD = 1 << 26
T = TypeVar("T")


class BatchRecord(Struct, frozen=True):
    """States that `count` entries from `first` on, with `crc32`, are durable. Seconds are inclusive epoch seconds."""

    first: Annotated[int, Meta(ge=1, le=2**31)]
    count: Annotated[int, Meta(ge=0, le=2**31)]
    crc32: Crc32
    second_min: Seconds
    second_max: Seconds
    end_ms: Milliseconds


@dataclass
class Journal:
    """The content of a journal up to its last whole record, which ends at byte `valid_length`.

    - `sequence` orders the files of one root by creation.
    - `predecessor` is the file before this one in its lane, and its number of durable entries. It shows whether that
      file's journal has lost records since.
    - `log_number` is the number of a log record before all records that name the file; 0: there was none.
    - `last_record` is the first byte of the last whole record, and its length and CRC32 as the journal has them.
    """

    file_id: str
    layout: Layout
    begin_ms: int
    lane: str
    sequence: int
    offset_space: str
    created_ms: int = 0
    predecessor: tuple[str, int] | None = None
    topics: dict[int, str] = field(default_factory=dict)
    batches: list[BatchRecord] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    documents: Documents = field(default_factory=dict)
    sealed: bool = False
    valid_length: int = 0
    log_number: int = 0
    last_record: tuple[int, bytes] = (0, b"")

    @property
    def count(self) -> int:
        """The number of durable entries."""
        return self.batches[-1].first + self.batches[-1].count - 1 if self.batches else 0

    @property
    def seconds(self) -> tuple[int, int] | None:
        """First and last second of the durable entries, inclusive; None without entries."""
        filled = [batch for batch in self.batches if batch.count]
        return (min(b.second_min for b in filled), max(b.second_max for b in filled)) if filled else None

    @property
    def end_ms(self) -> int:
        """The greatest timestamp of the durable entries, for the header; 0 without entries."""
        return max((batch.end_ms for batch in self.batches), default=0)


def _record(document: dict[str, Any]) -> bytes:
    payload = encoded(document)
    if len(payload) > _MAX_RECORD:  # a reader would drop it as torn
        raise InvalidArgument(f"a journal record of {len(payload):,} bytes: at most {_MAX_RECORD:,} are possible")
    length = len(payload).to_bytes(4, "big")
    return length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "big") + payload


def encode_open(journal: Journal) -> bytes:
    """Return the first bytes of a new journal: magic, version and the open record."""
    document = {
        "kind": "open",
        "file_id": journal.file_id,
        "layout": journal.layout.to_json(),
        **{name: getattr(journal, name) for name in ("begin_ms", "lane", "sequence", "offset_space", "created_ms")},
        **({"predecessor": journal.predecessor} if journal.predecessor else {}),
        **({"log_number": journal.log_number} if journal.log_number else {}),
    }
    return _START.pack(_MAGIC, JOURNAL_VERSION) + _record(document)


def encode_batch(
    batch: BatchRecord,
    positions: dict[str, int],
    topics: Sequence[tuple[int, str]] = (),
    documents: Documents = NO_DOCUMENTS,
) -> bytes:
    """Return the record of a durable batch, which may have no entries. `positions` and `documents` are durable with it.

    `topics` are the (id, name) pairs that this batch uses first. They have no record of their own, because a crash may
    lose only the first page of a write. Two records in one write would then look like damage. Raises `InvalidArgument`
    if the record is too long for readers. See `fit_record`.
    """
    document = {"kind": "batch", **asdict(batch), "positions": positions}
    if topics:
        document["topics"] = topics
    if documents:
        document["documents"] = stored_documents(documents)
    return _record(document)


def fit_record(topics: Iterable[tuple[int, str]]) -> bool:
    """Return whether the (id, name) pairs of a batch take at most half of a record, so that the rest fits, too."""
    # in JSON a character is at most an escape of six bytes
    return sum(32 + 6 * len(name) for _, name in topics) <= _MAX_RECORD // 2


def in_records(positions: dict[str, int]) -> list[dict[str, int]]:
    """Return positions in one or more parts. Each part fits a record beside topics that fit by `fit_record`."""
    parts, size = [dict[str, int]()], 0
    for source, position in positions.items():
        size += 32 + 6 * len(source)
        if size > _MAX_RECORD // 4 and parts[-1]:
            parts.append({})
            size = 32 + 6 * len(source)
        parts[-1][source] = position
    return parts


def documents_in_records(documents: Documents) -> list[dict[str, Revision]]:
    """Return documents in one or more parts. Each part fits a record beside positions of `in_records` and topics."""
    return in_parts(documents, _MAX_RECORD // 8)


def encode_seal() -> bytes:
    """Return the seal record: the file accepts no more entries."""
    return _record({"kind": "seal"})


def parse_journal(data: bytes, file: str, file_id: str | None = None) -> Journal | None:
    """Return the journal in `data`; None if a crash has torn its first record.

    `file_id` is the id in the journal's name. A torn last record is dropped. Raises `CorruptFile` for a damaged record
    before a whole one, which no crash can leave, and for a journal of another file. Raises `UnsupportedVersion`.
    """
    if len(data) < _START.size or not data.strip(b"\0"):
        # after a crash, a file system may have kept the length of a file but not its bytes, which are then zeros
        return None
    magic, version = _START.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptFile(file, "not a journal", offset=0, expected=_MAGIC, found=magic)
    UnsupportedVersion.unless_read(file, "journal", JOURNAL_VERSION, version, offset=8)
    journal = _with_records(None, data[_START.size :], file, _START.size)
    if journal is not None and file_id not in (None, journal.file_id):
        raise CorruptFile(
            file, "the journal's name has the id of another file", expected=file_id, found=journal.file_id
        )
    return journal


def read_on(journal: Journal, data: bytes, file: str) -> bool:
    """Apply the records that were appended. `data` are the bytes from the first one of `journal.last_record` on.

    Return False, changing nothing, if another record is there now. Errors: as above.
    """
    begin, frame = journal.last_record
    if data[: _FRAME.size] != frame:
        return False
    _with_records(journal, data[journal.valid_length - begin :], file, journal.valid_length)
    return True


def _with_records(journal: Journal | None, data: bytes, file: str, start: int) -> Journal | None:
    """Apply the whole records of `data`, which begins at byte `start` of the file, and return the journal."""
    position = 0
    while (payload := _payload_at(data, position)) is not None:
        journal = _apply(journal, payload, file, start + position)
        journal.last_record = start + position, data[position : position + _FRAME.size]
        position += _FRAME.size + len(payload)
        journal.valid_length = start + position
    # a payload starts with a brace, so a later record can start only 8 bytes before a brace
    brace = data.find(b"{", position + _FRAME.size + 1)
    while brace >= 0:
        if _payload_at(data, brace - _FRAME.size) is not None:
            raise CorruptFile(file, "damaged record before a whole one", offset=start + position)
        brace = data.find(b"{", brace + 1)
    return journal


def _payload_at(data: bytes, position: int) -> bytes | None:
    if position + _FRAME.size > len(data):
        return None
    length, crc = _FRAME.unpack_from(data, position)
    stop = position + _FRAME.size + length
    if not 2 <= length <= _MAX_RECORD or stop > len(data) or data[position + _FRAME.size] != ord("{"):
        return None
    payload = data[position + _FRAME.size : stop]
    return payload if zlib.crc32(payload, zlib.crc32(data[position : position + 4])) == crc else None


class _Kind(Struct):
    kind: str


class _Open(Struct):
    file_id: FileId
    layout: Layout
    begin_ms: Milliseconds
    lane: str
    sequence: Count
    offset_space: str
    created_ms: Milliseconds
    predecessor: Predecessor | None = None
    log_number: Count = 0


class _Batch(BatchRecord, frozen=True):
    positions: Positions
    topics: Topics = ()
    documents: StoredDocuments = ()


def _apply(journal: Journal | None, payload: bytes, file: str, position: int) -> Journal:
    """Apply a record that begins at byte `position`, and return the journal."""

    def read(kind: type[T]) -> T:
        return decoded(payload, kind, file, "journal record", offset=position, hook=read_schema)

    kind, damage = read(_Kind).kind, partial(CorruptFile, file, offset=position)
    if journal is None:
        if kind != "open":
            raise damage("journal does not start with its open record", expected="open", found=kind[:40])
        return Journal(**asdict(read(_Open)))
    if kind == "batch":
        stored = read(_Batch)
        batch = BatchRecord(*[getattr(stored, name) for name in BatchRecord.__struct_fields__])
        if batch.first != journal.count + 1 or batch.first + batch.count - 1 > journal.layout.capacity:
            raise damage("batches do not follow each other", expected=journal.count + 1, found=batch.first)
        if journal.sealed and batch.count:
            raise damage("entries after the seal")
        if batch.second_min > batch.second_max:
            raise damage("a batch ends before it begins", expected=batch.second_min, found=batch.second_max)
        if any(journal.topics.setdefault(topic_id, name) != name for topic_id, name in stored.topics):
            raise damage("a topic id has two names")
        journal.batches.append(batch)
        for source, place in stored.positions.items():
            journal.positions[source] = max(place, journal.positions.get(source, place))
        if stored.documents:
            journal.documents = newest_documents(journal.documents, documents_in(stored.documents))
    elif kind == "seal":
        journal.sealed = True
    else:
        raise UnsupportedVersion(file, f"unknown journal record {kind[:40]!r}", offset=position)
    return journal
