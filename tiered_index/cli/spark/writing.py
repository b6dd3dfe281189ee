"""`tiered-index spark build` and `erase`: commands whose executors write to a storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from typer import Option

from tiered_index.cli.ingesting import RowOptions
from tiered_index.cli.options import (
    Column,
    Constant,
    EraseOptions,
    SparkOptions,
    end_option,
    given_columns,
    time_option,
)
from tiered_index.cli.removing.erase import erase_here, erase_request, write_erasure
from tiered_index.cli.session import Session, command, storage_uri
from tiered_index.cli.spark import check_index, of_index, run_job, spark_columns, spark_of
from tiered_index.errors import InvalidArgument
from tiered_index.service.jobs.erase import check_shard_bytes

if TYPE_CHECKING:
    from tiered_index.spark.writing.build import BuildResult
    from tiered_index.spark.writing.linked import RowsOfFiles


@command
def build(
    session: Session,
    source: list[str] = Option(
        help="Parquet, NDJSON or CSV: files, folders, URIs; RocketMQ stores; archive:STORAGE-URI. With --topic: "
        "files of any form, folders, globs and prefixes. Repeatable."
    ),
    window: str = Option(
        "1d", metavar="1h|1d|30d", help="Length of a window. The first window begins at 1970-01-01 (UTC)."
    ),
    column: Column = None,
    constant: Constant = None,
    shards: str = Option("auto", metavar="auto|N", help="Shards per window."),
    mode: str = Option(
        "error",
        metavar="error|append|replace|replace-all",
        help="Action if an earlier build wrote a table in one of the windows: fail, add a table, or replace.",
    ),
    max_windows: int = Option(10_000, min=1, help="Fail if the source has more windows."),
    begin: int | None = Option(
        None, parser=time_option, metavar="T", help="Fail if a window of the source begins before this time."
    ),
    end: int | None = Option(
        None, parser=end_option, metavar="T", help="Fail if a window of the source ends after this time or date."
    ),
    skip_corrupt: bool = Option(False, "--skip-corrupt", help="Skip damage in a commit log, and count it."),
    dry_run: bool = Option(False, "--dry-run", help="Print windows, shards, bytes, requests and cost; change nothing."),
    key: list[str] | None = Option(
        None,
        metavar="[NAME=]PATH",
        help="With --topic: key of a row, NAME= and the value if it has a name. Repeatable.",
    ),
    skip_bad: bool = Option(False, "--skip-bad", help="With --topic: skip and count rows that are no entries."),
    *,
    of_rows: RowOptions,
    on: SparkOptions,
) -> int:
    """Build window tables from files or a commit log with Spark.

    [bold]Examples[/bold]

      tiered-index spark build --source messages/ --storage file:///tmp/index --window 1d

      tiered-index spark build --source orders.parquet --column key=order_id --constant topic=orders --storage
      s3://bucket/index --dry-run

      tiered-index spark build --source 'archive:s3://bucket/index?store=broker-a' --storage s3://bucket/rebuilt

      tiered-index spark build --source 's3://logs/**/*.ndjson.gz' --topic orders --key order_id --time occurred_at
      --storage s3://bucket/index --master spark://host:7077

    With --topic the rows of files of any form are indexed where they are, as by `ingest`. The answers are the same, and
    the rows come back from the files. Each file is indexed once: run the command again for new files and new lines.

    One log record publishes all tables at once. `--mode replace` removes the tables that earlier builds wrote in the
    same windows. It keeps entries that a writer put, even if a merge moved them into tables. `--mode replace-all`
    removes these tables, too. Before Spark writes anything, the command prints the topics and entries that it will
    remove. Entries with an
    implausible time (settings max_late_s, max_early_s) get windows of their own, and are counted.
    """
    config = session.config()
    if shards != "auto" and not shards.isdecimal():
        raise InvalidArgument(f"--shards is auto or a number, not {shards!r}")
    wanted_shards = "auto" if shards == "auto" else int(shards)
    # those that are checked before Spark, which takes seconds to start
    known: dict[str, Any] = {"storage": storage_uri(config), "config": config}
    known |= {"window": window, "shards": wanted_shards}
    more: dict[str, Any] = {"max_windows": max_windows, "dry_run": dry_run}
    if of_rows != RowOptions() or key:
        refused = {"--column": column, "--constant": constant, "--begin": begin, "--end": end}
        refused |= {"--skip-corrupt": skip_corrupt, "--mode": mode != "error"}
        if wrong := [name for name, value in refused.items() if value]:
            raise InvalidArgument(f"leave {wrong[0]} out: it is not for rows of files (--topic)")
        return _build_files(session, source, _rows_of(of_rows, key), on, {**known, **more, "skip_bad": skip_bad})
    if skip_bad:
        raise InvalidArgument("--skip-bad needs --topic")
    columns, constants = given_columns(column, constant)
    from tiered_index.spark.writing.build import build as build_tables
    from tiered_index.spark.writing.build import check_build

    known["mode"] = mode
    check_build(source, fields={**columns, **dict.fromkeys(constants)}, **known)
    spark = spark_of(session, on)
    more |= {"columns": spark_columns(columns, constants), "begin_ms": begin, "end_ms": end}
    result, elapsed_s = run_job(build_tables, spark, source, skip_corrupt=skip_corrupt, **known, **more)
    return _show_build(session, result, elapsed_s)


def _rows_of(options: RowOptions, keys: Sequence[str] | None) -> RowsOfFiles:
    """Return the fields of rows of files. Raises `InvalidArgument`, which names a missing option."""
    from tiered_index.spark.writing.linked import RowsOfFiles

    topic, mapping = options.mapping(keys)
    return RowsOfFiles(tuple(mapping.keys), mapping.time, mapping.unit, topic, mapping.topic, mapping.dialect)


def _build_files(
    session: Session, sources: Sequence[str], rows: RowsOfFiles, on: SparkOptions, options: dict[str, Any]
) -> int:
    """Index the rows of files where they are, and return the exit code."""
    from tiered_index.sources.listing import check_exists
    from tiered_index.spark.writing.linked import link_files

    for source in sources:
        check_exists(source)
    result, elapsed_s = run_job(link_files, spark_of(session, on), sources, rows, **options)
    for uri in result.changed:
        session.out.note(f"{uri} has changed since it was indexed: its earlier rows can't be read any more")
    for uri in result.held_back:
        session.out.note(
            f"{uri}: the last row has no newline or an open quote: it may be cut. A later run reads it when it ends"
        )
    bad = [{"where": where, "problem": problem} for where, problem in result.skipped_first]
    return _show_build(session, result, elapsed_s, skipped_first=bad)


def _show_build(session: Session, result: BuildResult, elapsed_s: float, **more: Any) -> int:
    """Print the result of a build, with `more` fields, and return the exit code."""
    document = {
        "status": "planned" if result.dry_run else "built",
        **asdict(result),
        "windows": [
            {"begin_ms": begin * 1000, "window_s": length, "entries": n} for begin, length, n in result.windows
        ],
        "removed_topics": [{"topic": topic, "entries": entries} for topic, entries in result.removed_topics],
        "skipped": [{"file": file, "begin": b, "end": e, "problem": problem} for file, b, e, problem in result.skipped],
        **more,
        "elapsed_s": round(elapsed_s, 3),
    }
    session.out.show(document)
    return 0


@command
def erase(
    session: Session,
    erasure: EraseOptions,
    shard_bytes: int = Option(256 << 20, help="Approximate bytes of an object (shard). A task writes one."),
    *,
    on: SparkOptions,
) -> int:
    """Erase entries of a topic, as `tiered-index erase --now`, with Spark.

    [bold]Examples[/bold]

      tiered-index spark erase --storage s3://bucket/index --topic orders

      tiered-index spark erase --storage s3://bucket/index --topic orders --before 2026-01-01 --yes --master
      spark://host:7077

      tiered-index spark erase --storage s3://bucket/index --topic orders --key order-4711 --yes --json

    Executors read the objects and archived segments, and rewrite those that hold the entries. Then they read all of
    them again for the certificate. The driver publishes and deletes. Without --yes the command changes nothing, and
    reads the objects without Spark. Output and exit codes are those of `tiered-index erase --now`. If a killed task
    left an upload unfinished, the status is `pending` for a day.
    """
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
