"""`tiered-index spark audit`: check every byte of an index, and compare its entries with its source."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from tiered_index.base.units import format_time
from tiered_index.cli.exit_codes import FINDING
from tiered_index.cli.on_spark import run_job, spark_columns, spark_of
from tiered_index.cli.operate.verify import write_findings
from tiered_index.cli.options import Column, Constant, RangeOptions, SparkOptions, given_columns
from tiered_index.cli.session import Session, storage_uri
from tiered_index.errors import InvalidArgument

_SHOWN = 20
# fields that `write_findings` prints
_OF_REPORT = ("findings", "notes", "missing", "lost", "unchecked")


def audit(
    session: Session,
    *,
    source: list[str] | None,
    column: Column,
    constant: Constant,
    list_: int,
    within: RangeOptions,
    on: SparkOptions,
) -> int:
    """Check every byte of an index, and compare its entries with its source."""
    begin, end = within.begin, within.end
    config = session.config()
    storage = storage_uri(config)
    columns, constants = given_columns(column, constant)
    if not source and (columns or constants or begin is not None or end is not None):
        raise InvalidArgument("--column, --constant, --begin and --end need --source")
    if begin is not None and end is not None and begin // 1000 > end // 1000:
        raise InvalidArgument(f"--begin {format_time(begin)} is after --end {format_time(end)}")
    from tiered_index.spark.audit.audit import audit as audit_index
    from tiered_index.spark.audit.audit import check_audit

    # checked before Spark, which takes seconds to start
    options: dict[str, Any] = {"storage": storage, "config": config}
    check_audit(source or None, fields={**columns, **dict.fromkeys(constants)}, **options)
    spark = spark_of(session, on)
    options |= {"columns": spark_columns(columns, constants), "begin_ms": begin, "end_ms": end, "most_listed": list_}
    result, elapsed_s = run_job(audit_index, spark, source or None, **options)
    differences = None if result.differences is None else asdict(result.differences)
    for difference in differences["listed"] if differences is not None else ():
        difference |= {name: _plain(difference[name]) for name in ("expected", "found")}
    document = {
        **result.report.to_dict(),
        **{name: getattr(result, name) for name in ("status", "entries", "objects", "log_number")},
        "differences": differences,
        "metrics": result.metrics,
        "elapsed_s": round(elapsed_s, 3),
    }
    session.out.show(document, without=(*_OF_REPORT, "differences"))
    write_findings(session.out, document, _SHOWN)
    if result.differences is not None:
        session.out.fields(document["differences"], without=("listed",))
        for kind, count in result.differences.counts.items():
            rows = [difference for difference in document["differences"]["listed"] if difference["kind"] == kind]
            session.out.rows(kind, rows, count)
        for remark in result.differences.remarks:
            session.out.line(remark)
    if result.status == "findings":
        return FINDING
    return 0 if result.status == "ok" else 3


def _plain(fields: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return fields for JSON: bytes as hexadecimal digits, infinities and NaN as text."""

    def said(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return None if fields is None else {name: said(value) for name, value in fields.items()}
