"""A writer in its own process, which tests stop, continue and kill.

    python -m tests.fencing.writer ROOT URI MOMENT LEASE_TTL_S

MOMENT is a call to the storage. At this call the writer prints a line on stdout, and sends no further request until it
reads a line. Then it puts until it is fenced, and prints its state. It prints one JSON document per line.
"""

import json
import sys
import threading
import time
from dataclasses import dataclass
from typing import Literal

from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService
from tiered_index.errors import WriterFenced
from tiered_index.storage.opening import open_storage

NOW_MS = 1_700_000_000_000
FIRST = 120
"""The number of messages that are durable before the moment."""
KEYS = 10
_LONGEST_S = 60


@dataclass(frozen=True)
class Moment:
    """The first call of `operation` whose name starts with `prefix`. `items` is the size of files."""

    operation: str
    prefix: str
    when: Literal["before", "after"] = "before"
    items: int = 50


MOMENTS = {
    "with nothing to publish": Moment("put", "lease/", items=100_000),
    "before an object": Moment("put", "data/"),
    "before a record": Moment("put_if_absent", "log/"),
    "before the answer to a record": Moment("put_if_absent", "log/", when="after"),
}


def append_positions(**document: object) -> None:
    """Print one line, whole: two threads may print."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def put(index: IndexService, number: int, topic: str = "old") -> None:
    key = f"key-{number % KEYS}"
    index.put(topic, 0, key, number, 10, NOW_MS + number * 1000, source=topic, source_position=number)


def main(root: str, uri: str, moment: str, lease_ttl_s: str) -> None:
    """Run until the writer is fenced."""
    chosen, released = MOMENTS[moment], threading.Event()
    storage = FaultStorage(open_storage(uri))

    def hold() -> None:
        append_positions(event="held")
        sys.stdin.readline()
        released.set()

    where = {"root": root, "storage": uri, "storage_backend": storage}
    intervals = {"lifecycle_interval_s": 0.05, "flush_interval_s": 0.02, "refresh_interval_s": 0.1}
    settings = {"slots": 101, "items": chosen.items, "lease_ttl_s": float(lease_ttl_s)}
    index = IndexService.open(**where, **intervals, **settings)
    for number in range(FIRST):
        put(index, number)
    storage.meanwhile(chosen.operation, hold, when=chosen.when, name_prefix=chosen.prefix)
    index.flush()
    append_positions(event="flushed", durable=index.durable_position("old"))
    released.wait()
    deadline_s = time.monotonic() + _LONGEST_S
    accepted = FIRST
    reason = ""
    while not reason and time.monotonic() < deadline_s:
        try:
            put(index, accepted)
            accepted += 1
            time.sleep(0.005)
        except WriterFenced as error:
            reason = str(error)
    index.flush()
    answers = sum(len(index.query("old", f"key-{key}", max_count=100_000)) for key in range(KEYS))
    health = {name: index.health()[name] for name in ("fenced", "problems")}
    durable = index.durable_position("old")
    append_positions(event="fenced", reason=reason, accepted=accepted, durable=durable, answers=answers, **health)
    index.close()
    append_positions(event="closed")


if __name__ == "__main__":
    main(*sys.argv[1:])
