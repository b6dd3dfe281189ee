"""Writes documents of `python -m tests.benchmarks.profiles` into docs/performance.md. The option `--page` of that
program calls it.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

from docs.generators.measured_pages import ROOT, about, markdown, number, rewrite

__all__ = ["PAGE", "rewrite_page"]

PAGE = ROOT / "docs" / "performance.md"
# smaller parts are left out
_LEAST = 0.03


def rewrite_page(document: dict[str, Any]) -> None:
    """Put a document's set-up, table and parts into the page."""
    operations = document["operations"]
    set_up = (
        f"Measured with {document['entries']:,} entries in one file, medians of {document['rounds']} rounds, stored "
        f"files on {document['server']}: {about(document['machine'])}."
    )
    columns = ["operation", "CPU us each", "limit, us", "times the limit", "the limit"]
    rows = [_row(name, each) for name, each in operations.items()]
    parts = {name_of(name): _parts(each) for name, each in operations.items()}
    rewrite(PAGE, {"set-up": f"{textwrap.fill(set_up, 120)}\n", "table": markdown(columns, rows), **parts})


def name_of(operation: str) -> str:
    """Return the name of an operation's part of the page."""
    return re.sub(r"[^a-z]+", "-", operation)


def _row(name: str, each: dict[str, Any]) -> list[Any]:
    times = each["cpu_us"] / each["limit_us"]
    return [f"{name} ({each['unit']})", _us(each["cpu_us"]), _us(each["limit_us"]), times, each["limit"]]


def _us(value: float) -> str:
    return f"{value:.2g}" if value < 1 else number(value)


def _parts(each: dict[str, Any]) -> str:
    text = f"- {_shares(each['parts'])}"
    return f"{textwrap.fill(text, 120, subsequent_indent='  ', break_on_hyphens=False)}\n"


def _shares(parts: list[tuple[str, float]]) -> str:
    return ", ".join(f"`{name}` {share:.0%}" for name, share in parts if share >= _LEAST)
