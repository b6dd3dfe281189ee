"""An added key finds earlier records, too, each once: from the broker, else from the archive, else they are named."""

import json
from collections import Counter

import pytest

from tests.kafka.followed import archive, ingest, source_of
from tests.support.kafka_cluster import PARTITIONS
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka import added_keys
from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.hashing import fingerprint


def produced(begin, end):
    # in some records both keys are equal
    for number in range(begin, end):
        value = json.dumps({"user": f"k{number % 6}", "n": number}).encode()
        yield {
            "key": f"k{number % 4}",
            "value": value,
            "partition": number % PARTITIONS,
            "timestamp": 1_700_000_000_000,
        }


KEYS = {
    "key": lambda number: f"k{number % 4}",
    "json:user": lambda number: f"k{number % 6}",
    "u=json:user": lambda number: f"u=k{number % 6}",
}


def entries(index, topic, numbers):
    """Return how often each entry is in the index, as number of the record and key."""
    known = {fingerprint(topic, key): key for number in numbers for key in (of(number) for of in KEYS.values())}
    with index.export(topic) as batches:
        rows = [row for batch in batches for row in batch.to_pylist()]
    return Counter((row["offset"] * PARTITIONS + row["queue_id"], known[row["fingerprint"]]) for row in rows)


def expected(numbers, *rules):
    return Counter({(number, KEYS[rule](number)) for number in numbers for rule in rules})


def test_a_key_is_added_to_records_that_are_known_and_kept_until_it_is_dropped(index, servers, producing, topic):
    producing.send(topic, produced(0, 40))
    ingest(index, servers, topic)
    producing.send(topic, produced(40, 60))
    # a run without the first key
    notes = list[str]()
    ingest(index, servers, topic, keys=("u=json:user",), note=notes.append)
    assert "new records are also indexed by --key key, as in earlier runs" in notes[0]
    assert entries(index, topic, range(60)) == expected(range(60), "key", "u=json:user")
    ingest(index, servers, topic, keys=("json:user", "key"))
    assert entries(index, topic, range(60)) == expected(range(60), *KEYS)
    assert index.query(topic, "k5").lost == ()
    ingest(index, servers, topic, dropped_keys=("json:user", "u=json:user"))
    producing.send(topic, produced(60, 80))
    ingest(index, servers, topic)
    with_all = expected(range(60), *KEYS) | expected(range(60, 80), "key")
    assert entries(index, topic, range(80)) == with_all
    with pytest.raises(InvalidArgument, match="it is no key of topic"):
        ingest(index, servers, topic, dropped_keys=("json:other",))


def test_the_document_of_a_topic_keeps_the_keys_of_another_cluster(index, servers, producing, topic):
    index.describe_topics([topic], document_of("kafka", {"cluster": "gone", "keys": ["json:user"]}))
    producing.send(topic, produced(0, 4))
    ingest(index, servers, topic)
    document = index.topic_document(topic)
    assert document.key_rules == ["json:user", "key"] and document.facts["cluster"] != "gone"


def test_earlier_records_come_from_the_archive_if_the_broker_has_deleted_them(
    index, cluster, servers, producing, topic
):
    producing.send(topic, produced(0, 40))
    archive(index, servers, topic)
    producing.send(topic, produced(40, 80))
    ingest(index, servers, topic)
    for partition in range(PARTITIONS):
        # the archive has up to offset 10
        cluster.trim(topic, partition, 15)
    notes = list[str]()
    ingest(index, servers, topic, keys=("u=json:user",), note=notes.append)
    there = [number for number in range(80) if not 10 <= number // PARTITIONS < 15]
    assert entries(index, topic, range(80)) == expected(range(80), "key") + expected(there, "u=json:user")
    assert sum("neither the broker nor the archive has offsets 10 to 14" in note for note in notes) == 4
    lost = index.query(topic, "u=k1").lost
    assert len(lost) == PARTITIONS and all(
        "can't be read any more for --key u=json:user" in part.reason for part in lost
    )
    assert index.query(topic, "k1").lost == ()


def test_a_pass_that_is_ended_between_any_batches_continues(index, servers, producing, topic, monkeypatch):
    monkeypatch.setattr(added_keys, "_AT_ONCE", 3)
    producing.send(topic, produced(0, 60))
    ingest(index, servers, topic)
    for number in range(60):
        source = source_of(index, servers, topic, keys=("u=json:user", "json:user"))
        with Follower(index, source, follow=False, note=lambda text: None):
            taken = 0
            for batch in source.batches():
                if batch.columns is not None and batch.source.startswith("topic-key-read:"):
                    index.put_source_batch(batch.columns, batch.source, batch.position)
                    taken += 1
                    break
        index.flush()
        if not taken:
            break
        assert index.query(topic, "u=k1").lost or number
    ingest(index, servers, topic)
    assert entries(index, topic, range(60)) == expected(range(60), *KEYS)
    assert index.query(topic, "u=k1").lost == ()
