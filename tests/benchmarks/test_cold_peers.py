"""The comparison in object storage, with few entries and without the other stores: its server, its oracle, and a whole
run.
"""

from __future__ import annotations

import contextlib
import json
import sys

import pyarrow as pa
import pytest

from tests.benchmarks.cold_peers import ours
from tests.benchmarks.cold_peers.data import HOT_KEYS, Data
from tests.benchmarks.cold_peers.figures import FIGURES
from tests.benchmarks.cold_peers.run import Amounts, DelayedServer, _environment, _Failed, _Run, run, versions
from tests.benchmarks.cold_peers.server import Delayed
from tests.benchmarks.cold_peers.worker import lookup_at_once
from tests.benchmarks.comparing import table
from tests.benchmarks.test_program import bench
from tests.support.object_store import unchunked
from tests.support.s3_server import CREDENTIALS

NO_BODY = b""


@pytest.fixture
def store(tmp_path):
    return Delayed(tmp_path)


def ask(store, method, target, body=NO_BODY, **headers):
    return store.answer(method, target, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def test_an_object_is_read_whole_and_by_ranges(store):
    assert ask(store, "PUT", "/b/a%20name", b"0123456789").status == 200
    assert ask(store, "GET", "/b/a%20name").body == b"0123456789"
    for asked, body in {"bytes=2-4": b"234", "bytes=8-99": b"89", "bytes=7-": b"789", "bytes=-3": b"789"}.items():
        reply = ask(store, "GET", "/b/a%20name", range=asked)
        assert (reply.status, reply.body) == (206, body)
    assert ask(store, "GET", "/b/a%20name", range="bytes=10-12").status == 416
    assert dict(ask(store, "HEAD", "/b/a%20name").headers)["Content-Length"] == "10"
    assert ask(store, "GET", "/b/none").status == 404


def test_puts_on_conditions(store):
    first = ask(store, "PUT", "/b/k", b"1", if_none_match="*")
    assert first.status == 200 and ask(store, "PUT", "/b/k", b"2", if_none_match="*").status == 412
    etag = dict(first.headers)["ETag"]
    assert ask(store, "PUT", "/b/k", b"3", if_match=etag).status == 200
    assert ask(store, "PUT", "/b/k", b"4", if_match=etag).status == 412
    assert ask(store, "GET", "/b/k").body == b"3"


def test_an_upload_in_parts_is_seen_when_it_is_complete(store):
    ask(store, "POST", "/b/k?uploads")
    (upload,) = store.uploads
    for number, body in ((2, b"two"), (1, b"one")):
        assert ask(store, "PUT", f"/b/k?partNumber={number}&uploadId={upload}", body).status == 200
    assert ask(store, "GET", "/b/k").status == 404
    assert ask(store, "POST", f"/b/k?uploadId={upload}", b"<parts/>").status == 200
    assert ask(store, "GET", "/b/k").body == b"onetwo"


def test_lists_have_folders_and_pages(store):
    for name in ("a/1", "a/2", "b", "c/1"):
        ask(store, "PUT", f"/bucket/{name}", b"x")
    listed = ask(store, "GET", "/bucket?list-type=2&delimiter=/").body.decode()
    assert listed.count("<Prefix>a/</Prefix>") == listed.count("<Prefix>c/</Prefix>") == 1
    assert "<Key>b</Key>" in listed and "<KeyCount>3</KeyCount>" in listed
    page = ask(store, "GET", "/bucket?list-type=2&max-keys=2").body.decode()
    assert "<NextContinuationToken>a/2</NextContinuationToken>" in page and "<Key>b</Key>" not in page
    rest = ask(store, "GET", "/bucket?list-type=2&continuation-token=a/2").body.decode()
    assert "<Key>b</Key>" in rest and "<Key>a/2</Key>" not in rest
    after = ask(store, "GET", "/bucket?list-type=2&delimiter=/&continuation-token=a/").body.decode()
    assert "<Prefix>a/</Prefix>" not in after and "<KeyCount>2</KeyCount>" in after


def test_requests_and_bytes_are_counted_and_copies_are_not(store):
    ask(store, "PUT", "/b/from/k", b"1234")
    ask(store, "GET", "/b/from/k", range="bytes=0-1")
    ask(store, "HEAD", "/b/from/k")
    ask(store, "GET", "/b?list-type=2&prefix=none")
    ask(store, "POST", "/b?delete", b"<Delete><Object><Key>none</Key></Object></Delete>")
    counts = json.loads(store.control("/-/copy?source=b/from&target=b/to").body)
    assert counts == {"get": 2, "put": 1, "list": 1, "delete": 1, "bytes": counts["bytes"]}
    assert json.loads(store.control("/-/counts").body) == {}
    assert json.loads(store.control("/-/size?prefix=b/to").body) == {"objects": 1, "bytes": 4}
    assert json.loads(store.control("/-/size?prefix=b/to/k").body)["bytes"] == 4


def test_a_body_in_chunks():
    assert unchunked(b"3;chunk-signature=x\r\nabc\r\n2\r\nde\r\n0\r\nx-amz-checksum-crc32:AA==\r\n\r\n") == b"abcde"


def test_the_oracle_knows_every_entry():
    data = Data(20_000, 7)
    found: dict[str, list[list[int]]] = {}
    for batch in data.files():
        for row in batch.to_pylist():
            assert row["timestamp_ms"] % 1000 == 0
            found.setdefault(row["key"], []).insert(0, [row["timestamp_ms"] // 1000, row["offset"], row["queue_id"]])
    numbers = data.drawn(data.keys, 0)
    assert len(set(numbers.tolist())) == data.keys
    for number, key in zip(numbers.tolist(), data.texts(numbers), strict=True):
        assert found.pop(key, []) == data.expected(number)
    for number in range(HOT_KEYS):
        assert found.pop(data.hot(number)) == data.expected_hot(number, 1 << 30)
    assert found == {}
    assert not set(data.drawn(10, 1).tolist()) & set(data.drawn(10, 2).tolist())


@pytest.fixture
def server(tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "objects").mkdir()
    with DelayedServer(tmp_path / "objects") as server:
        yield server


def test_our_columns_answer_like_the_oracle_and_a_wrong_answer_ends_the_run(server, tmp_path):
    data = Data(10_000, 3)
    source = tmp_path / "source"
    source.mkdir()
    for number, batch in enumerate(data.files()):
        with pa.ipc.new_file(source / f"{number}.arrow", batch.schema) as file:
            file.write_batch(batch)
    place = {"endpoint_url": server.endpoint_url, "bucket": "bench", "prefix": "files"}
    ours.build(place, source)
    server.copy("files", "month")
    before = server.stored_bytes("month")
    ours.build(place | {"prefix": "month"}, source, window="30d")
    assert 0 < server.stored_bytes("month") < before
    numbers = data.drawn(50, 0)
    keys = data.texts(numbers)
    expected = [data.expected(number) for number in numbers.tolist()]
    for prefix in ("files", "month"):
        with contextlib.closing(ours.Reader(place | {"prefix": prefix}, warm=True)) as reader:
            assert reader.lookup_many(keys) == lookup_at_once(reader, keys) == expected
            assert reader.lookup(data.hot(1), 4) == data.expected_hot(1, 4)
            assert reader.lookup(data.absent(numbers)[0], 64) == []
            server.counts()
            assert reader.lookup(keys[0], 64) == expected[0]
            assert server.counts().requests == (1 if prefix == "month" else 3)
    _Run._check("month", expected, expected)
    with pytest.raises(_Failed, match="30d table answered"):
        _Run._check("month", [expected[0][1:]], [expected[0]])


def test_our_processes_get_no_variables_that_send_them_to_boto3():
    peers, ours_alone = (_environment("http://127.0.0.1:1", peer) for peer in (True, False))
    assert peers.keys() - ours_alone.keys() == {"AWS_REGION", "AWS_ENDPOINT", "AWS_ALLOW_HTTP"}


def test_the_best_of_a_row_is_bold():
    size = {"columns": {"x": {"a": [1.0], "b": [5.0]}, "y": {"a": [2.0]}, "z": {"b": [7.0]}}}
    document = {"columns": {name: {"title": name} for name in "xyz"}}
    lines = table(document, size, {"a": "less", "b": "more"}, {"b"}).splitlines()
    assert lines[2:] == ["| less | **1** | 2 |  |", "| more | 5 |  | **7** |"]


def test_a_store_that_is_not_installed_is_named():
    found, skipped = versions(sys.executable, ["files", "slatedb"])
    assert list(found) == ["files"]
    assert skipped == {"SlateDB": f"slatedb not installed for {sys.executable}"}


def test_help_has_examples_and_usage_is_checked(tmp_path):
    shown_help = bench("cold-peers", "--help")
    assert shown_help.code == 0 and "cold-peers --entries 200000" in shown_help.out
    for wrong in (["--only", "nobody"], ["--root", "x"], ["--entries", "5"]):
        assert bench("cold-peers", *wrong).code == 2


@pytest.mark.slow
def test_a_run_of_our_columns(tmp_path):
    amounts = Amounts(rounds=1, processes=1, lookups=2, hot=1, many=10, at_once=4, fresh=1, files=3, delay_ms=0)
    steps: list[str] = []
    size = run(["files", "month"], 10_000, amounts, sys.executable, tmp_path, lambda done, step: steps.append(step))
    assert set(size["columns"]["files"]) >= set(FIGURES) and len(steps) == 5
    assert size["columns"]["month"]["key requests"] == [1]
