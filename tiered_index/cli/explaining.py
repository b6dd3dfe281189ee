"""What a lookup cost and what it could not read, for people."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_index.cli.output import Printer, counted, human_bytes
from tiered_index.cli.times import format_time
from tiered_index.types import Explain, FileReport

__all__ = ["print_explain", "print_failed"]


def print_failed(out: Printer, failed: Iterable[FileReport]) -> None:
    """Print each file that could not be read, once."""
    for report in {report.file: report for report in failed}.values():
        out.line(f"not read: {report.file} ({report.place}): {report.error}")


def print_explain(out: Printer, explain: Explain, more: str = "") -> None:
    """Print what was read, file by file, and what it cost; `more` stands before the cost."""
    rows = []
    for f in explain.files:
        between = format_time(f.begin_ms), format_time(f.end_ms)
        rows.append((f.file, f.place, f.outcome, *between, f.requests, f.bytes, f"{f.elapsed_ms:.2f}", f.matched))
    columns = ("file", "place", "outcome", "from", "to", "requests", "bytes", "ms", "matched")
    out.table(columns, rows, right="requests bytes ms matched")
    out.line(
        f"{counted(explain.files_read, 'file')} read, {explain.files_skipped} skipped, {more}{counted(explain.requests, 'request')}, "
        f"{human_bytes(explain.bytes)}, {explain.cost_usd * 1e6:.2f} USD a million such look-ups, {explain.elapsed_ms:.1f} ms"
    )
