"""The parts of one service: lookups, messages, tokens, audit log, and present problems.

Threads: any.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tiered_index.base.call import deadline_at
from tiered_index.base.encoding import json_text
from tiered_index.connectors.read_again import MessageSources
from tiered_index.errors import SetupUnavailable, TieredIndexError
from tiered_index.server.http.problems import Redaction, without_paths
from tiered_index.server.http.tokens import Tokens
from tiered_index.service.index import IndexService
from tiered_index.service.metrics import Gauges
from tiered_index.service.read.answers.budget import LookupLimits
from tiered_index.service.reader import IndexReader

Index = IndexReader | IndexService
"""The library's object that answers lookups: a reader of storages, or the writer of one index."""
SHOWN = 1024
"""Most characters of a client's text in a record of the audit log."""
MOST_SHOWN = 100
"""Most lookups of a batch, and topics, that a record names."""
# Validity and timeout of a check of the storage
_LOOK_KEEPS_S = 2.0
_LOOK_TIMEOUT_S = 2.0


class Audit:
    """An audit log: lookups as JSON lines in a file, with caller, time and outcome. `path` None: no log.

    Each record opens the file. So after a move, as by `logrotate`, the next record begins a new one. A new file has
    mode 600, because it has keys of messages. An existing file loses only the permissions of others.
    """

    def __init__(self, path: Path | None) -> None:
        self.problem: str | None = None
        self.is_on = path is not None
        """Whether records are written."""
        self._path, self._lock = path, threading.Lock()
        try:
            if path is not None:
                self._append(path, "")
        except OSError as error:
            raise SetupUnavailable(f"the audit log {path} can't be written: {error.strerror}") from error

    def refused(
        self, request_id: str, caller: str | None, method_and_path: str, query: str, more: dict[str, Any]
    ) -> None:
        """Write a forbidden request, with its query and `more`, fields of its body."""
        refused = {"refused": method_and_path[:SHOWN], "asked": query[:SHOWN], **more, "status": 403}
        self.write({"request_id": request_id, "caller": caller, **refused})

    def write(self, record: dict[str, Any]) -> None:
        """Write a record with its time. If that fails, `problem` has the reason, and the service is not ready."""
        if self._path is None:
            return
        try:
            self._append(self._path, json_text({"time_ms": time.time_ns() // 1_000_000, **record}) + "\n")
            self.problem = None
        except OSError as error:
            self.problem = f"the audit log can't be written: {error.strerror}"

    def _append(self, path: Path, line: str) -> None:
        # records are in the order of their times
        with self._lock, open(path, "ab", opener=partial(os.open, mode=0o600)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & stat.S_IRWXO:
                os.fchmod(file.fileno(), stat.S_IMODE(mode) & ~stat.S_IRWXO)
            file.write(line.encode())


def shown_topics(topics: Iterable[str]) -> list[str]:
    """Return topics for a record of the audit log."""
    return sorted({topic[:SHOWN] for topic in topics})[:MOST_SHOWN]


@dataclass(frozen=True, kw_only=True)
class Caps:
    """The greatest bounds of one request, and the defaults. `limits` has a `timeout_s`."""

    limits: LookupLimits = field(default_factory=partial(LookupLimits, 10_000, 1 << 30, 30.0))
    max_cost_usd: float = 0.05
    # Of the messages of a page
    message_bytes: int = 8 << 20
    body_bytes: int = 16 << 20


@dataclass
class Served:
    """The index or indexes of a service, and their state.

    `problems` and `gauges` are those of a follower in the process. `behind` returns why answers are too old, or None.
    `sources` has the messages of each topic.
    """

    lookups: Index
    sources: MessageSources
    caps: Caps
    redaction: Redaction
    audit: Audit
    tokens: Tokens | None = None
    problems: Callable[[], list[str]] = list
    gauges: Callable[[], Gauges] = dict
    behind: Callable[[], str | None] = lambda: None
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._looked_s = -_LOOK_KEEPS_S
        self._unreachable: str | None = "not checked yet"

    @property
    def writer(self) -> IndexService | None:
        """The index that this process writes; None: it only reads."""
        return self.lookups if isinstance(self.lookups, IndexService) else None

    @property
    def index_id(self) -> str:
        """The id of the index. Raises `InvalidArgument` if there are several."""
        return self.lookups.genesis.index_id if isinstance(self.lookups, IndexReader) else self.lookups.index_id

    def not_ready(self) -> dict[str, list[str]]:
        """Return the reasons to send this replica no requests, by part; empty: it is ready.

        Sends no request to the storage. A problem that all replicas share is not a reason: without any replica, clients
        would get refused connections in place of errors.
        """
        if self.stopping.is_set():
            return {"stopping": ["stopping"]}
        is_fenced = self.writer is not None and self.writer.health()["fenced"]
        reasons = {
            "audit": f"audit: {self.audit.problem}" if self.audit.problem else None,
            "writer": "writer: another writer has taken the index over" if is_fenced else None,
            "source": self.behind(),
        }
        return {part: self._public([reason]) for part, reason in reasons.items() if reason}

    def problems_by_part(self) -> dict[str, list[str]]:
        """Return a list of present problems for each part of the service. May send requests to the storage."""
        lookups, problem = self.lookups, self.tokens.problem() if self.tokens is not None else None
        if isinstance(lookups, IndexService):
            storage, writer = None, lookups.health()["problems"]
        else:
            storage, writer = self._look(lookups), []
        by_part: dict[str, Sequence[str | None]] = {
            "audit": [f"audit: {self.audit.problem}" if self.audit.problem else None],
            "storage": [f"storage: {storage}" if storage else None],
            "tokens": [f"tokens: {problem}" if problem else None],
            "writer": writer,
            "source": [*self.problems(), self.behind()],
        }
        return {part: self._public(filter(None, problems)) for part, problems in by_part.items()}

    def metrics(self) -> Gauges:
        """Return gauges of the service: meaning and value, by name. May send requests to the storage."""
        counts = {part: len(problems) for part, problems in self.problems_by_part().items()}
        return {
            "ready": ("1 while /readyz says ready.", not self.not_ready()),
            "service_problems": ("Problems of the service now, by part; /v1/health names them.", ("part", counts)),
            **self.gauges(),
        }

    def _public(self, texts: Iterable[str]) -> list[str]:
        # probes may need no token: remove every path, also unknown ones
        return [without_paths(self.redaction.text(text)) for text in texts]

    def _look(self, reader: IndexReader) -> str | None:
        """Return why the storage can't be read, or None. A check is valid for 2 s; other threads get the last one."""
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._looked_s >= _LOOK_KEEPS_S:
                    self._unreachable = _refreshed(reader)
                    self._looked_s = time.monotonic()
            finally:
                self._lock.release()
        return self._unreachable


def _refreshed(reader: IndexReader) -> str | None:
    try:
        with deadline_at(time.monotonic() + _LOOK_TIMEOUT_S):
            reader.refresh()
    except TieredIndexError as error:
        return str(error)
    # such as a folder below a prefix that this user may not read
    problem = reader._unopened_problem()
    return None if problem is None else str(problem)


def redaction_of(lookups: Index, store: Path | None, storages: Iterable[str] = ()) -> Redaction:
    """Return the redaction of the paths of an index, a store, and further `storages`."""
    own = [lookups.storage.uri] if isinstance(lookups, IndexService) else lookups.sources
    return Redaction.of(lookups.config, [*storages, *own], store=store)
