"""Connections whose clients break the protocol, or behave badly within it."""

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import time
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlencode

import pyarrow as pa
import pytest
from starlette.responses import Response

from tests.rocketmq.archived_store import index_log
from tests.rocketmq.test_remoting_server import certificate
from tests.server.conftest import PATIENCE_S, index_in, serving
from tests.support.batches import batch
from tests.support.hanging import until
from tests.support.store_writer import StoreWriter
from tiered_index.client import IndexClient
from tiered_index.server import joined, listening
from tiered_index.server.health import StandIn
from tiered_index.server.listening import HttpListener, Tls, in_background
from tiered_index.server.pacing import PACE, Pace, PacedResponse, document_of_rows

HOST = b" HTTP/1.1\r\nHost: localhost\r\n"
ALIVE = b"GET /livez" + HOST + b"\r\n"


@pytest.fixture
def connection(client):
    with socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE_S) as connection:
        yield connection


def answer(connection: socket.socket) -> bytes:
    """Return one answer with a JSON object as its body."""
    got = b""
    while not got.rstrip().endswith(b"}"):
        data = connection.recv(1 << 16)
        assert data
        got += data
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


@pytest.mark.parametrize(
    ("first", "then"),
    [(ALIVE, b"\r\n"), (b"POST /v1/nothing" + HOST + b"Content-Length: 1000\r\n\r\n", b"{")],
    ids=["an empty line", "a body that nobody reads"],
)
def test_an_invalid_request_does_not_hold_a_connection(connection, monkeypatch, first, then):
    connection.sendall(first)
    assert answer(connection).startswith(b"HTTP/1.1 ")
    monkeypatch.setattr(listening, "_HEAD_S", 0.0)
    connection.sendall(then)
    assert rest(connection) == b""


def test_a_request_with_two_hosts_is_refused(connection):
    for host, status in ((b"host: 127.0.0.1\r\n", b"400"), (b"X-Host: a\r\nX-Host: b\r\n", b"200")):
        connection.sendall(b"GET /v1/topics" + HOST + host + b"\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 " + status)
    # in the request's target, too, as proxies get it
    for host, status in (
        *((b"127.0.0.1", b"400"), (b"localhost", b"200"), (b"x@localhost", b"400")),
        *((b"[127.0.0.1]", b"400"), (b"[::1", b"400")),
    ):
        connection.sendall(b"GET http://" + host + b"/v1/topics" + HOST + b"\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("most", [8, 1])
def test_requests_of_one_connection_wait_up_to_a_number(connection, monkeypatch, most):
    monkeypatch.setattr(listening, "_MOST_WAITING", most)
    last = b"GET /livez" + HOST + b"Connection: close\r\n\r\n"
    connection.sendall(ALIVE * 3 + last)
    assert rest(connection).count(b"200 OK") == (4 if most == 8 else 0)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_body_without_a_length_moves_no_position(tmp_path, version):
    head = b"POST /v1/entries?source=shop&position=1 HTTP/" + version + b"\r\nHost: localhost\r\n"
    with index_in(tmp_path) as index, serving(index) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE_S) as connection:
            connection.sendall(head + b"Content-Type: application/x-ndjson\r\n\r\n{}\n")
            assert b" 200 " not in rest(connection)
        index.flush()
        assert index.durable_position("shop") is None


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
def test_an_invalid_request_is_reported_in_a_problem(connection, sent):
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
def test_a_head_that_is_too_long_is_reported(connection, status, begin, size, ends):
    connection.sendall(ALIVE)
    assert answer(connection).startswith(b"HTTP/1.1 200 ")
    # the client reads after it has sent everything
    connection.sendall(begin + b"x" * size + (HOST + b"\r\n" if ends else b""))
    head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"content-type: application/problem+json" in head
    assert "64 KiB" in json.loads(body)["detail"]


def test_a_head_that_arrives_too_slowly_is_reported(connection, monkeypatch):
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


def test_a_client_that_reads_no_refusal_is_disconnected(connection, monkeypatch):
    monkeypatch.setattr(listening, "_LINGER_S", 0.0)
    with pytest.raises(OSError):
        # more than any buffer holds
        for _ in range(1_000_000):
            connection.sendall(b"x" * 10_000)


def test_a_client_that_offers_another_protocol_is_answered_in_this_one(connection, caplog):
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n\r\n"
    last = b"GET /livez" + HOST + b"Connection: close\r\n\r\n"
    with caplog.at_level(logging.WARNING):
        connection.sendall(b"GET /livez" + HOST + offer)
        assert answer(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(last)
        assert rest(connection).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("more", [b"", b", close"])
def test_a_body_beside_an_offer_of_another_protocol_is_read(tmp_path, is_chunked, more):
    body = b'{"topic": "orders", "queue_id": 0, "keys": ["a"], "offset": 1, "size": 2, "timestamp_ms": 1762000000000}'
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    head = b"POST /v1/entries?source=shop&position=1&durable=true" + HOST + b"Content-Type: application/x-ndjson\r\n"
    # Java's client offers HTTP/2 in its first request
    head += b"Connection: Upgrade, HTTP2-Settings" + more + b"\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    head += length + b"\r\n\r\n"
    with index_in(tmp_path) as index, serving(index) as client:
        for parts, entries in (([head, sent], 1), ([head + sent + ALIVE], 0)):
            with socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE_S) as connection:
                for part in parts:
                    connection.sendall(part)
                assert b'"entries":%d,' % entries in answer(connection)
        assert len(index.query("orders", "a")) == 1


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
    """Replaces transport, flow and loop of a connection. Its client reads `rates` bytes, one rate per round."""

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
def test_a_client_that_keeps_reading_a_large_answer_gets_it(rates, is_stream, ended):
    connection = object.__new__(listening._Connection)
    connection.transport = connection.flow = connection.loop = taker = Taker(64 << 20, list(rates))
    connection._pace, connection._more_times = Pace(is_stream=is_stream), listening._MORE_TIMES
    connection.pause_writing()
    assert taker.aborted == ended
    assert connection._pace.is_slow == (is_stream and 100 in rates)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """An index with 20,000 entries of one key and second."""
    with index_in(tmp_path_factory.mktemp("many"), items=50_000) as index:
        index.put_batch(batch(20_000, topic="orders"))
        yield index


@pytest.fixture
def taken_slowly(monkeypatch):
    """A function that sends a request on a connection with a slow client, and returns the answer."""
    monkeypatch.setattr(listening, "_SENT_BYTES", 4096)
    paused = listening._Connection.pause_writing

    def pause(connection):
        paused(connection)
        connection._pace.is_slow = True

    monkeypatch.setattr(listening._Connection, "pause_writing", pause)

    def ask(client, request: bytes, accept: bytes, body: bytes = b"") -> bytes:
        with socket.socket() as asking:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            asking.settimeout(PATIENCE_S)
            asking.connect((client.base_url.host, client.base_url.port))
            head = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
            asking.sendall(request + HOST + b"Accept: " + accept + b"\r\nConnection: close\r\n" + head + b"\r\n" + body)
            return rest(asking)

    return ask


@pytest.fixture
def slow(many, taken_slowly):
    """A client, and `taken_slowly` of the same service."""
    with serving(many) as client:
        yield client, partial(taken_slowly, client)


def unchunked(got: bytes) -> tuple[bytes, bytes]:
    """Return head and body of an answer in chunks."""
    head, _, rest = got.partition(b"\r\n\r\n")
    body = b""
    while size := int(rest.partition(b"\r\n")[0], 16):
        body, rest = body + rest.partition(b"\r\n")[2][:size], rest.partition(b"\r\n")[2][size + 2 :]
    return head, body


@pytest.mark.parametrize("accept", [b"application/x-ndjson", b"application/vnd.apache.arrow.stream"])
@pytest.mark.parametrize("how", [b"all=true&max_count=2000", b"max_count=10000"])
def test_a_stream_that_is_taken_too_slowly_ends_with_a_line_that_says_so(slow, accept, how):
    client, ask = slow
    _, body = unchunked(ask(b"GET /v1/query?topic=orders&key=k&" + how, accept))
    if accept.endswith(b"ndjson"):
        *lines, last = [json.loads(line) for line in body.splitlines()]
    else:
        *batches, (_, metadata) = pa.ipc.open_stream(body).iter_batches_with_custom_metadata()
        lines = [line for batch, _ in batches for line in batch.to_pylist()]
        last = json.loads(metadata[b"tiered_index.status"])
    assert (last["error"]["status"], last["error"]["error"]) == (408, "Refused")
    assert 0 < len(lines) < 10_000
    # it continues from there
    more = client.get("/v1/query", params={"topic": "orders", "key": "k", "cursor": last["cursor"]}).json()
    assert more["items"][0]["offset"] == lines[-1]["offset"] - 1


def test_a_document_that_is_read_too_slowly_ends_after_an_entry_and_continues_from_there(slow):
    client, ask = slow
    head, body = unchunked(ask(b"GET /v1/query?topic=orders&key=k&max_count=10000&explain=true", b"application/json"))
    assert head.startswith(b"HTTP/1.1 200 ") and b"content-length" not in head.lower()
    document = json.loads(body)
    offsets = [item["offset"] for item in document["items"]]
    assert document["status"] == "truncated" and 1000 < len(offsets) < 10_000
    assert len(document["explain"]["files"]) == document["explain"]["files_read"] > 0
    with IndexClient(str(client.base_url)) as asking:
        cursor = document["cursor"]
        while cursor is not None:
            page = asking.query("orders", "k", max_count=1000, cursor=cursor)
            offsets += [item.offset for item in page]
            cursor = page.cursor
    assert offsets == list(range(20_000))[::-1]


@pytest.mark.parametrize(
    ("how", "accept", "end", "times"),
    [(b"all=true", b"application/x-ndjson", b'{"error":', 2), (b"max_count=2600", b"*/*", b'"status":"truncated"', 1)],
    ids=["a stream", "a document"],
)
def test_a_slow_client_gets_the_end_of_each_answer_of_its_connection(many, monkeypatch, how, accept, end, times):
    """As at 4 KB a second, in a thirtieth of the time."""
    for name, value in (("_SENT_BYTES", 4096), ("_TAKE_S", 1.0), ("_LEAST_TAKEN_PER_S", 30 * (16 << 10))):
        monkeypatch.setattr(listening, name, value)
    with serving(many) as client, socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        asking.settimeout(PATIENCE_S)
        asking.connect((client.base_url.host, client.base_url.port))
        for _ in range(times):
            asking.sendall(b"GET /v1/query?topic=orders&key=k&" + how + HOST + b"Accept: " + accept + b"\r\n\r\n")
            got, began_s = b"", time.monotonic()
            while not got.endswith(b"\r\n0\r\n\r\n"):
                time.sleep(0.01)
                taken = asking.recv(max(1, int(125_000 * (time.monotonic() - began_s)) - len(got)))
                assert taken, "the service closed the connection"
                got += taken
            assert end in got


@pytest.mark.parametrize("more", [b"Connection: close\r\n", b""], ids=["closed", "kept"])
def test_a_client_that_does_not_read_the_rest_of_an_answer_is_disconnected(monkeypatch, more):
    """Also if the rest is too short to pause the answer."""
    monkeypatch.setattr(listening, "_SENT_BYTES", 4096)
    monkeypatch.setattr(joined, "REST_S", 0.0)
    listener = HttpListener(Response(b"x" * 60_000), "127.0.0.1", 0)
    listener._server.config.timeout_keep_alive = 0
    with in_background(listener), socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asking.settimeout(PATIENCE_S)
        asking.connect(("127.0.0.1", listener.port))
        asking.sendall(b"GET /" + HOST + more + b"\r\n")
        # it begins to read
        assert asking.recv(1)
        until(lambda: not listener._server.server_state.connections)


@pytest.mark.parametrize("is_secure", [False, True])
@pytest.mark.parametrize("size", [10, 60_000])
def test_a_connection_that_ends_in_time_leaves_no_error(tmp_path, monkeypatch, caplog, is_secure, size):
    """asyncio's transports fail if they are aborted after their end, or, with TLS, asked after a second `close`."""
    monkeypatch.setattr(listening, "_SENT_BYTES", 4096)
    monkeypatch.setattr(joined, "REST_S", 0.2)
    file = certificate(tmp_path)
    listener = HttpListener(Response(b"x" * size), "127.0.0.1", 0, tls=Tls(file, file) if is_secure else None)
    with in_background(listener), socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asking.settimeout(PATIENCE_S)
        asking.connect(("127.0.0.1", listener.port))
        if is_secure:
            asking = ssl._create_unverified_context().wrap_socket(asking)
        with contextlib.closing(asking):
            asking.sendall(b"GET /" + HOST + b"Connection: close\r\n\r\n")
            time.sleep(0.05)
            assert rest(asking).endswith(b"x" * size)
        until(lambda: not listener._server.server_state.connections)
        # the time for the rest is over
        time.sleep(0.3)
    assert not caplog.records


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """An index of 40 messages of one key, each of 20 KiB, and their store."""
    folder = tmp_path_factory.mktemp("letters")
    with StoreWriter(folder / "store") as writer:
        for n in range(40):
            body, store_ms = b'{"n":%d},{"topic":' % n * 1000, 1_762_000_000_000 + n * 1000
            writer.put("letters", 0, body, keys=["k"], store_ms=store_ms)
    with index_in(folder) as index:
        index_log(index, folder / "store")
        yield index, folder / "store"


def test_messages_that_are_taken_too_slowly_go_on_behind_one(letters, taken_slowly):
    index, store = letters
    with serving(index, store=store) as client:
        url = b"GET /v1/messages?topic=letters&key=k&max_count=40"
        _, body = unchunked(taken_slowly(client, url, b"application/json"))
        first = json.loads(body)
        asked = {"topic": "letters", "key": "k", "body": "excerpt", "cursor": first["cursor"]}
        more = client.get("/v1/messages", params=asked).json()
    assert first["status"] == "truncated" and 0 < len(first["messages"]) < 40 and "failed" in first
    assert more["status"] == "complete"
    seconds = [one["item"]["timestamp_ms"] // 1000 for one in [*first["messages"], *more["messages"]]]
    assert seconds == [1_762_000_000 + n for n in range(40)][::-1]


@pytest.mark.parametrize("place", [{"at_ms": 1_762_000_020_000}, {"cursor": "earlier:0=40"}, {"cursor": "later:0=0"}])
def test_browsing_that_is_read_too_slowly_continues_after_a_message(letters, taken_slowly, place):
    index, store = letters
    url = b"GET /v1/browse?topic=letters&max_count=40&" + urlencode(place).encode()
    with serving(index, store=store) as client:
        _, body = unchunked(taken_slowly(client, url, b"application/json"))
        first = answer = json.loads(body)
        found = first["messages"]
        while answer["later"]:
            asked = {"topic": "letters", "body": "excerpt", "cursor": answer["later"]}
            answer = client.get("/v1/browse", params=asked).json()
            found = found + answer["messages"]
    assert 0 < len(first["messages"]) < 40
    assert (first["status"], first["earlier"]) == ("complete", None)
    assert first["queues"] == [{"queue_id": 0, "begin": 0, "end": 40}]
    assert [one["queue_offset"] for one in found] == [*range(40)]


@pytest.mark.parametrize("taken", range(0, 1 << 20, 99_999))
@pytest.mark.parametrize("status", ["complete", "partial"])
def test_a_document_ends_after_any_of_its_rows(taken, status):
    """Whenever a client becomes slow, it gets the first rows, and a cursor after the last of them."""
    pace, sent = Pace(), b""
    rows = [b'"%d %s"' % (n, b"x" * (n * 997 % 150_000)) for n in range(12)]
    body = b'{"rows":[%s],"status":"%s","cursor":null,"more":1}\n' % (b",".join(rows), status.encode())
    ends = [body.index(row) + len(row) for row in rows]
    document = document_of_rows(body, ends, status, None, str)

    async def send(message):
        nonlocal sent
        sent += message.get("body", b"")
        pace.is_slow = len(sent) > taken

    scope = {"type": "http", "state": {PACE: pace}}
    asyncio.run(PacedResponse(document, "application/json")(scope, None, send))
    got = json.loads(sent)
    kept = len(got["rows"])
    assert got["rows"] == [json.loads(row) for row in rows[:kept]] and got["more"] == 1
    if kept == len(rows):
        assert (got["status"], got["cursor"]) == (status, None)
    else:
        assert (got["status"], got["cursor"]) == ({"complete": "truncated"}.get(status, status), str(kept - 1))


def test_a_document_of_several_lists_that_is_taken_too_slowly_is_no_document(slow):
    _, ask = slow
    lookups = json.dumps({"lookups": [{"topic": "orders", "key": "k", "max_count": 1000}] * 20}).encode()
    _, got = unchunked(ask(b"POST /v1/query:batch", b"application/json", lookups))
    last = json.loads(got.splitlines()[-1])
    assert (last["error"]["status"], last["error"]["error"]) == (408, "Refused")
    with pytest.raises(ValueError):
        json.loads(got)
    # all lines except the last one are whole
    _, got = unchunked(ask(b"POST /v1/query:batch", b"application/x-ndjson", lookups))
    lines = [sorted(json.loads(line)) for line in got.splitlines()]
    assert lines[-1] == ["error"] and 1 < len(lines) <= 20
