"""Views: one call of the compiled core searches all files of a catalog.

A view has the files of one moment, and never changes. It keeps their maps open. The caller searches the `rest`: files
that the core can't search, or declines, each with the reason.
Threads: any.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from tiered_index.base.call import Call
from tiered_index.base.kernels import compiled_views, crc32
from tiered_index.format.keys.hashing import HASH_RULES, HashRule
from tiered_index.format.schema import Schema, row_form
from tiered_index.service.log.hidden import HiddenTable, core_of
from tiered_index.service.log.records import StoredObject
from tiered_index.service.read.answers.batch import LookupBatch, Matches, in_core
from tiered_index.service.read.answers.logs import Logs
from tiered_index.service.read.answers.replaced_rows import Page
from tiered_index.service.read.answers.rows import core_supports
from tiered_index.service.read.files.compacted import CompactedFile
from tiered_index.service.read.files.snapshot import FileLabel, Handle, label_of
from tiered_index.service.read.files.unsealed import UnsealedEntries, UnsealedFile
from tiered_index.service.read.files.window_table import WindowTable
from tiered_index.storage.base import OpenObject
from tiered_index.storage.prices import PriceTable
from tiered_index.types import FileReport, Freshness

if TYPE_CHECKING:
    from tiered_index.base._views import LocalFile, View, ViewRows
    from tiered_index.service.read.files.cold_path import ColdPath

# notes of `View.find`: out of range, excluded by the filter or by the topic
_AWAY, _BY_FILTER, _BY_TOPIC = -1, -4, -5
# a note of batches: in the range of all lookups together, but of none alone
_BY_TIME = -7
# in range, but all of its entries are hidden
_HIDDEN = -8
# this and smaller ones: left to the caller
_LEFT = -9
# numbers that `ViewBatch.find` returns for each file
_COUNTS = 5
# notes of skipped files
_SKIPPED = {
    -2: "skipped_budget",
    -4: "skipped_filter",
    -5: "skipped_topic",
    _BY_TIME: "skipped_time",
    _HIDDEN: "skipped_time",
}


class Why(StrEnum):
    """The reason why the compiled core did not search a file."""

    KIND = "kind"
    """It has no search for a file of this kind."""
    DIRECTORY = "directory"
    """The directory is not in memory."""
    SLOT_GROUP = "slot_group"
    """A slot group is not in memory."""
    BLOCKS = "blocks"
    """The slot group is cut into blocks."""
    LONG_CHAIN = "long_chain"
    """The slot of an unsealed file has too many entries."""
    DAMAGE = "damage"
    """A part is damaged, or not sorted."""
    EQUAL_ROWS = "equal_rows"
    """Two rows of the answer may be the same entry."""
    CURSOR = "cursor"
    """The core does not support the cursor, because the schema has further identity columns."""
    BOUNDS = "bounds"
    """The lookup is bounded or counts its requests, and the core has neither a deadline nor a count of requests."""
    NEW_FILES = "new_files"
    """The core does not have the files yet, because they have just changed."""
    NO_CORE = "no_core"
    """There is no compiled core: NumPy does all."""


# by the notes of `View.find`
_WHY = dict(enumerate((Why.KIND, Why.DIRECTORY, Why.SLOT_GROUP, Why.BLOCKS, Why.LONG_CHAIN, Why.DAMAGE)))
About = tuple[tuple[Freshness, ...], Logs]
"""The state of the logs for a view: freshness of indexes that are read without a root or by a fenced writer, and the
entries that answers lack.
"""


Part = tuple[bytearray, bytearray, bytearray, bytearray, bytearray, bytearray]
"""The result of `ViewBatch.find` for some of a batch's lookups."""
InParts = Callable[[Callable[[int, int], Part], int], Sequence[Part]]
"""Takes a function and a number of lookups. Returns the function's results for all parts of the lookups, in order."""


@dataclass(frozen=True)
class BatchNotes:
    """The notes of a batch. They keep no file open."""

    handles: Sequence[FileLabel]
    notes: Sequence[int]
    spent_by: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    knows_topic: bool = True


Noted: TypeAlias = Union["ViewRows", BatchNotes]
"""The notes of a lookup, or of a batch."""


class Rest(NamedTuple):
    """A file that the caller of a view has to search, and why.

    `lookups`: the numbers of those that need it; None: all. `matched`: its number of rows for the others.
    """

    handle: Handle
    why: Why
    lookups: npt.NDArray[np.int64] | None = None
    matched: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The rows of a view for a batch.

    - `retired`: matching rows (n) that newer readings replaced, with their lookups (n).
    - `rest`: the files that the caller has to search.
    - `seen`: for many lookups the files in range; for one those of `rest`, because `noted` knows about the others.
    - `skipped`: skipped files may have more rows.
    """

    matches: Sequence[Matches]
    retired: Sequence[Page]
    rest: Sequence[Rest]
    seen: Sequence[Handle]
    noted: Noted
    skipped: bool = False


def reports_of(noted: Noted, prices: PriceTable) -> list[FileReport]:
    """Return a report of each file in range, except those of the rest. The files have no times of their own."""
    reports = []
    for number, (label, note) in enumerate(zip(noted.handles, noted.notes, strict=True)):
        if note == _AWAY or note <= _LEFT:
            continue
        spent = noted.spent_by.get(number)
        # also if the directory or the filter that it read excludes the key
        outcome = _SKIPPED.get(note, "read") if spent is None else "read"
        requests, size = spent or (0, 0)
        # a stored file that needed no request
        cached = outcome == "read" and spent is None and label.place == "storage"
        reports.append(
            FileReport.of(
                file=label.file_id,
                place="cache" if cached else label.place,
                outcome=outcome,
                begin_ms=label.second_min * 1000,
                end_ms=label.second_max * 1000,
                requests=requests,
                bytes=size,
                cost_usd=prices.cost_usd({"get_range": requests}, size) if requests else 0.0,
                matched=max(note, 0),
            )
        )
    return reports


def excluded_by(noted: Noted) -> int:
    """Return the number of stored files that a view has excluded by filter or topic."""
    return sum([note in (_BY_FILTER, _BY_TOPIC) for note in noted.notes])


def with_reads_of(noted: Noted, reports: Sequence[FileReport], prices: PriceTable) -> list[FileReport]:
    """Return reports of files of the rest, with the requests that the core made for them."""
    if not noted.spent_by:
        return list(reports)
    labels, notes = noted.handles, noted.notes
    spent_by = {labels[number].file_id: spent for number, spent in noted.spent_by.items() if notes[number] <= _LEFT}
    return [
        report
        if (spent := spent_by.get(report.file)) is None
        else replace(
            report,
            requests=report.requests + spent[0],
            bytes=report.bytes + spent[1],
            cost_usd=report.cost_usd + prices.cost_usd({"get_range": spent[0]}, spent[1]),
        )
        for report in reports
    ]


class StoredSource:
    """Supplies the compiled core with a stored file or shard, without requests: from memory or a local folder."""

    __slots__ = "_cold", "_schema", "_stored"

    crc32 = staticmethod(crc32)

    def __init__(self, cold: ColdPath, stored: StoredObject, schema: Schema) -> None:
        self._cold, self._stored, self._schema = cold, stored, schema

    def open(self, file: LocalFile, call: Call | None, reads: bool) -> int:
        """Give `file` its directory and its filter. See `ColdPath.open_in_core`.

        Return the bytes read; -1: it can't be searched, or needs a filter first.
        """
        if call is not None and not call.waits:
            return -1
        read_bytes = self._cold.open_in_core(self._stored, file, self._schema, call, reads=reads)
        return -1 if not file.has_filter and self._cold.filters.is_due(self._stored) else read_bytes

    def open_now(self) -> OpenObject | None:
        """See `Storage.open_now`."""
        return self._cold.storage.open_now(self._stored.name, self._stored.size_bytes)

    def block(self, offset: int, length: int, crc: int, call: Call | None) -> bytes | tuple[bytes] | None:
        """See `ColdPath.block_now`."""
        return self._cold.block_now(self._stored, offset, length, crc, call)

    def miss(self, hash64: int, call: Call | None) -> None:
        """Note that a search for the key of `hash64` found nothing. This may read the filter from the disk cache."""
        if call is None or call.waits:
            self._cold.filters.record_miss(self._stored)


class LocalView:
    """The files of a catalog, `handles`, for lookups of rows of `schema`.

    Files in a storage are searched as far as that needs no request, or also in a storage that is a local folder.
    """

    def __init__(self, schema: Schema, handles: Sequence[Handle]) -> None:
        core = compiled_views()
        assert core is not None
        growing = [handle for handle in handles if isinstance(handle, UnsealedFile) and not handle.ended]
        rest = [handle for handle in handles if not isinstance(handle, UnsealedFile) or handle not in growing]
        rest.sort(key=lambda handle: (-handle.second_max, -handle.sequence, handle.file_id))
        self.handles: list[Handle] = [*growing, *rest]
        labels = []
        files: list[tuple[LocalFile | None, int, int]] = []
        # for each handle the number of its first file
        self._first: list[int] = []
        # the numbers of the handles that the core can't search
        self._unsearched = set[int]()
        for handle in self.handles:
            self._first.append(len(files))
            # labels in place of handles, so that an answer keeps no file open
            label = handle.label if isinstance(handle, UnsealedFile) else label_of(handle)
            for file in _local_in_core(handle, schema) or _stored_in_core(handle, schema) or [None]:
                files.append((file, handle.second_min, handle.second_max))
                labels.append(label)
            if files[-1][0] is None:
                self._unsearched.add(len(self._first) - 1)
        self.schema, self.labels = schema, labels
        self.core: View = core.View(row_form(schema), files, labels)

    def find(
        self,
        batch: LookupBatch,
        in_parts: InParts = lambda find, count: [find(0, count)],
        *,
        stored: bool = False,
        hidden: HiddenTable | None = None,
        call: Call | None = None,
    ) -> Found:
        """Return the rows of the files for a batch, without those that are `hidden`, and the rest of the files.

        `stored`: also search files in a storage that is a local folder, for many lookups.
        """
        if not batch.is_one:
            return self._find_many(batch, in_parts, stored=stored, hidden=hidden)
        key_hash, fingerprint, second_min, second_max = batch.first
        hashes = key_hash, int(batch.java_hash[0]) & 0x7FFFFFFF, fingerprint
        bounds = second_min, second_max, int(batch.max_count[0])
        topic, after = batch.topics[0], batch.after.get(0)
        if after is not None and not core_supports(after):
            return self._unfound(batch, Why.CURSOR)
        rows = self.core.find(topic, *hashes, *bounds, after, core_of(hidden, topic), call)
        return self._unfound(batch, Why.EQUAL_ROWS) if rows is None else self.of_rows(rows)

    def _unfound(self, batch: LookupBatch, why: Why) -> Found:
        """Return that the core searches nothing for a batch: all files in range are the rest."""
        low, high = int(batch.second_min.min()), int(batch.second_max.max())
        away = [handle.second_min > high or handle.second_max < low for handle in self.handles]
        within = [handle for handle, is_away in zip(self.handles, away, strict=True) if not is_away]
        notes = [_AWAY if is_away else _LEFT for is_away in away]
        noted = BatchNotes([self.labels[number] for number in self._first], notes, knows_topic=False)
        return Found((), (), [Rest(handle, why) for handle in within], within, noted)

    def of_rows(self, rows: ViewRows) -> Found:
        """Return what the core has found for one lookup."""
        places: dict[int, Why] = {}
        if rows.has_left:
            for number, note in enumerate(rows.notes):
                if note <= _LEFT:
                    # one for all shards of a table
                    places.setdefault(bisect_right(self._first, number) - 1, _WHY[_LEFT - note])
        rest = [Rest(self.handles[place], why) for place, why in places.items()]
        matches = [Matches(*self._of_only(rows.rows))] if len(rows) else []
        pages = [self._of_only(retired)] if (retired := rows.retired) else []
        return Found(matches, pages, rest, [left_file.handle for left_file in rest], rows, rows.skipped)

    def _of_only(self, data: bytes | bytearray) -> Page:
        """Return rows of the only lookup."""
        rows = np.frombuffer(data, self.schema.row)
        return np.zeros(len(rows), np.int64), rows

    def _find_many(self, batch: LookupBatch, in_parts: InParts, *, stored: bool, hidden: HiddenTable | None) -> Found:
        """Return at most `max_count` + 1 rows per file and lookup."""
        masked, of_topics = batch.under("mask")[0].key_hash, () if hidden is None else hidden.of(batch.topics)
        if (answers := in_core(self.core, batch, masked, stored=stored, hidden=of_topics)) is None:
            return self._unfound(batch, Why.CURSOR)
        parts = in_parts(answers.find, len(batch))
        matches = [
            Matches(np.frombuffer(lookups, np.int64), np.frombuffer(rows, self.schema.row))
            for lookups, rows, *_ in parts
        ]
        retired = [
            (np.frombuffer(lookups, np.int64), np.frombuffer(rows, self.schema.row))
            for *_, lookups, rows in parts
            if rows
        ]
        counts = np.sum([np.frombuffer(part[3], np.int64).reshape(-1, _COUNTS) for part in parts], axis=0)
        if len(counts) > len(self.handles):
            counts = np.add.reduceat(counts, self._first)
        low, high = int(batch.second_min.min()), int(batch.second_max.max())
        away = [handle.second_min > high or handle.second_max < low for handle in self.handles]
        needed = self._needed(answers.left, [part[2] for part in parts])
        shown = batch.hiding(hidden)
        notes, spent_by = [], {}
        for place, (rows, reads, size, in_range, searched) in enumerate(counts.tolist()):
            if reads:
                spent_by[place] = reads, size
            note = rows
            if away[place]:
                note = _AWAY
            elif place in needed:
                note = _LEFT
            elif not (self.handles[place].is_local or searched):
                handle = self.handles[place]
                asks = in_range or len(shown.overlapping(handle.second_min, handle.second_max))
                note = _BY_FILTER if in_range else _BY_TOPIC if asks else _BY_TIME
            notes.append(note)
        rest = [
            Rest(
                self.handles[place],
                self._why(place, lookups is not None, stored),
                lookups,
                0 if lookups is None else int(counts[place, 0]),
            )
            for place, lookups in needed.items()
            if not away[place]
        ]
        seen = [handle for handle, is_away in zip(self.handles, away, strict=True) if not is_away]
        labels = [self.labels[number] for number in self._first]
        return Found(matches, retired, rest, seen, BatchNotes(labels, notes, spent_by))

    def _why(self, place: int, is_searched: bool, stored: bool) -> Why:
        """Return why a batch leaves a file to the caller. `is_searched`: only for some lookups."""
        if is_searched:
            return Why.SLOT_GROUP
        if place in self._unsearched:
            return Why.KIND
        return Why.DIRECTORY if stored else Why.BOUNDS

    def _needed(self, files: Sequence[int], pairs: Sequence[bytearray]) -> dict[int, npt.NDArray[np.int64] | None]:
        """Return the handles to search, by place, and the lookups of each (None: all).

        `files` are to be searched for all lookups. `pairs` have a file and a lookup each.
        """
        needed: dict[int, npt.NDArray[np.int64] | None] = {bisect_right(self._first, file) - 1: None for file in files}
        rows = np.concatenate([np.frombuffer(some, np.int64) for some in pairs]).reshape(-1, 2)
        places = np.searchsorted(self._first, rows[:, 0], "right") - 1
        for place in np.unique(places).tolist():
            needed.setdefault(place, rows[places == place, 1])
        return needed


def _local_in_core(handle: Handle, schema: Schema) -> list[LocalFile | None] | None:
    """Return the core's `LocalFile` of a local file; None: it has none."""
    file = None
    if isinstance(handle, UnsealedEntries) and handle.layout.schema == schema:
        file = handle.in_core()
    elif isinstance(handle, CompactedFile) and handle.local is not None and handle.metadata().layout.schema == schema:
        file = handle.local.in_core()
    return None if file is None else [file]


def _stored_in_core(handle: Handle, schema: Schema) -> list[LocalFile | None] | None:
    """Return the core's `LocalFile` of a stored file, or of each shard of a table; None: it has none."""
    if isinstance(handle, CompactedFile) and handle.local is None and handle.stored is not None:
        return [_of_object(handle.stored.cold, handle.stored.stored, handle.hash, schema)]
    if isinstance(handle, WindowTable):
        shards = sorted(handle.shards, key=lambda shard: shard.part.slot_low)
        # shards of a giant slot have the same slot, and are left to the caller
        if all(shard.part.slot_high <= other.part.slot_low for shard, other in itertools.pairwise(shards)):
            return [_of_object(handle.cold, shard, handle.hash, schema) for shard in shards]
    return None


def _of_object(cold: ColdPath, stored: StoredObject, rule: HashRule, schema: Schema) -> LocalFile | None:
    if (number := HASH_RULES.index(rule)) > 1:
        return None
    file = cold.core_files.get(stored.name)
    if file is None:
        core, shard = compiled_views(), stored.shard
        assert core is not None
        slots = None if shard is None else (shard.slots.split, shard.slots.join, shard.slot_low, shard.slot_high)
        # a whole file gets its number of slots with its directory
        file = core.LocalFile(row_form(schema), None, None, number, 0, 1 if shard is None else shard.slots.base)
        file.from_source(StoredSource(cold, stored, schema), stored.second_min, stored.second_max, slots)
        # another thread may have added it
        file = cold.core_files.setdefault(stored.name, file)
    return file
