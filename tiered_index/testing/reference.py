"""Expected answers for millions of entries: the reference model's semantics in sorted arrays.

For workloads too large for `ReferenceModel`. Entries are sorted once by (topic, key) and answer order; an answer is a
slice of that. Nothing of the engine is used. Memory: some 60 bytes an entry. Immutable; any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.testing.workload import TOPICS, Workload

__all__ = ["Answer", "ReferenceAnswers"]

# (timestamp_ms of the second, queue_id, offset, size), in answer order: second descending, offset descending, queue
# ascending.
Answer = list[tuple[int, int, int, int]]
Array = npt.NDArray[Any]


class ReferenceAnswers:
    """What every lookup over a `Workload`, put whole, must answer."""

    def __init__(self, workload: Workload) -> None:
        of = workload.entry_message
        second = workload.timestamp_ms[of] // 1000
        self._topics = {name: number for number, name in enumerate(TOPICS)}
        self._keys = {key: number for number, key in enumerate(workload.keys)}
        group = workload.topic[of].astype(np.int64) * len(workload.keys) + workload.entry_key
        order = np.lexsort((workload.queue_id[of], -workload.offset[of], -second, group))
        self._group, self._second = group[order], second[order]
        of = of[order]
        self._queue, self._offset, self._size = workload.queue_id[of], workload.offset[of], workload.size[of]

    def answer(self, topic: str, key: str, begin_ms: int | None = None, end_ms: int | None = None) -> Answer:
        """Return every answer; bounds are inclusive and compared by whole seconds. An unknown topic or key has none."""
        if topic not in self._topics or key not in self._keys:
            return []
        group = self._topics[topic] * len(self._keys) + self._keys[key]
        low, high = np.searchsorted(self._group, (group, group + 1))
        rows = np.arange(low, high)
        seconds = self._second[low:high]
        if begin_ms is not None:
            rows, seconds = rows[seconds >= begin_ms // 1000], seconds[seconds >= begin_ms // 1000]
        if end_ms is not None:
            rows = rows[seconds <= end_ms // 1000]
        columns = (self._second[rows] * 1000, self._queue[rows], self._offset[rows], self._size[rows])
        return list(zip(*(column.tolist() for column in columns), strict=True))
