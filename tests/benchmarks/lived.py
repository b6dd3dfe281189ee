"""`make bench SUITE=lived`: warm lookups of one index as it is after years, beside a virgin one, in one process.

The virgin index has the same entries, but nothing in it has expired, was erased or was replaced. In each turn all ways
of asking run one after another, each for the same keys, so that the machine's other work slows all of them. A time is a
p50 of a turn; the table has the median of all turns. Every answer is compared with the entries that were put: a wrong
one ends the run.

Puts are measured in turns, too: their CPU time, with one key or two, with and without the position of a source.

A reader of many stored files is measured twice: with room for all directories, filters and slot groups, and with room
for a tenth of the files. Lookups ask for keys in the range of a twenty-fifth of the files. After every hundredth of
these, which are measured, a lookup asks all files of each reader, so that the processor's caches are the same for both.

Hidden entries are those of other keys and of older times, so each way finds the same entries. The retired ranges lie
between the offsets of the entries, and all entries are in their queue: each one that is found is searched in them.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tests.benchmarks.messages import START_MS, TOPIC, batch, key_array, keys_of
from tests.benchmarks.report import Measured, finish, note, options, require, scratch
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index import IndexReader, IndexService
from tiered_index.base.retention import Horizon
from tiered_index.format.names import linked_store
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.replaced import Replacement
from tiered_index.service.log.tombstones import Tombstone

_PER_KEY, _AT_ONCE, _OTHER = 4, 64, "Elsewhere"
# no entry of a lookup is as old
_OLD_MS = START_MS - 86_400_000
# the offsets of two entries differ by this number
_STEP = 1_000
_QUERIED, _MANY_STONES, _RANGES = 200, 1_000, 10_000
_FILTERED = 500
# entries of each of many files; parts of the files in the range of hot lookups, and for which there is room
_OF_FILE, _HOT, _ROOM, _BETWEEN = 200, 25, 10, 100
# the puts of a turn: more than a chunk of the buffer has room for
_PUTS = 5_000
# ways of asking several indexes, and their number
_SEVERAL = {"two indexes": 2, "ten indexes": 10}
Ask = Callable[[str], Any]


@dataclass(frozen=True)
class _Lived:
    """What hides entries of an index: an expiry, numbers of erased keys here and in another topic, retired ranges."""

    expires: bool = False
    elsewhere: int = 0
    here: int = 0
    ranges: int = 0

    def record(self, entries: int) -> LogRecord | None:
        """Return the log record that hides entries; None: nothing is hidden."""
        horizons = (Horizon(0, ((TOPIC, _OLD_MS + 1000),)),) if self.expires else ()
        stones = [Tombstone.of(_OTHER, START_MS, key=f"erased{number}") for number in range(self.elsewhere)]
        erased = keys_of(entries + np.arange(_FILTERED))[: self.here]
        stones += [Tombstone.of(TOPIC, START_MS + (1 << 40), key=key) for key in erased]
        store, step, new = linked_store(TOPIC, 0), entries * _STEP // max(1, self.ranges), 1 << 50
        starts = [number * step - number * step % _STEP + 1 + number % 7 for number in range(self.ranges)]
        replaced = [Replacement(store, start, start + 1, new, new) for start in starts]
        if not (horizons or stones or replaced):
            return None
        return LogRecord(0, "erase", 0, "", 0, expired=Expired(horizons, {}, tuple(stones)), replaced=tuple(replaced))


_LIVES = {
    "virgin": _Lived(),
    "an expiry of a topic": _Lived(expires=True),
    "one erasure elsewhere": _Lived(elsewhere=1),
    f"{_FILTERED} erasures here": _Lived(here=_FILTERED),
    f"{_RANGES:,} retired ranges": _Lived(ranges=_RANGES),
    "all of them, 1,000 erasures": _Lived(True, _MANY_STONES - _FILTERED, _FILTERED, _RANGES),
}


class _Index:
    """An index in `folder` for `entries` messages that lookups find."""

    def __init__(self, folder: Path, entries: int) -> None:
        self.root, self.entries = folder / "root", entries
        self.storage = f"file://{folder / 'storage'}"

    def live(self, lived: _Lived) -> None:
        """Put all entries, publish them, and hide some."""
        # for a life without erasures, too
        erased = keys_of(self.entries + np.arange(_FILTERED))
        with self.open() as index:
            index.put(_OTHER, 0, "k", 1, 1, START_MS)
            index.put(TOPIC, 0, "old", 999_999_999, 1, _OLD_MS)
            for number, key in enumerate(erased):
                index.put(TOPIC, 0, key, (self.entries + number) * _STEP, 1, START_MS)
            self.put(index)
            index.seal()
            index.run_lifecycle()
            self.hide(index, lived)
            require(len(index.query(TOPIC, "old")), int(not lived.expires), "entries that may expire")
            for key in erased[:3]:
                require(len(index.query(TOPIC, key)), int(not lived.here), "entries that may be erased")

    def hide(self, index: IndexService, lived: _Lived) -> None:
        """Append the record of a life to the log."""
        if (record := lived.record(self.entries)) is not None:
            index._session.log.append("a life", None, lambda _: record)

    def open(self, **settings: Any) -> IndexService:
        geometry = {"slots": max(50, self.entries // 4), "items": 2 * self.entries + 10_000}
        about = {"background": False, "storage": self.storage, "buffer_max_entries": self.entries + 100_000}
        return IndexService.open(root=self.root, disk=UnsyncedDisk(), **geometry, **about, **settings)

    def put(self, index: IndexService) -> None:
        """Put the messages that lookups find."""
        numbers = np.arange(self.entries)
        of_keys = key_array(numbers // _PER_KEY)
        index.put_batch(batch(numbers, of_keys, queue_id=np.zeros(self.entries, np.int64)))

    def reader(self, **settings: Any) -> IndexReader:
        """Open a reader of the storage alone, which never reads the log again."""
        return IndexReader.open(self.storage, refresh_interval_s=1e9, **settings)


@contextmanager
def _ways(folder: Path, entries: int) -> Iterator[dict[str, dict[str, Ask]]]:
    """Yield the ways of asking, by table and name. The first of a table is that of a virgin index."""
    tables: dict[str, dict[str, Ask]] = {"reader": {}, "cold, directories known": {}, "writer, settled": {}}
    begin, end = START_MS - 1_000, START_MS + entries
    with ExitStack() as stack:
        indexes = []
        for number, (name, lived) in enumerate(_LIVES.items()):
            note(f"making an index: {name}")
            made = _Index(folder / str(number), entries)
            made.live(lived)
            indexes.append(made)
            reader = stack.enter_context(made.reader())
            cold = stack.enter_context(made.reader(cache_slot_groups=False))
            tables["reader"][name] = lambda key, reader=reader: reader.query(TOPIC, key)
            tables["cold, directories known"][name] = lambda key, reader=cold: reader.query(TOPIC, key)
            writer = stack.enter_context(made.open())
            tables["writer, settled"][name] = lambda key, writer=writer: writer.query(TOPIC, key)
        virgin, first = indexes[0], stack.enter_context(indexes[0].reader())
        storages = [virgin.storage]
        for number in range(1, max(_SEVERAL.values())):
            beside = _Index(folder / f"beside {number}", entries)
            beside.live(_Lived())
            storages.append(beside.storage)
        tables["ways of asking a virgin reader"] = {
            "plain": lambda key: first.query(TOPIC, key),
            "with a range": lambda key: first.query(TOPIC, key, begin, end),
            "with timeout_s": lambda key: first.query(TOPIC, key, timeout_s=10),
            "page 2 by a cursor": _pages(first),
            "to_dict() of 4": lambda key: [first.query(TOPIC, key).to_dict()],
            "by a root, with the storage": _reading(stack, IndexReader.open(virgin.storage, root=virgin.root)),
        } | {
            name: _reading(stack, IndexReader.open(storages[:count], refresh_interval_s=1e9))
            for name, count in _SEVERAL.items()
        }
        states: dict[str, Ask] = {}
        for name in (next(iter(_LIVES)), list(_LIVES)[-1]):
            made = _Index(folder / f"written {len(states)}", entries)
            writer = stack.enter_context(made.open())
            made.hide(writer, _LIVES[name])
            made.put(writer)
            writer.flush()
            states[name] = lambda key, writer=writer: writer.query(TOPIC, key)
        tables["writer, in an unsealed file"] = states
        yield tables


@contextmanager
def _many_files(folder: Path, files: int) -> Iterator[dict[str, IndexReader]]:
    """Yield readers of an index of many files: with room for all, and for a tenth of them."""
    note(f"making an index of {files:,} files")
    storage = (folder / "storage").as_uri()
    geometry = {"slots": _OF_FILE // _PER_KEY, "items": _OF_FILE + 1, "merge": "off", "local_keep_s": 0}
    with IndexService.open(
        root=folder / "root", disk=UnsyncedDisk(), storage=storage, background=False, **geometry
    ) as index:
        for file in range(files):
            numbers = np.arange(file * _OF_FILE, (file + 1) * _OF_FILE)
            index.put_batch(batch(numbers, key_array(numbers // _PER_KEY), timestamp_ms=_times(numbers)))
            index.flush()
        index.seal()
        for _ in range(2):
            index.run_lifecycle()
        sizes = [stored.size_bytes for stored in index.log_state.objects.values()]
        require(len(sizes), files, "files in the storage")
    with (
        IndexReader.open(storage, refresh_interval_s=1e9) as virgin,
        IndexReader.open(storage, refresh_interval_s=1e9, read_cache_bytes=sum(sizes) // _ROOM) as bounded,
    ):
        yield {"room for all": virgin, f"room for {files // _ROOM:,}": bounded}


def _times(numbers: Any) -> Any:
    """Return times of entries so that no second is in two files."""
    return START_MS + numbers // _OF_FILE * 10_000 + numbers % _OF_FILE


def _hot(folder: Path, files: int, turns: int) -> dict[str, Measured]:
    """Return the p50 and the CPU time of hot lookups in each turn, in microseconds, by reader."""
    hot = files // _HOT
    numbers = np.random.default_rng(7).permutation(hot * _OF_FILE // _PER_KEY)[:_QUERIED]
    others = iter(np.random.default_rng(8).integers(0, files * _OF_FILE // _PER_KEY, 100 * turns).tolist())
    keys, end_ms = keys_of(numbers), START_MS + (hot - 1) * 10_000 + 9_999
    clock, cpu_clock = time.perf_counter, time.thread_time
    with _many_files(folder / "many files", files) as readers:
        figures: dict[str, Measured] = {name: {"p50": [], "cpu": []} for name in readers}
        # the first turn fills the caches
        for turn in range(turns + 1):
            elapsed: dict[str, list[float]] = {name: [] for name in readers}
            spent = dict.fromkeys(readers, 0.0)
            for first in range(0, len(keys), _BETWEEN):
                for name, reader in readers.items():
                    other = next(others)
                    _check(name, reader.query(TOPIC, *keys_of(np.array([other]))), other)
                for name, reader in list(readers.items())[:: 1 if turn % 2 else -1]:
                    for key, number in zip(keys[first : first + _BETWEEN], numbers[first:].tolist(), strict=False):
                        began, begun = cpu_clock(), clock()
                        answer = reader.query(TOPIC, key, START_MS, end_ms)
                        elapsed[name].append(clock() - begun)
                        spent[name] += cpu_clock() - began
                        _check(name, answer, number)
            if turn:
                for name, measured in figures.items():
                    measured["p50"].append(median(elapsed[name]) * 1e6)
                    measured["cpu"].append(spent[name] / len(keys) * 1e6)
        evictions = {name: reader.cache_use()["directories"].evictions for name, reader in readers.items()}
        require([count > files for count in evictions.values()], [False, True], "readers that dropped files")
    return figures


def _puts(folder: Path, turns: int) -> dict[str, list[float]]:
    """Return the CPU time of a put in each turn, in microseconds, by the kind of message."""
    key, two = "order 1234567", ["order 1234567", "customer 89"]
    kinds: dict[str, Callable[[IndexService, int], int]] = {
        "one key": lambda index, at: index.put(TOPIC, 0, key, at, 512, START_MS + at),
        "two keys": lambda index, at: index.put(TOPIC, 0, two, at, 512, START_MS + at),
        "one key, source and position": lambda index, at: index.put(TOPIC, 0, key, at, 512, START_MS + at, "s", at),
        "two keys, source and position": lambda index, at: index.put(TOPIC, 0, two, at, 512, START_MS + at, "s", at),
    }
    spent: dict[str, list[float]] = {name: [] for name in kinds}
    entries = 0
    with _Index(folder / "puts", turns * len(kinds) * _PUTS).open() as index:
        for turn in range(turns):
            for number, (name, put) in enumerate(kinds.items()):
                first = (turn * len(kinds) + number) * _PUTS
                began = time.thread_time()
                for at in range(first, first + _PUTS):
                    put(index, at)
                spent[name].append((time.thread_time() - began) / _PUTS * 1e6)
                entries += _PUTS * (2 if "two" in name else 1)
            index.flush()
        require(sum(getattr(file, "count", 0) for file in index.files()), entries, "entries of puts")
        require(index.durable_position("s"), turns * len(kinds) * _PUTS - 1, "the position of the puts' source")
    return spent


def _reading(stack: ExitStack, reader: IndexReader) -> Ask:
    stack.enter_context(reader)
    return lambda key: reader.query(TOPIC, key)


def _pages(reader: IndexReader) -> Ask:
    """Return a function that answers a key's second page of two entries. The first one is asked once a key."""
    cursors: dict[str, str | None] = {}

    def ask(key: str) -> Any:
        if key not in cursors:
            cursors[key] = reader.query(TOPIC, key, max_count=2).cursor
        return reader.query(TOPIC, key, max_count=2, cursor=cursors[key])

    return ask


def _check(name: str, answer: Any, number: int) -> None:
    """End the run unless the answer has the entries of a key."""
    if isinstance(answer, list):
        offsets = [item["offset"] for item in answer[0]["items"]]
    else:
        offsets = [item.offset for item in answer]
    expected = [(number * _PER_KEY + at) * _STEP for at in reversed(range(_PER_KEY))]
    # each of several indexes has every entry, and a second page the last two
    expected = expected if "page" not in name else expected[2:]
    expected = sorted(_SEVERAL.get(name, 1) * expected, reverse=True)
    require(offsets, expected, f"offsets of key {number}, {name}")


def _turn(ask: Ask, keys: list[str]) -> tuple[float, float]:
    """Return the p50 and the CPU time of a lookup, in microseconds."""
    for key in keys[:_AT_ONCE]:
        ask(key)
    elapsed = []
    clock, began = time.perf_counter, time.thread_time()
    for key in keys:
        begun = clock()
        ask(key)
        elapsed.append(clock() - begun)
    return median(elapsed) * 1e6, (time.thread_time() - began) / len(keys) * 1e6


def _rows(figures: dict[str, Measured]) -> list[list[Any]]:
    first = median(next(iter(figures.values()))["p50"])
    rows: list[list[Any]] = [["", "p50 us", "CPU us", "times the first"]]
    for name, measured in figures.items():
        p50 = median(measured["p50"])
        rows.append([name, p50, median(measured["cpu"]), p50 / first])
    return rows


def main(suite: str, arguments: list[str]) -> None:
    """Measure, and print the tables."""
    parser = options(suite, __doc__, rounds=9)
    parser.add_argument("--entries", type=int, default=20_000, help="entries that lookups find, four a key")
    parser.add_argument("--files", type=int, default=1_000, help="files of the reader whose cache has room for a tenth")
    flags = parser.parse_args(arguments)
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
    document: dict[str, list[Any]] = {}
    try:
        numbers = np.random.default_rng(7).permutation(flags.entries // _PER_KEY)[:_QUERIED]
        keys = keys_of(numbers)
        with scratch(flags.root_dir) as folder, _ways(folder, flags.entries) as tables:
            for title, ways in tables.items():
                note(title)
                figures: dict[str, Measured] = {name: {"p50": [], "cpu": []} for name in ways}
                for name, ask in ways.items():
                    for key, number in zip(keys, numbers.tolist(), strict=True):
                        _check(name, ask(key), number)
                for turn in range(flags.rounds):
                    for name in list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]:
                        p50, cpu = _turn(ways[name], keys)
                        figures[name]["p50"].append(p50)
                        figures[name]["cpu"].append(cpu)
                document[f"{title}, {flags.entries:,} entries, {flags.rounds} turns"] = _rows(figures)
            note("many files")
            title = f"reader of {flags.files:,} files, hot range of {flags.files // _HOT}, {flags.rounds} turns"
            document[title] = _rows(_hot(folder, flags.files, flags.rounds))
            note("puts")
            puts = {name: median(times) for name, times in _puts(folder, flags.rounds).items()}
            document[f"writer, put, {flags.rounds} turns"] = [["", "CPU us"], *map(list, puts.items())]
    finally:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
    finish(flags, {"tables": document})
