"""The suites of writing: `put`, `compact` and `pause`.

`pause` measures how long a put takes during compactions, uploads and queries. The writer has a core to itself. Flusher,
life cycle and queries share the other one. The same puts without that work show the delays of the machine and the
interpreter alone.
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

from tests.benchmarks.machine.figures import (
    MemoryWatch,
    Meter,
    Spec,
    Suite,
    at_least,
    at_most,
    cores,
    every_round,
    pin_thread,
    pinned,
    settle,
)
from tests.benchmarks.machine.setting import (
    START_MS,
    TOPIC,
    Setting,
    WatchedDisk,
    batch,
    compact_only,
    fill,
    key_array,
    keys_of,
    numbers_of,
    require,
    scratch,
    without_uploads,
)
from tiered_index.errors import BackPressure
from tiered_index.service.index import IndexService

_DURABLE = {1_000: 4e6, 10_000: 10e6}
"""Rows of durable batches, and the goals."""


def _durable_batch(rows: int) -> str:
    return f"durable put_batch of {rows:,} rows"


def _put_specs(setting: Setting) -> Sequence[Spec]:
    return (
        Spec("put_batch", "entries/s", sections=("put_batch call",)),
        Spec("put_batch and durable flush", "entries/s", at_least(6e6), ("put_batch call", "flush")),
        Spec("put_batch and flush, CPU", "ns/entry"),
        Spec("put, one entry per call", "entries/s", at_least(4e5), ("put loop",)),
        Spec("put, CPU", "ns/entry"),
        Spec("put and durable flush", "entries/s"),
        *(
            Spec(_durable_batch(rows), "entries/CPU s", at_least(goal), (_durable_batch(rows),))
            for rows, goal in _DURABLE.items()
        ),
    )


def _put(setting: Setting, place: Path, meter: Meter) -> None:
    core, _ = cores()
    with setting.open(place) as index, pinned(core):
        _batches(index, setting, meter)
        _singles(index, setting, meter)
        _durable_batches(index, meter)


PUT = Suite("put", _put_specs, every_round(_put))
"""A full file, filled in batches with durable flushes, single puts, and small durable batches, all on one core."""


def _batches(index: IndexService, setting: Setting, meter: Meter) -> None:
    count = setting.entries
    call, flush = meter.section("put_batch call"), meter.section("flush")
    index.put(TOPIC, 0, "first", 0, 1, START_MS)
    index.flush()  # the file's space is allocated before it is needed, as in a running index
    settle()
    fill(index, 1, count - 1, call, flush)
    require([getattr(file, "count", None) for file in index.files()], [count], "entries of the full file")
    meter.record("put_batch", count / call.elapsed_s)
    meter.record("put_batch and durable flush", count / (call.elapsed_s + flush.elapsed_s))
    meter.record("put_batch and flush, CPU", (call.cpu_s + flush.cpu_s) / count * 1e9)


def _singles(index: IndexService, setting: Setting, meter: Meter) -> None:
    count = setting.singles
    calls = list(zip(keys_of(np.arange(count)), range(count), range(START_MS, START_MS + count), strict=True))
    put, flush, put_one = meter.section("put loop"), meter.section("flush of single puts"), index.put
    with put:
        for key, offset, timestamp_ms in calls:
            put_one(TOPIC, 1, key, offset, 512, timestamp_ms)
    with flush:
        index.flush()
    require(sum(getattr(file, "count", 0) for file in index.files()), setting.entries + count, "entries in the index")
    meter.record("put, one entry per call", count / put.elapsed_s)
    meter.record("put, CPU", put.cpu_s / count * 1e9)
    meter.record("put and durable flush", count / (put.elapsed_s + flush.elapsed_s))


def _durable_batches(index: IndexService, meter: Meter) -> None:
    for rows in _DURABLE:
        batches = [batch(np.arange(number * rows, (number + 1) * rows)) for number in range(50)]
        with meter.section(_durable_batch(rows)) as section:
            for each in batches:
                index.put_batch(each)
                index.flush()
        meter.record(_durable_batch(rows), 50 * rows / section.cpu_s)


_WHICH = {"p50": 50.0, "p99.9": 99.9, "worst lookup": 100.0}
_STALLS = {(state, which): f"reader's {which} {state}" for state in ("before", "during") for which in _WHICH}
_JAVA_S = 5.4
"""Seconds of Java's doCompaction of 20,000,000 items, without a durable file, measured with RocketMQ's own code."""
_OVER_JAVA = f"times as fast as Java's {_JAVA_S} s"
_PERIOD_S = 0.0002
_GAP = 20_000
"""Messages left out, so that the two files have no second in common."""


def _compact_specs(setting: Setting) -> Sequence[Spec]:
    return (
        Spec("compaction of a full file", "s"),
        Spec("compaction rate", "entries/s"),
        Spec("compaction, CPU", "ns/entry"),
        *([Spec(_OVER_JAVA, "ratio", at_least(2), ("compaction",))] if setting.is_full else []),
        Spec("compaction beside a reader", "s"),
        Spec("anonymous memory, increase", "MiB", at_most(1024) if setting.is_full else None),
        *(Spec(name, "us") for name in _STALLS.values()),
    )


def _alone(setting: Setting, place: Path, meter: Meter) -> None:
    section = meter.section("compaction")
    disk = WatchedDisk(lambda state: section.stop())
    with setting.open(place, disk=disk, storage=without_uploads(place)) as index:
        fill(index, 0, setting.entries)
        index.seal()
        settle()
        with section:
            compact_only(index)
        require(disk.counts["compacted"], 1, "compacted files")
    meter.record("compaction of a full file", section.elapsed_s)
    meter.record("compaction rate", setting.entries / section.elapsed_s)
    meter.record("compaction, CPU", section.cpu_s / setting.entries * 1e9)
    if setting.is_full:
        meter.record(_OVER_JAVA, _JAVA_S / section.elapsed_s * setting.entries / 20e6)


def _beside_a_reader(setting: Setting, place: Path, meter: Meter) -> None:
    """Compact again, while a thread on the other core looks keys up in another, unsealed file."""
    first, hot = setting.entries + _GAP, max(1, setting.entries // 100)
    core, other = cores()
    section, memory = meter.section("compaction beside a reader"), MemoryWatch()
    latencies = {"before": array("d"), "during": array("d")}
    stop = threading.Event()

    def reached(state: str) -> None:
        if state == "compacted":
            section.stop()
            stop.set()

    with setting.open(place, disk=WatchedDisk(reached), storage=without_uploads(place)) as index, pinned(core):
        fill(index, 0, setting.entries)
        index.seal()
        fill(index, first, hot)
        settle()
        keys = keys_of(first + numbers_of(1_000, hot, 1))
        # the sealed file is older: lookups that begin here read only the other one
        begin_ms = index.files()[-1].second_min * 1000
        with ThreadPoolExecutor(1, "bench-reader") as threads:
            pause = threading.Event()
            before = threads.submit(_look_up, index, keys, begin_ms, latencies["before"], pause, other)
            pause.wait(setting.idle_s)
            pause.set()
            before.result()
            during = threads.submit(_look_up, index, keys, begin_ms, latencies["during"], stop, other)
            try:
                with memory, section:
                    compact_only(index)
            finally:
                stop.set()
            during.result()
    meter.record("compaction beside a reader", section.elapsed_s)
    meter.record("anonymous memory, increase", memory.peak_mib)
    for state, samples in latencies.items():
        meter.record_percentiles({_STALLS[state, which]: at for which, at in _WHICH.items()}, samples)


COMPACT = Suite("compact", _compact_specs, every_round(_alone, _beside_a_reader))
"""A full file per round, alone, and beside a reader of another file. The reader's stalls are measured."""


def _look_up(
    index: IndexService, keys: list[str], begin_ms: int, latencies: array[float], stop: threading.Event, core: int
) -> None:
    """Look keys up at a steady pace. A lookup's time begins when it is due, so that delays count."""
    pin_thread(core)
    due_s = time.perf_counter()
    for key in cycle(keys):
        time.sleep(max(0.0, due_s - time.perf_counter()))
        answer = index.query(TOPIC, key, begin_ms)
        now_s = time.perf_counter()
        latencies.append(now_s - due_s)
        require((len(answer) > 0, len(answer.explain.files)), (True, 1), "whether there are answers, and of files")
        if stop.is_set():
            return
        due_s = max(due_s + _PERIOD_S, now_s)


_PAUSE_PERIOD_S = 0.001
_SINGLES = 4
_LONGEST_S = 180.0
_CALLS = ("put", "put_batch")
_PAUSE_WHICH = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
_STATES = ("busy", "idle")
_COUNTS = ("files begun", "compactions", "uploads", "queries", "puts pushed back")


@dataclass
class _Latencies:
    """Seconds of each call, by kind."""

    samples: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in _CALLS})
    entries: int = 0
    elapsed_s: float = 0.0
    pushed_back: int = 0

    def timed(self, call: str, put: Callable[..., int], *arguments: Any) -> None:
        """Call `put` until it succeeds. The time includes the waits."""
        before_s = time.perf_counter()
        while True:
            try:
                put(*arguments)
            except BackPressure:
                self.pushed_back += 1
                time.sleep(_PAUSE_PERIOD_S)
            else:
                break
        self.samples[call].append(time.perf_counter() - before_s)


def _pause_specs(setting: Setting) -> Sequence[Spec]:
    return (
        *(Spec(f"{call}, {state}, {which}", "us") for call in _CALLS for state in _STATES for which in _PAUSE_WHICH),
        Spec("entries put", "entries/s"),
        *(Spec(name, "count") for name in _COUNTS),
    )


def _pause(setting: Setting, folder: Path, meter: Meter) -> None:
    keys = key_array(np.arange(min(setting.entries, 2_000_000)))
    measured, other = cores()
    for _ in meter.rounds():
        with pinned(other):
            with scratch(folder) as place:
                idle = _idle(setting, place, keys, measured)
            with scratch(folder) as place:
                busy = _busy(setting, place, keys, measured, meter)
        for state, latencies in zip(_STATES, (busy, idle), strict=True):
            for call, samples in latencies.samples.items():
                meter.record_percentiles(
                    {f"{call}, {state}, {which}": at for which, at in _PAUSE_WHICH.items()}, samples
                )
        meter.record("entries put", busy.entries / busy.elapsed_s)


PAUSE = Suite("pause", _pause_specs, _pause)
"""A batch of 1,000 and four single puts every millisecond, until the waiting files are uploaded."""


def _idle(setting: Setting, place: Path, keys: Any, core: int) -> _Latencies:
    """Put for a while into a buffer that no other thread flushes or reads."""
    index = setting.open(place, buffer_max_entries=1 << 40, buffer_max_bytes=1 << 50)
    with ThreadPoolExecutor(1, "bench-writer") as threads:
        settle()
        ends_s = time.monotonic() + setting.idle_s
        try:
            return threads.submit(_write, index, setting, keys, core, lambda: time.monotonic() >= ends_s).result()
        finally:
            index.abandon()


def _busy(setting: Setting, place: Path, keys: Any, core: int, meter: Meter) -> _Latencies:
    """Put while every worker runs, until all waiting files, and one that begins here, are uploaded."""
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

        def finished() -> bool:
            return disk.counts["uploaded"] > setting.pause_files or time.monotonic() >= ends_s

        looking_up = threads.submit(_look_up_beside, index, keys_of(numbers_of(10_000, len(keys), 1)), done)
        writing = threads.submit(_write, index, setting, keys, core, finished, waiting)
        try:
            latencies = writing.result()
        finally:
            counts = disk.counts.copy()
            done.set()
        moved = [counts[state] for state in ("unsealed", "compacted", "uploaded")]
        index.flush()
        found = sum(getattr(file, "count", 0) for file in index.files())
        require(found, waiting + latencies.entries, "entries in the index")
    for name, value in zip(_COUNTS, (*moved, looking_up.result(), latencies.pushed_back), strict=True):
        meter.record(name, value)
    return latencies


def _look_up_beside(index: IndexService, keys: list[str], done: threading.Event) -> int:
    """Look keys up, one after another, until done; return the number of lookups."""
    for number, key in enumerate(cycle(keys)):
        index.query(TOPIC, key)
        if done.wait(_PAUSE_PERIOD_S):
            return number + 1
    return 0


def _write(
    index: IndexService, setting: Setting, keys: Any, core: int, finished: Callable[[], bool], position: int = 0
) -> _Latencies:
    """Put messages from number `position` on at a steady pace until `finished`, but a minimum in any case."""
    pin_thread(core)
    latencies, rows = _Latencies(), setting.pause_rows
    texts = cycle(keys[: min(len(keys), 10_000)].to_pylist())
    started_s = time.perf_counter()
    due_s = started_s
    while not latencies.entries or not finished():
        time.sleep(max(0.0, due_s - time.perf_counter()))  # a late writer lets other threads run all the same
        first = position % max(1, len(keys) - rows + 1)
        columns = batch(np.arange(position, position + rows), keys[first : first + rows])
        position += rows
        latencies.timed("put_batch", index.put_batch, columns)
        for number in range(position, position + _SINGLES):
            latencies.timed("put", index.put, TOPIC, 1, next(texts), number * 1000, 512, START_MS + number // 10)
        latencies.entries += rows + _SINGLES
        due_s = max(due_s + _PAUSE_PERIOD_S, time.perf_counter())  # a late writer does not hurry
    latencies.elapsed_s = time.perf_counter() - started_s
    return latencies
