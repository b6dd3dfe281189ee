"""The end of a merge: proof that nothing was lost or doubled, then one log record that swaps tables for sources.

Whoever drives the tasks calls `publish` once with one result of each. Before the record is appended the uploads are completed, which makes
objects that nobody knows of; whatever fails before the record leaves the index as it was, and the leftovers to `orphans`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.service.log_records import LogRecord, LogState
from tiered_index.service.merge.plan import MergeJob
from tiered_index.service.merge.task import TaskResult
from tiered_index.service.storage_log import StorageLog
from tiered_index.service.unpublished import abandon, append_in_time, complete
from tiered_index.storage.base import Storage

__all__ = ["MergeOvertaken", "abandon", "check_results", "complete", "publish"]


class MergeOvertaken(TieredIndexError):
    """Another job has merged or removed a source meanwhile; nothing was changed. Plan again."""

    exit_code = 3


def publish(job: MergeJob, results: Sequence[TaskResult], storage: Storage, log: StorageLog) -> LogState:
    """Prove, complete and publish one job. Raises `CorruptFile` (the proof failed), `MergeOvertaken`, `JobOverdue`, as the storage."""
    check_results(job, results)
    shards = [shard for result in results for shard in result.shards]
    complete(shards, storage)
    names = tuple(source.name for source in job.sources)
    added = {shard.stored.name for shard in shards}

    def make(state: LogState) -> LogRecord | None:
        if added <= state.objects.keys():
            return None  # an earlier try got as far as the log
        gone = [name for name in names if name not in state.objects]
        if gone:
            raise MergeOvertaken(f"{storage.uri}: {len(gone)} of {len(names)} sources are in the log no more, {gone[0]} first")
        return LogRecord(0, "merge", 0, "", 0, tuple(shard.stored for shard in shards), names)

    return append_in_time("a merge", shards, make, storage, log)


def check_results(job: MergeJob, results: Sequence[TaskResult]) -> None:
    """Raise `CorruptFile` unless the results are one of each task and wrote exactly the entries of the sources."""
    numbers = sorted(result.number for result in results)
    if numbers != [task.number for task in job.tasks]:
        raise CorruptFile("merge", "not one result of each task", expected=len(job.tasks), found=numbers)
    for source in job.sources:
        read = sum(result.read_counts.get(source.name, 0) for result in results)
        if read != source.count:
            raise CorruptFile(source.name, "the merge read another number of entries than the log says", expected=source.count, found=read)
    shards = [shard for result in results for shard in result.shards]
    written = sum(shard.stored.count for shard in shards)
    if written != job.entries:
        raise CorruptFile("merge", "wrote another number of entries than it read", expected=job.entries, found=written)
    read_sum, written_sum = sum(result.read_checksum for result in results), sum(shard.checksum for shard in shards)
    if (read_sum - written_sum) % 2**64:
        raise CorruptFile("merge", "wrote other entries than it read", expected=read_sum % 2**64, found=written_sum % 2**64)
