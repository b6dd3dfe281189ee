"""Entries for an index, lookups of them, and a merge of all files."""

from tiered_index import IndexReader, IndexService
from tiered_index.base.clock import Clock
from tiered_index.service.jobs.merge_run import MergeReport, merge
from tiered_index.service.jobs.rewriting.merge_plan import MergeOptions
from tiered_index.service.log.log import StorageLog
from tiered_index.service.read.lookups import Lookups
from tiered_index.storage.base import Storage

T = 1_700_000_000_000 - 36_000_000
"""The time of messages: ten hours before the clock of the tests."""


def names_below(storage: Storage, prefix: str) -> list[str]:
    return [info.name for info in storage.list(prefix)]


def fill(index: IndexService, *offsets: int, seal: bool = True) -> None:
    """Put a message at each offset, a second older than the previous one, and seal all entries."""
    for offset in offsets:
        index.put("t", 0, f"k{offset % 3}", offset, 1, T - 1000 * offset, source="log", source_position=offset)
    if seal:
        index.seal()


def offsets_of(index: Lookups) -> list[int]:
    """Return the offsets of all messages of `fill` that lookups find."""
    return sorted(item.offset for key in ("k0", "k1", "k2") for item in index.query("t", key, max_count=1000))


def places(index: IndexService) -> list[str]:
    """Return the place of each file."""
    return [handle.place for handle in index.files()]


def holds(storage: Storage, clock: Clock, *offsets: int) -> None:
    """Assert that a reader of the storage alone finds exactly these offsets, each once."""
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        assert sum(handle.count for handle in reader.files()) == len(offsets)
        assert offsets_of(reader) == sorted(offsets)


def merge_all(storage: Storage, clock: Clock) -> MergeReport:
    """Merge all files that can be merged, by windows of an hour."""
    log = StorageLog(storage, clock)
    log.open()
    return merge(storage, log, clock, MergeOptions(window_s=3600, min_age_s=0, shard_bytes=1 << 20), threads=1)
