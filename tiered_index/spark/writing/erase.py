"""Erases on Spark: as `tiered_index.erase` with `now`, with reading and rewriting on executors.

Tasks find entries in objects, merge objects and overwrite archived segments. Each attempt uploads under its own names;
the driver publishes one result of each task, by the same records as without Spark. `orphans` deletes the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.connectors.erase import messages_to_erase
from tiered_index.format.schema import Schema
from tiered_index.service.jobs.erase import GRACE_S, EraseRequest, Erasure, check_grace, check_shard_bytes
from tiered_index.service.jobs.erase import erase as erase_by
from tiered_index.service.jobs.erase_find import Found, find_hidden
from tiered_index.service.log.records import StoredObject
from tiered_index.service.log.tombstones import Tombstones
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.metrics import JobMeter, JobMetrics
from tiered_index.spark.writing.merge import on_executors, opened_by_driver, run_in_tasks
from tiered_index.storage.base import Storage, StorageOptions
from tiered_index.storage.prices import PriceTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Tasks of one job for each core; a job's results are published before the next job begins
_TASKS_A_CORE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EraseResult(Erasure):
    """The certificate of an erasure, with the metrics of its job (`metrics`)."""

    metrics: JobMetrics = field(default_factory=JobMetrics)

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as `--json` prints it."""
        return Erasure.to_dict(self) | {"metrics": asdict(self.metrics)}


def erase(
    spark: SparkSession,
    *,
    storage: str,
    topic: str,
    keys: str | Sequence[str] | None = None,
    queue_id: int | None = None,
    before_ms: int | None = None,
    yes: bool = False,
    grace_s: float = GRACE_S,
    shard_bytes: int = 256 << 20,
    s3: StorageOptions | None = None,
    clock: Clock | None = None,
    prices: PriceTable | None = None,
) -> EraseResult:
    """Erase entries of a topic on executors, as `tiered_index.erase` with `now`; without `yes` only return the plan.

    `shard_bytes` is the size of a shard of a rewritten window, one task per shard. The arguments are checked before
    Spark starts. You may repeat it, also while writers, readers and merges run. `s3` has the options of S3. `clock`
    replaces the clock in tests. `prices` is the price table of the reported cost. Raises as `tiered_index.erase`;
    results that were published before an error stay.
    """
    request, present = EraseRequest.of(topic, keys, queue_id, before_ms), clock or SystemClock()
    check_grace(grace_s)
    check_shard_bytes(shard_bytes)
    address = StorageAddress(storage, s3)
    with opened_by_driver(address, present, prices) as (opened, log):
        meter = JobMeter(spark, opened)
        at_once = _TASKS_A_CORE * spark.sparkContext.defaultParallelism

        def find_in_tasks(
            _: Storage,
            objects: Iterable[StoredObject],
            stones: Tombstones,
            schema: Schema,
            progress: Callable[[int, int], None],
        ) -> Found:
            largest = sorted(objects, key=lambda stored: -stored.size_bytes)
            groups = [largest[number::at_once] for number in range(min(len(largest), at_once))]
            find = partial(find_hidden, stones=stones, schema=schema)
            step = "find: find the entries to erase"
            parts = run_in_tasks(spark, meter.address(address), step, find, groups)
            return {name: scanned for part in parts for name, scanned in part.items()}

        log.open()
        done = erase_by(
            opened,
            log,
            request,
            present,
            yes=yes,
            now=True,
            grace_s=grace_s,
            threads=at_once,
            messages=messages_to_erase(request, log.state),
            find=find_in_tasks,
            workers=on_executors(spark, meter, address, present),
            shard_bytes=shard_bytes,
        )
    known = {f.name: getattr(done, f.name) for f in fields(done)}
    return EraseResult(**known, metrics=meter.metrics)
