"""A line of NDJSON that is no message: the column is named, what it has and what is needed, whether Spark or a task
reads the file.
"""

from __future__ import annotations

import contextlib
import gzip
import json

import pyarrow as pa
import pytest

from tests.spark.entries import BEGIN_MS
from tests.support.cold_index import Recorder
from tiered_index.errors import InvalidArgument
from tiered_index.spark import build
from tiered_index.spark.build.sources import _read_ndjson
from tiered_index.spark.executors import first_wrong_line, told_by_spark, typed_errors
from tiered_index.storage.memory import MemoryStorage

GOOD = {"topic": "t", "queue_id": 1, "keys": ["k"], "offset": 1, "size": 1, "timestamp_ms": BEGIN_MS}
WRONG = {
    "text": ({"offset": "abc"}, "column 'offset' has 'abc', text; integers are needed"),
    "fraction": ({"size": 1.5}, "column 'size' has '1.5', a fraction; integers are needed"),
    "truth": ({"queue_id": True}, "column 'queue_id' has 'true', a truth value; integers are needed"),
    "list": ({"keys": "k"}, "column 'keys' has 'k', text; a list of text is needed"),
    "time": (
        {"timestamp_ms": "2024-01-01"},
        "column 'timestamp_ms' has '2024-01-01', text; integers (epoch milliseconds) are needed",
    ),
    "large": ({"offset": 2**63}, "column 'offset' has '9223372036854775808', a number; integers are needed"),
}


class Stored:
    """Opens one storage, whatever the URI."""

    def __init__(self) -> None:
        self.storage = Recorder(MemoryStorage())

    def address(self, uri):
        return self

    def open(self):
        return contextlib.nullcontext(self.storage)

    def read(self, name, data):
        self.storage.inner.put(name, gzip.compress(data) if name.endswith(".gz") else data)
        split = pa.record_batch({"split": [json.dumps(["s3://bucket", name, 0])]})
        return pa.Table.from_batches(_read_ndjson([split], self.address))


def lines(*changes):
    return b"".join(json.dumps({**GOOD, **change}).encode() + b"\n" for change in changes)


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("name", ["m.ndjson", "m.ndjson.gz"])
def test_a_task_names_line_and_column(case, name):
    change, message = WRONG[case]
    stored = Stored()
    assert stored.read(name, lines({}, {}))["offset"].to_pylist() == [1, 1]
    with pytest.raises(InvalidArgument) as caught:
        stored.read(name, lines({}, {}, change, change))
    assert f"{name}: line 3: " in str(caught.value) and message in str(caught.value)


def test_a_task_names_a_line_that_is_no_json():
    with pytest.raises(InvalidArgument, match=r"m\.ndjson: line 2 is no JSON"):
        Stored().read("m.ndjson", lines({}) + b"this is none\n")
    assert first_wrong_line([b"\n", b"[1]\n"]) == "line 2 is a list, not an object"
    assert first_wrong_line(lines({}, {"keys": None}, {"more": {}}).splitlines()) is None
    assert len(first_wrong_line([b'{"topic": ' + b"1" * 1000 + b"}"])) < 120


@pytest.mark.parametrize("name", ["m.ndjson", "m.ndjson.gz"])
def test_a_file_is_read_in_large_blocks(name):
    stored = Stored()
    data = b"".join(lines({"keys": [str(n * 2654435761 % 2**32)]}) for n in range(20_000))
    assert stored.read(name, data).num_rows == 20_000
    assert len(stored.storage.reads) == 1


def test_spark_names_the_column_of_a_local_file(spark, storage, config, tmp_path):
    path = tmp_path / "m.ndjson"
    path.write_bytes(lines({}, WRONG["text"][0]))
    with pytest.raises(InvalidArgument) as caught:
        build(spark, path, storage=storage, config=config)
    assert str(path) in str(caught.value) and WRONG["text"][1] in str(caught.value)


@pytest.mark.parametrize(
    ("value", "token", "shown"),
    [
        ("1.5", "VALUE_NUMBER_FLOAT", "'1.5', a fraction"),
        ("{", "START_OBJECT", "'{', an object"),
        ("a\nb", "VALUE_STRING", r"'a\nb', text"),
        ("x", "SOME_TOKEN", "'x', SOME_TOKEN"),
    ],
)
def test_what_spark_says(value, token, shown):
    text = (
        "[MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] Malformed records\nCaused by: "
        "org.apache.spark.SparkRuntimeException: "
        f"[CANNOT_PARSE_JSON_FIELD] Cannot parse the field name 'size' and the value {value} of the JSON token type "
        f"{token} to target"
        ' Spark data type "BIGINT". SQLSTATE: 2203G'
    )
    assert told_by_spark(text) == f"column 'size' has {shown}; integers are needed"
    with (
        pytest.raises(InvalidArgument, match=r"reading: file:///d/m\.json: column 'size' has"),
        typed_errors("reading"),
    ):
        raise RuntimeError(f"reading file file:///d/m.json. {text}")
    assert told_by_spark("MALFORMED_RECORD_IN_PARSING") is None
