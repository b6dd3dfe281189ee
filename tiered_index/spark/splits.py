"""The splits that tasks read: a list of plain values each, one split to a partition. No file is opened here.

Local files have a path, and the name by which Spark finds it: Spark takes a path for a pattern, and decodes nothing, so
`%20` is three characters of a name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from tiered_index.errors import InvalidArgument
from tiered_index.storage.disk import absolute_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["each_split", "frame_of_splits", "is_local", "local_path", "to_read", "to_write"]


def frame_of_splits(spark: SparkSession, splits: Sequence[Sequence[Any]]) -> DataFrame:
    """Return a DataFrame with one split to a partition."""
    rows = [(json.dumps(split),) for split in splits]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, max(1, len(rows))), "split string")


def each_split(batches: Iterable[pa.RecordBatch]) -> Iterator[list[Any]]:
    """Yield the splits in a task's batches."""
    for batch in batches:
        for split in batch.column(0).to_pylist():
            yield json.loads(split)


_PATTERN = re.compile(r"[][{}*?\\]")


def is_local(path: str) -> bool:
    """Return whether a path, or a URI, is of local disks."""
    return "://" not in path or path.startswith("file://")


def local_path(path: str) -> Path:
    """Return the absolute path that a path, or a `file://` URI with its escapes, names."""
    return absolute_path(unquote(urlsplit(path).path) if path.startswith("file://") else path)


def to_read(file: Path) -> str:
    """Return what Spark reads an absolute path by. Raises `InvalidArgument` for a name that Hadoop can't read."""
    if ":" in file.name:
        raise InvalidArgument(f"{file}: Spark reads no local file with ':' in its name: rename it")
    return "file://" + _PATTERN.sub(r"\\\g<0>", str(file))


def to_write(folder: Path) -> str:
    """Return what Spark writes to an absolute path by, which is no pattern then."""
    return f"file://{folder}"
