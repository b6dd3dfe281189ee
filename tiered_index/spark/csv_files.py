"""Local CSV files as a DataFrame whose columns are all text, a file a task. RFC 4180 in UTF-8, and nothing is guessed.

A quote in a quoted cell is doubled, a backslash is a backslash, and a cell may have lines, which end as they were written. What differs
is an error with its line. Spark's own reader would take an open quote for the rest of the file, replace what is no UTF-8, make LF of CRLF
in cells, and go by the order of columns in another file: keys would be other keys, and nobody told. The driver reads a header, tasks all
else.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.spark.splits import each_split, frame_of_splits

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["csv_frame", "header_of", "read_files"]

_BATCH_ROWS = 10_000
_TOLD = {
    "unexpected end of data": "a quote is not closed",
    "',' expected after '\"'": "'\"' in a quoted cell is not doubled",
    "new-line character": "a line ends with \\r alone, or a cell with \\r has no quotes",
}  # fmt: skip


def csv_frame(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    """Return the rows of files that have one header. Empty cells are null, quoted or not; a column without a name is `_c` and its place.

    Raises `InvalidArgument` and `CorruptFile`, or the tasks do.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    for first in files:
        if (header := header_of(first)) is not None:
            break
    else:
        raise InvalidArgument(f"{files[0]}: CSV begins with a header, and there is none")
    schema = StructType([StructField(name, StringType()) for name in _names(header, first)])
    read = partial(read_files, header=header, first=first)
    return frame_of_splits(spark, [[str(file)] for file in files]).mapInArrow(read, schema)


def header_of(file: Path) -> list[str] | None:
    """Return the cells of a file's first row; None where it has none. Raises as `csv_frame` does."""
    return next((cells for _, cells in _rows(file)), None)


def read_files(batches: Iterable[pa.RecordBatch], header: list[str], first: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the files in a task's splits, whose header must be that of the file `first`. Raises as `csv_frame` does."""
    names = _names(header, first)
    for (file,) in each_split(batches):
        rows = _rows(Path(file))
        found = next((cells for _, cells in rows), header)
        if found != header:
            raise InvalidArgument(f"{file} has other columns than {first}: {found} instead of {header}")
        checked = (_checked(file, line, cells, len(header)) for line, cells in rows)
        while part := list(islice(checked, _BATCH_ROWS)):
            columns = [pa.array([cell or None for cell in column], pa.string()) for column in zip(*part, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names)


def _names(header: list[str], file: Path) -> list[str]:
    names = [name or f"_c{place}" for place, name in enumerate(header)]
    # to Spark, names in other letters are the same
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise InvalidArgument(f"{file}: two columns {name!r}")
        seen.add(name.lower())
    return names


def _checked(file: str, line: int, cells: list[str], width: int) -> list[str]:
    if len(cells) != width:
        raise InvalidArgument(f"{file}: line {line:,} has {len(cells)} cell{'s' if len(cells) > 1 else ''}, the header {width}")
    return cells


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a file, each with its first line's number; empty lines are none."""
    line = 1
    try:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as lines:
            reader = csv.reader(_decoded(file, lines), strict=True)
            for cells in reader:
                if cells:
                    yield line, cells
                line = reader.line_num + 1
    except csv.Error as error:
        raise InvalidArgument(f"{file}: line {line:,}: {_told(str(error))}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorruptFile(str(file), str(error)) from error
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}") from error


def _decoded(file: Path, lines: Iterable[bytes]) -> Iterator[str]:
    # lines end with \n: a \r by itself is part of a cell, or refused where that has no quotes
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"{file}: line {number:,} is not UTF-8: {error.reason}") from error


def _told(problem: str) -> str:
    """Return csv's words, or ours for what is met in files."""
    if problem.startswith("field larger"):
        return f"a cell has more than {csv.field_size_limit():,} characters; is its quote closed?"
    return next((ours for theirs, ours in _TOLD.items() if problem.startswith(theirs)), problem)
