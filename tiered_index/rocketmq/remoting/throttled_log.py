"""Lines of the log that clients cause: one of each kind in ten seconds, so that no client fills the log. Any thread."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from tiered_index.clock import Clock

_EVERY_S = 10.0


@dataclass(eq=False)
class ThrottledLog:
    """Writes to `logger`; a line says how many of its kind were left out since the one before."""

    logger: logging.Logger
    clock: Clock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # by the text without its values: when a line was written, and how many were left out since then
    _written: dict[str, tuple[float, int]] = field(default_factory=dict)

    def log(self, level: int, text: str, *values: object, exc_info: bool = False) -> None:
        """Write a line unless one of its `text` was written just now."""
        with self._lock:
            now_s = self.clock.monotonic_s()
            written_s, left_out = self._written.get(text, (float("-inf"), 0))
            if now_s - written_s < _EVERY_S:
                self._written[text] = written_s, left_out + 1
                return
            self._written[text] = now_s, 0
        more = f" ({left_out:,} lines like this one were left out)" if left_out else ""
        line = f"{text}%s"
        self.logger.log(level, line, *values, more, exc_info=exc_info)
