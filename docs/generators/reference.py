"""Writes the reference pages of the site: commands, settings, HTTP, metrics, and the table of public names.

`python -m docs.generators.reference FOLDER` writes them into a folder. `make docs` does so before it builds the site.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

import tiered_index
from docs.generators import http_page, metrics_page, settings_page
from tiered_index.cli.main import LateCommand, app
from tiered_index.connectors import follow, source

__all__ = ["PAGES", "all_commands"]


def all_commands(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words of each command, and the command, without groups."""
    group = group or typer.main.get_command(app)
    group = group.loaded() if isinstance(group, LateCommand) else group
    below = getattr(group, "commands", {})
    if not below:
        yield words, group
    for name, command in below.items():
        yield from all_commands(command, (*words, name))


def commands() -> str:
    """Return a section for each command: the output of its `--help`."""
    parts = ["# Commands\n"]
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    for words, _ in [((), None), *all_commands()]:
        shown = (
            CliRunner(env=plain).invoke(app, [*words, "--help"], prog_name="tiered-index", terminal_width=100).output
        )
        parts.append(f"## {' '.join(words) or 'tiered-index'}\n\n```text\n{shown.strip()}\n```\n")
    return "\n".join(parts)


def names() -> str:
    """Return a row for each public name: the name, and the first sentence of its docstring."""
    rows = ["| name | meaning |", "|---|---|"]
    public = {name: getattr(tiered_index, name) for name in tiered_index.__all__}
    for module in (follow, source):
        path = module.__name__.removeprefix("tiered_index.")
        public |= {f"{path}.{name}": getattr(module, name) for name in module.__all__}
    for name, value in sorted(public.items(), key=lambda item: item[0].lower()):
        text = inspect.getdoc(value) if not isinstance(value, str) else "the version of the package"
        sentence = re.split(r"\.\s|\n\n", text or "")[0].replace("\n", " ").rstrip(".")
        rows.append(f"| `{name}` | {sentence} |")
    return "\n".join(rows) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": commands,
    "http.md": http_page.page,
    "metrics.md": metrics_page.page,
    "names.md": names,
    "settings.md": settings_page.page,
}
"""The functions that return the pages, by the names of their files."""


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in PAGES.items():
        (folder / file).write_text(text())
