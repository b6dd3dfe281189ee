"""Programs on the pages of docs/ run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_DOCS = Path(__file__).parents[2] / "docs"
_PAGES = ("several-indexes.md", "merge.md")


@pytest.mark.parametrize("page", _PAGES)
def test_programs_run(page: str, tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", (_DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert programs
    for program in programs:
        _run(program, tmp_path)


def _run(program: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERED_INDEX_")} | {
        "TMPDIR": str(tmp_path)
    }
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
