"""A client of Spark Connect that starts a server of its own, and prints what it found through the data sources."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from tests.spark.entries import BEGIN_MS
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader
from tiered_index import hash_key as hash_of
from tiered_index.errors import ConfigError
from tiered_index.spark import build, hash_key, register


def main() -> None:
    """Write, stream, read and look up an index in a folder."""
    folder = Path(sys.argv[1])
    uri = f"file://{folder}/index"
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    register(spark)
    n = F.col("id")
    rows = spark.range(1_000).select(
        F.lit("orders").alias("topic"),
        (n % 4).cast("int").alias("queue_id"),
        F.concat(F.lit("order-"), n % 100).alias("key"),
        n.alias("offset"),
        F.lit(90).alias("size"),
        (F.lit(BEGIN_MS) + n * 1_000).alias("timestamp_ms"),
    )
    rows.coalesce(2).write.format("tiered_index").mode("append").options(slots=100).save(uri)
    entries = spark.read.format("tiered_index").options(topic="orders", queues="1,3").load(uri)
    answer = spark.sql(f"SELECT offset FROM tiered_index_lookup('{uri}', 'orders', 'order-7') LIMIT 2")
    print(json.dumps({"written": entries.count(), "of_key": [row.offset for row in answer.collect()]}))
    hashed = rows.select("key", hash_key("topic", "key")).first()
    assert hashed is not None
    print(json.dumps({"hashed": hashed.hash_key == hash_of("orders", hashed.key)}))
    print(json.dumps(_streamed(spark, rows, folder, uri)))
    with StoreWriter(folder / "store", segment_bytes=20_000) as writer:
        for number in range(300):
            writer.put("t", number % 3, b"body", keys=[f"k-{number}"], store_ms=BEGIN_MS + number * 1_000)
    log = spark.read.format("rocketmq_commitlog").option("body", "none").load(str(folder / "store"))
    print(json.dumps({"messages": log.where("array_contains(keys, 'k-7') OR queue_id = 0").count()}))
    print(json.dumps({"error": _error_of(spark, f"{uri}/none")}))
    shutil.rmtree(folder / "index" / "data%")
    print(json.dumps({"lost": _error_of(spark, uri)}))
    try:
        build(spark, rows, storage=uri)
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}))
    spark.stop()


def _error_of(spark: SparkSession, uri: str) -> str:
    """Return the first line of the error of a read."""
    try:
        return f"no error: {spark.read.format('tiered_index').load(uri).count()} rows"
    except PySparkException as error:
        return str(error).splitlines()[0]


def _streamed(spark: SparkSession, rows: Any, folder: Path, uri: str) -> dict[str, int]:
    """Add the rows of files by a streaming query, which is started twice; return the number of entries then."""
    later = rows.withColumn("offset", F.col("offset") + 1_000)
    later.coalesce(1).write.parquet(f"{folder}/source")
    for _ in range(2):
        stream = spark.readStream.schema(later.schema).parquet(f"{folder}/source")
        sink = stream.writeStream.format("tiered_index").option("checkpointLocation", f"{folder}/checkpoint")
        assert sink.trigger(availableNow=True).start(uri).awaitTermination(200)
    with IndexReader.open(uri) as reader:
        return {"streamed": sum(stored.count for stored in reader.log_state.objects.values())}


if __name__ == "__main__":
    main()
