"""The stored files that suite `cold` asks, how many there are, the storage in front of them, and what reads them.

Every file holds some keys that all have, and its own; each covers an hour of its own. The storage is read as it is, or
behind an injected latency whose sequence starts anew with every measurement: two ways of reading the same number of
ranges then meet the same waits, so that few rounds tell them apart. Threads: `Network.begin` between measurements,
everything else from any.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tiered_index.cli.bench.setting import START_MS, TOPIC, Setting, UnsyncedDisk, batch, key_array, keys_of, require
from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.format.hashing import key_hash
from tiered_index.format.layout import Layout
from tiered_index.format.trailer import Run
from tiered_index.service.files.compacted import CompactedFile, StorageBytes
from tiered_index.service.reader import IndexReader
from tiered_index.storage.base import Storage, WrapperStorage
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.metering import PriceTable
from tiered_index.storage.opening import open_storage
from tiered_index.storage.wrappers import LatencyStorage

MEDIAN_MS = 30.0
SIGMA = 0.3
"""The injected latency is lognormal: the median of a request, and the deviation of its logarithm."""
_FULL_FILES, _QUICK_FILES, _FEW_FILES = 1_000, 100, 10
# numbers of the keys that every file holds; the messages' own are far below
_SHARED = 1 << 41
_HOUR_MS = 3_600_000
# message numbers of an hour
_HOUR = _HOUR_MS * 10
_AT_ONCE = 50
_COPIES = 8
NO_FILTERS = 1 << 30
"""As `filter_after_probes`: never fetch one."""
_PRICES = PriceTable()
RawGet = Callable[[str, int, int], bytes]


@dataclass(frozen=True)
class Amounts:
    """How much is measured; `lookups`: files in range -> lookups of each kind in a round."""

    quick: bool
    layout: Layout
    files: int
    lookups: Mapping[int, int]

    @classmethod
    def of(cls, setting: Setting) -> Amounts:
        """Return the amounts of a setting."""
        preset, schema, items = setting.layout.preset, setting.layout.schema, setting.layout.items
        few = items < 20_000
        small = min(items, 5_000 if setting.quick else 20_000)
        lookups = (
            {1: 2, 10: 1} if few else {1: 3, 10: 2, 100: 1} if setting.quick else {1: 30, 10: 20, 100: 8, 1_000: 2}
        )
        return cls(
            quick=setting.quick,
            layout=Layout(preset, schema, max(1, small // 4), small),
            files=_FEW_FILES if few else _QUICK_FILES if setting.quick else _FULL_FILES,
            lookups=lookups,
        )

    @property
    def space_bytes(self) -> int:
        """Disk space of the stored files and of one life cycle's worth of local ones."""
        return 2 * self.layout.unsealed_size * self.files


@dataclass(frozen=True)
class StoredFiles:
    """`count` files in the folder `objects`; `cache` is the writer's cache of their directories and filters."""

    layout: Layout
    count: int
    objects: Path
    cache: Path

    @property
    def shared(self) -> int:
        """How many keys every file holds."""
        return min(64, self.layout.capacity // 4)

    def begin_ms(self, files: int) -> int:
        """Return where the range of the `files` newest ones begins."""
        return START_MS + (self.count - files) * _HOUR_MS

    def key_in_all(self, number: int) -> str:
        """Return one of the keys that every file holds."""
        return keys_of(np.array([_SHARED + number % self.shared]))[0]

    def key_in_one(self, file: int, number: int) -> str:
        """Return one of the keys that only file `file` (0: the oldest) holds."""
        own = self.layout.capacity - self.shared
        return keys_of(np.array([file * own + number % own]))[0]

    def rows(self, file: int) -> pa.RecordBatch:
        """Return a file's messages."""
        own = self.layout.capacity - self.shared
        keys = np.concatenate([_SHARED + np.arange(self.shared), file * own + np.arange(own)])
        return batch(file * _HOUR + np.arange(self.layout.capacity), key_array(keys))


def make_files(setting: Setting, layout: Layout, count: int, folder: Path) -> StoredFiles:
    """Put, compact and upload `count` files of `layout` to a storage of folders; nothing is synced."""
    made = StoredFiles(layout, count, folder / "storage", folder / "root" / "cache")
    disk = UnsyncedDisk()
    at_once = max(1, min(_AT_ONCE, 2_000_000 // layout.capacity))
    storage = LocalStorage(made.objects, disk=disk)
    with replace(setting, layout=layout).open(folder, disk=disk, storage=storage, local_keep_s=0) as index:
        for first in range(0, count, at_once):
            for file in range(first, min(first + at_once, count)):
                index.put_batch(made.rows(file))
                index.flush()
            index.run_lifecycle()
        require([file.place for file in index.files()], ["storage"] * count, "states of the files")
    return made


def check_storage(uri: str) -> None:
    """Raise `InvalidArgument` for a storage that this suite doesn't read from."""
    if not uri.startswith(("s3://", "file://")):
        raise InvalidArgument("bench cold reads from an s3:// or file:// storage")


@contextlib.contextmanager
def copied(files: StoredFiles, uri: str, parallel_reads: int) -> Iterator[Storage]:
    """Copy the objects below a fresh prefix of the storage `uri`, and delete them at the end."""
    before, mark, query = uri.partition("?")
    source = LocalStorage(files.objects)
    with (
        open_storage(
            f"{before.rstrip('/')}/tiered-index-bench-{secrets.token_hex(6)}{mark}{query}",
            parallel_reads=parallel_reads,
        ) as target,
        ThreadPoolExecutor(_COPIES) as pool,
    ):
        try:
            for _ in pool.map(lambda info: target.put(info.name, source.get(info.name)), list(source.list())):
                pass
            yield target
        finally:
            target.delete_many([info.name for info in list(target.list())])


class Network(WrapperStorage):
    """`storage`, slowed down where `injected`."""

    def __init__(self, storage: Storage, *, injected: bool) -> None:
        super().__init__(storage)
        self.storage = storage
        self.injected = injected

    def begin(self, seed: int) -> None:
        """Start the sequence of waits that `seed` decides."""
        if self.injected:
            self.inner = LatencyStorage(self.storage, seed, MEDIAN_MS, SIGMA)


def raw_get(network: Network, threads: int) -> RawGet:
    """Return a plain GET of a range by (name, start, length): a boto3 client of its own for S3, else the storage's."""
    # imported when asked for: every command imports this module, and few need boto3
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
    """Open a reader of the index in `storage`; only with the writer's `cache` it has filters."""
    config = IndexConfig.load(
        block_cache_bytes=0, filter_after_probes=NO_FILTERS, refresh_interval_s=1e9, cache_dir=cache, **settings
    )
    return IndexReader.open(config=config, storage_backend=storage)


def warm(reader: IndexReader, files: StoredFiles) -> None:
    """Make every directory known."""
    found = len(reader.query(TOPIC, files.key_in_all(0), max_count=files.count))
    require(found >= files.count, True, "answers of all files")


def stored_files(reader: IndexReader) -> list[StorageBytes]:
    """Return the files in the storage, newest first."""
    handles = [handle for handle in reader.files() if isinstance(handle, CompactedFile)]
    handles.sort(key=lambda handle: -handle.second_max)
    return [handle.stored for handle in handles if handle.stored is not None]


@dataclass(frozen=True)
class LookupCost:
    """What one lookup took; `elapsed_s` is filled in by whoever times it."""

    found: int = 0
    requests: int = 0
    bytes: int = 0
    cost_usd: float = 0.0
    elapsed_s: float = 0.0

    @classmethod
    def of_gets(cls, found: int, requests: int, read: int) -> LookupCost:
        """Return what `requests` GETs cost."""
        return cls(found, requests, read, _PRICES.cost_usd({"get_range": requests}, read))


def runs_of(files: Sequence[StorageBytes], topic: str, key: str) -> list[tuple[str, Run]]:
    """Return the ranges that hold a key's slot, of each file whose slot group isn't empty."""
    hash31 = key_hash(topic, key)
    found = []
    for file in files:
        trailer = file.trailer()
        slot = hash31 % trailer.metadata.layout.slots
        found += [(file.stored.name, run) for run in trailer.directory.runs(slot, hash31, 0, 1 << 62)]
    return found


def raw_ranges(pool: Executor, get: RawGet, runs: Sequence[tuple[str, Run]]) -> LookupCost:
    """Read ranges side by side, as plain GETs of which the slowest counts."""
    # a single one in this thread
    bodies = list(
        (pool.map if len(runs) > 1 else map)(lambda item: len(get(item[0], item[1].offset, item[1].length)), runs)
    )
    return LookupCost.of_gets(0, len(bodies), sum(bodies))
