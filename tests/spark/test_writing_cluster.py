"""A DataFrame is written to an index on two hosts, on which Spark runs one task twice: what Spark takes counts once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.test_local_cluster import two_hosts

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_data_source_is_written_while_spark_speculates(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    with two_hosts(tmp_path / "cluster") as master:
        command = [sys.executable, "-m", "tests.spark.speculating_program", master, str(tmp_path), "2000"]
        ended = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-3000:]
    [line] = [json.loads(text) for text in ended.stdout.splitlines() if text.startswith("{")]
    assert line["twice"] and line["total"] == 2_000
    assert line["tables"] == 8  # of four tasks, each of which met both days; those of the other attempt are none
