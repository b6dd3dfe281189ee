"""Files of keys and of answers. Keys of CSV are those that were written, or an error names the line. Names of files are
literal, with any characters.
"""

import csv
import gzip
import io
import json
import re
from datetime import time
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from tests.spark.entries import messages
from tiered_index.errors import CorruptFile, DiskFull, InvalidArgument
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.lookup.keys import check_out, frame_of_keys, read_keys, write_answers
from tiered_index.storage.s3.options import S3Options

S3 = S3Options()
KEYS = [
    *('say "hi"', 'x,"y"', '"', '""', '\\"', "a\\", "\\n", "line\nbreak", "line\r\nbreak", "line\rbreak", '"\n,'),
    *(" spaces ", "#no comment", "über", "😀", "null", "NaN", "007", "1e3"),
]
HOSTILE = "my keys [1]{a,b}*?\\ü%20#'x'"
# Spark would match these names if it read parts of a name as a pattern
DECOYS = ("k1", "my keys 1")


def frame_of(spark, path):
    return frame_of_keys(spark, read_keys(str(path), S3))


def rows(spark, path):
    return [tuple(row) for row in frame_of(spark, path).collect()]


def test_keys_of_csv_are_those_that_were_written(tmp_path):
    """The files are as Python, Excel and DuckDB write them: quotes are doubled, a backslash is itself, a cell may
    contain line ends.
    """
    quotings = (csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC)
    for number, quoting in enumerate(quotings):
        # Python's csv before 3.13 does not quote \r by itself if quotes are optional and lines end with \n
        for end in ("\r\n", "\n") if quoting == csv.QUOTE_ALL else ("\r\n",):
            zipped = number == 1
            path = tmp_path / f"{number}{len(end)}.csv{'.gz' if zipped else ''}"
            encoding = "utf-8-sig" if number else "utf-8"
            with (gzip.open if zipped else open)(path, "wt", newline="", encoding=encoding) as file:
                writer = csv.writer(file, quoting=quoting, lineterminator=end)
                writer.writerow(["topic", "key", "from"])
                writer.writerows([f"of, {path.name}", key, str(place)] for place, key in enumerate(KEYS))
    table = read_keys(str(tmp_path), S3)
    assert table.schema == pa.schema(dict.fromkeys(("topic", "key", "from"), pa.string()))
    rows_read = sorted((row["topic"], int(row["from"]), row["key"]) for row in table.to_pylist())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    assert rows_read == [(f"of, {name}", place, key) for name in names for place, key in enumerate(KEYS)]


def test_empty_cells_of_csv_are_null_quoted_or_not(tmp_path):
    """Writers that quote everything also quote nulls."""
    path = tmp_path / "k.csv"
    path.write_text('topic,,begin_ms\n\nt,a,\nt,"",""\n,"b",7\n\n')
    table = read_keys(str(path), S3)
    assert table.column_names == ["topic", "_c1", "begin_ms"]
    assert [tuple(row.values()) for row in table.to_pylist()] == [("t", "a", None), ("t", None, None), (None, "b", "7")]


@pytest.mark.parametrize("header", ["key,topic", "topic,key,since", "Topic,key"])
def test_headers_that_differ(tmp_path, header):
    for name, text in (("a", "topic,key"), ("b", header)):
        (tmp_path / f"{name}.csv").write_text(f"{text}\n" + ",".join("k" * len(text.split(","))) + "\n")
    other = f"{tmp_path}/b.csv has other columns than {tmp_path}/a.csv: {header.split(',')} instead of ['topic', 'key']"
    with pytest.raises(InvalidArgument, match=re.escape(other)):
        read_keys(str(tmp_path), S3)


def test_keys_of_any_form_are_read_from_a_storage(tmp_path):
    uri = f"sqlite:///{tmp_path}/keys.db"
    with StorageAddress(uri).open(any_names=True) as storage:
        storage.put("k.csv.gz", gzip.compress(b"topic;key\nt;a\n"))
        storage.put("k.ndjson", b'{"topic": "t", "key": 1.50}')
    for name, key in (("k.csv.gz", "a"), ("k.ndjson", "1.50")):
        assert read_keys(f"{uri}/{name}", S3).to_pylist() == [{"topic": "t", "key": key}]


def test_a_file_with_columns_and_no_rows_has_no_keys(tmp_path):
    """So a job whose keys are none ends without answers, as with a header of CSV alone."""
    columns = ["topic", "key"]
    empty = pa.table([pa.array([], pa.string())] * 2, columns)
    pq.write_table(empty, tmp_path / "k.parquet")
    feather.write_feather(empty, tmp_path / "k.arrow")
    (tmp_path / "k.csv").write_text("topic,key\n")
    for name in ("k.parquet", "k.arrow", "k.csv"):
        table = read_keys(str(tmp_path / name), S3)
        assert (table.column_names, len(table)) == (columns, 0)
    fill(tmp_path / "l.parquet", "a")
    # Spark loses rows of a table with empty chunks
    (chunk,) = read_keys(f"{tmp_path}/*.parquet", S3)["key"].chunks
    assert chunk.to_pylist() == ["a"]


def test_times_of_parquet_in_96_bits_have_microseconds(tmp_path):
    """Hive, Impala and old Spark write all times so. Rows of files have them in milliseconds."""
    since = pa.array([1_700_000_000_123_456], pa.timestamp("us"))
    table = pa.table({"topic": ["t"], "key": ["k"], "since": since})
    pq.write_table(table, tmp_path / "k.parquet", use_deprecated_int96_timestamps=True)
    assert read_keys(str(tmp_path / "k.parquet"), S3)["since"].combine_chunks() == since


BAD_CSV = {
    "no header": (b"\n\n", "no file has a row"),
    "too many": (b"topic,key\nt,k\nt,k,7\n", "line 3: 3 columns, not 2"),
    "twice": (b"topic,Key,key\nt,k,l\n", "two columns 'key'"),
    "open quote": (b'topic,key\nt,"k\nt,l\nt,m\n', "line 2: not CSV: a quote is not closed"),
    "after a quote": (b'topic,key\nt,"say \\"hi\\""\n', "line 2: not CSV: '\"' in a quoted cell is not doubled"),
    "latin-1": ("topic,key\nt,k\nt,über\n".encode("latin-1"), "line 3: not UTF-8"),
    "a cell that is cut": (
        b"key\nline\rbreak\n",
        "line 2: not CSV: a line ends with \\r alone, or a cell with \\r has no quotes",
    ),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_invalid_csv_is_named_with_its_line(tmp_path, case):
    data, message = BAD_CSV[case]
    (tmp_path / "my keys.csv").write_bytes(data)
    with pytest.raises(InvalidArgument, match=re.escape(f"{tmp_path}/my keys.csv: {message}")):
        read_keys(str(tmp_path / "my keys.csv"), S3)


def fill(path, key):
    """Write a Parquet file of one key."""
    pq.write_table(pa.table({"topic": ["t"], "key": [key]}), path)


def test_a_files_name_is_no_pattern(tmp_path):
    folder = tmp_path / HOSTILE
    folder.mkdir()
    for name in (HOSTILE, "k[1]", *DECOYS):
        fill(folder / f"{name}.parquet", name)
    for path, keys in (
        (folder / f"{HOSTILE}.parquet", [HOSTILE]),
        ((folder / "k[1].parquet").as_uri(), ["k[1]"]),
        (folder, [HOSTILE, "k[1]", *DECOYS]),
    ):
        assert sorted(read_keys(str(path), S3)["key"].to_pylist()) == sorted(keys)


@pytest.mark.parametrize("kind", ["", ".ndjson"])
def test_answers_go_where_they_are_asked_to(spark, tmp_path, kind):
    place = tmp_path / f"out dir {HOSTILE}{kind}"
    write_answers(spark.createDataFrame([("t", "k")], "topic string, key string").coalesce(1), str(place), S3)
    assert [path.name for path in tmp_path.iterdir()] == [place.name] and (place / "_SUCCESS").exists()
    assert rows(spark, place if kind else next(place.glob("*.parquet"))) == [("t", "k")]


@pytest.mark.parametrize("kind", ["", ".ndjson"])
def test_a_local_command_that_fails_can_be_repeated(spark, tmp_path, kind):
    place, good = f"{tmp_path}/out{kind}", spark.range(3)
    with pytest.raises(DiskFull, match=r"disk of an executor is full.*TMPDIR and a local --out more room"):
        write_answers(good.selectExpr("id", "raise_error('No space left on device')"), place, S3)
    check_out(place, S3)
    write_answers(good, place, S3)


@pytest.mark.long
def test_times_of_day_are_written(spark, tmp_path):
    table = pa.table({"topic": ["t"], "key": ["k"], "at": pa.array([time(10, 11, 12)], pa.time64("ns"))})
    pq.write_table(table, tmp_path / "k.parquet")
    keys, parquet, ndjson = frame_of(spark, tmp_path / "k.parquet"), tmp_path / "out", tmp_path / "out.ndjson"
    for place in (parquet, ndjson):
        write_answers(keys, str(place), S3)
    assert pq.read_table(parquet)["at"].to_pylist() == [time(10, 11, 12)]
    assert rows(spark, ndjson) == [("t", "k", "10:11:12")]
    # Parquet files of Spark lack the nanoseconds
    pq.write_table(table.append_column("on", pa.array([1], pa.timestamp("ns"))), tmp_path / "k.parquet")
    with pytest.raises(InvalidArgument, match=r"k\.parquet: column 'on' has times in nanoseconds: write times in"):
        rows(spark, tmp_path / "k.parquet")
    pq.write_table(table.set_column(2, "at", pa.array([3_600_000_000_001], pa.time64("ns"))), tmp_path / "k.parquet")
    with pytest.raises(InvalidArgument, match=r"k\.parquet: a value does not fit .* would lose data"):
        rows(spark, tmp_path / "k.parquet")


@pytest.mark.long
def test_a_place_that_another_command_took_meanwhile_and_a_type_that_a_format_lacks(spark, tmp_path):
    """Both are known only when the answers are written."""
    frame = spark.createDataFrame([("t", "k")], "topic string, key string").coalesce(1)
    write_answers(frame, str(tmp_path / "out"), S3)
    with pytest.raises(InvalidArgument, match=r"can't be written to .*/out: Directory not empty"):
        write_answers(frame, str(tmp_path / "out"), S3)
    (tmp_path / "k.ndjson").write_text('{"topic": "t", "key": "k", "more": {}}\n')
    with pytest.raises(InvalidArgument, match=r"can't be written to .*/other: .*empty schema"):
        write_answers(frame_of(spark, tmp_path / "k.ndjson"), str(tmp_path / "other"), S3)


class Written:
    """A frame whose tasks end, or raise `error` after a file."""

    def __init__(self, batches, error=None):
        self._batches, self._error = batches, error

    def mapInArrow(self, write, _):  # noqa: N802 - Spark's name
        return SimpleNamespace(toLocalIterator=lambda **_: self._files(write))

    def _files(self, write):
        for batch in write(iter(self._batches)):
            yield (batch.column(0)[0].as_py(),)
        if self._error is not None:
            raise self._error


def test_answers_in_a_storage_are_named_last_and_those_of_a_failed_command_deleted(tmp_path):
    """A reader of the whole prefix would get them too, and a repetition would find the prefix in use."""
    rows, uri = [pa.record_batch({"key": ["k"]})], f"sqlite:///{tmp_path}/out.db"
    with StorageAddress(uri).open() as storage:
        with pytest.raises(KeyboardInterrupt):
            write_answers(Written(rows, KeyboardInterrupt()), uri, S3)
        assert not list(storage.list())
        check_out(uri, S3)
        write_answers(Written(rows), uri, S3)
        (valid,) = storage.get("_SUCCESS").decode().split()
        with pytest.raises(InvalidArgument, match="answers of another command"):
            write_answers(Written(rows), uri, S3)
        assert storage.get("_SUCCESS").decode().split() == [valid] and storage.head(valid).size_bytes
        assert [info.name for info in storage.list()] == ["_SUCCESS", valid]
        assert pq.read_table(io.BytesIO(storage.get(valid))).to_pylist() == [{"key": "k"}]


def test_ndjson_keys_are_read_as_written(tmp_path):
    keys = ["} {", "}x", "\\ud83d", "😀", "a}]"]
    lines = [json.dumps({"topic": "t", "key": key}) for key in keys]
    (tmp_path / "k.ndjson").write_text("\n".join(lines))
    (tmp_path / "l.ndjson").write_text('{"since": 7, "of": {"a": [1]}, "topic": "t", "key": "b"}\n{"since": 0.5}\n')
    table = read_keys(str(tmp_path), S3)
    kinds = {"topic": pa.string(), "key": pa.string(), "since": pa.float64()}
    assert table.schema == pa.schema(kinds | {"of": pa.struct({"a": pa.list_(pa.int64())})})
    assert sorted(filter(None, table["key"].to_pylist())) == sorted([*keys, "b"])
    assert table["since"].drop_null().to_pylist() == [7.0, 0.5]
    wrong = tmp_path / "my keys.ndjson"
    wrong.write_text('{"topic": "t", "key": "k", "since": "now"}\n')
    with pytest.raises(InvalidArgument, match=r"a column has values of several types: .*since"):
        read_keys(str(tmp_path), S3)
    wrong.write_text('{"topic": "t", "key": "k"}\n5\n')
    with pytest.raises(InvalidArgument) as caught:
        read_keys(str(tmp_path), S3)
    assert f"{wrong}: line 2: not a JSON object: b'5" in str(caught.value) and "messages" not in str(caught.value)
    for value in ('"a"', "9223372036854775808"):
        wrong.write_text(f'{{"topic": "t", "key": "k", "n": 1}}\n{{"topic": "t", "key": "k", "n": {value}}}\n')
        with pytest.raises(
            InvalidArgument, match=r"my keys\.ndjson: column 'n' has values of several types, or a number"
        ):
            read_keys(str(wrong), S3)


def test_numbers_that_are_ndjson_keys_keep_their_text_in_long_files_too(tmp_path):
    written = ["10.50", "12345678901234567.25", "-0", "1E+3", "4711"]
    lines = [f'{{"order": {number}, "paid": 1.50}}\n' for number in written]
    (tmp_path / "k.ndjson").write_text("".join(lines) * 2_001)
    table = read_keys(str(tmp_path / "k.ndjson"), S3, "order")
    assert table["order"].to_pylist() == written * 2_001 and set(table["paid"].to_pylist()) == {1.5}


@pytest.mark.long
def test_columns_that_go_through_spark_under_another_type(spark, tmp_path):
    """Spark's JVM knows neither bytes of fixed size nor large lists."""
    table = messages(10)
    table = table.append_column("id", pa.array([bytes(16)] * 10, pa.binary(16)))
    table = table.append_column("large", pa.array([2**64 - 1] * 10, pa.uint64()))
    table = table.append_column("tags", pa.array([["a"]] * 10, pa.large_list(pa.large_string())))
    view, coded = pa.string_view(), pa.array(["a"] * 10).dictionary_encode()
    table = table.set_column(table.column_names.index("topic"), "topic", table["topic"].cast(view))
    table = table.append_column("views", pa.array([["a"]] * 10, pa.list_view(view)))
    table = table.append_column("coded", pa.ListArray.from_arrays(pa.array(range(11), pa.int32()), coded))
    table = table.append_column(
        "inside", pa.StructArray.from_arrays([coded, coded.dictionary_decode().cast(view)], ["d", "v"])
    )
    pq.write_table(table, tmp_path / "m.parquet")
    (row, *_) = frame_of_keys(spark, read_keys(str(tmp_path), S3Options())).collect()
    assert (row.id, row.tags, row.views, row.coded) == (bytes(16), ["a"], ["a"], ["a"])
    assert (row.large, type(row.large).__name__) == (2**64 - 1, "Decimal")
    assert row.inside.asDict() == {"d": "a", "v": "a"}


def test_keys_stay_batches_of_arrow_in_java(spark):
    """As rows, a million keys fill the gibibyte of memory that Spark has by default, and it hangs."""
    frame = frame_of_keys(spark, pa.table({"topic": ["t"] * 100, "key": [f"k-{number}" for number in range(100)]}))
    assert "LocalTableScan" not in frame._jdf.queryExecution().executedPlan().toString() and frame.count() == 100


def test_bad_parquet_keys_are_named_with_their_file(spark, tmp_path):
    path = tmp_path / "my keys, 2%20.parquet"
    path.write_bytes(b"PAR1 this is none, and long enough for a footer")
    with pytest.raises(CorruptFile) as caught:
        rows(spark, path)
    assert f"{path}: " in str(caught.value) and "Parquet" in str(caught.value)
    wide = pa.array([1], pa.decimal256(40))
    pq.write_table(pa.table({"topic": ["t"], "key": ["k"], "wide": wide}), path)
    with pytest.raises(InvalidArgument, match="Spark has no type of a column of the keys: "):
        rows(spark, path)
