"""Gives MkDocs the pages at their places in the repository, the files that they link, and the reference pages.

`python -m docs.generators.reference build/reference` writes these before the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

TOP = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/decisions/*.md", "deploy/*.md")
REFERENCE = TOP / "build" / "reference"
LISTS = {"Commands": "cli.md", "Settings": "settings.md", "HTTP": "http.md", "Metrics": "metrics.md"}
SPECIFICATION = "tiered_index/format/SPEC.md"
_LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")
_NAME = re.compile(r"^\| `([\w.]+)` \|", re.M)


def on_config(config: Any) -> Any:
    """Add each decision to the navigation."""
    decisions = sorted((TOP / "docs/decisions").glob("0*.md"))
    config.nav[-1]["Decisions"] += [page.relative_to(TOP).as_posix() for page in decisions]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, each file that one links, and the lists that the program made."""
    pages = [page for pattern in PAGES for page in sorted(TOP.glob(pattern))] + [TOP / SPECIFICATION]
    wanted = {page.relative_to(TOP).as_posix() for page in pages}
    for page in pages:
        for link in _LINK.findall(page.read_text()):
            linked = (page.parent / link).resolve()
            if linked.is_file() and linked.suffix != ".md" and linked.is_relative_to(TOP):
                wanted.add(linked.relative_to(TOP).as_posix())
    for path in sorted(wanted):
        files.append(File.generated(config, path, abs_src_path=str(TOP / path)))
    for name in LISTS.values():
        files.append(File.generated(config, f"docs/{name}", content=(REFERENCE / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add links to the lists, and the signature and docstring of each name to the page of the public API."""
    if page.file.src_uri == "docs/reference.md":
        for title, name in LISTS.items():
            markdown = markdown.replace(f"\n## {title}\n", f"\n## {title}\n\n**[The whole list]({name})**\n")
    if page.file.src_uri == "docs/api.md":
        table = (REFERENCE / "names.md").read_text()
        names = [f"::: tiered_index.{name}" for name in _NAME.findall(table) if name != "__version__"]
        return "\n\n".join([markdown, "## Names", table, "## Reference", *names])
    return markdown
