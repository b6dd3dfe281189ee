"""The `Source` of Kafka's topics: reads every partition from the index's own position, without a consumer group.

The position of a partition is the offset after the last record that was put; `Name` is its key in the index. A
partition may change:

| found | what happens |
|---|---|
| a new partition, or a new topic that matches a pattern | it is read from its begin |
| a partition that is gone | it is reported once; the others continue |
| a partition whose broker does not answer | it waits, and is named; the others continue |
| another log than the one that was read | it is read from its begin, and reported as rewritten |
| a position out of the log's range | the partition stops; with `restart_at` it continues at the log's begin or end |
| a partition that the login may no longer read, or that is damaged | the partition stops |
| an open transaction | records behind it count as lag; if it stays open, it is named |
| a log that was cut, as the client or epochs show | it is read again from its end or the first other record |
| offsets without a record (compacted, control records, aborted) | the position passes them |

A topic that was deleted and created again has another id. Each name has the id of its topic. Every few seconds the
source looks for partitions (`_looking`): it asks for ids first and then for ranges, and does not wait for the answers.
While an id can't be asked the log counts as the same one.

A cluster before Kafka 2.8, whose topics have no ids, is refused. A log with archived records keeps its place in the
archive even if records are read again. The exception: an id shows that it is another log, or the log was cut before the
end of the archived records.

At each look the source notes the ends of all logs. It keeps in the index up to which time each topic is read whole
(`TopicRead`), and that it is behind. So answers are complete only up to this time.

A partition that stops is named, and the others continue. With `follow` it is tried again at each look, unless it is
damaged. Without `follow` its error is raised at the end of the run; if no partition is left, it is raised at once.
Errors are raised only after all earlier records were put. One thread uses a source; any thread may call `lag` and
`positions`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa

from tiered_index.clock import Clock, SystemClock
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    ObjectNotFound,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
    did_you_mean,
)
from tiered_index.follow import Batch, Lag, Loss
from tiered_index.kafka.archive import topic_id_of_file
from tiered_index.kafka.client import (
    MISSED,
    STEP_S,
    TIMEOUT_S,
    HeldLog,
    KafkaAddress,
    KafkaBroker,
    LogRange,
    Place,
    Ranges,
    SetupErrors,
    answers_of,
    ask_ids,
    asked,
    error_of,
    first_metadata,
    headers_of,
    id_in,
    is_of_group,
    is_passing,
    kafka,
    open_consumer,
    range_in,
    record_of,
)
from tiered_index.kafka.columns import RecordLists
from tiered_index.kafka.group import GroupOffsets
from tiered_index.kafka.keys import RecordKeys
from tiered_index.kafka.names import (
    BEGIN_PREFIX,
    EPOCH_PREFIX,
    KEYS_PREFIX,
    Name,
    archived_end,
    keys_in,
    positions_by_store,
)
from tiered_index.kafka.reads import Look, TopicRead
from tiered_index.service.index import IndexService
from tiered_index.service.log.reads import read_name, unread_name
from tiered_index.types import MAX_TIMESTAMP_MS, format_time, inclusive

_log = logging.getLogger(__name__)
RestartAt = Literal["begin", "end"]
# Most records that are taken before they are put, and most messages of the client that are held at a time: garbage
# collection visits each of them, and later ones use their memory again
_MESSAGES, _HELD = 100_000, 500
_WAIT_S = 0.2
_ROUND_S = 0.5
_METADATA_S = 5.0
# a cluster that elects new leaders takes some seconds: no trouble of a source that has read everything
_FAILOVER_S = 15.0
# the clock may have begun a second ago, with the host
_LONG_AGO_S = float("-inf")
# A run without `follow` raises after so long without an answer of the cluster
_PATIENCE_S = 60.0
# Most records before a position that are compared, and most entries of one key and second that are read for one
_COMPARED, _ALIKE = 100, 10_000
# Offsets before the position that are read again when a partition is taken up
_READ_AGAIN = 10
# Most topics whose leaders are asked for again at a look
_RENEWED = 20


class OffsetOutOfRange(CorruptFile):
    """The next record of a partition, at `position`, is not in its log, which has offsets [`begin`, `end`)."""

    def __init__(self, place: str, position: int, begin: int, end: int) -> None:
        problem = f"the next offset is {position:,}, and the log has {inclusive(begin, end)}"
        hint = "--restart-at begin or --restart-at end continues there, and reports the gap"
        super().__init__(place, f"{problem}: {hint}")
        self.position, self.begin, self.end = position, begin, end


_UNKNOWN = LogRange(0, 0, 0)


@dataclass(eq=False, slots=True)
class Partition:
    """One partition: `position` is the offset after its last put record, `read` after its last read one.

    `newest_ms` is the time of the last put record.
    """

    name: Name
    position: int
    read: int
    # The client has lost its place in the log
    is_out_of_range: bool = False
    # The offset at which a run without `follow` ends; None: unknown
    target: int | None = None
    at_end: bool = False
    newest_ms: int | None = None
    # The epoch of the leader that wrote the last put record; None: unknown. Earlier records have no greater one, unless
    # the log was cut and grew again
    epoch: int | None = None
    # The end of the log that the client saw last
    high: int = 0
    # The position at which this run took it up, and the mean size of a record that it read
    begun: int = 0
    record_bytes: float = 0.0
    # The log at the last look, the time at which its end was seen first, and whether that was an earlier look
    log: LogRange = _UNKNOWN
    seen_ms: int = 0
    is_seen_again: bool = False

    @property
    def key(self) -> Place:
        """Topic and number of the partition."""
        return self.name.topic, self.name.partition

    @property
    def place(self) -> str:
        """Topic and number of the partition, for messages."""
        return f"{self.name.topic}/{self.name.partition}"

    def is_done(self) -> bool:
        """Return whether all records that the log had at the begin are put."""
        return self.at_end or (self.target is not None and self.position >= self.target)

    def look_at(self, log: LogRange, now_ms: int) -> None:
        """Note the log as it is now."""
        self.is_seen_again = self.seen_ms > 0 and log.end == self.log.end
        if not self.is_seen_again:
            self.seen_ms = now_ms
        self.log, self.high = log, max(self.high, log.high)

    @property
    def held(self) -> str | None:
        """The records behind the last stable offset, which can't be read; None: there are none."""
        if self.position != self.log.end or self.log.high <= self.log.end:
            return None
        return (
            f"{self.place}: {self.log.high - self.log.end:,} offsets can't be read: a transaction is open at the last "
            f"stable offset, {self.log.end:,}, since {format_time(self.seen_ms)} or earlier"
        )


class _Read(NamedTuple):
    """A batch that was read."""

    partition: Partition
    batch: Batch
    newest_ms: int | None
    epoch: int | None


class _Taken:
    """Records of a partition that were taken, and their keys unless the record's key is the only one."""

    def __init__(self) -> None:
        self.records = RecordLists(with_values=False)
        # the keys of all records, and the number of keys of each
        self.texts: list[str] = []
        self.counts: list[int] = []
        self.left_out = 0
        self.epoch: int | None = None


_NO_ENTRIES: dict[str, Any] = {n: [] for n in ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")}


def check_cluster(address: KafkaAddress, settings: Mapping[str, str]) -> None:
    """Raise the errors of `KafkaSource` for a cluster that does not answer or refuses, and for a missing topic.

    For a first run: it makes no index for topics that can't be read.
    """
    place = f"kafka://{address.servers}/{','.join(address.topics)}"
    setup = SetupErrors(place)
    consumer = open_consumer({**settings, "bootstrap.servers": address.servers}, HeldLog(), error_cb=setup)
    try:
        metadata = first_metadata(consumer, setup)
    finally:
        consumer.close()
    _check_topics(address, place, metadata)


def _check_topics(address: KafkaAddress, place: str, cluster: Any) -> None:
    """Raise for a topic of `address` that `cluster`, a list of topics, does not have or let read."""
    known = [name for name, topic in cluster.topics.items() if topic.error is None]
    for topic in address.topics:
        error = cluster.topics[topic].error if topic in cluster.topics else None
        if _is_pattern(topic) or topic in known or (error is not None and is_passing(error)):
            continue
        refused = error_of(error, topic) if error is not None else None
        if isinstance(refused, StorageMisconfigured):
            raise refused
        problem = f"there is no topic {topic!r} that the client's login may see{did_you_mean(topic, known)}"
        raise InvalidArgument(f"{place}: {problem}{_hint_of_globs(topic)}")


@dataclass(eq=False)
class KafkaSource:
    """Follows the topics of one cluster for one index.

    `restart` reads every partition from its begin. `commit_group` publishes durable positions as offsets of a group.
    Raises `InvalidArgument` for a missing topic, `ConfigError` if the index follows another cluster,
    `StorageUnavailable` and `StorageMisconfigured` if the cluster does not answer or refuses.

    It has more attributes than most classes: each is one answer about partitions, in the states of the module's table.
    """

    index: IndexService
    address: KafkaAddress
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    keys: RecordKeys = field(default_factory=RecordKeys)
    follow: bool = True
    restart: bool = False
    restart_at: RestartAt | None = None
    commit_group: str | None = None
    cluster: str | None = None
    note: Callable[[str], None] = _log.warning
    clock: Clock = field(default_factory=SystemClock)

    unit = "records"
    offsets = "offsets"

    def __post_init__(self) -> None:
        self.place = f"kafka://{self.address.servers}/{','.join(self.address.topics)}"
        if not self.address.topics:
            raise InvalidArgument("name topics to follow: kafka://HOST:PORT/TOPIC,...; a topic may be a pattern")
        if self.commit_group == "":
            raise InvalidArgument("--commit-group: the name of a group is not empty")
        if self.cluster is not None and "/" in self.cluster:
            raise InvalidArgument(f"--store-name {self.cluster!r}: the name of a cluster has no /")
        settings = {**self.settings, "bootstrap.servers": self.address.servers}
        self._setup, log = SetupErrors(self.place), HeldLog()
        self._consumer = open_consumer(settings, log, error_cb=self._note_error)
        self.broker = KafkaBroker(settings)
        self._partitions: dict[Place, Partition] = {}
        # Partitions that are not read until their ranges are known, those of deleted topics, and those that the broker
        # reported as missing
        self._waiting: set[Place] = set()
        self._gone: set[Place] = set()
        self._missed: set[Place] = set()
        # Partitions that stopped, and why
        self._failed: dict[Place, TieredIndexError] = {}
        # Partitions and their last stable offsets that were noted
        self._noted_held: dict[Place, int] = {}
        # Topics that the brokers can't describe now, and why
        self._unsure: dict[str, str] = {}
        # Partitions that are read now, and the reason for each other one of the last look
        self._assigned: set[Place] = set()
        self._away: dict[Place, str] = {}
        # The part of each topic that is put; the begins of the last two looks, and of the first; whether records came
        # since `_tell_reads` put the last positions
        self._reads: dict[str, TopicRead] = {}
        self._looks_ms, self._begun_ms = (0, 0), 0
        self._has_moved = False
        # the last time when all partitions answered
        self._well_s = _LONG_AGO_S
        self._pending: deque[_Read] = deque()
        self._problem: Exception | None = None
        # whether records are being read, which the client does not return again
        self._is_taking = False
        self._trouble: str | None = None
        self._looked_s = _LONG_AGO_S
        self._look: Generator[Iterable[Future[Any]], None, None] | None = None
        self._answers: Iterable[Future[Any]] = ()
        self._has_begun = False
        self._heard_s = time.monotonic()
        self.group = GroupOffsets(self.commit_group, self.broker, self.note) if self.commit_group else None
        try:
            self._begin()
        except BaseException:
            self._consumer.close()
            self.broker.close()
            raise
        self._has_begun = True
        log.pass_on()
        for key in self.keys.rules:
            index_key = f"{KEYS_PREFIX}{key}"
            if self.index.durable_position(index_key) is None:
                self.index.put_batch(_NO_ENTRIES, index_key, 1)

    @property
    def trouble(self) -> str | None:
        """The reason that partitions are not read now, or that positions are not published; None if there is none."""
        is_failover = self._is_failover()
        away, failed = [] if is_failover else sorted(self._away.items()), sorted(self._failed.items())
        held = sorted(partition.held or "" for partition in self._held(again=True))
        named = f"{len(away):,} partitions can't be read now, the first {away[0][1]}" if away else None
        stopped = f"stopped partitions: {len(failed):,}, the first {failed[0][1]}" if failed else None
        unpublished = self.group.problem if self.group is not None else None
        open_ones = f"partitions with open transactions: {len(held):,}, the first {held[0]}" if held else None
        return (
            "; ".join(filter(None, (None if is_failover else self._trouble, named, stopped, open_ones, unpublished)))
            or None
        )

    def _is_failover(self) -> bool:
        """Return whether brokers are away since some seconds only, and all records of before were read."""
        return (
            (self._trouble is not None or bool(self._away))
            and time.monotonic() - self._well_s < _FAILOVER_S
            and not self._waiting
            and not self._failed
            and all(
                partition.high <= partition.position and (partition.target or 0) <= partition.position
                for partition in self._known()
            )
        )

    def _held(self, *, again: bool) -> list[Partition]:
        """Return the partitions that an open transaction holds, if `again` since an earlier look."""
        return [
            partition
            for partition in self._known()
            if partition.held is not None and (partition.is_seen_again or not again)
        ]

    def _note_held(self, *, again: bool) -> None:
        for partition in self._held(again=again):
            if self._noted_held.get(partition.key) != partition.log.end:
                self._noted_held[partition.key] = partition.log.end
                self.note(str(partition.held))

    def _note_error(self, error: Any) -> None:
        """Note an error of the client that is of no partition. It tries again by itself where that helps."""
        problem = error_of(error, self.place)
        if not self._has_begun:
            self._setup(error)
        if error.fatal() or not (self._has_begun or isinstance(problem, StorageUnavailable)):
            self._problem = problem
        else:
            self._trouble = str(problem)

    def _fail(self, place: Place, error: TieredIndexError) -> None:
        """Stop reading a partition, and note why."""
        self._stop_reading(place)
        self._waiting.discard(place)
        if place not in self._failed:
            self.note(f"{place[0]}/{place[1]} stops: {error}")
        self._failed[place] = error

    def _raise_failed(self) -> None:
        """Raise the error of a partition that stopped, if there is none that does not."""
        others = {partition.key for partition in self._known()} | self._waiting
        if self._failed and not others - self._failed.keys():
            raise self._failed[min(self._failed)]

    def _begin(self) -> None:
        """Look for the partitions. With `follow` those of brokers that are away are named, and read later."""
        until_s = time.monotonic() + (STEP_S if self.follow else TIMEOUT_S)
        while True:
            self._go_on_looking(wait_s=_WAIT_S)
            if self._look is not None:
                self._check_setup()
                continue
            if not self._waiting and not self._unsure:
                self._raise_failed()
                return
            self._check_setup()
            if time.monotonic() > until_s:
                break
            time.sleep(_WAIT_S)
            self._looked_s = _LONG_AGO_S
        reasons = [f"{topic}/{number}: {self._away.get((topic, number))}" for topic, number in sorted(self._waiting)]
        reasons += [f"all of {topic}: {reason}" for topic, reason in sorted(self._unsure.items())]
        if not self.follow:
            raise StorageUnavailable(reasons[0])
        self.note(f"some partitions are read once their brokers answer: {'; '.join(reasons[:10])}")

    def _check_setup(self) -> None:
        """Raise the error of a client that the brokers refuse, or that can't reach the brokers that they advertise."""
        if not self._assigned:  # otherwise a record would be lost, and some broker does answer
            self._consumer.poll(0.0)  # calls its callback
        if self._problem is not None:
            raise self._problem
        self._setup.check()

    def _go_on_looking(self, wait_s: float | None = 0.0) -> None:
        """Begin to look for partitions if it is time, and take the answers that are there. Raises as `_looking`."""
        if self._look is None and time.monotonic() - self._looked_s > _METADATA_S:
            self._looked_s = time.monotonic()
            self._look, self._answers = self._looking(), ()
        while self._look is not None and not wait(self._answers, wait_s).not_done:
            look, self._look = self._look, None  # an error ends it
            with contextlib.suppress(StopIteration):
                self._answers = next(look)
                self._look = look

    def _looking(self) -> Generator[Iterable[Future[Any]], None, None]:
        """Assign the partitions that are new or have another log, and report deleted ones. Yields what it waits for.

        If there are no new records, only this shows that a leader is away or has returned. Raises `OffsetOutOfRange`.
        """
        # only a client that reads nothing may be polled: it might return a record
        begins, begun_ms = not (self._has_begun or self._assigned), self.clock.now_ms()
        try:
            if begins:
                metadata = first_metadata(self._consumer, self._setup)
            else:
                metadata = asked(self.place, lambda: self._consumer.list_topics(timeout=min(STEP_S, TIMEOUT_S)))
        except StorageUnavailable as error:
            if begins:
                raise
            self._trouble = str(error)
            self._note_looks(begun_ms, {})
            return
        known = [name for name, topic in metadata.topics.items() if topic.error is None]
        wanted = [name for name in known if self._is_wanted(name)]
        unsure = {
            name: topic.error.str()
            for name, topic in metadata.topics.items()
            if topic.error is not None and is_passing(topic.error)
        }
        self._unsure = {name: reason for name, reason in unsure.items() if self._is_wanted(name)}
        if begins:
            self.cluster = self.cluster or metadata.cluster_id or "-"
            self._check_one_cluster()
            _check_topics(self.address, self.place, metadata)
            self._note_patterns(known)
        there = {(name, number) for name in wanted for number in metadata.topics[name].partitions}
        gone = {place for place in self._partitions.keys() - self._gone - there if place[0] not in unsure}
        self._waiting = {place for place in self._waiting if place in there or place[0] in unsure}
        self._waiting |= there - (self._partitions.keys() - self._gone) - self._failed.keys()
        if self.follow:
            again = {place for place, error in self._failed.items() if _may_pass(error)}
            self._waiting |= (again & there) - self._assigned
        missed = self._missed
        self._missed = set()
        self.broker.renew(sorted({topic for topic, _ in self._away if topic in wanted})[:_RENEWED])
        answers = ask_ids(self.broker.admin, metadata, {*wanted, *(topic for topic, _ in gone)})
        yield answers.values()
        ids, trouble, hidden = self._ids_in(answers)
        self._leave_gone(gone, hidden)
        self._gone -= there
        for place in there & self._assigned:
            if place in missed or ids.get(place[0], "") not in ("", self._partitions[place].name.topic_id):
                self._stop_reading(place)
                self._waiting.add(place)
        waiting = frozenset(self._waiting)
        ranges = self.broker.ranges(there)
        yield answers_of(ranges)
        away, ends = self._take_ranges(there, waiting, ids, ranges)
        self._away, self._trouble = away, trouble
        if not away and trouble is None and not unsure:
            self._well_s = time.monotonic()
        self._note_held(again=True)
        whole = {topic for topic, _ in there} - {topic for topic, _ in there - ends.keys() | self._waiting}
        looks: dict[str, dict[Name, int]] = {}
        for place, end in ends.items():
            if place[0] in whole:
                looks.setdefault(place[0], {})[self._partitions[place].name] = end
        self._note_looks(begun_ms, looks)

    @staticmethod
    def _ids_in(answers: Mapping[str, Future[Any]]) -> tuple[dict[str, str], str | None, dict[str, TieredIndexError]]:
        """Return the ids of topics, why some are not known now, and the errors of topics that the login may not see."""
        ids, trouble, hidden = dict[str, str](), None, dict[str, TieredIndexError]()
        for name, answer in answers.items():
            try:
                ids[name] = asked(name, partial(id_in, answer, name))
            except StorageUnavailable as error:
                trouble = str(error)
            except StorageMisconfigured as error:
                hidden[name] = error
        return ids, trouble, hidden

    def _leave_gone(self, gone: Iterable[Place], hidden: Mapping[str, TieredIndexError]) -> None:
        """Stop reading partitions that are gone: a list of all topics has none that the login may not see either."""
        for place in sorted(gone):
            if place[0] in hidden:
                self._fail(place, hidden[place[0]])
                continue
            self._stop_reading(place)
            self._gone.add(place)
            self._failed.pop(place, None)
            self.note(f"{self._partitions[place].place} is gone: it was deleted")

    def _take_ranges(
        self, there: Iterable[Place], waiting: Collection[Place], ids: Mapping[str, str], ranges: Ranges
    ) -> tuple[dict[Place, str], dict[Place, int]]:
        """Take up `waiting` partitions, and note the ranges of all. Return why some have none, and the others' ends."""
        durable = self._newest_names() if waiting else {}
        away, ends = dict[Place, str](), dict[Place, int]()
        for place in sorted(there):
            try:
                log = range_in(ranges, place)
                if place in waiting and place in self._waiting:
                    self._take_up(place, durable.get(place), ids.get(place[0], ""), log.begin, log.end)
                if place in self._partitions:
                    self._partitions[place].look_at(log, self.clock.now_ms())
                    ends[place] = log.high
            except StorageUnavailable as error:
                away[place] = str(error)
            except (StorageMisconfigured, CorruptFile) as error:
                self._fail(place, error)
        return away, ends

    def _note_looks(self, begun_ms: int, ends: Mapping[str, Mapping[Name, int]]) -> None:
        """Note the ends of the logs of topics, of those that could be asked for all partitions."""
        self._looks_ms, self._begun_ms = (self._looks_ms[1], begun_ms), self._begun_ms or begun_ms
        for topic in {partition.name.topic for partition in self._known()} | ends.keys():
            if (read := self._reads.get(topic)) is None:
                name, unread = (form(self._told_as, topic) for form in (read_name, unread_name))
                if (told_ms := self.index.durable_position(name)) is None:
                    # before its first record is put: nothing is known to be whole
                    told_ms = 0
                    self.index.put_batch(_NO_ENTRIES, name, told_ms)
                is_behind = (self.index.durable_position(unread) or 0) >= told_ms
                read = self._reads[topic] = TopicRead(told_ms, is_behind)
            if topic in ends:
                read.look(Look(begun_ms, ends[topic]))

    @property
    def _told_as(self) -> str:
        return f"kafka:{self.cluster}"

    def _tell_reads(self, whole_before_ms: int) -> Generator[Batch, None, None]:
        """Yield the positions that say up to which time topics are read whole, and which are not `whole_before_ms`.

        It yields them only after records, so that a topic without new ones writes nothing.
        """
        positions = {partition.name: partition.position for partition in self._partitions.values()}
        has_told = False
        for topic, read in self._reads.items():
            read.reach(positions)
            is_behind = read.read_ms < whole_before_ms
            if read.read_ms > read.told_ms and (self._has_moved or is_behind != read.is_told_behind):
                yield Batch(source=read_name(self._told_as, topic), position=read.read_ms, columns=_NO_ENTRIES)
                read.told_ms, read.is_told_behind, has_told = read.read_ms, False, True
            if is_behind and not read.is_told_behind:
                yield Batch(source=unread_name(self._told_as, topic), position=read.told_ms, columns=_NO_ENTRIES)
                read.is_told_behind = True
        self._has_moved = self._has_moved and not has_told

    def _is_wanted(self, name: str) -> bool:
        return any(_fits(name, pattern) for pattern in self.address.topics)

    def _note_patterns(self, known: list[str]) -> None:
        for pattern in self.address.topics:
            if _is_pattern(pattern) and not any(_fits(name, pattern) for name in known):
                later = "; a topic of later is taken up" if self.follow else ""
                self.note(f"no topic matches the pattern {pattern!r}{later}{_hint_of_globs(pattern)}")

    def _stop_reading(self, place: Place) -> None:
        if place in self._assigned:
            self._assigned.discard(place)
            self._consumer.incremental_unassign([kafka.TopicPartition(*place)])

    def _settle(self, place: Place) -> None:
        """Stop reading a partition until the next look, which begins soon, decides where it continues."""
        self._stop_reading(place)
        self._waiting.add(place)
        self._looked_s = _LONG_AGO_S

    def _take_up(self, place: Place, put: tuple[Name, int] | None, topic_id: str, begin: int, end: int) -> None:
        """Read a partition, whose log has offsets [`begin`, `end`): from its position in the index, or from `begin` if
        that belongs to another log.
        """
        before = self._partitions.get(place)
        if before is not None:
            put = before.name, before.position
        if put is None:
            partition = Partition(Name(self.cluster or "-", *place, 0, topic_id), begin, begin, high=end)
            self._begin_log(partition)
        else:
            name, position = put
            partition = Partition(name._replace(topic_id=topic_id or name.topic_id), position, position, high=end)
            partition.newest_ms = None if before is None else before.newest_ms
            partition.epoch = before.epoch if before else self.index.durable_position(f"{EPOCH_PREFIX}{name}")
            is_other = bool(name.topic_id and topic_id) and topic_id != name.topic_id
            if before is None and self.restart:
                self._begin_again(partition, begin, not is_other)
            elif is_other:
                self._start_anew(partition, begin, "its topic was deleted and created again", same_log=False)
            elif before is not None and before.is_out_of_range:
                self._find_place(partition, begin, end)
        partition.begun = partition.position if before is None else before.begun
        # behind the log's end only the client's answer counts: the log may have been cut
        partition.target = None if self.follow or partition.read > end else end
        # some records before the position are read again, unless they were compared now: their epochs show a cut
        is_compared = before is not None and before.is_out_of_range
        is_checked = partition.epoch is not None and not is_compared and begin < partition.read <= end
        at = max(begin, partition.read - _READ_AGAIN) if is_checked else partition.read
        self._consumer.incremental_assign([kafka.TopicPartition(*place, at)])
        self._assigned.add(place)
        self._partitions[place] = partition
        self._waiting.discard(place)

    def _begin_log(self, partition: Partition) -> None:
        """Keep the position of a log that is read first, and its begin, if it is not 0.

        Records before the begin can't be missing in the archive.
        """
        archive = self.index.segment_archive
        # a root that was lost may have archived another log under this name
        while (archived := archived_end(archive.segments(), partition.name.store)) is not None and (
            archived > partition.high or not self._may_be_archived_log(partition.name)
        ):
            partition.name = partition.name.begun_again(same_log=False)
        # the position is first: else the begin would count for the next log of this name
        self.index.put_batch(_NO_ENTRIES, str(partition.name), partition.position)
        if partition.position:
            self.index.put_batch(_NO_ENTRIES, f"{BEGIN_PREFIX}{partition.name.store}", partition.position)

    def _begin_again(self, partition: Partition, at: int, same_log: bool) -> None:
        """Continue at an offset, under the name of another generation."""
        partition.name = partition.name.begun_again(same_log=same_log)
        partition.position = partition.read = at
        partition.epoch = None
        if not same_log:
            self._begin_log(partition)

    def _start_anew(self, partition: Partition, at: int, why: str, same_log: bool) -> None:
        """Read a partition again from an offset, and report a loss. `same_log`: its archive continues."""
        before = partition.position
        self._begin_again(partition, at, same_log)
        partition.newest_ms = None
        problem = f"{partition.place}: {why}: it is read from {at:,}"
        self._pending.append(self._passed(partition, at, Loss("rewritten", min(at, before), before, None, problem)))

    def _find_place(self, partition: Partition, begin: int, end: int) -> None:
        """Continue in a log, which has offsets [`begin`, `end`), in which the client has lost its place: it was cut, or
        its next record was deleted.

        Raises `OffsetOutOfRange` without `restart_at` if the next record was deleted.
        """
        position = partition.position
        if position < begin:
            if self.restart_at is None:
                raise OffsetOutOfRange(partition.place, position, begin, end)
            target = begin if self.restart_at == "begin" else end
            self._pending.append(self._passed(partition, target, _gap(partition, begin, end, target)))
            return
        is_known, other = self._compared(partition, begin, end)
        if position > end:
            at = (end if other is None else other) if is_known else begin
            why = f"its log was cut: it had offset {position:,} next, and its log has {inclusive(begin, end)}"
        elif other is None:
            return  # a replica was behind its leader
        else:
            at = other if is_known else begin
            why = f"records from offset {other:,} on are not those that were read: its log was cut, and grew again"
        archived = archived_end(self.index.segment_archive.segments(), partition.name.store)
        # records before the cut may wait for the archive, and those behind it may be in the archive
        self._start_anew(partition, at, why, same_log=(archived or 0) <= at)

    def _compared(self, partition: Partition, begin: int, end: int) -> tuple[bool, int | None]:
        """Return whether one of the last records before the position is in the index, and the first one after it that
        is not. The log has offsets [`begin`, `end`).
        """
        other, until, keys_of = None, min(partition.position, end), self.all_keys().of
        records = list(self.broker.records(partition.key, max(begin, until - _COMPARED), until))
        for record in reversed(records):
            keys = keys_of(record)
            if not keys:
                continue
            # the entry of a record without a time has the one at which it was read
            begin_ms, end_ms = 0, MAX_TIMESTAMP_MS
            if record.timestamp_ms is not None:
                begin_ms = end_ms = min(record.timestamp_ms, MAX_TIMESTAMP_MS)
            place = record.partition, record.offset, record.size
            for key in keys:
                items = self.index.query(record.topic, key, begin_ms, end_ms, _ALIKE).items
                if any((item.queue_id, item.offset, item.size) == place for item in items):
                    return True, other
            other = record.offset
        return False, other

    def _may_be_archived_log(self, name: Name) -> bool:
        """Return whether the id of a partition's topic is that of the archived records, if both are known."""
        archive = self.index.segment_archive
        archive.refresh()
        last = archive.segments().last(name.store)
        # a damaged segment, or one that was deleted since, can't tell
        with contextlib.suppress(CorruptFile, ObjectNotFound):
            return last is None or topic_id_of_file(archive.table(last).footer) in ("", name.topic_id)
        return True

    def partition(self, name: Name) -> Partition:
        """Return the partition of a name. Any thread."""
        return self._partitions[name.topic, name.partition]

    def deleted(self) -> list[tuple[Name, int]]:
        """Return the names of partitions of deleted topics, and up to where they are durable. Any thread."""
        durable = positions_by_store(self.index.durable_positions())
        names = [self._partitions[place].name for place in list(self._gone) if place in self._partitions]
        return [(name, durable[name.store]) for name in names if name.store in durable]

    def pass_over(self, store: str, end: int) -> None:
        """Keep that records of a log before an offset are lost for the archive. Any thread."""
        self.index.put_batch(_NO_ENTRIES, f"{BEGIN_PREFIX}{store}", end)

    def settled(self) -> list[tuple[Name, int]]:
        """Return up to where partitions are durable, of those whose logs are known to be the ones put. Any thread."""
        durable = positions_by_store(self.index.durable_positions())
        names = [partition.name for partition in self._known() if partition.key not in self._waiting]
        return [(name, durable[name.store]) for name in names if name.store in durable]

    def _durable(self) -> dict[Place, int]:
        """Return the durable position of each partition that has one."""
        durable = self.index.durable_positions()
        positions = {partition.key: durable.get(str(partition.name)) for partition in self._known()}
        return {place: position for place, position in positions.items() if position is not None}

    def all_keys(self) -> RecordKeys:
        """Return the extraction of all keys that this run and earlier runs put."""
        if self.keys.function is not None:
            return self.keys
        return RecordKeys.by_rules({*self.keys.rules, *keys_in(self.index.durable_positions())})

    def _newest_names(self) -> dict[Place, tuple[Name, int]]:
        newest: dict[Place, tuple[Name, int]] = {}
        for text, position in self.index.durable_positions().items():
            if (name := Name.parse(text)) is not None and name.cluster == self.cluster:
                before = newest.get((name.topic, name.partition))
                if before is None or (before[0].generation, before[1]) < (name.generation, position):
                    newest[name.topic, name.partition] = name, position
        return newest

    def _check_one_cluster(self) -> None:
        known = {name.cluster for text in self.index.durable_positions() if (name := Name.parse(text)) is not None}
        if known - {self.cluster}:
            raise ConfigError(
                f"this index follows the cluster {min(known)!r}, and {self.cluster!r} has other offsets: use another "
                "root and storage, or --store-name if this is the same cluster under another id"
            )

    # the protocol `Source`

    def lacks(self, messages: int, hidden: int, left_out: int) -> list[str]:
        """Return why none of the records has a key."""
        return self.keys.lacks(messages)

    def counts(self) -> dict[str, Any]:
        """Return the counts that only this source has, for JSON."""
        keys = self.keys
        held = [
            {
                "partition": partition.place,
                "last_stable_offset": partition.log.end,
                "offsets": partition.log.high - partition.log.end,
                "since_ms": partition.seen_ms,
            }
            for partition in self._held(again=False)
        ]
        stopped = [{"partition": f"{t}/{n}", "error": str(error)} for (t, n), error in sorted(self._failed.items())]
        return {
            "no_json": keys.no_json,
            "no_json_first": keys.no_json_first,
            "too_long": keys.too_long,
            "open_transactions": held,
            "stopped": stopped,
        }

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return the metrics that only this source has, as `Follower.gauges` does."""
        return {
            "follow_failed_commits_total": (
                "Failed attempts to publish the offsets of --commit-group.",
                self.group.failed if self.group is not None else 0,
            ),
            "follow_stopped_partitions": ("Partitions that are not read any more, for an error.", len(self._failed)),
            "follow_open_transaction_partitions": (
                "Partitions whose records behind an open transaction can't be read.",
                len(self._held(again=True)),
            ),
        }

    def positions(self) -> dict[str, int]:
        """Return the offset after the last put record of each partition, by name."""
        return {str(partition.name): partition.position for partition in list(self._partitions.values())}

    def batches(self) -> Generator[Batch, None, None]:
        """Yield new records, in batches of one partition.

        Raises `OffsetOutOfRange`, `InvalidArgument` after an earlier round failed among records, and as `error_of`.
        The error of one partition is raised once all others have ended.
        """
        if self._is_taking:
            raise InvalidArgument(f"{self.place}: an earlier round failed among records: open another source")
        until_s = time.monotonic() + _ROUND_S
        yield from self._hand_over()
        try:
            self._go_on_looking()
        except TieredIndexError:
            yield from self._hand_over()
            raise
        while self._problem is None:
            has_any = self._take_in(self._consumed(until_s))
            self._is_taking = False
            for partition in self._known():
                partition.high = self._high(partition)
            yield from self._hand_over()
            if not has_any or time.monotonic() > until_s:
                break
        going_on = [partition for partition in self._known() if partition.key not in self._failed]
        caught_up = not self._waiting and all(partition.is_done() for partition in going_on)
        is_ending = caught_up and not self.follow
        yield from self._tell_reads(whole_before_ms=self._begun_ms if is_ending else self._looks_ms[0])
        if self.group is not None:
            self.group.publish(self._durable)
        if self._problem is not None:
            raise self._problem
        self._raise_failed()
        if caught_up and not self.follow:
            self._note_held(again=False)
            if self._failed:
                raise self._failed[min(self._failed)]
        if not caught_up and not self.follow and time.monotonic() - self._heard_s > _PATIENCE_S:
            raise StorageUnavailable(
                f"{self.place}: no answer for {_PATIENCE_S:g} seconds: {self.trouble or 'silence'}"
            )
        yield Batch(source="", position=0, caught_up=caught_up, pause=0.0)

    def _known(self) -> list[Partition]:
        return [partition for place, partition in list(self._partitions.items()) if place not in self._gone]

    def _hand_over(self) -> Generator[Batch, None, None]:
        """Yield the batches that were read. If one is not put, it and the later ones stay pending."""
        while self._pending:
            partition, batch, newest_ms, epoch = self._pending[0]
            begun_s = time.monotonic()
            yield batch
            # a put may wait for long, and that is no silence of the brokers
            self._heard_s += time.monotonic() - begun_s
            self._pending.popleft()
            partition.position = max(partition.position, batch.position)
            partition.newest_ms = newest_ms or partition.newest_ms
            self._has_moved = True
            # after the records: an older epoch than theirs only makes the records be compared
            if epoch is not None and epoch != partition.epoch:
                yield Batch(source=f"{EPOCH_PREFIX}{batch.source}", position=epoch, columns=_NO_ENTRIES)
                partition.epoch = epoch

    def _consumed(self, until_s: float) -> Iterator[list[Any]]:
        """Yield messages of the client, some at a time, until there are none for now or it is time to put them."""
        count = 0
        while count < _MESSAGES:
            try:
                messages = asked(self.place, lambda: self._consumer.consume(_HELD, _WAIT_S))
            except TieredIndexError as error:
                if not count:
                    raise
                self._problem = error  # it is raised after the records before it
                return
            self._is_taking = True
            yield messages
            count += len(messages)
            if len(messages) < _HELD or time.monotonic() > until_s:
                return

    def _take_in(self, parts: Iterable[Sequence[Any]]) -> bool:
        """Sort the client's records into batches, one a partition, and note its errors. Return whether there were any.

        `parts`: the messages, some at a time.
        """
        taken: dict[Place, _Taken] = {}
        ends: dict[Place, int] = {}
        resets: set[Place] = set()
        others: set[Place] = set()
        failed: dict[Place, TieredIndexError] = {}
        has_any = False
        for messages in parts:
            of_partitions: dict[Place, list[Any]] = {}
            last, several = None, list[Any]()
            for message in messages:
                place = message.topic(), message.partition()
                error = message.error()
                if error is None:
                    if place != last:
                        last, several = place, of_partitions.setdefault(place, [])
                        ends.pop(place, None)
                    several.append(message)
                    continue
                last = None
                if error.code() == kafka.KafkaError._PARTITION_EOF:
                    ends[place] = message.offset()
                elif error.code() == kafka.KafkaError._AUTO_OFFSET_RESET:
                    resets.add(place)
                elif (stopping := self._take_error(message, place)) is not None:
                    failed[place] = stopping
            has_any = has_any or bool(messages)
            if of_partitions or ends:
                self._trouble = None
            for place, several in of_partitions.items():
                partition = self._partitions.get(place)
                if partition is None or place not in self._assigned or place in others:
                    continue
                known = bisect_left(several, partition.read, key=_offset_of)
                if any((message.leader_epoch() or 0) > (partition.epoch or 0) for message in several[:known]):
                    others.add(place)
                    continue
                self._add(taken.setdefault(place, _Taken()), several[known:])
        for place in taken | ends:
            end, partition = ends.get(place), self._partitions.get(place)
            if partition is None or place not in self._assigned or place in others:
                continue
            if place not in failed:
                self._failed.pop(place, None)
            if not partition.is_done():
                self._heard_s = time.monotonic()
            if place in taken and taken[place].records.offsets:
                self._pending.append(self._read(partition, taken[place]))
            if end is not None:
                partition.at_end = True
                if end > partition.read:  # compacted, aborted or control records follow the last record
                    self._pending.append(self._passed(partition, end))
        # last, so that records before the reset are put
        for place in (resets | others) & self._partitions.keys():
            self._partitions[place].is_out_of_range = True
            self._settle(place)
        for place in failed.keys() & self._assigned:
            self._fail(place, failed[place])
        return has_any

    def _take_error(self, message: Any, place: Place) -> TieredIndexError | None:
        """Note an error of the client, in a message. Return it if it stops the partition at `place`."""
        error = message.error()
        if error.name() in MISSED:
            self._missed.add(place)
            self._looked_s = _LONG_AGO_S
        elif is_of_group(message):
            return None
        elif place[0] is None or error.fatal():
            self._note_error(error)
        elif isinstance(problem := error_of(error, f"{place[0]}/{place[1]}"), StorageUnavailable):
            self._trouble = str(problem)
        else:
            return problem
        return None

    def _passed(self, partition: Partition, end: int, *losses: Loss) -> _Read:
        partition.read = end
        batch = Batch(source=str(partition.name), position=end, columns=_NO_ENTRIES, losses=losses)
        return _Read(partition, batch, None, None)

    def _add(self, taken: _Taken, messages: Sequence[Any]) -> None:
        """Add messages of one partition, which are in order of offset."""
        if not messages:
            return
        if not self.keys.only_key:
            without = self.keys.without_key
            texts, counts = self._keys_of_all(messages)
            taken.texts += texts
            taken.counts += counts
            taken.left_out += self.keys.without_key - without
        taken.records.add(messages)
        taken.epoch = messages[-1].leader_epoch()

    def _read(self, partition: Partition, taken: _Taken) -> _Read:
        """Return the batch of records of one partition."""
        partition.at_end = False
        records = taken.records.columns()
        end, messages = int(records.offsets[-1]) + 1, len(records.offsets)
        keys, rows, left_out = None, None, taken.left_out
        if self.keys.only_key and (keys := self.keys.plain_keys(records.keys)) is None:
            without = self.keys.without_key
            keys_of_records = [
                self.keys.take_parts(key, (), None, partial("{}/{}".format, partition.place, offset))
                for key, offset in zip(records.keys, records.offsets.tolist(), strict=True)
            ]
            taken.texts, taken.counts = _flat(keys_of_records)
            left_out += self.keys.without_key - without
        offsets, sizes = records.offsets, records.sizes
        partition.record_bytes = float(sizes.mean())
        # A record without a time gets the present. A time beyond the greatest one becomes that, and is quarantined.
        times = np.where(records.times_ms < 0, self.clock.now_ms(), np.minimum(records.times_ms, MAX_TIMESTAMP_MS))
        newest_ms = int(times[-1])
        if keys is None:
            keys = pa.array(taken.texts, pa.string())
            rows = np.repeat(np.arange(messages), taken.counts)
            offsets, sizes, times = offsets[rows], sizes[rows], times[rows]
        count = len(offsets)
        topic = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([partition.name.topic]))
        columns = {
            "topic": topic,
            "queue_id": np.full(count, partition.name.partition, np.int64),
            "key": keys,
            "offset": offsets,
            "size": sizes,
            "timestamp_ms": times,
        }
        source = str(partition.name)
        batch = Batch(source=source, position=end, columns=columns, messages=messages, left_out=left_out)
        partition.read = end
        return _Read(partition, batch, newest_ms, taken.epoch)

    def _keys_of_all(self, messages: Sequence[Any]) -> tuple[list[str], list[int]]:
        """Return the keys of messages, and the number of keys of each."""
        if self.keys.function is not None:
            return _flat([self.keys.take(record_of(message)) for message in messages])
        if not self.keys.only_path:
            return _flat([self._keys_of(message, *self.keys.needs) for message in messages])
        texts = [self.keys.take_text(message.value()) for message in messages]
        if None not in texts:
            return cast("list[str]", texts), [1] * len(texts)
        return _flat(
            [
                self._keys_of(message, False, True) if text is None else [text]
                for message, text in zip(messages, texts, strict=True)
            ]
        )

    def _keys_of(self, message: Any, has_headers: bool, has_value: bool) -> list[str]:
        headers, value = headers_of(message) if has_headers else (), message.value() if has_value else None
        return self.keys.take_parts(message.key(), headers, value, partial(_place_of, message))

    def lag(self) -> Lag:
        """Return the number of records that are not put yet, and the greatest age of a last put record of their
        partitions.
        """
        end = behind = 0
        seconds: float | None = 0.0
        now_ms = self.clock.now_ms()
        for partition in self._known():
            high = max(partition.high, partition.position, partition.target or 0)
            end += high
            if high > partition.position:
                behind += high - partition.position
                if partition.newest_ms is None or seconds is None:
                    seconds = None
                else:
                    seconds = max(seconds, (now_ms - partition.newest_ms) / 1000)
        if self._is_failover():  # what was written since the last look is not known
            return Lag(end, behind, time.monotonic() - self._well_s)
        is_unknown = self._trouble is not None or self._away or self._waiting or self._failed
        return Lag(end, behind, None if is_unknown else seconds)

    def _high(self, partition: Partition) -> int:
        """Return the end of a partition's log that the client saw last. It waits for other calls of the client."""
        place = kafka.TopicPartition(*partition.key)
        with contextlib.suppress(kafka.KafkaException):
            watermarks = self._consumer.get_watermark_offsets(place, cached=True)
            if watermarks is not None and watermarks[1] > 0:
                return int(watermarks[1])
        return partition.high

    def close(self) -> None:
        """Publish the positions, and leave the cluster. If brokers are away this takes some seconds."""
        try:
            if self.group is not None:
                self.group.finish(self._durable)
        finally:
            self._consumer.close()
            self.broker.close()


def _flat(keys_of_records: Sequence[Sequence[str]]) -> tuple[list[str], list[int]]:
    """Return the keys of all records, and the number of keys of each."""
    return [key for keys in keys_of_records for key in keys], [len(keys) for keys in keys_of_records]


def _offset_of(message: Any) -> int:
    return int(message.offset())


def _place_of(message: Any) -> str:
    return f"{message.topic()}/{message.partition()}/{message.offset()}"


def _gap(partition: Partition, begin: int, end: int, target: int) -> Loss:
    """Return the loss: records that are skipped."""
    where = f"{partition.place} had offset {partition.read:,} next, and its log has {inclusive(begin, end)}"
    # producers choose the times of records, so records around the gap do not bound its times
    told = f"{where}: deleted before they were read"
    return Loss("missing", partition.read, target, None, told, topic=partition.key[0])


def _may_pass(error: TieredIndexError) -> bool:
    """Return whether a partition that stopped is tried again: a damaged record stays damaged."""
    return not isinstance(error, CorruptFile) or isinstance(error, OffsetOutOfRange)


def _is_pattern(topic: str) -> bool:
    return any(mark in topic for mark in "*?[")


def _hint_of_globs(topic: str) -> str:
    """Return what to add about patterns if `topic` looks like a regular expression."""
    # no name of a topic has one of these characters
    is_regex = ".*" in topic or any(mark in topic for mark in "^$|\\+(){}")
    return "; patterns are globs (orders-*), not regular expressions (orders-.*)" if is_regex else ""


def _fits(name: str, pattern: str) -> bool:
    """Return whether a topic matches `pattern`. Kafka's own topics match only their whole names."""
    return name == pattern or (_is_pattern(pattern) and not name.startswith("__") and fnmatchcase(name, pattern))
