"""`python -m tests.benchmarks billion`: a year of messages in ever larger indexes, up to a billion."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.benchmarks.billion.run import SPACE_BYTES_PER_ENTRY, Run
from tests.benchmarks.machine.figures import facts
from tests.benchmarks.memory import disk_bytes
from tests.benchmarks.running import Out, RootDir, base_folder, write_document
from tests.support.environment import own_environment
from tiered_index.cli.output import human_bytes
from tiered_index.cli.session import Session, command
from tiered_index.errors import ConfigError, DiskFull

_ENTRIES = (10_000_000, 100_000_000, 1_000_000_000)
_COLUMNS = (
    *("step", "wall s", "CPU s", "of it Java", "M entries a CPU s", "peak MiB: Java", "Spark's workers", "Python"),
    *("GB read", "GB written", "requests", "temporary GB"),
)


@command
def billion(
    session: Session,
    entries: Annotated[
        list[int] | None, typer.Option(min=100_000, help="Messages; several times. Default: 10 M, 100 M, 1 G.")
    ] = None,
    master: Annotated[str, typer.Option(help="Where Spark runs.")] = "local[2]",
    spark_parquet: Annotated[
        bool, typer.Option("--spark-parquet", help="Also write and join Spark's sorted buckets, which takes longest.")
    ] = False,
    root_dir: RootDir = None,
    out: Out = None,
) -> int:
    """Build, audit, look up, merge, verify, copy, erase and expire a year of messages, by Spark and by one process.

    Each step is a program of its own. The table has its time, CPU time, peak memory, bytes and requests. DuckDB reads
    the source and checks the answers to a million keys. Sizes run one after the other. Each needs 70 bytes of disk a
    message. With --root-dir, an interrupted run continues with its first unfinished step.

    [bold]Examples[/bold]

      python -m tests.benchmarks billion --entries 1000000

      python -m tests.benchmarks billion --root-dir /mnt/large --out build/billion.json
    """
    sizes = sorted(set(entries or _ENTRIES))
    base = base_folder(root_dir)
    try:
        import duckdb  # noqa: F401
        import pyspark  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"this needs {error.name}: pip install '.[bench,spark]'") from error
    _check_space(base, sizes)
    document: dict[str, Any] = {"machine": facts(base), "master": master, "sizes": {}}
    for size in sizes:
        folder = base / f"tiered-index-year-{size}"
        # the steps of a size that an interrupted run has finished
        finished = folder.with_suffix(".json")
        if finished.exists():
            steps = json.loads(finished.read_text())
        else:
            with own_environment():
                run = Run(folder, size, master, partial(_tell, session, size))
                steps = run.run(with_spark_parquet=spark_parquet)
            finished.write_text(json.dumps(steps))
            shutil.rmtree(folder)
        document["sizes"][f"{size}"] = steps
        write_document(out, document)
        session.out.table(_COLUMNS, _rows(steps, size))
    for size in sizes:
        (base / f"tiered-index-year-{size}.json").unlink()
    session.out.answer(document)
    return 0


def _tell(session: Session, size: int, step: str) -> None:
    session.out.note(f"{size:,} messages: {step}")


def _check_space(base: Path, sizes: list[int]) -> None:
    """Raise `DiskFull` where the largest size has too little disk."""
    free = shutil.disk_usage(base).free
    free += disk_bytes(*base.glob("tiered-index-year-*"))
    if free < (wanted := sizes[-1] * SPACE_BYTES_PER_ENTRY):
        raise DiskFull(
            f"{base} has {human_bytes(free)} free; {sizes[-1]:,} messages need {human_bytes(wanted)}. "
            "Pass --root-dir with a larger disk, or --entries with fewer messages."
        )


def _rows(steps: dict[str, dict[str, Any]], entries: int) -> list[tuple[object, ...]]:
    rows = []
    for name, taken in steps.items():
        if "wall_s" not in taken:
            continue
        cpu_s = taken["java_cpu_s"] + taken["python_cpu_s"]
        gigabytes = (round(taken[f"{kind}_bytes"] / 1e9, 2) for kind in ("read", "written"))
        peaks = (taken.get(f"{kind}_peak_mib", 0) for kind in ("java", "worker", "python"))
        rows.append(
            (
                name,
                round(taken["wall_s"], 1),
                round(cpu_s, 1),
                round(taken["java_cpu_s"], 1),
                round(entries / max(cpu_s, 0.01) / 1e6, 2),
                *peaks,
                *gigabytes,
                taken.get("requests", ""),
                round(taken["temporary_bytes"] / 1e9, 2),
            )
        )
    return rows
