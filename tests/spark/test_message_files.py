"""Files of messages as tasks read them: each message once, with the entries that `ingest` and Spark's reader make."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from tests.spark.entries import BEGIN_MS, messages
from tiered_index import IndexConfig
from tiered_index.connectors.files.message_files import open_source
from tiered_index.connectors.files.rows.fields import Fields
from tiered_index.connectors.files.rows.parquet import ParquetTable
from tiered_index.connectors.files.rows.places import LocalFile
from tiered_index.errors import InvalidArgument
from tiered_index.format.layout import PRESETS
from tiered_index.server.entries import parsed
from tiered_index.server.http import wire
from tiered_index.service.write.validation import TopicTable, batch_columns
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.writing.census import HAS_KEY
from tiered_index.spark.writing.files import MessageFiles, MessagePart, PartsReader
from tiered_index.spark.writing.sources import FIELDS, entries_of, entry_frame
from tiered_index.storage.opening import open_storage

SCHEMA = PRESETS["native"].schema
CONFIG = IndexConfig(storage="file:///nowhere")
COUNT = 1_500


Parts = tuple[PartsReader, Sequence[MessagePart]]


def reader_of(source: object, columns: Any = None) -> Parts:
    fields = Fields(columns or {}, {}, SCHEMA)
    return PartsReader(fields, CONFIG, StorageAddress), MessageFiles.of([str(source)], fields, CONFIG).parts


def read(of_parts: Parts, *names: str) -> list[pa.RecordBatch]:
    reader, parts = of_parts
    return list(reader(parts, names or FIELDS))


def numbers(batches: list[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """Return the stored values of entries with a key, in order."""
    values_of_entries: list[tuple[Any, ...]] = []
    for batch in batches:
        keyed = batch.filter(pc.is_valid(batch.column("key"))).select(FIELDS)
        columns = batch_columns(keyed, SCHEMA, TopicTable()).columns
        values_of_entries += zip(*(values.tolist() for values in columns.values()), strict=True)
    return sorted(values_of_entries)


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


@pytest.fixture
def parts_of_rows(monkeypatch: Any) -> Callable[[int], None]:
    """Return a function that sets the fewest rows of a part."""
    return lambda rows: monkeypatch.setattr("tiered_index.spark.writing.files._LEAST_ROWS", rows)


def listed(table: pa.Table) -> pa.Table:
    keys = [["a", "b", "a"], [], None, ["c"], ["d", "e"]] * (COUNT // 5)
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


def test_entries_are_those_that_spark_makes(spark: Any, tmp_path: Path) -> None:
    for shape, (made, options) in SHAPES.items():
        path = tmp_path / f"{shape}.parquet"
        pq.write_table(made(messages(COUNT)), path, row_group_size=300, **options)
        batches = read(reader := reader_of(path))
        theirs = entry_frame(spark.read.parquet(str(path)), {}, SCHEMA).toArrow().to_batches()
        assert numbers(batches) == numbers(theirs) and len(numbers(batches)) >= 900, shape
        keyed = [key for batch in read(reader, "topic", HAS_KEY) for key in batch.column(HAS_KEY).to_pylist()]
        assert (len(keyed), sum(keyed)) == (sum(map(len, theirs)), len(numbers(theirs))), shape
    table = messages(COUNT).rename_columns(["topic", "queue_id", "order_id", "offset", "size", "timestamp_ms"])
    pq.write_table(table, path := tmp_path / "m.parquet")
    columns = {"key": "order_id", "topic": F.lit("orders"), "size": F.lit(7)}
    entries = partial(entries_of, spark, str(path), schema=SCHEMA, config=CONFIG, address_of=StorageAddress)
    theirs = entry_frame(spark.read.parquet(str(path)), columns, SCHEMA).toArrow().to_batches()
    made: Any = entries(columns=columns)
    assert numbers(read((made.read, made.parts))) == numbers(theirs)
    with pytest.raises(InvalidArgument, match="columns: key is an expression, which needs a DataFrame: read the files"):
        entries(columns={**columns, "key": F.upper("order_id")})
    with pytest.raises(InvalidArgument, match="column 'topic' has the type int64, but must have text"):
        entries(columns={"key": "order_id", "topic": F.lit(5)})


@pytest.mark.parametrize("lacks", [None, "", "whole"])
def test_the_messages_with_a_key_are_counted_without_reading_keys(
    tmp_path: Path, monkeypatch: Any, parts_of_rows: Any, lacks: Any
) -> None:
    """If statistics do not say that each row of a row group has a key, its keys are read."""
    monkeypatch.setattr("tiered_index.connectors.files.rows.parquet.BATCH_ROWS", 10)
    table = messages(100)
    keys = table["key"].to_pylist()
    keys[70:72] = keys[70:72] if lacks == "whole" else [lacks] * 2
    path = tmp_path / "m.parquet"
    pq.write_table(with_column(table, "key", pa.array(keys)), path, row_group_size=50)
    wanted: list[tuple[str, ...]] = []
    all_rows = ParquetTable.read

    def read_rows(self: Any, names: Any, start: int = 0) -> Any:
        wanted.append(tuple(names))
        return all_rows(self, names, start)

    monkeypatch.setattr(ParquetTable, "read", read_rows)
    parts_of_rows(50)
    keyed = [key for batch in read(reader_of(path), "topic", HAS_KEY) for key in batch.column(HAS_KEY).to_pylist()]
    assert (len(keyed), sum(keyed)) == (100, 100 if lacks == "whole" else 98)
    assert ["key" in names for names in wanted] == [False, lacks != "whole"]


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
    return f"{where}/"


def test_files_of_a_table_whose_columns_changed_in_time(tmp_path: Path) -> None:
    """As in Iceberg's tables, columns get added, moved and renamed, and get wider types."""
    first = messages(10)
    second = with_column(first, "offset", first["offset"].cast(pa.int32()))
    second = timed(pa.timestamp("us", "UTC"), second).append_column("note", second["key"])
    tables = {"a": timed(pa.timestamp("ms"), first), "b": second.select(second.column_names[::-1])}
    source = put_all(tables, tmp_path, "stored")
    assert numbers(read(reader_of(source))) == sorted(2 * numbers(first.to_batches()))
    with pytest.raises(InvalidArgument, match=r"a\.parquet: give a column 'note' \(key\); it has"):
        reader_of(source, {"key": "note"})
    put_all({"c": with_column(first, "timestamp_ms", pa.array(range(10), pa.int32()).cast(pa.date32()))}, tmp_path, "l")
    with pytest.raises(InvalidArgument, match=r"c\.parquet: column 'timestamp_ms' has the type date32"):
        reader_of(source)


@pytest.mark.parametrize("lists", [False, True])
def test_a_needed_column_without_a_type_is_an_error(tmp_path: Path, lists: bool) -> None:
    """Pandas writes an empty column without a type. If the build skipped it, its rows would be messages without a
    key.
    """
    table = messages(10).append_column("topic_id", pa.nulls(10))
    if lists:
        table = with_column(table, "key", pa.array([[key] for key in table["key"].to_pylist()]))
    source = put_all({"a": table, "b": with_column(table, "key", pa.nulls(10))}, tmp_path, "local")
    with pytest.raises(InvalidArgument, match=r"column 'key' has no type in .*b\.parquet, only nulls"):
        reader_of(source)
    # some topics may have an id
    put_all({"c": with_column(table, "topic_id", pa.array([7] * 10))}, tmp_path, "local")
    batches = read(reader_of(source, {"key": "topic"}), "topic_id", "topic")
    assert [[*set(b.column("topic_id").to_pylist())] if "topic_id" in b.schema.names else None for b in batches] == [
        None, None, [7],
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["local", "stored"])
def test_a_file_that_another_one_replaces_is_an_error(tmp_path: Path, kind: str) -> None:
    """Before it is read: a build would skip row groups that the driver did not list, or read others in a second step.

    Meanwhile: another file may differ only in some values of the second row group.
    """
    table = messages(10)
    other = with_column(table, "size", pa.array([*table["size"].to_pylist()[:5], *[7] * 5], pa.int32()))
    layout: dict[str, Any] = {"row_group_size": 5, "compression": "none", "use_dictionary": False}
    replaced = pytest.raises(InvalidArgument, match=r"m\.parquet was replaced while it was read: use a copy")
    for rows in (1, 5, 7):
        reader = reader_of(put_all({"m": table}, tmp_path, kind, **layout))
        put_all({"m": table}, tmp_path, kind, **layout | {"row_group_size": rows})
        with replaced:
            read(reader, "key")
    reader, parts = reader_of(put_all({"m": table}, tmp_path, kind, **layout))
    batches = reader(parts, ["size"])
    assert next(batches)["size"].to_pylist() == table["size"].to_pylist()[:5]
    put_all({"m": other}, tmp_path, kind, **layout)
    with replaced:
        list(batches)


def test_parts_have_each_message_once(tmp_path: Path, monkeypatch: Any, parts_of_rows: Any) -> None:
    parts_of_rows(100)
    monkeypatch.setattr("tiered_index.spark.writing.files._PART_BYTES", 137)
    table = messages(COUNT)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    fields = Fields({}, {}, SCHEMA)
    files = MessageFiles.of([str(tmp_path)], fields, CONFIG, cores=4)
    assert 7 < len(files.parts) < 16 and files.rows == COUNT
    assert numbers(read((PartsReader(fields, CONFIG, StorageAddress), files.parts))) == numbers(table.to_batches())
    (tmp_path / "m.ndjson").write_bytes(data := lines(*({"offset": n, "keys": [str(n)]} for n in range(40))))
    reader = reader_of(tmp_path / "m.ndjson")
    assert len(reader[1]) == -(-len(data) // 137)
    assert [n for batch in read(reader) for n in batch.column("offset").to_pylist()] == list(range(40))
    assert numbers(read(reader_of(tmp_path / "*.parquet"))) == numbers(table.to_batches())
    (tmp_path / "m").write_bytes(gzip.compress(data))
    assert [n for batch in read(reader_of(tmp_path / "m")) for n in batch.column("offset").to_pylist()] == [*range(40)]


PLACE = {"topic": "t", "queue_id": 1, "offset": 1, "size": 1, "timestamp_ms": BEGIN_MS}


def lines(*changes: dict[str, Any]) -> bytes:
    return b"".join(json.dumps({**PLACE, "keys": ["k"], **change}).encode() + b"\n" for change in changes)


def test_a_task_and_the_service_take_the_keys_that_ingest_takes(tmp_path: Path) -> None:
    texts = ["10.50", "-0", "1E+3", "12345678901234567.25", '"k"', '["a", 1.50, ""]', '""', "null"]
    data = "".join(f'{{**, "key": {text}}}\n' for text in texts).replace("{**", json.dumps(PLACE)[:-1]).encode()
    (path := tmp_path / "m.ndjson").write_bytes(data)
    (batch,) = open_source(LocalFile(path)).batches(0)
    keys = [key for record in batch.records() if record.message is not None for key in record.message.keys]
    assert keys == [*texts[:4], "k", "a", "1.50"]
    batches = read(reader_of(path), "key", HAS_KEY)
    assert [key for batch in batches for key in batch.column("key").to_pylist()] == [*keys, None, None]
    assert pa.table(parsed(data, wire.NDJSON, 1 << 20).columns)["key"].to_pylist() == keys


def test_messages_have_a_row_for_each_key_and_one_without_key(tmp_path: Path) -> None:
    changes: tuple[dict[str, Any], ...] = ({"keys": ["a", "b", "a"]}, {"keys": []}, {"timestamp_ms": "2024-01-01"})
    path, topic_ids = tmp_path / "m.ndjson", []
    for more, extra in (((), []), (({"topic_id": 3},), ["k"]), (({"keys": ["", "c"]}, {"keys": [""]}), ["c", None])):
        path.write_bytes(lines(*changes, *more))
        batches = read(reader_of(path), "key", "topic_id", HAS_KEY)
        keys = [key for batch in batches for key in batch.column("key").to_pylist()]
        assert sorted(keys, key=str) == sorted(["a", "b", "k", None, *extra], key=str)
        counted = [batch.column(HAS_KEY) for batch in read(reader_of(path), "topic", HAS_KEY)]
        assert sorted(pa.chunked_array(counted).to_pylist()) == sorted(key is not None for key in keys)
        topic_ids += [b.column("topic_id").to_pylist() for b in batches if "topic_id" in b.schema.names]
    assert [3] in topic_ids
    path.write_bytes(lines({}) + lines({})[:-9])
    with pytest.raises(InvalidArgument, match=r"m\.ndjson: the last line has no newline"):
        read(reader_of(path))


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_folders_may_have_values_of_fields(s3: Any, tmp_path: Path, kind: str) -> None:
    table, folder = messages(50), tmp_path / "files"
    names = ["a.parquet", "b.PARQUET", "c.pq", "part-00003", "d.parquet.tmp", "_hidden", "_temporary/0/e.parquet"]
    for number, name in enumerate(names):
        path = folder / f"topic={number % 2}07" / "queue_id=3" / "_at=2026-11-21 01%3A00" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(10 * number, 10).drop_columns(["topic", "queue_id"]), path)
    source = str(folder)
    if kind == "s3":
        place, mark = f"s3://{s3.new_bucket()}/m", f"?endpoint_url={s3.endpoint_url}&addressing_style=path"
        with open_storage(place + mark) as storage:
            for path in filter(Path.is_file, folder.rglob("*")):
                key = f"m/{path.relative_to(folder).as_posix()}"
                storage.client.put_object(Bucket=storage.bucket, Key=key, Body=path.read_bytes())
            for ignored in ("m/", "m/topic=007/"):
                storage.client.put_object(Bucket=storage.bucket, Key=ignored, Body=b"")
        source = place + mark
    table_read = pa.concat_tables(pa.Table.from_batches([batch]) for batch in read(reader_of(source)))
    assert sorted(table_read["offset"].to_pylist()) == table["offset"].to_pylist()
    assert set(table_read["topic"].to_pylist()) == {"007", "107"} and set(table_read["queue_id"].to_pylist()) == {3}
    if kind == "local":
        topics = dict(zip(table_read["offset"].to_pylist(), table_read["topic"].to_pylist(), strict=True))
        topics_in_order = [topics[offset] for offset in table["offset"].to_pylist()]
        assert topics_in_order == [f"{n // 10 % 2}07" for n in range(50)]
        pq.write_table(table, folder / "topic=007" / "f.parquet")
        with pytest.raises(InvalidArgument, match=r"column 'topic' is in .*f\.parquet and in the name of its folder"):
            reader_of(source)
    else:
        # a folder's own name, with the escapes of a URI or without
        for named in ("_at=2026-11-21 01%3A00", "_at=2026-11-21%2001%253A00"):
            source = f"{place}/topic=007/queue_id=3/{named}/a.parquet{mark}"
            with pytest.raises(InvalidArgument, match=r"a\.parquet: column 'topic' is missing"):
                reader_of(source)
        # a source is read at the endpoint of the index, also to find out whether it is in a table
        of_index = CONFIG.changed(storage=place + mark)
        files = MessageFiles.of([place.replace("s3:", "s3a:")], Fields({}, {}, SCHEMA), of_index)
        assert {part.constants["topic"] for part in files.parts} == {"007", "107"}
        with open_storage(place + mark) as storage:
            storage.client.put_object(Bucket=storage.bucket, Key="m/_delta_log/0.json", Body=b"{}")
        for inside in ("topic=007", "topic=007/**/*.parquet"):
            with pytest.raises(InvalidArgument, match=r"/m is a table \(_delta_log/\)"):
                MessageFiles.of([f"{place}/{inside}"], Fields({}, {}, SCHEMA), of_index)


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("topic=__HIVE_DEFAULT_PARTITION__", "the folder topic=__HIVE_DEFAULT_PARTITION__ has no text for a field"),
        ("queue_id=1_0", "the folder queue_id=1_0 has no integer for a field"),
        ("offset=100", r"column 'offset' is in .*m\.ndjson and in the name of its folder"),
    ],
)
def test_a_folder_without_a_value_or_with_another_than_the_lines_is_an_error(
    tmp_path: Path, folder: str, problem: str
) -> None:
    """As topics, nulls of Spark would become entries of a topic with Spark's name for them."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "m.ndjson").write_bytes(lines({}))
    with pytest.raises(InvalidArgument, match=problem):
        read(reader_of(tmp_path))
    header, cells = ",".join(PLACE), ",".join(map(str, PLACE.values()))
    (tmp_path / folder / "m.ndjson").rename(tmp_path / "m.ndjson")
    (tmp_path / "offset=7").mkdir()
    (tmp_path / "offset=7" / "m.csv").write_text(f"key,{header}\nk,{cells}\n")
    with pytest.raises(InvalidArgument, match=r"column 'offset' is in .*m\.csv and in the name of its folder"):
        reader_of(tmp_path)


def test_a_file_that_several_sources_name_is_read_once(tmp_path: Path) -> None:
    (path := tmp_path / "m.ndjson").write_bytes(lines({}))
    files = MessageFiles.of([str(tmp_path), str(path), f"{tmp_path}/*.ndjson"], Fields({}, {}, SCHEMA), CONFIG)
    assert [part.uri for part in files.parts] == [path.as_uri()]
    (tmp_path / "topic=t").mkdir()
    (path := tmp_path / "topic=t" / "m.csv").write_text("key,topic,queue_id,offset,size,timestamp_ms\n")
    with pytest.raises(InvalidArgument, match=r"m\.csv is in several sources, with different values of its folders"):
        MessageFiles.of([str(path.parent), str(tmp_path)], Fields({}, {}, SCHEMA), CONFIG)


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    files, elsewhere = tmp_path / "files", tmp_path / "elsewhere"
    for folder in (files / "day=1", elsewhere):
        folder.mkdir(parents=True)
        pq.write_table(messages(10), folder / "a.parquet")
    (files / "b.parquet").symlink_to(elsewhere / "a.parquet")
    assert len(numbers(read(reader_of(files)))) == 20
    (elsewhere / "c.parquet").symlink_to("a.parquet")
    (files / "day=2").symlink_to(elsewhere)
    (files / "day=1" / "up").symlink_to("..")
    assert len(numbers(read(reader_of(files)))) == 40
