"""A task of a merge reads only what has entries in its run of slots: work and memory don't grow with the square of the
shards.
"""

from collections import Counter

import numpy as np

from tests.support.batches import batch
from tests.support.cold_index import Recorder
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, Merging
from tiered_index.service.merge.run import estimate
from tiered_index.storage.prices import PriceTable

_SHARD = 1 << 20
_ENTRIES = 40_000
# a day of which is more than one shard


def test_a_directory_is_read_by_the_tasks_that_need_it(life: Merging) -> None:
    for day in range(2):
        numbers = np.arange(_ENTRIES)
        times = BASE_MS + day * DAY_MS + numbers * 1000
        keys, offsets = [f"k{number}" for number in numbers], day * _ENTRIES + numbers
        life.index.put_batch(batch(_ENTRIES, key=keys, offset=offsets, timestamp_ms=times))
        life.publish()
    life.later()
    life.merge(DAY_S, shard_bytes=_SHARD)
    shards = len(life.state.objects)
    assert shards == 4
    (job,) = life.plan(30 * DAY_S, shard_bytes=_SHARD).jobs
    tasks = len(job.tasks)
    assert tasks >= 3 and {source for task in job.tasks for source in task.inputs} == set(job.inputs)
    readers = Counter(source.name for task in job.tasks for source in task.inputs)
    # cuts of the tasks and of the shards lie between each other: each shard is of two tasks, at most three
    assert max(readers.values()) < tasks
    recorder = Recorder(life.storage)
    life.merge(30 * DAY_S, storage=recorder, shard_bytes=_SHARD)
    directories = Counter(read.name for read in recorder.reads if read.end == _size_of(job.inputs, read.name))
    assert directories == readers
    # one directory and one range for each, for no task has more than a piece; by the log the new shards'
    expected = estimate(job, PriceTable())
    assert expected.requests["get_range"] == 2 * readers.total() + expected.shards
    assert len(recorder.reads) == 2 * readers.total()
    with life.reader() as reader:
        assert [item.offset for item in reader.query("t", "k17")] == [_ENTRIES + 17, 17]


def _size_of(sources: object, name: str) -> int:
    return next(source.size_bytes for source in sources if source.name == name)  # type: ignore[attr-defined]
