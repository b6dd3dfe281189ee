"""Conversion of Spark's errors of failed jobs to errors of this package."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Iterator
from typing import Any

from tiered_index import errors
from tiered_index.errors import ConfigError, CorruptFile, DiskFull, StorageUnavailable, TieredIndexError
from tiered_index.spark.versions import is_connect

_log = logging.getLogger(__name__)
_OURS = re.compile(r"tiered_index\.[a-z_.]*\b(?P<kind>[A-Z][A-Za-z]+): (?P<text>[^\n]*)")
# Error classes of other modules, with the class to raise for each.
_KINDS = {"MissingOffsets": CorruptFile}
# The text of ENOSPC in Java and Python.
_NO_ROOM = "No space left on device"
# The setting that limits the results of a job's tasks
_RESULTS = "spark.driver.maxResultSize"
_ENDED = "Spark's JVM ended"
_LOST = ("ExecutorLostFailure", "Python worker exited unexpectedly", "SparkContext was shut down", "FetchFailed")
_TRACE = "Traceback (most recent call last)"
_WITH_TRACES = ("AnalysisException", "PythonException", "StreamingQueryException")
# What loggers in the driver's Java print of a task's error of this package before Spark raises it, and lines that come
# with it and name no error: the manager of tasks prints errors of other code once more
_PRINTED_TWICE = (
    r"(?s).*\btiered_index\.errors\..*|Exception in task .*|Task \d+ in stage \S+ failed \d+ times; aborting job.*"
    r"|Block rdd_\S+ could not be removed as .*|Data source write support \S+ (is aborting|aborted).*"
)
_HIDDEN = "tiered_index.traces_hidden"


def show_sentences_first(spark: Any) -> None:
    """Let texts of Spark's errors start with the sentence of an error of this package, in this process. Idempotent.

    Spark raises the errors of data sources, of the table function and of lazy frames itself, and puts its words and the
    worker's trace before their texts. Errors of other code keep their texts. The Java of the driver prints no trace of
    a task's error of this package then, except with other loggers than Spark's Log4j.
    """
    client = "connect" if is_connect(spark) else "captured"
    kinds: Any = importlib.import_module(f"pyspark.errors.exceptions.{client}")
    for name in _WITH_TRACES:
        _show_sentence_first(getattr(kinds, name))
    _hide_traces(spark)


def _show_sentence_first(kind: Any) -> None:
    text_of = kind.__str__
    if text_of.__module__ == __name__:
        return

    def sentence_of(error: Any) -> str:
        text: str = text_of(error)
        # the last error of a chain of causes is the one that the task raised
        *_, last = (None, *_OURS.finditer(text))
        return text if last is None or _TRACE in text[last.end() :] else text[last.start() :]

    kind.__str__ = sentence_of


def _hide_traces(spark: Any) -> None:
    from py4j.protocol import Py4JError

    java: Any = getattr(spark, "_jvm", None)
    if java is None or java.System.setProperty(_HIDDEN, "true") is not None:
        return
    with contextlib.suppress(Py4JError, TypeError):  # TypeError: py4j returns a missing class as a package
        log4j = java.org.apache.logging.log4j
        result = log4j.core.Filter.Result
        hidden = log4j.core.filter.RegexFilter.createFilter(_PRINTED_TWICE, None, False, result.DENY, result.NEUTRAL)
        # a logger with a configuration of its own would escape the threshold of Spark's shells
        log4j.LogManager.getContext(False).getConfiguration().getRootLogger().addFilter(hidden)


@contextlib.contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Raise Spark's error of a failed job as an error of this package, if it is one; `what` names the job.

    A task's error of this package keeps class and text. Lost executors and the end of Java are `StorageUnavailable`, a
    full disk is `DiskFull`, too large results are `ConfigError`. Other errors pass unchanged.
    """
    try:
        yield
    except TieredIndexError:
        raise
    except Exception as error:
        text = _text(error)
        # the last error of a chain of causes is the one that the task raised
        for quoted in reversed(list(_OURS.finditer(text))):
            kind = _KINDS.get(quoted["kind"]) or getattr(errors, quoted["kind"], None)
            if isinstance(kind, type) and issubclass(kind, TieredIndexError):
                # in front of it, a notebook would print the traces of Java and of the worker
                _log.debug("%s failed", what, exc_info=error)
                raise _again(kind, quoted["text"], what) from None
        if _NO_ROOM in text:
            raise DiskFull(
                f"{what}: a disk of an executor is full: give Spark's local folder (spark.local.dir), TMPDIR and a "
                "local --out more room, and run it again"
            ) from error
        if _RESULTS in text:
            raise ConfigError(
                f"{what}: the results of the tasks together are too large for Spark's driver: set {_RESULTS} higher"
            ) from error
        if text == _ENDED or isinstance(error, ConnectionRefusedError):
            raise StorageUnavailable(
                f"{what}: Spark's JVM ended, perhaps because its memory was too small: see its log, and give it more "
                "(spark.driver.memory)"
            ) from error
        if any(sign in text for sign in _LOST):
            raise StorageUnavailable(f"{what}: Spark lost too many executors or workers; run it again") from error
        raise


def _text(error: Exception) -> str:
    """Return the text of an error of Spark, `_ENDED` without a JVM, which has the text."""
    from py4j.protocol import Py4JNetworkError

    try:
        return _ENDED if isinstance(error, Py4JNetworkError) else str(error)
    except (Py4JNetworkError, ConnectionError):
        return _ENDED


def _again(kind: type[TieredIndexError], text: str, what: str) -> TieredIndexError:
    """Return an error of class `kind`, whose constructor may have further parameters."""
    if issubclass(kind, CorruptFile):
        file, _, problem = text.partition(": ")
        return kind(file, f"{problem} ({what})")
    try:
        return kind(f"{what}: {text}")
    except TypeError:
        return TieredIndexError(text)
