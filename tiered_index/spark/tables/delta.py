"""New files of a Delta table. Positions are the table's versions; its id is the source's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.sources.places import opened_place
from tiered_index.spark.tables.files import AS_DATAFRAME, build_new
from tiered_index.spark.writing.build import BuildResult
from tiered_index.spark.writing.sources import PartitionedFiles
from tiered_index.storage.opening import spelled

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession


def build_delta(spark: SparkSession, table: DeltaTable, *, storage: str, **options: Any) -> BuildResult | None:
    """Add the files that a Delta table has got since the last build to the index; None if there are none.

    `table` is of the package `deltalake`. `options` are those of `build`, without `mode` and `source_range`. Columns
    that partition the table are read from the names of folders. Raises as `new_in_delta` and `build`.
    """
    config, source = options.get("config"), str(table.metadata().id)
    return build_new(lambda begin: new_in_delta(table, begin, config), spark, source, storage, options)


def new_in_delta(table: DeltaTable, begin: int = 0, config: IndexConfig | None = None) -> tuple[list[str], int]:
    """Return the files that a table has got from version `begin` (0: all) to its newest one, and the next version.

    ``OPTIMIZE`` only rewrites indexed rows, so its files are left out. Raises `InvalidArgument` for column mapping,
    deletion vectors, and versions that removed or rewrote rows, or that the table's log no longer has.
    """
    table.update_incremental()
    root, end = spelled(table.table_uri.rstrip("/")), table.version() + 1
    _check_names(root, table.metadata().configuration)
    if begin > end:
        raise InvalidArgument(f"{root} has versions up to {end - 1:,}, but the index has it up to {begin - 1:,}")
    if not begin and any(batch.num_rows for batch in table.deletion_vectors()):
        rewrite = "rewrite these files by REORG TABLE ... APPLY (PURGE)"
        raise InvalidArgument(f"{root} has deletion vectors: its files have deleted rows; {rewrite}. {AS_DATAFRAME}")
    if begin:
        paths = [path for version in range(begin, end) for path in _added(root, version, config or IndexConfig())]
    else:
        paths = pa.table(table.get_add_actions())["path"].to_pylist()
    return PartitionedFiles(root, [path if ":/" in path else f"{root}/{path}" for path in paths]), end


def _check_names(root: str, configuration: dict[str, str]) -> None:
    if (mode := configuration.get("delta.columnMapping.mode", "none")) != "none":
        raise InvalidArgument(f"{root} has column mapping ({mode}): its files have other names. {AS_DATAFRAME}")


def _added(root: str, version: int, config: IndexConfig) -> Iterator[str]:
    """Yield the paths of files with new rows of one version."""
    try:
        with opened_place(f"{root}/_delta_log/{version:020}.json", config) as place, place.open() as file:
            actions = [json.loads(line) for line in file.read().splitlines() if line.strip()]
    except InvalidArgument as error:
        raise InvalidArgument(f"the log of {root} has lost version {version:,}: build a new index") from error
    made_by = next((info["commitInfo"].get("operation") for info in actions if "commitInfo" in info), "?")
    # a file with a new deletion vector is added and removed, in any order
    for action in sorted(actions, key=lambda action: "remove" in action):
        _check_names(root, action.get("metaData", {}).get("configuration", {}))
        change = next(iter(action.values()))
        vector = "by deletion vectors " * bool(change.get("deletionVector"))
        if change.get("dataChange") and (vector or "remove" in action):
            told = f"version {version:,} ({made_by}) removed or rewrote rows {vector}"
            raise InvalidArgument(f"{root}: {told.strip()}, but a build only adds entries: build a new index")
        if "add" in action and change["dataChange"]:
            yield str(change["path"])
