"""Keeps the last hour of the figures that operators watch, each with the threshold of its alert.

A sample is taken every 15 seconds, without a request to the storage. Samples are kept for two hours, because a figure
may be the growth over an hour. Threads: one of its own takes samples; any may read them.
"""

from __future__ import annotations

import bisect
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tiered_index.errors import TieredIndexError
from tiered_index.metrics import of_storages, of_writer
from tiered_index.server.metrics import Metrics
from tiered_index.server.served import Served
from tiered_index.service.index import IndexService

EVERY_S = 15
_SHOWN_S = 3600
_KEPT = 2 * _SHOWN_S // EVERY_S + 1
_MONTH_S = 30 * 24 * 3600
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alert:
    """An alert of `deploy/prometheus/alerts.yaml`. It fires if a value exceeds `threshold` for `for_s` seconds."""

    name: str
    threshold: float
    for_s: int
    # the alert fires if the value is at or below the threshold
    is_floor: bool = False
    # the alert also fires if the value is not known
    unknown_fires: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure over time: the value `of` samples.

    With `over_s` it is the value's growth in that time. With `per` it is divided by the growth of that value and
    multiplied by `times`.
    """

    title: str
    unit: str
    of: str
    over_s: int = 0
    per: str | None = None
    times: int = 1
    alert: Alert | None = None

    def at(self, now: Mapping[str, float], before: Mapping[str, float] | None) -> float | None:
        """Return the figure for the sample `now`; `before` is the sample `over_s` earlier. None: unknown."""
        value = now.get(self.of, math.nan)
        if self.over_s:
            value = _grown(self.of, now, before or {})
        if self.per is not None:
            by = _grown(self.per, now, before or {})
            value = value * self.times / by if by > 0 else math.nan
        return value if math.isfinite(value) else None


FIGURES = (
    Figure(
        "Lag behind the source", "s", "follow_lag_seconds",
        alert=Alert("TieredIndexFollowerBehind", 300, 600, unknown_fires=True),
    ),
    Figure("Durable position", "", "durable_position"),
    Figure("Lease left", "s", "lease_remaining_seconds", alert=Alert("TieredIndexLeaseNotHeld", 0, 300, is_floor=True)),
    Figure("Files not in the storage yet", "", "unpublished_files", alert=Alert("TieredIndexUploadsStall", 5, 1800)),
    Figure("Entries in the write buffer", "", "buffered_entries", alert=Alert("TieredIndexBufferFills", 1.6e6, 300)),
    Figure("Life-cycle work per minute", "s", "lifecycle_seconds_sum", over_s=60, per="time_s", times=60),
    Figure("Present errors of the writer", "", "problems", alert=Alert("TieredIndexWriterProblem", 0, 300)),
    Figure(
        "Failed rounds of workers in 15 minutes", "", "worker_errors_total", over_s=900,
        alert=Alert("TieredIndexWorkersFail", 5, 900),
    ),
    Figure(
        "Failed requests over HTTP", "share", "http_failures", over_s=300, per="http_requests",
        alert=Alert("TieredIndexRequestsFail", 0.01, 600),
    ),
    Figure("Requests to the storage per minute", "", "storage_requests_total", over_s=60, per="time_s", times=60),
    Figure(
        "Requests to the storage per lookup", "", "lookup_storage_requests_sum", over_s=3600,
        per="lookup_storage_requests_count", alert=Alert("TieredIndexLookupsReadTooMuch", 100, 3600),
    ),
    Figure(
        "Cost of the requests per month, at the last hour's rate", "usd", "storage_cost_usd_total", over_s=3600,
        per="time_s", times=_MONTH_S, alert=Alert("TieredIndexCosts", 300, 3600),
    ),
)  # fmt: skip


class History:
    """The samples of one service. `run_once` takes one; a thread does so from `start` to `close`."""

    def __init__(self, served: Served, counters: Metrics, now_s: Callable[[], float] = time.monotonic) -> None:
        self._served, self._counters, self._now_s = served, counters, now_s
        self._samples: deque[dict[str, float]] = deque(maxlen=_KEPT)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiered-index-history", daemon=True)

    def start(self) -> None:
        """Take the first sample, and begin the thread."""
        self.run_once()
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def run_once(self) -> None:
        """Take a sample."""
        try:
            self._samples.append({"time_s": self._now_s(), **self._sample()})
        except (TieredIndexError, OSError) as error:
            _log.warning("history: this sample failed, the next one follows in %d s: %s", EVERY_S, error)

    def document(self) -> dict[str, Any]:
        """Return the last hour as a document for JSON. It has the figures with a value, or whose alert needs none."""
        samples, now_s = list(self._samples), self._now_s()
        times_s = [one["time_s"] for one in samples]
        first = bisect.bisect_left(times_s, now_s - _SHOWN_S)
        shown = []
        for figure in FIGURES:
            values = []
            for number, sample in enumerate(samples[first:], first):
                # a sample may be a little late
                earlier = bisect.bisect_left(times_s, times_s[number] - figure.over_s - EVERY_S / 2, 0, number)
                values.append(figure.at(sample, samples[earlier] if earlier < number else None))
            needs_none = figure.alert is not None and figure.alert.unknown_fires
            is_sampled = any(figure.of in one for one in samples[first:])
            if (needs_none and is_sampled) or any(value is not None for value in values):
                alert = figure.alert and {**vars(figure.alert)}
                shown.append({"title": figure.title, "unit": figure.unit, "alert": alert, "values": values})
        # samples have monotonic times; the document has the time of day
        end_ms = time.time_ns() // 1_000_000
        times_ms = [end_ms - int((now_s - one) * 1000) for one in times_s[first:]]
        return {"begin_ms": end_ms - _SHOWN_S * 1000, "end_ms": end_ms, "times_ms": times_ms, "figures": shown}

    def _run(self) -> None:
        while not self._end.wait(EVERY_S):
            self.run_once()

    def _sample(self) -> dict[str, float]:
        """Return the sums of the metrics by name, without those that need a request to the storage."""
        lookups, writer = self._served.lookups, self._served.writer
        storages = [lookups.storage] if isinstance(lookups, IndexService) else lookups.storages
        found = {name: value for name, (_, value) in self._served.gauges().items() if not isinstance(value, tuple)}
        sums = Counter(found | self._counters.totals())
        for family in (*of_storages(storages), *(of_writer(writer) if writer is not None else ())):
            for one in family.samples:
                sums[one.name.removeprefix("tiered_index_")] += one.value
        # the alert of the lease leaves a fenced writer out
        if sums["fenced"]:
            del sums["lease_remaining_seconds"]
        return dict(sums)


def _grown(name: str, now: Mapping[str, float], before: Mapping[str, float]) -> float:
    return now.get(name, math.nan) - before.get(name, math.nan)
