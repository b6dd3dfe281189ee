"""`tiered-index spark audit`: prove an index by executors, and compare it with its source."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from typer import Option

from tiered_index.cli.maintenance import write_findings
from tiered_index.cli.options import Column, Conf, Constant, Master, Ship, given_columns
from tiered_index.cli.output import Output, counted, human_bytes, human_seconds
from tiered_index.cli.session import Session, command
from tiered_index.cli.spark.sharing import given_storage, progress_of, spark_columns, spark_of
from tiered_index.cli.times import format_time, time_option
from tiered_index.errors import InvalidArgument

if TYPE_CHECKING:
    from tiered_index.spark.audit.audit import AuditResult
    from tiered_index.spark.audit.differences import Difference

_FOUND = 1
_SHOWN = 20


@command
def audit(
    session: Session,
    source: list[str] | None = Option(
        None, help="What the index was made of, as `spark build` takes it; none: the index is not compared."
    ),
    column: Column = None,
    constant: Constant = None,
    begin: int | None = Option(
        None, parser=time_option, metavar="T", help="Compare from here on; a date alone is its midnight."
    ),
    end: int | None = Option(
        None, parser=time_option, metavar="T", help="Compare up to this second; a date alone is its midnight."
    ),
    report: str | None = Option(
        None, metavar="PARQUET", help="Write what was found, a row each, to this path or s3:// object."
    ),
    list_: int = Option(
        1000, "--list", min=0, help="Differences of each kind to keep for report and JSON; all are counted."
    ),
    master: Master = None,
    conf: Conf = None,
    ship: Ship = False,
) -> int:
    """Check every record and every byte of an index, and that it holds its source's entries: none missing, extra or
    wrong. Changes nothing.

    Exit code 1: something is wrong. 3: something could not be read. Without --source this is `tiered-index verify
    --deep`, by many.

    [bold]Examples[/bold]

      tiered-index spark audit --storage s3://bucket/index

      tiered-index spark audit --storage s3://bucket/index --source orders.parquet --column key=order_id --report
      audit.parquet

      tiered-index spark audit --storage s3://bucket/index --source archive:s3://bucket/index --begin 2026-11-01 --end
      2026-11-30T23:59:59
    """
    config = session.config()
    storage = given_storage(config)
    columns, constants = given_columns(column, constant)
    if not source and (columns or constants or begin is not None or end is not None):
        raise InvalidArgument(
            "--column, --constant, --begin and --end say how to compare with a --source, and none is given"
        )
    if begin is not None and end is not None and begin // 1000 > end // 1000:
        raise InvalidArgument(f"--begin {format_time(begin)} lies after --end {format_time(end)}")
    from tiered_index.spark.audit.audit import audit as audit_index
    from tiered_index.spark.audit.audit import check_report_name, write_report

    if report is not None:
        check_report_name(report, config.s3)
    spark = spark_of(master, conf, ship=ship)
    begun = time.monotonic()
    result = audit_index(
        spark,
        source or None,
        storage=storage,
        columns=spark_columns(columns, constants),
        begin_ms=begin,
        end_ms=end,
        most_listed=list_,
        config=config,
        progress=progress_of(session),
    )
    elapsed_s = time.monotonic() - begun
    session.out.answer(_document(result, elapsed_s))
    _write(session.out, result, elapsed_s, bounded=begin is not None or end is not None)
    if report is not None:
        write_report(result, report, config.s3)  # last: what was found is reported even if this fails
    if result.status == "findings":
        return _FOUND
    return 0 if result.status == "ok" else 3


def _document(result: AuditResult, elapsed_s: float) -> dict[str, object]:
    from tiered_index.spark.audit.audit import plain

    differences = None if result.differences is None else asdict(result.differences)
    if differences is not None:
        for one in differences["listed"]:
            one |= {name: plain(one[name]) for name in ("expected", "found")}
    return {
        **result.report.to_dict(),
        **{name: getattr(result, name) for name in ("status", "entries", "objects", "log_number")},
        "differences": differences,
        "metrics": result.metrics.to_json(),
        "elapsed_s": round(elapsed_s, 3),
    }


def _write(out: Output, result: AuditResult, elapsed_s: float, *, bounded: bool) -> None:
    report, line = result.report, out.line
    write_findings(out, report, _SHOWN)
    entries, read = counted(result.entries, "entry", "entries"), human_bytes(report.checked["object_bytes"])
    found = counted(len(report.findings), "finding")
    line(f"log record {result.log_number}: {counted(result.objects, 'object')} with {entries}, {read} checked, {found}")
    if result.differences is not None:
        compared = result.differences
        for kind, number in compared.counts.items():
            shown = [one for one in compared.listed if one.kind == kind][:_SHOWN]
            for one in shown:
                line(_told(one))
            if number > len(shown):
                line(f"and {number - len(shown):,} further {kind}")
        counts = ", ".join(f"{number:,} {kind}" for kind, number in compared.counts.items())
        in_source = counted(compared.source_entries, "entry", "entries")
        line(f"source: {in_source}, index: {compared.index_entries:,}; {counts}")
        for remark in compared.remarks:
            line(remark)
        if not (compared.source_entries or compared.index_entries):
            line("nothing was compared: neither side has an entry" + (" between the bounds" if bounded else ""))
    line(f"{result.status}, {human_seconds(elapsed_s)}")


def _told(one: Difference) -> str:
    said = one.expected or one.found or {}
    name = f"{one.topic} {one.key}" if one.key is not None else f"key hash {one.key_hash}"
    where = f"queue {one.queue_id}, offset {one.offset}, {_time(said['second'])}, {counted(said['size'], 'byte')}"
    text = f"{one.kind.upper()} {name}: {where}"
    if one.kind == "wrong" and one.found is not None:
        differing = {field: value for field, value in one.found.items() if (one.expected or {}).get(field) != value}
        held = [f"time {_time(v)}" if field == "second" else f"{field} {v}" for field, v in differing.items()]
        text += f"; the index says {', '.join(held)}"
    return text + (f" ({one.object})" if one.object is not None else "")


def _time(second: int) -> str:
    try:
        return format_time(second * 1000)
    except OverflowError:
        return f"second {second}"
