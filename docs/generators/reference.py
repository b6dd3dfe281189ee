"""Writes the generated parts of the reference pages, and the pictures made from text.

Run `python -m docs.generators.reference`. A part is the text between ``<!-- generated: NAME -->`` and the next
``<!-- end -->``. A test fails if one is stale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generators import api_page, cli_page, http_page, metrics_page, settings_page
from docs.generators.diagrams import PICTURES

__all__ = ["PARTS", "rewritten"]

DOCS = Path(__file__).parents[1]
PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "api.md": {"names": api_page.names_table},
    "cli.md": {"commands": cli_page.commands},
    "http.md": {"routes": http_page.routes, "objects": http_page.objects},
    "metrics.md": {"metrics": metrics_page.tables},
    "settings.md": {"settings": settings_page.table},
}
"""For each page of docs/ the functions that return its parts, by name."""


def rewritten(page: str) -> str:
    """Return the text of a page of docs/ with the present parts."""
    text = (DOCS / page).read_text()
    for name, part in PARTS[page].items():
        mark = re.escape(f"<!-- generated: {name} -->\n")
        text, count = re.subn(f"({mark}).*?(<!-- end -->)", lambda m, s=part(): m[1] + s + m[2], text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{page} has {count} parts called {name}")
    return text


if __name__ == "__main__":
    for each in PARTS:
        (DOCS / each).write_text(rewritten(each))
    for name, picture in PICTURES.items():
        (DOCS / "images" / name).write_text(picture())
