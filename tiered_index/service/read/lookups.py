"""The base class of writers and readers: lookups, and the state of the storage's log.

Threads: every method from any thread.
"""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

from tiered_index.base.call import Call, active_context
from tiered_index.base.kernels import compiled_views
from tiered_index.base.locks import Lock, check_not_nested
from tiered_index.base.tracing import is_traced, span
from tiered_index.config import IndexConfig
from tiered_index.errors import IndexClosed, InvalidArgument, InvalidCursor, PartialAnswer, TieredIndexError
from tiered_index.format.metadata import NamedStats
from tiered_index.format.schema import Schema
from tiered_index.format.topic_documents import TopicDocument, names_of_keys
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.budget import Limits, LookupBudget, LookupLimits
from tiered_index.service.read.answers.lookup_columns import check_lookups
from tiered_index.service.read.answers.messages import MessageLookup, MessageSource, MessagesResult
from tiered_index.service.read.answers.results import QueryResults
from tiered_index.service.read.answers.rows import check_range, check_topic, encode_cursor, once, query_digest
from tiered_index.service.read.caches.store import CacheUse
from tiered_index.service.read.file_scans import LookupScan, StatsScan
from tiered_index.service.read.files.cold_path import ColdPath
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.inventory import Leftovers, du_table, files_table
from tiered_index.service.read.query import QueryEngine
from tiered_index.service.read.scan import Begun, LookupFiles, LookupRun, Pass, ScanT, SearchAll
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.metering import Usage
from tiered_index.storage.prices import PriceTable
from tiered_index.types import IndexItem, ItemT, Lookup, QueryResult, TopicsResult, TopicSummary

if TYPE_CHECKING:
    import pyarrow as pa

    from tiered_index.config import IndexSettings
    from tiered_index.service.read.export import Export

T = TypeVar("T")
NO_LIMITS = LookupLimits()
# a call that counts requests, for which a view makes none
_COUNTED = Call(usages=(Usage(),))
# a lookup that reads neither a disk nor a storage: the deadline of its requests has passed
_AT_ONCE = Call(deadline_s=0.0, waits=False)
# most files of a lookup that does not wait, because each takes time for its report
_FILES_NOW = 500
_TRACED = ("requests", "bytes", "cost_usd", "files_read", "files_skipped")


def config_of(config: IndexConfig | None, environment: bool, settings: IndexSettings, **more: Any) -> IndexConfig:
    """Return `config`, or the configuration of settings by name. Raises `InvalidArgument` if both are given."""
    if config is None:
        return IndexConfig.load(environment=environment, **more, **settings)
    if settings or any(value is not None for value in more.values()):
        raise InvalidArgument("give a config or settings by name, not both")
    return config


def _span_attributes(answer: Any) -> dict[str, Any]:
    """Return the attributes of a lookup's span: counts and costs, never its key."""
    attributes: dict[str, Any] = {"tiered_index.count": len(answer)}
    if (explain := getattr(answer, "explain", None)) is not None:
        attributes |= {f"tiered_index.{name}": getattr(explain, name) for name in _TRACED}
    if (status := getattr(answer, "status", None)) is not None:
        attributes["tiered_index.status"] = status
    return attributes


class Lookups(ABC, Generic[ItemT]):
    """Base class of `IndexService` and `IndexReader`: lookups, exports and inventory."""

    config: IndexConfig
    _called = "index"
    # the reason why further calls raise `IndexClosed`; None: they don't
    _refused: str | None = None
    # that calls hold for a moment
    _locks: list[Lock]
    _engine: QueryEngine
    _cold_paths: Sequence[ColdPath]
    _prices: PriceTable
    _leftovers: Leftovers | None = None

    def query(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 64,
        cursor: str | None = None,
        allow_partial: bool = False,
        **limits: Unpack[Limits],
    ) -> QueryResult[ItemT]:
        """Return the newest `max_count` entries of `key` in `topic`, in the inclusive range [begin_ms, end_ms].

        Bounds are epoch milliseconds and match by whole seconds. The answer is the same in every state of the files. A
        reader does not see entries that its writer has not flushed. `cursor` continues a truncated answer.
        `max_requests`, `max_bytes` (read from the storage) and `timeout_s` bound the lookup.

        Raises `InvalidArgument`, `InvalidCursor` and `IndexClosed`. If a file can't be read it raises
        `StorageUnavailable`, `CorruptFile` or `PartialAnswer`; at a bound `BudgetExceeded`, whose `result` has the
        entries found so far. With `allow_partial` the status is ``partial`` instead, and `failed` names each file and
        the reason. A folder below a prefix that this user may not read makes the status ``partial`` in any case.
        """
        engine = self._engine
        bounds = LookupLimits.of(self.query, limits) if limits else NO_LIMITS
        begun: Begun | None = None
        if compiled_views() is not None and not is_traced() and (files := self._files_now(topic, key)) is not None:
            call = _COUNTED if limits else active_context()
            answer = engine.at_once(files, topic, key, begin_ms, end_ms, max_count, cursor, call)
            if isinstance(answer, QueryResult):
                return answer
            if answer is not None and files.has_topics:
                begun = Begun(files, answer)
        self._check_open()
        lookup = engine.prepare(topic, key, begin_ms, end_ms, max_count, cursor)
        return self._answer("query", lambda search: engine.query(search, lookup), allow_partial, bounds, begun)

    def query_nowait(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 64,
        cursor: str | None = None,
    ) -> QueryResult[ItemT] | None:
        """Return the answer of `query` if it is in memory; None: call `query`.

        The call takes microseconds, so an event loop may make it. The system may have to read a part of a local file
        from the disk. The call also returns None in these cases:

        - A writer's buffer has an entry of the key, or some thousands of entries.
        - It has entries, and the index is of preset ``rocketmq``, or no file in the range has the topic.
        - The list of files has changed since the last `query`, or a reader has to read the storage's log.
        - The index has more than 500 files, or several indexes are read.
        - A stored file may have entries, and no cache has its part.
        - The topic has files: their places may have to be read.
        - The storage's log can't be read.
        - `query` would raise an error.
        - The compiled core is missing, or spans are recorded.

        Arguments: see `query`. Any thread.
        """
        engine = self._engine
        if is_traced():
            return None
        files = self._files_now(topic, key)
        if not isinstance(files, LookupFiles) or files.view is None or len(files.view.labels) > _FILES_NOW:
            return None
        with contextlib.suppress(InvalidArgument, InvalidCursor):
            answer = engine.at_once(files, topic, key, begin_ms, end_ms, max_count, cursor, _AT_ONCE)
            if isinstance(answer, QueryResult) and not engine.form.has_files(topic):
                return answer
        return None

    def query_all(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 1000,
        allow_partial: bool = False,
    ) -> Iterator[QueryResult[ItemT]]:
        """Yield an answer page by page, each of at most `max_count` entries.

        An entry is on one page only. Each page but the last is ``truncated``, or ``partial`` if files could not be
        read. A page is looked up when you ask for it. To bound the cost of a page, use `query` and its cursor.
        Arguments and errors: see `query`.
        """
        seen: set[tuple[object, ...]] = set()
        cursor = None
        while True:
            page = self.query(topic, key, begin_ms, end_ms, max_count, cursor, allow_partial)
            yield once(page, seen)
            cursor = page.cursor
            if cursor is None:
                return

    def query_many(
        self,
        lookups: Iterable[Lookup | tuple[str, str]],
        allow_partial: bool = False,
        *,
        max_count: int = 64,
        **limits: Unpack[Limits],
    ) -> QueryResults[ItemT]:
        """Answer many lookups, in their order; each file is read once for all of them.

        A lookup is a `Lookup`, or a tuple (topic, key) for the newest `max_count` entries. The result is a sequence of
        `QueryResult`, each built on access. The bounds apply to the whole call. With `allow_partial`, only lookups that
        need an unreadable file are partial. Other arguments and errors: see `query`.
        """
        bounds = LookupLimits.of(self.query_many, limits)
        self._check_open()
        checked = check_lookups(lookups, max_count)

        def answer(search_all: SearchAll[LookupScan]) -> QueryResults[ItemT]:
            return self._engine.query_many(search_all, checked, allow_partial)

        return self._answer("query_many", answer, allow_partial, bounds)

    def messages(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 64,
        cursor: str | None = None,
        allow_partial: bool = False,
        *,
        source: MessageSource,
        max_message_bytes: int | None = None,
        max_read: int | None = None,
        **limits: Unpack[Limits],
    ) -> MessagesResult:
        """Return the newest `max_count` messages of a key, each with its state, fetched from `source`.

        Entries of other keys with an equal hash are dropped and counted. A message that can't be read is in the answer
        with its state. The bounds apply to the whole call, including reads of archived messages. If the place of a
        message can't be read the call raises; with `allow_partial` the status is ``partial`` instead. `result` of
        `BudgetExceeded` is a `MessagesResult`. `max_message_bytes` bounds the stored bytes of the messages: the answer
        is truncated there, after at least one message. `max_read` bounds the number of messages that are fetched, also
        those that are dropped: the answer is truncated there, perhaps without a message. Other arguments and errors:
        see `query`.
        """
        topic = check_topic(topic)
        lookup = Lookup(topic=topic, key=key, begin_ms=begin_ms, end_ms=end_ms, max_count=max_count, cursor=cursor)
        bounds = LookupLimits.of(self.messages, limits)
        self._check_open()
        with LookupBudget(self._prices, bounds).open() as budget:
            with span("messages"):
                order_key = self._engine.order_key
                return MessageLookup(
                    self.query, lookup, allow_partial, source, order_key, budget, max_message_bytes, max_read
                ).run()

    def cursor_after(self, topic: str, key: str, begin_ms: int | None, end_ms: int | None, item: IndexItem) -> str:
        """Return the cursor of the page after `item`, an entry of the answer to this lookup."""
        second_min, second_max, _ = check_range(begin_ms, end_ms, 1)
        return encode_cursor(self._engine.order_key(item), query_digest(topic, key, second_min, second_max))

    def topics(
        self,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        allow_partial: bool = False,
        **limits: Unpack[Limits],
    ) -> TopicsResult:
        """Return the topics of the inclusive range [begin_ms, end_ms], with their entries and bytes.

        A topic is left out if its entries in each file are before or after the range. The sums have all entries of a
        topic in each other file, also those outside of the range.

        The call reads the directory of each stored file: one request unless it is cached. Arguments and errors: see
        `query`.
        """
        bounds = LookupLimits.of(self.topics, limits)
        self._check_open()
        within = check_range(begin_ms, end_ms, 1)[:2]

        def answer(search_all: SearchAll[StatsScan]) -> TopicsResult:
            return self._engine.topics(search_all, lambda run: self._once(run.files, run.call, *within), *within)

        result = self._answer("topics", answer, allow_partial, bounds)
        indexes = self.documents_of_indexes().values()
        topics = [
            _described(topic, [documents[topic.topic] for documents in indexes if topic.topic in documents])
            for topic in result.topics
        ]
        return replace(result, topics=tuple(topics))

    @abstractmethod
    def documents_of_indexes(self) -> dict[str | None, dict[str, TopicDocument]]:
        """See `IndexReader.documents_of_indexes`."""

    def export(
        self,
        topics: str | Iterable[str] | None = None,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        *,
        allow_partial: bool = False,
    ) -> Export:
        """Return the stored entries of `topics` (None: all) in the inclusive range [begin_ms, end_ms] as Arrow batches.

        The range matches by whole seconds. Batches are read as you take them. Every stored entry comes once, also
        several of one identity, as of one position of the log. A writer's export has all entries put before it, a
        reader's those that its writer had flushed. Only one index can be exported. An export may take as long as
        `orphans` keeps replaced objects (a day by default).

        Raises `InvalidArgument`; `StorageUnavailable` or `CorruptFile` if a file can't be read.

        A root without its storage gives the entries of the root, as of the log that its writer knew. `not_asked` of the
        export says why. `missing` names the objects that only the storage has: they raise `PartialAnswer` unless
        `allow_partial` is given.
        """
        # imported here, because a lookup of one key needs no Arrow
        from tiered_index.service.read.export import Export, ExportRange, topics_of

        self._check_open()
        self._check_one_index()
        second_min, second_max, _ = check_range(begin_ms, end_ms, 1)
        names = topics_of(topics)
        wanted = ExportRange(None if names is None else frozenset(map(check_topic, names)), second_min, second_max)
        with contextlib.ExitStack() as held:
            call = active_context()
            files = held.enter_context(self._taking(self._begin(call), call))
            handles = self._once(files, call, second_min, second_max)
            resources = held.pop_all()
            held.push(resources)  # closed if the export can't begin
            own = self._cold_paths[0].storage, self._check_open, lambda uri: self._read_log(uri, call), resources
            made = Export(wanted, self.schema, files.states[0], handles, *own, not_asked=files.not_asked)
            held.pop_all()
        if made.missing and not allow_partial:
            made.close()
            raise PartialAnswer(
                f"cannot export {len(made.missing)} objects, {made.missing[0]} first: only the storage has "
                f"them, and it was not asked ({made.not_asked}). Export again when it answers, or pass "
                "allow_partial=True to leave them out"
            )
        return made

    def files_table(self) -> pa.Table:
        """Return an Arrow table with a row for each file and window table, without reading entries. One index only.

        - file_id, state, lane, path, object and error are text.
        - sequence, begin_ms, end_ms (inclusive epoch milliseconds), entries and bytes are int64.
        - table is a struct for window tables: begin_ms, window_s, slots, and the names of the shards. Else it is null.
        """
        self._check_one_index()
        return files_table(self.files())

    def du(self) -> pa.Table:
        """Return stored entries, bytes and monthly cost by topic, day (UTC) and state, as an Arrow table.

        One index only.

        Columns: topic (text), day (date32), state (text), entries (int64), bytes (int64), usd_a_month (float64) and
        estimated (bool). The topic is null for archived segments and for files without topic names; the day is null if
        it is not known. The state is the `place` of a file, or ``archived``. The cost is that of objects in the
        storage, by the setting `prices`. A topic has a share of a file's bytes by its entries. The entries of a file of
        several days are assumed to be spread evenly over them: `estimated`.

        The call reads the directory of each stored file: one request unless it is cached. Errors: see `topics`.
        """
        self._check_open()
        self._check_one_index()
        within = check_range(None, None, 1)[:2]

        def answer(search_all: SearchAll[StatsScan]) -> list[tuple[Handle, NamedStats]]:
            return self._engine.file_stats(search_all, lambda run: self._once(run.files, run.call, *within), *within)

        stats = self._answer("du", answer, False, LookupLimits())
        return du_table(stats, self.segments(), self._prices)

    @property
    def item_type(self) -> type[IndexItem]:
        """The class of the entries."""
        return self._engine.item_type

    @property
    def schema(self) -> Schema:
        """The schema of the entries. One index only."""
        self._check_one_index()
        return self._engine.schema

    @property
    def log_state(self) -> LogState:
        """The state of the storage's log at the last refresh, as lookups see it. One index only."""
        self._check_process()
        self._check_one_index()
        return self._log_states()[0]

    def archived(self, store: str | None = None) -> tuple[ArchivedSegment, ...]:
        """Return the archived segments of `store` (None: of all stores), by store and start. One index only.

        An index may have a million: `segments` yields them one by one.
        """
        segments = self.segments()
        return tuple(segments if store is None else segments.of(store))

    def segments(self) -> Segments:
        """Return the segments of the log's state at the last refresh. One index only."""
        self._check_one_index()
        cold = self._cold_paths[0]
        return Segments(self.log_state, cold.storage, cold.caches.catalogs)

    def cache_use(self) -> dict[str, CacheUse]:
        """Return the use of the cache in memory, which all indexes share.

        By kind: ``directories``, ``filters``, ``slot_groups``, ``segments``, ``catalogs``.
        """
        self._check_process()
        return self._cold_paths[0].caches.use()

    @property
    def filter_false_positives(self) -> int:
        """Searches of stored files that found nothing although a cached filter allowed them."""
        return sum(cold.filters.false_positives for cold in self._cold_paths)

    def fetch_filter(self, file_id: str) -> bool:
        """Fetch the filter of a stored file now. Return whether it is cached then.

        `file_id` is an id of `files()`; for a window table, each shard's filter is fetched. A cached filter costs
        no request. Another one costs one request, and one more if the file's directory is not cached. Least recently
        used filters are evicted. False: the file has no filter, or the caches are too small for it. Any thread.

        Raises `InvalidArgument` if no stored file has the id; `StorageUnavailable`, `CorruptFile`; `ObjectNotFound` if
        the log has removed the file meanwhile.
        """
        self._check_open()
        if not isinstance(file_id, str):
            raise InvalidArgument(f"file_id must be text, not {file_id!r:.80}")
        cached = [
            cold.fetch_filter(stored)
            # not strict, because an index may appear meanwhile, after the others
            for cold, state in zip(self._cold_paths, self._log_states(), strict=False)
            for stored in [*state.tables.get(file_id, ()), state.files.get(file_id)]
            if stored is not None
        ]
        if not cached:
            raise InvalidArgument(f"no stored file has the id {file_id!r:.80}")
        return all(cached)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def files(self) -> list[Handle]:
        """Return the handles of all files, without buffered entries."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""

    def _answer(
        self,
        kind: str,
        answer: Callable[[SearchAll[Any]], T],
        allow_partial: bool,
        limits: LookupLimits,
        begun: Begun | None = None,
    ) -> T:
        status = "failed"
        try:
            with span(kind) as traced:
                budget = LookupBudget(self._prices, limits)
                result = answer(partial(self._search_all, budget, allow_partial, begun))
                if traced is not None and traced.is_recording():
                    traced.set_attributes(_span_attributes(result))
            status = getattr(result, "status", "partial" if getattr(result, "failed", ()) else "complete")
            return result
        except TieredIndexError as error:
            status = type(error).__name__
            raise
        finally:
            self._engine.count(kind, status)

    def _search_all(
        self, budget: LookupBudget, allow_partial: bool, begun: Begun | None, search: Callable[[LookupRun], Pass[ScanT]]
    ) -> Sequence[Pass[ScanT]]:
        """Return the pass of `search` over each index. Raises its errors. `begun`: the lookup, if it has begun."""
        call = budget.call
        take = partial(self._taking, self._begin(call), call)
        arguments = take, allow_partial, budget, call, self._prices, self._read_log, self._engine.files
        return [LookupRun(*arguments, begun=begun).run(search)]

    def _check_open(self) -> None:
        """Raise `IndexClosed` if the index is closed or can't be used any more, and as `check_not_nested`."""
        if self._refused is not None:
            raise IndexClosed(self._refused)
        check_not_nested(self._locks)

    def _check_process(self) -> None:
        """Raise `IndexClosed` in a forked child, and as `check_not_nested`. A closed index may take the call."""
        if self._refused == IndexClosed.FORKED:
            raise IndexClosed(self._refused)
        check_not_nested(self._locks)

    def _refuse_as_closed(self) -> bool:
        """Refuse further calls, and return whether there is anything to close: a forked child owns nothing."""
        if self._refused == IndexClosed.FORKED:
            return False
        self._refused = f"the {self._called} is closed: open it again"
        return True

    def _once(self, files: LookupFiles, call: Call, second_min: int, second_max: int) -> Sequence[Handle]:
        """Return the files of inclusive epoch seconds, without local ones that a record has removed."""
        handles = files.handles(second_min, second_max)
        if len(files.states) != 1 or files.not_asked is not None:
            return handles
        if self._leftovers is None:
            self._leftovers = Leftovers(self._cold_paths[0].storage)
        return call.run(partial(self._leftovers.without, handles, files.states[0]))

    def _check_one_index(self) -> None:
        """Raise `InvalidArgument` if this reads several indexes as one."""

    @abstractmethod
    def _files_now(self, topic: str, key: str) -> Any:
        """Return the present files, with a view, for the engine's `at_once`.

        Nothing beside them may have the key. None: a lookup needs more than a view.
        """

    @abstractmethod
    def _begin(self, call: Call) -> float:
        """Read what is due for a lookup's `call`.

        Return the time at which the lookup began (of the clock's `monotonic_s`).
        """

    @abstractmethod
    def _taking(self, begun_s: float, call: Call) -> contextlib.AbstractContextManager[LookupFiles]:
        """Return a context manager that yields the present snapshots for a lookup that began at `begun_s`.

        Inside it they keep their files.
        """

    @abstractmethod
    def _log_states(self) -> Sequence[LogState]:
        """Return the present log state of each index, in the order of `_cold_paths`."""

    def _check_opened(self) -> None:
        """Raise the error of an index that could not be opened: it may have what no other index has."""
        if (problem := self._unopened_problem()) is not None:
            raise copy.copy(problem)

    def _unopened_problem(self) -> TieredIndexError | None:
        """Return the error of an index that `_log_states` lacks because it could not be opened yet; None: no such."""
        return None

    @abstractmethod
    def _read_log(self, uri: str, call: Call) -> LogState:
        """For a `call`, read new records of the log of storage `uri`, update its catalog, and return the state."""


opened_ones: weakref.WeakSet[Lookups[Any]] = weakref.WeakSet()
"""The indexes and readers of this process that were opened and may be closed."""


def _refuse_after_fork() -> None:
    # here and not in each call, because a put takes less time than asking the system for the process id
    for index in list(opened_ones):
        index._refused = IndexClosed.FORKED


os.register_at_fork(after_in_child=_refuse_after_fork)


def _described(topic: TopicSummary, documents: Sequence[TopicDocument]) -> TopicSummary:
    """Return the summary of a topic with what its documents say: that of each index."""
    if not documents:
        return topic
    return replace(topic, key_names=names_of_keys(documents), connector=documents[0].connector)
