"""The data source `tiered_index`: every stored entry, by options and under filters, at one log position, in few
requests.

It also tests the output of `export`.
"""

import contextlib
import re
from collections import Counter

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql.functions import udf

from tests.spark.entries import BEGIN_MS, DAY_MS, messages, put_files, states, stored_rows
from tiered_index import IndexReader
from tiered_index.errors import InvalidArgument, SchemaMismatch
from tiered_index.spark import register
from tiered_index.spark.failures import typed_errors
from tiered_index.storage.opening import open_storage

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
COLUMNS = ["topic", "key_hash", "queue_id", "offset", "size", "timestamp"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Files and tables of an index, with some messages put twice, and the entries that were put."""
    folder = tmp_path_factory.mktemp("entries")
    table = messages(3_000, days=3)
    uri = f"file://{folder}/storage"
    put_files(uri, folder / "root", table, table.slice(0, 100), rows=700)
    rows = table.to_pylist()
    return uri, rows + rows[:100]


@pytest.fixture
def session(spark):
    """A session that knows the sources; afterwards it has its old configuration."""
    register(spark)
    register(spark)
    spark.conf.set(PUSHDOWN, "true")
    yield spark
    spark.conf.unset(PUSHDOWN)


def load(session, uri, **options):
    return session.read.format("tiered_index").options(**options).load(uri)


def row_counts(frame):
    """Return the rows of a frame, without the key, and the count of each."""
    return Counter(
        (r.topic, r.key_hash, r.queue_id, r.offset, r.size, int(r.timestamp.timestamp())) for r in frame.collect()
    )


def test_filters_on_one_frame_do_not_disturb_each_other(session, written):
    """The source accepts no filters: with them, Spark up to 4.3.0 would count filtered partitions even in a query
    without filters.
    """
    uri, rows = written
    frame = load(session, uri)
    assert frame.columns == COLUMNS
    late = frame.filter(f"timestamp >= timestamp_millis({BEGIN_MS + 2 * DAY_MS})")
    topic = frame.filter("topic = 'payments'")
    expected_late = stored_rows(r for r in rows if r["timestamp_ms"] >= BEGIN_MS + 2 * DAY_MS)
    expected_topic = stored_rows(r for r in rows if r["topic"] == "payments")
    assert row_counts(late.union(topic).union(frame)) == expected_late + expected_topic + stored_rows(rows)
    for _ in range(2):
        assert late.count() == expected_late.total()
        assert frame.select("offset").count() == len(rows)
    by_queue = [load(session, uri, queues=queue) for queue in ("0", "2")]
    assert row_counts(by_queue[0].union(by_queue[1])) == stored_rows(r for r in rows if r["queue_id"] in (0, 2))


def test_lookups_from_sql(session, written):
    uri, _ = written
    with pytest.raises(Exception, match="UNRESOLVED_COLUMN"):
        load(session, uri).filter("key = 'key-7' OR key = 'key-8'").collect()
    session.sql(
        "SELECT 'orders' AS topic, explode(array('key-7', 'key-8', 'nobody', NULL)) AS k"
    ).createOrReplaceTempView("wanted")
    begin, end = BEGIN_MS + DAY_MS // 2, BEGIN_MS + 2 * DAY_MS
    rows = session.sql(
        f"""SELECT k, found.* FROM wanted, LATERAL tiered_index_lookup('{uri}', wanted.topic, k) found
        UNION ALL SELECT 'ranged', * FROM tiered_index_lookup('{uri}', 'orders', 'key-0', {begin}L, {end}L)"""
    ).collect()
    with IndexReader.open(uri) as reader:
        for key, wanted, low, high in (
            ("key-7", "key-7", None, None),
            ("key-8", "key-8", None, None),
            ("ranged", "key-0", begin, end),
        ):
            items = reader.query("orders", wanted, low, high, max_count=100_000).items
            entries = [(r.topic, r.key, r.queue_id, r.offset, r.size, r.key_hash) for r in rows if r.k == key]
            assert entries == [("orders", wanted, i.queue_id, i.offset, i.size, i.key_hash) for i in items]
            assert [int(r.timestamp.timestamp()) * 1000 for r in rows if r.k == key] == [i.timestamp_ms for i in items]
    assert {row.k for row in rows} == {"key-7", "key-8", "ranged"}
    outer = f"SELECT k, offset FROM wanted LEFT JOIN LATERAL tiered_index_lookup('{uri}', wanted.topic, k) found"
    answered = session.sql(f"{outer} ON true").collect()
    assert {row.k for row in answered if row.offset is None} == {"nobody", None}
    # the reason why docs/spark-data.md asks for ON: a Spark that keeps all keys here fails this line
    assert {row.k for row in session.sql(outer).collect()} == {"key-7", "key-8"}
    for call, message in (
        (f"'{uri}', 'orders', 5", "key is int; text is needed: cast it"),
        (f"'{uri}', 'orders', 'k', TIMESTAMP '2026-11-01'", "begin_ms is timestamp; epoch milliseconds"),
        (f"'{uri}/none', 'orders', 'k'", "holds no tiered index"),
    ):
        with pytest.raises(AnalysisException) as failed:
            session.sql(f"SELECT * FROM tiered_index_lookup({call})").collect()
        # without traces, which Spark shows for the errors of other code
        assert re.fullmatch(rf"tiered_index\.errors\.\w+: .*{message}.*", str(failed.value).splitlines()[0])
        assert "Traceback" not in str(failed.value)


@contextlib.contextmanager
def log_of_java(session):
    """Yield a function that returns what Spark's loggers print in the block."""
    log4j, writer = session._jvm.org.apache.logging.log4j, session._jvm.java.io.StringWriter()
    appender = log4j.core.appender.WriterAppender.createAppender(None, None, writer, "test", False, True)
    appender.start()
    root = log4j.LogManager.getRootLogger()
    # the root's configuration, whose filter the appender is behind
    root.get().addAppender(appender, None, None)
    session.sparkContext.setLogLevel("WARN")
    try:
        yield writer.toString
    finally:
        session.sparkContext.setLogLevel("OFF")
        root.get().removeAppender("test")


def test_errors_and_schemas_of_the_user_reach_spark(session, written, tmp_path):
    uri, _ = written
    lost = f"file://{tmp_path}/storage"
    put_files(lost, tmp_path / "root", messages(10))
    frame = load(session, lost)
    with open_storage(lost) as storage:
        storage.delete_many(list(states(lost).objects))
    # a task's error: its sentence is all that Spark shows, and Java's logger prints nothing before it
    with log_of_java(session) as printed:
        with pytest.raises(PythonException) as failed:
            frame.collect()
        assert re.fullmatch(r"tiered_index\.errors\.CorruptFile: \S+: .*", str(failed.value).strip())
        assert not printed()
        # errors of other code keep their text
        failing = udf(lambda number: 1 // number, "long")
        with pytest.raises(PythonException, match=r"the Python worker(.|\n)*ZeroDivisionError"):
            session.range(1).select(failing("id")).collect()
        assert "ZeroDivisionError" in printed()
    with pytest.raises(InvalidArgument, match=r"'begin'.*beginMs"), typed_errors("reading"):
        load(session, uri, begin="1")
    with pytest.raises(SchemaMismatch, match=r"'offset'.*string.*bigint"), typed_errors("reading"):
        session.read.format("tiered_index").schema("topic string, offset string").load(uri).collect()
    # in upper or lower case, as in Spark
    schema = "OFFSET long, Topic string, TIMESTAMP timestamp"
    frame = session.read.format("tiered_index").schema(schema).option("topic", "orders").load(uri)
    rows = frame.filter("topic = 'orders'").collect()
    assert rows[0].__fields__ == ["OFFSET", "Topic", "TIMESTAMP"] and {row.Topic for row in rows} == {"orders"}
