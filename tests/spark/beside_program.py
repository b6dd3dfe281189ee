"""One of the programs that work on one storage side by side, in a process that tests kill at any moment.

- `beside_program.py write ROOT URI COUNT` puts messages from the durable position on, until all are in the storage.
- `beside_program.py merge - URI COUNT` merges by hour, day and 30 days until its input ends.
- `beside_program.py build - URI COUNT` builds one day after another, each with mode `error`.

The number of a message gives all its fields, so a test knows the messages that must be there. Times are past, so every
window is over.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tests.spark.entries import messages
from tests.spark.in_process import planned, shards_of, written
from tiered_index import IndexService
from tiered_index.clock import SystemClock
from tiered_index.errors import InvalidArgument
from tiered_index.service.jobs.job import JobOvertaken
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.spark.writing.build import publish_tables
from tiered_index.storage.opening import open_storage

__all__ = ["BUILT_ROWS", "KEYS", "TOPIC", "built", "message"]

TOPIC, KEYS, BUILT_ROWS = "orders", 7, 40
HOUR_S, DAY_S = 3_600, 86_400
BEGIN_MS = 1_699_920_000_000
_SPAN_MS = 4 * DAY_S * 1_000
_BUILT_OFFSET = 10**9
SCHEMA = messages(1).schema

Row = tuple[str, int, str, int, int, int]


def message(number: int) -> Row:
    """Return message `number` of the writer: topic, queue, key, offset, size, time. One message of four is late, by up
    to days.
    """
    late = number * 7_919_000 % _SPAN_MS if number % 4 == 0 else 0
    time_ms = BEGIN_MS + _SPAN_MS + number * 10_000 - late
    return TOPIC, number % 3, f"k{number % KEYS}", number, 1 + number % 5_000, time_ms


def built(number: int) -> list[Row]:
    """Return the messages of build `number`. Each build has a day of its own, long after the writer's days."""
    begin_ms = BEGIN_MS + (100 + number) * DAY_S * 1_000
    first = _BUILT_OFFSET + number * BUILT_ROWS
    return [
        (TOPIC, n % 3, f"k{n % KEYS}", n, 1 + n % 5_000, begin_ms + (n - first) * 1_000_000)
        for n in range(first, first + BUILT_ROWS)
    ]


def _write(root: str, uri: str, count: int) -> None:
    settings: Any = {"slots": 64, "items": 150, "local_keep_s": 0, "query_threads": 2}
    settings |= {"lifecycle_interval_s": 0.05, "flush_interval_s": 0.02, "max_late_s": 10**10, "max_early_s": 10**10}
    with IndexService.open(root=root, storage=uri, **settings) as index:
        pause = threading.Event()
        for number in range(index.durable_position("log") or 0, count):
            index.put(*message(number), source="log", source_position=number + 1)
            if number % 20 == 0:
                pause.wait(0.02)
        index.seal()
        index.run_lifecycle()
        index.run_lifecycle()


def _merge(uri: str) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    clock = SystemClock()
    with open_storage(uri) as storage:
        for window_s in itertools.cycle((HOUR_S, DAY_S, HOUR_S, DAY_S, 30 * DAY_S)):
            if ended.wait(0.05):
                return
            log = StorageLog(storage, clock)
            log.open()
            # in a longer table, a day would look like one that no build has published yet
            end_s = BEGIN_MS // 1000 + 90 * DAY_S if window_s > DAY_S else 1 << 62
            options = MergeOptions(window_s=window_s, min_age_s=0, shard_bytes=1 << 20, end_s=end_s)
            with contextlib.suppress(JobOvertaken):
                merge(storage, log, clock, options)


def _build(uri: str, count: int) -> None:
    with open_storage(uri) as storage:
        for number in range(count):
            log = StorageLog(storage, SystemClock())
            genesis = log.open().genesis
            assert genesis is not None
            table = pa.Table.from_arrays(list(map(pa.array, zip(*built(number), strict=True))), schema=SCHEMA)
            plan = replace(planned(table), genesis=genesis)
            shards = shards_of(written(table, plan, storage, now_ms=SystemClock().now_ms()))
            try:
                publish_tables(shards, "error", storage, log)
            except InvalidArgument as error:
                # a kill came after the record of the build before
                assert "has a table already" in str(error)
            threading.Event().wait(0.2)


if __name__ == "__main__":
    role, root, uri, count = sys.argv[1:]
    if role == "write":
        _write(root, uri, int(count))
    elif role == "merge":
        _merge(uri)
    else:
        _build(uri, int(count))
