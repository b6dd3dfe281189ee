"""`tiered-index serve --rocketmq-port`: RocketMQ's tools use the same process, which checks their permissions."""

import asyncio
import json
import signal
from types import SimpleNamespace
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import httpx
import pytest

from tests.rocketmq.archived_store import delete_segments, settled
from tests.rocketmq.remoting_client import Client, by_key, records
from tests.server.conftest import PATIENCE_S, index_in
from tests.server.test_serve_command import process_of
from tests.support.storage_faults import FaultStorage
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader
from tiered_index.base.call import remaining_s
from tiered_index.cli.main import run
from tiered_index.cli.operate import serving
from tiered_index.cli.operate.serving import Serving
from tiered_index.connectors.read_again import MessageSources
from tiered_index.connectors.rocketmq.log.layout import Host
from tiered_index.connectors.rocketmq.remoting.frames import Command, RequestCode, ResponseCode, signature
from tiered_index.errors import ConfigError
from tiered_index.server.http.listening import bind
from tiered_index.server.http.metrics import Metrics
from tiered_index.server.http.served import Audit, Caps, Served, redaction_of
from tiered_index.server.remoting import read_keys, remoting_listener
from tiered_index.service.read.answers.budget import LookupLimits
from tiered_index.storage.opening import open_storage

SECRET = "0123456789abcdef"


@pytest.fixture(scope="module")
def archived(tmp_path_factory):
    """The storage of a store whose broker has deleted its first segment, and that segment's messages."""
    folder = tmp_path_factory.mktemp("archived")
    with StoreWriter(folder / "store", segment_bytes=4096) as writer:
        for n in range(60):
            writer.put("orders", n % 4, b"paid", keys=[f"order-{n}"], store_ms=1_700_000_000_000 + n * 1000)
    with index_in(folder) as index:
        messages = settled(index, folder / "store")
    delete_segments(folder / "store", 4096)
    return (folder / "storage").as_uri(), [m for m in messages if m.physical_offset < 4096]


def test_tools_ask_beside_http(archived, tmp_path):
    uri, messages = archived
    keys = tmp_path / "keys.json"
    known = {name: {"secret": SECRET, "topics": [topic]} for name, topic in (("support", "order"), ("pay", "pay"))}
    keys.write_text(json.dumps(known))
    names = ("--rocketmq-cluster", "ArchiveA", "--rocketmq-broker", "broker-a", "--rocketmq-advertise", "archive:9876")

    async def ask(url):
        async with Client.open(SimpleNamespace(address=Host(url.hostname, url.port))) as client:

            async def signed(name, code, **fields):
                command = Command(code=code, fields={"AccessKey": name, **fields})
                return await client.ask(code, {**command.fields, "Signature": signature(command, SECRET)})

            query = by_key("orders", "order-7")
            assert (await client.ask(RequestCode.QUERY_MESSAGE, query)).code == 16
            response = await signed("support", RequestCode.QUERY_MESSAGE, **query)
            assert records(response.body) == [messages[7]]
            assert (await signed("pay", RequestCode.QUERY_MESSAGE, **query)).code == 22
            # the length of the log is a length of other tenants' messages
            assert response.fields["indexLastUpdatePhyoffset"] == "0"
            assert (await signed("pay", RequestCode.GET_BROKER_CLUSTER_INFO)).code == 0
            # sending a message, which every client is refused
            assert (await signed("pay", 10, topic="payments")).code == 16
            assert (await signed("pay", 99_999)).code == 3
            route = json.loads((await signed("support", 105, topic="orders")).body)
            named = {"brokerName": "broker-a", "cluster": "ArchiveA", "enableActingMaster": False}
            assert route["brokerDatas"] == [{"brokerAddrs": {"0": "archive:9876"}, **named}]

    options = ("--storage", uri, "--port", 0, "--rocketmq-port", 0, "--rocketmq-keys", keys, *names)
    with process_of("serve", "--json", *options, "--audit-log", tmp_path / "audit.ndjson") as process:
        http, rocketmq = json.loads(process.stdout.readline())["urls"]
        assert httpx.get(f"{http}/livez", timeout=PATIENCE_S, trust_env=False).status_code == 200
        assert rocketmq.startswith("rocketmq://127.0.0.1:")
        asyncio.run(ask(urlsplit(rocketmq)))
        page = httpx.get(f"{http}/metrics", timeout=PATIENCE_S, trust_env=False).text
        counted = 'tiered_index_lookups_total{kind="rocketmq:QUERY_MESSAGE",place="%s",status="%s"} 1.0'
        for place, status in (("storage", "complete"), ("none", "NoPermission")):
            assert counted % (place, status) in page
        # requests that need no lookup count, too
        for name, status in (("QUERY_MESSAGE", "NO_PERMISSION"), ("GET_BROKER_CLUSTER_INFO", "SUCCESS")):
            assert f'tiered_index_rocketmq_request_seconds_count{{request="{name}",status="{status}"}} 1.0' in page
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    audited = [json.loads(line) for line in (tmp_path / "audit.ndjson").read_text().splitlines()]
    assert (audited[0]["refused"], audited[0]["claimed"], audited[0]["key"]) == (
        "rocketmq:QUERY_MESSAGE",
        "",
        "order-7",
    )
    callers = [(record["caller"], record["code"], record["status"]) for record in audited]
    pay, support = ([("pay", 12, 22), ("pay", 106, 0), ("pay", 10, 16), ("pay", 99_999, 3)], [("support", 105, 0)])
    assert callers == [(None, 12, 16), ("support", 12, 0), *pay, *support]


def test_its_lookups_have_the_bounds_of_the_command(archived):
    async def ask(url):
        async with Client.open(SimpleNamespace(address=Host(url.hostname, url.port))) as client:
            return await client.ask(RequestCode.QUERY_MESSAGE, by_key("orders", "order-7"))

    options = ("--storage", archived[0], "--port", 0, "--rocketmq-port", 0, "--lookup-requests", 0)
    with process_of("serve", "--json", *options) as process:
        http, rocketmq = json.loads(process.stdout.readline())["urls"]
        assert asyncio.run(ask(urlsplit(rocketmq))).code == ResponseCode.SYSTEM_BUSY
        lines = httpx.get(f"{http}/metrics", timeout=PATIENCE_S, trust_env=False).text.splitlines()
        problem = httpx.get(f"{http}/v1/query?topic=orders&key=order-7", timeout=PATIENCE_S, trust_env=False).json()
    assert "max_requests=0 " in problem["detail"], problem
    (counted,) = [line for line in lines if line.startswith("tiered_index_lookups_total{")]
    assert 'status="BudgetExceeded"' in counted and counted.endswith(" 1.0"), counted


@pytest.mark.parametrize(("timeout_s", "bound_s"), [(30.0, 15.0), (2.0, 2.0)])
def test_its_lookups_have_the_time_of_the_service_and_at_most_15_s(archived, timeout_s, bound_s):
    """RocketMQ's clients wait for 18 s."""
    storage, left_s = FaultStorage(open_storage(archived[0])), []
    storage.meanwhile("*", lambda: left_s.append(remaining_s()), times=None)

    async def ask(served, metrics):
        bound = bind("127.0.0.1", 0)
        async with (
            remoting_listener(served, metrics, bound=bound, store=None, keys=None, tls=None, threads=1) as server,
            Client.open(server) as client,
        ):
            return await client.ask(RequestCode.QUERY_MESSAGE, by_key("orders", "order-7"))

    with IndexReader.open(storage_backend=storage) as reader:
        left_s.clear()
        caps = Caps(limits=LookupLimits(timeout_s=timeout_s))
        served = Served(reader, MessageSources(reader, reader.config), caps, redaction_of(reader, None), Audit(None))
        response = asyncio.run(ask(served, Metrics(reader, dict)))
    assert records(response.body) == [archived[1][7]]
    assert bound_s - 1 < left_s[0] <= bound_s and max(left_s) <= bound_s


def test_it_admits_only_clients_that_the_service_admits(archived, tmp_path, capsys, monkeypatch):
    uri, _ = archived
    (tmp_path / "tokens.json").write_text("[]")
    (tmp_path / "tokens.json").chmod(0o644)

    def served(*arguments):
        """Return the exit code of a service that ends at once, and its output."""
        monkeypatch.setattr(Serving, "_wait", lambda *_: None)
        monkeypatch.setattr(serving, "gc", MagicMock())
        with pytest.raises(SystemExit) as ended:
            run(["serve", "--storage", uri, "--port", "0", *map(str, arguments)])
        return ended.value.code, capsys.readouterr().err

    ports, tokens = ("--rocketmq-port", 0), ("--tokens", tmp_path / "tokens.json")
    code, error = served(*ports, *tokens, "--host", "0.0.0.0")
    assert code == 2 and "give --rocketmq-keys FILE, or --insecure" in error
    code, error = served(*ports, *tokens, "--host", "0.0.0.0", "--insecure")
    assert code == 0 and "--host 0.0.0.0 without --tls-cert: tokens, keys and messages travel unencrypted" in error
    assert f"{tokens[1]} grants access, and every user of this host can read it" in error
    tokens[1].chmod(0o600)
    code, error = served(*ports, *tokens)
    assert code == 0 and "every program on this host can read every topic there" in error
    assert "unencrypted" not in error and "grants access" not in error


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"a": "s3cret"}', '{"a": {"secret": ""}}', '{"a": {"secret": 5}}'])
def test_a_file_that_has_no_keys_is_refused_without_being_repeated(tmp_path, text):
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(tmp_path / "keys.json")
    assert "s3cret" not in str(caught.value)
