"""Answers become tables, and lookups are counted for Prometheus."""

import importlib
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.rounds import upload
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.errors import ConfigError, InvalidArgument, StorageUnavailable
from tiered_index.service.metrics import collector
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import to_pandas

T = 1_700_000_000_000
TOPIC = "<b>orders & more</b>"


@pytest.fixture
def filled(index):
    for offset in range(30):
        index.put(TOPIC, 0, ["k", f"k{offset % 2}"], offset, 5, T + 1000 * offset)
    index.put("u", 0, "k", 1, 5, T)
    return index


def test_pairs_take_a_count_and_lookups_have_their_own(filled):
    lookups = [(TOPIC, "k"), (TOPIC, "k1"), Lookup(TOPIC, "k", max_count=2)]
    assert filled.query_many(lookups, max_count=3).counts.tolist() == [3, 3, 2]
    assert filled.query_many(lookups[:2], max_count=20).counts.tolist() == [20, 15]
    assert filled.query_many(lookups[:1]).counts.tolist() == [30]
    for wrong in (0, "5", None):
        with pytest.raises(InvalidArgument, match="max_count"):
            filled.query_many(lookups[:2], max_count=wrong)


def test_a_batch_is_one_table(filled):
    cursor = filled.query(TOPIC, "k", max_count=28).cursor
    for more in ([], [Lookup(TOPIC, "k", cursor=cursor)]):
        results = filled.query_many([("u", "k"), ("u", "none"), (TOPIC, "k1"), *more])
        table = results.to_arrow()
        rows = [{"lookup": at, **row} for at, result in enumerate(results) for row in result.to_arrow().to_pylist()]
        assert table.to_pylist() == rows and len(rows) > 15
        assert results.to_pandas()["lookup"].tolist() == table["lookup"].to_pylist()
        assert table.schema.names == ["lookup", *results[0].to_arrow().schema.names]
    for none in ([], [("u", "none")]):
        assert filled.query_many(none).to_arrow().schema == table.schema


def test_what_needs_an_extra_names_it(monkeypatch):
    for name in ("prometheus_client", "prometheus_client.core"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "tiered_index.service.metrics", raising=False)
    with pytest.raises(ConfigError, match="pip install prometheus-client"):
        importlib.import_module("tiered_index.service.metrics")

    class Table:
        def to_pandas(self):
            raise ModuleNotFoundError("No module named 'pandas'")

    with pytest.raises(ConfigError, match=r"needs pandas: pip install .*\[pandas\]"):
        to_pandas(Table())


def test_a_collector_counts_lookups(tmp_path):
    storage, settings = FaultStorage(MemoryStorage()), {"slots": 7, "items": 12, "background": False}
    with IndexService.open(root=tmp_path / "root", storage_backend=storage, environment=False, **settings) as index:
        for offset in range(3):
            index.put("t", 0, "k", offset, 1, T)
        upload(index)
    with IndexReader.open(storage_backend=storage, cache_slot_groups=False) as reader:
        reader.query("t", "k", max_count=1)
        reader.query_many([Lookup("t", "k")] * 5)
        reader.topics()
        storage.fail("get_range", times=None)
        with pytest.raises(StorageUnavailable):
            reader.query("t", "k")
        reader.query("t", "k", allow_partial=True)
        registry = CollectorRegistry(auto_describe=True)
        registry.register(collector(reader))
        lines = generate_latest(registry).decode().splitlines()
        ends = [("query", end) for end in ("truncated", "StorageUnavailable", "partial")]
        ends += [(kind, "complete") for kind in ("query_many", "topics")]
        expected = {f'tiered_index_lookups_total{{kind="{kind}",status="{end}"}} 1.0' for kind, end in ends}
        assert {line for line in lines if line.startswith("tiered_index_lookups_total")} == expected
