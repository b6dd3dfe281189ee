"""The programs of docs/spark-sources.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "spark-sources.md"


def test_the_programs_of_the_page_run(spark):
    programs = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(programs) == 6
    names: dict[str, object] = {}
    for program in programs:
        exec(compile(program, str(_PAGE), "exec"), names)
