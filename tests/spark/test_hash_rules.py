"""An index on Spark with tables and files of both of RocketMQ's hash rules.

Builds write by the index's setting. Lookups, the data source, merges and audits find every entry by either rule.
"""

from collections import Counter

import pyarrow as pa
import pytest

from tests.spark.entries import BEGIN_MS, DAY_MS, has_slot_of, messages, put_files, states, write_parquet
from tests.spark.test_audit import audited, damage_an_item, harm
from tests.spark.test_datasource_reading import scan
from tiered_index import IndexConfig, IndexReader, hash_key
from tiered_index.spark import build, look_up, merge

SETTINGS = {"preset": "rocketmq", "slots": 64, "items": 100_000, "max_late_s": 10**10}


@pytest.fixture(scope="module")
def both(spark, tmp_path_factory):
    """A day's table of each rule, and a small file of rule mask; and all their rows."""
    folder = tmp_path_factory.mktemp("rules")
    uri = f"file://{folder}/index"
    parts = [messages(1_200, days=1), messages(1_200, days=1, seed=2), messages(150, days=2, seed=3)]
    for number, table in enumerate(parts):
        keys = pa.array([f"{key.as_py()}-of-some-length" for key in table["key"]])
        parts[number] = table.set_column(table.schema.get_field_index("key"), "key", keys)
    for rule, table in zip(("abs", "mask"), parts, strict=False):
        source = write_parquet(table, folder / f"{rule}.parquet")
        build(spark, source, storage=uri, shards=3, mode="append", config=IndexConfig(hash=rule, **SETTINGS))
    put_files(uri, folder / "root", parts[2], preset="rocketmq", hash="mask")
    table = pa.concat_tables(parts)
    return folder, table


def check(uri, table, folder, spark):
    rows = table.to_pylist()
    negative = {(row["topic"], row["key"]) for row in rows if hash_of(row, "abs") != hash_of(row, "mask")}
    pairs = sorted({(row["topic"], row["key"]) for row in rows})
    assert len(pairs) / 4 < len(negative) < len(pairs) * 3 / 4
    by_key = {pair: [] for pair in pairs}
    for row in sorted(rows, key=lambda row: -row["offset"]):
        by_key[row["topic"], row["key"]].append(row["offset"])
    result = look_up(spark, spark.createDataFrame(pairs, "topic string, key string"), storage=uri, max_count=10_000)
    offsets_by_pair = {pair: [] for pair in pairs}
    for row in result.frame.sort("position").collect():
        assert (row.status, row.key_hash) == ("complete", hash_key(row.topic, row.key))
        offsets_by_pair[row.topic, row.key].append(row.offset)
    result.release()
    with IndexReader.open(uri) as reader:
        for pair in pairs:
            offsets = [item.offset for item in reader.query(*pair, max_count=10_000)]
            assert offsets_by_pair[pair] == offsets and sorted(offsets, reverse=True) == by_key[pair]
    topic, key = sorted(negative)[0]
    hashes = {hash_key(topic, key), hash_key(topic, key, "mask")}
    picked = [row for part in scan(uri, topic=topic) for row in part.to_pylist() if row["key_hash"] in hashes]
    assert sorted((row["offset"] for row in picked), reverse=True) == by_key[topic, key]
    result = audited(spark, folder / "index", write_parquet(table, folder / "all.parquet"))
    assert (result.status, result.entries) == ("ok", len(rows))
    assert result.differences.counts == {"missing": 0, "extra": 0, "wrong": 0}


def hash_of(row, rule):
    return hash_key(row["topic"], row["key"], rule)


@pytest.mark.long
def test_both_rules_before_and_after_a_merge(spark, both):
    folder, table = both
    uri = f"file://{folder}/index"
    assert Counter(stored.hash for stored in states(uri).objects.values()).keys() == {"abs", "mask"}
    check(uri, table, folder, spark)
    merge(spark, storage=uri, window=30 * 86_400)
    # the writer's files had both rules; a build's tables stay separate
    objects = [stored for stored in states(uri).objects.values() if stored.hash == "both"]
    assert {stored.hash for stored in states(uri).objects.values()} == {"both", "mask"} and 0 < len(objects) < 4
    check(uri, table, folder, spark)
    # entries that damage may hide are sought in the slots of either rule
    stored = max(objects, key=lambda stored: stored.count)
    hidden = sum(has_slot_of(stored, *(hash_of(row, rule) for rule in ("abs", "mask"))) for row in table.to_pylist())
    harm(folder / "index", damage_an_item, stored)
    differences = audited(spark, folder / "index", str(folder / "all.parquet")).differences
    assert differences.counts == {"missing": 0, "extra": 0, "wrong": 0} and 0 < differences.unproven <= hidden
    bounds = {"begin_ms": BEGIN_MS + DAY_MS // 2, "end_ms": BEGIN_MS + DAY_MS}
    bounded = audited(spark, folder / "index", str(folder / "all.parquet"), **bounds).differences
    assert bounded.findings == 0
