"""Files that grant access, above all tokens: hashes, each with a role and the prefixes of the topics that it may see.

The files are read strictly, because a misspelt member would open every topic. An unknown member, a member that is given
twice and an empty prefix are refused. So is a file that every user of the host can write.

The file of tokens is JSON: ``[{"name", "sha256", "role", "topics", "max_topics"}]``. `topics` is a list of prefixes, or
null for every topic. `max_topics` is the most topics that the token may write to, or null for the default. A token has
256 random bits, so one round of SHA-256 protects it. The file is read again within a second of a change: a removed
token is refused from then on. While the file can't be read, the last known tokens stay valid. Threads: any.
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
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from tiered_index.base.documents import typed
from tiered_index.errors import ConfigError, InvalidArgument, SetupUnavailable, did_you_mean
from tiered_index.server.http.problems import Refused
from tiered_index.service.write.owned import prefix_of_follower

Role = Literal["read", "write", "admin"]
# Each role includes the earlier ones
ROLES: tuple[Role, ...] = ("read", "write", "admin")
T = TypeVar("T")
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

        A token may have the name of a kind of followed sources.
        """
        return self.topics is None or (source.startswith(f"{self.name}:") and not prefix_of_follower(source))

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
        if prefix := prefix_of_follower(source):
            raise Refused(403, f"sources named {prefix}... are those that a service follows")
        if not self.sees_source(source):
            raise Refused(403, f"this token may use only sources whose names begin with {self.name}:")

    def need_topic_ids(self) -> None:
        """Raise `Refused` if the caller may not choose topic ids.

        The error of a conflict names another topic, and a chosen id can't be used for another topic.
        """
        if self.topics is not None:
            raise Refused(403, "the token is for some topics: leave topic_id out, and the index chooses it")

    def need_every_topic(self, subject: str) -> None:
        """Raise `Refused` unless the caller may see every topic; `subject` begins the message."""
        if self.topics is not None:
            raise Refused(403, f"{subject} of all topics, and the token is for some of them")


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
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    with contextlib.ExitStack() as ending:
        try:
            folder = os.open(path.parent, os.O_RDONLY)
            ending.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
            ending.callback(new.unlink, missing_ok=True)
            with open(new, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as written:
                rows = _rows(path) if path.exists() else []
                if any(known.name == name for known in rows):
                    raise InvalidArgument(f"{path} has a token called {name}: remove it, or choose another name")
                if path.exists():
                    _keep_access(path, new)
                written.write(json.dumps([asdict(grant) for grant in (*rows, row)], indent=2) + "\n")
                written.flush()
                os.fsync(written.fileno())
            os.replace(new, path)
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}") from error
    return token


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


Prefix = Annotated[str, Meta(min_length=1)]
"""A prefix of topics. An empty one would open every topic."""


class Grant(Struct, kw_only=True, forbid_unknown_fields=True):
    """A grant of a file. `topics` are prefixes of topics; None: every topic."""

    topics: tuple[Prefix, ...] | None = None


def read_grants(path: Path, expected: str, kind: type[T]) -> T:
    """Return the grants of a JSON file, whose document is a `kind`; `expected` names the file in errors.

    Raises `SetupUnavailable` if the file can't be read or is another document, and `ConfigError` if every user of the
    host can write it. Errors name the member and the number of its grant, from 0. They have no value of the file, which
    may be a secret.
    """
    try:
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise SetupUnavailable(f"{path} can't be read: {error.strerror}") from error
    if mode & stat.S_IWOTH and stat.S_ISREG(mode):
        raise ConfigError(f"every user of this host can write {path}, and so grant access: chmod o-w {path}")
    try:
        return typed(json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once), kind)
    except _GivenTwice as error:
        problem = f"the member {error.args[0]!r:.80} is given twice"
    except msgspec.ValidationError as error:
        problem = str(error)
        if unknown := re.match(r"Object contains unknown field `(.*?)`(.*)", problem):
            members = get_args(kind)[-1].__struct_fields__
            hint = did_you_mean(unknown[1], members) or f"; the members are {', '.join(members)}"
            problem = f"the member {unknown[1]!r:.80} is unknown{hint}{unknown[2]}"
        elif (empty := _EMPTY.match(problem)) is not None:
            every = "which would open every topic: to open every topic, leave 'topics' out"
            problem = f"the member 'topics' has an empty prefix, {every}{empty[1]}"
    except (ValueError, RecursionError):
        problem = "it is not JSON"
    raise SetupUnavailable(f"{path} is not {expected}: {problem}")


class _GivenTwice(ValueError):
    """A member is given twice; the argument is its name."""


_EMPTY = re.compile(r"Expected `str` of length >= 1( - at `.*\.topics\[\d+\]`)")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise _GivenTwice(max(names, key=names.count))
    return members


def access_warning(path: Path) -> str | None:
    """Return a warning if every user of the host can read the file, or its group can write it; None: neither.

    None also for a file that can't be looked at: reading it raises the error.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    if not mode & (stat.S_IROTH | stat.S_IWGRP) or not stat.S_ISREG(mode):
        return None
    who = "every user of this host can read" if mode & stat.S_IROTH else "its group can write"
    return f"{path} grants access, and {who} it: chmod o-r,g-w {path}"


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
