"""A filter of logs for lines that a broker that is away, or a stranger, could repeat without bound."""

from __future__ import annotations

import logging
import re
import threading
import time

# Of texts: how long one is left out after it was passed, and the most that are remembered
_LINE_S, _LINES = 60.0, 1_000
# Durations and counts that differ in each line about the same trouble
_VARYING = re.compile(r"\([^()]*\d[^()]*\)")


class OnceAMinute(logging.Filter):
    """Passes a text once a minute, and then says how often it was left out since. Any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        # of each text: when it was passed, and how often it was left out since
        self._passed: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is passed."""
        now_s, line = time.monotonic(), record.getMessage()
        text = _VARYING.sub("", line)
        with self._lock:
            passed_s, left_out = self._passed.pop(text, (now_s - _LINE_S, 0))
            if now_s - passed_s < _LINE_S:
                self._passed[text] = passed_s, left_out + 1
                return False
            self._passed[text] = now_s, 0
            while len(self._passed) > _LINES:
                del self._passed[next(iter(self._passed))]
        if left_out:
            record.msg, record.args = f"{line} ({left_out:,} more such lines were left out)", ()
        return True
