"""Messages of a RocketMQ store, from its commit log, else from archived segments: for the index's answers, and one by
its id, as RocketMQ's tools find it. Any thread.

What is read at a place is judged by `search.py`. Archived segments are read in whole pieces, each compared with its
CRC32; a message that reaches into a damaged piece is not used. A segment that an erasure or a repair replaces while it
is read is looked for again.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tiered_index.errors import BudgetExceeded, CorruptFile, InvalidArgument, ObjectNotFound, StorageError
from tiered_index.format.archived import SegmentTable
from tiered_index.rocketmq.archive.search import Search
from tiered_index.rocketmq.follow.tail import TruncatedTail
from tiered_index.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.rocketmq.log.layout import MIN_MESSAGE_BYTES, Host, decode_offset_msg_id
from tiered_index.rocketmq.log.message import (
    HEAD_BYTES,
    MAX_BODY_BYTES,
    MAX_MESSAGE_BYTES,
    BodyFormat,
    Message,
    check_head,
    decode_message,
    peek_topic,
)
from tiered_index.rocketmq.log.store import StoreDirectory, queues_of
from tiered_index.service.lifecycle.segment_archive import SegmentArchive
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.lookup.budget import LookupBudget, LookupLimits
from tiered_index.service.lookup.lookups import Lookups
from tiered_index.service.lookup.messages import Fetched, MessageSource, MessagesResult, MessageState
from tiered_index.service.threads import DaemonPool
from tiered_index.storage.context import check_deadline
from tiered_index.types import IndexItem

T = TypeVar("T")
# Ranges of one segment with at most `_GAP_BYTES` between them are fetched as one, of at most `_RUN_BYTES`.
_GAP_BYTES = 64 << 10
_RUN_BYTES = 8 << 20
# How often a message is looked for again whose segment has gone since the log was read.
_LOOKS = 5
# First read of an archived message of unknown size.
_GUESS_BYTES = 16 << 10
# Of a body that is searched for a text.
_SEARCHED_BYTES = 256 << 10
# The answer to a caller that may see some topics only, for a place where no message of these topics begins.
_WITHHELD = "no message of a topic that you may see is here: there is none, it is damaged, or another topic's"


@dataclass(slots=True)
class _Run:
    """Neighbouring messages of one segment: offsets [begin, end) of its log, whole pieces, fetched by one request."""

    segment: ArchivedSegment
    table: SegmentTable
    begin: int
    end: int
    searches: list[Search]


class _Pieces(NamedTuple):
    """Whole pieces of a segment from an offset of its log on, and the errors of those that are damaged."""

    segment: ArchivedSegment
    table: SegmentTable
    begin: int
    data: bytes
    damage: list[CorruptFile]

    def at(self, offset: int, length: int) -> memoryview:
        """Return the bytes from an offset on, fewer at the end of the pieces. Raises `CorruptFile` for damaged ones."""
        position = offset - self.segment.start
        for error in self.damage:
            assert error.offset is not None
            if error.offset < position + length and position < error.offset + self.table.piece_bytes:
                raise error
        return memoryview(self.data)[offset - self.begin :][:length]


class RocketmqMessages:
    """The messages of one store directory and of an index's archived segments; either may be None.

    Of several indexes `archive` has theirs by the `source` of their entries, as `IndexReader.segment_archives`; there
    is no store then, since that is one broker's. `store` is the folder that holds ``commitlog``; `store_name` narrows
    the archive to one store's segments (None: all are tried). `threads` bounds requests at once. `root` is that of an
    index that follows the store: what its follower remembers tells what the broker cut off. Raises `InvalidArgument`
    where `store` is not a RocketMQ store.
    """

    def __init__(
        self,
        store: Path | None,
        archive: SegmentArchive | Mapping[str | None, SegmentArchive] | None = None,
        *,
        store_name: str | None = None,
        threads: int = 8,
        root: Path | None = None,
    ) -> None:
        self._store = StoreDirectory.open(store) if store is not None else None
        self._folder = self._store.commitlog if self._store is not None else None
        self._archives: Mapping[str | None, SegmentArchive]
        self._archives = {None: archive} if isinstance(archive, SegmentArchive) else archive or {}
        if store is not None and len(self._archives) > 1:
            raise InvalidArgument(
                f"the store {store} belongs to one broker, but {len(self._archives)} indexes are read: leave it "
                f"out to read archived segments"
            )
        self._store_name = store_name
        self._threads = threads
        self._root = root
        self._sees: Callable[[str], bool] | None = None

    @property
    def store(self) -> Path | None:
        """Folder of the store directory."""
        return self._store.folder if self._store is not None else None

    @property
    def root(self) -> Path | None:
        """Root of an index that follows the store."""
        return self._root

    @property
    def archives(self) -> tuple[SegmentArchive, ...]:
        """The archives of all indexes."""
        return tuple(self._archives.values())

    def seen_by(self, sees: Callable[[str], bool]) -> RocketmqMessages:
        """Return the messages as somebody gets them who may see the topics only for which `sees` returns True.

        Every place where no message of these topics begins is one and the same ``missing``, and `Fetched.withheld`: the
        answer, and what it takes requests and bytes, doesn't tell a message of another topic from anything else.
        """
        narrowed = copy.copy(self)
        narrowed._sees = sees
        return narrowed

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return what became of each of `items`, in their order. Errors of places are in the answers."""
        searches = [Search(item.offset, item.size or None, item, (topic, key), sees=self._sees) for item in items]
        return self._settle(searches)

    def at(self, offset: int, size: int | None = None, *, store_host: Host | None = None) -> Fetched:
        """Return the message that begins at a commit log offset; with `store_host`, only one that this broker stored.

        Raises `InvalidArgument`, and what made a place impossible to ask.
        """
        if offset < 0:
            raise InvalidArgument(f"a commit log offset is not negative: {offset}")
        (fetched,) = self._settle([Search(offset, size, None, None, store_host, sees=self._sees)])
        if fetched.error is not None:
            raise fetched.error
        return fetched

    def at_places(self, places: Sequence[tuple[int, int]]) -> list[Fetched]:
        """Return the messages at commit log offsets, each with its size. Errors of places are in the answers."""
        return self._settle([Search(offset, size, None, None, sees=self._sees) for offset, size in places])

    def by_msg_id(self, msg_id: str) -> Fetched:
        """Return the message that an offset message id names. Raises as `at`, and `InvalidArgument` for no such id."""
        host, offset = decode_offset_msg_id(msg_id)
        return self.at(offset, store_host=host)

    def by_queue_offset(self, topic: str, queue_id: int, queue_offset: int) -> Fetched:
        """Return the message at an offset of a queue, by the store's consume queue (RocketMQ's `queryMsgByOffset`).

        Raises as `at`, `CorruptFile` for a damaged queue, and `InvalidArgument` without a store.
        """
        if self._store is None:
            raise InvalidArgument(
                "an offset of a queue is looked up in the store's consume queues, and no store was given"
            )
        name = f"queue {queue_id} of {topic}"
        queues = queues_of(self._store.folder / "consumequeue", topic)
        queue = next((one for one in queues if one.queue_id == queue_id), None)
        if queue is None:
            return Fetched(item=None, state="missing", problem=f"{self._store.folder} has no {name}")
        begin, entries = queue.read(queue_offset, 1)
        if begin != queue_offset:
            return Fetched(
                item=None, state="expired", problem=f"{name} begins at offset {begin}: the broker deleted it"
            )
        if not len(entries):
            return Fetched(item=None, state="missing", problem=f"{name} ends before offset {queue.seek(2**63 - 1)}")
        (entry,) = entries
        fetched = self.at(int(entry["offset"]), int(entry["size"]))
        message = fetched.message
        asked = topic, queue_id, queue_offset
        if isinstance(message, Message) and (message.topic, message.queue_id, message.queue_offset) != asked:
            problem = f"another message than {name} names lies at commit log offset {message.physical_offset}"
            return replace(fetched, state="missing", message=None, problem=problem)
        return fetched

    def _settle(self, searches: list[Search]) -> list[Fetched]:
        if self._folder is not None:
            truncated = TruncatedTail(self._folder, self._root)
            try:
                # listed once: what was indexed before is in it, or was deleted
                log = CommitLogReader(self._folder, fixed=CommitLogReader(self._folder).segments())
            except StorageError as error:
                for search in searches:
                    search.read_from = str(self._folder)
                    search.fail(error)
            else:
                for search in searches:
                    self._read_local(log, search, truncated)
        if self._archives:
            of_sources: dict[str | None, list[Search]] = {}
            for search in searches:
                of_sources.setdefault(search.item.source if search.item is not None else None, []).append(search)

            def read(one: tuple[SegmentArchive, list[Search]]) -> None:
                self._read_archived(*one, self._threads // len(several))

            several = [(self._archive_of(source), of_source) for source, of_source in of_sources.items()]
            if len(several) == 1:
                read(several[0])
            else:
                _each(several, read, self._threads)
        return [self._outcome(search) for search in searches]

    # the store's own files

    def _read_local(self, log: CommitLogReader, search: Search, truncated: TruncatedTail) -> None:
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
                # of an entry's place a message of any size is of interest
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
            search.problems.append(f"{log.folder}: behind the end of the log (cut off)")
        elif message is not None:
            search.take(message, "local", str(log.folder))

    def _judge_gap(self, log: CommitLogReader, search: Search, error: MissingOffsets) -> None:
        """Tell what the broker has deleted, at the beginning of its log, from what is missing."""
        try:
            begin = log.begin_offset()
            if begin is None or search.offset >= begin:
                # unless it was deleted since that look
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
                f"{source or 'a place by itself'} is of none of the indexes whose archives are given"
            ) from None

    def _read_archived(self, archive: SegmentArchive, searches: Sequence[Search], threads: int) -> None:
        """Try the segments that hold each place, one store after the other, until its message is found."""
        one_store = len(archive.state().byte_stores) <= 1
        open_searches = [s for s in searches if s.found is None and not (one_store and s.collision is not None)]
        candidates = {id(search): archive.holding(search.offset, self._store_name) for search in open_searches}
        if unknown := [search for search in open_searches if not candidates[id(search)] and search.collision is None]:
            try:
                # it may have been archived since the log was last read, and deleted locally because of that
                archive.refresh()
            except (StorageError, BudgetExceeded) as error:
                for search in unknown:
                    search.error = search.error or error
                    search.problems.append(str(error))
            candidates |= {id(search): archive.holding(search.offset, self._store_name) for search in unknown}
        for _ in range(_LOOKS):
            turn, looked_for = 0, open_searches
            while open_searches := [s for s in open_searches if s.found is None and len(candidates[id(s)]) > turn]:
                of_segments: dict[str, tuple[ArchivedSegment, list[Search]]] = {}
                for search in open_searches:
                    segment = candidates[id(search)][turn]
                    of_segments.setdefault(segment.name, (segment, []))[1].append(search)
                tables: dict[str, SegmentTable] = {}
                several = [of_segments[name] for name in sorted(of_segments)]
                _each(several, partial(_read_table, archive, tables), threads)
                runs = [run for one, of in several if one.name in tables for run in _runs(one, tables[one.name], of)]
                _each(runs, partial(_read_run, archive), threads)
                turn += 1
            # the log was read again meanwhile: an erasure or a repair may have put another object in their place
            open_searches = [search for search in looked_for if search.gone and search.found is None]
            for search in open_searches:
                search.gone, tried = False, {segment.name for segment in candidates[id(search)]}
                again = archive.holding(search.offset, self._store_name)
                candidates[id(search)] = [segment for segment in again if segment.name not in tried]
            if not open_searches:
                break

    # what became of it

    def _gap_of(self, search: Search) -> str | None:
        """Return which archive has a gap at a place, between its segments; they are archived one after the other."""
        for archive in self._archives.values():
            state = archive.state()
            for store in state.byte_stores if self._store_name is None else (self._store_name,):
                segments = state.segments_of(store)
                if segments and segments[0].end <= search.offset < segments[-1].start:
                    behind = min(segment.start for segment in segments if segment.start > search.offset)
                    return f"the archived segment of {store} before offset {behind:,} was lost, and a record gave it up"
        return None

    def _outcome(self, search: Search) -> Fetched:
        is_open = search.error is not None or search.damaged
        known = search.found or (None if is_open else search.other or search.collision)
        if known is not None:
            return replace(known, requests=search.requests, bytes=search.bytes, instead=known.instead or search.instead)
        problem = "; ".join(search.problems) or None
        state: MessageState = "missing"
        if search.sees is not None and search.error is None and not (search.deleted and problem is None):
            search.read_from, problem = None, _WITHHELD
        if problem is None:
            not_archived = "no archived segment holds it" if self._archives else "no archive was given"
            if (gap := self._gap_of(search)) is not None:
                problem = gap
            elif search.deleted:
                state = "expired"
                problem = f"the broker has deleted this part of its commit log, and {not_archived}"
            else:
                no_log = "" if self._folder is not None else ", and no store directory was given"
                problem = not_archived + no_log
        return Fetched(
            item=search.item,
            state=state,
            read_from=search.read_from,
            problem=problem,
            error=search.error,
            requests=search.requests,
            bytes=search.bytes,
            damaged=search.damaged or search.is_damaged_locally,
            instead=search.instead,
            withheld=search.sees is not None,
        )


def _runs(segment: ArchivedSegment, table: SegmentTable, searches: Sequence[Search]) -> list[_Run]:
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
    """Return the offsets of the log from and to which whole pieces cover `length` bytes at an offset."""
    begin, end = table.whole_pieces(offset - segment.start, offset - segment.start + length)
    return segment.start + begin, segment.start + end


@contextlib.contextmanager
def _failing(searches: Sequence[Search]) -> Iterator[None]:
    """Let searches know what keeps their messages from being read within the block."""
    try:
        yield
    except ObjectNotFound:
        for search in searches:
            search.gone = True  # the log has removed the object: the segment is archived no more, or again
    except (CorruptFile, StorageError, BudgetExceeded) as error:
        for search in searches:
            search.fail(error)


@contextlib.contextmanager
def _charged(segment: ArchivedSegment, search: Search) -> Iterator[None]:
    """Charge a search for the request within the block, unless the budget refuses it."""
    check_deadline(f"reading {segment.name}")
    search.requests += 1
    try:
        yield
    except BudgetExceeded:
        search.requests -= 1
        raise


def _read_table(
    archive: SegmentArchive, tables: dict[str, SegmentTable], one: tuple[ArchivedSegment, list[Search]]
) -> None:
    """Add the table of a segment that searches need, if it can be had."""
    segment, searches = one
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
                message = _decode(archive, pieces, search)
                if message.is_erased:
                    search.take_erased(message, run.segment.name)
                else:
                    search.take(message, "archived", run.segment.name)


def _get(
    archive: SegmentArchive, segment: ArchivedSegment, table: SegmentTable, search: Search, begin: int, end: int
) -> _Pieces:
    """Return whole pieces of a segment by one request, which `search` is charged for; damaged ones are fetched once
    more.
    """
    for _ in range(2):
        with _charged(segment, search):
            data = archive.read(segment, begin - segment.start, end - begin)
        search.bytes += len(data)
        if not (damage := table.damage(segment.name, begin - segment.start, data)):
            break
    return _Pieces(segment, table, begin, data, damage)


def _is_seen(archive: SegmentArchive, pieces: _Pieces, search: Search) -> bool:
    """Return whether a message of a topic that may be seen begins at the place; if not, that costs one request always,
    of as many pieces wherever it leads.
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


def _decode(archive: SegmentArchive, pieces: _Pieces, search: Search) -> Message:
    """Return the message that is searched for; one of unknown size that is longer than the pieces is fetched whole."""
    offset, size, segment = search.offset, search.size, pieces.segment
    at = offset - segment.start
    head = pieces.at(offset, HEAD_BYTES)
    if search.item is not None and size is not None and int.from_bytes(head[:4], "big") != size:
        size = None  # of an entry's place every message is of interest
    length = size
    if length is None and len(head) >= MIN_MESSAGE_BYTES:
        length = check_head(head, segment.end - offset, file=segment.name, file_offset=at, physical_offset=offset).size
        if offset - pieces.begin + length > len(pieces.data):
            whole = _covering(segment, pieces.table, offset, length)
            pieces = _get(archive, segment, pieces.table, search, *whole)
    data = pieces.at(offset, length or MIN_MESSAGE_BYTES)
    return decode_message(data, file=segment.name, file_offset=at, physical_offset=offset, size=size)


def _each(parts: Sequence[T], act: Callable[[T], None], threads: int) -> None:
    """Call `act` for every part, several at once; requests count where the caller's do."""
    if not parts:
        return
    if len(parts) == 1:
        act(parts[0])  # most messages are looked for in one place, and a thread costs more than reading it
        return
    with contextlib.closing(DaemonPool(max(threads, 1), "tiered-index-messages")) as pool:
        for future in [pool.submit(act, part) for part in parts]:
            future.result()


# of messages with one unique key so many are shown at a time
_MANY = 32


def messages_by_id(
    lookups: Lookups | None,
    source: RocketmqMessages,
    msg_id: str,
    topic: str | None,
    cursor: str | None = None,
    allow_partial: bool = False,
    *,
    by_key: MessageSource | None = None,
    **limits: Any,
) -> MessagesResult:
    """Return the message at the place that `msg_id` names or, with `topic`, those whose unique key it is.

    Where no message of the topic has that unique key, the one at the place is returned, if the id names one.
    `allow_partial` and `limits` are as in `Lookups.messages`; without `lookups`, and then without `topic`, there are
    none. `by_key` fetches those of a unique key in place of `source`. Raises as that, and `InvalidArgument` for no such
    id.
    """
    if lookups is None or topic is None:
        with contextlib.ExitStack() as stack:
            if lookups is not None:
                stack.enter_context(LookupBudget(lookups.config.prices, LookupLimits(**limits)).open())
            return MessagesResult(messages=(source.by_msg_id(msg_id),), status="complete")
    unique = ByUniqueKey(by_key or source)
    limits |= {"max_count": _MANY, "cursor": cursor, "allow_partial": allow_partial}
    answer = lookups.messages(topic, msg_id, source=unique, **limits)
    if not answer.messages and cursor is None:
        answer = replace(answer, messages=_by_place(source, topic, msg_id))
    return answer


def describe_fetched(fetched: Fetched, body: BodyFormat, *, max_body_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """Return what became of an entry, its message among it, JSON-ready; `body` and `max_body_bytes` as in
    `show_body`.
    """
    message = fetched.message
    shown = {"message": message.to_dict(body, max_body_bytes)} if isinstance(message, Message) else {}
    return fetched.to_dict() | shown


@dataclass(frozen=True)
class ByUniqueKey:
    """Gives only messages whose unique key is the one asked for; others that carry it are paged past."""

    source: MessageSource

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return what became of each of `items`."""
        fetched = self.source.fetch(items, topic, key)
        return [
            one
            if one.message is None or getattr(one.message, "uniq_key", None) == key
            else replace(one, carries_key=False)
            for one in fetched
        ]


@dataclass(frozen=True)
class Containing:
    """Gives only messages that have `text`, in any case, in body, tags, keys, ids or properties; others are paged past.

    A message that can't be read, or not decompressed within `max_body_bytes`, may have it, and stays in the answer.
    One that the deadline leaves no time to search has an error.
    """

    source: MessageSource
    text: str
    max_body_bytes: int = MAX_BODY_BYTES

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return what became of each of `items`."""
        wanted = self.text.casefold()
        return [self._searched(one, wanted) for one in self.source.fetch(items, topic, key)]

    def _searched(self, one: Fetched, wanted: str) -> Fetched:
        try:
            # a few stored bytes can become megabytes of text
            check_deadline("searching messages for a text")
        except BudgetExceeded as error:
            if one.message is None or not one.carries_key:
                return one
            return replace(one, state="missing", message=None, problem=str(error), error=error)
        return self._passed_over(one, wanted)

    def _passed_over(self, one: Fetched, wanted: str) -> Fetched:
        message = one.message
        if not isinstance(message, Message) or not one.carries_key or self._has(message, wanted):
            return one
        # what was read of many messages is not kept
        return replace(one, message=one.message if one.instead is not None else None, carries_key=False)

    def _has(self, message: Message, wanted: str) -> bool:
        try:
            body = message.body(self.max_body_bytes)
        except CorruptFile:
            return True
        names = (message.offset_msg_id, *message.index_keys, *message.properties.values())
        return any(wanted in text.casefold() for text in names) or _body_has(body, wanted)


def _body_has(body: bytes, wanted: str) -> bool:
    """Return whether a body has the folded text `wanted`. As a whole, its text would take many times its bytes."""
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for at in range(0, len(body), _SEARCHED_BYTES):
        until = at + _SEARCHED_BYTES
        # the text may lie across two parts
        text = text[max(0, len(text) - len(wanted) + 1) :]
        text += decoder.decode(body[at:until], until >= len(body)).casefold()
        if wanted in text:
            return True
    return False


def _by_place(source: RocketmqMessages, topic: str, msg_id: str) -> tuple[Fetched, ...]:
    """Return the topic's message at the place that the id names, if it names one; RocketMQ's tools do so."""
    with contextlib.suppress(InvalidArgument):
        fetched = source.by_msg_id(msg_id)
        if fetched.message is None or getattr(fetched.message, "topic", None) == topic:
            return (fetched,)
    return ()
