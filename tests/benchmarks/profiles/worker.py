"""A process that does every main operation once, and prints the cost of each and its parts as JSON.

All times are CPU times of the process. The profile samples the main thread's stack at each tick of its CPU time. Python
sees a tick only after a call into C has ended. So each sample has the weight of the CPU time since the last one. A
sample counts for the innermost function of the project, or for the S3 client if that is further in. A lookup's sample
counts for the module, since many functions have a small part.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa

import tiered_index
from tiered_index import IndexReader, IndexService
from tiered_index.clock import SystemClock
from tiered_index.service.jobs.job import Rewrite, TaskResult
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

_HOME = str(Path(tiered_index.__file__).parent) + os.sep
_S3_CLIENT = ("botocore", "boto3", "urllib3")
_TICK_S = 0.001
_PARTS = 5
_BEGIN_MS = 1_700_000_000_000 // 86_400_000 * 86_400_000
_TOPIC = "orders"
_BATCH = 250_000
# of an entry of the native preset, without the chain's link
_ENTRY_BYTES = 32
# of the simple loops that give the limits
_TURNS = 50_000


class Profile:
    """CPU time by function, or by module."""

    def __init__(self, *, by_module: bool = False) -> None:
        self._by_module = by_module
        self.parts: Counter[str] = Counter()
        self._last_s = 0.0
        self._began_s = 0.0
        self.cpu_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sample until the block ends."""
        signal.signal(signal.SIGPROF, self._sample)
        self._last_s, self._began_s = time.thread_time(), time.process_time()
        signal.setitimer(signal.ITIMER_PROF, _TICK_S, _TICK_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.cpu_s += time.process_time() - self._began_s

    def _sample(self, _: int, frame: FrameType | None) -> None:
        now_s = time.thread_time()
        self.parts[_part_of(frame, by_module=self._by_module)] += now_s - self._last_s
        self._last_s = now_s

    def shares(self) -> list[tuple[str, float]]:
        """Return the largest parts with their shares of all sampled CPU time."""
        whole = sum(self.parts.values()) or 1.0
        return [(name, spent / whole) for name, spent in self.parts.most_common(_PARTS)]


def _part_of(frame: FrameType | None, *, by_module: bool) -> str:
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_HOME):
            module = code.co_filename.removeprefix(_HOME).removesuffix(".py")
            return module if by_module else f"{module}: {code.co_qualname}"
        if any(f"{os.sep}{package}{os.sep}" in code.co_filename for package in _S3_CLIENT):
            return "boto3's request"
        frame = frame.f_back
    return "the benchmark's loop"


def _cpu_us(act: Callable[[], object], turns: int) -> float:
    """Return the CPU time of one of `turns` calls, the median of five rounds."""
    spent = []
    for _ in range(5):
        began_s = time.process_time()
        for _ in range(turns):
            act()
        spent.append(time.process_time() - began_s)
    return statistics.median(spent) / turns * 1e6


def _copy_us(size_bytes: int) -> float:
    """Return the CPU time to copy this number of bytes. Many bytes come from memory that no cache holds."""
    source, target = np.ones(max(1, size_bytes), np.uint8), np.empty(max(1, size_bytes), np.uint8)
    return _cpu_us(lambda: np.copyto(target, source), max(3, min(_TURNS, (64 << 20) // max(1, size_bytes))))


def _crc_us(size_bytes: int) -> float:
    """Return the CPU time of one CRC32 pass over this number of bytes."""
    source = bytes(size_bytes)
    return _cpu_us(lambda: zlib.crc32(source), max(3, min(_TURNS, (64 << 20) // max(1, size_bytes))))


class Operations:
    """The main operations over `entries` entries with different keys; `uri` names the storage."""

    def __init__(self, folder: Path, uri: str, entries: int, lookups: int) -> None:
        self._folder, self._uri, self._entries, self._lookups = folder, uri, entries, lookups
        self._rng = np.random.default_rng(5)
        self.results: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        """Do all operations, in the order of an entry's life."""
        batches = [self._columns(begin) for begin in range(0, self._entries, _BATCH)]
        settings: dict[str, Any] = {"slots": self._entries // 4, "background": False, "local_keep_s": 0}
        settings |= {"buffer_max_entries": 2 * self._entries, "max_early_s": 10**9, "max_late_s": 10**9}
        with self._index("one", items=self._entries // 4 + 1, **settings) as index:
            self._put(index)
        with self._index("all", items=self._entries + 1, **settings) as index:
            self._fill(index, batches)
            self._look_up("hot lookup", index, _ENTRY_BYTES)
            index.seal()
            self._compact(index)
            index.run_lifecycle()
            index.run_lifecycle()
        with IndexReader.open(self._uri, refresh_interval_s=1e9) as reader:
            self._look_up("cached lookup", reader, self._group_bytes(), keys=200)
        with IndexReader.open(self._uri, refresh_interval_s=1e9, block_cache_bytes=0) as reader:
            self._look_up("cold lookup of a file", reader, self._group_bytes(), plain_get=True)
        self._merge()
        with IndexReader.open(self._uri, refresh_interval_s=1e9, block_cache_bytes=0) as reader:
            self._look_up("cold lookup of a window table", reader, self._group_bytes(), plain_get=True)

    def _index(self, name: str, **settings: Any) -> IndexService:
        storage = self._uri if name == "all" else (self._folder / name / "storage").as_uri()
        return IndexService.open(root=self._folder / name / "root", storage=storage, **settings)

    def _columns(self, begin: int) -> pa.RecordBatch:
        numbers = np.arange(begin, min(begin + _BATCH, self._entries))
        topics = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(numbers), np.int32)), pa.array([_TOPIC]))
        columns = {
            "topic": topics,
            "queue_id": pa.array(numbers % 8),
            "key": pa.array([_key(number) for number in numbers.tolist()]),
            "offset": pa.array(numbers * 300),
            "size": pa.array(np.full(len(numbers), 300)),
            "timestamp_ms": pa.array(_BEGIN_MS + numbers * 10),
        }
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _done(self, name: str, profile: Profile, units: int, unit: str, limit_us: float, limit: str) -> None:
        cpu_us = profile.cpu_s / units * 1e6
        parts = profile.shares()
        self.results[name] = {"cpu_us": cpu_us, "unit": unit, "limit_us": limit_us, "limit": limit, "parts": parts}

    def _put(self, index: IndexService) -> None:
        count = self._entries // 4
        keys = [_key(number) for number in range(count)]
        profile = Profile()
        with profile.running():
            for number, key in enumerate(keys):
                index.put(_TOPIC, number % 8, key, number * 300, 300, _BEGIN_MS + number * 10)
        item = bytes(_ENTRY_BYTES)
        copied_us = _cpu_us(lambda: bytearray(item), _TURNS)
        self._done(
            "put, one entry per call", profile, count, "per entry", copied_us, "a Python call that copies its 32 bytes"
        )

    def _fill(self, index: IndexService, batches: list[pa.RecordBatch]) -> None:
        put, flush = Profile(), Profile()
        for batch in batches:
            with put.running():
                index.put_batch(batch)
            # `flush` works in another thread, where the profile takes no samples
            with flush.running():
                index._flusher.run_once()
        size = self._entries * _ENTRY_BYTES
        copied_us = _copy_us(size) / self._entries
        self._done("put_batch", put, self._entries, "per entry", copied_us, "memcpy of its 32 bytes")
        checked_us = _crc_us(size) / self._entries
        self._done(
            "flush", flush, self._entries, "per entry", checked_us + copied_us, "memcpy and CRC32 of its 32 bytes"
        )

    def _compact(self, index: IndexService) -> None:
        (sealed,), profile = index.files(), Profile()
        with profile.running():
            index._lifecycle._compact(sealed)
        (path,) = (self._folder / "all" / "root" / "compacted").iterdir()
        read, written = self._entries * (_ENTRY_BYTES + 4), path.stat().st_size
        limit_us = (_copy_us(read) + _copy_us(written) + _crc_us(read) + _crc_us(written)) / self._entries
        limit = f"memcpy and CRC32 of {read / self._entries:.0f} bytes read, {written / self._entries:.0f} written"
        self._done("compact", profile, self._entries, "per entry", limit_us, limit)

    def _merge(self) -> None:
        storage = open_storage(self._uri)
        log = StorageLog(storage, SystemClock())
        read = sum(stored.size_bytes for stored in log.open().objects.values())
        profile, clock = Profile(), SystemClock()

        def in_this_thread(rewrite: Rewrite) -> list[TaskResult]:
            return [task.run(storage, clock.now_ms(), lambda _: None) for task in rewrite.tasks]

        with profile.running():
            merge(storage, log, clock, MergeOptions(window_s=86_400, min_age_s=0), workers=in_this_thread)
        written = sum(stored.size_bytes for stored in log.open().objects.values())
        limit_us = (_copy_us(read) + _copy_us(written) + _crc_us(read) + _crc_us(written)) / self._entries
        limit = f"memcpy and CRC32 of {read / self._entries:.0f} bytes read, {written / self._entries:.0f} written"
        self._done("merge", profile, self._entries, "per entry", limit_us, limit)
        storage.close()

    def _look_up(
        self, name: str, index: Any, size_bytes: int, *, keys: int | None = None, plain_get: bool = False
    ) -> None:
        # fewer lookups if they wait for a server
        count = self._lookups // 5 if plain_get else self._lookups
        drawn = [_key(number) for number in self._rng.integers(0, self._entries, keys or count).tolist()]
        # warms caches, connections and kernels
        for key in drawn[:200]:
            index.query(_TOPIC, key)
        profile, found = Profile(by_module=True), 0
        with profile.running():
            for key in itertools.islice(itertools.cycle(drawn), count):
                found += len(index.query(_TOPIC, key))
        if found != count:
            raise AssertionError(f"{name}: {found} answers to {count} lookups")
        read_us, read = _copy_us(size_bytes), "memcpy"
        if plain_get:
            read_us, read = self._plain_get_us(size_bytes, count // 5), "a plain GET"
        limit_us, limit = read_us + _crc_us(size_bytes), f"{read} and CRC32 of {size_bytes:,} bytes"
        self._done(name, profile, count, "per lookup", limit_us, limit)

    def _group_bytes(self) -> int:
        """Return the bytes that a lookup of a stored object reads, by its explain."""
        with IndexReader.open(self._uri, refresh_interval_s=1e9, block_cache_bytes=0) as reader:
            reader.query(_TOPIC, _key(1))
            read: int = reader.query(_TOPIC, _key(1)).explain.bytes
            return read

    def _plain_get_us(self, size_bytes: int, count: int) -> float:
        with_log = open_storage(self._uri)
        (stored, *_) = StorageLog(with_log, SystemClock()).open().objects.values()
        get = _plain_get(self._uri, stored.name, size_bytes)
        try:
            for _ in range(50):
                get()
            return _cpu_us(get, count)
        finally:
            with_log.close()


def _plain_get(uri: str, name: str, size_bytes: int) -> Callable[[], object]:
    """Return a function that reads a range of an object with least code: a boto3 client, or `os.pread` of a file."""
    if not uri.startswith("s3://"):
        path = next(path for path in Path(uri.removeprefix("file://")).rglob("*") if path.name == Path(name).name)
        handle = os.open(path, os.O_RDONLY)
        return lambda: os.pread(handle, size_bytes, 4096)
    import boto3

    bucket, _, prefix = uri.removeprefix("s3://").partition("?")[0].partition("/")
    client = boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL_S3"))
    wanted = f"bytes=4096-{4096 + size_bytes - 1}"
    return lambda: client.get_object(Bucket=bucket, Key=f"{prefix}/{name}", Range=wanted)["Body"].read()


def _key(number: int) -> str:
    return f"order-{number:018d}"


def main(folder: str, uri: str, entries: str, lookups: str) -> None:
    """Measure in `folder` and print the results."""
    operations = Operations(Path(folder), uri, int(entries), int(lookups))
    operations.run()
    print(json.dumps(operations.results))


if __name__ == "__main__":
    main(*sys.argv[1:])
