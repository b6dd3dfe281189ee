"""Whether a storage has stopped responding to some work.

Threads: any.
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
        self._heard_s = 0.0

    def heard(self) -> None:
        """Note a response to work that is over."""
        self._heard_s = time.monotonic()

    def lasts(self, work: Iterable[Usage], patience_s: float) -> bool:
        """Return whether requests of `work` are under way, and none had a response for `patience_s`.

        Each MiB that was asked for gets a second more.
        """
        work = list(work)
        waiting = [usage for usage in work if usage.under_way]
        if not waiting:
            return False
        begun_s = min(usage.since_s for usage in waiting)
        heard_s = max(self._heard_s, begun_s, *(usage.heard_s for usage in work))
        asked = sum(usage.bytes_asked - usage.bytes_read for usage in waiting)
        return time.monotonic() - heard_s >= patience_s + asked / _LEAST_BYTES_PER_S
