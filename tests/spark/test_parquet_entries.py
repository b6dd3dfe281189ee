"""Parquet files that tasks read by pyarrow give the entries that Spark's own reader gives."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from tests.spark.entries import messages
from tiered_index.errors import InvalidArgument
from tiered_index.format.layout import PRESETS
from tiered_index.service.write.validation import TopicTable, batch_columns
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.lookup.keys import frame_of_keys, read_keys
from tiered_index.spark.writing import folders
from tiered_index.spark.writing.parquet import HAS_KEY
from tiered_index.spark.writing.sources import FIELDS, Entries, check_source, entries_of, entry_frame
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3.options import S3Options

ADDRESS_OF = partial(StorageAddress, options=S3Options())
SCHEMA = PRESETS["native"].schema
COUNT = 1_500


def entries_in(spark: Any, path: object, columns: dict[str, Any] | None = None) -> Entries:
    return entries_of(spark, str(path), columns or {}, SCHEMA, ADDRESS_OF)


def numbers(batches: list[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """Return the stored values of entries with a key, in order."""
    found: list[tuple[Any, ...]] = []
    for batch in batches:
        kept = batch.filter(pc.is_valid(batch.column("key"))).select(FIELDS)
        columns, _ = batch_columns(kept, SCHEMA, TopicTable())
        found += zip(*(values.tolist() for values in columns.values()), strict=True)
    return sorted(found)


def read_whole(entries: Entries, names: list[str]) -> list[pa.RecordBatch]:
    assert entries.read is not None
    parts = range(len(entries.read.parts))  # type: ignore[attr-defined]
    return list(entries.read([pa.record_batch({"id": pa.array(parts)})], names))


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def listed(table: pa.Table) -> pa.Table:
    keys = [[None, "a", "b", "a"], [], None, [None], ["c"]] * (COUNT // 5)
    return with_column(table, "key", pa.array(keys, pa.list_(pa.string()))).rename_columns(
        ["keys" if name == "key" else name for name in table.column_names]
    )


def timed(kind: pa.DataType, table: pa.Table) -> pa.Table:
    millis = table["timestamp_ms"].cast(pa.timestamp("ms"))
    return with_column(table, "timestamp_ms", millis.cast(pa.timestamp("us")).cast(kind))


SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "as they are": (lambda table: table, {}),
    "lists": (listed, {}),
    "null keys": (lambda table: with_column(table, "key", pa.array(["k", None, "l"] * (COUNT // 3))), {}),
    "a category": (lambda table: with_column(table, "topic", table["topic"].dictionary_encode()), {}),
    "zoned": (partial(timed, pa.timestamp("us", "Europe/Berlin")), {}),
    "int96": (partial(timed, pa.timestamp("us")), {"use_deprecated_int96_timestamps": True}),
    "unsigned": (lambda table: with_column(table, "offset", table["offset"].cast(pa.uint32())), {}),
}


def test_entries_are_those_that_spark_makes(spark: Any, tmp_path: Any) -> None:
    for shape, (made, options) in SHAPES.items():
        path = tmp_path / f"{shape}.parquet"
        pq.write_table(made(messages(COUNT)), path, row_group_size=300, **options)
        entries = entries_in(spark, path)
        found = read_whole(entries, list(FIELDS))
        theirs = entry_frame(spark.read.parquet(str(path)), {}, SCHEMA).toArrow().to_batches()
        assert numbers(found) == numbers(theirs) and len(numbers(found)) >= 900, shape
        counted = read_whole(entries, ["topic", "timestamp_ms", HAS_KEY])
        keyed = np.concatenate([batch.column(HAS_KEY).to_numpy(zero_copy_only=False) for batch in counted])
        assert (len(keyed), keyed.sum()) == (sum(map(len, theirs)), len(numbers(theirs))), shape


def test_columns_by_name_and_constants_are_read_by_tasks(spark: Any, tmp_path: Any) -> None:
    table = messages(COUNT).rename_columns(["topic", "queue_id", "order_id", "offset", "size", "timestamp_ms"])
    pq.write_table(table, tmp_path / "m.parquet")
    columns = {"key": "order_id", "topic": F.lit("orders"), "size": F.lit(7)}
    found = read_whole(entries_in(spark, tmp_path / "m.parquet", columns), list(FIELDS))
    theirs = entry_frame(spark.read.parquet(str(tmp_path / "m.parquet")), columns, SCHEMA)
    assert numbers(found) == numbers(theirs.toArrow().to_batches())
    with pytest.raises(InvalidArgument, match="columns: key is an expression, which needs a DataFrame: read the files"):
        entries_in(spark, tmp_path / "m.parquet", {**columns, "key": F.upper("order_id")})
    assert entries_in(spark, tmp_path / "m.parquet", {"key": "order_id", "topic": "order_id"}).read is not None
    pq.write_table(timed(pa.timestamp("ns"), messages(10)), tmp_path / "ns.parquet")
    found = read_whole(entries_in(spark, tmp_path / "ns.parquet"), list(FIELDS))
    assert numbers(found) == numbers(messages(10).to_batches())
    with pytest.raises(InvalidArgument, match="column 'topic' has the type int64, but must have text"):
        entries_in(spark, tmp_path / "m.parquet", {"key": "order_id", "topic": F.lit(5)})


def put_all(tables: dict[str, pa.Table], folder: Any, kind: str, **layout: int) -> str:
    """Write files of a local folder, or of a storage; return the source."""
    if kind == "local":
        for name, table in tables.items():
            pq.write_table(table, folder / f"{name}.parquet", **layout)
        return str(folder)
    with contextlib.closing(open_storage(where := f"sqlite://{folder}/files.db")) as storage:
        for name, table in tables.items():
            pq.write_table(table, buffer := pa.BufferOutputStream(), **layout)
            storage.put(f"{name}.parquet", buffer.getvalue().to_pybytes())
    return where


def test_files_of_a_table_whose_columns_changed_in_time(spark: Any, tmp_path: Any) -> None:
    """As in Iceberg's tables, columns get added, moved and renamed, and get wider types."""
    first = messages(10)
    second = with_column(first, "offset", first["offset"].cast(pa.int32()))
    second = timed(pa.timestamp("us", "UTC"), second).append_column("note", second["key"])
    tables = {"a": timed(pa.timestamp("ms"), first), "b": second.select(second.column_names[::-1])}
    source = put_all(tables, tmp_path, "stored")
    found = entries_in(spark, source)
    assert numbers(read_whole(found, list(FIELDS))) == sorted(2 * numbers(first.to_batches()))
    with pytest.raises(InvalidArgument, match=r"column 'note' \(key\) is missing; the source has topic"):
        entries_in(spark, source, {"key": "note"})


@pytest.mark.parametrize(("kind", "listed"), [("local", False), ("stored", True)])
def test_a_needed_column_without_a_type_is_an_error(spark: Any, tmp_path: Any, kind: str, listed: bool) -> None:
    """Pandas writes an empty column without a type. If the build skipped it, its rows would be messages without a
    key.
    """
    table = messages(10).append_column("note", pa.nulls(10)).append_column("topic_id", pa.nulls(10))
    if listed:
        table = with_column(table, "key", pa.array([[key] for key in table["key"].to_pylist()]))
    source = put_all({"a": table, "b": with_column(table, "key", pa.nulls(10))}, tmp_path, kind)
    for check in (entries_in, lambda _, *given: check_source(*given, {}, SCHEMA, ADDRESS_OF)):
        with pytest.raises(InvalidArgument, match=r"column 'key' has no type in .*b\.parquet, only nulls"):
            check(spark, source)
    # some topics may have an id
    put_all({"c": with_column(table, "topic_id", pa.array([7] * 10))}, tmp_path, kind)
    found = entries_in(spark, source, {"key": "topic"})
    ids = [row for batch in read_whole(found, ["topic_id"]) for row in batch.column(0).to_pylist()]
    assert sorted(one or 0 for one in ids) == [0] * 20 + [7] * 10


@pytest.mark.parametrize("kind", ["local", "stored"])
def test_hidden_folders_and_tables_are_no_folder_of_files(tmp_path: Any, kind: str) -> None:
    """Uncommitted files of a killed Spark job, and old files of a table, would give entries twice."""
    names = ["a.parquet", "_day=1/b.parquet", "_SUCCESS", "_metadata", ".c.parquet", "_d.parquet"]
    names += ["_temporary/0/_temporary/attempt_1/e.parquet", ".snapshot/f.parquet", "g/.h/i.ndjson", "g/j.txt"]
    where = f"sqlite://{tmp_path}/files.db" if kind == "stored" else f"file://{tmp_path}/files"
    storage = open_storage(where)

    def found() -> list[str]:
        if kind == "stored":
            return [name for _, name in folders.find_stored(ADDRESS_OF, where)]
        return [file.relative_to(tmp_path / "files").as_posix() for file in folders.files_below(tmp_path / "files")]

    def put(name: str) -> None:
        if kind == "stored":
            storage.put(name, b"x")
        else:
            (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "files" / name).write_bytes(b"x")

    with contextlib.closing(storage):
        for name in names:
            put(name)
        assert sorted(found()) == ["_day=1/b.parquet", "a.parquet", "g/j.txt"]
        put("g/_delta_log/00000000000000000000.json")
        with pytest.raises(InvalidArgument, match=r"files is a table \(_delta_log/\)|db is a table \(_delta_log/\)"):
            found()


def test_columns_that_files_have_of_several_kinds_are_no_field(spark: Any, tmp_path: Any) -> None:
    """Parquet stores a date as a number of days."""
    first = messages(10)
    tables = {"a": first, "b": with_column(first, "timestamp_ms", pa.array(range(10), pa.int32()).cast(pa.date32()))}
    with pytest.raises(InvalidArgument, match=r"'timestamp_ms' is date32.* in .*b\.parquet, and int64 in .*a\.pa"):
        entries_in(spark, source := put_all(tables, tmp_path, "local"))
    found = entries_in(spark, source, {"timestamp_ms": "offset"})
    assert sum(map(len, read_whole(found, ["timestamp_ms"]))) == 20


@pytest.mark.parametrize(("kind", "rows"), [("local", 1), ("local", 5), ("stored", 7)])
def test_a_file_that_another_one_replaced_is_an_error(spark: Any, tmp_path: Any, kind: str, rows: int) -> None:
    """A build would skip row groups that were added after the driver listed the file's groups.

    Steps of a build would read other rows if a file has the same groups.
    """
    table = messages(10)
    entries = entries_in(spark, put_all({"m": table}, tmp_path, kind, row_group_size=5))
    put_all({"m": table}, tmp_path, kind, row_group_size=rows)
    with pytest.raises(InvalidArgument, match=r"m\.parquet was replaced while it was read: use a copy"):
        read_whole(entries, ["key"])


@pytest.mark.parametrize("kind", ["local", "stored"])
def test_a_file_that_another_one_replaces_while_it_is_read_is_an_error(spark: Any, tmp_path: Any, kind: str) -> None:
    """The other file differs only in some values of the second row group."""
    table = messages(10)
    other = with_column(table, "size", pa.array([*table["size"].to_pylist()[:5], *[7] * 5], pa.int32()))
    layout = {"row_group_size": 5, "compression": "none", "use_dictionary": False}
    entries = entries_in(spark, put_all({"m": table}, tmp_path, kind, **layout))
    assert entries.read is not None
    rows = entries.read([pa.record_batch({"id": pa.array([0])})], ["size"])
    assert next(rows)["size"].to_pylist() == table["size"].to_pylist()[:5]
    put_all({"m": other}, tmp_path, kind, **layout)
    with pytest.raises(InvalidArgument, match=r"m\.parquet was replaced while it was read: use a copy"):
        list(rows)


def test_columns_that_go_through_spark_under_another_type(spark: Any, tmp_path: Any) -> None:
    """Spark's JVM knows neither bytes of fixed size nor large lists, and no zone means `timestamp_ntz`."""
    table = timed(pa.timestamp("us"), messages(10))
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


def test_files_in_s3_may_have_any_name(s3):
    uri = f"s3://{s3.new_bucket()}/m?endpoint_url={s3.endpoint_url}&addressing_style=path"
    with open_storage(uri) as stored:
        stored.put("good.parquet", b"")
        for ignored in ("m/_spark/a b", "m/", "m/day=1/", "m/day=1_$folder$"):
            stored.client.put_object(Bucket=stored.bucket, Key=ignored, Body=b"")
        assert folders.find_stored(StorageAddress, uri) == [(uri, "good.parquet")]
        stored.client.put_object(Bucket=stored.bucket, Key="m/ts=2026-11-21 01%3A00/p.parquet", Body=b"")
    place, _, parameters = uri.partition("?")
    assert [name for _, name in folders.find_stored(StorageAddress, uri)] == [
        "good.parquet", "ts=2026-11-21 01%3A00/p.parquet",
    ]  # fmt: skip
    # the folder's own name, with the escapes of a URI or without
    for named in ("ts=2026-11-21 01%3A00", "ts=2026-11-21%2001%253A00"):
        [(of_folder, name)] = folders.find_stored(StorageAddress, f"{place}/{named}?{parameters}")
        with StorageAddress(of_folder).open(any_names=True) as stored:
            assert stored.head(name).size_bytes == 0


@pytest.mark.parametrize("kind", ["local", "stored"])
def test_a_folder_is_read_by_sparks_own_rules(spark: Any, tmp_path: Any, kind: str) -> None:
    """Spark's rules decide which files are read, and which columns come from the names of folders."""
    table, folder = messages(50), tmp_path / "files"
    names = ["a.parquet", "b.PARQUET", "c.pq", "part-00003", "d.parquet.tmp", "_hidden", "e.parquet._COPYING_"]
    for number, name in enumerate(names):
        path = folder / f"topic=orders%20{number % 2}" / "queue_id=3" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(10 * number, 10).drop_columns(["topic", "queue_id"]), path)
    uri = str(folder)
    if kind == "stored":
        uri = f"sqlite://{tmp_path}/files.db"
        with open_storage(uri) as storage:
            for path in folder.rglob("*"):
                if path.is_file():
                    storage.put(path.relative_to(folder).as_posix().replace("%20", "_"), path.read_bytes())
    check_source(uri, {}, SCHEMA, ADDRESS_OF)
    [plain] = [read_whole(entries_in(spark, uri), [*FIELDS, HAS_KEY])]
    got = pa.Table.from_batches(plain)
    assert sorted(got["offset"].to_pylist()) == table["offset"].to_pylist()
    blank = " " if kind == "local" else "_"
    assert set(got["topic"].to_pylist()) == {f"orders{blank}0", f"orders{blank}1"}
    assert set(got["queue_id"].to_pylist()) == {3}
    if kind == "local":
        theirs = spark.read.parquet(uri).select("topic", "queue_id", "offset").collect()
        ours = zip(*(got[name].to_pylist() for name in ("topic", "queue_id", "offset")), strict=True)
        assert sorted(map(tuple, theirs)) == sorted(ours)


def test_a_link_to_a_folder_is_not_left_out_in_silence(tmp_path: Any) -> None:
    files, elsewhere = tmp_path / "files", tmp_path / "elsewhere"
    for folder in (files / "day=1", elsewhere):
        folder.mkdir(parents=True)
        (folder / "a.parquet").write_bytes(b"x")
    (files / "b.parquet").symlink_to(elsewhere / "a.parquet")
    assert [file.name for file in folders.files_below(files)] == ["b.parquet", "a.parquet"]
    (files / "day=2").symlink_to(elsewhere)
    with pytest.raises(InvalidArgument, match="day=2 is a link to a folder"):
        folders.files_below(files)


def test_a_folder_that_may_not_be_read_is_not_left_out_in_silence(tmp_path: Any, monkeypatch: Any) -> None:
    for day in ("day=1", "day=2"):
        (tmp_path / day).mkdir()
        pq.write_table(messages(10), tmp_path / day / "a.parquet")
    scan = os.scandir

    def denied(path: Any) -> Any:
        if str(path).endswith("day=1"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(InvalidArgument, match="day=1: Permission denied"):
        folders.files_below(tmp_path)
