"""`make bench`: what this machine makes of the engine, as medians of several rounds and ratios within one run.

    python -m tests.benchmarks.engine [--preset native|rocketmq] [--entries N] [--rounds N] [--json]

Every figure is taken on the real file system with durable flushes. Nothing here is asserted: machines differ, and so do their neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tiered_index import IndexService
from tiered_index.format.layout import PRESETS

_BATCH = 250_000
_START_MS = 1_700_000_000_000
_TOPIC = "TopicOrder01"


def _batch(first: int, count: int, rng: np.random.Generator) -> pa.RecordBatch:
    topic = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([_TOPIC]))
    columns = [
        topic,
        pa.array(rng.integers(0, 8, count)),
        pa.array([_key(i) for i in range(first, first + count)]),
        pa.array(np.arange(first, first + count) * 1000),
        pa.array(np.full(count, 512)),
        pa.array(_START_MS + np.arange(first, first + count) // 10),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["topic", "queue_id", "key", "offset", "size", "timestamp_ms"])


def _key(number: int) -> str:
    return f"order-{number * 2_654_435_761 % 2**32:08x}-{number:016d}"


def _quantiles(samples: list[float]) -> tuple[float, float]:
    ordered = sorted(samples)
    return ordered[len(ordered) // 2] * 1e6, ordered[len(ordered) * 99 // 100] * 1e6


def _lookups(index: IndexService, entries: int, count: int) -> tuple[float, float]:
    rng = random.Random(7)
    samples = []
    for _ in range(count):
        key = _key(rng.randrange(entries))
        started = time.perf_counter()
        index.query(_TOPIC, key)
        samples.append(time.perf_counter() - started)
    return _quantiles(samples)


def _round(folder: Path, preset: str, entries: int, lookups: int) -> dict[str, float]:
    """One round: fill a file, look up, compact, look up; return figures by name."""
    rng = np.random.default_rng(1)
    figures: dict[str, float] = {}
    with IndexService.open(
        root=folder / "root", storage=f"file://{folder}/storage", preset=preset, items=entries + 1, background=False
    ) as index:
        put_s = flush_s = 0.0
        for first in range(0, entries, _BATCH):
            batch = _batch(first, min(_BATCH, entries - first), rng)
            started = time.perf_counter()
            index.put_batch(batch)
            put_s += time.perf_counter() - started
            started = time.perf_counter()
            index.flush()
            flush_s += time.perf_counter() - started
        figures["put_batch, entries/s"] = entries / put_s
        figures["put_batch and durable flush, entries/s"] = entries / (put_s + flush_s)
        figures["hot lookup p50, us"], figures["hot lookup p99, us"] = _lookups(index, entries, lookups)
        started = time.perf_counter()
        index.seal()
        index.run_lifecycle()
        both_s = time.perf_counter() - started
        path = next((folder / "root" / "uploaded").iterdir())
        size = path.stat().st_size
        started = time.perf_counter()
        shutil.copyfile(path, folder / "copy")
        with (folder / "copy").open("rb+") as handle:
            os.fsync(handle.fileno())
        copy_s = time.perf_counter() - started
        figures["compact and upload (file://), entries/s"] = entries / both_s
        figures["compact and upload: times a plain copy of the file"] = both_s / copy_s
        figures["compacted file, bytes an entry"] = size / entries
        figures["compacted lookup p50, us"], figures["compacted lookup p99, us"] = _lookups(index, entries, lookups)
        singles = min(entries, 100_000)
        started = time.perf_counter()
        for i in range(singles):
            index.put(_TOPIC, 1, _key(i), i, 100, _START_MS)
        figures["single put, entries/s"] = singles / (time.perf_counter() - started)
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="native")
    parser.add_argument("--entries", type=int, default=1_999_999, help="entries in the file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lookups", type=int, default=2_000, help="lookups a state and round")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds} ...", file=sys.stderr)
        folder = Path(tempfile.mkdtemp(prefix="tiered-index-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")))
        try:
            rounds.append(_round(folder, options.preset, options.entries, options.lookups))
        finally:
            shutil.rmtree(folder)
    medians: dict[str, Any] = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    if options.json:
        print(json.dumps({"preset": options.preset, "entries": options.entries, "rounds": rounds, "medians": medians}, indent=2))
    else:
        print(f"preset {options.preset}, {options.entries:,} entries a file, median of {options.rounds} rounds (smallest to greatest)")
        for name, median in medians.items():
            values = [r[name] for r in rounds]
            print(f"  {name:55} {median:>14,.2f}   ({min(values):,.2f} to {max(values):,.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
