"""docs/settings.md has every setting of `IndexConfig`, links of all pages lead somewhere, decisions are listed once.

Run this file as a program to rewrite the table after a change of settings.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from tiered_index import IndexConfig
from tiered_index.retention import Retention
from tiered_index.storage.metering import PriceTable
from tiered_index.storage.s3.options import S3Options

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "settings.md"
_DECISIONS = _ROOT / "docs" / "decisions"
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
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


def _pages() -> list[Path]:
    tops = [_ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tiered_index/format/SPEC.md")]
    return [*tops, *(_ROOT / "docs").rglob("*.md"), *(_ROOT / "deploy").rglob("*.md")]


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in plain}


def test_links_lead_to_a_page_and_a_heading() -> None:
    dead = []
    for page in _pages():
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target, anchor in _LINK.findall(text):
            if "://" in target:
                continue
            to = (page.parent / target).resolve() if target else page
            if not to.exists() or (anchor and to.suffix == ".md" and anchor not in _anchors(to)):
                dead.append(f"{page.relative_to(_ROOT)}: {target}#{anchor}")
    assert not dead


def test_each_decision_is_listed_once_and_none_is_named_that_is_gone() -> None:
    pages = sorted(page.name for page in _DECISIONS.glob("[0-9]*.md"))
    assert (
        sorted(re.findall(r"^\| \[\d{4}\]\(([^)]*)\)", (_DECISIONS / "README.md").read_text(), re.MULTILINE)) == pages
    )
    numbers = {name[:4] for name in pages}
    named = re.compile(r"(?:[Dd]ecisions?[ /]|decisions/)(0[0-9]{3})\b")
    for page in [*_pages(), *(_ROOT / "tiered_index").rglob("*.py")]:
        assert set(named.findall(page.read_text())) <= numbers, page


if __name__ == "__main__":
    head, rest = _PAGE.read_text().split(_BEGIN)
    _PAGE.write_text(head + _BEGIN + table() + _END + rest.split(_END)[1])
