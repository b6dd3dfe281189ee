"""Suite `compact`: compaction of a full file: alone, and beside a reader of another file whose stalls are measured."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

from tiered_index.cli.bench.figures import Spec, at_least, at_most
from tiered_index.cli.bench.machine import MemoryWatch, cores, pin_thread, pinned, settle
from tiered_index.cli.bench.messages import TOPIC, keys_of, numbers_of
from tiered_index.cli.bench.meter import Meter, percentiles_us
from tiered_index.cli.bench.setting import (
    Setting,
    WatchedDisk,
    compact_only,
    fill,
    plain_copy,
    require,
    scratch,
    without_uploads,
)
from tiered_index.service.index import IndexService

__all__ = ["Compact"]

_SECONDS, _RATE, _CPU, _COPY = (
    "compaction of a full file",
    "compaction rate",
    "compaction, CPU",
    "times a plain durable copy",
)
_BESIDE, _MEMORY = "compaction beside a reader", "anonymous memory, increase"
_WHICH = {"p50": 50.0, "p99.9": 99.9, "worst lookup": 100.0}
_STALLS = {(state, which): f"reader's {which} {state}" for state in ("before", "during") for which in _WHICH}
_COMPACTION = "compaction"
_JAVA_S = (4.4, 5.4)
"""Java's doCompaction of 20,000,000 items, without making the file durable (golden/BASELINE.md)."""
_HOT_SHARE = 100
_PERIOD_S = 0.0002
_GAP = 20_000
"""Messages left out, so that the two files have no second in common."""


def _java(seconds: float) -> str:
    return f"times as fast as Java's {seconds} s"


class Compact:
    """Two compactions of a full file a round."""

    name = "compact"
    passes = 1

    def specs(self, setting: Setting) -> Sequence[Spec]:
        """As `Suite.specs`."""
        java = (
            [Spec(_java(seconds), "ratio", at_least(2), (_COMPACTION,)) for seconds in _JAVA_S]
            if setting.is_full
            else []
        )
        return (
            Spec(_SECONDS, "s"),
            Spec(_RATE, "entries/s"),
            Spec(_CPU, "ns/entry"),
            Spec(_COPY, "ratio"),
            *java,
            Spec(_BESIDE, "s"),
            Spec(_MEMORY, "MiB", at_most(1024) if setting.is_full else None),
            *(Spec(name, "us") for name in _STALLS.values()),
        )

    def run(self, setting: Setting, folder: Path, meter: Meter) -> None:
        """As `Suite.run`."""
        for _ in meter.rounds():
            with scratch(folder) as place:
                _alone(setting, place, meter)
            with scratch(folder) as place:
                _beside_a_reader(setting, place, meter)


def _alone(setting: Setting, place: Path, meter: Meter) -> None:
    section = meter.section(_COMPACTION)
    disk = WatchedDisk(lambda state: section.stop())
    with setting.open(place, disk=disk, storage=without_uploads(place)) as index:
        fill(index, 0, setting.entries)
        index.seal()
        settle()
        with section:
            compact_only(index)
        require(disk.counts["compacted"], 1, "compacted files")
        (path,) = (place / "root" / "compacted").iterdir()
        settle()
        with meter.section("copy") as copy:
            plain_copy(path, place / "copy")
    meter.record(_SECONDS, section.elapsed_s)
    meter.record(_RATE, setting.entries / section.elapsed_s)
    meter.record(_CPU, section.cpu_s / setting.entries * 1e9)
    meter.record(_COPY, section.elapsed_s / copy.elapsed_s)
    if setting.is_full:
        for seconds in _JAVA_S:
            meter.record(_java(seconds), seconds / section.elapsed_s * setting.entries / 20e6)


def _beside_a_reader(setting: Setting, place: Path, meter: Meter) -> None:
    """Compact again, this time beside a thread on the other core that looks keys up in another, unsealed file."""
    first, hot = setting.entries + _GAP, max(1, setting.entries // _HOT_SHARE)
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
        # the sealed file is older: lookups that begin here read the other one only
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
    meter.record(_BESIDE, section.elapsed_s)
    meter.record(_MEMORY, memory.peak_mib)
    for state, samples in latencies.items():
        for which, value in zip(_WHICH, percentiles_us(samples, *_WHICH.values()), strict=True):
            meter.record(_STALLS[state, which], value)


def _look_up(
    index: IndexService, keys: list[str], begin_ms: int, latencies: array[float], stop: threading.Event, core: int
) -> None:
    """Look keys up at a steady pace; a lookup's time begins when it is due, so that whatever keeps this thread from it
    counts.
    """
    pin_thread(core)
    due_s = time.perf_counter()
    for key in cycle(keys):
        time.sleep(max(0.0, due_s - time.perf_counter()))
        answer = index.query(TOPIC, key, begin_ms)
        now_s = time.perf_counter()
        latencies.append(now_s - due_s)
        require(
            (len(answer) > 0, len(answer.explain.files)), (True, 1), "whether the reader has answers, and its files"
        )
        if stop.is_set():
            return
        due_s = max(due_s + _PERIOD_S, now_s)
