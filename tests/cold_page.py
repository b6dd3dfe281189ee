"""Rewrites the measured tables of docs/cold-path.md out of documents that `tiered-index bench cold --out` wrote.

    python -m tests.cold_page INJECTED.json S3.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "cold-path.md"
OURS, FILTERED, PLAIN = "ours", "ours, filters at hand", "plain GETs"
SERIAL, PARALLEL = "RocketMQ, file by file", "RocketMQ, side by side"


def _tables(document: dict[str, Any], start: str) -> list[list[Any]]:
    (table,) = [table for table in document["tables"] if table["title"].startswith(start)]
    return list(table["rows"])


def _number(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, int | float):
        return str(value)
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2g}"


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_number(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def lookups(document: dict[str, Any]) -> str:
    """Return the table of lookups beside plain GETs and RocketMQ's way."""
    cells = {tuple(row[:3]): row for start in ("lookups", "other ways") for row in _tables(document, start)}
    columns = (
        "files", "key in", "GETs", "KiB", "USD a million", "p50 ms", "p99 ms", "times plain GETs",
        "GETs, filters at hand", "p50 ms", "p99 ms", "RocketMQ: GETs", "USD a million", "p50 ms, file by file", "p50 ms, side by side",
    )  # fmt: skip
    rows = []
    for files, kind in dict.fromkeys((files, kind) for files, kind, who in cells if who == OURS):
        ours, filtered = cells[files, kind, OURS], cells[files, kind, FILTERED]
        theirs, serial = (cells.get((files, kind, way)) for way in (PARALLEL, SERIAL))
        rows.append(
            (
                files, kind, *ours[4:9], f"{ours[9]:.2f}", filtered[4], *filtered[7:9],
                *((theirs[4], theirs[6], serial[7] if serial else None, theirs[7]) if theirs else (None,) * 4),
            )
        )  # fmt: skip
    return _markdown(columns, rows)


def opening(document: dict[str, Any]) -> str:
    """Return the table of readers that know nothing."""
    cells = {(files, kind): (requests, kib, usd, p50) for files, kind, _, _, requests, kib, usd, p50, *_ in _tables(document, "a reader")}
    columns = ("files in range", "requests to open", "KiB", "ms", "requests of the first lookup (key in all)", "KiB", "ms")
    rows = []
    for files in dict.fromkeys(files for files, _ in cells):
        opened, first = cells[files, "(opening only)"], cells[files, "all"]
        rows.append((files, opened[0], opened[1], opened[3], first[0], first[1], first[3]))
    return _markdown(columns, rows)


def curve(document: dict[str, Any]) -> str:
    """Return the table of `query_many`."""
    columns = ["keys"]
    for filters in ("no filters", "filters"):
        for gap in ("256 KiB", "0"):
            columns += [f"{filters}, gap {gap}: requests", "MiB"]
    return _markdown(columns, _tables(document, "query_many"))


def fingerprint(document: dict[str, Any]) -> str:
    """Return the table of false matches."""
    (title,) = [table["title"] for table in document["tables"] if table["title"].startswith("false matches")]
    columns = ("entries of other keys", "met", "a lookup and file", "expected", "a lookup in 1,000 files")
    return f"{title[0].upper()}{title[1:]}:\n\n{_markdown(columns, _tables(document, 'false matches'))}"


def _about(machine: dict[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, load average {machine['load_average']} at the start"


def main(injected: dict[str, Any], real: dict[str, Any]) -> None:
    """Rewrite the page."""
    about = {name: _about(document["machine"]) for name, document in (("injected", injected), ("real", real))}
    parts = {
        "curve": curve(injected),
        "fingerprint": fingerprint(injected),
        "injected": f"{about['injected']}.\n\n{lookups(injected)}\nA reader that knows nothing, same storage:\n\n{opening(injected)}",
        "real": f"{about['real']}.\n\n{lookups(real)}\nA reader that knows nothing, same storage:\n\n{opening(real)}",
    }
    page = PAGE.read_text()
    for name, text in parts.items():
        head, rest = page.split(f"<!-- measured: {name} -->\n")
        page = f"{head}<!-- measured: {name} -->\n{text}{rest[rest.index('<!-- end -->') :]}"
    PAGE.write_text(page)


if __name__ == "__main__":
    main(*(json.loads(Path(name).read_text()) for name in sys.argv[1:3]))
