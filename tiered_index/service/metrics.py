"""Prometheus metrics (`tiered_index_*`, in base units) of an index in your own process.

    REGISTRY.register(tiered_index.service.metrics.collector(index))

A registry reads the state of the writer or the reader at each collection. Names that end in ``_total`` are counters. No
label has a key; the names of sources may have a topic. Needs the package prometheus-client. Threads: any.
docs/reference.md lists the metrics.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tiered_index.errors import ConfigError, IndexClosed
from tiered_index.service.index import IndexService
from tiered_index.service.read.inventory import sizes_of
from tiered_index.service.reader import IndexReader
from tiered_index.storage.metering import MeteredStorage

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
    from prometheus_client.registry import Collector
except ImportError as missing:
    raise ConfigError("metrics need prometheus-client: pip install prometheus-client") from missing

__all__ = ["collector"]

Gauges = Mapping[str, tuple[str, float | tuple[str, Mapping[str, float]]]]
"""The help text and the value of each metric, by name. A name that ends in ``_total`` is a counter. A pair in place of
the value is a label, and the number for each value of the label.
"""
_USES = (("hits", "Hits of"), ("misses", "Misses of"), ("evictions", "Evictions from"))


def collector(index: IndexService[Any] | IndexReader[Any]) -> Collector:
    """Return a Prometheus collector of a writer or a reader. Each index needs a registry of its own.

    In a forked child the collector of a writer yields nothing.
    """
    return _OwnCollector(index)


class StateCollector(Collector):
    """Collects the state of `lookups`, and the metrics that `more` returns."""

    def __init__(self, lookups: IndexService[Any] | IndexReader[Any], more: Callable[[], Gauges] = dict) -> None:
        self._lookups = lookups
        self._more = more

    def describe(self) -> Iterable[Metric]:
        """Return no metric, so that registering the collector does not read the index."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present state."""
        try:
            # all metrics or none
            yield from list(self._collect())
        except IndexClosed:
            return

    def _collect(self) -> Iterator[Metric]:
        lookups = self._lookups
        uses = lookups.cache_use()
        for name, meaning in _USES:
            counts = {cache: getattr(use, name) for cache, use in uses.items()}
            yield _by("cache", f"cache_{name}_total", f"{meaning} caches in memory.", counts)
        sizes = {cache: use.size_bytes for cache, use in uses.items()}
        yield _by("cache", "cache_bytes", "Bytes in caches in memory.", sizes)
        entries = {cache: use.entries for cache, use in uses.items()}
        yield _by("cache", "cache_entries", "Directories, filters and other entries in caches in memory.", entries)
        yield _one(
            "filter_false_positives_total",
            "Reads of stored files that found no entry, although the cached filter did not exclude the key.",
            lookups.filter_false_positives,
        )
        yield from self._files()
        # before the states, which then have each index that is opened meanwhile
        is_whole = lookups._unopened_problem() is None
        states = lookups._log_states()
        as_of_ms = [state.as_of_ms or 0 for state in states]
        # a smaller number means that a log went back
        if is_whole and all(state.number for state in states):
            meaning = (
                "Number of the newest log record that was read. With several indexes, the sum of their numbers. "
                "Missing until each log was read."
            )
            yield _one("log_number", meaning, sum(state.number for state in states))
        meaning = (
            "Time of the newest published entry outside the quarantine, or of the last upload if that is earlier, in "
            "epoch seconds. 0: there is none. With several indexes, the earliest of their times."
        )
        yield _one("published_timestamp_seconds", meaning, min(as_of_ms, default=0) / 1000)
        if isinstance(lookups, IndexService):
            yield from of_writer(lookups)
        yield from of_storages([lookups.storage] if isinstance(lookups, IndexService) else lookups.storages)
        for name, (meaning, value) in self._more().items():
            yield _by(value[0], name, meaning, value[1]) if isinstance(value, tuple) else _one(name, meaning, value)

    def _files(self) -> Iterator[Metric]:
        counts, sizes = Tally[str](), Tally[str]()
        for handle in self._lookups.files():
            counts[handle.place] += 1
            sizes[handle.place] += sizes_of(handle)[1] or 0
        yield _by("state", "files", "Files by state.", counts)
        yield _by("state", "file_bytes", "Bytes of files by state. Files of unknown size count as 0.", sizes)


class _OwnCollector(StateCollector):
    """Adds the lookups of this process to the state. The HTTP service counts its lookups itself."""

    def _collect(self) -> Iterator[Metric]:
        yield from super()._collect()
        family = CounterMetricFamily("tiered_index_lookups", "Lookups, by kind and status.", labels=["kind", "status"])
        for labels, count in sorted(self._lookups._engine.counts().items()):
            family.add_metric(labels, count)
        yield family


def of_writer(index: IndexService) -> Iterator[Metric]:
    """Yield the present state of a writer."""
    health = index.health()
    lease_left_s = health["lease_left_s"]
    values: dict[str, tuple[str, float]] = {
        "put_entries_total": ("Entries that were put.", health["put_entries"]),
        "put_refusals_total": ("Puts refused with BackPressure or DiskFull.", health["refused_puts"]),
        "buffered_entries": ("Entries in the write buffer.", health["buffered_entries"]),
        "buffered_bytes": ("Bytes of the write buffer.", health["buffered_bytes"]),
        "local_bytes": ("Bytes of local files.", health["local_bytes"]),
        "unpublished_files": ("Files that the storage does not have yet.", health["unpublished"]["files"]),
        "unpublished_entries": ("Entries that the storage does not have yet.", health["unpublished"]["entries"]),
        "quarantined_entries_total": ("Entries with an implausible time.", health["quarantined_entries"]),
        "problems": ("Errors that the writer has now.", len(health["problems"])),
        "fenced": ("1 if another writer has taken over the index.", health["fenced"]),
        "writer_epoch": (
            "Epoch of the writer: each writer claims a greater number. 0 before it claims one.",
            health["writer_epoch"],
        ),
        "lease_held": ("1 while the writer holds the lease.", lease_left_s is not None and lease_left_s > 0),
        "lease_remaining_seconds": (
            "Seconds until the lease ends if it is not renewed; 0 without a lease.",
            lease_left_s or 0.0,
        ),
        "merges_total": ("Merges that the writer published.", health["merge"]["jobs"]),
        "merged_timestamp_seconds": (
            "Time of the writer's last merge, in epoch seconds. 0: none since it was opened.",
            (health["merge"]["last_ms"] or 0) / 1000,
        ),
        "merge_waiting_windows": ("Windows that are over and wait for a merge.", health["merge"]["waiting_windows"]),
        "merge_left_windows": (
            "Windows and objects that the writer does not merge: too large, failed, or lost to another job.",
            health["merge"]["left_windows"],
        ),
    }
    for name, (meaning, value) in values.items():
        yield _one(name, meaning, value)
    steps = SummaryMetricFamily(
        "tiered_index_lifecycle_seconds",
        "Time of the steps seal, compact, upload, retire, expire and merge.",
        labels=["step"],
    )
    for step, done in health["steps"].items():
        steps.add_metric([step], done["count"], done["seconds"])
    yield steps
    failures = {step: done["errors"] for step, done in health["steps"].items()}
    yield _by("step", "lifecycle_errors_total", "Failed life-cycle steps.", failures)
    meaning = "Failed rounds of the workers flusher, lifecycle and merge."
    yield _by("worker", "worker_errors_total", meaning, health["failed_rounds"])
    positions, ages = index.durable_positions(), health["position_age_s"]
    yield _by("source", "durable_position", "Position of each source up to which its entries are on disk.", positions)
    meaning = "Seconds since the durable position last moved; before its first move, since the process began."
    yield _by("source", "durable_position_age_seconds", meaning, ages)


def of_storages(storages: Iterable[MeteredStorage]) -> Iterator[Metric]:
    """Yield the requests to storages so far."""
    usages = [storage.total for storage in storages]
    requests = Tally[str]()
    for usage in usages:
        requests.update(usage.requests_by_kind)
    yield _by("operation", "storage_requests_total", "Requests to the storage.", requests)
    read, written = (sum(getattr(usage, name) for usage in usages) for name in ("bytes_read", "bytes_written"))
    yield _one("storage_read_bytes_total", "Bytes read from the storage.", read)
    yield _one("storage_written_bytes_total", "Bytes written to the storage.", written)
    cost_usd = sum(usage.cost_usd for usage in usages)
    yield _one("storage_cost_usd_total", "Estimated cost of all requests in dollars.", cost_usd)


def _one(name: str, meaning: str, value: float) -> Metric:
    kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(f"tiered_index_{name}", meaning, value=value)  # type: ignore[no-any-return]


def _by(label: str, name: str, meaning: str, values: Mapping[str, float]) -> Metric:
    kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(f"tiered_index_{name}", meaning, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family  # type: ignore[no-any-return]
