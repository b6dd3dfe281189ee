"""Followers that are killed lose nothing and double nothing: the oracle is what was produced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kafka.followed import archive, archived, places
from tests.kafka.killed import open_index
from tests.support.kafka_cluster import PARTITIONS

KILLS, PACKET = 20, 500


@pytest.mark.long
def test_twenty_kills_while_records_arrive(servers, producing, topic, tmp_path):
    root, count = tmp_path / "root", 0

    def send():
        nonlocal count
        numbers = range(count, count + PACKET)
        producing.send(topic, ({"key": f"k{n}", "value": "v", "partition": n % PARTITIONS} for n in numbers))
        count += PACKET

    send()
    command = [sys.executable, "-m", "tests.kafka.killed", str(root), servers, topic, str(KILLS), "0.6", "archive"]
    folder = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as killing:
        while killing.poll() is None:
            send()
            try:
                killing.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        assert killing.stdout is not None
        # each follower had put something before it was killed
        assert (killing.returncode, killing.stdout.read().split()[-1]) == (0, str(KILLS))
    with open_index(root) as index:
        archive(index, servers, topic)
        found = [(one.key, one.partition, one.offset) for one in archived(index)]
        # more than this last follower has made alone
        assert sum(1 for _ in index.archived()) > PARTITIONS
        assert sorted(found) == sorted((f"k{n}".encode(), n % PARTITIONS, n // PARTITIONS) for n in range(count))
        answers = index.query_many([(topic, f"k{n}") for n in range(count)])
        for n, answer in enumerate(answers):
            assert [(item.queue_id, item.offset) for item in answer] == [(n % PARTITIONS, n // PARTITIONS)]
        assert places(index, topic, f"k{count}") == set()
