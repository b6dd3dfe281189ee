"""Rewrites the measured parts of docs/comparison.md on object storage.

The option `--page` of `python -m tests.benchmarks cold-peers` calls it with a document of that program.
"""

from __future__ import annotations

from typing import Any

from docs.generators.measured_pages import ROOT, about, rewrite
from tests.benchmarks.cold_peers.figures import FIGURES, GREATEST
from tests.benchmarks.comparing import heading, table

__all__ = ["rewrite_page"]

_PAGE = ROOT / "docs" / "comparison.md"


def rewrite_page(document: dict[str, Any]) -> None:
    """Put a document's tables and set-up into the page."""
    amounts = document["amounts"]
    lines = [
        f"- {about(document['machine'])}",
        f"- medians of {amounts['rounds']} interleaved rounds of {amounts['processes']} new processes, "
        f"{amounts['lookups']} keys, {amounts['lookups']} absent keys and {amounts['hot']} hot keys; "
        f"{amounts['delay_ms']:.0f} ms added to each request",
        *(f"- {column['title']}: {column['version']}" for column in document["columns"].values()),
        *(f"- {title}: not measured, {reason}" for title, reason in document["skipped"].items()),
    ]
    tables = [
        f"### {heading(size)} in object storage\n\n{table(document, size, FIGURES, GREATEST)}"
        for size in document["sizes"]
    ]
    rewrite(_PAGE, {"cold machine": "\n".join(lines) + "\n", "cold tables": "\n".join(tables)})
