"""The program behind docs/performance.md measures every operation on the page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generators.profiles_page import PAGE, name_of
from tests.benchmarks.profiles import worker


@pytest.mark.long
def test_each_operation_has_its_part_of_the_page(tmp_path: Path) -> None:
    uri = (tmp_path / "storage").as_uri()
    command = [sys.executable, worker.__file__, str(tmp_path), uri, "8000", "50"]
    measured = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    for operation, figures in measured.items():
        assert figures["cpu_us"] > 0 and figures["limit"], operation
    section = PAGE.read_text().split("\n## CPU time by part\n")[1]
    parts = re.findall("<!-- measured: (.*) -->", section)
    assert sorted(parts) == sorted(["set-up", "table", *map(name_of, measured)])
