"""A job as it runs: its descriptions on Spark's pages and in a terminal, the settings that it changes and restores, and
its interruption.

A call that needs a classic session refuses one of Spark Connect before it sends a request or writes.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.spark.commands import outcome_of as answered
from tests.spark.entries import messages, write_parquet
from tiered_index import spark as pipeline
from tiered_index.cli.on_spark import interrupts_first
from tiered_index.errors import ConfigError
from tiered_index.spark import build, merge
from tiered_index.spark.audit.audit import audit
from tiered_index.spark.session import ship_package


def test_jobs_have_descriptions_and_leave_no_files_of_shuffles_or_broadcasts(spark, storage, config, tmp_path):
    context = spark.sparkContext
    source = write_parquet(messages(2_000), tmp_path / "m.parquet")
    context.setJobDescription("mine")
    jobs, before = _jobs_described(spark), _shuffle_files(spark)
    broadcasts = {*Path(context._temp_dir).iterdir()}
    # Spark 4.0 keeps them until Java collects garbage
    deletes = not spark.version.startswith("4.0.")
    build(spark, source, storage=storage, config=config)
    assert _shuffle_files(spark) <= before or not deletes
    assert audit(spark, source, storage=storage, config=config).status == "ok"
    assert _shuffle_files(spark) <= before or not deletes
    merge(spark, storage=storage, window="30d")
    assert {*Path(context._temp_dir).iterdir()} <= broadcasts
    assert context.getLocalProperty("spark.job.description") == "mine"
    context.setJobDescription(None)
    described = _jobs_described(spark)[len(jobs) :]
    stages = ["count", "build", "objects", "compare", "merge"]
    assert all(any(f"tiered_index {stage}: " in description for description in described) for stage in stages)


def _jobs_described(spark: Any) -> list[str]:
    """Return the descriptions of the jobs that Spark still lists, oldest first."""
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    listed = [jobs.apply(place) for place in range(jobs.size())]
    return [job.description().get() if job.description().isDefined() else "" for job in reversed(listed)]


def _shuffle_files(spark: Any) -> set[str]:
    """Return the names of the session's shuffle files."""
    folder = Path(spark.sparkContext.getConf().get("spark.local.dir"))
    assert any(folder.rglob("blockmgr-*"))
    return {path.name for path in folder.rglob("shuffle_*.data")}


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
    # its own module last: the others take the function from it when they are imported
    for module in ("spark.audit", "spark.build", "spark.erase", "spark.lookup", "on_spark"):
        monkeypatch.setattr(importlib.import_module(f"tiered_index.cli.{module}"), "spark_of", None)
    error = answered(f"{job} --storage file://{tmp_path}/nothing", code=2).error
    assert error["type"] == "NotAnIndex" and "nothing" in error["message"]


class _Session:
    """Replaces `pyspark.sql.connect.session.SparkSession`, which has no context, and whose import needs gRPC."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a session of Spark Connect was asked for")


_Session.__module__ = "pyspark.sql.connect.session"


JOBS = {
    "build": lambda spark, uri, source: pipeline.build(spark, source, storage=uri),
    "merge": lambda spark, uri, source: pipeline.merge(spark, storage=uri),
    "erase": lambda spark, uri, source: pipeline.erase(spark, storage=uri, topic="orders"),
    "audit": lambda spark, uri, source: pipeline.audit(spark, storage=uri),
    "look_up": lambda spark, uri, source: pipeline.look_up(spark, source, storage=uri),
    "ship_package": lambda spark, uri, source: ship_package(spark),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_session_of_spark_connect_is_refused(job: str, tmp_path: Path) -> None:
    # as the session class of a managed service
    session = type("Vendors", (_Session,), {})
    source = write_parquet(messages(10), tmp_path / "m.parquet")
    with pytest.raises(ConfigError, match=r"session of Spark Connect.*spark-submit.*register\(spark\)"):
        JOBS[job](session(), f"file://{tmp_path}/index", source)
    assert not list((tmp_path / "index").rglob("*"))
