"""`make bench SUITE=ranges`: lookups in 1 to 1,000 stored files, with an injected latency. `SUITE=s3`: on a server.

There are small stored files, one for each hour. The 1, 10, 100 or 1,000 newest are in the range of a lookup. Each file
has some keys that are in all files, and keys of its own. Each lookup is for a new key. Its time is compared with that
of plain GETs of the same ranges. Each measurement starts the sequence of latencies again, so two ways that read the
same number of ranges have the same latencies.

RocketMQ's tiered `IndexStoreFile` reads a slot's 8 bytes and then the slot's array, in every file of the range. It has
no filter, and verifies nothing. Its storage provider decides how many files it reads in parallel, so the suite measures
two ways: file by file, and with as many parallel reads as a reader of this project has.

Two further tables need no server: the requests of new readers, and those of `query_many` by the number of keys.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.benchmarks.messages import START_MS, TOPIC, absent_keys, batch, key_array, keys_of
from tests.benchmarks.report import finish, note, options, percentiles, require, scratch
from tests.real_s3.server import ENDPOINT_VARIABLE
from tests.support.foreign_lookups import bare_slot_run
from tests.support.processes import own_environment
from tests.support.storage_faults import LatencyStorage
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.format.keys.hashing import key_hash, normal_hashes
from tiered_index.format.layout import HEADER_SIZE, PRESETS, SLOT_SIZE, Layout
from tiered_index.format.trailer import Run
from tiered_index.service.read.files.compacted import CompactedFile, StorageBytes
from tiered_index.storage.base import Storage, WrapperStorage
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.prices import PriceTable
from tiered_index.types import Lookup

_MEDIAN_MS, _SIGMA = 30.0, 0.3
# numbers of the keys that are in all files; those of other keys are far below
_SHARED, _SHARED_KEYS = 1 << 41, 64
_HOUR_MS = 3_600_000
_AT_ONCE, _COPIES = 50, 8
_LOOKUPS = {1: 30, 10: 20, 100: 8, 1_000: 2}
_MAX_COUNT = 64
_NEWEST = f"all, newest {_MAX_COUNT}"
_OURS, _WITH_FILTERS, _PLAIN, _FRESH = "ours", "ours, filters cached", "plain GETs", "a new reader"
_PARALLEL, _SERIAL = "RocketMQ, in parallel", "RocketMQ, file by file"
_KEYS = (1, 10, 100, 1_000, 10_000)
Get = Callable[[str, int, int], bytes]
Cost = tuple[int, int, int]
"""The matches, requests and bytes of a lookup."""


@dataclass(frozen=True)
class StoredFiles:
    """`count` files of `layout` in `folder`, whose writer cached their directories and filters."""

    layout: Layout
    count: int
    folder: Path

    @property
    def storage(self) -> LocalStorage:
        """A new storage of the files."""
        return LocalStorage(self.folder / "storage")

    @property
    def cache(self) -> Path:
        """The writer's cache."""
        return self.folder / "root" / "cache"

    def key(self, kind: str, files: int, number: int) -> tuple[str, int, int]:
        """Return a key that none, one or all of the newest files have, the number of its answers, and a `max_count`."""
        if kind == "none":
            return absent_keys(np.array([number]))[0], 0, _MAX_COUNT
        if kind == "one":
            own = self.layout.capacity - _SHARED_KEYS
            place = (self.count - 1 - number % files) * own + number % own
            return keys_of(np.array([place]))[0], 1, _MAX_COUNT
        most = _MAX_COUNT if kind == _NEWEST else max(_MAX_COUNT, files)
        return keys_of(np.array([_SHARED + number % _SHARED_KEYS]))[0], min(files, most), most

    def rows(self, file: int) -> pa.RecordBatch:
        """Return a file's messages."""
        own = self.layout.capacity - _SHARED_KEYS
        keys = np.concatenate([_SHARED + np.arange(_SHARED_KEYS), file * own + np.arange(own)])
        return batch(file * _HOUR_MS * 10 + np.arange(self.layout.capacity), key_array(keys))


@contextlib.contextmanager
def stored_files(base: Path, items: int, count: int, *, preset: str = "native") -> Iterator[StoredFiles]:
    """Put, compact and upload files without syncs. RocketMQ's way needs preset rocketmq, which has a slot table."""
    disk = UnsyncedDisk()
    layout = Layout(PRESETS[preset], PRESETS[preset].schema, max(1, items // 4), items)
    with scratch(base) as folder:
        files = StoredFiles(layout, count, folder)
        about: dict[str, Any] = {"root": folder / "root", "background": False, "local_keep_s": 0}
        config = IndexConfig.load(preset=preset, slots=layout.slots, items=items, **about)
        storage = LocalStorage(folder / "storage", disk=disk)
        with IndexService.open(config, disk=disk, storage_backend=storage) as index:
            for file in range(count):
                index.put_batch(files.rows(file))
                index.flush()
                if file % max(1, min(_AT_ONCE, 2_000_000 // items)) == 0 or file == count - 1:
                    index.run_lifecycle()
            require([file.place for file in index.files()], ["storage"] * count, "states of the files")
        yield files


class Network(WrapperStorage):
    """A storage, with injected latencies if `injected`."""

    def __init__(self, storage: Storage, *, injected: bool) -> None:
        super().__init__(storage)
        self.storage, self.injected = storage, injected

    def begin(self, seed: int) -> None:
        """Start the sequence of latencies of `seed`."""
        if self.injected:
            self.inner = LatencyStorage(self.storage, seed, _MEDIAN_MS, _SIGMA)


@contextlib.contextmanager
def _network(files: StoredFiles, endpoint: str | None) -> Iterator[tuple[Network, Get]]:
    """Yield the files with an injected latency, or a copy on the server, and a function that reads a range plainly."""
    if endpoint is None:
        network = Network(files.storage, injected=True)
        yield network, network.get_range
        return
    import boto3
    from botocore.config import Config

    style: Any = {"addressing_style": "path"}
    client = boto3.client("s3", endpoint_url=endpoint, config=Config(max_pool_connections=36, s3=style))
    bucket = f"tiered-index-bench-{secrets.token_hex(6)}"
    client.create_bucket(Bucket=bucket)

    def get(name: str, start: int, length: int) -> bytes:
        part = f"bytes={start}-{start + length - 1}"
        body: bytes = client.get_object(Bucket=bucket, Key=f"bench/{name}", Range=part)["Body"].read()
        return body

    source = files.storage
    with open_storage(f"s3://{bucket}/bench?endpoint_url={endpoint}") as target:
        try:
            with ThreadPoolExecutor(_COPIES) as pool:
                list(pool.map(lambda info: target.put(info.name, source.get(info.name)), list(source.list())))
            yield Network(target, injected=False), get
        finally:
            target.delete_many([info.name for info in list(target.list())])
            client.delete_bucket(Bucket=bucket)


def open_reader(storage: Storage, cache: Path | None = None, **settings: Any) -> IndexReader:
    """Open a reader without a block cache, which fetches no filters after misses. `cache` is the writer's cache."""
    never = {"cache_slot_groups": False, "filter_after_probes": 1 << 30, "refresh_interval_s": 1e9}
    return IndexReader.open(config=IndexConfig.load(cache_dir=cache, **never, **settings), storage_backend=storage)


class Lookups:
    """The costs of lookups, by (files in the range, files that have the key, way of reading)."""

    def __init__(self, files: StoredFiles, network: Network, get: Get, rounds: int) -> None:
        self.files, self.network, self.get, self.rounds = files, network, get, rounds
        self.costs: dict[tuple[int, str, str], list[tuple[int, int, float]]] = {}
        self._random = np.random.default_rng(1)

    def run(self) -> None:
        """Measure all ways, in turns."""
        self.network.begin(0)
        with open_reader(self.network) as plain, open_reader(self.network, self.files.cache) as filtered:
            for reader in (plain, filtered):
                reader.topics()  # reads the directories, and no filters
            newest_first = sorted(plain.files(), key=lambda file: -file.second_max)
            stored = [f.stored for f in newest_first if isinstance(f, CompactedFile) and f.stored is not None]
            with ThreadPoolExecutor(plain.config.query_threads) as pool:
                self._plainly(pool, stored, self.files.key("all", 1, 0)[0])  # opens connections
                for number in range(self.rounds):
                    note(f"round {number + 1} of {self.rounds}")
                    for count in (count for count in _LOOKUPS if count <= self.files.count):
                        for turn in range(_LOOKUPS[count]):
                            self._turn(plain, filtered, pool, stored[:count], number * 1_000 + turn)
                        self._fresh(count, number)

    def _turn(self, plain: Any, filtered: Any, pool: Any, stored: list[StorageBytes], seed: int) -> None:
        count = len(stored)
        for kind in ("one", "all", "none", *([_NEWEST] if count > _MAX_COUNT else [])):
            key, answers, most = self.files.key(kind, count, int(self._random.integers(1 << 31)))
            self._timed((count, kind, _PLAIN), seed, partial(self._plainly, pool, stored, key), None)
            for way, reader in ((_OURS, plain), (_WITH_FILTERS, filtered)):
                self._timed((count, kind, way), seed, partial(self._look_up, reader, count, key, most), answers)
        key = self.files.key("one", count, int(self._random.integers(1 << 31)))[0]
        read = partial(self._as_rocketmq, stored, key)
        self._timed((count, "one", _PARALLEL), seed, partial(read, pool.map), None)
        # a thousand files one by one take a minute
        if (count, "one", _SERIAL) not in self.costs or count <= 10:
            self._timed((count, "one", _SERIAL), seed, partial(read, map), None)

    def _timed(self, way: tuple[int, str, str], seed: int, read: Callable[[], Cost], answers: int | None) -> None:
        self.network.begin(seed)
        began_s = time.perf_counter()
        answer_count, requests, read_bytes = read()
        elapsed_s = time.perf_counter() - began_s
        if answers is not None:
            require(answer_count, answers, f"answers of {way}")
        self.costs.setdefault(way, []).append((requests, read_bytes, elapsed_s))

    def _look_up(self, reader: IndexReader, count: int, key: str, most: int) -> Cost:
        begin_ms = START_MS + (self.files.count - count) * _HOUR_MS
        result = reader.query(TOPIC, key, begin_ms=begin_ms, max_count=most)
        return len(result), result.explain.requests, result.explain.bytes

    def _fresh(self, count: int, seed: int) -> None:
        """Open a reader without caches, and look a key up once."""
        key, answers, most = self.files.key("all", count, int(self._random.integers(1 << 31)))
        metered, opened = MeteredStorage(self.network), list[IndexReader]()

        def begin() -> Cost:
            opened.append(open_reader(metered))
            return 0, metered.total.requests, metered.total.bytes_read

        self._timed((count, "(opening)", _FRESH), seed, begin, None)
        with opened[0] as reader:
            self._timed((count, "all", _FRESH), seed, partial(self._look_up, reader, count, key, most), answers)

    def _plainly(self, pool: Any, stored: Sequence[StorageBytes], key: str) -> Cost:
        """Read the ranges of a key's slot by parallel plain GETs. The slowest one decides the time."""
        runs: list[tuple[str, Run]] = []
        for file in stored:
            trailer = file.trailer()
            slot = np.array([key_hash(TOPIC, key) % trailer.metadata.layout.slots])
            runs += [(file.stored.name, run) for run in trailer.directory.runs_of(slot, 0, 1 << 62)]
        sizes = list(
            (pool.map if len(runs) > 1 else map)(lambda r: len(self.get(r[0], r[1].offset, r[1].length)), runs)
        )
        return 0, len(sizes), sum(sizes)

    def _as_rocketmq(self, stored: Sequence[StorageBytes], key: str, mapped: Any) -> Cost:
        layout, hash31 = self.files.layout, key_hash(TOPIC, key)
        slot = hash31 % layout.slots

        def look(file: StorageBytes) -> Cost:
            name, size = file.stored.name, file.stored.size_bytes
            head = self.network.get_range(name, HEADER_SIZE + SLOT_SIZE * slot, SLOT_SIZE)
            position, length = bare_slot_run(head, layout, name, size, slot)
            if not length:
                return 0, 1, SLOT_SIZE
            items = np.frombuffer(self.network.get_range(name, position, length), layout.schema.item)
            return int(np.count_nonzero(normal_hashes(items["key_hash"]) == hash31)), 2, SLOT_SIZE + length

        counts, requests, read_bytes = zip(*mapped(look, stored), strict=True)
        return sum(counts), sum(requests), sum(read_bytes)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the columns of the table and its rows."""
        yield "files", "key in", "read by", "GETs", "KiB", "USD per million", "p50 ms", "p99 ms", "times plain GETs"
        p50s = {way: percentiles([cost[2] for cost in costs], 50, unit=1e3)[0] for way, costs in self.costs.items()}
        for way, costs in sorted(self.costs.items(), key=lambda pair: pair[0][0]):
            gets, size = (float(np.mean([cost[at] for cost in costs])) for at in (0, 1))
            usd = PriceTable().cost_usd({"get_range": 1}, 0) * gets * 1e6
            p99 = percentiles([cost[2] for cost in costs], 99, unit=1e3)[0]
            beside = p50s.get((way[0], way[1], _PLAIN))
            yield (*way, gets, size / 1024, usd, p50s[way], p99, p50s[way] / beside if beside else None)


def new_readers(base: Path, count: int, sizes: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Yield the requests and MiB of new readers without a local cache: of opening, and of their first two lookups."""
    steps = ("open", "first lookup", "second lookup")
    yield "entries a file", "key in", *(text for step in steps for text in (f"{step}: requests", "MiB"))
    for items in sizes:
        with stored_files(base, items, count) as files:
            for kind in ("none", "one", "all"):
                metered = MeteredStorage(files.storage)
                spent: list[tuple[int, float]] = [(0, 0.0)]
                with open_reader(metered) as reader:
                    spent.append((metered.total.requests, metered.total.bytes_read / 2**20))
                    for number in (1, 2):
                        key, answers, _ = files.key(kind, count, number)
                        require(len(reader.query(TOPIC, key, max_count=2 * count)), answers, f"answers of {kind}")
                        spent.append((metered.total.requests, metered.total.bytes_read / 2**20))
                yield items, kind, *np.diff(spent, axis=0).ravel().tolist()


def many_keys(base: Path, items: int, count: int) -> Iterator[tuple[Any, ...]]:
    """Yield the requests and MiB of `query_many` in packed files. Each key is in one of them."""
    with stored_files(base, items, count) as files:
        own = (files.layout.capacity - _SHARED_KEYS) * count
        wanted = [size for size in _KEYS if size <= own]
        keys = keys_of(np.random.default_rng(7).choice(own, max(wanted), replace=False))
        gap = IndexConfig(environment=False).coalesce_gap_bytes
        yield "keys", "filters", "gap, KiB", "requests", "MiB"
        for filters, most in ((False, gap), (False, 0), (True, gap), (True, 0)):
            # the wrapped storage reads ranges as an object store does
            storage, cache = WrapperStorage(files.storage), files.cache if filters else None
            with open_reader(storage, cache, coalesce_gap_bytes=most) as reader:
                reader.topics()  # reads the directories, and no filters
                for size in wanted:
                    answers = reader.query_many([Lookup(topic=TOPIC, key=key) for key in keys[:size]])
                    require(int(answers.counts.sum()), size, "answers of query_many")
                    cost = answers.explain.requests, answers.explain.bytes / 2**20
                    yield size, "in memory" if filters else "none", most >> 10, *cost


def main(suite: str, arguments: list[str]) -> None:
    """Measure, and print the tables."""
    parser = options(suite, __doc__, rounds=3)
    parser.add_argument("--files", type=int, default=1_000, help="stored files")
    parser.add_argument("--items", type=int, default=20_000, help="items of a file")
    flags = parser.parse_args(arguments)
    large, few = 200 * flags.items, flags.items < 20_000
    endpoint = os.environ[ENDPOINT_VARIABLE] if suite == "s3" else None
    with own_environment():
        with stored_files(flags.root_dir, flags.items, flags.files, preset="rocketmq") as files:
            with _network(files, endpoint) as (network, get):
                lookups = Lookups(files, network, get, flags.rounds)
                lookups.run()
        where = "a real S3 server" if suite == "s3" else f"a folder behind lognormal({_MEDIAN_MS:.0f} ms, {_SIGMA})"
        tables = {f"{flags.files:,} files of {flags.items:,} items on {where}": list(lookups.rows())}
        if suite == "ranges":
            readers = (24, (500,)) if few else (240, (20_000, 80_000))
            tables |= {
                f"a new reader of {readers[0]} packed files": list(new_readers(flags.root_dir, *readers)),
                f"query_many in ten packed files of {large:,} items": list(many_keys(flags.root_dir, large, 10)),
            }
    finish(flags, {"tables": tables})
