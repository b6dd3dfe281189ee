"""The program of profiles measures the CPU time and the limit of every operation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.profiles import worker


@pytest.mark.long
def test_each_operation_has_its_time_and_limit(tmp_path: Path) -> None:
    command = [sys.executable, worker.__file__, str(tmp_path), (tmp_path / "storage").as_uri(), "8000", "50"]
    measured = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert len(measured) >= 8
    for operation, figures in measured.items():
        assert figures["cpu_us"] > 0 and figures["limit"], operation
