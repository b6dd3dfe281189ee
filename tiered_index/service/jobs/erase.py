"""Erasing: a log record states tombstones, rewriting removes the bytes of hidden entries, and a certificate reports it.

After the record no lookup shows the hidden entries. The record removes files and tables that have only hidden entries.
With `now`, other objects are merged without them, into tables of the same windows, and objects that records removed
`grace_s` ago are deleted. The certificate has the result of a scan of the stored bytes. You may repeat it: it continues
where it was interrupted. It needs no epoch, like a merge. Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tiered_index.base.clock import Clock
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.hashing import code_units, hash_batch
from tiered_index.format.names import DATA_PREFIX, LINKED, SEGMENTS_PREFIX, linked_store, topic_of_store
from tiered_index.format.segments.segment import LinkedSegment
from tiered_index.service.jobs.erase_find import FindHidden, Found, ScannedObject, find_hidden
from tiered_index.service.jobs.expiry import groups
from tiered_index.service.jobs.merge_run import rewrite_objects
from tiered_index.service.jobs.orphans import UNNAMED_S, sweep, unnamed
from tiered_index.service.jobs.rewriting.job import Rewrite, Workers, in_threads
from tiered_index.service.jobs.segments.erase_segments import FindMessages, erase_messages
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.records import LogRecord, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.log.tombstones import MOST_TOMBSTONES, Tombstone, Tombstones
from tiered_index.service.log.topic_keys import added_end
from tiered_index.service.read.answers.rows import check_integer, check_key, check_topic
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.base import Storage
from tiered_index.storage.probe import probe_put_if_absent
from tiered_index.types import no_progress

GRACE_S = 3600.0
"""Default time to keep the bytes of removed objects, for running exports and jobs."""
_LISTED = DATA_PREFIX, SEGMENTS_PREFIX
_QUEUES = -(2**31), 2**31 - 1
_MOMENTS_MS = -MAX_TIMESTAMP_MS, MAX_TIMESTAMP_MS + 1

Status = Literal["planned", "hidden", "erased", "pending", "remains"]
"""The status of an erasure:

- ``planned``: a dry run.
- ``hidden``: no lookup shows the entries, and merges remove their bytes. Archived messages are unchanged.
- ``erased``: the scan found no bytes of them.
- ``pending``: objects wait for the grace to end, or uploads of others for their outcome.
- ``remains``: bytes are left.
"""
MakeFind = Callable[[int, bool], FindMessages]
"""Takes a time (epoch milliseconds) and whether the index has fingerprints. Returns a function that finds the messages
of a request that were stored before the time.
"""
Progress = Callable[[str, int, int], None]
"""Called with a word for the work, the number of finished steps, and the number of all steps."""


@dataclass(frozen=True, slots=True)
class EraseRequest:
    """A request to erase entries of `topic`: of `keys`, of a queue, or all.

    It covers entries before `before_ms` (epoch milliseconds, rounded up to a whole second; None: up to the present
    second, inclusive). Raises `InvalidArgument` for a request that no record can state.
    """

    topic: str
    keys: tuple[str, ...] = ()
    queue_id: int | None = None
    before_ms: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "topic", check_topic(self.topic))
        object.__setattr__(self, "keys", tuple(dict.fromkeys(map(check_key, self.keys))))
        if self.keys and self.queue_id is not None:
            raise InvalidArgument("erase keys or a queue of a topic, not both at once")
        # a record is permanent: one with a number that its check refuses would make the index unreadable
        for name, least, most in (("queue_id", *_QUEUES), ("before_ms", *_MOMENTS_MS)):
            if (value := getattr(self, name)) is not None:
                if not least <= (number := check_integer(name, value)) <= most:
                    raise InvalidArgument(f"{name} {number} is outside {least}..{most}")
                object.__setattr__(self, name, number)

    @classmethod
    def of(
        cls, topic: str, keys: str | Sequence[str] | None, queue_id: int | None, before_ms: int | None
    ) -> EraseRequest:
        """Return the request of a call. `keys` None: all keys. Raises `InvalidArgument` for an empty list."""
        try:
            key_list = (keys,) if isinstance(keys, str) else tuple(keys or ())
        except TypeError as error:
            raise InvalidArgument(f"keys must be text or a sequence of texts, not {keys!r:.80}") from error
        if keys is not None and not key_list:
            raise InvalidArgument("keys are empty: leave them out to erase all of the topic")
        return cls(topic, key_list, queue_id, before_ms)

    def tombstones(self, now_ms: int, *, keyed: bool) -> tuple[Tombstone, ...]:
        """Return the tombstones of the request."""
        before_ms = now_ms // 1000 * 1000 + 1000 if self.before_ms is None else self.before_ms
        keys: Sequence[str | None] = self.keys or (None,)
        return tuple(
            [Tombstone.of(self.topic, before_ms, key=key, queue_id=self.queue_id, keyed=keyed) for key in keys]
        )

    def collisions(self, keys: Any, sought: npt.NDArray[np.bool_], *, keyed: bool) -> int:
        """Return the number of `keys` that are not `sought` but are hidden by the tombstones of the sought ones."""
        hashes, prints = hash_batch([self.topic], np.zeros(len(sought), np.int64), code_units(keys))
        alike = np.zeros(len(sought), np.bool_)
        for stone in self.tombstones(0, keyed=keyed):
            mine = np.isin(hashes, stone.hashes)
            alike |= mine if stone.fingerprint is None else mine & (prints == stone.fingerprint)
        return int((alike & ~sought).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """The certificate of an erasure, or its plan: counts of removed entries and objects, and the remaining objects.

    - `request` is the request, `tombstones` are those that hide its entries. `by_hash_alone`: the index has no
      fingerprints, so the hash alone identifies keys.
    - `status` is ``planned``, ``hidden``, ``pending``, ``remains`` or ``erased``.
    - `matched` counts the entries and archived messages of the request. `in_force`: the log stated the same erasure
      before, so it may match nothing. `unmatched_keys` are keys of the request that neither an earlier erasure nor a
      stored entry before the time has.
    - `objects` held `entries` entries of the request. Of these `removed` are no longer named by a record, and
      `entries_removed` entries are gone.
    - `deleted` objects that no record names were deleted, of `deleted_bytes` bytes.
    - `segments_read` and `segments_rewritten` count archived segments; `messages_erased` messages in them were
      overwritten or left out. `segments_remaining` names segments that may still have messages of the request, and
      `segment_problems` tells why segments could not be read or rewritten. `collisions` counts entries of other keys in
      these segments that the tombstones hide, too, because the hashes are equal (None: no segment was read, or the
      request has no key). `linked_remaining` names linked files that have, or may have, rows of the request: the
      index never changes them.
    - `log_numbers` are the records that state the erasure and remove objects. `log_number` is the log's last record.
    - `scanned_objects`, `scanned_entries` and `scanned_bytes` count the scan at the end. `remaining` are objects that
      still hold entries or can't be read.
    - `pending` are bytes that the index does not use: removed objects, unfinished uploads.
    - `unchecked` names places that the scan can't see. `to_do` names the next steps.
    - `unknown_topics` has the topic if no stored file had it; `known_topics` are the topics that files had.
    """

    request: EraseRequest
    tombstones: tuple[Tombstone, ...]
    status: Status
    objects: tuple[StoredObject, ...] = ()
    entries: int = 0
    by_hash_alone: bool = False
    collisions: int | None = None
    removed: tuple[str, ...] = ()
    entries_removed: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    segments_read: int = 0
    segments_rewritten: int = 0
    messages_erased: int = 0
    segments_remaining: tuple[str, ...] = ()
    linked_remaining: tuple[str, ...] = ()
    segment_problems: tuple[str, ...] = ()
    log_numbers: tuple[int, ...] = ()
    log_number: int = 0
    scanned_objects: int = 0
    scanned_entries: int = 0
    scanned_bytes: int = 0
    remaining: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    to_do: tuple[str, ...] = field(default=())
    unknown_topics: tuple[str, ...] = ()
    known_topics: frozenset[str] = frozenset()
    in_force: bool = False
    unmatched_keys: tuple[str, ...] = ()

    @property
    def matched(self) -> int:
        """Entries and archived messages of the request that were found."""
        return self.entries + self.messages_erased

    @property
    def matches_all(self) -> bool:
        """Whether something was found of the request and of each key, or an earlier erasure had the rest."""
        return bool(self.matched or self.in_force) and not (self.entries and self.unmatched_keys)

    @property
    def size_bytes(self) -> int:
        """Bytes of the objects."""
        return sum(stored.size_bytes for stored in self.objects)

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as a JSON-ready dict, as `--json` prints it."""
        return {
            "matched": self.matched,
            "status": self.status,
            "asked": asdict(self.request),
            "tombstones": [stone.to_json() for stone in self.tombstones],
            "objects": [{"object": s.name, "entries": s.count, "bytes": s.size_bytes} for s in self.objects],
            "entries": self.entries,
            "bytes": self.size_bytes,
            "by_hash_alone": self.by_hash_alone,
            "unknown_topics": list(self.unknown_topics),
            "in_force": self.in_force,
            "unmatched_keys": list(self.unmatched_keys),
            "collisions": self.collisions,
            "objects_removed": list(self.removed),
            "entries_removed": self.entries_removed,
            "deleted": {"objects": self.deleted, "bytes": self.deleted_bytes},
            "segments": {
                "read": self.segments_read,
                "rewritten": self.segments_rewritten,
                "messages_erased": self.messages_erased,
                "remaining": list(self.segments_remaining),
                "linked_remaining": list(self.linked_remaining),
            },
            "log_numbers": list(self.log_numbers),
            "log_number": self.log_number,
            "scan": {
                "objects": self.scanned_objects,
                "entries": self.scanned_entries,
                "bytes": self.scanned_bytes,
                "remaining": list(self.remaining),
            },
            "pending": list(self.pending),
            "unchecked": list(self.unchecked),
            "to_do": list(self.to_do),
        }


def erase(
    storage: Storage,
    log: StorageLog,
    request: EraseRequest,
    clock: Clock,
    *,
    yes: bool,
    now: bool = False,
    grace_s: float = GRACE_S,
    threads: int = 2,
    messages: MakeFind | None = None,
    find: FindHidden = find_hidden,
    workers: Workers[Rewrite] | None = None,
    shard_bytes: int = 1 << 30,
    progress: Progress = no_progress,
) -> Erasure:
    """Erase as `tiered_index.erase` does, from an index whose `log` is read.

    `messages` finds messages in archived segments; None: segments are not changed. `find` and `workers` may read
    objects and segments in other processes; `threads` segments are rewritten at once. `shard_bytes`: see `merge`.
    """
    check_grace(grace_s)
    check_shard_bytes(shard_bytes)
    if threads < 1:
        raise InvalidArgument(f"threads must be at least 1, not {threads!r}")
    if yes:
        # without put-if-absent, a record of a writer and this one could get the same number
        probe_put_if_absent(storage)
    erasing = _Erasing(storage, log, request, clock.now_ms(), find, progress)
    erasing.find_entries()
    if not yes:
        return erasing.planned()
    _record(log, Expired(tombstones=erasing.stones), erasing.scanned)
    if now:
        rewrite_objects(
            storage,
            log,
            clock,
            # again and again, because a job that began before the tombstones may publish hidden entries meanwhile
            erasing.hidden_objects,
            threads=threads,
            workers=workers,
            shard_bytes=shard_bytes,
            progress=partial(progress, "entries rewritten"),
        )
        if messages is not None:
            # with the time of the tombstones: messages that arrive meanwhile are neither hidden nor overwritten
            sought = messages(erasing.stones[0].before_ms, erasing.schema.keyed)
            of_segments = workers or in_threads(storage, clock, threads)
            erasing.fields |= erase_messages(log, sought, of_segments, threads, progress, keys=bool(request.keys))
        gone = sweep(storage, log, grace_s)
        erasing.fields |= {"deleted": len(gone.objects), "deleted_bytes": gone.size_bytes}
    return erasing.certificate(now=now, grace_s=grace_s)


@dataclass(eq=False)
class _Erasing:
    """One erasure: the objects that were scanned, and the `fields` of its certificate so far."""

    storage: Storage
    log: StorageLog
    request: EraseRequest
    now_ms: int
    find: FindHidden
    progress: Progress
    scanned: dict[str, ScannedObject] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begun = self.log.refresh()
        assert self._begun.genesis is not None
        self.schema = self._begun.genesis.layout.schema
        self.stones = self.request.tombstones(self.now_ms, keyed=self.schema.keyed)
        self._hiding = Tombstones(self.stones)
        self.fields: dict[str, Any] = {"request": self.request, "tombstones": self.stones}

    def _found_in(self, objects: Iterable[StoredObject], words: str) -> Found:
        return self.find(self.storage, objects, self._hiding, self.schema, partial(self.progress, words))

    def hidden_objects(self, state: LogState) -> set[str]:
        """Scan the objects of a state that were not scanned yet. Return the names of those with hidden entries."""
        fresh = [stored for stored in state.objects.values() if stored.name not in self.scanned]
        self.scanned.update(self._found_in(fresh, "objects read"))
        return {name for name, scan in self.scanned.items() if scan.hidden}

    def find_entries(self) -> None:
        """Scan all objects, and note what the request matches."""
        begun, request = self._begun, self.request
        names = self.hidden_objects(begun)
        hit = tuple([stored for name, stored in begun.objects.items() if name in names])
        self.fields |= {
            "objects": hit,
            "entries": sum(self.scanned[stored.name].hidden for stored in hit),
            "by_hash_alone": bool(request.keys) and not self.schema.keyed,
        }
        if not any(scan.may_have_topic for scan in self.scanned.values()):
            self.fields["unknown_topics"] = (request.topic,)
            self.fields["known_topics"] = frozenset().union(*(scan.topics for scan in self.scanned.values()))
        self._note_unmatched()

    def _note_unmatched(self) -> None:
        """Note the request, or keys of it, that no stored entry matches."""
        state, request, held = self._begun, self.request, self.scanned.values()
        are_in_force = [_is_in_force(state, stone) for stone in self._hiding]
        self.fields["in_force"] = all(are_in_force)
        having = {
            text
            for text, stone, is_in_force in zip(request.keys, self._hiding, are_in_force, strict=False)
            if is_in_force or any((number, stone.fingerprint) in scan.keys for scan in held for number in stone.hashes)
        }
        lacking = tuple([key for key in request.keys if key not in having])
        if lacking or not (all(are_in_force) or _hidden(self.scanned)):
            self.fields["unmatched_keys"] = lacking

    def planned(self) -> Erasure:
        """Return the plan. Raises `InvalidArgument` if the index would have too many tombstones."""
        _check_bound(self._begun.expired, Expired(tombstones=self.stones))
        return Erasure(status="planned", log_number=self._begun.number, **self.fields)

    def certificate(self, *, now: bool, grace_s: float) -> Erasure:
        """Read all again, because the certificate is about the present bytes, and return it."""
        storage, begun, scanned, fields = self.storage, self._begun, self.scanned, self.fields
        before_ms = storage.now_ms() - round(max(grace_s, UNNAMED_S) * 1000)
        half_made = storage.purge(before_ms)
        unused = {info.name for info in unnamed(self.log, (own_objects(storage, prefix) for prefix in _LISTED))}
        # of after the listing, so that objects that were published meanwhile are scanned
        state = self.log.state
        left = self._found_in(state.objects.values(), "objects read again")
        names = {name for name, scan in scanned.items() if scan.hidden and name not in state.objects}
        records = {number: self.log.record(number) for number in range(begun.number + 1, state.number + 1)}
        # entries that a job has moved meanwhile were counted in their old object
        moved = {stored.name for record in records.values() if record.remove for stored in record.add}
        fields |= {
            "removed": tuple(sorted(names)),
            "entries_removed": max(0, _hidden({**left, **scanned}, moved) - _hidden(left)),
            "log_numbers": tuple(
                [n for n, record in records.items() if record.kind == "erase" or not names.isdisjoint(record.remove)]
            ),
            "log_number": state.number,
            "scanned_objects": len(left),
            "scanned_entries": sum(scan.looked_at for scan in left.values()),
            "scanned_bytes": sum(scan.read_bytes for scan in left.values()),
            "remaining": tuple(sorted(name for name, scan in left.items() if scan.hidden or scan.problem)),
            # twice, because a short write is finished at the second look
            "pending": tuple(sorted(unused.union(set(half_made).intersection(storage.purge(before_ms))))),
            "unchecked": _unchecked(storage, state, left, fields),
        }
        fields["remaining"] += fields.get("segments_remaining", ())
        segments = Segments(state, storage)
        fields["linked_remaining"] = _linked(segments, self.request, self.stones, begun.expired, scanned)
        # archived messages are searched only with `now`
        is_left = bool(fields["remaining"] or fields["pending"] or (segments and not now))
        left_now: Status = "remains" if fields["remaining"] else "pending"
        status: Status = "erased" if not is_left else left_now if now else "hidden"
        return Erasure(status=status, to_do=_to_do(fields, now=now, grace_s=grace_s), **fields)


def check_grace(grace_s: float) -> None:
    """Raise `InvalidArgument` for a negative grace."""
    if not grace_s >= 0:
        raise InvalidArgument(f"grace_s must not be negative, not {grace_s!r}")


def check_shard_bytes(shard_bytes: int) -> None:
    """Raise `InvalidArgument` for shards that are too small, as a merge does."""
    if shard_bytes < 1 << 20:
        raise InvalidArgument(f"shard_bytes must be at least {1 << 20}, not {shard_bytes!r}")


def _is_in_force(state: LogState, stone: Tombstone) -> bool:
    """Return whether the log states an erasure of the same entries already, before whatever time."""
    return any(known.covers(replace(stone, before_ms=_MOMENTS_MS[0] - 1)) for known in state.expired.tombstones)


def _check_bound(expired: Expired, gone: Expired) -> Expired:
    joined = expired.joined(gone)
    if (count := len(joined.tombstones)) > MOST_TOMBSTONES and count > len(expired.tombstones):
        raise InvalidArgument(
            f"the index would have {count:,} tombstones; the limit is {MOST_TOMBSTONES:,}. Erase a whole topic before "
            f"some time, which replaces the tombstones of its keys, or expire older entries"
        )
    return joined


def _record(log: StorageLog, gone: Expired, scanned: Found) -> LogState:
    """Append the record that states `gone` and removes objects that have nothing else."""

    def make(state: LogState) -> LogRecord | None:
        joined = _check_bound(state.expired, gone)
        names = names_of_nothing_else(state, scanned)
        if joined is state.expired and not names:
            return None
        return LogRecord(0, "erase", 0, "", 0, remove=tuple(names), expired=gone)

    return log.append("the tombstones", None, make)


def take_over(storage: Storage, expired: Expired, clock: Clock, *, checks: bool = True) -> LogState:
    """Record the expired and erased entries of another index, before this index gets its entries.

    `checks` as in `StorageLog.open`. Raises the errors of the storage.
    """
    log = StorageLog(storage, clock)
    log.open(checks=checks)
    return _record(log, expired, {})


def names_of_nothing_else(state: LogState, scanned: Found) -> list[str]:
    """Return the objects of files and tables whose entries are all hidden, by `scanned`. A table counts as a whole."""

    def is_hidden(stored: StoredObject) -> bool:
        return stored.name in scanned and scanned[stored.name].hidden == stored.count

    return [stored.name for group in groups(state) if all(map(is_hidden, group)) for stored in group]


def _linked(
    segments: Segments, request: EraseRequest, stones: Sequence[Tombstone], before: Expired, scanned: Found
) -> tuple[str, ...]:
    """Return the URIs of linked files that still have, or may have, rows of a request.

    Rows of keys are known by their entries in `scanned`. A file may have others where entries are gone or not uploaded
    yet. Rows of a topic or a queue are known by the times of the files. `before` are the earlier erasures.
    """
    state, topic, queue_id = segments.state, request.topic, request.queue_id
    places = sorted(frozenset().union(*(held.places for held in scanned.values()))) if request.keys else []
    at = [segments.segment(linked_store(topic, queue), offset) for queue, offset in places]
    uris = dict.fromkeys(linked.uri for linked in at if isinstance(linked, LinkedSegment))
    unread = any(held.problem is not None for held in scanned.values())
    lost = [gap for gap in state.lacking.values() if gap.lacks_entries]
    for store in segments.stores:
        if not store.startswith(LINKED) or topic_of_store(store) not in (topic, None):
            continue
        queue = store.rpartition("/")[2]
        # the places of entries of other stores are not known
        is_own = queue.isdecimal() and linked_store(topic, int(queue)) == store
        if queue_id is not None and is_own and queue != str(queue_id):
            continue
        gone_ms = max(
            [state.expired.before_ms(topic), *(_gone_ms(earlier, stones, queue) for earlier in before.tombstones)]
        )
        is_known = bool(request.keys) and is_own and not unread
        reached, added = state.positions.get(store, 0), added_end(state.positions, store)
        if is_known and not gone_ms and not lost and segments.end(store) <= reached:
            continue
        for linked in segments.of_log(store):
            always = -MAX_TIMESTAMP_MS, MAX_TIMESTAMP_MS
            begin_ms, end_ms = always if linked.start < added else linked.times or always
            if not isinstance(linked, LinkedSegment) or begin_ms >= stones[0].before_ms:
                continue
            seconds = begin_ms // 1000, min(end_ms, stones[0].before_ms - 1) // 1000
            is_gone = (gone_ms and begin_ms < gone_ms) or any(known.concerns(*seconds, topic=topic) for known in lost)
            if is_gone or not is_known or linked.end > reached:
                uris[linked.uri] = None
    return tuple(uris)


def _gone_ms(earlier: Tombstone, stones: Sequence[Tombstone], queue: str) -> int:
    """Return the time before which an earlier tombstone may have removed entries of a queue that `stones` hide."""
    if earlier.topic != stones[0].topic or str(earlier.queue_id) not in ("None", queue):
        return 0
    return earlier.before_ms if not earlier.hashes or any(earlier.hashes == stone.hashes for stone in stones) else 0


def _hidden(scanned: Found, without: Container[str] = ()) -> int:
    return sum(held.hidden for name, held in scanned.items() if name not in without)


def _unchecked(storage: Storage, state: LogState, left: Found, fields: dict[str, Any]) -> tuple[str, ...]:
    said = [held.problem for held in left.values() if held.problem is not None]
    said.append("caches of readers (`cache_dir`): they drop removed objects when the reader next reads the log")
    if storage.uri.startswith("s3:"):
        said.append("a bucket with versioning: it keeps deleted objects as noncurrent versions")
    if state.epoch:
        said.append(
            "a writer's root: it hides entries that are not uploaded yet, and a merge after their upload removes them; "
            "the writer deletes copies of deleted objects, and their cache entries, when it next reads the log"
        )
    said += fields.get("segment_problems", ())
    segments = len(Segments(state, storage))
    if segments and not fields.get("segments_read"):
        said.append(f"{segments} archived segments: their messages are erased only with --now")
    elif segments:
        said.append("the source's own files: only the source can delete them")
    if given_up := sum(lost.range is None for lost in state.lost.values()):
        said.append(f"{given_up} lost objects that a record gave up")
    if unlisted := {gap.range.catalog for gap in state.lost.values() if gap.range is not None and gap.is_of_catalog}:
        said.append(f"segments and linked files that only {len(unlisted)} lost catalogs listed, which were given up")
    return tuple(said)


def _to_do(fields: dict[str, Any], *, now: bool, grace_s: float) -> tuple[str, ...]:
    steps = []
    if fields["linked_remaining"]:
        steps.append(
            f"{len(fields['linked_remaining'])} linked files have, or may have, erased rows, the first "
            f"{fields['linked_remaining'][0]}: the index never changes them; only their owner can"
        )
    if fields["remaining"]:
        problem = f"{len(fields['remaining'])} objects still have hidden entries, or can't be read"
        steps.append(
            f"{problem}: run it again; `verify` lists damaged ones" if now else f"{problem}: merge, or use --now"
        )
    if fields["pending"]:
        steps.append(
            f"{len(fields['pending'])} objects or uploads that the index does not use are still stored: run the "
            f"command with --now again after the grace ({grace_s:.0f} s), or with --grace 0 if no export or job is "
            f"running. An unfinished upload is deleted after a day"
        )
    return tuple(steps)
