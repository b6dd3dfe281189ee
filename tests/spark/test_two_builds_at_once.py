"""Two Spark applications build the same window at once: what the log says of them is what their mode promises, and
nothing is lost.

Both are ready before either publishes: each waits before it puts the record of a certain number until the other one is
about to do so, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.entries import BEGIN_MS, DAY_MS, check, check_stored, messages, states, sweep, total, write_parquet
from tests.spark.in_process import build_here

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 900.0
# the other day's table is nobody's business; one of the same day is replaced
OTHER_DAY = messages(90, days=1, seed=5, begin_ms=BEGIN_MS + DAY_MS)
SAME_DAY = messages(80, days=1, seed=6)
SOURCES = {"a": messages(240, days=1, seed=7), "b": messages(200, days=1, seed=8)}


@dataclass(frozen=True)
class Round:
    """A storage with these tables, and the log numbers that both programs try to put."""

    mode: str
    before: tuple[pa.Table, ...]
    meet_at: str


ROUNDS = {
    "error": Round("error", (OTHER_DAY,), "3"),
    "append": Round("append", (OTHER_DAY,), "3"),
    "replace": Round("replace", (OTHER_DAY, SAME_DAY), "4"),
    "nothing": Round("error", (), "1,2"),  # one of them creates the index
}


def run_both(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Run both programs; return how each round ended for each of them."""
    rounds = [f"{name}:{one.mode}:{one.meet_at}" for name, one in ROUNDS.items()]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    ended: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in ROUNDS}
    with contextlib.ExitStack() as stack:
        processes = {}
        for me, other in (("a", "b"), ("b", "a")):
            source = write_parquet(SOURCES[me], folder / f"{me}.parquet")
            command = [
                sys.executable,
                "-m",
                "tests.spark.racing_driver",
                "local[1]",
                str(folder),
                me,
                other,
                source,
                *rounds,
            ]
            pipe = subprocess.PIPE
            processes[me] = stack.enter_context(
                subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
            )
            stack.callback(processes[me].kill)
        for me, process in processes.items():
            out, error = process.communicate(timeout=_PATIENCE_S)
            assert process.returncode == 0, error[-3000:]
            for line in map(json.loads, filter(lambda text: text.startswith("{"), out.splitlines())):
                ended[line["name"]][me] = line
    return ended


def check_all(uri: str, *tables: pa.Table) -> None:
    """Assert that the tables' entries are there, each as often as in them, and no other ones; and that lookups answer
    with them.
    """
    check_stored(uri, *tables)
    assert total(uri) == sum(table.num_rows for table in tables)
    check(uri, *tables, keys=5)


@pytest.mark.slow
def test_two_applications_publish_the_same_window(tmp_path: Path) -> None:
    for name, one in ROUNDS.items():
        if one.before:
            build_here(f"file://{tmp_path}/{name}", *one.before)
    ended = run_both(tmp_path)
    for name, one in ROUNDS.items():
        uri, both = f"file://{tmp_path}/{name}", ended[name]
        assert both.keys() == SOURCES.keys()
        codes = {me: line["code"] for me, line in both.items()}
        if one.mode == "error":
            [winner] = [me for me, code in codes.items() if code == 0]
            [loser] = [me for me, code in codes.items() if code == 2]
            error = both[loser]["said"]["error"]
            assert error["type"] == "InvalidArgument" and "has a table already" in error["message"]
            assert sweep(uri) == 0  # the one that lost took its uploads back
            check_all(uri, *one.before, SOURCES[winner])
            continue
        assert set(codes.values()) == {0}
        first, last = sorted(both, key=lambda me: both[me]["said"]["log_number"])
        numbers = [both[me]["said"]["log_number"] for me in (first, last)]
        assert numbers == [states(uri).number - 1, states(uri).number]
        if one.mode == "append":
            assert sweep(uri) == 0
            check_all(uri, *one.before, *SOURCES.values())
        else:
            # the second one replaced what the first had published, and the first what had been there
            removed = [both[me]["said"]["removed_objects"] for me in (first, last)]
            assert removed == [2, both[first]["said"]["shards"]]
            assert sweep(uri) == sum(removed)
            check_all(uri, OTHER_DAY, SOURCES[last])
