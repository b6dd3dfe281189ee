"""The guide's section "Step by step", cell by cell: each prints the output below it."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.pages import section

_CELL = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
_ZONE = "spark.sql.session.timeZone"


@pytest.fixture
def session(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The shared session, as it was found; commands are those of this interpreter, and folders are swept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    zone = spark.conf.get(_ZONE)
    yield spark
    spark.conf.set(_ZONE, zone)


@pytest.mark.long
def test_each_cell_prints_what_the_page_shows(session: Any) -> None:
    page = section("spark.md", "Step by step")
    cells = _CELL.findall(page)
    assert (
        len(cells) == page.count("```python\n")
        and sum(bool(expected) for _, expected in cells) == page.count("```text\n") >= 15
    )
    names: dict[str, Any] = {}
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    try:
        for cell, expected in cells:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(cell, "docs/spark.md", "exec"), names)
            shown = printed.getvalue()
            assert doctest.OutputChecker().check_output(expected.strip() or "\n", shown.strip() or "\n", options), (
                f"{cell}\n{shown}"
            )
    finally:
        if "index" in names:
            names["index"].close()
