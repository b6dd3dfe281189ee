"""The keys of a log of files: a run may add some, whose entries for known rows are then put, or drop some.

The positions of `topic_keys.py` say which keys the rows of each offset have. A run with a new key reads the known files
again, in a pass: it puts entries of this key alone, at the offsets that the rows have. The pass has a position of its
own, so that a killed run loses and doubles nothing. No row gets an entry twice, also if two fields have the same text.
A file that is away is left out, and read by a run that lists it again. Rows that are damaged are named, by the log of
the storage for good. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from msgspec import structs

from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.files.copied_keys import CopiedRows, copied_rows
from tiered_index.connectors.files.identity import KnownFile, has_rows
from tiered_index.connectors.files.known_files import KnownFiles
from tiered_index.connectors.files.listing import FileMoved, SourceFile, reopened
from tiered_index.connectors.files.row_archive import CopiedTexts
from tiered_index.connectors.files.rows.batch import RowBatch, RowFile
from tiered_index.connectors.files.rows.forms import rows_of_form
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.files.rows.text import NdjsonFile
from tiered_index.connectors.files.rows.zone import TimeZone
from tiered_index.connectors.source import Put
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound, listed
from tiered_index.format.names import rows_store, topic_of_store
from tiered_index.format.segments.segment import LinkedSegment
from tiered_index.service.index import IndexService
from tiered_index.service.log.records import ArchivedSegment, LostRange, max_positions
from tiered_index.service.log.topic_keys import (
    KeyPass,
    TopicKeys,
    added_positions,
    away_positions,
    dropped_positions,
    kept_positions,
    named_end,
    positions_of,
    rules_in,
    rules_of,
    scope_of,
)

# how often a file is opened that is moved meanwhile
_LOOKS = 3
# most segments of files that are away, of one pass: each is three positions
_MOST_AWAY = 256
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
    - `skipped`: the bad rows of these files, which have no entry of the keys.
    - `unread`: files whose rows can't be read again now, with the reason.
    """

    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    further: list[str] = field(default_factory=list)
    files: int = 0
    entries: int = 0
    skipped: int = 0
    unread: list[dict[str, str]] = field(default_factory=list)


class AddedKeys:
    """The keys of one log of files, which a run may change, and the passes for added ones.

    `columns_of` returns the columns of entries for rows, whose positions and a number are their offsets.
    """

    def __init__(
        self, index: IndexService, log: str, put: Put, columns_of: Callable[[RowBatch, int], dict[str, Any]]
    ) -> None:
        self._index, self._log, self._patient, self._columns_of = index, log, put, columns_of
        self._positions: dict[str, int] = {}
        self._is_published = True
        # of the last segment that was not read, by its start: how many rows have no copies
        self._uncopied: dict[int, int | None] = {}
        # what was there in place of files that are away, by the first offsets that are not read
        self._looked = set[tuple[int, int, str]]()
        self._known, self._copied, self._read_end = KnownFiles(log), CopiedTexts(index.segment_archive, log, ()), 0
        self.counts = KeyCounts()
        self._read_uris = set[str]()

    def known(self) -> list[str]:
        """Return the keys by which new rows of the log are indexed, by the index."""
        self._positions = max_positions(self._index.log_state.positions, self._index.durable_positions())
        return rules_of(self._positions, scope_of(self._log))

    def ever(self) -> list[str]:
        """Return the keys by which rows of the log are indexed, or were, by the index."""
        self.known()
        return rules_in(self._positions, scope_of(self._log))

    def end(self) -> int:
        """Return the offset before which the index says what keys rows of the log have, also of some that may come."""
        self.known()
        return named_end(self._positions, self._log)

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
        self._is_published = self._is_published and not (added or dropped)
        if known:
            # lookups must know which rows lack entries of a new key, and other writers what the keys are
            self.publish()
        counts, further = self.counts, [key for key in known if key not in wanted and key not in dropped]
        counts.added += added if known else []
        counts.dropped += dropped
        counts.further = further
        return [*further, *dict.fromkeys(wanted)]

    def dropped_in(self, spans: Collection[tuple[int, int]]) -> list[str]:
        """Return the dropped keys that rows at offsets [start, end) of any of `spans` have."""
        return TopicKeys(self._positions, self._log).dropped_in(spans)

    def keep(self, rules: Sequence[str], begin: int, end: int) -> None:
        """Let rows at offsets [`begin`, `end`), behind all others, have their keys by `rules`, also by dropped ones.

        Do so before the log has their segments.
        """
        counted, active = rules_in(self._positions, scope_of(self._log)), rules_of(self._positions, scope_of(self._log))
        if begin == end or not (dropped := [rule for rule in rules if rule in counted and rule not in active]):
            return
        for rule in dropped:
            self._put_all(kept_positions(self._positions, self._log, rule, begin, end))
        self._is_published = False
        self.publish()

    def publish(self) -> None:
        """Publish the keys at once, if they are new. Do so before the first copy of a row that has them."""
        if not self._is_published:
            self._index.flush()
            self._index.publish_positions(positions_of(self._positions, self._log))
            self._is_published = True

    def _put_all(self, positions: dict[str, int]) -> None:
        for name, at in positions.items():
            self._put_position(name, at)

    def run(
        self, mapping: RowMapping, files: Sequence[SourceFile] = (), is_due: Callable[[], bool] = lambda: True
    ) -> None:
        """Put the entries of added keys for known rows: of one file, and of further ones as long as `is_due`.

        `mapping` has the other fields. Rows of files that were away are read if these are among the listed `files`.
        Raises the errors of the index and of the storages, and `CorruptFile` for archived copies that are damaged.
        """
        counted: dict[int, tuple[KnownFile, int]] | None = None
        while passes := (keys := TopicKeys(self._positions, self._log)).passes or self._back(keys.left_out, files):
            if counted is None:
                counted = self._counted()
            begin = passes[0].read
            together, holding = [key_pass for key_pass in passes if key_pass.read == begin], keys.holding(begin)
            for left_out in [each for key_pass in together for each in keys.left_out_by(key_pass)]:
                if left_out.end > begin and not left_out.is_done and together[0].away is None:
                    # a killed run left it out, and this one reads it in its turn
                    self._put_position(left_out.source, left_out.end)
            end = min(key_pass.end for key_pass in together)
            end = min(end, keys.next_change(begin) or end)
            of_range = mapping.with_keys([*holding, *(key_pass.rule for key_pass in together)])
            # times that its clocks do not show once were counted when the rows were read first
            of_range.zone = None if mapping.zone is None else TimeZone(mapping.zone.name)
            # one segment of copies at a time, which is archived anew before the entries of its rows are put
            archive = self._index.segment_archive
            copies = archive.segments().of(rows_store(self._log), begin)
            copy = next((segment for segment in copies if segment.start < end), None)
            if copy is not None:
                end = copy.start if copy.start > begin else min(copy.end, end)
                copy = copy if copy.start <= begin else None
            self._read_range(_Range(of_range, len(holding), together, begin, end, copy), counted, is_due)
            if not is_due():
                break

    def _back(self, left_out: Sequence[KeyPass], files: Sequence[SourceFile]) -> list[KeyPass]:
        """Return the passes for the first file that was away, is listed, and has not been looked at yet.

        Those for rows that have no segment any more need no file.
        """
        back, marks = list[KeyPass](), set[tuple[int, int, str]]()
        by_uri = {file.uri: file for file in files} if left_out else {}
        for key_pass in left_out if by_uri else ():
            if back and key_pass.read > back[0].read:
                break
            of_log = self._index.segment_archive.segments().of_log(self._log, key_pass.read)
            segment = next((each for each in of_log if isinstance(each, LinkedSegment)), None)
            if segment is None or segment.start >= key_pass.end:
                back.append(key_pass)
            elif (file := by_uri.get(segment.uri)) is not None:
                mark = key_pass.read, file.size_bytes, file.stamp
                if mark not in self._looked:
                    marks.add(mark)
                    back.append(key_pass)
        self._looked |= marks
        return back

    def _counted(self) -> dict[int, tuple[KnownFile, int]]:
        """Return the known file of each segment, by its start, and the position before which its rows count.

        A newer reading of the file replaced those behind it. A segment without any such row is left out.
        """
        self._read_end = 1 << 62
        self._known.learn(self._index.segment_archive.segments(), self._index.durable_position(self._log) or 0)
        return {segment.start: (known, end) for known in self._known.files for segment, end in known.parts()}

    def _read_range(
        self, reading: _Range, counted: dict[int, tuple[KnownFile, int]], is_due: Callable[[], bool]
    ) -> None:
        """Put the entries of a range. It may end before its end unless `is_due`."""
        begin, end = reading.begin, reading.end
        if begin < self._read_end:
            # the first reading of edited files has left out rows with copies, from the first file on
            without_file = self._known.offsets_without_file()
            self._copied = CopiedTexts(self._index.segment_archive, self._log, without_file)
        self._read_end = end
        copied: CopiedRows | None = None
        if reading.copy is not None:
            paths = reading.holding, len(reading.mapping.keys)
            copied = CopiedRows(self._index, reading.copy, *paths)
        sink = _KeyEntries(self, reading, copied)
        segments = self._index.segment_archive.segments().of_log(self._log, begin)
        linked = (each for each in segments if isinstance(each, LinkedSegment) and not each.is_unread)
        for number, segment in enumerate([each for each in linked if each.start < end]):
            known, row_end = counted.get(segment.start, (None, segment.position))
            # a segment of copies is archived as a whole, and each call goes on by a file
            if copied is None and number and not is_due():
                break
            # the copies of a file with columns that was replaced have no file any more
            self._take_copies(sink, sink.end, segment.start, is_ndjson=False)
            if known is not None and (unread := self._read(known, segment, row_end, sink)) is not None:
                if unread.is_away and reading.together[0].away is not None:
                    # it is not back
                    return
                self._read_copies(segment, sink, unread)
            # replaced rows are no answers, unless they have copies
            self._take_copies(sink, segment.start, segment.end, is_ndjson=_is_ndjson(segment))
            sink.pass_to(min(segment.end, end))
        else:
            self._take_copies(sink, sink.end, end, is_ndjson=False)
            sink.pass_to(end)
        sink.finish()

    def _read(self, known: KnownFile, segment: LinkedSegment, row_end: int, sink: _KeyEntries) -> _Unread | None:
        """Take the rows of a segment from its file. Return why they can't be read; None: they are taken."""
        unread: _Unread | None = None
        for _ in range(_LOOKS):
            is_there = False
            try:
                with reopened(segment.uri, self._index.config) as now:
                    if known.is_lost or not (known.has_hints(now) or has_rows(now, segment, row_end)):
                        return _Unread(f"{segment.uri} has changed since it was indexed", is_away=True)
                    is_there = True
                    rows = rows_of_form(now.file, segment.format, now.size_bytes)
                    self._read_file(segment, row_end, rows, sink)
                    return None
            except (InvalidArgument, ObjectNotFound, CorruptFile) as error:
                unread = _Unread(str(error), not is_there or isinstance(error, FileMoved | ObjectNotFound))
                if not isinstance(error, FileMoved):
                    break
        return unread

    def _read_file(self, segment: LinkedSegment, row_end: int, rows: RowFile, sink: _KeyEntries) -> None:
        reading, shift = sink.reading, segment.start - segment.position
        first, last = max(sink.end, segment.start) - shift, min(reading.end, row_end + shift) - shift
        mapping = reading.mapping.with_times(segment.time_rule)
        if segment.topic_field != mapping.topic:
            # another run has found the topics of these rows in another field
            mapping = replace(mapping, topic=segment.topic_field)
        of_file = rows.reading(mapping, first, last, whole=sink.copied is not None or bool(self._copied))
        if rows.is_text and first == segment.position and segment.lines is not None:
            of_file.lines_before = segment.lines[0]
        names = self._copied.names(segment.uri, self._known.offsets_before(segment)[:1]) if self._copied else []
        for batch in of_file.batches(first):
            self.counts.skipped += len([bad for bad in batch.bad if first <= bad.position < last])
            of_segment = batch.within(first, last)
            if names:
                of_segment = sink.without_copied(of_segment, shift, self._copied, names)
            sink.take(of_segment, shift, min(batch.end, last) + shift, segment.uri)
            if batch.end >= last:
                break
        else:
            # the first reading of a damaged file has passed over the same rows
            if of_file.damage is not None and (segment.damage is None or of_file.end < last):
                raise of_file.damage.error
        self._read_uris.add(segment.uri)
        self.counts.files = len(self._read_uris)

    def _read_copies(self, segment: LinkedSegment, sink: _KeyEntries, unread: _Unread) -> None:
        """Take the copied rows of a segment whose file can't be read. Others are named, also for all later answers."""
        reading = sink.reading
        begin, end = self._take_copies(sink, segment.start, segment.end, is_ndjson=_is_ndjson(segment))
        if segment.start not in self._uncopied:
            # of all rows, the ones without an earlier key have no copy
            copied = copied_rows(self._index, self._log, segment.start, segment.end)
            self._uncopied = {segment.start: None if segment.rows is None else segment.rows - copied}
        uncopied = self._uncopied[segment.start]
        if uncopied is not None and uncopied <= 0:
            return
        is_whole = (begin, end) == (segment.start, segment.end)
        # rows without copies beside others that have some are not read apart from these
        problem = unread.problem
        if unread.is_away and sink.copied is None and self._leave_out(reading, begin, end):
            problem += "; a later run reads it if it lists it as it was"
        else:
            sink.lose(begin, end, uncopied if is_whole else None)
        for rule in [key_pass.rule for key_pass in reading.together]:
            of_key = {"file": segment.uri, "key": rule, "problem": problem}
            if of_key not in self.counts.unread[-len(reading.together) :]:
                self.counts.unread.append(of_key)

    def _leave_out(self, reading: _Range, begin: int, end: int) -> bool:
        """Leave rows of a file that is away to a later run. Return whether it is done: there may be too many."""
        keys = TopicKeys(self._positions, self._log)
        if any(len(keys.left_out_by(key_pass)) >= _MOST_AWAY for key_pass in reading.together):
            return False
        for key_pass in reading.together:
            self._put_all(away_positions(self._positions, key_pass, begin, end))
        return True

    def _take_copies(self, sink: _KeyEntries, begin: int, end: int, *, is_ndjson: bool) -> tuple[int, int]:
        """Take the copied rows with offsets [`begin`, `end`) that are left of a range. Return the offsets of these."""
        begin, end = max(sink.end, begin), min(sink.reading.end, end)
        if sink.copied is not None and begin < end:
            sink.take_copies(sink.copied.batch(begin, end, sink.reading.mapping, is_ndjson=is_ndjson), end)
        return begin, end

    def put(self, batch: RowBatch, shift: int, end: int, reading: _Range) -> None:
        """Put the entries of rows by each key of a range, with the position of its pass."""
        for number, key_pass in enumerate(reading.together, reading.holding):
            of_key = batch.of_paths(number, number + 1)
            self.counts.entries += of_key.entries
            self._put_position(key_pass.source, end, self._columns_of(of_key, shift))

    def advance(self, end: int, reading: _Range) -> None:
        """Put the positions of the passes of a range, which have no entry up to `end`."""
        for key_pass in reading.together:
            if self._positions.get(key_pass.source, key_pass.read) < end:
                self._put_position(key_pass.source, end)

    def _put_position(self, source: str, position: int, columns: dict[str, Any] = NO_ENTRIES) -> None:
        self._patient(columns, source, position)
        self._positions[source] = position

    def topics_of(self, batch: RowBatch) -> pa.Array:
        """Return the topic of each row."""
        return pa.array(self._columns_of(batch, 0)["topic"], pa.string())

    def record(self, lost: LostRange, reading: _Range) -> None:
        """Name rows that can't be read again for the keys of a range, also for all later answers."""
        ranges = [structs.replace(lost, key=key_pass.rule) for key_pass in reading.together]
        # the times of rows that had no key are not known
        self._index.record_ranges([part.lost(0, MAX_TIMESTAMP_MS) for part in ranges])


def _is_ndjson(segment: LinkedSegment) -> bool:
    return segment.format.startswith(NdjsonFile.kind)


class _Unread(NamedTuple):
    """Why rows can't be read. If their file `is_away`, it is another one now, or none, and may come back."""

    problem: str
    is_away: bool


@dataclass(frozen=True)
class _Range:
    """Offsets [`begin`, `end`) whose rows have the same keys. `mapping` has these keys, `holding` in number, and those
    of the passes that are done `together`. `copy` is the archived segment with copies of the rows; None: there is none.
    """

    mapping: RowMapping
    holding: int
    together: Sequence[KeyPass]
    begin: int
    end: int
    copy: ArchivedSegment | None


class _KeyEntries:
    """The entries of one range: they are put at once, or wait for their copies. `end`: the offset that is reached."""

    def __init__(self, keys: AddedKeys, reading: _Range, copied: CopiedRows | None) -> None:
        self._keys, self.reading, self.copied = keys, reading, copied
        self.end = reading.begin
        self._waiting = list[tuple[RowBatch, int, int]]()
        # rows one after the other that are lost: their offsets, and their number if it is known
        self._lost: LostRange | None = None

    def without_copied(self, batch: RowBatch, shift: int, texts: CopiedTexts, names: Sequence[str]) -> RowBatch:
        """Return the rows of a file with `names` without those of an earlier text that stay answers by their copies."""
        has_copy = np.zeros(batch.entries, bool) if self.copied is None else self.copied.has(batch.positions + shift)
        others = batch.only(~has_copy)
        left_out = np.setdiff1d(others.positions, texts.left_out(others, names).positions)
        return batch.only(~np.isin(batch.positions, left_out)) if len(left_out) else batch

    def take(self, batch: RowBatch, shift: int, end: int, uri: str) -> None:
        """Take rows of a file up to offset `end`."""
        if self.copied is not None:
            self.copied.add(batch, self._keys.topics_of, uri, shift)
        self._put(batch, shift, end)

    def take_copies(self, batch: RowBatch, end: int) -> None:
        """Take copied rows up to offset `end`, whose offsets are their positions."""
        assert self.copied is not None
        self.copied.take(batch)
        self._put(batch, 0, end)

    def _put(self, batch: RowBatch, shift: int, end: int) -> None:
        self.end = end
        if self.copied is not None:
            self._waiting.append((batch, shift, end))
            return
        self._record()
        self._keys.put(batch, shift, end, self.reading)

    def lose(self, begin: int, end: int, rows: int | None) -> None:
        """Note rows that can't be read."""
        lost, self.end = self._lost, end
        if lost is None:
            log = self.reading.together[0].log
            self._lost = LostRange(log, "missing", begin, end, rows, topic_of_store(log))
            return
        messages = None if rows is None or lost.messages is None else lost.messages + rows
        self._lost = structs.replace(lost, end=end, messages=messages)

    def pass_to(self, end: int) -> None:
        """Note that no further row is before an offset."""
        self.end = max(self.end, end)

    def finish(self) -> None:
        """Put all entries, after their copies."""
        self._record()
        if self.copied is not None and not self.copied.send():
            # a record has put another segment in the place of this one: it is read again
            return
        for batch, shift, end in self._waiting:
            self._keys.put(batch, shift, end, self.reading)
        self._keys.advance(self.end, self.reading)

    def _record(self) -> None:
        if self._lost is not None:
            self._keys.record(self._lost, self.reading)
            self._lost = None
