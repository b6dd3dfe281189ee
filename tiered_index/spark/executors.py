"""What passes between driver and executors: storage addresses, packed records, errors; and what a worker keeps.

A storage is never pickled: tasks open it from its URI, with the credentials that the executor finds. Threads: any.

Spark runs task after task in one worker, in new threads, and glibc gives each an arena that keeps what it freed: six
merges of 8 million entries in one process peaked at 629 MiB at first and 831 MiB at last, without further arenas at 566
to 589 MiB. So a worker (Linux with glibc) makes no further arenas, and returns free memory between tasks.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index import errors
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, StorageUnavailable, TieredIndexError
from tiered_index.spark.local_files import told_by_spark
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage, Usage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3.options import S3Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_S3A = re.compile(r"s3a://", re.IGNORECASE)
_OURS = re.compile(r"tiered_index\.[a-z_.]*\b(?P<kind>[A-Z][A-Za-z]+): (?P<text>[^\n]*)")
_NO_LINES = ("MALFORMED_RECORD_IN_PARSING", "INVALID_JSON_RECORD_TYPE", "JsonParseException")
_TWICE = re.compile(r"COLUMN_ALREADY_EXISTS\] The column `(?P<name>[^`]+)`")
_NO_PARQUET = ("is not a Parquet file", "CANNOT_READ_FILE_FOOTER")
_UNREAD = "FAILED_READ_FILE"
# a URL, whose escapes are Spark's, but for footers of Parquet; and one in any other text
_FAILED = re.compile(r"while reading file (?P<file>file:/[^\n]*?)\.\s+(?P<next>SQLSTATE|Could not read footer)")
_FILE = re.compile(r"file:/+[^\s,;'\"]+")
_T = TypeVar("_T")
# Error classes of other modules, and the class raised here for each.
_KINDS = {"MissingOffsets": CorruptFile}
_LOST = ("ExecutorLostFailure", "Python worker exited unexpectedly", "SparkContext was shut down", "FetchFailed")


@dataclass(frozen=True, slots=True)
class StorageAddress:
    """Names a storage for any process; `s3a://` is `s3://`. Raises `ConfigError` where others can't reach it.

    `request_stats` is the Spark accumulator that gets the counts of each storage opened by it, when that is closed.
    """

    uri: str
    options: S3Options = field(default_factory=S3Options)
    request_stats: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", _S3A.sub("s3://", self.uri, count=1))
        if self.uri.startswith("memory:"):
            raise ConfigError("memory:// is one process's memory, and Spark's tasks run in others")

    def open(self) -> Storage:
        """Return the storage; the caller closes it. Raises `ConfigError`."""
        storage = open_storage(self.uri, options=self.options)
        return storage if self.request_stats is None else _CountedStorage(storage, self.request_stats)


# What makes the address of a storage's URI.
AddressOf: TypeAlias = Callable[[str], StorageAddress]
READ, WRITTEN = "bytes read", "bytes written"


def counts_of(usage: Usage) -> Counter[str]:
    """Return requests by operation, and bytes as `READ` and `WRITTEN`."""
    return Counter({**usage.requests_by_kind, READ: usage.bytes_read, WRITTEN: usage.bytes_written})


class _CountedStorage(MeteredStorage):
    def __init__(self, inner: Storage, request_stats: Any) -> None:
        super().__init__(inner)
        self._request_stats: Any = request_stats

    def close(self) -> None:
        try:
            super().close()
        finally:
            request_stats, self._request_stats = self._request_stats, None
            if request_stats is not None:
                request_stats.add(counts_of(self.total))


@contextlib.contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Raise as an error of this package what Spark reports of a failed job; others pass.

    A task's error of ours keeps class and text; lost executors are `StorageUnavailable`; a bad local file is named.
    """
    try:
        yield
    except TieredIndexError:
        raise
    except Exception as error:
        text = str(error)
        # a chain of causes ends with what was raised to the caller
        for found in reversed(list(_OURS.finditer(text))):
            kind = _KINDS.get(found["kind"]) or getattr(errors, found["kind"], None)
            if isinstance(kind, type) and issubclass(kind, TieredIndexError):
                raise _again(kind, found["text"], what) from error
        file = _file_in(text)
        if wrong := told_by_spark(text):
            raise InvalidArgument(f"{what}: {file}: {wrong}") from error
        if twice := _TWICE.search(text):
            raise InvalidArgument(f"{what}: two columns {twice['name']!r}") from error
        if any(sign in text for sign in _NO_LINES):
            raise InvalidArgument(f"{what}: {file} has a line that is no NDJSON") from error
        if any(sign in text for sign in _NO_PARQUET):
            raise CorruptFile(file, f"can't be read as Parquet ({what})") from error
        if _UNREAD in text:
            raise CorruptFile(file, f"can't be read ({what})") from error
        if any(sign in text for sign in _LOST):
            raise StorageUnavailable(f"{what}: Spark lost too many executors or workers; run it again") from error
        raise


def _file_in(text: str) -> str:
    """Return the local file that Spark's error is of, its name as it is."""
    if failed := _FAILED.search(text):
        return unquote(failed["file"]) if failed["next"] == "SQLSTATE" else failed["file"]
    named = _FILE.search(text)
    return "a file" if named is None else named[0].rstrip(".")


def _again(kind: type[TieredIndexError], text: str, what: str) -> TieredIndexError:
    """Return an error of a class whose constructor may want more than a text."""
    if issubclass(kind, CorruptFile):
        file, _, problem = text.partition(": ")
        return kind(file, f"{problem} ({what})")
    try:
        return kind(f"{what}: {text}")
    except TypeError:
        return TieredIndexError(text)


# `M_ARENA_MAX` of malloc.h.
_M_ARENA_MAX = -8


def give_back() -> None:
    """Return to the system what is free."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def between_tasks() -> Iterator[None]:
    """Return to the system what earlier tasks left, and at the end what this one freed."""
    limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit is not None:
        limit(_M_ARENA_MAX, 1)
    give_back()
    try:
        yield
    finally:
        give_back()


@contextlib.contextmanager
def broadcast(spark: SparkSession, value: Any) -> Iterator[Any]:
    """Send a value to each executor once; yield its handle, which is void when the block ends."""
    shared = spark.sparkContext.broadcast(value)
    try:
        yield shared
    finally:
        shared.destroy()


_ARROW_TYPES = {
    "int": pa.int32(),
    "long": pa.int64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", "UTC"),
    "array<string>": pa.list_(pa.string()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}


def gathered(items: Iterable[_T], size: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yield the items in lists whose sizes add up to at least `most`, the last one to less."""
    held: list[_T] = []
    total = 0
    for item in items:
        held.append(item)
        total += size(item)
        if total >= most:
            yield held
            held, total = [], 0
    if held:
        yield held


def arrow_schema(columns: str) -> pa.Schema:
    """Return the Arrow schema of columns as Spark's text has them: ``side int, identity binary``."""
    return pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in (one.split() for one in columns.split(", "))])


def cells_of(records: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> pa.Array:
    """Return runs of records, each from one of `starts` (i64, n) up to the next, as a binary column below 2 GiB."""
    data = np.ascontiguousarray(records)
    offsets = (np.append(starts, len(data)) * data.dtype.itemsize).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data.view(np.uint8))]
    return pa.BinaryArray.from_buffers(pa.binary(), len(starts), buffers)
