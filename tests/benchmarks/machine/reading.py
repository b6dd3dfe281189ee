"""The suites of reading: `lookup`, `recovery` and `commitlog`. The page cache is warm."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.machine.figures import Goal, Meter, Spec, Suite, at_least, at_most, cores, pinned, settle
from tests.benchmarks.machine.setting import (
    START_MS,
    TOPIC,
    Setting,
    absent_keys,
    compact_only,
    fill,
    keys_of,
    numbers_of,
    require,
    scratch,
    without_uploads,
)
from tests.support.store_writer import StoreWriter
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.index import IndexService
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.types import Lookup

_STATES = ("hot", "compacted")
_KINDS = ("lookup", "miss")
_GOALS: dict[str, Goal] = {"hot lookup p50": at_most(50), "hot query_many": at_least(5e5)}


def _lookup_specs(setting: Setting) -> Sequence[Spec]:
    specs = []
    for state in _STATES:
        specs += [(f"{state} {kind} {which}", "us", f"{state} {kind}") for kind in _KINDS for which in ("p50", "p99")]
        many = f"{state} query_many"
        specs += [(many, "keys/s", many), (f"{many}, every result read", "keys/s", many)]
    return [Spec(name, unit, _GOALS.get(name), (section,)) for name, unit, section in specs]


def _lookup(setting: Setting, folder: Path, meter: Meter) -> None:
    with scratch(folder) as place, setting.open(place, storage=without_uploads(place)) as index:
        fill(index, 0, setting.entries)
        for state in _STATES:
            if state == "compacted":
                index.seal()
                compact_only(index)
            places = [file.place for file in index.files()]
            require(places, ["unsealed" if state == "hot" else state], "states of the files")
            settle()
            for number in meter.rounds():
                _measure(index, setting, state, number, meter)


LOOKUP = Suite("lookup", _lookup_specs, _lookup, passes=len(_STATES))
"""One key at a time, and many at once, in a full file, unsealed and then compacted. Each round uses other keys."""


def _measure(index: IndexService, setting: Setting, state: str, seed: int, meter: Meter) -> None:
    numbers = numbers_of(setting.lookups, setting.entries, seed)
    for kind, keys, answers in zip(_KINDS, (keys_of(numbers), absent_keys(numbers)), (len(numbers), 0), strict=True):
        latencies, found = array("d"), 0
        with meter.section(f"{state} {kind}"):
            for key in keys:
                started_s = time.perf_counter()
                result = index.query(TOPIC, key)
                latencies.append(time.perf_counter() - started_s)
                found += len(result)
        require_answers(setting, found, answers, f"answers of {state} {kind}")
        meter.record_percentiles({f"{state} {kind} p{at}": at for at in (50, 99)}, latencies)
    lookups = [Lookup(topic=TOPIC, key=key) for key in keys_of(numbers_of(setting.many, setting.entries, seed + 1_000))]
    with meter.section(f"{state} query_many") as call:
        results = index.query_many(lookups)
    with meter.section(f"{state} results") as reading:
        found = sum(len(result) for result in results)
    require_answers(setting, found, len(lookups), f"answers of {state} query_many")
    meter.record(f"{state} query_many", len(lookups) / call.elapsed_s)
    meter.record(f"{state} query_many, every result read", len(lookups) / (call.elapsed_s + reading.elapsed_s))


def require_answers(setting: Setting, found: int, expected: int, what: str) -> None:
    """Raise an error if answers are missing. In files with fingerprints, also raise one for additional answers."""
    keyed = setting.layout.schema.keyed
    # without fingerprints an answer also has entries of other keys with the same 31-bit hash: one in a hundred at
    # 20,000,000 items
    require(found if keyed else min(found, expected), expected, what)


_MANY_FILES = 1_000
_SMALL = 100
_AT_ONCE = 50
"""Number of files that are unsealed at the same time while many are made. Each has two descriptors."""


def _recovery_specs(setting: Setting) -> Sequence[Spec]:
    files = setting.small_files
    many = at_most(2) if files >= _MANY_FILES else None
    return (
        Spec("opening a full unsealed file", "s", at_most(6) if setting.is_full else None, ("opening",)),
        Spec("recovery rate", "entries/s"),
        Spec(f"opening a root with {files:,} files", "s", many, ("opening many",)),
    )


def _recovery(setting: Setting, folder: Path, meter: Meter) -> None:
    with scratch(folder) as place:
        _full_file(setting, place, meter)
    with scratch(folder) as place:
        _many_files(setting, place, meter)


RECOVERY = Suite("recovery", _recovery_specs, _recovery, passes=2)
"""A root that a crash left with a full unsealed file, and one of many files, each opened once per round."""


def _full_file(setting: Setting, place: Path, meter: Meter) -> None:
    count = setting.entries - 1  # one more entry would seal the file
    index = setting.open(place)
    fill(index, 0, count)
    index.abandon()
    settle()
    for _ in meter.rounds():
        with meter.section("opening") as opening:
            index = setting.open(place)
        found = [(file.place, getattr(file, "count", None)) for file in index.files()]
        require(found, [("unsealed", count)], "files after recovery")
        index.flush()  # reserves the next file, so that every round begins with the files that a crash leaves
        index.abandon()
        meter.record("opening a full unsealed file", opening.elapsed_s)
        meter.record("recovery rate", count / opening.elapsed_s)


def _many_files(setting: Setting, place: Path, meter: Meter) -> None:
    """Open a root of small files that are all uploaded and kept locally. They are made without syncs."""
    small, files = setting.with_files_of(_SMALL), setting.small_files
    with small.open(place, disk=UnsyncedDisk(), storage=LocalStorage(place / "storage", disk=UnsyncedDisk())) as index:
        for first in range(0, files, _AT_ONCE):
            fill(index, first * _SMALL, min(_AT_ONCE, files - first) * _SMALL)
            index.run_lifecycle()
    settle()
    for _ in meter.rounds():
        with meter.section("opening many") as opening:
            index = small.open(place)
        counts = [getattr(file, "count", 0) for file in index.files() if file.place == "uploaded"]
        require((len(counts), sum(counts)), (files, files * _SMALL), "files and entries after opening")
        index.close()
        meter.record(f"opening a root with {files:,} files", opening.elapsed_s)


# With or without a check of each body.
_READINGS = {"extraction, walking": False, "extraction, walking, bodies checked": True}
_GOAL = at_least(5e5)
_SEGMENT_BYTES = 1 << 28
_BODY_BYTES = 256
_ENTRIES = 3


def _commitlog_specs(setting: Setting) -> Sequence[Spec]:
    rates = (Spec(name, "messages/s", _GOAL, (name,)) for name in _READINGS)
    return *rates, *(Spec(f"{name}, CPU", "ns/message") for name in _READINGS)


def _commitlog(setting: Setting, folder: Path, meter: Meter) -> None:
    core, _ = cores()
    for _ in meter.rounds():
        with scratch(folder) as place, pinned(core):
            _write(place, setting.log_messages)
            settle()
            store = StoreDirectory.open(place)
            # the first reading allocates memory that later ones reuse
            for _ in CommitLogReader(store.commitlog).batches():
                pass
            for name, check_crc in _READINGS.items():
                _read(store, setting.log_messages, meter, name, check_crc)


COMMITLOG = Suite("commitlog", _commitlog_specs, _commitlog)
"""A store, written again in each round and read to its end in two ways. The process stays on one core.

Each message has a body of 256 random bytes and about 130 bytes of properties, with a unique key and two keys: 3
entries.
"""


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


def _read(store: StoreDirectory, messages: int, meter: Meter, name: str, check_crc: bool) -> None:
    found = entries = 0
    with meter.section(name) as reading:
        for batch in CommitLogReader(store.commitlog, check_crc=check_crc).batches():
            found += batch.messages
            entries += len(batch.columns)
    require((found, entries), (messages, _ENTRIES * messages), f"messages and entries of {name}")
    meter.record(name, messages / reading.elapsed_s)
    meter.record(f"{name}, CPU", reading.cpu_s / messages * 1e9)
