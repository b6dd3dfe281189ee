"""Rewrites the measured parts of docs/comparison.md, and its plots.

The option `--page` of `python -m tests.benchmarks.peers` calls it with a document of that program.
"""

from __future__ import annotations

from typing import Any

from docs.generators.log_plot import Panel, svg
from docs.generators.measured_pages import ROOT, about, rewrite
from tests.benchmarks.comparing import heading, medians, table
from tests.benchmarks.peers.figures import FIGURES, PLAIN

__all__ = ["PAGE", "PLOTTED", "rewrite_page"]

PAGE = ROOT / "docs" / "comparison.md"
PLOTTED = {
    "ingest CPU": "durable ingest, CPU us per entry",
    "ingest wall": "durable ingest, wall us per entry",
    "settle CPU": "compaction, CPU us per entry",
    "bytes written": "write amplification",
    "batch p99.9": "durable batch beside compaction, p99.9 ms",
    "stored bytes": "stored, bytes per entry",
    "hot lookup CPU": "lookup, just written, CPU us",
    "settled lookup CPU": "lookup, settled, CPU us",
    "settled lookup p99": "lookup, settled, p99 us",
    "settled many CPU": "1,000 keys at once, CPU us per key",
    "recovery": "opened after SIGKILL, s",
    "memory writing": "peak memory while writing, MiB",
}


def rewrite_page(document: dict[str, Any]) -> None:
    """Put a document's tables, set-up and plots into the page."""
    sizes = document["sizes"]
    tables = [f"### {heading(size)}\n\n{table(document, size, FIGURES, plain=PLAIN)}" for size in sizes]
    plots = []
    for per_key in sorted({size["per_key"] for size in sizes}):
        picture = f"comparison-{per_key}.svg"
        grown = {size["entries"]: medians(size) for size in sizes if size["per_key"] == per_key}
        (PAGE.parent / picture).write_text(_plots(document["columns"], grown))
        plots.append(f"![Growth with {per_key} entries per key]({picture})\n")
    rewrite(PAGE, {"machine": _set_up(document), "tables": "\n".join(tables), "plots": "\n".join(plots)})


def _set_up(document: dict[str, Any]) -> str:
    machine = document["machine"]
    lines = [
        f"- {about(machine)}, {machine['memory']} of memory, {machine['filesystem']}",
        f"- a durable commit every {document['commit_entries']:,} entries",
        f"- {document['lookups']:,} lookups of each kind in a round, or as many as end within 5 s",
        *(f"- {column['title']}: {column['version']}" for column in document["columns"].values()),
        *(f"- {name}: not measured, {reason}" for name, reason in document["skipped"].items()),
    ]
    return "\n".join(lines) + "\n"


def _plots(columns: dict[str, Any], by_size: dict[int, dict[str, dict[str, float]]]) -> str:
    panels = []
    for name, title in PLOTTED.items():
        lines: dict[str, list[tuple[float, float]]] = {
            column["title"]: [
                (entries, figures[key][name])
                for entries, figures in sorted(by_size.items())
                if name in figures.get(key, {})
            ]
            for key, column in columns.items()
        }
        panels.append(Panel(title, lines))
    return svg(panels)
