"""Writes documents of `python -m tests.benchmarks.profiles` into docs/performance.md; called by its `--page`."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from docs.generators.measured_pages import ROOT, about, markdown, number, rewrite

__all__ = ["PAGE", "rewrite_page"]

PAGE = ROOT / "docs" / "performance.md"
# a part smaller than this is not told
_LEAST = 0.03
_VERSIONS = (("now", "after"), ("before", "before"))


def rewrite_page(document: dict[str, Any]) -> None:
    """Put a document's set-up, table and parts into the page."""
    operations = document["operations"]
    set_up = (
        f"Measured with {document['entries']:,} entries in one file, medians of {document['rounds']} rounds, stored "
        f"files on {document['server']}: {about(document['machine'])}."
    )
    columns = ["operation", "CPU us each", "limit, us", "times the limit", "the limit"]
    rows = [_row(name, each) for name, each in operations.items()]
    if any("before" in each for each in operations.values()):
        columns.insert(1, "before: CPU us each")
        for row, each in zip(rows, operations.values(), strict=True):
            row.insert(1, _us(each["before"]["cpu_us"]) if "before" in each else None)
    parts = {name_of(name): _parts(each) for name, each in operations.items()}
    rewrite(PAGE, {"set-up": f"{textwrap.fill(set_up, 120)}\n", "table": markdown(columns, rows), **parts})


def name_of(operation: str) -> str:
    """Return the name of an operation's part of the page."""
    return re.sub(r"[^a-z]+", "-", operation)


def _row(name: str, each: dict[str, Any]) -> list[Any]:
    now = each["after"]
    times = now["cpu_us"] / now["limit_us"]
    return [f"{name} ({now['unit']})", _us(now["cpu_us"]), _us(now["limit_us"]), times, now["limit"]]


def _us(value: float) -> str:
    return f"{value:.2g}" if value < 1 else number(value)


def _parts(each: dict[str, Any]) -> str:
    if "before" not in each:
        return _item(_shares(each["after"]["parts"]))
    return "".join(_item(f"{name}: {_shares(each[key]['parts'])}") for name, key in _VERSIONS)


def _item(text: str) -> str:
    return f"{textwrap.fill(f'- {text}', 120, subsequent_indent='  ', break_on_hyphens=False)}\n"


def _shares(parts: list[tuple[str, float]]) -> str:
    return ", ".join(f"`{name}` {share:.0%}" for name, share in parts if share >= _LEAST)
