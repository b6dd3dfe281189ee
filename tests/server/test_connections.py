"""Connections whose clients break the protocol, or behave badly within it."""

import asyncio
import contextlib
import resource
import socket
import ssl
import struct
import time
from functools import partial
from types import SimpleNamespace

import httpx
import msgspec
import pytest
import uvicorn.server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.server.conftest import PATIENCE_S, index_in, on_a_port, service_of
from tests.support.authority import Authority
from tests.support.batches import batch
from tests.support.hanging import until
from tiered_index.base import strangers
from tiered_index.base.strangers import Strangers
from tiered_index.server.health import StandIn
from tiered_index.server.http import gate, listening
from tiered_index.server.http.listening import HttpListener, Tls, loop_in_thread
from tiered_index.server.http.served import Caps
from tiered_index.server.http.tokens import add_token

HOST = b" HTTP/1.1\r\nHost: localhost\r\n"
ALIVE = b"GET /livez" + HOST + b"\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
ENTRY = b'{"topic": "orders", "queue_id": 0, "keys": ["a"], "offset": %d, "size": 2, "timestamp_ms": 1762000000000}'


@pytest.fixture(scope="module")
def client(index):
    with on_a_port(index) as client:
        yield client


@pytest.fixture
def connection(client):
    with socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE_S) as connection:
        yield connection


def taking_little(host: str, port: int) -> socket.socket:
    """Return a connection with room for little of an answer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE_S)
    connection.connect((host, port))
    return connection


def is_answered(listener: HttpListener, trusted: Authority, own: Authority | None = None) -> bool:
    """Return whether a client gets an answer that trusts an authority, and shows a certificate of its own one."""
    context = ssl.create_default_context(cafile=trusted.certificate_file)
    if own is not None:
        context.load_cert_chain(own.server_file)
    try:
        return httpx.get(f"{listener.url}/livez", verify=context, trust_env=False, timeout=PATIENCE_S).is_success
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        return False


def answer(connection: socket.socket) -> bytes:
    """Return one answer. A further one may already be there."""
    got, end = b"", None
    while end is None or len(got) < end:
        data = connection.recv(1 if end is None else end - len(got))
        assert data
        got += data
        if end is None and got.endswith(b"\r\n\r\n"):
            end = len(got) + int(got.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return got


def rest(connection: socket.socket) -> bytes:
    """Return all bytes until the service ends the connection."""
    got = b""
    try:
        while data := connection.recv(1 << 16):
            got += data
    except ConnectionResetError:
        pass
    return got


@pytest.fixture
def little_sent(monkeypatch):
    """The kernel takes little of an answer, so that a client's pace is felt."""
    monkeypatch.setattr(listening, "_SENT_BYTES", 4096)


def test_a_request_with_two_hosts_is_refused(connection):
    for host, status in ((b"host: 127.0.0.1\r\n", b"400"), (b"X-Host: a\r\nX-Host: b\r\n", b"200")):
        connection.sendall(b"GET /v1/topics" + HOST + host + b"\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /livez" + HOST + b"X: ",
        b"POST /v1/query:batch"
        + HOST
        + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
        b"POST /v1/query:batch" + HOST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1;",
    ],
)
def test_a_head_trailer_or_chunk_size_without_an_end_is_refused(connection, begin):
    """Otherwise the parser copies it at each piece, and no other request is answered meanwhile."""
    connection.sendall(begin)
    sent_bytes, piece = 0, b"x" * 65_536
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        while sent_bytes < 16 << 20:
            connection.sendall(piece)
            sent_bytes += len(piece)


@pytest.mark.parametrize("sent", [b"GET /livez" + HOST + b"X:\r\n" * 1000, ALIVE * 1000], ids=["headers", "requests"])
def test_many_headers_or_requests_at_once_are_refused(connection, sent):
    """Each needs some thirty times its bytes, and some microseconds of the time of all clients."""
    connection.sendall(sent)
    got = rest(connection)
    assert b" 400 Bad Request" in got and got.count(b" 200 OK") <= 1


@pytest.mark.usefixtures("little_sent")
@pytest.mark.parametrize("more", [ALIVE * 17, b"no HTTP"], ids=["requests", "damaged"])
def test_what_is_refused_behind_an_answer_under_way_writes_nothing_into_it(many, more):
    with on_a_port(many) as client, asking_slowly(client, b"&all=true") as asking:
        got = asking.recv(1 << 10)
        assert got.startswith(b"HTTP/1.1 200 OK")
        asking.sendall(more)
        with contextlib.suppress(ConnectionResetError):
            while data := asking.recv(1 << 20):
                got += data
    assert b"HTTP/1.1 400" not in got and b'"status":"complete"' not in got


def test_a_refused_body_is_read_to_its_end(connection):
    """Otherwise the client may not get the answer."""
    head = b"POST /v1/files" + HOST + b"Content-Length: %d\r\n\r\n" % (4 << 20)
    connection.sendall(head + b"x" * (4 << 20) + ALIVE)
    assert b" 405 " in answer(connection)
    assert b" 200 OK" in answer(connection)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_body_without_a_length_moves_no_position(tmp_path, version):
    head = b"POST /v1/entries?source=shop&position=1 HTTP/" + version + b"\r\nHost: localhost\r\n"
    with index_in(tmp_path) as index, on_a_port(index) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE_S) as connection:
            connection.sendall(head + b"Content-Type: application/x-ndjson\r\n\r\n{}\n")
            assert b" 200 " not in rest(connection)
        index.flush()
        assert index.durable_position("shop") is None


def entries_with_an_offer(position: int, is_chunked: bool = False) -> tuple[bytes, bytes]:
    """Return the head and the body of a request, as Java's client sends them: it offers HTTP/2 in each request."""
    body = ENTRY % position
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    head = b"POST /v1/entries?source=shop&position=%d&durable=true" % position + HOST + OFFER
    head += b"Content-Type: application/x-ndjson\r\n" + length + b"\r\n\r\n"
    return head, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body


@pytest.mark.parametrize("is_together", [False, True])
def test_bodies_beside_offers_of_another_protocol_are_read_on_one_connection(tmp_path, is_together):
    with index_in(tmp_path) as index, on_a_port(index) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE_S) as connection:
            for position in (1, 2, 3):
                head, body = entries_with_an_offer(position, is_chunked=position == 2)
                # refused before its body has come
                connection.sendall(head.replace(b"/v1/entries", b"/v1/files"))
                assert b" 405 " in answer(connection)
                if is_together:
                    connection.sendall(body + head + body)
                else:
                    connection.sendall(body)
                    connection.sendall(head)
                    connection.sendall(body)
                assert b'"entries":1,' in answer(connection)
            connection.sendall(head + body + ALIVE)
            assert b'"entries":0,' in answer(connection)
        assert len(index.query("orders", "a")) == 3


@pytest.mark.parametrize("is_pipelined", [False, True], ids=["parts", "pipelined"])
def test_a_body_that_the_parser_would_skip_moves_no_position(tmp_path, is_pipelined):
    head, body = entries_with_an_offer(1)
    with index_in(tmp_path) as index, on_a_port(index) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE_S) as connection:
            if is_pipelined:
                connection.sendall(ALIVE + head + body)
            else:
                connection.sendall(head[:-20])
                time.sleep(0.2)
                connection.sendall(head[-20:] + body)
            assert b" 400 " in rest(connection)
        assert index.durable_position("shop") is None


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["not begun", "not ended"])
def test_a_handshake_that_does_not_end_ends_its_connection(tmp_path, monkeypatch, begun):
    file = Authority(tmp_path).server_file
    monkeypatch.setattr(strangers, "FIRST_S", 0.1)
    listener = HttpListener(StandIn(), "127.0.0.1", 0, tls=Tls(file, file))
    # sooner than asyncio's minute
    with loop_in_thread() as portal, portal.wrap_async_context_manager(listener):
        with socket.create_connection(("127.0.0.1", listener.port), 30.0) as connection:
            connection.sendall(begun)
            assert rest(connection) == b""


def test_clients_of_a_ca_that_was_removed_are_refused_without_a_restart(tmp_path):
    own, first, second = (Authority(tmp_path / name) for name in ("own", "first", "second"))
    clients = tmp_path / "clients.pem"
    clients.write_bytes(first.certificate_file.read_bytes())
    listener = HttpListener(StandIn(), "127.0.0.1", 0, tls=Tls(own.server_file, own.server_file, clients))
    with loop_in_thread() as portal, portal.wrap_async_context_manager(listener):
        assert is_answered(listener, own, first) and not is_answered(listener, own, second)
        clients.write_bytes(second.certificate_file.read_bytes())
        until(lambda: is_answered(listener, own, second), every_s=0.1)
        assert not is_answered(listener, own, first)


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /livez HT", ALIVE + b"GET /livez HT"])
def test_a_head_that_does_not_arrive_ends_its_connection(connection, monkeypatch, sent):
    monkeypatch.setattr(listening, "FIRST_S", 0.0)
    connection.sendall(sent)
    assert rest(connection).count(b"200 OK") == (1 if ALIVE in sent else 0)


def test_strangers_make_place_for_others(index, tmp_path):
    """4,200 heads that do not end, from one address and without a token, shut nobody out."""
    token = {"authorization": f"Bearer {add_token(tmp_path / 'tokens', 'one', 'read', None)}"}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10_000)), hard))
    with contextlib.ExitStack() as opened, on_a_port(index, tokens=tmp_path / "tokens") as client:
        address = client.base_url.host, client.base_url.port
        # this connection has shown its token
        assert client.get("/v1/topics", headers=token).status_code == 200
        for number in range(4200):
            connection = opened.enter_context(socket.create_connection(address, PATIENCE_S))
            connection.sendall(b"GET /livez HT")
            if number % 1000 == 500:
                for path, headers in (("/livez", {}), ("/readyz", {}), ("/v1/topics", token)):
                    got = httpx.get(f"{client.base_url}{path}", headers=headers, timeout=PATIENCE_S, trust_env=False)
                    assert got.status_code == 200
        assert client.get("/v1/topics", headers=token).status_code == 200


def test_handshakes_that_do_not_begin_make_place_for_others(tmp_path, monkeypatch):
    # longer than this test waits
    monkeypatch.setattr(strangers, "FIRST_S", 10 * PATIENCE_S)
    authority = Authority(tmp_path)
    listener = HttpListener(StandIn(), "127.0.0.1", 0, tls=Tls(authority.server_file, authority.server_file))
    context = ssl.create_default_context(cafile=authority.certificate_file)
    with contextlib.ExitStack() as opened:
        portal = opened.enter_context(loop_in_thread())
        opened.enter_context(portal.wrap_async_context_manager(listener))
        address = "127.0.0.1", listener.port
        silent = [opened.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in range(100)]
        assert [rest(connection) for connection in silent[:30]] == [b""] * 30
        assert httpx.get(f"{listener.url}/livez", verify=context, trust_env=False, timeout=PATIENCE_S).is_success


@pytest.mark.parametrize("has_token", [True, False])
def test_strangers_end_no_connection_that_has_shown_its_token(index, tmp_path, monkeypatch, has_token):
    # longer than this test waits, so that nothing but its being a stranger ends the connection
    monkeypatch.setattr(listening, "FIRST_S", 10 * PATIENCE_S)
    token = add_token(tmp_path / "tokens", "one", "read", None)
    request = b"GET /v1/topics" + HOST + b"Authorization: Bearer %b\r\n\r\n" % token.encode() if has_token else ALIVE
    with contextlib.ExitStack() as opened, on_a_port(index, tokens=tmp_path / "tokens") as client:
        address = client.base_url.host, client.base_url.port
        first = opened.enter_context(socket.create_connection(address, PATIENCE_S))
        first.sendall(request)
        assert b" 200 OK" in answer(first)
        others = [opened.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in range(100)]
        assert rest(others[0]) == b""
        if has_token:
            first.sendall(request)
            assert b" 200 OK" in answer(first)
        else:
            assert rest(first) == b""


@pytest.mark.usefixtures("little_sent")
def test_strangers_that_take_no_answer_make_place_for_one_that_asks_late(index, tmp_path):
    """Otherwise those whose requests take longer than a moment to arrive would be shut out."""
    add_token(tmp_path / "tokens", "one", "read", None)
    with contextlib.ExitStack() as opened, on_a_port(index, tokens=tmp_path / "tokens") as client:
        address = client.base_url.host, client.base_url.port
        taking = [opened.enter_context(taking_little(*address)) for _ in range(64)]
        for connection in taking:
            connection.sendall((b"GET /openapi.json" + HOST + b"\r\n") * 10)
        for connection in taking:
            assert connection.recv(9) == b"HTTP/1.1 "
        late = opened.enter_context(socket.create_connection(address, PATIENCE_S))
        # longer than the moment after which some of too many are ended
        time.sleep(0.5)
        late.sendall(ALIVE)
        assert b" 200 OK" in answer(late)


def test_strangers_of_one_address_end_no_connection_of_another():
    """Also if more come in a moment than all addresses may have."""

    async def ended_of_many() -> list[int | str]:
        few, ended = Strangers(of_address=2, in_all=4), []
        for name, address in (("other", "b"), *((number, "a") for number in range(9))):
            few.enter(name, address, partial(ended.append, name))
        while len(few) > 4:
            await asyncio.sleep(0.01)
        return ended

    assert asyncio.run(ended_of_many()) == [*range(7)]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """An index with 100,000 entries of one key and second."""
    with index_in(tmp_path_factory.mktemp("many"), items=200_000) as index:
        index.put_batch(batch(100_000, topic="orders"))
        index.put_batch(batch(12_000, topic="orders", key="few"))
        index.flush()
        yield index


@contextlib.contextmanager
def asking_slowly(client, path, head=HOST):
    """Ask for lines on a connection with little room for them, and yield it."""
    with taking_little(client.base_url.host, client.base_url.port) as connection:
        connection.sendall(b"GET /v1/query?topic=orders&key=k" + path + head + b"Accept: application/x-ndjson\r\n\r\n")
        yield connection


@pytest.mark.parametrize("path", [b"&all=true", b"&max_count=1000"], ids=["stream", "page"])
@pytest.mark.usefixtures("little_sent")
def test_a_client_that_takes_nothing_is_disconnected(many, monkeypatch, path):
    for module in (gate, listening):
        monkeypatch.setattr(module, "SEND_S", 0.2)
    lost, lose = [], HttpToolsProtocol.connection_lost
    monkeypatch.setattr(
        HttpToolsProtocol, "connection_lost", lambda self, error: (lost.append(self.client), lose(self, error))
    )
    with on_a_port(many) as client, asking_slowly(client, path) as asking:
        counted = 'http_request_seconds_count{method="GET",route="/v1/query"'
        until(lambda: counted in client.get("/metrics").text)
        until(lambda: asking.getsockname() in lost)
        got = rest(asking).replace(b"\r\n", b"")
        # whole lines, and no status
        lines = [line for line in got.split(b"\n")[1:-1] if line.endswith(b"}")]
        assert lines and b'"status"' not in got


@pytest.mark.usefixtures("little_sent")
def test_a_stream_under_way_at_the_end_of_the_service_is_cut_without_a_traceback(many, caplog):
    """The client takes nothing for longer than the service gives requests under way."""
    request = b"GET /v1/query?topic=orders&key=k&all=true" + HOST + b"Accept: application/x-ndjson\r\n\r\n"
    with service_of(many) as service, loop_in_thread() as portal:
        listener = HttpListener(service.app, "127.0.0.1", 0, drain_s=1)
        with portal.wrap_async_context_manager(listener):
            asking = taking_little("127.0.0.1", listener.port)
            asking.sendall(request)
            assert asking.recv(9) == b"HTTP/1.1 "
        with asking:
            assert b'"status"' not in rest(asking)
    assert [record for record in caplog.records if record.exc_info] == []
    assert "was ended: the service stops" in caplog.text


@pytest.mark.usefixtures("little_sent")
def test_a_client_that_takes_its_stream_slowly_gets_it_whole(many, monkeypatch):
    """The time bounds each piece, not the stream."""
    monkeypatch.setattr(gate, "SEND_S", 2.0)
    head = HOST + b"Connection: close\r\n"
    patient = Caps(limits=msgspec.structs.replace(Caps().limits, timeout_s=300.0))
    with on_a_port(many, caps=patient) as client, asking_slowly(client, b"&all=true", head) as asking:
        got, began_s = bytearray(), time.monotonic()
        while data := asking.recv(1 << 20):
            got += data
            # longer in all than a piece may take, also if the machine is busy
            time.sleep(max(0.0, began_s + len(got) / 5e6 - time.monotonic()))
    assert b'"status":"complete","count":100000' in got and len(got) / 5e6 > 2.0


def test_requests_that_break_the_protocol_fill_no_log(index, caplog):
    with on_a_port(index) as client:
        for _ in range(30):
            with socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE_S) as connection:
                connection.sendall(b"no HTTP" + HOST + b"\r\n")
                assert b" 400 " in rest(connection)
    assert sum("Invalid HTTP request" in line for line in caplog.messages) <= 1


def test_a_clock_that_is_set_back_keeps_no_idle_connection(client, monkeypatch):
    assert client.get("/livez").is_success
    monkeypatch.setattr(listening, "FIRST_S", 0.0)
    monkeypatch.setattr(uvicorn.server, "time", SimpleNamespace(time=lambda: 0.0))
    with socket.create_connection((client.base_url.host, client.base_url.port), 10.0) as connection:
        connection.sendall(b"GET /livez HT")
        assert rest(connection) == b""


@pytest.mark.usefixtures("little_sent")
def test_requests_of_a_client_that_leaves_are_no_errors(index, caplog):
    """Also if several wait: otherwise a stranger could fill the log."""
    with on_a_port(index) as client:
        for _ in range(5):
            with taking_little(client.base_url.host, client.base_url.port) as asking:
                asking.sendall((b"GET /openapi.json" + HOST + b"\r\n") * 10)
                assert asking.recv(9) == b"HTTP/1.1 "
                asking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: "requests_in_flight 1.0" in client.get("/metrics").text)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
