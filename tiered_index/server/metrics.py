"""What the service has done, for Prometheus: `tiered_index_*`, in base units; what only grows ends in ``_total``.

Counters move with each request; the state of index, caches and storage is read when it is asked for, of a writer (its
`health`) or a reader. No label has a key, a topic, or a text that a client chose. Threads: any.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from tiered_index.server.served import Index
from tiered_index.service.index import IndexService
from tiered_index.service.lookup.inventory import describe_handle
from tiered_index.storage.metering import MeteredStorage
from tiered_index.types import Explain

Gauges = Mapping[str, tuple[str, float]]
"""What each means, and its value, by name; one that ends in ``_total`` only grows."""
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_REQUESTS = (0, 1, 2, 3, 5, 10, 20, 50, 100, 1000)
_BYTES = (0, *(4**power << 10 for power in range(1, 11)))
_SKIPPED = "skipped_"
_PLACES = ("buffer", "unsealed", "compacted", "uploaded", "cache", "storage")
_REASONS = ("time", "topic", "filter", "budget")
_HTTP = ("route", "method", "status")
# where a lookup had to go, the farthest first, of the places of the files that it read
_FARTHEST = (("storage", ("storage", "messages")), ("cache", ("cache",)))
_USES = (("hits", "Hits of"), ("misses", "Misses of"), ("evictions", "Evictions from"))


class Metrics:
    """The metrics of one service. `more` returns further ones, by name, with what they mean."""

    def __init__(self, lookups: Index, more: Callable[[], Gauges] = dict) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"tiered_index_{name}", meaning, labels, registry=registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"tiered_index_{name}", meaning, labels, buckets=buckets, registry=registry)

        self._http = histogram(
            "http_request_seconds", "Time of requests, by route, method and status.", _SECONDS, *_HTTP
        )
        self._lookups = counter(
            "lookups", "Lookups, by kind, the farthest place that was read, and status.", "kind", "place", "status"
        )
        self._requests = histogram("lookup_storage_requests", "Requests to the storage a lookup.", _REQUESTS)
        self._read = histogram("lookup_storage_bytes", "Bytes read from the storage a lookup.", _BYTES)
        self._bytes = counter("lookup_bytes", "Bytes read from the storage by lookups.")
        self._cost = counter("lookup_cost_usd", "Estimated dollars that lookups cost.")
        self._files = counter("lookup_files", "Files that lookups read, by where they lie.", "place")
        self._skipped = counter("lookup_files_skipped", "Files that lookups skipped, by why.", "reason")
        # a series that is not there until something happened has no rate when it does
        for counted, known in ((self._files, _PLACES), (self._skipped, _REASONS)):
            for value in known:
                counted.labels(value)
        registry.register(_StateCollector(lookups, more))

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._http.labels(route, method, str(status)).observe(seconds)

    def lookup(self, kind: str, status: str, explain: Explain) -> None:
        """Count a lookup and what it cost."""
        done = Tally((report.outcome, report.place) for report in explain.files)
        read = {place for outcome, place in done if outcome in ("read", "fetched")}
        farthest = next((name for name, places in _FARTHEST if read.intersection(places)), "local" if read else "none")
        self._lookups.labels(kind, farthest, status).inc()
        self._requests.observe(explain.requests)
        self._read.observe(explain.bytes)
        if explain.requests:
            self._bytes.inc(explain.bytes)
            self._cost.inc(explain.cost_usd)
        for (outcome, place), count in done.items():
            if outcome == "read":
                self._files.labels(place).inc(count)
            elif outcome.startswith(_SKIPPED):
                self._skipped.labels(outcome.removeprefix(_SKIPPED)).inc(count)

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _StateCollector(Collector):
    """Collects the state of `lookups`, and what `more` returns."""

    def __init__(self, lookups: Index, more: Callable[[], Gauges]) -> None:
        self._lookups = lookups
        self._more = more

    def collect(self) -> Iterator[Metric]:
        """Yield the present state."""
        lookups = self._lookups
        uses = lookups.cache_use()
        for name, meaning in _USES:
            counts = {cache: getattr(use, name) for cache, use in uses.items()}
            yield _by("cache", f"cache_{name}_total", f"{meaning} caches in memory.", counts)
        sizes = {cache: use.size_bytes for cache, use in uses.items()}
        yield _by("cache", "cache_bytes", "Bytes in caches in memory.", sizes)
        yield _one(
            "filter_false_positives_total",
            "Searches of stored files that found nothing though a cached filter let them.",
            lookups.filter_false_positives,
        )
        yield from self._files()
        if isinstance(lookups, IndexService):
            yield from _of_writer(lookups)
        yield from _of_storages([lookups.storage] if isinstance(lookups, IndexService) else lookups.storages)
        for name, (meaning, value) in self._more().items():
            yield _one(name, meaning, value)

    def _files(self) -> Iterator[Metric]:
        counts, sizes = Tally[str](), Tally[str]()
        for handle in self._lookups.files():
            file = describe_handle(handle)
            counts[file["state"]] += 1
            sizes[file["state"]] += file["bytes"] or 0
        yield _by("state", "files", "Files by state.", counts)
        yield _by("state", "file_bytes", "Bytes of files by state, as far as they are known.", sizes)


def _of_writer(index: IndexService) -> Iterator[Metric]:
    health = index.health()
    lease_left_s = health["lease_left_s"]
    values: dict[str, tuple[str, float]] = {
        "put_entries_total": ("Entries that were put.", health["put_entries"]),
        "put_refusals_total": ("Puts that were pushed back by a full buffer.", health["refused_puts"]),
        "buffered_entries": ("Entries in the write buffer.", health["buffered_entries"]),
        "buffered_bytes": ("Bytes of the write buffer.", health["buffered_bytes"]),
        "local_bytes": ("Bytes of local files.", health["local_bytes"]),
        "unpublished_files": ("Files that the storage does not have yet.", health["unpublished"]["files"]),
        "unpublished_entries": ("Entries that the storage does not have yet.", health["unpublished"]["entries"]),
        "quarantined_entries_total": ("Entries with a time that can't be right.", health["quarantined_entries"]),
        "problems": ("Present errors of the writer.", len(health["problems"])),
        "fenced": ("1 where another writer has taken the index over.", health["fenced"]),
        "writer_epoch": ("The epoch that the writer claimed; 0: none yet.", health["writer_epoch"]),
        "lease_held": ("1 while the writer's lease holds.", lease_left_s is not None and lease_left_s > 0),
        "lease_remaining_seconds": ("Until the lease ends, unless it is renewed; 0: none.", lease_left_s or 0.0),
    }
    for name, (meaning, value) in values.items():
        yield _one(name, meaning, value)
    steps = SummaryMetricFamily(
        "tiered_index_lifecycle_seconds", "Time of steps in the life of files.", labels=["step"]
    )
    for step, done in health["steps"].items():
        steps.add_metric([step], done["count"], done["seconds"])
    yield steps
    failures = {step: done["errors"] for step, done in health["steps"].items()}
    yield _by("step", "lifecycle_errors_total", "Steps in the life of files that failed.", failures)
    yield _by("worker", "worker_errors_total", "Rounds of workers that failed.", health["failed_rounds"])
    positions, ages = index.durable_positions(), health["position_age_s"]
    yield _by("source", "durable_position", "Up to where sources are durable.", positions)
    meaning = "Since when the durable position stands; at most since the process began."
    yield _by("source", "durable_position_age_seconds", meaning, ages)


def _of_storages(storages: Iterable[MeteredStorage]) -> Iterator[Metric]:
    usages = [storage.total for storage in storages]
    requests = Tally[str]()
    for usage in usages:
        requests.update(usage.requests_by_kind)
    yield _by("operation", "storage_requests_total", "Requests to the storage.", requests)
    read, written = (sum(getattr(usage, name) for usage in usages) for name in ("bytes_read", "bytes_written"))
    yield _one("storage_read_bytes_total", "Bytes read from the storage.", read)
    yield _one("storage_written_bytes_total", "Bytes written to the storage.", written)
    cost_usd = sum(usage.cost_usd for usage in usages)
    yield _one("storage_cost_usd_total", "Estimated dollars of all requests.", cost_usd)


def _one(name: str, meaning: str, value: float) -> Metric:
    kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(f"tiered_index_{name}", meaning, value=value)  # type: ignore[no-any-return]


def _by(label: str, name: str, meaning: str, values: Mapping[str, float]) -> Metric:
    kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(f"tiered_index_{name}", meaning, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family  # type: ignore[no-any-return]
