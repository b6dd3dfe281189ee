"""The list of public names in docs/api.md, of `tiered_index` and `tiered_index.follow`."""

from __future__ import annotations

import inspect
import re

import tiered_index
from tiered_index import follow

__all__ = ["names_table"]


def names_table() -> str:
    """Return a row for each public name: the name, and the first sentence of its docstring."""
    rows = ["| name | meaning |", "|---|---|"]
    names = {name: getattr(tiered_index, name) for name in tiered_index.__all__}
    names |= {f"follow.{name}": getattr(follow, name) for name in follow.__all__}
    for name, value in sorted(names.items(), key=lambda item: item[0].lower()):
        text = inspect.getdoc(value) if not isinstance(value, str) else "the version of the package"
        sentence = re.split(r"\.\s|\n\n", text or "")[0].replace("\n", " ").rstrip(".")
        rows.append(f"| `{name}` | {sentence} |")
    return "\n".join(rows) + "\n"
