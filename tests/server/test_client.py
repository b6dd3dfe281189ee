"""The client answers as the library does, repeats only safe requests, and never takes a part for the whole."""

import asyncio
import contextlib
import io
import json
import socket
import threading
from dataclasses import dataclass
from math import nan

import httpx
import pyarrow as pa
import pytest

from tests.server.conftest import PATIENCE_S, index_in, instead_of_query, on_a_port
from tiered_index import IndexService, KeyedIndexItem, Lookup, QueryResult, column
from tiered_index.cli.options import ServiceOptions
from tiered_index.cli.output import Output
from tiered_index.cli.session import Session, asked_service
from tiered_index.client import AsyncIndexClient, IndexClient
from tiered_index.client.answers import COLUMNS, NotThere, error_of, result_of, topics_of
from tiered_index.errors import (
    BackPressure,
    BudgetExceeded,
    ConfigError,
    CorruptFile,
    InvalidArgument,
    InvalidCursor,
    PartialAnswer,
    StorageBehind,
    StorageUnavailable,
)
from tiered_index.server.http.tokens import add_token
from tiered_index.service.log.reads import read_name


def same(got: QueryResult, own: QueryResult):
    """Return whether two answers agree, except for times."""
    documents = [answer.to_dict(files=False) for answer in (got, own)]
    for document in documents:
        document["explain"].pop("elapsed_ms")
    return documents[0] == documents[1]


@pytest.fixture(scope="module")
def client(index):
    with on_a_port(index) as client:
        yield client


@pytest.fixture
def asking(client):
    with IndexClient(str(client.base_url)) as asking:
        yield asking


def test_answers_are_the_librarys(asking, index):
    assert same(asking.query("orders", "order-4711"), index.query("orders", "order-4711"))
    assert type(asking.query("orders", "order-4711").items[0]) is type(index.query("orders", "order-4711").items[0])
    explained = asking.query("orders", "order-4711", explain=True).explain.files
    assert [file.outcome for file in explained] == ["read"]
    lookups = [("orders", "order-4711"), Lookup(topic="payments", key="order-4711", max_count=1)]
    assert all(map(same, asking.query_many(lookups), index.query_many(lookups)))
    assert asking.topics().topics == index.topics().topics
    assert asking.files()["index_id"] == index.index_id
    pages = list(asking.query_all("orders", "order-4711", max_count=1))
    assert [[item.offset for item in page] for page in pages] == [[204_800], [1024]]
    assert tuple(asking.stream("orders", "order-4711")) == index.query("orders", "order-4711").items
    for begin_ms, end_ms in ((0, 2**63 - 1), (-(2**63), 2**63)):
        ever = Lookup(topic="orders", key="order-4711", begin_ms=begin_ms, end_ms=end_ms)
        assert same(asking.query_many([ever])[0], index.query("orders", "order-4711"))
        assert len(asking.messages("orders", "order-4711", begin_ms=begin_ms, end_ms=end_ms)) == 2


@dataclass(frozen=True, kw_only=True)
class Order(KeyedIndexItem):
    region: int = column(">u2", identity=True)
    price: float = column(">f8")
    code: bytes = column("S4")
    # one text looks like the digits of bytes
    town: str = column("text", width=9)


def test_own_columns_keep_their_types(tmp_path):
    """JSON has neither bytes nor NaN, and an empty answer has no values: the service declares the columns."""
    with (
        index_in(tmp_path, item_type=Order) as index,
        on_a_port(index) as http,
        IndexClient(str(http.base_url)) as asking,
    ):
        for n, (price, town) in enumerate(((1.5, "日本語"), (2.0, "cafe"), (nan, ""))):
            own = {"region": n, "price": price, "code": b"a\0b", "town": town}
            index.put("orders", 0, "k", n, 7, 1_762_000_000_000, **own)
        for key in ("k", "none"):
            own = index.query("orders", key)
            table = own.to_arrow()
            assert table.schema.field("price").type == pa.float64()
            assert table.schema.field("town").type == pa.string()
            batch = asking.query_many_arrow([("orders", key)])[0].drop_columns(["lookup"])
            answers = [asking.query("orders", key), asking.query_many([("orders", key)])[0]]
            for served in (*(answer.to_arrow() for answer in answers), batch):
                assert (served.schema, repr(served.to_pylist())) == (table.schema, repr(table.to_pylist()))
            assert repr([*asking.stream("orders", key)]) == repr([*own])
            assert repr([fetched.item for fetched in asking.messages("orders", key).messages]) == repr([*own])
        served = http.get("/v1/query", params={"topic": "orders", "key": "k"})
        assert [item["town"] for item in served.json()["items"]] == ["", "cafe", "日本語"]
        # clients that know no text refuse this type: they would take "cafe" for two bytes
        assert json.loads(served.headers["tiered-index-columns"])["columns"][-1] == ["town", "text9", False]


def test_entries_are_put_once(tmp_path):
    columns = {"topic": ["a"], "queue_id": [0], "key": ["k"], "offset": [1], "size": [2], "timestamp_ms": [10**12]}
    with index_in(tmp_path) as index, on_a_port(index) as client, IndexClient(str(client.base_url)) as asking:
        assert asking.put_batch(columns, "s", 1, after=0)["entries"] == 1
        assert asking.put_batch(pa.table(columns), "s", 1)["repeated"] is True
        assert [item.offset for item in asking.query("a", "k")] == [1]


def test_an_answer_is_complete_only_up_to_where_the_source_was_read(tmp_path):
    """Also for a token that may not see the source's positions, and for each part of a batch."""
    path = tmp_path / "tokens"
    empty = {name: [] for name in ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")}
    tokens = [add_token(path, name, "read", topics) for name, topics in (("all", None), ("some", ["orders"]))]
    with index_in(tmp_path) as index, on_a_port(index, tokens=path) as client:
        index.put_source_batch(empty, read_name("kafka:c", "orders"), 1_762_000_000_500)
        index.flush()
        for token in tokens:
            with IndexClient(str(client.base_url), token=token) as asking:
                batch = asking.query_many([("orders", "k"), ("orders", "l")])
                assert {answer.as_of_ms for answer in (asking.query("orders", "k"), *batch)} == {1_762_000_000_000}
        with IndexClient(str(client.base_url), token=tokens[0]) as asking:
            assert asking.query("others", "k").as_of_ms is None


def test_errors_are_the_librarys(asking, index, tmp_path):
    with pytest.raises(InvalidCursor):
        asking.query("orders", "order-4711", cursor="x")
    for call in (asking.query, asking.messages):
        for place, about in ((("orders", 4711), "a key must be text, not int"), ((7, "k"), "topic must be text")):
            with pytest.raises(InvalidArgument, match=about):
                call(*place)
    with pytest.raises(InvalidArgument, match="no verification has the id"):
        asking.verification("x")
    path = tmp_path / "tokens.json"
    token = add_token(path, "a", "read", ["pay"])
    with on_a_port(index, tokens=path) as client:
        with IndexClient(str(client.base_url)) as nobody, pytest.raises(ConfigError, match="give a token"):
            nobody.topics()
        with IndexClient(str(client.base_url), token="x") as revoked, pytest.raises(ConfigError, match="not valid"):
            revoked.topics()
        with IndexClient(str(client.base_url), token=token) as some:
            assert [topic.topic for topic in some.topics().topics] == ["payments"]
            with pytest.raises(ConfigError, match="not for topic"):
                some.query("orders", "k")


@pytest.mark.parametrize(
    ("name", "status", "kind"),
    [
        ("BudgetExceeded", 422, BudgetExceeded),
        ("CorruptFile", 502, CorruptFile),
        ("StorageBehind", 502, StorageBehind),
        ("BackPressure", 503, BackPressure),
        ("Refused", 429, StorageUnavailable),
        ("Unexpected", 500, StorageUnavailable),
        (None, 404, NotThere),
        (None, 405, InvalidArgument),
    ],
)
def test_a_problem_is_the_error_with_the_remedy(name, status, kind):
    error = error_of({"error": name, "status": status, "detail": "why"})
    assert type(error) is kind and "why" in str(error)


def test_a_client_ignores_the_members_of_a_later_service(client):
    lost = {"file": "a", "begin_ms": 0, "end_ms": 1, "entries": 2, "source": None}
    freshness = {"source": "a", "as_of_ms": None, "positions": {}}
    for path, of, rows in (("query?topic=orders&key=order-4711", result_of, "items"), ("topics", topics_of, "topics")):
        got = client.get(f"/v1/{path}")
        document = got.json() | {"lost": [dict(lost)], "freshness": [dict(freshness)]}
        columns = {COLUMNS: got.headers.get(COLUMNS, "")}
        now = of(httpx.Response(200, json=document, headers=columns))
        parts = [*document["lost"], *document["freshness"], document["explain"]]
        # further members of an entry are columns
        for part in (*parts, *(document[rows] if rows == "topics" else ())):
            part["later"] = 1
        later = httpx.Response(200, json=document | {"later": 1}, headers=columns)
        assert of(later) == now and len(now.lost) == len(now.freshness) == 1


@contextlib.contextmanager
def answering(*answers):
    """A server that answers each connection with these bytes and closes it; yields its URL and the requests."""
    requests = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run():
            for answer in answers:
                try:
                    connection, _ = listening.accept()
                except OSError:  # the test closed it before all answers were requested
                    return
                with connection:
                    requests.append(connection.recv(65536))
                    connection.sendall(answer)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", requests
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)


def head(*columns):
    """The head of an answer whose entries have these columns of integers."""
    declared = {"name": "Entry", "columns": [[name, ">i8", False] for name in columns]}
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\nTiered-Index-Columns: %s\r\n" % json.dumps(declared).encode()


NDJSON = {"accept": "application/x-ndjson"}
HEAD = head()
ITEM = b'{"topic":"a","topic_id":1,"queue_id":0,"offset":1,"size":1,"timestamp_ms":0,"key_hash":1}'
BUSY = b"HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
NOTHING = dict.fromkeys(("cursor", "expired_before_ms")) | {"unknown_topics": [], "replaced": 0, "explain": {}}


def page(*offsets, status="truncated", **members):
    """The answer with a page of entries at these offsets."""
    items = [json.loads(ITEM) | {"offset": offset} for offset in offsets]
    document = {"items": items, "status": status, "timestamp_resolution_ms": 1000, **NOTHING, **members}
    body = json.dumps(document).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_stream_continues_an_answer_that_broke_off_from_its_last_cursor():
    whole = page(1, 2, cursor="page-2"), page(2, 3, cursor="page-3"), page(4, status="complete")
    cut = whole[1][:-40]

    async def offsets(url):
        async with AsyncIndexClient(url) as asking:
            return [item.offset async for item in asking.stream("a", "k")]

    for is_async in (False, True):
        with answering(whole[0], cut, BUSY, whole[1], whole[2]) as (url, requests), IndexClient(url) as asking:
            offsets_read = asyncio.run(offsets(url)) if is_async else [item.offset for item in asking.stream("a", "k")]
        assert offsets_read == [1, 2, 3, 4]
        pages_asked = [next((n for n in (2, 3) if b"cursor=page-%d" % n in request), 1) for request in requests]
        assert pages_asked == [1, 2, 2, 2, 3]
    with answering(whole[0], cut, cut) as (url, requests), IndexClient(url, tries=2) as asking:
        with pytest.raises(StorageUnavailable, match="did not answer"):
            list(asking.stream("a", "k"))
    assert len(requests) == 3


def test_a_stream_of_a_partial_answer_ends_with_its_error():
    failed = [
        {"file": name, "place": "storage", "outcome": "failed", "begin_ms": 0, "end_ms": 1} for name in ("x", "y")
    ]
    answers = page(1, cursor="page-2", failed=failed[:1]), page(2, status="partial", failed=failed)
    with answering(*answers) as (url, _), IndexClient(url) as asking:
        offsets = []
        with pytest.raises(PartialAnswer, match="2 files") as caught:
            for item in asking.stream("a", "k", allow_partial=True):
                offsets.append(item.offset)
    assert offsets == [1, 2] and [report.file for report in caught.value.failed] == ["x", "y"]


def test_a_busy_service_is_asked_again_and_a_lost_one_is_reported():
    whole = json.dumps({"status": "alive"}).encode()
    answer = HEAD + b"Content-Length: %d\r\n\r\n" % len(whole) + whole
    with answering(BUSY, BUSY, answer) as (url, requests), IndexClient(url) as asking:
        assert asking.files() == {"status": "alive"}
        assert len(requests) == 3
    with IndexClient(url, tries=1) as asking, pytest.raises(StorageUnavailable) as lost:
        asking.topics()
    assert str(lost.value).startswith(f"{url} did not answer (") and "Connection refused" in str(lost.value)
    # an answer that another program wrote, and ones that broke off
    for body, said in (
        (b"<html>", "is this a tiered_index service"),
        (b'{"items": [{"top', "broke off"),
        (b'{"items": [\n{"error": "of an entry"}', "broke off"),
    ):
        with answering(HEAD + b"\r\n" + body) as (url, _), IndexClient(url, tries=1) as asking:
            with pytest.raises(StorageUnavailable, match=said):
                asking.query("a", "k")


@pytest.mark.parametrize(
    ("content", "error"), [(b"\xbf\xff", ConfigError), (b"a\nb\n", InvalidArgument), (b"\n", InvalidArgument)]
)
def test_a_file_without_a_token_is_reported(tmp_path, content, error):
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(error, match=r"no token|invalid token"):
        asked_service(Session(Output(as_json=False)), ServiceOptions("http://localhost:1", tmp_path / "token"))


def test_a_put_without_a_position_is_sent_once():
    columns = {"topic": ["a"], "queue_id": [0], "key": ["k"], "offset": [1], "size": [2], "timestamp_ms": [10**12]}
    with answering(BUSY, BUSY, BUSY, BUSY) as (url, requests), IndexClient(url) as asking:
        with pytest.raises(StorageUnavailable):
            asking.put_batch(columns)
    assert len(requests) == 1


SECRET_URLS = ["http://u:secret@host", "http://:secret@host", "http://host?token=secret", "http://host/#secret"]


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://host", "http://", "http://[", *SECRET_URLS])
def test_an_invalid_url_is_refused_and_not_shown(url):
    with pytest.raises(InvalidArgument, match="not the URL of a service") as refused:
        IndexClient(url)
    assert "secret" not in str(refused.value)


def test_a_stream_that_breaks_within_says_why(index, monkeypatch):
    calls = []
    query = IndexService.query

    def breaking(self, *args, **kwargs):
        calls.append(args)
        if len(calls) > 1:
            raise StorageUnavailable("it went away")
        return query(self, *args, **kwargs)

    with on_a_port(index) as client:
        instead_of_query(monkeypatch, breaking)
        wanted = {"topic": "orders", "key": "order-4711", "max_count": 1, "all": True}
        lines = client.get("/v1/query", params=wanted, headers=NDJSON).text.splitlines()
        # an entry, the cursor of its page, and the error
        assert len(lines) == 3 and json.loads(lines[-1])["cursor"] == json.loads(lines[1])["cursor"]
        assert json.loads(lines[-1])["error"]["error"] == "StorageUnavailable" and "status" not in json.loads(lines[-1])
        calls.clear()
        data = client.get("/v1/query", params=wanted, headers={"accept": "application/vnd.apache.arrow.stream"}).content
        *_, (_, metadata) = pa.ipc.open_stream(io.BytesIO(data)).iter_batches_with_custom_metadata()
        assert "status" not in json.loads(metadata[b"tiered_index.status"])


@pytest.mark.parametrize("after", [b"99999999", b"Wed, 21 Oct 2099 07:28:00 GMT"])
def test_a_service_that_requests_a_long_wait_is_asked_again_soon(monkeypatch, after):
    waits = []

    async def sleep(wait_s):
        waits.append(wait_s)

    async def topics(url):
        async with AsyncIndexClient(url, tries=2) as asking:
            await asking.topics()

    monkeypatch.setattr(AsyncIndexClient, "_sleep", staticmethod(sleep))
    busy = BUSY.replace(b"After: 0", b"After: " + after)
    with answering(busy, busy) as (url, requests), pytest.raises(StorageUnavailable):
        asyncio.run(topics(url))
    assert (len(requests), len(waits)) == (2, 1) and waits[0] <= 10


def test_pages_tell_entries_of_several_times_apart_by_columns_that_only_their_index_has(tmp_path):
    where = {"root": tmp_path / "root", "storage": "memory://regions"}
    with IndexService.open(**where, item_type=Order, background=False) as index:
        for second, region in enumerate((1, 2, 1)):
            own = {"region": region, "price": 1.0, "code": b"c", "town": ""}
            index.put("orders", 0, "k", 7, 1, 1_762_000_000_000 + second * 1000, **own)
        with on_a_port(index) as client, IndexClient(str(client.base_url)) as asking:
            for reader in (index, asking):
                for count in (1, 2, 3):
                    # a page does not know the entries of earlier ones
                    pages = [*reader.query_all("orders", "k", max_count=count)]
                    assert [item.region for page in pages for item in page] == [1, 2]
                    assert sum(page.explain.folded_entries for page in pages) == 1
            assert sorted(item.region for item in asking.stream("orders", "k")) == [1, 2]
            lines = client.get("/v1/query?topic=orders&key=k&all=true&max_count=1", headers=NDJSON).text.splitlines()
            shown = [document["region"] for document in map(json.loads, lines) if "region" in document]
            assert {*shown} == {1, 2} and json.loads(lines[-1])["explain"]["folded_entries"] + len(shown) == 3
