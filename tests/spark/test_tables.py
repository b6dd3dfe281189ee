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
    for place in (delta / "topic=007", part.parent, iceberg, iceberg / "data"):
        done = run_here("spark", "build", "--source", str(place), *index[2:], "--quiet")
        assert done.code == 2 and "is a table (" in done.err and "Spark's reader of its format" in done.err, done.err
        assert "is a table (" in run_here("ingest", str(place), *index).err
    for file in (part, iceberg / "data" / part.name):
        assert "is a table (" in run_here("ingest", str(file), *index).err
    assert not (tmp_path / "storage").exists()
