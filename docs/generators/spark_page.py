"""Puts documents of `python -m tests.benchmarks spark --out` into docs/spark-cluster.md and docs/lifetime.md.

    python -m docs.generators.spark_page DOCUMENT.json ...

Each document is of one run, of suite `spark` or `spark-lookup`, without `--scale` or with it. Figures that are in no
document stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from docs.generators.measured_pages import ROOT, about, markdown, rewrite

_PAGE = ROOT / "docs" / "spark-cluster.md"


def _figures(document: dict[str, Any]) -> dict[str, float]:
    return {figure["name"]: figure["median"] for figure in document["figures"]}


def spent(document: dict[str, Any]) -> str:
    """Return the CPU seconds of every job, by its master, and of the same work in one process."""
    parts = []
    for table in document["tables"]:
        if table["title"].startswith("CPU seconds"):
            parts.append(f"{table['title']}:\n\n{markdown(table['columns'], table['rows'])}")
    alone = [(way, value) for way, value in _figures(document).items() if way.endswith(", one process")]
    parts.append(markdown(("the same without Spark", "CPU s"), alone))
    return "\n".join(parts)


def year(document: dict[str, Any]) -> str:
    """Return GETs per lookup of hourly files, before and after merges."""
    (table,) = [table for table in document["tables"] if table["title"].startswith("GETs per lookup")]
    return f"{table['title']}:\n\n{markdown(table['columns'], table['rows'])}"


def memory(document: dict[str, Any]) -> str:
    """Return the peaks of memory by the number of entries."""
    (table,) = [table for table in document["tables"] if table["title"].startswith("peak memory")]
    grown = ", ".join(f"{ratio:.2f} ({name.partition(':')[0]})" for name, ratio in _figures(document).items())
    words = "From the fewest to the most entries, memory of the largest Python worker grows by a factor of"
    head = f"{about(document['machine'])}; {table['title']}. {words} {grown}."
    return f"{head}\n\n{markdown(table['columns'], table['rows'])}"


def bulk(document: dict[str, Any]) -> str:
    """Return the bytes read and the memory of bulk lookups, by the number of keys and of entries."""
    tables = document["tables"]
    shown = "\n".join(f"{table['title']}:\n\n{markdown(table['columns'], table['rows'])}" for table in tables)
    return f"{about(document['machine'])}; {shown}"


def write(document: dict[str, Any]) -> None:
    """Rewrite the pages that show the document's figures."""
    if document["tables"][0]["suite"] == "spark-lookup":
        rewrite(_PAGE, {"spark-lookup scale": bulk(document)})
    elif document["tables"][0]["title"].startswith("peak memory"):
        rewrite(_PAGE, {"spark memory": memory(document)})
    else:
        _write_bench(document)


def _write_bench(bench: dict[str, Any]) -> None:
    head = f"{about(bench['machine'])}. "
    if not any(table["title"].startswith("GETs per lookup") for table in bench["tables"]):
        rewrite(_PAGE, {"spark at scale": head + spent(bench)})
        return
    rewrite(_PAGE, {"spark": head + spent(bench)})
    rewrite(ROOT / "docs" / "lifetime.md", {"year": year(bench)})


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(json.loads(Path(name).read_text()))
