"""New files of an Iceberg table. Positions are sequence numbers; the table's UUID names the source."""

from __future__ import annotations

from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tiered_index.errors import InvalidArgument
from tiered_index.spark.tables.files import AS_DATAFRAME, build_new
from tiered_index.spark.writing.build import BuildResult

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyspark.sql import SparkSession


def build_iceberg(spark: SparkSession, table: Table, *, storage: str, **options: Any) -> BuildResult | None:
    """Add the files that an Iceberg table has got since the last build to the index; None if there are none.

    `table` is of the package `pyiceberg`. `options` are those of `build`, without `mode` and `source_range`. Raises as
    `new_in_iceberg` and `build`.
    """
    source = f"iceberg:{table.metadata.table_uuid}"
    return build_new(lambda begin: new_in_iceberg(table, begin), spark, source, storage, options)


def new_in_iceberg(table: Table, begin: int = 0) -> tuple[list[str], int]:
    """Return the files that a table has got from sequence number `begin` on (0: all), and the next sequence number.

    Snapshots that only rewrite files are left out. Raises `InvalidArgument` for format version 1, renamed columns,
    position and equality deletes, deletion vectors, and snapshots that removed or rewrote rows, or have expired.
    """
    from pyiceberg.table.snapshots import Operation, ancestors_of

    with suppress(NotImplementedError):  # a table without a catalog is as it was loaded
        table.refresh()
    name, latest = ".".join(table.name()), table.current_snapshot()
    if table.format_version < 2:
        raise InvalidArgument(f"{name}: all snapshots of format version 1 have number 0: upgrade the table")
    _check_files(table, name)
    if latest is None:
        return [], begin
    numbers = {each.snapshot_id: int(each.sequence_number or 0) for each in table.snapshots()}
    end = numbers[latest.snapshot_id] + 1
    if not begin:
        return [_uri(task) for task in table.scan(snapshot_id=latest.snapshot_id).plan_files()], end
    older = [each for each in ancestors_of(latest, table.metadata) if numbers[each.snapshot_id] < begin]
    if not older or numbers[older[0].snapshot_id] != begin - 1:
        gone = f"the snapshot before position {begin:,} has expired or was rolled back"
        raise InvalidArgument(f"{name}: {gone}: build a new index")
    newer = takewhile(lambda each: numbers[each.snapshot_id] >= begin, ancestors_of(latest, table.metadata))
    for each in newer:
        made_by = each.summary.operation if each.summary else None
        # REPLACE only rewrites files: it adds no rows
        if made_by not in (Operation.APPEND, Operation.REPLACE):
            told = f"snapshot {numbers[each.snapshot_id]:,} ({made_by}) removed or rewrote rows"
            raise InvalidArgument(f"{name}: {told}, but a build only adds entries: build a new index")
    if end == begin:
        return [], begin
    new = table.incremental_append_scan(
        from_snapshot_id_exclusive=older[0].snapshot_id, to_snapshot_id_inclusive=latest.snapshot_id
    )
    return [_uri(task) for task in new.plan_files()], end


def _check_files(table: Table, name: str) -> None:
    """Raise `InvalidArgument` if files have columns under other names, or rows that were deleted."""
    from pyiceberg.manifest import DataFileContent, FileFormat, ManifestContent

    pairs = {(field.field_id, field.name) for schema in table.schemas().values() for field in schema.fields}
    if any(len({pair[side] for pair in pairs}) < len(pairs) for side in (0, 1)):
        renamed = "a column was renamed, or has a dropped one's name, and older files have the old names"
        raise InvalidArgument(f"{name} has column mapping: {renamed}. {AS_DATAFRAME}")
    snapshot = table.current_snapshot()
    for manifest in snapshot.manifests(table.io) if snapshot else ():
        for entry in manifest.fetch_manifest_entry(table.io) if manifest.content == ManifestContent.DELETES else ():
            of_rows = "deletion vectors" if entry.data_file.file_format == FileFormat.PUFFIN else "position deletes"
            kind = "equality deletes" if entry.data_file.content == DataFileContent.EQUALITY_DELETES else of_rows
            raise InvalidArgument(f"{name} has {kind}: its files have deleted rows; rewrite them. {AS_DATAFRAME}")


def _uri(task: Any) -> str:
    """Return a file's URI. Iceberg gives the bare path, and `%2F` in it is part of the name."""
    path = task.file.file_path
    return quote(path, safe=":/") if "://" in path else path.removeprefix("file:")
