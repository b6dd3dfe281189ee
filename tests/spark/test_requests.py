"""What Spark's tasks ask of an S3 server, seen from outside: a proxy counts what a lookup reports, and refuses one
shard.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.spark.entries import messages, states
from tests.spark.in_process import planned, shards_of, written
from tests.storage.scripted_server import error
from tests.support.cold_index import without_summary
from tests.support.counting_proxy import Action, CountingProxy, Exchange, counting_proxy
from tests.support.s3_server import S3Server
from tiered_index import IndexReader, QueryResult
from tiered_index.cli.main import run
from tiered_index.clock import SystemClock
from tiered_index.errors import StorageMisconfigured
from tiered_index.service.log.log import StorageLog
from tiered_index.spark import look_up, lookup, register
from tiered_index.spark.build.build import publish_tables
from tiered_index.spark.failures import typed_errors
from tiered_index.storage.opening import open_storage

ROWS = [
    ("orders", "key-0"),
    ("payments", "key-7"),
    ("orders", "nobody's"),
    *(("orders", f"key-{n}") for n in range(20, 60)),
]


@dataclass(frozen=True)
class Stored:
    """An index of two days in three shards each, in a bucket behind a proxy."""

    uri: str
    proxy: CountingProxy
    names: tuple[str, ...]

    def of_objects(self) -> list[Exchange]:
        """Return what was asked of the index's objects since the last time, not of its log."""
        return [exchange for exchange in self.proxy.reset() if "/data/" in exchange.key]

    def deny(self, name: str) -> None:
        """Answer 403 to every request for an object."""
        denied = Action(answer=error(403, "AccessDenied"))
        self.proxy.fault = lambda request: denied if request.key.endswith(name) else None


@pytest.fixture(scope="module")
def index(spark: Any, s3: S3Server) -> Iterator[Stored]:
    with counting_proxy(s3.endpoint_url) as proxy:
        uri = f"s3://{s3.new_bucket()}/index?endpoint_url={proxy.endpoint_url}"
        table = messages(2_000)
        plan = planned(table, shards=3, piece_items=100_000)
        with open_storage(uri) as storage:
            log = StorageLog(storage, SystemClock())
            log.create(plan.genesis)
            shards = shards_of(written(table, plan, storage, now_ms=SystemClock().now_ms()))
            publish_tables(shards, "error", storage, log)
            without_summary(storage)
        yield Stored(uri, proxy, tuple(sorted(states(uri).objects)))


@pytest.fixture
def stored(index: Stored) -> Stored:
    index.proxy.reset()
    return index


def queried(stored: Stored) -> QueryResult:
    """Return a fresh reader's answer to the hot key, and what it asked."""
    with IndexReader.open(stored.uri, block_cache_bytes=0, filter_after_probes=10**6) as reader:
        return reader.query("orders", "key-0", max_count=10_000)


def asked(spark: Any) -> Any:
    return spark.createDataFrame(ROWS, "topic string, key string")


def rows_of_key(spark: Any, uri: str) -> list[Any]:
    register(spark)
    frame = spark.read.format("tiered_index").option("topic", "orders").option("key", "key-0").load(uri)
    with typed_errors("reading"):
        return list(frame.select("offset").collect())


def test_a_lookup_reports_the_requests_that_were_sent(spark: Any, stored: Stored) -> None:
    result = look_up(spark, asked(spark), storage=stored.uri, max_count=5)
    seen = stored.of_objects()
    assert len(stored.names) == result.objects == 6
    assert (len(seen), sum(exchange.bytes for exchange in seen)) == (result.requests, result.bytes_read)
    # the directory of each, and its slot groups as one range
    assert Counter(exchange.key.partition("/index/")[2] for exchange in seen) == dict.fromkeys(stored.names, 2)
    assert result.frame is not None and {row.key for row in result.frame.collect()} == {key for _, key in ROWS}
    # answers are at hand
    assert stored.proxy.reset() == []
    result.release()


def test_the_data_source_asks_for_what_a_reader_would(spark: Any, stored: Stored) -> None:
    rows = rows_of_key(spark, stored.uri)
    seen = stored.of_objects()
    answer = queried(stored)
    assert sorted(row.offset for row in rows) == sorted(item.offset for item in answer) and len(rows) > 400
    assert (len(seen), sum(exchange.bytes for exchange in seen)) == (answer.explain.requests, answer.explain.bytes)
    # one shard of each day
    assert sorted(Counter(exchange.key for exchange in seen).values()) == [2, 2]


def test_the_data_source_explains_what_the_proxy_counts(spark: Any, stored: Stored, tmp_path: Path) -> None:
    register(spark)
    frame = spark.read.format("tiered_index").options(explain=f"file://{tmp_path}", topic="payments").load(stored.uri)
    found = len(frame.select("offset").collect())
    seen = stored.proxy.reset()
    lines = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sum(line["requests"] for line in lines) == len(seen)
    tasks = [line for line in lines if line["kind"] == "task"]
    assert len(tasks) < len(lines) and len(
        {(line["stage"], line["partition"], line["attempt"]) for line in tasks}
    ) == len(tasks)
    of_objects = [exchange for exchange in seen if "/data/" in exchange.key]
    assert sum(line["bytes"] for line in tasks) == sum(exchange.bytes for exchange in of_objects) > 0
    assert (sum(line["rows"] for line in tasks), {line["ended"] for line in lines}) == (found, {"whole"})
    assert {line["log_number"] for line in lines} == {states(stored.uri).number}


def test_a_shard_that_is_denied_is_named(spark: Any, stored: Stored, capfd: Any) -> None:
    queried(stored)
    name = stored.of_objects()[0].key.partition("/index/")[2]
    stored.deny(name)
    with pytest.raises(StorageMisconfigured, match=name):
        lookup(spark, asked(spark), storage=stored.uri)
    with pytest.raises(StorageMisconfigured, match=name):
        rows_of_key(spark, stored.uri)
    result = look_up(spark, asked(spark), storage=stored.uri, allow_partial=True, nested=True)
    assert result.frame is not None and result.objects == 5
    ((failed, why),) = result.failed
    assert failed == name and "AccessDenied" in why
    answers = {(row.topic, row.key): row for row in result.frame.collect()}
    assert answers["orders", "key-0"].status == "partial" and answers["orders", "key-0"].failed[0].file == name
    assert {row.status for row in answers.values()} == {"partial", "complete"}
    result.release()
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(["spark", "audit", "--storage", stored.uri, "--json", "--quiet"])
    document = json.loads(capfd.readouterr().out)
    assert (ended.value.code, document["status"], document["findings"]) == (3, "incomplete", [])
    (unchecked,) = document["unchecked"]
    assert (unchecked["what"], unchecked["type"]) == (
        name,
        "StorageMisconfigured",
    ) and "grant s3:GetObject" in unchecked["message"]


def test_a_limit_reads_the_first_partition_alone(spark: Any, stored: Stored, tmp_path: Path) -> None:
    register(spark)
    options = {"explain": f"file://{tmp_path}", "maxPartitionBytes": "5m"}
    frame = spark.read.format("tiered_index").options(**options).load(stored.uri)
    for asked, rows, tasks, objects in ((frame.limit(5), 5, 1, 1), (frame, 2_000, 5, 6)):
        stored.proxy.reset()
        assert len(asked.collect()) == rows
        seen = stored.of_objects()
        paths = sorted(tmp_path.glob("*.json"))
        lines = [line for path in paths if (line := json.loads(path.read_text()))["kind"] == "task"]
        assert (len(lines), len({exchange.key for exchange in seen})) == (tasks, objects)
        assert sum(line["requests"] for line in lines) == len(seen) == 2 * objects
        for path in paths:
            path.unlink()
