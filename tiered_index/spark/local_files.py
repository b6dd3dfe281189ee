"""Local files as Spark reads them: their names, and checks of NDJSON.

Spark takes a path for a pattern, and decodes nothing, so `%20` is three characters of a name. Its reader would change
some NDJSON without an error: of two values in a line it takes the first; half of a surrogate pair becomes a question
mark. Spark's errors say column and value; pyarrow's do not always, so the lines are parsed again then.
"""

from __future__ import annotations

import gzip
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
    from pyspark.sql import SparkSession


_PATTERN = re.compile(r"[][{}*?\\]")


def is_local(path: str) -> bool:
    """Return whether a path, or a URI, is of local disks."""
    return "://" not in path or path.startswith("file://")


def local_path(path: str) -> Path:
    """Return the absolute path that a path, or a `file://` URI with its escapes, names."""
    return absolute_path(unquote(urlsplit(path).path) if path.startswith("file://") else path)


def to_read(file: Path) -> str:
    """Return the URI of an absolute path for Spark. Raises `InvalidArgument` for a name that Hadoop can't read."""
    if ":" in file.name:
        raise InvalidArgument(f"{file}: Spark reads no local file with ':' in its name: rename it")
    return "file://" + _PATTERN.sub(r"\\\g<0>", str(file))


def check_each_line(files: Iterable[Path]) -> None:
    """Raise `InvalidArgument`, naming file and line, where a line of local files has no object."""
    for file in files:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if wrong := line_without_object(line):
                    raise InvalidArgument(f"{file}: line {number:,} is {wrong}")


def line_without_object(line: bytes) -> str | None:
    """Return what a line is that is neither empty nor one object (or array, as Spark takes it) of Unicode."""
    if not line.strip():
        return None
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        return "not UTF-8"
    except ValueError as error:
        return "more than one value" if str(error).startswith("Extra data") else "no JSON"
    except RecursionError:
        return "nested too deeply"
    if not isinstance(value, dict | list):
        return f"{_kind(value)}, not an object"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "no Unicode: it has half of a surrogate pair"
    return None


def _kind(value: Any) -> str:
    kinds = {str: "text", float: "a fraction", int: "a number", dict: "an object", list: "a list"}
    return kinds.get(type(value), "null" if value is None else "a truth value")


# Text behind the end of an object, or a surrogate: few lines of messages have it, and each of them is parsed whole.
_SUSPECT = r"[}\]]\s*[^\s,\]}]|\\u[dD][89a-fA-F]"


def check_lines(spark: SparkSession, files: Sequence[Path]) -> None:
    """Raise `InvalidArgument`, naming file and line, where a line of local files isn't one value of Unicode."""
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    lines = spark.read.text([to_read(file) for file in files])
    suspects = lines.where(F.col("value").rlike(_SUSPECT)).select(F.col("value").cast("binary"))
    if not (found := suspects.mapInArrow(_wrong_ones, "wrong string").limit(1).collect()):
        return
    check_each_line(files)
    raise InvalidArgument(f"{', '.join(map(str, files[:3]))}: a line is {found[0][0]}")


def _wrong_ones(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        wrong = [found for line in batch.column(0).to_pylist() if (found := line_without_object(line))]
        if wrong:
            yield pa.record_batch({"wrong": pa.array(wrong[:1])})
            return
