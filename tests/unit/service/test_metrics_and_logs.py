"""A process with an index has a Prometheus collector, and logs a line for each step."""

import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import tiered_index
from tests.support.rounds import upload
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.errors import ConfigError, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage

T = 1_700_000_000_000


def page(index):
    registry = CollectorRegistry(auto_describe=True)
    registry.register(tiered_index.metrics.collector(index))
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_a_collector_counts_lookups(tmp_path):
    storage, settings = FaultStorage(MemoryStorage()), {"slots": 7, "items": 12, "background": False}
    with IndexService.open(root=tmp_path / "root", storage_backend=storage, environment=False, **settings) as index:
        for offset in range(3):
            index.put("t", 0, "k", offset, 1, T)
        upload(index)
    with IndexReader.open(storage_backend=storage, block_cache_bytes=0) as reader:
        reader.query("t", "k", max_count=1)
        reader.query_many([Lookup("t", "k")] * 5)
        reader.topics()
        storage.fail("get_range", times=None)
        with pytest.raises(StorageUnavailable):
            reader.query("t", "k")
        reader.query("t", "k", allow_partial=True)
        counts = {name: count for name, count in page(reader).items() if name.startswith("tiered_index_lookups_total")}
        ends = [("query", end) for end in ("truncated", "StorageUnavailable", "partial")]
        ends += [(kind, "complete") for kind in ("query_many", "topics")]
        assert counts == {f'tiered_index_lookups_total{{kind="{kind}",status="{end}"}}': 1 for kind, end in ends}


def test_without_prometheus_the_package_is_named(monkeypatch):
    for name in ("prometheus_client", "prometheus_client.core"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "tiered_index.metrics", raising=False)
    monkeypatch.delattr(tiered_index, "metrics", raising=False)
    with pytest.raises(ConfigError, match="pip install prometheus-client"):
        tiered_index.metrics  # noqa: B018
