"""Keys and answers of a bulk lookup as files: Parquet, NDJSON and CSV on local disks, Parquet in a storage.

Spark reads and writes local files, except CSV: its reader would take an open quote for the rest of the file, replace
what is no UTF-8, make LF of CRLF in cells, and go by the order of columns in another file. Here CSV is RFC 4180 in
UTF-8, a file a task, and what differs is an error with its line.
"""

from __future__ import annotations

import csv
import gzip
import io
import secrets
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.spark import local_files
from tiered_index.spark.build.sources import NDJSON, frame_of
from tiered_index.spark.executors import StorageAddress, gathered, typed_errors
from tiered_index.storage.s3.options import S3Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS = 10_000
_TOLD = {
    "unexpected end of data": "a quote is not closed",
    "',' expected after '\"'": "'\"' in a quoted cell is not doubled",
    "new-line character": "a line ends with \\r alone, or a cell with \\r has no quotes",
}


def csv_frame(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    """Return the rows of files of one header: empty cells are null, a column without a name is `_c` and its place."""
    from pyspark.sql.types import StringType, StructField, StructType

    first, header = next(((file, cells) for file in files if (cells := header_of(file)) is not None), (files[0], None))
    if header is None:
        raise InvalidArgument(f"{first}: CSV begins with a header, and there is none")
    schema = StructType([StructField(name, StringType()) for name in _names(header, first)])
    read = partial(read_files, header=header, first=first)
    return local_files.frame_of_splits(spark, [[str(file)] for file in files]).mapInArrow(read, schema)


def header_of(file: Path) -> list[str] | None:
    """Return the cells of a file's first row; None where it has none. Raises `InvalidArgument`, `CorruptFile`."""
    return next((cells for _, cells in csv_rows(file)), None)


def read_files(batches: Iterable[pa.RecordBatch], header: list[str], first: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task's files, whose header must be that of the file `first`. Raises as `header_of`."""
    names = _names(header, first)
    for (file,) in local_files.each_split(batches):
        rows = csv_rows(Path(file))
        found = next((cells for _, cells in rows), header)
        if found != header:
            raise InvalidArgument(f"{file} has other columns than {first}: {found} instead of {header}")
        while part := [_checked(file, line, cells, len(header)) for line, cells in islice(rows, _BATCH_ROWS)]:
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
        raise InvalidArgument(
            f"{file}: line {line:,} has {len(cells)} cell{'s' if len(cells) > 1 else ''}, the header {width}"
        )
    return cells


def csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
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


_CSV = (".csv", ".csv.gz")
_PART_BYTES = 64 << 20


def read_keys(spark: SparkSession, path: str, s3: S3Options) -> DataFrame:
    """Return the rows of a file or folder of keys. Raises `InvalidArgument` where there is none, as the storage."""
    if not local_files.is_local(path):
        return frame_of(spark, path, partial(StorageAddress, options=s3))
    place = local_files.local_path(path)
    if not place.exists():
        raise InvalidArgument(f"{place}: no such file or folder")
    below = [p for p in place.iterdir() if p.is_file() and not p.name.startswith((".", "_"))] if place.is_dir() else []
    # Spark's order: the first Parquet file says which columns there are
    files = [place] if place.is_file() else sorted(below)
    kinds = [kind for kind in (_CSV, (".parquet",), NDJSON) if all(file.name.endswith(kind) for file in files)]
    if not files or not kinds:
        raise InvalidArgument(
            f"{place}: keys are files of one kind: .parquet, .ndjson (.jsonl, .json), or .csv with a header"
        )
    if kinds == [_CSV]:
        return csv_frame(spark, files)
    if kinds == [NDJSON]:
        return _json_frame(spark, place, files)
    with typed_errors(f"reading {place}"):
        return spark.read.parquet(*map(local_files.to_read, files))


def _json_frame(spark: SparkSession, place: Path, files: Sequence[Path]) -> DataFrame:
    """Return the objects of NDJSON files; reading them finds the columns, and that all lines are JSON."""
    with typed_errors(f"reading {place}"):
        local_files.check_lines(spark, files)
    try:
        with typed_errors(f"reading {place}"):
            reader = spark.read.option("mode", "FAILFAST").option("primitivesAsString", "false")
            return reader.json([local_files.to_read(file) for file in files])
    except InvalidArgument:
        local_files.check_each_line(files)  # Spark says neither which file it is nor which line
        raise


def check_out(out: str, s3: S3Options) -> None:
    """Raise `InvalidArgument` where answers can't be written to `out`: something is there already."""
    if not local_files.is_local(out):
        with StorageAddress(out, s3).open() as storage:
            if next(iter(storage.list()), None) is not None:
                raise InvalidArgument(f"{out} holds objects already: answers are written to a prefix of their own")
    elif (place := local_files.local_path(out)).exists():
        raise InvalidArgument(f"{place} exists already: answers are written to a folder of their own")


def write_answers(frame: DataFrame, out: str, s3: S3Options) -> None:
    """Write a folder of Parquet (NDJSON where `out` is named so), in a storage Parquet with a mark ``_SUCCESS``."""
    if local_files.is_local(out):
        place = local_files.local_path(out)
        with typed_errors(f"writing {place}"):
            writer = frame.write.mode("error")
            (writer.json if place.name.endswith(NDJSON) else writer.parquet)(f"file://{place}")
        return
    address = StorageAddress(out, s3)
    with typed_errors(f"writing {out}"):
        rows = frame.mapInArrow(partial(_write_parts, address=address), "names string").collect()
    names = [name for row in rows for name in row[0].split("\n") if name]
    with address.open() as storage:
        # tasks may have run twice: readers go by what the mark names
        storage.put("_SUCCESS", "".join(f"{name}\n" for name in sorted(names)).encode())
        for info in list(storage.list("part-")):
            if info.name not in names:
                storage.delete(info.name)


def _write_parts(batches: Iterator[pa.RecordBatch], address: StorageAddress) -> Iterator[pa.RecordBatch]:
    names: list[str] = []
    attempt = secrets.token_hex(8)
    with address.open() as storage:
        for held in gathered(filter(len, batches), lambda batch: batch.nbytes, _PART_BYTES):
            buffer = io.BytesIO()
            pq.write_table(pa.Table.from_batches(held), buffer)
            names.append(f"part-{attempt}-{len(names):05d}.parquet")
            storage.put(names[-1], buffer.getvalue())
    yield pa.record_batch({"names": pa.array(["\n".join(names)], pa.string())})
