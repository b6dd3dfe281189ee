"""Single lookups in an index: in fresh readers, in a warm one, and of absent keys."""

import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds

from tests.benchmarks.billion.data import KEYS_FILE
from tests.benchmarks.billion.oracle import FOUND, MAX_COUNT
from tiered_index import IndexConfig, IndexReader

_SINGLE, _FRESH = 1_000, 20
_CACHE_BYTES = IndexConfig(environment=False).read_cache_bytes


def _timed(reader: IndexReader, keys: Iterable[tuple[str, str]]) -> tuple[dict[str, float], list[int]]:
    """Look keys up one by one; return the figures and the number of entries of each answer."""
    wall, answers = [], []
    cpu_s = time.process_time()
    for topic, key in keys:
        begun = time.perf_counter()
        answers.append(reader.query(topic, key, max_count=MAX_COUNT))
        wall.append(time.perf_counter() - begun)
    cpu_s = time.process_time() - cpu_s
    requests = sum(answer.explain.requests for answer in answers)
    return {
        "p50_ms": 1000 * statistics.median(wall),
        "p99_ms": 1000 * sorted(wall)[len(wall) * 99 // 100],
        "cpu_ms": 1000 * cpu_s / len(wall),
        "requests": requests / len(wall),
    }, [len(answer) for answer in answers]


def _counts(folder: Path, keys: list[tuple[str, str]]) -> list[int]:
    """Return how many entries each answer must have."""
    import duckdb

    with duckdb.connect() as db:
        rows = db.sql(f"SELECT topic, key, count(*) FROM '{folder / FOUND}' GROUP BY ALL").fetchall()
    counts = {(topic, key): min(count, MAX_COUNT) for topic, key, count in rows}
    return [counts.get(pair, 0) for pair in keys]


def look_up(folder: str, storage: str, entries: str) -> dict[str, object]:
    """Measure; `entries` are those of the index."""
    table = ds.dataset(Path(folder) / KEYS_FILE).to_table(columns=["topic", "key"])
    some = np.random.default_rng(1).permutation(table.num_rows)[: _SINGLE + _FRESH]
    keys = [(row["topic"], row["key"]) for row in table.take(some).to_pylist()]
    wanted = _counts(Path(folder), keys)
    document: dict[str, object] = {}
    fresh_counts: list[int] = []
    opened, wall, cpu_s = [], [], time.process_time()
    for topic, key in keys[:_FRESH]:
        begun = time.perf_counter()
        with IndexReader.open(storage) as reader:
            opened.append(time.perf_counter() - begun)
            fresh_counts.append(len(reader.query(topic, key, max_count=MAX_COUNT)))
            wall.append(time.perf_counter() - begun)
    document["fresh"] = {
        "open_ms": 1000 * statistics.median(opened),
        "p50_ms": 1000 * statistics.median(wall),
        "cpu_ms": 1000 * (time.process_time() - cpu_s) / _FRESH,
    }
    least = 3 * int(entries)
    for caches, settings in (("", {}), ("large ", {"read_cache_bytes": least} if least > _CACHE_BYTES else {})):
        with IndexReader.open(storage, **settings) as reader:
            for name in ("first", "warm"):
                document[caches + name], counts = _timed(reader, keys[_FRESH:])
            document[caches + "absent"], none = _timed(reader, [(topic, f"no-{key}") for topic, key in keys[_FRESH:]])
        if fresh_counts + counts != wanted or any(none):
            raise RuntimeError("answers of single lookups differ from the source")
    return document
