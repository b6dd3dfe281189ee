"""`AsyncIndexReader`: an `IndexReader` for asyncio. Its calls run in threads and end when their task is cancelled.

Each call has its own `Cancellation` in its context. A cancelled task sets it, so that no further request of the call is
sent. A request that is under way is not interrupted. Threads: those of one event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

import pyarrow as pa

from tiered_index.base.call import Cancellation, active_context
from tiered_index.base.clock import Clock
from tiered_index.base.threads import DaemonPool
from tiered_index.config import IndexConfig
from tiered_index.errors import IndexClosed
from tiered_index.service.read.export import Export
from tiered_index.service.read.parts import hand_over
from tiered_index.service.reader import IndexReader
from tiered_index.storage.base import Storage
from tiered_index.types import ItemT, OpenedT

if TYPE_CHECKING:
    from tiered_index.config import IndexSettings

T = TypeVar("T")
P = ParamSpec("P")
# Most calls of one reader at the same time; further calls wait
_THREADS = 32


async def run_in_thread(threads: DaemonPool, call: Callable[[], T], late: Callable[[T], object] = lambda _: None) -> T:
    """Run `call` in a thread and return its result. If the task is cancelled, `late` gets the result of the call."""
    cancellation = Cancellation()
    with active_context().cancelled_by(cancellation).active():
        future = threads.submit(call)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        cancellation.set()
        future.add_done_callback(partial(hand_over, late))
        raise


def _threaded(
    method: Callable[Concatenate[IndexReader[ItemT], P], T],
) -> Callable[Concatenate[AsyncIndexReader[ItemT], P], Coroutine[Any, Any, T]]:
    """Return the method of `AsyncIndexReader` that runs a method of its reader in a thread."""

    @wraps(method)
    async def call(self: AsyncIndexReader[ItemT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await run_in_thread(self._threads, partial(method, self.reader, *args, **kwargs))

    return call


def _iterated(
    method: Callable[Concatenate[IndexReader[ItemT], P], Iterator[T]],
) -> Callable[Concatenate[AsyncIndexReader[ItemT], P], AsyncIterator[T]]:
    """Return the method of `AsyncIndexReader` that reads each item of a method of its reader in a thread."""

    @wraps(method)
    async def call(self: AsyncIndexReader[ItemT], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        items = method(self.reader, *args, **kwargs)
        while (item := await run_in_thread(self._threads, partial(next, items, None))) is not None:
            yield item

    return call


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

    query = _threaded(IndexReader.query)
    query_many = _threaded(IndexReader.query_many)
    messages = _threaded(IndexReader.messages)
    topics = _threaded(IndexReader.topics)
    topic_documents = _threaded(IndexReader.topic_documents)
    writers = _threaded(IndexReader.writers)
    refresh = _threaded(IndexReader.refresh)
    query_all = _iterated(IndexReader.query_all)

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
