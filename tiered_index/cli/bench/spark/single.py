"""The same work by one process without Spark: `put_batch` and the life cycle for a build, `tiered-index merge`'s code
for a merge.

The process stays on one core, or for merges by two threads on two. The build's files are published, not yet merged to
days: what a live writer does. One thread, but for the merge's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tiered_index.cli.bench.machine import pinned
from tiered_index.cli.bench.setting import FLUSH_ENTRIES, require
from tiered_index.cli.bench.spark.job import copy_of, merge_options
from tiered_index.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.service.index import IndexService
from tiered_index.service.log.log import StorageLog
from tiered_index.service.merge.run import merge
from tiered_index.storage.local.storage import LocalStorage

__all__ = ["build_alone", "merge_alone"]

_BATCH = 250_000


def build_alone(folder: Path, config: IndexConfig, entries: int) -> float:
    """Put the messages of `folder`/messages, compact and upload them on one core; return the seconds it took."""
    # imported when asked for: it loads pandas, and every command imports this module
    import pyarrow.dataset as ds

    place = Path(tempfile.mkdtemp(prefix="alone-", dir=folder))
    settings = config.model_copy(
        update={"root": place / "root", "storage": f"file://{place / 'storage'}", "background": False}
    )
    try:
        with _on_cores(1), IndexService.open(settings) as index:
            begun = time.perf_counter()
            waiting = put = 0
            for rows in ds.dataset(folder / "messages", format="parquet").to_batches(batch_size=_BATCH):
                waiting += index.put_batch(rows)
                if waiting >= FLUSH_ENTRIES:
                    index.flush()
                    index.run_lifecycle()
                    put, waiting = put + waiting, 0
            index.seal()
            index.run_lifecycle()
            elapsed_s = time.perf_counter() - begun
            require(put + waiting, entries, "entries that were put")
        return elapsed_s
    finally:
        shutil.rmtree(place)


def merge_alone(folder: Path, config: IndexConfig, entries: int, days: int, threads: int) -> float:
    """Merge a copy of `folder`/parts to days by as many threads as cores; return the seconds it took."""
    with copy_of(folder, "parts") as parts, LocalStorage(parts) as storage, _on_cores(threads):
        log = StorageLog(storage, SystemClock())
        log.open()
        options = merge_options(entries, days, config.layout().schema.item.itemsize)
        begun = time.perf_counter()
        report = merge(storage, log, SystemClock(), options, threads=threads)
        require(report.entries, entries, "entries that were merged")
        return time.perf_counter() - begun


@contextlib.contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Keep the process on one core; with more it may use all there are, of which the threads keep so many busy."""
    if count > 1:
        yield
        return
    with pinned(max(os.sched_getaffinity(0))):
        yield
