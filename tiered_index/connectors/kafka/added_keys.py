"""The keys of followed topics: a run may add some, whose entries for earlier records are then put, or drop some.

Positions say which keys the records of each offset have (`topic_keys.py`). A run with a new key reads the earlier
records again, in a pass for this key alone with a position of its own: from the broker, or from the archive where the
broker has deleted them. So a killed run loses and doubles nothing. Records that neither has are named, by the log of
the storage for good. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tiered_index.base.clock import Clock
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.documents import document_of, key_rules
from tiered_index.connectors.kafka.client.broker import KafkaBroker, LogRange
from tiered_index.connectors.kafka.columns import FORMAT, records_of
from tiered_index.connectors.kafka.keys import FUNCTION, RecordKeys
from tiered_index.connectors.kafka.names import Name, documents_of, positions_by_store
from tiered_index.connectors.kafka.record import KafkaRecord
from tiered_index.connectors.source import Batch, no_entries
from tiered_index.errors import InvalidArgument, StorageUnavailable, listed
from tiered_index.format.names import topic_of_store
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService
from tiered_index.service.log.records import LostRange
from tiered_index.service.log.topic_keys import (
    TopicKeys,
    added_positions,
    dropped_positions,
    rules_in,
    rules_of,
    scope_of,
)
from tiered_index.types import inclusive

# records that are read again at a time
_AT_ONCE = 10_000
NO_LOG = LogRange(0, 0, 0)


@dataclass(eq=False)
class AddedRules:
    """The rules of keys of the topics of one cluster. `wanted` are those of this run, which may change them.

    `restart`: all records are read again, so that no pass is needed. `is_live` returns whether a
    partition has the log of a name; None: not known now.
    """

    index: IndexService
    broker: KafkaBroker
    clock: Clock
    cluster: str
    wanted: RecordKeys
    dropped: Collection[str]
    restart: bool
    note: Callable[[str], None]
    is_live: Callable[[Name], bool | None]
    # by topic
    _keys: dict[str, RecordKeys] = field(default_factory=dict)
    _documents: dict[str, TopicDocument] = field(default_factory=dict)
    _positions: dict[str, int] = field(default_factory=dict)

    def of(self, topic: str, topic_id: str = "") -> RecordKeys:
        """Return the extraction of the keys of a topic's new records. The first call for a topic settles them.

        `topic_id` is its unique id in the cluster; empty: unknown. Raises `InvalidArgument` for a key that can't be
        dropped.
        """
        if topic not in self._keys:
            self._settle(topic, topic_id)
        elif topic_id and topic_id != (facts := self._documents[topic].facts).get("topic_id"):
            self._documents[topic] = document_of("kafka", facts | {"topic_id": topic_id})
        return self._keys[topic]

    def document(self, topic: str) -> TopicDocument:
        """Return the document of a topic: cluster, id, and all rules by which records have keys, or had."""
        self.of(topic)
        return self._documents[topic]

    def _settle(self, topic: str, topic_id: str) -> None:
        durable = self.index.durable_positions()
        self._positions |= {name: at for name, at in durable.items() if at > self._positions.get(name, -1)}
        scope, rules = f"kafka:{self.cluster}/{topic}", list(self.wanted.rules)
        known, ever = rules_of(durable, scope), rules_in(durable, scope)
        if both := [rule for rule in rules if rule in self.dropped]:
            raise InvalidArgument(f"--key {both[0]} and --drop-key {both[0]} are both given")
        if unknown := sorted({*self.dropped} - {*ever}):
            has = listed(known) or "none yet"
            raise InvalidArgument(f"--drop-key {unknown[0]}: it is no key of topic {topic}, which has {has}")
        ends = {log: at for log, at in positions_by_store(durable).items() if scope_of(log) == scope}
        dropped = [rule for rule in known if rule in self.dropped]
        added = [rule for rule in rules if rule not in known]
        # archived records of another cluster still have their keys
        before = documents_of([self.index.topic_document(topic)])
        facts = {"cluster": self.cluster, "keys": sorted({*key_rules(before), *ever, *rules})}
        # a broker that does not answer now tells no id
        topic_id = topic_id or next((document.facts.get("topic_id", "") for document in before), "")
        self._documents[topic] = document_of("kafka", facts | ({"topic_id": topic_id} if topic_id else {}))
        if added:
            # before the first entry by a new rule
            self.index.describe_topics([topic], self._documents[topic])
        for rule in added:
            self._put(added_positions(self._positions, scope, rule, {} if self.restart else ends))
        for rule in dropped:
            self._put(dropped_positions(self._positions, scope, rule, ends))
        further = [rule for rule in known if rule not in rules and rule not in dropped]
        if known and (added or dropped):
            # at once: lookups must know which records lack entries of a new key
            self.index.flush()
        if further:
            options = listed([f"--key {rule}" for rule in further])
            self.note(f"{topic}: new records are also indexed by {options}, as in earlier runs; --drop-key ends that")
        if FUNCTION in further:
            self.note(f"{topic}: a program followed it with a function of its own, whose keys this run can't find")
            further.remove(FUNCTION)
        is_mine = not further or self.wanted.function is not None
        self._keys[topic] = self.wanted if is_mine else RecordKeys((*rules, *further))

    def _put(self, positions: Mapping[str, int]) -> None:
        for name, at in positions.items():
            self.index.put_source_batch(no_entries(self.index), name, at)
            self._positions[name] = at

    @property
    def all_of_run(self) -> list[RecordKeys]:
        """The extractions of all topics, which count."""
        further = [keys for keys in self._keys.values() if keys is not self.wanted]
        return [self.wanted, *further]

    def _logs(self) -> list[str]:
        """Return the logs that have a pass which is not done."""
        scopes = {f"kafka:{self.cluster}/{topic}" for topic in self._keys}
        logs = [log for log in positions_by_store(self._positions) if scope_of(log) in scopes]
        return [log for log in logs if TopicKeys(self._positions, log).passes]

    @property
    def is_done(self) -> bool:
        """Whether all earlier records have all keys."""
        return not self._logs()

    def batches(self, until: Callable[[], bool]) -> Iterator[Batch]:
        """Yield entries of added keys for earlier records, a part of them, until it is time. Raises as the broker."""
        for log in self._logs():
            while not until() and (passes := (keys := TopicKeys(self._positions, log)).passes):
                begin = passes[0].read
                end = keys.next_change(begin)
                assert end is not None, "a pass has an end"
                together = [key_pass for key_pass in passes if key_pass.read == begin]
                if (read := self._records(log, begin, end, [key_pass.rule for key_pass in together])) is None:
                    break
                records, end = read
                held = [set(of_record) for of_record in self._keys_of(keys.holding(begin), records)]
                for key_pass in together:
                    columns = self._entries(log, records, held, key_pass.rule)
                    yield Batch(source=key_pass.source, position=end, columns=columns)
                    self._positions[key_pass.source] = end

    def _keys_of(self, rules: Sequence[str], records: Sequence[KafkaRecord]) -> list[list[str]]:
        """Return the keys of each record by some rules."""
        found_by: list[RecordKeys] = []
        if named := [rule for rule in rules if rule != FUNCTION]:
            found_by.append(RecordKeys(named, are_new=False))
        if FUNCTION in rules and self.wanted.function is not None:
            found_by.append(self.wanted)
        return [list(dict.fromkeys(key for keys in found_by for key in keys.of(record))) for record in records]

    def _entries(self, log: str, records: Sequence[KafkaRecord], held: Sequence[set[str]], rule: str) -> dict[str, Any]:
        """Return the entries of records by one rule, without the keys that they have, to which these are added."""
        rows = list[tuple[str, KafkaRecord]]()
        for record, has, keys in zip(records, held, self._keys_of([rule], records), strict=True):
            rows += [(key, record) for key in keys if key not in has]
            has.update(keys)
        now_ms, topic = self.clock.now_ms(), topic_of_store(log)
        times = [now_ms if record.timestamp_ms is None else record.timestamp_ms for _, record in rows]
        return {
            "topic": pa.array([topic] * len(rows), pa.string()),
            "queue_id": [record.partition for _, record in rows],
            "key": pa.array([key for key, _ in rows], pa.string()),
            "offset": [record.offset for _, record in rows],
            "size": [record.size for _, record in rows],
            "timestamp_ms": [min(time_ms, MAX_TIMESTAMP_MS) for time_ms in times],
        }

    def _records(self, log: str, begin: int, end: int, rules: Sequence[str]) -> tuple[list[KafkaRecord], int] | None:
        """Return records from an offset on, and the offset behind them, at most `end`. Lost ones are named.

        None: the broker can't be asked now.
        """
        name = Name.parse(log)
        assert name is not None
        place, there = (name.topic, name.partition), NO_LOG
        if (is_live := self.is_live(name)) is None:
            return None
        if is_live:
            try:
                there = self.broker.range(place)
                if begin >= there.end:
                    # the log was cut: what it gets there is new
                    return [], end
                if there.begin <= begin:
                    until = min(end, begin + _AT_ONCE, there.end)
                    return list(self.broker.records(place, begin, until)), until
            except StorageUnavailable:
                return None
        archive = self.index.segment_archive
        archive.refresh()
        segments = archive.segments()
        if (segment := segments.holding(log, begin)) is not None:
            table, until = FORMAT.read(archive, segment).records, min(end, segment.end)
            return [record for record in records_of(table) if begin <= record.offset < until], until
        following = segments.after(log, begin)
        bounds = [end, *([] if following is None else [following.start])]
        until = min([*bounds, there.begin]) if begin < there.begin else min(bounds)
        self._lose(log, begin, until, rules)
        return [], until

    def _lose(self, log: str, begin: int, end: int, rules: Sequence[str]) -> None:
        topic = topic_of_store(log)
        ranges = [LostRange(log, "missing", begin, end, topic=topic, key=rule) for rule in rules]
        self.index.record_ranges([lost.lost(0, MAX_TIMESTAMP_MS) for lost in ranges])
        options = listed([f"--key {rule}" for rule in rules])
        self.note(f"{log}: neither the broker nor the archive has offsets {inclusive(begin, end)} for {options}")
