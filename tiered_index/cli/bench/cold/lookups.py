"""Lookups of fresh keys in the n newest files, beside plain GETs of the same ranges and RocketMQ's way of reading.

The suite's thread.

Every measurement of one round of one n meets the same sequence of waits, where they are injected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tiered_index.cli.bench.cold.amounts import Amounts
from tiered_index.cli.bench.cold.files import StoredFiles
from tiered_index.cli.bench.cold.network import Network, raw_get
from tiered_index.cli.bench.cold.patterns import Spent, as_rocketmq, raw_ranges, runs_of
from tiered_index.cli.bench.cold.readers import open_reader, stored_files, warm
from tiered_index.cli.bench.messages import ABSENT, TOPIC, keys_of
from tiered_index.cli.bench.meter import Meter
from tiered_index.cli.bench.setting import require
from tiered_index.service.reader import IndexReader
from tiered_index.storage.metering import MeteredStorage

__all__ = [
    "FRESH",
    "KINDS",
    "OPENING",
    "OURS",
    "PARALLEL",
    "RAW",
    "SERIAL",
    "WITH_FILTERS",
    "Cell",
    "Way",
    "measure_lookups",
    "section_of",
]

KINDS = ("one", "all", "none")
"""Which of the files in the range hold the key."""
_NEWEST = "all, newest 64"
# all hold it, and 64 answers are asked for
OURS, WITH_FILTERS, RAW = "ours", "ours, filters at hand", "plain GETs"
SERIAL, PARALLEL = "RocketMQ, file by file", "RocketMQ, side by side"
FRESH, OPENING = "fresh reader", "(opening only)"
_ASKED = 64
_LONG = 1_000
# as many files one after another take a minute: once is enough

Way = tuple[int, str, str]
"""Files in range, which of them hold the key, who reads."""


@dataclass
class Cell:
    """Samples of one way of reading; `requests` and `bytes` are sums over them."""

    samples_s: list[float] = field(default_factory=list)
    requests: int = 0
    bytes: int = 0
    cost_usd: float = 0.0

    def add(self, samples_s: Iterable[float], requests: int, read: int, cost_usd: float) -> None:
        """Take lookups in, and what they cost together."""
        self.samples_s.extend(samples_s)
        self.requests += requests
        self.bytes += read
        self.cost_usd += cost_usd

    def percentile_ms(self, which: float) -> float:
        """Return a percentile of the times, in milliseconds."""
        return float(np.percentile(self.samples_s, which)) * 1000

    @property
    def requests_each(self) -> float:
        """Requests a lookup."""
        return self.requests / len(self.samples_s)

    @property
    def kib_each(self) -> float:
        """KiB a lookup."""
        return self.bytes / len(self.samples_s) / 1024

    @property
    def usd_a_million(self) -> float:
        """Estimated price of a million such lookups."""
        return self.cost_usd / len(self.samples_s) * 1e6


def section_of(files: int, kind: str) -> str:
    """Return the meter's section of our lookups."""
    return f"lookups in {files:,}, {kind}"


class _Round:
    """One round: cells of its own, and what they are measured with."""

    def __init__(self, network: Network, files: StoredFiles, amounts: Amounts, number: int, meter: Meter) -> None:
        self.cells: dict[Way, Cell] = {}
        self._network, self._files, self._amounts, self._number, self._meter = network, files, amounts, number, meter
        self._random = np.random.default_rng(1_000 + number)
        self._keyed = files.layout.schema.keyed

    def key(self, files: int, kind: str) -> tuple[str, int, int]:
        """Return a fresh key, how many answers it has in the `files` newest ones, and how many to ask for."""
        number = int(self._random.integers(1 << 31))
        if kind == "none":
            return keys_of(np.array([ABSENT + number]))[0], 0, _ASKED
        if kind == "one":
            file = self._files.count - 1 - int(self._random.integers(files))
            return self._files.key_in_one(file, number), 1, _ASKED
        asked = _ASKED if kind == _NEWEST else max(_ASKED, files)
        return self._files.key_in_all(number), min(files, asked), asked

    def timed(self, way: Way, seed: int, read: Callable[[], Spent], answers: int | None) -> None:
        """Measure one lookup; wrong answers end the run."""
        self._network.begin(seed)
        started_s = time.perf_counter()
        spent = read()
        elapsed_s = time.perf_counter() - started_s
        if answers is not None:
            # without fingerprints a key is answered with what others of its 31-bit hash have
            require(spent.found if self._keyed else min(spent.found, answers), answers, f"answers of {way}")
        self.cells.setdefault(way, Cell()).add((elapsed_s,), spent.requests, spent.bytes, spent.cost_usd)

    def ask(self, reader: IndexReader, files: int, kind: str, key: str, asked: int) -> Spent:
        """Ask our reader, in the section that a profile of it looks at."""
        with self._meter.section(section_of(files, kind)):
            result = reader.query(TOPIC, key, begin_ms=self._files.begin_ms(files), max_count=asked)
        return Spent(len(result), result.explain.requests, result.explain.bytes, result.explain.cost_usd)

    def open(self, files: int) -> None:
        """Open a reader that knows nothing, and ask it once."""
        key, answers, asked = self.key(files, "all")
        metered = MeteredStorage(self._network)
        readers: list[IndexReader] = []

        def begin() -> Spent:
            readers.append(open_reader(metered))
            return Spent(0, metered.total.requests, metered.total.bytes_read, metered.total.cost_usd)

        self.timed((files, OPENING, FRESH), self._number, begin, None)
        with readers[0] as reader:
            self.timed(
                (files, "all", FRESH), self._number, lambda: self.ask(reader, files, "fresh", key, asked), answers
            )


def measure_lookups(network: Network, files: StoredFiles, amounts: Amounts, meter: Meter) -> Iterator[dict[Way, Cell]]:
    """Yield the cells of each round."""
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
                measured = _Round(network, files, amounts, number, meter)
                for count, lookups in amounts.lookups.items():
                    near = newest[:count]
                    for turn in range(lookups):
                        for kind in (*KINDS, *([_NEWEST] if count > _ASKED else [])):
                            key, answers, asked = measured.key(count, kind)
                            seed = number * 1_000 + turn
                            runs = runs_of(near, TOPIC, key)
                            ask = partial(measured.ask, files=count, kind=kind, key=key, asked=asked)
                            measured.timed((count, kind, RAW), seed, partial(raw_ranges, pool, get, runs), None)
                            measured.timed((count, kind, OURS), seed, partial(ask, plain), answers)
                            measured.timed((count, kind, WITH_FILTERS), seed, partial(ask, filtered), answers)
                        key, _, _ = measured.key(count, "one")
                        rocketmq = partial(
                            as_rocketmq, storage=network, layout=files.layout, files=near, topic=TOPIC, key=key
                        )
                        measured.timed((count, "one", PARALLEL), number * 1_000 + turn, partial(rocketmq, pool), None)
                    if count in amounts.serial and (count < _LONG or number == 0):
                        measured.timed((count, "one", SERIAL), number, partial(rocketmq, None), None)
                    measured.open(count)
                yield measured.cells
