"""Spark's readers of Delta, Iceberg and S3A: an index of their rows has exactly the live ones.

The versions are those that docs/spark-cluster.md names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq

from tests.brokers.connectors.jobs import MOVED, TABLES, TOPIC, orders, recipe, run_job
from tests.spark.pages import section
from tiered_index import IndexReader

HERE = Path(__file__).parent
S3A = (HERE / "hadoop-aws.pom.xml", "hadoop-aws", "3.5.0")
LIVE = [
    (MOVED if position % 10 == 1 else order, position, *rest)
    for order, position, *rest in orders(0, 200)
    if position % 3 != 0
]
CHANGED = sum(position % 3 == 0 or position % 10 == 1 for position in range(200))
"""Rows that a statement deletes or updates."""


def assert_answers(uri: str, rows: Iterable[tuple]) -> None:
    """Assert that the lookup of each order finds its rows and no other, and that the index has no other entry."""
    rows = list(rows)
    with IndexReader.open(uri) as reader:
        for key in {order for order, *_ in orders(0, 240)} | {MOVED}:
            answer = reader.query(TOPIC, key, max_count=1_000)
            entries = sorted((item.offset, item.size, item.timestamp_ms // 1000) for item in answer)
            assert entries == sorted((position, size, at) for order, position, size, at, _ in rows if order == key), key
            assert answer.status == "complete"
        assert sum(stored.count for stored in reader.log_state.objects.values()) == len(rows)


def rows_in_files(folder: Path) -> int:
    return sum(pq.read_metadata(path).num_rows for path in folder.rglob("part-*.parquet"))


def test_the_page_names_the_versions_that_are_tested():
    text = section("spark-cluster.md", "Versions of Spark")
    for title, spark in (("Delta", "4.2.0"), ("Iceberg", "4.1.0"), ("Kafka", "4.2.0")):
        name = title.lower()
        package, _, version = recipe(name)["spark.jars.packages"].rpartition(":")
        assert f"| {title} {version} (`{package}`) | {spark}" in text
        if name != "kafka":
            installed = f"pip install '.[spark]' 'pyspark[sql]=={spark}'    # for {title} {version}"
            assert installed in section("spark-data.md", TABLES)
    assert f"hadoop-aws {S3A[2]} (`org.apache.hadoop:hadoop-aws`) |" in text


def test_an_index_of_a_delta_table_has_its_live_rows(tmp_path):
    failed, built, refused = run_job("delta", tmp_path, version="4.2.0")
    table = tmp_path / "table"
    logs = [path.read_text() for path in sorted((table / "_delta_log").glob("*.json"))]
    actions = [json.loads(line) for log in logs for line in log.splitlines()]
    vectors = [add["deletionVector"] for action in actions if (add := action.get("add")) and add.get("deletionVector")]
    # the files still have the rows that the vectors delete
    assert max(vector["cardinality"] for vector in vectors) > 0 and rows_in_files(table) > len(LIVE)
    assert built == {"entries": len(LIVE)}
    assert_answers((tmp_path / "built").as_uri(), LIVE)
    assert_answers((tmp_path / "index").as_uri(), orders(0, 200))
    # built anew, and a stream of what came after
    assert_answers((tmp_path / "index-2").as_uri(), [*LIVE, *orders(200, 240)])
    assert "delet" in failed["failed"].lower(), failed
    assert len(refused["refused"]) == 3
    for sentence in refused["refused"]:
        assert sentence.startswith("InvalidArgument: ") and f"{table} is a table (_delta_log/)" in sentence
    assert not (tmp_path / "refused").exists()


def test_an_index_of_an_iceberg_table_has_its_live_rows(tmp_path):
    deletes, failed, built, refused = run_job("iceberg", tmp_path, version="4.1.0")
    # 1: files of deleted positions
    assert {content for content, _ in deletes["deletes"]} == {1}
    assert sum(count for _, count in deletes["deletes"]) == CHANGED
    assert built == {"entries": len(LIVE)}
    assert_answers((tmp_path / "built").as_uri(), LIVE)
    assert_answers((tmp_path / "index").as_uri(), orders(0, 200))
    # built anew, and a stream of what came after
    assert_answers((tmp_path / "index-2").as_uri(), [*LIVE, *orders(200, 240)])
    assert "delete" in failed["failed"].lower(), failed
    assert len(refused["refused"]) == 4
    for sentence in refused["refused"]:
        assert sentence.startswith("InvalidArgument: ") and "orders is a table (metadata/)" in sentence
    assert not (tmp_path / "refused").exists()


def test_rows_and_keys_in_an_s3_bucket_are_read_by_s3a(server, tmp_path):
    bucket = server.new_bucket()
    built, *answers, failed = run_job("s3a", tmp_path, bucket, server.endpoint_url, pom=S3A)
    assert built == {"entries": 200}
    expected = []
    for n in range(0, 60, 3):
        of_key = [row for row in reversed(orders(0, 200)) if row[0] == f"order-{n}"]
        expected += [[row[0], "complete", place, row[1], row[2]] for place, row in enumerate(of_key)]
        expected += [] if of_key else [[f"order-{n}", "complete", None, None, None]]
    assert sorted(map(repr, (answer["row"] for answer in answers))) == sorted(map(repr, expected))
    assert failed["failed"].startswith("StorageUnavailable: ") and "127.0.0.1:1" in failed["failed"]
