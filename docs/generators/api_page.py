"""The list of public names in docs/api.md, made from `tiered_index.__all__`: `python -m docs.generators.api_page`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import tiered_index

__all__ = ["names_table", "rewritten"]

PAGE = Path(__file__).parents[1] / "api.md"
_NAMES = re.compile(r"(<!-- names -->\n).*?(<!-- end -->)", re.DOTALL)


def names_table() -> str:
    """Return a row for each public name: the name, and the first sentence of its docstring."""
    rows = ["| name | what it is |", "|---|---|"]
    for name in sorted(tiered_index.__all__, key=str.lower):
        value = getattr(tiered_index, name)
        text = inspect.getdoc(value) if not isinstance(value, str) else "the version of the package"
        sentence = re.split(r"\.\s|\n\n", text or "")[0].replace("\n", " ").rstrip(".")
        rows.append(f"| `{name}` | {sentence} |")
    return "\n".join(rows) + "\n"


def rewritten(page: str) -> str:
    """Return the page with the present table of names."""
    return _NAMES.sub(lambda found: found[1] + names_table() + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
