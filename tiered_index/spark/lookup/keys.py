"""Keys and answers of a bulk lookup as files, and lookups from a DataFrame of keys.

Files are Parquet, NDJSON and CSV on local disks, Parquet in a storage. Tasks read them with the readers of `sources`,
one NDJSON or CSV file in each. Spark writes local files.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tiered_index.errors import InvalidArgument, ObjectExists, ObjectNotFound, StorageError, TieredIndexError
from tiered_index.sources.keys import csv_rows, ndjson_rows
from tiered_index.sources.places import NDJSON, local_path
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.frames import cleaned_up_on_error, each_split, frame_of_splits, gathered, times_of_day_written
from tiered_index.spark.workers import plainly
from tiered_index.spark.writing.folders import kind_of
from tiered_index.spark.writing.parquet import ParquetFiles
from tiered_index.spark.writing.sources import column_of, files_of, frame_of_files, is_frame, shown_column, shown_kind
from tiered_index.storage.base import Storage, StorageOptions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


_BATCH_ROWS = 10_000


def csv_frame(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    """Return the rows of files with equal headers; empty cells are null, unnamed columns are `_c` and a number."""
    from pyspark.sql.types import StringType, StructField, StructType

    first, header = next(((file, cells) for file in files if (cells := header_of(file)) is not None), (files[0], None))
    if header is None:
        raise InvalidArgument(f"{first}: CSV needs a header")
    schema = StructType([StructField(name, StringType()) for name in _names(header, first)])
    read = partial(read_files, header=header, first=first)
    return frame_of_splits(spark, [[str(file)] for file in files]).mapInArrow(plainly(read), schema)


def header_of(file: Path) -> list[str] | None:
    """Return the cells of a file's first row, None for an empty file. Raises `InvalidArgument`, `CorruptFile`."""
    return next((cells for _, cells in csv_rows(file)), None)


def read_files(batches: Iterable[pa.RecordBatch], header: list[str], first: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task's files, whose header must equal that of the file `first`. Raises as `header_of`."""
    names = _names(header, first)
    for (file,) in each_split(batches):
        rows = csv_rows(Path(file))
        found = next((cells for _, cells in rows), header)
        if found != header:
            raise InvalidArgument(f"{file} has other columns than {first}: {found} instead of {header}")
        while part := [cells for _, cells in islice(rows, _BATCH_ROWS)]:
            columns = [pa.array([cell or None for cell in column], pa.string()) for column in zip(*part, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names)


def _names(header: list[str], file: Path) -> list[str]:
    names = [name or f"_c{place}" for place, name in enumerate(header)]
    # Spark ignores the case of names
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise InvalidArgument(f"{file}: two columns {name!r}")
        seen.add(name.lower())
    return names


def json_frame(spark: SparkSession, files: Sequence[Path], key: str = "key") -> DataFrame:
    """Return the JSON objects of files as rows; a first pass finds the columns. In column `key` a number is text."""
    from pyspark.sql.pandas.types import from_arrow_schema

    splits = frame_of_splits(spark, [[str(file)] for file in files])
    with typed_errors("reading the keys"):
        kinds = [
            pa.ipc.read_schema(pa.py_buffer(row[0]))
            for row in splits.mapInArrow(plainly(partial(_kinds, key=key)), "kinds binary").collect()
        ]
    schema = _kinds_of_all(kinds, "the keys")
    # any type will do for a column of nulls
    schema = pa.schema([f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in schema])
    return splits.mapInArrow(plainly(partial(_read_json, schema=schema, key=key)), from_arrow_schema(schema))


def _objects(batches: Iterable[pa.RecordBatch], key: str) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield (file, objects) for batches of the objects of a task's files."""
    for (file,) in each_split(batches):
        rows = ndjson_rows(Path(file), key)
        while part := [row for _, row in islice(rows, _BATCH_ROWS)]:
            yield file, part


def _kinds(batches: Iterable[pa.RecordBatch], key: str) -> Iterator[pa.RecordBatch]:
    """Yield one row, the serialized Arrow schema of all columns of a task's files."""
    found = [pa.schema([])]
    for file, rows in _objects(batches, key):
        for name in dict.fromkeys(name for row in rows for name in row):
            try:
                # `infer_type` accepts numbers with texts behind them
                kind = pa.array([row.get(name) for row in rows]).type
            except (pa.ArrowException, OverflowError) as error:
                raise InvalidArgument(
                    f"{file}: column {name!r} has values of several types, or a number beyond 64 bits: {error}"
                ) from error
            found.append(pa.schema([(name, kind)]))
        found = [_kinds_of_all(found, file)]
    yield pa.record_batch({"kinds": pa.array([found[0].serialize().to_pybytes()], pa.binary())})


def _kinds_of_all(kinds: Sequence[pa.Schema], where: str) -> pa.Schema:
    try:
        return pa.unify_schemas(kinds, promote_options="permissive")
    except pa.ArrowException as error:
        raise InvalidArgument(f"{where}: a column has values of several types: {error}") from error


def _read_json(batches: Iterable[pa.RecordBatch], schema: pa.Schema, key: str) -> Iterator[pa.RecordBatch]:
    for _, rows in _objects(batches, key):
        yield pa.RecordBatch.from_pylist(rows, schema)


_PART_BYTES = 64 << 20
_PART = "part-"
# begin of the name of an object that is there while a job writes; readers of folders of Parquet ignore it
_RUNNING = "_running-"


def key_files(path: str, s3: StorageOptions) -> ParquetFiles | list[Path]:
    """Return the files of a file or folder of keys: Parquet, or local ones of one other kind. Needs no Spark.

    Raises `InvalidArgument` if there are none or several kinds, the storage's errors.
    """
    found = files_of(path, partial(StorageAddress, options=s3), ("ndjson", "csv"))
    if isinstance(found, ParquetFiles):
        return found
    if local_path(path) is None:
        raise InvalidArgument(f"{path}: keys in a storage are Parquet; copy NDJSON and CSV to a local disk")
    return [Path(name) for _, name in found]


def read_keys(spark: SparkSession, path: str, s3: StorageOptions, key: str = "key") -> DataFrame:
    """Return the rows of a file or folder of keys; in NDJSON, numbers in the column `key` are text, as written.

    Raises as `key_files`.
    """
    files = key_files(path, s3)
    if isinstance(files, ParquetFiles):
        return frame_of_files(spark, files)
    is_csv = any(kind_of(file.name) == "csv" for file in files)
    return csv_frame(spark, files) if is_csv else json_frame(spark, files, key)


def check_out(out: str, s3: StorageOptions) -> None:
    """Raise `InvalidArgument` if `out` exists or has objects, and for NDJSON in a storage."""
    if (place := local_path(out)) is None:
        if out.partition("?")[0].rstrip("/").endswith(NDJSON):
            raise InvalidArgument(f"{out}: answers in a storage are Parquet; give a local folder for NDJSON")
        with StorageAddress(out, s3).open() as storage:
            if next(iter(storage.list()), None) is not None:
                raise InvalidArgument(f"{out} has objects already: give an empty prefix")
    elif place.exists():
        raise InvalidArgument(f"{place} exists already: answers are written to a folder of their own")


def write_answers(frame: DataFrame, out: str, s3: StorageOptions) -> None:
    """Write a local folder of Parquet (NDJSON if the name ends so), or Parquet and a list ``_SUCCESS`` to a storage.

    Raises `InvalidArgument` if another command has written its answers there meanwhile, or the format lacks a type.
    """
    from pyspark.errors import AnalysisException

    if (place := local_path(out)) is not None:
        # so that a repetition is not refused after an error, or an end of this process
        new = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        try:
            with cleaned_up_on_error(partial(shutil.rmtree, new)), times_of_day_written(frame.sparkSession):
                writer = frame.write.mode("error")
                with typed_errors(f"writing {place}"):
                    (writer.json if place.name.endswith(NDJSON) else writer.parquet)(f"file://{new}")
                new.rename(place)
        except AnalysisException as error:
            raise InvalidArgument(f"answers can't be written to {place}: {error}") from error
        except OSError as error:
            raise InvalidArgument(f"answers can't be written to {place}: {error.strerror}") from error
        return
    address, job = StorageAddress(out, s3), secrets.token_hex(4)
    with address.open() as storage:
        storage.put(_RUNNING + job, b"")
        # otherwise a repetition would be refused, and another command's answers would be read with them
        with cleaned_up_on_error(partial(_end_job, storage, job)):
            with typed_errors(f"writing {out}"):
                rows = frame.mapInArrow(
                    plainly(partial(_write_parts, address=address, job=job)), "name string"
                ).collect()
        names = {row[0] for row in rows}
        with contextlib.suppress(StorageError):  # the list does not name files of tasks that ran twice
            _end_job(storage, job, names)
        valid = "".join(f"{name}\n" for name in sorted(names)).encode()
        try:
            storage.put_if_absent("_SUCCESS", valid)
        except ObjectExists as error:  # perhaps of this put, if the storage repeated it
            if bytes(storage.get("_SUCCESS")) != valid:
                with cleaned_up_on_error(partial(_end_job, storage, job)):
                    raise InvalidArgument(f"{out} has the answers of another command: give an empty prefix") from error


def _end_job(storage: Storage, job: str, names: Container[str] = ()) -> None:
    """Delete the files of a job but `names`. Tasks that end later delete theirs, because its mark is gone."""
    storage.delete(_RUNNING + job)
    storage.delete_many([info.name for info in storage.list(_PART + job) if info.name not in names])


def _write_parts(batches: Iterator[pa.RecordBatch], address: StorageAddress, job: str) -> Iterator[pa.RecordBatch]:
    """Write files under names of this attempt, which exist for readers once the driver's list names them."""
    names: list[str] = []
    attempt = secrets.token_hex(8)
    with address.open() as storage:
        for held in gathered(filter(len, batches), lambda batch: batch.nbytes, _PART_BYTES):
            buffer = io.BytesIO()
            pq.write_table(pa.Table.from_batches(held), buffer)
            names.append(f"{_PART}{job}-{attempt}-{len(names):05d}.parquet")
            with storage.open_writer(names[-1]) as stream:
                stream.write(buffer.getbuffer())
        try:
            # after the files: if the mark is there, the end of the job will find them
            storage.head(_RUNNING + job)
        except ObjectNotFound as error:
            storage.delete_many(names)
            raise TieredIndexError(f"{storage.uri}: job {job} has ended: the answers of its late task go") from error
    yield pa.record_batch({"name": pa.array(names, pa.string())})


LOOKUP = "_lookup"
"""The name of a struct with the fields of a row's lookup, and its slot."""
_FIELDS = ("topic", "key", "begin_ms", "end_ms")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")


@dataclass(frozen=True)
class Keys:
    """Rows and their four fields as columns; `given` are fields that the frame lacks, `names` are for messages."""

    frame: DataFrame
    fields: Mapping[str, Any]
    given: Mapping[str, Any]
    names: Mapping[str, str]

    def rows(self) -> DataFrame:
        """Return the rows with the columns of `given`, and a struct `LOOKUP` of the fields."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        given = [column.alias(field) for field, column in self.given.items()]
        lookup = F.struct(*(self.fields[name].alias(name) for name in _FIELDS)).alias(LOOKUP)
        return self.frame.select("*", *given, lookup)

    def column(self, name: str) -> Any:
        """Return a field as a column of `rows`."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        return F.col(name) if name in self.given else self.fields[name]


def keys_of(frame: DataFrame, columns: Mapping[str, str | Column], taken: Sequence[str]) -> Keys:
    """Return the rows of `frame` as keys. Raises `InvalidArgument`, which names the column.

    `columns` has by field the name of its column, or a Spark column; `taken` are the names of answers' columns.
    """
    from pyspark.sql import Column
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
    from pyspark.sql.types import StringType

    if not is_frame(frame):
        raise InvalidArgument(f"the keys are a DataFrame of Spark, not {shown_kind(frame)}")
    if frame.isStreaming:
        raise InvalidArgument("the keys are a stream; look up each of its batches (foreachBatch)")
    if unknown := [name for name in columns if name not in _FIELDS]:
        raise InvalidArgument(f"columns: {unknown[0]!r} is not a field of a lookup; these are {', '.join(_FIELDS)}")
    fields: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for name in _FIELDS:
        source: Any = columns.get(name, name)
        if isinstance(source, str):
            if source not in frame.columns and name in ("begin_ms", "end_ms") and name not in columns:
                fields[name] = F.lit(None).cast("bigint")
            else:
                fields[name] = column_of(frame, name, source, "the keys have")
        elif not isinstance(source, Column):
            raise InvalidArgument(f"columns: {name} is the name of a column or a Column, not {source!r}")
        else:
            fields[name] = source
            if name not in frame.columns:
                given[name] = source
    there = [*frame.columns, *given]
    lower = [name.lower() for name in there]
    if twice := [name for name in there if lower.count(name.lower()) > 1]:
        raise InvalidArgument(f"the keys have two columns {twice[0]!r}")
    here = frame.select(*(column.alias(name) for name, column in fields.items())).schema
    names: dict[str, str] = {}
    for name in _FIELDS:
        kind = here[name].dataType
        # a collation does not matter: hashes are of the text
        found = "string" if isinstance(kind, StringType) else kind.simpleString()
        named = names[name] = shown_column(name, columns.get(name))
        if name in ("topic", "key"):
            if found != "string":
                raise InvalidArgument(f"column {named} is {found}; text is needed")
        elif found == "timestamp":
            fields[name] = F.unix_millis(fields[name])
        elif found in _INTEGERS:
            fields[name] = fields[name].cast("bigint")
        elif found == "string":
            fields[name] = fields[name].cast("string")
        else:
            wanted = "integers (epoch milliseconds), a timestamp with time zone, or text of either"
            raise InvalidArgument(f"column {named} is {found}; {wanted} are needed")
    names_taken = {name.lower() for name in taken}
    if clash := [name for name in there if name.lower() in names_taken]:
        of_answers = "of the keys has the name of a column of answers"
        raise InvalidArgument(f"column {clash[0]!r} {of_answers}; give it another one")
    return Keys(frame, fields, given, names)
