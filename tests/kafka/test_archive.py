"""Records in the archive: every one once, found by its offset, whatever is killed or deleted meanwhile."""

from __future__ import annotations

from tests.kafka.followed import archive
from tests.support.kafka_cluster import PARTITIONS
from tiered_index.format.columnar import decode_columns
from tiered_index.kafka.archive import records_of


def archived(index):
    """The records in the archive, in its order."""
    archive = index.segment_archive
    state = archive.refresh()
    segments = [segment for store in state.stores for segment in state.segments_of(store)]
    for segment in segments:
        assert segment.name.endswith(".parquet")
        yield from records_of(decode_columns(archive.verified(segment, 0, segment.size_bytes)))


def test_every_record_is_archived_as_it_is(index, servers, producing, topic):
    produced = [
        {
            "key": None if n % 7 == 0 else f"k{n}",
            "value": None if n % 5 == 0 else bytes([n % 256]) * (n % 50),
            "headers": [("a", b"\xff"), ("a", None)] if n % 3 == 0 else [],
            "partition": n % PARTITIONS,
            "timestamp": 1_700_000_000_000 + n,
        }
        for n in range(400)
    ]
    producing.send(topic, produced)
    follower = archive(index, servers, topic)
    assert (follower.messages, follower.archiving.archived, follower.loss_count) == (400, PARTITIONS, 0)
    found = {(one.partition, one.offset): one for one in archived(index)}
    assert len(found) == 400
    for n, sent in enumerate(produced):
        one = found[n % PARTITIONS, n // PARTITIONS]
        key = None if sent["key"] is None else sent["key"].encode()
        assert (one.topic, one.key, one.value, one.timestamp_ms) == (topic, key, sent["value"], sent["timestamp"])
        assert list(one.headers) == sent["headers"]
