"""Measures the rate at which topics are read into an index: ``python -m tests.kafka.rate ROOT SERVERS TOPIC,...``.

It prints records, seconds, and seconds of processor time of all threads, those of the client among them. All entries
are flushed by then.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.kafka.followed import ingest
from tiered_index import IndexService


def main(root: str, servers: str, topics: str) -> None:
    """Read the topics to their ends."""
    with IndexService.open(root=Path(root), storage=f"{Path(root).absolute().as_uri()}-storage") as index:
        began_s, used_s = time.monotonic(), time.process_time()
        follower = ingest(index, servers, *topics.split(","))
        wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - used_s
    print(json.dumps({"records": follower.messages, "wall_s": wall_s, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
