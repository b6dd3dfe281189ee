"""`ingest --archive-segments`: closed segments go into the storage beside the following, in a thread of their own.

An upload takes seconds and must not keep new messages out of lookups. A storage that is down is a problem to be shown, and tried again;
anything else ends the command.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from tiered_index.errors import BackPressure, StorageUnavailable
from tiered_index.rocketmq.archive import SegmentArchiver

__all__ = ["Archiving"]


class Archiving:
    """One archiver and its thread; `archived` counts segments, `problem` is what kept the last round from its end."""

    def __init__(self, archiver: SegmentArchiver) -> None:
        self._archiver = archiver
        self._pool = ThreadPoolExecutor(1, "tiered-index-archive")
        self._round: Future[int] | None = None
        self.archived = 0
        self.problem: str | None = None

    def __enter__(self) -> Archiving:
        return self

    def __exit__(self, *_: object) -> None:
        self._archiver.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def poll(self) -> None:
        """Take in the round that ended and begin the next one; raises what no repetition helps against."""
        if self._round is not None and not self._round.done():
            return
        ended, self._round = self._round, None
        if ended is not None:
            try:
                self.archived += ended.result()
                self.problem = None
            except (StorageUnavailable, BackPressure) as error:
                self.problem = str(error)
        self._round = self._pool.submit(self._archiver.run_once)

    def finish(self) -> None:
        """Archive what is closed now; raises whatever keeps it from that."""
        if self._round is not None:
            self.archived += self._round.result()
            self._round = None
        self.archived += self._pool.submit(self._archiver.run_once).result()
