"""Tables of Delta and Iceberg that Spark's own writers made (`data/make_tables.py`) are indexed once, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import StaticTable, Table

from tests.integration.cli.command_lines import run_here
from tiered_index import IndexConfig, IndexReader
from tiered_index.errors import InvalidArgument
from tiered_index.spark.tables import build_delta, new_in_delta, new_in_iceberg

TABLES = Path(__file__).parent / "data" / "tables"
CONFIG = IndexConfig(slots=100)


def at_version(name: str, version: int, folder: Path) -> DeltaTable:
    """Return a Delta table as it was at a version."""
    shutil.copytree(TABLES / name, folder, dirs_exist_ok=True)
    for commit in (folder / "_delta_log").glob("*.json"):
        if int(commit.stem) > version:
            commit.unlink()
    return DeltaTable(folder)


class MovedFiles(PyArrowFileIO):
    """Reads the files of a table of Iceberg from another folder than the one that its metadata names."""

    def new_input(self, location: str) -> Any:
        return super().new_input(location.replace("/tmp/tiered-index-golden/golden", str(TABLES)))


def iceberg_table(name: str, io: str = f"{__name__}.MovedFiles") -> Table:
    metadata = max((TABLES / name / "metadata").glob("*.metadata.json"))
    return StaticTable.from_metadata(str(metadata), {"py-io-impl": io})


def test_a_delta_table_is_continued_until_rows_are_deleted(spark: Any, tmp_path: Path, storage: str) -> None:
    folder = tmp_path / "table"

    def entries(version: int) -> int | None:
        built = build_delta(spark, at_version("delta_history", version, folder), storage=storage, config=CONFIG)
        return built and built.entries

    # version 3 is OPTIMIZE
    assert [entries(version) for version in (1, 2, 2, 4)] == [40, 40, None, 20]
    with IndexReader.open(storage) as reader:
        assert [item.offset for item in reader.query("orders", "k3")] == [93, 83, 73, 63, 53, 43, 33, 23, 13, 3]
        before = reader.log_state.number
    with pytest.raises(InvalidArgument, match=r"version 5 \(DELETE\) removed or rewrote rows by deletion vectors"):
        entries(5)
    with IndexReader.open(storage) as reader:
        assert reader.log_state.number == before


@pytest.mark.parametrize(
    ("name", "begin", "problem"),
    [
        ("delta_history", 0, "has deletion vectors: its files have deleted rows"),
        ("delta_checkpoint", 0, "has deletion vectors"),
        ("delta_checkpoint", 2, r"version 2 \(DELETE\) .*by deletion vectors"),
        ("delta_column_mapping", 0, r"has column mapping \(name\)"),
        ("delta_rewritten", 2, r"version 2 \(UPDATE\) removed or rewrote rows, but"),
        ("delta_rewritten", 4, "versions up to 2, but the index has it up to 3"),
    ],
)
def test_a_delta_table_whose_files_are_not_its_rows_is_refused(name: str, begin: int, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        new_in_delta(DeltaTable(TABLES / name), begin)


def test_a_version_that_the_log_has_lost_is_an_error(tmp_path: Path) -> None:
    table = at_version("delta_rewritten", 2, tmp_path)
    (tmp_path / "_delta_log" / f"{1:020}.json").rename(tmp_path / "gone")
    with pytest.raises(InvalidArgument, match="has lost version 1"):
        new_in_delta(table, 1)


def test_columns_that_partition_a_delta_table_are_read(spark: Any, storage: str) -> None:
    """Spark escapes `:` and `/` in the names of folders, and digits stay the text that they are."""
    build_delta(spark, DeltaTable(TABLES / "delta_partitioned"), storage=storage, config=CONFIG)
    with IndexReader.open(storage) as reader:
        assert [item.offset for topic in ("007", "a b:c/ü") for item in reader.query(topic, "k3")] == [3]
        assert [item.offset for item in reader.query("a b:c/ü", "k7")] == [7]


def test_a_delta_table_of_delta_rs_is_continued(tmp_path: Path) -> None:
    table = str(tmp_path)
    for number in range(3):
        write_deltalake(table, pa.table({"key": [f"k{number}"]}), mode="append")
    first, end = new_in_delta(DeltaTable(table))
    assert (len(first), end) == (3, 3) and new_in_delta(DeltaTable(table), 3) == ([], 3)
    later, _ = new_in_delta(DeltaTable(table), 1)
    assert len(later) == 2 and set(later) < set(first)
    DeltaTable(table).optimize.compact()
    assert new_in_delta(DeltaTable(table), 3) == ([], 4)
    DeltaTable(table).delete("key = 'k1'")
    with pytest.raises(InvalidArgument, match=r"version 4 .* removed or rewrote rows"):
        new_in_delta(DeltaTable(table), 3)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("iceberg_position_deletes", "has position deletes: its files have deleted rows"),
        ("iceberg_deletion_vectors", "has deletion vectors: "),
        ("iceberg_equality_deletes", "has equality deletes: "),
    ],
)
def test_an_iceberg_table_with_row_level_deletes_is_refused(name: str, problem: str) -> None:
    for begin in (0, 2):
        with pytest.raises(InvalidArgument, match=problem):
            new_in_iceberg(iceberg_table(name), begin)


def test_a_folder_in_a_table_is_refused(spark: Any, tmp_path: Path) -> None:
    """A partition's folder has files of old versions, too, and rows that a deletion vector removes."""
    delta, iceberg = tmp_path / "delta", tmp_path / "iceberg"
    shutil.copytree(TABLES / "delta_partitioned", delta)
    shutil.copytree(TABLES / "iceberg_position_deletes", iceberg)
    part = next(delta.glob("topic=007/*/*.parquet"))
    (iceberg / "data").mkdir(exist_ok=True)
    shutil.copy(part, iceberg / "data")
    index = ("--root", str(tmp_path / "root"), "--storage", f"file://{tmp_path}/storage")
    for place in (delta / "topic=007", part.parent, iceberg, iceberg / "data"):
        done = run_here("spark", "build", "--source", str(place), *index[2:], "--quiet")
        assert done.code == 2 and "is a table (" in done.err and "build_delta" in done.err, done.err
        assert "is a table (" in run_here("ingest", str(place), *index).err
    for file in (part, iceberg / "data" / part.name):
        assert "is a table (" in run_here("ingest", str(file), *index).err
    assert not (tmp_path / "storage").exists()
