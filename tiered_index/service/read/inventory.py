"""The files of an index, and their entries, bytes and cost by topic, day and state. Threads: any."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered_index.base.clock import SystemClock
from tiered_index.errors import BudgetExceeded, CorruptFile, InvalidArgument, StorageError, without_frames
from tiered_index.format.metadata import NamedStats
from tiered_index.format.names import COMPACTED, UPLOADED
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.compacted import CompactedFile, DamagedFile
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.files.unsealed import UnsealedEntries
from tiered_index.service.read.files.window_table import WindowTable
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.base import Storage
from tiered_index.storage.prices import PriceTable

if TYPE_CHECKING:
    import pyarrow as pa

MOST_SEGMENTS = 10_000
"""Most archived segments that a list of files has."""
_DAY_S = 86400
_EPOCH = dt.date(1970, 1, 1)
_QUARANTINE = "quarantine"
_GROUPS = ("topic", "day", "state")
_SUMS = ("entries", "bytes", "usd_a_month")
# rows of a table that are Python objects at a time
_MADE_AT_ONCE = 1024
# a topic, a day since the epoch, the number of entries, and whether that is an estimate
Piece = tuple[str | None, int | None, int, bool]


class Leftovers:
    """Finds local files that were merged: records removed their objects, and tables have their entries.

    After a crash of the writer, only the log shows this. Each record since the file was created is read once, or by
    calls at the same time more often. If one can't be read, the files that it may concern fail. Threads: any.
    """

    def __init__(self, storage: Storage) -> None:
        self._log = StorageLog(storage, SystemClock())

    def without(self, handles: Sequence[Handle], state: LogState) -> Sequence[Handle]:
        """Return the handles in `handles` without merged files, as of a state of the log."""
        over: set[str] = set()
        begun: dict[str, int] = {}
        for handle in handles:
            if handle.file_id in state.files:
                continue
            if isinstance(handle, CompactedFile):
                if handle.is_left_over(state.files):
                    over.add(handle.file_id)
                elif handle.folder == COMPACTED:
                    begun[handle.file_id] = int(handle.metadata().more.get("log_number", 0))
            elif isinstance(handle, UnsealedEntries) and handle.sealed:
                begun[handle.file_id] = handle.journal.log_number
        unsure: list[Handle] = []
        if begun:
            try:
                over |= begun.keys() & self._log.removed_files(state, min(begun.values()))
            except (StorageError, CorruptFile, BudgetExceeded) as error:
                unsure = [
                    DamagedFile(file.file_id, file.place, without_frames(error), file.second_min, file.second_max)
                    for file in handles
                    if file.file_id in begun
                ]
                over |= begun.keys()
        return [*(file for file in handles if file.file_id not in over), *unsure] if over else handles


def sizes_of(handle: Handle) -> tuple[int | None, int | None]:
    """Return the number of entries and of bytes of a file; None: not known."""
    if isinstance(handle, CompactedFile):
        place = handle.stored.stored if handle.stored is not None else handle.local
        return handle.count, None if place is None else place.size_bytes
    if isinstance(handle, WindowTable):
        return handle.count, sum(stored.size_bytes for stored in handle.shards)
    return (handle.count, handle.size_bytes) if isinstance(handle, UnsealedEntries) else (None, None)


def describe_handle(handle: Handle) -> dict[str, Any]:
    """Return a JSON-ready description of a file, without reading its entries."""
    known: dict[str, Any] = dict.fromkeys(("path", "object", "table", "error"))
    if isinstance(handle, CompactedFile):
        known["path"] = handle.local.file if handle.local is not None else None
        known["object"] = handle.stored.stored.name if handle.stored is not None else None
    elif isinstance(handle, WindowTable):
        known["table"] = {
            "begin_ms": handle.begin_s * 1000,
            "window_s": handle.window_s,
            "slots": handle.slots.slots,
            "shards": [stored.name for stored in handle.shards],
        }
    elif isinstance(handle, DamagedFile):
        known["error"] = str(handle.error)
    elif isinstance(handle, UnsealedEntries):
        known["path"] = str(handle.path)
    entries, size_bytes = sizes_of(handle)
    return {
        "file_id": handle.file_id,
        "state": handle.place,
        "lane": handle.lane,
        "sequence": handle.sequence,
        "begin_ms": handle.second_min * 1000,
        "end_ms": handle.second_max * 1000,
        "entries": entries,
        "bytes": size_bytes,
        **known,
    }


def files_document(
    index_id: str, state: LogState, handles: Sequence[Handle], archived: Iterable[ArchivedSegment]
) -> dict[str, Any]:
    """Return a JSON-ready document of an index's files, their totals, and the first 10,000 archived segments.

    Its status is ``partial`` if a file can't be read. `archived_more` is only there if there are more segments. `files`
    is an iterator, which makes each description when it is read.
    """
    segments = list(islice(archived, MOST_SEGMENTS + 1))
    totals, by_state = Counter(entries=0, bytes=0), Counter(handle.place for handle in handles)
    for entries, size_bytes in map(sizes_of, handles):
        totals.update(entries=entries or 0, bytes=size_bytes or 0)
    return {
        "index_id": index_id,
        "log_number": state.number,
        "status": "partial" if any(isinstance(handle, DamagedFile) for handle in handles) else "complete",
        "files": map(describe_handle, handles),
        "totals": {"files": len(handles), **totals, "by_state": dict(by_state)},
        "archived": [segment.to_json() for segment in segments[:MOST_SEGMENTS]],
        **({"archived_more": True} if len(segments) > MOST_SEGMENTS else {}),
    }


def files_table(handles: Sequence[Handle]) -> pa.Table:
    """Return a table with one row per file, as `files_document`. Only window tables have the struct `table`."""
    # imported here, because commands that list files need no Arrow
    import pyarrow as pa

    text, number = pa.string(), pa.int64()
    table = pa.struct({"begin_ms": number, "window_s": number, "slots": number, "shards": pa.list_(text)})
    kinds = {"file_id": text, "state": text, "lane": text, "sequence": number, "begin_ms": number, "end_ms": number}
    kinds |= {"entries": number, "bytes": number, "path": text, "object": text, "table": table, "error": text}
    return pa.Table.from_pylist(list(map(describe_handle, handles)), pa.schema(kinds))


def du_table(stats: Sequence[tuple[Handle, NamedStats]], segments: Segments, prices: PriceTable) -> pa.Table:
    """Return the table of `Lookups.du`. `stats` has the topic stats of each file."""
    import pyarrow as pa

    rows = []

    def add(topic: str | None, day: int | None, place: str, entries: int, size: int, estimated: bool) -> None:
        usd = prices.month_usd(size) if place in (UPLOADED, "storage", "archived") else 0.0
        date = None if day is None else _EPOCH + dt.timedelta(days=day)
        values = topic, date, place, entries, size, usd, estimated
        rows.append(dict(zip((*_GROUPS, *_SUMS, "estimated"), values, strict=True)))

    for handle, named in stats:
        if isinstance(handle, CompactedFile) and handle.is_left_over(segments.state.files):
            continue
        pieces = list(_pieces(handle, named))
        sizes = _shared(sizes_of(handle)[1] or 0, [piece[2] for piece in pieces])
        for (topic, day, entries, estimated), size in zip(pieces, sizes, strict=True):
            add(topic, day, handle.place, entries, size, estimated)
    if segments:
        add(None, None, "archived", 0, segments.object_bytes, False)
    kinds = {"topic": pa.string(), "day": pa.date32(), "state": pa.string(), "entries": pa.int64(), "bytes": pa.int64()}
    kinds |= {"usd_a_month": pa.float64(), "estimated": pa.bool_()}
    return _summed(pa.Table.from_pylist(rows, pa.schema(kinds)), list(_GROUPS))


def _summed(table: pa.Table, by: list[str]) -> pa.Table:
    """Return the sums of rows, grouped and sorted by some columns. A sum is `estimated` if one of its rows is."""
    sums = [(name, "sum") for name in _SUMS]
    table = table.group_by(by).aggregate([*sums, ("estimated", "any")])
    table = table.select([*by, *(f"{name}_sum" for name in _SUMS), "estimated_any"])
    return table.rename_columns([*by, *_SUMS, "estimated"]).sort_by([(name, "ascending") for name in by])


def du_groups(text: str) -> list[str]:
    """Parse a list of columns for `du_document`, such as ``topic,day``. Raises `InvalidArgument`."""
    groups = [name.strip() for name in text.split(",")]
    if len(set(groups)) < len(groups) or not set(groups) <= set(_GROUPS):
        raise InvalidArgument(f"by {text!r:.80}: give some of {', '.join(_GROUPS)}, each once, separated by commas")
    return groups


def du_document(table: pa.Table, by: list[str], index_id: str, log_number: int, prices: PriceTable) -> dict[str, Any]:
    """Return the table of `Lookups.du`, summed `by` some of its columns, as a JSON-ready dict of rows and totals.

    `rows` is an iterator, which makes each row when it is read.
    """
    table = _summed(table, by)
    return {
        "status": "complete",
        "index_id": index_id,
        "log_number": log_number,
        "by": by,
        "prices_as_of": prices.as_of,
        "usd_per_gib_month": prices.storage_per_gib_month_usd,
        "rows": _du_rows(table, by),
        "totals": {name: sum(table[name].to_numpy().tolist()) for name in _SUMS},
    }


def _du_rows(table: pa.Table, by: list[str]) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=_MADE_AT_ONCE):
        for row in batch.to_pylist():
            # only days are estimated
            row["estimated"] = bool(row["estimated"]) and "day" in by
            if row.get("day") is not None:
                row["day"] = row["day"].isoformat()
            yield row


def _pieces(handle: Handle, named: NamedStats) -> Iterator[Piece]:
    """Yield the number of entries of a file for each topic and day."""
    for topic, stats in named:
        yield from _days(handle, topic, stats.entries, stats.second_min, stats.second_max)


def _days(handle: Handle, topic: str | None, entries: int, second_min: int, second_max: int) -> Iterator[Piece]:
    first, last = second_min // _DAY_S, second_max // _DAY_S
    if first == last:
        yield topic, first, entries, False
    elif handle.lane == _QUARANTINE:  # an interval of implausible times can't be split into days
        yield topic, None, entries, False
    else:
        edges = np.clip(np.arange(first, last + 2) * _DAY_S, second_min, second_max + 1)
        for day, count in enumerate(_shared(entries, np.diff(edges).tolist()), first):
            if count:
                yield topic, day, count, True


def _shared(total: int, weights: Sequence[int]) -> list[int]:
    """Return integer shares of `total` by weights. Their sum is `total`."""
    reached = np.cumsum(np.asarray(weights, np.float64))
    if not len(reached) or not reached[-1]:
        return [total, *[0] * (len(weights) - 1)] if weights else []
    cuts = np.rint(reached / reached[-1] * total).astype(np.int64)
    return np.diff(cuts, prepend=0).tolist()  # type: ignore[no-any-return]
