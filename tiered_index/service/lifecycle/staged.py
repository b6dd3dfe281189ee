"""Staged files: the entries of a sealed file and what else its compacted form needs, in the storage, where no reader
looks. SPEC section 9.

```
staging/ID/ATTEMPT.entries     entries as in the unsealed file | document: the sealed file, CRC32 of each piece of 1 MiB
staging/ID/E.ticket            document: the writer of epoch E asks for that object to be compacted
```
Documents are those of the log (`encode_document`). Objects come before their ticket, a ticket goes before its object.
Threads: any.
"""

from __future__ import annotations

import mmap
import secrets
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index._version import __version__
from tiered_index.documents import COUNT, CRC32, MILLISECONDS, SIZE, Optional, checked, integer, list_of, record, text
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.format.compacted import SealedFile
from tiered_index.format.metadata import FILE_ID
from tiered_index.format.names import staged_name, ticket_name
from tiered_index.service.files.unsealed import UnsealedFile
from tiered_index.service.lifecycle.pending_uploads import Upload
from tiered_index.service.log.records import decode_document, encode_document
from tiered_index.storage.base import Storage

__all__ = ["Ticket", "read_sealed", "sealed_form", "send_entries", "staged_entries"]

Array = npt.NDArray[Any]
_PIECE_BYTES = 1 << 20
_PIECES_A_RANGE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Says that `object` has file `file_id`, staged by the writer of `epoch`.

    `created_ms` is the file's, `staged_ms` the object's.

    `log_number` is that of a record of the log before any that names the file; 0, as in older tickets, where none is
    known.
    """

    file_id: str
    epoch: int
    object: str
    size_bytes: int
    entries_bytes: int
    count: int
    created_ms: int
    staged_ms: int
    log_number: int = 0

    @property
    def name(self) -> str:
        """The ticket's own name."""
        return ticket_name(self.file_id, self.epoch)

    def encode(self) -> bytes:
        """Return the ticket's bytes."""
        return encode_document({"kind": "ticket", **{name: getattr(self, name) for name in self.__slots__}})

    @classmethod
    def decode(cls, data: bytes, file: str) -> Ticket:
        """Return the ticket in `data`. Raises `CorruptFile`, `UnsupportedVersion`."""
        ticket = checked(_TICKET, decode_document(data, file), file, "ticket")
        if ticket.name != file:
            raise CorruptFile(
                file, "ticket is of another file or epoch than its name", expected=file, found=ticket.name
            )
        if ticket.object != staged_name(ticket.file_id, ticket.object.rpartition("/")[2].removesuffix(".entries")):
            raise CorruptFile(file, "ticket names an object that was not staged for its file", found=ticket.object)
        if ticket.entries_bytes >= ticket.size_bytes:
            raise CorruptFile(
                file,
                "ticket's entries are as long as their object",
                expected=ticket.size_bytes,
                found=ticket.entries_bytes,
            )
        return ticket


_TICKET = record(
    Ticket,
    file_id=FILE_ID,
    epoch=COUNT,
    object=text(r"staging/[A-Za-z0-9_-]+/[A-Za-z0-9_-]+\.entries"),
    size_bytes=SIZE,
    entries_bytes=integer(1, 2**44),
    count=integer(1, 2**31),
    created_ms=MILLISECONDS,
    staged_ms=MILLISECONDS,
    log_number=Optional(COUNT, 0),
)
_STAGED = record(
    lambda **fields: tuple(fields.values()),
    sealed=SealedFile.from_json,
    pieces=list_of(CRC32),
    piece_bytes=integer(1, _PIECE_BYTES),
)


def sealed_form(file: UnsealedFile) -> SealedFile:
    """Return what is known of a sealed file beside its entries."""
    return SealedFile(
        file_id=file.file_id,
        layout=file.layout,
        begin_ms=file.table.begin_ms,
        end_ms=file.table.end_ms,
        count=file.count,
        lane=file.lane,
        sequence=file.sequence,
        predecessor=file.predecessor,
        created_ms=file.created_ms,
        offset_space=file.offset_space,
        topics=tuple(sorted(file.topics.items())),
        positions=dict(file.positions),
        writer=f"tiered_index {__version__}",
        log_number=file.log_number,
    )


def send_entries(
    storage: Storage, sealed: SealedFile, entries: Array, *, epoch: int, now_ms: int, part_bytes: int
) -> Ticket:
    """Put `entries` (structured, n, verified) and `sealed` into the storage, whole; return the ticket, which is not put
    yet.

    Raises what the storage raises; what was sent is taken back then.
    """
    name = staged_name(sealed.file_id, secrets.token_hex(8))
    upload = Upload(storage, name, part_bytes)
    data = memoryview(entries.view(np.uint8).reshape(-1))  # type: ignore[arg-type]
    pieces = []
    try:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            pieces.append(zlib.crc32(piece))
            upload.write(piece)
        document = {"kind": "staged", "sealed": sealed.to_json(), "piece_bytes": _PIECE_BYTES, "pieces": pieces}
        upload.write(encode_document(document))
        upload.finish()
        if upload.handle is not None:
            storage.complete_upload(upload.handle, upload.parts)
        size = storage.head(name).size_bytes
        if size != upload.size_bytes:
            raise StorageUnavailable(
                f"{storage.uri}: {name} has {size:,} bytes after it was sent, not {upload.size_bytes:,}"
            )
    except BaseException:
        upload.abandon()
        raise
    return Ticket(
        file_id=sealed.file_id,
        epoch=epoch,
        object=name,
        size_bytes=upload.size_bytes,
        entries_bytes=len(data),
        count=len(entries),
        created_ms=sealed.created_ms,
        staged_ms=now_ms,
        log_number=sealed.log_number,
    )


def read_sealed(storage: Storage, ticket: Ticket) -> tuple[SealedFile, tuple[int, ...]]:
    """Return what a staged object says beside the entries, and the CRC32 of each piece.

    Raises `CorruptFile`, what the storage raises.
    """
    position, length = ticket.entries_bytes, ticket.size_bytes - ticket.entries_bytes
    for last in (False, True):  # damage on the way is not damage of the object
        try:
            document = decode_document(storage.get_range(ticket.object, position, length), ticket.object)
            break
        except CorruptFile:
            if last:
                raise
    sealed, pieces, piece_bytes = checked(_STAGED, document, ticket.object, "staged file", offset=position)
    wanted = (ticket.file_id, ticket.entries_bytes, _PIECE_BYTES, -(-ticket.entries_bytes // _PIECE_BYTES))
    found = (sealed.file_id, sealed.count * sealed.entry.itemsize, piece_bytes, len(pieces))
    if found != wanted:
        raise CorruptFile(
            ticket.object, "staged file is not the one of its ticket", offset=position, expected=wanted, found=found
        )
    return sealed, pieces


@contextmanager
def staged_entries(storage: Storage, ticket: Ticket, sealed: SealedFile, pieces: tuple[int, ...]) -> Iterator[Array]:
    """Yield the verified entries (structured, n) over a map of a temporary file: memory does not grow with them, local
    disk does.

    Raises `CorruptFile`, what the storage raises.
    """
    with tempfile.TemporaryFile(prefix="tiered-index-") as spool:
        for first in range(0, len(pieces), _PIECES_A_RANGE):
            spool.write(_verified_range(storage, ticket, first, pieces[first : first + _PIECES_A_RANGE]))
        spool.flush()
        # the map is closed by its last array
        yield np.frombuffer(mmap.mmap(spool.fileno(), ticket.entries_bytes, access=mmap.ACCESS_READ), sealed.entry)


def _verified_range(storage: Storage, ticket: Ticket, first: int, pieces: tuple[int, ...]) -> bytes:
    """Return the bytes of `pieces`, of which `first` is the number of the first one; a wrong answer is asked for once
    more.
    """
    start = first * _PIECE_BYTES
    length = min(len(pieces) * _PIECE_BYTES, ticket.entries_bytes - start)
    wrong = 0
    for _ in range(2):
        data = storage.get_range(ticket.object, start, length)
        found = [zlib.crc32(data[at : at + _PIECE_BYTES]) for at in range(0, len(data), _PIECE_BYTES)]
        if len(data) == length and found == list(pieces):
            return data
        wrong = next((n for n, pair in enumerate(zip(found, pieces, strict=False)) if pair[0] != pair[1]), 0)
    raise CorruptFile(
        ticket.object,
        "staged entries do not match their CRC32",
        offset=start + wrong * _PIECE_BYTES,
        expected=pieces[wrong],
        found=found[wrong] if found else None,
    )
