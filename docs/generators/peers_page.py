"""Rewrites the measured parts of docs/comparison.md, and its plots, out of a document of
`python -m tests.benchmarks.peers`; called by its `--page`.
"""

from __future__ import annotations

from typing import Any

from docs.generators.log_plot import Panel, svg
from docs.generators.measured_pages import ROOT, about, rewrite
from tests.benchmarks.peers.figures import heading, medians, sizes_of, table

__all__ = ["PAGE", "PLOTTED", "rewrite_page"]

PAGE = ROOT / "docs" / "comparison.md"
PLOTTED = {
    "ingest CPU": "durable ingest, CPU us an entry",
    "ingest wall": "durable ingest, wall us an entry",
    "settle CPU": "compaction, CPU us an entry",
    "bytes written": "write amplification",
    "batch p99.9": "durable batch beside compaction, p99.9 ms",
    "stored bytes": "stored, bytes an entry",
    "hot lookup CPU": "lookup, just written, CPU us",
    "settled lookup CPU": "lookup, settled, CPU us",
    "settled lookup p99": "lookup, settled, p99 us",
    "settled many CPU": "1,000 keys at once, CPU us a key",
    "recovery": "opened after SIGKILL, s",
    "memory writing": "peak memory while writing, MiB",
}


def rewrite_page(document: dict[str, Any]) -> None:
    """Put a document's tables, set-up and plots into the page."""
    sizes = sizes_of(document)
    tables = [f"### {heading(document, *size)}\n\n{table(document, *size)}" for size in sizes]
    plots = []
    for per_key in sorted({each for _, each in sizes}):
        picture = f"comparison-{per_key}.svg"
        grown = sorted(entries for entries, each in sizes if each == per_key)
        (PAGE.parent / picture).write_text(_plots(document, grown, per_key))
        plots.append(f"![Growth with {per_key} entries a key]({picture})\n")
    rewrite(PAGE, {"machine": _set_up(document), "tables": "\n".join(tables), "plots": "\n".join(plots)})


def _set_up(document: dict[str, Any]) -> str:
    machine = document["machine"]
    lines = [
        f"- {about(machine)}, {machine['memory']} of memory, {machine['filesystem']}",
        f"- a durable commit every {document['commit_entries']:,} entries",
        f"- {document['lookups']:,} lookups of each kind in a round, or as many as end within 5 s",
        *(f"- {peer['name']}: {peer['version']}" for peer in document["peers"].values()),
        *(f"- {name}: not measured, {reason}" for name, reason in document["skipped"].items()),
    ]
    return "\n".join(lines) + "\n"


def _plots(document: dict[str, Any], sizes: list[int], per_key: int) -> str:
    by_size = {entries: medians(document, entries, per_key) for entries in sizes}
    panels = []
    for name, title in PLOTTED.items():
        lines: dict[str, list[tuple[float, float]]] = {
            peer["name"]: [
                (entries, found[key][name]) for entries, found in by_size.items() if name in found.get(key, {})
            ]
            for key, peer in document["peers"].items()
        }
        panels.append(Panel(title, lines))
    return svg(panels)
