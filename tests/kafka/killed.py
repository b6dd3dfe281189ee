"""Followers that are killed: ``python -m tests.kafka.killed ROOT SERVERS TOPIC,... KILLS [LIFE_S] [archive]``.

Each follower is a fork of this process, which itself has no client of Kafka. After each kill it prints how many of the
followers had put records before. `LIFE_S` is the longest life of a follower after it began to put. With
`archive` they archive, too, and the life of each fifth begins when it has archived.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import tiered_index.connectors.kafka.client.broker as kafka_client
import tiered_index.connectors.kafka.source as kafka_source
from tests.kafka.followed import source_of
from tiered_index import IndexService
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.archive import KafkaArchiver

SETTINGS = {"slots": 997, "items": 20_000, "flush_interval_s": 0.05}
# the client tries again soon
# what a follower writes into its pipe
PUT, ARCHIVED = b"p", b"a"
HASTY = {"reconnect.backoff.max.ms": "200", "retry.backoff.ms": "50", "retry.backoff.max.ms": "200", "log_level": "0"}


def open_index(root: Path) -> IndexService:
    """Return the index, whose storage is beside its root."""
    return IndexService.open(root=root, storage=f"{root.absolute().as_uri()}-storage", **SETTINGS)


def follow(root: Path, servers: str, topics: str, pipe: int, *, archives: bool) -> None:
    """Follow until the process is killed; a byte into the pipe when records were put, and when some were archived."""
    kafka_source._WAIT_S = kafka_client._WAIT_S = 0.02
    # several segments of few records
    kafka_client.MOST_MESSAGES = 20
    index = open_index(root)
    source = source_of(index, servers, *topics.split(","), follow=True, settings=HASTY)
    archiver = KafkaArchiver(source, segment_bytes=1 << 14, every_s=0.0) if archives else None
    follower = Follower(index, source, archiver=archiver, note=lambda _: None)
    follower.in_background()
    has_put = has_archived = False
    while not follower.has_ended():
        if follower.messages and not has_put:
            has_put = True
            os.write(pipe, PUT)
        if archiver is not None and archiver.archived and not has_archived:
            has_archived = True
            os.write(pipe, ARCHIVED)
        time.sleep(0.005)
    follower.end()


def wait_for(pipe: int, *signs: bytes) -> bool:
    """Return whether a follower wrote these signs, in any order, before it ended."""
    missing = set(signs)
    while missing and (written := os.read(pipe, 1)):
        missing.discard(written)
    return not missing


def main(root: str, servers: str, topics: str, kills: str, life_s: str = "0.2", *archive: str) -> None:
    """Kill so many followers, each at a moment of its own after it began to put."""
    times, fruitful = random.Random(4), 0
    for number in range(1, int(kills) + 1):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.close(read)
            follow(Path(root), servers, topics, write, archives=bool(archive))
            os._exit(1)
        os.close(write)
        fruitful += wait_for(read, PUT, ARCHIVED) if archive and not number % 5 else wait_for(read, PUT)
        time.sleep(times.uniform(0, float(life_s)))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        os.close(read)
        print(fruitful, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
