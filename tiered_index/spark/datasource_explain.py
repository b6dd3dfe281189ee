"""What reads of the data source ask of the storage, told outside Spark: PySpark lets a Python source report no metrics of its own.

With the option `explain` each call of Spark's that asks the storage puts one JSON line under that URI, an object of its own: ``schema`` and
``plan`` are the driver's, ``task`` is one attempt of a task. Spark may plan a read, or run a task, more than once: each counts, for each
was paid for. What writing the lines costs is in none of them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pyspark import TaskContext

from tiered_index.errors import InvalidArgument, TieredIndexError
from tiered_index.spark.executors import StorageAddress
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage

__all__ = ["ExplainedAddress", "Line"]


@dataclass(slots=True)
class Line:
    """What a call knows of itself, besides what was asked."""

    log_number: int | None = None
    files: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class ExplainedAddress:
    """An index's storage, and where to tell what is asked of it; None: nowhere. Raises `InvalidArgument` for a place within the index."""

    address: StorageAddress
    explain: StorageAddress | None = None

    def __post_init__(self) -> None:
        if self.explain is not None and f"{_place(self.explain)}/".startswith(f"{_place(self.address)}/"):
            raise InvalidArgument(f"option explain names a place within the index ({self.explain.uri}); give another one")

    @property
    def uri(self) -> str:
        """The index's."""
        return self.address.uri

    @contextlib.contextmanager
    def open(self, kind: str) -> Iterator[tuple[Storage, Line]]:
        """Open the storage for one call of Spark's; at its end put the line. Raises `ConfigError`; what the put of the line raises."""
        line = Line()
        with self.address.open() as opened:
            if self.explain is None:
                yield opened, line
                return
            metered, begin, ended = MeteredStorage(opened), time.perf_counter(), "failed"
            try:
                yield metered, line
                ended = "whole"
            except GeneratorExit:  # Spark wants no more rows
                ended = "stopped"
                raise
            finally:
                # an error on its way says more than one of the put
                with contextlib.suppress(*(() if ended == "whole" else (TieredIndexError,))):
                    self._put(kind, ended, metered, line, time.perf_counter() - begin)

    def _put(self, kind: str, ended: str, metered: MeteredStorage, line: Line, elapsed_s: float) -> None:
        assert self.explain is not None
        task, usage = TaskContext.get(), metered.total
        document = {
            "kind": kind, "index": self.uri, "log_number": line.log_number,
            "stage": task.stageId() if task else None, "partition": task.partitionId() if task else None,
            "attempt": task.attemptNumber() if task else None, "ended": ended, "rows": line.rows, "files": line.files,
            "requests": usage.requests, "requests_by_kind": usage.requests_by_kind, "bytes": usage.bytes_read,
            "cost_usd": usage.cost_usd, "elapsed_ms": round(elapsed_s * 1000, 3),
        }  # fmt: skip
        with self.explain.open() as storage:
            storage.put(f"{kind}-{secrets.token_hex(16)}.json", json.dumps(document, ensure_ascii=False).encode() + b"\n")


def _place(address: StorageAddress) -> str:
    return address.uri.partition("?")[0].rstrip("/")
