"""The reference pages of the site have every command and option, setting, route, object, metric and public name."""

import pkgutil
import re
from functools import cache
from pathlib import Path

from msgspec import structs

import tiered_index
from docs.generators.metrics_page import PREFIX, exported
from docs.generators.reference import PAGES, all_commands
from tiered_index import IndexConfig
from tiered_index.server.app import OPERATIONS
from tiered_index.server.http.operations import described


@cache
def page(name: str) -> str:
    return PAGES[name]()


def test_the_page_of_commands_has_each_option_of_each_command() -> None:
    for words, command in all_commands():
        section = page("cli.md").partition(f"\n## {' '.join(words)}\n")[2].partition("\n## ")[0]
        assert command.params and section
        for option in command.params:
            assert any(name in section for name in (*option.opts, option.metavar or option.name)), (words, option.opts)


def test_the_page_of_settings_has_each_setting_with_its_meaning() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \|.*\| (.+) \|$", page("settings.md"), re.MULTILINE))
    tables = {name.partition(".")[0] for name in rows if "." in name}
    settings = {each.name for each in structs.fields(IndexConfig)} - {"item_type"}
    assert {*tables, *(name for name in rows if "." not in name)} == settings
    assert all(len(meaning) > 10 for meaning in rows.values())


def test_the_page_of_http_has_each_route_and_object() -> None:
    document = described(OPERATIONS)
    heads = set(re.findall(r"^##+ (.*)$", page("http.md"), re.MULTILINE))
    assert {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods} <= heads
    assert set(document["components"]["schemas"]) <= heads
    for anchor in re.findall(r"\]\(#([\w-]+)\)", page("http.md")):
        assert anchor in {head.lower().replace(" ", "-") for head in heads}


def test_the_page_of_metrics_has_each_metric_once() -> None:
    with exported() as families:
        named = {family.name for family in families["writer"] if family.name.startswith(PREFIX)}
    rows = re.findall(r"^\| `(\w+)` \|", page("metrics.md"), re.MULTILINE)
    assert len(rows) == len(set(rows)) == len(named) > 50


def test_the_table_of_names_has_each_public_name() -> None:
    assert [name for name in tiered_index.__all__ if f"| `{name}` | " not in page("names.md")] == []


def test_a_page_says_when_to_change_each_setting() -> None:
    top = Path(__file__).parents[2]
    pages = [*(top / "docs").glob("*.md"), *(top / "deploy").glob("*.md"), top / "README.md"]
    said = {*re.findall(r"\w+", "".join(page.read_text() for page in pages))}
    assert [each.name for each in structs.fields(IndexConfig) if each.name not in said] == []


def test_each_name_of_the_reference_can_be_imported_by_its_path() -> None:
    """The site documents it by that path."""
    paths = re.findall(r"^\| `([\w.]+)` \|", page("names.md"), re.MULTILINE)
    assert {"column", "connectors.follow.Follower"} <= {*paths}
    for path in paths:
        pkgutil.resolve_name(f"tiered_index.{path}")
