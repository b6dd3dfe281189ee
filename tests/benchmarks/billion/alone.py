"""One process without Spark: the messages are put in batches, compacted and uploaded.

python -m tests.benchmarks.billion.alone FOLDER ROOT STORAGE        prints a JSON document
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.dataset as ds

from tests.benchmarks.billion.data import SOURCE
from tests.benchmarks.machine.setting import FLUSH_ENTRIES
from tiered_index import IndexConfig, IndexService

_BATCH = 250_000


def main(folder: str, root: str, storage: str) -> None:
    """Put all messages, and print how many there were."""
    config = IndexConfig.load(root=root, storage=storage, background=False, max_late_s=1e10, local_keep_s=0)
    files = sorted((Path(folder) / SOURCE).glob("*.parquet"))
    entries = waiting = 0
    with IndexService.open(config) as index:
        for rows in ds.dataset(files, format="parquet").to_batches(batch_size=_BATCH):
            waiting += index.put_batch(rows)
            if waiting >= FLUSH_ENTRIES:
                index.flush()
                index.run_lifecycle()
                entries, waiting = entries + waiting, 0
        index.seal()
        index.run_lifecycle()
    print(json.dumps({"entries": entries + waiting}))


if __name__ == "__main__":
    main(*sys.argv[1:])
