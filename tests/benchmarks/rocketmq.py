"""`make bench SUITE=rocketmq`: lookups by key over RocketMQ's protocol, beside a living broker.

One client of RocketMQ, in one thread, asks in turn, in one run: a broker; ``serve --root`` beside ``ingest --follow``,
whose only index file is being written (*unsealed*); and ``serve --root`` on an index whose files are all compacted and
uploaded (*sealed*). Both servers read messages from the broker's store. All three return the same number of messages.
It prints lookups a second, latencies, and the ratios of the rates to the broker's. It needs Maven and Java.
"""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks.report import finish, options, scratch
from tests.brokers import jars
from tests.brokers.rocketmq.living import (
    Asked,
    Broker,
    JavaClient,
    NameServer,
    made_topic,
    serving,
    tiered_index,
    until,
)
from tests.support.processes import TOP, without_settings

WAYS = ("broker", "unsealed", "sealed")
TOPIC, NAME, VERSION = "orders", "broker-a", "5.4.0"
_PER_KEY = 4
_BATCH = 500
_POM = TOP / "tests" / "brokers" / "rocketmq" / "pom.xml"
# As a broker is configured by default, but with smaller segments
_SETTINGS = {
    "mappedFileSizeCommitLog": 64 << 20,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "maxHashSlotNum": 5_000_000,
    "maxIndexNum": 20_000_000,
    "maxMessageSize": 4 << 20,
}


def key(number: int, messages: int) -> str:
    """Return the key of a message: all messages of a key are far from each other."""
    return f"order-{number % max(1, messages // _PER_KEY):09}"


def send(living: Asked, messages: int) -> None:
    """Send all messages in batches."""
    for start in range(0, messages, _BATCH):
        numbers = range(start, min(messages, start + _BATCH))
        batch = [{"keys": key(number, messages), "body": f"{number:0200x}"} for number in numbers]
        living.send(TOPIC, *batch, batch=True)


@contextlib.contextmanager
def following(store: Path, *index: object) -> Iterator[None]:
    """Run ``ingest --follow`` in the block."""
    command = [sys.executable, "-m", "tiered_index.cli", "ingest", str(store), "--follow", "-q", *map(str, index)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=TOP, env=without_settings(), **quiet) as process:
        try:
            yield
        finally:
            process.terminate()


def measure(
    client: JavaClient, broker: Broker, messages: int, lookups: int, rounds: int, folder: Path
) -> dict[str, dict[str, float]]:
    """Return the medians of the rounds for each way."""
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    choose = random.Random(0)
    last = key(messages - 1, messages)
    expected = sum(key(number, messages) == last for number in range(messages))
    with contextlib.ExitStack() as stack:
        asked = {"broker": Asked(client, broker.namesrv, broker.name)}
        made_topic(asked["broker"], broker, TOPIC)
        send(asked["broker"], messages)
        for way in ("unsealed", "sealed"):
            index = ("--root", folder / way, "--storage", (folder / f"{way}-storage").as_uri())
            if way == "sealed":
                tiered_index("ingest", broker.store, *index, "--wait", "-q")
            else:
                stack.enter_context(following(broker.store, *index))
                until(lambda root=folder / way: list(root.rglob("*.index")), 60.0)
            asked[way] = stack.enter_context(serving(client, broker.name, *index, "--store", broker.store))
        for way in WAYS:
            until(lambda way=way: len(asked[way].by_key(TOPIC, last)) == expected, 300.0)
        for _ in range(rounds):
            keys = [key(choose.randrange(messages), messages) for _ in range(lookups)]
            for way in WAYS:
                measured[way].append(asked[way].ask("rate", topic=TOPIC, keys=keys))
            found = {way: measured[way][-1]["found"] for way in WAYS}
            assert len(set(found.values())) == 1 and found["broker"] >= lookups, found
    return {
        way: {
            "per_s": statistics.median(lookups / one["seconds"] for one in each),
            **{name: statistics.median(one[name] for one in each) for name in ("p50_ms", "p99_ms")},
        }
        for way, each in measured.items()
    }


def main(suite: str, arguments: list[str]) -> None:
    """Measure, and print the table."""
    parser = options(suite, __doc__, rounds=3)
    parser.add_argument("--messages", type=int, default=1_000_000, help="messages of the topic, with two keys each")
    parser.add_argument("--lookups", type=int, default=500, help="lookups of each way and round")
    given = parser.parse_args(arguments)
    try:
        class_path = jars.class_path(_POM, "rocketmq", VERSION)
    except pytest.skip.Exception as missing:
        sys.exit(str(missing))
    with scratch(given.root_dir) as folder, contextlib.ExitStack() as stack:
        namesrv = NameServer(class_path, folder / "namesrv")
        stack.callback(namesrv.end)
        client = JavaClient(class_path, folder / "client")
        stack.callback(client.end)
        broker = Broker(class_path, folder / NAME, NAME, namesrv.address, **_SETTINGS)
        stack.callback(broker.end, signal.SIGKILL)
        figures = measure(client, broker, given.messages, given.lookups, given.rounds, folder)
    rows = [(way, *each.values(), each["per_s"] / figures["broker"]["per_s"]) for way, each in figures.items()]
    columns = ("way", "lookups/s", "p50 ms", "p99 ms", "times the broker's rate")
    finish(given, {"rocketmq": VERSION, "tables": {f"{given.messages:,} messages": [columns, *rows]}})
