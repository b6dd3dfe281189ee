"""A page says when to change each setting of `IndexConfig`."""

import re
from pathlib import Path

from msgspec.structs import fields

from tiered_index import IndexConfig

_TOP = Path(__file__).parents[2]


def test_a_page_says_when_to_change_each_setting() -> None:
    pages = [*(_TOP / "docs").glob("*.md"), *(_TOP / "deploy").glob("*.md"), _TOP / "README.md"]
    said = {*re.findall(r"\w+", "".join(page.read_text() for page in pages))}
    assert [each.name for each in fields(IndexConfig) if each.name not in said] == []
