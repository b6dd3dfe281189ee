"""A merge that compacts pending files in this process, without Spark; entries for an index, and lookups."""

from collections.abc import Sequence

from tiered_index import IndexReader, IndexService
from tiered_index.clock import Clock
from tiered_index.service.jobs.job import JobOvertaken, TaskResult, publish
from tiered_index.service.jobs.merge_plan import MergeOptions, MergeRewrite, plan_merge
from tiered_index.service.jobs.merge_run import MergeReport, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.service.read.lookups import Lookups
from tiered_index.storage.base import Storage

T = 1_700_000_000_000 - 36_000_000
"""The time of messages: ten hours before the clock of the tests."""
YOUNG = MergeOptions(window_s=3600, min_age_s=10**9, shard_bytes=1 << 20)
"""A merge that takes pending files only, because no window is old enough."""


class Job:
    """One merge of pending files, step by step; `run` does all steps."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self.storage, self.clock = storage, clock
        self.log = StorageLog(storage, clock)
        self.log.open()
        self.rewrites: Sequence[MergeRewrite] = ()
        self.results: list[Sequence[TaskResult]] = []

    def look(self, *file_ids: str) -> "Job":
        """Plan, for all pending files or only those of `file_ids`."""
        state = self.log.refresh()
        left_out = {file.name for file in state.pending.values() if file_ids and file.file_id not in file_ids}
        self.rewrites = plan_merge(state, YOUNG, now_s=self.clock.now_ms() // 1000, lost=left_out).rewrites
        return self

    def compact(self) -> "Job":
        """Run the tasks."""
        now_ms = self.clock.now_ms()
        self.results = [[task.run(self.storage, now_ms) for task in rewrite.tasks] for rewrite in self.rewrites]
        return self

    def publish(self) -> set[str]:
        """Publish; return the ids of the files that this job merged, without rewrites that were overtaken."""
        merged: set[str] = set()
        for rewrite, results in zip(self.rewrites, self.results, strict=True):
            try:
                publish(rewrite, results, self.log)
            except JobOvertaken:
                continue
            merged.update(file.file_id for file in rewrite.inputs if file.shard is None)
        return merged

    def run(self, *file_ids: str) -> set[str]:
        """Do all steps."""
        return self.look(*file_ids).compact().publish()


def names_below(storage: Storage, prefix: str) -> list[str]:
    return [info.name for info in storage.list(prefix)]


def pending(storage: Storage, clock: Clock) -> list[str]:
    """Return the names of the pending files in the log."""
    return [*Job(storage, clock).log.state.pending]


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
