"""`hash_key` as columns and SQL of Spark, and as SQL of DuckDB, equals Python's.

`tests/unit/format/test_hashing.py` proves that those are Java's.
"""

from functools import cache
from unittest import mock

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F  # noqa: N812 - the usual name

import tiered_index.spark
from tiered_index import hash_key, hash_key_sql
from tiered_index.errors import InvalidArgument

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
# characters outside the basic plane, and two keys whose hash is Integer.MIN_VALUE
PAIRS = [
    *(
        ("主题😀", key)
        for key in ("订单号-一二三", "🚀🚀rocket", "café", "𠮷野家", "👨\u200d👩\u200d👧", "a#b", " ", "\x00", "\uffff")
    ),
    *(("TopicTest", key) for key in ("boxvajrkywm", "euuudrqcyle", "", "x" * 32_767, *(f"k-{n}" for n in range(20)))),
]


@cache
def duck(rule):
    connection = duckdb.connect()
    connection.execute(hash_key_sql("duckdb", rule))
    return connection


def by_duck(rows, rule="abs"):
    return [duck(rule).execute("SELECT hash_key(?::VARCHAR, ?::VARCHAR)", list(row)).fetchone()[0] for row in rows]


def by_spark(spark, rows, rule="abs"):
    """Return the hashes of Spark's columns, as classic sessions and Spark Connect make them, and of its SQL."""
    frame = spark.createDataFrame(rows, "topic string, key string").coalesce(1)
    spark.sql(hash_key_sql("spark", rule))
    arguments = ("topic", frame.key, rule)
    with mock.patch("tiered_index.spark.lookup.hash_column._by_java", lambda text: None):
        without_java = tiered_index.spark.hash_key(*arguments)
    columns = tiered_index.spark.hash_key(*arguments), without_java, F.expr("hash_key(topic, key)")
    hashes = frame.select(*columns).collect()
    assert all(of_java == of_python == of_sql for of_java, of_python, of_sql in hashes)
    return [of_java for of_java, *_ in hashes]


@pytest.mark.parametrize("rule", ["abs", pytest.param("mask", marks=pytest.mark.long)])
def test_hashes_in_every_form(spark, rule):
    hashes = [hash_key(*pair, rule) for pair in PAIRS]
    assert 0 in hashes and (rule == "abs" or hashes != [hash_key(*pair) for pair in PAIRS])
    assert by_duck(PAIRS, rule) == by_spark(spark, PAIRS, rule) == hashes
    nulls = [(None, "k"), ("t", None)]
    assert by_duck(nulls, rule) == by_spark(spark, nulls, rule) == [None, None]
    with pytest.raises(InvalidArgument, match="'abs' or 'mask', not 'both'"):
        hash_key("t", "k", "both")


@given(st.tuples(text, text))
@settings(max_examples=300, deadline=None)
def test_random_text_in_duckdb(row):
    assert by_duck([row]) == [hash_key(*row)]
