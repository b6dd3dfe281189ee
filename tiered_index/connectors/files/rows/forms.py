"""Finds out which form a file of rows has, by its first bytes, and names forms that are not read."""

from __future__ import annotations

import contextlib
import io
import re

from tiered_index.connectors.files.rows.arrow import FILE_MAGIC, STREAM_MAGIC
from tiered_index.connectors.files.rows.batch import BYTE_ORDER_MARK, RowFile
from tiered_index.connectors.files.rows.columns import MAX_ROW_BYTES
from tiered_index.connectors.files.rows.fields import json_object
from tiered_index.connectors.files.rows.mapping import Dialect
from tiered_index.connectors.files.rows.places import CSV, NDJSON, PARQUET, File, LocalFile, Place, Stdin
from tiered_index.connectors.files.rows.table import TABLES, ColumnsFile
from tiered_index.connectors.files.rows.text import (
    HEAD_BYTES,
    CsvFile,
    NdjsonFile,
    compression_of,
    decompressed,
    text_before_damage,
    zeros_before,
)
from tiered_index.errors import CorruptFile, InvalidArgument

# the usual properties, and dictionary sizes of whole 64 KiB; it has no magic number
_LZMA = b"\x5d\0\0"
PARQUET_MAGIC = b"PAR1"
# the begin of a frame, and the bits of the byte behind it that state the size of a dictionary's number
_ZSTD_FRAME, _ZSTD_DICTIONARY = b"\x28\xb5\x2f\xfd", 3
_UNPACK = {"gzip": "gzip -dc", "bzip2": "bzip2 -dc", "xz": "xz -dc", "zstd": "zstd -dc"}
# forms that are not read, by their first bytes
_OTHERS = {
    b"Obj\x01": "an Avro file",
    b"ORC": "an ORC file",
    b"PK\x03\x04": "a ZIP archive",
    b"FEA1": "a Feather file of version 1",
    b"\x04\x22\x4d\x18": "packed by LZ4",
    b"SQLite format 3": "an SQLite database",
    b"%PDF": "a PDF file",
}
_PIECE_BYTES = 1 << 20
# bytes that no text has
_NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f\xc0\xc1\xf5-\xff]")


def is_growing_text(head: bytes) -> bool:
    """Return whether a file may be a text whose last line is not written yet. The other forms are written whole."""
    whole = (PARQUET_MAGIC, FILE_MAGIC, STREAM_MAGIC, b"[")
    begin = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    is_packed = compression_of(head) is not None or _is_lzma(head)
    return not is_packed and not begin.startswith(whole) and _other_form(begin) is None


def _is_lzma(head: bytes) -> bool:
    return head.startswith(_LZMA) and _NO_TEXT.search(head) is not None


def _other_form(head: bytes) -> str | None:
    """Return the form of a file that is not read; None: it may be read. A text may begin with the letters of one."""
    form = next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None)
    return None if form is None or not _NO_TEXT.search(head) else form


def _other_encoding(head: bytes) -> str | None:
    """Return the encoding of a text of units of 2 or 4 bytes, by its mark or by its first character; None: of bytes."""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    if len(head) >= 4 and head[:4].count(0) == 2 and head[0] != head[1]:
        return "UTF-16BE" if not head[0] and not head[2] else "UTF-16LE" if not head[1] and not head[3] else None
    return None


def _is_object(lines: bytes) -> bool:
    """Return whether the first line that is not blank is a whole JSON object."""
    line = lines.lstrip().partition(b"\n")[0]
    with contextlib.suppress(InvalidArgument):
        return line.startswith(b"{") and bool(json_object(line))
    return False


def _after_zeros(file: Place, compression: str | None) -> bytes:
    """Return the first bytes of a text that are neither 0 nor blank; empty: there are none."""
    with decompressed(file, compression, to_damage=True) as handle:
        while piece := text_before_damage(file, handle, compression, _PIECE_BYTES)[0]:
            if begin := piece[zeros_before(piece) :].lstrip(b"\0 \t\r\n"):
                return begin
    return b""


def rows_at(place: Place) -> RowFile:
    """Return the rows of a file, an object or stdin. Raises as `open_rows`, and `CorruptFile` for one that is cut off.

    Others may read a file as far as it goes, and name it.
    """
    if isinstance(place, Stdin):
        return open_rows(place, 0, place.head())
    if isinstance(place, LocalFile) and place.path.is_dir():
        raise InvalidArgument(f"{place} is a folder; give one file")
    with place.open() as handle:
        head, size_bytes = handle.read(HEAD_BYTES), handle.seek(0, io.SEEK_END)
    return undamaged(open_rows(place, size_bytes, head))


def undamaged(rows: RowFile) -> RowFile:
    """Return the rows of a file. Raises `CorruptFile` if the file is known to have more rows than can be read."""
    if isinstance(rows, ColumnsFile) and rows.table.damage is not None:
        raise rows.table.damage
    return rows


def rows_of_form(file: File, segment_format: str, size_bytes: int) -> RowFile:
    """Return the rows of a file of a known form, the format of a segment. Raises `InvalidArgument`, `CorruptFile`."""
    if segment_format in TABLES:
        return ColumnsFile(file, segment_format)
    kind, _, compression = segment_format.partition("+")
    of_text = file, compression or None, size_bytes
    return NdjsonFile(*of_text) if kind == "ndjson" else CsvFile(*of_text, Dialect.of(segment_format))


def open_rows(file: Place, size_bytes: int, head: bytes, dialect: Dialect | None = None) -> RowFile:
    """Return the rows of a file by `head`, its first 64 KiB; `dialect` is for CSV.

    The name decides only where the first line does not. Of stdin, `head` are the first bytes that are there. A text
    that has no row yet, such as a packed empty file, has rows of the bound 0: its first row decides the form. Raises
    `InvalidArgument` for a file of another form, and `CorruptFile`.
    """
    compression = compression_of(head)
    has_columns = head.startswith((PARQUET_MAGIC, FILE_MAGIC, STREAM_MAGIC))
    if isinstance(file, Stdin):
        if has_columns:
            raise InvalidArgument("Parquet and Arrow can't be read from stdin: give a file")
        if compression is not None:
            raise InvalidArgument(f"stdin is packed by {compression}: unpack it by `{_UNPACK[compression]}`")
        head = file.first_line(MAX_ROW_BYTES)
    elif has_columns:
        return ColumnsFile(file, "parquet" if head.startswith(PARQUET_MAGIC) else "arrow")
    if _is_lzma(head):
        command = "xz --format=lzma -dc FILE | gzip > FILE.gz"
        raise InvalidArgument(f"{file} is packed by LZMA alone: pack it by gzip, for example with `{command}`")
    if head.startswith(_ZSTD_FRAME) and head[4:5] and head[4] & _ZSTD_DICTIONARY:
        command = "zstd -dc -D DICTIONARY FILE | zstd > FILE.zst"
        raise InvalidArgument(f"{file} needs a dictionary of zstd: pack it without one, for example with `{command}`")
    text = head
    if compression is not None:
        with decompressed(file, compression, to_damage=True) as handle:
            text, damage = text_before_damage(file, handle, compression, HEAD_BYTES)
        if damage is not None and not text.strip():
            raise damage
    if (encoding := _other_encoding(text)) is not None:
        unpacked = "FILE" if compression is None else f"<({_UNPACK[compression]} < FILE)"
        command = f"iconv -f {encoding} -t UTF-8 {unpacked} > FILE.utf8"
        raise InvalidArgument(f"{file} is {encoding}: write UTF-8, for example with `{command}`")
    begin = text.removeprefix(BYTE_ORDER_MARK).lstrip()
    if not begin and len(text) < HEAD_BYTES:
        return NdjsonFile(file, compression, 0)
    is_after_zeros = begin.startswith(b"\0") and not isinstance(file, Stdin)
    if is_after_zeros and _after_zeros(file, compression).startswith(b"{"):
        return NdjsonFile(file, compression, size_bytes)
    line = begin.partition(b"\n")[0]
    if begin.startswith(b"[") or line.rstrip() == b"{":
        unpacked = "" if compression is None else f"{_UNPACK[compression]} < FILE | "
        what, each = ("a JSON array", ".[]") if begin.startswith(b"[") else ("JSON of several lines", ".")
        source = "FILE " if compression is None else ""
        command = f"{unpacked}jq -c '{each}' {source}> FILE.ndjson"
        raise InvalidArgument(f"{file} is {what}: write one object a line, for example with `{command}`")
    if begin.startswith(b"{"):
        return NdjsonFile(file, compression, size_bytes)
    if (form := _other_form(text)) is not None:
        raise InvalidArgument(f"{file} is {form}: convert it to NDJSON, CSV, Parquet or Arrow")
    name = str(file).lower()
    # the first line may be the rest of one
    is_half = dialect is None and not name.endswith(CSV) and _is_object(begin.partition(b"\n")[2])
    if is_half or (dialect is None and name.endswith(NDJSON)):
        return NdjsonFile(file, compression, size_bytes)
    has_delimiter = any(mark.encode() in line for mark in (dialect or Dialect()).delimiters)
    if b"\0" not in line and (has_delimiter or name.endswith(CSV)):
        return CsvFile(file, compression, size_bytes, dialect)
    if name.endswith(PARQUET):
        raise CorruptFile(str(file), "not a Parquet file", offset=0, expected=PARQUET_MAGIC, found=head[:4])
    raise InvalidArgument(
        f"{file} is neither NDJSON nor CSV, Parquet or Arrow: convert it to one of these, "
        "or give the --delimiter of CSV, with --topic"
    )
