"""Suite `commitlog`: index entries out of a RocketMQ store, on one core, and the store writer. The page cache is warm.

Each message has a body of 256 random bytes and some 130 bytes of properties, among them a unique key and two keys:
three entries.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tiered_index.cli.bench.figures import Spec, at_least
from tiered_index.cli.bench.machine import cores, pinned, settle
from tiered_index.cli.bench.messages import START_MS
from tiered_index.cli.bench.meter import Meter
from tiered_index.cli.bench.setting import Setting, require, scratch
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.consumequeue import QueuePositions
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.rocketmq.store_writer import StoreWriter

__all__ = ["CommitLog"]

_WALKED, _WITH_QUEUES, _CHECKED = (
    "extraction, walking",
    "extraction, with consume queues",
    "extraction, walking, bodies checked",
)
_READINGS = ((_WALKED, False, False), (_WITH_QUEUES, False, True), (_CHECKED, True, False))
_WRITER = "store writer"
_GOAL = at_least(5e5)
_SEGMENT_BYTES = 1 << 28
_BODY_BYTES = 256
_ENTRIES = 3


class CommitLog:
    """A store, written anew in each round and read to its end in three ways; the process stays on one core."""

    name = "commitlog"
    passes = 1

    def specs(self, setting: Setting) -> Sequence[Spec]:
        """As `Suite.specs`."""
        names = [name for name, _, _ in _READINGS]
        rates = (Spec(name, "messages/s", _GOAL, (name,)) for name in names)
        return *rates, *(Spec(f"{name}, CPU", "ns/message") for name in names), Spec(_WRITER, "messages/s")

    def run(self, setting: Setting, folder: Path, meter: Meter) -> None:
        """As `Suite.run`."""
        core, _ = cores()
        for _ in meter.rounds():
            with scratch(folder) as place, pinned(core):
                with meter.section(_WRITER) as writing:
                    _write(place, setting.log_messages)
                meter.record(_WRITER, setting.log_messages / writing.elapsed_s)
                settle()
                store = StoreDirectory.open(place)
                # the first reading pays for memory that later ones have
                list(CommitLogReader(store.commitlog).batches())
                for reading in _READINGS:
                    _read(store, setting.log_messages, meter, *reading)


def _write(place: Path, messages: int) -> None:
    body = os.urandom(_BODY_BYTES)
    with StoreWriter(place, segment_bytes=_SEGMENT_BYTES) as writer:
        for number in range(messages):
            writer.put(
                f"TopicOrder{number % 10:02d}",
                number % 8,
                body,
                keys=f"order-{number} user-{number % 1000}",
                tags="TagA",
                uniq_key=f"0A010203000004D218B4AAC2{number:08X}",
                properties={"CLUSTER": "DefaultCluster", "WAIT": "true"},
                store_ms=START_MS + number // 100,
            )


def _read(store: StoreDirectory, messages: int, meter: Meter, name: str, check_crc: bool, with_queues: bool) -> None:
    positions = QueuePositions(store.folder / "consumequeue") if with_queues else None
    found = entries = 0
    with meter.section(name) as reading:
        for batch in CommitLogReader(store.commitlog, check_crc=check_crc, positions=positions).batches():
            found += batch.messages
            entries += len(batch.columns)
    require((found, entries), (messages, _ENTRIES * messages), f"messages and entries of {name}")
    meter.record(name, messages / reading.elapsed_s)
    meter.record(f"{name}, CPU", reading.cpu_s / messages * 1e9)
