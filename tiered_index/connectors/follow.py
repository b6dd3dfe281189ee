"""Followers put the messages of a source into an index, in order, until the source ends or you stop them.

Implement `tiered_index.connectors.source.Source` for a broker; `Follower` does the rest. It waits while the index
pushes back, reports losses and torn tails, and archives. The index stores each position with the entries, so a
restarted follower continues there. One thread runs a follower. Any thread may read its counts, `problems` and
`gauges`, and stop it.

docs/embedding.md has the steps. docs/api.md lists all public names.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tiered_index.connectors.source import FIRST, Archiver, Batch, Loss, Source, Stopped, Torn, no_entries
from tiered_index.errors import BackPressure, StorageUnavailable, TieredIndexError
from tiered_index.format.topic_documents import DocumentOf, TopicDocument
from tiered_index.service.index import IndexService
from tiered_index.service.log.expired import Expired
from tiered_index.service.write.validation import as_mapping, distinct_topics, has_columns_of_keys, numbers_of
from tiered_index.types import inclusive

__all__ = ["Follower", "PatientPut"]

_log = logging.getLogger(__name__)
_PUT_PAUSE_S = 0.2
_STATUS_INTERVAL_S = 1.0
# A flush makes positions durable, so this bounds the entries that are put again after a crash.
_FLUSH_ENTRIES = 250_000
# Most losses that are kept.
_LOSSES = 1_000
_NOTHING = Batch(source="", position=0)


@dataclass
class PatientPut:
    """Puts batches of a source into one index, and tries again while the index pushes back.

    `index` is the index. It tries for `patience_s` seconds, or until `stop` is set. `is_outside`: the entries are not
    those of a source that the index follows, so they may not use its queues and positions. `document` is that of
    `put_source_batch`.

    `quarantined` has the first `FIRST` messages with an implausible time, JSON-ready. `expired` counts the entries that
    lookups leave out, because they are older than the retention.
    """

    index: IndexService
    patience_s: float
    stop: threading.Event = field(default_factory=threading.Event)
    document: DocumentOf | None = None
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    expired: int = 0
    is_outside: bool = False
    _unflushed: int = field(default=0, init=False)

    def __call__(self, columns: Any, source: str | None, source_position: int | None) -> int:
        """Put one batch; return its number of entries. Raises `BackPressure`, `Stopped`, `InvalidArgument`."""
        waiting_since: float | None = None
        columns = as_mapping(columns)  # a stream can be read only once
        while True:
            try:
                if self.is_outside:
                    put = self.index.put_batch(columns, source, source_position)
                else:
                    put = self.index.put_source_batch(columns, source, source_position, document=self.document)
                break
            except BackPressure:
                waiting_since = waiting_since or time.monotonic()
                if time.monotonic() - waiting_since > self.patience_s:
                    raise
                if self.stop.is_set():
                    raise Stopped("stopped while a put waited for space") from None
                if not self.flush():
                    self.stop.wait(_PUT_PAUSE_S)
        if put:
            times_ms = numbers_of("timestamp_ms", columns["timestamp_ms"])
            interval = int(times_ms.min()), int(times_ms.max())
            self.expired += self._count_expired(times_ms, interval[0], columns)
            if len(self.quarantined) < FIRST:
                self._note_quarantined(times_ms, interval, columns)
        self._unflushed += put
        if self._unflushed >= _FLUSH_ENTRIES:
            self.flush()
        return put

    def finish(self) -> None:
        """Flush the index; wait up to `patience_s` without an upload while its disk is full. Raises `BackPressure`."""
        left, until_s = None, 0.0
        while not self.flush():
            if (now := self.index.health()["unpublished"]) != left:
                left, until_s = now, time.monotonic() + self.patience_s
            if self.stop.is_set() or time.monotonic() > until_s:
                self.index.flush()
                break
            self.stop.wait(_PUT_PAUSE_S)

    def _count_expired(self, times_ms: npt.NDArray[np.int64], least_ms: int, columns: Mapping[str, Any]) -> int:
        expired, rule = self.index.expired, self.index.config.retention
        if rule.any:
            # the index's next round records it
            expired = expired.joined(Expired((rule.horizon(time.time_ns() // 10**6),)))
        if not expired.latest_ms:
            return 0
        # entries have whole seconds
        if least_ms // 1000 * 1000 >= expired.latest_ms:
            return 0
        numbers, topics = distinct_topics(columns["topic"])
        before_ms = np.array([expired.before_ms(topic) for topic in topics])
        is_expired = times_ms // 1000 * 1000 < before_ms[numbers]
        if not has_columns_of_keys(keys := columns.get("key", ())):
            return int(np.count_nonzero(is_expired))
        have_key = (column.is_valid().to_numpy(zero_copy_only=False) for column in keys)
        return sum(int(np.count_nonzero(is_expired & has_key)) for has_key in have_key)

    def _note_quarantined(
        self, times_ms: npt.NDArray[np.int64], interval: tuple[int, int], columns: Mapping[str, Any]
    ) -> None:
        now_s, settings = time.time(), self.index.config
        low_s, high_s = now_s - settings.max_late_s, now_s + settings.max_early_s
        if interval[0] // 1000 >= low_s and interval[1] // 1000 <= high_s:
            return
        seconds = times_ms // 1000
        wrong = (seconds < low_s) | (seconds > high_s)
        number, topics = distinct_topics(columns["topic"])
        numbers = {name: numbers_of(name, columns[name]) for name in ("queue_id", "offset")}
        for place in np.flatnonzero(wrong).tolist():
            message: dict[str, Any] = {"topic": topics[number[place]]}
            message |= {name: int(values[place]) for name, values in numbers.items()}
            message["timestamp_ms"] = int(seconds[place]) * 1000
            if message not in self.quarantined:  # a message has an entry for each key
                self.quarantined.append(message)
                if len(self.quarantined) == FIRST:
                    return

    def flush(self) -> bool:
        """Flush the index. Return false if its disk is full: then only the life cycle can free space."""
        try:
            self.index.flush()
        except BackPressure:
            return False
        self._unflushed = 0
        return True


class Archiving:
    """Runs an archiver in a thread of its own, so that uploads do not delay new messages.

    If the storage is unavailable or a segment is skipped, `problem` says so and the next round tries again. Any other
    error ends the follower.
    """

    def __init__(self, archiver: Archiver) -> None:
        self._archiver = archiver
        self._pool = ThreadPoolExecutor(1, "tiered-index-archive")
        self._round: Future[int] | None = None
        self._trouble: str | None = None
        self._reported = 0

    @property
    def archived(self) -> int:
        """The number of archived segments, including those of the round under way."""
        return self._archiver.archived

    @property
    def problem(self) -> str | None:
        """The error of the last round, and the segments that are skipped; None if there are none."""
        losses = self._archiver.passed_over
        named = f"skipped ranges: {len(losses):,}, the last one: {losses[-1].problem}" if losses else None
        return "; ".join(filter(None, (self._trouble, named))) or None

    @property
    def has_lost(self) -> bool:
        """Whether segments were skipped."""
        return bool(self._archiver.losses)

    def new_losses(self) -> list[Loss]:
        """Return the segments that were skipped since the last call."""
        new = self._archiver.losses[self._reported :]
        self._reported += len(new)
        return new

    def close(self) -> None:
        """Stop the round under way."""
        self._archiver.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def ends_whole(self) -> bool:
        """Whether all that is put must be archived before the command ends, and a loss ends it with a finding."""
        return bool(getattr(self._archiver, "ends_whole", False))

    def poll(self) -> None:
        """Begin the next round if none is under way. Raises the error of the last round if repeating it can't help."""
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
        """Archive all closed segments. Raises any error that prevents it."""
        ended, self._round = self._round, None
        if ended is not None:
            # an error that may pass: `finish` tries again
            with contextlib.suppress(StorageUnavailable, BackPressure):
                ended.result()
        self._pool.submit(self._archiver.finish).result()
        self._trouble = None


def _same(document: TopicDocument | None, topic: str) -> TopicDocument | None:
    return document


class Follower:
    """Puts the messages of a source into an index. Use it as a context manager, which closes the source.

    `run` reads the source to its end or, with `follow`, until `stop` is set. `in_background` runs it in a thread.
    `losses` has the first losses, `loss_count` counts all. `note` is called with each message for the operator.
    `status` is called about once a second. The index notes `document` for each topic that is put, unless the source has
    one of its own (`Source`). Its attributes are these arguments and counts, which the status line, the
    health and the metrics read.
    """

    def __init__(
        self,
        index: IndexService,
        source: Source,
        *,
        follow: bool = True,
        poll_s: float = 0.2,
        patience_s: float = 60.0,
        stop: threading.Event | None = None,
        archiver: Archiver | None = None,
        note: Callable[[str], None] = _log.warning,
        document: TopicDocument | None = None,
    ) -> None:
        self.index, self.source, self.stop = index, source, stop or threading.Event()
        of_source: DocumentOf | None = getattr(source, "document", None)
        self.put = PatientPut(index, patience_s, self.stop, of_source or partial(_same, document))
        self.archiving = Archiving(archiver) if archiver is not None else None
        self.messages = self.entries = self.hidden = self.left_out = self.replaced_keys = self.loss_count = 0
        self.losses: list[Loss] = []
        # The kind of bytes at the end of the source, and the incomplete part there.
        self.state: str | None = None
        self.torn: Torn | None = None
        # A torn tail is reported after two rounds have found it: most are messages that are being written.
        self.is_torn_reported = False
        self._follow, self._poll_s, self._note = follow, poll_s, note
        self.status: Callable[[Follower], None] = lambda _: None
        self._checked_s = 0.0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if (attach := getattr(source, "attach", None)) is not None:
            attach(self.put, self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self.stop.set()
            self._thread.join()
        if self.archiving is not None:
            self.archiving.close()
        self.source.close()

    def run(self) -> None:
        """Follow to the end of the source, or until stopped. Raises as source, archiver and `put_source_batch`."""
        progress_s = time.monotonic()
        while not self.stop.is_set():
            last = _NOTHING
            try:
                with contextlib.closing(self.source.batches()) as batches:
                    for last in batches:
                        self._take(last)
                        progress_s = time.monotonic()
            except Stopped:
                return
            except BackPressure:  # a source writes to the disk as well
                if time.monotonic() - progress_s > self.put.patience_s:
                    raise
                self.stop.wait(self._poll_s)
                continue
            self._take_end(last)
            if self.archiving is not None:
                self.archiving.poll()
                self._lose(self.archiving.new_losses())
            if last.caught_up and not self._follow:
                return
            self._check()
            if last.pause:
                self.stop.wait(self._poll_s * last.pause)
            progress_s = time.monotonic()
        with contextlib.suppress(Stopped):
            for batch in getattr(self.source, "last_batches", tuple)():
                self._take(batch)

    def _take(self, batch: Batch) -> None:
        if batch.losses:
            # before the position is durable: a range that no run finds again must be in the log
            self._record(batch.source, batch.losses)
        if batch.columns is not None:
            self.entries += self.put(batch.columns, batch.source, batch.position)
        self.entries += batch.entries
        self.messages += batch.messages
        self.hidden += batch.hidden
        self.left_out += batch.left_out
        self.replaced_keys += batch.replaced_keys
        self._lose(batch.losses)

    def _record(self, source: str, losses: Sequence[Loss]) -> None:
        """Record losses in the storage's log, so that answers name them. Waits while the storage is unavailable."""
        until_s = time.monotonic() + self.put.patience_s
        recorded = [loss.recorded(source, time.time_ns() // 10**6) for loss in losses]
        while True:
            try:
                self.index.record_ranges(recorded)
                return
            except StorageUnavailable:
                if time.monotonic() > until_s:
                    raise
                if self.stop.wait(_PUT_PAUSE_S):
                    raise Stopped("stopped while a skipped range waited for the storage") from None

    def _take_end(self, last: Batch) -> None:
        self.state = last.state or self.state
        torn, before, self.torn = last.torn, self.torn, last.torn
        if torn is None or before is None or (torn.begin, torn.end) != (before.begin, before.end):
            self.is_torn_reported = False
        elif not self.is_torn_reported:
            self.is_torn_reported = True
            place = f"{self.source.offsets} {inclusive(torn.begin, torn.end)}: {torn.what}"
            self._note(f"torn: {place} at the end of the log; {torn.why}")

    def _lose(self, losses: Iterable[Loss]) -> None:
        for loss in losses:
            least = "at least " if loss.is_least else ""
            count = f", {least}{loss.messages:,} messages" if loss.messages is not None else ""
            self._note(f"{loss.kind}: {self.source.offsets} {inclusive(loss.begin, loss.end)}{count}: {loss.problem}")
            self.loss_count += 1
            if len(self.losses) < _LOSSES:
                self.losses.append(loss)

    def _check(self) -> None:
        if time.monotonic() - self._checked_s >= _STATUS_INTERVAL_S:
            self._checked_s = time.monotonic()
            # an empty put, so that a fenced writer fails here even while there are no messages
            self.index.put_source_batch(no_entries(self.index))
            self.status(self)

    def finish_before_end(self) -> None:
        """Archive what may be deleted while the command is not running. An error that prevents it is noted."""
        if self.must_archive:
            try:
                self.finish_archiving()
            except TieredIndexError as error:
                self._note(f"not all is archived: {error}")

    @property
    def must_archive(self) -> bool:
        """Whether all that is put must be archived before the command ends."""
        return self.archiving is not None and self.archiving.ends_whole

    @property
    def has_lost(self) -> bool:
        """Whether messages were deleted before they were archived, without an option that allows it."""
        return self.archiving is not None and self.archiving.ends_whole and self.archiving.has_lost

    def finish_archiving(self) -> None:
        """Archive all closed segments. Raises any error that prevents it."""
        if self.archiving is not None:
            try:
                self.archiving.finish()
            finally:
                self._lose(self.archiving.new_losses())

    def in_background(self) -> Self:
        """Run in a thread until the context ends, `end` is called or an error ends it."""
        self._thread = threading.Thread(target=self._run, name="tiered-index-follow", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - `end` raises it in the caller's thread
            self._error = error

    def has_ended(self) -> bool:
        """Return whether the background thread has ended by itself."""
        return self._thread is not None and not self._thread.is_alive()

    def end(self) -> None:
        """End the background thread. Raises the error that ended it before."""
        self.stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def position(self) -> int:
        """The sum of the positions."""
        return sum(self.source.positions().values())

    def problems(self, max_lag_s: float | None = None) -> list[str]:
        """Return the problems of archiving and of the source, and a lag of more than `max_lag_s`.

        The index has problems of its own: see `IndexService.health`.
        """
        parts = {
            "archive": self.archiving.problem if self.archiving is not None else None,
            "source": getattr(self.source, "trouble", None),
        }
        problems = [f"{part}: {problem}" for part, problem in parts.items() if problem is not None]
        return [*problems, *filter(None, [self.behind(max_lag_s)])]

    def behind(self, max_lag_s: float | None) -> str | None:
        """Return a message if the index is more than `max_lag_s` behind, or if the lag is unknown. None: no bound."""
        if max_lag_s is None:
            return None
        lag = self.source.lag()
        if lag.is_unknown:
            return "follow: how far the index is behind the source is not known"
        behind = f"follow: {lag.bytes:,} {self.source.unit}"
        if lag.seconds is None:
            return f"{behind} behind the source, and how many seconds is not known yet"
        return f"{behind} and {lag.seconds:g} seconds behind the source" if lag.seconds > max_lag_s else None

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return the metrics of the follower: for each name its meaning and its value."""
        lag, unit = self.source.lag(), self.source.unit
        place = "Position up to which the source is indexed: of several parts the sum of their positions."
        seconds = math.nan if lag.seconds is None else lag.seconds
        archived = 0 if self.archiving is None else self.archiving.archived
        return {
            f"follow_position_{unit}": (place, self.position),
            f"follow_lag_{unit}": (
                f"{unit.capitalize()} behind the end of the source's log; NaN if unknown.",
                math.nan if lag.is_unknown else lag.bytes,
            ),
            "follow_lag_seconds": ("Seconds behind the newest message; NaN if unknown.", seconds),
            "follow_messages_total": ("Messages that were read.", self.messages),
            "follow_lost_ranges_total": (
                "Ranges of the log that were damaged, or deleted before they were read.",
                self.loss_count,
            ),
            "follow_archived_segments_total": ("Segments that were archived.", archived),
            **getattr(self.source, "gauges", dict)(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return counts, lag and losses, JSON-ready."""
        archiving = self.archiving
        return {
            "source": self.source.place,
            "position": self.position,
            "unit": self.source.unit,
            **{n: getattr(self, n) for n in ("messages", "entries", "hidden", "left_out", "replaced_keys")},
            "tail": self.state,
            "torn": None if (torn := self.torn) is None else {"begin": torn.begin, "end": torn.end, "what": torn.what},
            "lag": asdict(self.source.lag()),
            "loss_count": self.loss_count,
            "losses": [asdict(loss) for loss in self.losses],
            **({"archived_segments": archiving.archived} if archiving is not None else {}),
        }
