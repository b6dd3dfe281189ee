"""What a merge will cost, by its plan: requests, bytes and dollars before anything is read. Pure.

The counts follow from how a task works: a range to the end of each source for its directory, a range a source and piece (8 MiB at most),
and for each shard one put, or the parts of an upload. A source that lies in
several groups of windows is read for each. Entries are taken to be spread evenly over tasks; what is so small that it fits fewer
pieces or shards costs less, and a hot key more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tiered_index.service.merge.plan import MergeJob
from tiered_index.service.merge.task import PIECE_ITEMS
from tiered_index.storage.metering import PriceTable

__all__ = ["RECORD_REQUESTS", "MergeCost", "estimate", "writing_requests"]

_SPAN_BYTES = 8 << 20
_PART_BYTES = 16 << 20
RECORD_REQUESTS: Mapping[str, int] = {"get": 1, "head": 1, "put_if_absent": 1, "put": 1}
"""Of one log record: look for the end, is the last one there, append, checkpoint."""


@dataclass(frozen=True, slots=True)
class MergeCost:
    """Estimates. `requests` by operation; bytes are of items: directories and filters add some 5% to either side.

    `read_bytes` count what is read for several groups of windows as often.
    """

    shards: int
    requests: dict[str, int]
    read_bytes: int
    written_bytes: int
    cost_usd: float


def estimate(job: MergeJob, prices: PriceTable) -> MergeCost:
    """Return what a job will cost."""
    item_size = job.tasks[0].genesis.layout.schema.item.itemsize
    runs = len({task.base_low for task in job.tasks})
    readers = Counter(source.name for task in job.tasks for source in task.sources)
    times = Counter(name for name, _ in {(source.name, task.windows[0].begin_s) for task in job.tasks for source in task.sources})
    moved = sum(source.count * times[source.name] for source in job.sources)
    requests: Counter[str] = Counter(RECORD_REQUESTS)
    pieces = max(1, -(-moved // (len(job.tasks) * PIECE_ITEMS)))
    # a task reads of each source that has entries for it the directory, and a range a piece
    spans = sum(
        max(pieces * readers[source.name], -(-source.count * times[source.name] * item_size // _SPAN_BYTES)) for source in job.sources
    )
    requests["get_range"] += readers.total() + spans
    shards = 0
    for window in job.windows:
        # a window of few entries has no more shards than entries
        made = min(runs, window.entries)
        size = window.entries * item_size // made
        shards += made
        requests += writing_requests(made, size)
    return MergeCost(shards, dict(requests), moved * item_size, job.entries * item_size, prices.cost_usd(requests, moved * item_size))


def writing_requests(shards: int, size: int) -> Counter[str]:
    """Return what it takes to send `shards` objects of `size` bytes each, and to see that they are there, by operation."""
    if size < 2 * _PART_BYTES:
        return Counter(put=shards, head=shards)
    # the last part is what is left: less than two
    return Counter(begin_upload=shards, upload_part=shards * (size // _PART_BYTES), complete_upload=shards, head=shards)
