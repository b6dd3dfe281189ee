"""What the commands of `tiered-index spark` share: names of a source's columns, the session, progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tiered_index.cli.options import pairs
from tiered_index.cli.session import Session
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError
from tiered_index.spark.metrics import JobMetrics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tiered_index.spark.build.build import BuildResult
    from tiered_index.spark.build.merge import CompactReport, MergeResult


def given_storage(config: IndexConfig) -> str:
    """Return the storage's URI; a root's is not taken. Raises `ConfigError` where none is given."""
    if config.storage is None:
        raise ConfigError("no storage is given: --storage URI")
    return config.storage


def spark_of(master: str | None, conf: Sequence[str] | None, *, ship: bool = False) -> SparkSession:
    """Return the session; with `ship` its executors get this package from here.

    Raises `ConfigError` where PySpark or Java is missing.
    """
    from tiered_index.spark.session import open_session

    spark = open_session(master, settings=pairs("--conf", conf))
    spark.sparkContext.setLogLevel("ERROR")
    if ship:
        from tiered_index.spark.session import ship_package

        ship_package(spark)
    return spark


def progress_of(session: Session) -> Callable[[str, int, int], None]:
    """Return what is told of tasks done: a line on stderr where that has changed."""
    last: list[tuple[str, int, int]] = []

    def tell(stage: str, done: int, total: int) -> None:
        if total and last[-1:] != [(stage, done, total)]:
            last[:] = [(stage, done, total)]
            session.out.note(f"{stage}: {done:,} of {total:,} tasks")

    return tell


def job_document(result: BuildResult | CompactReport | MergeResult) -> dict[str, Any]:
    """Return what a job reports, JSON-ready."""
    return asdict(replace(result, metrics=JobMetrics())) | {"metrics": result.metrics.to_json()}


def spark_columns(columns: Mapping[str, str], constants: Mapping[str, str]) -> dict[str, Any]:
    """Return what `build` takes: constants as Spark columns, text where a field is text. Needs a session."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    return {
        **columns,
        **{name: F.lit(value if name in ("topic", "key") else int(value)) for name, value in constants.items()},
    }
