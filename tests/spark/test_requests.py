"""The requests of Spark's tasks to an S3 server: a proxy counts those that a lookup reports, and refuses one shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.spark.entries import messages, states
from tests.spark.in_process import build_here
from tests.storage.scripted_server import error
from tests.support.counting_proxy import Action, CountingProxy, Exchange, counting_proxy
from tests.support.s3_server import S3Server
from tiered_index import IndexReader, QueryResult
from tiered_index.errors import StorageMisconfigured
from tiered_index.spark import look_up, lookup

ROWS = [("orders", "key-0"), ("payments", "key-7"), ("orders", "nobody's")]
ROWS += [("orders", f"key-{n}") for n in range(20, 60)]


@dataclass(frozen=True)
class Stored:
    """An index of two days in three shards each, in a bucket behind a proxy."""

    uri: str
    proxy: CountingProxy
    names: tuple[str, ...]

    def of_objects(self) -> list[Exchange]:
        """Return the requests for the index's objects since the last call, without those for its log."""
        return [exchange for exchange in self.proxy.reset() if "/data/" in exchange.key]

    def deny(self, name: str) -> None:
        """Answer 403 to every request for an object."""
        denied = Action(answer=error(403, "AccessDenied"))
        self.proxy.fault = lambda request: denied if request.key.endswith(name) else None


@pytest.fixture(scope="module")
def index(spark: Any, s3: S3Server) -> Iterator[Stored]:
    with counting_proxy(s3.endpoint_url) as proxy:
        uri = f"s3://{s3.new_bucket()}/index?endpoint_url={proxy.endpoint_url}"
        build_here(uri, messages(2_000), shards=3, piece_items=100_000)
        yield Stored(uri, proxy, tuple(sorted(states(uri).objects)))


@pytest.fixture
def stored(index: Stored) -> Stored:
    index.proxy.reset()
    return index


def queried(stored: Stored) -> QueryResult:
    """Return a new reader's answer to the hot key, and its requests."""
    with IndexReader.open(stored.uri, block_cache_bytes=0, filter_after_probes=10**6) as reader:
        return reader.query("orders", "key-0", max_count=10_000)


def frame_of_keys(spark: Any) -> Any:
    return spark.createDataFrame(ROWS, "topic string, key string")


def test_a_lookup_reports_the_requests_that_were_sent(spark: Any, stored: Stored) -> None:
    result = look_up(spark, frame_of_keys(spark), storage=stored.uri, max_count=5)
    seen = stored.of_objects()
    # a table of three shards for each day
    assert (len(stored.names), result.objects) == (6, 2)
    assert {exchange.key.partition("/index/")[2] for exchange in seen} == {*stored.names}
    # the tasks also read the log
    assert len(seen) < result.requests and sum(exchange.bytes for exchange in seen) < result.bytes_read
    assert result.frame is not None and {row.key for row in result.frame.collect()} == {key for _, key in ROWS}
    # the answers are cached
    assert stored.proxy.reset() == []
    result.release()


@pytest.mark.long
def test_a_shard_that_is_denied_is_named(spark: Any, stored: Stored) -> None:
    queried(stored)
    name = stored.of_objects()[0].key.partition("/index/")[2]
    stored.deny(name)
    with pytest.raises(StorageMisconfigured, match=name):
        lookup(spark, frame_of_keys(spark), storage=stored.uri)
    result = look_up(spark, frame_of_keys(spark), storage=stored.uri, allow_partial=True)
    assert result.frame is not None and result.objects == 2
    ((failed, why),) = result.failed
    assert failed in states(stored.uri).tables and name in why and "AccessDenied" in why
    answers = {(row.topic, row.key): row for row in result.frame.collect()}
    assert answers["orders", "key-0"].status == "partial" and answers["orders", "key-0"].failed[0].file == failed
    statuses = Counter(row.status for row in answers.values())
    assert result.statuses == statuses and statuses.keys() == {"partial", "complete"}
    result.release()
