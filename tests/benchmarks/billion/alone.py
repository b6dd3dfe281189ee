"""One process without Spark: the messages are put in batches, compacted and uploaded.

python -m tests.benchmarks.billion.alone FOLDER ROOT STORAGE        prints a JSON document
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.billion.data import SOURCE
from tests.benchmarks.machine.setting import FLUSH_ENTRIES
from tiered_index import IndexConfig, IndexService

_BATCH = 250_000


def main(folder: str, root: str, storage: str) -> None:
    """Put all messages, and print how many there were."""
    # imported here: it loads pandas, and suites import `put_all`
    import pyarrow.dataset as ds

    config = IndexConfig.load(root=root, storage=storage, background=False, max_late_s=1e10, local_keep_s=0)
    files = sorted((Path(folder) / SOURCE).glob("*.parquet"))
    with IndexService.open(config) as index:
        entries = put_all(index, ds.dataset(files, format="parquet"))
    print(json.dumps({"entries": entries}))


def put_all(index: IndexService, messages: Any) -> int:
    """Put, compact and upload the messages of a dataset; return how many entries there are."""
    entries = waiting = 0
    for rows in messages.to_batches(batch_size=_BATCH):
        waiting += index.put_batch(rows)
        if waiting >= FLUSH_ENTRIES:
            index.flush()
            index.run_lifecycle()
            entries, waiting = entries + waiting, 0
    index.seal()
    index.run_lifecycle()
    return entries + waiting


if __name__ == "__main__":
    main(*sys.argv[1:])
