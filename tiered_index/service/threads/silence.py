"""Whether a storage has stopped responding to some work.

Threads: any. Imports no other folder of the service.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from tiered_index.storage.metering import Usage

# a response is not late as long as it may come at this rate
_LEAST_BYTES_PER_S = 1 << 20


class Silence:
    """The time since the last response to the requests of some work."""

    def __init__(self) -> None:
        self._heard_s = time.monotonic()
        # bytes at the last look
        self._received = 0

    def heard(self) -> None:
        """Note a response."""
        self._heard_s = time.monotonic()

    def lasts(self, work: Iterable[tuple[float, Usage]], patience_s: float) -> bool:
        """Return whether requests are under way, and none has had a response for `patience_s`.

        `work` has the begin (`time.monotonic()`) and the usage of each part. Each MiB that was asked for gets a second
        more. Call this several times within `patience_s`.
        """
        now_s, work = time.monotonic(), list(work)
        received = sum(usage.bytes_read for _, usage in work)
        waiting = [(begun_s, usage) for begun_s, usage in work if usage.under_way]
        # without a request under way, the work is done here
        if received > self._received or not waiting:
            self._heard_s = now_s
        self._received = received
        heard_s = max(self._heard_s, min((begun_s for begun_s, _ in waiting), default=now_s))
        asked = sum(usage.bytes_asked - usage.bytes_read for _, usage in waiting)
        return now_s - heard_s >= patience_s + asked / _LEAST_BYTES_PER_S
