"""A page says when to change each setting of `IndexConfig`."""

import re
from pathlib import Path

from msgspec.structs import fields

from tiered_index import IndexConfig

_PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_a_page_says_when_to_change_each_setting() -> None:
    pages = [*_PAGE.parent.glob("*.md"), *(_PAGE.parents[1] / "deploy").glob("*.md"), _PAGE.parents[1] / "README.md"]
    text = "".join(page.read_text() for page in pages if page != _PAGE)
    head, rest = _PAGE.read_text().split("<!-- generated: settings -->\n")
    said = {*re.findall(r"\w+", text + head + rest.split("<!-- end -->\n")[1])}
    assert [each.name for each in fields(IndexConfig) if each.name not in said] == []
