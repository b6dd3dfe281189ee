"""`make bench SUITE=machine`: puts, compaction, lookups, openings and commit logs on this machine's real disk.

Files have RocketMQ's default geometry, in both presets. `SUITE=quick` has smaller files, and one preset. Writes are
durable, and the page cache is warm. Wrong answers end the run.

The states of puts are: nothing beside them; compactions, uploads and lookups; the writer's own merge. The writer has a
core to itself. Four single puts and a batch of 1,000 are due every millisecond.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.memory import MemoryWatch
from tests.benchmarks.messages import FLUSH_ENTRIES, START_MS, TOPIC, absent_keys, batch, drawn, keys_of
from tests.benchmarks.report import Measured, Spent, finish, note, options, percentiles, require, scratch
from tests.support.processes import own_environment
from tests.support.storage_faults import FaultStorage
from tests.support.store_writer import StoreWriter
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index.base.process import give_back
from tiered_index.config import IndexConfig
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import BackPressure, StorageUnavailable
from tiered_index.format.layout import PRESETS, Layout
from tiered_index.format.names import DATA_PREFIX
from tiered_index.service.index import IndexService
from tiered_index.storage.local import LocalStorage
from tiered_index.types import Lookup

_FULL, _QUICK = (5_000_000, 20_000_000), (500_000, 2_000_000)
_BATCH = 250_000
_SMALL, _AT_ONCE = 100, 50
_PERIOD_S, _SINGLES = 0.001, 4
_LONGEST_S = 300.0
_DAY_MS = 86_400_000
STATES = ("nothing", "compaction, upload, lookups", "the writer's merge")
Record = Callable[[str, float], None]


@dataclass(frozen=True)
class Setting:
    """The geometry of files; all amounts follow from it."""

    preset: str
    slots: int
    items: int

    @property
    def entries(self) -> int:
        """The entries of a full file."""
        return Layout(PRESETS[self.preset], PRESETS[self.preset].schema, self.slots, self.items).capacity

    def open(self, folder: Path, *, disk: Any = None, storage: Any = None, **changes: Any) -> IndexService[Any]:
        """Open the index in `folder`. Its storage is a folder too."""
        where = {"root": folder / "root", "storage": f"file://{folder / 'storage'}", "background": False}
        geometry = {"preset": self.preset, "slots": self.slots, "items": self.items}
        return IndexService.open(IndexConfig.load(**where | geometry | changes), disk=disk, storage_backend=storage)

    def open_compacting(self, folder: Path, **changes: Any) -> IndexService[Any]:
        """Open the index with a storage that refuses index files, so that files stay compacted."""
        storage = FaultStorage(LocalStorage(folder / "storage"))
        storage.fail("put", times=None, name_prefix=DATA_PREFIX)
        return self.open(folder, storage=storage, **changes)


def fill(
    index: IndexService[Any], first: int, entries: int, put: Spent | None = None, flush: Spent | None = None
) -> None:
    """Put messages and make them durable, `FLUSH_ENTRIES` at a time."""
    put, flush, waiting = put or Spent(), flush or Spent(), 0
    for start in range(first, first + entries, _BATCH):
        rows = batch(np.arange(start, min(start + _BATCH, first + entries)))
        with put:
            waiting += index.put_batch(rows)
        if waiting >= FLUSH_ENTRIES or start + _BATCH >= first + entries:
            with flush:
                index.flush()
            waiting = 0


def settle() -> None:
    """Sync earlier writes and give freed memory back, so that the next measurement pays for neither."""
    os.sync()
    give_back()


@contextmanager
def on_core(which: int) -> Iterator[None]:
    """Keep all threads of the process, and those that they start, on its last core (-1) or first one (0)."""
    usable = os.sched_getaffinity(0)
    _pin({sorted(usable)[which]})
    try:
        yield
    finally:
        _pin(usable)


def _pin(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def measure_puts(setting: Setting, place: Path, record: Record) -> None:
    """A full file, filled in batches with durable flushes, and single puts, all on one core."""
    put, flush, single = Spent(), Spent(), Spent()
    singles = min(1_000_000, setting.items)
    with setting.open(place) as index, on_core(-1):
        index.put(TOPIC, 0, "first", 0, 1, START_MS)
        index.flush()  # the file's space is allocated before it is needed, as in a running index
        settle()
        fill(index, 1, setting.entries - 1, put, flush)
        require([getattr(file, "count", None) for file in index.files()], [setting.entries], "entries of the file")
        calls = list(zip(keys_of(np.arange(singles)), range(singles), strict=True))
        with single:
            for key, offset in calls:
                index.put(TOPIC, 1, key, offset, 512, START_MS + offset)
        index.flush()
        require(sum(getattr(f, "count", 0) for f in index.files()), setting.entries + singles, "entries in the index")
    record("put_batch: entries/s", setting.entries / put.elapsed_s)
    record("put_batch, durable each million rows: entries/s", setting.entries / (put.elapsed_s + flush.elapsed_s))
    record("put_batch and flush: CPU ns an entry", (put.cpu_s + flush.cpu_s) / setting.entries * 1e9)
    record("put: CPU us", single.cpu_s / singles * 1e6)


def measure_file(setting: Setting, place: Path, record: Record) -> None:
    """A full file: opened after a crash, looked up in, compacted beside a reader, and looked up in again."""
    entries = setting.entries - 1  # one more entry would seal the file
    index = setting.open_compacting(place)
    fill(index, 0, entries)
    index.abandon()
    settle()
    opening, compaction = Spent(), Spent()
    with opening:
        index = setting.open_compacting(place)
    with index:
        states = [(file.place, getattr(file, "count", None)) for file in index.files()]
        require(states, [("unsealed", entries)], "files after the crash")
        _look_up(setting, index, "unsealed", entries, record)
        index.seal()
        first = setting.entries + 20_000  # so that the two files have no second in common
        fill(index, first, max(1, entries // 100))
        settle()
        # the sealed file is older: lookups that begin here read only the other one
        look_up = partial(index.query, TOPIC, begin_ms=index.files()[-1].second_min * 1000)
        keys, done = keys_of(first + drawn(1_000, max(1, entries // 100), 1)), threading.Event()
        with ThreadPoolExecutor(1) as threads, MemoryWatch() as memory:
            looking_up = threads.submit(_look_up_steadily, look_up, keys, done)
            try:
                with compaction, suppress(StorageUnavailable):
                    index.run_lifecycle()
            finally:
                done.set()
        require([file.place for file in index.files()], ["compacted", "unsealed"], "states of the files")
        (path,) = (place / "root" / "compacted").glob("*.index")
        times, readers_s = looking_up.result()
        record("compaction: CPU s", compaction.cpu_s - readers_s)
        record("compaction: s", compaction.elapsed_s)
        record("compaction: anonymous memory, MiB", memory.peak_mib)
        record("compaction: slowest lookup of a reader, ms", max(times) * 1e3)
        record("compacted file: bytes an entry", path.stat().st_size / entries)
        _look_up(setting, index, "compacted", entries, record)
    record("opening a full unsealed file: s", opening.elapsed_s)


def _look_up(setting: Setting, index: IndexService[Any], state: str, entries: int, record: Record) -> None:
    numbers = drawn(min(20_000, entries), entries, 1)
    for kind, keys, expected in (("lookup", keys_of(numbers), len(numbers)), ("absent key", absent_keys(numbers), 0)):
        times, answers = array("d"), 0
        for key in keys:
            began_s = time.perf_counter()
            answer = index.query(TOPIC, key)
            times.append(time.perf_counter() - began_s)
            answers += len(answer)
        require_answers(setting.preset, answers, expected, f"answers of {kind}, {state}")
        for name, value in zip(("p50", "p99"), percentiles(times, 50, 99), strict=True):
            record(f"{kind}, {state}: {name} us", value)
    keys, many = keys_of(drawn(min(100_000, entries), entries, 2)), Spent()
    with many:
        results = index.query_many([Lookup(topic=TOPIC, key=key) for key in keys])
    require_answers(setting.preset, int(results.counts.sum()), len(keys), f"answers of query_many, {state}")
    record(f"query_many, {state}: keys/s", len(keys) / many.elapsed_s)


def require_answers(preset: str, found: int, expected: int, what: str) -> None:
    """Raise an error if answers are missing. In files with fingerprints, also raise one for additional answers."""
    # without fingerprints an answer also has entries of other keys with the same 31-bit hash
    require(found if preset == "native" else min(found, expected), expected, what)


def _look_up_steadily(
    look_up: Callable[[str], Any], keys: list[str], done: threading.Event
) -> tuple[array[float], float]:
    """Look keys up each 0.2 ms; return the seconds of each lookup, and the CPU seconds of all.

    A lookup's time begins when it is due, so that delays count.
    """
    times, due_s = array("d"), time.perf_counter()
    for key in cycle(keys):
        time.sleep(max(0.0, due_s - time.perf_counter()))
        require(len(look_up(key)) > 0, True, "whether there are answers")
        times.append(time.perf_counter() - due_s)
        if done.is_set():
            return times, time.thread_time()
        due_s = max(due_s + 0.0002, time.perf_counter())
    raise AssertionError


def measure_many_files(setting: Setting, place: Path, record: Record) -> None:
    """A root of small files that are all uploaded and kept locally, made without syncs."""
    files = min(1_000, max(10, setting.items // 200))
    small, disk = Setting(setting.preset, _SMALL, _SMALL + 1), UnsyncedDisk()
    with small.open(place, disk=disk, storage=LocalStorage(place / "storage", disk=disk)) as index:
        for first in range(0, files, _AT_ONCE):
            fill(index, first * _SMALL, min(_AT_ONCE, files - first) * _SMALL)
            index.run_lifecycle()
    settle()
    opening = Spent()
    with opening:
        index = small.open(place)
    with index:
        require(len([file for file in index.files() if file.place == "uploaded"]), files, "files after opening")
    record(f"opening a root with {files:,} files: s", opening.elapsed_s)


def measure_commit_log(setting: Setting, place: Path, record: Record) -> None:
    """A store of messages with a body of 256 bytes, a unique key and two keys, read on one core."""
    messages, body = min(500_000, setting.items), os.urandom(256)
    with StoreWriter(place, segment_bytes=1 << 28) as writer:
        for number in range(messages):
            writer.put(
                f"TopicOrder{number % 10:02d}",
                number % 8,
                body,
                keys=f"order-{number} user-{number % 1000}",
                tags="TagA",
                uniq_key=f"0A010203000004D218B4AAC2{number:08X}",
                properties={"CLUSTER": "DefaultCluster", "WAIT": "true"},
                store_ms=START_MS + number // 100,
            )
    settle()
    store = StoreDirectory.open(place)
    with on_core(-1):
        for _ in range(2):  # the first reading allocates memory that the second one reuses
            reading, counts = Spent(), (0, 0)
            with reading:
                for rows in CommitLogReader(store.commitlog).batches():
                    counts = counts[0] + rows.messages, counts[1] + len(rows.columns)
            require(counts, (messages, 3 * messages), "messages and entries")
    record("commit log: messages/CPU s", messages / reading.cpu_s)


# Puts beside other work


def measure_beside(setting: Setting, place: Path, record: Record) -> None:
    """Puts in each state, in the same run."""
    for state in STATES:
        with scratch(place) as folder:
            times = (_beside_merge if "merge" in state else _beside_work)(setting, folder, state)
        for call, samples in times.items():
            for name, value in zip(
                ("p50", "p99", "p99.9", "longest"), percentiles(samples, 50, 99, 99.9, 100), strict=True
            ):
                record(f"{call} beside {state}: {name} us", value)


def _beside_work(setting: Setting, folder: Path, state: str) -> dict[str, array[float]]:
    """Put into a buffer that nobody flushes, or while every worker runs, until two waiting files are uploaded."""
    busy = state != "nothing"
    waiting = 2 * setting.entries if busy else 0
    with setting.open(folder) as index:
        fill(index, 0, waiting)
    settle()
    idle_s = min(3.0, setting.items / 100_000)
    more = {"background": True} if busy else {"buffer_max_entries": 1 << 40, "buffer_max_bytes": 1 << 50}
    index = setting.open(folder, **more)
    keys, done, began_s = keys_of(drawn(10_000, setting.entries, 1)), threading.Event(), time.monotonic()
    core = max(os.sched_getaffinity(0))

    def over() -> bool:
        return len(index.log_state.objects) >= 2 if busy else time.monotonic() >= began_s + idle_s

    with ThreadPoolExecutor(2) as threads, on_core(0):
        looking_up = threads.submit(_look_up_until, index, keys, done) if busy else None
        try:
            times = threads.submit(_put_steadily, index, over, waiting, core=core).result()
        finally:
            done.set()
        if looking_up is not None:
            require(looking_up.result() > 0, True, "whether there were lookups")
    if busy:
        index.close()
    else:
        index.abandon()
    return times


def _look_up_until(index: IndexService[Any], keys: list[str], done: threading.Event) -> int:
    for number, key in enumerate(cycle(keys), 1):
        index.query(TOPIC, key)
        if done.wait(_PERIOD_S):
            return number
    raise AssertionError


def _beside_merge(setting: Setting, folder: Path, state: str) -> dict[str, array[float]]:
    """Put while eight files of one past day are merged."""
    entries = min(8_000_000, setting.items)
    # a file that the puts fill has many entries, however few are merged: a busy machine merges for long
    items = max(100_000, entries // 8 + 1)
    files = Setting("native", items // 4, items)
    day_ms = START_MS // _DAY_MS * _DAY_MS
    with files.open(folder, merge="off", local_keep_s=0) as index:
        for part in np.array_split(np.arange(entries), 8):
            for some in np.array_split(part, max(1, len(part) // 100_000)):
                index.put_batch(batch(some, timestamp_ms=day_ms + some * (_DAY_MS - 1) // entries))
            index.seal()
            index.run_lifecycle()
        before = sum(stored.count for stored in index.log_state.objects.values())
    with files.open(folder, background=True) as index:
        with ThreadPoolExecutor(1) as threads:
            working = threads.submit(index.run_merge)
            times = _put_steadily(index, working.done, entries, rows=100)
            working.result()
    with files.open(folder) as index:
        merged = sum(shard.count for shards in index.log_state.tables.values() for shard in shards)
        require(merged, before, "merged entries")
    return times


def _put_steadily(
    index: IndexService[Any], over: Callable[[], bool], first: int, rows: int = 1_000, core: int | None = None
) -> dict[str, array[float]]:
    """Put four messages and a batch each millisecond until `over`; return the seconds of the calls, waits included."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    times = {"put": array("d"), f"put_batch of {rows:,}": array("d")}
    single, many = times.values()
    keys, ends_s, due_s = cycle(keys_of(np.arange(10_000))), time.monotonic() + _LONGEST_S, time.perf_counter()
    for turn in count():
        if turn and (over() or time.monotonic() > ends_s):
            return times
        time.sleep(max(0.0, due_s - time.perf_counter()))  # a late writer lets other threads run all the same
        now_ms = time.time_ns() // 1_000_000
        numbers = np.arange(first + turn * rows, first + (turn + 1) * rows)
        columns = batch(numbers, timestamp_ms=np.full(rows, now_ms))
        for _ in range(_SINGLES):
            _timed(single, partial(index.put, TOPIC, 1, next(keys), turn, 512, now_ms))
        _timed(many, partial(index.put_batch, columns))
        due_s = max(due_s + _PERIOD_S, time.perf_counter())
    raise AssertionError


def _timed(times: array[float], put: Callable[[], object]) -> None:
    began_s = time.perf_counter()
    while True:
        with suppress(BackPressure):
            put()
            break
        time.sleep(_PERIOD_S)
    times.append(time.perf_counter() - began_s)


def main(suite: str, arguments: list[str]) -> None:
    """Measure, and print a table of medians for each preset."""
    parser = options(suite, __doc__, rounds=3)
    slots, items = _FULL if suite == "machine" else _QUICK
    parser.add_argument("--preset", action="append", choices=list(PRESETS), help="only this one")
    parser.add_argument("--slots", type=int, default=slots, help=f"hash slots per file (default: {slots:,})")
    parser.add_argument("--items", type=int, default=items, help=f"items per file (default: {items:,})")
    flags = parser.parse_args(arguments)
    presets = flags.preset or (["native", "rocketmq"] if suite == "machine" else ["native"])
    document: dict[str, Any] = {"figures": {}, "tables": {}}
    for preset in presets:
        setting, measured = Setting(preset, flags.slots, flags.items), Measured()
        parts = (
            measure_puts,
            measure_file,
            measure_many_files,
            measure_commit_log,
            *([measure_beside] if preset == "native" else []),
        )
        for number in range(flags.rounds):
            note(f"{preset}, round {number + 1} of {flags.rounds}")
            for part in parts:
                with own_environment(), scratch(flags.root_dir) as place:
                    part(setting, place, lambda name, value: measured.setdefault(name, []).append(float(value)))  # noqa: B023
        document["figures"][preset] = measured
        title = f"{preset}, {flags.slots:,} slots and {flags.items:,} items a file, {flags.rounds} rounds"
        rows = [(name, float(np.median(values)), min(values), max(values)) for name, values in measured.items()]
        document["tables"][title] = [("figure", "median", "least", "greatest"), *rows]
    finish(flags, document)
