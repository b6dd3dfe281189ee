"""Builds in a local session: a built index answers as the model does, whatever the source."""

import gzip
import json

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

from tests.spark.entries import BEGIN_MS, DAY_MS, check, messages, states, sweep, total, write_parquet
from tiered_index import IndexReader
from tiered_index.errors import InvalidArgument, StorageMisconfigured
from tiered_index.format.keys.hashing import assigned_topic_id
from tiered_index.spark import build
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3.storage import S3Storage


def ndjson(table):
    rows = ({name: value for name, value in row.items() if name != "key"} for row in table.to_pylist())
    return "".join(
        json.dumps(row | {"keys": [key]}) + "\n" for row, key in zip(rows, table["key"].to_pylist(), strict=True)
    ).encode()


def test_a_dataframe_with_names_of_its_own_lists_of_keys_and_timestamps(spark, storage, config):
    keys = [[f"c-{n % 3}", None, f"c-{n % 3}", f"d-{n}"] for n in range(200)]
    rows = [(f"o-{n % 7}", some, n, BEGIN_MS / 1000 + n) for n, some in enumerate([*keys, [], None, [None]])]
    frame = spark.createDataFrame(rows, "order_id string, customers array<string>, pos long, second double")
    frame = frame.withColumn("at", F.timestamp_seconds("second"))
    columns = {"key": "customers", "offset": "pos", "timestamp_ms": "at"}
    columns |= {"topic": F.lit("orders"), "queue_id": F.lit(2), "size": F.lit(9)}
    result = build(spark, frame, storage=storage, columns=columns, config=config)
    assert (result.entries, result.without_key) == (400, 3)
    with IndexReader.open(storage) as reader:
        items = reader.query("orders", "c-1", max_count=1_000).items
        assert [item.offset for item in items] == [n for n in range(199, -1, -1) if n % 3 == 1]
        assert {(item.queue_id, item.size) for item in items} == {(2, 9)}
        assert reader.query("orders", "d-5").items[0].timestamp_ms == BEGIN_MS + 5_000
    columns["key"] = "order_id"
    assert build(spark, frame, storage=storage, columns=columns, config=config, mode="append").entries == 203


def test_source_and_index_in_s3_without_any_hadoop_library(spark, s3, config, tmp_path):
    bucket = s3.new_bucket()
    base, query = f"s3://{bucket}", f"?endpoint_url={s3.endpoint_url}&addressing_style=path"
    table, more = messages(1_500), messages(200, seed=3)
    write_parquet(table, tmp_path / "m.parquet")
    with_id = ndjson(more).replace(b'"topic": "orders"', b'"topic_id": 5, "topic": "orders"')
    with open_storage(f"{base}/in{query}") as uploaded:
        uploaded.put("day/m.parquet", (tmp_path / "m.parquet").read_bytes())
        uploaded.put("lines/m.ndjson.gz", gzip.compress(with_id))
    storage = f"s3a://{bucket}/index{query}"
    built = build(spark, f"{base}/in/day{query}", storage=storage, config=config)
    assert built.entries == 1_500
    # two tasks read the footer between two HEADs; then the driver checks the shards
    assert built.metrics.requests["head"] >= 4 + built.shards and built.metrics.requests["put"] >= built.shards
    assert built.metrics.bytes_written >= built.written_bytes and built.metrics.bytes_read > 0
    lines = f"{base}/in/lines/m.ndjson.gz{query}"
    assert build(spark, lines, storage=storage, config=config, mode="append").entries == 200
    check(storage.replace("s3a", "s3"), table, more, keys=8)
    with IndexReader.open(storage.replace("s3a", "s3")) as reader:
        ids = {i.topic_id for i in reader.query("orders", "key-0", max_count=2_000).items}
    assert ids == {5, assigned_topic_id("orders")}


def test_a_build_refuses_an_s3_server_that_ignores_put_if_absent(spark, s3, config, tmp_path, monkeypatch):
    """It would lose one of two builds. The probe is made before a task writes a shard."""
    monkeypatch.setattr(S3Storage, "put_if_absent", S3Storage.put)
    storage = f"s3://{s3.new_bucket()}/index?endpoint_url={s3.endpoint_url}&addressing_style=path"
    with pytest.raises(StorageMisconfigured, match="put-if-absent"):
        build(spark, write_parquet(messages(50), tmp_path / "m.parquet"), storage=storage, config=config)
    with open_storage(storage) as opened:
        assert not list(opened.list())


def test_a_dry_run_then_tables_of_a_parquet_file_and_modes_error_append_and_replace(spark, storage, config, tmp_path):
    first, second = messages(600), messages(500, seed=2, days=1)
    paths = [write_parquet(t, tmp_path / f"{n}.parquet") for n, t in enumerate((first, second))]
    how = {"storage": storage, "shards": 3, "config": config}
    planned = build(spark, paths[0], dry_run=True, **how)
    assert planned.dry_run and planned.entries == 600 and planned.requests > planned.shards and planned.cost_usd > 0
    assert not any((tmp_path / "storage").rglob("*"))
    result = build(spark, paths[0], **how)
    assert (result.entries, result.quarantined, result.without_key) == (600, 0, 0)
    assert [begin * 1000 for begin, _, _ in result.windows] == [BEGIN_MS, BEGIN_MS + DAY_MS]
    assert sum(entries for _, _, entries in result.windows) == total(storage) == 600
    assert result.shards == planned.shards == len(states(storage).objects) == 6
    assert sweep(storage) == 0
    number = states(storage).number
    with pytest.raises(ValueError, match="has a table already"):
        build(spark, paths[1], storage=storage, config=config)
    assert states(storage).number == number
    appended = build(spark, paths[1], storage=storage, config=config, mode="append")
    # the plan's estimate is that of the writing
    assert appended.shards < appended.requests < sum(appended.metrics.requests.values())
    check(storage, first, second)
    result = build(spark, paths[1], storage=storage, config=config, mode="replace")
    assert result.removed_objects == 3 + 1
    left = first.filter(pa.compute.greater_equal(first["timestamp_ms"], BEGIN_MS + DAY_MS))
    check(storage, left, second)
    assert total(storage) == len(left) + len(second)


def test_times_that_cannot_be_right_are_in_quarantine_and_known_when_they_are_built_again(
    spark, storage, config, tmp_path
):
    # 1970, 2096 and 9999 are in windows of 68 years
    wrong = [0, 5_000, 253_402_300_799_000, 4_000_000_000_000]
    table, later = messages(300), messages(50, begin_ms=BEGIN_MS + 10 * DAY_MS, seed=4)
    at = table.schema.get_field_index("timestamp_ms")
    times = [*wrong, *table["timestamp_ms"].to_pylist()[len(wrong) :]]
    table = table.set_column(at, "timestamp_ms", pa.array(times))
    later = later.set_column(at, "timestamp_ms", pa.array([1_500, *later["timestamp_ms"].to_pylist()[1:]]))
    path = write_parquet(table, tmp_path / "m.parquet")
    first = build(spark, path, storage=storage, config=config, shards=3)
    assert (first.quarantined, len(first.windows)) == (len(wrong), 2 + 3)
    # every build has them, and they hinder none
    path_of_later = write_parquet(later, tmp_path / "l.parquet")
    second = build(spark, path_of_later, storage=storage, config=config)
    assert second.quarantined == 1
    check(storage, table, later, keys=100)
    with pytest.raises(InvalidArgument, match="already"):
        build(spark, path, storage=storage, config=config)
    assert (total(storage), states(storage).number) == (350, second.log_number)
    again = build(spark, path, storage=storage, config=config, mode="replace")
    assert (total(storage), again.removed_objects) == (350, first.shards)
    # entries of another source stay
    other = table.set_column(table.schema.get_field_index("size"), "size", pa.array([1] * 300))
    build(spark, write_parquet(other, tmp_path / "o.parquet"), storage=storage, config=config, mode="replace")
    assert total(storage) == 350 + len(wrong)
