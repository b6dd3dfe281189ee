"""`tiered-index spark compact`: what writers have staged becomes compacted objects, by executors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_index.cli.output import counted, human_bytes, human_seconds
from tiered_index.cli.session import Session, command
from tiered_index.cli.spark.sharing import Conf, Master, Ship, progress_of, spark_of
from tiered_index.cli.stored_index import storage_uri

if TYPE_CHECKING:
    from tiered_index.spark.build.compact import CompactReport

__all__ = ["compact"]

_SHOWN = 5
_UNAVAILABLE, _CORRUPT = 3, 4


@command
def compact(
    session: Session,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what is staged and what it would cost; start no Spark.")] = False,
    master: Master = None,
    conf: Conf = None,
    ship: Ship = False,
) -> int:
    """Compact the files that writers with setting compaction = "spark" have staged, and publish them with one log record.

    A cron job that runs it takes compaction off the writers' hosts. Exit code 4 where a staged file is damaged: it is left to its writer;
    3 where storage or disk failed a file: the others are published, the next run tries it again.

    [bold]Examples[/bold]

      tiered-index spark compact --storage s3://bucket/index

      tiered-index spark compact --storage s3://bucket/index --dry-run --json
    """
    config = session.config()
    uri = storage_uri(config)
    from tiered_index.spark.build.compact import compact as compact_staged_files
    from tiered_index.spark.build.compact import plan_compaction

    begun = time.monotonic()
    if dry_run:
        report = plan_compaction(storage=uri, s3=config.s3, prices=config.prices)
    else:
        spark = spark_of(master, conf, ship=ship)
        report = compact_staged_files(spark, storage=uri, s3=config.s3, prices=config.prices, progress=progress_of(session))
    elapsed_s = time.monotonic() - begun
    if session.out.as_json:
        status = "planned" if dry_run else "compacted" if report.files else "nothing to do"
        lists = {name: [list(pair) for pair in getattr(report, name)] for name in ("left", "damaged", "failed")}
        document = asdict(replace(report, metrics=type(report.metrics)()))
        # nothing was measured where nothing was done
        del document["metrics"]
        metrics = {} if dry_run else {"metrics": report.metrics.to_json()}
        session.out.document({"status": status, **document, **lists, **metrics, "elapsed_s": round(elapsed_s, 3)})
    else:
        _print(session, report, elapsed_s)
    return _CORRUPT if report.damaged else _UNAVAILABLE if report.failed else 0


def _print(session: Session, report: CompactReport, elapsed_s: float) -> None:
    what = f"{counted(report.files, 'staged file')} with {counted(report.entries, 'entry', 'entries')}, {human_bytes(report.read_bytes)}"
    if report.dry_run:
        session.out.line(f"{what}: would become about {human_bytes(report.written_bytes)}; nothing was changed")
    elif report.files:
        session.out.line(f"{what}, became {human_bytes(report.written_bytes)}: log record {report.log_number}, {human_seconds(elapsed_s)}")
    else:
        session.out.line("nothing to compact")
    about = "about " if report.dry_run else ""
    session.out.line(f"{about}{counted(sum(report.requests.values()), 'request')}, about ${report.cost_usd:.6f}")
    _note(session, "left as it is", report.left)
    _note(session, "damaged, left to its writer", report.damaged)
    _note(session, "failed", report.failed)


def _note(session: Session, what: str, files: Sequence[tuple[str, str]]) -> None:
    for file_id, reason in files[:_SHOWN]:
        session.out.note(f"{what}: {file_id}: {reason}")
    if len(files) > _SHOWN:
        session.out.note(f"{what}: {len(files) - _SHOWN:,} more")
