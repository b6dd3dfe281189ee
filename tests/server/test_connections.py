"""Connections whose clients do not keep to the protocol, or to the manners that it leaves to them."""

from __future__ import annotations

import json
import logging
import re
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from tests.rocketmq.test_remoting_server import certificate
from tests.server.conftest import PATIENCE_S, serving
from tiered_index import IndexService
from tiered_index.server import listening
from tiered_index.server.health import StandIn
from tiered_index.server.listening import HttpListener, Tls, in_background
from tiered_index.server.pacing import Pace

HOST = b" HTTP/1.1\r\nHost: localhost\r\n"
ALIVE = b"GET /livez" + HOST + b"\r\n"


@pytest.fixture
def connection(client):
    with socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE_S) as connection:
        yield connection


def answer(connection: socket.socket) -> bytes:
    """Return one answer, whose body is a JSON object."""
    got = b""
    while not got.rstrip().endswith(b"}"):
        data = connection.recv(1 << 16)
        assert data
        got += data
    return got


def rest(connection: socket.socket) -> bytes:
    """Return what comes until the service ends the connection."""
    got = b""
    try:
        while data := connection.recv(1 << 16):
            got += data
    except ConnectionResetError:
        pass
    return got


@pytest.mark.parametrize(
    ("first", "then"),
    [(ALIVE, b"\r\n"), (b"POST /v1/nothing" + HOST + b"Content-Length: 1000\r\n\r\n", b"{")],
    ids=["an empty line", "a body that nobody reads"],
)
def test_what_is_no_request_does_not_hold_a_connection(connection, monkeypatch, first, then):
    connection.sendall(first)
    assert answer(connection).startswith(b"HTTP/1.1 ")
    monkeypatch.setattr(listening, "_HEAD_S", 0.0)
    connection.sendall(then)
    assert rest(connection) == b""


def test_a_request_with_two_hosts_is_refused(connection):
    for host, status in ((b"host: 127.0.0.1\r\n", b"400"), (b"X-Host: a\r\nX-Host: b\r\n", b"200")):
        connection.sendall(b"GET /v1/topics" + HOST + host + b"\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 " + status)
    # in the request's target, too, as proxies are sent it
    for host, status in ((b"127.0.0.1", b"400"), (b"localhost", b"200"), (b"x@localhost", b"400")):
        connection.sendall(b"GET http://" + host + b"/v1/topics" + HOST + b"\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("most", [8, 1])
def test_requests_of_one_connection_wait_up_to_a_number(connection, monkeypatch, most):
    monkeypatch.setattr(listening, "_MOST_WAITING", most)
    last = b"GET /livez" + HOST + b"Connection: close\r\n\r\n"
    connection.sendall(ALIVE * 3 + last)
    assert rest(connection).count(b"200 OK") == (4 if most == 8 else 0)


def test_a_trailer_without_an_end_ends_its_connection(connection):
    head = b"POST /v1/entries" + HOST + b"Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head + b"0\r\nX-Long: ")
    with pytest.raises(OSError):
        for _ in range(1000):
            connection.sendall(b"x" * 10_000)


def test_pieces_of_a_body_are_no_head(connection, monkeypatch):
    monkeypatch.setattr(listening, "_MOST_HEAD_BYTES", 200)
    head = b"POST /v1/entries" + HOST + b"Connection: close\r\nContent-Type: application/x-ndjson\r\n"
    connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(100):
        connection.sendall(b"4\r\n\r\n\r\n\r\n")
    connection.sendall(b"0\r\n\r\n")
    # of empty lines
    assert rest(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01", b"GET /v1/query?topic=orders&key=gr\xc3\xbcn" + HOST + b"\r\n"],
    ids=["TLS", "a URL that is not percent-encoded"],
)
def test_what_is_no_request_is_told_in_a_problem(connection, sent):
    connection.sendall(sent)
    head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/problem+json" in head
    assert "percent-encoded" in json.loads(body)["detail"]


@pytest.mark.parametrize(("size", "ends"), [(70_000, True), (5_000_000, True), (5_000_000, False)])
@pytest.mark.parametrize(
    ("status", "begin"),
    [
        (414, b"GET /v1/query?topic=orders&key="),
        (431, b"GET /livez" + HOST + b"Authorization: Bearer "),
        (431, b"GET /livez" + HOST + b"X-Many: 1\r\n" * 4000 + b"X: "),
    ],
    ids=["URL", "header", "headers"],
)
def test_a_head_that_is_too_long_is_told_so(connection, status, begin, size, ends):
    connection.sendall(ALIVE)
    assert answer(connection).startswith(b"HTTP/1.1 200 ")
    # the client reads once all was sent
    connection.sendall(begin + b"x" * size + (HOST + b"\r\n" if ends else b""))
    head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"content-type: application/problem+json" in head
    assert "64 KiB" in json.loads(body)["detail"]


def test_a_head_that_comes_too_slowly_is_told_so(connection, monkeypatch):
    monkeypatch.setattr(listening, "_HEAD_S", 0.1)
    connection.sendall(ALIVE)
    assert answer(connection).startswith(b"HTTP/1.1 200 ")
    connection.sendall(b"GET /livez HT")
    assert rest(connection).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_was_refused_is_not_refused_again_for_being_late():
    armed, connection = [], object.__new__(listening._Connection)
    handle = SimpleNamespace(cancel=lambda: armed.remove(connection._end_late))
    connection.loop = SimpleNamespace(call_later=lambda _, act: armed.append(act) or handle)
    connection.transport = SimpleNamespace(write=len, can_write_eof=lambda: False, abort=len)
    connection.cycle, connection._in_head = None, True
    connection._watch()
    connection._refuse(431)
    assert armed == [connection.transport.abort]


def test_who_reads_no_refusal_is_let_go(connection, monkeypatch):
    monkeypatch.setattr(listening, "_LINGER_S", 0.0)
    with pytest.raises(OSError):
        # more than any buffer takes
        for _ in range(1_000_000):
            connection.sendall(b"x" * 10_000)


def test_who_offers_another_protocol_is_answered_in_this_one(connection, caplog):
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n\r\n"
    last = b"GET /livez" + HOST + b"Connection: close\r\n\r\n"
    with caplog.at_level(logging.WARNING):
        connection.sendall(b"GET /livez" + HOST + offer)
        assert answer(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(last)
        assert rest(connection).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["not begun", "not ended"])
def test_a_handshake_that_does_not_end_ends_its_connection(tmp_path, monkeypatch, begun):
    file = certificate(tmp_path)
    monkeypatch.setattr(listening, "_HANDSHAKE_S", 0.1)
    listener = HttpListener(StandIn(), "127.0.0.1", 0, tls=Tls(file, file))
    # sooner than asyncio's minute
    with in_background(listener), socket.create_connection(("127.0.0.1", listener.port), 30.0) as connection:
        connection.sendall(begun)
        assert rest(connection) == b""


class Taker:
    """Stands for transport, flow and loop of a connection whose client takes `rates` bytes, a round each."""

    def __init__(self, left: int, rates: list[int]) -> None:
        self.left, self.rates, self.aborted = left, rates, False

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.aborted = True

    def pause_writing(self) -> None:
        pass

    def call_later(self, _: float, act, *given) -> None:
        if self.rates:
            self.left -= self.rates.pop(0)
            act(*given)


@pytest.mark.parametrize(
    ("rates", "is_stream", "ended"),
    [
        ([1 << 20] * 3, False, False),
        ([1 << 20, 100], False, True),
        ([0], False, True),
        ([1 << 20] * 3, True, False),
        ([0], True, True),
        # a stream has more time, for its last line
        ([1 << 20, 100], True, False),
        ([100] * (listening._MORE_TIMES + 1), True, True),
    ],
)
def test_who_goes_on_taking_a_large_answer_gets_it(rates, is_stream, ended):
    connection = object.__new__(listening._Connection)
    connection.transport = connection.flow = connection.loop = taker = Taker(64 << 20, list(rates))
    connection._pace, connection._more_times = Pace(is_stream=is_stream), listening._MORE_TIMES
    connection.pause_writing()
    assert taker.aborted == ended
    assert connection._pace.is_slow == (is_stream and 100 in rates)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """An index with 20,000 entries of one key and second."""
    folder, count = tmp_path_factory.mktemp("many"), 20_000
    with IndexService.open(root=folder / "root", storage=(folder / "s").as_uri(), background=False) as index:
        columns = {"queue_id": 0, "size": 1, "timestamp_ms": 1_762_000_000_000}
        index.put_batch(
            {
                "topic": ["orders"] * count,
                "key": ["k"] * count,
                "offset": np.arange(count),
                **{name: np.full(count, value) for name, value in columns.items()},
            }
        )
        yield index


@pytest.fixture
def slow(many, monkeypatch):
    """A client, and a function that sends a request on a connection whose client is slow, and returns the answer."""
    monkeypatch.setattr(listening, "_SENT_BYTES", 4096)
    paused = listening._Connection.pause_writing

    def pause(connection):
        paused(connection)
        connection._pace.is_slow = True

    monkeypatch.setattr(listening._Connection, "pause_writing", pause)
    with serving(many) as client:

        def ask(request: bytes, accept: bytes, body: bytes = b"") -> bytes:
            with socket.socket() as asking:
                asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                asking.settimeout(PATIENCE_S)
                asking.connect((client.base_url.host, client.base_url.port))
                head = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
                asking.sendall(
                    request + HOST + b"Accept: " + accept + b"\r\nConnection: close\r\n" + head + b"\r\n" + body
                )
                return rest(asking)

        yield client, ask


def test_a_stream_that_is_taken_too_slowly_ends_with_a_line_that_says_so(slow):
    client, ask = slow
    got = ask(b"GET /v1/query?topic=orders&key=k&all=true&max_count=2000", b"application/x-ndjson")
    lines = [json.loads(line) for line in got.splitlines() if line.startswith(b'{"')]
    last = lines.pop()
    assert (last["error"]["status"], last["error"]["error"]) == (408, "Refused")
    assert 0 < len(lines) < 20_000
    # it goes on from there
    more = client.get("/v1/query", params={"topic": "orders", "key": "k", "cursor": last["cursor"]}).json()
    assert more["items"][0]["offset"] == lines[-1]["offset"] - 1


def test_one_document_that_is_taken_too_slowly_ends_so_too_and_is_no_document(slow):
    _, ask = slow
    lookups = json.dumps({"lookups": [{"topic": "orders", "key": "k", "max_count": 1000}] * 20}).encode()
    for request, body in (
        (b"GET /v1/query?topic=orders&key=k&max_count=10000", b""),
        (b"POST /v1/query:batch", lookups),
    ):
        head, _, got = ask(request, b"application/json", body).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"content-length" not in head.lower()
        # its chunks have lines of their own
        (last,) = [json.loads(line) for line in got.splitlines() if line.startswith(b'{"error')]
        assert (last["error"]["status"], last["error"]["error"]) == (408, "Refused")
        document = b"".join(line for line in got.split(b"\r\n") if not re.fullmatch(rb"[0-9a-f]*", line))
        with pytest.raises(ValueError):
            json.loads(document)
    # of lines all but the last one are whole
    got = ask(b"POST /v1/query:batch", b"application/x-ndjson", lookups).partition(b"\r\n\r\n")[2]
    lines = b"".join(line for line in got.split(b"\r\n") if not re.fullmatch(rb"[0-9a-f]*", line)).splitlines()
    assert [sorted(json.loads(line)) for line in lines][-1] == ["error"] and 1 < len(lines) <= 20
