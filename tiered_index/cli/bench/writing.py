"""The suites of writing: `put`, `compact` and `upload`."""

from __future__ import annotations

import os
import shutil
import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np

from tiered_index.cli.bench.figures import Meter, Section, Spec, Suite, at_least, at_most, every_round, percentiles_us
from tiered_index.cli.bench.machine import MemoryWatch, cores, pin_thread, pinned, settle
from tiered_index.cli.bench.messages import START_MS, TOPIC, keys_of, numbers_of
from tiered_index.cli.bench.setting import (
    FLUSH_ENTRIES,
    Setting,
    WatchedDisk,
    compact_only,
    fill,
    require,
    without_uploads,
)
from tiered_index.format.layout import Layout
from tiered_index.service.index import IndexService
from tiered_index.storage.disk import Disk


def _put_specs(setting: Setting) -> Sequence[Spec]:
    return (
        Spec("put_batch", "entries/s", sections=("put_batch call",)),
        Spec("put_batch and durable flush", "entries/s", at_least(6e6), ("put_batch call", "flush")),
        Spec("put_batch and flush, CPU", "ns/entry"),
        Spec("times a plain durable write", "ratio"),
        Spec("put, one entry a call", "entries/s", at_least(4e5), ("put loop",)),
        Spec("put, CPU", "ns/entry"),
        Spec("put and durable flush", "entries/s"),
    )


def _put(setting: Setting, place: Path, meter: Meter) -> None:
    core, _ = cores()
    with setting.open(place) as index, pinned(core):
        _batches(index, setting, place, meter)
        _singles(index, setting, meter)


PUT = Suite("put", _put_specs, every_round(_put))
"""A full file, filled in batches with durable flushes, and single puts; the process stays on one core."""


def _batches(index: IndexService, setting: Setting, place: Path, meter: Meter) -> None:
    count = setting.entries
    call, flush, plain = meter.section("put_batch call"), meter.section("flush"), meter.section("plain write")
    index.put(TOPIC, 0, "first", 0, 1, START_MS)
    index.flush()  # the file's space is taken before it is needed, as a running index does
    settle()
    fill(index, 1, count - 1, call, flush)
    require([getattr(file, "count", None) for file in index.files()], [count], "entries of the full file")
    settle()
    _write_plainly(place / "plain", setting, plain)
    durable_s = call.elapsed_s + flush.elapsed_s
    meter.record("put_batch", count / call.elapsed_s)
    meter.record("put_batch and durable flush", count / durable_s)
    meter.record("put_batch and flush, CPU", (call.cpu_s + flush.cpu_s) / count * 1e9)
    meter.record("times a plain durable write", durable_s / plain.elapsed_s)


def _write_plainly(path: Path, setting: Setting, section: Section) -> None:
    """Write as many bytes as the entries take, in pieces as large as the flushes, each durable."""
    entry_bytes = setting.layout.schema.entry.itemsize
    piece, total = os.urandom(min(FLUSH_ENTRIES, setting.entries) * entry_bytes), setting.entries * entry_bytes
    disk = Disk()
    descriptor = disk.create(path)
    disk.allocate(descriptor, total)
    try:
        for position in range(0, total, len(piece)):
            with section:
                disk.pwrite(descriptor, memoryview(piece)[: total - position], position)
                disk.sync(descriptor)
    finally:
        disk.close(descriptor)


def _singles(index: IndexService, setting: Setting, meter: Meter) -> None:
    count = setting.singles
    calls = list(zip(keys_of(np.arange(count)), range(count), range(START_MS, START_MS + count), strict=True))
    put, flush = meter.section("put loop"), meter.section("flush of single puts")
    put_one = index.put
    with put:
        for key, offset, timestamp_ms in calls:
            put_one(TOPIC, 1, key, offset, 512, timestamp_ms)
    with flush:
        index.flush()
    require(sum(getattr(file, "count", 0) for file in index.files()), setting.entries + count, "entries in the index")
    meter.record("put, one entry a call", count / put.elapsed_s)
    meter.record("put, CPU", put.cpu_s / count * 1e9)
    meter.record("put and durable flush", count / (put.elapsed_s + flush.elapsed_s))


_WHICH = {"p50": 50.0, "p99.9": 99.9, "worst lookup": 100.0}
_STALLS = {(state, which): f"reader's {which} {state}" for state in ("before", "during") for which in _WHICH}
_JAVA_S = (4.4, 5.4)
"""Java's doCompaction of 20,000,000 items, without making the file durable (golden/BASELINE.md)."""
_HOT_SHARE = 100
_PERIOD_S = 0.0002
_GAP = 20_000
"""Messages left out, so that the two files have no second in common."""


def _java(seconds: float) -> str:
    return f"times as fast as Java's {seconds} s"


def _compact_specs(setting: Setting) -> Sequence[Spec]:
    java = (
        [Spec(_java(seconds), "ratio", at_least(2), ("compaction",)) for seconds in _JAVA_S] if setting.is_full else []
    )
    return (
        Spec("compaction of a full file", "s"),
        Spec("compaction rate", "entries/s"),
        Spec("compaction, CPU", "ns/entry"),
        Spec("times a plain durable copy", "ratio"),
        *java,
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
        (path,) = (place / "root" / "compacted").iterdir()
        copy = _copied(path, place, meter)
    meter.record("compaction of a full file", section.elapsed_s)
    meter.record("compaction rate", setting.entries / section.elapsed_s)
    meter.record("compaction, CPU", section.cpu_s / setting.entries * 1e9)
    meter.record("times a plain durable copy", section.elapsed_s / copy.elapsed_s)
    if setting.is_full:
        for seconds in _JAVA_S:
            meter.record(_java(seconds), seconds / section.elapsed_s * setting.entries / 20e6)


def _copied(source: Path, place: Path, meter: Meter) -> Section:
    """Copy a file durably and return how long that took: what any rewriting of it is compared with."""
    settle()
    with meter.section("copy") as copy, source.open("rb") as read, (place / "copy").open("xb") as write:
        shutil.copyfileobj(read, write, 8 << 20)
        write.flush()
        Disk().sync(write.fileno())
    return copy


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
    meter.record("compaction beside a reader", section.elapsed_s)
    meter.record("anonymous memory, increase", memory.peak_mib)
    for state, samples in latencies.items():
        for which, value in zip(_WHICH, percentiles_us(samples, *_WHICH.values()), strict=True):
            meter.record(_STALLS[state, which], value)


COMPACT = Suite("compact", _compact_specs, every_round(_alone, _beside_a_reader))
"""A full file a round, alone, and beside a reader of another file whose stalls are measured."""


def _look_up(
    index: IndexService, keys: list[str], begin_ms: int, latencies: array[float], stop: threading.Event, core: int
) -> None:
    """Look keys up at a steady pace; a lookup's time begins when it is due, so that delays count."""
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


_SMALL_ENTRIES = 1_000
_SMALL_SHARE = 10


def _upload_specs(setting: Setting) -> Sequence[Spec]:
    return (
        Spec("upload of a full file", "s"),
        Spec("upload rate", "MiB/s"),
        Spec("times a plain durable copy", "ratio"),
        Spec("compaction, upload and retirement", "entries/s"),
        Spec("small files: compaction and upload", "files/s"),
        Spec("small files: retirement", "files/s"),
    )


def _full_file(setting: Setting, place: Path, meter: Meter) -> None:
    uploading, whole = meter.section("upload"), meter.section("life cycle")

    def reached(state: str) -> None:
        if state == "compacted":
            uploading.start()
        elif state == "uploaded":
            uploading.stop()

    with setting.open(place, disk=WatchedDisk(reached), local_keep_s=0) as index:
        fill(index, 0, setting.entries)
        index.seal()
        settle()
        with whole:
            index.run_lifecycle()
        require(Counter(file.place for file in index.files()), {"storage": 1}, "states of the files")
        (stored,) = index.log_state.objects.values()
        (source,) = (
            path
            for path in (place / "storage").rglob("*")
            if path.is_file() and path.stat().st_size == stored.size_bytes
        )
        copy = _copied(source, place, meter)
    meter.record("upload of a full file", uploading.elapsed_s)
    meter.record("upload rate", stored.size_bytes / uploading.elapsed_s / (1 << 20))
    meter.record("times a plain durable copy", uploading.elapsed_s / copy.elapsed_s)
    meter.record("compaction, upload and retirement", setting.entries / whole.elapsed_s)


def _small_files(setting: Setting, place: Path, meter: Meter) -> None:
    files = max(2, setting.small_files // _SMALL_SHARE)
    layout = setting.layout
    small = replace(setting, layout=Layout(layout.preset, layout.schema, _SMALL_ENTRIES, _SMALL_ENTRIES + 1))
    living, retiring = meter.section("small files"), meter.section("retirement")

    def reached(state: str) -> None:
        if state == "uploaded" and disk.counts["uploaded"] == files:
            living.stop()
            retiring.start()

    disk = WatchedDisk(reached)
    with small.open(place, disk=disk, local_keep_s=0) as index:
        fill(index, 0, files * _SMALL_ENTRIES)
        settle()
        with living:
            index.run_lifecycle()
        retiring.stop()
        require(Counter(file.place for file in index.files()), {"storage": files}, "states of the small files")
    meter.record("small files: compaction and upload", files / living.elapsed_s)
    meter.record("small files: retirement", files / retiring.elapsed_s)


UPLOAD = Suite("upload", _upload_specs, every_round(_full_file, _small_files))
"""A full file, and a number of small ones, through the life cycle; a local copy goes as soon as it is uploaded."""
