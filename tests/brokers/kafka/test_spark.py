"""Spark's own Kafka source on a real broker: a stream and a build of its rows make the entries that `ingest` makes."""

from __future__ import annotations

import json

import pytest

from tests.brokers.connectors.jobs import run_job
from tiered_index import IndexReader


def entries(uri):
    """Return the places, values and hashes of all entries of an index."""
    with IndexReader.open(uri) as reader, reader.export() as batches:
        rows = [row for batch in batches for row in batch.to_pylist()]
    names = ("queue_id", "offset", "size", "timestamp_ms", "key_hash", "fingerprint")
    return sorted(tuple(row[name] for name in names) for row in rows)


@pytest.mark.parametrize("version", ["4.2.0", None], ids=["4.2.0", "newest"])
def test_rows_of_sparks_source_make_the_entries_of_ingest(version, broker, topics, producing, run, topic, tmp_path):
    topics.create(topic, 2)
    sent = [
        {"key": f"key-{n % 20}", "value": json.dumps({"order": {"id": f"order-{n}"}}), "headers": [("trace", f"t-{n}")]}
        for n in range(60)
    ]
    producing.send(topic, [*sent, {"key": b"\xff\x0a", "value": b"{}"}, {"key": None, "value": b"no json"}])
    followed = (tmp_path / "followed").as_uri()
    keys = ("--key", "key", "--key", "header:trace", "--key", "json:order.id")
    done = run("ingest", f"kafka://{broker.address}/{topic}", *keys, "--storage", followed, "--wait", "--json")
    assert done.code == 0, done.err
    expected = entries(followed)
    assert len(expected) == 181

    run_job("kafka", tmp_path, broker.address, topic, version=version)
    for name in ("streamed", "built"):
        assert entries((tmp_path / name).as_uri()) == expected
