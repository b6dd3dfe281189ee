"""The figures of the comparison in object storage, in the order of its table, and the table."""

from __future__ import annotations

import statistics
from typing import Any

from tests.benchmarks.peers.figures import best_table

__all__ = ["FIGURES", "GREATEST", "heading", "medians", "table"]

FIGURES = {
    "process ms": "a new process, one lookup, ms",
    "process CPU": "... CPU ms",
    "open requests": "... requests",
    "open KiB": "... KiB",
    "key ms": "a key of weeks, p50 ms",
    "key requests": "... requests",
    "key USD": "... USD a million",
    "key CPU": "... CPU ms",
    "absent ms": "absent, 30 days, p50 ms",
    "absent requests": "... requests",
    "absent CPU": "... CPU ms",
    "hot ms": "newest 64 of a hot key, p50 ms",
    "hot requests": "... requests",
    "hot CPU": "... CPU ms",
    "many ms": "1,000 keys, ms",
    "many requests": "... requests",
    "many MB": "... MB",
    "many CPU": "... CPU ms",
    "at once": "lookups a second, 32 at once",
    "at once CPU": "... CPU ms a lookup",
    "memory": "peak memory, MiB",
    "stored": "stored, bytes an entry",
    "build": "build, CPU s",
    "fresh": "written to readable elsewhere, s",
    "fresh USD": "... cost of one entry and 100 lookups a second, USD a day",
}
GREATEST = {"at once"}
"""Figures that are better when greater."""


def medians(size: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return column -> figure -> median of the rounds, for one size of a document."""
    return {
        name: {figure: statistics.median(values) for figure, values in figures.items()}
        for name, figures in size["columns"].items()
    }


def heading(size: dict[str, Any]) -> str:
    """Return what stands above one size's table."""
    return f"{size['entries']:,} entries"


def table(document: dict[str, Any], size: dict[str, Any]) -> str:
    """Return one size's table in Markdown; the best of each row is bold."""
    found = medians(size)
    return best_table([document["columns"][name]["title"] for name in found], FIGURES, list(found.values()), GREATEST)
