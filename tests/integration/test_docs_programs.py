"""Programs in docs/several-indexes.md run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_PAGE = Path(__file__).parents[2] / "docs" / "several-indexes.md"
_PROGRAMS = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_there_is_a_program() -> None:
    assert _PROGRAMS


@pytest.mark.parametrize("number", range(len(_PROGRAMS)))
def test_programs_run(number: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERED_INDEX_")} | {"TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAMS[number]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
