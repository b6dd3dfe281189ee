"""``python -m tests.kafka.campaign``: a million records of three topics, followers that are killed, brokers that fail.

Every record of the brokers' logs must be found by its key at its place, once, and no other place with it. The archive
must have each of them once, and no other. The logs are
read again without the engine. The last line shows how much was tried.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import confluent_kafka

from tests.kafka.followed import archive, archived, proxied_cluster
from tests.kafka.killed import HASTY, open_index
from tests.support.cutting_proxy import CUT, Fault
from tests.support.kafka_cluster import PARTITIONS, Cluster, Producing

TOPICS = ("orders", "payments", "shipments")
BROKERS = 3
FOLDER = Path(__file__).parents[2]
_FETCH, _LIST_OFFSETS = 1, 2
# no leader, timeout, not its leader, an offset that a replica lacks, failed disk
_ERRORS = (5, 7, 6, 1, 56)
_LOOKUPS = 10_000
_LIFE_S = 0.5

Places = dict[tuple[str, str], set[tuple[int, int]]]


@dataclass
class Outcome:
    """The counts of records, kills, faults and checks."""

    records: int = 0
    kills: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    lost: int = 0
    doubled: int = 0
    stored_twice: int = 0
    wrong: int = 0
    follow_s: float = 0.0

    def is_right(self) -> bool:
        """Return whether nothing is lost, doubled or wrong."""
        return not (self.lost or self.doubled or self.wrong) and self.checked >= self.records


@contextlib.contextmanager
def troubled(cluster: Cluster, faults: Any, outcome: Outcome, seed: int) -> Iterator[None]:
    """Make trouble within the block: cuts, delays, errors, slow brokers, brokers that are away for a time."""
    ended, draws = threading.Event(), random.Random(seed)

    def trouble() -> None:
        while not ended.wait(draws.uniform(0.2, 1.2)):
            kind = draws.choice(("cuts", "holds", "errors", "slow brokers", "brokers away"))
            broker = draws.randint(1, BROKERS)
            if kind == "cuts":
                faults.append(CUT)
            elif kind == "holds":
                faults.append(Fault(draws.uniform(0, 0.5), draws.random() < 0.5))
            elif kind == "errors":
                cluster.fail(draws.choice((_FETCH, _LIST_OFFSETS)), draws.choice(_ERRORS))
            elif kind == "slow brokers":
                cluster.slow_down(broker, draws.choice((0, 20, 200)))
            else:
                cluster.take_down(broker)
                ended.wait(draws.uniform(0.1, 2.0))
                cluster.bring_up(broker)
            outcome.faults[kind] += 1

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        faults.clear()
        for broker in range(1, BROKERS + 1):
            cluster.slow_down(broker, 0)
        for request in (_FETCH, _LIST_OFFSETS):
            cluster.forgive(request)


def produce(producing: Producing, first: int, last: int) -> None:
    """Write the records of these numbers: the number is the key, and says topic and partition."""
    for turn, topic in enumerate(TOPICS):
        numbers = range(first + (turn - first) % len(TOPICS), last, len(TOPICS))
        producing.send(topic, ({"key": f"{n}", "partition": n // len(TOPICS) % PARTITIONS} for n in numbers))


def logs_of(servers: str) -> Places:
    """Return the places of each key in the brokers' logs."""
    places_by_key: Places = defaultdict(set)
    settings = {"bootstrap.servers": servers, "group.id": "oracle", "enable.partition.eof": True, "log_level": 0}
    reader = confluent_kafka.Consumer(settings)
    places = [(topic, partition) for topic in TOPICS for partition in range(PARTITIONS)]
    reader.assign([confluent_kafka.TopicPartition(*place, 0) for place in places])
    ends = set()
    while len(ends) < len(places):
        for message in reader.consume(20_000, 1.0):
            if message.error() is None:
                places_by_key[message.topic(), message.key().decode()].add((message.partition(), message.offset()))
            elif message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
                ends.add((message.topic(), message.partition()))
    reader.close()
    return places_by_key


def check(index: Any, expected: Places, outcome: Outcome) -> None:
    """Look every key up, and count the differences."""
    pairs = list(expected)
    for first in range(0, len(pairs), _LOOKUPS):
        some = pairs[first : first + _LOOKUPS]
        for pair, answer in zip(some, index.query_many(some), strict=True):
            entries = [(item.queue_id, item.offset) for item in answer]
            outcome.checked += len(expected[pair])
            outcome.lost += len(expected[pair] - set(entries)) + (answer.status != "complete")
            outcome.doubled += len(entries) - len(set(entries))
            outcome.wrong += len(set(entries) - expected[pair])
    index.seal()
    index.run_lifecycle()
    stored = sum(stored.count for stored in index.log_state.objects.values())
    outcome.stored_twice = stored - sum(map(len, expected.values()))


def check_archive(index: Any, expected: Places, outcome: Outcome) -> None:
    """Compare the archive with the brokers' logs, record by record."""
    stored = Counter((record.topic, record.key.decode(), record.partition, record.offset) for record in archived(index))
    wanted = Counter((*pair, *place) for pair, places in expected.items() for place in places)
    outcome.lost += (wanted - stored).total()
    outcome.doubled += (stored - wanted).total()


def run(records: int, kills: int, seed: int, folder: Path) -> Outcome:
    """Run the campaign once."""
    outcome = Outcome(records)
    with proxied_cluster(BROKERS) as (cluster, faults):
        root, producing = folder / "root", Producing(cluster.servers)
        # the first life reads what is there before
        packets = [records * n // (2 * kills) for n in range(2 * kills + 1)]
        produce(producing, 0, packets[1])
        began_s = time.monotonic()
        command = [sys.executable, "-m", "tests.kafka.killed", str(root), cluster.servers, ",".join(TOPICS), str(kills)]
        with (
            subprocess.Popen(
                [*command, str(_LIFE_S), "archive"], cwd=FOLDER, stdout=subprocess.PIPE, text=True
            ) as killing,
            troubled(cluster, faults, outcome, seed),
        ):
            assert killing.stdout is not None
            for n in range(1, 2 * kills):
                # two packets ahead: each life has something to read
                if n % 2 == 0 and not (line := killing.stdout.readline()):
                    raise AssertionError("the followers ended by themselves")
                if n % 2 == 0:
                    outcome.kills = int(line)
                produce(producing, packets[n], packets[n + 1])
            for line in killing.stdout:
                outcome.kills = int(line)
        assert killing.returncode == 0
        with open_index(root) as index:
            assert archive(index, cluster.servers, *TOPICS, settings=HASTY).loss_count == 0
            outcome.follow_s = time.monotonic() - began_s
            expected = logs_of(cluster.servers)
            assert {int(key) for _, key in expected} == set(range(records)), "the brokers lost records"
            check(index, expected, outcome)
            check_archive(index, expected, outcome)
    return outcome


def main() -> int:
    """Run the campaign, and print its counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(arguments.records, arguments.kills, arguments.seed, Path(folder))
    print(outcome)
    return not outcome.is_right()


if __name__ == "__main__":
    sys.exit(main())
