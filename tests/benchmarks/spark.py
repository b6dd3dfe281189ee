"""Suite `spark`: builds and merges by Spark beside one process and beside Parquet, lookups beside DuckDB, a year of
hourly files.

Each master is measured in a process of its own, on as many cores as it has; everything is written to local folders, and
for lookups copied to an S3 server. With `--scale` the suite measures memory instead: of each Python worker, by the
number of entries.

One process without Spark does the same work by `put_batch` and the life cycle, and by the code of `tiered-index merge`.
It stays on one core, or for merges by two threads on two. Its build's files are published, not yet merged to days: what
a live writer does. One thread, but for the merge's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.job import Job, copy_of, index_config, merge_options, run_process
from tests.benchmarks.lookups import LookupKeys, keys_by_kind, lookups_table, measure_lookups, place_of_uri
from tests.benchmarks.messages import PLAIN, TOPIC, TUNED
from tests.benchmarks.setting import SCALE_MASTER, SparkAmounts, SparkSetting, cores_of
from tests.benchmarks.year import year_table
from tiered_index.cli.bench.figures import Meter, Spec, Table, at_most, pinned
from tiered_index.cli.bench.setting import FLUSH_ENTRIES, require
from tiered_index.cli.demo.command import place_of
from tiered_index.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.service.index import IndexService
from tiered_index.service.log.log import StorageLog
from tiered_index.service.merge.run import merge
from tiered_index.storage.local.storage import LocalStorage

__all__ = ["Spark"]

_BATCH = 250_000
_ALONE = "one process"
_RATE = "entries/s a core"
_MOST_GROWTH = 1.15
_YEAR_EXACT = "lookups of the year that cost other than one GET a window in range"
_WAYS = {"build": "spark build", "merge": "spark merge", PLAIN: PLAIN, TUNED: TUNED}


def _rate(what: str, master: str) -> str:
    return f"{what}, {master}"


def _growth(kind: str) -> str:
    return f"{kind}: peak of a Python worker, most entries over fewest"


class Spark:
    """The source is made once; every round builds and merges it anew."""

    name = "spark"
    passes = 1

    def specs(self, setting: SparkSetting) -> Sequence[Spec]:
        """As `Suite.specs`."""
        amounts = SparkAmounts.of(setting)
        if amounts.scale:
            goal = at_most(_MOST_GROWTH) if len(amounts.scale) > 1 else None
            return [Spec(_growth(kind), "ratio", goal) for kind in ("build", "merge")]
        specs = [Spec(_rate(way, master), _RATE) for master in amounts.masters for way in _WAYS.values()]
        specs += [Spec(_rate("put_batch and life cycle", _ALONE), _RATE), Spec(_rate("merge", _ALONE), _RATE)]
        specs.append(Spec(_rate("merge, 2 threads", _ALONE), _RATE))
        specs += [Spec(f"{name}: bytes an entry", "bytes") for name in ("tiered_index", PLAIN, TUNED)]
        specs.append(Spec(_YEAR_EXACT, "count", at_most(0)))
        return specs

    def run(self, setting: SparkSetting, folder: Path, meter: Meter) -> None:
        """As `Suite.run`."""
        amounts = SparkAmounts.of(setting)
        if amounts.scale:
            _run_scale(amounts, folder, meter)
            return
        by_kind = keys_by_kind(amounts)
        flat = [key for pairs in by_kind.values() for key, _ in pairs]
        hashes: list[int] = []
        seconds: dict[tuple[str, str], list[float]] = {}
        for number, master in enumerate(amounts.masters):
            cores = cores_of(master) or 1

            def told(name: str, values: dict[str, Any], master: str = master) -> None:
                nonlocal cores, hashes
                if name == "started":
                    cores = values["cores"]
                elif name == "prepared":
                    hashes = values["hashes"]
                else:
                    require(values["entries"], amounts.entries, f"entries of {name}")
                    meter.record(_rate(_WAYS[name], master), values["entries"] / values["elapsed_s"] / cores)
                    seconds.setdefault((_WAYS[name], master), []).append(values["elapsed_s"])
                    if name != "merge":
                        size = values["bytes"] / values["entries"]
                        meter.record(f"{name if name in (PLAIN, TUNED) else 'tiered_index'}: bytes an entry", size)

            run_process(_job(amounts, folder, master, prepare=number == 0, keys=flat), told)
        config = index_config(_job(amounts, folder, ""))
        for _ in meter.rounds():
            elapsed_s = _build_alone(folder, config, amounts.entries)
            meter.record(_rate("put_batch and life cycle", _ALONE), amounts.entries / elapsed_s)
            for threads, name in ((1, "merge"), (2, "merge, 2 threads")):
                elapsed_s = _merge_alone(folder, config, amounts.entries, amounts.days, threads)
                meter.record(_rate(name, _ALONE), amounts.entries / elapsed_s / threads)
        meter.tables.append(_seconds_table(seconds, amounts))
        with place_of(_s3_or_none(setting), folder) as place:
            os.environ.update(place.environment)
            keys = LookupKeys(by_kind, dict(zip(flat, hashes, strict=True)))
            cells = measure_lookups(folder, place_of_uri(place.uri), amounts, keys)
            meter.tables.append(lookups_table(cells, amounts, place.label))
        table, exact = year_table(amounts.weeks)
        meter.tables.append(table)
        meter.record(_YEAR_EXACT, 0 if exact else 1)


def _s3_or_none(setting: SparkSetting) -> str | None:
    return setting.storage if setting.storage is not None and setting.storage.startswith("s3://") else None


def _job(amounts: SparkAmounts, folder: Path, master: str, **more: Any) -> Job:
    return Job(
        master,
        str(folder),
        amounts.entries,
        amounts.days,
        amounts.rounds,
        amounts.preset,
        amounts.slots,
        topic=TOPIC,
        **more,
    )


def _seconds_table(seconds: dict[tuple[str, str], list[float]], amounts: SparkAmounts) -> Table:
    masters = tuple(dict.fromkeys(master for _, master in seconds))
    rows = [
        (way, *(statistics.median(seconds[way, master]) for master in masters))
        for way in dict.fromkeys(way for way, _ in seconds)
    ]
    title = f"seconds, median: {amounts.entries:,} entries of {amounts.days} days, Parquet source, all in local folders"
    return Table(title, ("job", *masters), tuple(rows))


def _run_scale(amounts: SparkAmounts, folder: Path, meter: Meter) -> None:
    """Build and merge each number of entries in a fresh cluster; record by how much the greatest worker grows."""
    rows: list[tuple[Any, ...]] = []
    peaks: dict[str, list[int]] = {"build": [], "merge": []}
    master = amounts.masters[0] if len(amounts.masters) == 1 else SCALE_MASTER
    for entries in amounts.scale:

        def told(name: str, values: dict[str, Any], entries: int = entries) -> None:
            if not name.startswith("scale "):
                return
            kind = name.removeprefix("scale ")
            workers, java = values["workers_mib"], values["java_mib"]
            peaks[kind].append(max(workers, default=0))
            rows.append(
                (
                    entries,
                    kind,
                    values["shards"],
                    " ".join(map(str, workers)),
                    " ".join(map(str, java)),
                    round(values["elapsed_s"], 1),
                    round(values["load_average"], 1),
                )
            )

        run_process(_job(amounts, folder, master, scale=entries), told)
        require(len(rows) % 2, 0, "a build and a merge")
    for kind, values in peaks.items():
        meter.record(_growth(kind), values[-1] / max(1, values[0]))
    columns = ("entries", "job", "shards", "Python workers, peak MiB", "Java, peak MiB", "seconds", "load average")
    meter.tables.append(Table(f"peak memory of each process on {master}", columns, tuple(rows)))


def _build_alone(folder: Path, config: IndexConfig, entries: int) -> float:
    """Put the messages of `folder`/messages, compact and upload them on one core; return the seconds it took."""
    # imported when asked for: it loads pandas, and --help imports this module
    import pyarrow.dataset as ds

    place = Path(tempfile.mkdtemp(prefix="alone-", dir=folder))
    settings = config.model_copy(
        update={"root": place / "root", "storage": f"file://{place / 'storage'}", "background": False}
    )
    try:
        with _on_cores(1), IndexService.open(settings) as index:
            begun = time.perf_counter()
            waiting = put = 0
            for rows in ds.dataset(folder / "messages", format="parquet").to_batches(batch_size=_BATCH):
                waiting += index.put_batch(rows)
                if waiting >= FLUSH_ENTRIES:
                    index.flush()
                    index.run_lifecycle()
                    put, waiting = put + waiting, 0
            index.seal()
            index.run_lifecycle()
            elapsed_s = time.perf_counter() - begun
            require(put + waiting, entries, "entries that were put")
        return elapsed_s
    finally:
        shutil.rmtree(place)


def _merge_alone(folder: Path, config: IndexConfig, entries: int, days: int, threads: int) -> float:
    """Merge a copy of `folder`/parts to days by as many threads as cores; return the seconds it took."""
    with copy_of(folder, "parts") as parts, LocalStorage(parts) as storage, _on_cores(threads):
        log = StorageLog(storage, SystemClock())
        log.open()
        options = merge_options(entries, days, config.geometry().schema.item.itemsize)
        begun = time.perf_counter()
        report = merge(storage, log, SystemClock(), options, threads=threads)
        require(report.entries, entries, "entries that were merged")
        return time.perf_counter() - begun


@contextlib.contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Keep the process on one core; with more it may use all there are, of which the threads keep so many busy."""
    if count > 1:
        yield
        return
    with pinned(max(os.sched_getaffinity(0))):
        yield
