"""The memory budget of answers: the bytes that the answers of all requests hold at once have a bound.

A request reserves the bytes that its answer may take. Once the answer is made, the request keeps its bytes until the
client has taken them. A request that exceeds the budget waits a moment, and is refused then. Smaller answers go ahead
of larger ones. Threads: `Reservation.hold` and `Reservation.grow` from any, all else in the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiered_index.server.calls import CLIENT_GONE
from tiered_index.server.problems import Refused
from tiered_index.service.lookup.messages import Fetched, MessageSource
from tiered_index.types import IndexItem

T = TypeVar("T")
# An entry as its document while JSON is made, and what its topic adds for each byte: all of it escaped, three times.
_ENTRY_BYTES, _TOPIC_FACTOR = 1024, 6
# A message as it is stored, as text, and as JSON: digits and escapes take more than the bytes.
MESSAGE_FACTOR = 4
# A body of JSON as Python's objects: lists of one list each take most.
_PARSED_FACTOR = 50
# Of an entry that a stream has sent, lest it sends it again.
SEEN_BYTES = 256
# One answer claims no more than this part of the budget, so that it need not wait until nobody else asks.
_PARTS = 8
_WAIT_S = 5.0
_RETRY_S = 1


def entries_bytes(counts: Iterable[tuple[str, int]]) -> int:
    """Return what so many entries, each number with their topic, may take while an answer is made of them."""
    return sum(count * (_ENTRY_BYTES + _TOPIC_FACTOR * len(topic.encode(errors="replace"))) for topic, count in counts)


def parsed_bytes(body: bytes) -> int:
    """Return what a body of JSON may take while it is read."""
    return _PARSED_FACTOR * len(body)


class MemoryBudget:
    """`most_bytes` for all answers together. Of one event loop."""

    def __init__(self, most_bytes: int, *, wait_s: float = _WAIT_S) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._wait_s = wait_s
        self._lock = threading.Lock()
        # who waits, and for how much
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def fits(self, size: int) -> bool:
        """Count `size` bytes more if the budget has them, and return whether it has."""
        with self._lock:
            if self.held_bytes + size > self.most_bytes:
                return False
            self.held_bytes += size
            return True

    async def wait(self, size: int, left_s: float) -> bool:
        """Count `size` bytes once the budget has them, after `left_s` seconds at most; return whether it had."""
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
        """Count bytes that are there, or with a negative `size` are gone, and let those in who fit by now."""
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
    """A call in a thread needs to hold `size` bytes in all, which are to be claimed before it is made again."""

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
        """Hold `size` bytes in place of what was held. Raises `Refused` if the budget lacks them for
        `left_s` seconds.
        """
        more = size - self._bytes if self._bytes else self._share(size)
        if more <= 0:
            self._memory.count(more)
        elif self._bytes + more > self._memory.most_bytes or not await self._memory.wait(more, left_s):
            raise _no_memory_left()
        self._bytes += more

    def hold(self, size: int) -> None:
        """Hold `size` bytes at least. Raises `MemoryInUse` if the budget lacks them now. In any thread."""
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

    def settle(self, size: int) -> None:
        """Hold the `size` bytes that were made, in place of what they might have been."""
        self._memory.count(size - self._bytes)
        self._bytes = size

    def making(self, call: Callable[[], T]) -> T:
        """Return what `call` returns; what is held meanwhile is held until it ends. Raises `Refused` where the request
        has ended: what the call would hold, nobody would count. In any thread.
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
                # nobody waited for it
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self.settle, 0)

    def end(self) -> None:
        """Hold nothing more, where a call is under way once it has ended."""
        with self._lock:
            self._has_ended = True
            is_making = self._is_making
        if not is_making:
            self.settle(0)

    def _share(self, size: int) -> int:
        return min(size, self._memory.most_bytes - self._memory.most_bytes // _PARTS)


@dataclass(frozen=True)
class CountedMessages:
    """Fetches messages for which the budget has memory."""

    source: MessageSource
    reservation: Reservation

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return the result of each of `items`. Raises `Refused` if the budget lacks their bytes."""
        self.reservation.grow(MESSAGE_FACTOR * sum(item.size for item in items))
        return self.source.fetch(items, topic, key)


def _no_memory_left() -> Refused:
    error = "the answers that are under way leave no room for this one; try again, a stream from its cursor"
    return Refused(503, error, retry_after_s=_RETRY_S)
