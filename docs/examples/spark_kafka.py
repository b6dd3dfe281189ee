"""A stream of Kafka's records into an index. It reads files with the columns of Spark's Kafka source.

`entries_of` makes the entries of `ingest --key key --key header:trace --key json:order.id`.
"""

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tiered_index import IndexReader
from tiered_index.spark import open_session, register

HEADERS = "array<struct<key: string, value: binary>>"
KAFKA = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int, "
    f"headers {HEADERS}"
)


def size_of(column: Column | str) -> Column:
    return F.coalesce(F.octet_length(column), F.lit(0))


def text_of(column: Column) -> Column:
    """Return bytes as a key: `0x` and hexadecimal digits if they are not UTF-8 or have a control character."""
    text = column.cast("string")
    is_key = F.is_valid_utf8(text) & ~F.rlike(text, F.lit("[\\x00-\\x1f\\x7f]"))
    return F.when(is_key, text).otherwise(F.concat(F.lit("0x"), F.lower(F.hex(column))))


def entries_of(records: DataFrame) -> DataFrame:
    """Return the entries of Kafka's records: by key, by the header `trace` and by a field of JSON."""
    headers = F.coalesce("headers", F.array().cast(HEADERS))
    traces = F.transform(F.filter(headers, lambda h: h.key == "trace"), lambda h: text_of(h.value))
    order = F.get_json_object(F.col("value").cast("string"), "$.order.id")
    keys = F.array_compact(F.concat(F.array(text_of(F.col("key")), order), traces))
    of_headers = F.aggregate(headers, F.lit(0), lambda total, h: total + size_of(h.key) + size_of(h.value))
    return records.select(
        "topic",
        F.col("partition").alias("queue_id"),
        F.explode_outer(F.array_distinct(F.array_remove(keys, ""))).alias("key"),
        "offset",
        (size_of("key") + size_of("value") + of_headers).alias("size"),
        F.col("timestamp").alias("timestamp_ms"),
    )


spark = open_session()
register(spark)
folder = Path(tempfile.mkdtemp())
uri = f"file://{folder}/index"


def produce(first: int, count: int) -> None:
    """Write records as a producer and a broker with two partitions do."""
    begin = datetime(2023, 11, 15, tzinfo=UTC)
    rows = [
        (b"order-%d" % (n % 100), b"body", "orders", n % 2, n // 2, begin + timedelta(seconds=n), 1, None)
        for n in range(first, first + count)
    ]
    rows.append((None, b"no key", "orders", 0, 10**6 + first, begin, 1, None))
    spark.createDataFrame(rows, KAFKA).coalesce(1).write.mode("append").parquet(f"{folder}/records")


def index_new_records() -> None:
    records = spark.readStream.schema(KAFKA).parquet(f"{folder}/records")
    sink = entries_of(records).coalesce(2).writeStream.format("tiered_index").options(window="1d", slots=1000)
    sink = sink.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    sink.start(uri).awaitTermination()


produce(0, 600)
index_new_records()
index_new_records()
produce(600, 400)
index_new_records()
with IndexReader.open(uri) as reader:
    answer = reader.query("orders", "order-7", max_count=100)
    assert [(item.queue_id, item.offset) for item in answer] == [(1, n // 2) for n in range(907, 0, -100)]
    assert sum(stored.count for stored in reader.log_state.objects.values()) == 1000
