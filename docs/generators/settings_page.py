"""The page of settings, made from `IndexConfig` and the options of its tables."""

from __future__ import annotations

import inspect
import re
from typing import Any

from msgspec import NODEFAULT, structs

from tiered_index import IndexConfig
from tiered_index.base.retention import Retention
from tiered_index.config import TABLES

__all__ = ["page"]


def page() -> str:
    """Return a row for each setting: its name, its default, its variable, its meaning."""
    lines = ["# Settings\n", "| setting | default | environment variable | meaning |", "|---|---|---|---|"]
    meanings = _items(IndexConfig)
    for setting in structs.fields(IndexConfig):
        name = setting.name
        if name != "item_type" and name not in TABLES:
            lines.append(f"| `{name}` | {_shown(setting.default)} | `{_variable(name)}` | {meanings[name]} |")
    for name, kind in TABLES.items():
        meanings = _items(kind)
        for option in structs.fields(kind):
            default = None if option.default is NODEFAULT else option.default
            meaning, variable = meanings[option.name], _variable(f"{name}__{option.name}")
            default = f"{default / 86400:g}d" if kind is Retention and isinstance(default, float) else default
            lines.append(f"| `{name}.{option.name}` | {_shown(default)} | `{variable}` | {meaning} |")
    return "\n".join(lines) + "\n"


def _variable(name: str) -> str:
    return f"TIERED_INDEX_{name.upper()}"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"`{value:,}`" if isinstance(value, int | float) and not isinstance(value, bool) else f"`{value}`"


def _items(kind: type) -> dict[str, str]:
    """Return the meaning of each field that is an item of the docstring's list."""
    items = re.findall(r"^- `(\w+)`: (.*(?:\n  .*)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    texts = {name: " ".join(line.strip() for line in text.splitlines()).rstrip(".") for name, text in items}
    return {name: text[0].upper() + text[1:] for name, text in texts.items()}
