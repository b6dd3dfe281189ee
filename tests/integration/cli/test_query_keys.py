"""`query --keys FILE`: the same answers as with one key at a time, as a table on stdout or in a file."""

import csv
import json
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.several_indexes import BASE_MS, Cluster
from tiered_index import IndexReader, Lookup

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
    """Return a function that writes a file of keys in a given format."""

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


def epoch_ms(moment):
    return round(moment.timestamp() * 1000)


def rows_of(path):
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
        return [row | {"timestamp_ms": row["timestamp_ms"] and epoch_ms(row["timestamp_ms"])} for row in rows]
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("kind", "out"), [("csv", "parquet"), ("ndjson", "ndjson"), ("parquet", None)])
def test_a_file_of_keys_is_answered_as_key_by_key(run_here, cluster, keys, tmp_path, monkeypatch, kind, out):
    monkeypatch.setattr("tiered_index.cli.look_up.keys._BATCH", 2)
    uri = cluster.uris[0]
    target = () if out is None else ("--out", tmp_path / f"answers.{out}")
    done = run_here("query", "--keys", keys(kind), "--storage", uri, "--max", 3, *target, "--json")
    assert done.code == 0, done
    *rows, last = done.records if out is None else [*rows_of(target[1]), done.document]
    with IndexReader.open(uri) as reader:
        for topic, key, begin, end in KEYS:
            answer = reader.query(topic, key, begin, end, 3)
            entries = [item.to_dict() | {"source": None} for item in answer] or [{}]
            lookup = {"topic": topic, "key": key, "begin_ms": begin, "end_ms": end, "status": answer.status}
            for position, entry in enumerate(entries):
                row = rows.pop(0)
                assert row == dict.fromkeys(row) | lookup | ({"position": position} if entry else {}) | entry
                assert {"failed", "offset", "timestamp_ms", "fingerprint"} <= row.keys()
    assert rows == []
    figures = [last[name] for name in ("status", "count", "lookups", "found", "not_looked_up")]
    assert figures == ["truncated", 6, 3, 2, 0] and last["statuses"] == {"complete": 2, "truncated": 1}
    assert last["as_of_ms"] == BASE_MS + 29_000 and last["hints"] == []
    assert last["explain"]["requests"] > 0 and last.get("out") == (str(target[1]) if target else None)


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
    assert (
        refused.code == 2
        and f"the temporary file {mine} is a folder" in refused.err
        and (mine / "note").read_text() == "mine"
    )


def test_a_reached_bound_is_reported_and_the_found_entries_are_written(run_here, cluster, keys, tmp_path):
    out = tmp_path / "answers.ndjson"
    command = ("query", "--keys", keys("csv"), "--storage", cluster.uris[0], "--max-requests", 0, "--json")
    done = run_here(*command, "--out", out)
    assert (done.code, done.document["status"], done.error["type"]) == (6, "partial", "BudgetExceeded")
    assert {row["status"] for row in rows_of(out)} == {"partial"} and rows_of(out)[0]["failed"][0]["file"]
    done = run_here(*command, "--allow-partial")
    assert (done.code, done.err, done.records[-1]["status"]) == (6, "", "partial")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("k.csv", "key\nk1\n", "column 'topic' is missing; it has key"),
        ("k.csv", "topic,key\nt,k1\nt\n", "line 3: 1 columns, not 2"),
        ("k.csv", "topic,key\nt,k1\nt,\n", "line 3: 'key' is missing"),
        ("k.csv", "topic,key,begin_ms\nt,k1,soon\n", "line 2: 'soon' is neither epoch milliseconds nor"),
        ("k.ndjson", '{"topic": "t", "key": true}', "line 1: a key must be text, not bool"),
        (
            "k.ndjson",
            '{"topic": "t", "key": "k", "begin_ms": 2, "end_ms": 1}',
            "line 1: begin_ms 1970-01-01T00:00:00.002Z is after end_ms 1970-01-01T00:00:00.001Z",
        ),
        ("k.ndjson", '{"topic": "t", "key": "k\\ud800"}', "has half a surrogate pair"),
        ("k.ndjson", b'{"topic": "t", "key": "\xed\xa0\xbd"}', "has half a surrogate pair"),
        ("k.ndjson", b'{"topic": "t", "key": "\xff"}', "line 1: not JSON: 'utf-8' codec"),
        ("k.ndjson", '{"topic": "t", "key": "a"} {"topic": "t", "key": "b"}', "line 1: not JSON: Extra data"),
        ("k.ndjson", "\n[]", "is a JSON array: write one object a line, for example with `jq"),
        ("k.ndjson", '{"topic": "t", "key": "a"}\n[]', "line 2: not a JSON object, but an array"),
        ("k.parquet", "no", "not a Parquet file"),
        ("k.txt", "keys", "is neither NDJSON nor CSV, Parquet or Arrow"),
    ],
)
def test_a_file_that_is_none_of_keys_is_named_with_its_row(run_here, cluster, tmp_path, name, text, said):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    out = tmp_path / "answers.parquet"
    done = run_here("query", "--keys", tmp_path / name, "--storage", cluster.uris[0], "--out", out, "--json")
    assert (done.code, done.out) == (4 if name == "k.parquet" else 2, "")
    assert said in done.error["message"] and str(tmp_path / name) in done.error["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_no_keys_have_an_empty_table(run_here, cluster, tmp_path):
    (tmp_path / "k.csv").write_text("topic,key\n")
    out = tmp_path / "answers.parquet"
    assert run_here("query", "--keys", tmp_path / "k.csv", "--storage", cluster.uris[0], "--out", out).code == 0
    assert pq.read_table(out).num_rows == 0 and "fingerprint" in pq.read_schema(out).names


def test_unknown_topics_and_likely_seconds_in_rows_are_told(run_here, cluster, keys):
    rows = [("t", "k1", None, BASE_MS), ("t", "k2", 0, 1_700_000_000), *((f"tt{n}", "k1", 0, None) for n in range(7))]
    where = ("query", "--storage", cluster.uris[0], "--json", "--keys")
    hints = run_here(*where, keys("ndjson", rows)).records[-1]["hints"]
    assert "no file that was read has topic 'tt4'" in hints
    assert "nor any of 2 more topics" in hints
    assert any(hint.endswith("did you mean milliseconds? 1700000000 seconds are 1700000000000") for hint in hints)
    assert run_here(*where, keys("ndjson", rows[:1])).records[-1]["hints"] == []
    shown = run_here("query", "--storage", cluster.uris[0], "--keys", keys("ndjson", rows), "--explain").out
    assert "nothing found" in shown and "nor any of 2 more topics" in shown
    assert "9 lookups (9 complete), " in shown
