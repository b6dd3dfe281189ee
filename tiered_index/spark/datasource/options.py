"""The checked options of a data source, and the reports of option `explain`.

PySpark accepts no metrics of a Python source. So with `explain` each call by Spark that reads puts an object with one
JSON line under that URI: ``schema`` and ``plan`` by the driver, ``task`` by an attempt of a task.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from tiered_index.clock import SystemClock
from tiered_index.errors import InvalidArgument, TieredIndexError
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.spark.addresses import StorageAddress
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage, Usage

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_BYTES = re.compile(r"([0-9]{1,15})\s*([kmg]?)i?b?")


class Options:
    """The user's options for the source `name`. Raises `InvalidArgument` for unknown options, no or several paths."""

    def __init__(self, name: str, given: Mapping[str, str], known: Sequence[str]) -> None:
        self._name = name
        self._given = {option.lower(): value for option, value in given.items()}
        places = {option.lower(): option for option in known}
        if "paths" in self._given:
            raise InvalidArgument(f"{name}: one path is read at a time; load each and take the union")
        if "owner" in self._given:
            raise InvalidArgument(
                f"{name}: CREATE TABLE ... USING {name} can't be read, since Spark's catalog gives a Python data "
                f"source no path of a table: use CREATE TEMPORARY VIEW entries USING {name} OPTIONS (path 'URI')"
            )
        if unknown := [option for option in self._given if option not in places and option != "path"]:
            there = ", ".join(["path", *known])
            raise InvalidArgument(f"{name}: unknown option {unknown[0]!r}; the options are {there}")
        if not self._given.get("path", "").strip():
            raise InvalidArgument(
                f"{name}: no path is given: use load(URI), save(URI) or the option path; CREATE TABLE ... AS and "
                "saveAsTable pass no path"
            )
        self.path = self._given["path"].strip()

    def text(self, option: str) -> str | None:
        """Return an option's text, None if it is not set."""
        return self._given.get(option.lower())

    def number(self, option: str) -> int | None:
        """Return an option as an integer, None if it is not set."""
        value = self.text(option)
        try:
            return None if value is None else int(value)
        except ValueError as error:
            raise InvalidArgument(f"{self._name}: option {option} is an integer, not {value!r}") from error

    def size(self, option: str) -> int | None:
        """Return an option's number of bytes (at least 1, as a number or like ``64m``), None if it is not set."""
        value = self.text(option)
        if value is None:
            return None
        found = _BYTES.fullmatch(value.strip().lower())
        if found is None or not int(found[1]):
            like = "a number of bytes like 67108864 or 64m"
            raise InvalidArgument(f"{self._name}: option {option} is {like}, not {value!r}")
        return int(found[1]) * _UNITS[found[2]]

    def choice(self, option: str, choices: Sequence[str]) -> str:
        """Return an option's value, one of `choices`, the first one if it is not set."""
        value = (self.text(option) or choices[0]).strip().lower()
        if value not in choices:
            raise InvalidArgument(f"{self._name}: option {option} is {' or '.join(choices)}, not {value!r}")
        return value

    def explain(self) -> StorageAddress | None:
        """Return the storage of option explain, None if it is not set. Raises `ConfigError`."""
        told = (self.text("explain") or "").strip()
        return StorageAddress(told) if told else None


class TaskPartition(InputPartition):
    """The part of a read for one task: a `Stretch` or a `TaskPlan`."""

    value: Any


@dataclass(slots=True)
class Line:
    """The line of one call for `explain`, which the call fills in."""

    log_number: int | None = None
    selection: dict[str, Any] | None = None
    files: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class ExplainedAddress:
    """An index's storage, and the storage for reports. Raises `InvalidArgument` if `explain` is within the index."""

    address: StorageAddress
    explain: StorageAddress | None = None

    def __post_init__(self) -> None:
        if self.explain is not None and f"{_place(self.explain.uri)}/".startswith(f"{_place(self.uri)}/"):
            where = f"a place within the index ({self.explain.uri})"
            raise InvalidArgument(f"option explain names {where}; give another one")

    @property
    def uri(self) -> str:
        """URI of the index."""
        return self.address.uri

    @contextlib.contextmanager
    def open(self, kind: str) -> Iterator[tuple[Storage, Line]]:
        """Open the storage for one call by Spark; put the line at its end. Raises `ConfigError`, the put's errors."""
        with self.address.open() as opened:
            if self.explain is None:
                yield opened, Line()
                return
            metered = MeteredStorage(opened)
            with telling(self.explain, kind, self.uri, metered.total) as line:
                yield metered, line

    def state(self, kind: str, selection: dict[str, Any] | None = None) -> LogState:
        """Return the newest state of the log, for one call by Spark that reads a `selection` of entries.

        Raises `NotAnIndex`, and as `open`.
        """
        with self.open(kind) as (storage, line):
            state = StorageLog(storage, SystemClock()).open()
            line.log_number, line.selection = state.number, selection
        return state


@contextlib.contextmanager
def telling(explain: StorageAddress, kind: str, index: str, request_stats: Usage) -> Iterator[Line]:
    """Put the line of one call by Spark when the block ends; `index` is its URI."""
    line, begin, ended = Line(), time.perf_counter(), "failed"
    try:
        yield line
        ended = "whole"
    except GeneratorExit:  # Spark needs no more rows
        ended = "stopped"
        raise
    finally:
        elapsed_s = time.perf_counter() - begin
        # an error of the block is more important than one of the put
        with contextlib.suppress(*(() if ended == "whole" else (TieredIndexError,))):
            task, requests = TaskContext.get(), request_stats.requests_by_kind
            document = {
                "kind": kind,
                "index": index,
                "stage": task.stageId() if task else None,
                "partition": task.partitionId() if task else None,
                "attempt": task.attemptNumber() if task else None,
                "ended": ended,
                **asdict(line),
                "requests": sum(requests.values()),
                "requests_by_kind": dict(requests),
                "bytes": request_stats.bytes_read,
                "cost_usd": request_stats.cost_usd,
                "elapsed_ms": round(elapsed_s * 1000, 3),
            }
            text = json.dumps(document, ensure_ascii=False).encode() + b"\n"
            with explain.open() as storage:
                storage.put(f"{kind}-{secrets.token_hex(16)}.json", text)


def _place(uri: str) -> str:
    return uri.partition("?")[0].rstrip("/")
