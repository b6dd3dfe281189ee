"""Further columns, also texts, through a build, a write, a lookup, a scan, the table function and an audit."""

from dataclasses import dataclass

import pyarrow as pa
import pytest

from tests.spark.entries import messages, write_parquet
from tiered_index import IndexConfig, IndexReader, KeyedIndexItem, column
from tiered_index.errors import InvalidArgument
from tiered_index.spark import audit, build, look_up, register

TEXTS = ["日本語の", "Ελλάδα", "", "cafe"]


@dataclass(frozen=True, kw_only=True)
class Place(KeyedIndexItem):
    town: str = column("text", width=12)
    region: int = column(">u2", identity=True)
    price: float = column(">f8")


@pytest.mark.long
def test_further_columns_and_texts_as_strings(spark, tmp_path):
    uri, rows = f"file://{tmp_path}/index", messages(40, days=1).to_pylist()
    for number, row in enumerate(rows):
        row |= {"key": "k", "topic": "t", "town": TEXTS[number % 4], "region": number % 7, "price": number / 4}
    half = pa.Table.from_pylist(rows[:20])
    config = IndexConfig(slots=64, items=100_000, item_type=Place, max_late_s=10**10)
    build(spark, write_parquet(half, tmp_path / "half.parquet"), storage=uri, config=config)
    register(spark)
    rest = spark.createDataFrame(pa.Table.from_pylist(rows[20:]))
    rest.coalesce(1).write.format("tiered_index").mode("append").save(uri)
    expected = {row["offset"]: row["town"] for row in rows}

    def seen(frame):
        assert dict(frame.dtypes)["town"] == "string"
        return {row.offset: row.town for row in frame.collect()}

    keys = spark.createDataFrame([("t", "k")], "topic string, key string")
    load = spark.read.format("tiered_index")
    assert seen(load.load(uri)) == seen(load.option("topic", "t").load(uri)) == expected
    of_queue = {row["offset"]: row["town"] for row in rows if row["queue_id"] == 0}
    assert seen(load.option("topic", "t").option("queues", "0").load(uri)) == of_queue
    assert seen(look_up(spark, keys, storage=uri).frame) == expected
    assert dict(spark.sql(f"SELECT * FROM tiered_index_lookup('{uri}', 't', 'k')").dtypes)["town"] == "string"
    with IndexReader.open(uri) as reader:
        assert {item.offset: item.town for item in reader.query("t", "k")} == expected
    # an identity with another value of a column is another entry
    rows[0]["region"] += 7
    rows[3]["town"] = "Zürich"
    rows[5]["price"] += 0.25
    source = write_parquet(pa.Table.from_pylist(rows), tmp_path / "source.parquet")
    differences = audit(spark, source, storage=uri).differences
    assert differences.counts == {"missing": 1, "extra": 1, "wrong": 2} and differences.unproven == 0
    wrong = [d for d in differences.listed if d.kind == "wrong"]
    assert [(d.offset, d.expected["town"], d.found["town"], d.expected["price"] - d.found["price"]) for d in wrong] == [
        (rows[3]["offset"], "Zürich", "cafe", 0),
        (rows[5]["offset"], rows[5]["town"], rows[5]["town"], 0.25),
    ]
    long = pa.Table.from_pylist([{**rows[0], "town": "é" * 7}])
    with pytest.raises(InvalidArgument, match="row 1: town must be text of at most 12 bytes in UTF-8, and 'ééééééé'"):
        build(spark, write_parquet(long, tmp_path / "long.parquet"), storage=uri, mode="append")
