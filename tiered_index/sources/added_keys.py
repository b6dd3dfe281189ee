"""The keys of a log of files: a run may add some, whose entries for known rows are then put, or drop some.

The positions of `topic_keys.py` say which keys the rows of each offset have. A run with a new key reads the known files
again, in a pass: it puts entries of this key alone, at the offsets that the rows have. The pass has a position of its
own, so that a killed run loses and doubles nothing. No row gets an entry twice, also if two fields have the same text.
Rows that can't be read again are named, by the log of the storage for good. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import structs

from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound, listed
from tiered_index.follow import PatientPut
from tiered_index.format.names import topic_of_store
from tiered_index.format.segment import LinkedSegment
from tiered_index.service.index import IndexService
from tiered_index.service.log.records import LostRange, max_positions
from tiered_index.service.log.topic_keys import (
    KeyPass,
    TopicKeys,
    added_positions,
    dropped_positions,
    positions_of,
    rules_in,
    rules_of,
    scope_of,
)
from tiered_index.sources.chains import has_text
from tiered_index.sources.listing import FileMoved, reopened
from tiered_index.sources.rows.batch import RowBatch, RowFile
from tiered_index.sources.rows.forms import rows_of_form
from tiered_index.sources.rows.mapping import RowMapping
from tiered_index.sources.rows.zone import TimeZone
from tiered_index.types import MAX_TIMESTAMP_MS

# how often a file is opened that is moved meanwhile
_LOOKS = 3
NO_ENTRIES: dict[str, Any] = {
    "topic": pa.array([], pa.string()),
    "key": pa.array([], pa.string()),
    **dict.fromkeys(("queue_id", "offset", "size", "timestamp_ms"), np.zeros(0, np.int64)),
}
"""The columns of a batch that has only a position."""


@dataclass
class KeyCounts:
    """What a run did about the keys of a topic.

    - `added`, `dropped`: the keys that this run added to those of the topic, and the ones that it dropped.
    - `further`: keys of earlier runs, by which this run indexes files, too.
    - `files`, `entries`: files that were read again for added keys, and the entries of these.
    - `unread`: files whose rows can't be read again, with the reason.
    """

    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    further: list[str] = field(default_factory=list)
    files: int = 0
    entries: int = 0
    unread: list[dict[str, str]] = field(default_factory=list)


class AddedKeys:
    """The keys of one log of files, which a run may change, and the passes for added ones.

    `columns_of` returns the columns of entries for rows, whose positions and a number are their offsets.
    """

    def __init__(
        self, index: IndexService, log: str, put: PatientPut, columns_of: Callable[[RowBatch, int], dict[str, Any]]
    ) -> None:
        self._index, self._log, self._patient, self._columns_of = index, log, put, columns_of
        self._positions: dict[str, int] = {}
        self.counts = KeyCounts()

    def known(self) -> list[str]:
        """Return the keys by which new rows of the log are indexed, by the index."""
        self._positions = max_positions(self._index.log_state.positions, self._index.durable_positions())
        return rules_of(self._positions, scope_of(self._log))

    def at(self, offset: int) -> list[str]:
        """Return the keys that the row at an offset has, or gets when it is read first."""
        self.known()
        return TopicKeys(self._positions, self._log).holding(offset)

    def settle(self, wanted: Sequence[str], dropped: Collection[str], end: int) -> list[str]:
        """Keep the keys of a run, which all rows from offset `end` on get, and return all keys of the log.

        Rows before `end` are read again by `run`. Raises `InvalidArgument` for a key that can't be dropped.
        """
        known, scope = self.known(), scope_of(self._log)
        if both := [key for key in wanted if key in dropped]:
            raise InvalidArgument(f"--key {both[0]} and --drop-key {both[0]} are both given")
        if unknown := {*dropped} - {*rules_in(self._positions, scope)}:
            has = listed(known) or "none yet"
            raise InvalidArgument(f"--drop-key {min(unknown)}: it is no key of this topic, which has {has}")
        # a run that was killed may have dropped others
        dropped = [key for key in known if key in dropped]
        added = [key for key in dict.fromkeys(wanted) if key not in known]
        if not {*known, *wanted} - {*dropped}:
            raise InvalidArgument(f"--drop-key {listed(known)}: a topic keeps one key at least: add another --key")
        for key in added:
            self._put_all(added_positions(self._positions, scope, key, {self._log: end}))
        for key in dropped:
            self._put_all(dropped_positions(self._positions, scope, key, {self._log: end}))
        if known and (added or dropped):
            # at once: lookups must know which rows lack entries of a new key, and other writers what the keys are
            self._index.flush()
            self._index.publish_positions(positions_of(self._positions, self._log))
        counts, further = self.counts, [key for key in known if key not in wanted and key not in dropped]
        counts.added += added if known else []
        counts.dropped += dropped
        counts.further = further
        return [*further, *dict.fromkeys(wanted)]

    def _put_all(self, positions: dict[str, int]) -> None:
        for name, at in positions.items():
            self._put_position(name, at)

    def run(self, mapping: RowMapping, is_due: Callable[[], bool] = lambda: True) -> None:
        """Put the entries of added keys for all known rows, as long as `is_due`. `mapping` has the other fields.

        Raises the errors of the index and of the storages, and `InvalidArgument` for a file of another form.
        """
        while is_due() and (passes := (keys := TopicKeys(self._positions, self._log)).passes):
            begin = passes[0].read
            end = keys.next_change(begin)
            assert end is not None, "a pass has an end"
            together, holding = [key_pass for key_pass in passes if key_pass.read == begin], keys.holding(begin)
            of_range = mapping.with_keys([*holding, *(key_pass.rule for key_pass in together)])
            # times that its clocks do not show once were counted when the rows were read first
            of_range.zone = None if mapping.zone is None else TimeZone(mapping.zone.name)
            reading = _Range(of_range, len(holding), together, begin, end)
            known = self._index.segment_archive.segments().of_log(self._log, begin)
            unread = list[LinkedSegment]()
            for segment in [linked for linked in known if linked.start < end and isinstance(linked, LinkedSegment)]:
                if not is_due():
                    break
                if (problem := self._read(segment, reading, unread)) is not None:
                    unread.append(segment)
                    rules = [key_pass.rule for key_pass in together]
                    self.counts.unread += [{"file": segment.uri, "key": rule, "problem": problem} for rule in rules]
            else:
                self._lose(unread, reading)
                self._advance(reading, end)
                continue
            self._lose(unread, reading)

    def _read(self, segment: LinkedSegment, reading: _Range, unread: list[LinkedSegment]) -> str | None:
        """Put the entries of a segment's rows within a range. Return why they can't be read; None: they are put.

        Before a segment that can be read, `unread` ones are lost.
        """
        problem: str | None = None
        for _ in range(_LOOKS):
            try:
                with reopened(segment.uri, self._index.config) as now:
                    if not (now.is_same(segment.size_bytes, segment.etag) or has_text(now, [segment], now.head())):
                        return f"{segment.uri} has changed since it was indexed"
                    rows = rows_of_form(now.file, segment.format, now.size_bytes)
                    self._lose(unread, reading)
                    self._read_file(segment, rows, reading)
                    return None
            except (InvalidArgument, ObjectNotFound, CorruptFile) as error:
                problem = str(error)
                if not isinstance(error, FileMoved):
                    break
        return problem

    def _read_file(self, segment: LinkedSegment, rows: RowFile, reading: _Range) -> None:
        shift = segment.start - segment.position
        first, last = max(reading.begin, segment.start) - shift, min(reading.end, segment.end) - shift
        of_file = rows.reading(reading.mapping, segment.position, segment.position + segment.length)
        for batch in of_file.batches(first):
            self._put(batch.within(first, last), shift, min(batch.end, last) + shift, reading)
            if batch.end >= last:
                break
        self._advance(reading, last + shift)
        self.counts.files += 1

    def _put(self, batch: RowBatch, shift: int, end: int, reading: _Range) -> None:
        """Put the entries of rows by each key of a range, with the position of its pass."""
        for number, key_pass in enumerate(reading.together, reading.holding):
            of_key = batch.of_path(number)
            self.counts.entries += of_key.entries
            self._put_position(key_pass.source, end, self._columns_of(of_key, shift))

    def _advance(self, reading: _Range, end: int) -> None:
        for key_pass in reading.together:
            if self._positions.get(key_pass.source, key_pass.read) < end:
                self._put_position(key_pass.source, end)

    def _put_position(self, source: str, position: int, columns: dict[str, Any] = NO_ENTRIES) -> None:
        self._patient(columns, source, position)
        self._positions[source] = position

    def _lose(self, unread: list[LinkedSegment], reading: _Range) -> None:
        """Name rows of segments, one after the other, which can't be read again, also for all later answers."""
        if not unread:
            return
        first, last = unread[0], unread[-1]
        begin, end = max(reading.begin, first.start), min(reading.end, last.end)
        counts = [segment.rows for segment in unread]
        is_counted = begin == first.start and end == last.end and None not in counts
        lost = LostRange(self._log, "missing", begin, end, topic=topic_of_store(self._log))
        if is_counted:
            lost = structs.replace(lost, messages=sum(filter(None, counts)))
        if lost.messages != 0:
            # the times of rows that had no key are not known
            ranges = [structs.replace(lost, key=key_pass.rule) for key_pass in reading.together]
            self._index.record_ranges([part.lost(0, MAX_TIMESTAMP_MS) for part in ranges])
        unread.clear()
        self._advance(reading, end)


@dataclass(frozen=True)
class _Range:
    """Offsets [`begin`, `end`) whose rows have the same keys. `mapping` has these keys, `holding` in number, and those
    of the passes that are done `together`.
    """

    mapping: RowMapping
    holding: int
    together: Sequence[KeyPass]
    begin: int
    end: int
