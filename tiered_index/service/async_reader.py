"""`AsyncIndexReader`: an `IndexReader` for asyncio. Its calls run in threads and end when their task is cancelled.

Each call has its own `Usage` in its context. A cancelled task cancels the usage, so that the storage refuses all
further requests of the call. A request that is under way is not interrupted. Threads: those of one event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Self, TypeVar, Unpack

import pyarrow as pa

from tiered_index.base.call import active_context
from tiered_index.base.clock import Clock
from tiered_index.base.threads import DaemonPool
from tiered_index.config import IndexConfig
from tiered_index.errors import IndexClosed
from tiered_index.service.log.session import WriterStatus
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.budget import Limits
from tiered_index.service.read.answers.messages import MessageSource, MessagesResult
from tiered_index.service.read.answers.results import QueryResults
from tiered_index.service.read.export import Export
from tiered_index.service.read.parts import hand_over
from tiered_index.service.reader import IndexReader
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import Usage
from tiered_index.types import ItemT, Lookup, OpenedT, QueryResult, TopicsResult

if TYPE_CHECKING:
    from tiered_index.config import IndexSettings

T = TypeVar("T")
# Most calls of one reader at the same time; further calls wait
_THREADS = 32


async def run_in_thread(threads: DaemonPool, call: Callable[[], T], late: Callable[[T], object] = lambda _: None) -> T:
    """Run `call` in a thread and return its result. If the task is cancelled, `late` gets the result of the call."""
    usage = Usage()
    with active_context().counting(usage).active():
        future = threads.submit(call)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        usage.cancel()
        future.add_done_callback(partial(hand_over, late))
        raise


class AsyncExport:
    """An `Export` for asyncio: ``async for batch in export``. Close it, or use it as an asynchronous context manager.

    `export` is the `Export`, with the schema and the counts so far. Errors are those of an `Export`. If a task is
    cancelled while it waits for a batch, the next call raises `IndexClosed`.
    """

    def __init__(self, export: Export, threads: DaemonPool) -> None:
        self.export = export
        self._threads = threads
        # a thread may still read a cancelled batch when the export is closed
        self._lock = threading.Lock()
        # whether a cancelled task asked for a batch, which nobody gets
        self._lost = False

    def __aiter__(self) -> AsyncExport:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        if self._lost:
            raise IndexClosed("a cancelled task lost a batch of this export: begin the export again")
        try:
            batch = await run_in_thread(self._threads, self._next)
        except asyncio.CancelledError:
            self._lost = True
            raise
        if batch is None:
            raise StopAsyncIteration
        return batch

    def _next(self) -> pa.RecordBatch | None:
        with self._lock:
            return next(self.export, None)

    async def close(self) -> None:
        """Release the files. Idempotent."""
        await asyncio.to_thread(self._close)
        self._lost = False

    def _close(self) -> None:
        with self._lock:
            self.export.close()

    async def __aenter__(self) -> AsyncExport:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncIndexReader(Generic[ItemT]):
    """An `IndexReader` whose calls are awaited.

    Open it with ``async with await AsyncIndexReader.open(...) as reader``. Calls run in threads, up to 32 at a time. If
    you cancel the task of a call, the await ends at once and the call sends no further requests. `reader` is the
    `IndexReader`.
    """

    def __init__(self, reader: IndexReader[ItemT]) -> None:
        """Wrap a reader; prefer `open`. `close` closes the reader."""
        self.reader = reader
        self._threads = DaemonPool(_THREADS, "tiered-index-async")

    @staticmethod
    async def open(
        storage: str | Sequence[str] | None = None,
        *,
        root: str | Path | None = None,
        config: IndexConfig | None = None,
        clock: Clock | None = None,
        storage_backend: Storage | None = None,
        timeout_s: float | None = None,
        item_type: type[OpenedT] | None = None,
        environment: bool = True,
        **settings: Unpack[IndexSettings],
    ) -> AsyncIndexReader[OpenedT]:
        """Open an index with the arguments and errors of `IndexReader.open`."""
        opening: Callable[[], IndexReader[OpenedT]] = partial(
            IndexReader.open,
            storage,
            root=root,
            config=config,
            clock=clock,
            storage_backend=storage_backend,
            timeout_s=timeout_s,
            item_type=item_type,
            environment=environment,
            **settings,
        )
        pool = DaemonPool(1, "tiered-index-async-open")
        return AsyncIndexReader(await run_in_thread(pool, opening, IndexReader.close))

    async def query(
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
        """Look up a key with the arguments, answer and errors of `IndexReader.query`."""
        look_up = partial(self.reader.query, topic, key, begin_ms, end_ms, max_count, cursor, allow_partial, **limits)
        return await run_in_thread(self._threads, look_up)

    async def query_many(
        self,
        lookups: Iterable[Lookup | tuple[str, str]],
        allow_partial: bool = False,
        *,
        max_count: int = 64,
        **limits: Unpack[Limits],
    ) -> QueryResults[ItemT]:
        """Answer many lookups with the arguments, answers and errors of `IndexReader.query_many`."""
        look_up = partial(self.reader.query_many, lookups, allow_partial, max_count=max_count, **limits)
        return await run_in_thread(self._threads, look_up)

    async def messages(
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
        """Look up the messages of a key with the arguments, answer and errors of `IndexReader.messages`."""
        look_up = partial(
            self.reader.messages,
            *(topic, key, begin_ms, end_ms, max_count, cursor, allow_partial),
            source=source,
            max_message_bytes=max_message_bytes,
            max_read=max_read,
            **limits,
        )
        return await run_in_thread(self._threads, look_up)

    async def topics(
        self,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        allow_partial: bool = False,
        **limits: Unpack[Limits],
    ) -> TopicsResult:
        """Return the topics with the arguments, answer and errors of `IndexReader.topics`."""
        return await run_in_thread(
            self._threads, partial(self.reader.topics, begin_ms, end_ms, allow_partial, **limits)
        )

    async def writers(self) -> dict[str, WriterStatus | None]:
        """Return the writers with the answer and errors of `IndexReader.writers`."""
        return await run_in_thread(self._threads, self.reader.writers)

    async def refresh(self) -> LogState:
        """Read new log records with the answer and errors of `IndexReader.refresh`."""
        return await run_in_thread(self._threads, self.reader.refresh)

    async def query_all(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 1000,
        allow_partial: bool = False,
    ) -> AsyncIterator[QueryResult[ItemT]]:
        """Yield an answer page by page, with the arguments and errors of `IndexReader.query_all`."""
        pages = self.reader.query_all(topic, key, begin_ms, end_ms, max_count, allow_partial)
        while (page := await run_in_thread(self._threads, partial(next, pages, None))) is not None:
            yield page

    async def export(
        self,
        topics: str | Iterable[str] | None = None,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        *,
        allow_partial: bool = False,
    ) -> AsyncExport:
        """Export the entries, with the arguments, rows and errors of `IndexReader.export`."""
        beginning = partial(self.reader.export, topics, begin_ms, end_ms, allow_partial=allow_partial)
        return AsyncExport(await run_in_thread(self._threads, beginning, Export.close), self._threads)

    async def close(self) -> None:
        """Release threads and connections. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.reader.close()
        self._threads.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
