"""`tiered-index ingest FILE --wait`, killed by SIGKILL at the worst moments, and run again: every entry is found
exactly once.

The moments are requests: the gate holds one (or its response), and the process dies while it waits. So an upload is
unfinished, or the server has stored a part or a record without the client's knowledge.
"""

import json
from pathlib import Path

import pytest

from tests.real_s3.commands import TIMEOUT_S, finished, ingest_command, settings
from tests.real_s3.conftest import Server
from tests.real_s3.gate import Gate
from tests.real_s3.sample import MESSAGES, Sample
from tests.support.processes import started
from tiered_index import IndexReader
from tiered_index.base.clock import SystemClock
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

pytestmark = pytest.mark.real_s3

MOMENTS: dict[str, tuple[str, str, bool, int]] = {
    "before the log is made": ("PUT", r"/log/0+1\b", False, 0),
    "the log made, unheard": ("PUT", r"/log/0+1\b", True, 0),
    "before its epoch": ("PUT", r"/epoch/", False, 0),
    "its epoch claimed, unheard": ("PUT", r"/epoch/", True, 0),
    "before its fence": ("PUT", r"/log/0+2\b", False, 0),
    "an upload begun, unheard": ("POST", r"/data/.*uploads", True, 0),
    "before the first part": ("PUT", r"partNumber=1\b", False, 0),
    "before the second part": ("PUT", r"partNumber=2\b", False, 0),
    "all parts stored, unheard": ("PUT", r"partNumber=2\b", True, 0),
    "before completion": ("POST", r"/data/.*uploadId=", False, 0),
    "completed, unheard": ("POST", r"/data/.*uploadId=", True, 0),
    "before its first file is published": ("PUT", r"/log/0+3\b", False, 0),
    "its first file published, unheard": ("PUT", r"/log/0+3\b", True, 0),
    "in the second file's upload": ("PUT", r"partNumber=2\b", False, 1),
    "the second file published, unheard": ("PUT", r"/log/0+4\b", True, 0),
    "before the lease is released": ("PUT", r"/lease/.*0+2\b", False, 0),
}


@pytest.fixture(scope="module")
def source(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "messages.parquet"
    sample.write_parquet(path, 0, MESSAGES, group_rows=50_000)
    return path


def check(sample: Sample, uri: str, root: Path) -> None:
    """Assert that lookups find every entry exactly once, and that at most a killed upload is left for a sweep.

    The command puts a half-confirmed batch again, so files may have an entry twice. An answer never does. The most
    frequent key has entries in every batch, so its answer alone would show a missing one.
    """
    with open_storage(uri) as storage:
        state = StorageLog(storage, SystemClock()).open()
        assert sample.workload.entries <= sum(o.count for o in state.objects.values()) < 2 * sample.workload.entries
        assert list(state.positions.values()) == [MESSAGES]
        names = {info.name for info in storage.list("data/")}
        assert names >= state.objects.keys()
        # that of the killed upload: sweeps delete it by its age
        assert len(names - state.objects.keys()) <= 1
        numbers = [int(info.name.removeprefix("log/")) for info in storage.list("log/")]
        assert numbers == list(range(1, state.number + 1))
    with IndexReader.open(uri) as reader:
        sample.check(reader, sample.questions(60))
    assert not list(root.rglob("unsealed/*.index"))
    assert not list(root.rglob("compacted/*.index"))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_a_request_loses_and_doubles_nothing(
    server: Server, place: str, server_gate: Gate, tmp_path: Path, sample: Sample, source: Path, moment: str
) -> None:
    method, path, answer, skip = MOMENTS[moment]
    uri, root = server.uri(place, server_gate.endpoint_url), tmp_path / "root"
    command = ingest_command(source, root, uri)
    server_gate.hold(method, path, answer=answer, skip=skip)
    with started(command, settings()) as process:
        server_gate.wait()
        assert process.poll() is None
        if "partNumber" in path:
            with open_storage(server.uri(place)) as storage:
                assert len(storage.purge(0)) == 1
        process.kill()
        process.wait(TIMEOUT_S)
    server_gate.release()
    report = json.loads(finished(command))
    assert report["status"] == "complete"
    assert report["position"] == MESSAGES
    check(sample, server.uri(place), root)
