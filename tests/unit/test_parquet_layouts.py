"""Text and lists of Parquet files are read in every layout in which Arrow's writers declare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tiered_index import IndexReader
from tiered_index.sources.parquet import ParquetTable
from tiered_index.sources.places import LocalFile

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
    kind_of, index = next(made for is_so, made in of_kind.items() if is_so(kind))
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
    for shared in ([], ["topic"]):
        read = ParquetTable(LocalFile(tmp_path / "m.parquet"))
        ((_, rows),) = read.read_group(0, table.column_names, shared=shared)
        assert rows.to_pylist() == table.to_pylist()


def test_columns_of_other_tools_in_one_file_go_through_every_command(tmp_path: Path) -> None:
    index = ("--root", str(tmp_path / "root"), "--storage", f"file://{tmp_path}/storage")
    keys = lists_of(pa.large_list_view(pa.string_view()))
    pq.write_table(messages(pa.string_view(), keys), tmp_path / "m.parquet")
    done = run_here("ingest", str(tmp_path / "m.parquet"), *index, "--slots", "100", "--items", "1000", "--wait")
    assert done.code == 0, done.err
    with IndexReader.open(index[3]) as reader:
        assert [item.offset for item in reader.query("t", "b")] == [2, 1]
    pq.write_table(pa.table({"topic": ["t"], "key": pa.array(["b"], pa.string_view())}), tmp_path / "keys.parquet")
    done = run_here("query", "--keys", str(tmp_path / "keys.parquet"), *index[2:], "--json")
    assert done.code == 0 and done.out.count('"offset"') == 2, (done.out, done.err)
    assert run_here("export", *index[2:], "--out", str(tmp_path / "e.parquet")).code == 0
    exported = pq.read_table(tmp_path / "e.parquet")
    place = exported.column_names.index("topic")
    viewed = exported.set_column(place, "topic", exported["topic"].cast(pa.string_view()))
    pq.write_table(viewed, tmp_path / "v.parquet")
    again = ("--root", str(tmp_path / "again"), "--storage", f"file://{tmp_path}/other")
    done = run_here("ingest", str(tmp_path / "v.parquet"), *again, "--wait")
    assert done.code == 0, done.err
    with IndexReader.open(again[3]) as reader:
        assert [item.offset for item in reader.query("t", "b")] == [2, 1]
