"""Puts measured tables into pages: between ``<!-- measured: NAME -->`` and the next ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["about", "markdown", "number", "rewrite", "shown", "table_rows"]

ROOT = Path(__file__).parents[2]


def table_rows(document: dict[str, Any], start: str) -> list[list[Any]]:
    """Return the rows of the one table of a bench document whose title starts with this text."""
    (table,) = [table for table in document["tables"] if table["title"].startswith(start)]
    return list(table["rows"])


def number(value: Any) -> str:
    """Return a number as tables show it: three figures, or whole; texts unchanged."""
    if value is None:
        return ""
    if not isinstance(value, int | float):
        return str(value)
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2g}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table."""
    lines = [columns, ["---"] * len(columns), *([number(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def about(machine: dict[str, Any]) -> str:
    """Return the machine and the setting of a measurement."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, load average "
        f"{machine['load_average']} at the start"
    )


def shown(text: str, name: str) -> str:
    """Return the text of a page under a name."""
    rest = text.split(f"<!-- measured: {name} -->\n")[1]
    return rest[: rest.index("<!-- end -->")]


def rewrite(page: Path, parts: Mapping[str, str]) -> None:
    """Replace the parts of a page by their names. Raises `ValueError` for one that the page lacks or has twice."""
    text = page.read_text()
    for name, part in parts.items():
        mark = re.escape(f"<!-- measured: {name} -->\n")
        text, count = re.subn(
            f"({mark}).*?(<!-- end -->)", lambda match, part=part: f"{match[1]}{part}{match[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{page} has {count} parts called {name}")
    page.write_text(text)
