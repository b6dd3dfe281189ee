"""`query --keys FILE`: the same answers as key by key, as a table that goes to stdout or to a file."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.server.conftest import serving
from tests.support.several_indexes import BASE_MS, Cluster
from tiered_index import IndexReader, Lookup
from tiered_index.cli import keys as keys_command
from tiered_index.client import IndexClient
from tiered_index.errors import BudgetExceeded
from tiered_index.server.calls import Caps

KEYS = [("t", "k1", None, None), ("t", "none", None, None), ("t", "k2", BASE_MS + 2_000, BASE_MS + 9_000)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    made = Cluster(folder)
    # "again": each entry with two times
    again = [("t", 0, "again", 100 + n % 3, 5, BASE_MS + n * 1000) for n in range(6)]
    for name in "ab":
        rows = [("t", 0, f"k{n % 3}", n, 5, BASE_MS + n * 1000) for n in range(30)]
        made.add(f"file://{folder}/cluster/{name}", rows + again)
    return made


@pytest.fixture
def keys(tmp_path):
    """Return a function that writes a file of keys of a kind."""

    def write(kind, rows=KEYS):
        path = tmp_path / f"keys.{kind}"
        named = [dict(zip(("topic", "key", "begin_ms", "end_ms"), row, strict=True)) for row in rows]
        if kind == "parquet":
            times = pa.timestamp("us", "UTC")
            columns = {name: [row[name] for row in named] for name in named[0]}
            columns["begin_ms"] = pa.array([t and t * 1000 for t in columns["begin_ms"]], pa.int64()).cast(times)
            pq.write_table(pa.table({**columns, "more": [1.5] * len(named)}), path)
        elif kind == "csv":
            with path.open("w", newline="") as file:
                lines = csv.writer(file)
                lines.writerow(["key", "more", "begin_ms", "topic", "end_ms"])
                for topic, key, begin, end in rows:
                    when = datetime.fromtimestamp(begin / 1000, UTC).isoformat() if begin else ""
                    lines.writerow([key, "x,\ny", when, topic, end or ""])
        else:
            path.write_text("".join(json.dumps(row | {"more": [1]}) + "\n\n" for row in named))
        return path

    return write


def rows_of(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("kind", "out"), [("csv", "parquet"), ("ndjson", "ndjson"), ("parquet", None)])
def test_a_file_of_keys_is_answered_as_key_by_key(run_here, cluster, keys, tmp_path, kind, out):
    uri = cluster.uris[0]
    target = () if out is None else ("--out", tmp_path / f"answers.{out}")
    done = run_here("query", "--keys", keys(kind), "--storage", uri, "--max", 3, *target, "--json")
    assert done.code == 0, done
    *rows, last = done.records if out is None else [*rows_of(target[1]), done.document]
    with IndexReader.open(uri) as reader:
        for topic, key, begin, end in KEYS:
            answer = reader.query(topic, key, begin, end, 3)
            entries = [item.to_dict() | {"source": None} for item in answer] or [{}]
            asked = {"topic": topic, "key": key, "begin_ms": begin, "end_ms": end, "status": answer.status}
            for position, entry in enumerate(entries):
                row = rows.pop(0)
                assert row == dict.fromkeys(row) | asked | ({"position": position} if entry else {}) | entry
                assert {"failed", "offset", "timestamp_ms", "fingerprint"} <= row.keys()
    assert rows == []
    figures = {name: last[name] for name in ("status", "count", "lookups", "found", "statuses", "not_looked_up")}
    assert figures == {
        "status": "truncated",
        "count": 6,
        "lookups": 3,
        "found": 2,
        "not_looked_up": 0,
        "statuses": {"complete": 2, "truncated": 1},
    }
    assert last["as_of_ms"] == BASE_MS + 29_000 and last["hints"] == []
    assert last["explain"]["requests"] > 0 and last.get("out") == (str(target[1]) if target else None)


def test_people_see_a_table_and_rows_without_bounds_take_the_options(run_here, cluster, keys):
    given = ("--begin", BASE_MS + 20_000, "--all", "--explain")
    done = run_here("query", "--keys", keys("ndjson"), "--storage", cluster.uris[0], *given)
    assert done.code == 0, done
    assert done.out.count(" k1 ") == 3 and done.out.count(" k2 ") == 3 and "nothing found" in done.out
    assert (
        "3 lookups (3 complete), 2 with entries: 6 found as of 2023-11-14T22:13:49Z; the" in done.out
        and "1 file read" in done.out
    )


def test_several_indexes_are_one_answer_to_each_key(run_here, cluster, keys, tmp_path):
    out = tmp_path / "answers.parquet"
    storages = [word for uri in cluster.uris for word in ("--storage", uri)]
    assert run_here("query", "--keys", keys("csv"), *storages, "--all", "--out", out).code == 0
    with IndexReader.open(cluster.uris) as reader:
        (answer,) = reader.query_many([Lookup(topic="t", key="k1")])
    assert [row["source"] for row in rows_of(out) if row["key"] == "k1"] == [item.source for item in answer]
    again = run_here("query", "--keys", keys("csv"), *storages, "--out", out)
    assert again.code == 2 and f"--out {out} exists already" in again.err
    (mine := tmp_path / ".answers.ndjson.partial").mkdir()
    (mine / "note").write_text("mine")
    refused = run_here("query", "--keys", keys("csv"), *storages, "--out", tmp_path / "answers.ndjson")
    assert refused.code == 2 and f"{mine}, which is a folder" in refused.err and (mine / "note").read_text() == "mine"


def test_a_bound_that_is_reached_is_said_and_what_was_found_is_written(run_here, cluster, keys, tmp_path):
    out = tmp_path / "answers.ndjson"
    asked = ("query", "--keys", keys("csv"), "--storage", cluster.uris[0], "--max-requests", 0, "--json")
    done = run_here(*asked, "--out", out)
    assert (done.code, done.document["status"], done.error["type"]) == (6, "partial", "BudgetExceeded")
    assert {row["status"] for row in rows_of(out)} == {"partial"} and rows_of(out)[0]["failed"][0]["file"]
    done = run_here(*asked, "--allow-partial")
    assert (done.code, done.err, done.records[-1]["status"]) == (6, "", "partial")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("k.csv", "key\nk1\n", "column 'topic' is missing; it has key"),
        ("k.csv", "topic,key\nt,k1\nt\n", "line 3 has 1 cell, the header 2"),
        ("k.csv", "topic,key\nt,k1\nt,\n", "line 3: 'key' is missing"),
        ("k.csv", "topic,key,begin_ms\nt,k1,soon\n", "line 2: 'soon' is neither epoch milliseconds nor"),
        ("k.ndjson", '{"topic": "t", "key": 5}', "line 1: a key must be text, not int"),
        (
            "k.ndjson",
            '{"topic": "t", "key": "k", "begin_ms": 2, "end_ms": 1}',
            "line 1: begin_ms 1970-01-01T00:00:00.002Z is after end_ms 1970-01-01T00:00:00.001Z",
        ),
        ("k.ndjson", '{"topic": "t", "key": "k\\ud800"}', "line 1: 'utf-8' codec can't encode character"),
        ("k.ndjson", "\n[]", "line 2: not a JSON object"),
        ("k.parquet", "no", "can't be read"),
        ("k.txt", "", "a file of keys is .parquet, .ndjson"),
    ],
)
def test_a_file_that_is_none_of_keys_is_named_with_its_row(run_here, cluster, tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    out = tmp_path / "answers.parquet"
    done = run_here("query", "--keys", tmp_path / name, "--storage", cluster.uris[0], "--out", out, "--json")
    assert (done.code, done.out) == (4 if name == "k.parquet" else 2, "")
    assert said in done.error["message"] and str(tmp_path / name) in done.error["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["orders"], "give a TOPIC and a KEY, or --keys FILE"),
        (["orders", "k", "--out", "x.parquet"], "give --keys, too"),
        (["orders", "--keys", "k.csv"], "leave TOPIC out"),
        (["--keys", "k.csv", "--messages"], "leave --messages out"),
        (["--keys", "absent.csv"], "absent.csv: No such file"),
        (["--keys", "k.csv", "--out", "x.xls"], "--out x.xls: answers are written as .parquet or .ndjson"),
    ],
)
def test_what_does_not_go_together(run_here, cluster, line, said):
    done = run_here("query", *line, "--storage", cluster.uris[0], "--json")
    assert (done.code, done.out) == (2, "") and said in done.error["message"]


def test_no_keys_have_an_empty_table(run_here, cluster, tmp_path):
    (tmp_path / "k.csv").write_text("topic,key\n")
    out = tmp_path / "answers.parquet"
    assert run_here("query", "--keys", tmp_path / "k.csv", "--storage", cluster.uris[0], "--out", out).code == 0
    assert pq.read_table(out).num_rows == 0 and "fingerprint" in pq.read_schema(out).names


def test_topics_that_no_file_has_are_told_beside_what_was_found(run_here, cluster, tmp_path):
    file = tmp_path / "k.csv"
    file.write_text("topic,key\nt,k1\n" + "".join(f"tt{n},k1\n" for n in range(7)))
    where = ("query", "--keys", file, "--storage", cluster.uris[0])
    done = run_here(*where)
    assert "1 with entries" in done.out and "no file that was read has topic 'tt0'" in done.out
    assert "'tt4'" in done.out and "has topic 'tt5'" not in done.out and "nor any of 2 more topics" in done.out
    file.write_text("topic,key\nt,k1\n")
    assert "no file that was read" not in run_here(*where, "--begin", 1000).out


@pytest.mark.parametrize(
    "options", [("--max", 3), ("--all",), ("--all", "--explain"), ("--max", 7, "--begin", BASE_MS + 4_000)]
)
@pytest.mark.parametrize("several", [False, True])
def test_a_service_answers_a_file_of_keys_as_the_index_does(
    run_here, cluster, keys, tmp_path, monkeypatch, options, several
):
    uris = cluster.uris if several else cluster.uris[:1]
    storages = [word for uri in uris for word in ("--storage", uri)]
    rows = [*KEYS, ("nowhere", "k", None, None), ("t", "k1", None, BASE_MS + 20_000)]
    rows += [("t", "again", None, None)]
    # several requests of several pages each
    monkeypatch.setattr(keys_command, "_SERVED", 2)
    monkeypatch.setattr(keys_command, "_SERVED_PAGE", 2)
    with IndexReader.open(uris if several else uris[0]) as reader, serving(reader) as client:
        said = {}
        for name, where in (("local", storages), ("url", ("--url", str(client.base_url)))):
            out = tmp_path / f"{name}.parquet"
            done = run_here("query", "--keys", keys("csv", rows), *where, *options, "--out", out, "--json")
            assert done.code == 0, done
            said[name] = done.document, pq.read_table(out)
        local, served = said["local"], said["url"]
        places = {uri.removeprefix("file://"): f"/{uri.rpartition('/')[2]}" for uri in uris}
        shown = local[1]
        if several:
            sources = [
                one and next(one.replace(at, to) for at, to in places.items() if at in one)
                for one in shown["source"].to_pylist()
            ]
            shown = shown.set_column(shown.column_names.index("source"), "source", pa.array(sources))
        assert served[1].to_pylist() == shown.to_pylist()
        assert served[1].equals(shown)
        same = ("status", "count", "lookups", "found", "statuses", "not_looked_up", "unknown_topics", "as_of_ms")
        assert [served[0][name] for name in same] == [local[0][name] for name in same]
        # people see the same, too, but for who writes the index, and hints
        text = run_here("query", "--keys", keys("csv", rows), "--url", str(client.base_url), *options)
        assert text.code == 0 and f"{local[0]['lookups']} lookups" in text.out and "nothing found" in text.out


# of two requests each index may have one, or one of them both
@pytest.mark.parametrize("most", [1, 3])
def test_a_bound_gives_what_was_found_of_a_service_as_of_the_index(run_here, cluster, keys, tmp_path, most):
    asked = ("query", "--keys", keys("csv"), "--json", "--max-requests", most, "--out")
    storages = [word for uri in cluster.uris for word in ("--storage", uri)]
    local = run_here(*asked, tmp_path / "local.ndjson", *storages)
    with IndexReader.open(cluster.uris) as reader, serving(reader) as client:
        served = run_here(*asked, tmp_path / "url.ndjson", "--url", str(client.base_url))
    assert local.code == served.code == 6 and served.error["type"] == "BudgetExceeded"
    same = ("status", "count", "found", "statuses", "not_looked_up")
    assert [served.document[name] for name in same] == [local.document[name] for name in same]
    assert (served.document["count"] > 0) == (most > 1), served.document


def test_a_bound_within_the_pages_of_a_service_gives_the_pages_before_it(
    run_here, cluster, keys, tmp_path, monkeypatch
):
    monkeypatch.setattr(keys_command, "_SERVED_PAGE", 2)
    asked, pages = ("query", "--keys", keys("csv"), "--json", "--all", "--out"), []
    answer = IndexClient.query_many_arrow

    def second_is_refused(*args, **kwargs):
        pages.append(args)
        if len(pages) == 2:
            raise BudgetExceeded("timeout_s was reached")
        return answer(*args, **kwargs)

    monkeypatch.setattr(IndexClient, "query_many_arrow", second_is_refused)
    with IndexReader.open(cluster.uris[0]) as reader, serving(reader) as client:
        done = run_here(*asked, tmp_path / "a.ndjson", "--url", str(client.base_url))
    assert (done.code, done.error["type"], done.document["count"]) == (6, "BudgetExceeded", 4)
    assert done.document["statuses"] == {"truncated": 2, "complete": 1}
    assert [row["offset"] for row in rows_of(tmp_path / "a.ndjson") if row["key"] == "k1"] == [28, 25]


def test_long_keys_go_to_a_service_in_several_requests(run_here, cluster, keys, tmp_path, monkeypatch):
    monkeypatch.setattr(keys_command, "_SERVED_BYTES", 1 << 18)
    rows = [("t", f"{n}{'é' * 9_000}", None, None) for n in range(9)] + KEYS
    with IndexReader.open(cluster.uris[0]) as reader, serving(reader, caps=Caps(body_bytes=300_000)) as client:
        done = run_here("query", "--keys", keys("ndjson", rows), "--url", str(client.base_url), "--json")
    assert (done.code, done.records[-1]["lookups"], done.records[-1]["found"]) == (0, 12, 2)


def test_a_service_that_can_not_read_a_file_is_told(run_here, cluster, keys, tmp_path):
    asked = ("query", "--keys", keys("csv"), "--json", "--out")
    with IndexReader.open(cluster.uris[0]) as reader, serving(reader, caps=Caps(max_requests=0)) as client:
        url = ("--url", str(client.base_url))
        done = run_here(*asked, tmp_path / "a.ndjson", *url)
        assert (done.code, done.document["status"], done.document["not_looked_up"]) == (6, "partial", 0)
        assert (done.error["type"], done.document["statuses"]) == ("BudgetExceeded", {"partial": 3})
        assert rows_of(tmp_path / "a.ndjson")[0]["failed"][0]["file"]
        done = run_here(*asked, tmp_path / "b.ndjson", *url, "--allow-partial")
        assert (done.code, done.document["statuses"]) == (6, {"partial": 3})
        assert rows_of(tmp_path / "b.ndjson")[0]["failed"][0]["file"]
    refused = run_here(*asked, tmp_path / "c.ndjson", *url, "--storage", cluster.uris[0])
    assert refused.code == 2 and "leave --storage out" in refused.err
