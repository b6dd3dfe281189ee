"""The files that `ingest` takes, NDJSON and Parquet, and the name under which the index keeps a source's position.

The name, `file:PATH#LENGTH-HASH`, holds the absolute path and a fingerprint of the content: it tells the same file,
also one that has grown at its end, from another one at the same path. Positions count in the source's `unit`.

NDJSON files, plain or gzipped, hold one JSON object a line; blank lines and further fields are skipped, a position is a
byte offset in the uncompressed text. A block of lines is parsed at once by Arrow; where that fails or disagrees with
the number of lines, its lines are parsed one by one by `json`, which decides. Memory: a few blocks.

Parquet files hold one row a message, with key (text) or keys (list of text); further columns are skipped, a position is
a row number. A row without key makes no entry. Such a file does not grow: its footer identifies it. Memory: one batch.

One thread uses a source.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.schema import ROCKETMQ_SCHEMA
from tiered_index.service.answers.rows import check_topic
from tiered_index.service.answers.validation import check_keys, check_number, message_row, milliseconds
from tiered_index.storage.disk import absolute_path

# What every message has beside its keys; `topic_id` is optional.
FIELDS = ("topic", "queue_id", "offset", "size", "timestamp_ms")


@dataclass(frozen=True, slots=True)
class Message:
    """One message, checked. `topic_id` is None where the source leaves it to the index."""

    topic: str
    queue_id: int
    offset: int
    size: int
    timestamp_ms: int
    keys: tuple[str, ...]
    topic_id: int | None


# What of a problem is the message's own: values, and what a parser says of a line.
_OWN = re.compile(r": .*|, not .*| -?[0-9]+(?= is outside)", re.DOTALL)
_TOO_LONG = re.compile(r"(topic|key) .* UTF-16 code units; the limit is", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Record:
    """One message, or what is wrong with it, and its place: `where` for people, [start, end) as positions."""

    where: str
    start: int
    end: int
    message: Message | None
    problem: str = ""

    @property
    def reason(self) -> str:
        """What is wrong without the values of this message, so that it can be counted."""
        return _OWN.sub("", _TOO_LONG.sub(r"\1 is longer than", self.problem))


@dataclass(frozen=True)
class Batch:
    """Messages up to position `end`; `columns` is None where only `records`, slow and exact, can say what is wrong."""

    columns: pa.RecordBatch | None
    messages: int
    end: int
    records: Callable[[], Iterator[Record]]


def checked_message(fields: Mapping[str, Any]) -> Message:
    """Return a message of plain values. Raises `InvalidArgument` naming the field."""
    if missing := [name for name in (*FIELDS, "keys") if name not in fields]:
        raise InvalidArgument(f"{missing[0]!r} is missing")
    keys = fields["keys"]
    if not isinstance(keys, list):
        raise InvalidArgument(f"keys must be a list of text, not {keys!r:.80}")
    topic, queue_id, offset, size, time_ms = (fields[name] for name in FIELDS)
    topic, queue_id, offset, size, second, _ = message_row(topic, queue_id, offset, size, time_ms, {}, ROCKETMQ_SCHEMA)
    checked_keys = tuple(check_keys(keys))
    topic_id = check_number("topic_id", fields["topic_id"]) if fields.get("topic_id") is not None else None
    return Message(topic, queue_id, offset, size, second * 1000, checked_keys, topic_id)


def columns_of(messages: list[Message]) -> dict[str, Any]:
    """Return messages as columns of entries; either all or none of them have a topic id."""
    rows = [(m, key) for m in messages for key in m.keys]
    columns: dict[str, Any] = {name: [getattr(m, name) for m, _ in rows] for name in FIELDS}
    columns["key"] = [key for _, key in rows]
    if messages and messages[0].topic_id is not None:
        columns["topic_id"] = [m.topic_id for m, _ in rows]
    return columns


def entry_columns(table: pa.Table) -> pa.RecordBatch | None:
    """Return one row an entry out of one row a message with a list column `keys`.

    None where a value is missing somewhere. A key that stands twice in one message counts once. Memory: the batch
    twice.
    """
    names = [name for name in (*FIELDS, "topic_id") if name in table.column_names]
    if "topic_id" in names and table["topic_id"].null_count == len(table):
        names.remove("topic_id")
    table = table.combine_chunks()
    lists = table["keys"].chunk(0) if table["keys"].num_chunks else pa.array([], pa.list_(pa.string()))
    if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
        return None
    if lists.null_count or any(table[name].null_count for name in names):
        return None
    if not _keyless_are_sound(table, lists, names):
        return None
    keys, parents = pc.list_flatten(lists), pc.list_parent_indices(lists)
    if keys.null_count:
        return None
    if len(keys) > len(table) or len(pc.unique(parents)) < len(keys):
        # a message with several keys: (message, key) pairs as one number each, the first of equal ones stays
        codes = keys.dictionary_encode()
        pairs = parents.to_numpy().astype(np.int64) * max(1, len(codes.dictionary)) + codes.indices.to_numpy()
        first = np.unique(pairs, return_index=True)[1]
        if len(first) < len(keys):
            kept = pa.array(np.sort(first))
            keys, parents = keys.take(kept), parents.take(kept)
    # combined columns have one chunk, or none where there is no row
    columns = {name: table[name].take(parents).combine_chunks() for name in names}
    return pa.RecordBatch.from_pydict({**{n: _array(c) for n, c in columns.items()}, "key": keys})


def _keyless_are_sound(table: pa.Table, lists: pa.Array, names: list[str]) -> bool:
    """Return whether messages without keys are well; they make no entry, so nobody else looks at them."""
    keyless = table.filter(pc.equal(pc.list_value_length(lists), 0))
    try:
        for name in names if len(keyless) else ():
            if name == "topic":
                for topic in pc.unique(keyless[name]).to_pylist():
                    check_topic(topic)
            elif pa.types.is_integer(keyless[name].type):
                for number in pc.min_max(keyless[name]).as_py().values():
                    check_number(name, number)
            else:
                return False
    except InvalidArgument:
        return False
    return True


def _array(column: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks else pa.array([], column.type)
    return column


BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 16 << 20
FINGERPRINT_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("queue_id", pa.int64()),
        ("keys", pa.list_(pa.string())),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("topic_id", pa.int64()),
    ]
)
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


MAGIC = b"PAR1"
BATCH_ROWS = 100_000
_FOOTER_BYTES = 1 << 20


class ParquetSource:
    """One file. Raises `InvalidArgument` for missing columns or bad rows, `CorruptFile` for damage."""

    unit = "rows"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with pq.ParquetFile(path) as file:
                names = file.schema_arrow.names
                self._groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        except pa.ArrowException as error:
            raise CorruptFile(str(path), f"not a Parquet file that can be read: {error}") from error
        if missing := [name for name in FIELDS if name not in names]:
            raise InvalidArgument(f"{path}: column {missing[0]!r} is missing; it has {', '.join(names)}")
        if ("key" in names) == ("keys" in names):
            raise InvalidArgument(
                f"{path}: give a column 'key' (text) or a column 'keys' (list of text); it has {', '.join(names)}"
            )
        self._names = [name for name in (*FIELDS, "key", "keys", "topic_id") if name in names]
        self.total: int | None = sum(self._groups)

    def fingerprint(self, length: int | None) -> tuple[int, str]:
        """Return the file's size and a hash of its last bytes, where the footer describes every row group."""
        size = self.path.stat().st_size
        with self.path.open("rb") as handle:
            handle.seek(max(0, size - _FOOTER_BYTES))
            return size, hashlib.sha256(handle.read()).hexdigest()[:16]

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield the rows from number `start` on."""
        if self.total is not None and start > self.total:
            raise InvalidArgument(
                f"{self.path} is not what it was when it was taken up to row {start}: it has {self.total} rows"
            )
        first, before = 0, 0
        while first < len(self._groups) and before + self._groups[first] <= start:
            before += self._groups[first]
            first += 1
        position = before
        try:
            with pq.ParquetFile(self.path, coerce_int96_timestamp_unit="ms") as file:
                groups = list(range(first, len(self._groups)))
                for rows in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=self._names):
                    skip = min(len(rows), max(0, start - position))
                    position += len(rows)
                    if skip < len(rows):
                        yield self._batch(rows.slice(skip), position)
        except (pa.ArrowException, OSError) as error:
            raise CorruptFile(str(self.path), f"rows from {position} on can't be read: {error}") from error

    def _batch(self, rows: pa.RecordBatch, end: int) -> Batch:
        if pa.types.is_timestamp(rows["timestamp_ms"].type):
            times = milliseconds(rows["timestamp_ms"])
            rows = rows.set_column(rows.schema.get_field_index("timestamp_ms"), "timestamp_ms", times)
        keyed = rows["key" if "key" in self._names else "keys"]
        with_key = rows.filter(pc.is_valid(keyed)) if keyed.null_count else rows
        columns = with_key if "key" in self._names else entry_columns(pa.Table.from_batches([with_key]))
        return Batch(columns, len(rows), end, partial(_records, rows, end - len(rows)))


def _records(rows: pa.RecordBatch, first: int) -> Iterator[Record]:
    for number, row in enumerate(rows.to_pylist(), first):
        fields: dict[str, Any] = row
        if "key" in fields:
            key = fields.pop("key")
            fields["keys"] = [] if key is None else [key]
        elif fields["keys"] is None:
            fields["keys"] = []
        try:
            yield Record(f"row {number + 1}", number, number + 1, checked_message(fields))
        except InvalidArgument as error:
            yield Record(f"row {number + 1}", number, number + 1, None, str(error))


_NAME = re.compile(r"file:(?P<path>.*)#(?P<length>[0-9]+)-(?P<hash>[0-9a-f]{16})", re.DOTALL)
_NDJSON_SUFFIXES = (".ndjson", ".jsonl", ".json", ".ndjson.gz", ".jsonl.gz", ".json.gz")


Source = NdjsonSource | ParquetSource


def open_source(path: Path) -> Source:
    """Return the source at `path`, told by its first bytes. Raises `InvalidArgument`, `CorruptFile`."""
    path = absolute_path(path)
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; give one NDJSON or Parquet file")
    try:
        with path.open("rb") as handle:
            head = handle.read(64)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from error
    if head.startswith(MAGIC):
        return ParquetSource(path)
    if path.name.endswith(".parquet"):
        raise CorruptFile(str(path), "not a Parquet file", offset=0, expected=MAGIC, found=head[:4])
    if not path.name.endswith(_NDJSON_SUFFIXES) and not _plain(path, head).lstrip().startswith(b"{"):
        raise InvalidArgument(f"{path} is neither NDJSON nor Parquet")
    return NdjsonSource(path)


def source_name(source: Source, known: Iterable[str], *, restart: bool) -> str:
    """Return the name of `source` in an index with the `known` ones. Raises `InvalidArgument` where it changed."""
    candidates = []
    for name in known:
        match = _NAME.fullmatch(name)
        if match is None or match["path"] != str(source.path):
            continue
        length, found = source.fingerprint(int(match["length"]))
        if (length, found) == (int(match["length"]), match["hash"]):
            return name
        candidates.append(name)
    if candidates and not restart:
        raise InvalidArgument(
            f"{source.path} is not the file that was taken before: its beginning differs. Give it another name, "
            "or take it from its start with --restart"
        )
    length, found = source.fingerprint(None)
    return f"file:{source.path}#{length}-{found}"


def _plain(path: Path, head: bytes) -> bytes:
    if not head.startswith(b"\x1f\x8b"):
        return head
    try:
        with gzip.open(path, "rb") as handle:
            return handle.read(64)
    except (EOFError, OSError, zlib.error) as error:
        raise CorruptFile(str(path), f"damaged gzip file: {error}") from error
