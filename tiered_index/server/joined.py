"""A transport that sends the head of a response together with its body.

Uvicorn writes the two separately, and each write is a system call. Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from typing import Any

# A longer write is sent at once; heads are shorter
_HELD_BYTES = 4096
# Time in which a peer reads the rest of a closed connection
REST_S = 120.0


class JoinedTransport:
    """Holds a short write until the next one, or until the event loop has run the other callbacks that are ready.

    All else is passed to `transport`.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held = b""

    def write(self, data: bytes | memoryview) -> None:
        """As `asyncio.Transport.write`. Nothing is written once the connection has ended: uvloop would raise."""
        if self._transport.is_closing():
            self._held = b""
        elif self._held:
            held, self._held = self._held, b""
            # not `writelines`: that of asyncio's own loops ignores flow control in some releases of Python
            self._transport.write(b"".join((held, data)))
        elif isinstance(data, bytes) and 0 < len(data) <= _HELD_BYTES:
            self._held = data
            self._loop.call_soon(self.send)
        else:
            self._transport.write(data)

    def send(self) -> None:
        """Send the bytes that wait."""
        if self._held and not self._transport.is_closing():
            held, self._held = self._held, b""
            self._transport.write(held)

    def close(self) -> None:
        """As `asyncio.Transport.close`: everything written is sent, unless the peer does not read it in two minutes."""
        if self._transport.is_closing():
            # asyncio's TLS transport is of no use after a second call
            return
        self.send()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(REST_S, self._end)

    def _end(self) -> None:
        # asyncio's transport can't be aborted after its end
        if self._transport.get_write_buffer_size():
            self._transport.abort()

    def write_eof(self) -> None:
        """As `asyncio.Transport.write_eof`."""
        self.send()
        self._transport.write_eof()

    def get_write_buffer_size(self) -> int:
        """As `asyncio.Transport.get_write_buffer_size`."""
        return self._transport.get_write_buffer_size() + len(self._held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
