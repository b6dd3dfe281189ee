"""Files of keys and of answers of a bulk lookup, and lookups from a DataFrame of keys.

The driver reads files of keys as files of rows, of any form and in any place. Answers go to a local folder by Spark's
writers, or to a storage through the driver.
"""

from __future__ import annotations

import io
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tiered_index.config import IndexConfig
from tiered_index.connectors.files.listing import listed_files
from tiered_index.connectors.files.rows.columns import has_items, is_text
from tiered_index.connectors.files.rows.forms import open_rows, undamaged
from tiered_index.connectors.files.rows.lookups import text_rows
from tiered_index.connectors.files.rows.parquet import ParquetTable
from tiered_index.connectors.files.rows.places import NDJSON, local_path
from tiered_index.connectors.files.rows.table import ColumnsFile
from tiered_index.connectors.files.rows.text import CsvFile, NdjsonFile
from tiered_index.errors import InvalidArgument, ObjectExists
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.frames import batches_of_arrow, cleaned_up_on_error, gathered, times_of_day_written
from tiered_index.spark.writing.sources import column_of, is_frame, shown_column, shown_kind
from tiered_index.storage.base import StorageOptions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


# Rows of NDJSON that are converted at once
_BATCH_ROWS = 10_000
_PART_BYTES = 64 << 20


def read_keys(path: str, s3: StorageOptions, key: str = "key") -> pa.Table:
    """Return the rows of a file or folder of keys, in types of Spark. Needs no Spark.

    Files have rows of one form. In CSV, empty cells are null, and an unnamed column is `_c` and a number. In NDJSON, a
    number in the column `key` is text, as written. Raises `InvalidArgument` for no columns or several forms, and for
    types that Spark lacks; `CorruptFile`, the storage's errors.
    """
    with listed_files([path], IndexConfig(s3=s3)) as files:
        opened = [undamaged(open_rows(file.file, file.size_bytes, file.head())) for file in files]
        # a text of blank lines has no columns; a table without rows has
        opened = [rows for rows in opened if rows.length_bound(0) or isinstance(rows, ColumnsFile)]
        forms = {rows.format.partition("+")[0] for rows in opened}
        if not forms:
            raise InvalidArgument(f"{path}: no file has a row")
        if len(forms) > 1:
            raise InvalidArgument(f"{path}: keys are files of one kind, not of {' and '.join(sorted(forms))}")
        if texts := [rows for rows in opened if isinstance(rows, NdjsonFile)]:
            return _json_table(texts, key)
        if texts_of_csv := [rows for rows in opened if isinstance(rows, CsvFile)]:
            return _csv_table(texts_of_csv)
        tables = [_columns_table(rows) for rows in opened if isinstance(rows, ColumnsFile)]
        # Spark loses rows of a table with empty chunks
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


def _columns_table(file: ColumnsFile) -> pa.Table:
    # Spark's times have microseconds
    table = ParquetTable(file.place, "us") if file.format == "parquet" else file.table
    schema = pa.schema([field.with_type(_known_type(field.type, field.name, str(file.file))) for field in table.schema])
    try:
        parts = [rows.cast(schema) for _, rows in table.read(schema.names)]
    except pa.ArrowInvalid as error:
        raise InvalidArgument(f"{file.file}: a value does not fit a type of Spark: {error}") from error
    return pa.concat_tables([schema.empty_table(), *parts]).replace_schema_metadata()


def _csv_table(files: Sequence[CsvFile]) -> pa.Table:
    first = files[0]
    header = first.header
    if other := next((file for file in files if file.header != header), None):
        raise InvalidArgument(f"{other.file} has other columns than {first.file}: {other.header} instead of {header}")
    names = [name or f"_c{place}" for place, name in enumerate(header)]
    # Spark ignores the case of names
    if twice := [name for place, name in enumerate(names) if name.lower() in map(str.lower, names[:place])]:
        raise InvalidArgument(f"{first.file}: two columns {twice[0]!r}")
    columns: list[list[str | None]] = [[] for _ in names]
    for file in files:
        file.header = names
        for _, row in text_rows(file):
            for column, cell in zip(columns, row.values(), strict=True):
                column.append(cell)
    return pa.table([pa.array(column, pa.string()) for column in columns], names)


def _json_table(files: Sequence[NdjsonFile], key: str) -> pa.Table:
    tables = []
    for file in files:
        rows = text_rows(file, key)
        while part := [row for _, row in islice(rows, _BATCH_ROWS)]:
            columns = {}
            for name in dict.fromkeys(name for row in part for name in row):
                try:
                    columns[name] = pa.array([row.get(name) for row in part])
                except (pa.ArrowException, OverflowError) as error:
                    raise InvalidArgument(
                        f"{file.file}: column {name!r} has values of several types, or a number beyond 64 bits: {error}"
                    ) from error
                except UnicodeEncodeError as error:
                    raise InvalidArgument(f"{file.file}: column {name!r} has half of a surrogate pair") from error
            tables.append(pa.table(columns))
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise InvalidArgument(f"the keys: a column has values of several types: {error}") from error
    # any type will do for a column of nulls
    return table.cast(pa.schema([f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in table.schema]))


def _known_type(kind: pa.DataType, column: str, file: str) -> pa.DataType:
    """Return a type of Spark for all values of a Parquet type, also within lists, structs and maps.

    Unsigned numbers become wider, bytes of any length; lists, texts and dictionaries become plain. Nanoseconds of times
    raise `InvalidArgument`, because Spark would cut them.
    """
    if pa.types.is_dictionary(kind):
        return _known_type(kind.value_type, column, file)
    if is_text(kind):
        return pa.string()
    if pa.types.is_unsigned_integer(kind):
        return pa.int64() if kind.bit_width < 64 else pa.decimal128(20)
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    if has_items(kind):
        return pa.list_(kind.value_field.with_type(_known_type(kind.value_type, column, file)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_known_type(field.type, column, file)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(*(_known_type(each, column, file) for each in (kind.key_type, kind.item_type)))
    if pa.types.is_time(kind):
        return pa.time64("us")
    if not pa.types.is_timestamp(kind):
        return kind
    if kind.unit == "ns":
        raise InvalidArgument(f"{file}: column {column!r} has times in nanoseconds: write times in microseconds")
    return pa.timestamp("us", kind.tz)


def frame_of_keys(spark: SparkSession, keys: pa.Table) -> DataFrame:
    """Return keys as a DataFrame. Raises `InvalidArgument` for a type that Spark lacks."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        with batches_of_arrow(spark):
            return spark.createDataFrame(keys, from_arrow_schema(keys.schema))
    except (PySparkException, ValueError) as error:
        raise InvalidArgument(f"Spark has no type of a column of the keys: {error}") from error


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
    with StorageAddress(out, s3).open() as storage, ExitStack() as failing:
        names: list[str] = []
        failing.callback(lambda: storage.delete_many(names))
        # the driver takes one result of each task, and stores it
        files = frame.mapInArrow(_parquet_files, "file binary").toLocalIterator(prefetchPartitions=True)
        job = secrets.token_hex(4)
        with typed_errors(f"writing {out}"):
            for number, (file,) in enumerate(files):
                names.append(f"part-{job}-{number:05d}.parquet")
                storage.put(names[-1], file)
        valid = "".join(f"{name}\n" for name in names).encode()
        try:
            storage.put_if_absent("_SUCCESS", valid)
        except ObjectExists as error:  # perhaps of this put, if the storage repeated it
            if bytes(storage.get("_SUCCESS")) != valid:
                raise InvalidArgument(f"{out} has the answers of another command: give an empty prefix") from error
        failing.pop_all()


def _parquet_files(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield a task's rows as Parquet files."""
    for held in gathered(filter(len, batches), lambda batch: batch.nbytes, _PART_BYTES):
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_batches(held), buffer)
        yield pa.record_batch({"file": pa.array([buffer.getvalue()], pa.binary())})


LOOKUP = "_lookup"
"""The name of a struct with the fields of a row's lookup, and its slot."""
_FIELDS = ("topic", "key", "begin_ms", "end_ms")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")


@dataclass(frozen=True)
class Keys:
    """Rows and their four fields as columns; `expressions` are fields that the frame lacks, `names` for messages."""

    frame: DataFrame
    fields: Mapping[str, Any]
    expressions: Mapping[str, Any]
    names: Mapping[str, str]

    def rows(self) -> DataFrame:
        """Return the rows with the columns of `columns`, and a struct `LOOKUP` of the fields."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        columns = [column.alias(field) for field, column in self.expressions.items()]
        lookup = F.struct(*(self.fields[name].alias(name) for name in _FIELDS)).alias(LOOKUP)
        return self.frame.select("*", *columns, lookup)

    def column(self, name: str) -> Any:
        """Return a field as a column of `rows`."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        return F.col(name) if name in self.expressions else self.fields[name]


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
    expressions: dict[str, Any] = {}
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
                expressions[name] = source
    there = [*frame.columns, *expressions]
    lower = [name.lower() for name in there]
    if twice := [name for name in there if lower.count(name.lower()) > 1]:
        raise InvalidArgument(f"the keys have two columns {twice[0]!r}")
    here = frame.select(*(column.alias(name) for name, column in fields.items())).schema
    names: dict[str, str] = {}
    for name in _FIELDS:
        kind = here[name].dataType
        # a collation does not matter: hashes are of the text
        actual = "string" if isinstance(kind, StringType) else kind.simpleString()
        named = names[name] = shown_column(name, columns.get(name))
        if name in ("topic", "key"):
            if actual != "string":
                raise InvalidArgument(f"column {named} is {actual}; text is needed: cast it")
        elif actual == "timestamp":
            fields[name] = F.unix_millis(fields[name])
        elif actual in _INTEGERS:
            fields[name] = fields[name].cast("bigint")
        elif actual == "string":
            fields[name] = fields[name].cast("string")
        else:
            wanted = "integers (epoch milliseconds), a timestamp with time zone, or text of either"
            raise InvalidArgument(f"column {named} is {actual}; {wanted} are needed")
    names_taken = {name.lower() for name in taken}
    if clash := [name for name in there if name.lower() in names_taken]:
        of_answers = "of the keys has the name of a column of answers"
        raise InvalidArgument(f"column {clash[0]!r} {of_answers}; give it another one")
    return Keys(frame, fields, expressions, names)
