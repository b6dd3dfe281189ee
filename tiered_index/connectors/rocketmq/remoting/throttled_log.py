"""Throttles log lines that clients cause: one line of each kind in ten seconds. Any thread."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from tiered_index.base.clock import Clock

_EVERY_S = 10.0


@dataclass(eq=False)
class ThrottledLog:
    """Writes to `logger`; a line has the number of omitted lines of its kind since the last one."""

    logger: logging.Logger
    clock: Clock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # By format: time of the last line, and number of omitted lines since then
    _written: dict[str, tuple[float, int]] = field(default_factory=dict)

    def log(self, level: int, text: str, *values: object, exc_info: bool = False) -> None:
        """Write a line unless one with the format `text` was written within ten seconds."""
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
