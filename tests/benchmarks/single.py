"""`python -m tests.benchmarks.single [FOLDER ...]`: CPU time of single lookups, by where the entries lie and how many
answers there are.

Each folder is a checkout of this project; without any, this one is measured. They are measured in turns, each by a
process of its own, since times of one run alone say little on a busy machine. A line has for each checkout the median
and the 99th percentile (thread CPU, microseconds), and the median where the answer's items are looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tiered_index import IndexReader, IndexService

# where the entries lie, and in how many files
PLACES = ("unsealed 1", "unsealed 10", "compacted 1", "compacted 10", "cached 1", "cached 10", "written 1")
# how many answers a file has for a key of that name
ANSWERS = {"absent": 0, "one": 1, "few": 4, "many": 64}
_ENTRIES, _ROUNDS, _LOOKUPS = 40_000, 5, 1_000
_BEGIN_MS = 1_700_000_000_000


@contextlib.contextmanager
def opened(place: str) -> Iterator[IndexService[Any] | IndexReader[Any]]:
    """Yield an index with the entries at `place`; of ``written`` another thread puts meanwhile."""
    state, files = place.split()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        root, uri = Path(folder) / "root", (Path(folder) / "storage").as_uri()
        index = stack.enter_context(IndexService.open(root=root, storage=uri, background=False))
        for number in range(int(files)):
            index.put_batch(_entries(number))
            index.flush()
            if state != "written" and place != "unsealed 1":
                index.seal()
        if state in ("compacted", "cached"):
            index.run_lifecycle()
        if state == "cached":
            yield stack.enter_context(IndexReader.open(uri, filter_after_probes=1 << 30, refresh_interval_s=1e9))
            return
        if state == "written":
            ended = threading.Event()
            writer = threading.Thread(target=_write, args=(index, ended))
            stack.callback(writer.join)
            stack.callback(ended.set)
            writer.start()
        yield index


def _entries(file: int) -> dict[str, list[Any]]:
    keys = [f"{name} {number}" for name in ("few", "many") for number in range(100) for _ in range(ANSWERS[name])]
    keys += [f"one {file * _ENTRIES + number}" for number in range(_ENTRIES - len(keys))]
    random.Random(file).shuffle(keys)
    offsets = range(file * _ENTRIES, (file + 1) * _ENTRIES)
    return {
        "topic": ["orders"] * _ENTRIES,
        "queue_id": [offset % 8 for offset in offsets],
        "key": keys,
        "offset": list(offsets),
        "size": [100] * _ENTRIES,
        "timestamp_ms": [_BEGIN_MS + offset * 10 for offset in offsets],
    }


def _write(index: IndexService[Any], ended: threading.Event) -> None:
    offset = 1 << 40
    while not ended.wait(0.002):
        for _ in range(20):
            offset += 1
            index.put("orders", 0, f"written {offset}", offset, 1, _BEGIN_MS)
        if offset % 2_000 == 0:
            index.flush()


def measured(index: IndexService[Any] | IndexReader[Any], answers: str) -> list[float]:
    """Return median and 99th percentile of lookups, and their median with items."""
    keys = [f"{answers} {number}" for number in range(100)]
    for key in keys:
        assert len(index.query("orders", key).items) >= min(ANSWERS[answers], 1)

    def times(look: Callable[[str], object]) -> list[float]:
        found = []
        for number in range(_LOOKUPS):
            begun = time.thread_time_ns()
            look(keys[number % len(keys)])
            found.append((time.thread_time_ns() - begun) / 1000)
        return found

    bare = times(lambda key: index.query("orders", key))
    items = times(lambda key: index.query("orders", key).items)
    return [statistics.median(bare), statistics.quantiles(bare, n=100)[-1], statistics.median(items)]


def _work() -> None:
    """Measure what standard input asks for, a line each; the same place again is still open."""
    with contextlib.ExitStack() as stack:
        place = ""
        for line in sys.stdin:
            if line != place:
                stack.close()
                place, index = line, stack.enter_context(opened(line.strip()))
            print(json.dumps({answers: measured(index, answers) for answers in ANSWERS}), flush=True)


def main(folders: list[str]) -> None:
    """Measure the checkouts in turns and print their lines."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "--work"],
                    env={**os.environ, "PYTHONPATH": folder},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for folder in folders
        ]
        print(f"{'entries':<14}{'answers':<8}" + "".join(f"{'p50':>10}{'p99':>8}{'items':>8}" for _ in workers))
        for place in PLACES:
            rounds: list[list[dict[str, list[float]]]] = [[] for _ in workers]
            for _ in range(_ROUNDS):
                for worker, found in zip(workers, rounds, strict=True):
                    assert worker.stdin is not None and worker.stdout is not None
                    worker.stdin.write(place + "\n")
                    worker.stdin.flush()
                    found.append(json.loads(worker.stdout.readline()))
            for answers in ANSWERS:
                line = f"{place:<14}{answers:<8}"
                for found in rounds:
                    p50, p99, items = (statistics.median(one[answers][i] for one in found) for i in range(3))
                    line += f"{p50:>10.1f}{p99:>8.1f}{items:>8.1f}"
                print(line, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        _work()
    else:
        main(sys.argv[1:] or [str(Path(__file__).parents[2])])
