"""The names of positions and of logs of Kafka's partitions. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from tiered_index.format.topic_documents import TopicDocument

BEGIN_PREFIX = "kafka-begin:"
"""Before a log's name in the archive: the position is the offset at which the log was read first, if it is not 0."""
LOST_PREFIX = "kafka-lost:"
"""Before a log's name in the archive: the position is the offset before which what is not archived is lost."""
EPOCH_PREFIX = "kafka-epoch:"
"""Before a partition's name: the position is the epoch of the leader that wrote the last put record."""
_NAME = re.compile(r"kafka:([^/]+)/([^/]+)/([0-9]+)(?:@([0-9a-f]{32}))?(?:#([0-9]+)(?:\.([0-9]+))?)?")


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
        if (parts := _NAME.fullmatch(text)) is None:
            return None
        return cls(parts[1], parts[2], int(parts[3]), int(parts[5] or 0), parts[4] or "", int(parts[6] or 0))

    def __str__(self) -> str:
        topic_id = f"@{self.topic_id}" if self.topic_id else ""
        log = f".{self.log}" if self.log else ""
        generation = f"#{self.generation}{log}" if self.generation else ""
        return f"kafka:{self.cluster}/{self.topic}/{self.partition}{topic_id}{generation}"

    @property
    def store(self) -> str:
        """The name of the partition's log in the archive: that of a position whose generation is the log's number."""
        return str(self._replace(generation=self.log, topic_id="", log=0))

    def begun_again(self, *, same_log: bool) -> Name:
        """Return the name of the partition's next generation."""
        return self._replace(generation=self.generation + 1, log=self.log + (not same_log))


def positions_by_store(positions: Mapping[str, int]) -> dict[str, int]:
    """Return the greatest position of each log of a partition, whatever its generation, by `Name.store`."""
    greatest: dict[str, int] = {}
    for text, position in positions.items():
        if (name := Name.parse(text)) is not None:
            greatest[name.store] = max(position, greatest.get(name.store, 0))
    return greatest


def documents_of(documents: Iterable[TopicDocument | None]) -> list[TopicDocument]:
    """Return the documents of topics of Kafka."""
    return [document for document in documents if document is not None and document.connector == "kafka"]
