"""The cold path of one index: verified trailers, filters and slot groups of its stored files.

A lookup in a file costs one range request, or none if a cached filter excludes the key. The first lookup fetches the
directory into the caches, together with a small filter. So it costs one request if the file lacks the key, otherwise
two. A range that does not match its CRC32 is fetched once more.
Threads: any number. At most `query_threads` range reads are under way, for all indexes of a reader together.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tiered_index.base.call import UNBOUNDED, Call, Cancellation, active_context
from tiered_index.base.kernels import crc32
from tiered_index.base.locks import call_lock
from tiered_index.base.threads import Condition, DaemonPool, NoThread, PoolFuture, have_ended, side_by_side
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    IndexClosed,
    InvalidArgument,
    ObjectNotFound,
    StorageError,
    TieredIndexError,
    UnsupportedVersion,
)
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import Run, Trailer
from tiered_index.service.log.records import StoredObject, verified_trailer
from tiered_index.service.read.caches.disk import CacheFolder
from tiered_index.service.read.caches.store import Filters, ReadCache
from tiered_index.service.read.files.spans import MAX_SPAN_BYTES, Span, cut_spans, spans_of, whole_runs
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import bound

if TYPE_CHECKING:
    from tiered_index.base._views import LocalFile

T = TypeVar("T")
# most useless bytes that are read to save a request: reading them takes as long as a request
_GAP_BYTES = 256 << 10
# share of the requests that a bounded lookup has left, which it may send to read fewer gaps
_SPENT_ON_GAPS = 1 / 32
_log = logging.getLogger(__name__)


class MissingObject(ObjectNotFound):
    """An object that the log names is missing in the storage `uri`: a later record removed it, or it was lost."""

    def __init__(self, name: str, uri: str) -> None:
        super().__init__(name, uri)
        self.uri = uri


def missing_error(name: str) -> CorruptFile:
    """Return the error for an object that the log names but the storage does not have, outside of lookups."""
    return CorruptFile(
        name,
        "the log names this object, but the storage does not have it: `tiered-index verify --deep --repair` restores "
        "it from a copy, and `recover --lost` gives it up",
    )


def lost_error(name: str) -> CorruptFile:
    """Return the error for an object that the newest log state names but the storage does not have."""
    return CorruptFile(
        name,
        "the log names this object, but the storage does not have it: use --allow-partial (allow_partial=True) for "
        "answers without it, `verify` to list missing objects, or `recover --lost` to give it up",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSettings:
    """The settings of the cold path, with the same names as in `IndexConfig`."""

    query_threads: int = 32
    coalesce_gap_bytes: int = _GAP_BYTES
    read_cache_bytes: int = 512 << 20
    cache_slot_groups: bool = True
    filter_after_probes: int = 8
    cuts_spans: bool = True
    """Whether idle threads read parts of a range with many gaps, which takes more requests and fewer bytes."""

    @classmethod
    def of(cls, config: IndexConfig) -> ColdSettings:
        """Return the settings of `config`."""
        chosen = {field.name: getattr(config, field.name) for field in fields(cls) if field.name != "cuts_spans"}
        by_price = chosen["coalesce_gap_bytes"] == "price"
        if by_price:
            chosen["coalesce_gap_bytes"] = config.prices.gap_bytes(_GAP_BYTES)
        return cls(**chosen, cuts_spans=not by_price)


class RangeReadPool(DaemonPool):
    """Bounds the range reads under way in all threads, and has as many threads for the reads of one file."""

    def __init__(self, ranges: int) -> None:
        super().__init__(ranges, "tiered-index-ranges")
        self._ranges = ranges
        self._free = Condition(call_lock())
        # weak, so that an interrupt at any line loses no place
        self._held: weakref.WeakSet[_Place] = weakref.WeakSet()

    @property
    def idle(self) -> int:
        """The number of further range reads that could begin now."""
        return self._ranges - len(self._held)

    def place(self, name: str, call: Call, among: weakref.WeakSet[_Place]) -> _Place:
        """Return a context manager that holds a place for a read of `name`, and note it `among` those of an index.

        It raises `BudgetExceeded` if none is free in time.
        """
        place = _Place(self, name, call)
        among.add(place)
        return place

    def take(self, place: _Place) -> None:
        """Wait for a free place. Raises `BudgetExceeded` if none is free in time."""
        with self._free:
            if not self._free.wait_for(lambda: len(self._held) < self._ranges, place.call.remaining_s()):
                raise BudgetExceeded(f"timeout_s was reached while waiting to read {place.name}")
            self._held.add(place)

    def give_back(self, places: Iterable[_Place]) -> None:
        """Let others have these places, also if their range reads hang. Idempotent."""
        with self._free:
            for place in places:
                self._held.discard(place)
            self._free.notify_all()


class _Place:
    """A place for the range read of `name` for a call. Its block holds it."""

    def __init__(self, pool: RangeReadPool, name: str, call: Call) -> None:
        self._pool, self.name, self.call = pool, name, call

    def __enter__(self) -> None:
        self._pool.take(self)

    def __exit__(self, *exc: object) -> None:
        self._pool.give_back([self])


class ColdPath:
    """Reads the stored files of one index.

    `keyed`: its entries have fingerprints. `folder` is its disk cache. Several indexes, each with its `index_id`, may
    share `caches` (in memory) and `range_reads`; the owner of these closes them. Its requests are those of the context,
    unless it is `bound` to a call.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        keyed: bool = False,
        settings: ColdSettings | None = None,
        folder: CacheFolder | None = None,
        caches: ReadCache | None = None,
        range_reads: RangeReadPool | None = None,
        index_id: str = "",
    ) -> None:
        self.storage = storage
        self.keyed = keyed
        self.settings = settings or ColdSettings()
        self._folder = folder
        self._index_id = index_id
        self._own_caches = caches is None
        self.caches = caches or ReadCache(self.settings.read_cache_bytes)
        self.filters = Filters(folder, self.caches, index_id, self.settings.filter_after_probes)
        self._own_pool: RangeReadPool | None = None
        if range_reads is None:
            self._own_pool = range_reads = RangeReadPool(self.settings.query_threads)
        self._range_reads = range_reads
        # those of its reads under way; weak, as in the pool
        self._places: weakref.WeakSet[_Place] = weakref.WeakSet()
        self._fetches: dict[str, PoolFuture[Trailer]] = {}
        self._fetch_lock = call_lock()
        self._is_closed = Cancellation()
        self._call: Call | None = None
        # fetches filters and directories that lookups with limits did not; one at a time, so that lookups lose little
        self._background = DaemonPool(1, "tiered-index-later")
        # the compiled core's `LocalFile` of each object, by name; `caches` has the bytes of those that are open
        self.core_files: dict[str, LocalFile] = {}

    @property
    def call(self) -> Call:
        """The call whose requests it makes."""
        return active_context() if self._call is None else self._call

    def bound(self, call: Call) -> ColdPath:
        """Return this cold path for the requests of `call`. It shares all else with this one, which is closed."""
        of_call = object.__new__(ColdPath)
        of_call.__dict__.update(self.__dict__)
        of_call._call, of_call.storage = call, bound(self.storage, call)
        return of_call

    def trailer(self, stored: StoredObject, *, with_filter: bool = False) -> Trailer:
        """Return a file's verified trailer. Concurrent callers share one fetch and its error.

        `with_filter`: a fetch also keeps the filter, which is before the directory.
        """
        while True:
            known = self.known_trailer(stored)
            if known is not None or (known := self._trailer_at_hand(stored)) is not None:
                return known
            mine = PoolFuture[Trailer](self._fetch_lock)
            mine.thread_id = threading.get_ident()
            try:
                fetch = self._fetches.setdefault(stored.name, mine)
                # a finalizer in the fetch of this thread may need the same trailer
                if fetch is mine or fetch.runs_here:
                    trailer = self._load_trailer(stored, with_filter=with_filter)
                    self._keep_trailer(stored, trailer)
                    mine.set_result(trailer)
                    return trailer
            except BaseException as error:  # also for an interrupt, because other threads wait
                if isinstance(error, TieredIndexError) and not mine.done():
                    mine.set_exception(error)
                else:
                    # the others have to fetch
                    mine.cancel()
                raise
            finally:
                if self._fetches.get(stored.name) is mine:
                    del self._fetches[stored.name]
            if not have_ended([fetch], self.call.remaining_s()):
                raise BudgetExceeded(f"timeout_s was reached while waiting for the directory of {stored.name}")
            try:
                return fetch.result()
            except (BudgetExceeded, CancelledError):
                continue  # the error or the interrupt of another lookup: this one has a budget of its own

    def known_trailer(self, stored: StoredObject) -> Trailer | None:
        """Return a file's trailer, without noting its use; None: not in memory."""
        return self.caches.directories.peek((self._index_id, stored.name))

    def open_in_core(
        self, stored: StoredObject, file: LocalFile, schema: Schema, call: Call | None, *, reads: bool
    ) -> int:
        """Give the compiled core's file its directory and filter, from memory, or if it `reads` by `_read_now`.

        Return the bytes read; -1: the file is not open.
        """
        key, caches = (self._index_id, stored.name), self.caches
        read_bytes = 0
        if not file.is_open:
            if (trailer := caches.directories.peek(key)) is None and reads:
                trailer, read_bytes = self._trailer_now(stored, call)
            if trailer is None or trailer.metadata.layout.schema != schema:
                return -1
            if (is_opened := trailer.give_to(file)) is None:
                return -1
            if is_opened and not caches.directories.attach(key, trailer, file):
                file.close()
                return -1
        if stored.filter_length and not file.has_filter and (held := caches.filters.peek(key)) is not None:
            file.with_filter(held)
            if not caches.filters.attach(key, held, file):
                file.with_filter(None)
        return read_bytes

    def verified(
        self, stored: StoredObject, runs: Sequence[Run], damaged: dict[int, CorruptFile] | None = None
    ) -> list[memoryview]:
        """Return each run's verified bytes, in the given order. Raises `CorruptFile` and `MissingObject`.

        If `damaged` is given, damaged runs are left out, and their errors are added to it by position.
        """
        checked: list[memoryview] = []
        pieces: dict[int, memoryview] = {}
        missing: list[Run] = []
        for run in runs:
            block = self.caches.slot_groups.get((self._index_id, stored.name, run.offset))
            if block is None:
                missing.append(run)
            else:
                piece = pieces[run.offset] = memoryview(block)
                checked.append(piece)
        if not missing:
            return checked
        spans = spans_of(missing, self.settings.coalesce_gap_bytes, MAX_SPAN_BYTES)
        # one run has no gap
        if len(missing) > 1 and (cuts := self._cuts(spans)) > 0:
            spans = cut_spans(spans, cuts)
        self._fetch_spans(stored, spans, pieces, damaged)
        return [pieces[run.offset] for run in runs if damaged is None or run.offset not in damaged]

    def _cuts(self, spans: Sequence[Span]) -> int:
        """Return how often to cut spans, if there are idle threads: once for each `coalesce_gap_bytes` of gaps in them.

        Requests that are sent side by side take no longer than one. So they save bytes and time.
        """
        if not self.settings.cuts_spans:
            return 0
        cuts = sum([span.gap_bytes for span in spans]) // max(self.settings.coalesce_gap_bytes, _GAP_BYTES)
        left = self.call.requests_left if cuts else None
        return min(cuts, self._range_reads.idle - len(spans), cuts if left is None else int(left * _SPENT_ON_GAPS))

    def _fetch_spans(
        self,
        stored: StoredObject,
        spans: Sequence[Span],
        pieces: dict[int, memoryview],
        damaged: dict[int, CorruptFile] | None,
    ) -> None:
        if len(spans) == 1:
            pieces.update(self._fetch_span(stored, spans[0], damaged))
            return
        if self._is_closed.is_set:
            raise IndexClosed("the index was closed during the lookup")
        fetches = [partial(self._fetch_span, stored, span, damaged) for span in spans]
        for some in side_by_side(fetches, self.call.with_threads(self._range_reads.submit)):
            pieces.update(some)

    def block_now(
        self, stored: StoredObject, offset: int, length: int, crc: int, call: Call | None
    ) -> bytes | tuple[bytes] | None:
        """Return the verified bytes of a run from the cache, or, in a tuple, from a storage in a local folder.

        None: the caller has to use `verified`, which reads them or raises an error. Only the cache is used for a call
        that does not wait, or that counts requests.
        """
        key = self._index_id, stored.name, offset
        if (block := self.caches.slot_groups.get(key, counts_miss=False)) is not None:
            return block
        data = self._read_now(stored, offset, length, call)
        if data is None or crc32(data) != crc:
            return None
        if self.settings.cache_slot_groups:
            self.caches.slot_groups.put(key, data, length)
        return (data,)

    def _trailer_now(self, stored: StoredObject, call: Call | None) -> tuple[Trailer | None, int]:
        """Return a file's trailer, by a read of a storage in a local folder, and the bytes read. See `_read_now`.

        None: the file has a cache that is asked first, or the caller has to use `trailer`.
        """
        caches = self.caches
        if self._folder is not None or caches.filters.peek((self._index_id, stored.name)) is not None:
            return None, 0
        length = stored.size_bytes - stored.directory_position
        if not caches.directories.takes(length):
            return None, 0
        filter_bytes = stored.filter_length if self._wants_filter(stored) else 0
        data = self._read_now(stored, stored.directory_position - filter_bytes, filter_bytes + length, call)
        if data is None:
            return None, 0
        try:
            trailer = verified_trailer(stored, memoryview(data)[filter_bytes:])
        except CorruptFile:
            return None, 0
        self._keep_trailer(stored, trailer)
        self._keep_filter(stored, trailer, data[:filter_bytes])
        return trailer, len(data)

    def _read_now(self, stored: StoredObject, offset: int, length: int, call: Call | None) -> bytes | None:
        """Return a range from a storage in a local folder. The caller verifies it.

        None: the storage is another one, or the call does not wait or counts requests.
        """
        if call is not None and (call.usages or not call.waits):
            return None
        if (opened := self.storage.open_now(stored.name, stored.size_bytes)) is None:
            return None
        data = b""
        try:
            data = os.pread(opened.descriptor, length, offset)
        except (OSError, ValueError):
            return None
        finally:
            opened.close(int(bool(data)), len(data))
        return data if len(data) == length else None

    def prepare_search(self, stored: StoredObject) -> bool:
        """Note the use of a file's directory, and fetch its filter before a search, if it is due.

        A small filter is fetched if the directory is fetched anyway. Return whether a filter may have been fetched,
        which may exclude the key.
        """
        directory_bytes = stored.size_bytes - stored.directory_position
        known = self.caches.directories.get((self._index_id, stored.name))
        if known is None and self.caches.directories.takes(directory_bytes) and self._wants_filter(stored):
            self.trailer(stored, with_filter=True)
            return True
        return self.maybe_fetch_filter(stored)

    def _wants_filter(self, stored: StoredObject) -> bool:
        """Return whether to read a file's filter with its directory: a filter that excludes the key saves a request."""
        # as many needless bytes as between two ranges
        return stored.filter_length <= self.settings.coalesce_gap_bytes and self.filters.wants(stored)

    def replace_hanging(self) -> None:
        """Let other indexes have the places of the range reads under way."""
        self._range_reads.give_back(list(self._places))

    def maybe_fetch_filter(self, stored: StoredObject) -> bool:
        """Fetch a file's filter if it is due. Return whether it was fetched and kept.

        If the call has a budget, another thread fetches the filter for later lookups, and the result is False.
        """
        if not self.filters.is_due(stored) or not self.filters.begin_fetch(stored):
            return False
        call = self.call
        if call.deadline_s is None and not call.is_limited and not call.is_cancelled:
            return self._fetch_due(stored)
        try:
            self._background.submit(partial(self.bound(UNBOUNDED)._fetch_later, stored))
        except (IndexClosed, NoThread):
            self.filters.end_fetch(stored)
        return False

    def _fetch_later(self, stored: StoredObject) -> None:
        """Fetch a filter that a lookup with limits did not fetch."""
        with contextlib.suppress(MissingObject):  # a lookup finds out by itself
            self._fetch_due(stored)

    def _fetch_due(self, stored: StoredObject) -> bool:
        try:
            return self.fetch_filter(stored)
        except MissingObject:
            raise
        except (BudgetExceeded, CorruptFile, StorageError) as error:
            _log.warning("ignoring the filter of %s: %s", stored.name, error)
            return False
        finally:
            self.filters.end_fetch(stored)

    def fetch_filter(self, stored: StoredObject) -> bool:
        """Fetch a file's filter unless a cache has it. Return whether a cache has it. Raises `CorruptFile`, and storage
        errors.
        """
        filters = self.filters
        if not filters.fits(stored):
            return False
        return filters.whole(stored) is not None or filters.keep(stored, self._filter(stored))

    def _filter(self, stored: StoredObject) -> bytes:
        expected = self.trailer(stored).tail.filter_crc32

        def check(data: bytes) -> bytes:
            _check_filter(stored, data, expected)
            return data

        return self._checked(stored, stored.trailer_position, stored.filter_length, check)

    def forget_unnamed(self, named: Container[str]) -> None:
        """Forget notes and disk cache entries of objects that are not in `named`."""
        self.filters.forget_unnamed(named)
        # copied first, because lookups of other threads add files
        for name in [name for name in list(self.core_files) if name not in named]:
            self.core_files.pop(name, None)
        if self._folder is not None:
            self._folder.forget_unnamed(named)

    def keep(self, stored: StoredObject, data: Any) -> None:
        """Put the directory and the filter of a file into the disk cache. `data` is the whole file."""
        if self._folder is not None:
            with memoryview(data) as whole:
                self._folder.write(stored.name, "trailer", bytes(whole[stored.directory_position : stored.size_bytes]))
                if self.filters.fits(stored):
                    self._folder.write(
                        stored.name, "filter", bytes(whole[stored.trailer_position : stored.directory_position])
                    )

    def close(self, until_s: float | None = None) -> None:
        """Release threads and memory. `until_s`: see `DaemonPool.close`. Idempotent."""
        self._is_closed.set()
        self._background.close(until_s)
        if self._own_pool is not None:
            self._own_pool.close(until_s)
        if self._own_caches:
            self.caches.clear()

    def _keep_trailer(self, stored: StoredObject, trailer: Trailer) -> None:
        size_bytes = stored.size_bytes - stored.directory_position
        self.caches.directories.put((self._index_id, stored.name), trailer, size_bytes)

    def _trailer_at_hand(self, stored: StoredObject) -> Trailer | None:
        """Return a file's trailer from the disk cache. None: only the file has it."""
        length = stored.size_bytes - stored.directory_position
        if self._folder is not None and (cached := self._folder.read(stored.name, "trailer", length)) is not None:
            with contextlib.suppress(CorruptFile):  # a wrong cache entry: read the storage
                trailer = verified_trailer(stored, cached)
                self._keep_trailer(stored, trailer)
                return trailer
        # another thread may have read it
        return self.known_trailer(stored)

    def _load_trailer(self, stored: StoredObject, *, with_filter: bool) -> Trailer:
        filter_bytes = stored.filter_length if with_filter else 0
        start = stored.directory_position - filter_bytes

        def check(data: bytes) -> tuple[Trailer, bytes]:
            return verified_trailer(stored, memoryview(data)[filter_bytes:]), data

        trailer, fetched = self._checked(stored, start, stored.size_bytes - start, check)
        if self._folder is not None:
            self._folder.write(stored.name, "trailer", fetched[filter_bytes:])
        self._keep_filter(stored, trailer, fetched[:filter_bytes])
        return trailer

    def _keep_filter(self, stored: StoredObject, trailer: Trailer, data: bytes) -> None:
        """Cache a file's filter, which was read with its trailer, unless it is damaged. Empty: it was not read."""
        if not data:
            return
        try:
            _check_filter(stored, data, trailer.tail.filter_crc32)
            self.filters.keep(stored, data)
        except CorruptFile as error:
            _log.warning("ignoring the filter of %s: %s", stored.name, error)

    def _fetch_span(
        self, stored: StoredObject, span: Span, damaged: dict[int, CorruptFile] | None
    ) -> list[tuple[int, memoryview]]:
        def check(data: bytes, damaged: dict[int, CorruptFile] | None = None) -> list[tuple[int, memoryview]]:
            if gap_bytes := span.gap_bytes:
                for usage in self.call.usages:
                    usage.count_between(gap_bytes)
            blocks = []
            for run, piece in list(whole_runs(span.pieces(data), stored.name, damaged)):
                block = piece
                # a view would keep the whole range in memory, with what is between the runs
                if self.settings.cache_slot_groups or gap_bytes > span.length // 2:
                    copied = data if run.length == len(data) else bytes(piece)
                    block = memoryview(copied)
                    if self.settings.cache_slot_groups:
                        self.caches.slot_groups.put((self._index_id, stored.name, run.offset), copied, run.length)
                blocks.append((run.offset, block))
            return blocks

        try:
            return self._checked(stored, span.start, span.length, check, partial(check, damaged=damaged))
        except CorruptFile as error:
            if damaged is None:
                raise
            # the object is too short, so all runs of the span count as damaged
            damaged.update((run.offset, error) for run in span.runs)
            return []

    def _checked(
        self,
        stored: StoredObject,
        start: int,
        length: int,
        check: Callable[[bytes], T],
        again: Callable[[bytes], T] | None = None,
    ) -> T:
        """Return the result of `check` for a range.

        If it is damaged, fetch the range again and use `again`, because the transfer may have failed.
        """
        try:
            return check(self._get(stored, start, length))
        except UnsupportedVersion:
            raise
        except CorruptFile as error:
            _log.warning("reading the damaged range again: %s", error)
        return (again or check)(self._get(stored, start, length))

    def _get(self, stored: StoredObject, start: int, length: int) -> bytes:
        try:
            with self._range_reads.place(stored.name, self.call, self._places):
                data = self.storage.get_range(stored.name, start, length)
        except ObjectNotFound as error:
            raise MissingObject(stored.name, self.storage.uri) from error
        except InvalidArgument as error:  # the range is within the size by the log, so the object is too short
            if self._is_closed.is_set:
                raise IndexClosed("the index was closed during the lookup") from error
            raise CorruptFile(
                stored.name, f"shorter than the log says ({error})", expected=stored.size_bytes
            ) from error
        if len(data) != length:
            problem = "a range came back with another length"
            raise CorruptFile(stored.name, problem, offset=start, expected=length, found=len(data))
        return data


def _check_filter(stored: StoredObject, data: bytes, expected: int) -> None:
    """Raise `CorruptFile` if a file's filter does not match its CRC32."""
    problem, position = "filter's CRC32 does not match", stored.trailer_position
    CorruptFile.unless_equal(stored.name, problem, expected, crc32(data), offset=position)
