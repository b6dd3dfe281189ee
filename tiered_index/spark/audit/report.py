"""An audit's findings as one Parquet file.

A row a finding, a difference, a note, or an object that could not be checked.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.spark.audit.audit import AuditResult
from tiered_index.spark.executors import StorageAddress
from tiered_index.storage.s3.options import S3Options

__all__ = ["REPORT_SCHEMA", "check_report_name", "plain", "report_table", "write_report"]

# `kind`: ``finding``, ``missing``, ``extra``, ``wrong``, ``note`` or ``unchecked``; `expected` and `found` are JSON
# objects.
REPORT_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("object", pa.string()),
        ("part", pa.string()),
        ("problem", pa.string()),
        ("byte_offset", pa.int64()),
        ("topic", pa.string()),
        ("key", pa.string()),
        ("key_hash", pa.int32()),
        ("queue_id", pa.int32()),
        ("offset", pa.int64()),
        ("expected", pa.string()),
        ("found", pa.string()),
    ]
)


def report_table(result: AuditResult) -> pa.Table:
    """Return the rows, in the order of `kind` above."""
    rows: list[dict[str, Any]] = [
        {"kind": "finding", "object": d.file, "part": d.part, "problem": d.problem, "byte_offset": d.offset}
        for d in result.report.findings
    ]
    for d in result.differences.listed if result.differences is not None else ():
        rows.append(
            {
                "kind": d.kind,
                "object": d.object,
                "topic": d.topic,
                "key": d.key,
                "key_hash": d.key_hash,
                "queue_id": d.queue_id,
                "offset": d.offset,
                "expected": _text(d.expected),
                "found": _text(d.found),
            }
        )
    rows += [{"kind": "note", "problem": note} for note in (*_left_out(result), *result.report.notes)]
    rows += [{"kind": "unchecked", "object": what, "problem": str(error)} for what, error in result.report.unchecked]
    return pa.Table.from_pylist(rows, REPORT_SCHEMA)


def check_report_name(uri: str, s3: S3Options | None = None) -> None:
    """Raise `InvalidArgument` where a report can't be written there by its name."""
    folder, name = _place(uri)
    if not name.endswith(".parquet"):
        raise InvalidArgument(
            f"a report is one Parquet file, as report.parquet or s3://bucket/audits/2026-11-20.parquet, not {uri!r}"
        )
    if "://" in uri:
        try:
            StorageAddress(folder, s3 or S3Options()).open().close()
        except ConfigError as error:
            raise InvalidArgument(f"the report can't be written to {uri}: {error}") from error
    elif not Path(folder).is_dir():
        raise InvalidArgument(f"the report can't be written to {uri}: there is no folder {folder}")


def _place(uri: str) -> tuple[str, str]:
    """Return the folder or the storage, its parameters with it, and the name in it."""
    if "://" not in uri:
        return str(Path(uri).parent), Path(uri).name
    place, mark, parameters = uri.partition("?")
    folder, _, name = place.rpartition("/")
    return folder + mark + parameters, name


def write_report(result: AuditResult, uri: str, s3: S3Options | None = None) -> None:
    """Write the report to a path, or to an object of a storage, replacing what is there.

    Raises `InvalidArgument`, what the storage raises.
    """
    check_report_name(uri, s3)
    body = io.BytesIO()
    pq.write_table(report_table(result), body)
    if "://" not in uri:
        try:
            with open(uri, "wb") as file:
                file.write(body.getvalue())
        except OSError as error:
            raise InvalidArgument(f"the report can't be written to {uri}: {error.strerror}") from error
        return
    folder, name = _place(uri)
    with StorageAddress(folder, s3 or S3Options()).open() as storage:
        storage.put(name, body.getvalue())


def plain(fields: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return fields as JSON can say them: bytes as hexadecimal digits, numbers that are none as text."""
    return None if fields is None else {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(fields: dict[str, Any] | None) -> str | None:
    return None if fields is None else json.dumps(plain(fields))


def _left_out(result: AuditResult) -> list[str]:
    if result.differences is None:
        return []
    further = [
        f"{count:,} further {kind} entries are not listed" for kind, count in result.differences.unlisted.items()
    ]
    return further + result.differences.remarks
