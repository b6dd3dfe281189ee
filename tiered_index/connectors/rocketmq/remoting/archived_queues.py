"""Reads a broker's queues by the queue offsets of its archived segments (`ingest --archive-queues`).

Also the queues of a store with older messages from the archive. A segment without queue offsets, or a gap between
segments, may have messages of any queue: offsets that depend on it raise `UnknownOffsets`. An offset that is missing
between two known runs has no message. If a queue begins again at 0 in the log, its topic was deleted and created again,
and the queue begins there. Expired and erased messages are never returned, even if their bytes still exist.

Segments and their directories are read one after the other, once for each topic of a request. Memory: the runs of the
topic, 56 bytes each, and a bounded cache of directories.
"""

from __future__ import annotations

import contextlib
import itertools
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.threads import DaemonPool
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.log.message import Message
from tiered_index.connectors.rocketmq.log.store import ENTRY as QUEUE_ENTRY
from tiered_index.connectors.rocketmq.log.store import ConsumeQueue
from tiered_index.connectors.rocketmq.remoting.pulling import (
    NO_CODE,
    Ends,
    Queues,
    StoreQueues,
    UnknownOffsets,
    checked_message,
)
from tiered_index.errors import CorruptFile
from tiered_index.format.keys.hashing import lookup_numbers
from tiered_index.format.segments.queue_offsets import ENTRY, QueueDirectory, QueueRun, decode_entries
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.records import ArchivedSegment, LostRange
from tiered_index.service.read.caches.store import CachedKind
from tiered_index.service.read.segments.archive import SegmentArchive

Directories = CachedKind[tuple[str, str], QueueDirectory]
"""Directories of queue offsets, by the storage's URI and the object's name."""
# Directories that are fetched at once, and segments whose directories are in memory.
_THREADS, _SEGMENTS = 8, 64
# Most messages, and bytes, that are fetched at once: the memory of a pull in addition to its answer
_BATCH, _BATCH_BYTES = 32, 256 << 10


@dataclass(frozen=True, slots=True)
class SegmentOfQueues:
    """A segment of a log, archived or of the store: the offsets [start, end), and its queue offsets.

    `place` is its name among all segments of this process. `queues_bytes` are those of its queue offsets; 0: they are
    not known. `directory()` returns their directory, `queue_offsets(begin, length)` some of their bytes; both raise as
    `SegmentArchive.read`.
    """

    name: str
    start: int
    end: int
    place: tuple[str, str]
    queues_bytes: int
    directory: Callable[[], QueueDirectory]
    queue_offsets: Callable[[int, int], bytes]


@dataclass(frozen=True)
class SegmentsOfQueues:
    """The segments of one log. `all` returns them in the order of the log, `at` the one that begins at an offset.

    `lost` are ranges of the log whose segments only a lost catalog had.
    """

    all: Callable[[], Iterable[SegmentOfQueues]]
    at: Callable[[int], SegmentOfQueues]
    lost: Sequence[LostRange] = ()


def archived_segments(archive: SegmentArchive, store: str) -> SegmentsOfQueues:
    """Return the archived segments of a store, as of the present log state."""
    segments, uri = archive.segments(), archive.storage.uri

    def of_queues(segment: ArchivedSegment) -> SegmentOfQueues:
        return SegmentOfQueues(
            segment.name,
            segment.start,
            segment.end,
            (uri, segment.name),
            segment.queues_bytes,
            partial(archive.queue_directory, segment),
            partial(archive.queue_offsets, segment),
        )

    def at(start: int) -> SegmentOfQueues:
        segment = segments.at(store, start)
        assert segment is not None, "a run is of a segment of this state"
        return of_queues(segment)

    expired = segments.state.expired.segments.get(store, 0)
    lost = [given_up for given_up in segments.state.given_up.get(store, ()) if given_up.end > expired]
    return SegmentsOfQueues(lambda: map(of_queues, segments.of(store)), at, lost)


@dataclass(frozen=True, slots=True)
class ArchivedRun:
    """A run of a queue in the segment that begins at `start`.

    `after_unknown`: unknown messages of the queue may be between it and the previous run.
    """

    start: int
    run: QueueRun
    after_unknown: bool


class ArchivedRuns(Sequence[ArchivedRun]):
    """Runs of a queue, of 56 bytes each."""

    _NUMBERS = 7

    def __init__(self) -> None:
        self._rows = array("q")

    def append(self, start: int, run: QueueRun, after_unknown: bool) -> None:
        """Add a run of the segment that begins at `start`."""
        self._rows.extend((start, after_unknown, run.first, run.count, run.crc32, run.newest_ms, run.begin))

    def clear(self) -> None:
        """Remove all runs."""
        self._rows = array("q")

    def __len__(self) -> int:
        return len(self._rows) // self._NUMBERS

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return (self[at] for at in range(*number.indices(len(self))))
        at = range(len(self))[number] * self._NUMBERS
        start, after_unknown, *of_run = self._rows[at : at + self._NUMBERS]
        return ArchivedRun(start, QueueRun(0, *of_run), bool(after_unknown))


@dataclass(frozen=True, slots=True)
class _LogFacts:
    """The facts about all segments of a log.

    `lacking` says why messages may be unknown; empty: all are known. `end` is that of the last segment; None: there is
    none. `has_begin`: the first segment has the log's first offset.
    """

    lacking: str
    has_begin: bool
    end: int | None


@dataclass(eq=False)
class ArchivedQueue:
    """One queue with its runs by queue offset; `is_open`: unknown messages may follow the last run.

    `problem` says why its offsets are unusable; empty: they are usable.
    """

    topic: str
    queue_id: int
    runs: ArchivedRuns = field(default_factory=ArchivedRuns)
    is_open: bool = False
    problem: str = ""


class ArchivedQueues(Queues[ArchivedQueue]):
    """Reads the queues of one log from `segments`, by their queue offsets.

    `name` is the store's name in the archive, if it is known. `messages` reads their messages. `holds(offset)` returns
    whether a segment still has an offset. `expired` has the places that expired or were erased.
    """

    def __init__(
        self,
        segments: SegmentsOfQueues,
        messages: RocketmqMessages,
        expired: Expired,
        holds: Callable[[int], bool],
        directories: Directories,
        *,
        name: str | None = None,
    ) -> None:
        self.name = name
        self._segments, self._messages, self._expired, self._holds = segments, messages, expired, holds
        self._cache = directories
        # Caches for the request that this object serves
        self._facts: _LogFacts | None = None
        self._topics: dict[str, dict[int, ArchivedQueue]] = {}
        self._decoded: dict[tuple[int, int], npt.NDArray[np.void]] = {}

    @classmethod
    def of_archive(cls, archive: SegmentArchive, store: str, directories: Directories) -> ArchivedQueues:
        """Return the queues of the store called `store` in the archive of an index, as of the present log state."""
        return cls(
            archived_segments(archive, store),
            RocketmqMessages(None, archive, store_name=store),
            archive.state().expired,
            lambda offset: bool(archive.holding(offset, store)),
            directories,
            name=store,
        )

    @property
    def log_end(self) -> int | None:
        """The offset of the log behind its last segment here; None: there is none."""
        return self._log_facts().end

    def counts(self) -> dict[str, int]:
        """Return the least number of queues of each topic."""
        counts: dict[str, int] = {}
        for _, directory in self._directories():
            for topic, runs in directory.topics.items() if directory is not None else ():
                counts[topic] = max(counts.get(topic, 0), *(run.queue_id + 1 for run in runs))
        return counts

    def of_topic(self, topic: str, *, whole: bool = False) -> list[ArchivedQueue]:
        """Return the queues of a topic with a message in the archive. Raises also if none is known but may exist."""
        known = self._known(topic)
        if (whole and (why := self._lacking())) or (not known and (why := self._lacking() or self._gone())):
            raise self._unknown(f"which queues {topic} has", why)
        return [known[queue_id] for queue_id in sorted(known)]

    def find(self, topic: str, queue_id: int) -> ArchivedQueue | None:
        """Return a queue; None if it has no message. Raises also if it may have had one."""
        if (queue := self._known(topic).get(queue_id)) is not None:
            return queue
        if why := self._lacking() or self._gone():
            raise self._unknown(f"where queue {queue_id} of {topic} begins and ends", why)
        return None

    def ends(self, queue: ArchivedQueue) -> Ends:
        """Return the begin and end of a queue. Raises also if unknown messages may precede or follow the known ones."""
        if queue.problem:
            raise self._unknown(f"the offsets of queue {queue.queue_id} of {queue.topic}", queue.problem)
        first, last = queue.runs[0], queue.runs[-1]
        if queue.is_open or (first.after_unknown and first.run.first > 0):
            where = f"where queue {queue.queue_id} of {queue.topic} {'ends' if queue.is_open else 'begins'}"
            raise self._unknown(where, self._lacking())
        begin_s = self._begin_s(queue)
        for archived in queue.runs:
            if archived.run.newest_ms // 1000 >= begin_s:
                if begin_s <= 0:
                    return Ends(archived.run.first, last.run.end)
                is_recent = self._entries_of(archived)["store_ms"] // 1000 >= begin_s
                return Ends(archived.run.first + int(is_recent.argmax()), last.run.end)
        return Ends(last.run.end, last.run.end)

    def last_store_ms(self, queue: ArchivedQueue, ends: Ends) -> int:
        """Return the store timestamp of a queue's last message; 0 if it has none."""
        return 0 if ends.begin == ends.end else int(self._entries_of(queue.runs[-1])["store_ms"][-1])

    def seek_ms(self, queue: ArchivedQueue, ends: Ends, at_ms: int) -> int:
        """Return the offset of the first message stored at a time or later, by the times in the archive."""
        for archived in queue.runs:
            if archived.run.newest_ms >= at_ms and archived.run.end > ends.begin:
                later = self._entries_of(archived)["store_ms"] >= at_ms
                return max(ends.begin, archived.run.first + int(later.argmax()))
        return ends.end

    def _within(self, queue: ArchivedQueue, begin: int, end: int) -> tuple[int, int]:
        number = bisect_right(queue.runs, end - 1, key=lambda archived: archived.run.first) - 1
        run = queue.runs[number].run
        if run.end < end and queue.runs[number + 1].after_unknown:
            raise self._unknown(f"the message at offset {end - 1} of queue {queue.queue_id}", self._lacking())
        return max(begin, run.first), min(end, run.end)

    def _entries(self, queue: ArchivedQueue, offset: int, most: int) -> tuple[int, npt.NDArray[np.void]]:
        number = bisect_right(queue.runs, offset, key=lambda archived: archived.run.first) - 1
        if number < 0 or queue.runs[number].run.end <= offset:
            # an offset between runs: a later one is next
            number += 1
            if queue.runs[number].after_unknown:
                raise self._unknown(f"the message at offset {offset} of queue {queue.queue_id}", self._lacking())
        first = max(offset, queue.runs[number].run.first)
        parts, count, end = [np.zeros(0, QUEUE_ENTRY)], 0, queue.runs[number].run.first
        for archived in queue.runs[number:]:
            if archived.run.first != end or count >= most:
                break
            entries = self._entries_of(archived)[max(0, first - archived.run.first) :][: most - count]
            part = np.empty(len(entries), QUEUE_ENTRY)
            part["offset"] = entries["position"].astype(np.int64) + archived.start
            part["size"], part["tags_code"] = entries["size"], NO_CODE
            parts.append(part)
            count, end = count + len(entries), archived.run.end
        return first, np.concatenate(parts)

    def _reader(
        self, queue: ArchivedQueue, offsets: npt.NDArray[np.int64], entries: npt.NDArray[np.void], rows: Sequence[int]
    ) -> Callable[[int], Message | None]:
        fetched: dict[int, Message | Exception | None] = {}
        waiting = list(reversed(rows))

        def read(row: int) -> Message | None:
            if row not in fetched:
                fetched.clear()
                batch, size = list[int](), 0
                while waiting and len(batch) < _BATCH and size < _BATCH_BYTES:
                    batch.append(waiting.pop())
                    size += int(entries["size"][batch[-1]])
                fetched.update(self._fetch(queue, offsets, entries, batch))
            message = fetched[row]
            if isinstance(message, Exception):
                raise message
            return message

        return read

    def _fetch(
        self, queue: ArchivedQueue, offsets: npt.NDArray[np.int64], entries: npt.NDArray[np.void], rows: Sequence[int]
    ) -> Iterator[tuple[int, Message | Exception | None]]:
        """Yield the message of each of `rows`, None for an expired or erased one, or its error."""
        places = [(int(entries["offset"][row]), int(entries["size"][row])) for row in rows]
        for row, (place, _), fetched in zip(rows, places, self._messages.at_places(places), strict=True):
            message = fetched.message
            if fetched.error is not None:
                yield row, fetched.error
            elif isinstance(message, Message):
                try:
                    checked_message(message, queue, int(offsets[row]), fetched.read_from or queue.topic)
                except CorruptFile as error:
                    yield row, error
                else:
                    yield row, None if is_gone(self._expired, message) else message
            elif fetched.state == "erased" or not self._holds(place):
                yield row, None
            else:
                problem = fetched.problem or "its message can't be read"
                yield row, CorruptFile(f"queue {queue.queue_id} of {queue.topic}", f"offset {offsets[row]}: {problem}")

    # of the archive

    def _directories(self) -> Iterator[tuple[SegmentOfQueues, QueueDirectory | None]]:
        """Yield each segment with its directory, None without queue offsets. Raises as `SegmentArchive.read`."""
        segments = iter(self._segments.all())
        while some := list(itertools.islice(segments, _SEGMENTS)):
            wanted = [segment for segment in some if segment.queues_bytes]
            known = {segment.start: self._cache.get(segment.place) for segment in wanted}
            if missing := [segment for segment in wanted if known[segment.start] is None]:
                with contextlib.closing(DaemonPool(min(_THREADS, len(missing)), "tiered-index-queues")) as pool:
                    # each is cached when it arrives, also for the next request if this one ends early
                    for segment, future in [(segment, pool.submit(self._fetched, segment)) for segment in missing]:
                        known[segment.start] = future.result()
            yield from ((segment, known.get(segment.start)) for segment in some)

    def _fetched(self, segment: SegmentOfQueues) -> QueueDirectory:
        directory = segment.directory()
        self._cache.put(segment.place, directory, segment.queues_bytes - directory.entries_bytes)
        return directory

    def _known(self, topic: str) -> dict[int, ArchivedQueue]:
        """Return the queues of a topic with a message in the archive, by number."""
        if topic in self._topics:
            return self._topics[topic]
        queues: dict[int, ArchivedQueue] = {}
        # the number of unknown segments and gaps so far, and that number at each queue's last run
        unknown, seen, end, begin = 0, dict[int, int](), None, None
        gap = no_offsets = ""
        for segment, directory in self._directories():
            if directory is None:
                no_offsets = "segments were archived without queue offsets, or are damaged"
            lost = self._lost_before(segment.start, end)
            if lost is not None or (end is not None and segment.start != end):
                gap = gap or ("an archived segment was lost" if lost is None else lost.reason)
                unknown += 1
            else:
                unknown += directory is None
            begin, end = segment.start if begin is None else begin, segment.end
            for run in directory.topics.get(topic, ()) if directory is not None else ():
                queue = queues.setdefault(run.queue_id, ArchivedQueue(topic, run.queue_id))
                if queue.runs and run.first < queue.runs[-1].run.end:
                    back = f"its offset {run.first} follows {queue.runs[-1].run.end - 1} in the log"
                    queue.problem = back if run.first else ""
                    queue.runs.clear()
                queue.runs.append(segment.start, run, unknown > seen.get(run.queue_id, 0))
                seen[run.queue_id] = unknown
        if (lost := self._lost_before(None, end)) is not None:
            gap, unknown = gap or lost.reason, unknown + 1
        for queue in queues.values():
            queue.is_open = unknown > seen[queue.queue_id]
        self._topics[topic] = queues
        self._facts = _LogFacts(no_offsets or gap, begin == 0, end)
        return queues

    def _lost_before(self, start: int | None, end: int | None) -> LostRange | None:
        """Return a range of a lost catalog that is, or begins, in the gap from `end` to `start`; None: there is none.

        `end` None: from the log's begin; `start` None: without an end.
        """
        return next(
            (
                lost
                for lost in self._segments.lost
                if (start is None or lost.begin < start) and (end is None or lost.end > end) and end != start
            ),
            None,
        )

    def _log_facts(self) -> _LogFacts:
        if self._facts is None:
            self._known("")
        assert self._facts is not None
        return self._facts

    def _lacking(self) -> str:
        """Return why messages of the archive may be unknown; empty: all are known."""
        return self._log_facts().lacking

    def _gone(self) -> str:
        """Return why a queue without a message may have had one; empty: the archive has the log's begin."""
        gone = "no archived segment has a message of it, and older segments are gone"
        return "" if self._log_facts().has_begin else gone

    @staticmethod
    def _unknown(fact: str, why: str) -> UnknownOffsets:
        return UnknownOffsets("the archive", f"{fact} is not known: {why}")

    def _begin_s(self, queue: ArchivedQueue) -> int:
        """Return the first epoch second of a queue that is neither expired nor erased as a whole."""
        return max(self._expired.hidden_of(queue.topic).begin_of_queue(queue.queue_id), 0)

    def _entries_of(self, archived: ArchivedRun) -> npt.NDArray[np.void]:
        run = archived.run
        if (known := self._decoded.get((archived.start, run.begin))) is None:
            segment = self._segments.at(archived.start)
            data = segment.queue_offsets(run.begin, run.count * ENTRY.itemsize)
            known = decode_entries(data, run, segment.end - segment.start, segment.name)
            self._decoded[archived.start, run.begin] = known
        return known


def is_gone(expired: Expired, message: Message) -> bool:
    """Return whether a message has expired or was erased, even if its bytes still exist."""
    second, hidden = message.store_ms // 1000, expired.hidden_of(message.topic)
    if second < max(hidden.begin_of_queue(message.queue_id), 0):
        return True
    if not len(hidden.hashes):
        return False
    for key in message.lookup_keys:
        absolute, masked, fingerprint = lookup_numbers(message.topic, key)
        if second < max(hidden.begin_of(absolute, fingerprint), hidden.begin_of(masked, fingerprint)):
            return True
    return False


class StoreAndArchive(StoreQueues):
    """Reads the queues of a store, and messages from before the store's begin from `older`.

    `older` is used only if it also has the store's first message of the queue, or the last one if the store has none.
    It is also used if it is the archive of this folder, and ends where the log begins. Otherwise the queue begins with
    the store.
    """

    def __init__(self, folder: Path, root: Path | None, older: ArchivedQueues) -> None:
        super().__init__(folder, root)
        self._older = older

    def ends(self, queue: ConsumeQueue) -> Ends:
        """Return the begin of a queue, in the archive or the store, and its end in the store."""
        own = super().ends(queue)
        older = self._older_of(queue, own)
        return own if older is None else Ends(min(own.begin, self._older.ends(older).begin), own.end)

    def last_store_ms(self, queue: ConsumeQueue, ends: Ends) -> int:
        """Return the store timestamp of a queue's last message, in the store or the archive; 0 if it has none."""
        own = super().ends(queue)
        if own.begin == own.end and (older := self._older_of(queue, own)) is not None:
            return self._older.last_store_ms(older, self._older.ends(older))
        return super().last_store_ms(queue, own)

    def seek_ms(self, queue: ConsumeQueue, ends: Ends, at_ms: int) -> int:
        """Return the offset of the first message stored at a time or later, in the archive or the store."""
        own = super().ends(queue)
        if ends.begin < own.begin and (older := self._older_of(queue, own)) is not None:
            offset = self._older.seek_ms(older, self._older.ends(older), at_ms)
            if offset < own.begin:
                return max(offset, ends.begin)
        return super().seek_ms(queue, own, at_ms)

    def _within(self, queue: ConsumeQueue, begin: int, end: int) -> tuple[int, int]:
        own = super().ends(queue)
        if end > own.begin:
            return max(begin, own.begin), end
        older = self._older_of(queue, own)
        return (begin, end) if older is None else self._older._within(older, begin, end)

    def _entries(self, queue: ConsumeQueue, offset: int, most: int) -> tuple[int, npt.NDArray[np.void]]:
        older = self._before(queue, offset)
        return super()._entries(queue, offset, most) if older is None else self._older._entries(older, offset, most)

    def _reader(
        self, queue: ConsumeQueue, offsets: npt.NDArray[np.int64], entries: npt.NDArray[np.void], rows: Sequence[int]
    ) -> Callable[[int], Message | None]:
        if (older := self._before(queue, int(offsets[0]))) is not None:
            return self._older._reader(older, offsets, entries, rows)
        return super()._reader(queue, offsets, entries, rows)

    def _offsets(self, queue: ConsumeQueue, first: int, entries: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        if entries.dtype == QUEUE_ENTRY:
            # of a plain queue, or archived
            return np.arange(first, first + len(entries) + 1)
        return super()._offsets(queue, first, entries)

    def _before(self, queue: ConsumeQueue, offset: int) -> ArchivedQueue | None:
        """Return the archived queue if an offset is before the store's begin, else None."""
        own = super().ends(queue)
        return self._older_of(queue, own) if offset < own.begin else None

    def _older_of(self, queue: ConsumeQueue, own: Ends) -> ArchivedQueue | None:
        if own.begin == 0:
            return None
        # the broker keeps the last entry of a queue, also if it has deleted the message
        at = min(own.begin, own.end - 1)
        with contextlib.suppress(UnknownOffsets):
            older = self._older.find(queue.topic, queue.queue_id)
            if older is None:
                return None
            end = self._older.ends(older).end
            is_own = self._older.name == str(self._store.resolve())
            if is_own and end == own.begin and self._older.log_end == self._log.begin_offset():
                return older  # the log continues where the archive ends
            if end > at:
                first, archived = self._older._entries(older, at, 1)
                _, stored = queue.read(at, 1)
                if first == at and len(stored) and archived["offset"][0] == stored["offset"][0]:
                    return older
        return None
