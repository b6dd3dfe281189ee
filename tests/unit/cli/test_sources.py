"""NDJSON and Parquet files are read as messages.

Fast and slow reading agree, positions continue, and another file at the same path is recognised.
"""

import bz2
import contextlib
import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tiered_index.config import IndexConfig
from tiered_index.connectors.files import message_files as files
from tiered_index.connectors.files.message_files import source_name
from tiered_index.connectors.files.rows import parquet
from tiered_index.connectors.files.rows import text as rows_of_text
from tiered_index.connectors.files.rows.columns import columns_of
from tiered_index.connectors.files.rows.fields import Fields
from tiered_index.connectors.files.rows.lookups import read_lookups
from tiered_index.connectors.files.rows.places import LocalFile, opened_place
from tiered_index.errors import CorruptFile, InvalidArgument

BEGIN_MS = 1_700_000_000_000


def make_message(number, **changes):
    """Return the fields of message `number`."""
    fields = {
        "topic": "orders" if number % 3 else "payments",
        "queue_id": number % 4,
        "keys": [f"k{number % 7}", f"u{number % 5}"],
        "offset": number,
        "size": 100 + number % 50,
        "timestamp_ms": BEGIN_MS + number * 1000,
    }
    return fields | changes


@pytest.fixture
def write_lines(tmp_path):
    """Return a function that writes values, one per line, and returns the path. A dict is written as JSON."""

    def write(values):
        lines = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
        (path := tmp_path / "messages.ndjson").write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


def open_source(path, fields=None):
    return files.open_source(LocalFile(path), fields)


def rows(columns):
    """Return entries as a list of comparable tuples, in whatever form the caller has them."""
    if columns is None:
        return None
    data = columns.to_pydict() if isinstance(columns, pa.RecordBatch) else columns
    names = sorted(data)
    columns = (pa.array(data[name]).to_pylist() for name in names)
    return sorted(zip(*(list(map(repr, column)) for column in columns), strict=True))


def slow_rows(batch):
    return rows(columns_of([record.message for record in batch.records() if record.message is not None]))


def read(source, start=0):
    return [record for batch in source.batches(start) for record in batch.records()]


BAD = {
    b"[1]": "not a JSON object, but an array",
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
    "keys": ("a", None, [None], [True], [{}]),
    "timestamp_ms": (-1, 10**15, "yesterday", "1960-01-01"),
    "topic_id": (-1, "x", 1.0),
}
CASES = [*BAD, *(json.dumps({"field": f, "value": v}).encode() for f, values in BAD_FIELDS.items() for v in values)]


@pytest.mark.parametrize("line", CASES)
def test_a_bad_line_never_passes_for_a_message(write_lines, line):
    good = json.dumps(make_message(1)).encode()
    for keys in (["k"], []):
        bad, expected = line, BAD.get(line)
        if expected is None:
            case = json.loads(line)
            bad = json.dumps(make_message(3) | {"keys": keys} | {case["field"]: case["value"]}).encode()
            expected = "key" if case["field"] == "keys" else case["field"]
        (batch,) = open_source(write_lines([good, good, bad, good])).batches(0)
        records = list(batch.records())
        assert [record.message is None for record in records] == [False, False, True, False]
        assert expected in records[2].problem
        assert (records[2].where, records[2].start) == ("line 3", 2 * (len(good) + 1))
        # `put_batch` refuses the whole of a batch that fast reading accepts by mistake: a row has a value out of range
        if batch.columns is not None:
            values = batch.columns.to_pydict()
            assert (
                min(min(values[name]) for name in ("queue_id", "offset", "timestamp_ms")) < 0
                or max(values["queue_id"]) >= 2**31
                or max(values["timestamp_ms"]) >= 10**15
                or "" in values["key"] + [topic.strip() for topic in values["topic"]]
                or min(values.get("topic_id", [0])) < 0
            )


@pytest.mark.parametrize("null", [b"null", b" \tnull", b"\xef\xbb\xbfnull", b"null null"])
def test_a_null_in_place_of_a_message_is_refused_wherever_it_is(write_lines, null):
    """Arrow's parser crashes if it is the first row."""
    good = json.dumps(make_message(1)).encode()
    for lines in ([null, good], [b"", null, good], [good, null]):
        (batch,) = open_source(write_lines(lines)).batches(0)
        assert batch.columns is None
        assert [record.message is None for record in batch.records()] == [line == null for line in lines if line]


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2"])
def test_names_and_positions_of_texts_are_those_of_the_unpacked_text(tmp_path, ending):
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[ending]
    lines = [json.dumps(make_message(number)).encode() + b"\n" for number in range(4)]
    path, begun = tmp_path / f"m.ndjson{ending}", b"".join(lines[:2])
    path.write_bytes(pack(begun))
    first = f"file:{path}#{len(begun)}-{hashlib.sha256(begun).hexdigest()[:16]}"
    assert source_name(open_source(path), [], restart=False) == first
    path.write_bytes(pack(b"".join(lines)))
    assert source_name(open_source(path), [first], restart=False) == first
    assert [record.message.offset for record in read(open_source(path), len(begun))] == [2, 3]
    for text, problem in ((begun[:-9], "it is shorter"), (begun[:-5] + b"x" * 9 + b"\n", "no line ends there")):
        path.write_bytes(pack(text))
        with pytest.raises(InvalidArgument, match=problem):
            read(open_source(path), len(begun))


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("kind", ["ndjson", "csv"])
def test_a_last_line_that_may_be_cut_is_held_back(tmp_path, kind, grows):
    """The cut line of CSV is a message of its own. A file may also grow while it is read."""
    path = tmp_path / f"messages.{kind}"
    if kind == "csv":
        rows_of_file = (f"orders,0,k,5000,8,{number}\n" for number in (121, 122, 123))
        text = "topic,queue_id,key,timestamp_ms,size,offset\n" + "".join(rows_of_file)
    else:
        text = "".join(json.dumps(make_message(number)) + "\n" for number in (121, 122, 123))
    begin, cut = text.rindex("\n", 0, -1) + 1, len(text) - 2
    path.write_text(text[:cut])
    source = open_source(path)
    batches = source.batches(0)
    first = next(batches)
    if grows:
        with path.open("a") as handle:
            handle.write(text[cut:] + text[begin:])
    assert list(batches) == []
    assert (first.messages, first.end, source.held_back_bytes) == (2, begin, cut - begin)
    if not grows:
        path.write_text(text)
    again = open_source(path)
    assert [record.message.offset for record in read(again, first.end)] == [123] * (1 + grows)
    assert again.held_back_bytes == 0


def table(messages, named="keys", **changes):
    columns = {name: [m[name] for m in messages] for name in ("topic", "queue_id", "offset", "size", "timestamp_ms")}
    columns[named] = [m["keys"] if named == "keys" else m["keys"][0] for m in messages]
    return pa.table(columns | changes)


def test_parquet_takes_timestamps_rows_without_key_and_names_bad_rows(tmp_path):
    messages = [make_message(i) for i in range(4)]
    times = pa.array([m["timestamp_ms"] * 1_000_000 + 999_999 for m in messages], pa.timestamp("ns"))
    path = tmp_path / "m.parquet"
    pq.write_table(table(messages, timestamp_ms=times, keys=pa.array([["a"], None, [], ["b", "c"]])), path)
    (batch,) = open_source(path).batches(0)
    assert [record.message.keys for record in batch.records()] == [("a",), (), (), ("b", "c")]
    assert rows(batch.columns) == slow_rows(batch)
    assert batch.columns.to_pydict()["timestamp_ms"][0] == messages[0]["timestamp_ms"]
    pq.write_table(table(messages, size=pa.array([1, None, 3, -4])), path)
    problems = [(record.where, record.problem) for record in read(open_source(path)) if record.message is None]
    assert [(where, "size" in problem) for where, problem in problems] == [("row 2", True), ("row 4", True)]
    for name, values, problem in (
        ("topic", [["t"]], "column 'topic' has the type list<.*>, but must have text"),
        ("size", [1.5], "column 'size' has the type double, but must have integers"),
        ("keys", ["k"], "column 'keys' has the type string, but must have a list of text"),
    ):
        pq.write_table(table(messages[:1], **{name: values}), path)
        with pytest.raises(InvalidArgument, match=problem):
            open_source(path)


def test_files_that_are_not_sources(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    (tmp_path / "x.txt").write_bytes(b"hello")
    pq.write_table(table([make_message(i) for i in range(4)]), half := tmp_path / "half.parquet")
    half.write_bytes(half.read_bytes()[:-9])
    pq.write_table(table([make_message(1)]).drop_columns(["offset", "topic"]), tmp_path / "less.parquet")
    for name, fields, error, problem in (
        ("", None, InvalidArgument, "folder"),
        ("none.ndjson", None, InvalidArgument, "No such file"),
        ("x.txt", None, InvalidArgument, "neither"),
        ("x.parquet", None, CorruptFile, "Parquet"),
        ("half.parquet", None, CorruptFile, "Parquet"),
        ("less.parquet", None, InvalidArgument, r"column 'topic' is missing; it has .*--constant topic=VALUE"),
        ("less.parquet", Fields({}, {"topic": "t"}), InvalidArgument, "'offset' is missing"),
        (
            "less.parquet",
            Fields({"key": "order"}, {"topic": "t", "offset": 0}),
            InvalidArgument,
            r"give a column 'order' .key.; it has ",
        ),
    ):
        with pytest.raises(error, match=problem):
            open_source(tmp_path / name, fields)


def test_the_name_of_a_source_distinguishes_a_grown_file_from_a_changed_one(write_lines, tmp_path):
    path = write_lines([make_message(i) for i in range(5)])
    first = source_name(open_source(path), [], restart=False)
    known = ["other", f"file:{path}x#5-0000000000000000", first]
    path.write_bytes(b" " + path.read_bytes()[:-10])
    with pytest.raises(InvalidArgument, match="has changed since it was read"):
        read(open_source(path), path.stat().st_size + 9)
    tables = tmp_path / "m.parquet"
    pq.write_table(table([make_message(i) for i in range(5)]), tables)
    known.append(source_name(open_source(tables), [], restart=False))
    assert source_name(open_source(tables), known, restart=False) == known[-1]
    pq.write_table(table([make_message(i) for i in range(6)]), tables)
    for changed in (path, tables):
        with pytest.raises(InvalidArgument, match="--restart"):
            source_name(open_source(changed), known, restart=False)
        assert source_name(open_source(changed), known, restart=True) not in known


def test_lines_have_one_key_or_several_and_times_as_numbers_or_text(write_lines):
    """NDJSON accepts `key` in the same forms as `keys`. If both are there, `keys` counts. A null key is no key."""
    plain = {name: value for name, value in make_message(1).items() if name != "keys"}
    ways = [{"key": "a"}, {"key": ["a", "b"]}, {"keys": ["a", "b"]}, {"keys": None, "key": "a"}, {"key": None}]
    ways += [{"key": "x", "keys": ["a"]}, {"keys": ["a", "x", "a"]}, {"keys": ["\u4e2d"], "body": {"a": [1]}}]
    expected = [("a",), ("a", "b"), ("a", "b"), ("a",), (), ("a",), ("a", "x"), ("\u4e2d",)]
    assert [record.message.keys for record in read(open_source(write_lines([plain | way for way in ways])))] == expected
    times = ["2023-11-14T22:13:21Z", "2023-11-14T23:13:21+01:00", "2023-11-14 22:13:21", plain["timestamp_ms"]]
    for way, keys in zip(ways, expected, strict=True):
        for time in times:
            (batch,) = open_source(write_lines([plain | way | {"timestamp_ms": time}] * 6 + [b"", b"  "])).batches(0)
            assert {record.message.timestamp_ms for record in batch.records()} == {plain["timestamp_ms"]}
            assert (batch.columns is None) == (way == {"key": None})
            if batch.columns is not None:
                assert rows(batch.columns) == slow_rows(batch)
            assert len(slow_rows(batch)) == 6 * len(set(keys))


CSV = """order_id,queue_id,offset,size,created,note
A-1,0,1,10,2023-11-14T22:13:20Z,"hi, ""you"" there"
A-2,0,2,10,2023-11-14T23:13:21.5+01:00,
,0,3,10,2023-11-14T22:13:20Z,
"""
ORDERS = Fields({"key": "order_id", "timestamp_ms": "created"}, {"topic": "orders"})


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_csv_with_other_names_of_columns(tmp_path, ends):
    path = tmp_path / "orders.csv"
    path.write_bytes(b"\xef\xbb\xbf" + CSV.replace("\n", ends).encode())
    source = open_source(path, ORDERS)
    (batch,) = source.batches(0)
    assert batch.columns is not None
    assert batch.columns.num_rows == 2
    messages = [record.message for record in batch.records()]
    assert [(m.topic, m.keys, m.offset, m.timestamp_ms - 1_700_000_000_000) for m in messages] == [
        ("orders", ("A-1",), 1, 0),
        ("orders", ("A-2",), 2, 1000),
        ("orders", (), 3, 0),
    ]
    assert sorted(batch.columns["timestamp_ms"].to_pylist()) == [1_700_000_000_000, 1_700_000_001_500]
    before = path.stat().st_size
    with path.open("a") as handle:
        handle.write("A-4,0,4,10,1700000000000," + ends)
    (more,) = open_source(path, ORDERS).batches(before)
    (record,) = more.records()
    assert (record.where, record.message.offset, record.message.timestamp_ms) == ("line 5", 4, 1_700_000_000_000)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        *((f"A,0,{offset},10,1700000000000,", "offset must be an integer") for offset in ("x", "")),
        ("A,0,1,10,yesterday,", "timestamp_ms is epoch milliseconds or ISO 8601, not 'yesterday'"),
        ("A,0,1,10,1960-01-01T00:00:00Z,", "timestamp_ms -315619200000 is outside"),
        ("A,0,1,10", "4 columns, not 6"),
    ],
)
def test_a_bad_csv_line_never_passes_for_a_message(tmp_path, line, problem):
    (path := tmp_path / "orders.csv").write_text(CSV + line + "\n")
    (batch,) = open_source(path, ORDERS).batches(0)
    last = list(batch.records())[-1]
    assert last.where == "line 5" and problem in last.problem
    assert batch.columns is None or min(batch.columns["timestamp_ms"].to_pylist()) < 0


def test_cells_of_csv_are_the_same_in_both_ways_of_reading(tmp_path):
    """Keys are separated by blanks, blanks around numbers are ignored, and a cell may be long."""
    lines = ["t,0, a  b,1,1,5000,", "t, 0,c,\t7 ,  1,5000,", f"t,0,d,8,1,5000,{'x' * 200_000}", "t,0,,9,1,5000,"]
    header = "topic,queue_id,keys,offset,size,timestamp_ms,note"
    (path := tmp_path / "m.csv").write_text("\n".join([header, *lines, ""]))
    (batch,) = open_source(path).batches(0)
    assert rows(batch.columns) == slow_rows(batch)
    pairs = zip(batch.columns["key"].to_pylist(), batch.columns["offset"].to_pylist(), strict=True)
    assert list(pairs) == [("a", 1), ("b", 1), ("c", 7), ("d", 8)]


@contextlib.contextmanager
def piped(monkeypatch, data, *, is_blocking=True):
    """Let stdin be a pipe with some bytes, and yield its place and the pipe's other end."""
    end, start = os.pipe()
    os.set_blocking(end, is_blocking)
    with open(end) as stdin, open(start, "wb", buffering=0) as pipe, monkeypatch.context() as patched:
        patched.setattr("sys.stdin", stdin)
        pipe.write(data)
        with opened_place("-", IndexConfig()) as place:
            yield place, pipe


@pytest.mark.parametrize("gzipped", [False, True])
def test_stdin_is_taken_as_it_comes(monkeypatch, gzipped):
    """Reading does not wait for a whole block, reads nothing twice, and still numbers the lines."""
    lines = [json.dumps(make_message(i)).encode() + b"\n" for i in range(4)]
    first, second = (gzip.compress(p) if gzipped else p for p in (b"".join(lines), b"nope\n" + lines[0]))
    with piped(monkeypatch, first) as (place, pipe):
        source = files.open_source(place)
        assert (source_name(source, [], restart=False), source.total) == (None, None)
        batches = source.batches(0)
        records = list(next(batches).records())
        pipe.write(second)
        pipe.close()
        records += [record for batch in batches for record in batch.records()]
    assert [(r.where, r.message and r.message.offset) for r in records] == [
        *((f"line {i + 1}", i) for i in range(4)),
        ("line 5", None),
        ("line 6", 0),
    ]


def test_a_pause_of_a_pipe_that_does_not_block_is_no_end(monkeypatch):
    lines = [json.dumps(make_message(i)).encode() + b"\n" for i in range(2)]
    with piped(monkeypatch, lines[0], is_blocking=False) as (place, pipe):
        batches = files.open_source(place).batches(0)
        records = list(next(batches).records())
        later = threading.Timer(0.2, lambda: (pipe.write(lines[1]), pipe.close()))
        later.start()
        records += [record for batch in batches for record in batch.records()]
        later.join()
    assert [record.message.offset for record in records] == [0, 1]


def test_damaged_metadata_of_a_column_does_not_end_the_process(tmp_path):
    """Arrow aborts the process if it is asked for the metadata of a column before it has read some of the column, or
    of a column whose order is damaged.
    """
    path = tmp_path / "keys.parquet"
    pq.write_table(pa.table({"key": [f"key {n}" for n in range(50)]}), path, row_group_size=25)
    program = f"""
import json
from pathlib import Path
from tiered_index.errors import CorruptFile
from tiered_index.connectors.files.rows import parquet
from tiered_index.connectors.files.rows.places import LocalFile
parquet.BATCH_ROWS, path, said = 1, Path({str(path)!r}), []
data = path.read_bytes()
for place in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 8):
    for value in {{0, 0xFF, data[place] ^ 1, data[place] ^ 16}} - {{data[place]}}:
        path.write_bytes(data[:place] + bytes([value]) + data[place + 1:])
        try:
            said.append(parquet.ParquetTable(LocalFile(path)).has_every_text(0, "key"))
        except (CorruptFile, KeyError) as error:
            said.append(type(error).__name__)
print(json.dumps({{str(one): said.count(one) for one in said}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout, done.stderr)
    counts = json.loads(done.stdout)
    assert counts["True"] > 100 and counts["CorruptFile"] > 50


NUMBERS = ("queue_id", "offset", "size", "timestamp_ms")


def numbers(rows):
    """Return columns of numbers. All rows have the same numbers."""
    return {name: [5] * rows for name in NUMBERS}


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.list_(pa.string(), 1000)])
def test_keys_that_take_no_bytes_of_a_file_are_bounded(tmp_path, monkeypatch, kind):
    keys, path = [""] * 1000, tmp_path / "m.parquet"
    pq.write_table(pa.table({"keys": pa.array([keys] * 50, kind), "topic": ["t"] * 50} | numbers(50)), path)
    for name, most in (("LIST_ROWS", 20), ("TABLE_KEYS", 20_000)):
        with monkeypatch.context() as patch:
            patch.setattr(parquet, name, most)
            counts = [batch.messages for batch in open_source(path).batches(0)]
            assert sum(counts) == 50 and max(counts) <= 20
    monkeypatch.setattr(parquet, "MAX_ROW_KEYS", 999)
    with pytest.raises(InvalidArgument, match=r"states 50,000 items of keys.list.element in 50 rows, but a row"):
        next(open_source(path).batches(0))
    uneven = pa.array([keys, *[["", ""]] * 49], pa.list_(pa.string()))
    pq.write_table(pa.table({"keys": uneven, "topic": ["t"] * 50} | numbers(50)), path)
    with pytest.raises(InvalidArgument, match=r"m.parquet, row 1: it has 1,000 keys; 999 are allowed"):
        next(open_source(path).batches(0))
    monkeypatch.setattr(parquet, "MAX_ROW_BYTES", 1_000)
    many = pa.array([["k" * 10] * (200 if row == 3 else 2) for row in range(5)])
    fixed = pa.array([["k" * 1000, "k"]], pa.list_(pa.string(), 2))
    for keys, said in ((many, "row 4: its text has 2,001 bytes"), (fixed, "row 1: its text has 1,002 bytes")):
        pq.write_table(pa.table({"keys": keys, "topic": ["t"] * len(keys)} | numbers(len(keys))), path)
        with pytest.raises(InvalidArgument, match=f"m.parquet, {said}; 1,000 are allowed"):
            read(open_source(path))


LINE = b'{"topic": "t", "key": "k", "queue_id": 0, "offset": 1, "size": 1, "timestamp_ms": 5000}\n'


WIDE = ",".join(["topic", *(f"c{n}" for n in range(10_001))]).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("m.csv", WIDE, "columns; at most 10,000"),
        ("keys.csv", WIDE, "columns; at most 10,000"),
        ("keys.ndjson.gz", LINE + b"x" * 3_000, "the line at byte 88 is longer than 1,000 bytes"),
        ("keys.csv.gz", b"topic,key\nt,k\n" + b"x" * 3_000, "the line at byte 14 is longer than 1,000 bytes"),
    ],
)
def test_rows_without_end_are_refused(tmp_path, monkeypatch, name, data, said):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 1_000)
    monkeypatch.setattr(rows_of_text, "MAX_ROW_BYTES", 1_000)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(InvalidArgument, match=f"{path}.*{said}"):
        list(read_lookups(path, None, None, 1)) if name.startswith("keys") else read(open_source(path))


@pytest.mark.parametrize("end", [b"", b"\n" + LINE])
def test_a_line_without_end_is_a_bad_message(tmp_path, monkeypatch, end):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 1_000)
    monkeypatch.setattr(rows_of_text, "MAX_ROW_BYTES", 1_000)
    (path := tmp_path / "m.ndjson.gz").write_bytes(gzip.compress(LINE + b"x" * 3_000 + end))
    first, bad, *last = read(open_source(path))
    assert (first.message.keys, len(last)) == (("k",), bool(end))
    assert (bad.where, bad.message, bad.problem) == ("line 2", None, "the line at byte 88 is longer than 1,000 bytes")


def test_a_record_of_csv_may_have_several_lines_but_in_one_of_several_parts(tmp_path):
    path = tmp_path / "orders.csv"
    path.write_text(CSV.replace("A-2", '"A\n2"') + '6",0,4,10,1700000000000,\n')
    records = read(open_source(path, ORDERS))
    assert [(record.where, record.message.keys) for record in records] == [
        *(("line 2", ("A-1",)), ("line 3", ("A\n2",)), ("line 5", ())),
        ("line 6", ('6"',)),
    ]
    path.write_text(CSV + '"open,0,4,10,1700000000000,\n')
    assert len(read(source := open_source(path, ORDERS))) == 3 and source.held_back_bytes == 28
    path.write_text(CSV + '"B\n2",0,4,10,1700000000000,\n')
    for begin, end in ((0, 10), (0, path.stat().st_size), (60, None)):
        batches = open_source(path, ORDERS).part(begin, end)
        records = [record for batch in batches for record in batch.records()]
        assert all(record.message for record in records[:-2])
        if end != 10:
            assert records[-2].problem == "not CSV: a quote is not closed"


@pytest.mark.parametrize("kind", ["ndjson", "csv", "parquet"])
def test_row_numbers_are_those_of_the_file_wherever_reading_begins(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 200)
    monkeypatch.setattr(parquet, "BATCH_ROWS", 3)
    path = tmp_path / f"m.{kind}"
    values = [{**make_message(i, keys=["k"]), "offset": None} for i in range(20)]
    rows_ = range(20)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([{**v, "key": "k"} for v in values]).drop_columns(["keys", "offset"]), path)
    else:
        header = b"topic,queue_id,size,timestamp_ms,key\n" if kind == "csv" else b""
        lines = list(map(json.dumps, values))
        if kind == "csv":
            lines = [f"{v['topic']},{v['queue_id']},{v['size']},{v['timestamp_ms']},k" for v in values]
        lines.insert(5, "")
        rows_ = [n for n in range(21) if n != 5]
        path.write_bytes(header + "\n".join([*lines, ""]).encode())
    source = open_source(path, Fields({"offset": "rownumber"}))
    ends = []
    for batch in source.batches(0):
        assert batch.columns is not None
        assert rows(batch.columns) == slow_rows(batch)
        ends.append(batch.end)
    assert len(ends) > 2
    for number, end in enumerate([0, *ends]):
        offsets = [record.message.offset for record in read(open_source(path, source.fields), end)]
        assert offsets == list(rows_)[len(rows_) - len(offsets) :]
        assert (len(offsets) == 20) == (number == 0)


def test_a_last_line_without_an_end_is_taken_once(write_lines):
    path = write_lines([make_message(0), make_message(1)])
    path.write_bytes(path.read_bytes()[:-1])
    source = open_source(path)
    assert len(read(source)) == 2
    size = path.stat().st_size
    with path.open("ab") as handle:
        handle.write(b"\n" + json.dumps(make_message(2)).encode() + b"\n")
    assert [record.message.offset for record in read(open_source(path), size)] == [2]


def test_row_numbers_of_ndjson_that_a_member_states_are_used(write_lines):
    values = [make_message(i, keys=["k"], **({} if i == 2 else {"rownumber": 700 + i})) for i in range(4)]
    (batch,) = open_source(write_lines(values), Fields({"offset": "rownumber"})).batches(0)
    assert batch.columns["offset"].to_pylist() == [700, 701, 2, 703]
    assert rows(batch.columns) == slow_rows(batch)


def test_a_constant_beyond_its_limit_is_named(tmp_path):
    path = tmp_path / "orders.csv"
    path.write_text("order_id,queue_id,offset,created\nA-1,0,1,1700000000000\n")
    constants = {"topic": "t", "size": 2**63}
    (batch,) = open_source(path, Fields({"key": "order_id", "timestamp_ms": "created"}, constants)).batches(0)
    assert [record.problem for record in batch.records()] == [f"size {2**63} is outside 0..{2**31 - 1}"]
