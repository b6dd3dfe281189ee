"""`tiered-index spark audit`: prove an index by executors, and compare it with its source."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_index.cli.output import counted, human_bytes, human_seconds
from tiered_index.cli.session import Session, command
from tiered_index.cli.spark.sharing import Conf, Master, Ship, progress_of, spark_of
from tiered_index.cli.spark.source_options import Column, Constant, given_columns, spark_columns
from tiered_index.cli.times import format_time, time_option
from tiered_index.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from tiered_index.spark.audit import AuditResult
    from tiered_index.spark.audit_differences import Difference

__all__ = ["audit"]

_FOUND = 1
_SHOWN = 20


@command
def audit(
    session: Session,
    source: Annotated[
        list[str] | None, typer.Option(help="What the index was made of, as `spark build` takes it; none: the index is not compared.")
    ] = None,
    column: Column = None,
    constant: Constant = None,
    begin: Annotated[int | None, typer.Option(parser=time_option, metavar="T", help="Compare from here on.")] = None,
    end: Annotated[int | None, typer.Option(parser=time_option, metavar="T", help="Compare up to here, inclusive to the second.")] = None,
    report: Annotated[str | None, typer.Option(metavar="PARQUET", help="Write all findings to this path or s3:// object.")] = None,
    list_: Annotated[int, typer.Option("--list", min=0, help="Differences of each kind to keep; all are counted.")] = 1000,
    master: Master = None,
    conf: Conf = None,
    ship: Ship = False,
) -> int:
    """Check every record and every byte of an index, and that it holds its source's entries: none missing, extra or wrong. Changes nothing.

    Exit code 1: something is wrong. 3: something could not be read. Without --source this is `tiered-index verify --deep`, by many.

    [bold]Examples[/bold]

      tiered-index spark audit --storage s3://bucket/index

      tiered-index spark audit --storage s3://bucket/index --source orders.parquet --column key=order_id --report audit.parquet

      tiered-index spark audit --storage s3://bucket/index --source archive:s3://bucket/index --begin 2026-11-01 --end 2026-11-30
    """
    config = session.config()
    if config.storage is None:
        raise ConfigError("no storage is given: --storage URI")
    columns, constants = given_columns(column, constant)
    if not source and (columns or constants or begin is not None or end is not None):
        raise InvalidArgument("--column, --constant, --begin and --end say how to compare with a --source, and none is given")
    from tiered_index.spark.audit import audit as audit_index
    from tiered_index.spark.audit_report import check_report_name, write_report

    if report is not None:
        check_report_name(report)
    spark = spark_of(master, conf, ship=ship)
    begun = time.monotonic()
    result = audit_index(
        spark, source or None, storage=config.storage, columns=spark_columns(columns, constants), begin_ms=begin, end_ms=end,
        most_listed=list_, config=config, progress=progress_of(session),
    )  # fmt: skip
    if session.out.as_json:
        session.out.document(_document(result, time.monotonic() - begun))
    else:
        _print(session, result, time.monotonic() - begun)
    if report is not None:
        write_report(result, report, config.s3)  # last: what was found is told even if this fails
    if result.status == "findings":
        return _FOUND
    return 0 if result.status == "ok" else 3


def _document(result: AuditResult, elapsed_s: float) -> dict[str, object]:
    differences = None
    if result.differences is not None:
        differences = {**asdict(result.differences), "listed": [asdict(one) for one in result.differences.listed]}
    return {
        **result.report.to_dict(), "status": result.status, "entries": result.entries, "objects": result.objects,
        "log_number": result.log_number, "differences": differences, "metrics": result.metrics.to_json(), "elapsed_s": round(elapsed_s, 3),
    }  # fmt: skip


def _print(session: Session, result: AuditResult, elapsed_s: float) -> None:
    report, line = result.report, session.out.line
    for defect in report.findings[:_SHOWN]:
        place = f" at byte {defect.offset:,}" if defect.offset is not None else ""
        line(f"FINDING {defect.file}: {defect.part}: {defect.problem}{place}")
    if len(report.findings) > _SHOWN:
        line(f"and {counted(len(report.findings) - _SHOWN, 'further finding')}")
    for note in report.notes[:_SHOWN]:
        session.out.note(f"note: {note}")
    for what, error in report.unchecked[:_SHOWN]:
        line(f"NOT CHECKED {what}: {error}")
    entries, read = counted(result.entries, "entry", "entries"), human_bytes(report.checked["object_bytes"])
    found = counted(len(report.findings), "finding")
    line(f"log record {result.log_number}: {counted(result.objects, 'object')} with {entries}, {read} checked, {found}")
    if result.differences is not None:
        compared = result.differences
        for one in compared.listed[:_SHOWN]:
            line(_told(one))
        if compared.findings > min(_SHOWN, len(compared.listed)):
            line(f"and {counted(compared.findings - min(_SHOWN, len(compared.listed)), 'further difference')}")
        counts = ", ".join(f"{number:,} {kind}" for kind, number in compared.counts.items())
        line(f"source: {counted(compared.source_entries, 'entry', 'entries')}, index: {compared.index_entries:,}; {counts}")
        if compared.unproven:
            line(f"{counted(compared.unproven, 'entry', 'entries')} of the source may have lain in damaged objects: unproven")
    line(f"{result.status}, {human_seconds(elapsed_s)}")


def _told(one: Difference) -> str:
    said = one.expected or one.found or {}
    name = f"{one.topic} {one.key}" if one.key is not None else f"key hash {one.key_hash}"
    time_ms = int(said["second"]) * 1000
    text = f"{one.kind.upper()} {name}: queue {one.queue_id}, offset {one.offset}, {format_time(time_ms)}, {said['size']} bytes"
    if one.kind == "wrong" and one.found is not None:
        held = ", ".join(f"{field} {value}" for field, value in one.found.items() if (one.expected or {}).get(field) != value)
        text += f"; the index says {held}"
    return text + (f" ({one.object})" if one.object is not None else "")
