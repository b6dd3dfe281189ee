"""Metrics of a service for Prometheus: `tiered_index_*`, in base units. Names of counters end in ``_total``.

Counters move with each request. The state of index, caches and storage is that of `tiered_index.service.metrics`. No
label of the counters has a key, a topic, or a text that a client chose. Threads: any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from tiered_index.base.version import __version__
from tiered_index.server.http.served import Index
from tiered_index.service.metrics import Gauges, StateCollector
from tiered_index.types import Explain

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_REQUESTS = (0, 1, 2, 3, 5, 10, 20, 50, 100, 1000)
_BYTES = (0, *(4**power << 10 for power in range(1, 11)))
_SKIPPED = "skipped_"
_PLACES = ("buffer", "unsealed", "compacted", "uploaded", "cache", "storage")
_REASONS = ("time", "topic", "filter", "budget")
_HTTP = ("route", "method", "status")
# Places of files that a lookup read, the farthest first
_FARTHEST = (("storage", ("storage", "messages")), ("cache", ("cache",)))


class Metrics:
    """The metrics of one service. `more` returns further gauges."""

    def __init__(self, lookups: Index, more: Callable[[], Gauges] = dict) -> None:
        registry = self._registry = CollectorRegistry()
        # no `_created` series for counters and histograms
        disable_created_metrics()  # type: ignore[no-untyped-call]

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"tiered_index_{name}", meaning, labels, registry=registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"tiered_index_{name}", meaning, labels, buckets=buckets, registry=registry)

        self._http = histogram(
            "http_request_seconds", "Time of requests, by route, method and status.", _SECONDS, *_HTTP
        )
        self._rocketmq = histogram(
            "rocketmq_request_seconds", "Time of requests of RocketMQ's protocol.", _SECONDS, "request", "status"
        )
        self._lookups = counter(
            "lookups", "Lookups, by kind, status and the farthest place that they read.", *("kind", "place", "status")
        )
        self._requests = histogram("lookup_storage_requests", "Storage requests per lookup.", _REQUESTS)
        self._read = histogram("lookup_storage_bytes", "Bytes read from the storage per lookup.", _BYTES)
        self._bytes = counter("lookup_bytes", "Bytes read from the storage by lookups.")
        self._cost = counter("lookup_cost_usd", "Estimated cost of lookups in dollars.")
        self._files = counter("lookup_files", "Files read by lookups, by place.", "place")
        self._skipped = counter("lookup_files_skipped", "Files skipped by lookups, by reason.", "reason")
        # begin at 0: a rate misses the first increase of a series that did not exist before
        for counted, known in ((self._files, _PLACES), (self._skipped, _REASONS)):
            for value in known:
                counted.labels(value)
        # finding the labels of a metric takes longer than counting
        self._http_of, self._lookups_of = functools.cache(self._http.labels), functools.cache(self._lookups.labels)
        self._files_of, self._skipped_of = functools.cache(self._files.labels), functools.cache(self._skipped.labels)
        Info("tiered_index_build", "Version of the program.", registry=registry).info({"version": __version__})
        ProcessCollector(registry=registry)
        registry.register(StateCollector(lookups, more))

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._http_of(route, method, str(status)).observe(seconds)

    def rocketmq_request(self, request: str, status: str, seconds: float) -> None:
        """Count a request of RocketMQ's protocol, by the names of request and response code."""
        self._rocketmq.labels(request, status).observe(seconds)

    def lookup(self, kind: str, status: str, explain: Explain) -> None:
        """Count a lookup and its cost."""
        done: dict[tuple[str, str], int] = {}
        for report in explain.files:
            where = report.outcome, report.place
            done[where] = done.get(where, 0) + 1
        read = {place for outcome, place in done if outcome in ("read", "fetched")}
        farthest = "local" if read else "none"
        for name, places in _FARTHEST:
            if not read.isdisjoint(places):
                farthest = name
                break
        self._lookups_of(kind, farthest, status).inc()
        self._requests.observe(explain.requests)
        self._read.observe(explain.bytes)
        if explain.requests:
            self._bytes.inc(explain.bytes)
            self._cost.inc(explain.cost_usd)
        for (outcome, place), count in done.items():
            if outcome == "read":
                self._files_of(place).inc(count)
            elif outcome.startswith(_SKIPPED):
                self._skipped_of(outcome.removeprefix(_SKIPPED)).inc(count)

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
