"""DataFrames written through Spark: appended, overwritten by window, refused. Some tasks fail once, and some
micro-batches repeat.
"""

from __future__ import annotations

import shutil

import pytest
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from tests.spark.entries import BEGIN_MS, DAY_MS, check, joined, messages, states, sweep, total
from tiered_index import IndexReader
from tiered_index.errors import InvalidArgument, NotAnIndex
from tiered_index.spark import register
from tiered_index.spark.failures import typed_errors


@pytest.fixture
def session(spark):
    register(spark)
    return spark


def write(frame, uri, mode="append", **options):
    with typed_errors("writing"):
        frame.write.format("tiered_index").mode(mode).options(**{"slots": 64, "items": 100_000, **options}).save(uri)


def test_append_and_overwrite_by_window(session, storage):
    first, second = messages(600, days=2), messages(300, days=1, seed=2, begin_ms=BEGIN_MS + DAY_MS)
    write(session.createDataFrame(first).coalesce(1), storage, slots="64")
    assert {shards[0].shard.origin for shards in states(storage).tables.values()} == {"build"}
    assert len(states(storage).tables) == 2
    check(storage, first, keys=10)
    write(session.createDataFrame(second).repartition(2), storage)
    assert (len(states(storage).tables), states(storage).number) == (4, 3)
    check(storage, joined([first, second]), keys=10)
    # the second day has only entries of the last frame, and the first day is unchanged
    third = messages(200, days=1, seed=3, begin_ms=BEGIN_MS + DAY_MS)
    write(session.createDataFrame(third).coalesce(1), storage, "overwrite")
    day_one = first.filter([time < BEGIN_MS + DAY_MS for time in first["timestamp_ms"].to_pylist()])
    assert (len(states(storage).tables), total(storage)) == (2, len(day_one) + 200)
    check(storage, joined([day_one, third]), keys=10)
    assert sweep(storage) == 3  # the replaced tables


def test_lists_of_keys_timestamps_and_times_that_are_wrong_on_s3(session, s3):
    place = f"{s3.new_bucket()}/index?endpoint_url={s3.endpoint_url}"
    storage = f"s3://{place}"
    keys = [["a", f"k-{n}", "a", None] if n % 4 < 2 else [None] if n % 4 == 2 else None for n in range(7)]
    rows = [("t", some, 0, n, 5, BEGIN_MS // 1000 + n) for n, some in enumerate(keys)]
    rows.append(("t", ["late"], 0, 7, 5, 9_000_000_000))
    schema = "topic string, keys array<string>, queue_id int, offset long, size int, second long"
    at = F.timestamp_seconds("second").alias("timestamp_ms")
    frame = session.createDataFrame(rows, schema).select("*", at).drop("second")
    write(frame.coalesce(1), f"s3a://{place}", window="1h")
    with IndexReader.open(storage) as reader:
        assert [item.offset for item in reader.query("t", "a")] == [5, 4, 1, 0]
        assert [item.offset for item in reader.query("t", "k-4")] == [4]
        assert [item.timestamp_ms for item in reader.query("t", "late")] == [9_000_000_000_000]
    assert total(storage) == 9
    assert sorted(o.shard.window_s for o in states(storage).objects.values() if o.shard is not None) == [3600, 1 << 31]
    write(frame.where("offset = 7"), storage, "overwrite", window="1h")
    assert total(storage) == 9  # the write replaces the quarantined entries, too


def test_invalid_entries_are_refused_and_named(session, storage):
    frame = session.createDataFrame(messages(20)).coalesce(1)
    text = frame.withColumn("offset", F.col("offset").cast("string"))
    with pytest.raises(InvalidArgument, match="column 'offset' has the type string, but must have integers"):
        write(text, storage)
    with pytest.raises(NotAnIndex):
        states(storage)
    both = session.createDataFrame(messages(20)).repartition(2, "key")
    assert both.select(F.spark_partition_id()).distinct().count() == 2
    # one task is refused, and the other one's uploads are deleted
    wrong = both.withColumn("size", F.when(F.col("offset") % 100 != 7, F.col("size")))
    with pytest.raises(Exception, match=r"column 'size' has 1 null") as refused:
        wrong.write.format("tiered_index").mode("append").option("slots", 64).save(storage)
    first, *others = str(refused.value).strip().splitlines()
    assert first.startswith("tiered_index.errors.InvalidArgument: a row {") and "column 'size' has" in first
    assert len(others) <= 1  # SQLSTATE
    assert total(storage) == sweep(storage) == 0


def micro_batches(session, frame_folder, uri, checkpoint, change=lambda frame: frame):
    schema = "topic string, queue_id int, key string, offset long, size int, timestamp_ms long"
    source = change(session.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(frame_folder)))
    writer = source.writeStream.format("tiered_index").options(
        slots=64, items=100_000, checkpointLocation=str(checkpoint)
    )
    query = writer.trigger(availableNow=True).start(uri)
    try:
        with typed_errors("streaming"):
            query.awaitTermination()
    finally:
        query.stop()


@pytest.mark.streams
def test_a_repeated_micro_batch_is_published_once(spark, storage, tmp_path, caplog):
    """One warning names the denied attempts. The cluster's settings are in a separate session, where Spark does not
    look for them.
    """
    session = spark.newSession()
    session.conf.set("spark.sql.legacy.setCommandRejectsSparkCoreConfs", "false")
    session.conf.set("spark.speculation", "true")
    session.conf.set("spark.task.maxFailures", "1")
    register(session)
    tables = [messages(200, days=1), messages(150, days=2, seed=2)]
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    for table in tables:
        session.createDataFrame(table).coalesce(1).write.mode("append").parquet(str(folder))
    micro_batches(session, folder, storage, checkpoint)
    check(storage, joined(tables), keys=10)
    before = states(storage)
    [(stream, last)] = before.positions.items()
    # no later build with mode replace removes what a stream wrote
    assert {stored.shard.origin for stored in before.objects.values()} == {"writer"}
    assert last == 1 and stream.startswith("spark:") and total(storage) == 350
    # the driver died after its record and before Spark's own record: the batch comes again
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink()
    micro_batches(session, folder, storage, checkpoint)
    assert (checkpoint / "commits" / "1").exists()
    assert states(storage).objects == before.objects and sweep(storage) == 0
    # with a new checkpoint it is another query
    shutil.rmtree(checkpoint)
    micro_batches(session, folder, storage, checkpoint)
    assert (total(storage), len(states(storage).positions)) == (700, 2)
    check(storage, joined(tables), keys=5)
    [warning] = [record for record in caplog.records if "speculation" in record.getMessage()]
    assert warning.levelname == "WARNING" and "spark.task.maxFailures is 1" in warning.getMessage()
