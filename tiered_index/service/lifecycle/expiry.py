"""Expiry: what a retention rule says of the log's state (`plan_expiry`, pure), and doing it.

One record states what has expired and removes the objects that hold nothing else; from then on no reader shows any of
it. The bytes go after `grace_s`, as orphans, so that readers at work finish. Of objects that hold more than what has
expired the rest stays: the next merge leaves the expired entries out. Repeating it is harmless: the plan is made again
at the state that the record follows. Threads: any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from tiered_index.clock import Clock, SystemClock
from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.metadata import NamedStats
from tiered_index.retention import Expired, Horizon, Retention
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.lifecycle.orphans import Orphans, delete_orphans, find_orphans
from tiered_index.service.lifecycle.publication import MAX_AGE_S
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, LogRecord, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage, StorageOptions
from tiered_index.storage.opening import open_storage, probe_put_if_absent

_READERS = 8
_UNNAMED_S = MAX_AGE_S + 3600.0

Stats = Mapping[str, NamedStats]
"""What objects, by name, hold of each topic, as far as it was looked up."""


@dataclass(frozen=True, slots=True)
class ExpiryPlan:
    """The plan of an expiry: the log record, and the objects that go.

    `objects` are files and window tables, `segments` archived segments. `mixed` objects have, or may have, expired
    entries beside others; at least `mixed_entries` of these have expired. `unknown_topics` are patterns of the rule
    that match no topic of the stored objects (`known_topics`).
    """

    expired: Expired
    objects: tuple[StoredObject, ...]
    segments: tuple[ArchivedSegment, ...]
    mixed: tuple[StoredObject, ...] = ()
    mixed_entries: int = 0
    unknown_topics: tuple[str, ...] = ()
    known_topics: frozenset[str] = frozenset()

    @property
    def entries(self) -> int:
        """Entries of the objects."""
        return sum(stored.count for stored in self.objects)

    @property
    def size_bytes(self) -> int:
        """Bytes of objects and segments."""
        return sum(o.size_bytes for o in self.objects) + sum(segment.object_bytes for segment in self.segments)


def plan_expiry(rule: Retention, state: LogState, now_ms: int, stats: Stats | None = None) -> ExpiryPlan:
    """Return what has expired by `rule`, and by what the log says already. Without `stats` of an object its entries are
    taken to be of any topic.
    """
    expired = state.expired.joined(Expired((rule.horizon(now_ms),), _expired_segments(rule, state, now_ms)))
    kept = [group for group in groups(state) if not _is_whole(group, expired, stats or {})]
    if rule.max_bytes is not None and (before_ms := _bytes_before_ms(kept, rule.max_bytes, now_ms)):
        expired = expired.joined(Expired((Horizon(before_ms),)))
    objects: list[StoredObject] = []
    mixed: list[StoredObject] = []
    for group in groups(state):
        if _is_whole(group, expired, stats or {}):
            objects += group
        else:
            mixed += [stored for stored in group if may_be_mixed(stored, expired, stats or {})]
    segments = [s for s in state.archive.values() if s.end <= expired.segments.get(s.store, 0)]
    left = sum(_expired_entries(stats[stored.name], expired) for stored in mixed if stats and stored.name in stats)
    return ExpiryPlan(expired, tuple(objects), tuple(segments), tuple(mixed), left)


def may_be_mixed(stored: StoredObject, expired: Expired, stats: Stats) -> bool:
    """Return whether an object may hold entries that have expired."""
    if stored.second_min * 1000 >= expired.latest_ms:
        return False
    known = stats.get(stored.name)
    return known is None or any(one is None or one.second_min * 1000 < expired.before_ms(topic) for topic, one in known)


def groups(state: LogState) -> Iterator[list[StoredObject]]:
    """Yield what goes at once: each file, and the shards of each window table."""
    for stored in state.files.values():
        yield [stored]
    yield from state.tables.values()


def _is_whole(group: list[StoredObject], expired: Expired, stats: Stats) -> bool:
    """Return whether nothing but what has expired is in a file or a table."""

    def is_whole(stored: StoredObject) -> bool:
        if expired.is_over(stored.second_max):
            return True
        known = stats.get(stored.name)
        return bool(known) and all(
            one is not None and one.second_max * 1000 < expired.before_ms(topic) for topic, one in known or ()
        )

    return all(map(is_whole, group))


def _expired_entries(stats: NamedStats, expired: Expired) -> int:
    """Return how many entries have certainly expired: those of topics whose newest entry has."""
    return sum(
        one.entries for topic, one in stats if one is not None and one.second_max * 1000 < expired.before_ms(topic)
    )


def _bytes_before_ms(groups: list[list[StoredObject]], max_bytes: int, now_ms: int) -> int:
    """Return before when entries expire so that what is left has `max_bytes` at most; 0: it has. Never later than now:
    an entry of a clock that is years fast would take with it what is yet to be put.
    """
    total = sum(stored.size_bytes for group in groups for stored in group)
    before_ms = 0
    for group in sorted(groups, key=lambda group: max(stored.second_max for stored in group)):
        if total <= max_bytes:
            break
        total -= sum(stored.size_bytes for stored in group)
        before_ms = (max(stored.second_max for stored in group) + 1) * 1000
    return max(0, min(before_ms, now_ms // 1000 * 1000))


def _expired_segments(rule: Retention, state: LogState, now_ms: int) -> dict[str, int]:
    """Return up to where the segments of each store have expired, what was never archived before it included: that is
    older still. A segment's messages are older than its upload.
    """
    if rule.segments_age_s is None:
        return {}
    before_ms = now_ms - rule.segments_age_s * 1000
    ends: dict[str, int] = {}
    for store in state.stores:
        for segment in state.segments_of(store):
            if segment.published_ms >= before_ms:
                break
            ends[store] = segment.end
    return ends


def record_expiry(
    log: StorageLog, rule: Retention, clock: Clock, epoch: int | None = None, stats: Stats | None = None
) -> ExpiryPlan:
    """Append the record of what has expired by `rule`, if there is anything new; return what it says. `epoch` is the
    writer's, None for jobs. Raises as `StorageLog.append`.
    """
    now_ms = clock.now_ms()
    plans: list[ExpiryPlan] = []

    def make(state: LogState) -> LogRecord | None:
        plan = plan_expiry(rule, state, now_ms, stats)
        plans.append(plan)
        if not (plan.objects or plan.segments or plan.expired != state.expired):
            return None
        names = (*(stored.name for stored in plan.objects), *(segment.name for segment in plan.segments))
        return LogRecord(0, "expire", epoch or 0, "", 0, remove=names, expired=plan.expired)

    log.append("what has expired", epoch, make)
    return plans[-1]


def sweep(storage: Storage, log: StorageLog, rule: Retention, *, delete: bool) -> Orphans:
    """Find what records removed the rule's grace ago, and what none has named for that long and a day; with `delete`
    delete it: `orphans` does the same.
    """
    # a job may publish what it uploaded hours ago, however short the grace is
    found = find_orphans(storage, log, older_than_s=max(rule.grace_s, _UNNAMED_S), removed_s=rule.grace_s)
    return delete_orphans(storage, found) if delete else found


class KnownStats:
    """The entries of each topic in stored objects that a rule of topics may remove whole. One request finds them, once
    per object. One thread.
    """

    def __init__(self, cold: ColdPath) -> None:
        self._cold = cold
        self._known: dict[str, NamedStats] = {}

    def of(self, rule: Retention, state: LogState, now_ms: int) -> Stats:
        """Return what decides whether objects go by `rule`. Raises as the storage."""
        # of what goes by its age, too, lest bytes that are gone then count
        plan = plan_expiry(replace(rule, max_bytes=None), state, now_ms)
        mixed = [stored for stored in plan.mixed if stored.second_max * 1000 < plan.expired.latest_ms]
        fresh = [stored for stored in mixed if stored.name not in self._known]
        looked_up = {**self._known, **_stats(replace(plan, mixed=tuple(fresh)), self._cold)}
        # of what can't be read nothing is known; it is asked for again
        self._known = {one.name: looked_up[one.name] for one in mixed if one.name in looked_up}
        return self._known


def expire(
    storage: Storage, log: StorageLog, rule: Retention, clock: Clock, *, yes: bool, settings: ColdSettings | None = None
) -> tuple[ExpiryPlan, Orphans]:
    """Do what `expire_index` does, to an index whose `log` is read; return also the objects that the sweep found, and
    with `yes` deleted.
    """
    if yes:
        # whose put-if-absent isn't one would let a writer's record and this one have the same number
        probe_put_if_absent(storage)
    state = log.refresh()
    assert state.genesis is not None
    # of what goes by its age, too, lest bytes that are gone then count
    plan = plan_expiry(replace(rule, max_bytes=None), state, clock.now_ms())
    keyed = state.genesis.layout.schema.keyed
    with contextlib.closing(ColdPath(storage, keyed=keyed, settings=settings or ColdSettings())) as cold:
        stats = _stats(plan, cold)
        unknown, topics = _unknown_topics(rule, state, stats, cold)
    plan = record_expiry(log, rule, clock, stats=stats) if yes else plan_expiry(rule, state, clock.now_ms(), stats)
    plan = replace(plan, unknown_topics=unknown, known_topics=topics)
    return plan, sweep(storage, log, rule, delete=yes)


def _unknown_topics(
    rule: Retention, state: LogState, stats: Stats, cold: ColdPath
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the rule's patterns that match no stored topic, and the stored topics. Where none of the objects that were
    read has a match the others are read, too; one that can't be read may have any topic.
    """
    known = _names(stats)
    if not _unmatched(rule, known):
        return (), known
    others = [stored for stored in state.objects.values() if stored.name not in stats]
    looked_up = _looked_up(others, cold)
    known |= _names(looked_up)
    return _unmatched(rule, known) if len(looked_up) == len(others) else (), known


def _names(stats: Stats) -> frozenset[str]:
    return frozenset(topic for named in stats.values() for topic, _ in named)


def _unmatched(rule: Retention, topics: frozenset[str]) -> tuple[str, ...]:
    return tuple(p for p in rule.topics if p not in topics and not any(fnmatchcase(topic, p) for topic in topics))


def _stats(plan: ExpiryPlan, cold: ColdPath) -> Stats:
    """Return what objects hold of each topic, where topics decide whether they go: a request each. Of what can't be
    read nothing is known, so that it stays.
    """
    if not any(horizon.topics for horizon in plan.expired.horizons):
        return {}
    return _looked_up(plan.mixed, cold)


def _looked_up(objects: Sequence[StoredObject], cold: ColdPath) -> Stats:
    """Return what objects hold of each topic, of those that can be read: a request each."""

    def read(stored: StoredObject) -> NamedStats:
        with contextlib.suppress(CorruptFile, ObjectNotFound):
            metadata = cold.trailer(stored).metadata
            named, stats = dict(metadata.topics), metadata.stats_by_topic()
            # entries of an id without a name may be of any topic
            return stats if all(one is None or one.topic_id in named for _, one in stats) else []
        return []

    with ThreadPoolExecutor(_READERS) as pool:
        return {one.name: stats for one, stats in zip(objects, pool.map(read, objects), strict=True) if stats}


def expire_index(
    storage: str, rule: Retention, *, yes: bool = False, s3: StorageOptions | None = None, clock: Clock | None = None
) -> ExpiryPlan:
    """Expire entries of the index at a storage URI by `rule`; without `yes` only return the plan.

    With `yes` one log record states the expired times permanently and removes the objects without newer entries.
    Objects that expiry and merges removed `rule.grace_s` seconds ago are deleted. You may repeat the call, also beside
    writers, readers and merges. Raises `NotAnIndex`, `CorruptFile`, `StorageUnavailable`, `StorageMisconfigured`.
    """
    present = clock or SystemClock()
    with contextlib.closing(open_storage(storage, options=s3)) as opened:
        log = StorageLog(opened, present)
        log.open()
        return expire(opened, log, rule, present, yes=yes)[0]
