"""What passes between driver and executors: storage addresses, packed records, errors; what a worker keeps; and local
files as Spark reads them: their names, the splits that tasks read, and checks of NDJSON.

A storage is never pickled: tasks open it from its URI, with the credentials that the executor finds. Threads: any.

Spark runs task after task in one worker, in new threads, and glibc gives each an arena that keeps what it freed: six
merges of 8 million entries in one process peaked at 629 MiB at first and 831 MiB at last, without further arenas at 566
to 589 MiB. So a worker (Linux with glibc) makes no further arenas, and returns free memory between tasks.

Spark takes a path for a pattern, and decodes nothing, so `%20` is three characters of a name. Its reader would change
some NDJSON without an error: of two values in a line it takes the first; half of a surrogate pair becomes a question
mark. Spark's errors say column and value; pyarrow's do not always, so the lines are parsed again then.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import gzip
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index import errors
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    DiskFull,
    InvalidArgument,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.heap import give_back
from tiered_index.storage.base import Storage, StorageOptions
from tiered_index.storage.disk import absolute_path
from tiered_index.storage.metering import MeteredStorage, Usage
from tiered_index.storage.opening import open_storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# repartitionById and filters of Python data sources came with it
OLDEST = (4, 2)


def check_classic(spark: object) -> None:
    """Raise `ConfigError` for a session of Spark Connect, which has no context by which the driver could run tasks, and
    for a Spark that is too old.
    """
    if any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(spark).__mro__):
        raise ConfigError(
            "this is a session of Spark Connect, and a classic one is needed: run it as a job of the cluster "
            "(spark-submit, or tiered-index spark ...), or use the data source: register(spark), then spark.read and "
            "df.write of format tiered_index"
        )
    check_version("Spark", str(getattr(spark, "version", "")))


def check_version(what: str, found: str) -> None:
    """Raise `ConfigError` where a version is older than jobs need; one without numbers is taken for new enough."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"{what} {found} is too old: jobs and data sources need {oldest} or later, on driver and executors: "
            f"pip install 'pyspark[sql]>={oldest}', and a cluster of that version"
        )


def frame_of_splits(spark: SparkSession, splits: Sequence[Sequence[Any]]) -> DataFrame:
    """Return a DataFrame with one split to a partition."""
    rows = [(json.dumps(split),) for split in splits]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, max(1, len(rows))), "split string")


def each_split(batches: Iterable[pa.RecordBatch]) -> Iterator[list[Any]]:
    """Yield the splits in a task's batches."""
    for batch in batches:
        for split in batch.column(0).to_pylist():
            yield json.loads(split)


_PATTERN = re.compile(r"[][{}*?\\]")


def is_local(path: str) -> bool:
    """Return whether a path, or a URI, is of local disks."""
    return "://" not in path or path.startswith("file://")


def local_path(path: str) -> Path:
    """Return the absolute path that a path, or a `file://` URI with its escapes, names."""
    return absolute_path(unquote(urlsplit(path).path) if path.startswith("file://") else path)


def to_read(file: Path) -> str:
    """Return what Spark reads an absolute path by. Raises `InvalidArgument` for a name that Hadoop can't read."""
    if ":" in file.name:
        raise InvalidArgument(f"{file}: Spark reads no local file with ':' in its name: rename it")
    return "file://" + _PATTERN.sub(r"\\\g<0>", str(file))


def check_each_line(files: Iterable[Path]) -> None:
    """Raise `InvalidArgument`, naming file and line, where a line of local files has no object."""
    for file in files:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if wrong := line_without_object(line):
                    raise InvalidArgument(f"{file}: line {number:,} is {wrong}")


def line_without_object(line: bytes) -> str | None:
    """Return what a line is that is neither empty nor one object (or array, as Spark takes it) of Unicode."""
    if not line.strip():
        return None
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        return "not UTF-8"
    except ValueError as error:
        return "more than one value" if str(error).startswith("Extra data") else "no JSON"
    except RecursionError:
        return "nested too deeply"
    if not isinstance(value, dict | list):
        return f"{_kind(value)}, not an object"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "no Unicode: it has half of a surrogate pair"
    return None


def _kind(value: Any) -> str:
    kinds = {str: "text", float: "a fraction", int: "a number", dict: "an object", list: "a list"}
    return kinds.get(type(value), "null" if value is None else "a truth value")


# Text behind the end of an object, or a surrogate: few lines of messages have it, and each of them is parsed whole.
_SUSPECT = r"[}\]]\s*[^\s,\]}]|\\u[dD][89a-fA-F]"


def check_lines(spark: SparkSession, files: Sequence[Path]) -> None:
    """Raise `InvalidArgument`, naming file and line, where a line of local files isn't one value of Unicode."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    lines = spark.read.text([to_read(file) for file in files])
    suspects = lines.where(F.col("value").rlike(_SUSPECT)).select(F.col("value").cast("binary"))
    if not (found := suspects.mapInArrow(_wrong_ones, "wrong string").limit(1).collect()):
        return
    check_each_line(files)
    raise InvalidArgument(f"{', '.join(map(str, files[:3]))}: a line is {found[0][0]}")


def _wrong_ones(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        wrong = [found for line in batch.column(0).to_pylist() if (found := line_without_object(line))]
        if wrong:
            yield pa.record_batch({"wrong": pa.array(wrong[:1])})
            return


_S3A = re.compile(r"s3a://", re.IGNORECASE)
_OURS = re.compile(r"tiered_index\.[a-z_.]*\b(?P<kind>[A-Z][A-Za-z]+): (?P<text>[^\n]*)")
# a value that the schema of a user's own `spark.read.json` does not take
_TOLD = re.compile(
    r"CANNOT_PARSE_JSON_FIELD\].{1,40}?field name [`']*(?P<name>[^`']+)[`']* and the value (?P<value>.*?) of the JSON ",
    re.DOTALL,
)
_NO_LINES = ("MALFORMED_RECORD_IN_PARSING", "INVALID_JSON_RECORD_TYPE", "JsonParseException")
_TWICE = re.compile(r"COLUMN_ALREADY_EXISTS\] The column `(?P<name>[^`]+)`")
_NO_TYPE = re.compile(r"PARQUET_TYPE_ILLEGAL\] Illegal Parquet type: (?P<type>.+?)\. SQLSTATE")
_NO_PARQUET = ("is not a Parquet file", "CANNOT_READ_FILE_FOOTER")
_UNREAD = "FAILED_READ_FILE"
# a URL, whose escapes are Spark's, but for footers of Parquet; and one in any other text
_FAILED = re.compile(r"while reading file (?P<file>file:/[^\n]*?)\.\s+(?P<next>SQLSTATE|Could not read footer)")
_FILE = re.compile(r"file:/+[^\s,;'\"]+")
_T = TypeVar("_T")
# Error classes of other modules, and the class raised here for each.
_KINDS = {"MissingOffsets": CorruptFile}
# As Java and Python say ENOSPC: of a shuffle, a spill or a temporary file.
_NO_ROOM = "No space left on device"
_LOST = ("ExecutorLostFailure", "Python worker exited unexpectedly", "SparkContext was shut down", "FetchFailed")


@dataclass(frozen=True, slots=True)
class StorageAddress:
    """Names a storage for any process; `s3a://` is `s3://`. Raises `ConfigError` where others can't reach it.

    `request_stats` is the Spark accumulator that gets the counts of each storage opened by it, when that is closed.
    """

    uri: str
    options: StorageOptions | None = None
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

    A task's error of ours keeps class and text; lost executors are `StorageUnavailable`, a full temporary disk is
    `DiskFull`; a bad local file is named.
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
        if told := _TOLD.search(text):
            wrong = f"column {told['name']!r} has {told['value']!r:.40}, and another type is declared"
            raise InvalidArgument(f"{what}: {file}: {wrong}") from error
        if twice := _TWICE.search(text):
            raise InvalidArgument(f"{what}: two columns {twice['name']!r}") from error
        if illegal := _NO_TYPE.search(text):
            what_to_do = "write times in microseconds" if "NANOS" in illegal["type"] else "write another type"
            raise InvalidArgument(
                f"{what}: Spark reads no Parquet column of {illegal['type']}: {what_to_do}"
            ) from error
        if any(sign in text for sign in _NO_LINES):
            raise InvalidArgument(f"{what}: {file} has a line that is no NDJSON") from error
        if any(sign in text for sign in _NO_PARQUET):
            raise CorruptFile(file, f"can't be read as Parquet ({what})") from error
        if _UNREAD in text:
            raise CorruptFile(file, f"can't be read ({what})") from error
        if _NO_ROOM in text:
            raise DiskFull(
                f"{what}: a temporary disk of an executor is full: give Spark's local folder (spark.local.dir) and "
                "TMPDIR more room, and run it again"
            ) from error
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


def spare_collections() -> None:
    """Have a worker's collections of garbage pass over what outlives tasks: its modules. Idempotent.

    PySpark's workers collect behind each task, some 80 ms of CPU with all that is imported here.
    """
    if _set_apart not in gc.callbacks:
        gc.callbacks.append(_set_apart)


def _set_apart(phase: str, about: dict[str, int]) -> None:
    # the task and its functions are gone where the worker's own loop collects; nobody calls when a process ends
    caller = sys._getframe().f_back
    if phase == "stop" and about["generation"] == 2 and caller is not None and caller.f_code.co_name == "manager":
        gc.freeze()


@contextlib.contextmanager
def between_tasks() -> Iterator[None]:
    """Return to the system what earlier tasks left, and at the end what this one freed."""
    spare_collections()
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


_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_rows_lock = threading.Lock()
# of sessions by their identity: blocks under way, and the setting before the first
_rows_held: dict[int, tuple[int, str]] = {}


@contextlib.contextmanager
def large_batches(spark: SparkSession) -> Iterator[None]:
    """Have Spark hand rows to Python in batches of 2^17 in this block, fewer where they pass its bound
    of bytes (64 MiB).
    """
    # jobs of several threads share a session: the first one sets it, the last one sets it back
    with _rows_lock:
        held, before = _rows_held.get(id(spark), (0, ""))
        if not held:
            before = str(spark.conf.get(_ROWS))
            spark.conf.set(_ROWS, str(1 << 17))
        _rows_held[id(spark)] = held + 1, before
    try:
        yield
    finally:
        with _rows_lock:
            held, before = _rows_held.pop(id(spark))
            if held > 1:
                _rows_held[id(spark)] = held - 1, before
            else:
                spark.conf.set(_ROWS, before)


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
