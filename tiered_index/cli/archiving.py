"""`ingest --archive-segments`: closed segments go into the storage beside the following, in a thread of their own.

An upload takes seconds and must not keep new messages out of lookups. A storage that is down is a problem to be shown, and tried again;
so is a segment that the archiver passes over. Anything else ends the command.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from tiered_index.errors import BackPressure, StorageUnavailable
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.follow.dispatcher import Loss

__all__ = ["Archiving"]


class Archiving:
    """One archiver and its thread."""

    def __init__(self, archiver: SegmentArchiver) -> None:
        self._archiver = archiver
        self._pool = ThreadPoolExecutor(1, "tiered-index-archive")
        self._round: Future[int] | None = None
        self._trouble: str | None = None
        self._told = 0

    @property
    def archived(self) -> int:
        """How many segments were archived, those of a round under way, or that ended in an error, among them."""
        return self._archiver.archived

    @property
    def problem(self) -> str | None:
        """What kept the last round from its end, and which segments are passed over; None where all is archived."""
        losses = self._archiver.passed_over
        named = f"segments passed over: {len(losses):,}, the last {losses[-1].problem}" if losses else None
        return "; ".join(filter(None, (self._trouble, named))) or None

    def new_losses(self) -> list[Loss]:
        """Return the segments that were passed over since the last call."""
        new = self._archiver.losses[self._told :]
        self._told += len(new)
        return new

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
                ended.result()
                self._trouble = None
            except (StorageUnavailable, BackPressure) as error:
                self._trouble = str(error)
        self._round = self._pool.submit(self._archiver.run_once)

    def finish(self) -> None:
        """Archive what is closed now; raises whatever keeps it from that."""
        if self._round is not None:
            self._round.result()
            self._round = None
        self._pool.submit(self._archiver.run_once).result()
        self._trouble = None
