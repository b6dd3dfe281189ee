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
(`TopicRead`). So answers are complete only up to this time, also after the source ended.

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
from typing import Any

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.connectors.kafka.added_keys import AddedRules
from tiered_index.connectors.kafka.client.broker import (
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
    id_in,
    is_of_group,
    is_passing,
    kafka,
    open_consumer,
    range_in,
)
from tiered_index.connectors.kafka.client.calls import LATE_S, ClientStuck, stuck_clients
from tiered_index.connectors.kafka.client.group import GroupOffsets
from tiered_index.connectors.kafka.intake import TakenRecords
from tiered_index.connectors.kafka.keys import NAMED, RecordKeys
from tiered_index.connectors.kafka.names import EPOCH_PREFIX, LOST_PREFIX, Name, positions_by_store
from tiered_index.connectors.kafka.partitions import OffsetOutOfRange, Partition, ReadBatch
from tiered_index.connectors.kafka.positions import LogPositions, RestartAt
from tiered_index.connectors.kafka.reads import TopicReads
from tiered_index.connectors.source import Batch, Lag, no_entries
from tiered_index.errors import (
    CorruptFile,
    InvalidArgument,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
    did_you_mean,
)
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService

_log = logging.getLogger(__name__)
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
# Most topics whose leaders are asked for again at a look
_RENEWED = 20


def check_cluster(address: KafkaAddress, settings: Mapping[str, str]) -> None:
    """Raise the errors of `KafkaSource` for a cluster that does not answer or refuses, and for a missing topic.

    For a first run: it makes no index for topics that can't be read.
    """
    place = f"kafka://{address.servers}/{','.join(address.topics)}"
    settings = {**settings, "bootstrap.servers": address.servers}
    setup = SetupErrors(place, settings)
    consumer = open_consumer(settings, HeldLog(), error_cb=setup)
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
        if is_pattern(topic) or topic in known or (error is not None and is_passing(error)):
            continue
        refused = error_of(error, topic) if error is not None else None
        if isinstance(refused, StorageMisconfigured):
            raise refused
        problem = f"there is no topic {topic!r} that the client's login may see{did_you_mean(topic, known)}"
        raise InvalidArgument(f"{place}: {problem}{_hint_of_globs(topic)}")


@dataclass(eq=False)
class _Round:
    """What the client returned in one round, by partition.

    `ends`: where logs end, behind the records. `resets`: the client lost its place. `others`: the log was cut. `errors`
    stop partitions.
    """

    records: dict[Place, TakenRecords] = field(default_factory=dict)
    ends: dict[Place, int] = field(default_factory=dict)
    resets: set[Place] = field(default_factory=set)
    others: set[Place] = field(default_factory=set)
    errors: dict[Place, TieredIndexError] = field(default_factory=dict)


@dataclass(eq=False)
class KafkaSource:
    """Follows the topics of one cluster for one index.

    `restart` reads every partition from its begin. `commit_group` publishes durable positions as offsets of a group.
    Raises `InvalidArgument` for a missing topic, `ConfigError` if the index follows another cluster,
    `StorageUnavailable` and `StorageMisconfigured` if the cluster does not answer or refuses.

    Where partitions are read on is decided by `LogPositions`, what is whole by `TopicReads`. The other attributes are
    the arguments, the clients, and one answer each about partitions, in the states of the module's table.
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
    dropped_keys: Sequence[str] = ()
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
        self._setup, log = SetupErrors(self.place, settings), HeldLog()
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
        # the last time when all partitions answered
        self._well_s = _LONG_AGO_S
        self._pending: deque[ReadBatch] = deque()
        self._problem: Exception | None = None
        # whether records are being read, which the client does not return again
        self._is_taking = False
        self._trouble: str | None = None
        self._looked_s = _LONG_AGO_S
        self._look: Generator[Iterable[Future[Any]], None, None] | None = None
        self._answers: Iterable[Future[Any]] = ()
        self._asked_s = _LONG_AGO_S
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
        trouble = None if is_failover else self._trouble
        return "; ".join(filter(None, (trouble, named, stopped, open_ones, unpublished, *stuck_clients()))) or None

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
        begun_ms, self._looked_s = self.clock.now_ms(), time.monotonic()
        metadata = first_metadata(self._consumer, self._setup)
        self.cluster = self.cluster or metadata.cluster_id or "-"
        rules = self.keys, self.cluster, self.restart, self.restart_at, self.follow
        self._positions = LogPositions(self.index, self.broker, *rules, self._pending.append)
        self._positions.check_one_cluster()
        self._reads = TopicReads(self.index, self.cluster)
        of_cluster = self.index, self.broker, self.clock, self.cluster
        self._added = AddedRules(*of_cluster, self.keys, self.dropped_keys, self.restart, self.note, self._is_live)
        _check_topics(self.address, self.place, metadata)
        self._note_patterns([name for name, topic in metadata.topics.items() if topic.error is None])
        self._look = self._looking(begun_ms, metadata)
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
            self._look, self._answers = self._looking(self.clock.now_ms()), ()
        try:
            while self._look is not None and not wait(self._answers, wait_s).not_done:
                look, self._look = self._look, None  # an error ends it
                with contextlib.suppress(StopIteration):
                    self._answers, self._asked_s = next(look), time.monotonic()
                    self._look = look
            if self._look is not None and time.monotonic() - self._asked_s > STEP_S + LATE_S:
                self._look = None
                raise ClientStuck(f"{self.place}: the client has not answered: it may be stuck")
        except ClientStuck as error:
            self._trouble = str(error)

    def _looking(self, begun_ms: int, metadata: Any = None) -> Generator[Iterable[Future[Any]], None, None]:
        """Assign the partitions that are new or have another log, and report deleted ones. Yields what it waits for.

        `metadata` is the list of topics, or the cluster is asked for it; it was asked after `begun_ms`. If there are no
        new records, only this shows that a leader is away or has returned. Raises `OffsetOutOfRange`.
        """
        try:
            metadata = metadata or asked(self.place, lambda: self._consumer.list_topics(timeout=min(STEP_S, TIMEOUT_S)))
        except StorageUnavailable as error:
            self._trouble = str(error)
            self._note_look(begun_ms, {})
            return
        topics = metadata.topics.items()
        wanted = [name for name, topic in topics if topic.error is None and self._is_wanted(name)]
        unsure = {
            name: topic.error.str() for name, topic in topics if topic.error is not None and is_passing(topic.error)
        }
        self._unsure = {name: reason for name, reason in unsure.items() if self._is_wanted(name)}
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
        self._note_look(begun_ms, looks)

    def _note_look(self, begun_ms: int, ends: Mapping[str, Mapping[Name, int]]) -> None:
        """Note the ends of the logs of topics, of those that could be asked for all partitions."""
        self._reads.look(begun_ms, {partition.name.topic for partition in self._known()}, ends)

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
        durable = self._positions.newest_names() if waiting else {}
        away, ends = dict[Place, str](), dict[Place, int]()
        for place in sorted(there):
            try:
                log = range_in(ranges, place)
                if place in waiting and place in self._waiting:
                    self._take_up(place, durable.get(place), ids.get(place[0], ""), log)
                if place in self._partitions:
                    self._partitions[place].look_at(log, self.clock.now_ms())
                    ends[place] = log.high
            except StorageUnavailable as error:
                away[place] = str(error)
            except (StorageMisconfigured, CorruptFile) as error:
                self._fail(place, error)
        return away, ends

    def _is_wanted(self, name: str) -> bool:
        return any(_fits(name, pattern) for pattern in self.address.topics)

    def _note_patterns(self, known: list[str]) -> None:
        for pattern in self.address.topics:
            if is_pattern(pattern) and not any(_fits(name, pattern) for name in known):
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

    def _take_up(self, place: Place, durable: tuple[Name, int] | None, topic_id: str, log: LogRange) -> None:
        """Read a partition on, where `LogPositions.taken_up` says."""
        # before its position: which records have which keys
        self._added.of(place[0], topic_id)
        partition, at = self._positions.taken_up(self._partitions.get(place), place, durable, topic_id, log)
        self._consumer.incremental_assign([kafka.TopicPartition(*place, at)])
        self._assigned.add(place)
        self._partitions[place] = partition
        self._waiting.discard(place)

    def _is_live(self, name: Name) -> bool | None:
        """Return whether a partition's log is the one of a name; None: not known now."""
        partition = self._partitions.get((name.topic, name.partition))
        if partition is None or partition.key in self._waiting:
            return None
        return partition.name.store == name.store and partition.key not in self._gone

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
        self.index.put_source_batch(no_entries(self.index), f"{LOST_PREFIX}{store}", end)

    def settled(self) -> list[tuple[Name, int]]:
        """Return up to where partitions are durable, of those whose logs are known to be the ones put. Any thread."""
        durable = positions_by_store(self.index.durable_positions())
        known = [partition for partition in self._known() if partition.is_checked]
        names = [partition.name for partition in known if partition.key not in self._waiting]
        return [(name, durable[name.store]) for name in names if name.store in durable]

    def _durable(self) -> dict[Place, int]:
        """Return the durable position of each partition that has one."""
        durable = self.index.durable_positions()
        positions = {partition.key: durable.get(str(partition.name)) for partition in self._known()}
        return {place: position for place, position in positions.items() if position is not None}

    def all_keys(self) -> RecordKeys:
        """Return the extraction of all keys that this run and earlier runs put."""
        return self._positions.all_keys()

    # the protocol `Source`

    def document(self, topic: str) -> TopicDocument:
        """As `Source`."""
        return self._added.document(topic)

    def lacks(self, messages: int, hidden: int, left_out: int) -> list[str]:
        """Return why none of the records has a key."""
        every = self._added.all_of_run
        return [] if any(keys.has_found for keys in every) else max((keys.lacks(messages) for keys in every), key=len)

    def counts(self) -> dict[str, Any]:
        """Return the counts that only this source has, for JSON."""
        every = self._added.all_of_run
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
            "no_json": sum(keys.no_json for keys in every),
            "no_json_first": [place for keys in every for place in keys.no_json_first][:NAMED],
            "too_long": sum(keys.too_long for keys in every),
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
                "Partitions whose records after an open transaction can't be read.",
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
        for batch in self._added.batches(lambda: time.monotonic() > until_s):
            yield batch
            self._heard_s = time.monotonic()
        try:
            self._go_on_looking()
        except TieredIndexError:
            yield from self._hand_over()
            raise
        while self._problem is None:
            has_any = self._take_in(self._consumed(until_s))
            self._is_taking = False
            yield from self._hand_over()
            if not has_any or time.monotonic() > until_s:
                break
        going_on = [partition for partition in self._known() if partition.key not in self._failed]
        caught_up = not self._waiting and all(partition.is_done() for partition in going_on) and self._added.is_done
        is_ending = caught_up and not self.follow
        yield from self._reads.told(self._put_positions(), is_ending=is_ending)
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

    def last_batches(self) -> Generator[Batch, None, None]:
        """Yield the times before which all records of topics are put, unless the index has them."""
        yield from self._reads.told(self._put_positions(), is_ending=True)

    def _put_positions(self) -> dict[Name, int]:
        return {partition.name: partition.position for partition in self._partitions.values()}

    def _known(self) -> list[Partition]:
        return [partition for place, partition in list(self._partitions.items()) if place not in self._gone]

    def _hand_over(self) -> Generator[Batch, None, None]:
        """Yield the batches that were read. If one is not put, it and the later ones stay pending."""
        while self._pending:
            partition, batch, newest_ms, oldest_ms, epoch = self._pending[0]
            begun_s = time.monotonic()
            yield batch
            # a put may wait for long, and that is no silence of the brokers
            self._heard_s += time.monotonic() - begun_s
            self._pending.popleft()
            partition.position = max(partition.position, batch.position)
            partition.newest_ms = newest_ms or partition.newest_ms
            if oldest_ms is not None:
                partition.oldest.add(batch.position, oldest_ms)
            self._reads.has_moved = True
            # after the records: an older epoch than theirs only makes the records be compared
            if epoch is not None and epoch != partition.epoch:
                columns = no_entries(self.index)
                yield Batch(source=f"{EPOCH_PREFIX}{batch.source}", position=epoch, columns=columns)
                partition.epoch = epoch

    def _consumed(self, until_s: float) -> Iterator[list[Any]]:
        """Yield messages of the client, some at a time, until there are none for now or it is time to put them."""
        count = 0
        while count < _MESSAGES:
            try:
                messages = asked(self.place, lambda: self._consumer.consume(_HELD, _WAIT_S))
            except ClientStuck as error:
                self._trouble = str(error)
                return
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
        """Make batches of the client's records, one a partition, and note its errors. Return whether there were any.

        `parts`: the messages, some at a time.
        """
        has_any, taken = False, _Round()
        for messages in parts:
            has_any = has_any or bool(messages)
            records = self._sorted(messages, taken)
            if records or taken.ends:
                self._trouble = None
            for place, several in records.items():
                self._take_new(place, several, taken)
        for place in taken.records | taken.ends:
            if self._is_read(place, taken):
                self._end_round(self._partitions[place], taken)
        # last, so that records before the reset are put
        for place in (taken.resets | taken.others) & self._partitions.keys():
            self._partitions[place].is_out_of_range = True
            self._settle(place)
        for place in taken.errors.keys() & self._assigned:
            self._fail(place, taken.errors[place])
        return has_any

    def _sorted(self, messages: Sequence[Any], taken: _Round) -> dict[Place, list[Any]]:
        """Return the records among messages by partition, and note what the others say in `taken`."""
        records: dict[Place, list[Any]] = {}
        last, several = None, list[Any]()
        for message in messages:
            place = message.topic(), message.partition()
            error = message.error()
            if error is None:
                if place != last:
                    last, several = place, records.setdefault(place, [])
                    taken.ends.pop(place, None)
                several.append(message)
                continue
            last = None
            if error.code() == kafka.KafkaError._PARTITION_EOF:
                taken.ends[place] = message.offset()
            elif error.code() == kafka.KafkaError._AUTO_OFFSET_RESET:
                taken.resets.add(place)
            elif (stopping := self._take_error(message, place)) is not None:
                taken.errors[place] = stopping
        return records

    def _is_read(self, place: Place, taken: _Round) -> bool:
        """Return whether the messages of a partition count: the client may return some after it was unassigned."""
        return place in self._partitions and place in self._assigned and place not in taken.others

    def _take_new(self, place: Place, records: Sequence[Any], taken: _Round) -> None:
        """Take the records of a partition that are new. Epochs of earlier ones show whether its log was cut."""
        if not self._is_read(place, taken):
            return
        partition = self._partitions[place]
        first_new = bisect_left(records, partition.read, key=_offset_of)
        if any((message.leader_epoch() or 0) > (partition.epoch or 0) for message in records[:first_new]):
            taken.others.add(place)
            return
        if place not in taken.records:
            taken.records[place] = TakenRecords(self._added.of(place[0]))
        taken.records[place].add(records[first_new:])

    def _end_round(self, partition: Partition, taken: _Round) -> None:
        """Keep the records of a partition to be put, and the end of its log if it is reached."""
        place = partition.key
        if partition.is_past_end:
            taken.others.add(place)
            return
        if place not in taken.errors:
            self._failed.pop(place, None)
        if not partition.is_done():
            self._heard_s = time.monotonic()
        if place in taken.records and taken.records[place].records.offsets:
            self._pending.append(taken.records[place].batch(partition, self.clock))
            partition.is_checked = True
        if (end := taken.ends.get(place)) is not None:
            partition.at_end = partition.is_checked = True
            if end > partition.read:  # compacted, aborted or control records follow the last record
                self._pending.append(partition.pass_to(end, self.index))

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

    def close(self) -> None:
        """Publish the positions, and leave the cluster. If brokers are away this takes some seconds."""
        try:
            if self.group is not None:
                self.group.finish(self._durable)
        finally:
            self._consumer.close()
            self.broker.close()


def _offset_of(message: Any) -> int:
    return int(message.offset())


def _may_pass(error: TieredIndexError) -> bool:
    """Return whether a partition that stopped is tried again: a damaged record stays damaged."""
    return not isinstance(error, CorruptFile) or isinstance(error, OffsetOutOfRange)


def is_pattern(topic: str) -> bool:
    """Return whether a name of an address is a pattern of topics."""
    return any(mark in topic for mark in "*?[")


def _hint_of_globs(topic: str) -> str:
    """Return what to add about patterns if `topic` looks like a regular expression."""
    # no name of a topic has one of these characters
    is_regex = ".*" in topic or any(mark in topic for mark in "^$|\\+(){}")
    return "; patterns are globs (orders-*), not regular expressions (orders-.*)" if is_regex else ""


def _fits(name: str, pattern: str) -> bool:
    """Return whether a topic matches `pattern`. Kafka's own topics match only their whole names."""
    return name == pattern or (is_pattern(pattern) and not name.startswith("__") and fnmatchcase(name, pattern))
