"""This package on its way to the executors: its modules as one zip file, which Spark hands to every Python worker.

Workers need an interpreter that has what the package depends on; their own copy of the package, if any, is not looked at. Driver only.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import tiered_index

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["pack_package", "ship_package"]


def pack_package(target: Path) -> Path:
    """Write the package as a zip file of its modules, the same bytes for the same modules; return `target`."""
    folder = Path(tiered_index.__file__).parent
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for module in sorted(folder.rglob("*.py")):
            # a fixed time of change: the default of ZipInfo
            packed.writestr(zipfile.ZipInfo(f"{folder.name}/{module.relative_to(folder).as_posix()}"), module.read_bytes())
    return target


def ship_package(spark: SparkSession) -> None:
    """Send the package to the executors of a session, those to come among them. Once a session is enough."""
    folder = tempfile.mkdtemp(prefix="tiered-index-")
    # executors fetch the file from the driver when they start, so it stays until the driver ends
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    spark.sparkContext.addPyFile(str(pack_package(Path(folder) / "tiered_index.zip")))
