"""Judges whether a storage's log, its checkpoints and a root are of one history, or one of them went back in time.

| restored | noticed by | error |
|---|---|---|
| the storage, to an earlier state | its log ends before the record that root or process have seen | `StorageBehind` |
| the storage, and it went on | the record of a number has another digest than the one seen | `StorageBehind` |
| two histories in one storage | a record names another predecessor, or a checkpoint another record | `StorageBehind` |
| the root, or a clone of it | the log has a record of this root that the root's note of attempts lacks | `RootBehind` |
| a file of a root or of a clone | its later form or object lacks its entries: `life/same_file.py` | `RootBehind` |
| any of them, and `recover` stopped | the root has a folder `aside/` | `RootBehind` |

A writer's log asks when it is opened, and before anything is deleted or counts as published. Readers and jobs that know
a root ask `RootBeside.check`. Replays ask `check_follows` for each record. No check changes anything. Only this module
makes these errors. Threads: any.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Protocol

from tiered_index.errors import CorruptFile, ObjectNotFound, RootBehind, StorageBehind
from tiered_index.format.names import log_name
from tiered_index.service.root import ASIDE, Root
from tiered_index.service.root.seen import Seen, SeenFile

_WAY_ON = "run `tiered-index recover --root ROOT`, which sends the entries that the storage lacks"
# a writer's own attempts, by which it distinguishes its records from those of a clone of its root
_ATTEMPTS_KEPT = 1000
_log = logging.getLogger(__name__)


class LinkedRecord(Protocol):
    """A record of a log: its digest, and that of the record before it."""

    @property
    def digest(self) -> str: ...
    @property
    def previous(self) -> str: ...


class LastRecords(Protocol):
    """The last record of a log that was read, and the last record of each root, by its id."""

    @property
    def number(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def roots(self) -> Mapping[str, tuple[int, str]]: ...
    def digest_at(self, number: int, /) -> str: ...


class ListedCheckpoint(Protocol):
    """A checkpoint as its listing shows it."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def digest(self) -> str: ...


def check_follows(file: str, number: int, digest: str, previous: str) -> None:
    """Raise `StorageBehind` unless record `file` names `digest`, that of record `number` before it, as `previous`."""
    if previous != digest:
        raise StorageBehind(
            file,
            f"its previous record {number} differs from the one read: the storage was restored, or two "
            f"histories of this index were mixed",
            expected=digest,
            found=previous,
        )


def check_recovered(root: Root) -> None:
    """Raise `RootBehind` for a root that `recover` was setting up again when it stopped."""
    if (root.path / ASIDE).exists():
        raise RootBehind(
            str(root.path / ASIDE),
            f"`tiered-index recover --root {root.path}` was interrupted and has left files here: run it again",
        )


class Counted(Protocol):
    """A file's number of entries, and the seconds of its first and last one."""

    @property
    def count(self) -> int: ...
    @property
    def second_min(self) -> int: ...
    @property
    def second_max(self) -> int: ...


def exceeds(local: Counted, later: Counted) -> bool:
    """Return whether a file has entries that a later form of it, or its object, lacks: by their number and times."""
    is_inside = later.second_min <= local.second_min and local.second_max <= later.second_max
    return local.count > later.count or not is_inside


def other_file(where: str, later: str, expected: object, found: object) -> RootBehind:
    """Return the error for a root's file `where`, whose id has a `later` form or object with other entries."""
    return RootBehind(
        where,
        f"there is another file with this id ({later}), written by another copy of this root. Nothing was changed; "
        f"{_WAY_ON}",
        expected=expected,
        found=found,
    )


class RootBeside:
    """A root whose writer may run while its log is read. Make it before: it has the records that were seen by then."""

    def __init__(self, root: Root) -> None:
        """Raises typed errors of the disk."""
        self._root, self._before = root, SeenFile(root).read()

    def check(self, identity: Identity, state: LastRecords, *, deep: bool = True) -> None:
        """Compare a log that was read with the root; `deep` as in `Identity.check_seen`.

        Raises `StorageBehind`, `RootBehind`, and typed errors of the disk.
        """
        if self._before is not None:
            identity.check_seen(state, self._before, deep=deep)
        # if `recover` set files aside, the root's view reports that
        marker = self._root.read_marker() if not (self._root.path / ASIDE).exists() else None
        if marker is not None:
            # the later note, because a running writer notes each attempt before its record
            identity.check_own(state, marker.root_id, SeenFile(self._root).read())


class Identity:
    """The identity of one log. A writer's log belongs to the root `root_id`, which has `seen` records of it.

    `uri` is the storage's. `record` reads a record by number, and `gone` returns the error for a missing one.
    """

    def __init__(
        self,
        uri: str,
        record: Callable[[int], LinkedRecord],
        gone: Callable[[int], Exception],
        *,
        root_id: str = "",
        seen: SeenFile | None = None,
    ) -> None:
        self._uri, self._record, self._gone = uri, record, gone
        self.root_id, self._seen = root_id, seen
        self._attempts = deque(seen.last.attempts if seen is not None else [], maxlen=_ATTEMPTS_KEPT)

    @property
    def seen_number(self) -> int:
        """The number of the newest record that the log's root has seen; 0: none, or there is no root."""
        return self._seen.last.number if self._seen is not None else 0

    def note(self, state: LastRecords, attempt: str | None = None) -> None:
        """Note durably in the root that it knows `state`, and tries to append a record as `attempt`.

        Raises the errors of the root's disk.
        """
        if self._seen is None:
            return
        if attempt is None:
            self._seen.note(state.number, state.digest)
        else:
            self._attempts.append(attempt)
            self._seen.note(state.number, state.digest, attempt)

    def check_root(self, state: LastRecords) -> None:
        """Compare a log that was read with its root, with at most one request. Raises `StorageBehind`, `RootBehind`."""
        if self._seen is not None:
            self.check_seen(state, self._seen.last)
            self.check_attempts(state)

    def check_attempts(self, state: LastRecords) -> None:
        """Raise `RootBehind` if the log has a record of its root that this root did not try to append. No request."""
        if self._seen is not None:
            self.check_own(state, self.root_id, self._seen.last, self._attempts)

    def check_own(self, state: LastRecords, root_id: str, seen: Seen | None, attempts: Container[str] = ()) -> None:
        """Raise `RootBehind` if the log has records of a root beyond those that it has `seen` and its `attempts`.

        Then the root is an older copy, or another root has its id.
        """
        seen = seen or Seen()
        own = state.roots.get(root_id)
        if own is None or own[0] <= seen.number or own[1] in seen.attempts or own[1] in attempts:
            return
        raise RootBehind(
            f"{self._uri}/{log_name(own[0])}",
            f"this root wrote it, but has seen the log only up to record {seen.number}: the root was restored from a "
            f"backup, or is a clone of a root that is still in use. Nothing was changed; {_WAY_ON}",
            expected=seen.number,
            found=own[0],
        )

    def check_seen(self, state: LastRecords, seen: Seen, *, deep: bool = True) -> None:
        """Compare the log that was read with the position that a root has `seen`. Raises `StorageBehind`.

        `deep`: use a request if the log has more records since.
        """
        if state.number < seen.number:
            raise StorageBehind(
                f"{self._uri}/{log_name(state.number)}",
                f"the log ends here, but its root has seen record {seen.number}: the storage was restored to an "
                f"earlier state. Nothing local was deleted; {_WAY_ON}",
                expected=seen.number,
                found=state.number,
            )
        if seen.number and (deep or state.number == seen.number):
            try:
                # the next record has its digest
                digest = state.digest if state.number == seen.number else self._record(seen.number + 1).previous
            except ObjectNotFound as error:
                raise self._gone(seen.number) from error
            self.check_same(seen.number, seen.digest, digest)

    def check_same(self, number: int, expected: str, digest: str) -> None:
        """Raise `StorageBehind` if record `number` has another digest than the `expected` one of the record seen."""
        if digest != expected:
            raise StorageBehind(
                f"{self._uri}/{log_name(number)}",
                f"this record differs from the one seen under its number: the storage was restored, or it "
                f"has another history of the index. Nothing local was deleted; {_WAY_ON}",
                expected=expected,
                found=digest,
            )

    def cut_off(self, number: int, last: int) -> StorageBehind:
        """Return the error for a log that ends at `last`, before record `number` that was read."""
        return StorageBehind(
            f"{self._uri}/{log_name(number)}",
            f"the record is missing, and the log ends before it: the storage was restored to an earlier state. Open a "
            f"reader again; for a root, {_WAY_ON}",
            expected=number,
            found=last,
        )

    def is_followed(self, checkpoint: ListedCheckpoint, behind: int) -> bool:
        """Return whether the log continues from the record of a checkpoint, for `behind` records."""
        try:
            before = self._record(checkpoint.number)
            if not before.digest.startswith(checkpoint.digest):
                return False
            for number in range(checkpoint.number + 1, checkpoint.number + behind + 1):
                after = self._record(number)
                if after.previous != before.digest:
                    return False
                before = after
        except (ObjectNotFound, CorruptFile) as error:
            _log.debug("%s can't be compared with the log: %s", checkpoint.name, error)
        return True

    def mixed(self, state: LastRecords, stray: ListedCheckpoint) -> StorageBehind:
        """Return the error for a checkpoint that is not of the log with `state`."""
        number = stray.number
        return StorageBehind(
            f"{self._uri}/{stray.name}",
            f"two histories of this index are mixed here, as after a sync without deletes: this checkpoint and that of "
            f"record {state.number} have different digests of record {number}. Entries of one history may be "
            f"missing. Restore one whole history, or use `tiered-index copy` to copy the newest to empty storage. If "
            f"`tiered-index verify` reports only checkpoints, delete these, or run `verify --deep --repair --yes`",
            expected=state.digest_at(number) or None,
            found=stray.digest,
        )
