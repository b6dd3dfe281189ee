"""The demo's stream as messages and as entries."""

import numpy as np
import pyarrow as pa

from tests.demo.workload import TOPICS, Workload
from tiered_index.sources.columns import entry_columns


def message_table(workload: Workload, start: int, stop: int) -> pa.Table:
    """Return messages [start, stop) as `tiered-index ingest` reads them, with keys as lists."""
    low, high = np.searchsorted(workload.entry_message, (start, stop))
    ends = np.searchsorted(workload.entry_message[low:high], np.arange(start, stop + 1)).astype(np.int32)
    keys = pa.array(workload.keys).take(pa.array(workload.entry_key[low:high]))
    of = slice(start, stop)
    return pa.table(
        {
            "topic": pa.DictionaryArray.from_arrays(pa.array(workload.topic[of]), pa.array(TOPICS)),
            "queue_id": workload.queue_id[of],
            "offset": workload.offset[of],
            "size": workload.size[of],
            "timestamp_ms": workload.timestamp_ms[of],
            "keys": pa.ListArray.from_arrays(pa.array(ends), keys),
        }
    )


def entry_batch(workload: Workload, start: int, stop: int) -> pa.RecordBatch:
    """Return the entries of messages [start, stop) as `IndexService.put_batch` takes them."""
    return entry_columns(message_table(workload, start, stop))
