"""The memory budget of answers: bounds the bytes of the answers to all requests.

A request reserves the bytes that its answer may need. Once the answer is made, the reservation is its size, until the
client has read it. A request that exceeds the budget waits up to 5 seconds, and is then refused. Smaller answers may
pass larger ones. Threads: `hold`, `grow` and `making` of a `Reservation` from any, all else in the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tiered_index.encoding import BodyFormat
from tiered_index.errors import BudgetExceeded
from tiered_index.kafka.record import KafkaRecord
from tiered_index.rocketmq.log.message import Message
from tiered_index.server.calls import CLIENT_GONE, Allowance
from tiered_index.server.problems import Refused
from tiered_index.service.lookup.messages import Fetched, FoundMessage, MessageSource
from tiered_index.types import IndexItem

T = TypeVar("T")
# Memory of an entry while JSON is made, and of each byte of its topic: escaped, three copies
_ENTRY_BYTES, _TOPIC_FACTOR = 1024, 6
# Memory of a message for each stored byte: stored, as text, and as JSON with digits and escapes
MESSAGE_FACTOR = 4
# Memory of a body that is decompressed and searched for each plain byte: in parts, then whole
SEARCHED_FACTOR = 2
# Memory of a parsed JSON body for each byte; nested lists need the most
_PARSED_FACTOR = 50
# Memory of an entry that a stream has sent, and must not send again; and of a file's report, until the stream ends
SEEN_BYTES, REPORT_BYTES = 256, 2048
# Memory of an entry that a batch has found, as a stored row, twice while rows are joined
ROW_BYTES = 128
# One answer claims at most 7 of 8 parts of the budget, so that it need not wait for an idle service
_PARTS = 8
_WAIT_S = 5.0
_RETRY_S = 1


def entries_bytes(counts: Iterable[tuple[str, int]]) -> int:
    """Return the memory that an answer of entries may need, in bytes; `counts` are pairs of topic and number."""
    return sum(count * (_ENTRY_BYTES + _TOPIC_FACTOR * len(topic.encode(errors="replace"))) for topic, count in counts)


def parsed_bytes(body: bytes) -> int:
    """Return the memory that a JSON body may need when it is parsed, in bytes."""
    return _PARSED_FACTOR * len(body)


class MemoryBudget:
    """A budget of `most_bytes` for all answers of one event loop."""

    def __init__(self, most_bytes: int, *, wait_s: float = _WAIT_S) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._wait_s = wait_s
        self._lock = threading.Lock()
        # Bytes that requests wait for
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def fits(self, size: int) -> bool:
        """Reserve `size` bytes and return True, or return False if the budget lacks them."""
        with self._lock:
            if self.held_bytes + size > self.most_bytes:
                return False
            self.held_bytes += size
            return True

    async def wait(self, size: int, left_s: float) -> bool:
        """Wait up to `left_s` seconds to reserve `size` bytes; return whether they were reserved."""
        if self.fits(size):
            return True
        found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, found))
        try:
            await asyncio.wait([found], timeout=min(left_s, self._wait_s))
        except BaseException:
            if found.done():
                self.count(-size)
            raise
        finally:
            if not found.done():
                self._waiting.remove((size, found))
        return found.done()

    def count(self, size: int) -> None:
        """Add `size` bytes to the reserved ones. A negative `size` frees bytes, and wakes requests that fit now."""
        with self._lock:
            self.held_bytes += size
        if size < 0 and self._waiting:
            waiting, self._waiting = self._waiting, deque()
            for wanted, found in waiting:
                if self.fits(wanted):
                    found.set_result(None)
                else:
                    self._waiting.append((wanted, found))


class MemoryInUse(Exception):
    """A call in a thread needs `size` bytes in total. Claim them, then repeat the call."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class Reservation:
    """The bytes that one request has reserved, until the request and the last call that it made in a thread end."""

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._bytes = 0
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._is_making = self._has_ended = False

    async def claim(self, size: int, left_s: float) -> None:
        """Hold `size` bytes in place of those held. Raises `Refused` if the budget lacks them for `left_s` seconds."""
        more = size - self._bytes if self._bytes else self._share(size)
        if more <= 0:
            self._memory.count(more)
        elif self._bytes + more > self._memory.most_bytes or not await self._memory.wait(more, left_s):
            raise _no_memory_left()
        self._bytes += more

    def hold(self, size: int) -> None:
        """Hold at least `size` bytes. Raises `MemoryInUse` if the budget lacks them now. In any thread."""
        more = (share := self._share(size)) - self._bytes
        if more > 0:
            if not self._memory.fits(more):
                raise MemoryInUse(share)
            self._bytes += more

    def grow(self, size: int) -> None:
        """Hold `size` bytes more. Raises `Refused` if the budget lacks them now. In any thread."""
        try:
            self.hold(self._bytes + size)
        except MemoryInUse:
            raise _no_memory_left() from None

    def need(self, count: int, size: int) -> None:
        """Raise `Refused` if an answer of `count` entries needs `size` bytes, more than the whole budget."""
        if size > (most := self._memory.most_bytes):
            raise Refused(
                413,
                f"an answer of {count:,} entries needs up to {size:,} bytes of memory, and this service has {most:,} "
                f"for all answers: ask for fewer keys, or a lower max_count, or raise --answer-bytes",
            )

    def settle(self, size: int) -> None:
        """Hold `size` bytes, those of the finished answer, in place of the reserved ones."""
        self._memory.count(size - self._bytes)
        self._bytes = size

    def making(self, call: Callable[[], T]) -> T:
        """Return `call()`, and keep the reserved bytes until it ends, even if the request ends first.

        Raises `Refused` if the request has ended already. In any thread.
        """
        with self._lock:
            if self._has_ended:
                raise Refused(CLIENT_GONE, "the client has gone")
            self._is_making = True
        try:
            return call()
        finally:
            with self._lock:
                self._is_making = False
            if self._has_ended:
                # the request ended during the call; RuntimeError: the loop is closed
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self.settle, 0)

    def end(self) -> None:
        """Free all bytes, after the call under way if there is one."""
        with self._lock:
            self._has_ended = True
            is_making = self._is_making
        if not is_making:
            self.settle(0)

    def _share(self, size: int) -> int:
        return min(size, self._memory.most_bytes - self._memory.most_bytes // _PARTS)


@dataclass(frozen=True)
class CountedMessages:
    """A `MessageSource` that reserves memory for the messages before it fetches them."""

    source: MessageSource
    reservation: Reservation

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """As `MessageSource.fetch`. Raises `Refused` if the budget lacks memory for the messages."""
        self.reservation.grow(MESSAGE_FACTOR * sum(item.size for item in items))
        return self.source.fetch(items, topic, key)


class Largest:
    """Reserves memory for bodies that are made one after the other: `factor` bytes for each byte of the largest."""

    def __init__(self, reservation: Reservation, factor: int) -> None:
        self._reservation = reservation
        self._factor = factor
        self._bytes = 0

    def claim(self, size: int) -> None:
        """Reserve memory for a body of `size` bytes. Raises `Refused` if the budget lacks it."""
        if size > self._bytes:
            self._reservation.grow(self._factor * (size - self._bytes))
            self._bytes = size


class ShownBodies:
    """Bounds the bodies of one answer while they are shown: in total `left` bytes, within memory and time."""

    def __init__(
        self,
        reservation: Reservation,
        allowance: Allowance,
        wanted: BodyFormat,
        left: int,
        *,
        allow_partial: bool = False,
    ) -> None:
        self.left = left
        self.encoded: list[bytes] = []
        self._reservation = reservation
        self._allowance = allowance
        self._wanted = wanted
        self._allow_partial = allow_partial
        # Whether the deadline left a body compressed
        self.is_partial = False
        self._late: BudgetExceeded | None = None
        # One body is parsed at a time
        self._parsed = Largest(reservation, _PARSED_FACTOR)
        # Reserved bytes of bodies that were shown as stored
        self._spare_bytes = 0

    def document(self, found: Fetched | FoundMessage) -> dict[str, Any]:
        """Return `found` JSON-ready. Raises `Refused` if the budget lacks memory for its plain body.

        Raises `BudgetExceeded` after the deadline if a body is compressed. With `allow_partial`, such a body is shown
        as stored, and `is_partial` becomes True.
        """
        message = found.message if isinstance(found, Fetched) else found
        most_bytes, claimed = self._claimed(message)
        document = found.to_dict(self._wanted, most_bytes)
        shown = (document["message"] if isinstance(found, Fetched) else document) or {}
        if "body_problem" not in shown:
            self._spare_bytes -= claimed
        elif self._late is not None:
            shown["body_problem"] = str(self._late)
            self.is_partial = True
        return document

    def add(self, encoded: bytes) -> None:
        """Append a document to `encoded`, and count its bytes."""
        self.encoded.append(encoded)
        self.left = max(0, self.left - len(encoded))

    def _claimed(self, message: FoundMessage | None) -> tuple[int, int]:
        """Reserve memory for a message's plain body; return the bytes that it may have, and the reserved ones.

        The reserved bytes remain spare until a body is shown plain.
        """
        if self._wanted in ("excerpt", "none") or not isinstance(message, Message | KafkaRecord):
            return self.left, 0
        size, claimed = message.size, 0
        if isinstance(message, Message) and message.compression is not None:
            try:
                self._allowance.left_s("while bodies were decompressed")
            except BudgetExceeded as error:
                if not self._allow_partial:
                    raise
                self._late = error
                return 0, 0
            # a compressed body can become a thousand times its size
            size = message.plain_bytes(self.left)
            claimed = MESSAGE_FACTOR * size
            if claimed > self._spare_bytes:
                self._reservation.grow(claimed - self._spare_bytes)
                self._spare_bytes = claimed
            if size > self.left:
                return self.left, claimed
        if self._wanted == "json":
            self._parsed.claim(size)
        return self.left, claimed


def _no_memory_left() -> Refused:
    error = "the service has no memory left for this answer: try again (a stream: from its cursor)"
    return Refused(503, error, retry_after_s=_RETRY_S)
