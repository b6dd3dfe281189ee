"""The `Source` of Kafka's topics: reads every partition from the index's own position, without a consumer group.

The position of a partition is the offset after the last record that was put; `Name` is its key in the index. A
partition may change:

| found | what happens |
|---|---|
| a new partition, or a new topic that matches a pattern | it is read from its begin |
| a partition that is gone | it is reported once; the others go on |
| another log than the one that was read | it is read from its begin, and reported as rewritten |
| a position out of the log's range | `OffsetOutOfRange`; with `restart_at` it continues at the log's begin or end |
| offsets without a record (compacted, control records, aborted) | the position passes them |

A topic that was deleted and created again has another id. Each name has the id of its topic, and ids are compared at
the begin and every few seconds. A cluster before Kafka 2.8 has no ids. There, at the begin and if a topic reappears,
one of the last `_COMPARED` records before the position must be in the index, by place, size, time and key. Otherwise
the log counts as another one. A topic that is replaced between two checks is not detected there.

Errors are raised only after all earlier records were put. One thread uses a source; any thread may call `lag` and
`positions`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa

from tiered_index.clock import Clock, SystemClock
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, StorageUnavailable, did_you_mean
from tiered_index.follow import Batch, Lag, Loss
from tiered_index.kafka.client import (
    MISSED,
    PROMPT,
    TIMEOUT_S,
    KafkaAddress,
    asked,
    error_of,
    ids_of_topics,
    is_passing,
    kafka,
    open_admin,
    open_consumer,
    range_of,
    record_of,
)
from tiered_index.kafka.keys import Keys
from tiered_index.service.index import IndexService
from tiered_index.types import MAX_TIMESTAMP_MS

_log = logging.getLogger(__name__)
RestartAt = Literal["begin", "end"]
KEYS_PREFIX = "kafka-key:"
_NAME = re.compile(r"kafka:([^/]+)/([^/]+)/([0-9]+)(?:@([0-9a-f]{32}))?(?:#([0-9]+)(?:\.([0-9]+))?)?")
_MESSAGES = 20_000
_WAIT_S = 0.2
_ROUND_S = 0.5
_METADATA_S = 5.0
_COMMIT_S = 1.0
_LOOK_TIMEOUT_S = 5.0
# A run without `follow` raises after so long without an answer of the cluster
_PATIENCE_S = 60.0
# Most records before a position that are compared, and most entries of one key and second that are read for one
_COMPARED, _ALIKE = 100, 10_000


class OffsetOutOfRange(CorruptFile):
    """The next record of a partition, at `position`, is not in its log, which has offsets [`begin`, `end`)."""

    def __init__(self, place: str, position: int, begin: int, end: int) -> None:
        problem = f"the next offset is {position:,}, and the log has {begin:,} to {end:,}"
        hint = "--restart-at begin or --restart-at end continues there, and reports the gap"
        super().__init__(place, f"{problem}: {hint}")
        self.position, self.begin, self.end = position, begin, end


class Name(NamedTuple):
    """The key of a partition's position in the index. A log that is read from its begin again has a new `generation`.

    `topic_id` is the topic's unique id in the cluster; empty: unknown. `log` counts the logs that the partition had.
    """

    cluster: str
    topic: str
    partition: int
    generation: int = 0
    topic_id: str = ""
    log: int = 0

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the name in `text`; None: it is another source's."""
        if (found := _NAME.fullmatch(text)) is None:
            return None
        return cls(found[1], found[2], int(found[3]), int(found[5] or 0), found[4] or "", int(found[6] or 0))

    def __str__(self) -> str:
        topic_id = f"@{self.topic_id}" if self.topic_id else ""
        log = f".{self.log}" if self.log else ""
        generation = f"#{self.generation}{log}" if self.generation else ""
        return f"kafka:{self.cluster}/{self.topic}/{self.partition}{topic_id}{generation}"

    @property
    def store(self) -> str:
        """The name of the partition's log in the archive: that of a position whose generation is the log's number."""
        return str(self._replace(generation=self.log, topic_id="", log=0))

    def begun_again(self, topic_id: str = "", *, same_log: bool = False) -> Name:
        """Return the name of the partition's next generation."""
        log = self.log + (not same_log)
        return self._replace(generation=self.generation + 1, topic_id=topic_id or self.topic_id, log=log)


@dataclass(eq=False, slots=True)
class Partition:
    """One partition: `position` is the offset after its last put record, `read` after its last read one.

    `newest_ms` is the time of the last put record.
    """

    name: Name
    position: int
    read: int
    # The log may be another one: records before the position must be compared with the index
    doubted: bool = False
    # The offset at which a run without `follow` ends; None: unknown
    target: int | None = None
    at_end: bool = False
    newest_ms: int | None = None
    # The end of the log that the client saw last
    high: int = 0
    # The offset at which the log was read first; None: an earlier run began it
    first: int | None = None

    @property
    def place(self) -> str:
        """Topic and number of the partition, for messages."""
        return f"{self.name.topic}/{self.name.partition}"

    def is_done(self) -> bool:
        """Return whether all records that the log had at the begin are put."""
        return not self.doubted and (self.at_end or (self.target is not None and self.position >= self.target))


class _Read(NamedTuple):
    """A batch that was read."""

    partition: Partition
    batch: Batch
    newest_ms: int | None


_NO_ENTRIES: dict[str, Any] = {n: [] for n in ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")}


@dataclass(eq=False)
class KafkaSource:
    """Follows the topics of one cluster for one index.

    `restart` reads every partition from its begin. `commit_group` publishes durable positions as offsets of a group.
    Raises `InvalidArgument` for a missing topic, `ConfigError` if the index follows another cluster,
    `StorageUnavailable` and `StorageMisconfigured` if the cluster does not answer or refuses.
    """

    index: IndexService
    address: KafkaAddress
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    keys: Keys = field(default_factory=Keys)
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
        if self.cluster is not None and "/" in self.cluster:
            raise InvalidArgument(f"--store-name {self.cluster!r}: the name of a cluster has no /")
        group = {} if self.commit_group is None else {"group.id": self.commit_group}
        self._consumer = open_consumer(self.address.servers, self.settings, error_cb=self._note_error, **group)
        # for ranges of offsets: a broker answers such a request of the other client behind one that waits for records
        self._asking = open_consumer(self.address.servers, {**self.settings, "log_level": "0"})
        self.admin = open_admin(self.address.servers, self.settings)
        self._partitions: dict[tuple[str, int], Partition] = {}
        # Deleted partitions, and those that the broker reported as missing since the last check
        self._gone: set[tuple[str, int]] = set()
        self._missed: set[tuple[str, int]] = set()
        self._pending: deque[_Read] = deque()
        self._out_of_range: set[tuple[str, int]] = set()
        self._losses: list[Loss] = []
        self._problem: Exception | None = None
        # whether records are being taken in, which the client does not return again
        self._is_taking = False
        self.trouble: str | None = None
        self._looked_s = self._committed_s = 0.0
        self._heard_s = time.monotonic()
        self._committed: dict[tuple[str, int], int] = {}
        self._answers: dict[Any, Any] = {}
        try:
            self._look_for_partitions(begin=True)
        except BaseException:
            self._leave()
            raise
        for key in self.keys.given if self.keys.function is None else ("function",):
            index_key = f"{KEYS_PREFIX}{key}"
            if self.index.durable_position(index_key) is None:
                self.index.put_batch(_NO_ENTRIES, index_key, 1)

    def _note_error(self, error: Any, place: str = "") -> None:
        """Note an error of the client. It tries again by itself where that helps."""
        found = error_of(error, place or self.place)
        if error.fatal() or (place and not isinstance(found, StorageUnavailable)):
            self._problem = found
        else:
            self.trouble = str(found)

    def _look_for_partitions(self, *, begin: bool = False) -> None:
        """Assign the partitions that are new or have another log, and report deleted ones."""
        self._looked_s = time.monotonic()
        timeout_s = TIMEOUT_S if begin else _LOOK_TIMEOUT_S
        try:
            patience_s = TIMEOUT_S if begin else 0.0
            found = asked(self.place, lambda: self._consumer.list_topics(timeout=timeout_s), patience_s)
            known = [name for name, topic in found.topics.items() if topic.error is None]
            wanted = [name for name in known if any(_fits(name, pattern) for pattern in self.address.topics)]
            ids = asked(self.place, lambda: ids_of_topics(self.admin, found, wanted, timeout_s), patience_s)
        except StorageUnavailable as error:
            if begin:
                raise
            self.trouble = str(error)
            return
        if begin:
            self.cluster = self.cluster or found.cluster_id or "-"
            self._check_one_cluster()
            for topic in self.address.topics:
                if not any(_fits(name, topic) for name in known) and not _is_pattern(topic):
                    raise InvalidArgument(f"{self.place}: there is no topic {topic!r}{did_you_mean(topic, known)}")
        there = {(name, number) for name in wanted for number in found.topics[name].partitions}
        reading = self._partitions.keys() - self._gone
        # topics that the brokers can't describe now
        unsure = {name for name, topic in found.topics.items() if topic.error is not None and is_passing(topic.error)}
        gone = {place for place in reading - there if place[0] not in unsure}
        changed = {
            place
            for place in reading & there
            if place in self._missed or ids.get(place[0], "") not in ("", self._partitions[place].name.topic_id)
        }
        for place in sorted(gone | changed):
            self._consumer.incremental_unassign([kafka.TopicPartition(*place)])
        for place in sorted(gone):
            self.note(f"{self._partitions[place].place} is gone: it was deleted, or you may no longer read it")
        self._gone = (self._gone | gone) - there
        self._out_of_range -= gone | changed
        self._missed.clear()
        new = sorted(there - reading | changed)
        durable = self._newest_names() if new else {}
        for place in new:
            before = self._partitions.get(place)
            put = durable.get(place) if before is None else (before.name, before.position)
            try:
                partition = self._begin(place, put, ids.get(place[0], ""), restart=begin and self.restart)
                self._assign(partition)
            except StorageUnavailable as error:  # it may be deleted again: the next check decides
                if begin:
                    raise
                self.trouble = str(error)
                self._gone.add(place)
                continue
            if before is not None and partition.position == before.position:
                partition.newest_ms = before.newest_ms
            self._partitions[place] = partition
        self._ask_leaders()

    def _ask_leaders(self) -> None:
        """Request the end of each partition, and note partitions without a response since the last call.

        If there are no new records, only this shows that a leader is away or has returned.
        """
        if not all(one.done() for one in self._answers.values()):
            return  # each ends by its timeout
        if self._answers:
            failed = [one.exception() for one in self._answers.values() if one.exception() is not None]
            self.trouble = str(failed[0]) if failed else None
        places = [kafka.TopicPartition(one.name.topic, one.name.partition) for one in self._reading()]
        latest = kafka.admin.OffsetSpec.latest()
        asked_of = dict.fromkeys(places, latest)
        self._answers = self.admin.list_offsets(asked_of, request_timeout=_LOOK_TIMEOUT_S) if places else {}

    def _begin(
        self, place: tuple[str, int], put: tuple[Name, int] | None, topic_id: str, *, restart: bool
    ) -> Partition:
        """Return a partition at its position in the index or, if that belongs to another log, at its begin."""
        begin, end = self._range(place)
        target = None if self.follow else end
        if put is None or restart:
            name = Name(self.cluster or "-", *place, 0, topic_id)
            if put is not None:
                # without ids it may be another log, whose records must not count as archived
                name = put[0].begun_again(topic_id, same_log=bool(topic_id) and topic_id == put[0].topic_id)
            return Partition(name, begin, begin, target=target, high=end, first=begin)
        name, position = put
        partition = Partition(name, position, position, target=target, high=end)
        if topic_id and name.topic_id and topic_id != name.topic_id:
            self._start_anew(partition, "its topic was deleted and created again", topic_id)
        elif not topic_id or topic_id != name.topic_id:
            partition.name = name._replace(topic_id=topic_id or name.topic_id)
            # without records before the position there is nothing to compare
            partition.doubted = begin < position
        return partition

    def _assign(self, partition: Partition) -> None:
        """Read a partition from its position, or from earlier records that must be compared."""
        place = partition.name.topic, partition.name.partition
        at = max(self._range(place)[0], partition.read - _COMPARED) if partition.doubted else partition.read
        self._consumer.incremental_assign([kafka.TopicPartition(*place, at)])

    def _start_anew(self, partition: Partition, why: str, topic_id: str = "") -> None:
        """Read a partition with another log from its begin, and report a loss."""
        name, before = partition.name, partition.position
        begin = self._range((name.topic, name.partition))[0]
        partition.name = name.begun_again(topic_id)
        partition.position, partition.doubted, partition.at_end, partition.newest_ms = begin, False, False, None
        partition.high, partition.first = 0, begin
        self._pending.append(self._passed(partition, begin))
        problem = f"{partition.place}: {why}: it is read from {begin:,}"
        self._losses.append(Loss("rewritten", min(begin, before), before, None, problem))

    def _is_same_log(self, partition: Partition, messages: list[Any], end: int | None) -> bool:
        """Return whether a record before the position is in the index. If none is, read the log from its begin.

        `end` is the log's end if no message follows. While all `messages` are before the position, later ones decide.
        """
        position, keys = partition.position, self.all_keys()
        if any(self._is_put(message, keys) for message in messages if message.offset() < position):
            partition.doubted = False
            return True
        place = partition.name.topic, partition.name.partition
        if end is not None and end < position:
            self._out_of_range.add(place)
        elif end is not None or messages[-1].offset() >= position:
            why = f"none of its records before offset {position:,} is in the index"
            self._start_anew(partition, why)
            self._consumer.incremental_unassign([kafka.TopicPartition(*place)])
            self._assign(partition)
        return False

    def settled(self) -> list[tuple[Name, int]]:
        """Return up to where partitions are durable, of those whose logs are known to be the ones put. Any thread."""
        durable = positions_by_store(self.index.durable_positions())
        names = [partition.name for partition in self._reading() if not partition.doubted]
        return [(name, durable[name.store]) for name in names if name.store in durable]

    def first_offset(self, name: Name) -> int | None:
        """Return the offset at which this source began a log; None: an earlier run did. Any thread."""
        partition = self._partitions.get((name.topic, name.partition))
        return partition.first if partition is not None and partition.name.store == name.store else None

    def open_consumer(self) -> Any:
        """Return another consumer of the cluster."""
        return open_consumer(self.address.servers, {**PROMPT, **self.settings})

    def _is_put(self, message: Any, keys: Keys) -> bool:
        """Return whether the index has an entry of a message, with its place, size, time and one of its keys."""
        time_ms = min(message.timestamp()[1], MAX_TIMESTAMP_MS)
        if time_ms < 0:
            return False  # its entry has the time at which it was read
        topic, wanted = message.topic(), (message.partition(), message.offset(), _size(message))
        return any(
            (item.queue_id, item.offset, item.size) == wanted
            for key in keys.of(record_of(message))
            for item in self.index.query(topic, key, time_ms, time_ms, _ALIKE).items
        )

    def all_keys(self) -> Keys:
        """Return the extraction of all keys that this run and earlier runs put."""
        if self.keys.function is not None:
            return self.keys
        given = {*self.keys.given, *keys_in(self.index.durable_positions())}
        return Keys(tuple(given - {"function"}))

    def _newest_names(self) -> dict[tuple[str, int], tuple[Name, int]]:
        newest: dict[tuple[str, int], tuple[Name, int]] = {}
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

    def _range(self, place: tuple[str, int]) -> tuple[int, int]:
        return range_of(self._asking, *place)

    # the protocol `Source`

    def counts(self) -> dict[str, Any]:
        """Return the counts that only this source has, for JSON."""
        return {"no_json": self.keys.no_json, "no_json_first": self.keys.no_json_first}

    def positions(self) -> dict[str, int]:
        """Return the offset after the last put record of each partition, by name."""
        return {str(partition.name): partition.position for partition in list(self._partitions.values())}

    def batches(self) -> Generator[Batch, None, None]:
        """Yield new records, in batches of one partition.

        Raises `OffsetOutOfRange`, `InvalidArgument` after an earlier round failed among records, and as `error_of`.
        """
        if self._is_taking:
            raise InvalidArgument(f"{self.place}: an earlier round failed among records: open another source")
        until_s = time.monotonic() + _ROUND_S
        yield from self._hand_over()
        if time.monotonic() - self._looked_s > _METADATA_S:
            self._look_for_partitions()
        while self._problem is None:
            messages = asked(self.place, lambda: self._consumer.consume(_MESSAGES, _WAIT_S))
            self._is_taking = True
            self._take_in(messages)
            self._is_taking = False
            for partition in self._reading():
                partition.high = self._high(partition)
            yield from self._hand_over()
            if not messages or self._out_of_range or time.monotonic() > until_s:
                break
        self._publish_positions()
        if self._out_of_range:
            self._look_for_partitions()  # detects a topic that was created again
            self._settle_range()
        if self._problem is not None:
            raise self._problem
        caught_up = not self._losses and all(partition.is_done() for partition in self._reading())
        if not caught_up and not self.follow and time.monotonic() - self._heard_s > _PATIENCE_S:
            raise StorageUnavailable(
                f"{self.place}: no answer for {_PATIENCE_S:g} seconds: {self.trouble or 'silence'}"
            )
        yield Batch(source="", position=0, losses=tuple(self._losses), caught_up=caught_up, pause=0.0)
        self._losses.clear()

    def _reading(self) -> list[Partition]:
        return [partition for place, partition in list(self._partitions.items()) if place not in self._gone]

    def _hand_over(self) -> Generator[Batch, None, None]:
        """Yield the batches that were read. If one is not put, it and the later ones stay pending."""
        while self._pending:
            partition, batch, newest_ms = self._pending[0]
            yield batch
            self._pending.popleft()
            partition.position = max(partition.position, batch.position)
            partition.newest_ms = newest_ms or partition.newest_ms

    def _take_in(self, messages: Iterable[Any]) -> None:
        """Sort the client's records into batches, and note its errors."""
        of_partitions: dict[tuple[str, int], list[Any]] = {}
        ends: dict[tuple[str, int], int] = {}
        for message in messages:
            place = message.topic(), message.partition()
            error = message.error()
            if error is None:
                of_partitions.setdefault(place, []).append(message)
                ends.pop(place, None)
            elif error.code() == kafka.KafkaError._PARTITION_EOF:
                ends[place] = message.offset()
            elif error.code() == kafka.KafkaError._AUTO_OFFSET_RESET:
                self._out_of_range.add(place)
            elif error.name() in MISSED:
                self._missed.add(place)
                self._looked_s = 0.0
            else:
                self._note_error(error, f"{place[0]}/{place[1]}")
        if of_partitions or ends:
            self._heard_s, self.trouble = time.monotonic(), None
        for place in of_partitions | ends:
            several, end, partition = of_partitions.get(place, []), ends.get(place), self._partitions.get(place)
            if partition is None:
                continue
            if partition.doubted:
                if not self._is_same_log(partition, several, end):
                    continue
                several = [message for message in several if message.offset() >= partition.read]
            if several:
                self._pending.append(self._read(partition, several))
            if end is not None:
                partition.at_end = True
                if end > partition.read:  # compacted, aborted or control records follow the last record
                    self._pending.append(self._passed(partition, end))

    def _passed(self, partition: Partition, end: int) -> _Read:
        partition.read = end
        return _Read(partition, Batch(source=str(partition.name), position=end, columns=_NO_ENTRIES), None)

    def _read(self, partition: Partition, messages: list[Any]) -> _Read:
        """Return the batch of messages of one partition, which are in order of offset."""
        partition.at_end = False
        end = messages[-1].offset() + 1
        without = self.keys.without_key
        if self.keys.only_key:
            found = [message.key() for message in messages]
            with_key = [key is not None and 0 < len(key) <= _SURE_BYTES for key in found]
            try:
                # most keys are short texts: Arrow checks them all at once
                keys = pa.array(found if all(with_key) else None, pa.binary()).cast(pa.string())
            except (pa.ArrowInvalid, TypeError):
                keys, rows = self._slow_keys(messages)
            else:
                rows = None
        else:
            keys, rows = self._slow_keys(messages)
        offsets = np.array([message.offset() for message in messages], np.int64)
        sizes = np.array([_size(message) for message in messages], np.int64)
        times = np.array([message.timestamp()[1] for message in messages], np.int64)
        # A record without a time gets the present. A time beyond the greatest one becomes that, and is quarantined.
        times = np.where(times < 0, self.clock.now_ms(), np.minimum(times, MAX_TIMESTAMP_MS))
        newest_ms = int(times[-1])
        if rows is not None:
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
        left_out = self.keys.without_key - without
        batch = Batch(
            source=str(partition.name), position=end, columns=columns, messages=len(messages), left_out=left_out
        )
        partition.read = end
        return _Read(partition, batch, newest_ms)

    def _slow_keys(self, messages: list[Any]) -> tuple[Any, Any]:
        """Return the keys, one a row, and the number of each key's record."""
        found = [self.keys.take(record_of(message)) for message in messages]
        rows = np.repeat(np.arange(len(found)), [len(keys) for keys in found])
        return pa.array([key for keys in found for key in keys], pa.string()), rows

    def _settle_range(self) -> None:
        """Continue at the begin or end of logs that lack the next record. Raises `OffsetOutOfRange` without
        `restart_at`.
        """
        for place in sorted(self._out_of_range):
            partition = self._partitions[place]
            try:
                begin, end = self._range(place)
            except StorageUnavailable as error:  # the next round asks again
                self.trouble = str(error)
                continue
            self._out_of_range.discard(place)
            # otherwise a replica was behind its leader
            if not begin <= partition.read <= end:
                if self.restart_at is None:
                    raise OffsetOutOfRange(partition.place, partition.read, begin, end)
                target = begin if self.restart_at == "begin" else end
                self._losses.append(_gap(partition, begin, end, target))
                if target < partition.read:
                    partition.name = partition.name.begun_again()
                    partition.position = partition.first = target
                partition.doubted = False
                self._pending.append(self._passed(partition, target))
            self._consumer.incremental_unassign([kafka.TopicPartition(*place)])
            self._assign(partition)

    def _publish_positions(self) -> None:
        """Commit durable positions for the group. They are for other tools; this source does not read them."""
        if self.commit_group is None or time.monotonic() - self._committed_s < _COMMIT_S:
            return
        self._committed_s = time.monotonic()
        self._commit(wait=False)

    def _commit(self, *, wait: bool) -> None:
        durable = self.index.durable_positions()
        of_places = {place: durable.get(str(one.name)) for place, one in self._partitions.items()}
        new = {place: at for place, at in of_places.items() if at is not None and self._committed.get(place) != at}
        if new:
            offsets = [kafka.TopicPartition(*place, at) for place, at in new.items()]
            try:
                self._consumer.commit(offsets=offsets, asynchronous=not wait)
            except kafka.KafkaException as error:
                self.trouble = f"group {self.commit_group}: {error.args[0].str()}"
            else:
                self._committed |= new

    def lag(self) -> Lag:
        """Return the number of records that are not put yet, and the greatest age of a last put record of their
        partitions.
        """
        end = behind = 0
        seconds: float | None = 0.0
        now_ms = self.clock.now_ms()
        for partition in self._reading():
            high = max(partition.high, partition.position, partition.target or 0)
            end += high
            if high > partition.position and not partition.at_end:
                behind += high - partition.position
                if partition.newest_ms is None or seconds is None:
                    seconds = None
                else:
                    seconds = max(seconds, (now_ms - partition.newest_ms) / 1000)
        return Lag(end, behind, None if self.trouble is not None else seconds)

    def _high(self, partition: Partition) -> int:
        """Return the end of a partition's log that the client saw last. It waits for other calls of the client."""
        place = kafka.TopicPartition(partition.name.topic, partition.name.partition)
        with contextlib.suppress(kafka.KafkaException):
            found = self._consumer.get_watermark_offsets(place, cached=True)
            if found is not None and found[1] > 0:
                return int(found[1])
        return partition.high

    def close(self) -> None:
        """Publish the positions, and leave the cluster."""
        if self.commit_group is not None:
            self._commit(wait=True)
        self._leave()

    def _leave(self) -> None:
        self._consumer.close()
        self._asking.close()


def positions_by_store(positions: Mapping[str, int]) -> dict[str, int]:
    """Return the greatest position of each log of a partition, whatever its generation, by `Name.store`."""
    found: dict[str, int] = {}
    for text, position in positions.items():
        if (name := Name.parse(text)) is not None:
            found[name.store] = max(position, found.get(name.store, 0))
    return found


def keys_in(positions: Iterable[str]) -> set[str]:
    """Return what `--key` gave by the names of an index's positions; "function": keys of a function."""
    return {name.removeprefix(KEYS_PREFIX) for name in positions if name.startswith(KEYS_PREFIX)}


_SURE_BYTES = 32_767


def _size(message: Any) -> int:
    key, headers = message.key(), message.headers()
    size = len(message) + (0 if key is None else len(key))
    return size if not headers else size + sum(len(name.encode()) + len(value or b"") for name, value in headers)


def _gap(partition: Partition, begin: int, end: int, target: int) -> Loss:
    """Return the loss: records that are skipped, or that were put and are not in the log any more."""
    where = f"{partition.place} had offset {partition.read:,} next, and its log has {begin:,} to {end:,}"
    if target >= partition.read:
        return Loss("missing", partition.read, target, None, f"{where}: deleted before they were read")
    return Loss(
        "rewritten", target, partition.read, None, f"{where}: the log begins again, and is read from {target:,}"
    )


def _is_pattern(topic: str) -> bool:
    return any(mark in topic for mark in "*?[")


def _fits(name: str, pattern: str) -> bool:
    """Return whether a topic matches `pattern`. Kafka's own topics match only their whole names."""
    return name == pattern or (_is_pattern(pattern) and not name.startswith("__") and fnmatchcase(name, pattern))
