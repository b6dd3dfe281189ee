"""A session of Spark Connect is refused by what needs a classic one, before anything is asked of it or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spark.entries import messages, write_parquet
from tiered_index import spark as pipeline
from tiered_index.cli.main import run
from tiered_index.errors import ConfigError
from tiered_index.spark import session as session_module
from tiered_index.spark.session import ship_package


class _Session:
    """Stands for `pyspark.sql.connect.session.SparkSession`, which has no context, and needs gRPC to be imported."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a session of Spark Connect was asked for")


_Session.__module__ = "pyspark.sql.connect.session"


class _Vendors(_Session):
    """Stands for a managed service's own class of session."""


JOBS = {
    "build": lambda spark, uri, source: pipeline.build(spark, source, storage=uri),
    "merge": lambda spark, uri, source: pipeline.merge(spark, storage=uri),
    "compact": lambda spark, uri, source: pipeline.compact(spark, storage=uri),
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


def test_the_command_line_refuses_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # as where SPARK_REMOTE is set
    monkeypatch.setattr(session_module, "open_session", lambda *_, **__: _Session())
    source = write_parquet(messages(10), tmp_path / "m.parquet")
    with pytest.raises(SystemExit) as ended:
        run(["spark", "build", "--source", source, "--storage", f"file://{tmp_path}/index"])
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert "session of Spark Connect" in told.err and "Traceback" not in told.err
