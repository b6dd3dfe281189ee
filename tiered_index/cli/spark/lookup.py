"""`tiered-index spark lookup`: look up each key of a file."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from tiered_index.base.units import format_time
from tiered_index.cli.exit_codes import PARTIAL
from tiered_index.cli.on_spark import interrupts_first, spark_of
from tiered_index.cli.options import RangeOptions, SparkOptions
from tiered_index.cli.session import Session, storage_uri
from tiered_index.cli.spark.commands import LookupOptions
from tiered_index.connectors.options import pairs
from tiered_index.errors import InvalidArgument
from tiered_index.spark.metrics import described
from tiered_index.storage.opening import beside

_FIGURES = (*("rows", "skipped_null", "objects", "tasks", "log_number"), *("requests", "bytes_read", "cost_usd"))


def lookup(session: Session, *, keys: str, options: LookupOptions, within: RangeOptions, on: SparkOptions) -> int:
    """Look up every key of a file with Spark."""
    begin, end, config = within.begin, within.end, session.config()
    storage = storage_uri(config)
    if options.out is None:
        raise InvalidArgument("no folder for the answers is given: pass --out FOLDER")
    columns: dict[str, Any] = dict(pairs("--column", options.column))
    bounds = {"topic": options.topic, "begin_ms": begin, "end_ms": end}
    if both := [name for name, value in bounds.items() if value is not None and name in columns]:
        raise InvalidArgument(f"{both[0]} is given by --column and for all rows")
    if begin is not None and end is not None and begin > end:
        raise InvalidArgument(f"--begin {format_time(begin)} is after --end {format_time(end)}")
    from tiered_index.spark.lookup.keys import check_out, frame_of_keys, read_keys, write_answers
    from tiered_index.spark.lookup.lookup import look_up, opened_index

    keys, out = beside(keys, storage), beside(options.out, storage)
    # checked before Spark, which takes seconds to start
    check_out(out, config.s3)
    rows = read_keys(keys, config.s3, columns.get("key", "key"))
    more: dict[str, Any] = {"max_count": options.max_count, "messages": options.messages}
    opened_index(storage, config, **more)
    spark = spark_of(session, on)
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    types = {name: "string" if name == "topic" else "bigint" for name, value in bounds.items() if value is not None}
    columns |= {name: F.lit(bounds[name]).cast(kind) for name, kind in types.items()}
    begun = time.monotonic()
    with interrupts_first(), contextlib.ExitStack() as ending:
        result = look_up(
            spark,
            frame_of_keys(spark, rows),
            storage=storage,
            columns=columns,
            allow_partial=options.allow_partial,
            skip_null=options.skip_null,
            max_requests=options.max_requests,
            max_bytes=options.max_bytes,
            config=config,
            **more,
        )
        ending.callback(result.release)
        with described(spark, "write: write the answers"):
            write_answers(result.frame, out, config.s3)
        statuses = result.statuses
    document = {
        "status": "partial" if statuses.get("partial") else "done",
        **{name: getattr(result, name) for name in _FIGURES},
        "lookups": statuses,
        "failed": [{"file": file, "error": error} for file, error in result.failed],
        "lost": result.lost,
        "expired_before_ms": result.expired_before_ms,
        "replaced": result.replaced,
        "elapsed_s": round(time.monotonic() - begun, 3),
    }
    session.out.show(document)
    return PARTIAL if statuses.get("partial") else 0
