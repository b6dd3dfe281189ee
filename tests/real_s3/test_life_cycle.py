"""A file's whole life on a real server: put, seal, compact, upload in parts, retire, and cold lookups by one range GET
per file.
"""

from pathlib import Path

import pytest

from tests.real_s3.commands import ITEMS, SLOTS
from tests.real_s3.conftest import Server
from tests.real_s3.sample import MESSAGES, Sample
from tests.support.counting_proxy import counting_proxy
from tiered_index import IndexReader, IndexService
from tiered_index.storage.base import PART_BYTES

pytestmark = pytest.mark.real_s3

SETTINGS = {"preset": "rocketmq", "slots": SLOTS, "items": ITEMS, "local_keep_s": 0, "background": False}


def test_the_life_of_files(server: Server, place: str, tmp_path: Path, sample: Sample) -> None:
    uri, keys = server.uri(place), sample.questions(40)
    with IndexService.open(root=tmp_path / "root", storage=uri, **SETTINGS) as index:
        sample.put_into(index, source="log")
        index.flush()
        sample.check(index, keys)
        index.run_lifecycle()  # full files
        sample.check(index, keys)
        index.seal()
        index.run_lifecycle()
        index.run_lifecycle()  # a file retires at the latest in the round after its upload
        sample.check(index, keys)
        assert {handle.place for handle in index.files()} == {"storage"}
        stored = list(index.log_state.objects.values())
        assert sum(o.count for o in stored) == sample.workload.entries
        assert index.durable_position("log") == MESSAGES
        used = index.storage.total.requests_by_kind
        in_parts = [o.size_bytes for o in stored if o.size_bytes > PART_BYTES]
        # the begin of each upload, and its parts; the last one counts with the upload's end
        assert used["write"] == sum(1 + size // PART_BYTES for size in in_parts) >= 2 * len(in_parts) > 2
        assert index.storage.purge(0) == ()
        assert sorted(info.name for info in index.storage.list("data/")) == sorted(o.name for o in stored)
    assert not list((tmp_path / "root").rglob("*.index"))
    # the server checks the signature of every request that the proxy passes on and counts
    cold = {"refresh_interval_s": 3600, "cache_slot_groups": False, "filter_after_probes": 10**6}
    with (
        counting_proxy(server.endpoint_url) as proxy,
        IndexReader.open(server.uri(place, proxy.endpoint_url), **cold) as reader,
    ):
        sample.check(reader, sample.questions(300))  # these lookups read every directory
        rare = [(topic, key) for topic, key in sample.questions(120) if len(sample.answers.answer(topic, key)) < 50]
        reads, (begin_ms, end_ms) = 0, sample.hour()
        for topic, key in rare:
            proxy.reset()
            result = reader.query(topic, key, max_count=1_000_000)
            sent = proxy.reset()
            sample.check_one(result, topic, key)
            read = [report.requests for report in result.explain.files if report.outcome == "read"]
            assert read == [1] * len(sent) and all(exchange.ranged for exchange in sent)
            assert (result.explain.requests, result.explain.bytes) == (len(sent), sum(each.bytes for each in sent))
            assert result.explain.bytes < 200_000 * len(stored)
            reads += len(read)
            result = reader.query(topic, key, begin_ms, end_ms, max_count=1_000_000)
            sample.check_one(result, topic, key, begin_ms, end_ms)
        assert reads > len(rare) > 30
