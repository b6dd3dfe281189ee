"""One index, two roots, a real server: leases, takeover, and writers that continue too late."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fencing.scenarios import FencingScenarios, records
from tests.real_s3.commands import TIMEOUT_S, finished, ingest_command, settings
from tests.real_s3.conftest import Server
from tests.real_s3.gate import Gate
from tests.real_s3.sample import Sample
from tests.support.hanging import until
from tests.support.processes import started
from tiered_index import IndexReader
from tiered_index.base.clock import SystemClock
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

pytestmark = pytest.mark.real_s3

FENCED_EXIT = 5


class TestFencing(FencingScenarios):
    """The scenarios of every storage."""


@pytest.fixture(scope="module")
def sources(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files that are the whole sample together."""
    folder = tmp_path_factory.mktemp("sources")
    paths = folder / "first.parquet", folder / "second.parquet"
    sample.write_parquet(paths[0], 0, 300_000, group_rows=50_000)
    sample.write_parquet(paths[1], 300_000, 400_000, group_rows=50_000)
    return paths


def take_over(command: list[str], environment: dict[str, str]) -> None:
    """Run `command` as soon as the stopped writer's lease has ended."""

    def let_in() -> bool:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode in (0, FENCED_EXIT), done.stderr
        return done.returncode == 0

    until(let_in, within_s=TIMEOUT_S, every_s=0.05)


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
        # the stopped record arrives after the fence: the new writer has its number
        assert after == before
        of_the_first = sum(record.kind == "publish" and record.epoch == 1 for record in after)
        assert of_the_first == published == (stop == "between two files")
        assert list((tmp_path / "first").rglob("compacted/*.index"))
        # the same command, after the other one has ended, publishes the kept entries: none is lost or doubled
        finished(command, environment)
        state = StorageLog(storage, SystemClock()).open()
        assert sum(o.count for o in state.objects.values()) >= sample.workload.entries
        assert [info.name for info in storage.list("data/")] == sorted(state.objects)
    with IndexReader.open(plain) as reader:
        sample.check(reader, sample.questions(60))
