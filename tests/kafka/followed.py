"""Topics that are read into an index."""

import contextlib
from collections import deque
from collections.abc import Iterator

from tests.support.cutting_proxy import Fault, cutting_proxy
from tests.support.kafka_cluster import Cluster, kafka_cluster
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.archive import KafkaArchiver
from tiered_index.connectors.kafka.client.broker import KafkaAddress
from tiered_index.connectors.kafka.columns import records_of
from tiered_index.connectors.kafka.keys import RecordKeys
from tiered_index.connectors.kafka.source import KafkaSource
from tiered_index.format.segments.columnar import decode_columns


def source_of(index, servers, *topics, **options) -> KafkaSource:
    keys = RecordKeys(options.pop("keys", ("key",)), options.pop("function", None))
    return KafkaSource(index, KafkaAddress(servers, topics), keys=keys, **{"follow": False, **options})


def ingest(index, servers, *topics, **options) -> Follower:
    """Read topics to their ends, and flush."""
    notes: list[str] = []
    with Follower(index, source_of(index, servers, *topics, **options), follow=False, note=notes.append) as follower:
        follower.run()
    index.flush()
    follower.notes = notes
    return follower


def archive(index, servers, *topics, segment_bytes=32 << 20, **options) -> Follower:
    """Read topics to their ends, and archive all of it."""
    notes: list[str] = []
    source = source_of(index, servers, *topics, **options)
    archiver = KafkaArchiver(source, segment_bytes)
    with Follower(index, source, follow=False, archiver=archiver, note=notes.append) as follower:
        follower.run()
        follower.finish_archiving()
    follower.notes = notes
    return follower


def archived(index):
    """The records in the archive, in its order."""
    archive = index.segment_archive
    archive.refresh()
    for segment in archive.segments():
        assert segment.name.endswith(".parquet")
        yield from records_of(decode_columns(archive.verified(segment, 0, segment.size_bytes)))


def places(index, topic, key):
    return {(item.queue_id, item.offset) for item in index.query(topic, key).items}


@contextlib.contextmanager
def proxied_cluster(brokers: int) -> Iterator[tuple[Cluster, deque[Fault]]]:
    """Run a cluster, and proxies before its brokers, for followers alone; yield it and the faults of all proxies."""
    faults: deque[Fault] = deque()
    with kafka_cluster(brokers) as cluster, contextlib.ExitStack() as stack:
        for number, address in enumerate(cluster.servers.split(","), 1):
            proxy = stack.enter_context(cutting_proxy(address, b"tiered-index"))
            proxy.faults = faults
            cluster.advertise(number, proxy.port)
        yield cluster, faults
