"""Pending files: sealed files in the storage as they are, until a merge, or their writer, compacts them.

```
data/ID/ATTEMPT.index     entries as in the unsealed file | document: the sealed file, CRC32 of each piece of 1 MiB
```
A log record names the object as pending (SPEC section 9). The process that compacts it appends a record that removes
that name and adds its entries; the log accepts one, and the loser deletes its own objects. Entries keep `previous`, 4
of 36 bytes, because removing it would copy every entry on the writer's host. Threads: any.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from tiered_index.errors import CorruptFile, SchemaMismatch
from tiered_index.format.compacted import SealedFile
from tiered_index.format.names import data_name
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import FORMAT_VERSION, Trailer
from tiered_index.service.log.log import read_again
from tiered_index.service.log.publication import Publication
from tiered_index.service.log.records import PendingFile, StoredObject, decode_document, encode_document
from tiered_index.service.log.session import StorageSession
from tiered_index.service.read.cold_path import ColdPath
from tiered_index.service.read.compacted import LocalBytes, StorageBytes
from tiered_index.service.read.file_search import FileBytes
from tiered_index.service.root import disk_errors
from tiered_index.storage.base import Storage, Writer
from tiered_index.stored import Crc32

Array = npt.NDArray[Any]
_PIECE_BYTES = 1 << 20
_PIECES_A_RANGE = 8
_COMPACTING = threading.Lock()
Read = Callable[[int, int], bytes]
"""Returns `length` bytes of an object from `start` on."""


class _Pending(Struct):
    sealed: SealedFile
    pieces: tuple[Crc32, ...]
    piece_bytes: Annotated[int, Meta(ge=1, le=_PIECE_BYTES)]


def send_sealed(session: StorageSession, sealed: SealedFile, entries: Array) -> tuple[PendingFile, Publication]:
    """Send `entries` (structured, n, verified) and `sealed`. Return the file as a record will name it.

    Raises the errors of the storage.
    """
    data = memoryview(entries.view(np.uint8).reshape(-1))  # type: ignore[arg-type]

    def fill(stream: Writer) -> None:
        pieces = []
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            pieces.append(zlib.crc32(piece))
            stream.write(piece)
        document = {"kind": "pending", "sealed": sealed.to_json(), "piece_bytes": _PIECE_BYTES, "pieces": pieces}
        stream.write(encode_document({"version": FORMAT_VERSION, **document}))

    name = data_name(sealed.file_id, secrets.token_hex(8))
    publication = Publication.send(session.log, name, fill, session.epoch)
    seconds, size = entries["time_diff_s"].astype(np.int64) + sealed.begin_ms // 1000, publication.sent.size_bytes
    pending = PendingFile(
        name=name,
        file_id=sealed.file_id,
        lane=sealed.lane,
        sequence=sealed.sequence,
        second_min=int(seconds.min()),
        second_max=int(seconds.max()),
        count=len(entries),
        size_bytes=size,
        trailer_position=len(data),
        filter_length=0,
        directory_length=0,
        metadata_length=size - len(data),
        published_ms=publication.sent.began_ms,
        hash=sealed.layout.hash,
        created_ms=sealed.created_ms,
    )
    return pending, publication


def read_sealed(pending: PendingFile, read: Read) -> tuple[SealedFile, tuple[int, ...]]:
    """Return a pending file's description and the CRC32 of each piece. Raises `CorruptFile`, and storage errors."""
    position = pending.trailer_position

    def decoded() -> _Pending:
        data = read(position, pending.metadata_length)
        document: _Pending = decode_document(data, pending.name, _Pending, "pending file", FORMAT_VERSION)
        return document

    document = read_again(decoded)
    sealed, pieces = document.sealed, document.pieces
    size = sealed.count * sealed.layout.schema.entry.itemsize
    wanted = (pending.file_id, pending.count, position, _PIECE_BYTES, -(-position // _PIECE_BYTES), pending.hash)
    described = (sealed.file_id, sealed.count, size, document.piece_bytes, len(pieces), sealed.layout.hash)
    CorruptFile.unless_equal(
        pending.name, "the pending file differs from its description in the log", wanted, described, offset=position
    )
    return sealed, pieces


def verified_pieces(pending: PendingFile, pieces: Sequence[int], read: Read) -> Iterator[bytes]:
    """Yield the bytes of the entries in ranges of 8 MiB, each verified. Raises `CorruptFile`, and storage errors."""
    for first in range(0, len(pieces), _PIECES_A_RANGE):
        start = first * _PIECE_BYTES
        length = min(_PIECES_A_RANGE * _PIECE_BYTES, pending.trailer_position - start)
        expected = pieces[first : first + _PIECES_A_RANGE]

        def verified(start: int = start, length: int = length, expected: Sequence[int] = expected) -> bytes:
            data = read(start, length)
            for number, crc32 in enumerate(expected):
                at = number * _PIECE_BYTES
                computed = zlib.crc32(data[at : min(at + _PIECE_BYTES, length)])
                problem = "entries of the pending file do not match their CRC32"
                CorruptFile.unless_equal(pending.name, problem, crc32, computed, offset=start + at)
            return data[:length]

        yield read_again(verified)


def check_pending(pending: PendingFile, read: Read) -> None:
    """Read a whole pending file, and check each byte. Raises `CorruptFile`, and storage errors."""
    _, pieces = read_sealed(pending, read)
    for _ in verified_pieces(pending, pieces, read):
        pass


@contextlib.contextmanager
def pending_bytes(storage: Storage, pending: PendingFile, schema: Schema) -> Iterator[LocalBytes]:
    """Yield a pending file's compacted form, in a temporary folder of this host, as any reader of files takes it.

    Memory: that of a compaction. Raises `CorruptFile`, `SchemaMismatch`, and the errors of storage and disk.
    """

    def read(start: int, length: int) -> bytes:
        return storage.get_range(pending.name, start, length)

    sealed, pieces = read_sealed(pending, read)
    if (stored_schema := sealed.layout.schema) != schema:
        raise SchemaMismatch(f"{pending.name} stores {stored_schema.name} entries, the index {schema.name}")
    with tempfile.TemporaryDirectory(prefix="tiered-index-") as folder:
        path = Path(folder) / f"{pending.file_id}.index"
        _compact(path, sealed, schema, verified_pieces(pending, pieces, read))
        local = LocalBytes(path)
        local.file = pending.name
        try:
            metadata = local.trailer().metadata
            said, found_s = (pending.second_min, pending.second_max), (metadata.second_min, metadata.second_max)
            CorruptFile.unless_equal(pending.name, "the entries have other times than the log says", said, found_s)
            yield local
        finally:
            local.let_go()


def open_input(cold: ColdPath, stored: StoredObject, schema: Schema, closing: contextlib.ExitStack) -> FileBytes:
    """Return the bytes of an object that a job reads, compacted if it is pending; `closing` lets go of them.

    `input_trailer` returns its trailer. Raises the errors of `pending_bytes`.
    """
    if isinstance(stored, PendingFile):
        return closing.enter_context(pending_bytes(cold.storage, stored, schema))
    return StorageBytes(cold, stored)


def input_trailer(source: FileBytes, schema: Schema) -> Trailer:
    """Return the trailer of a file from `open_input`. Raises `SchemaMismatch`, and the errors of the storage."""
    return source.trailer_of(schema) if isinstance(source, StorageBytes) else source.trailer()


def _compact(path: Path, sealed: SealedFile, schema: Schema, pieces: Iterator[bytes]) -> None:
    """Write the compacted form of `sealed`, whose entries have the bytes `pieces`."""
    with disk_errors(f"compacting into {path}"), tempfile.TemporaryFile(dir=path.parent) as spool:
        size = sum(spool.write(piece) for piece in pieces)
        spool.flush()
        # one at a time in a process, because each takes about 100 bytes for an entry
        with _COMPACTING, path.open("wb") as compacted:
            # the map is closed with its last array
            entries = np.frombuffer(mmap.mmap(spool.fileno(), size, access=mmap.ACCESS_READ), schema.entry)
            for piece in sealed.compacted(entries):
                compacted.write(piece)
