"""Lookups of suite `cold`: requests, bytes and time in stored files, with an injected latency or on `--storage`.

There are many small stored files, one for each hour. The 1, 10, 100 or 1,000 newest are in the range of a lookup. Each
file has some keys that are in all files, and keys of its own. Each lookup is for a new key. Its time is compared with
the time of plain GETs of the same ranges. Each measurement starts the sequence of injected latencies again, so two ways
that read the same number of ranges have the same latencies.

RocketMQ's tiered `IndexStoreFile` reads a slot's 8 bytes and then the slot's array, in every file of the range. It has
no filter, and verifies nothing. Its storage provider decides how many files it reads in parallel. So the suite measures
two ways: file by file, and with as many parallel reads as a reader of this project has.

Threads: the suite's thread calls everything. Only the methods of `Network` may be called from any thread, except
`begin`.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.benchmarks.machine.figures import Meter, Spec, Table, at_least, at_most
from tests.benchmarks.machine.setting import (
    START_MS,
    TOPIC,
    ColdAmounts,
    Setting,
    absent_keys,
    batch,
    key_array,
    keys_of,
    require,
    scratch,
)
from tests.support.foreign_lookups import bare_slot_run
from tests.support.plain_files import plain_files
from tests.support.storage_faults import LatencyStorage
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index.cli.output import counted
from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.format.hashing import key_hash, normal_hashes
from tiered_index.format.layout import HEADER_SIZE, SLOT_SIZE, Layout
from tiered_index.format.trailer import Run
from tiered_index.service.read.compacted import CompactedFile, StorageBytes
from tiered_index.service.reader import IndexReader
from tiered_index.storage.base import Storage, WrapperStorage
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.prices import PriceTable

_MEDIAN_MS = 30.0
_SIGMA = 0.3
"""The injected latency is lognormal: the median of a request, and the standard deviation of its logarithm."""
# numbers of the keys that are in all files; those of other keys are far below
_SHARED = 1 << 41
_HOUR_MS = 3_600_000
# message numbers of an hour
_HOUR = _HOUR_MS * 10
_AT_ONCE = 50
_COPIES = 8
# as `filter_after_probes`: never fetch one
_NO_FILTERS = 1 << 30
_PRICES = PriceTable()
_RawGet = Callable[[str, int, int], bytes]


@dataclass(frozen=True)
class StoredFiles:
    """`count` files in the folder `objects`; `cache` is the writer's cache of their directories and filters."""

    layout: Layout
    count: int
    objects: Path
    cache: Path

    @property
    def shared(self) -> int:
        """Number of keys that are in all files."""
        return min(64, self.layout.capacity // 4)

    def begin_ms(self, files: int) -> int:
        """Return the begin of the range of the `files` newest files, in epoch milliseconds."""
        return START_MS + (self.count - files) * _HOUR_MS

    def key_in_all(self, number: int) -> str:
        """Return one of the keys that are in all files."""
        return keys_of(np.array([_SHARED + number % self.shared]))[0]

    def key_in_one(self, file: int, number: int) -> str:
        """Return one of the keys that are only in file `file` (0: the oldest)."""
        own = self.layout.capacity - self.shared
        return keys_of(np.array([file * own + number % own]))[0]

    def rows(self, file: int) -> pa.RecordBatch:
        """Return a file's messages."""
        own = self.layout.capacity - self.shared
        keys = np.concatenate([_SHARED + np.arange(self.shared), file * own + np.arange(own)])
        return batch(file * _HOUR + np.arange(self.layout.capacity), key_array(keys))


def make_files(setting: Setting, layout: Layout, count: int, folder: Path, *, plain: bool = False) -> StoredFiles:
    """Put, compact and upload `count` files of `layout` to a `file://` storage, without syncs.

    `plain`: the files have a slot table.
    """
    made = StoredFiles(layout, count, folder / "storage", folder / "root" / "cache")
    disk = UnsyncedDisk()
    at_once = max(1, min(_AT_ONCE, 2_000_000 // layout.capacity))
    storage = LocalStorage(made.objects, disk=disk)
    opened = replace(setting, layout=layout).open(folder, disk=disk, storage=storage, local_keep_s=0)
    with plain_files(plain), opened as index:
        for first in range(0, count, at_once):
            for file in range(first, min(first + at_once, count)):
                index.put_batch(made.rows(file))
                index.flush()
            index.run_lifecycle()
        require([file.place for file in index.files()], ["storage"] * count, "states of the files")
    return made


def check_storage(uri: str) -> None:
    """Raise `InvalidArgument` for a storage that this suite can't measure."""
    if not uri.startswith(("s3://", "file://")):
        raise InvalidArgument("bench cold reads from an s3:// or file:// storage")


class Network(WrapperStorage):
    """`storage`, with injected latencies if `injected`."""

    def __init__(self, storage: Storage, *, injected: bool) -> None:
        super().__init__(storage)
        self.storage = storage
        self.injected = injected

    def begin(self, seed: int) -> None:
        """Start the sequence of latencies of `seed`."""
        if self.injected:
            self.inner = LatencyStorage(self.storage, seed, _MEDIAN_MS, _SIGMA)


def _raw_get(network: Network, threads: int) -> _RawGet:
    """Return a function that reads a range (name, start, length) by a plain GET.

    For S3 it uses its own boto3 client, otherwise the storage.
    """
    # imported here, because every command imports this module, and few need boto3
    import boto3
    from botocore.config import Config

    from tiered_index.storage.s3.storage import S3Storage

    storage = network.storage
    if not isinstance(storage, S3Storage):
        return network.get_range

    options = storage.options
    style: Any = {"addressing_style": options.addressing_style or ("path" if options.endpoint_url else "auto")}
    client = boto3.Session(profile_name=options.profile, region_name=options.region).client(
        "s3", endpoint_url=options.endpoint_url, config=Config(max_pool_connections=threads + 4, s3=style)
    )
    bucket, prefix = storage.bucket, storage.uri.partition("?")[0].removeprefix(f"s3://{storage.bucket}").strip("/")

    def get(name: str, start: int, length: int) -> bytes:
        body: bytes = client.get_object(
            Bucket=bucket, Key=f"{prefix}/{name}", Range=f"bytes={start}-{start + length - 1}"
        )["Body"].read()
        return body

    return get


def open_reader(storage: Storage, cache: Path | None = None, **settings: Any) -> IndexReader:
    """Open a reader of the index in `storage`. It fetches no filters after misses; `cache` is the writer's cache."""
    config = IndexConfig.load(
        block_cache_bytes=0, filter_after_probes=_NO_FILTERS, refresh_interval_s=1e9, cache_dir=cache, **settings
    )
    return IndexReader.open(config=config, storage_backend=storage)


@dataclass(frozen=True)
class LookupCost:
    """Matches, requests, bytes, cost and time of one lookup. `Round.timed` sets `elapsed_s`."""

    found: int = 0
    requests: int = 0
    bytes: int = 0
    cost_usd: float = 0.0
    elapsed_s: float = 0.0

    @classmethod
    def of_gets(cls, found: int, requests: int, read: int) -> LookupCost:
        """Return the cost of `requests` GETs of `read` bytes in all."""
        return cls(found, requests, read, _PRICES.cost_usd({"get_range": requests}, read))


def _runs_of(files: Sequence[StorageBytes], topic: str, key: str) -> list[tuple[str, Run]]:
    """Return the range of a key's slot in each file whose slot group isn't empty."""
    hash31 = key_hash(topic, key)
    found = []
    for file in files:
        trailer = file.trailer()
        slot = hash31 % trailer.metadata.layout.slots
        found += [(file.stored.name, run) for run in trailer.directory.runs_of(np.array([slot]), 0, 1 << 62)]
    return found


def _raw_ranges(pool: Executor, get: _RawGet, runs: Sequence[tuple[str, Run]]) -> LookupCost:
    """Read ranges by parallel plain GETs. The slowest GET decides the time."""
    # a single range is read in this thread
    bodies = list(
        (pool.map if len(runs) > 1 else map)(lambda item: len(get(item[0], item[1].offset, item[1].length)), runs)
    )
    return LookupCost.of_gets(0, len(bodies), sum(bodies))


_KINDS = ("one", "all", "none")
"""The files in the range that have the key."""
# all files have the key, and the lookup asks for 64 answers
_NEWEST = "all, newest 64"
_OURS, _WITH_FILTERS, _RAW = "ours", "ours, filters cached", "plain GETs"
_SERIAL, _PARALLEL = "RocketMQ, file by file", "RocketMQ, in parallel"
# reading this many files one by one takes a minute: the suite does it once
_LONG = 1_000
_FRESH, _OPENING = "fresh reader", "(opening only)"
_MAX_COUNT = 64
_MOST_TIMES = 1.2
_LEAST_SPARED = 98.0
_MOST_TO_OPEN = 3

Way = tuple[int, str, str]
"""Number of files in the range, those of them that have the key, and the way of reading."""


Cells = dict[Way, list[LookupCost]]
"""The costs of lookups, by the way of reading."""


def _section(files: int, kind: str) -> str:
    return f"lookups in {files:,}, {kind}"


class Round:
    """Round `number`: its results, and the objects that it measures with."""

    def __init__(self, network: Network, files: StoredFiles, amounts: ColdAmounts, number: int, meter: Meter) -> None:
        self.cells: Cells = {}
        self.network, self.files, self.amounts, self.number = network, files, amounts, number
        self._meter = meter
        self._random = np.random.default_rng(1_000 + number)
        self._keyed = files.layout.schema.keyed

    def key(self, files: int, kind: str) -> tuple[str, int, int]:
        """Return a new key, the number of its answers in the `files` newest files, and a `max_count`."""
        number = int(self._random.integers(1 << 31))
        if kind == "none":
            return absent_keys(np.array([number]))[0], 0, _MAX_COUNT
        if kind == "one":
            file = self.files.count - 1 - int(self._random.integers(files))
            return self.files.key_in_one(file, number), 1, _MAX_COUNT
        max_count = _MAX_COUNT if kind == _NEWEST else max(_MAX_COUNT, files)
        return self.files.key_in_all(number), min(files, max_count), max_count

    def timed(self, way: Way, seed: int, read: Callable[[], LookupCost], answers: int | None) -> None:
        """Measure one lookup. A wrong number of answers ends the run."""
        self.network.begin(seed)
        started_s = time.perf_counter()
        cost = read()
        elapsed_s = time.perf_counter() - started_s
        if answers is not None:
            # without fingerprints an answer also has entries of other keys with the same 31-bit hash
            require(cost.found if self._keyed else min(cost.found, answers), answers, f"answers of {way}")
        self.cells.setdefault(way, []).append(replace(cost, elapsed_s=elapsed_s))

    def look_up(self, reader: IndexReader, files: int, kind: str, key: str, max_count: int) -> LookupCost:
        """Look a key up by `reader`, in a section that profiles can select."""
        with self._meter.section(_section(files, kind)):
            result = reader.query(TOPIC, key, begin_ms=self.files.begin_ms(files), max_count=max_count)
        return LookupCost(len(result), result.explain.requests, result.explain.bytes, result.explain.cost_usd)

    def open(self, files: int) -> None:
        """Open a reader without caches, and look a key up once."""
        key, answers, max_count = self.key(files, "all")
        metered = MeteredStorage(self.network)
        readers: list[IndexReader] = []

        def begin() -> LookupCost:
            readers.append(open_reader(metered))
            return LookupCost(0, metered.total.requests, metered.total.bytes_read, metered.total.cost_usd)

        self.timed((files, _OPENING, _FRESH), self.number, begin, None)
        with readers[0] as reader:
            look_up = partial(self.look_up, reader, files, "fresh", key, max_count)
            self.timed((files, "all", _FRESH), self.number, look_up, answers)


def _rocketmqs_ways(measured: Round, files: Sequence[StorageBytes], turn: int, pool: Executor) -> None:
    """Measure one more lookup of a key in RocketMQ's way, and file by file in the last turn."""
    count, number, amounts = len(files), measured.number, measured.amounts
    key, _, _ = measured.key(count, "one")
    read = partial(
        _as_rocketmq, storage=measured.network, layout=measured.files.layout, files=files, topic=TOPIC, key=key
    )
    measured.timed((count, "one", _PARALLEL), number * 1_000 + turn, partial(read, pool), None)
    is_last = turn == amounts.lookups[count] - 1
    if is_last and (count <= 10 or not amounts.quick) and (count < _LONG or number == 0):
        measured.timed((count, "one", _SERIAL), number, partial(read, None), None)


def _as_rocketmq(
    pool: Executor | None, storage: Storage, layout: Layout, files: Sequence[StorageBytes], topic: str, key: str
) -> LookupCost:
    """Look a key up in RocketMQ's way: in parallel with a pool, otherwise file by file."""
    hash31 = key_hash(topic, key)
    slot = hash31 % layout.slots

    def look(file: StorageBytes) -> LookupCost:
        name, size = file.stored.name, file.stored.size_bytes
        slot_item = storage.get_range(name, HEADER_SIZE + SLOT_SIZE * slot, SLOT_SIZE)
        position, length = bare_slot_run(slot_item, layout, name, size, slot)
        if not length:
            return LookupCost(0, 1, SLOT_SIZE)
        items = np.frombuffer(storage.get_range(name, position, length), layout.schema.item)
        return LookupCost(int(np.count_nonzero(normal_hashes(items["key_hash"]) == hash31)), 2, SLOT_SIZE + length)

    spent = list((pool.map if pool is not None and len(files) > 1 else map)(look, files))
    return LookupCost.of_gets(sum(s.found for s in spent), sum(s.requests for s in spent), sum(s.bytes for s in spent))


def _measure_lookups(network: Network, files: StoredFiles, amounts: ColdAmounts, meter: Meter) -> Iterator[Cells]:
    """Yield the results of each round."""
    network.begin(0)
    with open_reader(network) as plain, open_reader(network, files.cache) as filtered:
        threads = plain.config.query_threads
        # reads the directories, and no filters
        plain.topics()
        filtered.topics()
        get = _raw_get(network, threads)
        files_newest_first = sorted(plain.files(), key=lambda file: -file.second_max)
        newest = [f.stored for f in files_newest_first if isinstance(f, CompactedFile) and f.stored is not None]
        with ThreadPoolExecutor(threads) as pool:
            # open connections and start threads, as the readers have done
            _raw_ranges(pool, get, _runs_of(newest, TOPIC, files.key_in_all(0)))
            for number in meter.rounds():
                measured = Round(network, files, amounts, number, meter)
                for count, lookups in amounts.lookups.items():
                    near = newest[:count]
                    for turn in range(lookups):
                        for kind in (*_KINDS, *([_NEWEST] if count > _MAX_COUNT else [])):
                            key, answers, max_count = measured.key(count, kind)
                            seed = number * 1_000 + turn
                            runs = _runs_of(near, TOPIC, key)
                            look_up = partial(measured.look_up, files=count, kind=kind, key=key, max_count=max_count)
                            measured.timed((count, kind, _RAW), seed, partial(_raw_ranges, pool, get, runs), None)
                            measured.timed((count, kind, _OURS), seed, partial(look_up, plain), answers)
                            measured.timed((count, kind, _WITH_FILTERS), seed, partial(look_up, filtered), answers)
                        _rocketmqs_ways(measured, near, turn, pool)
                    measured.open(count)
                yield measured.cells


def _times(files: int, kind: str) -> str:
    return f"key in {kind} of {counted(files, 'file')}: times the slowest plain GET, p50"


def _to_open(amounts: ColdAmounts) -> str:
    return f"requests to open a reader on {amounts.files:,} files"


def _spared(amounts: ColdAmounts) -> str:
    return f"absent keys, filters cached: files of {max(amounts.lookups):,} without a GET"


def cold_specs(setting: Setting) -> Sequence[Spec]:
    """Return the figures with goals."""
    amounts = ColdAmounts.of(setting)
    pairs = [(files, kind) for files in amounts.lookups for kind in _KINDS]
    specs = [Spec(_times(*pair), "ratio", at_most(_MOST_TIMES), (_section(*pair),)) for pair in pairs]
    most = max(amounts.lookups)
    specs.append(Spec(_spared(amounts), "%", at_least(_LEAST_SPARED), (_section(most, "none"),)))
    specs.append(Spec(_to_open(amounts), "count", at_most(_MOST_TO_OPEN), (_section(most, "fresh"),)))
    return specs


def measure_cold(setting: Setting, folder: Path, meter: Meter) -> None:
    """Measure lookups and, in the same rounds, RocketMQ's ways of reading."""
    amounts = ColdAmounts.of(setting)
    with scratch(folder) as place:
        # RocketMQ's way needs the slot table
        files = make_files(setting, amounts.layout, amounts.files, place, plain=True)
        cells: Cells = {}
        with _network(setting, files) as network:
            for measured in _measure_lookups(network, files, amounts, meter):
                _record(measured, amounts, meter)
                for way, costs in measured.items():
                    cells.setdefault(way, []).extend(costs)
        where = setting.storage or f"a folder behind a latency of lognormal({_MEDIAN_MS:.0f} ms, {_SIGMA})"
        about = f"{amounts.files:,} files of {files.layout.slots:,} slots and {files.layout.items:,} items on {where}"
        meter.tables += _lookup_tables(cells, about)


@contextlib.contextmanager
def _network(setting: Setting, files: StoredFiles) -> Iterator[Network]:
    """Yield the files with an injected latency, or a copy below a new prefix of the setting's storage.

    The copy is deleted at the end.
    """
    source = LocalStorage(files.objects)
    if setting.storage is None:
        yield Network(source, injected=True)
        return
    before, mark, query = setting.storage.partition("?")
    uri = f"{before.rstrip('/')}/tiered-index-bench-{secrets.token_hex(6)}{mark}{query}"
    with open_storage(uri) as target, ThreadPoolExecutor(_COPIES) as pool:
        try:
            for _ in pool.map(lambda info: target.put(info.name, source.get(info.name)), list(source.list())):
                pass
            yield Network(target, injected=False)
        finally:
            target.delete_many([info.name for info in list(target.list())])


def _percentile_ms(costs: Sequence[LookupCost], which: float) -> float:
    return float(np.percentile([cost.elapsed_s for cost in costs], which)) * 1000


def _mean(costs: Sequence[LookupCost], name: str) -> float:
    return float(np.mean([getattr(cost, name) for cost in costs]))


def _record(cells: Cells, amounts: ColdAmounts, meter: Meter) -> None:
    for files in amounts.lookups:
        for kind in _KINDS:
            plain = _percentile_ms(cells[files, kind, _RAW], 50)
            meter.record(_times(files, kind), _percentile_ms(cells[files, kind, _OURS], 50) / plain)
    most = max(amounts.lookups)
    meter.record(_spared(amounts), 100 * (1 - _mean(cells[most, "none", _WITH_FILTERS], "requests") / most))
    meter.record(_to_open(amounts), _mean(cells[most, _OPENING, _FRESH], "requests"))


_COLUMNS = (
    *("files", "key in", "read by", "lookups", "requests", "KiB", "USD per million"),
    *("p50 ms", "p99 ms", "p50 times plain GETs"),
)


def _lookup_tables(cells: Cells, about: str) -> Iterator[Table]:
    parts = {
        "lookups": (_OURS, _WITH_FILTERS),
        "other ways": (_RAW, _PARALLEL, _SERIAL),
        "a reader without caches": (_FRESH,),
    }
    for title, ways in parts.items():
        chosen = [(way, costs) for who in ways for way, costs in cells.items() if way[2] == who]
        chosen.sort(key=lambda pair: pair[0][0])
        yield Table(f"{title}: {about}", _COLUMNS, tuple(_row(cells, *pair) for pair in chosen))


def _row(cells: Cells, way: Way, costs: Sequence[LookupCost]) -> tuple[Any, ...]:
    p50_ms = _percentile_ms(costs, 50)
    plain = cells.get((way[0], way[1], _RAW))
    return (
        *way,
        len(costs),
        _mean(costs, "requests"),
        _mean(costs, "bytes") / 1024,
        _mean(costs, "cost_usd") * 1e6,
        p50_ms,
        _percentile_ms(costs, 99),
        p50_ms / _percentile_ms(plain, 50) if plain is not None else None,
    )
