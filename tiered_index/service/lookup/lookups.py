"""The lookups that a writer and its readers have in common: one signature, one meaning.

Threads: every method from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tiered_index.config import IndexConfig
from tiered_index.format.schema import Schema
from tiered_index.service.answers.batch import QueryResults
from tiered_index.service.answers.validation import check_lookups
from tiered_index.service.catalog.catalog import Catalog, Handle
from tiered_index.service.cold.memory_cache import CacheUse
from tiered_index.service.cold.path import ColdPath
from tiered_index.service.log.state import LogState
from tiered_index.service.lookup.budget import LookupBudget, LookupLimits
from tiered_index.service.lookup.messages import LookupArguments, MessageSource, MessagesResult, find_messages
from tiered_index.service.lookup.query import MissingObjects, QueryEngine, past_lost_objects
from tiered_index.storage.metering import PriceTable
from tiered_index.types import Lookup, QueryResult

__all__ = ["Lookups"]

T = TypeVar("T")
_NO_LIMITS = LookupLimits()


class Lookups(ABC):
    """Base of `IndexService` and `IndexReader`, which supply the files."""

    config: IndexConfig
    _engine: QueryEngine
    _schema: Schema
    _catalogs: Sequence[Catalog]
    _cold_paths: Sequence[ColdPath]
    _prices: PriceTable
    _always_accounted = True
    # whether requests can be made beside those for files, so that each lookup needs an account of its own

    def query(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 64,
        cursor: str | None = None,
        allow_partial: bool = False,
        *,
        max_requests: int | None = None,
        max_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> QueryResult:
        """Return the newest `max_count` messages of `topic` that carry `key`, stored in the inclusive range [begin_ms,
        end_ms].

        The range is compared by whole seconds. Buffered, unsealed, compacted and uploaded entries answer alike; a
        reader does not see what its writer has not flushed. `cursor` continues a truncated answer. `max_requests`,
        `max_bytes` (read from the storage) and `timeout_s` bound what the lookup may cost.

        Raises `InvalidArgument`, `InvalidCursor`; where a file can't be read `StorageUnavailable`, `CorruptFile` or
        `PartialAnswer`; where a bound was reached `BudgetExceeded`, whose `result` is what was found. With
        `allow_partial` the status is ``partial`` instead, and `failed` names each file and why.
        """
        limits = _NO_LIMITS
        if max_requests is not None or max_bytes is not None or timeout_s is not None:
            limits = LookupLimits(max_requests, max_bytes, timeout_s)
        return self._answer(
            allow_partial,
            limits,
            lambda lost, account: self._engine.query(
                self._handles,
                topic,
                key,
                begin_ms,
                end_ms,
                max_count,
                cursor,
                allow_partial,
                lost=lost,
                account=account,
            ),
        )

    def query_many(
        self,
        lookups: Iterable[Lookup],
        allow_partial: bool = False,
        *,
        max_requests: int | None = None,
        max_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> QueryResults:
        """Answer many lookups at once, in their order, each file read once for all of them; arguments and errors as
        `query`.

        The bounds are of the whole call. The result is a sequence of `QueryResult`, each made when it is looked at.
        """
        self._check_open()
        asked = check_lookups(lookups)
        return self._answer(
            allow_partial,
            LookupLimits(max_requests, max_bytes, timeout_s),
            lambda lost, account: self._engine.query_many(
                self._handles, asked, allow_partial, lost=lost, account=account
            ),
        )

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
        max_requests: int | None = None,
        max_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> MessagesResult:
        """Return the newest `max_count` messages themselves, each with its state, fetched from `source`; arguments as
        `query`.

        Entries of other keys with an equal hash are dropped, counted, and paged past; a message that can't be had is
        listed with its state. The bounds are of the whole call, reads of archived messages included. Raises as `query`,
        also where a message's place can't be asked; with `allow_partial` the status is ``partial`` then. The `result`
        of a `BudgetExceeded` is a `MessagesResult`.
        """
        self._check_one_index()
        asked = LookupArguments(topic, key, begin_ms, end_ms, max_count, cursor, allow_partial)
        with LookupBudget(self._prices, LookupLimits(max_requests, max_bytes, timeout_s)).open() as account:
            return find_messages(self.query, asked, source, self._schema, account)

    def cache_use(self) -> dict[str, CacheUse]:
        """Return how the caches in memory were used so far: ``blocks``, ``directories``, ``filters``; those of several
        indexes together.
        """
        return self._cold_paths[0].use()  # they are shared by all

    def _answer(
        self, allow_partial: bool, limits: LookupLimits, ask_engine: Callable[[MissingObjects, LookupBudget | None], T]
    ) -> T:
        self._check_open()
        if not self._always_accounted and not limits.any:
            return past_lost_objects(self._catalogs, self._read_log, allow_partial, lambda lost: ask_engine(lost, None))
        with LookupBudget(self._prices, limits).open() as account:
            self._prepare()
            return past_lost_objects(
                self._catalogs, self._read_log, allow_partial, lambda lost: ask_engine(lost, account)
            )

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `InvalidArgument` where it was closed."""

    def _check_one_index(self) -> None:  # noqa: B027 - most are of one
        """Raise `InvalidArgument` where several indexes are read as one."""

    @abstractmethod
    def _handles(self, second_min: int, second_max: int) -> Sequence[Handle]:
        """Return what may hold answers in an inclusive range of epoch seconds."""

    @abstractmethod
    def _read_log(self, uri: str) -> LogState:
        """Read what the log of the storage `uri` has gained, and show it in its catalog."""

    def _prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """Do what is due before a lookup."""
