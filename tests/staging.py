"""A job that compacts what is staged, in this process: what Spark does, without Spark."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_index.clock import Clock
from tiered_index.service.staged import Ticket
from tiered_index.service.staging_jobs import StagedResult, compact_staged, open_tickets, publish_staged
from tiered_index.service.storage_log import StorageLog
from tiered_index.storage.base import Storage

__all__ = ["Job", "names_below"]


class Job:
    """One job, step by step; `run` takes all of them."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self.storage, self.clock = storage, clock
        self.log = StorageLog(storage, clock)
        self.log.open()
        self.tickets: list[Ticket] = []
        self.left: list[StagedResult] = []
        self.results: Sequence[StagedResult] = ()

    def look(self) -> Job:
        """Read the tickets."""
        self.tickets, self.left = open_tickets(self.storage, self.log)
        return self

    def compact(self, *file_ids: str) -> Job:
        """Run the tasks, those of `file_ids` only where some are given."""
        chosen = [ticket for ticket in self.tickets if not file_ids or ticket.file_id in file_ids]
        self.results = [compact_staged(ticket, self.storage, self.clock.now_ms()) for ticket in chosen]
        return self

    def publish(self) -> set[str]:
        """Publish; return the ids of the files that were."""
        _, self.results = publish_staged(self.results, self.storage, self.log)
        return {result.ticket.file_id for result in self.results if result.finished is not None}

    def run(self) -> set[str]:
        """Do all of it."""
        return self.look().compact().publish()

    @property
    def reasons(self) -> list[str]:
        """Why files were left, by the look and by what came after."""
        return [result.left for result in (*self.left, *self.results) if result.left]


def names_below(storage: Storage, prefix: str) -> list[str]:
    """Return the names of objects and of unfinished uploads below `prefix`."""
    return [info.name for info in storage.list(prefix)] + [handle.name for handle in storage.list_uploads(prefix)]
