"""Makes a small, real tree of all files that the engine and a broker have on disks and in storages.

```
native/  rocketmq/  each: root (all states, cache, lock), storage (files, window tables, an unfinished upload)
follow/             store (RocketMQ's golden one), root that follows it, storage with its archived segments
bare/               RocketMQ's own index files, without journal or trailer        sqlite/  root, db
```
`put` of an index has the entries that were put: (topic, key) -> (queue, offset, size).
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from tests.rocketmq import golden_store
from tests.rocketmq.followed import SteppedDispatcher
from tests.support.log_records import open_log
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import StorageUnavailable
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage

NOW_MS = 1_700_000_000_000
KEYS = ("k0", "k1", "k2", "hot", "absent")
Put = dict[tuple[str, str], set[tuple[int, int, int]]]
_GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "tiered"


@contextmanager
def small_parts() -> Iterator[None]:
    """Give files of a few entries the parts of large files.

    These are slot groups in blocks, and slots that continue in further shards.
    """
    with ExitStack() as stack:
        for module in ("compacted", "shard"):
            for name, value in (("GROUP_BYTES", 256), ("BLOCK_BYTES", 128)):
                stack.enter_context(mock.patch(f"tiered_index.format.{module}.{name}", value))
        stack.enter_context(mock.patch("tiered_index.service.jobs.rewriting.rewrite.PIECE_ITEMS", 16))
        yield


def storage_uri(tree: Path, name: str) -> str:
    """Return the URI of an index's storage."""
    return f"sqlite://{tree / name / 'db'}" if name == "sqlite" else f"file://{tree / name / 'storage'}"


def open_index(tree: Path, name: str, storage: Storage | None = None, **settings: Any) -> IndexService:
    where = {"root": tree / name / "root", "storage": storage_uri(tree, name), "storage_backend": storage}
    chosen = {"slots": 5, "items": 40, "query_threads": 2, "background": False, "flush_interval_s": 10**6}
    chosen |= dict.fromkeys(("max_late_s", "max_early_s", "local_keep_s"), 10**9)
    chosen |= {"preset": "rocketmq" if name == "rocketmq" else "native", "offset_space": "commitlog"}
    return IndexService.open(clock=ManualClock(NOW_MS), **where, **{**chosen, **settings})


def open_reader(tree: Path, name: str, *, root: bool = False, **settings: Any) -> IndexReader:
    """Open a reader of a storage, or of a root and its storage."""
    where = {"root": tree / name / "root"} if root else {}
    return IndexReader.open(storage_uri(tree, name), clock=ManualClock(NOW_MS), query_threads=2, **where, **settings)


def merge_all(tree: Path, name: str, window_s: int = 3600) -> None:
    storage, clock = open_storage(storage_uri(tree, name)), ManualClock(NOW_MS)
    options = MergeOptions(window_s=window_s, min_age_s=0, shard_bytes=1 << 20)
    merge(storage, open_log(storage, clock), clock, options, threads=1)


def grow(tree: Path) -> dict[str, Put]:
    """Make the tree in an empty folder. Return the entries of each of its indexes."""
    put: dict[str, Put] = {}
    rng = Random(1)
    # otherwise names are random, and so is the file that a seed changes
    with small_parts(), mock.patch("secrets.token_hex", lambda size: rng.randbytes(size).hex()):
        for name in ("native", "rocketmq", "sqlite"):
            put[name] = _grow_index(tree, name)
        put["follow"] = _grow_follower(tree)
    for path in sorted(_GOLDEN.iterdir()):
        if path.is_dir():
            for file in path.iterdir():
                if file.suffix not in (".json", ".jsonl", ".gz", ".md"):
                    (tree / "bare").mkdir(exist_ok=True)
                    shutil.copy(file, tree / "bare" / f"{path.name}-{file.name}")
    return put


def _grow_index(tree: Path, name: str) -> Put:
    put: Put = {}

    def fill(index: IndexService, first: int, count: int) -> None:
        for number in range(first, first + count):
            topic, key = ("t", "u")[number % 5 == 0], "hot" if number % 2 else f"k{number % 3}"
            place = (number % 3, number, 10 + number)
            timestamp_ms = NOW_MS - 9_000_000 + 40_000 * number
            index.put(topic, place[0], key, *place[1:], timestamp_ms, source="s", source_position=number)
            put.setdefault((topic, key), set()).add(place)

    with open_index(tree, name, local_keep_s=0) as index:
        for first in range(0, 90, 30):
            fill(index, first, 30)
            index.seal()
        index.run_lifecycle()
        index.run_lifecycle()
    merge_all(tree, name)
    with open_index(tree, name) as index:
        fill(index, 90, 30)
        index.seal()
        index.run_lifecycle()
    storage = FaultStorage(open_storage(storage_uri(tree, name)))
    index = open_index(tree, name, storage)
    fill(index, 120, 12)
    index.seal()
    storage.fail("put", times=None)
    with suppress(StorageUnavailable):
        index.run_lifecycle()
    fill(index, 132, 10)
    index.flush()
    index.seal()
    fill(index, 142, 6)
    index.put("t", 0, "k1", 500, 7, 1)  # to the quarantine lane
    put.setdefault(("t", "k1"), set()).add((0, 500, 7))
    index.flush()
    index.abandon()
    if name != "sqlite":
        (tree / name / "storage" / ".%work" / ".tmp-1-left").write_bytes(b"left")
    with open_reader(tree, name, root=True, filter_after_probes=1) as reader:
        for _ in range(3):
            for key in KEYS:
                reader.query("t", key)
    return put


def _grow_follower(tree: Path) -> Put:
    put: Put = {}
    store = StoreDirectory.open(golden_store.unpack(tree / "follow" / "store"))
    with open_index(tree, "follow", slots=97, items=5000) as index:
        dispatcher = SteppedDispatcher(index, store)
        while not dispatcher.run_once().caught_up:
            pass
        SegmentArchiver(index, "broker a", store.commitlog).run_once()
        index.seal()
        index.run_lifecycle()
    for topic, queue, key, offset, size, _ in golden_store.rows():
        put.setdefault((topic, key), set()).add((queue, offset, size))
    return put
