"""Suite `spark`: CPU seconds of builds, audits, merges and bulk lookups by Spark, and of other ways.

The other ways are Spark's own jobs on Parquet, DuckDB and one process. The suite also counts the requests of lookups in
a year of hourly files.

CPU seconds are Java's and the Python workers' together, since elapsed time on a busy machine says little. Each master
runs in a separate process, on as many cores as it has. Everything is written to local folders. With `--scale` the suite
measures memory instead: of each Python worker, by the number of entries.

One process without Spark does the same work by `put_batch` and the life cycle, and by the code of `tiered-index merge`.
It uses one core, or for merges two threads on two cores. Its build publishes files that are not yet merged to days, as
a live writer does. The suite uses one thread, and the merge its own.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks import ways
from tests.benchmarks.billion.alone import put_all
from tests.benchmarks.job import Job, copy_of, index_config, merge_options, run_process
from tests.benchmarks.machine.figures import Meter, Spec, Table, at_most, pinned
from tests.benchmarks.machine.setting import require
from tests.benchmarks.setting import SparkAmounts, SparkSetting
from tests.benchmarks.year import year_table
from tiered_index.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.merge_run import merge
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.local.storage import LocalStorage

_ALONE = "one process"
_ALONE_WAYS = ("put_batch and life cycle", "merge", "merge, 2 threads")
_MOST_GROWTH = 1.15
_YEAR_EXACT = "lookups of the year that cost other than one GET a window in range"
_CPU, _START = "CPU s", "start"


def _named(way: str, keys: int) -> str:
    return f"{way}, {keys:,} keys" if keys else way


def _growth(kind: str) -> str:
    return f"{kind}: peak of a Python worker, most entries over fewest"


@dataclass
class _Spent:
    """The use of each way in each round, by (way, number of keys), and on few entries, by way: its fixed part."""

    rounds: dict[tuple[str, int], list[dict[str, float]]] = field(default_factory=dict)
    few: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def median(self, way: tuple[str, int], *names: str) -> float:
        """Return the median of a value, or of a sum of several."""
        return statistics.median(sum(values[name] for name in names) for values in self.rounds[way])

    def cpu_s(self, way: tuple[str, int]) -> float:
        """Return the median of the CPU seconds, Java's and Python's."""
        return self.median(way, "java_s", "python_s")

    def fixed_s(self, way: str) -> float:
        """Return the CPU seconds of a job on few entries; 0 if none was measured."""
        return statistics.median([values["java_s"] + values["python_s"] for values in self.few.get(way, ())] or [0.0])


class Spark:
    """The source is made once. Every round builds and merges it again."""

    name = "spark"
    passes = 1

    def specs(self, setting: SparkSetting) -> Sequence[Spec]:
        """Do as `Suite.specs`."""
        amounts = SparkAmounts.of(setting)
        if amounts.scale:
            goal = at_most(_MOST_GROWTH) if len(amounts.scale) > 1 else None
            return [Spec(_growth(kind), "ratio", goal) for kind in ("build", "merge")]
        named = [way for way in ways.ALL if amounts.measures_all or way not in ways.LEFT_OUT]
        named += [_named(way, count) for count in amounts.counts for way in (ways.LOOKUP, ways.JOIN)]
        specs = [Spec(f"{way}, {master}", _CPU) for master in amounts.masters for way in named]
        specs += [Spec(f"{way}, {_ALONE}", _CPU) for way in _ALONE_WAYS]
        layouts = [way for way in named if way in (ways.PLAIN, ways.TUNED)]
        specs += [Spec(f"{name}: bytes an entry", "bytes") for name in ("tiered_index", *layouts)]
        if amounts.measures_all:
            specs.append(Spec(_YEAR_EXACT, "count", at_most(0)))
        return specs

    def run(self, setting: SparkSetting, folder: Path, meter: Meter) -> None:
        """Do as `Suite.run`."""
        amounts = SparkAmounts.of(setting)
        if amounts.scale:
            _run_scale(amounts, folder, meter)
            return
        for number, master in enumerate(amounts.masters):
            spent = _Spent()
            for name, values in run_process(
                job_of(amounts, folder, master, prepare=number == 0, counts=amounts.counts)
            ):
                if name == "started":
                    spent.few[_START] = [values]
                elif values["few"]:
                    spent.few.setdefault(name, []).append(values)
                elif name == "stored":
                    meter.record(f"{values['way']}: bytes an entry", values["bytes"] / amounts.entries)
                else:
                    spent.rounds.setdefault((name, values["keys"]), []).append(values)
                    meter.record(f"{_named(name, values['keys'])}, {master}", values["java_s"] + values["python_s"])
            meter.tables.append(_cpu_table(spent, amounts, master))
        config = index_config(job_of(amounts, folder, ""))
        for _ in meter.rounds():
            meter.record(f"{_ALONE_WAYS[0]}, {_ALONE}", _build_alone(folder, config, amounts.entries))
            for threads, way in enumerate(_ALONE_WAYS[1:], 1):
                meter.record(f"{way}, {_ALONE}", _merge_alone(folder, config, amounts.entries, amounts.days, threads))
        if not amounts.measures_all:
            return
        table, exact = year_table(amounts.weeks)
        meter.tables.append(table)
        meter.record(_YEAR_EXACT, 0 if exact else 1)


def job_of(amounts: SparkAmounts, folder: Path, master: str, **more: Any) -> Job:
    """Return a job of these amounts."""
    about = (amounts.entries, amounts.days, amounts.rounds, amounts.preset, amounts.slots)
    return Job(master, str(folder), *about, all_ways=amounts.measures_all, **more)


def _cpu_table(spent: _Spent, amounts: SparkAmounts, master: str) -> Table:
    """Return a line per job: its use, its fixed part, and the ways to compare it with."""
    rows: list[tuple[Any, ...]] = []
    for way, keys in spent.rounds:
        cpu_s, fixed_s = spent.cpu_s((way, keys)), spent.fixed_s(way)
        beside = [(other, keys) for other in ways.BESIDE.get(way, ()) if (other, keys) in spent.rounds]
        rows.append(
            (
                _named(way, keys),
                round(cpu_s, 1),
                round(spent.median((way, keys), "java_s"), 1),
                round(fixed_s, 1),
                # lookups and joins don't grow with the index alone
                None if keys else round(amounts.entries / max(cpu_s - fixed_s, 0.01) / 1e6, 2),
                round(spent.median((way, keys), "elapsed_s"), 1),
                "; ".join(f"{cpu_s / spent.cpu_s(other):.2f} of {other[0]}" for other in beside),
            )
        )
    columns = ("job", "CPU s", "of it Java", "fixed part", "rate, M entries a CPU s", "wall s", "CPU ÷ another job's")
    title = (
        f"CPU seconds, median: {amounts.entries:,} entries of {amounts.days} days, Parquet, local folders; {master}; "
        f"Spark's start takes {spent.fixed_s(_START):.1f}"
    )
    return Table(title, columns, tuple(rows))


def _run_scale(amounts: SparkAmounts, folder: Path, meter: Meter) -> None:
    """Build and merge each number of entries in a new cluster; record the growth of the greatest worker."""
    rows: list[tuple[Any, ...]] = []
    peaks: dict[str, list[int]] = {"build": [], "merge": []}
    master = amounts.masters[0]
    for entries in amounts.scale:
        for name, values in run_process(job_of(amounts, folder, master, scale=entries)):
            if not name.startswith("scale "):
                continue
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

        require(len(rows) % 2, 0, "a build and a merge")
    for kind, values in peaks.items():
        meter.record(_growth(kind), values[-1] / max(1, values[0]))
    columns = ("entries", "job", "shards", "Python workers, peak MiB", "Java, peak MiB", "seconds", "load average")
    meter.tables.append(Table(f"peak memory of each process on {master}", columns, tuple(rows)))


def _build_alone(folder: Path, config: IndexConfig, entries: int) -> float:
    """Put the messages of `folder`/messages, compact and upload them on one core; return the CPU seconds."""
    # imported here, because it loads pandas, and --help imports this module
    import pyarrow.dataset as ds

    with tempfile.TemporaryDirectory(prefix="alone-", dir=folder) as place:
        settings = config.changed(root=Path(place, "root"), storage=f"file://{place}/storage", background=False)
        with _on_cores(1), IndexService.open(settings) as index:
            begun = time.process_time()
            put = put_all(index, ds.dataset(folder / "messages", format="parquet"))
            cpu_s = time.process_time() - begun
            require(put, entries, "entries that were put")
    return cpu_s


def _merge_alone(folder: Path, config: IndexConfig, entries: int, days: int, threads: int) -> float:
    """Merge a copy of `folder`/parts to days by as many threads as cores; return the CPU seconds."""
    with copy_of(folder, "parts") as parts, LocalStorage(parts) as storage, _on_cores(threads):
        log = StorageLog(storage, SystemClock())
        log.open()
        options = merge_options(entries, days, config.geometry().schema.item.itemsize)
        begun = time.process_time()
        report = merge(storage, log, SystemClock(), options, threads=threads)
        require(report.entries, entries, "entries that were merged")
        return time.process_time() - begun


@contextlib.contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Keep the process on one core. With more cores it may use all, and the threads keep that many busy."""
    if count > 1:
        yield
        return
    with pinned(max(os.sched_getaffinity(0))):
        yield
