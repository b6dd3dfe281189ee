"""Makes batches of the messages of the client: the records of one partition with their keys, as columns of entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.base.clock import Clock
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.kafka.client.broker import headers_of, record_of
from tiered_index.connectors.kafka.columns import RecordLists, entry_columns
from tiered_index.connectors.kafka.keys import RecordKeys
from tiered_index.connectors.kafka.partitions import Partition, ReadBatch
from tiered_index.connectors.source import Batch


@dataclass(eq=False)
class TakenRecords:
    """Records of one partition, and their keys, `keys` of each unless the record's key is the only one. One thread.

    Garbage collection would visit each message of the client, so their fields are kept in lists.
    """

    keys: RecordKeys
    records: RecordLists = field(default_factory=lambda: RecordLists(is_whole=False))
    # the keys of all records, and the number of keys of each
    texts: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    left_out: int = 0
    epoch: int | None = None

    def add(self, messages: Sequence[Any]) -> None:
        """Add messages, which are in order of offset."""
        if not messages:
            return
        if not self.keys.only_key:
            without = self.keys.without_key
            texts, counts = self._keys_of_all(messages)
            self.texts += texts
            self.counts += counts
            self.left_out += self.keys.without_key - without
        self.records.add(messages)
        self.epoch = messages[-1].leader_epoch()

    def batch(self, partition: Partition, clock: Clock) -> ReadBatch:
        """Return the batch of the records, at least one, of `partition`, which is read up to their end."""
        partition.at_end = False
        records = self.records.table()
        end, messages = int(records["offset"][-1].as_py()) + 1, len(records)
        keys, left_out = None, self.left_out
        if self.keys.only_key and (keys := self.keys.plain_keys(records["key"].chunk(0))) is None:
            without = self.keys.without_key
            keys_of_records = [
                self.keys.take_parts(key, (), None, partial("{}/{}".format, partition.place, offset))
                for key, offset in zip(records["key"].to_pylist(), records["offset"].to_pylist(), strict=True)
            ]
            self.texts, self.counts = _flat(keys_of_records)
            left_out += self.keys.without_key - without
        partition.record_bytes = self.records.size_bytes / messages
        now_ms, newest_ms = clock.now_ms(), records["timestamp"][-1].value
        newest_ms = now_ms if newest_ms is None else min(newest_ms, MAX_TIMESTAMP_MS)
        counts = self.counts if keys is None else None
        keys = pa.array(self.texts, pa.string()) if keys is None else keys
        columns = entry_columns(partition.key, records, keys, counts, now_ms)
        source = str(partition.name)
        batch = Batch(source=source, position=end, columns=columns, messages=messages, left_out=left_out)
        partition.read = end
        oldest_ms = pc.min(records["timestamp"]).value
        return ReadBatch(partition, batch, newest_ms, oldest_ms, self.epoch)

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


def _flat(keys_of_records: Sequence[Sequence[str]]) -> tuple[list[str], list[int]]:
    """Return the keys of all records, and the number of keys of each."""
    return [key for keys in keys_of_records for key in keys], [len(keys) for keys in keys_of_records]


def _place_of(message: Any) -> str:
    return f"{message.topic()}/{message.partition()}/{message.offset()}"
