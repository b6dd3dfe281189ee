"""Which files the log has removed: what its state, which names only what exists, doesn't say. Threads: one."""

from __future__ import annotations

from tiered_index.format.names import DATA_PREFIX
from tiered_index.service.log_records import LogState
from tiered_index.service.storage_log import StorageLog

__all__ = ["CLOCK_SLACK_MS", "Removals"]

CLOCK_SLACK_MS = 86_400_000
"""By which a writer's clock may have been put back."""


class Removals:
    """The files of which a record behind number `after`, and not made before `since_ms`, has removed an object.

    Each record is read once, at a request each; asked again, only what the log has gained since.
    """

    def __init__(self, log: StorageLog, *, since_ms: int = 0, after: int = 0) -> None:
        self._log = log
        self._since_ms = since_ms
        self._after = after
        self._files: set[str] = set()

    def files(self, state: LogState) -> set[str]:
        """Return the ids of those files as of `state`. Raises what the storage raises; what was read is read again then."""
        if state.number > self._after:
            for record in self._log.records_back(state.number, after=self._after, since_ms=self._since_ms):
                self._files.update(name.split("/")[1] for name in record.remove if name.startswith(DATA_PREFIX))
            self._after = state.number
        return self._files
