"""`hash_key` in all its forms equals Java's: Python's scalar and vectorised forms, Spark's columns and SQL, DuckDB's
SQL.
"""

import json
import struct
from functools import cache
from pathlib import Path
from unittest import mock

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F  # noqa: N812 - the usual name

import tiered_index.spark
from tiered_index import hash_key, hash_key_sql
from tiered_index.errors import InvalidArgument
from tiered_index.format.hashing import code_units, hash_batch, java_string_hash

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "tiered"
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
pairs = st.tuples(text, text)


def java(topic, key):
    value = 0
    for (unit,) in struct.iter_unpack(">H", f"{topic}#{key}".encode("utf-16-be")):
        value = (31 * value + unit) % 2**32
    signed = value - 2**32 if value >= 2**31 else value
    return 0 if signed == -(2**31) else abs(signed)


def golden_pairs():
    """Topics and keys whose hashes are in Java's files, with those hashes."""
    hashes_by_pair = {}
    for case in ("unicode", "minvalue_slots16"):
        calls = [json.loads(line) for line in (GOLDEN / case / "input.jsonl").read_text().splitlines()]
        meta = json.loads((GOLDEN / case / "meta.json").read_text())
        data = (GOLDEN / case / "unsealed.bin").read_bytes()
        hashes = {abs(hash_) % 2**31 for (hash_,) in struct.iter_unpack(">i28x", data[28 + 8 * meta["slots"] :])}
        for call in calls:
            for key in call["keys"] or ():
                if call["result"] == "SUCCESS" and call["topic"]:
                    hashes_by_pair[call["topic"], key] = hashes
    return hashes_by_pair


@cache
def duck():
    connection = duckdb.connect()
    connection.execute(hash_key_sql("duckdb"))
    return connection


def by_duck(rows):
    return [duck().execute("SELECT hash_key(?::VARCHAR, ?::VARCHAR)", list(row)).fetchone()[0] for row in rows]


def by_batch(rows):
    topics = [topic for topic, _ in rows]
    hashes, _ = hash_batch(topics, np.arange(len(rows)), code_units([key for _, key in rows]))
    return hashes.tolist()


def by_spark(spark, rows):
    frame = spark.createDataFrame(rows, "topic string, key string").coalesce(1)
    frame.createOrReplaceTempView("hashed_keys")
    spark.sql(hash_key_sql("spark"))
    column = tiered_index.spark.hash_key("topic", frame.key)
    rows = frame.select(column, without_java("topic", frame.key), F.expr("hash_key(topic, key)")).collect()
    assert all(of_java == of_python == of_sql for of_java, of_python, of_sql in rows)
    return [of_java for of_java, *_ in rows]


def without_java(*arguments):
    """The column as Spark Connect makes it."""
    with mock.patch("tiered_index.spark.lookup.hash_column._by_java", lambda text: None):
        return tiered_index.spark.hash_key(*arguments)


def test_hashes_of_the_golden_files_in_every_form(spark):
    golden = golden_pairs()
    rows = list(golden)
    assert len(rows) > 60
    hashes = [hash_key(*row) for row in rows]
    assert all(key_hash in golden[row] for row, key_hash in zip(rows, hashes, strict=True))
    # the keys include characters outside the basic plane, and one whose hash is Integer.MIN_VALUE
    assert 0 in hashes and any(ord(c) > 0xFFFF for _, key in rows for c in key)
    assert by_batch(rows) == by_duck(rows) == by_spark(spark, rows) == hashes == [java(*row) for row in rows]
    rows = [(None, "k"), ("t", None), ("t", ""), ("t", "x" * 32_767)]
    assert by_duck(rows) == by_spark(spark, rows) == [None, None, java("t", ""), java("t", "x" * 32_767)]


@given(pairs)
@settings(max_examples=300, deadline=None)
def test_random_text_in_python_and_duckdb(row):
    assert [hash_key(*row)] == by_batch([row]) == by_duck([row]) == [java(*row)]


@pytest.mark.long
def test_the_rule_of_newer_rocketmq(spark):
    """The rule is the lower 31 bits, Java's `hashCode() & 0x7FFFFFFF`, in every form."""
    rows = list(golden_pairs())
    masked = [java_string_hash(f"{topic}#{key}") & 0x7FFFFFFF for topic, key in rows]
    assert masked != [hash_key(*row) for row in rows]
    assert [hash_key(*row, "mask") for row in rows] == masked
    frame = spark.createDataFrame(rows, "topic string, key string").coalesce(1)
    frame.createOrReplaceTempView("masked_keys")
    spark.sql(hash_key_sql("spark", "mask"))
    arguments = ("topic", "key", "mask")
    columns = tiered_index.spark.hash_key(*arguments), without_java(*arguments), F.expr("hash_key(topic, key)")
    assert [tuple(row) for row in frame.select(*columns).collect()] == [(hashed,) * 3 for hashed in masked]
    with duckdb.connect() as connection:
        connection.execute(hash_key_sql("duckdb", "mask"))
        assert [connection.execute("SELECT hash_key(?, ?)", row).fetchone()[0] for row in rows] == masked
    with pytest.raises(InvalidArgument, match="'abs' or 'mask', not 'both'"):
        hash_key("t", "k", "both")
