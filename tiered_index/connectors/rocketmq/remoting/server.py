"""The server of RocketMQ's remoting protocol on asyncio: connections, frames and their bounds.

One task for each connection reads frames, and one for each request answers it. Responses are sent when they are ready,
with their request's `opaque`. A one-way request is processed and counted as others, but its response is not sent.
Lookups run in a bounded pool of threads. A connection ends at the first bytes that are not a frame, when it is idle for
too long, and when its client disconnects. `Strangers` bounds those without a valid key. Its end also ends its lookups.
Threads: one event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self

from tiered_index.base.strangers import FIRST_S, Strangers
from tiered_index.base.threads import DaemonPool
from tiered_index.connectors.rocketmq.log.layout import Host
from tiered_index.connectors.rocketmq.remoting.broker import ReadOnlyBroker, busy, waits_for_messages
from tiered_index.connectors.rocketmq.remoting.frames import (
    EVERY_TOPIC,
    AccessKey,
    Command,
    ResponseCode,
    decode_frame,
    encode_frame,
    signer_of,
)
from tiered_index.errors import InvalidArgument, SetupUnavailable, StorageUnavailable
from tiered_index.service.async_reader import run_in_thread
from tiered_index.service.read.answers.messages import pause_s

_LENGTH_BYTES = 4
_LEAST_FRAME_BYTES = 4
# Time to hold a pull that waits for messages, as a broker that polls does
_POLL_S = 1.0
_log = logging.getLogger(__name__)


class _Ended(Exception):
    """The connection must end; the text is for the log."""


class RemotingServer:
    """Serves `broker` between `start` and `close`, or in ``async with``, on `bound`, a socket bound to its address.

    With `keys` (by name), a request that is not signed with one of them gets "no permission"; the key decides which
    topics the caller sees. With `tls` every connection is encrypted. `audit` is called once for every request, with its
    response and whether it was signed with one of the keys (True without `keys`). `observe` is called once for every
    request, with its response and the seconds between them. Both are called also if the request failed, or if the
    client has disconnected: the response is then "system busy". `audit` is called in any thread, `observe` in the
    loop's. `threads` answer lookups. `address` is that of the socket.
    """

    # Bounds on the memory that clients use. Connections, beside those of strangers:
    connections_at_most = 1_024
    # Bytes of a request, without its length
    frame_bytes = 256 << 10
    # Lookups under way and waiting: of one connection, which is then not read, and of all connections
    requests_of_connection, requests = 16, 256
    # Bytes of responses that clients have not read yet
    unsent_bytes = 256 << 20
    # Time for the next complete frame, and for reading a response; and the time of a stranger for a frame
    idle_s, first_s = 120.0, FIRST_S
    # A lookup that has waited longer is not begun: its client has given up
    queued_s = 5.0

    def __init__(
        self,
        broker: ReadOnlyBroker,
        bound: socket.socket,
        *,
        keys: Mapping[str, AccessKey] | None = None,
        tls: ssl.SSLContext | None = None,
        threads: int = 16,
        audit: Callable[[Command, Command, bool], None] | None = None,
        observe: Callable[[Command, Command, float], None] | None = None,
    ) -> None:
        self.broker = broker
        self.address = _host_of(bound.getsockname())
        self._keys = dict(keys or {})
        self._tls = tls
        self._audit, self._observe = audit, observe
        self._bound = bound
        self._threads = DaemonPool(threads, "tiered-index-remoting")
        self._end_accepting: Callable[[], object] = bound.close
        self._connections: set[asyncio.Task[Any]] = set()
        self.strangers = Strangers()
        self._refusing = self._closing = False
        self._requests = 0
        self._unsent_bytes = 0

    async def start(self) -> None:
        """Listen. Raises `SetupUnavailable` if another process listens on the address already."""
        try:
            self._end_accepting = await self.strangers.serve(self._bound, self._protocol, self._tls)
        except OSError as error:
            ip, port = self.address
            raise SetupUnavailable(f"can't listen on {ip} port {port}: {error.strerror}") from error

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._connected)

    @property
    def connections(self) -> int:
        """The number of connections."""
        return len(self._connections)

    @property
    def url(self) -> str:
        """The URL of the address, for messages."""
        return f"rocketmq://{self.address}"

    async def close(self) -> None:
        """End all connections and release the port and the threads. Idempotent.

        Lookups under way are cancelled: clients repeat them elsewhere.
        """
        # a connection that is being made begins later
        self._closing = True
        self._end_accepting()
        for task in self._connections:
            task.cancel()
        while self._connections:
            await asyncio.wait(self._connections)
        await asyncio.to_thread(self._threads.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if self._closing:
            writer.transport.abort()
            return
        if task is None or len(self._connections) - len(self.strangers) >= self.connections_at_most:
            if not self._refusing:
                _log.warning("refusing connections: all %d allowed ones are open", len(self._connections))
            self._refusing = True
            writer.transport.abort()
            return
        self._connections.add(task)
        self._refusing = False
        connection = _RemotingConnection(self, reader, writer)
        self.strangers.enter(connection, connection.peer, writer.transport.abort)
        try:
            await connection.run()
        except asyncio.CancelledError:
            pass  # the server is closing
        finally:
            writer.transport.abort()
            self._connections.discard(task)
            self.strangers.leave(connection)

    async def respond(
        self, request: Command, local: Host, peer: str = "somewhere", known: Callable[[], None] = lambda: None
    ) -> Command:
        """Return the response to a request from `peer` to `local`. `known` is called if it is signed with a key."""
        received_s, response, key = time.monotonic(), _failed(request), None
        try:
            key = signer_of(request, self._keys) if self._keys else EVERY_TOPIC
            if key is None:
                response = self.broker.refuse(request, peer)
            else:
                known()
                at_once = self.broker.answer_at_once(request, local)
                response = at_once or await self._looked_up(request, local, key, received_s)
        except asyncio.CancelledError:
            # the client has disconnected
            response = busy(request)
            raise
        finally:
            if self._observe is not None:
                self._observe(request, response, time.monotonic() - received_s)
            if self._audit is not None:
                # in a thread: writing may wait for a disk; also if the client disconnects before it begins
                await asyncio.shield(asyncio.to_thread(self._audit, request, response, key is not None))
        if response.withheld:
            # the time must not show what is at a withheld place; until then the response counts as unsent
            with self.sending(response.body):
                await asyncio.sleep(pause_s(time.monotonic() - received_s))
        if waits_for_messages(request, response):
            # the client pulls again at once
            await asyncio.sleep(_POLL_S)
        return response

    async def _looked_up(self, request: Command, local: Host, key: AccessKey, received_s: float) -> Command:
        def look_up() -> Command:
            waited = time.monotonic() - received_s > self.queued_s
            # other lookups may have filled the memory since this one was admitted
            if waited or self._unsent_bytes >= self.unsent_bytes:
                return busy(request)
            return self.broker.look_up(request, local, None if key.topics is None else key.sees)

        if self._requests >= self.requests or self._unsent_bytes >= self.unsent_bytes:
            return busy(request)
        self._requests += 1
        try:
            return await run_in_thread(self._threads, look_up)
        except StorageUnavailable as error:  # no thread could be started
            self.broker.log.log(logging.WARNING, "request %d of RocketMQ's protocol: %s", request.code, error)
            return busy(request)
        finally:
            self._requests -= 1

    @contextlib.contextmanager
    def sending(self, frame: bytes) -> Iterator[None]:
        """Count a response as unsent within the block."""
        self._unsent_bytes += len(frame)
        try:
            yield
        finally:
            self._unsent_bytes -= len(frame)


class _RemotingConnection:
    """One client: reads its frames and sends the responses."""

    def __init__(self, server: RemotingServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._local = _host_of(writer.get_extra_info("sockname"))
        self.peer = str((writer.get_extra_info("peername") or ("somewhere",))[0])
        self._free = asyncio.Semaphore(server.requests_of_connection)
        self._requests = 0

    async def run(self) -> None:
        """Answer requests until the connection ends; then cancel those under way."""
        try:
            async with asyncio.TaskGroup() as requests:
                await self._read(requests)
        except* (_Ended, EOFError, OSError) as ended:
            _log.debug("a connection of %s ended: %s", self._writer.get_extra_info("peername"), ended.exceptions[0])
        except* Exception:  # noqa: BLE001 - a defect ends this connection, not the server, and the log shows it
            _log.exception("a connection failed unexpectedly")

    async def _read(self, requests: asyncio.TaskGroup) -> None:
        while True:
            await self._free.acquire()
            try:
                request = decode_frame(await self._frame())
            except InvalidArgument as error:
                raise _Ended(str(error)) from None
            if request.is_response:
                self._free.release()
                continue
            self._requests += 1
            if request.is_oneway:
                # not in a task, which ends with the connection: the client may have disconnected already
                await self._answer(request)
            else:
                requests.create_task(self._answer(request))
                # let the task begin before the connection can end: otherwise it would not account for the request
                await asyncio.sleep(0)

    async def _frame(self) -> bytes:
        length = int.from_bytes(await self._exactly(_LENGTH_BYTES), "big")
        most = self._server.frame_bytes
        if not _LEAST_FRAME_BYTES <= length <= most:
            raise _Ended(f"no frame of {_LEAST_FRAME_BYTES} to {most} bytes: {length}")
        return await self._exactly(length)

    async def _exactly(self, size: int) -> bytes:
        while True:
            try:
                is_stranger = self in self._server.strangers
                async with asyncio.timeout(self._server.first_s if is_stranger else self._server.idle_s):
                    return await self._reader.readexactly(size)
            except TimeoutError:
                if not self._requests:
                    raise _Ended("idle for too long") from None

    async def _answer(self, request: Command) -> None:
        try:
            known = partial(self._server.strangers.leave, self)
            response = await self._server.respond(request, self._local, self.peer, known)
            if request.is_oneway:
                return
            frame = encode_frame(response)
            with self._server.sending(frame):
                self._writer.write(frame)
                try:
                    async with asyncio.timeout(self._server.idle_s):
                        await self._writer.drain()
                except TimeoutError:
                    raise _Ended("the client did not read a response") from None
        finally:
            self._requests -= 1
            self._free.release()


def _failed(request: Command) -> Command:
    return request.answered(ResponseCode.SYSTEM_ERROR, "the request failed unexpectedly; the server's log says why")


def _host_of(name: tuple[Any, ...]) -> Host:
    """Return a socket's name as a host; an IPv4-mapped IPv6 address becomes IPv4."""
    address = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return Host(str(mapped or address), int(name[1]))
