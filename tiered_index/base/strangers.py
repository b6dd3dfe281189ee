"""Bounds the connections whose clients have shown no token or key yet, of each address and in all.

Of too many, the oldest are ended, a moment after a further one came, those without a request under way first. So a
client that shows its token at once and a probe get in, however many connections others hold. A connection whose TLS
handshake has not ended is a stranger's, too. Threads: one event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Hashable

_log = logging.getLogger(__name__)
# Many clients may connect at once: time to read what they sent
_MOMENT_S = 0.1
# Most connections that wait to be accepted
_BACKLOG = 2048
# Time until connections are accepted again, after a failure, such as too many open files
_AGAIN_S = 1.0
FIRST_S = 5.0
"""Seconds that a client has for a TLS handshake, and a stranger for each head or frame."""


class Strangers:
    """The connections of strangers: at most `of_address` from one address, and `in_all` together."""

    def __init__(self, of_address: int = 64, in_all: int = 512) -> None:
        self._of_address, self._in_all = of_address, in_all
        # The oldest first: the address, the function that ends the connection, and whether it has a request under way
        self._connections: dict[Hashable, tuple[str, Callable[[], object], Callable[[], bool]]] = {}
        self._ending: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def __contains__(self, connection: Hashable) -> bool:
        return connection in self._connections

    def enter(
        self, connection: Hashable, address: str, end: Callable[[], object], is_busy: Callable[[], bool] = lambda: False
    ) -> None:
        """Add a connection. If there are too many in a moment, the oldest are ended by their `end`, busy ones last."""
        self._connections[connection] = address, end, is_busy
        if len(self._connections) > self._of_address and self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(_MOMENT_S, self._end_oldest)

    def _end_oldest(self) -> None:
        self._ending = None
        counts = Counter(address for address, *_ in self._connections.values())
        idle_first = sorted(self._connections.items(), key=lambda entered: entered[1][2]())
        # each address for itself first: connections of one address must not end those of others
        for is_of_address in (True, False):
            for connection, (address, end, _) in idle_first:
                is_many = counts[address] > self._of_address if is_of_address else len(self) > self._in_all
                if is_many and connection in self._connections:
                    counts[address] -= 1
                    del self._connections[connection]
                    end()

    def leave(self, connection: Hashable) -> None:
        """Remove a connection that has ended, or whose client is known now."""
        self._connections.pop(connection, None)

    async def serve(
        self, listening: socket.socket, make: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext | None
    ) -> Callable[[], object]:
        """Accept connections, and return the function that ends this and closes the socket.

        Each connection gets a protocol of `make`, with `tls` after its handshake. Raises `OSError` if the socket can't
        listen.
        """
        loop = asyncio.get_running_loop()
        if tls is None:
            return (await loop.create_server(make, sock=listening, backlog=_BACKLOG)).close
        listening.setblocking(False)
        listening.listen(_BACKLOG)
        return loop.create_task(self._accept(listening, make, tls)).cancel

    async def _accept(
        self, listening: socket.socket, make: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext
    ) -> None:
        """Accept connections until the task is cancelled: a loop's own server does not bound handshakes under way."""
        loop = asyncio.get_running_loop()

        async def begin(connection: socket.socket, address: str) -> None:
            self.enter(connection, address, lambda: _shut_down(connection))
            try:
                await loop.connect_accepted_socket(make, connection, ssl=tls, ssl_handshake_timeout=FIRST_S)
            except OSError as error:
                _log.debug("a handshake of %s failed: %s", address, error)
            except Exception:  # noqa: BLE001 - a defect ends this connection, not the server, and the log shows it
                _log.exception("a connection failed unexpectedly")
            finally:
                self.leave(connection)

        with listening:
            async with asyncio.TaskGroup() as beginning:
                while True:
                    try:
                        connection, address = await loop.sock_accept(listening)
                    except OSError:
                        await asyncio.sleep(_AGAIN_S)
                    else:
                        beginning.create_task(begin(connection, str(address[0])))


def _shut_down(connection: socket.socket) -> None:
    # its handshake fails; it may have ended already
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
