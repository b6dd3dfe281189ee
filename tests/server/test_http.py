"""Every route: its answers equal the library's, and its refusals are problem documents."""

import asyncio
import io
import json
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pyarrow as pa
import pytest

from tests.server.conftest import DESCRIPTION, index_in, instead_of_query, on_a_port, service_of, serving
from tests.support.memory import traced_memory
from tiered_index import IndexItem, IndexReader, IndexService, column
from tiered_index.base.encoding import STATUS
from tiered_index.errors import BudgetExceeded, CorruptFile, StorageUnavailable
from tiered_index.server import stored
from tiered_index.server.http import parameters, wire
from tiered_index.server.http.served import Caps

NDJSON = {"accept": wire.NDJSON}
ARROW = {"accept": wire.ARROW}
BATCH = DESCRIPTION["paths"]["/v1/query:batch"]["post"]["requestBody"]["content"][wire.JSON]["example"]
# parts that differ between two indexes, or two calls
VOLATILE = {"elapsed_ms", "index_id", "log_number", "file_id", "path", "bytes", "files"}


def masked(value, name=None):
    if isinstance(value, dict):
        return {key: masked(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [masked(part, name if name != "files" else None) for part in value]
    return type(value).__name__ if name in VOLATILE else value


def expected(answer):
    """Return the service's text of the library's answer, without times."""
    return masked(json.loads(json.dumps(answer.to_dict(files=False))))


@pytest.mark.parametrize("count", [1, 64])
def test_a_stream_ends_with_its_status(client, count):
    params = {"topic": "orders", "key": "order-4711", "max_count": count}
    whole = client.get("/v1/query", params=params | {"max_count": 64}).json()
    got = client.get("/v1/query", params=params | {"all": True}, headers=NDJSON)
    *lines, status = map(json.loads, got.text.splitlines())
    items = [line for line in lines if "offset" in line]
    assert items == whole["items"]
    # a cursor after each page but the last
    assert [sorted(line) == ["cursor"] for line in lines] == ([False, True, False] if count == 1 else [False, False])
    assert (status["status"], status["count"], status["cursor"]) == ("complete", 2, None)
    data = client.get("/v1/query", params=params | {"all": True}, headers=ARROW).content
    batches = list(pa.ipc.open_stream(io.BytesIO(data)).iter_batches_with_custom_metadata())
    rows = [row for batch, _ in batches for row in batch.to_pylist()]
    rows = [row | {"timestamp_ms": round(row["timestamp_ms"].timestamp() * 1000)} for row in rows]
    assert [{**item, "source": None} for item in whole["items"]] == rows
    assert json.loads(batches[-1][1][STATUS])["status"] == "complete"
    assert all(metadata is None for _, metadata in batches[:-1])


def test_topics_and_files_are_listed(client, index):
    got = client.get("/v1/topics").json()
    assert masked(got) == expected(index.topics())
    assert [topic["topic"] for topic in got["topics"]] == ["orders", "payments"]
    files = client.get("/v1/files").json()
    assert (files["index_id"], files["totals"]["entries"]) == (index.index_id, 4)
    *lines, rest = map(json.loads, client.get("/v1/files", headers=NDJSON).text.splitlines())
    assert {**rest, "files": lines} == files
    file = client.get(f"/v1/files/{files['files'][0]['file_id']}").json()
    assert file == files["files"][0] | {"topics": ["orders", "payments"]}
    # the folder stays private to the service
    assert file["path"].startswith("[root]/")


def test_a_request_has_an_id_that_errors_name(client):
    got = client.get("/v1/query", headers={"x-request-id": "my-7"})
    assert got.headers["x-request-id"] == got.json()["request_id"] == "my-7"
    answered = client.get("/v1/query", headers={"x-request-id": "not an id"})
    assert answered.headers["x-request-id"] == answered.json()["request_id"] != "not an id"


WRONG = [
    ("/v1/query", 400, "topic is missing"),
    ("/v1/query?topic=orders&key=k&max_count=ten", 400, 'max_count: must be a whole number, not "ten"'),
    ("/v1/query?topic=orders&key=k&max_count=0", 400, 'max_count: must be at least 1, not "0"'),
    (
        "/v1/query?topic=orders&key=k&max_count=1001",
        400,
        'max_count: must be at most 1000, not "1001"; continue with the cursor',
    ),
    ("/v1/query?topic=orders&key=k&key=j", 400, "parameter 'key' is given more than once"),
    ("/v1/query?topic=orders&key=k&begin=0", 400, "begin is not a parameter of this request"),
    ("/v1/query?topic=orders&key=", 400, "key: must not be empty"),
    (f"/v1/query?topic={'o' * 1025}&key=k", 400, "topic: must have at most 1,024 characters"),
    ("/v1/query?topic=orders&key=k&begin_ms=soon", 400, "'soon' is neither epoch milliseconds"),
    ("/v1/query?topic=orders&key=k&cursor=xyz", 400, "cursor"),
    ("/v1/query?topic=orders&key=k&all=true", 400, "all=true needs a stream"),
    ("/v1/query?topic=orders&key=k&timeout_s=0", 400, "timeout_s: must be greater than 0"),
    ("/v1/query?topic=orders&key=order-%ff", 400, "not UTF-8"),
    ("/v1/files/%ff", 400, "not UTF-8"),
    ("/v1/messages/xyz", 400, "xyz"),
    ("/v1/messages/7F00000100002A9F0000000000000000?cursor=c", 400, "give topic, too"),
    ("/v1/files/xyz", 404, "no file has the id 'xyz'"),
    *((f"/v1/du?by={by}", 400, "topic, day, state") for by in ("", "topic,topic", "size")),
    ("/v1/nothing", 404, "Not Found"),
]


@pytest.mark.parametrize(("path", "status", "detail"), WRONG)
def test_a_wrong_request_is_a_problem(client, path, status, detail):
    got = client.get(path)
    assert (got.status_code, got.headers["content-type"]) == (status, "application/problem+json")
    assert detail in got.json()["detail"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"lookups": []}', "application/json", 400),
        (b'{"lookups": [{"topic": "orders"}]}', "application/json", 400),
        (b'{"lookups": [{"topic": "a", "key": "k", "max_count": true}]}', "application/json", 400),
        (b'{"lookups": [{"topic": "a", "key": "k"}], "max_requests": true}', "application/json", 400),
        (b'{"lookups": [{"topic": "a", "key": "k\\ud800"}]}', "application/json", 400),
        (b'{"lookups": [{"topic": "a", "key": "k", "max_count": "64"}]}', "application/json", 400),
        ('{"lookups": [{"topic": "a", "key": "k"}]}'.encode("utf-16"), "application/json", 400),
        (json.dumps({"lookups": [dict.fromkeys(map(str, range(100)), 0)]}).encode(), "application/json", 400),
        (b"[" * 20, "application/json", 400),
        (b"[" * 100_000, "application/json", 413),
        (b'{"lookups": [{"topic": "a", "key": "k"}, {"topic": "a", "key": "k"}]}', "application/json", 413),
        (b'{"lookups": [1, 2]}', "application/json", 400),
        (b" " * 3000, "application/json", 413),
        (b'{"lookups": [{"topic": "a", "key": "k"}]}', "text/plain", 415),
    ],
)
def test_a_wrong_body_is_a_problem(index, monkeypatch, body, kind, status):
    monkeypatch.setattr(parameters, "MAX_LOOKUPS", 1)
    with serving(index, caps=Caps(body_bytes=200_000 if body[:1] == b"[" else 2000)) as client:
        got = client.post("/v1/query:batch", content=body, headers={"content-type": kind})
        assert (got.status_code, got.json()["status"]) == (status, status)
        # without a declared length, too
        got = client.post("/v1/query:batch", content=iter([body]), headers={"content-type": kind})
        assert got.status_code == status


def test_an_answer_that_could_be_too_large_is_refused_before_it_is_made(index, monkeypatch):
    monkeypatch.setattr("tiered_index.server.lookups._ENTRIES_OF_BATCH", 100)
    with serving(index) as client:
        for counts, status in (([50, 50], 200), ([50, 51], 413), ([64, 64], 413)):
            rows = [{"topic": "orders", "key": "k", "max_count": count} for count in counts]
            got = client.post("/v1/query:batch", json={"lookups": rows})
            assert (got.status_code, "the lookups ask for up to" in got.text) == (status, status == 413)


def test_an_unknown_method_is_refused(index):
    with on_a_port(index) as client:
        assert client.request("BREW", "/v1/topics").status_code == 400
        # a client can't add metrics
        assert "BREW" not in client.get("/metrics").text


def test_unsupported_methods_and_encodings_are_refused(client):
    for path in ("/v1/topics", "/v1/files/some"):
        got = client.delete(path)
        assert (got.status_code, got.headers["allow"]) == (405, "GET")
    headers = {"content-type": wire.JSON, "content-encoding": "gzip"}
    got = client.post("/v1/query:batch", content=b"x", headers=headers)
    assert (got.status_code, "'gzip'" in got.json()["detail"]) == (415, True)


def test_probes_answer_head_and_lookups_do_not(client):
    for path in ("/livez", "/readyz", "/metrics", "/v1/health", "/v1/token"):
        assert client.head(path).status_code == 200
    for path in ("/v1/topics", "/v1/query?topic=orders&key=k"):
        assert client.head(path).status_code == 405


def test_long_lists_are_sent_in_pieces(client, monkeypatch):
    places = [("/v1/files", {}), ("/v1/files", NDJSON), ("/v1/du", {}), ("/v1/topics", {})]
    whole = [client.get(path, headers=headers) for path, headers in places]
    # the index has one file and two topics
    monkeypatch.setattr(wire, "ROWS", 1)
    for (path, headers), expected in zip(places, whole, strict=True):
        got = client.get(path, headers=headers)
        assert ["content-length" in response.headers for response in (got, expected)] == [False, True]
        documents = [[json.loads(line) for line in response.text.splitlines()] for response in (got, expected)]
        for document in (documents[0][-1], documents[1][-1]):
            document.get("explain", {}).pop("elapsed_ms", None)
        assert documents[0] == documents[1]


@pytest.mark.parametrize("form", [{}, NDJSON], ids=["JSON", "lines"])
def test_a_list_that_breaks_off_has_no_end(index, monkeypatch, form):
    def breaking():
        yield {"file_id": "a"}
        raise StorageUnavailable("it went away")

    monkeypatch.setattr(wire, "ROWS", 1)
    monkeypatch.setattr(stored, "files_document", lambda *_: {"status": "complete", "files": breaking()})
    with on_a_port(index) as client:
        taken = b""
        with client.stream("GET", "/v1/files", headers=form) as got, pytest.raises(httpx.RemoteProtocolError):
            for part in got.iter_raw():
                taken += part
        assert got.status_code == 200 and b'"file_id":"a"' in taken and b"status" not in taken


@dataclass(frozen=True, kw_only=True)
class Wide(IndexItem):
    text: str = column("text", width=200_000)


def test_entries_of_wide_columns_come_in_pages_of_8_mib(tmp_path):
    texts = [f"{number}" * 190_000 for number in range(9)] * 8
    with index_in(tmp_path, item_type=Wide) as index:
        for number, text in enumerate(texts):
            index.put("orders", 0, "k", number, 10, 1_762_000_000_000 + 1000 * number, text=text)
        index.flush()
        lookup = {"topic": "orders", "key": "k"}
        with serving(index) as client:
            for path, name in (("/v1/query", "items"), ("/v1/messages", "messages")):
                got = client.get(path, params=lookup)
                assert len(got.content) < 8 << 20 and got.json()["status"] == "truncated"
                assert 1 < len(got.json()[name]) < 64
            lines = client.get("/v1/query", params=lookup | {"all": True}, headers=NDJSON).text.splitlines()
            items = [line for line in map(json.loads, lines) if "offset" in line]
            assert [item["text"] for item in items] == texts[::-1]
            assert sum('{"cursor"' in line[:12] for line in lines) >= 3
            lookups = [lookup, lookup | {"max_count": 1000}]
            got = client.post("/v1/query:batch", json={"lookups": lookups}).json()
            assert [len(answer["items"]) for answer in got["results"]] == [20, 20] and [*got["cursors"]] == ["0", "1"]
            got = client.post("/v1/query:batch", json={"lookups": lookups * 3})
            assert got.status_code == 413 and "this service returns 80 at once" in got.text


def raising(error):
    def method(*_, **__):
        raise error

    return method


@pytest.mark.parametrize(
    ("error", "status", "name", "retry"),
    [
        (StorageUnavailable("it is away"), 502, "StorageUnavailable", True),
        (CorruptFile("a", "is damaged"), 502, "CorruptFile", False),
        (BudgetExceeded("max_requests=1 reached"), 422, "BudgetExceeded", False),
        (RuntimeError("secret of the process"), 500, "Unexpected", False),
    ],
)
def test_errors_of_the_library_have_a_status_each(index, error, status, name, retry):
    with serving(index) as client, pytest.MonkeyPatch.context() as patch:
        instead_of_query(patch, raising(error))
        got = client.get("/v1/query", params={"topic": "orders", "key": "k"})
        assert (got.status_code, got.json()["error"], "retry-after" in got.headers) == (status, name, retry)
        assert "secret" not in got.text and "Traceback" not in got.text
        # a stream that can't begin is a problem document, too
        assert client.get("/v1/query", params={"topic": "orders", "key": "k"}, headers=NDJSON).status_code == status


def test_a_file_of_one_of_several_indexes_is_shown(tmp_path):
    uris = [(tmp_path / name).as_uri() for name in ("a", "b")]
    for uri in uris:
        with IndexService.open(root=tmp_path / uri[-1:] / "root", storage=uri) as index:
            index.put("orders", 0, "k", 1, 10, 1_762_000_000_000)
            index.seal()
            index.run_lifecycle()
    with IndexReader.open(uris) as reader, serving(reader) as client:
        for handle in reader.files():
            assert client.get(f"/v1/files/{handle.file_id}").json()["entries"] == 1
        assert client.get("/v1/files/none").status_code == 404


def called(app, path, pieces=(), noted=lambda _: None):
    """Call an application with a body in `pieces`, and return the status. `noted` gets each part of the answer."""
    left, statuses, method = pieces, [], "POST" if pieces else "GET"

    async def receive():
        if not left:
            await asyncio.Future()
        return {"type": "http.request", "body": left.popleft(), "more_body": bool(left)}

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        else:
            noted(message.get("body", b""))

    headers = {"host": "127.0.0.1", "content-type": wire.JSON, "transfer-encoding": "chunked"}
    scope = {"type": "http", "method": method, "path": path, "query_string": b""}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(app(scope, receive, send))
    return statuses[0]


def test_an_answer_in_pieces_holds_one_and_no_body(index, monkeypatch):
    """While its client takes it."""
    lookups = json.dumps(BATCH | {"lookups": BATCH["lookups"] * 2}).encode()
    with service_of(index) as service, ExitStack() as stack:
        # loads modules, which are no part of an answer
        called(service.app, "/v1/du", (), lambda _: None)
        traced = stack.enter_context(traced_memory())

        def held(path, pieces=()):
            sizes = []
            assert called(service.app, path, pieces, lambda _: sizes.append(traced()[0])) == 200
            # while the first part is sent, the thread that made it may still end
            return sizes[1:]

        monkeypatch.setattr(wire, "ROWS", 1)
        sizes = held("/v1/query:batch", deque([lookups, b" " * (8 << 20)]))
        assert len(sizes) > 3 and max(sizes) < 4 << 20
        monkeypatch.setattr(wire, "list_document", lambda *_: (bytes(4 << 20) for _ in range(3)))
        sizes = held("/v1/du")
        assert len(sizes) == 48 and max(sizes) < 6 << 20


def test_a_body_in_pieces_is_bounded(index):
    lookup, spaces = b'{"lookups": [{"topic": "orders", "key": "k"}]}', b" " * 100
    with service_of(index, caps=Caps(body_bytes=1000)) as service:
        for count, status in ((9, 200), (10, 413)):
            assert called(service.app, "/v1/query:batch", deque([lookup, *[spaces] * count])) == status


def test_a_piece_of_a_long_list_is_in_memory_at_a_time(monkeypatch):
    monkeypatch.setattr(wire, "ROWS", 500)
    document = {"rows": ({"topic": f"topic-{number}", "entries": number} for number in range(50_000)), "by": ["topic"]}
    with traced_memory() as traced:
        size = sum(map(len, wire.list_document(document, "rows", wire.JSON)))
        assert traced()[1] < 1 << 20 < size
