"""The figures of the comparison, in the order of its table. All are better when smaller."""

from __future__ import annotations

FIGURES = {
    "ingest CPU": "durable ingest, CPU us per entry",
    "ingest driver CPU": "... of it the driver's packing",
    "ingest wall": "durable ingest, wall us per entry",
    "settle CPU": "compaction to the settled state, CPU us per entry",
    "bytes written": "write amplification: bytes written per byte of entries",
    "batch p50": "durable batch of 500 beside compaction, p50 ms",
    "batch p99.9": "... p99.9 ms",
    "hot lookup p50": "lookup, just written, p50 us",
    "hot lookup p99": "... p99 us",
    "hot lookup CPU": "... CPU us",
    "hot absent p50": "absent key, just written, p50 us",
    "hot absent p99": "... p99 us",
    "hot absent CPU": "... CPU us",
    "hot many CPU": "1,000 keys at once, just written, CPU us per key",
    "settled lookup p50": "lookup, settled, p50 us",
    "settled lookup p99": "... p99 us",
    "settled lookup CPU": "... CPU us",
    "settled absent p50": "absent key, settled, p50 us",
    "settled absent p99": "... p99 us",
    "settled absent CPU": "... CPU us",
    "settled many CPU": "1,000 keys at once, settled, CPU us per key",
    "reader lookup p50": "lookup by a reader without the local files, settled, p50 us",
    "reader lookup p99": "... p99 us",
    "reader lookup CPU": "... CPU us",
    "reader absent p50": "absent key, that reader, p50 us",
    "reader absent p99": "... p99 us",
    "reader absent CPU": "... CPU us",
    "reader many CPU": "1,000 keys at once, that reader, CPU us per key",
    "driver CPU": "an empty call of the same interface, CPU us",
    "cold lookup p50": "lookup after a restart, no page cached, p50 us",
    "cold lookup p99": "... p99 us",
    "stored bytes": "stored, bytes per entry",
    "recovery": "opened and answering after SIGKILL, s",
    "open": "opened after a clean end, no page cached, s",
    "memory writing": "peak memory while writing, MiB",
    "memory reading": "peak memory while reading, MiB",
}
PLAIN = {name for name in FIGURES if "driver" in name}
"""Figures without a best value."""
