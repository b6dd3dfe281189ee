"""Compares a store's commit log with its other files, which may name messages that the log lacks.

The newer messages of a store may be elsewhere: in DLedger's log, in another folder of `storePathCommitLog`, or in files
that a copy lacks. The log alone then looks whole. But the consume queues and the checkpoint name later messages.

Some of that has another cause. After a crash a broker cuts its log, and zeroes nothing: entries of cut messages stay in
the files of the queues. So entries after the log's end count only beyond the bytes that a broker has not flushed
(`UNFLUSHED_BYTES`, at most a segment). If the broker ended normally, they count unless their messages
are still in the log's files. The checkpoint has the store timestamp of the last flushed message: it counts if it is
later than those of all messages of the log by more than `UNFLUSHED_MS`. The last message does not suffice, because a
broker's clock may have been set back. Stateless; any thread.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tiered_index.base.units import format_time
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import BLANK_BYTES
from tiered_index.connectors.rocketmq.log.segments import list_segments, local_errors, pread
from tiered_index.connectors.rocketmq.log.store import StoreDirectory, list_queues
from tiered_index.errors import CorruptFile, StorageError

# A broker flushes every 500 ms, and everything every 10 s
UNFLUSHED_BYTES, UNFLUSHED_MS = 64 << 20, 10_000
# Times (ms) up to which log, queues and index are flushed, the master's flushed offset, the confirmed offset
_checkpoint = struct.Struct(">5q").unpack_from


class Evidence(NamedTuple):
    """The end of the last message, which the file `named_by` of a store names, and the time of the last flush.

    `place` is the offset of that message; None: an offset without a message. Times are epoch milliseconds, 0: unknown.
    """

    end: int
    named_by: str
    place: int | None
    flushed_ms: int
    has_queues: bool


def gather(store: StoreDirectory) -> Evidence:
    """Return what the store's files besides the log name. Call it before you look for the log's end.

    It takes about 30 small reads a queue. Files that can't be read name nothing.
    """
    end, named_by, place, has_queues = 0, "", None, False
    folder = store.folder / "consumequeue"
    with suppress(CorruptFile, StorageError):
        for queue in list_queues(folder):
            with suppress(CorruptFile, StorageError):
                behind = queue.seek(2**63 - 1)
                _, entries = queue.read(max(behind - 1, 0), 1)
                for entry in entries:
                    has_queues, at = True, int(entry["offset"])
                    if at + int(entry["size"]) > end:
                        end, place = at + int(entry["size"]), at
                        named_by = f"the consume queue {queue.topic}/{queue.queue_id}"
    flushed_ms, *offsets = _of_checkpoint(store)
    if max(offsets) > end:
        end, named_by, place = max(offsets), "the checkpoint", None
    return Evidence(end, named_by, place, flushed_ms, has_queues)


def _of_checkpoint(store: StoreDirectory) -> tuple[int, int, int]:
    """Return the time up to which the log is flushed (epoch ms), and two offsets; 0 for unknown ones."""
    path = store.folder / "checkpoint"
    with suppress(OSError, StorageError), local_errors(path):
        data = pread(path, 40, 0)
        if len(data) == 40:
            flushed_ms, _, _, flushed, confirmed = _checkpoint(data)
            return flushed_ms, max(flushed, 0), max(confirmed, 0)
    return 0, 0, 0


def problem_of(store: StoreDirectory, read_to: int, evidence: Evidence, greatest_ms: int | None) -> str | None:
    """Return why messages after `read_to`, where a reader found the log's end, must exist elsewhere; None: none must.

    `greatest_ms` is the greatest store timestamp of all messages of the log (epoch ms), 0 without messages. If it is
    None, for unknown, the time of the last flush is not compared. The text names both ends, and the likely cause.
    """
    log_end = store.log_end()
    # a body of zeros can hide later messages from the estimate of the end
    end = read_to if log_end is None else max(log_end.offset, read_to)
    dledger = dledger_log(store.folder)
    ahead = evidence.end - end
    is_later = ahead > 0 and (dledger is not None or log_end is None or _is_missing(store, evidence, ahead))
    # bytes after half a message, where the reader stopped, may be messages of any time
    is_whole = log_end is not None and read_to >= log_end.offset
    if is_later:
        named = f"{evidence.named_by} names a message that ends at commit log offset {evidence.end:,}"
    elif is_whole and greatest_ms and evidence.flushed_ms > greatest_ms + UNFLUSHED_MS:
        named = (
            f"the checkpoint says that a message of {format_time(evidence.flushed_ms)} is flushed, and the newest one "
            f"read is of {format_time(greatest_ms)}"
        )
    elif dledger is not None and not evidence.has_queues:
        named = "there are messages in DLedger's log"
    else:
        return None
    return f"{named}, but the log ends at offset {end:,}: {_cause(store, dledger)}"


def _is_missing(store: StoreDirectory, evidence: Evidence, ahead: int) -> bool:
    """Return whether a named message is missing: a crash of the broker or its host does not explain it."""
    segments = list_segments(store.commitlog)
    if ahead > min(UNFLUSHED_BYTES, segments[0].end - segments[0].start if segments else 0):
        return True
    if not store.is_closed or evidence.place is None:
        return False
    try:
        CommitLogReader(store.commitlog).read(evidence.place)
    except CorruptFile:
        return True
    return False  # the broker cut its log: the message's bytes are left over, as its entry is


def dledger_log(store: Path) -> Path | None:
    """Return the folder of DLedger's log in a store, if it has messages."""
    with suppress(OSError, StorageError):
        for data in sorted(store.glob("dledger-*/data")):
            if any(any(pread(segment.path, BLANK_BYTES, 0)) for segment in list_segments(data)):
                return data
    return None


def _cause(store: StoreDirectory, dledger: Path | None) -> str:
    if dledger is not None:
        return (
            f"the newer messages are in DLedger's log {dledger}, which can't be read. Follow a broker without DLedger "
            f"(enableDLegerCommitLog=false; controller mode needs none)"
        )
    return (
        "the folder is an old or partial copy, or the broker's storePathCommitLog has another folder, too: give a "
        "whole store, and that folder by `ingest --commitlog`"
    )
