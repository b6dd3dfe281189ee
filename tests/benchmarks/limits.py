"""`make bench SUITE=limits`: the CPU time of each main operation, beside a lower limit.

A limit is, for example, the CPU time to copy the operation's bytes and to compute their CRC32. All times are CPU times
of the process. Stored files are on the tests' S3 server if it runs (`python -m tests.real_s3.server run -- ...`),
otherwise on the disk. Each round is a process of its own.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import secrets
import statistics
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.messages import START_MS, TOPIC, batch, keys_of
from tests.benchmarks.report import Spent, cpu_us, finish, note, options, require, scratch
from tests.real_s3.server import ENDPOINT_VARIABLE
from tiered_index import IndexReader, IndexService
from tiered_index.clock import SystemClock
from tiered_index.service.jobs.job import Rewrite, TaskResult
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

_BATCH = 250_000
# of an entry of the native preset, without the chain's link
_ENTRY_BYTES = 32
# of the simple loops that give the limits
_TURNS = 50_000
_SETTINGS: dict[str, Any] = {"background": False, "local_keep_s": 0, "max_early_s": 10**9, "max_late_s": 10**9}
_UNCACHED: dict[str, Any] = {"refresh_interval_s": 1e9, "block_cache_bytes": 0}


def _turns(size_bytes: int) -> int:
    return max(3, min(_TURNS, (64 << 20) // max(1, size_bytes)))


def copy_us(size_bytes: int) -> float:
    """Return the CPU time to copy this number of bytes. Many bytes come from memory that no cache holds."""
    source, target = np.ones(max(1, size_bytes), np.uint8), np.empty(max(1, size_bytes), np.uint8)
    return cpu_us(lambda: np.copyto(target, source), _turns(size_bytes))


def crc_us(size_bytes: int) -> float:
    """Return the CPU time of one CRC32 pass over this number of bytes."""
    source = bytes(size_bytes)
    return cpu_us(lambda: zlib.crc32(source), _turns(size_bytes))


class Operations:
    """The main operations over `entries` entries with different keys; `uri` names the storage.

    `results` has the CPU time of each, its limit, and what the limit is.
    """

    def __init__(self, folder: Path, uri: str, entries: int, lookups: int) -> None:
        self._folder, self._uri, self._entries, self._lookups = folder, uri, entries, lookups
        self.results: dict[str, tuple[float, float, str]] = {}

    def run(self) -> None:
        """Do all operations, in the order of an entry's life."""
        slots = self._entries // 4
        with self._index("one", slots=slots, items=slots + 1, buffer_max_entries=2 * self._entries) as index:
            self._put(index)
        about = {"slots": slots, "items": self._entries + 1, "buffer_max_entries": 2 * self._entries}
        with self._index("all", **about) as index:
            self._fill(index)
            self._look_up("hot lookup", index, _ENTRY_BYTES)
            index.seal()
            self._compact(index)
            index.run_lifecycle()
            index.run_lifecycle()
        with IndexReader.open(self._uri, refresh_interval_s=1e9) as reader:
            self._look_up("cached lookup", reader, self._group_bytes(), keys=200)
        with IndexReader.open(self._uri, **_UNCACHED) as reader:
            self._look_up("cold lookup of a file", reader, self._group_bytes(), plain_get=True)
        self._merge()
        with IndexReader.open(self._uri, **_UNCACHED) as reader:
            self._look_up("cold lookup of a window table", reader, self._group_bytes(), plain_get=True)

    def _index(self, name: str, **settings: Any) -> IndexService[Any]:
        storage = self._uri if name == "all" else (self._folder / name / "storage").as_uri()
        return IndexService.open(root=self._folder / name / "root", storage=storage, **_SETTINGS, **settings)

    def _put(self, index: IndexService[Any]) -> None:
        keys, spent = keys_of(np.arange(self._entries // 4)), Spent()
        with spent:
            for number, key in enumerate(keys):
                index.put(TOPIC, number % 8, key, number * 300, 300, START_MS + number)
        item = bytes(_ENTRY_BYTES)
        limit_us = cpu_us(lambda: bytearray(item), _TURNS)
        name = "put, one entry per call"
        self.results[name] = spent.cpu_s / len(keys) * 1e6, limit_us, "a Python call that copies its 32 bytes"

    def _fill(self, index: IndexService[Any]) -> None:
        put, flush = Spent(), Spent()
        for begin in range(0, self._entries, _BATCH):
            rows = batch(np.arange(begin, min(begin + _BATCH, self._entries)))
            with put:
                index.put_batch(rows)
            with flush:
                index.flush()
        size = self._entries * _ENTRY_BYTES
        copied_us, checked_us = copy_us(size) / self._entries, crc_us(size) / self._entries
        an_entry = 1e6 / self._entries
        self.results["put_batch"] = put.cpu_s * an_entry, copied_us, "memcpy of its 32 bytes"
        limit = "memcpy and CRC32 of its 32 bytes"
        self.results["flush"] = flush.cpu_s * an_entry, checked_us + copied_us, limit

    def _rewritten(self, name: str, spent: Spent, read: int, written: int) -> None:
        limit_us = sum(us(size) for us in (copy_us, crc_us) for size in (read, written)) / self._entries
        limit = f"memcpy and CRC32 of {read / self._entries:.0f} bytes read, {written / self._entries:.0f} written"
        self.results[name] = spent.cpu_s / self._entries * 1e6, limit_us, limit

    def _compact(self, index: IndexService[Any]) -> None:
        (sealed,), spent = index.files(), Spent()
        with spent:
            index._lifecycle._compact(sealed)
        (path,) = (self._folder / "all" / "root" / "compacted").iterdir()
        self._rewritten("compact", spent, self._entries * (_ENTRY_BYTES + 4), path.stat().st_size)

    def _merge(self) -> None:
        clock, spent = SystemClock(), Spent()
        with open_storage(self._uri) as storage:
            log = StorageLog(storage, clock)
            read = sum(stored.size_bytes for stored in log.open().objects.values())

            def in_this_thread(rewrite: Rewrite) -> list[TaskResult]:
                return [task.run(storage, clock.now_ms(), lambda _: None) for task in rewrite.tasks]

            with spent:
                merge(storage, log, clock, MergeOptions(window_s=86_400, min_age_s=0), workers=in_this_thread)
            written = sum(stored.size_bytes for stored in log.open().objects.values())
        self._rewritten("merge", spent, read, written)

    def _look_up(
        self, name: str, index: Any, size_bytes: int, *, keys: int | None = None, plain_get: bool = False
    ) -> None:
        # fewer lookups if they wait for a server
        count = self._lookups // 5 if plain_get else self._lookups
        drawn = keys_of(np.random.default_rng(5).integers(0, self._entries, keys or count))
        # warms caches, connections and kernels
        for key in drawn[:200]:
            index.query(TOPIC, key)
        spent, found = Spent(), 0
        with spent:
            for key in itertools.islice(itertools.cycle(drawn), count):
                found += len(index.query(TOPIC, key))
        require(found, count, f"answers of {name}")
        read_us, read = copy_us(size_bytes), "memcpy"
        if plain_get:
            read_us, read = self._plain_get_us(size_bytes, max(1, count // 5)), "a plain GET"
        limit = f"{read} and CRC32 of {size_bytes:,} bytes"
        self.results[name] = spent.cpu_s / count * 1e6, read_us + crc_us(size_bytes), limit

    def _group_bytes(self) -> int:
        """Return the bytes that a lookup of a stored object reads, by its explain."""
        with IndexReader.open(self._uri, **_UNCACHED) as reader:
            keys = keys_of(np.array([1, 1]))
            read = [reader.query(TOPIC, key).explain.bytes for key in keys]
            return read[1]

    def _plain_get_us(self, size_bytes: int, count: int) -> float:
        """Return the CPU time to read a range of an object with least code: by boto3, or `os.pread` of a file."""
        with open_storage(self._uri) as storage:
            (stored, *_) = StorageLog(storage, SystemClock()).open().objects.values()
        get: Callable[[], object]
        if self._uri.startswith("s3://"):
            import boto3

            bucket, _, prefix = self._uri.removeprefix("s3://").partition("?")[0].partition("/")
            client = boto3.client("s3", endpoint_url=os.environ[ENDPOINT_VARIABLE])
            about = {"Bucket": bucket, "Key": f"{prefix}/{stored.name}", "Range": f"bytes=4096-{4095 + size_bytes}"}
            get = lambda: client.get_object(**about)["Body"].read()  # noqa: E731
        else:
            files = Path(self._uri.removeprefix("file://")).rglob("*")
            handle = os.open(next(path for path in files if path.name == Path(stored.name).name), os.O_RDONLY)
            get = lambda: os.pread(handle, size_bytes, 4096)  # noqa: E731
        for _ in range(50):
            get()
        return cpu_us(get, count)


def measure(folder: str, uri: str, entries: int, lookups: int) -> dict[str, tuple[float, float, str]]:
    """Do each main operation once in this process, and return the results."""
    if endpoint := os.environ.get(ENDPOINT_VARIABLE):
        os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
    operations = Operations(Path(folder), uri, entries, lookups)
    operations.run()
    return operations.results


def main(suite: str, arguments: list[str]) -> None:
    """Measure, and print the table."""
    parser = options(suite, __doc__, rounds=3)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--lookups", type=int, default=5_000, help="lookups of each kind")
    given = parser.parse_args(arguments)
    bucket, rounds = f"limits-{secrets.token_hex(4)}", []
    if endpoint := os.environ.get(ENDPOINT_VARIABLE):
        import boto3

        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
    for number in range(given.rounds):
        note(f"round {number + 1} of {given.rounds}")
        with scratch(given.root_dir) as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
            uri = f"s3://{bucket}/{number}?addressing_style=path" if endpoint else (folder / "storage").as_uri()
            rounds.append(pool.apply(measure, (str(folder), uri, given.entries, given.lookups)))
    rows = []
    for name, (_, _, limit) in rounds[0].items():
        cpu, least = (statistics.median(results[name][at] for results in rounds) for at in (0, 1))
        rows.append((name, cpu, least, cpu / least, limit))
    columns = ("operation", "CPU us", "limit, us", "times the limit", "the limit is")
    finish(given, {"tables": {f"{given.entries:,} entries": [columns, *rows]}})
