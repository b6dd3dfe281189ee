"""What the service has done and how it is, for Prometheus: `tiered_index_*`, in base units.

Counters move with each request; the state of index, caches and storage is read when it is asked for. Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiered_index.service.index import IndexService
from tiered_index.service.lookup.lookups import Lookups
from tiered_index.service.reader import IndexReader
from tiered_index.types import Explain

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_REQUESTS = (0, 1, 2, 3, 5, 10, 20, 50, 100, 1000)


class Metrics:
    """The metrics of one service. `more` returns further gauges, by name, with what they mean."""

    def __init__(self, lookups: Lookups, more: Callable[[], dict[str, tuple[str, float]]] = dict) -> None:
        self._registry = CollectorRegistry()
        self._http = Histogram(
            "tiered_index_http_request_seconds",
            "Time of requests, by route, method and status.",
            ("route", "method", "status"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._lookups = Counter(
            "tiered_index_lookups", "Lookups, by kind and status.", ("kind", "status"), registry=self._registry
        )
        self._requests = Histogram(
            "tiered_index_lookup_storage_requests",
            "Requests to the storage a lookup.",
            buckets=_REQUESTS,
            registry=self._registry,
        )
        self._bytes = Counter(
            "tiered_index_lookup_bytes", "Bytes read from the storage by lookups.", registry=self._registry
        )
        self._cost = Counter(
            "tiered_index_lookup_cost_usd", "Estimated dollars that lookups cost.", registry=self._registry
        )
        self._files = Counter("tiered_index_lookup_files", "Files that lookups read.", registry=self._registry)
        self._skipped = Counter(
            "tiered_index_lookup_files_skipped", "Files that lookups skipped.", registry=self._registry
        )
        self._puts = Counter("tiered_index_put_entries", "Entries taken by POST /v1/entries.", registry=self._registry)
        self._registry.register(_State(lookups, more))

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._http.labels(route, method, str(status)).observe(seconds)

    def lookup(self, kind: str, status: str, explain: Explain) -> None:
        """Count a lookup and what it cost."""
        self._lookups.labels(kind, status).inc()
        self._requests.observe(explain.requests)
        if explain.requests:
            self._bytes.inc(explain.bytes)
            self._cost.inc(explain.cost_usd)
        self._files.inc(explain.files_read)
        self._skipped.inc(explain.files_skipped)

    def put(self, entries: int) -> None:
        """Count entries that were taken."""
        self._puts.inc(entries)

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _State(Collector):
    """What is read when it is asked for."""

    def __init__(self, lookups: Lookups, more: Callable[[], dict[str, tuple[str, float]]]) -> None:
        self._lookups = lookups
        self._more = more

    def collect(self) -> Iterator[Metric]:
        """Yield the present state."""
        lookups = self._lookups
        for cache, use in lookups.cache_use().items():
            for name, count in (("hits", use.hits), ("misses", use.misses), ("evictions", use.evictions)):
                yield _labelled(
                    CounterMetricFamily,
                    f"tiered_index_cache_{name}",
                    f"{name} of caches in memory",
                    "cache",
                    cache,
                    count,
                )
            size = float(use.size_bytes)
            yield _labelled(
                GaugeMetricFamily, "tiered_index_cache_bytes", "Bytes in caches in memory.", "cache", cache, size
            )
        if isinstance(lookups, IndexService):
            yield from self._writer(lookups)
        storages = [lookups.storage] if isinstance(lookups, IndexService) else _storages(lookups)
        requests = CounterMetricFamily(
            "tiered_index_storage_requests", "Requests to the storage.", labels=["operation"]
        )
        counts: dict[str, int] = {}
        for storage in storages:
            for operation, count in storage.total.requests_by_kind.items():
                counts[operation] = counts.get(operation, 0) + count
        for operation, count in counts.items():
            requests.add_metric([operation], count)
        yield requests
        yield CounterMetricFamily(
            "tiered_index_storage_read_bytes",
            "Bytes read from the storage.",
            value=sum(storage.total.bytes_read for storage in storages),
        )
        yield CounterMetricFamily(
            "tiered_index_storage_cost_usd",
            "Estimated dollars of all requests.",
            value=sum(storage.total.cost_usd for storage in storages),
        )
        for name, (meaning, value) in self._more().items():
            yield GaugeMetricFamily(f"tiered_index_{name}", meaning, value=value)

    def _writer(self, index: IndexService) -> Iterator[Metric]:
        health = index.health()
        files = GaugeMetricFamily("tiered_index_files", "Files by state.", labels=["state"])
        for state, count in health["files"].items():
            files.add_metric([state], count)
        yield files
        gauges: dict[str, tuple[str, float]] = {
            "buffered_entries": ("Entries in the write buffer.", health["buffered_entries"]),
            "buffered_bytes": ("Bytes of the write buffer.", health["buffered_bytes"]),
            "local_bytes": ("Bytes of local files.", health["local_bytes"]),
            "unpublished_files": ("Files that the storage does not have yet.", health["unpublished"]["files"]),
            "unpublished_entries": ("Entries that the storage does not have yet.", health["unpublished"]["entries"]),
            "quarantined_entries": ("Entries with a time that can't be right.", health["quarantined_entries"]),
            "problems": ("Present errors of the writer.", len(health["problems"])),
            "fenced": ("1 where another writer has taken the index over.", float(health["fenced"])),
        }
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"tiered_index_{name}", meaning, value=value)
        positions = GaugeMetricFamily(
            "tiered_index_durable_position", "Up to where sources are durable.", labels=["source"]
        )
        for source, position in index.durable_positions().items():
            positions.add_metric([source], position)
        yield positions


def _storages(lookups: Lookups) -> list[Any]:
    assert isinstance(lookups, IndexReader)
    return lookups.storages


def _labelled(kind: type[Any], name: str, meaning: str, label: str, value: str, number: float) -> Metric:
    family = kind(name, meaning, labels=[label])
    family.add_metric([value], number)
    return family  # type: ignore[no-any-return]
