"""Suite `cold`: what lookups of stored files cost, in requests, bytes and time, behind an injected latency or on
`--storage`.

Many small stored files, of which the 1, 10, 100, 1,000 newest are in range; every lookup takes a fresh key. Beside each
lookup the very ranges that it needs are read by plain GETs, as many at once; a lookup's time is judged by theirs. Every
measurement of one round of one n meets the same sequence of waits, where they are injected. The suite's thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tiered_index.cli.bench.cold_files import (
    MEDIAN_MS,
    SIGMA,
    Amounts,
    LookupCost,
    Network,
    StoredFiles,
    copied,
    make_files,
    open_reader,
    raw_get,
    raw_ranges,
    runs_of,
    stored_files,
    warm,
)
from tiered_index.cli.bench.figures import Meter, Spec, Suite, Table, at_least, at_most
from tiered_index.cli.bench.setting import ABSENT, TOPIC, Setting, keys_of, require, scratch
from tiered_index.cli.output import counted
from tiered_index.config import IndexConfig
from tiered_index.service.files.compacted import StorageBytes
from tiered_index.service.reader import IndexReader
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.metering import MeteredStorage

KINDS = ("one", "all", "none")
"""Which of the files in the range hold the key."""
_NEWEST = "all, newest 64"
# all hold it, and 64 answers are asked for
_OURS, _WITH_FILTERS, _RAW = "ours", "ours, filters at hand", "plain GETs"
_FRESH, _OPENING = "fresh reader", "(opening only)"
_MAX_COUNT = 64
_MOST_TIMES = 1.2
_LEAST_SPARED = 98.0
_MOST_TO_OPEN = 3

Way = tuple[int, str, str]
"""Files in range, which of them hold the key, who reads."""


Cells = dict[Way, list[LookupCost]]
"""What each lookup cost, by the way of reading."""


def _section(files: int, kind: str) -> str:
    """Return the meter's section of our lookups."""
    return f"lookups in {files:,}, {kind}"


class Round:
    """Round `number`: cells of its own, and what they are measured with."""

    def __init__(self, network: Network, files: StoredFiles, amounts: Amounts, number: int, meter: Meter) -> None:
        self.cells: Cells = {}
        self.network, self.files, self.amounts, self.number = network, files, amounts, number
        self._meter = meter
        self._random = np.random.default_rng(1_000 + number)
        self._keyed = files.layout.schema.keyed

    def key(self, files: int, kind: str) -> tuple[str, int, int]:
        """Return a fresh key, how many answers it has in the `files` newest ones, and how many to ask for."""
        number = int(self._random.integers(1 << 31))
        if kind == "none":
            return keys_of(np.array([ABSENT + number]))[0], 0, _MAX_COUNT
        if kind == "one":
            file = self.files.count - 1 - int(self._random.integers(files))
            return self.files.key_in_one(file, number), 1, _MAX_COUNT
        max_count = _MAX_COUNT if kind == _NEWEST else max(_MAX_COUNT, files)
        return self.files.key_in_all(number), min(files, max_count), max_count

    def timed(self, way: Way, seed: int, read: Callable[[], LookupCost], answers: int | None) -> None:
        """Measure one lookup; wrong answers end the run."""
        self.network.begin(seed)
        started_s = time.perf_counter()
        cost = read()
        elapsed_s = time.perf_counter() - started_s
        if answers is not None:
            # without fingerprints a key is answered with what others of its 31-bit hash have
            require(cost.found if self._keyed else min(cost.found, answers), answers, f"answers of {way}")
        self.cells.setdefault(way, []).append(replace(cost, elapsed_s=elapsed_s))

    def look_up(self, reader: IndexReader, files: int, kind: str, key: str, max_count: int) -> LookupCost:
        """Look a key up by our reader, in the section that a profile of it looks at."""
        with self._meter.section(_section(files, kind)):
            result = reader.query(TOPIC, key, begin_ms=self.files.begin_ms(files), max_count=max_count)
        return LookupCost(len(result), result.explain.requests, result.explain.bytes, result.explain.cost_usd)

    def open(self, files: int) -> None:
        """Open a reader that knows nothing, and look a key up once."""
        key, answers, max_count = self.key(files, "all")
        metered = MeteredStorage(self.network)
        readers: list[IndexReader] = []

        def begin() -> LookupCost:
            readers.append(open_reader(metered))
            return LookupCost(0, metered.total.requests, metered.total.bytes_read, metered.total.cost_usd)

        self.timed((files, _OPENING, _FRESH), self.number, begin, None)
        with readers[0] as reader:
            self.timed(
                (files, "all", _FRESH),
                self.number,
                lambda: self.look_up(reader, files, "fresh", key, max_count),
                answers,
            )


OtherWays = Callable[[Round, Sequence[StorageBytes], int, Executor], None]


def _measure_lookups(
    network: Network, files: StoredFiles, amounts: Amounts, meter: Meter, other_ways: OtherWays | None
) -> Iterator[Cells]:
    """Yield the cells of each round; after our lookups of each turn `other_ways` are measured."""
    network.begin(0)
    with open_reader(network) as plain, open_reader(network, files.cache) as filtered:
        threads = plain.config.query_threads
        warm(plain, files)
        warm(filtered, files)
        get, newest = raw_get(network, threads), stored_files(plain)
        with ThreadPoolExecutor(threads) as pool:
            # connections and threads as warm as ours
            raw_ranges(pool, get, runs_of(newest, TOPIC, files.key_in_all(0)))
            for number in meter.rounds():
                measured = Round(network, files, amounts, number, meter)
                for count, lookups in amounts.lookups.items():
                    near = newest[:count]
                    for turn in range(lookups):
                        for kind in (*KINDS, *([_NEWEST] if count > _MAX_COUNT else [])):
                            key, answers, max_count = measured.key(count, kind)
                            seed = number * 1_000 + turn
                            runs = runs_of(near, TOPIC, key)
                            look_up = partial(measured.look_up, files=count, kind=kind, key=key, max_count=max_count)
                            measured.timed((count, kind, _RAW), seed, partial(raw_ranges, pool, get, runs), None)
                            measured.timed((count, kind, _OURS), seed, partial(look_up, plain), answers)
                            measured.timed((count, kind, _WITH_FILTERS), seed, partial(look_up, filtered), answers)
                        if other_ways is not None:
                            other_ways(measured, near, turn, pool)
                    measured.open(count)
                yield measured.cells


def _times(files: int, kind: str) -> str:
    return f"key in {kind} of {counted(files, 'file')}: times the slowest plain GET, p50"


def _to_open(amounts: Amounts) -> str:
    return f"requests to open a reader on {amounts.files:,} files"


def _spared(amounts: Amounts) -> str:
    return f"absent keys, filters at hand: files of {max(amounts.lookups):,} that cost no GET"


def _specs(setting: Setting) -> Sequence[Spec]:
    amounts = Amounts.of(setting)
    pairs = [(files, kind) for files in amounts.lookups for kind in KINDS]
    specs = [Spec(_times(*pair), "ratio", at_most(_MOST_TIMES), (_section(*pair),)) for pair in pairs]
    most = max(amounts.lookups)
    specs.append(Spec(_spared(amounts), "%", at_least(_LEAST_SPARED), (_section(most, "none"),)))
    specs.append(Spec(_to_open(amounts), "count", at_most(_MOST_TO_OPEN), (_section(most, "fresh"),)))
    return specs


def measure_cold(
    setting: Setting, folder: Path, meter: Meter, others: Sequence[str] = (), other_ways: OtherWays | None = None
) -> None:
    """Measure lookups, and in the same rounds `other_ways` to look keys up, which tables call `others`."""
    amounts = Amounts.of(setting)
    with scratch(folder) as place:
        files = make_files(setting, amounts.layout, amounts.files, place)
        cells: Cells = {}
        with _network(setting, files) as network:
            for measured in _measure_lookups(network, files, amounts, meter, other_ways):
                _record(measured, amounts, meter)
                for way, costs in measured.items():
                    cells.setdefault(way, []).extend(costs)
        where = setting.storage or f"a folder behind a latency of lognormal({MEDIAN_MS:.0f} ms, {SIGMA})"
        about = f"{amounts.files:,} files of {files.layout.slots:,} slots and {files.layout.items:,} items on {where}"
        meter.tables += _lookup_tables(cells, about, others)


COLD = Suite("cold", _specs, measure_cold)
"""Files made once; every round takes other keys."""


@contextlib.contextmanager
def _network(setting: Setting, files: StoredFiles) -> Iterator[Network]:
    if setting.storage is None:
        yield Network(LocalStorage(files.objects), injected=True)
        return
    with copied(files, setting.storage, IndexConfig.model_fields["query_threads"].default) as storage:
        yield Network(storage, injected=False)


def _percentile_ms(costs: Sequence[LookupCost], which: float) -> float:
    return float(np.percentile([cost.elapsed_s for cost in costs], which)) * 1000


def _mean(costs: Sequence[LookupCost], name: str) -> float:
    return float(np.mean([getattr(cost, name) for cost in costs]))


def _record(cells: Cells, amounts: Amounts, meter: Meter) -> None:
    for files in amounts.lookups:
        for kind in KINDS:
            plain = _percentile_ms(cells[files, kind, _RAW], 50)
            meter.record(_times(files, kind), _percentile_ms(cells[files, kind, _OURS], 50) / plain)
    most = max(amounts.lookups)
    meter.record(_spared(amounts), 100 * (1 - _mean(cells[most, "none", _WITH_FILTERS], "requests") / most))
    meter.record(_to_open(amounts), _mean(cells[most, _OPENING, _FRESH], "requests"))


_COLUMNS = (
    "files",
    "key in",
    "read by",
    "lookups",
    "requests",
    "KiB",
    "USD a million",
    "p50 ms",
    "p99 ms",
    "p50 times plain GETs",
)


def _lookup_tables(cells: Cells, about: str, others: Sequence[str]) -> Iterator[Table]:
    parts = {"lookups": (_OURS, _WITH_FILTERS), "other ways": (_RAW, *others), "a reader that knows nothing": (_FRESH,)}
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
