"""A stream of a folder of Parquet files into an index, which is stopped and continued."""

import tempfile
from pathlib import Path

from pyspark.sql import functions as F

from tiered_index import IndexReader
from tiered_index.spark import open_session, register

folder = Path(tempfile.mkdtemp())
source, uri = f"{folder}/source", f"file://{folder}/index"
BEGIN_MS = 1_700_006_400_000

spark = open_session()
register(spark)


def fill(first, count):
    """Add files of messages."""
    n = F.col("id")
    messages = spark.range(first, first + count, numPartitions=2).select(
        F.lit("orders").alias("topic"),
        F.lit(0).alias("queue_id"),
        F.array(F.concat(F.lit("order-"), n % 100), F.lit("all")).alias("keys"),
        n.alias("offset"),
        F.lit(90).alias("size"),
        (F.lit(BEGIN_MS) + n * 60_000).alias("timestamp_ms"),
    )
    messages.write.mode("append").parquet(source)


def start():
    entries = spark.readStream.schema(spark.read.parquet(source).schema).parquet(source)
    sink = entries.writeStream.format("tiered_index").options(window="1d", slots=1000)
    return sink.option("checkpointLocation", f"{folder}/checkpoint").start(uri)


fill(0, 600)
query = start()
query.processAllAvailable()
with IndexReader.open(uri) as reader:
    assert len(reader.query("orders", "order-7", max_count=100).items) == 6
    fill(600, 400)
    query.processAllAvailable()
    reader.refresh()
    answer = reader.query("orders", "order-7", max_count=100)
    assert [item.timestamp_ms for item in answer] == [BEGIN_MS + n * 60_000 for n in range(907, 0, -100)]
    query.stop()  # or kill -9, a lost machine, an error: `start` continues
    fill(1000, 100)
    query = start()
    query.processAllAvailable()
    reader.refresh()
    assert len(reader.query("orders", "all", max_count=10_000).items) == 1100
query.stop()
