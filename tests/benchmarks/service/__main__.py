"""`python -m tests.benchmarks.service`: lookups per second, latencies and memory of `tiered-index serve`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.machine.figures import facts
from tests.benchmarks.running import write_document
from tests.benchmarks.service.measuring import measure

_OUT = Path(__file__).parents[3] / "build" / "service.json"


def main() -> None:
    """Measure, write the document, print its table. Every answer is checked; a wrong one ends the run with an error.

    Client and service share this machine. The CPU time of the service's process per lookup is the service's own cost.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.service", description=main.__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000, help="entries of the index, four per key")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each measurement")
    parser.add_argument("--soak", type=float, default=30.0, help="seconds of mixed load while memory is watched")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="folder for the indexes")
    parser.add_argument("--out", type=Path, default=_OUT, help="the document")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        rows = measure(Path(folder), given.entries, given.seconds, given.soak)
    document = {"machine": facts(given.dir), "entries": given.entries, "seconds": given.seconds, "rows": rows}
    write_document(given.out, document)
    print("\n".join(table(rows)))
    if wrong := [row["name"] for row in rows if row.get("wrong")]:
        sys.exit(f"wrong answers: {', '.join(wrong)}")


_COLUMNS = (
    ("answers_per_s", "answers/s", "{:,.0f}"),
    ("p50_ms", "p50 ms", "{:.2f}"),
    ("p99_ms", "p99 ms", "{:.1f}"),
    ("cpu_us", "CPU us", "{:,.0f}"),
    ("keys_per_s", "keys/s", "{:,.0f}"),
    ("written_per_s", "written/s", "{:,.0f}"),
    ("refused", "refused", "{}"),
    ("wrong", "wrong", "{}"),
    ("memory_mib", "MiB", "{}"),
    ("threads", "threads", "{}"),
    ("descriptors", "descriptors", "{}"),
)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the figures as lines of a Markdown table."""
    lines = ["|  | " + " | ".join(title for _, title, _ in _COLUMNS) + " |", "| --- |" + " ---: |" * len(_COLUMNS)]
    for row in rows:
        cells = [form.format(row[name]) if name in row else "" for name, _, form in _COLUMNS]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
