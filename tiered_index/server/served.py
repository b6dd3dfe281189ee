"""The parts of one service: lookups, messages, tokens, audit log, and present problems.

Threads: any.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tiered_index.encoding import json_text
from tiered_index.errors import SetupUnavailable, TieredIndexError
from tiered_index.metrics import Gauges
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.server.calls import Caps
from tiered_index.server.problems import Redaction, without_paths
from tiered_index.server.tokens import Tokens
from tiered_index.service.index import IndexService
from tiered_index.service.reader import IndexReader
from tiered_index.storage.context import deadline_at

Index = IndexReader | IndexService
"""What answers lookups: readers of storages, or the writer of one index."""
SHOWN = 1024
"""Characters of a text that a client chose in a record of the audit log."""
MOST_SHOWN = 100
"""Lookups of a batch, and topics, that a record names."""
# how long a look at the storage counts, and may take
_LOOK_KEEPS_S = 2.0
_LOOK_TIMEOUT_S = 2.0


class Audit:
    """Lookups as JSON lines in a file: caller, lookup, time and outcome. None: no file.

    A file that was moved away or deleted (`logrotate` does so) is begun again with the next record. It is made with
    mode 600, since it has keys of messages. One that is there keeps its mode except for the rights of everybody else.
    """

    def __init__(self, path: Path | None) -> None:
        self.problem: str | None = None
        self._lock = threading.Lock()
        self._path = path
        try:
            self._file = _opened(path) if path is not None else None
        except OSError as error:
            raise SetupUnavailable(f"the audit log {path} can't be written: {error.strerror}") from error

    def refused(self, request_id: str, caller: str | None, what: str, asked: str, more: dict[str, Any]) -> None:
        """Write that a request was not allowed: `what` is its method and path, `asked` its query, `more` is of its
        body.
        """
        said = {"refused": what[:SHOWN], "asked": asked[:SHOWN], **more, "status": 403}
        self.write({"request_id": request_id, "caller": caller, **said})

    def write(self, record: dict[str, Any]) -> None:
        """Write a record with its time. If it can't be written, `problem` says why, and the service is not ready."""
        if self._file is None:
            return
        line = json_text({"time_ms": time.time_ns() // 1_000_000, **record}) + "\n"
        with self._lock:
            try:
                self._follow()
                self._file.write(line)
                self.problem = None
            except OSError as error:
                self.problem = f"the audit log can't be written: {error.strerror}"

    def _follow(self) -> None:
        """Open the file again where its path names another one by now, or none."""
        assert self._path is not None and self._file is not None
        try:
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        except FileNotFoundError:
            pass
        before, self._file = self._file, _opened(self._path)
        # closing fails where a full disk did not take its last records; that was told then
        with contextlib.suppress(OSError):
            before.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _opened(path: Path) -> TextIO:
    """Return the file for appending; who is neither its owner nor of its group may not use it. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) and mode & stat.S_IRWXO:
            os.fchmod(descriptor, stat.S_IMODE(mode) & ~stat.S_IRWXO)
        return os.fdopen(descriptor, "a", encoding="utf-8", buffering=1)
    except BaseException:
        os.close(descriptor)
        raise


def shown_topics(topics: Iterable[str]) -> list[str]:
    """Return topics as a record of the audit log names them."""
    return sorted({topic[:SHOWN] for topic in topics})[:MOST_SHOWN]


@dataclass
class Served:
    """An index, or several, as a service shows them. Of what runs beside: its `problems`, its `gauges` (meaning and
    value, by name), and with `behind` why its answers are too old.
    """

    lookups: Index
    messages: RocketmqMessages
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
        self._unreachable: str | None = "it was not looked at yet"

    @property
    def writer(self) -> IndexService | None:
        """The index where this process writes it."""
        return self.lookups if isinstance(self.lookups, IndexService) else None

    @property
    def index_id(self) -> str:
        """The identity of the one index. Raises `InvalidArgument` where several are read."""
        return self.lookups.genesis.index_id if isinstance(self.lookups, IndexReader) else self.lookups.index_id

    def not_ready(self) -> list[str]:
        """Return the reasons to leave this replica out: others of its kind could do better. Nothing: it is ready.

        A problem that all replicas share is none: without any of them, clients would meet refused connections in place
        of errors that say what is wrong. Does not ask the storage.
        """
        if self.stopping.is_set():
            return ["stopping"]
        reasons = [f"audit: {self.audit.problem}"] if self.audit.problem else []
        if self.writer is not None and self.writer.health()["fenced"]:
            reasons.append("writer: another writer has taken the index over")
        return self._public([*reasons, *filter(None, [self.behind()])])

    def problems_by_part(self) -> dict[str, list[str]]:
        """Return all that is amiss now, by the part of the service: each part has a list. May ask the storage."""
        lookups, problem = self.lookups, self.tokens.problem() if self.tokens is not None else None
        if isinstance(lookups, IndexService):
            storage, writer = None, lookups.health()["problems"]
        else:
            storage, writer = self._look(lookups), []
        found = {
            "audit": [f"audit: {self.audit.problem}" if self.audit.problem else None],
            "storage": [f"storage: {storage}" if storage else None],
            "tokens": [f"tokens: {problem}" if problem else None],
            "writer": writer,
            "source": [*self.problems(), self.behind()],
        }
        return {part: self._public(filter(None, problems)) for part, problems in found.items()}

    def metrics(self) -> Gauges:
        """Return the numbers that metrics have beside the index's: meaning and value, by name. May ask the storage."""
        counts = {part: len(found) for part, found in self.problems_by_part().items()}
        return {
            "ready": ("1 while /readyz says ready.", not self.not_ready()),
            "service_problems": ("Problems of the service now, by part; /v1/health names them.", ("part", counts)),
            **self.gauges(),
        }

    def _public(self, texts: Iterable[str]) -> list[str]:
        # probes need no token: they get no path at all, also none that nobody foresaw
        return [without_paths(self.redaction.text(text)) for text in texts]

    def _look(self, reader: IndexReader) -> str | None:
        """Return why the storage can't be read. A look counts for a moment; who asks meanwhile has the one before."""
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
    return None


def redaction_of(lookups: Index, store: Path | None, storages: Iterable[str] = ()) -> Redaction:
    """Return what hides the places of an index, of a store, and of further `storages`."""
    own = [lookups.storage.uri] if isinstance(lookups, IndexService) else lookups.sources
    return Redaction.of(lookups.config, [*storages, *own], store=store)


def messages_of(lookups: Index, store: Path | None) -> RocketmqMessages:
    """Return where the messages of an index's entries come from: a store's folder, and archived segments."""
    archive = lookups.segment_archives if isinstance(lookups, IndexReader) else lookups.segment_archive
    config = lookups.config
    return RocketmqMessages(store, archive, threads=config.query_threads, root=config.root)
