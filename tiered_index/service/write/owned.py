"""What the sources of an index own: the names of their positions, and the queues whose offsets they give.

Some sources choose the offsets of a log of their own, as of the rows of files. An entry from outside (of a program, a
request, a file of entries, or a DataFrame) may not use the queue of such a log: it could pass for a row or a record, or
hide one. Messages in a common log say their topic themselves, so their queues are open. Pure. Threads: any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from tiered_index.base.source_names import SYSTEM_NAME, messages_of_log
from tiered_index.errors import OwnedBySource
from tiered_index.format.names import TOPICS_QUEUE, queue_of_log
from tiered_index.service.log.reads import READ_PREFIX
from tiered_index.service.log.state import LogState
from tiered_index.service.log.topic_keys import TOPIC_KEYS

_KEYS = f"{TOPIC_KEYS}(?:-[a-z]+)?:"
# a program may say in two positions how much of its own source it has read
_OF_SOURCE = re.compile(f"(?:{READ_PREFIX})?{SYSTEM_NAME}|{_KEYS}")
_OF_FOLLOWER = re.compile(f"{READ_PREFIX}|{SYSTEM_NAME}|{_KEYS}")


def is_of_source(position: str, connectors: Container[str] = ()) -> bool:
    """Return whether only a source that an index follows sets a position of this name.

    `connectors` are those that wrote topics: the names of their positions begin with theirs.
    """
    return _OF_SOURCE.match(position) is not None or position.partition(":")[0] in connectors


def prefix_of_follower(position: str) -> str:
    """Return the beginning of a position's name that only programs beside the writer use; empty: it has none."""
    named = _OF_FOLLOWER.match(position)
    return "" if named is None else named[0]


def check_position_name(position: str, connectors: Container[str] = ()) -> None:
    """Raise `OwnedBySource` if a position from outside has a name as of `is_of_source`."""
    if is_of_source(position, connectors):
        named = _OF_SOURCE.match(position)
        begin = f"{position.partition(':')[0]}:" if named is None else named[0]
        raise OwnedBySource(
            f"positions named {begin}... are those of sources that an index follows: choose another name"
        )


def names_of(state: LogState) -> set[str]:
    """Return the names in the state of a log that may say which queues sources own."""
    return {*state.positions, *state.listed_logs, *state.given_up, *state.expired.segments}


@dataclass(frozen=True, slots=True)
class SourceQueues:
    """The queues of each topic that sources own, and what they have. For every topic it is also `TOPICS_QUEUE`."""

    of_topics: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str], connectors: Container[str] = ()) -> Self:
        """Return the queues by the names of an index's positions and stores, and the connectors that wrote topics."""
        queues: dict[str, dict[int, str]] = {}
        for name in names:
            what, queue = messages_of_log(name), queue_of_log(name)
            if what is None and (other := name.partition(":")[0]) in connectors and not is_of_source(name):
                what = f"messages of {other}"
            if what is not None and queue is not None:
                queues.setdefault(queue[0], {})[queue[1]] = what
        return cls(queues)

    def check(self, topic: str, queue_id: int) -> None:
        """Raise `OwnedBySource` if an entry from outside may not be in a queue of a topic."""
        if queue_id == TOPICS_QUEUE:
            raise OwnedBySource(f"queue_id {queue_id} is for rows of files whose topic is a field: choose another one")
        if (what := self.of_topics.get(topic, {}).get(queue_id)) is not None:
            raise OwnedBySource(
                f"queue_id {queue_id} of topic {topic!r:.80} has {what} that this index follows: "
                "choose another topic or queue"
            )

    def check_columns(
        self, topic_ids: npt.NDArray[np.int32], queue_ids: npt.NDArray[np.int32], name_of: Callable[[int], str]
    ) -> None:
        """Check n entries, as `check`; `name_of` returns the topic of an id."""
        if not len(queue_ids):
            return
        if int(queue_ids.max()) == TOPICS_QUEUE:
            self.check("", TOPICS_QUEUE)
        if not self.of_topics:
            return
        is_one_topic = topic_ids.min() == topic_ids.max()
        for topic_id in (topic_ids[:1] if is_one_topic else np.unique(topic_ids)).tolist():
            topic = name_of(topic_id)
            for queue_id in self.of_topics.get(topic, ()):
                if np.any((topic_ids == topic_id) & (queue_ids == queue_id)):
                    self.check(topic, queue_id)
