"""Parts that one reader's indexes share: caches, thread pools, and a schema that names the index of each row.

If several indexes are read as one, the number of the index is the last identity column: equal positions in the logs of
two brokers are two messages. The number is a digest of the index's id, so order and cursors don't depend on the other
indexes. Threads: call every method from any thread, except from threads of the pool `threads`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from tiered_index.errors import BudgetExceeded
from tiered_index.format.schema import Column, Schema
from tiered_index.service.answers.batch import LookupBatch, Matches
from tiered_index.service.answers.rows import Array, PreparedLookup, check_schema
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.cold.caches import Caches
from tiered_index.service.cold.disk_cache import DiskCache
from tiered_index.service.cold.path import RangeReadPool
from tiered_index.service.reading.refreshed import Refreshed
from tiered_index.storage.context import active_context, check_deadline, remaining_s
from tiered_index.storage.pools import DaemonPool, NoThread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReaderParts:
    """The caches in memory and on disk (None: no disk cache), the pool of range reads, the threads that read logs."""

    caches: Caches
    disk_cache: DiskCache | None
    range_reads: RangeReadPool
    threads: DaemonPool

    def begin(self, read: Callable[[], T]) -> Future[T]:
        """Read a log in another thread, without the lookup's deadline. Raises as `DaemonPool.submit`."""
        with active_context().without_deadline().active():
            return self.threads.submit(read)

    def begin_or_run(self, read: Callable[[], T]) -> Future[T]:
        """As `begin`; in the caller's thread if no thread can be started."""
        return self.begin_all(self.begin, [read])[0]

    def begin_all(
        self, begin: Callable[[Callable[[], T]], Future[T]], calls: Sequence[Callable[[], T]]
    ) -> list[Future[T]]:
        """Run each call by `begin`, or in the caller's thread if no thread can be started."""
        begun: list[Future[T]] = []
        for call in calls:
            try:
                begun.append(begin(call))
            except NoThread:
                begun.append(Future())
                try:
                    begun[-1].set_result(call())
                except Exception as error:  # noqa: BLE001 - the caller of `result` gets it
                    begun[-1].set_exception(error)
        return begun

    def in_time(
        self, calls: Sequence[tuple[str, Callable[[], T]]], late: Callable[[T], object] = lambda _: None
    ) -> list[T]:
        """Run calls in parallel until the deadline, and return their results in order.

        Each call comes with a text for errors. Raises the first call's error, or `BudgetExceeded` with the text of an
        unfinished call at the deadline. After an error, `late` gets each result, also of calls still running.
        """
        if len(calls) == 1 and remaining_s() is None:
            return [calls[0][1]()]
        if calls:
            check_deadline(calls[0][0])
        made = self.begin_all(self.threads.submit, [call for _, call in calls])
        unfinished = wait(made, remaining_s()).not_done
        try:
            for (doing, _), future in zip(calls, made, strict=True):
                if future in unfinished:
                    raise BudgetExceeded(f"timeout_s was reached while {doing}")
            return [future.result() for future in made]
        except BaseException:  # also an interrupted wait: `late` closes the results
            for future in made:
                if not future.cancel():
                    future.add_done_callback(partial(hand_over, late))
            raise

    def close(self, until_s: float | None = None) -> None:
        """Release threads and memory; `until_s` as in `DaemonPool.close`. Idempotent."""
        self.threads.close(until_s)
        self.range_reads.close(until_s)
        self.caches.clear()


def hand_over(late: Callable[[T], object], future: Future[T]) -> None:
    """Give `late` the result of a call that nobody waits for; an error is dropped."""
    if not future.cancelled() and future.exception() is None:
        late(future.result())


def source_number(index_id: str) -> int:
    """Return the number (63 bits) of an index in rows and cursors."""
    return int.from_bytes(hashlib.blake2b(index_id.encode(), digest_size=8).digest(), "big") >> 1


def sourced_schema(schema: Schema) -> Schema:
    """Return the schema with one more column, the last: the number of the row's index."""
    name = "source_id"
    while any(column.name == name for column in schema.extra):
        name += "_"
    return Schema(schema.name, (*schema.extra, Column(name, ">i8", identity=True)))


class SourcedFile:
    """A file of `index`, one of several: `schema` is that of the index, `sourced` that of the rows it returns."""

    def __init__(self, handle: Handle, index: Refreshed, number: int, schema: Schema, sourced: Schema) -> None:
        self._handle = handle
        self._index = index
        self._number = number
        self._schema = schema
        self._row = sourced.row
        self.source: str | None = index.name
        self.file_id = handle.file_id
        self.place = handle.place
        self.second_min = handle.second_min
        self.second_max = handle.second_max
        self.sequence = handle.sequence
        self.is_local = handle.is_local
        self.asks_storage = handle.asks_storage
        self.lane = handle.lane
        self.hash = handle.hash
        self.excludes = handle.excludes
        self.excludes_all = handle.excludes_all
        self.let_go = handle.let_go
        self.topic_stats = handle.topic_stats

    @property
    def known_topics(self) -> Collection[str] | None:
        """As `Handle.known_topics`."""
        return self._handle.known_topics

    def search(self, lookup: PreparedLookup) -> Array:
        """As `Handle.search`, with sourced rows. Raises the error of an index that is away."""
        self._check_there()
        after = lookup.after
        if after is not None:
            *place, last = after
            if self._number > last:
                # a row at the cursor's place comes after it if its source is later: begin one step earlier
                place[-1] -= 1
            after = tuple(place)
        return self._sourced(self._handle.search(lookup._replace(after=after)))

    def search_many(self, batch: LookupBatch) -> Matches:
        """As `Handle.search_many`, with sourced rows. Raises the error of an index that is away."""
        self._check_there()
        found = self._handle.search_many(batch)
        return replace(found, rows=self._sourced(found.rows)) if len(found.rows) else found

    def _check_there(self) -> None:
        if (away := self._index.away) is not None:
            raise away

    def _sourced(self, rows: Array) -> Array:
        if not len(rows):
            return np.empty(0, self._row)
        check_schema(rows, self._schema, self.file_id)
        sourced = np.empty(len(rows), self._row)
        for name in rows.dtype.names or ():
            sourced[name] = rows[name]
        sourced[self._row.names[-1]] = self._number  # type: ignore[index]
        return sourced
