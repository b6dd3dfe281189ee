"""The files of one log, by the segments that the index has of them: which listed file is which known one.

A file is what it holds (`identity.py`). Its name, inode and size say with which known file it is compared, in this
order:

1. A file with the size and the hints of a known one is that file, also under another name. Nothing is read.
2. A file with the inode, and then one with the name, of a known file is that file if it has its first block.
3. Any other file is new, or has the rows of a known file that has *moved*: one whose name or size it has, and that is
   not at its place any more.
4. A new file is a *copy* if it is in the folder of another one that is still there, has its name and suffixes of
   rotation or packing, and a part of its text. It is not indexed as long as this is so.

So rows keep their offsets while files are renamed, copied, truncated, packed, uploaded again, or mounted elsewhere. One
thread.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from msgspec import structs

from tiered_index.base.clock import SystemClock
from tiered_index.base.kernels import crc32
from tiered_index.connectors.files.identity import (
    Content,
    Cut,
    Grown,
    KnownFile,
    OldOffsets,
    Other,
    Same,
    Verdict,
    backed_up,
    begins_with,
    first_digest,
    first_name,
    first_text,
    is_earlier,
    names_before,
    what_is,
)
from tiered_index.connectors.files.listing import HEAD_BYTES, SourceFile, as_it_is
from tiered_index.connectors.files.rows.batch import RowFile, partition_of
from tiered_index.connectors.files.rows.forms import is_growing_text, open_rows
from tiered_index.connectors.files.rows.mapping import RowMapping, RowRule
from tiered_index.connectors.files.rows.places import HeldFile, StoredFile
from tiered_index.connectors.files.rows.table import TABLES
from tiered_index.connectors.files.rows.text import BLOCK_BYTES, TextFile, has_returns_alone
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, ObjectNotFound, StorageError
from tiered_index.format.names import points_store, rows_store
from tiered_index.format.segments.segment import LOST, LinkedSegment
from tiered_index.service.log.replaced import ReplacedRanges
from tiered_index.service.log.topic_keys import named_end
from tiered_index.service.read.segments.segments import Segments

# fields of a segment that say what its text has
_OF_TEXT = ("rows", "times", "blocks", "lines")
UNKNOWN_FORM = "unknown"
"""The format of the segment of a file that is of no form that is read."""
Torn = Literal["torn"]
TORN: Torn = "torn"
Opened = Callable[[str], SourceFile]
"""Returns the file at a URI as it is now. Raises as `as_it_is`."""


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file whose rows from `position` on are to be read. They replace those at the offsets `old`.

    It `is_reread` if that is because they were read in another way. It `is_rest` if a killed run has begun to
    replace the old rows: the record that says what was read must reserve the offsets of the rest, too.
    """

    listed: SourceFile
    position: int = 0
    old: tuple[OldOffsets, ...] = ()
    is_reread: bool = False
    is_rest: bool = False


@dataclass
class Plan:
    """What a run has to do.

    - `unread`: the files with rows that no run has read.
    - `resumed`: segments that an earlier run has not finished, with their files, which still have these rows.
    - `changed`, `gone`, `retired`: what the log must state first: segments with new facts, places of segments without
      rows, and offsets of rows that are in no file.
    - `ended`: offsets that wait for a segment that is not read to its end, and its offsets that are read.
    - `known`: the number of files that are not read, and `copies` the URIs of those that are copies of others.
    - `lost`: the URIs of files that have other rows, so that their earlier ones can't be read any more.
    - `rewritten`: the URIs of files whose rows from some place on are read anew.
    - `packed`: files that have the text of known ones, which were not packed, and their segments.
    - `otherwise`: the URIs of known files that are not listed, and whose times were read in another way.
    - `is_first_part`: a further plan is to be made after this one.
    """

    unread: list[UnreadFile] = field(default_factory=list)
    resumed: list[tuple[SourceFile, LinkedSegment]] = field(default_factory=list)
    changed: list[LinkedSegment] = field(default_factory=list)
    gone: list[tuple[str, int]] = field(default_factory=list)
    retired: list[OldOffsets] = field(default_factory=list)
    ended: list[tuple[OldOffsets, tuple[int, int]]] = field(default_factory=list)
    known: int = 0
    copies: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    packed: list[tuple[SourceFile, list[LinkedSegment]]] = field(default_factory=list)
    otherwise: list[str] = field(default_factory=list)
    is_first_part: bool = False


class KnownFiles:
    """The known files of a log, and the end of all offsets that were ever reserved."""

    def __init__(self, store: str) -> None:
        self.store = store
        self.end = 0
        self.unread: dict[str, LinkedSegment] = {}
        """The segments of files of which no row could be read, by URI."""
        self._position = 0
        # the places of segments of files with columns that have other content now
        self._replaced_tables: list[tuple[str, int]] = []
        # the places of segments of texts that were read anew, by their first offsets
        self._superseded: dict[int, tuple[str, int]] = {}
        # those at a URI, and those whose text no file has any more
        self._by_uri: dict[str, KnownFile] = {}
        self._lost: list[KnownFile] = []
        # the offsets that wait for the end of a new reading, by the first offset of its segment
        self._waiting: dict[int, list[OldOffsets]] = {}
        # copies with their originals, by URI, size and stamp, so that a follower compares them once
        self._copies = set[tuple[str, int, str, str, int, str]]()

    def at(self, uri: str) -> KnownFile | None:
        """Return the known file at a URI."""
        return self._by_uri.get(uri)

    def is_as_it_was(self, listed: SourceFile) -> bool:
        """Return whether a file has the hints of the known one at its URI."""
        unread, known = self.unread.get(listed.uri), self._by_uri.get(listed.uri)
        has_hints = unread is not None and listed.is_same(unread.size_bytes, unread.etag)
        return has_hints or (known is not None and known.has_hints(listed))

    @property
    def files(self) -> list[KnownFile]:
        """The known files."""
        return [*self._by_uri.values(), *self._lost]

    @property
    def unfinished(self) -> list[LinkedSegment]:
        """The segments that no run has finished, by their first offset."""
        segments = [segment for known in self.files for segment in known.unfinished]
        return sorted(segments, key=lambda segment: segment.start)

    def learn(self, segments: Segments, position: int) -> None:
        """Take the segments of the log in place of all known ones. `position`: all rows before it are durable.

        Raises as `Segments`.
        """
        self._by_uri, self._lost, self.unread, self._position, self._replaced_tables = {}, [], {}, position, []
        self._superseded = {}
        replaced = segments.state.expired.replaced.stores.get(self.store, ReplacedRanges())
        self._waiting = {
            start: [OldOffsets(begin, end, None) for begin, end in reading.old]
            for reading in replaced.readings
            for start, _ in reading.new
        }
        for segment in segments.of_log(self.store):
            if isinstance(segment, LinkedSegment):
                self.add(segment)
        self.end = max(self.end, position, offsets_end(segments, self.store))

    def add(self, segment: LinkedSegment) -> None:
        """Add a segment behind all others: the next one of its file, the first one of a file, or of another text."""
        self.end = max(self.end, segment.end)
        if segment.is_unread:
            self.unread[segment.uri] = segment
            return
        if segment.etag == LOST:
            known = next((lost for lost in reversed(self._lost) if lost.uri == segment.uri), None)
        else:
            known = self._by_uri.get(segment.uri)
        if segment.position == 0:
            if known is not None and known.is_table and segment.etag != LOST:
                # its rows were replaced, so it must not be found again
                self._replaced_tables += [other.place for other in known.segments]
            elif known is not None and segment.etag != LOST:
                self._superseded |= {other.start: other.place for other in known.segments}
            known = KnownFile([], self._position)
            if segment.etag == LOST:
                self._lost.append(known)
            else:
                self._by_uri[segment.uri] = known
        if known is not None:
            # the text was read anew from the position on
            before = [other for other in known.segments if other.position < segment.position]
            self._superseded |= {other.start: other.place for other in known.segments[len(before) :]}
            known.set_segments([*before, segment])
        # otherwise it was replaced, and the file has moved since then

    def finish(self, before: LinkedSegment, after: LinkedSegment | None) -> None:
        """Put a finished segment, all of whose rows were put, in the place of one. None: it has no row. Idempotent."""
        if after is not None and after.is_unread:
            self.unread[after.uri], after = after, None
        if (known := self._by_uri.get(before.uri)) is None:
            return
        known.durable = max(known.durable, before.end)
        known.set_segments([segment for other in known.segments if (segment := after if other == before else other)])
        if not known.segments:
            del self._by_uri[before.uri]

    def waiting(self, segment: LinkedSegment) -> tuple[OldOffsets, ...]:
        """Return the offsets that wait for the rows of a segment that an earlier run has begun."""
        return tuple(self._waiting.get(segment.start, ()))

    def lines_before(self, segment: LinkedSegment) -> int | None:
        """Return the number of lines of a file before a segment; None: not known."""
        known = self._by_uri.get(segment.uri)
        for before in () if known is None else known.segments:
            if before.position + before.length == segment.position and before.lines is not None:
                return before.lines[0] + sum(before.lines[1])
        return None

    def offsets_before(self, segment: LinkedSegment) -> list[tuple[int, int]]:
        """Return the offsets of the rows of a file before a segment."""
        known = self._by_uri.get(segment.uri)
        return [each for each in known.offsets() if each[0] < segment.start] if known is not None else []

    def offsets_without_file(self) -> Iterator[tuple[int, int]]:
        """Yield the offsets of rows that no file has any more, because files were read again."""
        reached = 0
        for start, end in sorted(each for known in self.files for each in known.offsets()):
            if reached < start:
                yield reached, start
            reached = max(reached, end)

    def reserved(self, unread: UnreadFile, mapping: RowMapping) -> tuple[RowFile, LinkedSegment] | Torn | None:
        """Return the rows of a file, and an open segment at the end of the log for those that are unread.

        Returns None if the file has no byte there, and `TORN` if it has only a line that may still be written. Raises
        `CorruptFile`, and `InvalidArgument` for a file of another form.
        """
        published_ms, listed, position = SystemClock().now_ms(), unread.listed, unread.position
        head = first = listed.head()
        if is_growing_text(head):
            first = listed.part(position, HEAD_BYTES) if position else head
            if _is_torn(listed, first, position):
                return TORN
        # a small file is read once, by its head
        file = HeldFile(listed.file, head) if len(head) == listed.size_bytes else listed.file
        rows = open_rows(file, listed.size_bytes, head, mapping.dialect)
        if (length := rows.length_bound(position)) <= 0:
            return None
        # what a later run compares if this one is killed
        blocks: tuple[int, tuple[int, ...]] | None = None
        if rows.format in TABLES:
            blocks = first_digest(listed.file, listed.size_bytes)
        elif isinstance(rows, TextFile) and (rows.compression is None or not position):
            text = first if rows.compression is None else first_text(listed.file, head, rows.compression)
            blocks = (len(text), (crc32(text),)) if text else None
        of_file = listed.uri, self.store, self.end, length, rows.format, listed.size_bytes, listed.stamp
        of_rows: dict[str, Any] = {"topic_field": mapping.topic, "time_rule": mapping.time_rule(is_whole=False)}
        segment = LinkedSegment(*of_file, published_ms, position, blocks=blocks, is_open=True, **of_rows)
        self.add(segment)
        return rows, segment

    def of_unknown_form(self, listed: SourceFile, topic_field: str | None) -> LinkedSegment:
        """Return an open segment, of one offset at the end of the log, of a file that is of no form that is read."""
        of_file = listed.uri, self.store, self.end, 1, UNKNOWN_FORM, listed.size_bytes, listed.stamp
        segment = LinkedSegment(*of_file, SystemClock().now_ms(), is_open=True, topic_field=topic_field)
        self.end = segment.end
        return segment

    def reserved_further(self, segment: LinkedSegment, position: int, length: int) -> LinkedSegment:
        """Return an open segment at the end of the log, for the rows of a file behind its other segments."""
        of_text: dict[str, Any] = dict.fromkeys(_OF_TEXT)
        further = structs.replace(segment, start=self.end, position=position, length=length, is_open=True, **of_text)
        self.add(further)
        return further

    def plan(
        self,
        files: Sequence[SourceFile],
        opened: Opened,
        wanted: RowRule,
        is_tried: Callable[[LinkedSegment], bool] = lambda _: True,
    ) -> Plan:
        """Decide what each listed file is, and what a run has to do.

        It reads files whose hints are other ones than those of the known file. `wanted` says how rows are to be read:
        a listed file whose rows were read otherwise is read anew. `is_tried` says whether a damaged file
        need not be read again as long as it has the hints of its segment. Raises the storage's errors.
        """
        new, gone = list[SourceFile](), list[tuple[str, int]]()
        for listed in files:
            unread, known = self.unread.get(listed.uri), self._by_uri.get(listed.uri)
            if unread is not None:
                if listed.is_same(unread.size_bytes, unread.etag) and is_tried(unread):
                    continue
                gone.append(self.unread.pop(listed.uri).place)
            elif known is not None and known.last.damage is not None and known.has_hints(listed):
                is_tried(known.last)
            new.append(listed)
        plan = _Decision(self, new, opened, wanted).plan()
        plan.known += len(files) - len(new)
        plan.gone += gone + self._replaced_tables
        self._replaced_tables = []
        return plan


class _Decision:
    """One decision about all listed files. It changes the known files as the plan says."""

    def __init__(self, known_files: KnownFiles, files: Sequence[SourceFile], opened: Opened, wanted: RowRule) -> None:
        self._files, self._by_uri, self._lost = known_files.files, known_files._by_uri, known_files._lost
        self._waiting, self._compared = known_files._waiting, known_files._copies
        self._superseded = known_files._superseded
        self._opened, self._wanted, self._plan = opened, wanted, Plan()
        places = dict[str, SourceFile]()
        for listed in files:
            # of the names of one file, the known one counts
            other = places.setdefault(listed.place, listed)
            if other.uri not in self._by_uri and listed.uri in self._by_uri:
                places[listed.place] = listed
        self._plan.known = len(files) - len(places)
        self._listed = {listed.uri: listed for listed in places.values()}
        """The listed files by URI, each as it is now."""
        # other sources may be listed than those of a run that was interrupted
        self._unlisted = set[str]()
        for uri in [known.uri for known in self._by_uri.values() if known.unfinished]:
            there = self._there(uri) if uri not in self._listed else None
            if there is not None and there.place not in places:
                self._listed[uri] = there
                self._unlisted.add(uri)
        self._known = dict[str, KnownFile]()
        """The known file that each of them is."""
        self._verdicts = dict[str, Verdict]()
        """What each of these is by its content. Missing: it has the hints of the known file."""
        self._claimed = set[KnownFile]()
        self._compared_now = dict[tuple[str, int, str, KnownFile], Verdict]()
        by_inode = {known.inode: known for known in self._files if known.inode is not None}
        self._ways: tuple[Callable[[SourceFile], KnownFile | None], ...] = (
            lambda listed: by_inode.get(listed.place),
            lambda listed: self._by_uri.get(listed.uri),
        )

    def plan(self) -> Plan:
        """Return what to do."""
        new = [*self._listed.values()]
        for known_of in reversed(self._ways):
            new = [listed for listed in new if not self._has_hints(listed, known_of(listed))]
        new = [now for listed in new if (now := self._refreshed(listed)) is not None]
        self._match(new)
        self._drop_copies()
        for listed in self._listed.values():
            self._decide(listed)
        for uri in self._plan.copies:
            if (before := self._by_uri.get(uri)) is not None and before not in self._claimed:
                self._plan.retired += self._replace(before)
        for known in self._files:
            if known not in self._claimed and known.unfinished:
                self._plan.lost.append(known.uri)
                self._plan.ended += self._end(known)
            if known.segments and known.uri not in self._listed and known.is_read_otherwise(self._wanted):
                self._plan.otherwise.append(known.uri)
        known_files = [known for known in [*self._by_uri.values(), *self._claimed] if known.segments]
        self._lost[:] = [known for known in self._lost if known not in self._claimed]
        self._by_uri.clear()
        self._by_uri.update((known.uri, known) for known in known_files if not known.is_lost)
        return self._plan

    # Which known file a listed one is

    def _claim(self, listed: SourceFile, known: KnownFile, verdict: Verdict | None = None) -> None:
        self._known[listed.uri] = known
        self._claimed.add(known)
        if verdict is not None:
            self._verdicts[listed.uri] = verdict

    def _has_hints(self, listed: SourceFile, known: KnownFile | None) -> bool:
        """Claim a known file whose hints a listed one has."""
        if (
            known is None
            or known in self._claimed
            or not known.has_hints(listed)
            or self._has_other_fields(listed, known)
        ):
            return False
        self._claim(listed, known)
        return True

    def _refreshed(self, listed: SourceFile) -> SourceFile | None:
        """Return a file that seems to be written to as it is now, because a list may be old; None: it is gone."""
        known_ones = [known_of(listed) for known_of in self._ways]
        free = [known for known in known_ones if known is not None and known not in self._claimed]
        if not free:
            return listed
        may_have_grown = isinstance(listed.file, StoredFile) and listed.size_bytes > free[0].last.size_bytes
        if may_have_grown and not isinstance(self._verdict(listed, free[0]), Other):
            return listed
        if (now := self._there(listed.uri, listed)) is None:
            del self._listed[listed.uri]
            return None
        self._listed[now.uri] = now
        for known in free:
            if self._has_hints(now, known):
                break
        return now

    def _there(self, uri: str, listed: SourceFile | None = None) -> SourceFile | None:
        """Return the file at a URI as it is now; None: there is none, it is empty, or it can't be opened."""
        with contextlib.suppress(InvalidArgument, ObjectNotFound, ConfigError, StorageError):
            now = self._opened(uri) if listed is None else as_it_is(listed.file)
            return now if now.size_bytes else None
        return None

    def _has_other_fields(self, listed: SourceFile, known: KnownFile) -> bool:
        """Return whether the folders give the rows of a file other keys, times or topics than those of a known one."""
        before, now = (self._wanted.fields_of_folders(partition_of(uri)) for uri in (known.uri, listed.uri))
        return before != now

    def _verdict(self, listed: SourceFile, known: KnownFile) -> Verdict:
        compared = listed.uri, listed.size_bytes, listed.stamp, known
        if compared not in self._compared_now:
            # the reading of the file says why it can't be read
            self._compared_now[compared] = Other()
            if not self._has_other_fields(listed, known):
                with contextlib.suppress(InvalidArgument, ObjectNotFound, CorruptFile):
                    self._compared_now[compared] = what_is(listed, known)
        return self._compared_now[compared]

    def _match(self, files: Sequence[SourceFile]) -> None:
        """Claim known files for new ones that have all of their rows, and then for those that have the first ones.

        So a log that begins as the one before is not taken for that one while another file has all of it.
        """
        # a new file may have the inode of one that is gone: of two edited texts, the one at the known name counts
        for has_them, ways in ((_has_all_rows, self._ways), (_has_first_rows, self._ways[::-1])):
            matches = list[tuple[int, SourceFile, KnownFile, Verdict]]()
            for known_of in ways:
                for listed in files:
                    known = known_of(listed)
                    if listed.uri in self._known or known is None or known in self._claimed or self._is_unread(known):
                        continue
                    is_moved = _group(known.uri) != _group(listed.uri)
                    if has_them(verdict := self._verdict(listed, known)) and not (is_moved and self._is_copy(listed)):
                        position = verdict.position if isinstance(verdict, Cut) and not verdict.is_known else 0
                        matches.append((position, listed, known, verdict))
            for _, listed, known, verdict in sorted(matches, key=lambda each: -each[0]):
                if listed.uri not in self._known and known not in self._claimed:
                    self._claim(listed, known, verdict)
            self._find_moved([listed for listed in files if listed.uri not in self._known], has_them)

    def _find_moved(self, files: Sequence[SourceFile], has_them: Callable[[Verdict], bool]) -> None:
        """Claim known files that are not at their places any more for new ones that have their rows."""
        free = [known for known in self._files if known not in self._claimed and known.end] if files else []
        by_size: dict[int, list[KnownFile]] = {}
        by_name: dict[str, list[KnownFile]] = {}
        for known in free:
            by_size.setdefault(known.last.size_bytes, []).append(known)
            by_name.setdefault(first_name(known.uri), []).append(known)
        has_gone = dict[KnownFile, bool]()
        for listed in files if free else ():
            folder = _folder(listed.uri)
            named = sorted(by_name.get(first_name(listed.uri), ()), key=lambda known: _folder(known.uri) != folder)
            alike = dict.fromkeys([*named, *by_size.get(listed.size_bytes, ())])
            # a text may begin with several known ones
            for known in sorted(alike, key=lambda known: -known.end):
                verdict = Other() if known in self._claimed else self._verdict(listed, known)
                if not has_them(verdict) or (isinstance(verdict, Cut) and not verdict.is_known):
                    continue
                if known not in has_gone:
                    has_gone[known] = not self._is_there(known, has_them)
                if has_gone[known] and not self._is_copy(listed) and not self._is_backup(listed, known):
                    self._claim(listed, known, verdict)
                    break

    def _is_unread(self, known: KnownFile) -> bool:
        """Return whether a run has only reserved offsets for a file. A file with other hints may then be a copy."""
        return known.end == 0 and all(
            segment.is_open and segment.damage is None and not self._waiting.get(segment.start)
            for segment in known.segments
        )

    def _is_copy(self, listed: SourceFile) -> bool:
        """Return whether a new file has only rows of a known one in its folder, from which suffixes tell it apart."""
        others = [uri for uri in self._related(listed.uri) if uri in self._known]
        unedited = (self._known[uri] for uri in others if not isinstance(self._verdicts.get(uri), Cut))
        return any(isinstance(self._verdict(listed, known), Same) for known in unedited)

    def _is_backup(self, listed: SourceFile, known: KnownFile) -> bool:
        """Return whether a new file with all rows of a known one was made before an edit of that, which goes on."""
        original = self._listed.get(backed_up(listed.uri) or "")
        if original is None or not isinstance(self._verdict(original, known), Cut):
            return False
        return _is_so(is_earlier, listed, original)

    def _related(self, uri: str) -> list[str]:
        """Return the other files in the folder of a file, from which suffixes of rotation or packing tell it apart."""
        return [other for other in self._groups[_group(uri)] if other != uri]

    @cached_property
    def _groups(self) -> dict[tuple[str, str], list[str]]:
        """The URIs of listed and known files by their folders and their names before all rotations."""
        groups: dict[tuple[str, str], list[str]] = {}
        for uri in sorted({*self._listed, *self._by_uri}):
            groups.setdefault(_group(uri), []).append(uri)
        return groups

    def _is_there(self, known: KnownFile, has_them: Callable[[Verdict], bool]) -> bool:
        """Return whether a file that is not claimed is at its place."""
        if known.is_lost or known.uri in self._listed:
            # it is another one
            return False
        now = self._there(known.uri)
        return now is not None and (known.has_hints(now) or has_them(self._verdict(now, known)))

    # Copies

    def _drop_copies(self) -> None:
        """Leave out the new files that are copies, or of which others are copies."""
        files, groups = dict(self._listed), dict[tuple[str, str], list[str]]()
        for uri in sorted(files.keys() - self._known.keys(), reverse=True):
            groups.setdefault(_group(uri), []).append(uri)
        for (folder, _), uris in groups.items():
            beginnings = _Beginnings(files)
            # a text that begins with another one is behind it, and of equal ones that with the first name is the last
            in_order = sorted(uris, key=beginnings.of) if len(uris) > 1 else uris
            for number, uri in enumerate(in_order):
                before = [folder + name for name in names_before(uri.removeprefix(folder))]
                known = self._known_alike(files[uri], beginnings, is_rotated=bool(before))
                for other in itertools.chain(before, known, beginnings.behind(in_order, number)):
                    if uri not in self._listed or uri in self._known:
                        break
                    self._compare(self._listed[uri], other)

    def _known_alike(self, listed: SourceFile, beginnings: _Beginnings, *, is_rotated: bool) -> Iterator[str]:
        """Yield the related known files that may have the text of a new one, or the begin of it."""
        for other in self._related(uri := listed.uri):
            known = self._known.get(other) or (None if other in self._listed else self._by_uri.get(other))
            if known is None or isinstance(self._verdicts.get(other), Cut):
                continue
            if known.is_table:
                may_have = known.last.size_bytes == listed.size_bytes
            elif not known.blocks:
                may_have = False
            elif (crc := beginnings.crc32(uri, known.blocks[0].length)) is not None:
                may_have = crc == known.blocks[0].crc32
            else:
                # a log that begins anew is short, too
                may_have = is_rotated and other in self._listed and beginnings.is_of(uri, other)
            if may_have:
                yield other

    def _compare(self, listed: SourceFile, original_uri: str) -> None:
        """Leave out a new file if it is a copy of the one at a URI, or this one if it is a copy of the new one."""
        if (original := self._original(listed, original_uri)) is None or listed.uri in self._known:
            return
        mark = listed.uri, listed.size_bytes, listed.stamp, original.uri, original.size_bytes, original.stamp
        known = self._known.get(original_uri)
        if known is None and (at_uri := self._by_uri.get(original_uri)) not in self._claimed:
            known = at_uri
        is_edited = isinstance(self._verdicts.get(original_uri), Cut)
        verdict = None if known is None or not known.end or is_edited else self._verdict(listed, known)
        is_copy = mark in self._compared or isinstance(verdict, Same) or _is_so(begins_with, original, listed)
        may_be_one = original_uri in self._listed and not is_edited and isinstance(verdict, Grown | None)
        if not is_copy and may_be_one and _is_so(begins_with, listed, original):
            if known is not None and verdict is not None:
                self._verdicts.pop(original_uri, None)
                self._claim(listed, known, verdict)
            self._drop(original_uri)
        elif is_copy or (backed_up(listed.uri) == original_uri and _is_so(is_earlier, listed, original)):
            self._compared.add(mark)
            self._drop(listed.uri)

    def _drop(self, uri: str) -> None:
        self._known.pop(uri, None)
        del self._listed[uri]
        self._plan.copies.append(uri)

    def _original(self, copy: SourceFile, uri: str) -> SourceFile | None:
        """Return the file at a URI, as it is now, if it may have a copy; None: there is none.

        If it has been truncated since it was listed, the copy has its known rows.
        """
        listed, known = self._listed.get(uri), self._known.get(uri)
        if listed is None:
            at_uri = self._by_uri.get(uri)
            is_there = at_uri is not None and at_uri not in self._claimed and self._is_there(at_uri, _has_all_rows)
            return self._there(uri) if is_there else None
        now = self._there(uri, listed)
        if now is not None and now.is_same(listed.size_bytes, listed.stamp):
            return now
        if known is not None:
            self._claimed.discard(known)
            del self._known[uri]
            self._verdicts.pop(uri, None)
        if now is None:
            del self._listed[uri]
        else:
            self._listed[uri] = now
        self._match([copy] if now is None or known is None else [now, copy])
        return now

    # What follows

    def _decide(self, listed: SourceFile) -> None:
        known, before = self._known.get(listed.uri), self._by_uri.get(listed.uri)
        old: list[OldOffsets] = []
        if before is not None and before is not known and before not in self._claimed:
            old = self._replace(before)
        if known is not None:
            self._plan.retired += old
            self._plan.gone += [segment.place for segment in before.segments] if old and before is not None else []
            is_read_anew = listed.uri not in self._unlisted and known.is_read_otherwise(self._wanted)
            if is_read_anew and not known.unfinished:
                self._read_anew(listed, known)
            else:
                # old rows wait for those of a reading that was interrupted: that one is finished first
                self._plan.is_first_part |= is_read_anew
                self._continue(listed, known, self._verdicts.get(listed.uri))
        elif listed.uri not in self._unlisted:
            self._plan.unread.append(UnreadFile(listed, 0, tuple(old)))

    def _replace(self, known: KnownFile) -> list[OldOffsets]:
        """End a known file whose place another one has. Return the offsets of rows that the other one replaces."""
        uri, old = known.uri, known.offsets_from(0) if known.is_table else []
        self._plan.ended += self._end(known)
        if known.segments:
            (self._plan.rewritten if known.is_table else self._plan.lost).append(uri)
        if known.segments and not known.is_table:
            self._state(known, [structs.replace(segment, etag=LOST) for segment in known.segments])
            self._lost.append(known)
        return old

    def _continue(self, listed: SourceFile, known: KnownFile, verdict: Verdict | None) -> None:
        """Note what is to be read of a file that is a known one."""
        if verdict is None:
            if known.uri != listed.uri:
                self._state(known, [structs.replace(segment, uri=listed.uri) for segment in known.segments])
            self._resume(listed, known)
            self._plan.known += not known.unfinished
            return
        old, position = list[OldOffsets](), known.end
        goes_on = not isinstance(verdict, Same)
        if isinstance(verdict, Cut):
            position = min(verdict.position, known.durable_end)
            old = known.offsets_from(position)
            self._plan.rewritten += [listed.uri] if old else []
        ended = self._end(known, Content(listed), position, with_closed=isinstance(verdict, Cut), goes_on=goes_on)
        if goes_on:
            old += [waiting for waiting, _ in ended]
        else:
            self._plan.ended += ended
        if known.segments:
            self._renew(listed, known, is_whole=isinstance(verdict, Same))
            if isinstance(verdict, Same) and known.last.damage is not None and not verdict.is_damaged:
                # what was lacking has come, and it is no row
                self._state(known, [*known.segments[:-1], structs.replace(known.last, damage=None)])
            self._resume(listed, known)
        if isinstance(verdict, Same):
            self._plan.known += not known.unfinished
        else:
            self._plan.unread.append(UnreadFile(listed, position, tuple(old), is_rest=bool(ended)))

    def _read_anew(self, listed: SourceFile, known: KnownFile) -> None:
        """Note that all rows of a file, which is a known one, are to be read in place of the known ones."""
        old = tuple(known.offsets_from(0))
        if listed.uri in self._verdicts:
            self._renew(listed, known, is_whole=False)
        elif known.uri != listed.uri:
            self._state(known, [structs.replace(segment, uri=listed.uri) for segment in known.segments])
        self._plan.unread.append(UnreadFile(listed, 0, old, is_reread=True))

    def _resume(self, listed: SourceFile, known: KnownFile) -> None:
        """Note the segments whose rows are not all put. Their text is known, or the file has not been written to."""
        self._plan.resumed += [(listed, segment) for segment in known.unfinished]

    def _renew(self, listed: SourceFile, known: KnownFile, *, is_whole: bool) -> None:
        """Put the name and the hints of a file into the segments of a known one, whose rows it has.

        Unless it `is_whole`, the hints are none that the file can have: it has rows that no run has read.
        """
        content = Content(listed)
        last, stamp = known.last, listed.stamp if is_whole else unread_stamp(listed.uri, listed.place)
        formats = [content.packed_format(segment.format) for segment in known.segments]
        # no object may be read behind its end
        is_shorter = any(segment.size_bytes > listed.size_bytes for segment in known.segments)
        is_other = known.is_lost or last.uri != listed.uri or formats[-1] != last.format or is_shorter
        if is_other or content.compression is not None:
            now = {"uri": listed.uri, "size_bytes": listed.size_bytes, "etag": stamp}
            pairs = zip(known.segments, formats, strict=True)
            self._state(known, [structs.replace(segment, format=form, **now) for segment, form in pairs])
            if "+" in formats[-1] and "+" not in last.format:
                self._plan.packed.append((listed, known.segments))
        elif is_whole:
            renewed = structs.replace(last, size_bytes=listed.size_bytes, etag=stamp)
            self._state(known, [*known.segments[:-1], renewed])

    def _end(
        self,
        known: KnownFile,
        content: Content | None = None,
        position: int = 0,
        *,
        with_closed: bool = True,
        goes_on: bool = False,
    ) -> list[tuple[OldOffsets, tuple[int, int]]]:
        """End the unfinished segments of a file before their first row that is not durable.

        `content` has the known rows before `position`. Return the offsets that wait for the segments, with those of
        the durable rows. If the file `goes_on`, a further reading has the rest of their rows.
        """
        segments, ended = list[LinkedSegment](), list[tuple[OldOffsets, tuple[int, int]]]()
        for segment in known.segments:
            if segment not in known.unfinished or not (segment.is_open or with_closed):
                segments.append(segment)
                continue
            length = max(0, min(segment.length, known.durable - segment.start))
            waiting = self._waiting.get(segment.start, [])
            ended += [(old, (segment.start, segment.start + length)) for old in waiting]
            if not length:
                self._plan.gone.append(segment.place)
                if waiting and not known.is_table and not goes_on:
                    # the rows that it was to replace are retired, and must not count again
                    segments = [_cut(before, segment.position, known.inode or "") for before in segments]
                    self._plan.gone += [
                        self._superseded.pop(start)
                        for start in [*self._superseded]
                        if any(old.start <= start < old.end for old in waiting)
                    ]
                continue
            of_text: dict[str, Any] = {"rows": None, "times": None, "lines": None}
            if not known.is_table and content is not None and segment.position < position:
                length = min(length, position - segment.position)
                of_text |= content.facts_of(segment.position, length)
            elif not known.is_table and (segment.blocks is None or segment.blocks[0] != length):
                of_text["blocks"] = None
            stamp = unread_stamp(segment.uri, known.inode or "")
            segments.append(structs.replace(segment, length=length, is_open=False, etag=stamp, **of_text))
        self._state(known, segments)
        return ended

    def _state(self, known: KnownFile, segments: Sequence[LinkedSegment]) -> None:
        """Give a known file other segments, which the log must state."""
        before = {segment.start: segment for segment in known.segments}
        changed = [segment for segment in segments if before[segment.start] != segment]
        places = {segment.place for segment in changed}
        self._plan.changed = [other for other in self._plan.changed if other.place not in places] + changed
        known.set_segments(segments)


def _has_all_rows(verdict: Verdict) -> bool:
    """Return whether a file has all known rows, as far as they are known."""
    if isinstance(verdict, Same):
        return not verdict.is_part
    return isinstance(verdict, Grown) or (isinstance(verdict, Cut) and verdict.is_known)


def _has_first_rows(verdict: Verdict) -> bool:
    return not isinstance(verdict, Other)


class _Beginnings:
    """The first bytes of the texts of listed files, in memory."""

    _BYTES = 1 << 10

    def __init__(self, files: Mapping[str, SourceFile]) -> None:
        self._files = files
        self._texts = dict[str, bytes]()
        self._sums = dict[tuple[str, int], int | None]()

    def of(self, uri: str) -> bytes:
        """Return the first bytes of a text, all if it is shorter; none if it can't be read."""
        if uri not in self._texts:
            self._texts[uri] = self._read(uri, self._BYTES)
        return self._texts[uri]

    def is_of(self, uri: str, other: str) -> bool:
        """Return whether one text may begin with another one."""
        return bool(self.of(uri)) and self.of(other).startswith(self.of(uri))

    def crc32(self, uri: str, length: int) -> int | None:
        """Return the CRC32 of the first bytes of a text; None: it has fewer."""
        if (uri, length) not in self._sums:
            data = self._read(uri, length)
            self._sums[uri, length] = crc32(data) if len(data) == length else None
        return self._sums[uri, length]

    def behind(self, in_order: Sequence[str], number: int) -> Iterator[str]:
        """Yield the texts of some in their order that may begin with one of them."""
        uri = in_order[number]
        for other in itertools.islice(in_order, number + 1, None):
            if not self.is_of(uri, other):
                break
            of_both = [self.crc32(each, HEAD_BYTES) for each in (uri, other)]
            if None in of_both or of_both[0] == of_both[1]:
                yield other

    def _read(self, uri: str, size: int) -> bytes:
        with contextlib.suppress(InvalidArgument, ObjectNotFound, CorruptFile):
            return Content(self._files[uri]).first_bytes(size)
        return b""


def _is_so(question: Callable[[SourceFile, SourceFile], bool], file: SourceFile, other: SourceFile) -> bool:
    with contextlib.suppress(InvalidArgument, ObjectNotFound, CorruptFile):
        return question(file, other)
    return False


def _cut(segment: LinkedSegment, position: int, inode: str) -> LinkedSegment:
    """Return a segment of a text without the rows from a position on, which is behind its begin."""
    if (length := position - segment.position) >= segment.length:
        return segment
    (size_bytes, sums), of_text = segment.blocks or (1, ()), dict[str, Any].fromkeys(_OF_TEXT)
    if whole := sums[: length // size_bytes]:
        lines = None if segment.lines is None else (segment.lines[0], segment.lines[1][: len(whole)])
        of_text |= {"blocks": (size_bytes, whole), "lines": lines}
    return structs.replace(segment, length=length, etag=unread_stamp(segment.uri, inode), **of_text)


def _folder(uri: str) -> str:
    return uri[: uri.rfind("/") + 1]


def _group(uri: str) -> tuple[str, str]:
    return _folder(uri), first_name(uri)


def unread_stamp(uri: str, place: str) -> str:
    """Return the stamp in a segment of a file that has rows behind it, which no run has read. No file has it."""
    return f"{place}-0" if uri.startswith("file:") else "-"


def offsets_end(segments: Segments, store: str) -> int:
    """Return the end of all offsets of a log that a record has named. Those of a lost catalog are never used again."""
    given_up = [lost.end for lost in segments.state.given_up.get(store, ())]
    listed = [log.end for _, log in segments.state.listed_logs.get(store, ())]
    archived = (segments.end(rows_store(store)), segments.end(points_store(store)))
    # the new offsets of a reading that was interrupted before its first row
    replaced = segments.state.expired.replaced.end(store)
    positions = segments.state.positions
    # a segment may have become shorter since a run reserved it, and added keys for rows before its end
    return max([*archived, *given_up, *listed, replaced, named_end(positions, store), positions.get(store, 0)])


def _is_torn(listed: SourceFile, first: bytes, position: int) -> bool:
    """Return whether a text behind a position is a line that may still be written. `first` are its first bytes."""
    part = first
    while position < listed.size_bytes and part:
        if b"\n" in part or has_returns_alone(part):
            return False
        if position + len(part) == listed.size_bytes and part.rstrip().endswith(b"}"):
            # perhaps a whole object
            return False
        position += len(part)
        part = listed.part(position, BLOCK_BYTES)
    return True


def may_grow(segment_format: str) -> bool:
    """Return whether lines may be appended to the file of a segment."""
    return segment_format.partition(":")[0] in ("ndjson", "csv") and "+" not in segment_format
