"""Columnar segments: Parquet files of records in order of their numbers. SPEC.md section 9. Pure.

The columns of a row group are contiguous, and the footer has the smallest and the greatest number of each row group. So
a reader gets one record with one range. A row group has about 256 KiB of records, or one larger record.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

NUMBER = "offset"
"""The column of the records' numbers, i64."""
_GROUP_BYTES = 256 << 10
# the bytes of a row without its texts
_ROW_BYTES = 48


class RowGroup(NamedTuple):
    """A row group: its position in the footer, and its range [`begin`, `end`) of the file."""

    place: int
    begin: int
    end: int


def encode_columns(
    table: pa.Table, sizes: npt.NDArray[np.int64], texts: Sequence[str], notes: Mapping[str, str]
) -> bytes:
    """Return a Parquet file of records. `sizes` (i64, n) are the bytes of their texts; the footer has `notes`.

    `texts`: the paths of the columns to compress. Numbers are stored as differences, which are small without that.
    """
    groups = np.cumsum(sizes + _ROW_BYTES) // _GROUP_BYTES
    cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(table)]
    numbers = [
        column.name for column in table.schema if pa.types.is_integer(column.type) or pa.types.is_temporal(column.type)
    ]
    file = pa.BufferOutputStream()
    with pq.ParquetWriter(
        file,
        table.schema,
        # each column of a row group begins a compressor of its own, which costs more than numbers take
        compression=dict.fromkeys(texts, "zstd"),
        column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
        use_dictionary=["topic"],
        write_statistics=[NUMBER],
        store_schema=False,
    ) as writer:
        for begin, end in itertools.pairwise(cuts):
            if end > begin:
                writer.write_table(table.slice(begin, end - begin), row_group_size=end - begin)
        writer.add_key_value_metadata(dict(notes))
    return file.getvalue().to_pybytes()  # type: ignore[no-any-return]


def encode_joined(records: pa.Table, files: Sequence[bytes]) -> bytes:
    """Return one file of `records`, which are those of `files`, all with the columns and notes that `records` has."""
    texts = dict.fromkeys(path for file in files for path in _compressed(file))
    notes = {name.decode(): value.decode() for name, value in (records.schema.metadata or {}).items()}
    records = records.replace_schema_metadata(None).combine_chunks()
    sizes = byte_lengths(records, {path.partition(".")[0] for path in texts})
    return encode_columns(records, sizes, [*texts], notes)


def _compressed(file: bytes) -> list[str]:
    """Return the paths of the columns that are compressed in a file."""
    metadata = pq.read_metadata(pa.BufferReader(file))
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    parts = (group.column(column) for group in groups for column in range(metadata.num_columns))
    return [part.path_in_schema for part in parts if part.compression != "UNCOMPRESSED"]


def byte_lengths(records: pa.Table, names: Iterable[str]) -> npt.NDArray[np.int64]:
    """Return the bytes of each record in some columns of text or bytes, or of lists of these, together (i64, n)."""
    lengths = np.zeros(len(records), np.int64)
    for name in names:
        lengths += _bytes_of(records[name].combine_chunks())
    return lengths


def _bytes_of(texts: pa.Array) -> npt.NDArray[np.int64]:
    """Return the bytes of texts, of lists of texts, or of structs of texts (i64, n). A null has none."""
    lengths = np.zeros(len(texts), np.int64)
    if pa.types.is_struct(texts.type):
        for part in texts.flatten():
            lengths += _bytes_of(part)
    elif not pa.types.is_list(texts.type):
        lengths += pc.binary_length(texts).fill_null(0).to_numpy()
    elif texts.null_count < len(texts):
        np.add.at(lengths, pc.list_parent_indices(texts).to_numpy(), _bytes_of(pc.list_flatten(texts)))
    return lengths


def notes_of(footer: bytes) -> dict[str, str]:
    """Return the notes in a footer, by name."""
    metadata = pq.read_metadata(pa.BufferReader(footer)).metadata or {}
    return {name.decode(): value.decode() for name, value in metadata.items()}


def row_group_of(footer: bytes, number: int) -> RowGroup | None:
    """Return the row group whose numbers include `number`; None: there is none. The record may be missing."""
    metadata = pq.read_metadata(pa.BufferReader(footer))
    column = metadata.schema.names.index(NUMBER)
    groups = range(metadata.num_row_groups)
    place = bisect_left(groups, number, key=lambda group: metadata.row_group(group).column(column).statistics.max)
    if place == len(groups) or metadata.row_group(place).column(column).statistics.min > number:
        return None
    return _row_group(metadata, place)


def row_group_before(footer: bytes, number: int) -> RowGroup | None:
    """Return the row group with the last record whose number is at most `number`; None: there is none."""
    metadata = pq.read_metadata(pa.BufferReader(footer))
    column = metadata.schema.names.index(NUMBER)
    groups = range(metadata.num_row_groups)
    place = bisect_right(groups, number, key=lambda group: metadata.row_group(group).column(column).statistics.min) - 1
    return _row_group(metadata, place) if place >= 0 else None


def _row_group(metadata: pq.FileMetaData, place: int) -> RowGroup:
    parts = [metadata.row_group(place).column(column) for column in range(metadata.num_columns)]
    begins = [part.dictionary_page_offset or part.data_page_offset for part in parts]
    ends = [begin + part.total_compressed_size for begin, part in zip(begins, parts, strict=True)]
    return RowGroup(place, min(begins), max(ends))


def decode_group(footer: bytes, group: RowGroup, data: bytes) -> pa.Table:
    """Return the records of a row group; `data` has the bytes of its range."""
    # untouched pages take no memory
    file = np.zeros(group.end, np.uint8)
    file[group.begin :] = np.frombuffer(data, np.uint8)
    metadata = pq.read_metadata(pa.BufferReader(footer))
    return pq.ParquetFile(pa.BufferReader(pa.py_buffer(file)), metadata=metadata).read_row_group(group.place)


def decode_columns(file: bytes) -> pa.Table:
    """Return all records of a file."""
    return pq.read_table(pa.BufferReader(file))
