"""The recipes for tables and for Kafka run, the programs of each section one after the other."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.pages import programs, section
from tiered_index.sources.places import local_path


def run(page: str, name: str) -> dict[str, Any]:
    """Run the programs of a section; return what they named."""
    names: dict[str, Any] = {}
    for program in programs(section(page, name)):
        exec(compile(program, page, "exec"), names)
    return names


@pytest.mark.long
def test_an_iceberg_table_is_continued(spark: Any) -> None:
    named = run("spark.md", "An Iceberg table")
    table, new = named["table"], named["new_in_iceberg"]
    assert (len(new(table, 0)[0]), len(new(table, 2)[0])) == (3, 2)
    assert (new(table, 4), new(table, 3)[1]) == (([], 4), 4)
    # the index was filled from a table that was made anew
    with pytest.raises(SystemExit, match="before position 9 has expired or was rolled back"):
        new(table, 9)
    table.delete("order_id = 'order-7'")
    with pytest.raises(SystemExit, match="deleted or overwritten"):
        new(table, 4)
    table.append(named["orders"](2000, 10))
    assert len(new(table, table.last_sequence_number)[0]) == 1
    # names of files have escapes of their own
    apart = named["catalog"].create_table("shop.apart", table.schema())
    with apart.update_spec() as spec:
        spec.add_field("order_id", "identity")
    apart.append(named["orders"](0, 1).set_column(0, "order_id", [["a/b %"]]))
    [uri] = new(apart, 0)[0]
    place = local_path(uri)
    assert "a%252Fb" in uri and place is not None and place.is_file()
    # none of its snapshots would ever be new
    first = named["catalog"].create_table("shop.first", table.schema(), properties={"format-version": "1"})
    first.append(named["orders"](0, 10))
    with pytest.raises(SystemExit, match="format version 1 have number 0"):
        new(first, 1)


def test_a_delta_table_is_continued(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    new, table = run("spark.md", "A Delta table")["new_in_delta"], str(tmp_path)
    for n in range(3):
        deltalake.write_deltalake(table, pa.table({"key": [f"k{n}"]}), mode="append")
    first, at = new(table, 0)
    assert (len(first), at) == (3, 3) and new(table, 3) == ([], 3)
    assert len(new(table, 1)[0]) == 2
    deltalake.DeltaTable(table).optimize.compact()
    assert new(table, 3) == ([], 4)
    deltalake.write_deltalake(table, pa.table({"key": ["k3"]}), mode="append")
    (one,), at = new(table, 3)
    assert one not in first and at == 5
    deltalake.DeltaTable(table).delete("key = 'k1'")
    with pytest.raises(SystemExit, match="version 5 removed rows"):
        new(table, 3)


@pytest.mark.long
def test_records_of_kafka_become_entries_once(spark: Any) -> None:
    found = run("spark-sql.md", "Kafka")
    at = datetime(2023, 11, 15, tzinfo=UTC)
    rows = [
        (b"k", None, "t", 3, 4, at, 0, None),
        (b"", b"12", "t", 3, 5, at, 1, [("trace", None)]),
        ("ü".encode(), b"12", "t", 3, 6, at, 0, [("trace", b"ab")]),
    ]
    entries = [tuple(row)[:5] for row in found["entries_of"](spark.createDataFrame(rows, found["KAFKA"])).collect()]
    assert entries == [("t", 3, "k", 4, 1), ("t", 3, None, 5, 7), ("t", 3, "ü", 6, 11), ("t", 3, "ab", 6, 11)]
