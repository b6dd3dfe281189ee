"""Staged files: the entries of sealed files in the storage, until a job compacts them. Readers ignore them.

```
staging/ID/ATTEMPT.entries     entries as in the unsealed file | document: the sealed file, CRC32 of each piece of 1 MiB
staging/ID/E.ticket            document: the writer of epoch E asks for that object to be compacted
```
An object is put before its ticket, and deleted after it (SPEC section 9). A task makes one compacted object and changes
nothing that a reader sees, so it may be repeated, run twice or fail. One log record publishes all files, and only while
the tickets' epoch is the log's, so that no file of a fenced writer appears. The record has no source positions, which
only the writer knows. A root that restarts with a new epoch puts new tickets and does not send entries again. Entries
keep `previous`, 4 of 36 bytes, because removing it would copy every entry on the writer's host. Threads: any.
"""

from __future__ import annotations

import logging
import mmap
import secrets
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from tiered_index.documents import COUNT, CRC32, MILLISECONDS, SIZE, checked, fields_of, integer, list_of, record, text
from tiered_index.errors import CorruptFile, ObjectNotFound, TieredIndexError
from tiered_index.format.compacted import SealedFile
from tiered_index.format.metadata import FILE_ID
from tiered_index.format.names import STAGING_PREFIX, TICKET_SUFFIX, staged_name, ticket_name
from tiered_index.format.trailer import FORMAT_VERSION
from tiered_index.service.lifecycle.publication import FinishedObject, Publication, Upload, send_compacted
from tiered_index.service.log.log import StorageLog, own_objects, read_again
from tiered_index.service.log.records import LogRecord, decode_document, encode_document, latest_ms
from tiered_index.service.log.session import StorageSession
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage

_log = logging.getLogger(__name__)
Array = npt.NDArray[Any]
_PIECE_BYTES = 1 << 20
_PIECES_A_RANGE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A request to compact file `file_id`, staged as `object` by the writer of `epoch`.

    `created_ms` is the time of the file, `staged_ms` that of the object. `log_number` is the number of a log record
    before all that name the file; 0: unknown.
    """

    file_id: Annotated[str, FILE_ID]
    epoch: Annotated[int, COUNT]
    object: Annotated[str, text(r"staging/[A-Za-z0-9_-]+/[A-Za-z0-9_-]+\.entries")]
    size_bytes: Annotated[int, SIZE]
    entries_bytes: Annotated[int, integer(1, 2**44)]
    count: Annotated[int, integer(1, 2**31)]
    created_ms: Annotated[int, MILLISECONDS]
    staged_ms: Annotated[int, MILLISECONDS]
    log_number: Annotated[int, COUNT] = 0

    @property
    def name(self) -> str:
        """The object name of the ticket."""
        return ticket_name(self.file_id, self.epoch)

    def encode(self) -> bytes:
        """Return the ticket's bytes."""
        return encode_document({"kind": "ticket", **{name: getattr(self, name) for name in self.__slots__}})

    @classmethod
    def decode(cls, data: bytes, file: str) -> Ticket:
        """Return the ticket in `data`. Raises `CorruptFile`, `UnsupportedVersion`."""
        ticket = checked(_TICKET, decode_document(data, file), file, "ticket")
        CorruptFile.unless_equal(file, "file or epoch of the ticket differ from its name", file, ticket.name)
        if ticket.object != staged_name(ticket.file_id, ticket.object.rpartition("/")[2].removesuffix(".entries")):
            raise CorruptFile(file, "ticket names an object that was not staged for its file", found=ticket.object)
        if ticket.entries_bytes >= ticket.size_bytes:
            size, found = ticket.size_bytes, ticket.entries_bytes
            raise CorruptFile(
                file, "the ticket's entries have as many bytes as their object, or more", expected=size, found=found
            )
        return ticket


_TICKET = record(Ticket, **fields_of(Ticket))
_STAGED = record(
    lambda **fields: tuple(fields.values()),
    sealed=SealedFile.from_json,
    pieces=list_of(CRC32),
    piece_bytes=integer(1, _PIECE_BYTES),
)


def send_entries(
    session: StorageSession, sealed: SealedFile, entries: Array, part_bytes: int
) -> tuple[Ticket, Publication]:
    """Send `entries` (structured, n, verified) and `sealed`. Return the ticket, which is not put yet.

    Raises the errors of the storage.
    """
    data = memoryview(entries.view(np.uint8).reshape(-1))  # type: ignore[arg-type]

    def fill(upload: Upload) -> None:
        pieces = []
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            pieces.append(zlib.crc32(piece))
            upload.write(piece)
        document = {"kind": "staged", "sealed": sealed.to_json(), "piece_bytes": _PIECE_BYTES, "pieces": pieces}
        upload.write(encode_document({"version": sealed.layout.version, **document}))

    name = staged_name(sealed.file_id, secrets.token_hex(8))
    publication = Publication.send(session.log, name, fill, part_bytes, epoch=session.epoch)
    ticket = Ticket(
        file_id=sealed.file_id,
        epoch=session.epoch,
        object=name,
        size_bytes=publication.sent.size_bytes,
        entries_bytes=len(data),
        count=len(entries),
        created_ms=sealed.created_ms,
        staged_ms=publication.sent.began_ms,
        log_number=sealed.log_number,
    )
    return ticket, publication


def read_sealed(storage: Storage, ticket: Ticket) -> tuple[SealedFile, tuple[int, ...]]:
    """Return a staged file's description and the CRC32 of each piece. Raises `CorruptFile`, and storage errors."""
    position, length = ticket.entries_bytes, ticket.size_bytes - ticket.entries_bytes

    def read() -> dict[str, Any]:
        return decode_document(storage.get_range(ticket.object, position, length), ticket.object, FORMAT_VERSION)

    document = read_again(read)
    sealed, pieces, piece_bytes = checked(_STAGED, document, ticket.object, "staged file", offset=position)
    wanted = (ticket.file_id, ticket.entries_bytes, _PIECE_BYTES, -(-ticket.entries_bytes // _PIECE_BYTES))
    found = (sealed.file_id, sealed.count * sealed.layout.schema.entry.itemsize, piece_bytes, len(pieces))
    problem = "staged file differs from its ticket"
    CorruptFile.unless_equal(ticket.object, problem, wanted, found, offset=position)
    return sealed, pieces


@contextmanager
def staged_entries(storage: Storage, ticket: Ticket, sealed: SealedFile, pieces: tuple[int, ...]) -> Iterator[Array]:
    """Yield the verified entries (structured, n) from a mapped temporary file. Raises `CorruptFile`, storage errors."""
    with tempfile.TemporaryFile(prefix="tiered-index-") as spool:
        for first in range(0, len(pieces), _PIECES_A_RANGE):
            spool.write(_verified_range(storage, ticket, first, pieces[first : first + _PIECES_A_RANGE]))
        spool.flush()
        # the map is closed with its last array
        yield np.frombuffer(
            mmap.mmap(spool.fileno(), ticket.entries_bytes, access=mmap.ACCESS_READ), sealed.layout.schema.entry
        )


def _verified_range(storage: Storage, ticket: Ticket, first: int, pieces: tuple[int, ...]) -> bytes:
    """Return the verified bytes of `pieces`, whose first piece has number `first`."""
    start = first * _PIECE_BYTES
    length = min(len(pieces) * _PIECE_BYTES, ticket.entries_bytes - start)

    def read() -> bytes:
        data = storage.get_range(ticket.object, start, length)
        for number, expected in enumerate(pieces):
            at = number * _PIECE_BYTES
            found = zlib.crc32(data[at : min(at + _PIECE_BYTES, length)])
            problem = "staged entries do not match their CRC32"
            CorruptFile.unless_equal(ticket.object, problem, expected, found, offset=start + at)
        return data[:length]

    return read_again(read)


@dataclass(frozen=True, slots=True)
class StagedResult:
    """The result for one file: `finished`, or the reason why it was `left`.

    `corrupt`: its staged object is damaged. `failed`: an error occurred.
    """

    ticket: Ticket
    finished: FinishedObject | None = None
    left: str = ""
    corrupt: bool = False
    failed: bool = False


def open_tickets(storage: Storage, log: StorageLog) -> tuple[list[Ticket], list[StagedResult]]:
    """Return the tickets to compact, oldest first, and the others. It costs a listing and a request per ticket."""
    tickets: list[Ticket] = []
    left: list[StagedResult] = []
    for info in list(own_objects(storage, STAGING_PREFIX)):
        if not info.name.endswith(TICKET_SUFFIX):
            continue
        try:
            tickets.append(Ticket.decode(storage.get(info.name), info.name))
        except ObjectNotFound:
            continue  # its file was published, or its ticket replaced, meanwhile
        except CorruptFile as error:
            _log.error("%s", error)
            unknown = dict.fromkeys(("epoch", "size_bytes", "entries_bytes", "count", "created_ms", "staged_ms"), 0)
            damaged = Ticket(file_id=info.name.split("/")[1], object=info.name, **unknown)
            left.append(StagedResult(damaged, left=str(error), corrupt=True))
    # the log after the tickets, so that files that were published meanwhile are known
    state = log.refresh()
    # without those of fenced writers, which are left anyway, and would need ever more records
    current = [ticket for ticket in tickets if ticket.epoch == state.epoch]
    gone = log.removed_files(state, min(ticket.log_number for ticket in current)) if current else set()
    ready = []
    for ticket in sorted(tickets, key=lambda ticket: (ticket.staged_ms, ticket.file_id)):
        reason = _reason(ticket, state, gone)
        if reason:
            left.append(StagedResult(ticket, left=reason))
        else:
            ready.append(ticket)
    return ready, left


def compact_staged(ticket: Ticket, storage: Storage, now_ms: int) -> StagedResult:
    """Compact and send one file without publishing it. Errors of storage, disk and object are in the result."""
    try:
        sealed, pieces = read_sealed(storage, ticket)
        with staged_entries(storage, ticket, sealed, pieces) as entries:
            finished = send_compacted(storage, sealed, entries, now_ms)
            del entries
    except ObjectNotFound as error:
        return StagedResult(ticket, left=f"its staged object is gone: {error}")
    except CorruptFile as error:
        return StagedResult(ticket, left=str(error), corrupt=True)
    except (TieredIndexError, OSError) as error:
        return _failed(ticket, error)
    return StagedResult(ticket, finished)


def publish_staged(
    results: Sequence[StagedResult], storage: Storage, log: StorageLog
) -> tuple[LogState, list[StagedResult]]:
    """Complete the uploads; append one record with all files that may be published. Return the log's state and results.

    The objects of other files are deleted. Raises `JobOverdue`, and the errors of the log. If the outcome is unknown,
    objects are kept.
    """
    done = [_completed(result, storage, log) for result in results]
    finished = [result.finished for result in done if result.finished is not None]
    if not finished:
        return log.state, done
    before = min(result.ticket.log_number for result in done)
    reasons: dict[str, str] = {}

    def make(state: LogState) -> LogRecord | None:
        gone = log.removed_files(state, before)
        reasons.clear()
        reasons.update((r.ticket.file_id, why) for r in done if (why := _reason(r.ticket, state, gone)))
        add = tuple(one.stored for one in finished if one.stored.file_id not in reasons)
        return LogRecord(0, "compact", 0, "", 0, add, put_before_ms=latest_ms(add)) if add else None

    state = Publication(log, [one.sent for one in finished]).record("a compaction", make)
    # by name, because the record of an earlier try may name them
    return state, [
        StagedResult(r.ticket, left=reasons[r.ticket.file_id])
        if r.finished is not None and r.finished.stored.name not in state.objects
        else r
        for r in done
    ]


def _completed(result: StagedResult, storage: Storage, log: StorageLog) -> StagedResult:
    if result.finished is None:
        return result
    try:
        Publication(log, [result.finished.sent]).complete()
    except ObjectNotFound:
        return StagedResult(result.ticket, left="its upload is gone: it was swept")
    except (TieredIndexError, OSError) as error:
        return _failed(result.ticket, error)
    return result


def _failed(ticket: Ticket, error: Exception) -> StagedResult:
    _log.error("cannot compact %s: %s", ticket.file_id, error)
    return StagedResult(ticket, left=f"{type(error).__name__}: {error}", failed=True)


def _reason(ticket: Ticket, state: LogState, gone: set[str]) -> str:
    """Return why the file of a ticket can't be published after `state`; empty: it can."""
    if ticket.epoch != state.epoch:
        return f"was staged by the writer of epoch {ticket.epoch}, the log's is {state.epoch}"
    if state.object_of(ticket.file_id) is not None:
        return "is in the log already"
    return "was published and merged meanwhile" if ticket.file_id in gone else ""
