"""Expiry: plans what a retention rule expires (`plan_expiry`, pure), and records it.

One log record states the horizons and removes the objects that have only expired entries. From then on no reader shows
expired entries. The bytes are deleted after `grace_s`, as orphans, so that running readers can finish. An object that
also has other entries stays until it is rewritten without its expired entries: by the next merge, or with `now`. You
may repeat an expiry: the plan is made for the state before the record. Threads: any.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from msgspec import structs

from tiered_index.base.clock import MOST_SKEW_MS, Clock, SteadyClock, SystemClock
from tiered_index.base.retention import Horizon, Retention
from tiered_index.base.units import format_time
from tiered_index.errors import ConfigError, CorruptFile, ObjectNotFound
from tiered_index.format.metadata import NamedStats
from tiered_index.service.jobs.merge_run import rewrite_objects
from tiered_index.service.jobs.orphans import Orphans, sweep
from tiered_index.service.jobs.segments.catalogs import MOST_WAITING, merge_catalogs
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, LogRecord, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.cold_path import ColdPath, ColdSettings
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.base import Storage, StorageOptions
from tiered_index.storage.opening import open_storage
from tiered_index.storage.probe import probe_put_if_absent

_READERS = 8
# most segments that a plan lists
_LISTED = 1000

Stats = Mapping[str, NamedStats]
"""The topic stats of objects, by name. Objects that were not read are missing."""


@dataclass(frozen=True, slots=True)
class SegmentTotals:
    """The number of archived segments, the bytes of their objects, and their offsets by topic."""

    segments: int = 0
    bytes: int = 0
    offsets_by_topic: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Iterable[ArchivedSegment]) -> SegmentTotals:
        """Return the sums of segments, which are read one by one."""
        count = size_bytes = 0
        offsets: dict[str, int] = {}
        for segment in segments:
            count, size_bytes = count + 1, size_bytes + segment.object_bytes
            if segment.topic is not None:
                offsets[segment.topic] = offsets.get(segment.topic, 0) + segment.end - segment.start
        return cls(count, size_bytes, offsets)


NO_SEGMENTS = SegmentTotals()


@dataclass(frozen=True, slots=True)
class ExpiryPlan:
    """The plan of an expiry: the times before which entries expire, and the objects to delete.

    `expired` has the times. `objects` are files and window tables. `mixed` objects have, or may have, expired entries
    beside others; at least `mixed_entries` of these have expired. `segments` are archived segments that expire, at most
    the first 1,000; `segments_expired` sums all of them. `segments_kept` sums the archived segments that stay, once
    `with_sums` has added it. Of these, `segments_of_age` were uploaded before the time before which entries of their
    topic expire: of some topic, if the segment has messages of many.
    `unknown_topics` are patterns of the rule that match no topic of the stored objects (`known_topics`). With
    `now`, `rewritten` mixed objects were replaced, without `entries_removed` expired entries.
    """

    expired: Expired
    objects: tuple[StoredObject, ...]
    segments: tuple[ArchivedSegment, ...]
    mixed: tuple[StoredObject, ...] = ()
    mixed_entries: int = 0
    unknown_topics: tuple[str, ...] = ()
    known_topics: frozenset[str] = frozenset()
    segments_expired: SegmentTotals = NO_SEGMENTS
    segments_kept: SegmentTotals = NO_SEGMENTS
    segments_of_age: SegmentTotals = NO_SEGMENTS
    rewritten: int = 0
    entries_removed: int = 0

    @property
    def entries(self) -> int:
        """The number of entries of the objects."""
        return sum(stored.count for stored in self.objects)

    @property
    def size_bytes(self) -> int:
        """The bytes of objects and segments."""
        return sum(o.size_bytes for o in self.objects) + self.segments_expired.bytes


def plan_expiry(
    rule: Retention, state: LogState, now_ms: int, stats: Stats | None = None, storage: Storage | None = None
) -> ExpiryPlan:
    """Return the plan of an expiry by `rule`, in addition to horizons in the log.

    The entries of an object without `stats` may have any topic. `storage` has the catalogs of segments.
    """
    expired = state.expired.joined(
        Expired((rule.horizon(now_ms),), _expired_segments(rule, Segments(state, storage), now_ms))
    )
    remaining = [group for group in groups(state) if not _is_whole(group, expired, stats or {})]
    if rule.max_bytes is not None and (before_ms := _bytes_before_ms(remaining, rule.max_bytes, now_ms)):
        expired = expired.joined(Expired((Horizon(before_ms),)))
    objects: list[StoredObject] = []
    mixed: list[StoredObject] = []
    for group in groups(state):
        if _is_whole(group, expired, stats or {}):
            objects += group
        else:
            mixed += [stored for stored in group if may_be_mixed(stored, expired, stats or {})]
    segments = Segments(state, storage)
    # one by one: there may be a million
    sums = SegmentTotals.of(_newly_expired(segments, expired))
    first = itertools.islice(_newly_expired(segments, expired), _LISTED)
    left = sum(_expired_entries(stats[stored.name], expired) for stored in mixed if stats and stored.name in stats)
    return ExpiryPlan(expired, tuple(objects), tuple(first), tuple(mixed), left, segments_expired=sums)


def with_sums(plan: ExpiryPlan, segments: Segments) -> ExpiryPlan:
    """Return a plan with the sums of the archived segments that stay. All segments are read, one by one."""
    expired = plan.expired

    def staying() -> Iterator[ArchivedSegment]:
        return (segment for segment in segments if segment.end > expired.segments.get(segment.store, 0))

    of_age = (segment for segment in staying() if segment.published_ms < _entries_before_ms(segment, expired))
    return replace(plan, segments_kept=SegmentTotals.of(staying()), segments_of_age=SegmentTotals.of(of_age))


def _newly_expired(segments: Segments, expired: Expired) -> Iterator[ArchivedSegment]:
    """Yield the archived segments that expire now."""
    for store in segments.stores:
        before = expired.segments.get(store, 0)
        if before > segments.state.expired.segments.get(store, 0):
            yield from itertools.takewhile(lambda segment: segment.end <= before, segments.of(store))  # noqa: B023 - read at once


def _entries_before_ms(segment: ArchivedSegment, expired: Expired) -> int:
    """Return the time before which entries of a segment's messages have expired: of some topic, if it has many."""
    return expired.latest_ms if segment.topic is None else expired.before_ms(segment.topic)


def may_be_mixed(stored: StoredObject, expired: Expired, stats: Stats) -> bool:
    """Return whether an object may have expired entries."""
    if stored.second_min * 1000 >= expired.latest_ms:
        return False
    known = stats.get(stored.name)
    return known is None or any(
        of_topic is None or of_topic.second_min * 1000 < expired.before_ms(topic) for topic, of_topic in known
    )


def groups(state: LogState) -> Iterator[list[StoredObject]]:
    """Yield the objects that are removed together: each file, and the shards of each table."""
    for stored in state.files.values():
        yield [stored]
    yield from state.tables.values()


def _is_whole(group: list[StoredObject], expired: Expired, stats: Stats) -> bool:
    """Return whether all entries of a file or a table have expired."""

    def is_whole(stored: StoredObject) -> bool:
        if expired.is_over(stored.second_max):
            return True
        known = stats.get(stored.name)
        return bool(known) and all(
            of_topic is not None and of_topic.second_max * 1000 < expired.before_ms(topic)
            for topic, of_topic in known or ()
        )

    return all(map(is_whole, group))


def _expired_entries(stats: NamedStats, expired: Expired) -> int:
    """Return the number of entries that have certainly expired: those of topics whose newest entry has."""
    return sum(of_topic.entries for topic, of_topic in stats if of_topic.second_max * 1000 < expired.before_ms(topic))


def _bytes_before_ms(groups: list[list[StoredObject]], max_bytes: int, now_ms: int) -> int:
    """Return the time before which entries must expire so that `max_bytes` are left; 0: nothing must.

    It is never in the future: otherwise an entry with a time in the future would expire entries that are yet to be put.
    """
    total = sum(stored.size_bytes for group in groups for stored in group)
    before_ms = 0
    for group in sorted(groups, key=lambda group: max(stored.second_max for stored in group)):
        if total <= max_bytes:
            break
        total -= sum(stored.size_bytes for stored in group)
        before_ms = (max(stored.second_max for stored in group) + 1) * 1000
    return max(0, min(before_ms, now_ms // 1000 * 1000))


def _expired_segments(rule: Retention, segments: Segments, now_ms: int) -> dict[str, int]:
    """Return the offset up to which the segments of each store have expired, by the time of their upload.

    Bytes before it that were never archived count as expired, too, because they are older. A segment with messages that
    are newer than its upload was uploaded by a host whose clock was behind: then its newest message counts.
    """
    ends: dict[str, int] = {}
    for store in segments.stores:
        age_s, first_ms = rule.age_of_segments_s(segments.topic_of(store)), segments.first_ms(store)
        if age_s is None or first_ms is None or first_ms >= now_ms - age_s * 1000:
            continue
        for segment in segments.of_log(store):
            newest_ms = 0 if segment.times is None or segment.times[1] > now_ms else segment.times[1]
            if max(segment.published_ms, newest_ms) >= now_ms - age_s * 1000:
                break
            ends[store] = segment.end
    return ends


def agreed_now_ms(storage: Storage, clock: Clock) -> int:
    """Return the storage's time, in epoch milliseconds: the present time of an expiry.

    Raises `ConfigError` if this machine's clock differs from it by more than a minute, and the errors of the storage.
    """
    wall_ms = clock.wall_ms() if isinstance(clock, SteadyClock) else clock.now_ms()
    now_ms = storage.now_ms()
    if abs(now_ms - wall_ms) > MOST_SKEW_MS:
        raise ConfigError(
            f"nothing expires while clocks differ: this machine's says {format_time(wall_ms)}, that of {storage.uri} "
            f"{format_time(now_ms)}: set the one that is wrong"
        )
    return now_ms


def record_expiry(
    log: StorageLog, rule: Retention, now_ms: int, epoch: int | None = None, stats: Stats | None = None
) -> ExpiryPlan:
    """Append the record of an expiry by `rule` at the time `now_ms`, if it changes anything. Return its plan.

    `epoch` is the writer's, None for jobs. Raises the errors of `StorageLog.append`.
    """
    plans: list[ExpiryPlan] = []

    def make(state: LogState) -> LogRecord | None:
        plan = plan_expiry(rule, state, now_ms, stats, log.storage)
        plans.append(plan)
        if not (plan.objects or plan.segments or plan.expired != state.expired):
            return None
        names = tuple(stored.name for stored in plan.objects)
        return LogRecord(0, "expire", epoch or 0, "", 0, remove=names, expired=plan.expired, expiry_ms=now_ms)

    state = log.append("the expired times", epoch, make)
    if state.catalogs:
        # without the segments that expired: from then on their objects may be deleted
        merge_catalogs(log, epoch, least=MOST_WAITING)
    return plans[-1]


class KnownStats:
    """Caches the topic stats of objects that a rule with topics may remove: one request per object. One thread.

    `all_mixed`: those of all objects that may have expired entries.
    """

    def __init__(self, cold: ColdPath, *, all_mixed: bool = False) -> None:
        self._cold, self._all_mixed = cold, all_mixed
        self._known: dict[str, NamedStats] = {}

    def of(self, rule: Retention, state: LogState, now_ms: int, beat: Callable[[], object] = lambda: None) -> Stats:
        """Return the stats that decide which objects `rule` removes. Raises the errors of the storage.

        `beat` is called again and again meanwhile.
        """
        # by ages alone first, so that objects that ages remove do not count for `max_bytes`
        plan = plan_expiry(structs.replace(rule, max_bytes=None), state, now_ms, storage=self._cold.storage)
        mixed = plan.mixed if _has_topics(plan.expired) else ()
        if not self._all_mixed:
            mixed = tuple([stored for stored in mixed if stored.second_max * 1000 < plan.expired.latest_ms])
        fresh = [stored for stored in mixed if stored.name not in self._known]
        looked_up = {**self._known, **_looked_up(fresh, self._cold, beat)}
        # an object that can't be read is read again next time
        self._known = {stored.name: looked_up[stored.name] for stored in mixed if stored.name in looked_up}
        return self._known


def expire(
    storage: Storage,
    log: StorageLog,
    rule: Retention,
    clock: Clock,
    *,
    yes: bool,
    now: bool = False,
    settings: ColdSettings | None = None,
    now_ms: int | None = None,
) -> tuple[ExpiryPlan, Orphans]:
    """Expire as `expire_index` does, in an index whose `log` is read. Return the plan, and the objects of the sweep.

    `yes`: record the expiry and delete the objects. `now`: also rewrite mixed objects. `now_ms` replaces the present
    time in tests.
    """
    if yes:
        # without put-if-absent, a record of a writer and this one could get the same number
        probe_put_if_absent(storage)
    state = log.refresh()
    now_ms = agreed_now_ms(storage, clock) if now_ms is None else now_ms
    assert state.genesis is not None
    keyed = state.genesis.layout.schema.keyed
    with contextlib.closing(ColdPath(storage, keyed=keyed, settings=settings or ColdSettings())) as cold:
        stats = KnownStats(cold, all_mixed=True).of(rule, state, now_ms)
        unknown, topics = _unknown_topics(rule, state, stats, cold)
    plan = record_expiry(log, rule, now_ms, stats=stats) if yes else plan_expiry(rule, state, now_ms, stats, storage)
    plan = replace(plan, unknown_topics=unknown, known_topics=topics)
    if yes and now:
        # an object whose topics are unknown may have no expired entry
        certain = {stored.name for stored in plan.mixed if stored.name in stats or not _has_topics(plan.expired)}
        done = rewrite_objects(storage, log, clock, lambda state: certain)
        plan = replace(plan, rewritten=done.sources, entries_removed=done.expired)
    plan = with_sums(plan, Segments(log.state, storage))
    return plan, sweep(storage, log, rule.grace_s, delete=yes)


def _unknown_topics(
    rule: Retention, state: LogState, stats: Stats, cold: ColdPath
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the rule's patterns that match no stored topic, and the topics of files and archive that are known.

    If the objects in `stats` have no match, the others are read, too. An object that can't be read may have any topic.
    """
    known = _names(stats) | Segments(state, cold.storage).topics
    if not _unmatched(rule, known):
        return (), known
    others = [stored for stored in state.objects.values() if stored.name not in stats]
    looked_up = _looked_up(others, cold)
    known |= _names(looked_up)
    return _unmatched(rule, known) if len(looked_up) == len(others) else (), known


def _names(stats: Stats) -> frozenset[str]:
    return frozenset(topic for named in stats.values() for topic, _ in named)


def _unmatched(rule: Retention, topics: frozenset[str]) -> tuple[str, ...]:
    patterns = dict.fromkeys((*rule.topics, *rule.segments_topics))
    return tuple(p for p in patterns if p not in topics and not any(fnmatchcase(topic, p) for topic in topics))


def _has_topics(expired: Expired) -> bool:
    return any(horizon.topics for horizon in expired.horizons)


def _looked_up(objects: Sequence[StoredObject], cold: ColdPath, beat: Callable[[], object] = lambda: None) -> Stats:
    """Return the topic stats of the objects that can be read: a request each."""

    def read(stored: StoredObject) -> NamedStats:
        with contextlib.suppress(CorruptFile, ObjectNotFound):
            return cold.trailer(stored).metadata.stats_by_topic()
        return []

    by_name: dict[str, NamedStats] = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for stored, stats in zip(objects, pool.map(read, objects), strict=True):
            beat()
            if stats:
                by_name[stored.name] = stats
    return by_name


def expire_index(
    storage: str,
    rule: Retention,
    *,
    yes: bool = False,
    now: bool = False,
    s3: StorageOptions | None = None,
    clock: Clock | None = None,
) -> ExpiryPlan:
    """Expire entries of the index at a storage URI by `rule`; without `yes` only return the plan.

    With `yes` one log record states the expired times permanently and removes the objects without newer entries. With
    `now`, objects that also have newer entries are written again without the expired ones. Otherwise the next merge of
    an object does this. Objects that expiry and merges removed `rule.grace_s` seconds ago are deleted. You may repeat
    the call, also beside writers, readers and merges. The present time is the storage's. `s3` has the options of S3.
    `clock` replaces both clocks in tests. Raises `NotAnIndex`, `CorruptFile`, `StorageUnavailable`,
    `StorageMisconfigured`, and `ConfigError` if the clocks of this machine and the storage differ.
    """
    present = clock or SystemClock()
    with contextlib.closing(open_storage(storage, options=s3)) as opened:
        log = StorageLog(opened, present)
        log.open()
        now_ms = None if clock is None else clock.now_ms()
        return expire(opened, log, rule, present, yes=yes, now=now, now_ms=now_ms)[0]
