"""The figures of the comparison, in the order of its table, and the table. All are better when smaller."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

__all__ = ["FIGURES", "heading", "medians", "sizes_of", "table"]

FIGURES = {
    "ingest CPU": "durable ingest, CPU us an entry",
    "ingest driver CPU": "... of it the driver's packing",
    "ingest wall": "durable ingest, wall us an entry",
    "settle CPU": "compaction to the settled state, CPU us an entry",
    "bytes written": "bytes written a byte of entry, whole life",
    "batch p50": "durable batch of 500 beside compaction, p50 ms",
    "batch p99.9": "... p99.9 ms",
    "hot lookup p50": "lookup, just written, p50 us",
    "hot lookup p99": "... p99 us",
    "hot lookup CPU": "... CPU us",
    "hot absent p50": "absent key, just written, p50 us",
    "hot absent CPU": "... CPU us",
    "settled lookup p50": "lookup, settled, p50 us",
    "settled lookup p99": "... p99 us",
    "settled lookup CPU": "... CPU us",
    "settled absent p50": "absent key, settled, p50 us",
    "settled absent CPU": "... CPU us",
    "driver CPU": "an empty call of the same interface, CPU us",
    "many CPU": "many keys at once, settled, CPU us a key",
    "cold lookup p50": "lookup after a restart, no page cached, p50 us",
    "cold lookup p99": "... p99 us",
    "stored bytes": "stored, bytes an entry",
    "recovery": "opened and answering after SIGKILL, s",
    "open": "opened after a clean end, no page cached, s",
    "memory writing": "peak memory while writing, MiB",
    "memory reading": "peak memory while reading, MiB",
}


def medians(document: dict[str, Any], entries: int, per_key: int) -> dict[str, dict[str, float]]:
    """Return peer -> figure -> median of the rounds, for one size."""
    return {
        result["peer"]: {name: statistics.median(values) for name, values in result["figures"].items()}
        for result in document["results"]
        if (result["entries"], result["per_key"]) == (entries, per_key)
    }


def sizes_of(document: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the sizes (entries, entries a key) of a document."""
    return list(dict.fromkeys((each["entries"], each["per_key"]) for each in document["results"]))


def heading(document: dict[str, Any], entries: int, per_key: int) -> str:
    """Return what stands above one size's table."""
    rounds = {
        len(values)
        for each in document["results"]
        if (each["entries"], each["per_key"]) == (entries, per_key)
        for values in each["figures"].values()
    }
    count = max(rounds, default=0)
    return f"{entries:,} entries, {per_key} a key, {count} round{'s' if count != 1 else ''}"


def table(document: dict[str, Any], entries: int, per_key: int) -> str:
    """Return one size's table in Markdown; the best of each row is bold."""
    found = medians(document, entries, per_key)
    lines = [["", *(document["peers"][peer]["name"] for peer in found)], ["---"] * (1 + len(found))]
    for name, words in FIGURES.items():
        values = [figures.get(name) for figures in found.values()]
        best = min((value for value in values if value is not None), default=None)
        lines.append([words, *_cells(values, best if "driver" not in name else None)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(values: Iterable[float | None], best: float | None) -> Iterable[str]:
    for value in values:
        if value is None:
            yield ""
            continue
        text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"
        yield f"**{text}**" if value == best else text
