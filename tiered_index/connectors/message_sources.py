"""The sources of the messages of an index: rows of files, records of Kafka, and the log of RocketMQ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_index.config import IndexConfig
from tiered_index.connectors.kafka.names import keys_in
from tiered_index.connectors.systems import FILES, KAFKA, ROCKETMQ, position_names, words_of
from tiered_index.service.read.segments.places import has_files

if TYPE_CHECKING:
    from tiered_index.connectors.files.linked_rows import FileRows
    from tiered_index.connectors.kafka.client.broker import KafkaBroker
    from tiered_index.connectors.kafka.messages import KafkaMessages
    from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
    from tiered_index.service.index import IndexService
    from tiered_index.service.read.answers.messages import MessageSource
    from tiered_index.service.read.segments.archive import SegmentArchive
    from tiered_index.service.reader import IndexReader


class MessageSources:
    """The sources of the messages of an index (None: only a store and a broker). Each is loaded when it is needed.

    - `store`: the folder of a RocketMQ store.
    - `broker`: a cluster of Kafka that has records, which `close` leaves.
    - `keys`: the rules of `--key` of entries that may not be durable yet, in addition to those that the index names.

    Threads: any, once `log` and `rows` are made.
    """

    def __init__(
        self,
        index: IndexReader[Any] | IndexService[Any] | None,
        config: IndexConfig,
        store: Path | None = None,
        broker: KafkaBroker | None = None,
        keys: Iterable[str] = (),
    ) -> None:
        self._index, self._config, self._store = index, config, store
        self._broker, self._keys = broker, set(keys)

    @property
    def _archives(self) -> Mapping[str | None, SegmentArchive]:
        return self._index.segment_archives if self._index is not None else {}

    def _names(self) -> set[str]:
        return position_names(self._index) if self._index is not None else set()

    @cached_property
    def log(self) -> RocketmqMessages:
        """The messages of RocketMQ. Raises `InvalidArgument` if the folder is not a store."""
        from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages

        config, names = self._config, self._names if self._index is not None else None
        return RocketmqMessages(
            self._store, self._archives, threads=config.query_threads, root=config.root, positions=names
        )

    @cached_property
    def rows(self) -> FileRows:
        """The rows of files. Needs an index."""
        from tiered_index.connectors.files.linked_rows import FileRows

        assert self._index is not None
        return FileRows(self._index)

    def has_rows(self, topic: str) -> bool:
        """Return whether a topic has files. No request."""
        return has_files([archive.state() for archive in self._archives.values()], self._names, topic)

    def records(self, topic: str) -> KafkaMessages | None:
        """Return the records of a topic. None: the topic is not Kafka's.

        With a broker, topics without positions are Kafka's, too, unless the index follows a RocketMQ store.
        """
        names = self._names()
        words = words_of(names, topic)
        if words is not KAFKA and (self._broker is None or words in (ROCKETMQ, FILES)):
            return None
        from tiered_index.connectors.kafka.messages import KafkaMessages

        return KafkaMessages(self._archives, self._broker, keys_in(names) | self._keys)

    def of(self, topic: str, log: RocketmqMessages | None = None) -> MessageSource:
        """Return the source of the messages of a topic; `log` is in place of all messages of RocketMQ."""
        return self.rows if self.has_rows(topic) else self.records(topic) or log or self.log

    def close(self) -> None:
        """Leave the cluster, and close the storages of files."""
        if "rows" in vars(self):
            self.rows.close()
        if self._broker is not None:
            self._broker.close()
