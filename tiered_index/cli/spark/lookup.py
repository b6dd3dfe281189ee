"""`tiered-index spark lookup`: answers for a file of keys, by executors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from typer import Option

from tiered_index.cli.explaining import lost_text
from tiered_index.cli.options import Column, Conf, Master, pairs
from tiered_index.cli.output import Output, counted, human_bytes, human_seconds
from tiered_index.cli.session import Session, command
from tiered_index.cli.spark.sharing import given_storage, progress_of, spark_of
from tiered_index.cli.times import time_option
from tiered_index.errors import InvalidArgument

if TYPE_CHECKING:
    from tiered_index.spark.lookup.lookup import LookupResult

_PARTIAL = 6
_FAILED_SHOWN = 5
_FIGURES = (
    *("rows", "skipped_null", "objects", "tasks", "log_number"),
    *("requests", "bytes_read", "cost_usd", "plans", "dry_run"),
)


@command
def lookup(
    session: Session,
    keys: str = Option(
        metavar="FILE", help="Parquet, NDJSON or CSV file or folder of keys; Parquet also as s3:// URI."
    ),
    out: str | None = Option(
        None, metavar="FOLDER", help="Where answers go: a new folder of Parquet (NDJSON if named .ndjson), or a URI."
    ),
    column: Column = None,
    topic: str | None = Option(None, help="One topic for all keys."),
    begin: int | None = Option(None, parser=time_option, metavar="T", help="Only entries stored then or later."),
    end: int | None = Option(None, parser=time_option, metavar="T", help="Only entries stored then or earlier."),
    max_count: int = Option(64, "--max", min=1, help="Entries a key, the newest."),
    nested: bool = Option(False, "--nested", help="One row a key, its entries in an array."),
    allow_partial: bool = Option(False, "--allow-partial", help="Name files that can't be read, don't fail."),
    skip_null: bool = Option(False, "--skip-null", help="Leave out rows without topic or key, and count them."),
    max_requests: int | None = Option(None, min=0, help="Most requests of all tasks."),
    max_bytes: int | None = Option(None, min=0, help="Most bytes that all tasks read."),
    messages: str | None = Option(
        None, metavar="archive|FOLDER", help="Join the messages: archived ones, or those of a RocketMQ store."
    ),
    dry_run: bool = Option(False, "--dry-run", help="Show objects, requests, bytes and cost; read no entries."),
    master: Master = None,
    conf: Conf = None,
) -> int:
    """Look up every key of a file, on Spark: each stored object that may hold one is opened once, whatever the number
    of keys.

    Fields of a row: topic, key, optionally begin_ms and end_ms (epoch ms or ISO 8601); --begin and --end stand for all
    rows. Other columns are carried through.

    [bold]Examples[/bold]

      tiered-index spark lookup --keys keys.parquet --storage s3://bucket/index --out answers/

      tiered-index spark lookup --keys orders.csv --column key=order_id --topic orders --storage file:///tmp/index
      --dry-run
    """
    config = session.config()
    storage = given_storage(config)
    if out is None and not dry_run:
        raise InvalidArgument("no place for the answers is given: --out FOLDER, or --dry-run")
    columns: dict[str, Any] = dict(pairs("--column", column))
    given = {"topic": topic, "begin_ms": begin, "end_ms": end}
    if both := [name for name, value in given.items() if value is not None and name in columns]:
        raise InvalidArgument(f"{both[0]} is given by --column and for all rows")
    from tiered_index.spark.lookup.files import check_out, read_keys, write_answers

    if out is not None:
        # before Spark, which takes seconds to start
        check_out(out, config.s3)
    spark = spark_of(master, conf)
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    from tiered_index.spark.lookup.lookup import look_up

    kinds = {"topic": "string", "begin_ms": "bigint", "end_ms": "bigint"}
    columns |= {name: F.lit(value).cast(kinds[name]) for name, value in given.items() if value is not None}
    begun = time.monotonic()
    result = look_up(
        spark,
        read_keys(spark, keys, config.s3),
        storage=storage,
        columns=columns,
        max_count=max_count,
        nested=nested,
        allow_partial=allow_partial,
        skip_null=skip_null,
        max_requests=max_requests,
        max_bytes=max_bytes,
        messages=messages,
        config=config,
        dry_run=dry_run,
        progress=progress_of(session),
    )
    try:
        if result.frame is not None and out is not None:
            write_answers(result.frame, out, config.s3)
        statuses = result.statuses
    finally:
        result.release()
    _write(session.out, result, statuses, time.monotonic() - begun)
    return _PARTIAL if statuses.get("partial") else 0


def _write(out: Output, result: LookupResult, statuses: dict[str, int], elapsed_s: float) -> None:
    out.answer(
        {
            "status": "planned" if result.dry_run else "partial" if statuses.get("partial") else "done",
            **{name: getattr(result, name) for name in _FIGURES},
            "lookups": statuses,
            "failed": [{"file": file, "error": error} for file, error in result.failed],
            "lost": [one.to_dict() for one in result.lost],
            "elapsed_s": round(elapsed_s, 3),
        }
    )
    cost = f"{counted(result.requests, 'request')}, {human_bytes(result.bytes_read)}, ${result.cost_usd:.6f}"
    if result.skipped_null:
        out.line(f"{counted(result.skipped_null, 'row')} without topic or key left out")
    if result.dry_run:
        out.line(
            f"{counted(result.rows, 'row')} would be looked up in {counted(result.objects, 'object')} by "
            f"{counted(result.tasks, 'task')}: at most about {cost}; nothing was read"
        )
        return
    told = ", ".join(f"{count:,} {status}" for status, count in sorted(statuses.items()))
    lookups = counted(sum(statuses.values()), "different lookup")
    out.line(f"{counted(result.rows, 'row')}, {lookups}{f' ({told})' if told else ''}")
    out.line(f"{counted(result.objects, 'object')} opened: {cost}, {human_seconds(elapsed_s)}")
    if result.lost:
        out.line(f"lost for good: {lost_text(result.lost)}")
    failed = [f"not read: {file}: {error}" for file, error in result.failed]
    out.first(_FAILED_SHOWN, failed, lambda rest: f"not read: {rest:,} more", remark=True)
