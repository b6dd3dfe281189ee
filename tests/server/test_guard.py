"""Permissions and sizes of requests, and the end of lookups whose client has gone."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from tests.server.conftest import PATIENCE_S, index_in, instead_of_query, on_a_port, serving
from tests.support.core import compiled_core
from tests.support.hanging import until
from tiered_index import IndexReader, IndexService
from tiered_index.base.call import active_context
from tiered_index.errors import BudgetExceeded, ConfigError, InvalidArgument, ObjectNotFound, StorageUnavailable
from tiered_index.server.http import bounds, calls, wire
from tiered_index.server.http.served import Audit, Caps
from tiered_index.server.http.tokens import Caller, Tokens, add_token
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.prices import PriceTable

QUERY = {"topic": "orders", "key": "order-4711"}


def bearer(token):
    return {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def path_and_tokens(tmp_path_factory):
    """A token file, and its tokens by name."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    wanted = {"reader": ("read", None), "pay": ("admin", ["pay", "invoice"])}
    return path, {name: add_token(path, name, *rights) for name, rights in wanted.items()}


@pytest.fixture(scope="module")
def guarded(index, path_and_tokens):
    with serving(index, tokens=path_and_tokens[0]) as client:
        yield client


def test_every_route_but_probes_needs_a_token(guarded):
    described = guarded.get("/openapi.json").json()
    for path, methods in described["paths"].items():
        for method in methods:
            for headers in ({}, bearer("ti_wrong"), {"authorization": "Basic eDp5"}):
                got = guarded.request(method, path.replace("{id}", "x"), headers=headers)
                if path in ("/livez", "/readyz"):
                    assert got.status_code == 200
                else:
                    assert (path, got.status_code) == (path, 401)
                    assert got.headers["www-authenticate"] == "Bearer"


def test_tokens_are_kept_as_hashes_readable_by_their_owner(path_and_tokens):
    path, by_name = path_and_tokens
    assert not any(token in path.read_text() for token in by_name.values())
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidArgument, match="has a token called reader"):
        add_token(path, "reader", "read", None)


@pytest.mark.parametrize("topics", [[], [""], ["order", ""]])
def test_a_token_of_no_topics_is_not_one_of_every_topic(tmp_path, topics):
    with pytest.raises(InvalidArgument, match="prefix of topics is empty"):
        add_token(tmp_path / "tokens.json", "team", "read", topics)
    assert not any(tmp_path.iterdir())


def test_a_token_sees_its_topics_only(guarded, path_and_tokens):
    pay, reader = bearer(path_and_tokens[1]["pay"]), bearer(path_and_tokens[1]["reader"])
    params = {"topic": "payments", "key": "order-4711"}
    assert len(guarded.get("/v1/query", params=params, headers=pay).json()["items"]) == 1
    for path in ("/v1/query", "/v1/messages"):
        got = guarded.get(path, params=QUERY, headers=pay)
        assert (got.status_code, got.json()["detail"]) == (403, "the token is not for topic 'orders'")
    stream = guarded.get("/v1/query", params=QUERY | {"all": True}, headers=pay | {"accept": wire.NDJSON})
    assert stream.status_code == 403
    both = {"lookups": [params, QUERY]}
    assert guarded.post("/v1/query:batch", json=both, headers=pay).status_code == 403
    assert guarded.post("/v1/query:batch", json=both, headers=reader).status_code == 200
    topics = [topic["topic"] for topic in guarded.get("/v1/topics", headers=pay).json()["topics"]]
    assert topics == ["payments"]
    rows = {name: guarded.get("/v1/du", headers=who).json()["rows"] for name, who in (("pay", pay), ("all", reader))}
    assert {row["topic"] for row in rows["pay"]} == {"payments"} and len(rows["all"]) == 2
    explained = {name: [] for name in ("pay", "reader")}
    for name, explains in explained.items():
        headers, more = bearer(path_and_tokens[1][name]), {"explain": True}
        for path in ("/v1/query", "/v1/messages", "/v1/topics"):
            asks = (params if path != "/v1/topics" else {}) | more
            explains.append(guarded.get(path, params=asks, headers=headers).json()["explain"])
        batch = guarded.post("/v1/query:batch", json={"lookups": [params]} | more, headers=headers)
        explains.append(batch.json()["explain"])
        lines = guarded.get("/v1/query", params=params | more, headers=headers | {"accept": wire.NDJSON}).text
        explains.append(json.loads(lines.splitlines()[-1])["explain"])
    # files are of all topics
    assert [("files" in explain) for explain in explained["pay"]] == [False] * 5
    assert [bool(explain["files"]) for explain in explained["reader"]] == [True] * 5
    for path in ("/v1/files", "/v1/files/x", "/metrics"):
        assert guarded.get(path, headers=pay).status_code == 403
        assert guarded.get(path, headers=reader).status_code in (200, 404)


def test_a_token_sees_its_own_sources_only_and_none_a_path(tmp_path, path_and_tokens):
    """In every form, and without the storage, when the freshness is that of the log that the root keeps."""
    uri, store = (tmp_path / "storage").as_uri(), tmp_path / "store"
    (store / "commitlog").mkdir(parents=True)
    with index_in(tmp_path) as index:
        row = {"topic": ["payments"], "queue_id": [0], "key": ["k"], "size": [1], "timestamp_ms": [1_762_000_000_000]}
        for position, source in enumerate((f"rocketmq:{store}", "pay:daily"), 1):
            index.put_source_batch(row | {"offset": [position]}, source, position)
        index.seal()
        index.run_lifecycle()
    params, every = {"topic": "payments", "key": "k", "max_count": 1}, {"rocketmq:[store]": 1, "pay:daily": 2}

    def seen_by(client, name, cursor=None):
        headers = bearer(path_and_tokens[1][name])
        stream = client.get("/v1/query", params=params | {"all": True}, headers=headers | {"accept": wire.NDJSON})
        batch = client.post("/v1/query:batch", json={"lookups": [params | {"cursor": cursor}]}, headers=headers).json()
        plain = [client.get(f"/v1/{what}", headers=headers).json() for what in ("topics", "query?topic=pay&key=k")]
        answers = (*plain, batch, json.loads(stream.text.splitlines()[-1]))
        return [source["positions"] for answer in answers for source in answer["freshness"]]

    with IndexReader.open(uri) as reader, serving(reader, tokens=path_and_tokens[0], store=store) as client:
        assert seen_by(client, "pay") == [{"pay:daily": 2}] * 4
        assert seen_by(client, "reader") == [every] * 4
    (tmp_path / "storage").rename(tmp_path / "away")
    with (
        IndexReader.open(root=tmp_path / "root") as reader,
        serving(reader, tokens=path_and_tokens[0], store=store) as client,
    ):
        cursor = reader.query(**params).cursor
        assert seen_by(client, "pay", cursor) == [{"pay:daily": 2}] * 4
        assert seen_by(client, "reader", cursor) == [every] * 4


# the beginnings of names of positions that only sources set
OF_SOURCES = ["rocketmq:", *(f"kafka{of}:" for of in ("", "-key", "-begin", "-epoch"))]
OF_SOURCES += [*(f"files{of}:" for of in ("", "-key")), "read-before:"]
OF_SOURCES += ["topic-key:", "topic-key-read:"]


@pytest.mark.parametrize("prefix", OF_SOURCES)
def test_a_token_with_the_name_of_followed_sources_does_not_see_them(prefix):
    name = prefix.removesuffix(":")
    assert not Caller(name, "read", ("pay",)).sees_source(f"{name}:cluster/orders/0")


def test_a_new_token_leaves_the_file_to_its_owner(tmp_path, monkeypatch):
    path, link = tmp_path / "tokens.json", tmp_path / "link.json"
    add_token(path, "first", "read", None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    link.symlink_to(path)
    before, owners = path.stat(), []
    monkeypatch.setattr(os, "chown", lambda file, *owner: owners.append((file.name, *owner)))
    token = add_token(link, "second", "read", None)
    assert link.is_symlink() and Tokens(path).find(token).name == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    [(new, *owner)] = owners
    assert new.startswith(".tokens.json.") and owner == [before.st_uid, before.st_gid]
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_tokens_that_are_added_at_once_are_all_in_the_file(tmp_path):
    path, names = tmp_path / "tokens.json", [f"token-{number}" for number in range(16)]
    with ThreadPoolExecutor(len(names)) as pool:
        added = list(pool.map(lambda name: add_token(path, name, "read", None), names))
    known = Tokens(path)
    assert [known.find(token).name for token in added] == names


@pytest.mark.usefixtures("tokens_looked_at")
def test_a_token_that_is_taken_out_ends_and_none_ends_by_a_damaged_file(tmp_path):
    path = tmp_path / "tokens.json"
    first, second = add_token(path, "first", "read", None), add_token(path, "second", "read", None)
    known = Tokens(path)
    rows = json.loads(path.read_text())
    assert known.find(first).name == "first"
    for text in ("[", "{}", "[1]", '[{"name": "a", "sha256": "12", "role": "read"}]'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not a file of tokens"):
            Tokens(path)
        assert known.find(first) is not None and "is not a file of tokens" in known.problem()
    path.write_text(json.dumps(rows[1:]))
    assert known.find(first) is None and known.find(second) is not None and known.problem() is None
    # also if size and time are unchanged, as after copies that preserve them
    before = path.stat()
    path.write_text(json.dumps([rows[1] | {"sha256": rows[0]["sha256"]}]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert known.find(second) is None and known.find(first) is not None
    path.chmod(0o606)
    assert known.find(first) is not None
    assert "every user of this host can write the token file" in known.problem()
    path.chmod(0o600)
    assert known.problem() is None


def test_without_tokens_only_its_own_address_and_its_own_page_are_answered(client):
    for headers, status in (
        ({"host": "evil.example:8080"}, 403),
        *(({"host": host}, 200) for host in ("localhost", "127.0.0.1:80", "[::1]:8080")),
        *(({"sec-fetch-site": site}, 403) for site in ("cross-site", "same-site")),
        ({"sec-fetch-site": "same-origin"}, 200),
    ):
        assert client.get("/v1/topics", headers=headers).status_code == status, headers


def answer(client, sent):
    """Return the first bytes of the answer to a request."""
    with socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE_S) as connection:
        connection.sendall(sent)
        return connection.recv(1000)


HOST = b" HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def bodies_within(monkeypatch):
    """Return a function that sets how many seconds a body may take."""
    return lambda seconds: monkeypatch.setattr(bounds, "_BODY_S", seconds)


@pytest.mark.parametrize(
    ("status", "request_bytes"),
    [
        # what is lacking of its body does not come in time
        (408, b"POST /v1/entries" + HOST + b"Content-Length: 9\r\nContent-Type: application/x-ndjson\r\n\r\n{"),
        (414, b"GET /v1/query?topic=t&key=" + b"k" * (63 << 10) + HOST + b"\r\n"),
        (413, b"POST /v1/query:batch" + HOST + b"Content-Type: application/json\r\nExpect: 100-continue\r\n"
              b"Content-Length: 999999999\r\n\r\n"),
    ],
)  # fmt: skip
def test_requests_are_bounded_in_time_and_by_their_heads(index, bodies_within, status, request_bytes):
    bodies_within(0.0)
    with on_a_port(index) as client:
        assert answer(client, request_bytes).startswith(b"HTTP/1.1 %d" % status)


def test_a_long_body_has_more_time(tmp_path, bodies_within, monkeypatch):
    """What has arrived gives the rest time."""
    line = b'{"topic": "t", "queue_id": 0, "key": "slow", "offset": 1, "size": 1, "timestamp_ms": 1762000000000}\n'
    bodies_within(2.0)
    monkeypatch.setattr(bounds, "_LEAST_BYTES_PER_S", 1)

    def pieces():
        yield line
        time.sleep(2.5)
        yield line.replace(b'"offset": 1', b'"offset": 2')

    with index_in(tmp_path) as index, on_a_port(index) as client:
        put = client.post("/v1/entries", content=pieces(), headers={"content-type": wire.NDJSON})
    assert put.json().get("entries") == 2


class Held:
    """A lookup that waits, then sends the storage one request per turn until it is refused."""

    def __init__(self):
        self.entered, self.go_on, self.refused = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, *_, **__):
        assert active_context().deadline_s is not None
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)
        try:
            MeteredStorage(MemoryStorage()).get_range("object", 0, 1)
        except ObjectNotFound as error:
            raise StorageUnavailable("a request was sent") from error
        except BudgetExceeded:
            self.refused.set()
            raise


BATCH = b'{"lookups": [{"topic": "orders", "key": "k"}], "max_requests": 9}'


PAGES = b"&all=true&max_count=1" + HOST + b"Accept: application/x-ndjson\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "pages", "request_bytes"),
    [
        ("query", 0, b"GET /v1/query?topic=orders&key=k" + HOST + b"\r\n"),
        # within its stream
        ("query", 1, b"GET /v1/query?topic=orders&key=order-4711" + PAGES),
        ("query_many", 0, b"POST /v1/query:batch" + HOST + b"Content-Type: application/json\r\n"
                          b"Content-Length: %d\r\n\r\n%b" % (len(BATCH), BATCH)),
    ],
)  # fmt: skip
def test_a_client_that_leaves_ends_its_lookup_and_is_no_failure(
    index, monkeypatch, caplog, method, pages, request_bytes
):
    held, first = Held(), [index.query("orders", "order-4711", max_count=1)][:pages]
    assert all(page.cursor is not None for page in first)
    gc.collect()  # warnings that other tests left
    caplog.clear()
    with on_a_port(index, threads=1) as client:
        monkeypatch.setattr(
            IndexService, method, lambda self, *args, **kwargs: first.pop() if first else held(*args, **kwargs)
        )
        monkeypatch.setattr(IndexService, "query_nowait", lambda *_: None)
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.sendall(request_bytes)
            assert held.entered.wait(PATIENCE_S)
        until(lambda: 'status="499"' in client.get("/metrics").text)
        held.go_on.set()
        assert held.refused.wait(PATIENCE_S)
        # the one thread is free again
        assert client.get("/v1/topics").status_code == 200
    # the collector reports an error that no task awaits
    gc.collect()
    assert not caplog.records


def test_no_more_lookups_than_threads_and_places_to_wait(index, monkeypatch):
    held = Held()
    with serving(index, threads=1, waiting=0) as client:
        instead_of_query(monkeypatch, lambda self, *args, **kwargs: held(*args, **kwargs))
        asking = [threading.Thread(target=client.get, args=("/v1/query",), kwargs={"params": QUERY}) for _ in range(4)]
        for thread in asking:
            thread.start()
        assert held.entered.wait(PATIENCE_S)
        until(lambda: "tiered_index_calls_waiting 3.0" in client.get("/metrics").text)
        metrics = client.get("/metrics").text
        assert "tiered_index_calls_running 1.0" in metrics and "tiered_index_http_requests_in_flight 5.0" in metrics
        got = client.get("/v1/query", params=QUERY)
        assert (got.status_code, got.headers["retry-after"]) == (503, "1")
        # the service still answers about its state
        for path in ("/livez", "/readyz", "/metrics"):
            assert client.get(path).status_code == 200
        held.go_on.set()
        for thread in asking:
            thread.join(PATIENCE_S)


def test_an_answer_in_memory_waits_for_no_thread(index, monkeypatch):
    compiled_core()
    held, params = Held(), QUERY | {"max_count": "1"}
    expected = index.query(QUERY["topic"], QUERY["key"], max_count=1)
    with serving(index, threads=1, waiting=0) as client:
        monkeypatch.setattr(IndexService, "topics", lambda self, *args, **kwargs: held(*args, **kwargs))
        first = threading.Thread(target=client.get, args=("/v1/topics",))
        first.start()
        assert held.entered.wait(PATIENCE_S)
        got = client.get("/v1/query", params=params).json()
        assert (got["items"], got["cursor"]) == ([expected[0].to_dict()], expected.cursor)
        rest = client.get("/v1/query", params=params | {"cursor": got["cursor"]})
        assert [item["offset"] for item in rest.json()["items"]] == [1024]
        metrics = client.get("/metrics").text
        assert 'tiered_index_lookups_total{kind="query",place="local",status="truncated"} 1.0' in metrics
        held.go_on.set()
        first.join(PATIENCE_S)


def test_an_audit_log_is_for_its_owner_and_group(index, tmp_path):
    def ask(path):
        with serving(index, audit=path) as client:
            client.get("/v1/query", params=QUERY)
            path.rename(path.with_suffix(".1"))
            client.get("/v1/query", params=QUERY)
        return [stat.S_IMODE(file.stat().st_mode) for file in (path, path.with_suffix(".1"))]

    before = os.umask(0)
    try:
        assert ask(tmp_path / "new.ndjson") == [0o600, 0o600]
        # a group's permission is the operator's choice, as with logrotate's `create 0640 root adm`
        (tmp_path / "open.ndjson").touch(0o664)
        assert ask(tmp_path / "open.ndjson") == [0o600, 0o660]
    finally:
        os.umask(before)


def test_an_audit_log_that_was_moved_away_or_could_not_be_written_is_begun_again(index, tmp_path):
    path, moved = tmp_path / "audit.ndjson", tmp_path / "audit.ndjson.1"

    def keys(file):
        return [json.loads(line)["key"] for line in file.read_text().splitlines()]

    with serving(index, audit=path) as client:
        client.get("/v1/query", params=QUERY | {"key": "before"})
        path.rename(moved)
        for _ in range(2):
            client.get("/v1/query", params=QUERY | {"key": "after"})
        assert (keys(moved), keys(path)) == (["before"], ["after"] * 2)
        # a folder in its place, and a full disk
        for make, remove in ((path.mkdir, path.rmdir), (lambda: path.symlink_to("/dev/full"), path.unlink)):
            path.unlink()
            make()
            client.get("/v1/query", params=QUERY)
            assert "the audit log can't be written" in client.get("/readyz").text
            remove()
            client.get("/v1/query", params=QUERY | {"key": "last"})
            assert client.get("/readyz").status_code == 200
            assert keys(path) == ["last"]


def test_lookups_refusals_and_keys_of_batches_are_written_to_the_audit_log(index, tmp_path, path_and_tokens):
    path = tmp_path / "audit.ndjson"
    batch = [{"topic": "payments", "key": f"{n}" + "x" * 2000} for n in range(150)]
    with serving(index, tokens=path_and_tokens[0], audit=path) as client:
        reader, pay = (bearer(path_and_tokens[1][name]) | {"x-request-id": "r-1"} for name in ("reader", "pay"))
        client.get("/v1/query", params=QUERY, headers=reader)
        client.get("/v1/query", params=QUERY | {"cursor": "x"}, headers=reader)
        assert client.get("/v1/query", params=QUERY, headers=pay).status_code == 403
        assert client.get("/v1/files", headers=pay).status_code == 403
        assert client.post("/v1/query:batch", json={"lookups": batch}, headers=pay).status_code == 200
        others = {"lookups": [*batch[:1], {"topic": "orders", "key": "k"}]}
        assert client.post("/v1/query:batch", json=others, headers=pay).status_code == 403
    answered, wrong, topic, files, many, refused = map(json.loads, path.read_text().splitlines())
    expected = {"request_id": "r-1", "caller": "reader", "lookup": "query", **QUERY, "status": "complete", "count": 2}
    assert answered | expected == answered
    assert (wrong["status"], wrong["count"]) == ("InvalidCursor", 0)
    expected = {"request_id": "r-1", "caller": "pay", "refused": "GET /v1/query", "status": 403}
    assert topic == expected | {"asked": "topic=orders&key=order-4711", "time_ms": topic["time_ms"]}
    assert files["refused"] == "GET /v1/files"
    assert (many["lookups"], len(many["keys"]), many["topics"]) == (150, 100, ["payments"])
    assert many["keys"][7] == ["payments", ("7" + "x" * 2000)[:1024]]
    assert (refused["refused"], refused["topics"]) == ("POST /v1/query:batch", ["orders", "payments"])
    assert (refused["keys"][1], refused["status"]) == (["orders", "k"], 403)


def test_an_audit_log_that_hangs_delays_no_other_request(index, tmp_path, path_and_tokens, monkeypatch):
    hangs, goes_on = threading.Event(), threading.Event()

    def refused(*_):
        hangs.set()
        assert goes_on.wait(PATIENCE_S)

    with on_a_port(index, tokens=path_and_tokens[0], audit=tmp_path / "audit.ndjson") as client:
        monkeypatch.setattr(Audit, "refused", refused)
        assert client.get("/v1/files", headers=bearer(path_and_tokens[1]["pay"])).status_code == 403
        assert hangs.wait(PATIENCE_S)
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE_S, trust_env=False) as other:
            assert other.get("/livez").status_code == 200
            assert not goes_on.is_set()
            goes_on.set()


@pytest.mark.usefixtures("tokens_looked_at")
def test_probes_get_no_path(index, tmp_path):
    path = tmp_path / "a folder" / "tokens.json"
    path.parent.mkdir()
    token = add_token(path, "first", "read", None)
    problems = [
        f"storage: {index.config.root}/log can't be read",
        "follow: '/home/rocketmq/store/commitlog/0' and file:///mnt/deep/index are gone, s3://bucket/a/b is not",
    ]
    with serving(index, tokens=path, problems=lambda: problems) as client:
        path.unlink()
        client.get("/v1/query", params=QUERY, headers=bearer(token))
        problems_found = client.get("/v1/health", headers=bearer(token)).json()["problems"]
        assert [problem["reason"] for problem in problems_found] == [
            "tokens: the token file can't be read: No such file or directory",
            "storage: [root]/log can't be read",
            "follow: '[path]' and [path] are gone, s3://bucket/a/b is not",
        ]
    with serving(index, problems=lambda: problems) as client:
        assert client.get("/readyz").json()["problems"] == [problem["reason"] for problem in problems_found[1:]]


def test_probes_without_a_token_get_only_the_parts_with_problems(index, path_and_tokens):
    behind, problem = "follow: 9 records of secret-topic are behind", "follow: broker-7:9092 does not answer"
    with serving(
        index, tokens=path_and_tokens[0], behind=lambda: behind, problems=lambda: [problem, problem]
    ) as client:
        for headers in ({}, bearer(path_and_tokens[1]["pay"])):
            got = client.get("/readyz", headers=headers)
            assert (got.status_code, got.json()) == (
                503,
                {"status": "not ready", "reasons": ["source"], "problems": ["source"]},
            )
        rows = client.get("/v1/health", headers=bearer(path_and_tokens[1]["reader"])).json()["problems"]
        assert [row["reason"] for row in rows] == [problem, problem, behind]


def test_a_token_file_that_would_change_its_owner_stays_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "tokens.json"
    add_token(path, "first", "read", None)
    text = path.read_text()

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(ConfigError, match="run this as that user, or as root"):
        add_token(path, "second", "read", None)
    assert path.read_text() == text and list(tmp_path.iterdir()) == [path]


def test_the_time_of_a_stream_is_that_of_its_lookups(monkeypatch):
    """A client may take any time for the whole answer."""
    now_s = [0.0]
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    allowance = calls.Allowance(Caps(), PriceTable())
    served = SimpleNamespace(lookups=SimpleNamespace(config=SimpleNamespace(prices=PriceTable())))

    def pages():
        for number in range(3):
            assert active_context().deadline_s == now_s[0] + 30.0
            yield b"%d" % number

    async def main():
        with contextlib.closing(calls.Calls(1, 1)) as pool:
            response = await calls.Handlers(served, pool, None).answer(None, allowance, pages, wire.NDJSON)
            body = b""
            async for piece in response.body_iterator:
                body += piece
                now_s[0] += 1000.0
            return body

    assert asyncio.run(main()) == b"012"


def test_a_lookup_may_take_longer_than_its_body(index, bodies_within, monkeypatch):
    bodies_within(1.0)
    look_up = IndexService.query_many

    def slow(*arguments, **limits):
        time.sleep(1.2)
        return look_up(*arguments, **limits)

    monkeypatch.setattr(IndexService, "query_many", slow)
    with serving(index) as client:
        got = client.post("/v1/query:batch", content=BATCH, headers={"content-type": wire.JSON})
        assert got.json()["status"] == "complete"
