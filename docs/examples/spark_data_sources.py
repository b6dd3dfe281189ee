"""Spark's data sources of an index and of RocketMQ's commit log: read, SQL, Parquet by day, write."""

import tempfile
from pathlib import Path

from pyspark.sql import functions as F

from tests.support.store_writer import StoreWriter
from tiered_index import IndexService, hash_key
from tiered_index.spark import open_session, register

folder = tempfile.mkdtemp()
uri = f"file://{folder}/index"
with IndexService.open(root=f"{folder}/root", storage=uri, slots=1000, background=False) as index:
    for n in range(2_000):
        index.put("orders", 0, f"order-{n % 100}", offset=n, size=512, timestamp_ms=1_700_006_400_000 + n * 60_000)
    index.seal()
    index.run_lifecycle()

spark = open_session()
register(spark)

entries = spark.read.format("tiered_index").load(uri)
assert entries.columns == ["topic", "key_hash", "queue_id", "offset", "size", "timestamp"]
assert entries.filter("topic = 'orders'").agg(F.sum("size")).first()[0] == 2_000 * 512

first = spark.read.format("tiered_index").option("queues", "0").option("endMs", 1_700_006_400_000).load(uri)
assert [row.offset for row in first.collect()] == [0]

order = spark.sql(f"SELECT * FROM tiered_index_lookup('{uri}', 'orders', 'order-7') LIMIT 3")
assert [row.offset for row in order.collect()] == [1907, 1807, 1707]

spark.createDataFrame([("order-7",), ("order-8",)], "order_id string").createOrReplaceTempView("asked")
some = spark.sql(f"SELECT order_id, found.* FROM asked, LATERAL tiered_index_lookup('{uri}', 'orders', order_id) found")
assert {(row.order_id, row.key_hash) for row in some.collect()} == {
    (key, hash_key("orders", key)) for key in ("order-7", "order-8")
}
spark.conf.set("spark.sql.session.timeZone", "UTC")
days = entries.withColumn("day", F.to_date("timestamp"))
days.write.partitionBy("day").parquet(f"{folder}/entries")
assert spark.read.parquet(f"{folder}/entries").where("day = '2023-11-15'").count() == 1_440
orders = spark.range(500).select(
    F.lit("orders").alias("topic"),
    F.lit(0).alias("queue_id"),
    F.concat(F.lit("order-"), F.col("id") % 100).alias("key"),
    F.col("id").alias("offset"),
    F.lit(512).alias("size"),
    F.timestamp_seconds(F.lit(1_700_006_400) + F.col("id") * 60).alias("timestamp_ms"),
)
written = f"file://{folder}/written"
orders.coalesce(1).write.format("tiered_index").mode("append").options(window="1d", slots=1000).save(written)
orders.limit(100).coalesce(1).write.format("tiered_index").mode("overwrite").save(written)
assert spark.read.format("tiered_index").load(written).count() == 100
with StoreWriter(Path(folder) / "store", segment_bytes=50_000) as writer:
    for n in range(500):
        writer.put("orders", 0, b"body", keys=[f"order-{n % 100}"], store_ms=1_700_006_400_000 + n)

messages = spark.read.format("rocketmq_commitlog").option("body", "none").load(f"{folder}/store")
assert messages.count() == 500
