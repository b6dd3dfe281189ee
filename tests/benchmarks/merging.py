"""`python -m tests.benchmarks merging`: how long puts take beside merges.

The index has files of one past day. A thread puts messages at a steady pace: without a merge, beside the writer's own
merge, and beside `spark merge` in another process. Each state runs in a new process on a copy of the same index, so
that its memory counts. The writer's other workers run, too. Figures are medians of the rounds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from tests.benchmarks.machine.setting import START_MS, TOPIC, batch, keys_of, require, scratch
from tests.benchmarks.running import Out, RootDir, Rounds, base_folder, shown_number, write_document
from tests.support.processes import without_settings
from tiered_index import IndexService
from tiered_index.cli.session import Session, command
from tiered_index.errors import InvalidArgument

State = Literal["no merge", "own merge", "spark merge"]
STATES: tuple[State, ...] = ("no merge", "own merge", "spark merge")
_PERIOD_S, _SINGLES, _ROWS = 0.001, 4, 100
_DAY_MS = 86_400_000
_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "longest": 100.0}
_LATEST_S = 400.0


def opened(folder: Path, **settings: Any) -> IndexService:
    """Open the writer of the index in `folder`."""
    uri = f"file://{folder / 'storage'}"
    return IndexService.open(root=folder / "root", storage=uri, slots=250_000, items=4_000_000, **settings)


def fill(folder: Path, entries: int, files: int) -> None:
    """Publish files of one past day."""
    day_ms = START_MS // _DAY_MS * _DAY_MS
    with opened(folder, background=False, merge="off", local_keep_s=0) as index:
        for numbers in np.array_split(np.arange(entries), files):
            for some in np.array_split(numbers, max(1, len(numbers) // 100_000)):
                index.put_batch(batch(some, timestamp_ms=day_ms + some * (_DAY_MS - 1) // entries))
            index.seal()
            index.run_lifecycle()
        require(len(index.log_state.files), files, "files")


def measured(state: State, folder: str, seconds: float) -> dict[str, float]:
    """Return the figures of one state, in the process of its own that calls this."""
    with opened(Path(folder)) as index:
        before = sum(stored.count for stored in index.log_state.objects.values())
        resident = _kib("VmRSS")
        done = threading.Event()
        beside: dict[State, Callable[[], object]]
        beside = {"no merge": lambda: time.sleep(seconds), "own merge": index.run_merge, "spark merge": _spark(folder)}

        def work() -> tuple[float, float]:
            try:
                began_s, cpu_s = time.perf_counter(), time.thread_time()
                beside[state]()
                return time.perf_counter() - began_s, time.thread_time() - cpu_s
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            samples = _puts(index, done)
            took_s, cpu_s = working.result()
        if state != "no merge":
            state_now = index._lifecycle.refresh()
            tables = sum(s.count for shards in state_now.tables.values() for s in shards)
            require(tables, before, "merged entries")
        peak_mib = (_kib("VmHWM") - resident) / 1024
    figures = {"seconds": took_s, "CPU share of the merge": cpu_s / took_s if state == "own merge" else 0.0}
    figures["memory MiB"] = peak_mib
    for call, times in samples.items():
        for name, at in _PERCENTILES.items():
            figures[f"{call}, {name}, us"] = float(np.percentile(np.frombuffer(times), at)) * 1e6
    return figures


def _puts(index: IndexService, done: threading.Event) -> dict[str, array[float]]:
    """Put four messages and a batch of 100 each millisecond until `done`. Return the seconds of each call."""
    samples = {"put": array("d"), f"put_batch of {_ROWS}": array("d")}
    keys = itertools.cycle(keys_of(np.arange(20_000)))
    numbers, now_ms = np.arange(_ROWS), time.time_ns() // 1_000_000
    columns = batch(numbers, timestamp_ms=np.full(_ROWS, now_ms))
    due_s = began_s = time.perf_counter()
    for number in itertools.count():
        if done.is_set() or time.perf_counter() > began_s + _LATEST_S:
            return samples
        time.sleep(max(0.0, due_s - time.perf_counter()))
        for _ in range(_SINGLES):
            key = next(keys)
            call_s = time.perf_counter()
            index.put(TOPIC, 1, key, number, 512, now_ms)
            samples["put"].append(time.perf_counter() - call_s)
        call_s = time.perf_counter()
        index.put_batch(columns)
        samples[f"put_batch of {_ROWS}"].append(time.perf_counter() - call_s)
        due_s = max(due_s + _PERIOD_S, time.perf_counter())
    raise AssertionError


def _spark(folder: str) -> Callable[[], object]:
    command = [sys.executable, "-m", "tiered_index", "spark", "merge", "--window", "1d", "--master", "local[1]"]
    command += ["--storage", f"file://{folder}/storage", "--json", "--quiet"]
    return lambda: subprocess.run(command, check=True, capture_output=True, env=without_settings())


def _kib(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:"))


@contextmanager
def _copied(index: Path, into: Path) -> Iterator[Path]:
    shutil.copytree(index, into)
    try:
        yield into
    finally:
        shutil.rmtree(into)


@command
def merging(
    session: Session,
    entries: Annotated[int, typer.Option(min=10_000, help="Entries to merge.")] = 8_000_000,
    files: Annotated[int, typer.Option(min=2, help="Files to merge.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time of puts without a merge.")] = 20.0,
    spark: Annotated[bool, typer.Option("--spark", help="Also beside `spark merge`. Needs PySpark and Java.")] = False,
    rounds: Rounds = 3,
    root_dir: RootDir = None,
    out: Out = None,
) -> int:
    """Measure puts without a merge, beside the writer's own merge, and beside a merge by Spark.

    [bold]Examples[/bold]

      python -m tests.benchmarks merging --entries 1000000 --rounds 1

      python -m tests.benchmarks merging --spark
    """
    if session.root is not None or session.storage is not None or session.config_file is not None:
        raise InvalidArgument("merging makes its own index: leave out --root, --storage and --config")
    states = STATES if spark else STATES[:2]
    columns: dict[State, list[dict[str, float]]] = {state: [] for state in states}
    context = multiprocessing.get_context("spawn")
    with session.out.progress("measuring", rounds * len(states)) as progress, scratch(base_folder(root_dir)) as folder:
        fill(folder / "index", entries, files)
        for number, state in enumerate(states * rounds):
            with _copied(folder / "index", folder / "copy") as place, context.Pool(1) as pool:
                # a copied root has the name of its storage
                columns[state].append(pool.apply(measured, (state, str(place), seconds)))
            progress.update(number + 1, state)
    names = list(columns["no merge"][0])
    document: dict[str, Any] = {
        "entries": entries,
        "files": files,
        "rounds": rounds,
        "rows": [
            {"name": name, "values": [statistics.median(one[name] for one in columns[state]) for state in states]}
            for name in names
        ],
        "states": list(states),
    }
    write_document(out, document)
    session.out.answer(document)
    rows = [(row["name"], *map(shown_number, row["values"])) for row in document["rows"]]
    title = f"puts beside merges of {entries:,} entries in {files} files"
    session.out.table(("figure", *states), rows, title=title, right=" ".join(states))
    return 0
