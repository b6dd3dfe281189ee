"""`make bench SUITE=billion`: a year of messages in ever larger indexes. `SUITE=spark`: also Spark's own ways."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.billion.run import SPACE_BYTES_PER_ENTRY, Run
from tests.benchmarks.report import TOP, finish, note, numbers, options
from tests.support.processes import own_environment

_COLUMNS = (
    *("step", "wall s", "CPU s", "of it Java", "M entries a CPU s", "peak MiB: Java", "Spark's workers", "Python"),
    *("GB read", "GB written", "requests", "temporary GB"),
)


def main(suite: str, arguments: list[str]) -> None:
    """Build, audit, look up, merge, verify, copy, erase and expire a year of messages, by Spark and by one process.

    Each step is a program of its own. The table has its time, CPU time, peak memory, bytes and requests. DuckDB reads
    the source and checks the answers to all keys. Sizes run one after the other. Each needs 70 bytes of disk a message.
    An interrupted run continues with its first unfinished step.
    """
    parser = options(suite, main.__doc__)
    parser.set_defaults(root_dir=TOP / "build" / suite)
    sizes = [20_000_000] if suite == "spark" else [10_000_000, 100_000_000, 1_000_000_000]
    parser.add_argument("--entries", type=numbers, default=sizes, help="numbers of messages, by commas")
    parser.add_argument("--master", default="local[2]", help="where Spark runs")
    flags = parser.parse_args(arguments)
    check_space(flags.root_dir, max(flags.entries))
    document: dict[str, Any] = {"sizes": {}, "tables": {}}
    for size in sorted(flags.entries):
        folder = flags.root_dir / f"tiered-index-year-{size}"
        # the steps of a size that an interrupted run has finished
        finished = folder.with_suffix(".json")
        if not finished.exists():
            with own_environment():
                run = Run(folder, size, flags.master, lambda step, size=size: note(f"{size:,} messages: {step}"))  # type: ignore[misc]
                finished.write_text(json.dumps(run.run(with_sparks_ways=suite == "spark")))
            shutil.rmtree(folder)
        steps = document["sizes"][str(size)] = json.loads(finished.read_text())
        document["tables"][f"{size:,} messages"] = [_COLUMNS, *_rows(steps, size)]
        finish(flags, document)
    for size in flags.entries:
        (flags.root_dir / f"tiered-index-year-{size}.json").unlink()


def check_space(base: Path, entries: int) -> None:
    """End the program where so many messages have too little disk."""
    base.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(base).free + sum(f.stat().st_size for f in base.rglob("*") if f.is_file())
    if free < (wanted := entries * SPACE_BYTES_PER_ENTRY):
        sys.exit(f"{base} has {free >> 20:,} MiB free; {entries:,} messages need {wanted >> 20:,} MiB (--root-dir)")


def _rows(steps: dict[str, dict[str, Any]], entries: int) -> list[tuple[object, ...]]:
    rows = []
    for name, taken in steps.items():
        if "wall_s" in taken:
            cpu_s = taken["java_cpu_s"] + taken["python_cpu_s"]
            speed = entries / max(cpu_s, 0.01) / 1e6
            peaks = (taken.get(f"{kind}_peak_mib", 0) for kind in ("java", "worker", "python"))
            gigabytes = (taken[f"{kind}_bytes"] / 1e9 for kind in ("read", "written"))
            ends = taken.get("requests"), taken["temporary_bytes"] / 1e9
            rows.append((name, taken["wall_s"], cpu_s, taken["java_cpu_s"], speed, *peaks, *gigabytes, *ends))
    return rows
