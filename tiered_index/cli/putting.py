"""Putting batches with patience: back-pressure is waited out, and positions become durable every so often. One thread."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tiered_index.errors import BackPressure, TieredIndexError
from tiered_index.service.index import IndexService

__all__ = ["PatientPut", "Stopped"]

_PAUSE_S = 0.2
_FLUSH_ENTRIES = 250_000
# positions become durable by the flush, so this bounds what a crash makes the next run put again


class Stopped(TieredIndexError):
    """A put that was waiting for room was given up because the command is to end; nothing of it was put."""


@dataclass
class PatientPut:
    """Puts into one index. `patience_s` bounds how long back-pressure is waited out without any room being made; `stop` ends a wait."""

    index: IndexService
    patience_s: float
    stop: threading.Event = field(default_factory=threading.Event)
    _unflushed: int = 0

    def __call__(self, columns: Any, source: str, source_position: int) -> int:
        """Put one batch; return how many entries that made. Raises `BackPressure` when patience ends, `Stopped`, `InvalidArgument`."""
        waiting_since: float | None = None
        while True:
            try:
                put = self.index.put_batch(columns, source, source_position)
                break
            except BackPressure:
                waiting_since = waiting_since or time.monotonic()
                if time.monotonic() - waiting_since > self.patience_s:
                    raise
                if self.stop.is_set():
                    raise Stopped("ended while waiting for room") from None
                if not self.flush():
                    self.stop.wait(_PAUSE_S)
        self._unflushed += put
        if self._unflushed >= _FLUSH_ENTRIES:
            self.flush()
        return put

    def flush(self) -> bool:
        """Return whether the buffer is empty now. At the disk's bound it isn't: only the life cycle's own threads can help there."""
        try:
            self.index.flush()
        except BackPressure:
            return False
        self._unflushed = 0
        return True
