"""The data sources over Spark Connect, whose client has no Spark context: a process with a client and a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.commands import run_program


@pytest.mark.slow
def test_the_data_sources_work_over_spark_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Spark gives the server a free port, not 15002: another process may have that one
    monkeypatch.setenv("SPARK_TESTING", "1")
    lines, _ = run_program("connect_program", tmp_path, timeout=1_200)
    figures = {name: value for line in lines for name, value in line.items()}
    assert (figures["written"], figures["of_key"], figures["hashed"]) == (500, [907, 807], True)
    # a repeated stream adds nothing
    assert (figures["streamed"], figures["messages"]) == (2_000, 101)
    assert "NotAnIndex" in figures["error"] and "holds no tiered index" in figures["error"]
    assert figures["lost"].startswith("tiered_index.errors.CorruptFile: data/")
    assert "session of Spark Connect" in figures["refused"]
