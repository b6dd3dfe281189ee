"""Tables of documents that compare stores.

A document has `columns`: titles and versions, by store. It also has `sizes`: measurements of each size. Their own
`columns` have the values of the rounds, by store and figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Any

Document = dict[str, Any]


def medians(size: Document) -> dict[str, dict[str, float]]:
    """Return store -> figure -> median of the rounds, for one size of a document."""
    return {
        name: {figure: statistics.median(values) for figure, values in figures.items()}
        for name, figures in size["columns"].items()
    }


def heading(size: Document) -> str:
    """Return the heading of one size's table."""
    if "per_key" not in size:
        return f"{size['entries']:,} entries"
    count = max((len(values) for figures in size["columns"].values() for values in figures.values()), default=0)
    return f"{size['entries']:,} entries, {size['per_key']} per key, {count} round{'s' if count != 1 else ''}"


def table(
    document: Document,
    size: Document,
    figures: Mapping[str, str],
    greatest: Collection[str] = (),
    plain: Collection[str] = (),
) -> str:
    """Return one size's table in Markdown: a row for each of `figures`, a column for each store.

    The best value of a row is bold: the smallest, or the greatest of those in `greatest`. Rows in `plain` have no best
    value.
    """
    columns = medians(size)
    titles = [document["columns"][name]["title"] for name in columns]
    lines = [["", *titles], ["---"] * (1 + len(titles))]
    for name, words in figures.items():
        values = [column.get(name) for column in columns.values()]
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
