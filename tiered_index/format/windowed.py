"""Many small reads turned into few large ones, as long as they mostly go forward. One thread."""

from __future__ import annotations

from collections.abc import Callable

from tiered_index.format.foreign import Read

__all__ = ["WINDOW_BYTES", "WindowedRead"]

WINDOW_BYTES = 8 << 20
"""What is read at a time."""


class WindowedRead:
    """A `Read` over `read` that fetches windows of 8 MiB and keeps the last one; `seen` is told each window that is fetched."""

    def __init__(self, read: Read, size_bytes: int, seen: Callable[[int, bytes], None] | None = None) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._seen = seen
        self._start = 0
        self._window = b""
        self._fetched: set[int] = set()

    def finish(self) -> None:
        """Fetch every window that no read has asked for, so that `seen` has been told the whole file."""
        for start in range(0, self._size_bytes, WINDOW_BYTES):
            if start not in self._fetched:
                self._fetch(start)

    def __call__(self, position: int, length: int) -> bytes:
        """Return `length` bytes from `position`; shorter at the file's end."""
        pieces = []
        length = max(0, min(length, self._size_bytes - position))
        while length:
            offset = position - self._start
            if not 0 <= offset < len(self._window):
                self._fetch(position // WINDOW_BYTES * WINDOW_BYTES)
                continue
            piece = self._window[offset : offset + length]
            pieces.append(piece)
            position += len(piece)
            length -= len(piece)
        return b"".join(pieces)

    def _fetch(self, start: int) -> None:
        self._start = start
        self._fetched.add(start)
        self._window = self._read(start, min(WINDOW_BYTES, self._size_bytes - start))
        if self._seen is not None:
            self._seen(start, self._window)
