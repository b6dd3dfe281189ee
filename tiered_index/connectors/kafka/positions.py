"""Where the logs of partitions are read on: by the positions of the index, and by comparing records of a cut log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.archive.archiver import archived_end
from tiered_index.connectors.documents import key_rules
from tiered_index.connectors.kafka.client.broker import KafkaBroker, LogRange, Place
from tiered_index.connectors.kafka.columns import topic_id_of_file
from tiered_index.connectors.kafka.keys import RecordKeys
from tiered_index.connectors.kafka.names import BEGIN_PREFIX, EPOCH_PREFIX, Name, documents_of
from tiered_index.connectors.kafka.partitions import OffsetOutOfRange, OldestTimes, Partition, ReadBatch
from tiered_index.connectors.source import Loss, no_entries
from tiered_index.errors import ConfigError, CorruptFile, ObjectNotFound
from tiered_index.service.index import IndexService
from tiered_index.types import inclusive

RestartAt = Literal["begin", "end"]
# Most records that are compared at a time, and most entries of one key and second that are read for one
_COMPARED, _ALIKE = 100, 10_000
# Offsets before the position that are read again when a partition is taken up
_READ_AGAIN = 10


@dataclass(eq=False)
class LogPositions:
    """Decides where the partitions of one cluster are read on. One thread.

    `restart`, `restart_at` and `follow` as in `KafkaSource`. `put` gets batches without records that move a position
    and report a loss; they are to be put before what is read next.
    """

    index: IndexService
    broker: KafkaBroker
    keys: RecordKeys
    cluster: str
    restart: bool
    restart_at: RestartAt | None
    follow: bool
    put: Callable[[ReadBatch], object]

    def check_one_cluster(self) -> None:
        """Raise `ConfigError` if the index follows another cluster."""
        known = {name.cluster for text in self.index.durable_positions() if (name := Name.parse(text)) is not None}
        if known - {self.cluster}:
            raise ConfigError(
                f"this index follows the cluster {min(known)!r}, and {self.cluster!r} has other offsets: use another "
                "root and storage, or --store-name if this is the same cluster under another id"
            )

    def newest_names(self) -> dict[Place, tuple[Name, int]]:
        """Return the newest name of each partition that the index knows, and its durable position."""
        newest: dict[Place, tuple[Name, int]] = {}
        for text, position in self.index.durable_positions().items():
            if (name := Name.parse(text)) is not None and name.cluster == self.cluster:
                before = newest.get((name.topic, name.partition))
                if before is None or (before[0].generation, before[1]) < (name.generation, position):
                    newest[name.topic, name.partition] = name, position
        return newest

    def all_keys(self) -> RecordKeys:
        """Return the extraction of all keys that this run and earlier runs put."""
        if self.keys.function is not None:
            return self.keys
        return RecordKeys.by_rules({*self.keys.rules, *key_rules(documents_of(self.index.topic_documents().values()))})

    def taken_up(
        self, before: Partition | None, place: Place, durable: tuple[Name, int] | None, topic_id: str, log: LogRange
    ) -> tuple[Partition, int]:
        """Return a partition with the position at which it is read on, and the offset from which the client reads it.

        The position is that of `before`, of this run, or `durable`, that of the index; or the log's begin if the
        position belongs to another log. Raises `OffsetOutOfRange`.
        """
        begin, end = log.begin, log.end
        if before is not None:
            durable = before.name, before.position
        if durable is None:
            partition = Partition(Name(self.cluster, *place, 0, topic_id), begin, begin, high=end)
            self._begin_log(partition)
        else:
            name, position = durable
            partition = Partition(name._replace(topic_id=topic_id or name.topic_id), position, position, high=end)
            if before is not None:
                partition.newest_ms, partition.oldest = before.newest_ms, before.oldest
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
        is_read_again = partition.epoch is not None and not is_compared and begin < partition.read <= end
        partition.is_past_end = partition.read > end
        partition.is_checked = not (is_read_again or partition.is_past_end)
        return partition, max(begin, partition.read - _READ_AGAIN) if is_read_again else partition.read

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
        columns = no_entries(self.index)
        self.index.put_source_batch(columns, str(partition.name), partition.position)
        if partition.position:
            self.index.put_source_batch(columns, f"{BEGIN_PREFIX}{partition.name.store}", partition.position)

    def _begin_again(self, partition: Partition, at: int, same_log: bool) -> None:
        """Continue at an offset, under the name of another generation."""
        partition.name = partition.name.begun_again(same_log=same_log)
        partition.position = partition.read = at
        partition.epoch = None
        if not same_log:
            partition.oldest = OldestTimes()
            self._begin_log(partition)

    def _start_anew(self, partition: Partition, at: int, why: str, same_log: bool) -> None:
        """Read a partition again from an offset, and report a loss. `same_log`: its archive continues."""
        before = partition.position
        self._begin_again(partition, at, same_log)
        partition.newest_ms = None
        problem = f"{partition.place}: {why}: it is read from {at:,}"
        self.put(partition.pass_to(at, self.index, Loss("rewritten", min(at, before), before, None, problem)))

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
            self.put(partition.pass_to(target, self.index, _gap(partition, begin, end, target)))
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
        """Return whether a record before the position is in the index, and the offset after the last such record if
        others follow it. The log has offsets [`begin`, `end`).

        The records before a cut are in the index, and the later ones are not. So it looks back in steps that double
        until it finds one that is, and then bisects.
        """
        until, step = min(partition.position, end), _COMPARED
        high = until
        while high > begin:
            low = max(begin, until - step)
            after, has_others = self._last_known(partition.key, low, min(low + _COMPARED, high))
            if after is not None:
                break
            high, step = low, step * 2
        else:
            return False, None
        low = min(low + _COMPARED, high)
        if low == until and not has_others:
            return True, None
        # records before `low` are known, and from `high` on none is
        while low < high and not has_others:
            middle = (low + high) // 2 if high - low > _COMPARED else low
            later, has_others = self._last_known(partition.key, middle, min(middle + _COMPARED, high))
            if later is None:
                high, has_others = middle, False
            else:
                after, low = later, min(middle + _COMPARED, high)
        return True, after

    def _last_known(self, place: Place, begin: int, end: int) -> tuple[int | None, bool]:
        """Return the offset after the last record of offsets [`begin`, `end`) that is in the index, and whether others
        follow it there.
        """
        has_others, keys_of = False, self.all_keys().of
        for record in reversed(list(self.broker.records(place, begin, end))):
            keys = keys_of(record)
            if not keys:
                continue
            # the entry of a record without a time has the one at which it was read
            begin_ms, end_ms = 0, MAX_TIMESTAMP_MS
            if record.timestamp_ms is not None:
                begin_ms = end_ms = min(record.timestamp_ms, MAX_TIMESTAMP_MS)
            wanted = record.partition, record.offset, record.size
            for key in keys:
                items = self.index.query(record.topic, key, begin_ms, end_ms, _ALIKE).items
                if any((item.queue_id, item.offset, item.size) == wanted for item in items):
                    return record.offset + 1, has_others
            has_others = True
        return None, has_others

    def _may_be_archived_log(self, name: Name) -> bool:
        """Return whether the id of a partition's topic is that of the archived records, if both are known."""
        archive = self.index.segment_archive
        archive.refresh()
        last = archive.segments().last(name.store)
        # a damaged segment, or one that was deleted since, can't tell
        with contextlib.suppress(CorruptFile, ObjectNotFound):
            return last is None or topic_id_of_file(archive.table(last).footer) in ("", name.topic_id)
        return True


def _gap(partition: Partition, begin: int, end: int, target: int) -> Loss:
    """Return the loss: records that are skipped."""
    where = f"{partition.place} had offset {partition.read:,} next, and its log has {inclusive(begin, end)}"
    # producers choose the times of records, so records around the gap do not bound its times
    problem = f"{where}: deleted before they were read"
    return Loss("missing", partition.read, target, None, problem, topic=partition.key[0])
