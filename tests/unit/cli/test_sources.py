"""NDJSON and Parquet files as messages: fast and slow reading agree, positions continue, another file at the same path
is told apart.
"""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tiered_index.cli import sources
from tiered_index.cli.sources import NdjsonSource, ParquetSource, columns_of, open_source, source_name
from tiered_index.errors import CorruptFile, InvalidArgument


def rows(columns):
    """Return entries as a list of comparable tuples, whatever form they have."""
    if columns is None:
        return None
    data = columns.to_pydict() if isinstance(columns, pa.RecordBatch) else columns
    names = sorted(data)
    return sorted(zip(*(list(map(repr, data[name])) for name in names), strict=True))


def slow_rows(batch):
    return rows(columns_of([record.message for record in batch.records() if record.message is not None]))


def read(source, start=0):
    return [record for batch in source.batches(start) for record in batch.records()]


def test_fast_and_slow_reading_make_the_same_entries(write_lines, make_message):
    values = [make_message(i, keys=[f"k{i}", "x", f"k{i}"][: i % 4]) for i in range(50)]
    (batch,) = NdjsonSource(write_lines([*values, b"", b"  "])).batches(0)
    assert batch.columns is not None
    assert rows(batch.columns) == slow_rows(batch)
    assert batch.messages == 50
    assert len(batch.columns) == sum(len(set(v["keys"])) for v in values)


@pytest.mark.parametrize(
    "line", [{"keys": ["\ud800"]}, {"keys": ["\u4e2d\u6587"]}, {"topic_id": 7}, {"body": {"a": [1]}}]
)
def test_unusual_lines_are_messages(write_lines, make_message, line):
    (record,) = read(NdjsonSource(write_lines([make_message(1, **line)])))
    assert record.message is not None
    assert record.message.keys == tuple(line.get("keys", ["k1", "u1"]))
    assert record.message.topic_id == line.get("topic_id")


BAD = {
    b"[1]": "not a JSON object",
    b"{": "not JSON",
    b'"x"': "not a JSON object",
    b"\xff\xfe": "not JSON",
    b"nope": "not JSON",
    b"[" * 100_000: "not JSON",
}
BAD_FIELDS = {
    "queue_id": (1.5, "1", True, None, -1, 2**31),
    "offset": (2**63, -1, "x"),
    "topic": ("", None, 5, " "),
    "keys": ("a", None, [None], [5], [""]),
    "timestamp_ms": (-1, 10**15, "2023-01-01"),
    "topic_id": (-1, "x", 1.0),
}
CASES = [*BAD, *(json.dumps({"field": f, "value": v}).encode() for f, values in BAD_FIELDS.items() for v in values)]


@pytest.mark.parametrize("bad", range(len(CASES)))
@pytest.mark.parametrize("keys", [["k"], []])
def test_a_bad_line_never_passes_for_a_message(write_lines, make_message, bad, keys):
    line = CASES[bad]
    expected = BAD.get(line)
    if expected is None:
        case = json.loads(line)
        line = json.dumps(make_message(3) | {"keys": keys} | {case["field"]: case["value"]}).encode()
        expected = "key" if case["field"] == "keys" else case["field"]
    good = json.dumps(make_message(1)).encode()
    (batch,) = NdjsonSource(write_lines([good, good, line, good])).batches(0)
    records = list(batch.records())
    assert [record.message is None for record in records] == [False, False, True, False]
    assert expected in records[2].problem
    assert records[2].where == "line 3"
    assert records[2].start == 2 * (len(good) + 1)
    # what the fast way lets through is refused whole by put_batch: a value out of range in a row of its own
    if batch.columns is not None:
        values = batch.columns.to_pydict()
        lows = [min(values[name]) for name in ("queue_id", "offset", "timestamp_ms")]
        assert (
            min(lows) < 0
            or max(values["queue_id"]) >= 2**31
            or max(values["timestamp_ms"]) >= 10**15
            or "" in values["key"] + [topic.strip() for topic in values["topic"]]
            or min(values.get("topic_id", [0])) < 0
        )


def test_a_missing_field_is_named(write_lines, make_message):
    line = make_message(1)
    del line["offset"]
    assert read(NdjsonSource(write_lines([line])))[0].problem == "'offset' is missing"


@pytest.mark.parametrize("gzipped", [False, True])
def test_reading_goes_on_at_every_batch_end(write_lines, make_message, tmp_path, monkeypatch, gzipped):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 500)
    path = write_lines([make_message(i) for i in range(60)])
    if gzipped:
        packed = tmp_path / "messages.ndjson.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path = packed
    source = NdjsonSource(path)
    whole = read(source)
    assert [record.message.offset for record in whole] == list(range(60))
    ends = [batch.end for batch in source.batches(0)]
    assert len(ends) > 5
    for end in ends:
        rest = read(source, end)
        assert rest == [record for record in whole if record.start >= end]


def test_line_numbers_count_from_the_start_of_the_file(write_lines, make_message, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 300)
    path = write_lines([*[make_message(i) for i in range(20)], b"nope"])
    assert read(NdjsonSource(path))[-1].where == "line 21"


def test_a_last_line_without_an_end_is_taken_once(write_lines, make_message):
    path = write_lines([make_message(0), make_message(1)])
    path.write_bytes(path.read_bytes()[:-1])
    source = NdjsonSource(path)
    assert len(read(source)) == 2
    size = path.stat().st_size
    with path.open("ab") as handle:
        handle.write(b"\n" + json.dumps(make_message(2)).encode() + b"\n")
    assert [record.message.offset for record in read(NdjsonSource(path), size)] == [2]


@pytest.mark.parametrize("tail", [b"", b"x\n"])
def test_a_file_that_changed_behind_the_position_is_refused(write_lines, make_message, tail):
    path = write_lines([make_message(0), make_message(1)])
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10] + tail)
    with pytest.raises(InvalidArgument, match="not what it was"):
        read(NdjsonSource(path), size - 3)


def test_a_damaged_gzip_file_is_corrupt(write_lines, make_message, tmp_path):
    data = gzip.compress(b"".join(json.dumps(make_message(i)).encode() + b"\n" for i in range(500)))
    packed = tmp_path / "m.ndjson.gz"
    packed.write_bytes(data[:-20])
    with pytest.raises(CorruptFile, match="gzip"):
        read(NdjsonSource(packed))


def table(messages, named="keys", **changes):
    columns = {name: [m[name] for m in messages] for name in ("topic", "queue_id", "offset", "size", "timestamp_ms")}
    columns[named] = [m["keys"] if named == "keys" else m["keys"][0] for m in messages]
    return pa.table(columns | changes)


@pytest.mark.parametrize("keys", ["key", "keys"])
def test_parquet_goes_on_at_every_row(make_message, tmp_path, monkeypatch, keys):
    monkeypatch.setattr(sources, "BATCH_ROWS", 7)
    path = tmp_path / "m.parquet"
    pq.write_table(table([make_message(i) for i in range(30)], keys), path, row_group_size=12)
    source = open_source(path)
    assert isinstance(source, ParquetSource)
    for start in range(31):
        batches = list(source.batches(start))
        assert [r.message.offset for batch in batches for r in batch.records()] == list(range(start, 30))
        assert all(rows(batch.columns) == slow_rows(batch) for batch in batches)
    with pytest.raises(InvalidArgument, match="not what it was"):
        list(source.batches(31))


def test_parquet_takes_timestamps_rows_without_key_and_names_bad_rows(make_message, tmp_path):
    messages = [make_message(i) for i in range(4)]
    times = pa.array([m["timestamp_ms"] * 1_000_000 + 999_999 for m in messages], pa.timestamp("ns"))
    path = tmp_path / "m.parquet"
    pq.write_table(table(messages, timestamp_ms=times, keys=pa.array([["a"], None, [], ["b", "c"]])), path)
    (batch,) = ParquetSource(path).batches(0)
    assert [record.message.keys for record in batch.records()] == [("a",), (), (), ("b", "c")]
    assert rows(batch.columns) == slow_rows(batch)
    assert batch.columns.to_pydict()["timestamp_ms"][0] == messages[0]["timestamp_ms"]
    pq.write_table(table(messages, size=pa.array([1, None, 3, -4])), path)
    problems = [(record.where, record.problem) for record in read(ParquetSource(path)) if record.message is None]
    assert [where for where, _ in problems] == ["row 2", "row 4"]
    assert all("size" in problem for _, problem in problems)


def test_files_that_are_no_source(tmp_path, make_message):
    with pytest.raises(InvalidArgument, match="folder"):
        open_source(tmp_path)
    with pytest.raises(InvalidArgument, match="No such file"):
        open_source(tmp_path / "none.ndjson")
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    with pytest.raises(CorruptFile, match="Parquet"):
        open_source(tmp_path / "x.parquet")
    (tmp_path / "x.txt").write_bytes(b"hello")
    with pytest.raises(InvalidArgument, match="neither"):
        open_source(tmp_path / "x.txt")
    path = tmp_path / "half.parquet"
    pq.write_table(table([make_message(i) for i in range(4)]), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptFile):
        open_source(path)
    pq.write_table(table([make_message(1)]).drop_columns(["offset"]), path)
    with pytest.raises(InvalidArgument, match="'offset' is missing"):
        open_source(path)


def test_the_name_of_a_source_tells_a_grown_file_from_a_changed_one(write_lines, make_message):
    path = write_lines([make_message(i) for i in range(5)])
    first = source_name(open_source(path), [], restart=False)
    assert str(path) in first
    with path.open("ab") as handle:
        handle.write(json.dumps(make_message(5)).encode() + b"\n")
    known = ["other", f"file:{path}x#5-0000000000000000", first]
    assert source_name(open_source(path), known, restart=False) == first
    path.write_bytes(b" " + path.read_bytes()[:-1])
    with pytest.raises(InvalidArgument, match="--restart"):
        source_name(open_source(path), known, restart=False)
    assert source_name(open_source(path), known, restart=True) not in known
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(InvalidArgument, match="--restart"):
        source_name(open_source(path), known, restart=False)


def test_another_parquet_file_at_the_same_path_is_a_changed_one(make_message, tmp_path):
    path = tmp_path / "m.parquet"
    pq.write_table(table([make_message(i) for i in range(5)]), path)
    first = source_name(open_source(path), [], restart=False)
    assert source_name(open_source(path), [first], restart=False) == first
    pq.write_table(table([make_message(i) for i in range(6)]), path)
    with pytest.raises(InvalidArgument, match="--restart"):
        source_name(open_source(path), [first], restart=False)
