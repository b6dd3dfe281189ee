"""NDJSON files, plain or gzipped: one JSON object a line, a position is a byte offset in the uncompressed text.

    {"topic": "orders", "queue_id": 0, "keys": ["order-1"], "offset": 42, "size": 512, "timestamp_ms": 1700000000000}

`topic_id` is optional, blank lines and further fields are passed over. A block of lines is parsed at once by Arrow; where that fails or
disagrees with the number of lines, its lines are read one by one by `json`, which decides. One thread; memory: a few blocks.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.json as pj

from tiered_index.cli.sources.messages import Batch, Record, checked_message, entry_columns
from tiered_index.errors import CorruptFile, InvalidArgument

__all__ = ["NdjsonSource"]

BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 16 << 20
FINGERPRINT_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_SCHEMA = pa.schema(
    [("topic", pa.string()), ("queue_id", pa.int64()), ("keys", pa.list_(pa.string())), ("offset", pa.int64()), ("size", pa.int64()),
     ("timestamp_ms", pa.int64()), ("topic_id", pa.int64())]
)  # fmt: skip
_PARSE = pj.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore")


class NdjsonSource:
    """One file. Raises `InvalidArgument` for a line that is no message, `CorruptFile` for a damaged gzip file."""

    unit = "bytes"

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as raw:
            self._gzipped = raw.read(2) == _GZIP_MAGIC
        self.total = None if self._gzipped else path.stat().st_size

    def fingerprint(self, length: int | None) -> tuple[int, str]:
        """Return how many of the first bytes (a MiB at most) the hash covers, and their hash."""
        with self._open() as handle:
            head = self._checked(handle.read, FINGERPRINT_BYTES if length is None else length)
        return len(head), hashlib.sha256(head).hexdigest()[:16]

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield the lines behind byte `start`, which must be the end of a line."""
        with self._open() as handle:
            self._seek(handle, start)
            position = start
            while block := self._checked(handle.read, BLOCK_BYTES):
                if not block.endswith(b"\n"):
                    rest = self._checked(handle.readline, MAX_LINE_BYTES)
                    if len(rest) == MAX_LINE_BYTES:
                        begun = position + block.rfind(b"\n") + 1
                        raise InvalidArgument(f"{self.path}: the line at byte {begun} is longer than 16 MiB")
                    block += rest
                end = position + len(block)
                columns, messages = _columns(block)
                yield Batch(columns, messages, end, partial(self._records, block, position))
                position = end

    def _open(self) -> IO[bytes]:
        return cast(IO[bytes], gzip.open(self.path, "rb")) if self._gzipped else self.path.open("rb")

    def _seek(self, handle: IO[bytes], start: int) -> None:
        if not start:
            return
        changed = f"{self.path} is not what it was when it was taken up to byte {start}: "
        if self._checked(handle.seek, start - 1) != start - 1:
            raise InvalidArgument(changed + "it is shorter")
        before = self._checked(handle.read, 1)
        if before == b"\n":
            return
        # the last line may have had no end then; now it must have one, or still be the last
        if not before or self._checked(handle.read, 1) not in (b"", b"\n", b"\r"):
            raise InvalidArgument(changed + ("no line ends there" if before else "it is shorter"))
        self._checked(handle.seek, start)

    def _checked(self, read: Any, argument: int) -> Any:
        try:
            return read(argument)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CorruptFile(str(self.path), f"damaged gzip file: {error}") from error

    def _records(self, block: bytes, position: int) -> Iterator[Record]:
        number = self._lines_before(position)
        for line in io.BytesIO(block):
            number += 1
            start, position = position, position + len(line)
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                if not isinstance(fields, dict):
                    raise InvalidArgument(f"not a JSON object: {line[:60]!r}")
                yield Record(f"line {number}", start, position, checked_message(fields))
            except InvalidArgument as error:
                yield Record(f"line {number}", start, position, None, str(error))
            except (ValueError, RecursionError) as error:
                yield Record(f"line {number}", start, position, None, f"not JSON: {error}")

    def _lines_before(self, position: int) -> int:
        lines = 0
        with self._open() as handle:
            while position > 0 and (piece := self._checked(handle.read, min(position, BLOCK_BYTES))):
                lines += piece.count(b"\n")
                position -= len(piece)
        return lines


def _columns(block: bytes) -> tuple[pa.RecordBatch | None, int]:
    """Return a block's entries and how many messages it has; None where a line needs a closer look."""
    lines = [line for line in block.split(b"\n") if line.strip()]
    if not lines:
        return None, 0
    try:
        block.decode()  # Arrow takes any bytes for text
        options = pj.ReadOptions(use_threads=False, block_size=len(block) + 1)
        table = pj.read_json(io.BytesIO(block), options, _PARSE)
    except (UnicodeDecodeError, pa.ArrowException):
        return None, len(lines)
    return (entry_columns(table) if len(table) == len(lines) else None), len(lines)
