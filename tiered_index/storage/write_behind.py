"""Writing a large file while its next pieces are being made: one thread writes, in order, and the file system works meanwhile.

Threads: one caller; the writing thread is this module's own and has ended when the context is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from tiered_index.storage.base import Bytes

__all__ = ["WriteBehind"]

_PENDING = 4
# pieces made ahead of the writes: bounds the memory, which holds them until they are written
_SYNC_BYTES = 64 << 20
# durable in steps, so that the last sync doesn't find everything left to do


class WriteBehind:
    """Hands pieces to `pwrite` and, now and then, `sync`. An error of theirs is raised by a later `write` or by `finish`."""

    def __init__(self, pwrite: Callable[[Bytes, int], None], sync: Callable[[], None]) -> None:
        self._pwrite, self._sync = pwrite, sync
        self._thread = ThreadPoolExecutor(1, "tiered-index-write")
        self._pending: deque[Future[None]] = deque()
        self._unsynced = 0

    def write(self, data: Bytes, position: int) -> None:
        """Have `data`, which nobody may change any more, written at `position`."""
        self._pending.append(self._thread.submit(self._step, data, position))
        while len(self._pending) > _PENDING:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Return when everything is written."""
        while self._pending:
            self._pending.popleft().result()

    def _step(self, data: Bytes, position: int) -> None:
        self._pwrite(data, position)
        self._unsynced += memoryview(data).nbytes
        if self._unsynced >= _SYNC_BYTES:
            self._sync()
            self._unsynced = 0

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
