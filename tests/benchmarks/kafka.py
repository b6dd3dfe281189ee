"""`make bench SUITE=kafka`: what indexing topics of Kafka costs, beside a plain consume loop.

All ways read the same records of a mock cluster, in turn, in one run, each in a process of its own: a loop that only
consumes; an index by the record's key, by a field of its JSON value, and by its key with the archive. It prints the
seconds of processor time of all threads, those of the client among them, and their ratios to the loop's. All entries
are flushed, and all records are archived by then.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import confluent_kafka

from tests.benchmarks.report import finish, options
from tests.kafka.followed import archive, ingest
from tests.support.kafka_cluster import Producing, kafka_cluster
from tiered_index import IndexService

WAYS = ("loop", "key", "json", "archive")
# The mock cluster keeps 5 MiB of a partition. 24,000 records in one partition are compressed to less
_TOPIC_RECORDS = 24_000
_FIELDS = 20
_BATCH = 20_000


def topics_of(records: int) -> list[str]:
    """Return the topics that have so many records."""
    return [f"orders-{number}" for number in range(-(-records // _TOPIC_RECORDS))]


def value(number: int) -> str:
    """Return a document of some 560 bytes."""
    fields = {f"field_{n:02}": f"value {number + n:012}" for n in range(_FIELDS - 3)}
    return json.dumps({"order": {"id": f"order-{number}", "total": number / 4}, "at": number, **fields})


def consume(servers: str, records: int) -> None:
    """Read all records, and touch their parts."""
    settings = {"bootstrap.servers": servers, "group.id": "loop", "enable.auto.commit": False, "check.crcs": True}
    consumer = confluent_kafka.Consumer({**settings, "auto.offset.reset": "earliest"})
    topics = consumer.list_topics().topics
    places = [(topic, number) for topic in topics_of(records) for number in topics[topic].partitions]
    consumer.assign([confluent_kafka.TopicPartition(*place, 0) for place in places])
    read = size = 0
    while read < records:
        for message in consumer.consume(_BATCH, 0.2):
            assert message.error() is None
            size += len(message.key()) + len(message.value()) + message.offset() + message.timestamp()[1]
            read += 1
    consumer.close()


def run_way(way: str, servers: str, records: int, folder: str) -> float:
    """Return the seconds of processor time of one way in this process."""
    if way == "loop":
        begun_s = time.process_time()
        consume(servers, records)
        return time.process_time() - begun_s
    root = Path(folder) / "root"
    with IndexService.open(root=root, storage=f"{root.as_uri()}-storage", background=False) as index:
        begun_s = time.process_time()
        read = archive if way == "archive" else ingest
        follower = read(index, servers, *topics_of(records), keys=("json:order.id" if way == "json" else "key",))
        index.flush()
        used_s = time.process_time() - begun_s
        assert (follower.messages, follower.entries) == (records, records)
    return used_s


def measure(records: int, partitions: int, rounds: int) -> dict[str, float]:
    """Return the seconds of each way, the medians of the rounds."""
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    with kafka_cluster() as cluster:
        for number, topic in enumerate(topics_of(records)):
            mine = range(number * _TOPIC_RECORDS, min(records, (number + 1) * _TOPIC_RECORDS))
            produced = ({"key": f"customer-{n}", "value": value(n), "partition": n % partitions} for n in mine)
            Producing(cluster.servers).send(topic, produced)
        for _ in range(rounds):
            for way in WAYS:
                with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
                    taken[way].append(pool.apply(run_way, (way, cluster.servers, records, folder)))
    return {way: statistics.median(each) for way, each in taken.items()}


def main(suite: str, arguments: list[str]) -> None:
    """Measure, and print the table."""
    parser = options(suite, __doc__, rounds=3)
    parser.add_argument("--records", type=int, default=480_000)
    parser.add_argument("--partitions", type=int, default=4, help="of a topic of 24,000 records, at most 4")
    given = parser.parse_args(arguments)
    seconds = measure(given.records, given.partitions, given.rounds)
    rows = [(way, each, each / seconds["loop"]) for way, each in seconds.items()]
    finish(given, {"tables": {f"{given.records:,} records": [("way", "CPU s", "times the loop"), *rows]}})
