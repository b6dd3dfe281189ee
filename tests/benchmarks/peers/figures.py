"""The figures of the comparison, in the order of its table, and the table. All are better when smaller."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["FIGURES", "best_table", "heading", "medians", "sizes_of", "table"]

FIGURES = {
    "ingest CPU": "durable ingest, CPU us an entry",
    "ingest driver CPU": "... of it the driver's packing",
    "ingest wall": "durable ingest, wall us an entry",
    "settle CPU": "compaction to the settled state, CPU us an entry",
    "bytes written": "write amplification: bytes written per byte of entries",
    "batch p50": "durable batch of 500 beside compaction, p50 ms",
    "batch p99.9": "... p99.9 ms",
    "hot lookup p50": "lookup, just written, p50 us",
    "hot lookup p99": "... p99 us",
    "hot lookup CPU": "... CPU us",
    "hot absent p50": "absent key, just written, p50 us",
    "hot absent p99": "... p99 us",
    "hot absent CPU": "... CPU us",
    "hot many CPU": "1,000 keys at once, just written, CPU us a key",
    "settled lookup p50": "lookup, settled, p50 us",
    "settled lookup p99": "... p99 us",
    "settled lookup CPU": "... CPU us",
    "settled absent p50": "absent key, settled, p50 us",
    "settled absent p99": "... p99 us",
    "settled absent CPU": "... CPU us",
    "settled many CPU": "1,000 keys at once, settled, CPU us a key",
    "reader lookup p50": "lookup by a reader without the local files, settled, p50 us",
    "reader lookup p99": "... p99 us",
    "reader lookup CPU": "... CPU us",
    "reader absent p50": "absent key, that reader, p50 us",
    "reader absent p99": "... p99 us",
    "reader absent CPU": "... CPU us",
    "reader many CPU": "1,000 keys at once, that reader, CPU us a key",
    "driver CPU": "an empty call of the same interface, CPU us",
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
    titles = [document["peers"][peer]["name"] for peer in found]
    return best_table(titles, FIGURES, list(found.values()), plain={name for name in FIGURES if "driver" in name})


def best_table(
    titles: Sequence[str],
    figures: Mapping[str, str],
    columns: Sequence[Mapping[str, float]],
    greatest: Collection[str] = (),
    plain: Collection[str] = (),
) -> str:
    """Return a table in Markdown: a row for each of `figures`, a column for each title. The best value of a row is
    bold: the smallest, or the greatest of those in `greatest`. Rows in `plain` have no best value.
    """
    lines = [["", *titles], ["---"] * (1 + len(titles))]
    for name, words in figures.items():
        values = [column.get(name) for column in columns]
        known = [value for value in values if value is not None]
        best = None if name in plain or not known else max(known) if name in greatest else min(known)
        lines.append([words, *_cells(values, best)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(values: Iterable[float | None], best: float | None) -> Iterable[str]:
    for value in values:
        if value is None:
            yield ""
            continue
        text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"
        yield f"**{text}**" if value == best else text
