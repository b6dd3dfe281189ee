"""Access tokens, stored as hashes, each with a role and the prefixes of the topics that it may see.

The file is JSON: ``[{"name", "sha256", "role", "topics", "max_topics"}]``. `topics` is a list of prefixes, or null for
every topic. `max_topics` is the most topics that the token may write to, or null for the default. A token has 256
random bits, so one round of SHA-256 protects it. The file is read again within a second of a change: a removed token is
refused from then on. While the file can't be read, the last known tokens stay valid. Threads: any.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import asdict

from tiered_index.errors import ConfigError, InvalidArgument, SetupUnavailable
from tiered_index.follow import FOLLOWED
from tiered_index.rocketmq.log.layout import TAGS_SOURCE
from tiered_index.server.grants import Grant, read_grants
from tiered_index.server.problems import Refused

Role = Literal["read", "write", "admin"]
# Each role includes the earlier ones
ROLES: tuple[Role, ...] = ("read", "write", "admin")
_log = logging.getLogger(__name__)
_LOOK_INTERVAL_S = 1.0
MAX_TOPICS = 10_000
"""Default of `max_topics` for a token that is for some topics: each topic that it makes slows the lists of others."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Caller:
    """The sender of a request. `topics` are the prefixes of the topics that it may see; None: every topic.

    `max_topics` is the most topics that it may write to while the service runs; None: no bound.
    """

    name: str
    role: Role
    topics: tuple[str, ...] | None = None
    max_topics: int | None = None

    def need(self, role: Role) -> None:
        """Raise `Refused` unless the caller has `role` or a higher one."""
        if ROLES.index(self.role) < ROLES.index(role):
            raise Refused(403, f"this needs the role {role}, and the token has {self.role}")

    def sees(self, topic: str) -> bool:
        """Return whether the caller may see a topic."""
        return self.topics is None or topic.startswith(self.topics)

    def sees_source(self, source: str) -> bool:
        """Return whether the caller may see a source of entries, whose name may have names of other topics.

        A token may have the name of a kind of followed sources. `TAGS_SOURCE` names no topic.
        """
        return (
            self.topics is None
            or source == TAGS_SOURCE
            or (source.startswith(f"{self.name}:") and not source.startswith(FOLLOWED))
        )

    def need_topic(self, topic: str) -> None:
        """Raise `Refused` if the caller may not see a topic."""
        if not self.sees(topic):
            raise Refused(403, f"the token is not for topic {topic!r:.80}")

    def need_topics(self, topics: Iterable[str]) -> None:
        """As `need_topic` for each of `topics`, in order of name."""
        for topic in sorted(topics):
            self.need_topic(topic)

    def need_source(self, source: str) -> None:
        """Raise `Refused` if the caller may not set the position of a source.

        A wrong position would make the service skip entries that others put of that source.
        """
        for prefix in FOLLOWED:
            if source.startswith(prefix):
                raise Refused(403, f"sources named {prefix}... are those that a service follows")
        if not self.sees_source(source):
            raise Refused(403, f"this token may use only sources whose names begin with {self.name}:")

    def need_topic_ids(self) -> None:
        """Raise `Refused` if the caller may not choose topic ids.

        The error of a conflict names another topic, and a chosen id can't be used for another topic.
        """
        if self.topics is not None:
            raise Refused(403, "the token is for some topics: leave topic_id out, and the index chooses it")

    def need_every_topic(self, what: str) -> None:
        """Raise `Refused` unless the caller may see every topic; `what` begins the message."""
        if self.topics is not None:
            raise Refused(403, f"{what} of all topics, and the token is for some of them")


# The caller of each request to a service without tokens
ANYONE = Caller("anyone", "admin")


class Tokens:
    """The tokens of a file. The constructor raises `SetupUnavailable` if the file can't be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen = _changed(path)
        self._callers = _load(path)
        self._looked_s = time.monotonic()
        self._problem: str | None = None

    def find(self, token: str) -> Caller | None:
        """Return the caller with a token; None: the token is unknown."""
        self._look()
        # compare hashes, not tokens: the time must not show parts of a token
        return self._callers.get(hashlib.sha256(token.encode()).hexdigest())

    def problem(self) -> str | None:
        """Return why the file can't be read now, without its path; None: it can be read."""
        self._look()
        return self._problem

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_INTERVAL_S:
            return
        with self._lock:
            self._looked_s = now_s
            try:
                seen = _changed(self._path)
                if seen != self._seen or self._problem is not None:
                    self._callers, self._seen = _load(self._path), seen
                if self._problem is not None:
                    _log.warning("%s can be read again", self._path)
                self._problem = None
            except ConfigError as error:
                # a half-written file must not refuse all callers
                problem = str(error).replace(str(self._path), "the token file")
                if problem != self._problem:
                    _log.error("%s; the last known tokens stay valid", error)
                self._problem = problem


def add_token(path: Path, name: str, role: Role, topics: Sequence[str] | None, max_topics: int | None = None) -> str:
    """Make a token, add its hash to the file, and return it. A missing file is made, with mode 600.

    The file is replaced as a whole, and keeps its owner, group and mode. Concurrent calls of any processes wait for
    each other. `topics` are prefixes; None allows every topic. `max_topics` None: `MAX_TOPICS` if `topics` is
    given, else no bound. Raises `InvalidArgument` for the name, an empty list or an empty prefix, and `ConfigError` if
    the file can't be read or replaced.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"a token's name is 1 to 64 letters, digits, dots, dashes or underscores, not {name!r:.80}"
        )
    if topics is not None and not (topics and all(topics)):
        raise InvalidArgument("a prefix of topics is empty: give at least one prefix, or leave the option out")
    # replace the target of a link, not the link
    path = path.resolve()
    token = f"ti_{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(token.encode()).hexdigest()
    scope = None if topics is None else tuple(topics)
    row = _Row(name=name, sha256=digest, role=role, topics=scope, max_topics=max_topics)
    try:
        while not _is_added(path, row):
            pass
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error
    return token


def _is_added(path: Path, row: _Row) -> bool:
    """Add a row to the file and return True, or return False if another call replaced or made the file meanwhile."""
    with contextlib.ExitStack() as ending:
        is_new = not path.exists()
        if not is_new:
            file = ending.enter_context(path.open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                return False
        rows = [] if is_new else _rows(path)
        if any(known.name == row.name for known in rows):
            raise InvalidArgument(f"{path} has a token called {row.name}: remove it, or choose another name")
        new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
        ending.callback(new.unlink, missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as written:
            if not is_new:
                _keep_access(path, new)
            written.write(json.dumps([asdict(grant) for grant in (*rows, row)], indent=2) + "\n")
            written.flush()
            os.fsync(written.fileno())
        if is_new:
            try:
                os.link(new, path)
            except FileExistsError:
                return False
        else:
            os.replace(new, path)
    return True


def _keep_access(path: Path, new: Path) -> None:
    """Give `new` the owner, group, mode and access list of the file at `path`. Raises `ConfigError`."""
    state = path.stat()
    try:
        os.chown(new, state.st_uid, state.st_gid)
        shutil.copystat(path, new)
    except OSError as error:
        raise ConfigError(
            f"{path} belongs to user {state.st_uid} and group {state.st_gid}, and its replacement would not: "
            "run this as that user, or as root"
        ) from error


class _Row(Grant):
    name: Annotated[str, Meta(pattern=rf"\A(?:{_NAME.pattern})\Z")]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    role: Role
    max_topics: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None

    @property
    def caller(self) -> Caller:
        """The caller with this token."""
        default = None if self.topics is None else MAX_TOPICS
        return Caller(self.name, self.role, self.topics, default if self.max_topics is None else self.max_topics)


def _rows(path: Path) -> list[_Row]:
    return read_grants(path, "a file of tokens", list[_Row])


def _load(path: Path) -> dict[str, Caller]:
    return {row.sha256: row.caller for row in _rows(path)}


def _changed(path: Path) -> tuple[int, ...]:
    try:
        state = path.stat()
    except OSError as error:
        raise SetupUnavailable(f"{path} can't be read: {error.strerror}") from error
    # ctime, too: mtime can be set back
    return state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino
