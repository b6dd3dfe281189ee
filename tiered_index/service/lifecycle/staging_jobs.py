"""Compacting staged files anywhere: a task makes the compacted object of one file, who drives the tasks publishes all
by one log record.

A task changes nothing that a reader sees; it may be repeated, run twice at once or die. The log decides: a file is
published once, and only while the epoch of its ticket is the log's, so that nothing of a fenced writer appears. The
record carries no source positions, which only the writer can know to be true. Threads: one task by one thread, any
number of tasks anywhere.

What compacting staged files will cost: requests, bytes and dollars before anything is read or sent. Pure.

The counts follow from how a task works: a range for the document and one for 8 MiB of entries, a put or the parts of an
upload, and a look at what is there. What the writer does about a file, staging, adopting and sweeping it, is not in it.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiered_index.errors import CorruptFile, ObjectNotFound, TieredIndexError
from tiered_index.format.names import STAGING_PREFIX, TICKET_SUFFIX, data_name
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.lifecycle.local_copies import Removals
from tiered_index.service.lifecycle.pending_uploads import (
    FinishedObject,
    Upload,
    abandon,
    append_in_time,
    complete,
    stored_file,
)
from tiered_index.service.lifecycle.staged import Ticket, read_sealed, staged_entries
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import PriceTable

__all__ = ["CompactionCost", "StagedResult", "compact_staged", "estimate_compaction", "open_tickets", "publish_staged"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedResult:
    """What became of one file: `finished`, or why it was `left`; `corrupt`: its staged object is damaged; `failed`: an
    error stopped it.
    """

    ticket: Ticket
    finished: FinishedObject | None = None
    left: str = ""
    corrupt: bool = False
    failed: bool = False


def open_tickets(storage: Storage, log: StorageLog) -> tuple[list[Ticket], list[StagedResult]]:
    """Return the tickets whose files can be compacted now, oldest first, and those that are left.

    Costs a listing, a request a ticket, and one for each log record since the oldest file of the log's epoch was begun.
    """
    tickets: list[Ticket] = []
    left: list[StagedResult] = []
    for info in list(storage.list(STAGING_PREFIX)):
        if not info.name.endswith(TICKET_SUFFIX):
            continue
        try:
            tickets.append(Ticket.decode(storage.get(info.name), info.name))
        except ObjectNotFound:
            continue  # its file was published meanwhile, or its ticket renewed
        except CorruptFile as error:
            _log.error("%s", error)
            damaged = Ticket(
                file_id=info.name.split("/")[1],
                epoch=0,
                object=info.name,
                size_bytes=0,
                entries_bytes=0,
                count=0,
                created_ms=0,
                staged_ms=0,
            )
            left.append(StagedResult(damaged, left=str(error), corrupt=True))
    # the log after the tickets: what was published meanwhile is known
    state = log.refresh()
    # those of fenced writers are left anyhow: they must not cost more from day to day
    current = [ticket for ticket in tickets if ticket.epoch == state.epoch]
    gone = Removals(log).files(state, _before(current)) if current else set()
    ready = []
    for ticket in sorted(tickets, key=lambda ticket: (ticket.staged_ms, ticket.file_id)):
        reason = _reason(ticket, state, gone)
        if reason:
            left.append(StagedResult(ticket, left=reason))
        else:
            ready.append(ticket)
    return ready, left


def compact_staged(ticket: Ticket, storage: Storage, now_ms: int) -> StagedResult:
    """Compact one file and send it, unpublished; what was sent is taken back where that fails.

    No file stands in the way of another: one that is damaged, or gone because it was published meanwhile, and whatever
    error storage or disk raise is what the result says.
    """
    upload = Upload(storage, data_name(ticket.file_id, secrets.token_hex(8)))
    try:
        sealed, pieces = read_sealed(storage, ticket)
        last: bytes | memoryview = b""
        with staged_entries(storage, ticket, sealed, pieces) as entries:
            for last in sealed.compacted(entries):
                upload.write(last)
            del entries
        trailer = parse_trailer(last, upload.name, upload.size_bytes)
        upload.finish()
    except BaseException as error:
        upload.abandon()
        if isinstance(error, ObjectNotFound):
            return StagedResult(ticket, left=f"its staged object is gone: {error}")
        if isinstance(error, CorruptFile):
            return StagedResult(ticket, left=str(error), corrupt=True)
        if isinstance(error, TieredIndexError | OSError):
            return _failed(ticket, error)
        raise
    stored = stored_file(upload.name, trailer, upload.size_bytes, now_ms)
    return StagedResult(ticket, FinishedObject(stored, upload.handle, tuple(upload.parts)))


def publish_staged(
    results: Sequence[StagedResult], storage: Storage, log: StorageLog
) -> tuple[LogState, list[StagedResult]]:
    """Complete the uploads and append one record with all files that still may come; return the log's state and what
    became of each.

    Files that may not come any more are told as left, and taken back, and those whose upload can't be completed as
    failed. Raises `JobOverdue`, and what the log raises: what was sent stays then, since the record's outcome may be
    unknown; `orphans` decides.
    """
    done = [_completed(result, storage) for result in results]
    finished = [result.finished for result in done if result.finished is not None]
    if not finished:
        return log.state, done
    removals, before = Removals(log), _before([result.ticket for result in done])
    reasons: dict[str, str] = {}

    def make(state: LogState) -> LogRecord | None:
        gone = removals.files(state, before)
        reasons.clear()
        reasons.update((r.ticket.file_id, why) for r in done if (why := _reason(r.ticket, state, gone)))
        add = tuple(one.stored for one in finished if one.stored.file_id not in reasons)
        return LogRecord(0, "compact", 0, "", 0, add) if add else None

    state = append_in_time("a compaction", finished, make, storage, log)
    # an earlier try may have got as far as the log
    late = [one for one in finished if one.stored.file_id in reasons and one.stored.name not in state.objects]
    abandon(late, storage)
    names = {one.stored.name for one in late}
    return state, [
        StagedResult(r.ticket, left=reasons[r.ticket.file_id])
        if r.finished is not None and r.finished.stored.name in names
        else r
        for r in done
    ]


def _completed(result: StagedResult, storage: Storage) -> StagedResult:
    if result.finished is None:
        return result
    try:
        complete([result.finished], storage)
    except ObjectNotFound:
        return StagedResult(result.ticket, left="its upload is gone: somebody has swept it")
    except (TieredIndexError, OSError) as error:
        return _failed(result.ticket, error)
    return result


def _failed(ticket: Ticket, error: Exception) -> StagedResult:
    _log.error("%s is not compacted: %s", ticket.file_id, error)
    return StagedResult(ticket, left=f"{type(error).__name__}: {error}", failed=True)


def _before(tickets: Sequence[Ticket]) -> int:
    return min(ticket.log_number for ticket in tickets)


def _reason(ticket: Ticket, state: LogState, gone: set[str]) -> str:
    """Return why the file of a ticket is not published at `state`, or nothing."""
    if ticket.epoch != state.epoch:
        return f"was staged by the writer of epoch {ticket.epoch}, the log's is {state.epoch}"
    if state.object_of(ticket.file_id) is not None:
        return "is in the log already"
    return "was published and merged meanwhile" if ticket.file_id in gone else ""


_RANGE_BYTES = 8 << 20
_PART_BYTES = 16 << 20
_PROBE = {"put_if_absent": 2, "get": 1, "delete": 1}
_RECORD = {"list": 1, "head": 1, "put_if_absent": 1, "put": 1}
# of one log record: look for the end, is the last one there, append, checkpoint


@dataclass(frozen=True, slots=True)
class CompactionCost:
    """Estimates.

    `requests` by operation; `written_bytes` are of items: directories and filters add some 5%, more to small files.
    """

    requests: dict[str, int]
    read_bytes: int
    written_bytes: int
    cost_usd: float


def estimate_compaction(
    tickets: Sequence[Ticket], item_bytes: int, prices: PriceTable, *, looked: Mapping[str, int], looked_bytes: int
) -> CompactionCost:
    """Return what a job for `tickets` will cost.

    `looked`, `looked_bytes`: what looking at tickets and log has just cost.
    """
    requests = Counter(looked)
    requests.update(_PROBE)
    written = 0
    for ticket in tickets:
        size = ticket.count * item_bytes
        written += size
        requests["get_range"] += 1 + -(-ticket.entries_bytes // _RANGE_BYTES)
        requests["head"] += 1
        if size < 2 * _PART_BYTES:
            requests["put"] += 1
        else:
            requests["begin_upload"] += 1
            requests["upload_part"] += size // _PART_BYTES
            requests["complete_upload"] += 1
    if tickets:
        requests.update(_RECORD)
    read = looked_bytes + sum(ticket.size_bytes for ticket in tickets)
    return CompactionCost(
        {name: count for name, count in requests.items() if count}, read, written, prices.cost_usd(requests, read)
    )
