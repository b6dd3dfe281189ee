"""Records of Kafka in an archive on a real server: two GETs read a record; the archive is verified, erased, and
expires.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kafka.followed import archive, archived
from tests.support.kafka_cluster import PARTITIONS, Producing, kafka_cluster
from tiered_index import IndexReader, IndexService, Retention, erase, expire
from tiered_index.clock import ManualClock, SystemClock
from tiered_index.kafka.messages import KafkaMessages
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.storage.opening import open_storage

pytestmark = pytest.mark.real_s3

TIME_MS = 1_700_000_000_000
COUNT = 3_000


def check(uri: str) -> None:
    report = Report()
    with open_storage(uri) as storage:
        check_storage(storage, {}, report, lambda *_: None, deep=True, threads=4)
    assert not report.findings and not report.notes


def test_records_are_found_erased_and_expired_on_a_real_server(uri: str, tmp_path: Path) -> None:
    produced = [
        {"key": f"k{n}", "value": f"value {n}", "partition": n % PARTITIONS, "timestamp": TIME_MS + n}
        for n in range(COUNT)
    ]
    settings = {"slots": 97, "items": 5_000, "background": False}
    with kafka_cluster() as cluster, IndexService.open(root=tmp_path / "root", storage=uri, **settings) as index:
        Producing(cluster.servers).send("orders", produced)
        follower = archive(index, cluster.servers, "orders", segment_bytes=100_000)
        assert (follower.messages, follower.loss_count) == (COUNT, 0)
        assert len(list(archived(index))) == COUNT
        index.seal()
        index.run_lifecycle()
        check(uri)
        with IndexReader.open(uri) as reader:
            source = KafkaMessages(reader.segment_archives)
            for n in range(0, COUNT, 97):
                (found,) = reader.messages("orders", f"k{n}", source=source).messages
                assert (found.state, found.message.value) == ("archived", b"value %d" % n)
                assert found.requests <= 2
    certificate = erase(uri, "orders", keys="k97", yes=True, now=True, grace_s=0)
    assert (certificate.messages_erased, certificate.segments_remaining) == (1, ())
    check(uri)
    with IndexReader.open(uri) as reader:
        assert KafkaMessages(reader.segment_archives).at("orders", 97 % PARTITIONS, 97 // PARTITIONS).state == "erased"
    expire(uri, Retention(segments_age_s=1), yes=True, clock=ManualClock(SystemClock().now_ms() + 10_000))
    with IndexReader.open(uri) as reader:
        assert not reader.archived()
