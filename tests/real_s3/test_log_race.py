"""Writers that race for the same log numbers on a real server: every record is there once, and no number is left out."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.real_s3.commands import TIMEOUT_S, started
from tiered_index import IndexService
from tiered_index.clock import SystemClock
from tiered_index.service.log_records import LogRecord, StoredObject
from tiered_index.service.storage_log import StorageLog
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3 import S3Storage

pytestmark = pytest.mark.real_s3

EACH = 25

RACER = """
import sys
from tests.real_s3.test_log_race import append_all
from tiered_index.storage.opening import open_storage

with open_storage(sys.argv[1]) as storage:
    append_all(storage, sys.argv[2], int(sys.argv[3]), lambda: (print("ready", flush=True), sys.stdin.readline()))
"""


def stored(name: str) -> StoredObject:
    return StoredObject(name, name.replace("/", "-"), "main", 1, 0, 0, 1, 1, 0, 0, 0, 0, 0)


def append_all(storage: object, racer: str, epoch: int, wait: object) -> None:
    """Append `EACH` records that add one object each, beginning at the log's present end."""
    assert isinstance(storage, S3Storage)
    assert callable(wait)
    log = StorageLog(storage, SystemClock(), checkpoint_every=7)
    log.open()
    wait()
    for n in range(EACH):
        log.publish(epoch, (stored(f"data/{racer}-{n}"),))


@pytest.fixture
def begun(uri: str, storage: S3Storage, tmp_path: Path) -> int:
    """Make an index; return the number of its last record. Its epoch is 1."""
    IndexService.open(root=tmp_path / "root", storage=uri, background=False, slots=7, items=100).close()
    return len(list(storage.list("log/")))


def check(storage: S3Storage, begun: int, racers: list[str]) -> None:
    names = [info.name for info in storage.list("log/")]
    records = [LogRecord.decode(storage.get(name), name) for name in names]
    assert [record.number for record in records] == list(range(1, begun + len(racers) * EACH + 1))
    added = [each.name for record in records for each in record.add]
    assert sorted(added) == sorted(f"data/{racer}-{n}" for racer in racers for n in range(EACH))
    assert len({record.attempt for record in records}) == len(records)
    for racer in racers:  # each one's own order is kept
        own = [name for name in added if name.startswith(f"data/{racer}-")]
        assert own == [f"data/{racer}-{n}" for n in range(EACH)]
    owners = [name.split("-")[0] for name in added]
    assert sum(a != b for a, b in pairwise(owners)) > len(racers), "they did not race"
    state = StorageLog(storage, SystemClock()).open()
    assert sorted(state.objects) == sorted(added)


def test_threads(uri: str, storage: S3Storage, begun: int) -> None:
    racers = ["a", "b", "c", "d"]
    barrier = threading.Barrier(len(racers))
    with ExitStack() as stack, ThreadPoolExecutor(len(racers)) as pool:
        storages = [stack.enter_context(open_storage(uri)) for _ in racers]
        list(pool.map(lambda pair: append_all(pair[0], pair[1], 1, lambda: barrier.wait(60)), zip(storages, racers, strict=True)))
    check(storage, begun, racers)


def test_processes(uri: str, storage: S3Storage, begun: int) -> None:
    racers = ["a", "b", "c"]
    with ExitStack() as stack:
        processes = [stack.enter_context(started([sys.executable, "-c", RACER, uri, racer, "1"])) for racer in racers]
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            _, err = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, err
    check(storage, begun, racers)
