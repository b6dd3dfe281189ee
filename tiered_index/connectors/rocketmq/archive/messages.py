"""Reads messages of a RocketMQ store from its commit log, else from archived segments: by entry, id or queue offset.

Any thread. `search.py` judges the bytes at a place. Archived segments are read in whole pieces, each compared with its
CRC32; a message that overlaps a damaged piece is not used. If an erasure or a repair replaces a segment meanwhile, its
replacement is read.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from tiered_index.base.call import check_deadline
from tiered_index.base.threads import each
from tiered_index.connectors.documents import words_of
from tiered_index.connectors.registry import Words
from tiered_index.connectors.rocketmq.archive.search import MessageSearch
from tiered_index.connectors.rocketmq.follow.tail import TruncatedTail
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.connectors.rocketmq.log.layout import MIN_MESSAGE_BYTES, Host, decode_offset_msg_id
from tiered_index.connectors.rocketmq.log.message import (
    HEAD_BYTES,
    MAX_MESSAGE_BYTES,
    Message,
    check_head,
    decode_message,
    peek_topic,
)
from tiered_index.connectors.rocketmq.log.store import SOURCE_PREFIX, StoreDirectory
from tiered_index.connectors.rocketmq.spec import SPEC
from tiered_index.errors import BudgetExceeded, CorruptFile, InvalidArgument, ObjectNotFound, StorageError
from tiered_index.format.names import topic_of_store
from tiered_index.format.segments.archived import DAMAGED_PIECE, SegmentTable
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.log.records import ArchivedSegment, LostRange
from tiered_index.service.read.answers.budget import LookupBudget, LookupLimits
from tiered_index.service.read.answers.messages import MANY, Fetched, MessageSource, MessagesResult, MessageState
from tiered_index.service.read.lookups import Lookups
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.types import IndexItem, inclusive

# Ranges of one segment with at most `_GAP_BYTES` between them are fetched as one, of at most `_RUN_BYTES`.
_GAP_BYTES = 64 << 10
_RUN_BYTES = 8 << 20
# Most attempts for a message whose segment was replaced since the log was read
_LOOKS = 5
# First read of an archived message of unknown size.
_GUESS_BYTES = 16 << 10
# Answer to a caller with some topics, for a place without a message of these topics
_WITHHELD = "no message of a topic that you may see is here: there is none, it is damaged, or another topic's"


@dataclass(slots=True)
class _Run:
    """Neighbouring messages of one segment: offsets [begin, end) of its log, whole pieces, fetched by one request."""

    segment: ArchivedSegment
    table: SegmentTable
    begin: int
    end: int
    searches: list[MessageSearch]


class _Pieces(NamedTuple):
    """Whole pieces of a segment from the log offset `begin`, and the errors of damaged ones."""

    segment: ArchivedSegment
    table: SegmentTable
    begin: int
    data: bytes
    damage: list[CorruptFile]

    def at(self, offset: int, length: int) -> memoryview:
        """Return up to `length` bytes from an offset. Raises `CorruptFile` if they overlap a damaged piece."""
        position = offset - self.segment.start
        for error in self.damage:
            assert error.offset is not None
            if error.offset < position + length and position < error.offset + self.table.piece_bytes:
                raise error
        return memoryview(self.data)[offset - self.begin :][:length]


class RocketmqMessages:
    """The messages of one store directory and of an index's archived segments; either may be None.

    For several indexes, `archive` maps the `source` of entries to archives, as `IndexReader.segment_archives`, and
    `store` must be None. `store` is the folder that has ``commitlog``. `store_name` limits the archive to one store's
    segments (None: all). `threads` bounds concurrent requests. `root` is the root of an index that follows the store;
    its follower's fingerprints show which messages the broker cut off. `documents` returns the documents of topics,
    which say what connector wrote them (None: RocketMQ's). Raises `InvalidArgument` if `store` is not a RocketMQ store.
    """

    def __init__(
        self,
        store: Path | None,
        archive: SegmentArchive | Mapping[str | None, SegmentArchive] | None = None,
        *,
        store_name: str | None = None,
        threads: int = 8,
        root: Path | None = None,
        documents: Callable[[], Mapping[str, TopicDocument]] | None = None,
    ) -> None:
        # Folder of the store directory
        self.store = StoreDirectory.open(store).folder if store is not None else None
        self._folder = self.store / "commitlog" if self.store is not None else None
        self._archives: Mapping[str | None, SegmentArchive]
        self._archives = {None: archive} if isinstance(archive, SegmentArchive) else archive or {}
        if store is not None and len(self._archives) > 1:
            raise InvalidArgument(
                f"the store {store} belongs to one broker, but {len(self._archives)} indexes are read: leave it "
                f"out to read archived segments"
            )
        self._store_name = store_name
        self._threads = threads
        self.root = root
        self._documents = documents
        self._sees: Callable[[str], bool] | None = None

    @property
    def archives(self) -> tuple[SegmentArchive, ...]:
        """The archives of all indexes."""
        return tuple(self._archives.values())

    def words(self, topic: str) -> Words:
        """Return the words of the connector that wrote a topic."""
        if self._folder is not None or self._documents is None:
            return SPEC.words
        return words_of(self._documents().get(topic))

    def seen_by(self, sees: Callable[[str], bool]) -> RocketmqMessages:
        """Return a copy for a caller that may see only the topics for which `sees` returns True.

        A place without a message of these topics is always ``missing`` and `Fetched.withheld`. Its answer, requests and
        bytes do not show whether a message of another topic is there.
        """
        narrowed = copy.copy(self)
        narrowed._sees = sees
        return narrowed

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return the result for each of `items`, in order. Errors are in the results."""
        searches = [
            MessageSearch(item.offset, item.size or None, (topic, key), item=item, sees=self._sees) for item in items
        ]
        return self._settle(searches)

    def at(self, offset: int, size: int | None = None, *, store_host: Host | None = None) -> Fetched:
        """Return the message that begins at a commit log offset; with `store_host`, only if this broker stored it.

        Raises `InvalidArgument`, and the error of the storage or budget if the place can't be read.
        """
        if offset < 0:
            raise InvalidArgument(f"a commit log offset is not negative: {offset}")
        (fetched,) = self._settle([MessageSearch(offset, size, host=store_host, item=None, sees=self._sees)])
        if fetched.error is not None:
            raise fetched.error
        return fetched

    def at_places(self, places: Sequence[tuple[int, int]]) -> list[Fetched]:
        """Return the results for pairs of commit log offset and size. Errors are in the results."""
        return self._settle([MessageSearch(offset, size, item=None, sees=self._sees) for offset, size in places])

    def by_msg_id(self, msg_id: str) -> Fetched:
        """Return the message with an offset message id. Raises as `at`, and `InvalidArgument` for another text."""
        host, offset = decode_offset_msg_id(msg_id)
        return self.at(offset, store_host=host)

    def by_id(
        self,
        lookups: Lookups | None,
        msg_id: str,
        topic: str | None,
        cursor: str | None = None,
        allow_partial: bool = False,
        *,
        max_message_bytes: int | None = None,
        **limits: Any,
    ) -> MessagesResult:
        """Return the message at the place that `msg_id` names or, with `topic`, the messages with that unique key.

        If no message of the topic has the unique key, the message at the place that the id names is returned, if any.
        `allow_partial`, `max_message_bytes` and `limits` are as in `Lookups.messages`. `lookups` may be None without
        `topic`; then `limits` do not apply. Raises as `Lookups.messages`, and `InvalidArgument` for an invalid id.
        """
        if lookups is None or topic is None:
            with contextlib.ExitStack() as stack:
                if lookups is not None:
                    stack.enter_context(LookupBudget(lookups.config.prices, LookupLimits(**limits)).open())
                return MessagesResult(messages=(self.by_msg_id(msg_id),), status="complete")
        unique = ByUniqueKey(self)
        # the limits hold for the lookup and the place together
        with LookupBudget(lookups.config.prices, LookupLimits(**limits)).open():
            limits |= {"max_count": MANY, "cursor": cursor, "allow_partial": allow_partial}
            answer = lookups.messages(topic, msg_id, source=unique, max_message_bytes=max_message_bytes, **limits)
            if not answer.messages and cursor is None:
                answer = replace(answer, messages=_by_place(self, topic, msg_id))
            return answer

    def _settle(self, searches: list[MessageSearch]) -> list[Fetched]:
        if self._folder is not None:
            truncated = TruncatedTail(self._folder, self.root)
            try:
                # list the folder once: an indexed message is in this list, or was deleted
                log = CommitLogReader(self._folder, fixed=CommitLogReader(self._folder).segments())
            except StorageError as error:
                for search in searches:
                    search.read_from = str(self._folder)
                    search.fail(error)
            else:
                for search in searches:
                    self._read_local(log, search, truncated)
        if self._archives:
            of_sources: dict[str | None, list[MessageSearch]] = {}
            for search in searches:
                of_sources.setdefault(search.item.source if search.item is not None else None, []).append(search)

            def read(searches_of_archive: tuple[SegmentArchive, list[MessageSearch]]) -> None:
                self._read_archived(*searches_of_archive, self._threads // len(several))

            several = [(self._archive_of(source), of_source) for source, of_source in of_sources.items()]
            if len(several) == 1:
                read(several[0])
            else:
                each(several, read, self._threads)
        words = cache(self.words)
        return [self._outcome(search, words) for search in searches]

    # the store's own files

    def _read_local(self, log: CommitLogReader, search: MessageSearch, truncated: TruncatedTail) -> None:
        message = None
        try:
            if search.sees is not None and not ((topic := log.topic_at(search.offset)) and search.sees(topic)):
                search.problems.append(_WITHHELD)
                return
            message = log.read(search.offset, search.size)
        except MissingOffsets as error:
            self._judge_gap(log, search, error)
        except CorruptFile as error:
            search.read_from = error.file
            if search.item is not None:
                # the message at an entry's place may have another size
                with contextlib.suppress(CorruptFile, StorageError):
                    message = log.read(search.offset)
            if message is None:
                search.is_damaged_locally = search.item is not None
                search.problems.append(str(error))
        except StorageError as error:
            search.read_from = str(log.folder)
            search.fail(error)
        if message is not None and truncated.has(message):
            search.read_from = str(log.folder)
            search.problems.append(f"{log.folder}: after the end of the log (cut off)")
        elif message is not None:
            search.take(message, "local", str(log.folder))

    def _judge_gap(self, log: CommitLogReader, search: MessageSearch, error: MissingOffsets) -> None:
        """Note whether the broker has deleted a place, at the begin of its log, or whether it is missing."""
        try:
            begin = log.begin_offset()
            if begin is None or search.offset >= begin:
                # the broker may have deleted it since the folder was listed
                begin = CommitLogReader(log.folder).begin_offset()
        except StorageError as trouble:
            search.read_from = str(log.folder)
            search.fail(trouble)
            return
        if begin is None:
            search.problems.append(f"{log.folder} holds no segments")
        elif search.offset < begin:
            search.deleted = True
        else:
            search.problems.append(str(error))

    # archived segments

    def _archive_of(self, source: str | None) -> SegmentArchive:
        try:
            return self._archives[source]
        except KeyError:
            raise InvalidArgument(
                f"{source or 'this place'} belongs to none of the indexes whose archives are given"
            ) from None

    def _read_archived(self, archive: SegmentArchive, searches: Sequence[MessageSearch], threads: int) -> None:
        """Try the segments that hold each place, one store after the other, until its message is found."""
        one_store = len(archive.segments().byte_stores) <= 1
        open_searches = [s for s in searches if s.found is None and not (one_store and s.collision is not None)]
        if not open_searches:
            return
        name, reads = self._store_name, list[int]()
        try:
            archive.prefetch([search.offset for search in open_searches], name, reads)
            candidates = {id(search): archive.holding(search.offset, name, reads) for search in open_searches}
        except (StorageError, BudgetExceeded, CorruptFile) as error:
            for search in open_searches:
                if isinstance(error, CorruptFile):
                    search.damaged = True
                else:
                    search.error = search.error or error
                search.problems.append(str(error))
            return
        finally:
            open_searches[0].charge(reads)
        if unknown := [search for search in open_searches if not candidates[id(search)] and search.collision is None]:
            try:
                # it may have been archived since the log was last read
                archive.refresh()
            except (StorageError, BudgetExceeded) as error:
                for search in unknown:
                    search.error = search.error or error
                    search.problems.append(str(error))
            reads.clear()
            candidates |= {id(search): archive.holding(search.offset, name, reads) for search in unknown}
            unknown[0].charge(reads)
        for _ in range(_LOOKS):
            turn, looked_for = 0, open_searches
            while open_searches := [s for s in open_searches if s.found is None and len(candidates[id(s)]) > turn]:
                of_segments: dict[str, tuple[ArchivedSegment, list[MessageSearch]]] = {}
                for search in open_searches:
                    segment = candidates[id(search)][turn]
                    of_segments.setdefault(segment.name, (segment, []))[1].append(search)
                tables: dict[str, SegmentTable] = {}
                several = [of_segments[name] for name in sorted(of_segments)]
                each(several, partial(_read_table, archive, tables), threads)
                runs = [
                    run
                    for segment, of in several
                    if segment.name in tables
                    for run in _runs(segment, tables[segment.name], of)
                ]
                each(runs, partial(_read_run, archive), threads)
                turn += 1
            # an erasure or a repair may have replaced the segments since the log was read
            open_searches = [search for search in looked_for if search.gone and search.found is None]
            for search in open_searches:
                search.gone, tried = False, {segment.name for segment in candidates[id(search)]}
                again = archive.holding(search.offset, self._store_name)
                candidates[id(search)] = [segment for segment in again if segment.name not in tried]
            if not open_searches:
                break

    def _gap_of(self, search: MessageSearch) -> str | None:
        """Return the problem if a place is in a gap between archived segments, or of a lost catalog, else None."""
        for archive in self._archives.values():
            segments = archive.segments()
            for store in segments.state.given_up if self._store_name is None else (self._store_name,):
                lost = segments.given_up(store, search.offset)
                if lost is not None and topic_of_store(store) is None:
                    return lost.reason
            for store in segments.byte_stores if self._store_name is None else (self._store_name,):
                first, later = segments.first(store), segments.after(store, search.offset)
                if first is not None and first.end <= search.offset and later is not None:
                    return (
                        f"no archived segment of {store} has the offsets before {later.start:,}: it was lost, and a "
                        f"record removed it, or the broker deleted them before they were archived"
                    )
        return None

    def _cut_of(self, search: MessageSearch) -> LostRange | None:
        """Return the range that the broker rewrote after the message of an entry was put, by the log of its index."""
        item = search.item
        archive = self._archives.get(item.source) if item is not None else None
        if item is None or archive is None:
            return None
        for lost_file in archive.state().lost.values():
            lost = lost_file.range
            if lost is None or lost.kind != "rewritten" or not lost.begin <= item.offset < lost.end:
                continue
            of_store = self._store_name is None or lost.source == SOURCE_PREFIX + self._store_name
            if of_store and item.timestamp_ms // 1000 <= lost_file.second_max:
                return lost
        return None

    def _outcome(self, search: MessageSearch, words: Callable[[str], Words]) -> Fetched:
        outcome = search.outcome(partial(self._missing, search, words))
        return replace(outcome, instead=outcome.instead or search.instead)

    def _missing(self, search: MessageSearch, words: Callable[[str], Words]) -> Fetched:
        state: MessageState = "missing"
        if search.sees is not None and search.error is None and not (search.deleted and not search.problems):
            search.read_from, search.problems = None, [_WITHHELD]
        if not search.problems:
            not_archived = "no archived segment holds it" if self._archives else "no archive was given"
            if (gap := self._gap_of(search)) is not None:
                search.problems.append(gap)
            elif search.deleted:
                state = "expired"
                search.problems.append(f"the broker has deleted this part of its commit log, and {not_archived}")
            elif self._folder is not None:
                search.problems.append(not_archived)
            else:
                # only the place of an entry may be of another system than RocketMQ
                of_place = words(search.key[0]) if search.key is not None else SPEC.words
                search.problems.append(of_place.no_message)
        damaged = search.damaged or search.is_damaged_locally
        if damaged and not search.is_damage_sure and (cut := self._cut_of(search)) is not None:
            damaged = False
            search.problems.insert(0, f"commit log offsets {inclusive(cut.begin, cut.end)} were cut off or rewritten")
        return search.missing(state, damaged=damaged, withheld=search.sees is not None)


def _runs(segment: ArchivedSegment, table: SegmentTable, searches: Sequence[MessageSearch]) -> list[_Run]:
    """Return the ranges of a segment to fetch: neighbours are joined."""
    runs: list[_Run] = []
    for search in sorted(searches, key=attrgetter("offset")):
        length = max(min(search.size or _GUESS_BYTES, MAX_MESSAGE_BYTES), HEAD_BYTES)
        begin, end = _covering(segment, table, search.offset, length)
        last = runs[-1] if runs else None
        if last is not None and begin <= last.end + _GAP_BYTES and end - last.begin <= _RUN_BYTES:
            last.end = max(last.end, end)
            last.searches.append(search)
        else:
            runs.append(_Run(segment, table, begin, end, [search]))
    return runs


def _covering(segment: ArchivedSegment, table: SegmentTable, offset: int, length: int) -> tuple[int, int]:
    """Return the log offsets [begin, end) of the whole pieces that cover `length` bytes at an offset."""
    begin, end = table.whole_pieces(offset - segment.start, offset - segment.start + length)
    return segment.start + begin, segment.start + end


@contextlib.contextmanager
def _failing(searches: Sequence[MessageSearch]) -> Iterator[None]:
    """Note an error of the block in all `searches`."""
    try:
        yield
    except ObjectNotFound:
        for search in searches:
            search.gone = True  # the segment was removed, or replaced by another object
    except (CorruptFile, StorageError, BudgetExceeded) as error:
        for search in searches:
            search.fail(error)


@contextlib.contextmanager
def _charged(segment: ArchivedSegment, search: MessageSearch) -> Iterator[None]:
    """Count the request of the block for a search, unless the budget refuses it."""
    check_deadline(f"reading {segment.name}")
    search.requests += 1
    try:
        yield
    except BudgetExceeded:
        search.requests -= 1
        raise


def _read_table(
    archive: SegmentArchive, tables: dict[str, SegmentTable], searched: tuple[ArchivedSegment, list[MessageSearch]]
) -> None:
    """Add the table of a segment to `tables`, or note the error in its searches."""
    segment, searches = searched
    for search in searches:
        search.read_from = segment.name
    if (known := archive.known_table(segment)) is not None:
        tables[segment.name] = known
        return
    with _failing(searches):
        with _charged(segment, searches[0]):
            tables[segment.name] = archive.table(segment)
        searches[0].bytes += segment.object_bytes - segment.size_bytes - segment.queues_bytes


def _read_run(archive: SegmentArchive, run: _Run) -> None:
    """Fetch a run and let each of its searches judge its message."""
    with _failing(run.searches):
        pieces = _get(archive, run.segment, run.table, run.searches[0], run.begin, run.end)
        for search in run.searches:
            with _failing([search]):
                if search.sees is not None and not _is_seen(archive, pieces, search):
                    search.problems.append(_WITHHELD)
                    continue
                try:
                    message = _decode(archive, pieces, search)
                except CorruptFile as error:
                    search.fail(error, no_message=error.problem != DAMAGED_PIECE)
                    continue
                if message.is_erased:
                    search.take_erased(message, run.segment.name)
                else:
                    search.take(message, "archived", run.segment.name)


def _get(
    archive: SegmentArchive, segment: ArchivedSegment, table: SegmentTable, search: MessageSearch, begin: int, end: int
) -> _Pieces:
    """Return whole pieces of a segment by one request, counted for `search`; fetch damaged ones once more."""
    # the transfer may have failed
    for _ in range(2):
        with _charged(segment, search):
            data = archive.read(segment, begin - segment.start, end - begin)
        search.bytes += len(data)
        if not (damage := table.damage(segment.name, begin - segment.start, data)):
            break
    return _Pieces(segment, table, begin, data, damage)


def _is_seen(archive: SegmentArchive, pieces: _Pieces, search: MessageSearch) -> bool:
    """Return whether a message of a visible topic begins at the place.

    If not, this always sends one more request, for the same number of pieces, so that the cost shows nothing.
    """
    segment, table, sees, at = pieces.segment, pieces.table, search.sees, search.offset - pieces.segment.start
    assert sees is not None

    def fetched(position: int, size: int) -> memoryview:
        length = table.piece_bytes
        count = -(-size // length) + 1
        begin = max(min((at + position) // length, len(table.pieces) - count), 0) * length
        end = min(begin + count * length, segment.size_bytes)
        read = _get(archive, segment, table, search, segment.start + begin, segment.start + end)
        return read.at(search.offset + position, size)

    head, left = pieces.at(search.offset, HEAD_BYTES), segment.size_bytes - at
    topic = peek_topic(head, left, search.offset, lambda position, size: pieces.at(search.offset + position, size))
    if topic is None or not sees(topic):
        topic = peek_topic(head, left, search.offset, fetched)
    return topic is not None and sees(topic)


def _decode(archive: SegmentArchive, pieces: _Pieces, search: MessageSearch) -> Message:
    """Return the message of a search; fetch it whole if it is longer than `pieces`."""
    offset, size, segment = search.offset, search.size, pieces.segment
    at = offset - segment.start
    head = pieces.at(offset, HEAD_BYTES)
    if search.item is not None and size is not None and int.from_bytes(head[:4], "big") != size:
        size = None  # the message at an entry's place may have another size
    length = size
    if length is None and len(head) >= MIN_MESSAGE_BYTES:
        length = check_head(head, segment.end - offset, file=segment.name, file_offset=at, physical_offset=offset).size
        if offset - pieces.begin + length > len(pieces.data):
            whole = _covering(segment, pieces.table, offset, length)
            pieces = _get(archive, segment, pieces.table, search, *whole)
    data = pieces.at(offset, length or MIN_MESSAGE_BYTES)
    return decode_message(data, file=segment.name, file_offset=at, physical_offset=offset, size=size)


@dataclass(frozen=True)
class ByUniqueKey:
    """A `MessageSource` of only the messages whose unique key is `key`; others are marked as not carrying it."""

    source: MessageSource

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return the result for each of `items`."""
        fetched = self.source.fetch(items, topic, key)
        return [
            fetched_message
            if fetched_message.message is None or getattr(fetched_message.message, "uniq_key", None) == key
            else replace(fetched_message, carries_key=False)
            for fetched_message in fetched
        ]


def _by_place(source: RocketmqMessages, topic: str, msg_id: str) -> tuple[Fetched, ...]:
    """Return the topic's message at the place that the id names, if it names one; RocketMQ's tools do so."""
    with contextlib.suppress(InvalidArgument):
        fetched = source.by_msg_id(msg_id)
        if fetched.message is None or getattr(fetched.message, "topic", None) == topic:
            return (fetched,)
    return ()
