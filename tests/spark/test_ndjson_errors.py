"""Files of NDJSON as tasks read them: each line once, with the keys that `ingest` takes of it."""

from __future__ import annotations

import contextlib
import gzip
import json

import pyarrow as pa
import pytest

from tests.spark.entries import BEGIN_MS
from tests.support.cold_index import Recorder
from tiered_index.errors import InvalidArgument
from tiered_index.server import wire
from tiered_index.server.entries import parsed
from tiered_index.sources.files import NdjsonSource
from tiered_index.sources.messages import Fields
from tiered_index.sources.places import LocalFile
from tiered_index.spark.writing import sources
from tiered_index.storage.memory import MemoryStorage

PLACE = {"topic": "t", "queue_id": 1, "offset": 1, "size": 1, "timestamp_ms": BEGIN_MS}


class Stored:
    """Opens one storage for every URI."""

    uri = "s3://bucket/p?region=x"

    def __init__(self) -> None:
        self.storage = Recorder(MemoryStorage())

    def address(self, uri):
        return self

    def open(self, *, any_names=False):
        return contextlib.nullcontext(self.storage)

    def read(self, name, data):
        self.storage.inner.put(name, gzip.compress(data) if name.endswith(".gz") else data)
        return rows(["s3://bucket", name, 0, None], address_of=self.address)


def rows(*splits, address_of=None):
    batch = pa.record_batch({"split": [json.dumps(split) for split in splits]})
    return pa.Table.from_batches(sources._read_ndjson([batch], address_of, Fields()))


def lines(*changes):
    return b"".join(json.dumps({**PLACE, "keys": ["k"], **change}).encode() + b"\n" for change in changes)


def test_a_task_and_the_service_take_the_keys_that_ingest_takes(tmp_path):
    texts = ["10.50", "-0", "1E+3", "12345678901234567.25", '"k"', '["a", 1.50, ""]', '""', "null"]
    data = "".join(f'{{**, "key": {text}}}\n' for text in texts).replace("{**", json.dumps(PLACE)[:-1]).encode()
    (tmp_path / "m.ndjson").write_bytes(data)
    (batch,) = NdjsonSource(LocalFile(tmp_path / "m.ndjson")).batches(0)
    keys = [key for record in batch.records() for key in record.message.keys]
    assert keys == [*texts[:4], "k", "a", "1.50"]
    assert Stored().read("m.ndjson", data)["key"].to_pylist() == [*keys, None, None]
    assert pa.table(parsed(data, wire.NDJSON, 1 << 20).columns)["key"].to_pylist() == keys


def test_a_task_names_the_end_of_a_file_that_is_cut():
    with pytest.raises(InvalidArgument, match=r"m\.ndjson: the last line has no newline"):
        Stored().read("m.ndjson", lines({}) + lines({})[:-9])


def test_messages_have_a_row_for_each_key_and_one_without_key():
    changes = ({"keys": ["a", "b", "a"]}, {"keys": []}, {"timestamp_ms": "2024-01-01", "topic_id": 3})
    for more, extra in (((), []), (({"queue_id": 10**6},), ["k"])):
        table = Stored().read("m.ndjson", lines(*changes, *more))
        assert sorted(table["key"].to_pylist(), key=str) == sorted(["a", "b", "k", None, *extra], key=str)
    assert set(table["topic_id"].to_pylist()) == {None, 3}


def test_parts_of_a_file_have_each_line_once(tmp_path):
    path = tmp_path / "m.ndjson"
    path.write_bytes(data := lines(*({"offset": n, "keys": [str(n)]} for n in range(40))))
    for size in (37, 128, len(data)):
        parts = [["", str(path), begin, begin + size] for begin in range(0, len(data), size)]
        assert rows(*parts)["offset"].to_pylist() == list(range(40))
    (tmp_path / "m").write_bytes(gzip.compress(data))
    zipped = [["", str(tmp_path / "m"), begin, begin + 64] for begin in (0, 64)]
    assert rows(*zipped)["offset"].to_pylist() == list(range(40))
