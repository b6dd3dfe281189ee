"""The figures of the comparison in object storage, in the order of its table."""

from __future__ import annotations

FIGURES = {
    "process ms": "a new process, one lookup, ms",
    "process CPU": "... CPU ms",
    "open requests": "... requests",
    "open KiB": "... KiB",
    "key ms": "a key of weeks, p50 ms",
    "key requests": "... requests",
    "key USD": "... USD per million",
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
    "at once": "lookups per second, 32 at once",
    "at once CPU": "... CPU ms per lookup",
    "memory": "peak memory, MiB",
    "stored": "stored, bytes per entry",
    "build": "build, CPU s",
    "fresh": "written to readable elsewhere, s",
    "fresh USD": "... cost of one entry and 100 lookups per second, USD per day",
}
GREATEST = {"at once"}
"""Figures that are better when greater."""
