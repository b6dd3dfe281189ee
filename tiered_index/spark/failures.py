"""Spark's reports of failed jobs, as errors of this package."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from urllib.parse import unquote

from tiered_index import errors
from tiered_index.errors import CorruptFile, DiskFull, InvalidArgument, StorageUnavailable, TieredIndexError

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
# a URL, whose escapes are Spark's, except for footers of Parquet; and one in any other text
_FAILED = re.compile(r"while reading file (?P<file>file:/[^\n]*?)\.\s+(?P<next>SQLSTATE|Could not read footer)")
_FILE = re.compile(r"file:/+[^\s,;'\"]+")
# Error classes of other modules, and the class raised here for each.
_KINDS = {"MissingOffsets": CorruptFile}
# As Java and Python say ENOSPC: of a shuffle, a spill or a temporary file.
_NO_ROOM = "No space left on device"
_LOST = ("ExecutorLostFailure", "Python worker exited unexpectedly", "SparkContext was shut down", "FetchFailed")


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
            raise InvalidArgument(f"{what}: {file} has a line that is not NDJSON") from error
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
