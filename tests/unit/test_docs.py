"""docs/settings.md says what `IndexConfig` takes.

Run this file as a program to rewrite the table after a change of settings.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from tiered_index import IndexConfig
from tiered_index.retention import Retention
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.s3.options import S3Options

_PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
_BEGIN, _END = "<!-- generated: settings -->\n", "<!-- end -->\n"


def _shown(value: Any) -> str:
    return (
        ""
        if value is None
        else f"`{value:,}`"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else f"`{value}`"
    )


def _default(option: dataclasses.Field[Any]) -> Any:
    return None if option.default is dataclasses.MISSING else option.default


def table() -> str:
    """Return the table of settings."""
    lines = ["| setting | default | environment | meaning |", "|---|---|---|---|"]
    for name, field in IndexConfig.model_fields.items():
        if name in ("item_type", "s3", "prices", "retention"):
            continue
        lines.append(f"| `{name}` | {_shown(field.default)} | `TIERED_INDEX_{name.upper()}` | {field.description} |")
    for table, kind in (("s3", S3Options), ("prices", PriceTable), ("retention", Retention)):
        for option in dataclasses.fields(kind):
            variable = f"TIERED_INDEX_{table.upper()}__{option.name.upper()}"
            lines.append(
                f"| `{table}.{option.name}` | {_shown(_default(option))} | `{variable}` | see `{kind.__name__}` |"
            )
    return "\n".join(lines) + "\n"


def test_settings_page_names_every_setting() -> None:
    page = _PAGE.read_text()
    assert page.split(_BEGIN)[1].split(_END)[0] == table(), "run `python -m tests.unit.test_docs`"


def test_a_page_says_when_to_change_each_setting() -> None:
    pages = [*_PAGE.parent.glob("*.md"), *(_PAGE.parents[1] / "deploy").glob("*.md"), _PAGE.parents[1] / "README.md"]
    text = "".join(page.read_text() for page in pages if page != _PAGE)
    head, rest = _PAGE.read_text().split(_BEGIN)
    said = {*re.findall(r"\w+", text + head + rest.split(_END)[1])}
    assert [name for name in IndexConfig.model_fields if name not in said] == []


if __name__ == "__main__":
    head, rest = _PAGE.read_text().split(_BEGIN)
    _PAGE.write_text(head + _BEGIN + table() + _END + rest.split(_END)[1])
