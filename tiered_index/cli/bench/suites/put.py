"""Suite `put`: how fast entries are taken in, on one core: `put_batch`, its durable flush, and `put` of one entry a
call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tiered_index.cli.bench.figures import Spec, at_least
from tiered_index.cli.bench.machine import cores, pinned, settle
from tiered_index.cli.bench.messages import START_MS, TOPIC, keys_of
from tiered_index.cli.bench.meter import Meter, Section
from tiered_index.cli.bench.setting import FLUSH_ENTRIES, Setting, fill, require, scratch
from tiered_index.service.index import IndexService
from tiered_index.storage.disk import Disk

__all__ = ["Put"]

_BATCH, _DURABLE, _CPU, _PLAIN = (
    "put_batch",
    "put_batch and durable flush",
    "put_batch and flush, CPU",
    "times a plain durable write",
)
_SINGLE, _SINGLE_CPU, _SINGLE_DURABLE = "put, one entry a call", "put, CPU", "put and durable flush"
_CALL, _FLUSH, _ONE, _ONE_FLUSH = "put_batch call", "flush", "put loop", "flush of single puts"


class Put:
    """A full file, filled in batches, and single puts; the process stays on one core."""

    name = "put"
    passes = 1

    def specs(self, setting: Setting) -> Sequence[Spec]:
        """As `Suite.specs`."""
        return (
            Spec(_BATCH, "entries/s", sections=(_CALL,)),
            Spec(_DURABLE, "entries/s", at_least(6e6), (_CALL, _FLUSH)),
            Spec(_CPU, "ns/entry"),
            Spec(_PLAIN, "ratio"),
            Spec(_SINGLE, "entries/s", at_least(4e5), (_ONE,)),
            Spec(_SINGLE_CPU, "ns/entry"),
            Spec(_SINGLE_DURABLE, "entries/s"),
        )

    def run(self, setting: Setting, folder: Path, meter: Meter) -> None:
        """As `Suite.run`."""
        core, _ = cores()
        for _ in meter.rounds():
            with scratch(folder) as place, setting.open(place) as index, pinned(core):
                _batches(index, setting, place, meter)
                _singles(index, setting, meter)


def _batches(index: IndexService, setting: Setting, place: Path, meter: Meter) -> None:
    count = setting.entries
    call, flush, plain = meter.section(_CALL), meter.section(_FLUSH), meter.section("plain write")
    index.put(TOPIC, 0, "first", 0, 1, START_MS)
    index.flush()  # the file's space is taken before it is needed, as a running index does
    settle()
    fill(index, 1, count - 1, call, flush)
    require([getattr(file, "count", None) for file in index.files()], [count], "entries of the full file")
    settle()
    _write_plainly(place / "plain", setting, plain)
    durable_s = call.elapsed_s + flush.elapsed_s
    meter.record(_BATCH, count / call.elapsed_s)
    meter.record(_DURABLE, count / durable_s)
    meter.record(_CPU, (call.cpu_s + flush.cpu_s) / count * 1e9)
    meter.record(_PLAIN, durable_s / plain.elapsed_s)


def _write_plainly(path: Path, setting: Setting, section: Section) -> None:
    """Write as many bytes as the entries take, in pieces as large as the flushes, each durable."""
    piece, total = (
        os.urandom(min(FLUSH_ENTRIES, setting.entries) * setting.entry_bytes),
        setting.entries * setting.entry_bytes,
    )
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
    put, flush = meter.section(_ONE), meter.section(_ONE_FLUSH)
    put_one = index.put
    with put:
        for key, offset, timestamp_ms in calls:
            put_one(TOPIC, 1, key, offset, 512, timestamp_ms)
    with flush:
        index.flush()
    require(sum(getattr(file, "count", 0) for file in index.files()), setting.entries + count, "entries in the index")
    meter.record(_SINGLE, count / put.elapsed_s)
    meter.record(_SINGLE_CPU, put.cpu_s / count * 1e9)
    meter.record(_SINGLE_DURABLE, count / (put.elapsed_s + flush.elapsed_s))
