"""The program that the suites of Spark start, once per master. Each has its own process and Java, on as many cores as
the master says. `run_process` starts it.

    python -m tests.benchmarks.job DOCUMENT.json        prints a JSON line per measurement

The document is a `Job`. Before the first round, the program does everything twice on few entries. The first time loads
classes and forks workers, and is not reported. The second time gives the fixed costs of a job.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks import ways
from tests.benchmarks.bulk import look_up_many, taken
from tests.benchmarks.machine.setting import require
from tests.benchmarks.memory import ProcessWatch
from tests.benchmarks.messages import (
    DAY_S,
    keys_folder,
    message_frame,
    quiet_session,
    sum_of,
    sum_of_join,
    write_buckets,
    write_by_duckdb,
    write_keys,
    write_parquet,
)
from tests.benchmarks.setting import cores_of
from tiered_index.config import IndexConfig
from tiered_index.service.jobs.merge_run import MergeOptions
from tiered_index.spark import audit, build, hash_key, look_up, merge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MERGE_SOURCES_S = DAY_S // 4
"""Windows of the tables that are merged to days."""
_FEW_ENTRIES, _FEW_KEYS = 20_480, 100
_TOLD_OF_FAILURE = 4_000
_LEAST_SHARD = 1 << 20
_SCALE_SHARD = 256 << 20
Tell = Callable[..., None]


@dataclass(frozen=True)
class Job:
    """The work of one process. `folder` has the source and the results.

    With `scale`, it is a memory run of that many entries: of builds and merges, or of bulk lookups of `counts` keys.
    `prepare`: write the source, the index for merges, and the table for joins. `counts` keys are looked up and joined.
    With `duck`, DuckDB writes Parquet, too. Without `all_ways`, the process skips `ways.LEFT_OUT`.
    """

    master: str
    folder: str
    entries: int
    days: int
    rounds: int
    preset: str
    slots: int
    prepare: bool = False
    scale: int = 0
    counts: Sequence[int] = ()
    duck: bool = True
    all_ways: bool = True


def run_process(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a job; yield the name and the values of each measurement at once. Raises `RuntimeError` if the job fails."""
    document = Path(job.folder) / "job.json"
    document.write_text(json.dumps(asdict(job)))
    complaints = Path(job.folder) / "job.log"
    # the program runs in the job's folder and imports this package
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    with complaints.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.job", str(document)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=job.folder,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": job.folder},
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                values = json.loads(line)
                yield values.pop("name"), values
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            process.stdout.close()
    if status:
        raise RuntimeError(
            f"the Spark job on {job.master} ended with status {status}: {complaints.read_text()[-_TOLD_OF_FAILURE:]}"
        )


def index_config(job: Job) -> IndexConfig:
    """Return the settings of the index."""
    return IndexConfig.load(preset=job.preset, slots=job.slots, max_late_s=1e10)


def merge_options(entries: int, days: int, item_bytes: int) -> MergeOptions:
    """Return options under which each day has about four shards, enough for two cores."""
    return MergeOptions(shard_bytes=max(_LEAST_SHARD, entries // days * item_bytes // 4))


@contextlib.contextmanager
def copy_of(folder: Path, name: str) -> Iterator[Path]:
    """Yield a copy of the index `name` to merge, and delete it at the end."""
    with tempfile.TemporaryDirectory(prefix="merged-", dir=folder) as target:
        yield Path(shutil.copytree(folder / name, Path(target) / "index"))


def run_job(spark: SparkSession, job: Job, watch: ProcessWatch, tell: Tell) -> None:
    """Measure on `spark`. Call `tell` with each measurement's name and values, and whether it has few entries.

    A job of few entries takes little more than its fixed part.
    """
    folder = Path(job.folder)
    if job.prepare:
        _prepare(spark, job, folder)
    with tempfile.TemporaryDirectory(dir=folder) as warm:
        few = replace(job, folder=warm, entries=_FEW_ENTRIES, days=1, counts=(_FEW_KEYS,), duck=False)
        _prepare(spark, few, Path(warm))
        _measure_all(spark, few, watch, lambda **_: None, keep=False)
        _measure_all(spark, few, watch, partial(tell, few=True), keep=False)
    for number in range(job.rounds):
        _measure_all(spark, job, watch, partial(tell, few=False), keep=job.prepare and number == 0)


def _prepare(spark: SparkSession, job: Job, folder: Path) -> None:
    """Write the source, the index of short windows for merges, and the table for joins."""
    source = str(folder / "messages")
    message_frame(spark, job.entries, job.days, max(8, job.entries // 2_500_000)).write.parquet(source)
    build(spark, source, storage=f"file://{folder}/parts", window=MERGE_SOURCES_S, config=index_config(job))
    write_buckets(spark.read.parquet(source), folder / "buckets")
    for count in job.counts:
        write_keys(spark, folder, count, job.entries)


def _measure_all(spark: SparkSession, job: Job, watch: ProcessWatch, tell: Tell, *, keep: bool) -> None:
    """Measure every way once. With `keep`, the index and the Parquet files stay in the job's folder."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    folder = Path(job.folder)
    source, config = str(folder / "messages"), index_config(job)

    def measure(name: str, work: Callable[[], Any], keys: int = 0) -> Any:
        before, begun = watch.cpu_s(), time.perf_counter()
        found = work()
        elapsed_s, after = time.perf_counter() - begun, watch.cpu_s()
        require(getattr(found, "entries", job.entries), job.entries, f"entries of {name}")
        spent = {f"{kind}_s": after[kind] - before[kind] for kind in after}
        tell(name=name, keys=keys, elapsed_s=elapsed_s, **spent)
        return found

    with tempfile.TemporaryDirectory(dir=folder, prefix="round-") as round_:
        kept = folder if keep else Path(round_)
        index = f"file://{kept}/index"
        options = merge_options(job.entries, job.days, config.geometry().schema.item.itemsize)
        built = measure(ways.BUILD, lambda: build(spark, source, storage=index, window="1d", config=config))
        tell(name="stored", way="tiered_index", bytes=built.written_bytes)
        frame = spark.read.parquet(source)
        if job.all_ways:
            place = f"file://{round_}/frame"
            measure(ways.BUILD_FRAME, lambda: build(spark, frame, storage=place, window="1d", config=config))
        audited = measure(ways.AUDIT, lambda: audit(spark, source, storage=index, config=config))
        require(audited.status, "ok", "an audit")
        with copy_of(folder, "parts") as parts:
            measure(ways.MERGE, lambda: merge(spark, storage=f"file://{parts}", window="1d", options=options))
        for layout in (ways.PLAIN, ways.TUNED) if job.all_ways else (ways.TUNED,):
            measure(layout, partial(write_parquet, frame, kept / layout, layout, job.days, job.entries // job.days))
            tell(name="stored", way=layout, bytes=_size(kept / layout))
        if job.duck:
            measure(ways.DUCK, lambda: write_by_duckdb(source, kept / ways.DUCK, cores_of(job.master)))
        hashes = ((ways.HASH_KEY, hash_key("topic", "key")), (ways.XXHASH, F.xxhash64("topic", "key")))
        for name, column in hashes if job.all_ways else ():
            measure(name, frame.agg(F.bit_xor(column)).collect)
        for count in job.counts:
            keys = spark.read.parquet(keys_folder(folder, count))
            found = measure(ways.LOOKUP, partial(sum_of_lookup, spark, keys, index, config), count)
            joined = measure(ways.JOIN, partial(sum_of_join, spark, keys, folder / "buckets"), count)
            require(found, joined, f"answers to {count:,} keys")


def sum_of_lookup(spark: SparkSession, keys: DataFrame, index: str, config: IndexConfig) -> tuple[int, int]:
    """Look keys up, and return the same values as `sum_of`."""
    result = look_up(spark, keys, storage=index, config=config)
    assert result.frame is not None
    try:
        return sum_of(result.frame)
    finally:
        result.release()


def run_scale(spark: SparkSession, job: Job, watch: ProcessWatch, tell: Tell) -> None:
    """Build and merge `job.scale` entries that Spark makes; report the peaks of memory of each step."""
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        storage = f"file://{folder}/index"
        # as many tasks as a source of files with a million messages each would have
        source = message_frame(spark, job.scale, job.days, max(4, job.scale // 1_000_000))
        watch.restart()
        begun = time.perf_counter()
        built = build(spark, source, storage=storage, window="1d", config=index_config(job))
        tell("scale build", **_scaled(job, begun, built.entries, built.shards, watch))
        watch.restart()
        begun = time.perf_counter()
        report = merge(spark, storage=storage, window="30d", options=MergeOptions(shard_bytes=_SCALE_SHARD))
        tell("scale merge", **_scaled(job, begun, report.entries, report.shards, watch))


def _scaled(job: Job, begun: float, entries: int, shards: int, watch: ProcessWatch) -> dict[str, Any]:
    if entries != job.scale:
        raise RuntimeError(f"{entries:,} of {job.scale:,} entries")
    return {"entries": entries, "shards": shards, **taken(begun, watch)}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.parquet") if not path.name.startswith("."))


def _session(master: str) -> SparkSession:
    if (cores := cores_of(master)) is not None:
        # Java and its workers inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    local = {f"spark.driver.{name}": "127.0.0.1" for name in ("host", "bindAddress")}
    return quiet_session(master, level="OFF", **local | {"spark.executor.memory": "1g"})


def main(document: str) -> None:
    """Run the job of the document."""
    job = Job(**json.loads(Path(document).read_text()))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Java writes messages to stdout

    def tell(name: str, **values: Any) -> None:
        print(json.dumps({"name": name, **values}), file=out, flush=True)

    with ProcessWatch() as watch:
        spark = _session(job.master)
        try:
            tell("started", **{f"{kind}_s": spent for kind, spent in watch.cpu_s().items()})
            if job.scale and job.counts:
                look_up_many(spark, Path(job.folder), job.scale, job.days, job.counts, index_config(job), watch, tell)
            elif job.scale:
                run_scale(spark, job, watch, tell)
            else:
                run_job(spark, job, watch, tell)
        finally:
            spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
