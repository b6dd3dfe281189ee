"""`AsyncIndexReader`: an `IndexReader` for asyncio. Its calls run in threads and end when their task is cancelled.

Each call has its own `Usage` in its context. A cancelled task sets the usage's bound to 0, so that the storage refuses
all further requests of the call. A request that is under way is not interrupted. Threads: those of one event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from tiered_index.errors import IndexClosed
from tiered_index.service.lookup.export import Export
from tiered_index.service.reader import IndexReader
from tiered_index.service.reading.parts import hand_over
from tiered_index.service.threads import DaemonPool
from tiered_index.storage.context import active_context
from tiered_index.storage.metering import Usage
from tiered_index.types import QueryResult

P = ParamSpec("P")
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
        usage.max_requests = 0
        future.add_done_callback(partial(hand_over, late))
        raise


def _in_a_thread(
    method: Callable[Concatenate[IndexReader, P], T],
) -> Callable[Concatenate[AsyncIndexReader, P], Coroutine[Any, Any, T]]:
    """Return an awaitable form of a method of `IndexReader`: same arguments, result and errors."""

    @wraps(method)
    async def awaited(self: AsyncIndexReader, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await run_in_thread(self._threads, lambda: method(self.reader, *args, **kwargs))

    return awaited


def _opened_in_a_thread(open_reader: Callable[P, IndexReader]) -> Callable[P, Coroutine[Any, Any, AsyncIndexReader]]:
    """Return an awaitable form of `IndexReader.open`: same arguments and errors."""

    @wraps(open_reader)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> AsyncIndexReader:
        opening = partial(open_reader, *args, **kwargs)
        pool = DaemonPool(1, "tiered-index-async-open")
        return AsyncIndexReader(await run_in_thread(pool, opening, IndexReader.close))

    return awaited


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


class AsyncIndexReader:
    """An `IndexReader` whose calls are awaited.

    Open it with ``async with await AsyncIndexReader.open(...) as reader``. Calls run in threads, up to 32 at a time. If
    you cancel the task of a call, the await ends at once and the call sends no further requests. `reader` is the
    `IndexReader`.
    """

    def __init__(self, reader: IndexReader) -> None:
        """Wrap a reader; prefer `open`. `close` closes the reader."""
        self.reader = reader
        self._threads = DaemonPool(_THREADS, "tiered-index-async")

    open = staticmethod(_opened_in_a_thread(IndexReader.open))
    query = _in_a_thread(IndexReader.query)
    query_many = _in_a_thread(IndexReader.query_many)
    messages = _in_a_thread(IndexReader.messages)
    topics = _in_a_thread(IndexReader.topics)
    writers = _in_a_thread(IndexReader.writers)
    refresh = _in_a_thread(IndexReader.refresh)

    async def query_all(self, *args: Any, **kwargs: Any) -> AsyncIterator[QueryResult]:
        """Yield an answer page by page, with the arguments and errors of `IndexReader.query_all`."""
        pages = self.reader.query_all(*args, **kwargs)
        while (page := await run_in_thread(self._threads, partial(next, pages, None))) is not None:
            yield page

    async def export(self, *args: Any, **kwargs: Any) -> AsyncExport:
        """Export the entries, with the arguments, rows and errors of `IndexReader.export`."""
        beginning = partial(self.reader.export, *args, **kwargs)
        return AsyncExport(await run_in_thread(self._threads, beginning, Export.close), self._threads)

    async def close(self) -> None:
        """Release threads and connections. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.reader.close()
        self._threads.close()

    async def __aenter__(self) -> AsyncIndexReader:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
