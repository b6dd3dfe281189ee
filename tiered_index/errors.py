"""Errors, sorted by what the caller should do next.

| do next        | class |
|----------------|-------|
| retry later    | `StorageUnavailable` |
| slow down      | `BackPressure`, `DiskFull` |
| fix the call   | `InvalidArgument`, `InvalidCursor`, `OwnedBySource` |
| fix the set-up | `ConfigError`, `StorageMisconfigured`, `SchemaMismatch`, `NotAnIndex`, `LockHeld`, `WriterFenced` |
| mend the place | `SetupUnavailable`, `FolderDenied`, `ObjectRefused` |
| restore it     | `ObjectArchived` |
| repair         | `CorruptFile`, `UnsupportedVersion`, `StorageBehind`, `RootBehind` |
| accept less    | `PartialAnswer`, `BudgetExceeded` |
| open it again   | `IndexClosed` |

Every class has an `exit_code`, the exit status of the command line. A failure is never reported as success, as `None`
or as a shorter answer. Other modules define subclasses, such as `JobOvertaken`; docs/troubleshooting.md names them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

E = TypeVar("E", bound=BaseException)
PushedBackBy = Literal["buffer", "disk", "storage"]


class TieredIndexError(Exception):
    """Base class of the errors of this package."""

    exit_code = 70

    def __reduce__(self) -> tuple[Any, ...]:
        # restores the attributes, because the message is not always an argument of the class
        return _restored, (type(self), self.args), self.__dict__


class InvalidArgument(TieredIndexError, ValueError):
    """The call is wrong: a value out of range, a ragged batch, an unknown name. Nothing was changed."""

    exit_code = 2


class OwnedBySource(InvalidArgument):
    """A source that the index follows owns the queue of an entry, or the name of a position. Nothing was changed."""


class InvalidCursor(InvalidArgument):
    """The cursor was altered, or belongs to another query."""


class IndexClosed(TieredIndexError):
    """The index was closed before or during the call, or can't be used any more.

    A forked child can't use an index or reader that its parent opened. After an interrupt in a call that writes, the
    index must be closed. The call itself was right: open the index again and repeat it.
    """

    FORKED = "a parent process opened the index and forked this process: open it after the fork"
    INTERRUPTED = "an interrupt ended a call that writes: close the index and open it again"


class CloseTimeout(TieredIndexError):
    """Something had not ended when the time of `close` was over. The message says what, and what that means."""

    exit_code = 3


class NestedCall(TieredIndexError):
    """A finalizer or a signal handler has called the index in the middle of another call in the same thread.

    Call the index from another thread, or after the interrupted call. Nothing was changed.
    """

    TEXT = (
        "a finalizer (__del__) or a signal handler has interrupted a call of the index and called it again in the same "
        "thread: call it from another thread, or later"
    )


class ConfigError(TieredIndexError):
    """The set-up is wrong: a setting, a geometry that cannot exist, a missing extra."""

    exit_code = 2


class SetupUnavailable(ConfigError):
    """A file, folder or port that the set-up names is missing or can't be used now. A later start may succeed."""

    exit_code = 3


class NotAnIndex(ConfigError):
    """A folder or storage prefix holds no tiered index, or another one."""


class SchemaMismatch(ConfigError):
    """The stored schema of a file or index differs from the requested one."""


class LockHeld(ConfigError):
    """Another writer holds the root's lock or the storage's lease.

    Attributes: `pid` and `host` of the holder, if known.
    """

    exit_code = 5

    def __init__(self, message: str, *, pid: int | None = None, host: str | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host

    @classmethod
    def by(cls, place: str, pid: int | None, host: str | None, more: str = "") -> LockHeld:
        """Return the error for a place that process `pid` on `host` is writing. None: not known."""
        if pid == os.getpid() and host == socket.gethostname():
            holder = f"this process ({pid})"
        else:
            holder = "another process" if pid is None else f"process {pid} on {host}"
        return cls(f"{place} is being written by {holder}{more}", pid=pid, host=host)


class WriterFenced(ConfigError):
    """A newer writer has taken over the index. This one publishes nothing more and keeps its local files."""

    exit_code = 5


class StorageError(TieredIndexError):
    """Base class of the errors of a storage."""

    exit_code = 3


class StorageUnavailable(StorageError):
    """The storage did not answer, or answered with a transient fault, at every retry. Retry later."""


class StorageMisconfigured(StorageError, ConfigError):
    """No credentials, no such bucket, access denied, or a storage or disk without an ability that the engine needs.

    `exit_code` is 2 for a missing ability: the place can't be used at any time.
    """

    exit_code = 3

    @classmethod
    def lacking(cls, message: str) -> StorageMisconfigured:
        """Return the error for a storage or disk that lacks an ability; `message` names the place and the ability."""
        error = cls(f"{message}. docs/storages.md lists the abilities that the engine needs")
        error.exit_code = 2
        return error


class FolderDenied(StorageMisconfigured):
    """This user may not read a folder below a prefix of several indexes. It may be no index: lookups are partial."""


class ObjectArchived(StorageMisconfigured):
    """The object is in an archive, such as Glacier: restore it there first, then repeat the call."""


class ObjectRefused(StorageMisconfigured):
    """The service refuses these credentials an object: grant access. In lookups of messages it is an entry's state."""


class ObjectNotFound(StorageError):
    """There is no object with that name. Attribute: `name`."""

    def __init__(self, name: str, where: str = "") -> None:
        super().__init__(f"no object {name!r}" + (f" in {where}" if where else ""))
        self.name = name


class ObjectExists(StorageError):
    """Put-if-absent found an object with that name. Attribute: `name`."""

    def __init__(self, name: str, where: str = "") -> None:
        super().__init__(f"object {name!r} exists already" + (f" in {where}" if where else ""))
        self.name = name


class CorruptFile(TieredIndexError):
    """Bytes contradict their checksum or structure. None of them were used.

    Attributes: `file` (path or object name), `problem`, `offset` (byte position or None), `expected`, `found`. The
    message never quotes stored bytes.
    """

    exit_code = 4

    def __init__(
        self, file: str, problem: str, *, offset: int | None = None, expected: object = None, found: object = None
    ) -> None:
        place = f" at byte {offset}" if offset is not None else ""
        shown = None if isinstance(found, bytes | bytearray | memoryview) else found
        pair = [f"{name} {value!r}" for name, value in (("expected", expected), ("found", shown)) if value is not None]
        detail = f" ({', '.join(pair)})" if pair else ""
        super().__init__(f"{file}: {problem}{place}{detail}")
        self.file = file
        self.problem = problem
        self.offset = offset
        self.expected = expected
        self.found = found

    @classmethod
    def unless_equal(
        cls, file: str, problem: str, expected: object, found: object, *, offset: int | None = None
    ) -> None:
        """Raise this error if `found` differs from `expected`."""
        if found != expected:
            raise cls(file, problem, offset=offset, expected=expected, found=found)


class UnsupportedVersion(CorruptFile):
    """Another version wrote this file or record. It is intact, but this version can't read it."""

    @classmethod
    def unless_read(cls, file: str, what: str, expected: object, found: object, *, offset: int | None = None) -> None:
        """Raise this error if the version `found` of `what` is not the `expected` one, which this program reads."""
        if found != expected:
            is_later = isinstance(found, int) and isinstance(expected, int) and found > expected
            raise cls(
                file,
                f"{what} of version {found!r:.40}, and this program reads version {expected}: written by a development "
                "version: build the index again" + (", or by a later version: upgrade tiered_index" * is_later),
                offset=offset,
                expected=expected,
                found=found,
            )


class StorageBehind(CorruptFile):
    """The storage's log differs from the one seen before: it was restored to an earlier state, or has another history.

    Nothing local was deleted. `tiered-index recover` sends the entries that the storage lacks.
    """


class RootBehind(CorruptFile):
    """The root is older than log records of its own writer: it was restored from a backup, or is a clone.

    Nothing was changed. `tiered-index recover` begins the root again and keeps the entries that the storage lacks.
    """


class BackPressure(TieredIndexError):
    """The write buffer or the local disk is at its bound. The call was refused whole: slow down and repeat it.

    Attributes: `reason` is the bottleneck: ``buffer`` (puts are faster than the disk), ``disk`` (it is full) or
    ``storage`` (uploads fail, so local files can't be deleted). `number` and `bound` are the present and the highest
    number of entries or bytes of the buffer, or of bytes of local files; None if only the file system knows.
    """

    exit_code = 7

    def __init__(
        self, message: str, *, reason: PushedBackBy = "buffer", number: int | None = None, bound: int | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.number = number
        self.bound = bound


class DiskFull(BackPressure):
    """The file system is full, or the local files are at `disk_max_bytes`.

    The call was refused whole, or the entries wait in the write buffer.
    """

    def __init__(
        self, message: str, *, reason: PushedBackBy = "disk", number: int | None = None, bound: int | None = None
    ) -> None:
        super().__init__(message, reason=reason, number=number, bound=bound)


class PartialAnswer(TieredIndexError):
    """A lookup could not read every file it needed, and the caller did not allow partial answers.

    Attribute: `failed`, the reports of the files that could not be read.
    """

    exit_code = 6

    def __init__(self, message: str, *, failed: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.failed = failed


class BudgetExceeded(PartialAnswer):
    """A lookup reached `max_requests`, `max_bytes` or `timeout_s`, or an opening its `timeout_s`.

    Attributes: `failed` as in `PartialAnswer`; `result` has the entries found so far (a partial `QueryResult` or
    `QueryResults`).
    """

    def __init__(self, message: str, *, failed: tuple[object, ...] = (), result: object = None) -> None:
        super().__init__(message, failed=failed)
        self.result = result


__all__ = [name for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, TieredIndexError)]


def _restored(kind: type[TieredIndexError], args: tuple[object, ...]) -> TieredIndexError:
    """Return an unpickled error without attributes: pickle sets them afterwards."""
    error = kind.__new__(kind)
    error.args = args
    return error


def error_named(name: str) -> type[TieredIndexError]:
    """Return the error class of that name; `TieredIndexError` for a class that only another version has."""
    return globals()[name] if name in __all__ else TieredIndexError


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean ...?" with `prefix` and the known name nearest to `name`, whose case may differ; empty if
    none is near.
    """
    folded = {candidate.strip().casefold(): candidate for candidate in known}
    # imported on use, because most processes see no such error
    import difflib

    near = difflib.get_close_matches(name.strip().casefold(), folded, 1)
    return f"; did you mean {prefix + folded[near[0]]!r}?" if near else ""


def install_hint(extra: str) -> str:
    """Return the commands that install an extra from a clone or a wheel: the package is in no package index."""
    return f"pip install '.[{extra}]' in a clone, or pip install 'FILE.whl[{extra}]' of its wheel"


def without_frames(error: E) -> E:
    """Remove the tracebacks of `error` and of its causes, and return it. Use this for an error that you keep.

    A traceback refers to every frame, and so to memory maps and to the caller's objects.
    """
    link: BaseException | None = error
    while link is not None and link.__traceback__ is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def listed(names: Sequence[str], most: int = 20) -> str:
    """Return the first `most` names, and the number of the others, as text."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
