"""The connector of docs/examples/redis_streams.py beside a real server of Redis."""

import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.integration.cli.command_lines import run_here
from tests.support.hanging import until
from tiered_index import IndexReader
from tiered_index.connectors.contract import SourceConnector, SourceRun
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.registry import CONNECTORS
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.service.index import IndexService
from tiered_index.testing.connector_conformance import ConnectorConformance, TestedSource, WrittenMessage

_EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
_MS = 1_700_000_000_000


class Server:
    """A server of Redis at a port of this host. Its data is in memory."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.client = redis.Redis("127.0.0.1", self.port)
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.process = subprocess.Popen(
            ["redis-server", *settings], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        until(self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.ConnectionError):
            return bool(self.client.ping())
        return False

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if shutil.which("redis-server") is None:
        pytest.skip("a real Redis needs redis-server (Debian: apt-get install redis-server); not found")
    with contextlib.closing(Server(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> SourceConnector:
    """The connector of the example, whose batches are small."""
    monkeypatch.syspath_prepend(_EXAMPLES)
    module = __import__("redis_streams")
    monkeypatch.setattr(module, "COUNT", 10)
    connector: SourceConnector = module.CONNECTOR
    return connector


class Stream(TestedSource):
    """One stream of the server."""

    archives = True

    def __init__(self, server: Server, connector: SourceConnector, stream: str) -> None:
        self.server, self.connector, self.stream = server, connector, stream
        self.address = f"redis://127.0.0.1:{server.port}/{stream}"
        self.begin_ms, self.number = _MS, 0

    def write(self, count: int) -> list[WrittenMessage]:
        written = []
        for _ in range(count):
            self.number += 1
            key, text = f"key-{self.number}", f"text-{self.number}."
            fields: Any = {"key": key, "text": text}
            self.server.client.xadd(self.stream, fields, id=f"{self.begin_ms + self.number}-0")
            written.append(WrittenMessage(self.stream, key, text))
        return written

    def trim(self) -> None:
        self.server.client.xtrim(self.stream, maxlen=1, approximate=False)

    def replace(self) -> None:
        self.server.client.delete(self.stream)
        self.begin_ms -= 1_000_000

    def away(self) -> contextlib.AbstractContextManager[None]:
        return self.hanging()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.server.process.send_signal(signal.SIGCONT)


class TestRedisStreams(ConnectorConformance):
    @pytest.fixture
    def tested(self, server: Server, connector: SourceConnector, request: pytest.FixtureRequest) -> Iterator[Stream]:
        yield Stream(server, connector, request.node.name)
        server.client.delete(request.node.name)


def _follow(connector: SourceConnector, address: str, index: IndexService) -> Follower:
    notes: list[str] = []
    opened = connector.source(SourceRun(addresses=(address,), note=notes.append), index)
    with Follower(index, opened.source, follow=False, note=notes.append) as follower:
        follower.run()
    index.flush()
    return follower


@pytest.fixture
def index(tmp_path: Path) -> Iterator[IndexService]:
    service = IndexService.open(
        root=tmp_path, storage=f"memory://{tmp_path.name}", background=False, environment=False, slots=97, items=5_000
    )
    yield service
    service.abandon()


def test_an_id_is_an_offset_and_a_sequence_number_without_one_is_refused(
    server: Server, connector: SourceConnector, index: IndexService
) -> None:
    address = f"redis://127.0.0.1:{server.port}/large"
    server.client.xadd("large", {"key": "fits"}, id=f"{_MS}-{(1 << 20) - 1}")
    _follow(connector, address, index)
    (item,) = index.query("large", "fits").items
    assert (item.offset, item.timestamp_ms) == ((_MS << 20) + (1 << 20) - 1, _MS)
    server.client.xadd("large", {"key": "large"}, id=f"{_MS}-{1 << 20}")
    with pytest.raises(InvalidArgument, match=rf"entry {_MS}-{1 << 20}: sequence numbers from 1,048,576 on"):
        _follow(connector, address, index)
    assert len(index.query("large", "large")) == 0


def test_entries_that_xdel_removes_unread_are_lost(
    server: Server, connector: SourceConnector, index: IndexService
) -> None:
    stream = Stream(server, connector, "deleted")
    stream.write(2)
    _follow(connector, stream.address, index)
    stream.write(2)
    server.client.xdel("deleted", f"{_MS + 4}-0")
    follower = _follow(connector, stream.address, index)
    assert [(loss.kind, loss.end > (_MS + 4) << 20) for loss in follower.losses] == [("missing", True)]
    assert index.query("deleted", "key-4").lost and len(index.query("deleted", "key-3")) == 1
    assert _follow(connector, stream.address, index).loss_count == 0


def test_a_wrong_address_and_a_server_that_is_not_there_are_refused(
    connector: SourceConnector, index: IndexService
) -> None:
    for address, error in (("redis://host", InvalidArgument), ("redis://127.0.0.1:1/s", StorageUnavailable)):
        with pytest.raises(error, match=address):
            connector.check(SourceRun(addresses=(address,), note=print), index.config)


def test_commands_find_erase_and_ingest_again_what_is_archived(
    server: Server, connector: SourceConnector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "redis_streams-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: redis-streams\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[tiered_index.connectors]\nredis = redis_streams:SPEC\n")
    monkeypatch.syspath_prepend(tmp_path)
    for known in ("_others", "_packages"):
        vars(CONNECTORS).pop(known, None)
    stream = Stream(server, connector, "commands")
    first, *_, last = stream.write(25)
    places = ("--root", f"{tmp_path}/root", "--storage", f"file://{tmp_path}/store")
    done = run_here("ingest", stream.address, *places, "--wait", "--json")
    assert (done.document["entries"], done.code) == (25, 0), done.err
    stream.trim()
    for message in (first, last):
        query = ("query", message.topic, message.key, "--messages", "--json", *places[2:])
        (message_of,) = run_here(*query).document["messages"]
        assert (message_of["state"], message_of["message"]["fields"]["text"]) == ("archived", message.text)
    erased = ("--topic", first.topic, "--key", first.key, "--yes", "--now", "--grace", "0")
    done = run_here("erase", *erased, *places[2:], "--json")
    assert (done.document["segments"]["messages_erased"], done.document["status"]) == (1, "erased"), done.out
    done = run_here("ingest", f"archive:file://{tmp_path}/store", "--storage", f"file://{tmp_path}/again", "--json")
    assert (done.document["entries"], done.document["copied"], done.code) == (24, 24, 0), done.err
    with IndexReader.open(f"file://{tmp_path}/again") as reader:
        assert [len(reader.query(message.topic, message.key)) for message in (first, last)] == [0, 1]
        assert reader.topic_documents().keys() == {"commands"}
    for known in ("_others", "_packages"):
        vars(CONNECTORS).pop(known, None)
