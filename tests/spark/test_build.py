"""Builds on a local session: what is built answers as the model and as the live engine do, whatever the source."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

from tests.spark.entries import BEGIN_MS, DAY_MS, check, messages, states, sweep, total, write_parquet
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader, IndexService
from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.service.answers.validation import assigned_topic_id
from tiered_index.spark import build
from tiered_index.spark.build import plan as planning


def ndjson(table, *, keys="keys"):
    lines = []
    for row in table.to_pylist():
        row[keys] = [row.pop("key")] if keys == "keys" else row.pop("key")
        lines.append(json.dumps(row))
    return ("\n".join(lines) + "\n").encode()


def test_a_parquet_file_becomes_tables_that_answer_as_the_live_engine_does(spark, storage, config, tmp_path):
    table = messages(6_000)
    result = build(spark, write_parquet(table, tmp_path / "m.parquet"), storage=storage, shards=3, config=config)
    assert (result.entries, result.quarantined, result.without_key) == (6_000, 0, 0)
    assert [begin * 1000 for begin, _, _ in result.windows] == [BEGIN_MS, BEGIN_MS + DAY_MS]
    assert sum(entries for _, _, entries in result.windows) == total(storage) == 6_000
    assert result.shards == len(states(storage).objects) == 6
    check(storage, table)
    with IndexService.open(
        root=tmp_path / "live", storage=f"file://{tmp_path}/live-storage", config=None, background=False
    ) as live:
        live.put_batch(table.combine_chunks().to_batches()[0])
        live.flush()
        with IndexReader.open(storage) as reader:
            for key in ("key-0", "key-1", "key-2"):
                theirs, ours = (i.query("orders", key, max_count=5_000).items for i in (live, reader))
                assert [(i.offset, i.queue_id, i.size, i.timestamp_ms, i.key_hash) for i in theirs] == [
                    (i.offset, i.queue_id, i.size, i.timestamp_ms, i.key_hash) for i in ours
                ]
    assert sweep(storage) == 0


def test_folders_of_ndjson_plain_and_gzipped(spark, storage, config, tmp_path):
    first, second = messages(400), messages(300, seed=2)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.ndjson").write_bytes(ndjson(first))
    (tmp_path / "in" / "b.ndjson.gz").write_bytes(gzip.compress(ndjson(second, keys="key")))
    (tmp_path / "in" / "_SUCCESS").write_text("")
    without = {"topic": "orders", "queue_id": 0, "keys": [], "offset": 1, "size": 1, "timestamp_ms": BEGIN_MS}
    (tmp_path / "in" / "c.jsonl").write_text(json.dumps(without) + "\n")
    with_id = {**without, "topic": "with an id", "keys": ["a", "b"], "topic_id": 77}
    (tmp_path / "in" / "d.ndjson").write_text(json.dumps(with_id) + "\n")
    result = build(spark, tmp_path / "in", storage=storage, config=config)
    assert (result.entries, result.without_key) == (702, 1)
    check(storage, first, second)
    with IndexReader.open(storage) as reader:
        assert [i.topic_id for i in reader.query("with an id", "b").items] == [77]


def test_a_dataframe_with_names_of_its_own_lists_of_keys_and_timestamps(spark, storage, config):
    rows = [(f"o-{n % 7}", [f"c-{n % 3}", f"c-{n % 3}", f"d-{n}"], n, BEGIN_MS / 1000 + n) for n in range(200)]
    frame = spark.createDataFrame(rows, "order_id string, customers array<string>, pos long, second double")
    frame = frame.withColumn("at", F.timestamp_seconds("second"))
    columns = {
        "key": "customers",
        "offset": "pos",
        "timestamp_ms": "at",
        "topic": F.lit("orders"),
        "queue_id": F.lit(2),
        "size": F.lit(9),
    }
    assert build(spark, frame, storage=storage, columns=columns, config=config).entries == 400
    with IndexReader.open(storage) as reader:
        found = reader.query("orders", "c-1", max_count=1_000).items
        assert [item.offset for item in found] == [n for n in range(199, -1, -1) if n % 3 == 1]
        assert {(item.queue_id, item.size) for item in found} == {(2, 9)}
        assert reader.query("orders", "d-5").items[0].timestamp_ms == BEGIN_MS + 5_000
    columns["key"] = "order_id"
    assert build(spark, frame, storage=storage, columns=columns, config=config, mode="append").entries == 200


def test_a_rocketmq_store_of_several_segments(spark, storage, tmp_path):
    with StoreWriter(tmp_path / "store", segment_bytes=20_000) as writer:
        for n in range(400):
            writer.put("orders", n % 2, b"x" * (n % 50), keys=[f"k-{n % 9}", f"u-{n}"], store_ms=BEGIN_MS + n * 60_000)
    segments = len(list((tmp_path / "store" / "commitlog").iterdir()))
    assert segments > 2
    result = build(spark, str(tmp_path / "store"), storage=storage, config=IndexConfig(slots=64, items=10_000))
    assert result.entries == 800
    assert states(storage).genesis.offset_space == "commitlog"
    with IndexReader.open(storage) as reader:
        assert len(reader.query("orders", "k-4", max_count=1_000).items) == len([n for n in range(400) if n % 9 == 4])
        assert reader.query("orders", "u-399").items[0].timestamp_ms == BEGIN_MS + 399 * 60_000


def test_source_and_index_in_s3_without_any_hadoop_library(spark, s3, config, tmp_path):
    bucket = s3.new_bucket()
    base, query = f"s3://{bucket}", f"?endpoint_url={s3.endpoint_url}&addressing_style=path"
    table, more = messages(1_500), messages(200, seed=3)
    from tiered_index.storage.opening import open_storage

    write_parquet(table, tmp_path / "m.parquet")
    with_id = ndjson(more).replace(b'"topic": "orders"', b'"topic_id": 5, "topic": "orders"')
    with open_storage(f"{base}/in{query}") as uploaded:
        uploaded.put("day/m.parquet", (tmp_path / "m.parquet").read_bytes())
        uploaded.put("lines/m.ndjson.gz", gzip.compress(with_id))
    storage = f"s3a://{bucket}/index{query}"
    built = build(spark, f"{base}/in/day{query}", storage=storage, config=config)
    assert built.entries == 1_500
    _, counted, written, published = built.metrics.stages
    # 3 row groups are one task's: the file is opened by a HEAD, its footer and its bytes read by ranges
    assert counted.task_requests["head"] == written.task_requests["head"] == 1
    assert counted.bytes_read < written.bytes_read
    assert counted.bytes_read > 0 and counted.bytes_written == 0
    assert (written.task_requests["put"], written.bytes_written) == (built.shards, built.written_bytes)
    assert (published.task_requests, published.driver_requests["head"] >= built.shards) == ({}, True)
    assert (
        build(spark, f"{base}/in/lines/m.ndjson.gz{query}", storage=storage, config=config, mode="append").entries
        == 200
    )
    check(storage.replace("s3a", "s3"), table, more, keys=8)
    with IndexReader.open(storage.replace("s3a", "s3")) as reader:
        ids = {i.topic_id for i in reader.query("orders", "key-0", max_count=2_000).items}
    assert ids == {5, assigned_topic_id("orders")}


def test_a_hot_key_continues_in_parts_by_time(spark, storage, config, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "PIECE_ITEMS", 150)
    table = messages(5_000, days=1)
    build(spark, write_parquet(table, tmp_path / "m.parquet"), storage=storage, shards=2, config=config)
    ranges = [(o.shard.slot_low, o.shard.slot_high) for o in states(storage).objects.values()]
    assert max(ranges.count(r) for r in ranges) > 3  # parts of one range of slots
    assert total(storage) == 5_000
    check(storage, table)


def test_modes_error_append_and_replace(spark, storage, config, tmp_path):
    first, second = messages(600), messages(500, seed=2, days=1)
    paths = [write_parquet(t, tmp_path / f"{n}.parquet") for n, t in enumerate((first, second))]
    build(spark, paths[0], storage=storage, config=config)
    number = states(storage).number
    with pytest.raises(ValueError, match="has a table already"):
        build(spark, paths[1], storage=storage, config=config)
    assert states(storage).number == number
    appended = build(spark, paths[1], storage=storage, config=config, mode="append")
    *_, written, published = appended.metrics.stages
    assert appended.requests == sum(written.task_requests.values()) + sum(published.driver_requests.values())
    check(storage, first, second)
    result = build(spark, paths[1], storage=storage, config=config, mode="replace")
    assert result.removed_objects == 2
    kept = first.filter(pa.compute.greater_equal(first["timestamp_ms"], BEGIN_MS + DAY_MS))
    check(storage, kept, second)
    assert total(storage) == len(kept) + len(second)


def test_times_that_cannot_be_right_go_to_quarantine_and_are_counted(spark, storage, config, tmp_path):
    table = messages(300)
    wrong = [0, 5_000, 253_402_300_799_000, 4_000_000_000_000]
    at = table.schema.get_field_index("timestamp_ms")
    table = table.set_column(at, "timestamp_ms", pa.array(wrong + table["timestamp_ms"].to_pylist()[4:]))
    path = write_parquet(table, tmp_path / "m.parquet")
    result = build(spark, path, storage=storage, config=config)
    assert result.quarantined == 4
    assert len(result.windows) == 2 + 3  # 1970, 2096 and 9999 in windows of 68 years
    check(storage, table, keys=100)
    # they are every build's: they stand in nobody's way
    later = messages(50, begin_ms=BEGIN_MS + 10 * DAY_MS, seed=4)
    later = later.set_column(at, "timestamp_ms", pa.array([1_000, *later["timestamp_ms"].to_pylist()[1:]]))
    assert build(spark, write_parquet(later, tmp_path / "l.parquet"), storage=storage, config=config).quarantined == 1
    check(storage, table, later, keys=100)


@pytest.mark.parametrize(
    "wrong", [[0, 5_000, 253_402_300_799_000], list(range(0, 300_000, 1_000))], ids=["some", "all"]
)
def test_wrong_clocks_of_a_source_that_is_built_again_are_known(spark, storage, config, tmp_path, wrong):
    table = messages(300)
    at = table.schema.get_field_index("timestamp_ms")
    table = table.set_column(at, "timestamp_ms", pa.array(wrong + table["timestamp_ms"].to_pylist()[len(wrong) :]))
    path = write_parquet(table, tmp_path / "m.parquet")
    first = build(spark, path, storage=storage, config=config, shards=3)
    assert first.quarantined == len(wrong)
    with pytest.raises(InvalidArgument, match="already"):
        build(spark, path, storage=storage, config=config)
    assert (total(storage), states(storage).number) == (300, first.log_number)
    again = build(spark, path, storage=storage, config=config, mode="replace")
    assert (total(storage), again.removed_objects) == (300, first.shards)
    # entries of another source stay
    other = table.set_column(table.schema.get_field_index("size"), "size", pa.array([1] * 300))
    build(spark, write_parquet(other, tmp_path / "o.parquet"), storage=storage, config=config, mode="replace")
    assert total(storage) == 300 + len(wrong)


def test_a_dry_run_says_what_would_be_and_changes_nothing(spark, storage, config, tmp_path):
    path = write_parquet(messages(500), tmp_path / "m.parquet")
    planned = build(spark, path, storage=storage, config=config, dry_run=True)
    assert planned.dry_run and planned.entries == 500 and planned.requests > planned.shards and planned.cost_usd > 0
    assert not (tmp_path / "storage").exists() or not any((tmp_path / "storage").rglob("*"))
    assert build(spark, path, storage=storage, config=config).shards == planned.shards
