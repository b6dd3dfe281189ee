"""A folder in a table of Delta or Iceberg is refused. Spark's own writers made the tables (`data/make_tables.py`)."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.integration.cli.command_lines import run_here

TABLES = Path(__file__).parent / "data" / "tables"


def test_a_folder_in_a_table_is_refused(tmp_path: Path) -> None:
    """A partition's folder has files of old versions, too, and rows that a deletion vector removes."""
    delta, iceberg = tmp_path / "delta", tmp_path / "iceberg"
    shutil.copytree(TABLES / "delta_partitioned", delta)
    shutil.copytree(TABLES / "iceberg_position_deletes", iceberg)
    part = next(delta.glob("topic=007/*/*.parquet"))
    (iceberg / "data").mkdir(exist_ok=True)
    shutil.copy(part, iceberg / "data")
    index = ("--root", str(tmp_path / "root"), "--storage", f"file://{tmp_path}/storage")
    of_rows = ("--topic", "orders", "--key", "key", "--time", "timestamp_ms")
    globs = delta / "topic=007" / "*" / "*.parquet", iceberg / "**" / "*.parquet"
    for place in (delta / "topic=007", part.parent, iceberg, iceberg / "data", *globs):
        for more in ((), of_rows):
            done = run_here("spark", "build", "--source", str(place), *index[2:], "--quiet", *more)
            assert done.code == 2 and "is a table (" in done.err and "Spark's reader of its" in done.err, done.err
            if more or place not in globs:
                assert "is a table (" in run_here("ingest", str(place), *index, *more).err
    for file in (part, iceberg / "data" / part.name):
        for more in ((), of_rows):
            assert "is a table (" in run_here("ingest", str(file), *index, *more).err
    assert not (tmp_path / "storage").exists()
