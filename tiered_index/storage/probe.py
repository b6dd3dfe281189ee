"""Probes whether a storage, and a folder for a root, have the abilities that the engine needs.

`probe` tries each ability by the calls that the engine makes, on objects below `PROBE_PREFIX` with unique names, and
deletes them. `check_storage` raises for the first ability that is missing: before an index is created. Without it,
users would find out weeks later, in words about something else. `probe_put_if_absent` is the part that each writer and
job checks at its start, if a server decides. Threads: any.
"""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.errors import (
    ConfigError,
    InvalidArgument,
    ObjectExists,
    ObjectNotFound,
    StorageMisconfigured,
    TieredIndexError,
    without_frames,
)
from tiered_index.storage.base import BULK_DELETES, PART_BYTES, PROBE_PREFIX, RANGES, START_AFTER, Storage
from tiered_index.storage.disk import TEMPORARY_PREFIX, Disk, LacksAbility, lock_file, map_file

# All bytes, more than once, so that a range is no prefix of them
_BODY = bytes(range(256)) * 16
_OTHER = b"second" * 100
_RANGE = 1000, 500
# The start of a frame of a body that is sent in frames (aws-chunked)
_FRAME = re.compile(rb"[0-9a-fA-F]{1,8}(;[^\r\n]{0,200})?\r\n")
_NOTABLE_SKEW_MS = 60_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AbilityFinding:
    """The finding of a probe about one ability.

    - `what`: the ability.
    - `needed_for`: what the engine uses it for.
    - `state`: ``ok``; ``worked round``: it lacks something, at a price that `result` names; ``missing``.
    - `result`: what was found, for people.
    - `error`: the error of a missing ability, if there was one.
    """

    what: str
    needed_for: str
    state: Literal["ok", "worked round", "missing"]
    result: str
    error: TieredIndexError | None = None


def check_storage(storage: Storage, clock: Clock | None = None) -> None:
    """Raise `StorageMisconfigured` for the first ability that a storage lacks. Log those that are worked round.

    Multipart uploads are left out: an upload of a large file reports itself that the service refuses it.
    Passes on other errors. Raises `StorageUnavailable` if the storage does not answer.
    """
    for finding in probe(storage, clock, uploads=False):
        if isinstance(finding.error, StorageMisconfigured):
            raise finding.error
        if finding.state == "missing":
            raise StorageMisconfigured.lacking(f"{storage.uri} can't keep an index: {finding.what}: {finding.result}")
        if finding.state == "worked round":
            _log.warning("%s: %s: %s", storage.uri, finding.what, finding.result)


def probe_put_if_absent(storage: Storage, name: str = PROBE_PREFIX + "put-if-absent") -> None:
    """Check that a server honours put-if-absent: put an object with a unique name twice, then delete it.

    A storage without a server is not asked: the kernel's hard links or a transaction decide, or the put fails. The
    object's name begins with `name`. Raises `StorageMisconfigured` if the second put succeeds, or is refused but
    stored, and if other bytes come back than were put. Passes on other errors.
    """
    if not storage.has_server:
        return
    unique = f"{name}-{uuid.uuid4().hex}"
    try:
        problem = _problem(storage, unique)
    finally:
        # the first error is the one to raise
        with contextlib.suppress(TieredIndexError):
            storage.delete_many([unique])
    if problem:
        raise StorageMisconfigured.lacking(f"{storage.uri} {problem}")


def probe(storage: Storage, clock: Clock | None = None, *, uploads: bool = True) -> list[AbilityFinding]:
    """Return what is found about each ability of a storage; `uploads`: also about multipart uploads.

    `clock` is this machine's. Raises `StorageError` if the storage can't be used at all, for example without access.
    """
    return _Probe(storage, clock or SystemClock(), uploads).findings()


def probe_folder(folder: Path, disk: Disk | None = None) -> Iterator[AbilityFinding]:
    """Yield what is found about each ability of the disk of `folder`, in which a root may be made.

    The folder may be missing: then its next existing parent is probed. Raises `StorageMisconfigured` if this user can't
    write to it.
    """
    disk = disk or Disk()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    path = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    try:
        descriptor = disk.create(path)
        try:
            disk.pwrite(descriptor, _BODY, 0)
            disk.sync(descriptor)
            steps: list[tuple[str, str, Callable[[], object]]] = [
                ("sync of folders", "entries that are durable survive a crash", lambda: disk.sync_folder(folder)),
                ("file locks", "a root has one writer", lambda: lock_file(descriptor, folder)),
                ("shared maps", "lookups read local files", lambda: map_file(descriptor, folder).close()),
            ]
            for what, needed_for, step in steps:
                try:
                    step()
                    yield AbilityFinding(what, needed_for, "ok", "yes")
                except LacksAbility as error:
                    yield AbilityFinding(what, needed_for, "missing", str(error.strerror))
        finally:
            disk.close(descriptor)
            disk.unlink(path)
    except OSError as error:
        raise StorageMisconfigured(
            f"{folder}: {error.strerror or error}: give a folder to which this user may write"
        ) from error


def _problem(storage: Storage, name: str) -> str:
    """Return what is wrong with puts of an object if absent; empty: nothing.

    A lack shows a second time. If this process was suspended for a day between two puts, a sweep has deleted the object
    of the first one.
    """
    if problem := _twice_put(storage, name):
        storage.delete_many([name])
        problem = _twice_put(storage, name)
    return problem


def _twice_put(storage: Storage, name: str) -> str:
    """Put an object twice if absent, and return what is wrong; empty: nothing."""
    # A backend that repeats the first put after a lost response finds its own object: the name is unique
    with contextlib.suppress(ObjectExists):
        storage.put_if_absent(name, _BODY)
    is_refused = False
    try:
        storage.put_if_absent(name, _OTHER)
    except ObjectExists:
        is_refused = True
    stored = None
    with contextlib.suppress(ObjectNotFound):
        stored = storage.get(name)
    if stored not in (_BODY, _OTHER, None):
        return _difference(stored)
    if is_refused and stored == _BODY:
        return ""
    return (
        "ignores put-if-absent (If-None-Match: *): two writers would overwrite each other's log. Use a server that "
        "honours it"
    )


def _difference(stored: bytes | None) -> str:
    """Return what is wrong with bytes that came back."""
    if _FRAME.match(stored or b""):
        return (
            "stores other bytes than it was sent, namely the frames of the transfer (aws-chunked): set "
            "AWS_REQUEST_CHECKSUM_CALCULATION=when_required, or use a server that reads such bodies"
        )
    return f"returns {len(stored or b''):,} other bytes than the {len(_BODY):,} that were put"


class _Probe:
    """The probe of one storage."""

    def __init__(self, storage: Storage, clock: Clock, uploads: bool) -> None:
        self._storage, self._clock, self._has_uploads = storage, clock, uploads
        self._folder = f"{PROBE_PREFIX}{uuid.uuid4().hex}/"
        self.names = self._first, self._second, self._big = [f"{self._folder}{letter}" for letter in "abc"]
        self._skew_ms = 0
        self._is_older = self._is_clean = False

    def findings(self) -> list[AbilityFinding]:
        """Try each ability, and return the findings. Delete the objects, if the last steps have not."""
        steps: list[tuple[str, str, Callable[[], str]]] = [
            ("put-if-absent", "one of two writers wins", self._put_if_absent),
            ("the bytes that come back", "every checksum", self._bytes),
            (RANGES, "a lookup reads a piece of a file", self._ranges),
            (START_AFTER, "a reader finds the log's end", self._lists),
            *([("multipart uploads", "files of more than 8 MiB", self._upload)] if self._has_uploads else []),
            (BULK_DELETES, "checkpoints, merges, erasures", self._deletes),
            ("clock", "ages of orphans", self._times),
        ]
        findings: list[AbilityFinding] = []
        try:
            for what, needed_for, step in steps:
                findings.append(self._finding(what, needed_for, step, is_first=not findings))
                if findings[0].state == "missing":
                    break
        finally:
            if not self._is_clean:
                with contextlib.suppress(TieredIndexError):
                    for name in self.names:
                        self._storage.delete_many([name])
        return findings

    def _finding(self, what: str, needed_for: str, step: Callable[[], str], *, is_first: bool) -> AbilityFinding:
        try:
            problem = step()
        except (StorageMisconfigured, InvalidArgument, ObjectNotFound) as error:
            # without a bucket or access to it, no other step can succeed
            if is_first and error.exit_code != ConfigError.exit_code:
                raise
            return AbilityFinding(what, needed_for, "missing", str(error), without_frames(error))
        if problem:
            return AbilityFinding(what, needed_for, "missing", problem)
        if instead := self._storage.shortfalls().get(what):
            return AbilityFinding(what, needed_for, "worked round", f"the service {instead}")
        if what == "clock" and abs(self._skew_ms) > _NOTABLE_SKEW_MS:
            ahead = "ahead of" if self._skew_ms > 0 else "behind"
            seconds = f"{abs(self._skew_ms) / 1000:,.0f} s {ahead} this machine's: set both clocks"
            return AbilityFinding(what, needed_for, "worked round", f"the storage's clock is {seconds}")
        return AbilityFinding(what, needed_for, "ok", "yes")

    def _put_if_absent(self) -> str:
        problem = _problem(self._storage, self._first)
        # the next step reports bytes that differ
        return problem if problem.startswith("ignores") else ""

    def _bytes(self) -> str:
        stored = self._storage.get(self._first)
        return "" if stored == _BODY else _difference(stored)

    def _ranges(self) -> str:
        start, length = _RANGE
        if self._storage.get_range(self._first, start, length) != _BODY[start : start + length]:
            return "other bytes come back than those of the range"
        if self._storage.get_suffix(self._first, length) != (_BODY[-length:], len(_BODY)):
            return "other bytes come back than those at the object's end"
        return ""

    def _lists(self) -> str:
        before_ms = self._storage.now_ms()
        self._skew_ms = before_ms - self._clock.now_ms()
        self._storage.put(self._second, _BODY)
        listed = [*self._storage.list(self._folder)]
        self._is_older = any(info.name == self._second and info.modified_ms < before_ms for info in listed)
        later = [info.name for info in self._storage.list(self._folder, start_after=self._first)]
        if [(info.name, info.size_bytes) for info in listed] != [(name, len(_BODY)) for name in self.names[:2]]:
            return f"a listing of two objects has {len(listed)}, or wrong names or sizes"
        if later != [self._second]:
            return f"a listing after the first of two objects has {len(later)}"
        return ""

    def _upload(self) -> str:
        with self._storage.open_writer(self._big) as stream:
            stream.write(bytes(PART_BYTES))
            stream.write(_BODY)
        whole = _BODY, PART_BYTES + len(_BODY)
        is_whole = self._storage.get_suffix(self._big, len(_BODY)) == whole
        return "" if is_whole else "other bytes come back than were uploaded"

    def _deletes(self) -> str:
        self._storage.delete_many(self.names)
        left = len([*self._storage.list(self._folder)])
        self._is_clean = not left
        return f"{left} of {len(self.names)} objects are still listed" if left else ""

    def _times(self) -> str:
        return "an object that is written has an earlier time than the storage's own" if self._is_older else ""
