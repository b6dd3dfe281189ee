"""The commands that run on Spark."""

from __future__ import annotations

from dataclasses import dataclass

from typer import Option

from tiered_index.cli.declaring import done_by
from tiered_index.cli.options import Column, Constant, EraseOptions, RangeOptions, SparkOptions, end_option, time_option
from tiered_index.connectors.files.spec import RowOptions
from tiered_index.connectors.options import declare


@done_by("tiered_index.cli.spark.build:build")
def build(
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
) -> None:
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


@done_by("tiered_index.cli.spark.erase:erase")
def erase(
    erasure: EraseOptions,
    shard_bytes: int = Option(256 << 20, help="Approximate bytes of an object (shard). A task writes one."),
    *,
    on: SparkOptions,
) -> None:
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


@dataclass(frozen=True)
class LookupOptions:
    """Options of `spark lookup` beside its keys."""

    out: str | None = declare(
        metavar="FOLDER", help="New folder for the answers, or a URI. Parquet, or NDJSON if the name ends in .ndjson."
    )
    column: Column = None
    topic: str | None = declare(help="Topic of all keys.")
    max_count: int = declare(64, "--max", min=1, help="Limit of entries per key, newest first.")
    allow_partial: bool = declare(False, "--allow-partial", help="Answer from the readable files, and name the others.")
    skip_null: bool = declare(False, "--skip-null", help="Skip rows without topic or key, and count them.")
    max_requests: int | None = declare(metavar="N", help="Limit of requests to the storage, of all tasks together.")
    max_bytes: int | None = declare(metavar="BYTES", help="Limit of bytes read, of all tasks together.")
    messages: str | None = declare(
        metavar="archive|SOURCE", help="Join the messages: `archive`, the folder of a RocketMQ store, or kafka://..."
    )


@done_by("tiered_index.cli.spark.lookup:lookup")
def lookup(
    keys: str = Option(metavar="FILE", help="File, folder or URI of keys: Parquet, Arrow, NDJSON or CSV."),
    *,
    options: LookupOptions,
    within: RangeOptions,
    on: SparkOptions,
) -> None:
    """Look up every key of a file with Spark.

    [bold]Examples[/bold]

      tiered-index spark lookup --keys keys.parquet --storage s3://bucket/index --out answers/

      tiered-index spark lookup --keys orders.csv --column key=order_id --topic orders --storage file:///tmp/index
      --out answers.ndjson

    Each task reads its range of slots in the stored files. A row of the file has topic, key and optionally begin_ms and
    end_ms (epoch ms or ISO 8601). --begin and --end apply to all rows. Answers also have the other columns of their
    row.
    """


@done_by("tiered_index.cli.spark.audit:audit")
def audit(
    source: list[str] | None = Option(
        None, help="Source of the index, as for `spark build`. Without it entries are not compared."
    ),
    column: Column = None,
    constant: Constant = None,
    list_: int = Option(
        1000, "--list", min=0, help="Limit of differences of each kind in JSON. The counts include all."
    ),
    *,
    within: RangeOptions,
    on: SparkOptions,
) -> None:
    """Check every byte of an index, and compare its entries with its source. Changes nothing.

    [bold]Examples[/bold]

      tiered-index spark audit --storage s3://bucket/index

      tiered-index spark audit --storage s3://bucket/index --source orders.parquet --column key=order_id --json

      tiered-index spark audit --storage s3://bucket/index --source archive:s3://bucket/index --begin 2026-11-01 --end
      2026-11-30T23:59:59

    With --source the index must have each entry of the source, and no other. Without --source the command is
    `tiered-index verify --deep` on many machines. Exit code 1: something is wrong. Exit code 3: something could not be
    read.
    """
