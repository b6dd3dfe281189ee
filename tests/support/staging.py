"""A job that compacts staged files in this process, as Spark does, without Spark; entries for an index, and lookups."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_index import IndexReader, IndexService
from tiered_index.clock import Clock
from tiered_index.service.lifecycle.staged import StagedResult, Ticket, compact_staged, open_tickets, publish_staged
from tiered_index.service.log.log import StorageLog
from tiered_index.service.lookup.lookups import Lookups
from tiered_index.service.merge.run import MergeOptions, MergeReport, merge
from tiered_index.storage.base import Storage

T = 1_700_000_000_000 - 36_000_000
"""The time of messages: ten hours before the clock of the tests."""


class Job:
    """One job, step by step; `run` does all steps."""

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
        """Run the tasks, or only those of `file_ids`."""
        chosen = [ticket for ticket in self.tickets if not file_ids or ticket.file_id in file_ids]
        self.results = [compact_staged(ticket, self.storage, self.clock.now_ms()) for ticket in chosen]
        return self

    def publish(self) -> set[str]:
        """Publish; return the ids of the published files."""
        _, self.results = publish_staged(self.results, self.storage, self.log)
        return {result.ticket.file_id for result in self.results if result.finished is not None}

    def run(self) -> set[str]:
        """Do all steps."""
        return self.look().compact().publish()

    @property
    def reasons(self) -> list[str]:
        """The reasons why files were left, from the look and from later steps."""
        return [result.left for result in (*self.left, *self.results) if result.left]


def names_below(storage: Storage, prefix: str) -> list[str]:
    """Return the names of objects and of unfinished uploads below `prefix`."""
    return [info.name for info in storage.list(prefix)] + [handle.name for handle in storage.list_uploads(prefix)]


def staged(storage: Storage) -> list[str]:
    """Return the names of the staged objects."""
    return names_below(storage, "staging/")


def fill(index: IndexService, *offsets: int, seal: bool = True) -> None:
    """Put a message at each offset, a second older than the previous one, and seal all entries."""
    for offset in offsets:
        index.put("t", 0, f"k{offset % 3}", offset, 1, T - 1000 * offset, source="log", source_position=offset)
    if seal:
        index.seal()


def found(index: Lookups) -> list[int]:
    """Return the offsets of all messages of `fill` that lookups find."""
    return sorted(item.offset for key in ("k0", "k1", "k2") for item in index.query("t", key, max_count=1000))


def places(index: IndexService) -> list[str]:
    """Return the place of each file."""
    return [handle.place for handle in index.files()]


def holds(storage: Storage, clock: Clock, *offsets: int) -> None:
    """Assert that a reader of the storage alone finds exactly these offsets, each once."""
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        assert sum(handle.count for handle in reader.files()) == len(offsets)
        assert found(reader) == sorted(offsets)


def merge_all(storage: Storage, clock: Clock) -> MergeReport:
    """Merge all files that can be merged, by windows of an hour."""
    log = StorageLog(storage, clock)
    log.open()
    return merge(storage, log, clock, MergeOptions(window_s=3600, min_age_s=0, shard_bytes=1 << 20), threads=1)
