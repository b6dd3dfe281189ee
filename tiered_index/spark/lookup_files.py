"""Keys and answers of a bulk lookup as files: Parquet, NDJSON and CSV on local disks, Parquet in a storage.

Local files are Spark's to read and write, but for CSV (`csv_files`); those of a storage (`s3://...`) go through the project's storage
layer, a file a task.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from tiered_index.errors import InvalidArgument
from tiered_index.spark.csv_files import csv_frame
from tiered_index.spark.executors import StorageAddress, typed_errors
from tiered_index.spark.local_files import is_local, local_path, to_read, to_write
from tiered_index.spark.metrics import SourceAccess
from tiered_index.spark.ndjson_errors import first_line_without_object
from tiered_index.spark.ndjson_lines import check_lines
from tiered_index.spark.sources import frame_of
from tiered_index.storage.s3.options import S3Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["check_out", "read_keys", "write_answers"]

_JSON = (".ndjson", ".jsonl", ".json", ".ndjson.gz", ".jsonl.gz", ".json.gz")
_CSV = (".csv", ".csv.gz")
_PART_BYTES = 64 << 20


def read_keys(spark: SparkSession, path: str, s3: S3Options) -> DataFrame:
    """Return the rows of a file or folder of keys. Raises `InvalidArgument` where there is none, what the storage raises."""
    if not is_local(path):
        return frame_of(spark, path, SourceAccess(s3))
    place = local_path(path)
    if not place.exists():
        raise InvalidArgument(f"{place}: no such file or folder")
    below = [place] if place.is_file() else [p for p in place.iterdir() if p.is_file() and not p.name.startswith((".", "_"))]
    # Spark's order: the first Parquet file says which columns there are
    files = sorted(below)
    if files and all(file.name.endswith(_CSV) for file in files):
        return csv_frame(spark, files)
    if files and all(file.name.endswith(".parquet") for file in files):
        with typed_errors(f"reading {place}"):
            return spark.read.parquet(*map(to_read, files))
    if files and all(file.name.endswith(_JSON) for file in files):
        return _json_frame(spark, place, files)
    raise InvalidArgument(f"{place}: keys are files of one kind: .parquet, .ndjson (.jsonl, .json), or .csv with a header")


def _json_frame(spark: SparkSession, place: Path, files: Sequence[Path]) -> DataFrame:
    """Return the objects of NDJSON files; which columns there are, and that all lines are JSON, is found by reading them."""
    with typed_errors(f"reading {place}"):
        check_lines(spark, files)
    try:
        with typed_errors(f"reading {place}"):
            return spark.read.option("mode", "FAILFAST").option("primitivesAsString", "false").json([to_read(file) for file in files])
    except InvalidArgument as error:
        # Spark says neither which file it is nor which line
        for file in files:
            if wrong := first_line_without_object(file):
                raise InvalidArgument(f"{file}: line {wrong[0]:,} is {wrong[1]}") from error
        raise


def check_out(out: str, s3: S3Options) -> None:
    """Raise `InvalidArgument` where answers can't be written to `out`: something is there already."""
    if is_local(out):
        if local_path(out).exists():
            raise InvalidArgument(f"{local_path(out)} exists already: answers are written to a folder of their own")
        return
    with StorageAddress(out, s3).open() as storage:
        if next(iter(storage.list()), None) is not None:
            raise InvalidArgument(f"{out} holds objects already: answers are written to a prefix of their own")


def write_answers(frame: DataFrame, out: str, s3: S3Options) -> None:
    """Write answers as a folder of Parquet files (of NDJSON where `out` is named so), or as Parquet objects with a mark ``_SUCCESS``."""
    if is_local(out):
        place = local_path(out)
        with typed_errors(f"writing {place}"):
            if place.name.endswith(_JSON):
                frame.write.mode("error").json(to_write(place))
            else:
                frame.write.mode("error").parquet(to_write(place))
        return
    address = StorageAddress(out, s3)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _write_parts(batches, address)

    with typed_errors(f"writing {out}"):
        names = [name for row in frame.mapInArrow(write, "names string").collect() for name in row[0].split("\n") if name]
    with address.open() as storage:
        # tasks may have run twice: readers go by what the mark names
        storage.put("_SUCCESS", "".join(f"{name}\n" for name in sorted(names)).encode())
        for info in list(storage.list("part-")):
            if info.name not in names:
                storage.delete(info.name)


def _write_parts(batches: Iterator[pa.RecordBatch], address: StorageAddress) -> Iterator[pa.RecordBatch]:
    names: list[str] = []
    held: list[pa.RecordBatch] = []
    attempt = secrets.token_hex(8)
    with address.open() as storage:

        def flush() -> None:
            buffer = io.BytesIO()
            pq.write_table(pa.Table.from_batches(held), buffer)
            names.append(f"part-{attempt}-{len(names):05d}.parquet")
            storage.put(names[-1], buffer.getvalue())
            held.clear()

        for batch in batches:
            if len(batch):
                held.append(batch)
            if sum(part.nbytes for part in held) >= _PART_BYTES:
                flush()
        if held:
            flush()
    yield pa.record_batch({"names": pa.array(["\n".join(names)], pa.string())})
