"""Entries over HTTP: accepted whole, once, from permitted clients; verifications as jobs."""

import contextlib
import io
import json
import random
from functools import partial

import pyarrow as pa
import pytest

from tests.server.conftest import DESCRIPTION, PATIENCE_S, index_in, put_entries, serving
from tests.server.test_guard import OF_SOURCES, bearer
from tests.support.hanging import until
from tests.support.memory import traced_memory
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.errors import BackPressure, InvalidArgument, WriterFenced
from tiered_index.server.entries import parsed
from tiered_index.server.http import wire
from tiered_index.server.http.problems import Refused
from tiered_index.server.http.served import Caps
from tiered_index.server.http.tokens import add_token
from tiered_index.storage.opening import open_storage

LINES = {"content-type": wire.NDJSON}
ARROW = {"content-type": wire.ARROW}
ENTRY = DESCRIPTION["paths"]["/v1/entries"]["post"]["requestBody"]["content"][wire.NDJSON]["example"]


def message(offset, topic="orders", **more):
    places = {"offset": offset, "timestamp_ms": 1_762_000_000_000 + offset * 1000}
    return {"topic": topic, "queue_id": 0, "keys": ["k", f"k{offset}"], "size": 10, **places, **more}


def lines(*messages):
    return "".join(json.dumps(message) + "\n" for message in messages)


def arrow(*messages):
    return arrow_of(pa.Table.from_pylist(list(messages)))


def arrow_of(table, **options):
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        stream.write(table)
    return sink.getvalue()


@pytest.fixture
def index(tmp_path):
    with index_in(tmp_path) as index:
        yield index


@pytest.mark.parametrize(("headers", "encode"), [(LINES, lines), (ARROW, arrow)])
def test_a_source_is_taken_once(index, headers, encode):
    with serving(index) as client:

        def post(body, **params):
            return client.post("/v1/entries", content=body, headers=headers, params={"source": "s", **params})

        first = encode(message(1), message(2))
        got = post(first, position=2, after=0, durable=True).json()
        taken = {"entries": 4, "messages": 2, "source": "s", "position": 2, "durable_position": 2, "repeated": False}
        assert got == taken
        # a client without an answer sends it again, perhaps with more entries after it
        assert post(first, position=2, after=0).json() == taken | {"entries": 0, "messages": 0, "repeated": True}
        gap = post(encode(message(9)), position=10, after=5)
        assert (gap.status_code, gap.json()["detail"]) == (409, "source 's' is at position 2, not 5")
        assert post(encode(message(3)), position=3, after=2).json()["position"] == 3
        assert [item.offset for item in index.query("orders", "k")] == [3, 2, 1]
        assert index.durable_position("s") == 2
        index.flush()
        assert index.durable_position("s") == 3


def test_a_fenced_writer_does_not_say_that_the_index_has_a_body(index, tmp_path):
    params = {"source": "s", "position": 1, "after": 0}
    with serving(index) as client:
        request = partial(client.post, "/v1/entries", content=lines(message(1)), headers=LINES)
        assert request(params=params).json()["entries"] == 2
        with IndexService(index.config.changed(root=tmp_path / "other"), takes_over=True) as newer:
            index.seal()
            with pytest.raises(WriterFenced):
                index.run_lifecycle()
            # the client sends it again
            for more in ({}, {"durable": True}):
                answer = request(params=params | more)
                assert (answer.status_code, answer.json()["error"]) == (409, "WriterFenced")
            assert newer.durable_position("s") is None


def test_a_token_can_not_move_the_position_of_another_source(index, tmp_path):
    named = {"all": None, "shop": ("o",)}.items()
    every, some = (bearer(add_token(tmp_path / "tokens", name, "write", topics)) for name, topics in named)
    with serving(index, tokens=tmp_path / "tokens") as client:

        def post(headers, source):
            options = {"params": {"source": source, "position": 2**62}, "headers": LINES | headers}
            return client.post("/v1/entries", content=lines(message(1)), **options).status_code

        refused = [403] * 3
        assert [post(some, source) for source in ("s", "shop", "rocketmq:broker", "shop:1")] == [*refused, 200]
        assert {post(every, f"{prefix}c/t/0") for prefix in OF_SOURCES} == {403} and post(every, "s") == 200


ONE = pa.Table.from_pylist([message(1)])
TWICE = ONE.append_column("topic", ONE["topic"])
TWO = pa.Table.from_pylist([message(1), message(2)])
NULL = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["orders", None]))
WRONG = [
    (LINES, lines(message(1)) + "{", "line 2: not JSON: "),
    (LINES, lines(message(1), message(2, size=-1)), "line 2: size"),
    (LINES, lines(message(1), message(2, body="x")), "line 2: 'body' is not a field of a message"),
    (LINES, lines(message(1), [1]), "line 2: not a JSON object, but an array: b'[1]"),
    (LINES, lines(message(1), message(2, topic_id=7)), "either all messages have a topic_id, or none"),
    (LINES, lines(message(1), message(2, keys=[True])), "line 2: a key must be text, not bool"),
    (LINES, "[" * 100_000, "line 1: not JSON: "),
    # no lookup over HTTP could name this key
    (LINES, lines(message(1), message(2, keys=["k\ud800"])), "half a surrogate pair"),
    (ARROW, "no arrow", "the body is not an Arrow stream"),
    (ARROW, arrow(message(1))[:-200], "the body is not an Arrow stream"),
    (ARROW, arrow(message(1)) + arrow(message(2)), "has data after the end of the Arrow stream"),
    (ARROW, arrow({"topic": "orders", "key": "k"}), "column 'queue_id' is missing"),
    (ARROW, arrow_of(ONE.drop_columns("keys")), "give a column 'key' (text) or 'keys' (list of text)"),
    (ARROW, arrow(message(1, body="x")), "'body' is not a column of messages"),
    (ARROW, arrow({**message(1), "size": None}), "a value is missing"),
    (ARROW, arrow(message(1), message(2, size=-1)), "size"),
    (ARROW, arrow(message(1, topic=["orders"])), "column 'topic' has the type list<item: string>, but must have text"),
    (ARROW, arrow(message(1, keys="k")), "column 'keys' has the type string, but must have a list of text"),
    (ARROW, arrow(message(1, size="10")), "column 'size' has the type string, but must have integers"),
    (ARROW, arrow_of(TWICE), "the body: column 'topic' appears twice"),
    (ARROW, arrow_of(TWO.set_column(0, "topic", NULL)), "a value is missing"),
]


def test_a_wrong_request_is_refused_whole(index):
    with serving(index) as client:
        for headers, body, detail in WRONG:
            got = client.post("/v1/entries", content=body, headers=headers)
            assert (got.status_code, detail in got.json()["detail"]) == (400, True), (detail, got.json()["detail"])
        assert client.post("/v1/entries", content=b"a", headers={"content-type": "text/csv"}).status_code == 415
        got = client.post("/v1/entries", content=lines(message(1)), headers=LINES, params={"source": "s"})
        assert (got.status_code, "belong together" in got.json()["detail"]) == (400, True)
    assert not index.query("orders", "k").items


def columns(count, **more):
    rows = [message(n, keys=["k"]) for n in range(count)]
    table = pa.Table.from_pylist(rows)
    for name, values in more.items():
        table = table.set_column(table.column_names.index(name), name, values)
    return table


SHARED = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int8()), pa.array(["x" * 20_000]))
VIEWS = pa.array(["orders"] * 100, pa.string_view())
TOPICS = pa.array(["x" * 1000] + ["y"] * 99)
MANY_KEYS = pa.array([[str(n) for n in range(10_000)]] + [["k"]] * 99)
# it decodes to far more bytes than it has
BOMBS = [
    (arrow_of(columns(100, keys=pa.array([["x" * 20_000]] * 100)), compression="zstd"), 413, "when it is decompressed"),
    (arrow_of(columns(100, keys=pa.array([["x" * 20_000]] * 100)), compression="lz4"), 413, "when it is decompressed"),
    (arrow_of(columns(100, topic=SHARED), compression="zstd"), 413, "when it is decompressed"),
    (arrow_of(columns(100, topic=VIEWS)), 400, "column 'topic' has a type that no message column may have: cast it"),
    (arrow_of(columns(100, topic=TOPICS, keys=MANY_KEYS)), 413, "topics of this length"),
    (lines(message(1, topic="x" * 1000, keys=[str(n) for n in range(10_000)])), 413, "topics of this length"),
]


def test_a_small_body_does_not_stand_for_a_large_one(index):
    with serving(index, caps=Caps(body_bytes=1 << 20)) as client:
        for body, status, detail in BOMBS:
            assert len(body) < 1 << 20
            got = client.post("/v1/entries", content=body, headers=ARROW if isinstance(body, bytes) else LINES)
            assert (got.status_code, detail in got.json()["detail"]) == (status, True), (detail, got.text)
        assert not index.query("orders", "k").items
        whole = columns(100, topic=pa.array(["orders"] * 100).dictionary_encode())
        for number, compression in enumerate((None, "zstd", "lz4")):
            body = arrow_of(whole, compression=compression)
            got = client.post("/v1/entries", content=body, headers=ARROW)
            assert (number, got.status_code, got.json().get("entries")) == (number, 200, 100), got.text


def test_a_damaged_stream_is_refused():
    chance = random.Random(19)
    whole = arrow_of(columns(20, topic=pa.array(["orders"] * 20).dictionary_encode()), compression="zstd")
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(InvalidArgument, Refused):
            assert parsed(bytes(data), wire.ARROW, 1 << 20).messages <= 20


def test_a_column_without_rows_has_no_offsets_that_count():
    """Arrow aborts the process for an offset outside the data."""
    outside = pa.py_buffer((1 << 40).to_bytes(8, "little"))
    keys = pa.Array.from_buffers(pa.large_list(pa.string()), 0, [None, outside], children=[pa.array([], pa.string())])
    columns = {name: pa.array([], pa.int64()) for name in ("queue_id", "offset", "size", "timestamp_ms")}
    body = arrow_of(pa.record_batch({"topic": pa.array([], pa.string()), "keys": keys, **columns}))
    assert outside.to_pybytes() in body
    assert parsed(body, wire.ARROW, 1 << 20).messages == 0


def test_a_full_buffer_asks_for_patience(index, monkeypatch):
    def full(self, *_):
        raise BackPressure("the write buffer is full")

    monkeypatch.setattr(IndexService, "put_batch", full)
    with serving(index) as client:
        got = client.post("/v1/entries", content=ENTRY, headers=LINES)
        assert (got.status_code, got.headers["retry-after"], got.json()["error"]) == (503, "1", "BackPressure")


def test_only_writers_write_and_only_admins_verify(index, tmp_path):
    path = tmp_path / "tokens.json"
    tokens = {role: bearer(add_token(path, role, role, None)) for role in ("read", "write", "admin")}
    tokens["orders"] = bearer(add_token(path, "orders", "admin", ["orders"]))
    with serving(index, tokens=path) as client:
        for role, put, verify in (("read", 403, 403), ("write", 200, 403), ("admin", 200, 202), ("orders", 200, 403)):
            got = client.post("/v1/entries", content=ENTRY, headers=LINES | tokens[role])
            assert (role, got.status_code) == (role, put)
            assert (role, client.post("/v1/verify", json={}, headers=tokens[role]).status_code) == (role, verify)
            seen = client.get("/v1/verify/x", headers=tokens[role]).status_code
            assert (role, seen) == (role, 404 if verify == 202 else 403)
        for encode, headers in ((lines, LINES), (arrow, ARROW)):
            both = encode(message(1), message(2, "payments"))
            got = client.post("/v1/entries", content=both, headers=headers | tokens["orders"])
            assert (got.status_code, got.json()["detail"]) == (403, "the token is not for topic 'payments'")


def test_a_token_of_some_topics_chooses_no_topic_id(index, tmp_path):
    """An id gave away the name of its topic, and an id that was taken first was lost for its own topic."""
    path = tmp_path / "tokens.json"
    team, every = bearer(add_token(path, "team", "write", ["orders"])), bearer(add_token(path, "every", "write", None))
    with serving(index, tokens=path) as client:
        taken = client.post("/v1/entries", content=lines(message(1, "payments", topic_id=7)), headers=LINES | every)
        assert taken.status_code == 200
        for encode, headers in ((lines, LINES), (arrow, ARROW)):
            for topic_id in (7, 8):
                body = encode(message(2, topic_id=topic_id))
                got = client.post("/v1/entries", content=body, headers=headers | team)
                said = "the token is for some topics: leave topic_id out, and the index chooses it"
                assert (got.status_code, got.json()["detail"]) == (403, said)
            body = encode(message(3, topic_id=None))
            assert client.post("/v1/entries", content=body, headers=headers | team).status_code == 200
        ours = client.post("/v1/entries", content=lines(message(4, "payments", topic_id=8)), headers=LINES | every)
        assert ours.status_code == 200


def test_a_reader_takes_no_entries(index):
    put_entries(index)
    with IndexReader.open(root=index.config.root) as reader, serving(reader) as client:
        got = client.post("/v1/entries", content=ENTRY, headers=LINES)
        assert (got.status_code, "read-only" in got.json()["detail"]) == (409, True)
        assert len(client.get("/v1/query", params={"topic": "orders", "key": "order-4711"}).json()["items"]) == 2


def test_a_verification_is_a_job(tmp_path):
    """It reads the storage with which the index was opened."""
    slow = FaultStorage(open_storage((tmp_path / "storage").as_uri()))

    def ended(client, begun):
        until(lambda: client.get(begun.headers["location"]).json()["state"] == "done")
        return client.get(begun.headers["location"]).json()

    with index_in(tmp_path, storage_backend=slow) as index, serving(index) as client:
        put_entries(index)
        index.seal()
        index.run_lifecycle()
        hang = slow.hang("*")
        begun = client.post("/v1/verify", json={"deep": True})
        assert (begun.status_code, begun.json()["state"]) == (202, "running")
        assert hang.entered.wait(PATIENCE_S)
        assert client.post("/v1/verify", json={}).status_code == 409
        hang.release.set()
        done = ended(client, begun)
        assert (done["report"]["status"], done["doing"], done["report"]["checked"]["objects"]) == ("ok", "objects", 1)
        (stored,) = (tmp_path / "storage").rglob("*.index")
        stored.write_bytes(b"x" * stored.stat().st_size)
        job = ended(client, client.post("/v1/verify", json={"deep": True}))
        assert job["report"]["findings"]
        # files are named, and their folder stays here
        assert str(tmp_path) not in json.dumps(job)


def test_short_lines_are_not_held_all_at_once():
    body = b"{}\n" * 200_000
    with traced_memory() as traced:
        with pytest.raises(InvalidArgument, match="line 1: "):
            parsed(body, wire.NDJSON, 1 << 24)
        assert traced()[1] < len(body)


COLUMNS = (
    pa.array(["t", "u"]),
    pa.array([["k", "l"], []]),
    pa.array([[None], None], pa.list_(pa.null())),
    pa.array([1, -1]),
    pa.array([1.5, 2.5]),
    pa.nulls(2),
    pa.array(["k", None]).dictionary_encode(),
    pa.array([[1], [2]]),
    pa.array([5, 6], pa.timestamp("ms")),
    pa.array([b"x", b"y"]),
)


def test_columns_of_any_type_and_name_are_taken_or_refused(index):
    chance = random.Random(31)
    names = ("topic", "queue_id", "offset", "size", "timestamp_ms", "key", "keys", "topic_id")
    taken = 0
    for _ in range(400):
        of_message = [pa.array(["t", "u"]), *[pa.array([1, 2])] * 4, pa.array(["k", "l"]), COLUMNS[1], pa.array([7, 8])]
        table = pa.table([chance.choice(COLUMNS) if chance.random() < 0.15 else column for column in of_message], names)
        table = table.select(sorted(range(8), key=lambda _: chance.random())[: chance.choice((6, 7, 8))])
        if chance.random() < 0.2:
            table = table.append_column(chance.choice(names), chance.choice(COLUMNS))
        body = arrow_of(table.slice(0, chance.choice((0, 1, 2))))
        with contextlib.suppress(InvalidArgument, Refused):
            index.put_batch(parsed(body, wire.ARROW, 1 << 20).columns)
            taken += 1
    assert 20 < taken < 380
