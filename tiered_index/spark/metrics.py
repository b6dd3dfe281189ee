"""The cost of a job, and the descriptions of its steps on Spark's web pages.

Storages opened by a meter's addresses add their counts to a Spark accumulator when they are closed. Failed tasks, the
driver's list of a source's files, and Spark's own reads are not counted. `JobMeter` belongs to the driver's thread; its
addresses are sent to tasks.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tiered_index.spark.addresses import READ, WRITTEN, StorageAddress, counts_of
from tiered_index.spark.failures import show_sentences_first
from tiered_index.spark.versions import check_classic
from tiered_index.storage.base import StorageOptions
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.prices import rounded_usd

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DESCRIPTION = "spark.job.description"
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def described(spark: SparkSession, step: str) -> Iterator[None]:
    """Describe Spark's jobs of the block on Spark's web pages, and log the step."""
    show_sentences_first(spark)
    context = spark.sparkContext
    before: Any = context.getLocalProperty(_DESCRIPTION)
    _log.info("%s", step)
    context.setLocalProperty(_DESCRIPTION, f"tiered_index {step}")
    try:
        yield
    finally:
        context.setLocalProperty(_DESCRIPTION, before)


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """The requests of a job's driver and tasks to storages, and their cost.

    - `application_id`: the id of the Spark application.
    - `requests`: the number of requests by operation.
    - `bytes_read`, `bytes_written`: payload bytes.
    - `cost_usd`: cost of the requests and bytes by the price table, in US dollars.
    """

    application_id: str = ""
    requests: Mapping[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    cost_usd: float = 0.0


class JobMeter:
    """The meter of one job; `driver` is the driver's storage, whose prices are used.

    Raises `ConfigError` for a session of Spark Connect.
    """

    def __init__(self, spark: SparkSession, driver: MeteredStorage) -> None:
        from pyspark.accumulators import AddingAccumulatorParam

        check_classic(spark)
        self._spark, self._driver = spark, driver
        sums: Any = AddingAccumulatorParam(Counter())
        self._request_stats = spark.sparkContext.accumulator(Counter(), sums)

    def address(self, address: StorageAddress) -> StorageAddress:
        """Return an address for tasks whose requests count here."""
        return replace(address, request_stats=self._request_stats)

    def sources(self, s3: StorageOptions, index: str) -> Callable[[str], StorageAddress]:
        """Return a function that returns the address of a source of `index` by its URI; its requests count here."""
        return partial(StorageAddress, options=s3, request_stats=self._request_stats, index=index)

    @property
    def metrics(self) -> JobMetrics:
        """The metrics so far."""
        counts = Counter(self._request_stats.value) + counts_of(self._driver.total)
        read, written = counts.pop(READ, 0), counts.pop(WRITTEN, 0)
        cost_usd = rounded_usd(self._driver.prices.cost_usd(counts, read))
        requests = dict(sorted(counts.items()))
        return JobMetrics(self._spark.sparkContext.applicationId, requests, read, written, cost_usd)
