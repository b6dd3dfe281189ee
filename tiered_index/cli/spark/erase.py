"""`tiered-index spark erase`: erase entries, and rewrite what has them, on Spark."""

from __future__ import annotations

from dataclasses import asdict

from tiered_index.cli.keep.erase import erase_here, erase_request, write_erasure
from tiered_index.cli.on_spark import check_index, of_index, run_job, spark_of
from tiered_index.cli.options import EraseOptions, SparkOptions
from tiered_index.cli.session import Session
from tiered_index.service.jobs.erase import check_shard_bytes


def erase(session: Session, *, erasure: EraseOptions, shard_bytes: int, on: SparkOptions) -> int:
    """Erase entries of a topic, as `tiered-index erase --now`, with Spark."""
    request = erase_request(erasure)
    check_shard_bytes(shard_bytes)
    if not erasure.yes:
        return erase_here(session, erasure, now=True)
    config = session.config()
    check_index(config)
    spark = spark_of(session, on)
    from tiered_index.spark.writing.erase import erase as erase_on

    options = {**asdict(request), "keys": request.keys or None, "grace_s": erasure.grace, **of_index(config)}
    done, _ = run_job(erase_on, spark, yes=True, shard_bytes=shard_bytes, **options)
    costs = {name: getattr(done.metrics, name) for name in ("requests", "cost_usd")}
    return write_erasure(session.out, done, costs, allow_none=erasure.allow_none)
