"""Spark's reports of failed jobs, as errors of this package."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from tiered_index import errors
from tiered_index.errors import CorruptFile, DiskFull, StorageUnavailable, TieredIndexError

_OURS = re.compile(r"tiered_index\.[a-z_.]*\b(?P<kind>[A-Z][A-Za-z]+): (?P<text>[^\n]*)")
# Error classes of other modules, and the class raised here for each.
_KINDS = {"MissingOffsets": CorruptFile}
# As Java and Python say ENOSPC: of a shuffle, a spill or a temporary file.
_NO_ROOM = "No space left on device"
_LOST = ("ExecutorLostFailure", "Python worker exited unexpectedly", "SparkContext was shut down", "FetchFailed")


@contextlib.contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Raise as an error of this package what Spark reports of a failed job; others pass.

    A task's error of ours keeps class and text; lost executors are `StorageUnavailable`, a full temporary disk is
    `DiskFull`.
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
        if _NO_ROOM in text:
            raise DiskFull(
                f"{what}: a temporary disk of an executor is full: give Spark's local folder (spark.local.dir) and "
                "TMPDIR more room, and run it again"
            ) from error
        if any(sign in text for sign in _LOST):
            raise StorageUnavailable(f"{what}: Spark lost too many executors or workers; run it again") from error
        raise


def _again(kind: type[TieredIndexError], text: str, what: str) -> TieredIndexError:
    """Return an error of a class whose constructor may want more than a text."""
    if issubclass(kind, CorruptFile):
        file, _, problem = text.partition(": ")
        return kind(file, f"{problem} ({what})")
    try:
        return kind(f"{what}: {text}")
    except TypeError:
        return TieredIndexError(text)
