"""Rewrites the measured tables of docs/cold-path.md from documents of `python -m tests.benchmarks cold --out`.

python -m docs.generators.cold_page INJECTED.json S3.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from docs.generators.measured_pages import about as about_machine
from docs.generators.measured_pages import markdown, rewrite, table_rows

PAGE = Path(__file__).parents[2] / "docs" / "cold-path.md"
OURS, FILTERED, PLAIN = "ours", "ours, filters cached", "plain GETs"
SERIAL, PARALLEL = "RocketMQ, file by file", "RocketMQ, in parallel"


def lookups(document: dict[str, Any]) -> str:
    """Return the table of lookups, with RocketMQ's way of reading and the ratio to plain GETs."""
    cells = {tuple(row[:3]): row for start in ("lookups", "other ways") for row in table_rows(document, start)}
    columns = (
        "files",
        "key in",
        "GETs",
        "KiB",
        "USD per million",
        "p50 ms",
        "p99 ms",
        "times plain GETs",
        "GETs, filters cached",
        "p50 ms",
        "p99 ms",
        "RocketMQ: GETs",
        "USD per million",
        "p50 ms, file by file",
        "p50 ms, in parallel",
    )
    rows = []
    for files, kind in dict.fromkeys((files, kind) for files, kind, who in cells if who == OURS):
        ours, filtered = cells[files, kind, OURS], cells[files, kind, FILTERED]
        theirs, serial = (cells.get((files, kind, way)) for way in (PARALLEL, SERIAL))
        rows.append(
            (
                files,
                kind,
                *ours[4:9],
                f"{ours[9]:.2f}",
                filtered[4],
                *filtered[7:9],
                *((theirs[4], theirs[6], serial[7] if serial else None, theirs[7]) if theirs else (None,) * 4),
            )
        )
    return markdown(columns, rows)


def opening(document: dict[str, Any]) -> str:
    """Return the table of readers without caches."""
    measured = table_rows(document, "a reader")
    cells = {(files, kind): (requests, kib, usd, p50) for files, kind, _, _, requests, kib, usd, p50, *_ in measured}
    columns = (
        "files in range",
        "requests to open",
        "KiB",
        "ms",
        "requests of the first lookup (key in all)",
        "KiB",
        "ms",
    )
    rows = []
    for files in dict.fromkeys(files for files, _ in cells):
        opened, first = cells[files, "(opening only)"], cells[files, "all"]
        rows.append((files, opened[0], opened[1], opened[3], first[0], first[1], first[3]))
    return markdown(columns, rows)


def first(document: dict[str, Any]) -> str:
    """Return the table of new readers of unmerged files."""
    (table,) = [table for table in document["tables"] if table["title"].startswith("a new reader")]
    return markdown(table["columns"], table["rows"])


def curve(document: dict[str, Any]) -> str:
    """Return the table of `query_many`."""
    columns = ["keys"]
    for filters in ("no filters", "filters"):
        for gap in ("256 KiB", "0"):
            columns += [f"{filters}, gap {gap}: requests", "MiB"]
    return markdown(columns, table_rows(document, "query_many"))


def fingerprint(document: dict[str, Any]) -> str:
    """Return the table of false matches."""
    (title,) = [table["title"] for table in document["tables"] if table["title"].startswith("false matches")]
    columns = ("entries of other keys", "found", "per lookup and file", "expected", "per lookup in 1,000 files")
    return f"{title[0].upper()}{title[1:]}:\n\n{markdown(columns, table_rows(document, 'false matches'))}"


def main(injected: dict[str, Any], real: dict[str, Any]) -> None:
    """Rewrite the page."""
    about = {name: about_machine(document["machine"]) for name, document in (("injected", injected), ("real", real))}
    parts = {
        "first": first(injected),
        "curve": curve(injected),
        "fingerprint": fingerprint(injected),
        "injected": f"{about['injected']}.\n\n{lookups(injected)}\nA reader without caches, same "
        f"storage:\n\n{opening(injected)}",
        "real": f"{about['real']}.\n\n{lookups(real)}\nA reader without caches, same storage:\n\n{opening(real)}",
    }
    rewrite(PAGE, parts)


if __name__ == "__main__":
    main(*(json.loads(Path(name).read_text()) for name in sys.argv[1:3]))
