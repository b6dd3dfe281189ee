"""Bounds the connections whose clients have shown no token or key yet, of each address and in all.

Of too many, the oldest are ended, a moment after a further one came, those without a request under way first. So a
client that shows its token at once and a probe get in, however many connections others hold. Threads: one event loop's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable

# Many clients may connect at once: time to read what they sent
_MOMENT_S = 0.1
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
        for connection, (address, end, _) in idle_first:
            if counts[address] > self._of_address or len(self._connections) > self._in_all:
                counts[address] -= 1
                del self._connections[connection]
                end()

    def leave(self, connection: Hashable) -> None:
        """Remove a connection that has ended, or whose client is known now."""
        self._connections.pop(connection, None)
