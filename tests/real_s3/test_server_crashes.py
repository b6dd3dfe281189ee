"""SIGKILL ends all the server's processes at once; then it starts again. Every acknowledged write is there, and uploads
continue.
"""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.real_s3.cluster import Cluster
from tests.real_s3.commands import ITEMS, SLOTS, TIMEOUT_S, ingest_command, settings
from tests.real_s3.conftest import Server
from tests.real_s3.gate import Gate
from tests.real_s3.sample import MESSAGES, Sample
from tests.support.processes import started
from tiered_index import IndexReader, IndexService
from tiered_index.base.clock import SystemClock
from tiered_index.errors import ObjectExists, StorageError, StorageUnavailable
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3.options import S3Options

pytestmark = pytest.mark.real_s3

# the client notices a refused connection at once; many repeats would only delay the tests
IMPATIENT = S3Options(max_attempts=2, read_timeout_s=10)


def test_acknowledged_writes_survive(cluster: Cluster, uri: str) -> None:
    """Four writers put small objects, like log records. Every acknowledged one is there, whole, and still unique."""
    killed, many = threading.Event(), threading.Event()

    def write(writer: int) -> list[str]:
        acknowledged: list[str] = []
        with open_storage(uri, options=IMPATIENT) as storage:
            for n in itertools.count():
                name = f"log/{writer}-{n:06d}"
                try:
                    storage.put_if_absent(name, name.encode() * 20)
                except StorageError:
                    assert killed.wait(30), f"{name} failed while the server was running"
                    return acknowledged
                acknowledged.append(name)
                if n == 100:
                    many.set()
        raise AssertionError("an endless count ended")

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, writer) for writer in range(4)]
        assert many.wait(TIMEOUT_S)  # at any moment, each writer has requests on the wire
        killed.set()
        cluster.kill()
        acknowledged = [name for writer in writers for name in writer.result(TIMEOUT_S)]
    assert len(acknowledged) > 100
    cluster.start()
    with open_storage(uri) as storage, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda name: storage.get(name) == name.encode() * 20, acknowledged))
        with pytest.raises(ObjectExists):
            storage.put_if_absent(acknowledged[0], b"second")
        assert storage.get(acknowledged[0]) == acknowledged[0].encode() * 20
        listed = {info.name for info in storage.list("log/")}
        assert listed >= set(acknowledged)
        # one object of each writer may be stored although its response was lost
        assert len(listed) <= len(acknowledged) + 4


HELD: dict[str, tuple[str, str, bool]] = {
    "in an upload": ("PUT", r"partNumber=2\b", False),
    "completed, unheard": ("POST", r"/data/.*uploadId=", True),
    "before a record": ("PUT", r"/log/0+4\b", False),
    "record stored, unheard": ("PUT", r"/log/0+4\b", True),
}


@pytest.mark.parametrize("held", HELD)
def test_uploads_continue_after_the_server_was_killed(
    server: Server, cluster: Cluster, place: str, server_gate: Gate, tmp_path: Path, sample: Sample, held: str
) -> None:
    (method, path, answer), uri = HELD[held], server.uri(place, server_gate.endpoint_url)
    settings = {"preset": "rocketmq", "slots": SLOTS, "items": ITEMS, "background": False}
    settings |= {"local_keep_s": 0, "lease_ttl_s": 600, "s3": IMPATIENT}
    with IndexService.open(root=tmp_path / "root", storage=uri, **settings) as index:
        sample.put_into(index, source="log")
        index.seal()
        server_gate.hold(method, path, answer=answer)
        with ThreadPoolExecutor(1) as pool:
            round_of_life = pool.submit(index.run_lifecycle)
            server_gate.wait()
            cluster.kill()
            acknowledged = index.log_state
            server_gate.release()
            with pytest.raises(StorageUnavailable):
                round_of_life.result(TIMEOUT_S)
        assert index.health()["problems"]
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()  # still down
        index.put("while it is down", 0, "key", 1, 1, sample.hour()[0])
        index.flush()
        cluster.start()
        with open_storage(server.uri(place)) as storage:
            state = StorageLog(storage, SystemClock()).open()
            assert state.number >= acknowledged.number
            assert state.objects.keys() >= acknowledged.objects.keys()
            if "/log/" in path:
                assert len(state.objects) == 1 + answer
        index.seal()
        index.run_lifecycle()
        index.run_lifecycle()
        assert index.health()["problems"] == []
        assert sum(o.count for o in index.log_state.objects.values()) == sample.workload.entries + 1
        assert index.log_state.positions == {"log": MESSAGES}
        assert index.log_state.objects.keys() >= acknowledged.objects.keys()
        sample.check(index, sample.questions(20))
    with IndexReader.open(server.uri(place)) as reader:
        sample.check(reader, sample.questions(60))
        assert len(reader.query("while it is down", "key")) == 1


def test_a_waiting_ingest_outlives_the_server(
    server: Server, cluster: Cluster, place: str, server_gate: Gate, tmp_path: Path, sample: Sample
) -> None:
    """`--wait` waits: the command succeeds although the server dies and starts again meanwhile."""
    source = tmp_path / "messages.parquet"
    sample.write_parquet(source, 0, MESSAGES, group_rows=50_000)
    server_gate.hold("PUT", r"partNumber=2\b")
    command = ingest_command(source, tmp_path / "root", server.uri(place, server_gate.endpoint_url))
    with started([*command, "--patience", "60"], settings()) as process:
        server_gate.wait()
        cluster.kill()
        server_gate.release()
        cluster.start()
        _, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, err
    with IndexReader.open(server.uri(place)) as reader:
        sample.check(reader, sample.questions(60))
        assert sum(o.count for o in reader.log_state.objects.values()) == sample.workload.entries
        assert list(reader.log_state.positions.values()) == [MESSAGES]
