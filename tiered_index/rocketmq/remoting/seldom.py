"""Lines of the log that clients cause: one of each kind in ten seconds, so that no client fills the log. Any thread."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from tiered_index.clock import Clock

_EVERY_S = 10.0


@dataclass(eq=False)
class SeldomLog:
    """Writes to `log`; a line says how many of its kind were left out since the one before."""

    log: logging.Logger
    clock: Clock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # by the text without its values: when a line was written, and how many were left out since then
    _told: dict[str, tuple[float, int]] = field(default_factory=dict)

    def tell(self, level: int, text: str, *values: object, exc_info: bool = False) -> None:
        """Write a line unless one of its `text` was written just now."""
        with self._lock:
            now_s = self.clock.monotonic_s()
            told_s, left_out = self._told.get(text, (float("-inf"), 0))
            if now_s - told_s < _EVERY_S:
                self._told[text] = told_s, left_out + 1
                return
            self._told[text] = now_s, 0
        more = f" ({left_out:,} lines like this one were left out)" if left_out else ""
        line = f"{text}%s"
        self.log.log(level, line, *values, more, exc_info=exc_info)
