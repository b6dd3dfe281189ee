"""Puts documents of `python -m tests.benchmarks billion --out` into docs/performance.md and deploy/SIZING.md.

    python -m docs.generators.billion_page DOCUMENT.json ...

Several documents are read as one: each has some of the sizes. SIZING's arithmetic is done again from the largest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from docs.generators.log_plot import Panel, svg
from docs.generators.measured_pages import ROOT, about, markdown, rewrite
from docs.generators.sizing_page import PAGE as SIZING
from docs.generators.sizing_page import main as compute_sizing
from tiered_index import IndexConfig

PAGE = ROOT / "docs" / "performance.md"
_PICTURE = "billion.svg"
_OURS = (
    *("build", "audit, equal", "audit, a day missing", "audit, 0.1 % different"),
    *("million keys, daily tables", "merge to 30 days", "million keys", "verify --deep", "du", "copy", "erase a key"),
    *("expire a month", "put_batch and life cycle, one process", "merge, one process"),
    "million keys, one process's index",
)
_PEERS = ("sorted Parquet (DuckDB)", "keys in it (DuckDB)", "sorted buckets (Spark)", "million keys in them (Spark)")
_CACHE_BYTES = IndexConfig().directory_cache_bytes
_SINGLE = ("single keys, daily tables", "single keys")
_PANELS = {
    "Spark, CPU s": ("build", "audit, equal", "merge to 30 days"),
    "one process, CPU s": ("put_batch and life cycle, one process", "merge, one process"),
    "million keys, CPU s": ("million keys, daily tables", "million keys"),
}
Steps = dict[str, dict[str, Any]]
Sizes = dict[int, Steps]


def cpu_s(step: dict[str, Any]) -> float:
    """Return the CPU seconds of a step."""
    return float(step["java_cpu_s"] + step["python_cpu_s"])


def steps_table(sizes: Sizes) -> str:
    """Return CPU seconds by step and size, and all figures of the largest size."""
    largest = max(sizes)
    columns = ["step", *(f"{_size(size)}: CPU s" for size in sizes), "of it Java", "wall s", "M entries a CPU s"]
    columns += ["peak MiB: Java", "Spark's worker", "other Python", "GB read", "GB written", "temporary GB", "requests"]
    rows: list[list[Any]] = []
    for name in _named(*sizes.values()):
        row: list[Any] = [name, *(cpu_s(steps[name]) if name in steps else None for steps in sizes.values())]
        if (step := sizes[largest].get(name)) is not None:
            row += [step["java_cpu_s"] or None, step["wall_s"], largest / cpu_s(step) / 1e6]
            row += [step.get(f"{kind}_peak_mib") for kind in ("java", "worker", "python")]
            row += [step[f"{kind}_bytes"] / 1e9 for kind in ("read", "written", "temporary")]
            row.append(step.get("requests"))
        rows.append(row + [None] * (len(columns) - len(row)))
    return markdown(columns, rows)


def _named(*sizes: Steps) -> list[str]:
    """Return the names of the steps that one of the sizes has, in the order of the page."""
    return [name for name in (*_OURS, *_PEERS) if any(name in steps for steps in sizes)]


def lookups_table(sizes: Sizes) -> str:
    """Return the figures of single lookups by tables, size and caches."""
    columns = ("tables", "messages", "caches", "first lookup of a new reader, ms", "first 1,000 keys, ms", "requests")
    columns += ("the same again, ms", "requests", "p99 ms", "absent keys, ms", "requests")
    rows = []
    for name, tables in zip(_SINGLE, ("365 of a day", "13 of 30 days"), strict=True):
        for size, steps in sizes.items():
            for caches, prefix in (("default", ""), ("3 bytes an entry", "large ")):
                step = steps.get(name, {})
                if prefix + "first" in step and (not prefix or size * 3 > _CACHE_BYTES):
                    first, warm, absent = (step[prefix + kind] for kind in ("first", "warm", "absent"))
                    fresh = None if prefix else step["fresh"]["p50_ms"]
                    figures = (first["p50_ms"], first["requests"], warm["p50_ms"], warm["requests"], warm["p99_ms"])
                    row = (tables, _size(size), caches, fresh, *figures, absent["p50_ms"], absent["requests"])
                    rows.append(row)
    return markdown(columns, rows)


def inputs(machine: dict[str, Any], sizes: Sizes) -> str:
    """Return SIZING's measured inputs, of the largest size."""
    entries, steps = max(sizes), sizes[max(sizes)]
    command = "`make bench-billion`"
    rows = [
        (name, f"{entries / cpu_s(steps[step]):,.0f}", "entries a CPU second", f"{command}, {step}")
        for name, step in (("build", "build"), ("merge", "merge to 30 days"))
    ]
    stored = steps["delete the merged tables"]["stored_bytes"] / entries
    rows.append(("bytes an entry", f"{stored:.2f}", "bytes", f"{command}, all objects after the merge"))
    return f"{about(machine)}.\n\n{markdown(('input', 'value', 'unit', 'from'), rows)}"


def _size(entries: int) -> str:
    return f"{entries // 10**6:,} M"


def _plot(sizes: Sizes) -> str:
    panels = []
    for title, names in _PANELS.items():
        lines = {name: [(size, cpu_s(steps[name])) for size, steps in sizes.items() if name in steps] for name in names}
        panels.append(Panel(title, lines))
    return svg(panels)


def part(sizes: Sizes) -> str:
    """Return the tables and the plot of all sizes."""
    plot = f"![CPU seconds by the number of messages, on logarithmic axes]({_PICTURE})\n"
    return "\n".join([steps_table(sizes), lookups_table(sizes), plot])


def main(names: list[str]) -> None:
    """Rewrite the page and its plot."""
    sizes: Sizes = {}
    machines: dict[int, dict[str, Any]] = {}
    for name in names:
        document = json.loads(Path(name).read_text())
        sizes |= {int(size): steps for size, steps in document["sizes"].items()}
        machines |= dict.fromkeys(map(int, document["sizes"]), document["machine"])
    sizes = dict(sorted(sizes.items()))
    (PAGE.parent / _PICTURE).write_text(_plot(sizes))
    rewrite(PAGE, {"billion": part(sizes)})
    rewrite(SIZING, {"inputs": inputs(machines[max(machines)], sizes)})
    compute_sizing()


if __name__ == "__main__":
    main(sys.argv[1:])
