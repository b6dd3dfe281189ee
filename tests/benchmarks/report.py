"""What all suites share: options, folders, facts about the machine (Linux), tables, and checks of their work."""

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.benchmarks.memory import proc_lines
from tiered_index.base.kernels import compiled
from tiered_index.base.version import __version__

TOP = Path(__file__).parents[2]
Measured = dict[str, list[float]]
"""The values of each figure, one a round."""


def numbers(text: str) -> list[int]:
    """Return numbers with commas between them, such as ``1_000_000,2000``."""
    return [int(part.replace("_", "")) for part in text.split(",")]


def options(suite: str, description: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of each suite: `--root-dir`, `--out` and, with `rounds`, `--rounds`."""
    parser = argparse.ArgumentParser(
        f"python -m tests.benchmarks {suite}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    place = Path(os.environ.get("TMPDIR", "/var/tmp"))
    parser.add_argument(
        "--root-dir", type=Path, default=place, help="folder to measure in (default: TMPDIR or /var/tmp)"
    )
    out = TOP / "build" / f"{suite}.json"
    parser.add_argument("--out", type=Path, default=out, help=f"the JSON document (default: build/{suite}.json)")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="figures are medians of the rounds")
    return parser


def note(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Yield a new folder in `parent`, and delete it at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tiered-index-bench-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def facts(folder: Path) -> dict[str, Any]:
    """Return the facts that figures depend on. The figures are measured in `folder`."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    holding = [(len(point), kind) for _, point, kind, *_ in mounts if folder.resolve().is_relative_to(point)]
    return {
        "cpu": proc_lines("cpuinfo").get("model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": proc_lines("meminfo").get("MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyarrow": pa.__version__,
        "compiled_core": compiled() is not None,
        "tiered_index": __version__,
        "filesystem": max(holding, default=(0, "unknown"))[1],
        "load_average": round(os.getloadavg()[0], 2),
    }


def require(found: object, expected: object, what: str) -> None:
    """Raise an error if a measurement did not do its work: figures of wrong work are worthless."""
    if found != expected:
        raise RuntimeError(f"{what}: {found!r}, not {expected!r}")


def finish(flags: argparse.Namespace, document: Mapping[str, Any]) -> None:
    """Write the document of a suite, with its options and the machine, and print its tables.

    A table is a list of rows in `document["tables"]`, by its title. The first row has the columns.
    """
    said = {name: value if isinstance(value, int | float | list) else str(value) for name, value in vars(flags).items()}
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    whole = {"machine": facts(flags.root_dir), "options": said, **document}
    flags.out.write_text(json.dumps(whole, indent=1) + "\n")
    for title, (columns, *rows) in document["tables"].items():
        print(f"\n{title}\n\n{table(columns, rows)}")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *([shown(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown(value: Any) -> str:
    """Return a cell. None is an empty one."""
    if value is None or isinstance(value, str):
        return value or ""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2g}"


def medians(measured: Measured) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in measured.items()}


def compared(columns: Mapping[str, Measured], figures: Mapping[str, str], greatest: Collection[str] = ()) -> list[Any]:
    """Return the table of several stores: a row for each of `figures`, a column for each store.

    The best value of a row is bold: the smallest, or the greatest of those in `greatest`.
    """
    known = {name: medians(measured) for name, measured in columns.items()}
    rows: list[list[Any]] = [["", *columns]]
    for figure, words in figures.items():
        values = [column.get(figure) for column in known.values()]
        of_some = [value for value in values if value is not None]
        best = (max if figure in greatest else min)(of_some, default=None)
        rows.append([words, *(f"**{shown(value)}**" if value == best else shown(value) for value in values)])
    return rows


def percentiles(samples_s: Collection[float], *which: float, unit: float = 1e6) -> list[float]:
    """Return percentiles (100: the maximum) of times in seconds; by default in microseconds."""
    return (np.percentile(np.fromiter(samples_s, np.float64, len(samples_s)), which) * unit).tolist()  # type: ignore[no-any-return]


class Spent:
    """While entered, adds elapsed seconds and CPU seconds of the whole process. It may be entered again."""

    def __init__(self) -> None:
        self.elapsed_s = self.cpu_s = 0.0

    def __enter__(self) -> "Spent":
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.elapsed_s += time.perf_counter() - self._began[0]
        self.cpu_s += time.process_time() - self._began[1]
