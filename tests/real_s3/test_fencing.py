"""One index, two roots, a real server: leases, takeover, and writers that wake up too late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real_s3.commands import TIMEOUT_S, finished, ingest_command, settings, started
from tests.real_s3.conftest import Server
from tests.real_s3.gate import Gate
from tests.real_s3.sample import Sample
from tiered_index import IndexReader, IndexService
from tiered_index.clock import ManualClock, SystemClock
from tiered_index.errors import LockHeld, WriterFenced
from tiered_index.service.log_records import LogRecord
from tiered_index.service.storage_log import StorageLog
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3 import S3Storage

pytestmark = pytest.mark.real_s3

NOW_MS = 1_700_000_000_000
FENCED_EXIT = 5


def open_index(root: Path, uri: str, clock: ManualClock) -> IndexService:
    return IndexService.open(root=root, storage=uri, clock=clock, background=False, slots=101, items=1000)


def put(index: IndexService, topic: str, count: int) -> None:
    for n in range(count):
        index.put(topic, n % 3, f"key-{n % 10}", n, 10, NOW_MS + n * 1000)


def records(storage: S3Storage) -> list[LogRecord]:
    """Return the whole log; it must have no hole."""
    names = [info.name for info in storage.list("log/")]
    found = [LogRecord.decode(storage.get(name), name) for name in names]
    assert [record.number for record in found] == list(range(1, len(found) + 1))
    return found


def test_a_lease_keeps_others_out_until_it_ends(uri: str, storage: S3Storage, tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    with open_index(tmp_path / "first", uri, clock) as first:
        with pytest.raises(LockHeld) as held:
            open_index(tmp_path / "second", uri, clock)
        assert held.value.pid == os.getpid()
        clock.advance(59)
        first.run_lifecycle()  # renews
        clock.advance(59)
        with pytest.raises(LockHeld):
            open_index(tmp_path / "second", uri, clock)
    with open_index(tmp_path / "second", uri, clock):  # released, so at once
        pass
    assert [record.kind for record in records(storage)] == ["create", "fence", "fence"]
    assert [record.epoch for record in records(storage)] == [0, 1, 2]


def test_a_writer_that_was_taken_over_publishes_nothing(uri: str, storage: S3Storage, tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    first = open_index(tmp_path / "first", uri, clock)
    put(first, "old", 50)
    first.flush()
    clock.advance(61)
    with open_index(tmp_path / "second", uri, clock) as second:
        put(second, "new", 30)
        second.seal()
        second.run_lifecycle()
        before = records(storage)
        first.seal()
        for _ in range(2):
            with pytest.raises(WriterFenced, match="newer writer"):
                first.run_lifecycle()
        with pytest.raises(WriterFenced):
            put(first, "old", 1)
        assert first.health()["fenced"]
        assert records(storage) == before
        assert len(first.query("old", "key-3")) == 5  # its files are kept, and answer
        first.close()
        assert list((tmp_path / "first").rglob("compacted/*.index"))
    with open_index(tmp_path / "first", uri, clock) as first:  # in its turn it publishes what it kept
        first.run_lifecycle()
        # what it had uploaded in vain is swept, too
        assert [info.name for info in storage.list("data/")] == sorted(first.log_state.objects)
    with IndexReader.open(uri, clock=clock) as reader:
        assert len(reader.query("old", "key-3")) == 5
        assert len(reader.query("new", "key-3")) == 3


@pytest.fixture(scope="module")
def sample() -> Sample:
    return Sample.generate(400_000, seed=2)


@pytest.fixture(scope="module")
def sources(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files that make the whole sample together."""
    folder = tmp_path_factory.mktemp("sources")
    paths = folder / "first.parquet", folder / "second.parquet"
    sample.workload.write_parquet(paths[0], 0, 300_000, group_rows=50_000)
    sample.workload.write_parquet(paths[1], 300_000, 400_000, group_rows=50_000)
    return paths


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def take_over(command: list[str], environment: dict[str, str]) -> None:
    """Run `command` as soon as the stopped writer's lease has ended."""

    def let_in() -> bool:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode in (0, FENCED_EXIT), done.stderr
        return done.returncode == 0

    until(let_in, "the lease never ended")


STOPS: dict[str, tuple[str, str, bool]] = {
    "in an upload": ("PUT", r"partNumber=2\b", False),
    "before its record": ("PUT", r"/log/0+3\b", False),
    "between two files": ("PUT", r"/log/0+3\b", True),
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_stopped_writer_that_wakes_publishes_nothing_and_says_why(
    server: Server, place: str, server_gate: Gate, tmp_path: Path, sample: Sample, sources: tuple[Path, Path], stop: str
) -> None:
    method, path, answer = STOPS[stop]
    environment = settings(LEASE_TTL_S="2")
    plain, gated = server.uri(place), server.uri(place, server_gate.endpoint_url)
    command = ingest_command(sources[0], tmp_path / "first", gated)
    server_gate.hold(method, path, answer=answer)
    with started(command, environment) as first, open_storage(plain) as storage:
        assert isinstance(storage, S3Storage)
        server_gate.wait()
        os.kill(first.pid, signal.SIGSTOP)
        published = sum(record.kind == "publish" for record in records(storage))
        take_over(ingest_command(sources[1], tmp_path / "second", plain), environment)
        before = records(storage)
        assert [record.epoch for record in before if record.kind == "fence"] == [1, 2]
        server_gate.release()
        os.kill(first.pid, signal.SIGCONT)
        out, err = first.communicate(timeout=TIMEOUT_S)
        assert first.returncode == FENCED_EXIT, (out, err)
        assert "newer writer (epoch 2)" in err
        after = records(storage)
        # The record that was on its way when it was stopped is let go behind the fence: its number was lost to the new writer.
        assert after == before
        assert sum(record.kind == "publish" and record.epoch == 1 for record in after) == published == (stop == "between two files")
        assert list((tmp_path / "first").rglob("compacted/*.index"))
        # Given again once the other one has ended, it publishes what it kept: nothing is lost, nothing doubled.
        finished(command, environment)
        state = StorageLog(storage, SystemClock()).open()
        assert sum(o.count for o in state.objects.values()) >= sample.workload.entries
        assert [info.name for info in storage.list("data/")] == sorted(state.objects)
        assert list(storage.list_uploads()) == []
    with IndexReader.open(plain) as reader:
        sample.check(reader, sample.questions(60))


def test_a_writer_without_the_console_keeps_what_it_could_not_publish(uri: str, storage: S3Storage, tmp_path: Path) -> None:
    """The same through the library: a process that is stopped in the middle of its life, with its threads running."""
    script = f"""
import sys, time
from tiered_index import IndexService
from tiered_index.errors import WriterFenced

index = IndexService.open(root=sys.argv[1], storage=sys.argv[2], slots=101, items=1000, lease_ttl_s=1, lifecycle_interval_s=0.05)
for n in range(500):
    index.put("old", 0, f"key-{{n % 10}}", n, 10, {NOW_MS} + n * 1000)
index.flush()
print("flushed", flush=True)
sys.stdin.readline()
deadline_s = time.monotonic() + 60
try:
    n = 500
    while time.monotonic() < deadline_s:
        index.put("old", 0, f"key-{{n % 10}}", n, 10, {NOW_MS} + n * 1000)
        n += 1
        time.sleep(0.01)
except WriterFenced as error:
    print("fenced", error, flush=True)
print(len(index.query("old", "key-3", max_count=1000)) >= 50, flush=True)
index.close()
"""
    with started([sys.executable, "-c", script, str(tmp_path / "first"), uri]) as first:
        assert first.stdout
        assert first.stdin
        assert first.stdout.readline() == "flushed\n"
        os.kill(first.pid, signal.SIGSTOP)

        def let_in() -> bool:
            try:
                second = IndexService.open(root=tmp_path / "second", storage=uri, background=False, slots=101, items=1000)
            except LockHeld:
                return False
            with second:
                put(second, "new", 10)
                second.seal()
                second.run_lifecycle()
            return True

        until(let_in, "the lease never ended")
        before = records(storage)
        os.kill(first.pid, signal.SIGCONT)
        out, err = first.communicate("go on\n", timeout=TIMEOUT_S)
        assert first.returncode == 0, err
        assert out.splitlines()[0].startswith("fenced"), out
        assert "newer writer" in out
        assert out.splitlines()[1] == "True"
        assert records(storage) == before
        assert not any(record.kind == "publish" and record.epoch == 1 for record in before)
    with IndexService.open(root=tmp_path / "first", storage=uri, background=False) as first_again:
        first_again.seal()
        first_again.run_lifecycle()
        assert len(first_again.query("old", "key-3", max_count=1000)) >= 50
