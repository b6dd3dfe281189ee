"""Rows of files by HTTP and by the library: each by one ranged read, with its file and place."""

import contextlib
import gzip
import json
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.server.conftest import on_a_port, serving
from tiered_index import FileRows, IndexReader, IndexService
from tiered_index.client import IndexClient
from tiered_index.config import IndexConfig
from tiered_index.service.read.answers.rows import once

BEGIN_S = 1_700_000_000
KEYS = ("--topic", "orders", "--key", "order_id", "--time", "at")


def lines(begin, end):
    return "".join(
        f'{{"order_id": {n % 10}, "at": {BEGIN_S + n}, "n": {n}, "text": "{"x" * 300}"}}\n' for n in range(begin, end)
    ).encode()


@pytest.fixture
def indexed(tmp_path):
    """Return the options of an index with the rows of four local files of four forms."""
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "0.ndjson").write_bytes(lines(0, 100))
    (folder / "1.ndjson.gz").write_bytes(gzip.compress(lines(100, 200)))
    rows = [json.loads(line) for line in lines(200, 300).splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "2.parquet", 30)
    (folder / "3.csv").write_text("order_id,at,n\n" + "".join(f"{n % 10},{BEGIN_S + n},{n}\n" for n in range(300, 400)))
    where = {"root": tmp_path / "root", "storage": f"file://{tmp_path}/objects"}
    done = run_here("ingest", folder, *KEYS, "--root", where["root"], "--storage", where["storage"], "--wait", "--json")
    assert (done.code, done.document["rows"]) == (0, 400), done.err
    return where


def numbers(documents):
    texts = [document["message"]["body"] for document in documents]
    return sorted(int(json.loads(text)["n"]) for text in texts)


def test_a_service_gives_the_rows_of_a_key(indexed):
    with IndexReader.open(indexed["storage"]) as reader, serving(reader) as client:
        answer = client.get("/v1/messages", params={"topic": "orders", "key": "7"}).json()
        assert (numbers(answer["messages"]), answer["status"]) == ([*range(7, 400, 10)], "complete")
        first = answer["messages"][0]["message"]
        row = {"order_id": "7", "at": f"{BEGIN_S + 397}", "n": "397"}
        assert first["file"].endswith("logs/3.csv") and json.loads(first["body"]) == row
        assert {"queue_id", "msg_id", "queue_offset"}.isdisjoint(first)
        by_id = client.get("/v1/messages/7", params={"topic": "orders", "body": "json"}).json()
        assert (len(by_id["messages"]), by_id["status"]) == (32, "truncated")
        assert by_id["messages"][0]["message"]["body"] == row
        rest = client.get("/v1/messages/7", params={"topic": "orders", "cursor": by_id["cursor"]}).json()
        assert (len(rest["messages"]), rest["status"]) == (8, "complete")
        having = client.get("/v1/messages", params={"topic": "orders", "key": "7", "contains": '"n": 17,'}).json()
        assert numbers(having["messages"]) == [17]
        assert client.get("/v1/messages/nobody", params={"topic": "orders"}).status_code == 404


NAMES = {"topic", "timestamp_ms", "file", "row"}


def named(items):
    """Check that entries have no words of brokers, and return their files and rows."""
    items = [*items]
    assert {name for item in items for name in item} - {"entry_id"} == NAMES
    return [(item["file"], item["row"]) for item in items]


def test_entries_have_the_file_and_the_row_in_every_answer(indexed):
    """A client makes the same entries of the documents as the library has, by their `entry_id`."""
    lookup = {"topic": "orders", "key": "7", "max_count": 100}
    with IndexReader.open(indexed["storage"]) as reader, on_a_port(reader) as client, FileRows(reader) as rows:
        answer = reader.query(**lookup)
        messages = [*reader.messages("orders", "7", source=rows, max_count=100)]
        expected = [(fetched.message.file, fetched.message.row) for fetched in messages]
        assert len(expected) == 40 and ("2.parquet", 7) in [(file.rpartition("/")[2], row) for file, row in expected]
        table = answer.to_arrow()
        assert table.column_names == ["topic", "timestamp_ms", "file", "row", "source"]
        assert [*zip(table["file"].to_pylist(), table["row"].to_pylist(), strict=True)] == expected
        assert table["timestamp_ms"][0].as_py().isoformat() == "2023-11-14T22:19:57+00:00"
        assert pa.table(answer) == table and pa.table(pickle.loads(pickle.dumps(answer))) == table
        assert reader.query("orders", "none").to_arrow().schema == table.schema
        documents = answer.to_dict()["items"]
        assert named(documents) == expected and len({document["entry_id"] for document in documents}) == 40
        assert client.get("/v1/query", params=lookup).json()["items"] == documents
        stream = client.get("/v1/query", params=lookup, headers={"Accept": "application/x-ndjson"}).text.splitlines()
        assert [*map(json.loads, stream[:-1])] == documents
        arrow = client.get("/v1/query", params=lookup, headers={"Accept": "application/vnd.apache.arrow.stream"})
        assert pa.ipc.open_stream(arrow.content).read_all() == table
        (many,) = client.post("/v1/query:batch", json={"lookups": [lookup]}).json()["results"]
        of_messages = client.get("/v1/messages", params=lookup).json()["messages"]
        assert many["items"] == [document["item"] for document in of_messages] == documents
        schema = client.get("/openapi.json").json()["components"]["schemas"]["IndexItem"]
        assert {*documents[0]} <= schema["properties"].keys() and {*schema["required"]} <= {*documents[0]}
        with IndexClient(str(client.base_url)) as other:
            served = other.query(**lookup)
            assert [*served] == [*answer] == [*other.query_many([("orders", "7")])[0]] and served.to_arrow() == table
            assert served.places == answer.places and {place.unit for place in served.places} == {"byte", "row"}
            told = [(fetched.item, fetched.place) for fetched in other.messages(**lookup)]
            assert told == [(fetched.item, fetched.place) for fetched in messages]
            assert [place for _, place in told] == [*answer.places]
        with IndexService.open(**indexed) as index, on_a_port(index) as writer:
            assert named(writer.get("/v1/query", params=lookup).json()["items"]) == expected
    where = ("--storage", indexed["storage"])
    command = ("query", "orders", "7", "--max", 100, *where)
    assert named(run_here(*command, "--json").document["items"]) == expected
    rows_shown = run_here(*command, "--messages", "--json").document["messages"]
    assert [(row["message"]["file"], row["message"]["row"]) for row in rows_shown] == expected
    assert named(row["item"] for row in rows_shown) == expected
    by_key = run_here("message", "7", "--topic", "orders", *where, "--json").document["messages"]
    assert named(row["item"] for row in by_key) == expected[:32]
    assert named(run_here("query", "orders", "7", "--all", *where, "--json").records[:-1]) == expected
    head, _, *shown = run_here(*command).out.strip().splitlines()
    assert head.split() == ["time", "file", "row"]
    assert [line.split()[1] for line in shown[:40]] == [file for file, _ in expected]
    assert "row 7 " in run_here(*command).out and shown[0].endswith(f"byte {expected[0][1]:,} ")
    for key, code, said in (("397", 1, "no row of orders with the key 397\n"), ("7", 0, "32 found, truncated")):
        done = run_here("message", key, "--topic", "orders", *where)
        assert (done.code, said in done.out, "queue" in done.out or "offset" in done.out) == (code, True, False)


def test_an_entry_of_a_file_that_is_gone_still_names_its_row(indexed, tmp_path):
    (tmp_path / "logs" / "3.csv").unlink()
    with IndexReader.open(indexed["storage"]) as reader, serving(reader) as client:
        first = client.get("/v1/messages", params={"topic": "orders", "key": "7"}).json()["messages"][0]
        assert (first["message"], first["state"]) == (None, "missing") and "is gone" in first["problem"]
        assert first["item"]["file"].endswith("3.csv") and first["item"]["row"] > 0


def test_answers_of_batches_and_of_several_indexes_have_files_and_rows(indexed, tmp_path):
    """Topics of one batch may differ: entries that are of no file have a null."""
    with IndexService.open(**indexed) as index:
        index.put("events", 0, "7", 99, 5, BEGIN_S * 1000)
        index.seal()
        index.run_lifecycle()
    topics_and_keys = [("orders", "7"), ("events", "7"), ("none", "7")]
    with IndexReader.open(indexed["storage"]) as reader, on_a_port(reader) as client:
        rows_of_orders = reader.query("orders", "7").to_arrow().select(["file", "row"]).to_pylist()
        expected = [*rows_of_orders, {"file": None, "row": None}]
        many = reader.query_many(topics_and_keys)
        table = many.to_arrow()
        assert table.select(["file", "row"]).to_pylist() == expected and len(expected) == 41
        assert pa.table(many) == table and table["offset"][40].as_py() == 99
        assert [answer.places is None for answer in many] == [False, True, True]
        assert [len(answer.to_arrow().column_names) for answer in many] == [5, 9, 9]
        lines = [document for answer in many.item_documents() for document in answer]
        assert [(document.get("file"), document.get("row")) for document in lines] == [
            (document["file"], document["row"]) for document in expected
        ]
        with IndexClient(str(client.base_url)) as other:
            assert other.query_many_arrow(topics_and_keys)[0] == table
            assert [answer.places is None for answer in other.query_many(topics_and_keys)] == [False, True, True]
        plain = reader.query_many(topics_and_keys[1:]).to_arrow()
        assert "file" not in plain.column_names and len(plain) == 1
    # the index of a root alone has no catalog
    with IndexService.open(root=tmp_path / "second", storage=f"file://{tmp_path}/more") as index:
        index.put("orders", 0, "7", 0, 5, BEGIN_S * 1000)
        index.flush()
        index.seal()
        index.run_lifecycle()
    with IndexReader.open([indexed["storage"], f"file://{tmp_path}/more"]) as reader:
        table = reader.query("orders", "7", max_count=100).to_arrow()
        assert table.select(["file", "row"]).to_pylist() == expected
        assert table["source"].to_pylist()[-1] == f"file://{tmp_path}/more"


def test_pages_without_repeated_entries_have_the_places_of_the_rest(indexed):
    with IndexReader.open(indexed["storage"]) as reader:
        page = reader.query("orders", "7", max_count=4)
        first = page.items[0]
        rest = once(page, {(first.source, first.queue_id, first.offset)})
        assert rest.items == page.items[1:] and rest.places == page.places[1:] and len(rest.places) == 3
        assert once(page, set()).places == page.places


def test_the_rows_of_a_file_of_keys_come_back(indexed, tmp_path):
    """Each key has the same rows as alone; a key without rows is told, and so is one that was not looked up."""
    (tmp_path / "keys.csv").write_text("topic,key\norders,7\norders,none\norders,3\norders,7\n")
    where = ("--storage", indexed["storage"], "--messages", "--body", "json")
    command = ("query", "--keys", tmp_path / "keys.csv", *where)
    done = run_here(*command, "--all", "--max", 7, "--json")
    *rows, last = done.records
    assert done.code == 0, done.err
    alone = {key: run_here("query", "orders", key, *where, "--max", 100, "--json").document["messages"] for key in "73"}
    told = {"topic": "orders", "key": "none", "state": None}
    assert [row["key"] for row in rows] == ["7"] * 40 + ["none"] + ["3"] * 40 + ["7"] * 40
    assert told.items() <= rows.pop(40).items() and rows[:40] == rows[80:]
    for key, got in (("7", rows[:40]), ("3", rows[40:80])):
        assert [row["message"] for row in got] == [message["message"] for message in alone[key]]
    assert (last["lookups"], last["found"], last["statuses"], last["not_looked_up"]) == (4, 3, {"complete": 4}, 0)
    assert (last["status"], last["count"], last["states"]) == ("complete", 120, {"local": 120})
    shown = run_here(*command, "--max", 2).out
    assert "orders  7\n" in shown and "orders  none: nothing found\n" in shown and "--cursor" not in shown
    assert "3 truncated: more with a greater --max, or --all\n" in shown
    entries = ("query", "--keys", tmp_path / "keys.csv", "--storage", indexed["storage"])
    first = run_here(*entries, "--json").records[0]
    assert first["file"].endswith("logs/3.csv") and first.keys().isdisjoint({"queue_id", "offset", "size", "key_hash"})
    head, _, row, *_ = run_here(*entries).out.strip().splitlines()
    assert head.split() == ["topic", "key", "time", "file", "row"] and row.split()[3].endswith("logs/3.csv")
    spent = run_here(*command, "--max-requests", 0, "--json")
    assert (spent.code, spent.records[-1]["not_looked_up"], spent.records[-1]["status"]) == (6, 3, "partial")
    # it may have rows
    limited = "the limit was reached before all files were read"
    assert [record["problem"] for record in spent.records[:-1]] == [limited]
    for table in Path(indexed["storage"].removeprefix("file://")).glob("data%/**/*.index"):
        table.write_bytes(b"damaged")
    damaged = run_here(*command, "--allow-partial").out
    assert "orders  7: nothing found in the files that could be read\n" in damaged


def test_an_export_has_files_and_rows_and_is_ingested_again(indexed, tmp_path):
    source, out = ("--root", indexed["root"], "--storage", indexed["storage"]), tmp_path / "entries.parquet"
    done = run_here("export", *source, "--out", out, "--json")
    assert (done.code, done.document["entries"]) == (0, 400), done.err
    places = {(row["file"], row["row"]) for row in pq.read_table(out).to_pylist()}
    with IndexReader.open(indexed["storage"]) as reader:
        expected = reader.query("orders", "7", max_count=100).places
        assert len(places) == 400 and places > {(place.file, place.row) for place in expected}
    again = "--root", tmp_path / "again", "--storage", f"file://{tmp_path}/copy"
    assert run_here("ingest", out, *again, "--wait", "--json").document["checksum"] == done.document["checksum"]


def test_a_row_of_an_object_costs_one_ranged_read(tmp_path, monkeypatch, s3_environment):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_environment.endpoint_url)
    of_server = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    monkeypatch.setitem(run_here.__kwdefaults__, "environment", of_server)
    uri, storage = f"s3://{s3_environment.new_bucket()}", f"file://{tmp_path}/objects"
    with contextlib.closing(IndexConfig(storage=storage).open_storage(uri, any_names=True)) as bucket:
        bucket.put("logs/a b.ndjson", lines(0, 2000))
        bucket.put("logs/c.csv", b"order_id,at,n\n" + b"".join(b"%d,%d,%d\n" % (n, BEGIN_S, n) for n in range(99)))
    done = run_here("ingest", uri, *KEYS, "--root", tmp_path / "root", "--storage", storage, "--wait", "--json")
    assert (done.code, done.document["rows"]) == (0, 2099), done.err
    with IndexReader.open(storage) as reader, FileRows(reader) as rows:
        first = reader.messages("orders", "42", source=rows)
        # a part of the catalog, the header of the file, and the row
        assert (first.message_requests, numbers([fetched.to_dict() for fetched in first])) == (3, [42])
        again = reader.messages("orders", "43", source=rows)
        assert (again.message_requests, numbers([fetched.to_dict() for fetched in again])) == (1, [43])
        many = reader.messages("orders", "4", source=rows, max_count=50)
        assert (many.message_requests, len(many)) == (50, 50)
        assert 50 * 256 << 10 >= many.message_bytes > 49 << 17
        # nothing else was asked
        assert sum(report.requests for report in many.explain.files) == many.explain.requests
