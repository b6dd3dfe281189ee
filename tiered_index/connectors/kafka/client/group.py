"""Publishes durable positions as offsets of a consumer group, for other tools: the source does not read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from tiered_index.connectors.kafka.client.broker import KafkaBroker, Place, error_of, kafka
from tiered_index.connectors.kafka.client.calls import ClientStuck

COMMIT_S = 1.0
_CLOSE_S = 3.0


class GroupOffsets:
    """The offsets of one group. An answer is taken by a later call: only then do offsets count as published.

    So they are sent again after an error. `failed` counts failed attempts; `problem` is why the last one failed. One
    thread.
    """

    def __init__(self, group: str, broker: KafkaBroker, note: Callable[[str], None]) -> None:
        self.failed = 0
        self.problem: str | None = None
        self._group, self._broker, self._note = group, broker, note
        self._published: dict[Place, int] = {}
        # Offsets that are being published, with the answer
        self._sent: tuple[dict[Place, int], Future[Any]] | None = None
        self._sent_s = float("-inf")

    def publish(self, positions: Callable[[], Mapping[Place, int]]) -> None:
        """Take an answer that is there, and publish new positions if it is time."""
        if self._sent is not None and self._sent[1].done():
            (sent, answer), self._sent = self._sent, None
            problem = _problem_of(answer, f"group {self._group}: its offsets are not published")
            if problem is None:
                self._published |= sent
            else:
                self.failed += 1
                if problem != self.problem:
                    self._note(problem)
            self.problem = problem
        if self._sent is None and time.monotonic() - self._sent_s >= COMMIT_S:
            self._sent_s = time.monotonic()
            new = {place: at for place, at in positions().items() if self._published.get(place) != at}
            if new:
                offsets = [kafka.TopicPartition(*place, at) for place, at in new.items()]
                request = kafka.ConsumerGroupTopicPartitions(self._group, offsets)
                ask = self._broker.admin.ask
                try:
                    answers = ask("alter_consumer_group_offsets", [request], request_timeout=_CLOSE_S)
                except ClientStuck as error:
                    self.problem = str(error)
                else:
                    self._sent = new, answers[self._group]

    def finish(self, positions: Callable[[], Mapping[Place, int]]) -> None:
        """Publish the last positions, and wait some seconds for the answer."""
        until_s = time.monotonic() + _CLOSE_S
        self._sent_s = float("-inf")
        self.publish(positions)
        while self._sent is not None and time.monotonic() < until_s:
            wait([self._sent[1]], until_s - time.monotonic())
            self.publish(positions)


def _problem_of(answer: Future[Any], what: str) -> str | None:
    """Return why offsets of a group were not published; None: they were. `what` begins the text."""
    try:
        failed = [partition.error for partition in answer.result().topic_partitions if partition.error is not None]
    except kafka.KafkaException as error:
        failed = [error.args[0]]
    return str(error_of(failed[0], what)) if failed else None
