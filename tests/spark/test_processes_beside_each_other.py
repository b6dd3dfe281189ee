"""A writer, a merger and builds in separate processes on one storage, which the test kills now and then.

No entry is lost or doubled.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.property.published import Published, mark
from tests.spark.beside_program import BUILT_ROWS, KEYS, TOPIC, built, message
from tests.spark.entries import sweep
from tests.support.model import Answer, ModelEntry, ReferenceModel
from tests.support.s3_server import S3Server
from tiered_index import IndexReader
from tiered_index.clock import SystemClock
from tiered_index.errors import NotAnIndex
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 240.0
MESSAGES, BUILDS = 4_000, 12


class Role:
    """A process that starts again after each kill, until it ends by itself."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "tests.spark.beside_program", name, *map(str, arguments)]
        self.kills = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, cwd=_ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        """Kill it and start it again; do nothing if it has ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
            self.kills += 1
            self.start()

    def end(self) -> None:
        """Wait until it ends by itself; it must succeed."""
        _, error = self.process.communicate("", timeout=_PATIENCE_S)
        assert self.process.returncode == 0, f"{self.name}: {error[-3000:]}"


@contextmanager
def roles(root: Path, uri: str) -> Iterator[dict[str, Role]]:
    """Start all three; none runs when the block ends."""
    made: dict[str, Role] = {}
    try:
        made["write"] = Role("write", root, uri, MESSAGES)
        _until(lambda: _number(uri) > 0)  # a build needs an index
        made["merge"] = Role("merge", "-", uri, 0)
        made["build"] = Role("build", "-", uri, BUILDS)
        yield made
    finally:
        for role in made.values():
            role.process.kill()
            role.process.communicate()


def _until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not reached():
        assert time.monotonic() < end, "the log has no new record"
        time.sleep(0.02)


def _number(uri: str) -> int:
    with open_storage(uri) as storage:
        try:
            return StorageLog(storage, SystemClock()).open().number
        except NotAnIndex:
            return 0


def check(reader: IndexReader, log: StorageLog, key: int) -> int:
    """Look up a key: all entries that the log promised before are there once. Return the promised position."""
    state = log.refresh()
    position = state.positions.get("log", 0)
    result = reader.query(TOPIC, f"k{key}", max_count=10**6)
    assert result.status == "complete"
    found = [item.offset for item in result]
    assert len(found) == len(set(found))
    missing = set(range(key, position, KEYS)) - set(found)
    assert not missing, f"{len(missing)} of {position} promised messages are missing, such as {sorted(missing)[:3]}"
    for item in result:
        day, row = divmod(item.offset - 10**9, BUILT_ROWS)
        expected = message(item.offset) if item.offset < MESSAGES else built(day)[row]
        assert (item.queue_id, item.size, item.timestamp_ms) == (expected[1], expected[4], expected[5] // 1000 * 1000)
    return position


def check_records(log: StorageLog) -> None:
    """Each object was added once and removed at most once. Each merge added the entries that it removed. The state has
    the objects that are left.
    """
    counts: dict[str, int] = {}
    gone: set[str] = set()
    for number in range(1, log.refresh().number + 1):
        record = log.record(number)
        added = {stored.name: stored.count for stored in record.add}
        assert not added.keys() & counts.keys() and not gone & set(record.remove)
        assert set(record.remove) <= counts.keys()
        if record.kind == "merge":
            assert sum(added.values()) == sum(counts[name] for name in record.remove)
        counts |= added
        gone |= set(record.remove)
    assert counts.keys() - gone == set(log.refresh().objects)


def model() -> ReferenceModel:
    made = ReferenceModel()
    for row in [*map(message, range(MESSAGES)), *(row for number in range(BUILDS) for row in built(number))]:
        made.put(*row)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [("s3", 1), ("sqlite", 2), ("file", 3)])
def test_kills_now_and_then(tmp_path: Path, s3: S3Server, kind: str, seed: int) -> None:
    uri = {
        "s3": f"s3://{s3.new_bucket()}/index?endpoint_url={s3.endpoint_url}",
        "sqlite": f"sqlite://{tmp_path}/store.db",
        "file": f"file://{tmp_path}/store",
    }[kind]
    rng, asked = random.Random(seed), 0
    with roles(tmp_path / "root", uri) as running, open_storage(uri) as storage:
        log = StorageLog(storage, SystemClock())
        log.open()
        with IndexReader.open(uri, refresh_interval_s=0, block_cache_bytes=0) as reader:
            strike = log.state.number
            while running["write"].process.poll() is None or running["build"].process.poll() is None:
                check(reader, log, rng.randrange(KEYS))
                asked += 1
                time.sleep(0.02)  # so that the other processes progress
                if log.state.number >= strike:
                    running[rng.choice(("write", "merge", "merge", "build"))].kill()
                    strike = log.state.number + rng.randrange(2, 8)
        for role in ("write", "build", "merge"):
            running[role].end()
        kills = {role.name: role.kills for role in running.values()}
        state = log.refresh()
        assert state.positions == {"log": MESSAGES}
        check_records(log)
        published = Published(storage, [f"k{key}" for key in range(KEYS)], keyed=True)
        found = Counter(
            mark(entry, keyed=True) for stored in state.objects.values() for entry in published.entries(stored)
        )
    expected = model()
    once = Counter(mark(entry, keyed=True) for entry in expected.entries)
    # entries that were durable at a kill, but not confirmed yet, are put twice
    twice = found - once
    assert set(found) == set(once)
    assert twice.total() == 0 or (kills["write"] and max(place[4] for place in twice) < MESSAGES)
    assert min(kills["write"], kills["merge"]) >= 2 and asked > 20
    sweep(uri)
    with IndexReader.open(uri) as reader:
        for key in range(KEYS):
            assert [Answer.of(item) for item in reader.query(TOPIC, f"k{key}", max_count=10**6)] == expected.query(
                TOPIC, f"k{key}", max_count=None
            )


def test_messages_say_where_they_belong() -> None:
    rows: Iterator[int] = (row[3] for number in range(BUILDS) for row in built(number))
    assert len(set(rows)) == BUILDS * BUILT_ROWS
    assert min(row[5] for row in built(0)) > max(message(n)[5] for n in range(MESSAGES))
    entries: list[ModelEntry] = model().entries
    assert len({(e.queue_id, e.offset) for e in entries}) == MESSAGES + BUILDS * BUILT_ROWS
