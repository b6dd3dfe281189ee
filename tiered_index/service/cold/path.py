"""The cold path of one index: verified trailers, filters and slot groups of its stored files.

A lookup in a file costs one range request, or none if a cached filter excludes the key. The first lookup costs one more
request, which fetches the directory into the caches. A range that does not match its CRC32 is fetched once more.
Threads: any number. At most `query_threads` range reads are under way, for all indexes of a reader together.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

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
from tiered_index.format.trailer import Run, Trailer
from tiered_index.kernels import crc32
from tiered_index.service.cold.caches import Caches, Filters
from tiered_index.service.cold.disk_cache import CacheFolder
from tiered_index.service.log.records import StoredObject, verified_trailer
from tiered_index.service.log.summary import decode
from tiered_index.storage.base import Storage
from tiered_index.storage.context import (
    NO_WAIT,
    RequestContext,
    active_context,
    check_deadline,
    remaining_s,
    request_context,
)
from tiered_index.storage.pools import DaemonPool, NoThread, Share, share_of, side_by_side

T = TypeVar("T")
# directories that are read one by one before the summary is read
_SUMMARY_AFTER = 2
# a lookup waits so long for another one's read of the summary
_SUMMARY_WAIT_S = 2.0
# most useless bytes that are read to save a request: reading them takes as long as a request
_GAP_BYTES = 256 << 10
MAX_SPAN_BYTES = 8 << 20
"""The longest range of one read. Longer ranges are cut and read in parallel."""
_log = logging.getLogger(__name__)


class _Abandoned(Exception):
    """Internal: the thread that fetched for all was interrupted, so the others have to fetch."""


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
    block_cache_bytes: int = 64 << 20
    directory_cache_bytes: int = 256 << 20
    filter_after_probes: int = 8

    @classmethod
    def of(cls, config: IndexConfig) -> ColdSettings:
        """Return the settings of `config`."""
        chosen = {field.name: getattr(config, field.name) for field in fields(cls)}
        if chosen["coalesce_gap_bytes"] == "price":
            chosen["coalesce_gap_bytes"] = config.prices.gap_bytes(_GAP_BYTES)
        return cls(**chosen)


@dataclass
class Span:
    """One range to fetch, and the runs in it, in order of offset."""

    start: int
    length: int
    runs: list[Run] = field(default_factory=list)

    @property
    def gap_bytes(self) -> int:
        """The number of bytes that no run has."""
        return self.length - sum([run.length for run in self.runs])

    def pieces(self, data: bytes | memoryview) -> Iterator[tuple[Run, memoryview]]:
        """Yield each run with its bytes in the span's `data`."""
        view = memoryview(data)
        for run in self.runs:
            at = run.offset - self.start
            yield run, view[at : at + run.length]


def spans_of(runs: Iterable[Run], gap_bytes: int, max_bytes: int) -> list[Span]:
    """Return spans that cover `runs` (each once, not overlapping), in order of offset.

    Runs at most `gap_bytes` apart share a span, because a request takes as long as reading some hundred KiB. A span has
    at most `max_bytes`, unless a run is longer.
    """
    spans: list[Span] = []
    for run in sorted(runs, key=attrgetter("offset")):
        end = run.offset + run.length
        if spans:
            last = spans[-1]
            if run.offset - (last.start + last.length) <= gap_bytes and end - last.start <= max_bytes:
                last.length = end - last.start
                last.runs.append(run)
                continue
        spans.append(Span(run.offset, run.length, [run]))
    return spans


class RangeReadPool(DaemonPool):
    """Bounds the range reads under way in all threads, and has as many threads for the reads of one file."""

    def __init__(self, ranges: int) -> None:
        super().__init__(ranges, "tiered-index-ranges")
        self._ranges = ranges
        self._free = threading.Condition()
        # weak, so that an interrupt at any line loses no place
        self._held: weakref.WeakSet[_Place] = weakref.WeakSet()
        self._shares: set[RangeShare] = set()

    def share(self) -> RangeShare:
        """Return a share for one of the indexes that use this pool."""
        share = RangeShare(self, lambda: share_of(self._ranges, len(self._shares)))
        self._shares.add(share)
        return share

    def end(self, share: RangeShare) -> None:
        """Forget a share."""
        self._shares.discard(share)

    @contextlib.contextmanager
    def held(self, place: _Place, name: str) -> Iterator[None]:
        """Return a context manager that holds `place`. Raises `BudgetExceeded` if none is free in time."""
        try:
            with self._free:
                if not self._free.wait_for(lambda: len(self._held) < self._ranges, remaining_s()):
                    raise BudgetExceeded(f"timeout_s was reached while waiting to read {name}")
                self._held.add(place)
            yield
        finally:
            self.give_back(place)

    def give_back(self, place: _Place) -> None:
        """Let others have a place, also if its range read hangs. Idempotent."""
        with self._free:
            self._held.discard(place)
            self._free.notify()


class _Place:
    """A place for a range read."""


class RangeShare(Share):
    """The threads and places of a `RangeReadPool` that one index may use."""

    def __init__(self, pool: RangeReadPool, most: Callable[[], int]) -> None:
        super().__init__(pool, most)
        self._ranges = pool
        self._free = threading.Condition()
        # weak, as in the pool
        self._used: weakref.WeakSet[_Place] = weakref.WeakSet()

    @contextlib.contextmanager
    def place(self, name: str) -> Iterator[None]:
        """Return a context manager that holds a place for the read of `name`. Raises `BudgetExceeded`."""
        place = _Place()
        try:
            with self._free:
                if not self._free.wait_for(lambda: len(self._used) < self._most(), remaining_s()):
                    raise BudgetExceeded(f"timeout_s was reached while waiting to read {name}")
                self._used.add(place)
            with self._ranges.held(place, name):
                yield
        finally:
            with self._free:
                self._used.discard(place)
                self._free.notify()

    def replace_hanging(self) -> None:
        """Let other shares have the threads and places of the range reads under way."""
        self.replace_threads()
        with self._free:
            used = list(self._used)
        for place in used:
            self._ranges.give_back(place)

    def close(self) -> None:
        """Return the share. Idempotent."""
        self._ranges.end(self)


class ColdPath:
    """Reads the stored files of one index.

    `keyed`: its entries have fingerprints. `folder` is its disk cache. Several indexes, each with its `index_id`, may
    share `caches` (in memory) and `range_reads`; the owner of these closes them.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        keyed: bool = False,
        settings: ColdSettings | None = None,
        folder: CacheFolder | None = None,
        caches: Caches | None = None,
        range_reads: RangeShare | None = None,
        index_id: str = "",
    ) -> None:
        self.storage = storage
        self.keyed = keyed
        self.settings = settings or ColdSettings()
        self._folder = folder
        self._index_id = index_id
        self._own_caches = caches is None
        self.caches = caches or Caches(self.settings.block_cache_bytes, self.settings.directory_cache_bytes)
        self.filters = Filters(folder, self.caches.filters, index_id, self.settings.filter_after_probes)
        self._own_pool: RangeReadPool | None = None
        if range_reads is None:
            self._own_pool = RangeReadPool(self.settings.query_threads)
            range_reads = self._own_pool.share()
        self._range_reads = range_reads
        self._fetches: dict[str, Future[Trailer]] = {}
        self._closed = False
        # the name of a summary to read, and a function that returns the objects that the log names
        self._summary: tuple[str, Callable[[], Mapping[str, StoredObject]]] | None = None
        self._summary_lock = threading.Lock()
        # until then others wait for the thread that has the lock
        self._summary_until_s = 0.0
        self._has_summary = False
        self._asks_summary = False
        self._directories_read = 0
        # fetches filters and directories that lookups with limits did not; one at a time, so that lookups lose little
        self._background = DaemonPool(1, "tiered-index-later")
        # the compiled core's `LocalFile` of each object, by name
        self.in_core: dict[str, Any] = {}
        # bytes of the directories and filters in these
        self.core_bytes = 0

    def trailer(self, stored: StoredObject) -> Trailer:
        """Return a file's verified trailer. Concurrent callers share one fetch and its error."""
        while True:
            known = self.caches.directories.get((self._index_id, stored.name))
            if known is not None or (known := self._trailer_at_hand(stored)) is not None:
                return known
            mine: Future[Trailer] = Future()
            try:
                fetch = self._fetches.setdefault(stored.name, mine)
                if fetch is mine:
                    trailer = self._load_trailer(stored)
                    self._keep_trailer(stored, trailer)
                    mine.set_result(trailer)
                    return trailer
            except BaseException as error:  # also for an interrupt, because other threads wait
                if not mine.done():
                    mine.set_exception(error if isinstance(error, TieredIndexError) else _Abandoned())
                raise
            finally:
                if self._fetches.get(stored.name) is mine:
                    del self._fetches[stored.name]
            try:
                return fetch.result(remaining_s())
            except (BudgetExceeded, _Abandoned):
                continue  # the error of another lookup: this one has a budget of its own
            except TimeoutError as error:
                raise BudgetExceeded(
                    f"timeout_s was reached while waiting for the directory of {stored.name}"
                ) from error

    def use_summary(self, name: str, objects: Callable[[], Mapping[str, StoredObject]]) -> None:
        """Read summary `name` after some directories were read. `objects` returns the objects that the log names."""
        self._summary = name, objects

    def adopt(self, data: bytes, name: str, objects: Mapping[str, StoredObject]) -> None:
        """Cache the directories and filters of a summary, given its bytes. Damaged parts are ignored."""
        try:
            parts = decode(data, name)
        except CorruptFile as error:
            _log.warning("ignoring a summary of directories: %s", error)
            return
        for of, (position, part) in parts.items():
            if (stored := objects.get(of)) is None:
                continue
            try:
                CorruptFile.unless_equal(name, f"does not end where {of} ends", stored.size_bytes, position + len(part))
                trailer = verified_trailer(stored, part)
                directory_bytes = stored.size_bytes - stored.directory_position
                if position == stored.trailer_position and stored.filter_length:
                    found = bytes(part[:-directory_bytes])
                    problem = f"the filter of {of} does not match its CRC32"
                    CorruptFile.unless_equal(name, problem, trailer.tail.filter_crc32, crc32(found))
                    self.filters.adopt(stored, found)
                self.caches.directories.put((self._index_id, of), trailer, directory_bytes)
            except CorruptFile as error:
                _log.warning("ignoring a summary of directories: %s", error)

    def tries_summary(self, stored: StoredObject) -> bool:
        """Read a file's directory if a summary may have it. Return whether filters may have come with a summary."""
        if self._summary is None:
            return self._has_summary
        self.trailer(stored)
        return True

    def _read_summary(self) -> None:
        """Read the summary if it is due. Concurrent callers wait for it a short time, then read their directories."""
        self._directories_read += 1
        if self._summary is None or self._directories_read <= _SUMMARY_AFTER:
            return
        if active_context().is_limited:
            # the requests and bytes of this lookup do not suffice for certain: another thread reads it for later ones
            if not self._asks_summary:
                self._asks_summary = self._later(self._read_summary)
            return
        wait_s, left_s = self._summary_until_s - time.monotonic(), remaining_s()
        if not self._summary_lock.acquire(timeout=max(0.0, wait_s if left_s is None else min(wait_s, left_s))):
            return
        try:
            self._summary_until_s = time.monotonic() + _SUMMARY_WAIT_S
            if self._summary is not None:
                name, objects = self._summary
                self.adopt(self.storage.get(name), name, objects())
                self._has_summary, self._summary = True, None
        except BudgetExceeded:
            pass
        except (StorageError, CorruptFile) as error:
            # the summary may be outdated and deleted
            self._summary = None
            _log.warning("ignoring a summary of directories: %s", error)
        finally:
            self._summary_lock.release()

    def known_trailer(self, stored: StoredObject, *, counts_miss: bool = True) -> Trailer | None:
        """Return a file's trailer; None: not in memory."""
        return self.caches.directories.get((self._index_id, stored.name), counts_miss=counts_miss)

    def verified(
        self, stored: StoredObject, runs: Sequence[Run], damaged: dict[int, CorruptFile] | None = None
    ) -> list[memoryview]:
        """Return each run's verified bytes, in the given order. Raises `CorruptFile` and `MissingObject`.

        If `damaged` is given, damaged runs are left out, and their errors are added to it by position.
        """
        found: list[memoryview] = []
        pieces: dict[int, memoryview] = {}
        missing: list[Run] = []
        for run in runs:
            block = self.caches.blocks.get((self._index_id, stored.name, run.offset))
            if block is None:
                missing.append(run)
            else:
                piece = pieces[run.offset] = memoryview(block)
                found.append(piece)
        if not missing:
            return found
        spans = spans_of(missing, self.settings.coalesce_gap_bytes, MAX_SPAN_BYTES)
        if len(spans) == 1:
            pieces.update(self._fetch_span(stored, spans[0], damaged))
        elif spans:
            if self._closed:
                raise IndexClosed("the index was closed during the lookup")
            with active_context().with_threads(self._range_reads.submit).active():
                for some in side_by_side([partial(self._fetch_span, stored, span, damaged) for span in spans]):
                    pieces.update(some)
        return [pieces[run.offset] for run in runs if damaged is None or run.offset not in damaged]

    def block_now(self, stored: StoredObject, offset: int, length: int, crc: int) -> bytes | tuple[bytes] | None:
        """Return the verified bytes of a run from the cache, or, in a tuple, from a storage in a local folder.

        None: the caller has to use `verified`, which reads them or raises an error. In the context `NO_WAIT` only the
        cache is used.
        """
        key = self._index_id, stored.name, offset
        if (block := self.caches.blocks.get(key, counts_miss=False)) is not None:
            return block
        if request_context.get() is NO_WAIT:
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
        if len(data) != length or crc32(data) != crc:
            return None
        self.caches.blocks.put(key, data, length)
        return (data,)

    def excludes(self, stored: StoredObject, key_hash: int, fingerprint: int) -> bool:
        """Return whether a file certainly lacks a key. False if its filter is in no cache."""
        return self.filters.excludes(stored, key_hash, fingerprint if self.keyed else 0)

    def replace_hanging(self) -> None:
        """Let other indexes have the threads and places of the range reads under way."""
        self._range_reads.replace_hanging()

    def maybe_fetch_filter(self, stored: StoredObject) -> bool:
        """Fetch a file's filter if it is due. Return whether it was fetched and kept.

        If the context has a budget, another thread fetches the filter for later lookups, and the result is False.
        """
        if not self.filters.is_due(stored) or not self.filters.begin_fetch(stored):
            return False
        context = active_context()
        if context.deadline_s is None and not context.is_limited:
            return self._fetch_due(stored)
        if not self._later(partial(self._fetch_due, stored)):
            self.filters.end_fetch(stored)
        return False

    def _later(self, call: Callable[[], object]) -> bool:
        """Call `call` in another thread, without limits. Return whether a thread was found."""

        def act() -> None:
            with RequestContext().active(), contextlib.suppress(MissingObject):  # a lookup finds out by itself
                call()

        try:
            self._background.submit(act)
        except (IndexClosed, NoThread):
            return False
        return True

    def _fetch_due(self, stored: StoredObject) -> bool:
        try:
            return self.filters.keep(stored, self._filter(stored))
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
        return filters.has(stored) or (filters.fits(stored) and filters.keep(stored, self._filter(stored)))

    def _filter(self, stored: StoredObject) -> bytes:
        expected = self.trailer(stored).tail.filter_crc32

        def check(data: bytes) -> bytes:
            problem, position = "filter's CRC32 does not match", stored.trailer_position
            CorruptFile.unless_equal(stored.name, problem, expected, crc32(data), offset=position)
            return data

        return self._checked(stored, stored.trailer_position, stored.filter_length, check)

    def forget_unnamed(self, named: Container[str]) -> None:
        """Forget notes and disk cache entries of objects that are not in `named`."""
        self.filters.forget_unnamed(named)
        # copied first, because lookups of other threads add files
        kept = {name: file for name, file in list(self.in_core.items()) if name in named}
        self.core_bytes, self.in_core = sum(file.size_bytes for file in kept.values()), kept
        if self._folder is not None:
            self._folder.forget_unnamed(named)

    def keep(self, stored: StoredObject, data: Any) -> None:
        """Put the directory and the filter of a file into the disk cache. `data` is the whole file."""
        if self._folder is not None:
            with memoryview(data) as whole:
                self._folder.write(stored.name, "trailer", bytes(whole[stored.directory_position : stored.size_bytes]))
                if stored.filter_length:
                    self._folder.write(
                        stored.name, "filter", bytes(whole[stored.trailer_position : stored.directory_position])
                    )

    def close(self, until_s: float | None = None) -> None:
        """Release threads and memory. `until_s`: see `DaemonPool.close`. Idempotent."""
        self._closed = True
        self._background.close(until_s)
        self._range_reads.close()
        if self._own_pool is not None:
            self._own_pool.close(until_s)
        if self._own_caches:
            self.caches.clear()

    def _keep_trailer(self, stored: StoredObject, trailer: Trailer) -> None:
        size_bytes = stored.size_bytes - stored.directory_position
        self.caches.directories.put((self._index_id, stored.name), trailer, size_bytes)

    def _trailer_at_hand(self, stored: StoredObject) -> Trailer | None:
        """Return a file's trailer from the disk cache or the summary. None: only the file has it.

        Not a part of a shared fetch, because a summary that hangs must not keep others from the file.
        """
        length = stored.size_bytes - stored.directory_position
        if self._folder is not None and (kept := self._folder.read(stored.name, "trailer", length)) is not None:
            with contextlib.suppress(CorruptFile):  # a wrong cache entry: read the storage
                trailer = verified_trailer(stored, kept)
                self._keep_trailer(stored, trailer)
                return trailer
        if self._summary is not None:
            self._read_summary()
        # another thread may have read it
        return self.known_trailer(stored, counts_miss=False)

    def _load_trailer(self, stored: StoredObject) -> Trailer:
        start = stored.directory_position
        length = stored.size_bytes - start
        fetched: list[bytes] = []

        def check(data: bytes) -> Trailer:
            fetched[:] = [data]
            return verified_trailer(stored, data)

        trailer = self._checked(stored, start, length, check)
        if self._folder is not None:
            self._folder.write(stored.name, "trailer", fetched[0])
        return trailer

    def _fetch_span(
        self, stored: StoredObject, span: Span, damaged: dict[int, CorruptFile] | None
    ) -> list[tuple[int, memoryview]]:
        def check(data: bytes, damaged: dict[int, CorruptFile] | None = None) -> list[tuple[int, memoryview]]:
            if gap_bytes := span.gap_bytes:
                for _, usage in active_context().usages:
                    usage.count_between(gap_bytes)
            found = list(whole_runs(span.pieces(data), stored.name, damaged))
            for run, piece in found:
                # a copy, because a view would keep the whole span in memory
                block = data if run.length == len(data) else bytes(piece)
                self.caches.blocks.put((self._index_id, stored.name, run.offset), block, run.length)
            return [(run.offset, piece) for run, piece in found]

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
        """Return the result of `check` for a range. If it is damaged, fetch the range again and use `again`."""
        try:
            return check(self._get(stored, start, length))
        except UnsupportedVersion:
            raise
        except CorruptFile as error:
            _log.warning("reading the damaged range again: %s", error)
        return (again or check)(self._get(stored, start, length))

    def _get(self, stored: StoredObject, start: int, length: int) -> bytes:
        try:
            with self._range_reads.place(stored.name):
                check_deadline(f"reading {stored.name}")
                data = self.storage.get_range(stored.name, start, length)
        except ObjectNotFound as error:
            raise MissingObject(stored.name, self.storage.uri) from error
        except InvalidArgument as error:  # the range is within the size by the log, so the object is too short
            if self._closed:
                raise IndexClosed("the index was closed during the lookup") from error
            raise CorruptFile(
                stored.name, f"shorter than the log says ({error})", expected=stored.size_bytes
            ) from error
        if len(data) != length:
            problem = "a range came back with another length"
            raise CorruptFile(stored.name, problem, offset=start, expected=length, found=len(data))
        return data


def whole_runs(
    pieces: Iterable[tuple[Run, memoryview]], file: str, damaged: dict[int, CorruptFile] | None
) -> Iterator[tuple[Run, memoryview]]:
    """Yield the runs that match their CRC32, with their bytes. `damaged`: see `ColdPath.verified`."""
    for run, piece in pieces:
        try:
            check_run(piece, run, file)
        except CorruptFile as error:
            if damaged is None:
                raise
            damaged[run.offset] = error
        else:
            yield run, piece


def check_run(piece: memoryview, run: Run, file: str) -> None:
    """Raise `CorruptFile` if a run's bytes do not match its CRC32."""
    if (found := crc32(piece)) != run.crc32:
        raise CorruptFile(file, "items do not match their CRC32", offset=run.offset, expected=run.crc32, found=found)
