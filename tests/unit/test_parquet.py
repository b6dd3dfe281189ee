"""Parquet files of every layout and coding are read unchanged. Row groups are checked by their stated sizes first."""

import contextlib
import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.support.batches import batch
from tests.support.memory import arrow_memory
from tiered_index.connectors.files.rows import parquet
from tiered_index.connectors.files.rows.parquet import ParquetTable
from tiered_index.connectors.files.rows.places import LocalFile, StoredFile
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.storage.opening import open_storage

# Polars and DataFusion write views
TEXTS = [
    pa.string_view(),
    pa.large_string(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.uint8(), pa.large_string()),
]
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda text: pa.list_(text, 2)]
KEYS = [["k0", "a"], ["k1", "b"], ["k2", "b"]]


def lists_of(kind: pa.DataType) -> pa.Array:
    """Return `KEYS` as an array of lists. Arrow can't make or cast all of these types from Python."""
    flat = pa.array([key for keys in KEYS for key in keys])
    text = kind.value_type
    flat = flat.dictionary_encode().cast(text) if pa.types.is_dictionary(text) else flat.cast(text)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(flat, 2)
    of_kind: Any = {
        pa.types.is_list: (pa.ListArray, pa.int32()),
        pa.types.is_large_list: (pa.LargeListArray, pa.int64()),
        pa.types.is_list_view: (pa.ListViewArray, pa.int32()),
        pa.types.is_large_list_view: (pa.LargeListViewArray, pa.int64()),
    }
    kind_of, index = next(kind_and_index for is_so, kind_and_index in of_kind.items() if is_so(kind))
    if kind_of in (pa.ListViewArray, pa.LargeListViewArray):
        return kind_of.from_arrays(pa.array([0, 2, 4], index), pa.array([2, 2, 2], index), flat)
    return kind_of.from_arrays(pa.array([0, 2, 4, 6], index), flat)


def messages(topic: pa.DataType, keys: pa.Array) -> pa.Table:
    topics = pa.array(["t"] * 3)
    topics = topics.dictionary_encode().cast(topic) if pa.types.is_dictionary(topic) else topics.cast(topic)
    numbers = {name: list(range(3)) for name in ("queue_id", "offset", "size")}
    return pa.table({"topic": topics, "keys": keys, "timestamp_ms": [1_700_000_000_000] * 3, **numbers})


@pytest.mark.parametrize("text", TEXTS, ids=str)
@pytest.mark.parametrize("of", LISTS)
def test_every_layout_is_read(tmp_path: Path, text: pa.DataType, of: Any) -> None:
    pq.write_table(table := messages(text, lists_of(of(text))), tmp_path / "m.parquet")
    ((_, rows),) = ParquetTable(LocalFile(tmp_path / "m.parquet")).read(table.column_names)
    assert rows.to_pylist() == table.to_pylist()


# before any test reads a file
OWN = pa.default_memory_pool().backend_name


def test_a_file_is_read_with_memory_of_the_system_and_the_program_keeps_its_own(tmp_path):
    pq.write_table(pa.table({"key": [f"key-{number}" for number in range(100_000)]}), tmp_path / "m.parquet")
    before = pa.system_memory_pool().bytes_allocated()
    ((_, rows),) = ParquetTable(LocalFile(tmp_path / "m.parquet")).read(["key"])
    assert pa.system_memory_pool().bytes_allocated() - before >= rows.nbytes // 2
    assert pa.default_memory_pool().backend_name == OWN


BOUND = 1 << 20
LONG = "x" * (1 << 18)


def written(path: Path, keys: Any, encoding: str = "PLAIN", **options: Any) -> Path:
    """Write one column `key` as one row group."""
    name = "key" if keys.type == pa.string() else "key.list.element"
    how = {"use_dictionary": False, "column_encoding": {name: encoding}, "write_statistics": False}
    pq.write_table(pa.table({"key": keys}), path, write_batch_size=1, **how, **options)
    return path


def test_a_row_group_that_states_too_much_for_its_rows_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_ROW_GROUP_ROW_BYTES", BOUND)
    path = written(tmp_path / "m.parquet", pa.array([LONG * 5] * 10), compression="zstd", row_group_size=5)
    assert path.stat().st_size < 20_000
    said = r"m\.parquet: row group 0 states 6,5\d\d,\d{3} bytes for 5 rows, but a row may have 1,048,576 bytes: write"
    with arrow_memory() as pool, pytest.raises(InvalidArgument, match=said):
        list(parquet.ParquetTable(LocalFile(path)).read(["key"]))
    assert pool.max_memory() < BOUND
    monkeypatch.setattr(parquet, "MAX_ROW_GROUP_ROW_BYTES", 2 * BOUND)
    assert sum(len(rows) for _, rows in parquet.ParquetTable(LocalFile(path)).read(["key"])) == 10


def test_rows_are_read_in_batches_by_the_stated_size_of_their_row_group(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_BYTES", BOUND)
    path = written(tmp_path / "m.parquet", pa.array([LONG] * 40), compression="zstd", data_page_size=1 << 16)
    with arrow_memory() as pool:
        sizes = [rows.nbytes for _, rows in parquet.ParquetTable(LocalFile(path)).read(["key"])]
    assert sum(sizes) > 40 * len(LONG) and max(sizes) <= BOUND and pool.max_memory() < 8 * BOUND


@pytest.mark.parametrize(
    ("encoding", "compression"),
    [
        ("PLAIN", "lz4"),
        ("DELTA_LENGTH_BYTE_ARRAY", "none"),
        ("DELTA_BYTE_ARRAY", "snappy"),
        ("DELTA_BYTE_ARRAY", "gzip"),
        ("RLE_DICTIONARY", "brotli"),
        ("RLE_DICTIONARY", "zstd"),
    ],
)
def test_files_of_any_coding_are_read_whole(tmp_path, monkeypatch, encoding, compression):
    drawn = random.Random(f"{encoding}{compression}")
    texts = [f"{drawn.randrange(300):04}" * drawn.randrange(1, 40) for _ in range(1_000)]
    flat = [text if drawn.random() < 0.9 else None for text in texts]
    cuts = sorted({0, len(texts), *(drawn.randrange(len(texts)) for _ in range(400))})
    lists = [texts[begin:end] if drawn.random() < 0.9 else None for begin, end in itertools.pairwise(cuts)]
    lists += [[]] * 5
    storage = open_storage(f"memory://{tmp_path.name}")
    cases = itertools.product((32 << 20, 50_000), (flat, lists), ("1.0", "2.0"))
    for number, (bound, keys, version) in enumerate(cases):
        monkeypatch.setattr(parquet, "BATCH_BYTES", bound)
        path, path_of_keys = tmp_path / "m.parquet", "key" if keys is flat else "key.list.element"
        options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {path_of_keys: encoding}}
        if encoding == "RLE_DICTIONARY":
            # pages without a dictionary follow a full dictionary
            options = {"use_dictionary": True, "dictionary_pagesize_limit": 5_000}
        options |= {"compression": compression, "data_page_version": version, "data_page_size": 4_000}
        pq.write_table(pa.table({"n": range(len(keys)), "key": keys}), path, write_batch_size=50, **options)
        storage.put(str(number), path.read_bytes())
        for place in (LocalFile(path), StoredFile(str(number), storage, str(number), path.stat().st_size)):
            groups = [rows for _, rows in parquet.ParquetTable(place).read(["n", "key"])]
            assert [value for rows in groups for value in rows.column("key").to_pylist()] == keys
            assert [n for rows in groups for n in rows.column("n").to_pylist()] == list(range(len(keys)))


@pytest.mark.parametrize("form", ["text", "field of a structure", "list", "columns of numbers"])
@pytest.mark.parametrize("store_schema", [True, False])
def test_a_few_bytes_that_many_cells_repeat_are_read_in_small_batches(tmp_path, monkeypatch, form, store_schema):
    """A file of 1.3 MB, whose rows had the same text of 10 kB, took 2 GiB."""
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1 << 20)
    count, number = 20_000, pa.array(range(20_000))
    bodies = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), ["x" * 10_000])
    if form == "columns of numbers":
        table = pa.table({"n": number, **{f"c{each}": pa.repeat(0, count) for each in range(200)}})
    elif form == "list":
        bodies = bodies.cast(pa.string())[:2000]
        number, count = number[:2000], 2000
        table = pa.table({"n": number, "body": pa.ListArray.from_arrays(range(2001), bodies)})
    else:
        bodies = bodies if form == "text" else pa.StructArray.from_arrays([bodies, number], ["text", "other"])
        table = pa.table({"n": number, "body": bodies})
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path, store_schema=store_schema)
    del table, bodies
    rows = ParquetTable(LocalFile(path))
    with arrow_memory() as pool:
        for start in (0, count // 2):
            end = start
            for first, part in rows.read(rows.schema.names, start):
                assert first == end and part["n"].to_pylist() == [*range(first, first + len(part))]
                end = first + len(part)
                del part
            assert end == count
            # one batch of all texts has 200 MB, and is copied
            assert pool.max_memory() < 100 << 20


def test_a_row_group_that_is_far_larger_than_its_file_is_named_before_it_is_read(tmp_path, monkeypatch):
    """A page of 1 GiB in a file of 34 kB took 1.4 GiB."""
    monkeypatch.setattr(parquet, "LARGE_ROW_GROUP_BYTES", 4 << 20)
    path = tmp_path / "rows.parquet"
    table = pa.table({"n": range(8), "body": ["0" * (1 << 20)] * 8})
    pq.write_table(table, path, use_dictionary=False, compression="zstd", data_page_size=1 << 30)
    rows = ParquetTable(LocalFile(path))
    said = r"rows.parquet: row group 0 states 8,\d+,\d+ bytes, more than 1,000 times those of the file"
    with arrow_memory() as pool, pytest.raises(InvalidArgument, match=said):
        next(rows.read(["n", "body"]))
    assert pool.max_memory() < 1 << 20


@pytest.mark.parametrize("form", ["list", "field of a structure", "map"])
@pytest.mark.parametrize("most", ["of a row", "of a file"])
def test_lists_of_far_more_items_than_rows_may_have_are_named_before_they_are_read(tmp_path, monkeypatch, form, most):
    """A row of 60 million items in a file of 900 bytes took 784 MiB."""
    count, rows = 200_000, 1 if most == "of a row" else 1000
    monkeypatch.setattr(parquet, "MAX_ROW_KEYS", 100_000 if most == "of a row" else 1 << 20)
    monkeypatch.setattr(parquet, "LARGE_ITEMS", 1 << 20 if most == "of a row" else 50_000)
    monkeypatch.setattr(parquet, "MAX_ROW_GROUP_RATIO", 1)
    items = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), ["a"]).cast(pa.string())
    ends = pa.array(range(0, count + 1, count // rows), pa.int32())
    column, path = pa.ListArray.from_arrays(ends, items), tmp_path / "rows.parquet"
    name = "k"
    if form == "map":
        column = pa.MapArray.from_arrays(ends, items, items)
    elif form == "field of a structure":
        column, name = pa.StructArray.from_arrays([column], ["tags"]), "k.tags"
    pq.write_table(pa.table({"n": range(rows), "k": column}), path)
    assert path.stat().st_size < 20_000
    table = ParquetTable(LocalFile(path))
    said = rf"rows.parquet: row group 0 states 200,000 items of {name}\S* in {rows:,} rows, but a row may have"
    with arrow_memory() as pool, pytest.raises(InvalidArgument, match=said):
        next(table.read(["n", name]))
    assert pool.max_memory() < 1 << 20
    assert sum(len(part) for _, part in table.read(["n"])) == rows
    monkeypatch.setattr(parquet, "MAX_ROW_KEYS", 1 << 20)
    monkeypatch.setattr(parquet, "LARGE_ITEMS", 1 << 20)
    assert sum(len(part) for _, part in table.read(["n", name])) == rows


def test_pieces_of_many_columns_have_no_more_bytes_than_those_of_few(tmp_path, monkeypatch):
    path, pieces, opened = tmp_path / "wide.parquet", [], pq.ParquetFile
    pq.write_table(pa.table({f"c{number}": [number] for number in range(256)}), path)
    table = ParquetTable(LocalFile(path))
    monkeypatch.setattr(
        pq, "ParquetFile", lambda *place, **how: pieces.append(how["buffer_size"]) or opened(*place, **how)
    )
    for names in (["c0"], table.schema.names):
        assert [len(part) for _, part in table.read(names)] == [1]
    assert pieces == [1 << 20, (64 << 20) // 256]


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_row_group_of_an_object_is_read_in_pieces(tmp_path, monkeypatch, is_large):
    monkeypatch.setattr(parquet, "LARGE_ROW_GROUP_BYTES", 1 << 20 if is_large else 1 << 30)
    monkeypatch.setattr(parquet, "_PIECE_BYTES", 1 << 18)
    monkeypatch.setattr(parquet, "_LARGE_PIECE_BYTES", 1 << 18)
    texts = [random.Random(each).randbytes(500).hex() for each in range(4000)]
    table = pa.table({"n": range(4000), "body": texts})
    pq.write_table(table, tmp_path / "rows.parquet", use_dictionary=False, data_page_size=1 << 16, write_batch_size=64)
    with contextlib.closing(open_storage(tmp_path.as_uri())) as storage:
        sizes_read = []
        ranged = storage.get_range
        monkeypatch.setattr(storage, "get_range", lambda *range_: (sizes_read.append(range_[2]), ranged(*range_))[1])
        size_bytes = (tmp_path / "rows.parquet").stat().st_size
        rows = ParquetTable(StoredFile("u", storage, "rows.parquet", size_bytes))
        sizes_read.clear()
        read = [text for _, part in rows.read(["n", "body"]) for text in part["body"].to_pylist()]
    assert read == texts
    few_large = max(sizes_read) > 1 << 20 and len(sizes_read) < 6
    assert (max(sizes_read) <= 1 << 19 and len(sizes_read) > 10) if is_large else few_large


@pytest.mark.parametrize("is_field", [False, True], ids=["column", "field of a structure"])
@pytest.mark.parametrize("text", [b"caf\xe9", b"\xed\xa0\x80"])
def test_text_that_is_not_utf_8_is_damage(tmp_path, text, is_field):
    column = pa.array([b"plain", "café".encode(), text], pa.binary()).view(pa.string())
    if is_field:
        column = pa.StructArray.from_arrays([column], ["inner"])
    pq.write_table(pa.table({"name": column}), tmp_path / "a.parquet")
    with pytest.raises(CorruptFile, match="row group 0 can't be read from its row 0 on"):
        list(ParquetTable(LocalFile(tmp_path / "a.parquet")).read(["name"]))


NOW_S = 1_700_000_000


@pytest.mark.parametrize(("unit", "time"), [("us", -1), ("ns", -1), ("int96", (NOW_S + 2**64 // 10**9) * 10**6)])
def test_a_time_of_messages_that_is_out_of_range_never_becomes_another_time(tmp_path, unit, time):
    """As nanoseconds of 64 bits, times of 96 bits would wrap around every 584 years."""
    path, scale = tmp_path / "messages.parquet", 10**9 if unit == "ns" else 10**6
    times = pa.array([NOW_S * scale, time], pa.timestamp("ns" if unit == "ns" else "us"))
    table = pa.table(batch(2, offset=[0, 1], timestamp_ms=times))
    pq.write_table(table, path, use_deprecated_int96_timestamps=unit == "int96")
    place = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/storage")
    run_here("ingest", path, *place, "--slots", 7, "--items", 20)
    items = run_here("query", "t", "k", *place, "--json").document["items"]
    times = {item["offset"]: item["timestamp_ms"] // 1000 for item in items}
    assert times.get(0, NOW_S) == NOW_S
    assert times.get(1) in (None, time // scale) and (unit == "int96" or 1 not in times)
