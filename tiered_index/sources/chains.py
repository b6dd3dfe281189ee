"""The files of one log, by the segments that the index has: what is new in a file, and its offsets.

One thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from tiered_index.clock import SystemClock
from tiered_index.errors import InvalidArgument, ObjectNotFound
from tiered_index.format.names import points_store, rows_store
from tiered_index.format.segment import LinkedSegment
from tiered_index.kernels import crc32
from tiered_index.service.read.segments import Segments
from tiered_index.sources.listing import HEAD_BYTES, SourceFile, as_it_is
from tiered_index.sources.places import HeldFile
from tiered_index.sources.rows.batch import RowFile
from tiered_index.sources.rows.forms import is_growing_text, open_rows
from tiered_index.sources.rows.mapping import Dialect
from tiered_index.sources.rows.text import BLOCK_BYTES


class FileChains:
    """The segments of a log by the files that have their text, and the end of all offsets that were ever reserved.

    - `by_place` has the segments of the text that each file has, by its place, in order of their positions.
    - `lost` has those of a text whose file has another one since: a copy of it may appear.
    """

    def __init__(self, store: str) -> None:
        self.store = store
        self.by_place: dict[str, list[LinkedSegment]] = {}
        self.lost: list[list[LinkedSegment]] = []
        self.end = 0

    def learn(self, segments: Segments, position: int) -> list[LinkedSegment]:
        """Take the segments of the log in place of all known ones, and return those that are not whole.

        They are open, or end behind `position`, before which all rows are durable. Raises as `Segments`.
        """
        self.by_place, self.lost, pending = {}, [], list[LinkedSegment]()
        for segment in segments.of_log(self.store):
            if isinstance(segment, LinkedSegment):
                self.note(segment)
                if segment.is_open or segment.end > position:
                    pending.append(segment)
        self.end = max(self.end, position, offsets_end(segments, self.store))
        return pending

    def note(self, segment: LinkedSegment) -> None:
        """Add a segment, or replace the one of its place."""
        is_local = segment.uri.startswith("file:")
        place = segment.etag.rsplit("-", 2)[0] if is_local else segment.uri
        chain = self.by_place.setdefault(place, [])
        for number, known in enumerate(chain):
            if known.start == segment.start:
                chain[number] = segment
                break
        else:
            if chain and segment.position != end_of(chain):
                self.lost.append(chain)
                chain = self.by_place[place] = []
            chain.append(segment)
        self.end = max(self.end, segment.end)

    def forget(self, segment: LinkedSegment) -> None:
        """Remove a segment without a row."""
        self.by_place = {
            place: left
            for place, chain in self.by_place.items()
            if (left := [other for other in chain if other.start != segment.start] if segment in chain else chain)
        }

    def drop(self, chain: list[LinkedSegment]) -> None:
        """Remove the segments of a text, which another file has now."""
        self.by_place = {place: other for place, other in self.by_place.items() if other is not chain}

    def new_from(self, listed: SourceFile, chain: list[LinkedSegment]) -> int | None:
        """Return the position from which on a known file is new: behind its segments, if it has only grown.

        None: it has another text, which is new as a whole. The segments of the text before are lost.
        """
        if has_text(listed, chain, listed.head()):
            return end_of(chain)
        del self.by_place[listed.place]
        self.lost.append(chain)
        return None

    def lines_before(self, listed: SourceFile, segment: LinkedSegment) -> int | None:
        """Return the number of lines in the segments of a file before one; None: not known."""
        for before in self.by_place.get(listed.place, ()):
            if before.position + before.length == segment.position and before.lines is not None:
                return before.lines[0] + sum(before.lines[1])
        return None

    def reserved(
        self, listed: SourceFile, head: bytes, position: int, dialect: Dialect | None, topic_field: str | None
    ) -> tuple[RowFile, LinkedSegment] | None:
        """Return the rows of a file, and an open segment at the end of the log for those behind `position`.

        `head` are its first bytes, `dialect` is for CSV, and `topic_field` is the path of the topic of a row, None if
        all have one topic. Returns None if the file has no byte there. Raises `CorruptFile`, and `InvalidArgument` for
        a file of another form.
        """
        published_ms = SystemClock().now_ms()
        # a small file is read once, by its head
        file = HeldFile(listed.file, head) if len(head) == listed.size_bytes else listed.file
        rows = open_rows(file, listed.size_bytes, head, dialect)
        if (length := rows.length_bound(position)) <= 0:
            return None
        of_file = listed.uri, self.store, self.end, length, rows.format, listed.size_bytes, listed.etag(head)
        segment = LinkedSegment(*of_file, published_ms, position, is_open=True, topic_field=topic_field)
        self.end = segment.end
        return rows, segment


def offsets_end(segments: Segments, store: str) -> int:
    """Return the end of all offsets of a log that a record has named. Those of a lost catalog are never used again."""
    given_up = [lost.end for lost in segments.state.given_up.get(store, ())]
    listed = [log.end for _, log in segments.state.listed_logs.get(store, ())]
    archived = (segments.end(rows_store(store)), segments.end(points_store(store)))
    return max([*archived, *given_up, *listed, segments.state.positions.get(store, 0)])


def is_torn(listed: SourceFile, head: bytes, position: int) -> bool:
    """Return whether the text of a file behind a position is a line that may still be written."""
    if not is_growing_text(head):
        return False
    while position < listed.size_bytes:
        # a small file is whole in its head
        part = head[position:] if len(head) == listed.size_bytes else listed.part(position, BLOCK_BYTES)
        if not part:
            break
        if b"\n" in part:
            return False
        if position + len(part) == listed.size_bytes and part.rstrip().endswith(b"}"):
            # perhaps a whole object
            return False
        position += len(part)
    return True


def may_grow(segment: LinkedSegment) -> bool:
    """Return whether lines may be appended to the file of a segment."""
    return segment.format.partition(":")[0] in ("ndjson", "csv") and "+" not in segment.format


def end_of(chain: Sequence[LinkedSegment]) -> int:
    """Return the position of a file behind its segments."""
    return chain[-1].position + chain[-1].length


def of_file(segment: LinkedSegment, listed: SourceFile) -> LinkedSegment:
    """Return a segment as one of another file, which has its text. What the file has beside it stays new."""
    return structs.replace(segment, uri=listed.uri, etag=listed.etag(listed.head()[: segment.size_bytes]))


def has_grown(listed: SourceFile, segment: LinkedSegment, head: bytes) -> bool:
    """Return whether a file is the text of a segment, perhaps with more behind it, by its size and first bytes."""
    if not may_grow(segment) or listed.size_bytes < segment.size_bytes:
        return False
    known = head[: min(HEAD_BYTES, segment.size_bytes)]
    return f"{crc32(known):08x}" == segment.etag.rpartition("-")[2]


def has_text(listed: SourceFile, chain: Sequence[LinkedSegment], head: bytes) -> bool:
    """Return whether a file has the text of segments, perhaps with more behind it, by its first and last bytes."""
    if not has_grown(listed, chain[-1], head) or listed.size_bytes < end_of(chain):
        return False
    # the last segment may not be whole yet
    last = next((segment for segment in reversed(chain) if segment.blocks is not None), None)
    if last is None or last.blocks is None:
        return True
    size_bytes, sums = last.blocks
    begin = (len(sums) - 1) * size_bytes
    return crc32(listed.part(last.position + begin, last.length - begin)) == sums[-1]


def has_changed(listed: SourceFile, segment: LinkedSegment) -> bool:
    """Return whether a file was written to since it was listed, other than to append to a text."""
    try:
        now = as_it_is(listed.file)
        if now.is_same(listed.size_bytes, f"{listed.stamp}-"):
            return False
        return now.place != listed.place or not has_grown(now, segment, now.head())
    except (InvalidArgument, ObjectNotFound):
        # it is gone, which its rows say
        return False
