"""Followers that are killed: ``python -m tests.kafka.killed ROOT SERVERS TOPIC,... KILLS [LIFE_S] [archive]``.

Each follower is a fork of this process, which itself has no client of Kafka. After each kill it prints how many of the
followers had put records before. `LIFE_S` is the longest life of a follower after it began to put. With
`archive` they archive, too.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import tiered_index.kafka.client as kafka_client
import tiered_index.kafka.source as kafka_source
from tests.kafka.followed import source_of
from tiered_index import IndexService
from tiered_index.follow import Follower
from tiered_index.kafka.archive import KafkaArchiver

SETTINGS = {"slots": 997, "items": 20_000, "flush_interval_s": 0.05}
# the client tries again soon
HASTY = {"reconnect.backoff.max.ms": "200", "retry.backoff.ms": "50", "retry.backoff.max.ms": "200", "log_level": "0"}


def open_index(root: Path) -> IndexService:
    """Return the index, whose storage is beside its root."""
    return IndexService.open(root=root, storage=f"{root.absolute().as_uri()}-storage", **SETTINGS)


def follow(root: Path, servers: str, topics: str, put: int, *, archives: bool) -> None:
    """Follow until the process is killed; a byte for each round that put records."""
    kafka_source._WAIT_S = kafka_client._WAIT_S = 0.02
    index = open_index(root)
    source = source_of(index, servers, *topics.split(","), follow=True, settings=HASTY)
    archiver = KafkaArchiver(source, segment_bytes=1 << 14, every_s=0.0) if archives else None
    follower = Follower(index, source, archiver=archiver, note=lambda _: None)
    follower.in_background()
    seen = 0
    while not follower.has_ended():
        if follower.messages > seen:
            seen = follower.messages
            os.write(put, b".")
        time.sleep(0.005)
    follower.end()


def main(root: str, servers: str, topics: str, kills: str, life_s: str = "0.2", *archive: str) -> None:
    """Kill so many followers, each at a moment of its own after it began to put."""
    times, fruitful = random.Random(4), 0
    for _ in range(int(kills)):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.close(read)
            follow(Path(root), servers, topics, write, archives=bool(archive))
            os._exit(1)
        os.close(write)
        fruitful += bool(os.read(read, 1))
        time.sleep(times.uniform(0, float(life_s)))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        os.close(read)
        print(fruitful, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
