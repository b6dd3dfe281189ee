"""Reads the messages of a topic around a moment, without a key: its queues, merged by store time.

A page has the places of its first and last messages, so that earlier and later pages neither repeat nor omit a message.
Expired and erased messages are skipped. One `Browser` serves one request.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tiered_index.base.call import check_deadline
from tiered_index.connectors.contract import BrowsedMessages, PlacedMessage
from tiered_index.connectors.rocketmq.remoting.archived_queues import is_gone
from tiered_index.connectors.rocketmq.remoting.pulling import Ends, PulledQueue, Queues
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.service.log.expired import Expired

MOST_QUEUES = 64
"""Most queues of one request, because each needs reads of its own."""
_CURSOR = re.compile(r"(earlier|later):((?:[0-9]{1,9}=[0-9]{1,18})(?:,[0-9]{1,9}=[0-9]{1,18})*)", re.ASCII)
# Entries of a queue that are looked up at once.
_MOST_STEP = 32


@dataclass
class Browser:
    """Reads pages of one topic's queues.

    `claim` is called before a message is read, with its size in bytes and whether it is the first of its queue. If it
    returns False, the page ends; the first message of each queue is read anyway.
    """

    queues: Queues[Any]
    expired: Expired
    claim: Callable[[int, bool], bool] = lambda *_: True

    def page(
        self, topic: str, queue_id: int | None, at_ms: int | None, cursor: str | None, max_count: int
    ) -> BrowsedMessages | None:
        """Return up to `max_count` messages around `at_ms`, or those that `cursor` names; None: no such topic or queue.

        Raises `InvalidArgument` for a cursor of another request and for too many queues, and `CorruptFile` for a
        damaged queue. A message that can't be read is in the page, with its problem.
        """
        if queue_id is None:
            queues = {queue.queue_id: queue for queue in self.queues.of_topic(topic)}
        else:
            queue = self.queues.find(topic, queue_id)
            queues = {} if queue is None else {queue_id: queue}
        if not queues:
            return None
        if len(queues) > MOST_QUEUES:
            raise InvalidArgument(f"topic {topic!r:.80} has {len(queues)} queues: choose one by queue_id")
        ends = {number: self.queues.ends(queue) for number, queue in queues.items()}
        if cursor is None:
            assert at_ms is not None
            places = {number: self.queues.seek_ms(queues[number], ends[number], at_ms) for number in queues}
            share = max_count // 2
        else:
            is_backwards, places = _decoded(cursor, ends)
            share = max_count if is_backwards else 0
        before = _Way(self, queues, ends, places, is_backwards=True).read(share)
        rest = max_count - (len(before.messages) if cursor is None else share)
        behind = _Way(self, queues, ends, places, is_backwards=False).read(rest)
        has_earlier = any(before.places[number] > ends[number].begin for number in queues)
        has_later = any(behind.places[number] < ends[number].end for number in queues)
        return BrowsedMessages(
            messages=(*before.messages[::-1], *behind.messages),
            earlier=_encoded("earlier", before.places) if has_earlier else None,
            later=_encoded("later", behind.places) if has_later else None,
            ends=ends,
        )


class _Way:
    """Reads messages by time, from `places` or backwards, and moves `places` along."""

    def __init__(
        self,
        browser: Browser,
        queues: Mapping[int, PulledQueue],
        ends: Mapping[int, Ends],
        places: Mapping[int, int],
        *,
        is_backwards: bool,
    ) -> None:
        self._browser, self._queues, self._ends, self._is_backwards = browser, queues, ends, is_backwards
        self.places = dict(places)
        self.messages: list[PlacedMessage] = []
        self._is_full = False

    def read(self, most: int) -> _Way:
        """Read up to `most` messages."""
        if most:
            step = min(most // len(self._queues) + 1, _MOST_STEP)
            merged = heapq.merge(*(self._timed(queue, step) for queue in self._queues.values()), key=itemgetter(0, 1))
            while len(self.messages) < most and (timed := next(merged, None)) is not None and not self._is_full:
                *_, following, placed = timed
                self.messages.append(placed)
                # only now, because the merge reads one message of each queue ahead
                self.places[placed.queue_id] = following
        return self

    def _timed(self, queue: PulledQueue, step: int) -> Iterator[tuple[float, int, int, PlacedMessage]]:
        """Yield messages of a queue, each with its order among those of all queues, and the place behind it.

        The order is a time that never decreases, so that merging keeps the queue's order, and the queue. A message that
        can't be read has the time of the previous one.
        """
        number, sign = queue.queue_id, -1 if self._is_backwards else 1
        latest, is_first, (begin, end) = -math.inf, True, self._ends[number]
        if self._is_backwards:
            end = self.places[number]
        else:
            begin = self.places[number]
        messages = self._browser.queues.messages(queue, begin, end, step, backwards=self._is_backwards)
        # bytes claimed for messages that were skipped
        room = 0
        for offset, size, read, behind in messages:
            check_deadline(f"reading messages of {queue.topic}")
            if not self._browser.claim(max(0, size - room), is_first) and not is_first:
                self._is_full = True
                return
            room = max(room, size)
            try:
                message, problem = read(), None
            except CorruptFile as error:
                message, problem = None, str(error)
            if problem is None and (message is None or is_gone(self._browser.expired, message)):
                continue
            room -= size
            if message is not None:
                latest = max(latest, sign * message.store_ms)
            following = offset if self._is_backwards else behind
            yield latest, sign * number, following, PlacedMessage(number, offset, message, problem)
            is_first = False
        # only skipped messages may follow the last one
        self.places[number] = begin if self._is_backwards else end


def _encoded(direction: str, places: Mapping[int, int]) -> str:
    return f"{direction}:" + ",".join(f"{number}={offset}" for number, offset in sorted(places.items()))


def _decoded(cursor: str, ends: Mapping[int, Ends]) -> tuple[bool, dict[int, int]]:
    """Return the direction and the places of a cursor. A place that does not exist becomes the nearest one.

    A queue that the cursor lacks is newer than the cursor: its place is its begin.
    """
    cursor_parts = _CURSOR.fullmatch(cursor)
    if cursor_parts is None:
        raise InvalidArgument("the cursor does not belong to this request: begin again with at_ms")
    named = {
        int(number): int(offset) for number, _, offset in (pair.partition("=") for pair in cursor_parts[2].split(","))
    }
    if not named.keys() <= ends.keys():
        raise InvalidArgument("the cursor has other queues: begin again with at_ms")
    places = {
        number: min(max(named.get(number, of_queue.begin), of_queue.begin), of_queue.end)
        for number, of_queue in ends.items()
    }
    return cursor_parts[1] == "earlier", places
