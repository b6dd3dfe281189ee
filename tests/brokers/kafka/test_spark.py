"""Spark's own Kafka source on a real broker: a stream and a build of its rows make the entries that `ingest` makes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.brokers.jars import class_path
from tests.spark.pages import DOCS, section
from tests.spark.sessions import local_session
from tiered_index import IndexReader
from tiered_index.spark import build, register

# the newest version on Maven Central
CONNECTOR = "4.2.0"
PAGE = ("spark.md", "Kafka")
# py4j's own finalizers close its sockets
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    jars = class_path(Path(__file__).with_name("spark.pom.xml"), "spark-kafka", CONNECTOR).removesuffix("*")
    settings = {"spark.jars": ",".join(map(str, sorted(Path(jars).glob("*.jar"))))}
    with local_session(tmp_path_factory.mktemp("spark"), settings) as session:
        yield session


def entries(uri):
    """Return the places, values and hashes of all entries of an index."""
    with IndexReader.open(uri) as reader, reader.export() as batches:
        rows = [row for batch in batches for row in batch.to_pylist()]
    names = ("queue_id", "offset", "size", "timestamp_ms", "key_hash", "fingerprint")
    return sorted(tuple(row[name] for name in names) for row in rows)


def test_rows_of_sparks_source_make_the_entries_of_ingest(spark, broker, topics, producing, run, topic, tmp_path):
    topics.create(topic, 2)
    sent = [
        {"key": f"key-{n % 20}", "value": json.dumps({"order": {"id": f"order-{n}"}}), "headers": [("trace", f"t-{n}")]}
        for n in range(60)
    ]
    producing.send(topic, [*sent, {"key": b"\xff\x0a", "value": b"{}"}, {"key": None, "value": b"no json"}])
    followed, streamed, built = ((tmp_path / name).as_uri() for name in ("followed", "streamed", "built"))
    keys = ("--key", "key", "--key", "header:trace", "--key", "json:order.id")
    done = run("ingest", f"kafka://{broker.address}/{topic}", *keys, "--storage", followed, "--wait", "--json")
    assert done.code == 0, done.err
    expected = entries(followed)
    assert len(expected) == 181

    # the example's mapping, and the page's block that reads a topic
    names = {"spark": spark}
    exec((DOCS / "examples/spark_kafka.py").read_text().partition("spark = open_session()")[0], names)
    (block,) = re.findall(r"^```text\n(records = .*?)^```", section(*PAGE), re.MULTILINE | re.DOTALL)
    block = block.replace("broker:9092", broker.address).replace('"orders"', repr(topic))
    exec(block, names)
    register(spark)
    sink = names["entries_of"](names["records"]).writeStream.format("tiered_index").options(window="1d", slots=1000)
    sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    sink.start(streamed).awaitTermination()
    assert entries(streamed) == expected

    exec(re.sub("readStream", "read", block).replace('"maxOffsetsPerTrigger": "5000000",', ""), names)
    build(spark, names["entries_of"](names["records"]), storage=built, window="1d")
    assert entries(built) == expected
