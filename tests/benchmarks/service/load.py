"""Clients that send requests to a service over keep-alive connections and check every answer: one asyncio loop, no HTTP
library.

A connection sends one request, waits for the whole answer, and sends the next one. Its latency is the time from the
first byte sent to the last byte received.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.object_store import unchunked

_STATUS = slice(9, 12)


@dataclass(frozen=True, slots=True)
class Request:
    """The bytes of a whole request, and how often `marker` is in its answer's body."""

    data: bytes
    marker: bytes
    count: int


@dataclass
class Load:
    """The results: seconds of each answer, and the wrong answers."""

    latencies_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    # by 503, which the service answers if too many requests wait
    refused: int = 0
    elapsed_s: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Return answers per second, percentiles of the latency in milliseconds, and the number of wrong answers."""
        found = np.array(self.latencies_s or [np.nan]) * 1000
        p50, p99 = np.percentile(found, [50, 99]).tolist()
        return {
            "answers": len(self.latencies_s),
            "answers_per_s": len(self.latencies_s) / self.elapsed_s,
            "p50_ms": p50,
            "p99_ms": p99,
            "refused": self.refused,
            "wrong": len(self.wrong),
        }


class Connection(asyncio.Protocol):
    """One connection, which sends `requests` until the load ends, at least one. It waits between
    them.
    """

    def __init__(self, load: Load, requests: Iterator[Request], until_s: float, pause_s: float = 0.0) -> None:
        self._load, self._requests = load, requests
        self._until_s, self._pause_s = until_s, pause_s
        self._request: Request | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        is_over = self._request is not None and time.perf_counter() >= self._until_s
        if is_over or self._transport.is_closing():
            self._transport.close()
            return
        self._request, self._received = next(self._requests), bytearray()
        self._began_s = time.perf_counter()
        self._transport.write(self._request.data)

    def data_received(self, data: bytes) -> None:
        self._received += data
        body_at = self._received.find(b"\r\n\r\n") + 4
        if body_at < 4:
            return
        head = bytes(self._received[:body_at]).lower()
        at = head.find(b"content-length:") + 15
        if at < 15:  # a long answer comes in chunks
            if not self._received.endswith(b"\r\n0\r\n\r\n"):
                return
            self._received[body_at:] = unchunked(bytes(self._received[body_at:]))
        elif len(self._received) < body_at + int(head[at : head.index(b"\r", at)]):
            return
        if head[_STATUS] == b"503":
            self._load.refused += 1
            self._next()
            return
        assert self._request is not None
        self._load.latencies_s.append(time.perf_counter() - self._began_s)
        found = self._received.count(self._request.marker, body_at)
        if head[_STATUS] != b"200" or found != self._request.count:
            self._load.wrong.append(f"{found} of {self._request.count}: {bytes(self._received[:300])!r}")
        self._next()

    def _next(self) -> None:
        if self._pause_s:
            asyncio.get_running_loop().call_later(self._pause_s, self._ask)
        else:
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._load.wrong.append(f"a connection broke off: {exc!r}")
        if not self.ended.done():
            self.ended.set_result(None)


async def drive(
    address: tuple[str, int],
    requests: Callable[[int], Iterator[Request]],
    *,
    connections: int,
    seconds: float,
    pause_s: float = 0.0,
) -> Load:
    """Send requests over this number of connections for this time. `requests` returns those of a connection, by its
    number.
    """
    loop, load, made = asyncio.get_running_loop(), Load(), []
    asked = [requests(number) for number in range(connections)]
    began_s = time.perf_counter()
    for number in range(connections):
        # the connections do not begin all at once
        first_s = pause_s * number / connections
        one = Connection(load, asked[number], began_s + seconds, pause_s)
        # a service ends connections without a request
        await asyncio.sleep(began_s + first_s - time.perf_counter())
        await loop.create_connection(lambda one=one: one, *address)
        made.append(one)
    await asyncio.gather(*(one.ended for one in made))
    load.elapsed_s = time.perf_counter() - began_s
    return load


class SlowReader(asyncio.Protocol):
    """A client that sends one request and reads `_SIP_BYTES` of its answer at a time, with waits between."""

    def __init__(self, request: bytes, pause_s: float) -> None:
        self._request, self._pause_s = request, pause_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.transport.pause_reading()
        asyncio.get_running_loop().call_later(self._pause_s, self._resume)

    def _resume(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
