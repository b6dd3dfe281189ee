"""A job as it runs: its descriptions on Spark's pages and in a terminal, the settings that it changes and restores, and
its interruption.

A call that needs a classic session refuses one of Spark Connect before it sends a request or writes.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.integration.cli.command_lines import run_here
from tests.spark.commands import told as answered
from tests.spark.entries import BEGIN_MS, messages, write_parquet
from tests.support.store_writer import StoreWriter
from tiered_index import spark as pipeline
from tiered_index.cli.options import SparkOptions
from tiered_index.cli.output import Output
from tiered_index.cli.session import Session
from tiered_index.cli.spark import interrupts_first, spark_of
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.format.layout import PRESETS
from tiered_index.spark import build, merge
from tiered_index.spark import session as session_module
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.audit.audit import audit
from tiered_index.spark.frames import large_batches, shuffles_deleted
from tiered_index.spark.metrics import described
from tiered_index.spark.session import ship_package
from tiered_index.spark.workers import spare_collections
from tiered_index.spark.writing.log_sources import SKIPPED
from tiered_index.spark.writing.parquet import HAS_KEY
from tiered_index.spark.writing.sources import FIELDS, entries_of
from tiered_index.storage.s3.options import S3Options

_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def test_jobs_have_descriptions_and_leave_no_shuffle_files(spark, storage, config, tmp_path):
    context = spark.sparkContext
    table = messages(2_000)
    source = write_parquet(table, tmp_path / "m.parquet")
    few = write_parquet(table.slice(3), tmp_path / "few.parquet")
    context.setJobDescription("mine")
    jobs, before = _jobs_described(spark), _shuffle_files(spark)
    build(spark, source, storage=storage, config=config)
    assert _shuffle_files(spark).keys() <= before.keys()
    assert audit(spark, source, storage=storage, config=config).status == "ok"
    assert _shuffle_files(spark).keys() <= before.keys()
    merge(spark, storage=storage, window="30d")
    assert context.getLocalProperty("spark.job.description") == "mine"
    context.setJobDescription(None)
    described = _jobs_described(spark)[len(jobs) :]
    stages = ["count", "build", "objects", "compare", "merge"]
    assert all(any(f"tiered_index {stage}: " in one for one in described) for stage in stages)
    found = audit(spark, few, storage=storage, config=config).differences
    assert found is not None and found.counts["extra"] == 3
    # files of the entries in ranges that differ, not of all; Spark deletes them when Java collects garbage
    left = {name: size for name, size in _shuffle_files(spark).items() if name not in before}
    assert sum(left.values()) < 10_000


def test_java_prints_no_traces_of_the_tasks_of_a_step(spark: Any) -> None:
    log4j = spark.sparkContext._jvm.org.apache.logging.log4j
    name, set_level = "org.apache.spark.executor.Executor", log4j.core.config.Configurator.setLevel
    set_level(name, log4j.Level.WARN)
    try:
        with pytest.raises(ValueError, match="fails"), described(spark, "count: fail"):
            assert log4j.LogManager.getLogger(name).getLevel().toString() == "OFF"
            raise ValueError("fails")
        assert log4j.LogManager.getLogger(name).getLevel().toString() == "WARN"
    finally:
        set_level(name, log4j.Level.OFF)


def _jobs_described(spark: Any) -> list[str]:
    """Return the descriptions of the jobs that Spark still lists, oldest first."""
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    listed = [jobs.apply(place) for place in range(jobs.size())]
    return [job.description().get() if job.description().isDefined() else "" for job in reversed(listed)]


def test_batches_are_large_while_a_job_runs_and_as_before_behind_it(spark: Any) -> None:
    rows = spark.range(0, 40_000, 1, 1)

    def sizes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch({"size": [batch.num_rows]})

    before = spark.conf.get(_ROWS)
    try:
        spark.conf.set(_ROWS, "10000")
        with large_batches(spark):
            assert [row[0] for row in rows.mapInArrow(sizes, "size long").collect()] == [40_000]
        with pytest.raises(ValueError, match="fails"), large_batches(spark):
            raise ValueError("fails")
        assert spark.conf.get(_ROWS) == "10000"
    finally:
        spark.conf.set(_ROWS, before)


def test_a_setting_that_was_unset_is_unset_again(spark: Any) -> None:
    name = "spark.sql.classic.shuffleDependency.fileCleanup.enabled"
    assert spark.conf.get(name, None) is None
    with shuffles_deleted(spark):
        assert spark.conf.get(name) == "true"
    assert spark.conf.get(name, None) is None


def _shuffle_files(spark: Any) -> dict[str, int]:
    """Return the size of each of the session's shuffle files, by name."""
    folder = Path(spark.sparkContext.getConf().get("spark.local.dir"))
    assert any(folder.rglob("blockmgr-*"))
    sizes = {}
    for path in folder.rglob("shuffle_*.data"):
        with suppress(FileNotFoundError):  # Spark may delete an older one meanwhile
            sizes[path.name] = path.stat().st_size
    return sizes


def test_a_worker_freezes_its_modules_after_its_first_task(spark: Any) -> None:
    def apart(_: int) -> int:
        spare_collections()
        spare_collections()
        return gc.get_freeze_count() if len(gc.callbacks) == 1 else -1

    for _ in range(2):
        found = spark.sparkContext.parallelize(range(8), 8).map(apart).collect()
    assert min(found) > 10_000


def test_a_log_is_read_by_the_tasks_that_pack_it(spark: Any, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", segment_bytes=20_000) as writer:
        for n in range(300):
            writer.put("t", n % 3, b"body" * 20, keys=[f"k-{n}", f"l-{n}"] * (n % 5 > 0), store_ms=BEGIN_MS + n * 1000)
    address_of = partial(StorageAddress, options=S3Options())
    schema = PRESETS["native"].schema
    entries = entries_of(spark, tmp_path / "store", {}, schema, address_of)
    assert entries.read is not None and entries.names == (*FIELDS, SKIPPED)
    splits = entries.frame.toArrow().to_batches()
    read = pa.Table.from_batches(entries.read(splits, [*FIELDS, HAS_KEY]))
    keys = [key for n in range(300) if n % 5 for key in (f"k-{n}", f"l-{n}")]
    assert read["key"].to_pylist() == keys and read[HAS_KEY].to_pylist() == [True] * len(keys)
    with pytest.raises(InvalidArgument, match="a commit log has its own fields; to map others, read it as a DataFrame"):
        entries_of(spark, tmp_path / "store", {"key": "topic"}, schema, address_of)


@pytest.mark.parametrize("as_json", [False, True], ids=["people", "programs"])
def test_a_command_names_the_pages_of_its_session_in_one_line(spark: Any, as_json: bool, capsys: Any) -> None:
    assert spark_of(Session(Output(as_json=as_json)), SparkOptions()) is spark
    out, said = capsys.readouterr()
    context = spark.sparkContext
    shown = f"its progress is at {context.uiWebUrl}" if context.uiWebUrl else "it has no web pages"
    assert (out, said) == ("", f"Spark application {context.applicationId} runs: {shown}\n")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_an_error_after_an_interrupt_is_reported_as_the_interrupt(failure: type[BaseException]) -> None:
    """Java's connection is broken by then, so every clean-up fails."""
    with pytest.raises(failure), interrupts_first():
        try:
            raise failure
        finally:
            raise RuntimeError("no answer from Java")
    with pytest.raises(RuntimeError, match="alone"), interrupts_first():
        raise RuntimeError("alone")


@pytest.mark.parametrize("job", ["merge", "erase --topic t --yes", "audit"])
def test_a_missing_index_is_an_error_before_spark_starts(job: str, tmp_path: Path, monkeypatch: Any) -> None:
    for module in ("reading", "writing"):
        monkeypatch.setattr(importlib.import_module(f"tiered_index.cli.spark.{module}"), "spark_of", None)
    error = answered(f"{job} --storage file://{tmp_path}/nothing", code=2).error
    assert error["type"] == "NotAnIndex" and "nothing" in error["message"]


class _Session:
    """Replaces `pyspark.sql.connect.session.SparkSession`, which has no context, and whose import needs gRPC."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a session of Spark Connect was asked for")


_Session.__module__ = "pyspark.sql.connect.session"


class _Vendors(_Session):
    """Replaces the session class of a managed service."""


JOBS = {
    "build": lambda spark, uri, source: pipeline.build(spark, source, storage=uri),
    "merge": lambda spark, uri, source: pipeline.merge(spark, storage=uri),
    "erase": lambda spark, uri, source: pipeline.erase(spark, storage=uri, topic="orders"),
    "audit": lambda spark, uri, source: pipeline.audit(spark, storage=uri),
    "look_up": lambda spark, uri, source: pipeline.look_up(spark, source, storage=uri),
    "ship_package": lambda spark, uri, source: ship_package(spark),
}


@pytest.mark.parametrize("session", [_Session, _Vendors])
@pytest.mark.parametrize("job", JOBS)
def test_a_session_of_spark_connect_is_refused(job: str, session: Any, tmp_path: Path) -> None:
    source = write_parquet(messages(10), tmp_path / "m.parquet")
    with pytest.raises(ConfigError, match=r"session of Spark Connect.*spark-submit.*register\(spark\)"):
        JOBS[job](session(), f"file://{tmp_path}/index", source)
    assert not list((tmp_path / "index").rglob("*"))


def test_the_command_line_refuses_it_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # as if SPARK_REMOTE were set
    monkeypatch.setattr(session_module, "open_session", lambda *_, **__: _Session())
    source = write_parquet(messages(10), tmp_path / "m.parquet")
    told = run_here("spark", "build", "--source", source, "--storage", f"file://{tmp_path}/index")
    assert (told.code, told.out) == (2, "")
    assert "session of Spark Connect" in told.err and "Traceback" not in told.err
