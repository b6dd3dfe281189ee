"""Suite `pause`: how long a put takes, and how late the writer wakes, beside compactions, uploads and queries.

The writer has a core to itself; flusher, life cycle and queries share the other one. The same puts at the same pace
without any of them show what the machine and the interpreter do to such a thread anyway.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from tiered_index.cli.bench.figures import Meter, Spec, Suite, percentiles_us
from tiered_index.cli.bench.machine import core_wait_s, cores, pin_thread, pinned, settle
from tiered_index.cli.bench.messages import START_MS, TOPIC, batch, key_array, keys_of, numbers_of
from tiered_index.cli.bench.setting import Setting, WatchedDisk, fill, require, scratch
from tiered_index.errors import BackPressure
from tiered_index.service.index import IndexService

_PERIOD_S = 0.001
_SINGLES = 4
_POOL = 2_000_000
_LONGEST_S = 180.0
_QUERY_PAUSE_S = 0.001
_CALLS = ("put", "put_batch", "wake-up")
_WHICH = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
_STATES = ("busy", "idle")
_COUNTS = ("files begun", "compactions", "uploads", "queries", "puts pushed back")
_PACE = "entries put"
_KEPT_OFF = {state: f"writer kept off its core, {state}" for state in _STATES}


@dataclass
class _Latencies:
    """Seconds of each call, by kind; a wake-up is how much later than asked the writer's sleep ended."""

    samples: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in _CALLS})
    entries: int = 0
    elapsed_s: float = 0.0
    core_wait_s: float = 0.0
    pushed_back: int = 0


def _pause_specs(setting: Setting) -> Sequence[Spec]:
    calls = [Spec(_figure(call, state, which), "us") for call in _CALLS for state in _STATES for which in _WHICH]
    return (
        *calls,
        Spec(_PACE, "entries/s"),
        *(Spec(name, "ms/s") for name in _KEPT_OFF.values()),
        *(Spec(name, "count") for name in _COUNTS),
    )


def _pause(setting: Setting, folder: Path, meter: Meter) -> None:
    keys = key_array(np.arange(min(setting.entries, _POOL)))
    measured, other = cores()
    for _ in meter.rounds():
        with pinned(other):
            with scratch(folder) as place:
                idle = _idle(setting, place, keys, measured)
            with scratch(folder) as place:
                busy = _busy(setting, place, keys, measured, meter)
        for state, latencies in zip(_STATES, (busy, idle), strict=True):
            for call, samples in latencies.samples.items():
                for which, value in zip(_WHICH, percentiles_us(samples, *_WHICH.values()), strict=True):
                    meter.record(_figure(call, state, which), value)
            meter.record(_KEPT_OFF[state], latencies.core_wait_s / latencies.elapsed_s * 1000)
        meter.record(_PACE, busy.entries / busy.elapsed_s)


PAUSE = Suite("pause", _pause_specs, _pause)
"""Every millisecond a batch of 1,000 and four single puts, for as long as the waiting files take."""


def _figure(call: str, state: str, which: str) -> str:
    return f"{call}, {state}, {which}"


def _idle(setting: Setting, place: Path, keys: Any, core: int) -> _Latencies:
    """Put for a while into a buffer that nobody flushes or asks."""
    index = setting.open(place, buffer_max_entries=1 << 40, buffer_max_bytes=1 << 50)
    with ThreadPoolExecutor(1, "bench-writer") as threads:
        settle()
        ends_s = time.monotonic() + setting.idle_s

        def finished(entries: int) -> bool:
            return entries > 0 and time.monotonic() >= ends_s

        try:
            return threads.submit(_write, index, setting.pause_rows, keys, core, finished).result()
        finally:
            index.abandon()


def _busy(setting: Setting, place: Path, keys: Any, core: int, meter: Meter) -> _Latencies:
    """Put with every worker running until all waiting files, and one that was begun here, are uploaded."""
    waiting = setting.pause_files * setting.entries
    with setting.open(place) as index:
        fill(index, 0, waiting)
    settle()
    disk, done = WatchedDisk(), threading.Event()
    with (
        setting.open(place, disk=disk, background=True, seal_after_s=setting.pause_seal_s) as index,
        ThreadPoolExecutor(2, "bench") as threads,
    ):
        ends_s = time.monotonic() + _LONGEST_S

        def finished(entries: int) -> bool:
            return disk.counts["uploaded"] > setting.pause_files or time.monotonic() >= ends_s

        looking_up = threads.submit(_look_up, index, keys_of(numbers_of(10_000, len(keys), 1)), done)
        writing = threads.submit(_write, index, setting.pause_rows, keys, core, finished, waiting)
        try:
            latencies = writing.result()
        finally:
            counts = disk.counts.copy()
            done.set()
        moved = (counts[state] for state in ("unsealed", "compacted", "uploaded"))
        values = (*moved, looking_up.result(), latencies.pushed_back)
        index.flush()
        found = sum(getattr(file, "count", 0) for file in index.files())
        require(found, waiting + latencies.entries, "entries in the index")
    for name, value in zip(_COUNTS, values, strict=True):
        meter.record(name, value)
    return latencies


def _look_up(index: IndexService, keys: list[str], done: threading.Event) -> int:
    """Look keys up, one after another, until done; return how many."""
    for number, key in enumerate(cycle(keys)):
        index.query(TOPIC, key)
        if done.wait(_QUERY_PAUSE_S):
            return number + 1
    return 0


def _write(
    index: IndexService, rows: int, keys: Any, core: int, finished: Callable[[int], bool], position: int = 0
) -> _Latencies:
    """Put messages from number `position` on at a steady pace until `finished` says so of the entries put."""
    pin_thread(core)
    latencies = _Latencies()
    singles, batches, wakes = (latencies.samples[name] for name in _CALLS)
    texts = cycle(keys[: min(len(keys), 10_000)].to_pylist())
    waited_s, started_s = core_wait_s(), time.perf_counter()
    due_s = started_s
    while not finished(latencies.entries):
        wake_s = max(due_s, time.perf_counter())
        time.sleep(max(0.0, due_s - time.perf_counter()))  # a writer that is late lets others run all the same
        wakes.append(time.perf_counter() - wake_s)
        first = position % max(1, len(keys) - rows + 1)
        columns = batch(np.arange(position, position + rows), keys[first : first + rows])
        position += rows
        before_s = time.perf_counter()
        _put(latencies, index.put_batch, columns)
        batches.append(time.perf_counter() - before_s)
        latencies.entries += rows
        for number in range(position, position + _SINGLES):
            key, offset, timestamp_ms = next(texts), number * 1000, START_MS + number // 10
            before_s = time.perf_counter()
            _put(latencies, index.put, TOPIC, 1, key, offset, 512, timestamp_ms)
            singles.append(time.perf_counter() - before_s)
        latencies.entries += _SINGLES
        due_s = max(due_s + _PERIOD_S, time.perf_counter())  # and does not hurry
    latencies.elapsed_s = time.perf_counter() - started_s
    latencies.core_wait_s = core_wait_s() - waited_s
    return latencies


def _put(latencies: _Latencies, put: Callable[..., int], *arguments: Any) -> None:
    """Call `put` until it is not pushed back; the waiting is part of the call's time."""
    while True:
        try:
            put(*arguments)
        except BackPressure:
            latencies.pushed_back += 1
            time.sleep(_PERIOD_S)
        else:
            return
