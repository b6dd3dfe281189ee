"""Reads the messages of a live store in order, for an index, from its durable position.

A `Dispatcher` is a `Source`; `batches` is one round, and `Follower` repeats it. The source position is the commit log
offset up to which everything was put. A restart continues there; entries that are put twice are one answer. The
broker's files are only read. A round may find:

| found                | what happens |
|---|---|
| zeros, or half a message, at the end of the live log | the end for now |
| a last message followed by older bytes | it is put if the next round finds it unchanged |
| zeros followed by something readable | the end for one round, then damage |
| damage               | `CorruptFile`; with `skip_corrupt` on to the next readable message |
| a segment deleted before it was read | `MissingOffsets`; with `skip_missing` on to the next segment |
| a segment that is missing between two others | `MissingOffsets`; with `skip_corrupt` on to the next segment |
| another or a shorter log than before | `RewrittenOffsets`; with `skip_missing` back to the last same message |
| a log that ends before the position, in a new root | the same; back to the log's begin |

An error is raised only after an earlier round has put everything before it. One thread uses a dispatcher.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.connectors.documents import document_of, of_store
from tiered_index.connectors.rocketmq.follow.fingerprints import (
    FAR_BYTES,
    LogFingerprints,
    RangeFingerprint,
    Scrubber,
    Verdict,
    fingerprints_of,
    last_two_bytes,
)
from tiered_index.connectors.rocketmq.follow.queue_ends import QueueEnds
from tiered_index.connectors.rocketmq.follow.tail import (
    EVERYTHING,
    NOTHING,
    LastRead,
    StableEnd,
    TornTail,
    is_followed,
    stable_end,
    stable_part,
    store_ms_at,
    torn_tail,
)
from tiered_index.connectors.rocketmq.log.columns import IndexBatch, Selection, SkippedRange
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.connectors.rocketmq.log.evidence import dledger_log, gather, problem_of
from tiered_index.connectors.rocketmq.log.layout import TAG_NAME
from tiered_index.connectors.rocketmq.log.segments import End, Segment
from tiered_index.connectors.rocketmq.log.store import SOURCE_PREFIX, StoreDirectory
from tiered_index.connectors.source import Batch, Lag, Loss, ReadTime
from tiered_index.errors import BackPressure, ConfigError, CorruptFile, StorageUnavailable, TieredIndexError
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService
from tiered_index.service.log.records import LostRange
from tiered_index.storage.disk import Disk
from tiered_index.types import inclusive

_ROUND_BYTES = 1 << 26
_ROUND_S = 0.5
# Rounds at zeros between two reads of the consume queues, which may name later messages
_LOOKS = 300
# Seconds between two comparisons of the log's end with the consume queues and the checkpoint
_EVIDENCE_S = 30.0
_END_OF_LOG = 2**63 - 1
# Most fingerprints, newest first, whose message is read for the last store timestamp
_LAST_RANGES = 8
_REWRITTEN = "the log was cut or rewritten after it was read"


class RewrittenOffsets(CorruptFile):
    """Commit log offsets [`begin`, `end`) were changed or cut off after they were read.

    `messages` is None in a new root, which only knows that the log ends before `end`.
    """

    def __init__(self, folder: str, begin: int, end: int, messages: int | None) -> None:
        if messages is None:
            problem = (
                f"the log ends before offset {end:,}, up to which it was read: a slave that does not have all messages "
                f"yet, or a log that was cut; `ingest --skip-missing` reads it again from its start"
            )
        else:
            offsets = f"commit log offsets {inclusive(begin, end)}, {messages:,} messages in the index"
            problem = f"{_REWRITTEN}: {offsets}; `ingest --skip-missing` reads the log again from there"
        super().__init__(folder, problem)
        self.begin, self.end, self.messages = begin, end, messages


class MissingMessages(CorruptFile):
    """Other files of a store name messages after `end`, the end of its commit log: they are elsewhere, or missing."""

    def __init__(self, folder: str, problem: str, end: int) -> None:
        super().__init__(folder, problem)
        self.end = end


def check_one_store(index: IndexService, source: str, *, restart: bool = False) -> None:
    """Raise `ConfigError` if the index follows another store: offsets of two stores can't be distinguished."""
    known = [name for name in index.durable_positions() if name.startswith(SOURCE_PREFIX)]
    if known and source not in known and not restart:
        other, this = (name.removeprefix(SOURCE_PREFIX) for name in (known[0], source))
        raise ConfigError(
            f"this index follows the store {other!r}, not {this!r}: use another root and storage, --store-name "
            f"if the store has moved, or --restart to put both into one index"
        )


def document_of_store(index: IndexService, name: str, selection: Selection) -> TopicDocument:
    """Return the document of the topics of a store. It names tags if the index has, or had, entries of them."""
    known = of_store(index.topic_documents().values(), name)
    has_tags = selection.tags or (known is not None and TAG_NAME in known.key_names)
    return document_of("rocketmq", {"store": name, **names_of_keys(has_tags=has_tags)})


def names_of_keys(*, has_tags: bool) -> dict[str, list[str]]:
    """Return the fact in the document of a topic that says whether the tags of its messages are keys, too."""
    return {"key_names": [TAG_NAME]} if has_tags else {}


class Dispatcher:
    """Follows one store for one index: the `Source` of a RocketMQ store.

    Its attributes are the options, the parts that read and check the log, and the place and the damage of the last
    round. They change together, in `batches`, so they are of one class.
    """

    unit = "bytes"
    offsets = "commit log offsets"

    def __init__(
        self,
        index: IndexService,
        store: StoreDirectory,
        *,
        follow: bool = True,
        skip_corrupt: bool = False,
        skip_missing: bool = False,
        restart: bool = False,
        reader: CommitLogReader | None = None,
        round_bytes: int = _ROUND_BYTES,
        disk: Disk | None = None,
        stopping: Callable[[], bool] = lambda: False,
        now_s: Callable[[], float] = time.monotonic,
        clock: Clock | None = None,
    ) -> None:
        """Continue at the index's durable position.

        Without `follow`, a torn tail is read a second time, because it may be damage. `restart` reads the log from its
        begin. `reader` selects the indexed messages; the default is every topic but RocketMQ's own. A round ends early
        once `stopping()` is True; `now_s` is its clock, and `clock` is the index's. Raises `ConfigError` if the index
        follows another store, `CorruptFile` if the fingerprints can't be read, `StorageMisconfigured` if access to the
        log is denied. It is long, because the class has many attributes (see there).
        """
        assert index.config.root is not None
        check_one_store(index, store.source, restart=restart)
        self._index, self.store, self.place, self._follow = index, store, str(store.folder), follow
        self._skip_corrupt, self._skip_missing = skip_corrupt, skip_missing
        self._reader = reader or CommitLogReader(store.commitlog, selection=Selection())
        self._round_bytes = round_bytes
        self._stopping, self._now_s, self._clock = stopping, now_s, clock or SystemClock()
        self.fingerprints = LogFingerprints.load(index.config.root, store.source, disk or Disk())
        durable = self._known = index.durable_position(store.source)
        self._last_store_ms: int | None = None
        # Commit log offset after the last put message; None before the first message of an empty log
        self.position: int | None = durable
        if restart or durable is None:
            self.position = self._reader.begin_offset()
            self.fingerprints.greatest_store_ms = 0
            self.fingerprints.continue_at = self.position if durable is not None else None
            if self.fingerprints.ranges:
                end = self.fingerprints.ranges[-1].end
                same = self._last_same(self._reader.segments(), end)
                self._note_rewritten(self.fingerprints, same, end)
                if same is not None and same.end < end:
                    self._record_rewritten(same.end, end, None)
            self.fingerprints.cut(0)
        elif self.fingerprints.continue_at is not None:
            # the durable position may belong to the log before it was rewritten, or be before `continue_at`
            self.position = min(self.fingerprints.continue_at, durable)
        elif not self.fingerprints.ranges and (cut := self._recorded_cut(durable)) is not None:
            self.position = self.fingerprints.continue_at = cut
        self.fingerprints.cut(self.position or 0)
        if self.fingerprints.queue_ends.position != self.position:
            # of a batch that was not put, or of a position that the index has passed
            self.fingerprints.queue_ends = QueueEnds()
        self.resumed_from = self.position
        selection, before = str(self._reader.selection), self.fingerprints.selection
        # The selection of the previous run, in words, if it differs from the present one
        self.selected_before = before if durable is not None and not restart and before != selection else None
        self.fingerprints.selection = selection
        # The torn tail at the end of the last round
        self._tail: TornTail | None = None
        # Position of zeros before something readable, and the log's end then; in the next round they are written or
        # damage
        self._hole: tuple[int, int] | None = None
        # A last message that only older bytes follow: it is put if the next round finds it unchanged
        self._last_read: LastRead | None = None
        # One that is not read again while it is unchanged
        self._torn: TornTail | None = None
        self._damage_at: int | None = None
        # Without `follow`: position of half a message at the end of the log in the last round
        self._ended_at: int | None = None
        self._no_hole: tuple[int, int] | None = None
        self._looks = 0
        self._broker = self._broker_start()
        self._scrubber = Scrubber()
        # The reason why messages of the store can't be read, although the log looks whole; None: there is none
        self.trouble: str | None = None
        self._evidence_s: float | None = None
        # The time before which all messages are put, by the index, and whether some came since
        self._read_time: ReadTime | None = None
        self._has_moved = False
        # The begin of a round and the position of the zeros at which it ended. Once a message is there, the log has
        # ended there; and the begin of the last such round
        self._zeros: tuple[int, int] | None = None
        self._passed_ms = 0
        self._document = document_of_store(index, store.name, self._reader.selection)

    def positions(self) -> dict[str, int]:
        """Return the commit log offset after the last put message, by source; empty before the first message."""
        return {} if self.position is None else {self.store.source: self.position}

    def document(self, topic: str) -> TopicDocument:
        """As `Source`."""
        return self._document

    def close(self) -> None:
        """Do nothing: a dispatcher keeps no file open."""

    def batches(self) -> Generator[Batch, None, None]:
        """Yield the messages after the position, up to the end of the log; the last batch has no entries.

        A batch before it may say up to which time all messages are put. A round ends after about 64 MiB or half a
        second. A batch counts as put when the next one is requested. Raises `CorruptFile`, `MissingOffsets`,
        `RewrittenOffsets`, `StorageMisconfigured` and, without `follow`, `StorageUnavailable`; with it this is
        `trouble`, and a later round reads on.
        """
        try:
            yield from self._batches()
        except StorageUnavailable as error:
            if not self._follow:
                raise
            # the disk may be mounted again
            self.trouble, self._evidence_s = str(error), None
            yield self._end(caught_up=True)

    def _batches(self) -> Generator[Batch, None, None]:
        self.fingerprints.cut(self.position or 0)  # those of a batch that was not put
        if self._read_time is None:
            self._read_time = ReadTime(self._index, self.store.source)
        begun_ms = self._clock.now_ms()
        segments = self._reader.segments()  # listed once a round
        losses = self._check_log(segments)
        if not losses and self.position and self._scrubber.is_changed(self.fingerprints, self.position, segments):
            losses = (self._rewritten(),)
        last = self._end(losses=losses, caught_up=False) if losses else (yield from self._round(segments))
        self._settle()
        if self._evidence_s is None:
            self.trouble = None
        if last.caught_up and not losses:
            last = self._compared(last)
            # a torn message that others follow is not the end
            is_end = self._tail is None or not is_followed(self.store, self._tail)
        else:
            is_end = False
            if last.state == End.OPEN.value and self._hole is not None:
                self._zeros = begun_ms, self._hole[0]
        if self.trouble is None:
            read_ms = begun_ms if is_end else self._passed_ms
            is_due = self._has_moved or (is_end and not self._follow)
            if (yield from self._read_time.told(read_ms, is_due=is_due)):
                self._has_moved = False
        yield last

    def last_batches(self) -> Iterator[Batch]:
        """Yield the time before which all messages are put, unless the index has it."""
        if self._read_time is not None:
            yield from self._read_time.told(is_due=True)

    def _compared(self, last: Batch) -> Batch:
        """Compare the end of the log with the store's other files. `last` ends a round that reached the log's end.

        With `follow` a problem is `trouble`. Without it `MissingMessages` is raised or, with `skip_missing`, the loss
        is added.
        """
        now_s = self._now_s()
        if self._follow and self._evidence_s is not None and now_s - self._evidence_s < _EVIDENCE_S:
            return last
        self._evidence_s = now_s
        evidence = gather(self.store)
        position = self.position or 0
        if evidence.end <= self._rewritten_end():
            evidence = evidence._replace(end=0)  # entries of messages that the broker cut off
        self.trouble = problem_of(self.store, position, evidence, self.fingerprints.greatest_store_ms)
        if self.trouble is None or self._follow:
            return last
        if not self._skip_missing:
            raise MissingMessages(str(self.store.commitlog), self.trouble, position)
        begin_ms, end = self._time_before() or 0, max(evidence.end, position + 1)
        count = self.store.messages_named(position, end)
        loss = Loss("missing", position, end, count, self.trouble, begin_ms=begin_ms, is_least=count is not None)
        return replace(last, losses=(*last.losses, loss))

    def _recorded_rewritten(self) -> list[LostRange]:
        """Return the ranges of the log that were found rewritten, by the storage's log."""
        ranges = [lost.range for lost in self._index.log_state.lost.values() if lost.range is not None]
        return [lost for lost in ranges if (lost.source, lost.kind) == (self.store.source, "rewritten")]

    def _recorded_cut(self, durable: int) -> int | None:
        """Return where a root without a memory of the log continues if `durable` is of the log before a cut.

        The storage keeps the greatest position, and not the one to which a lost root had gone back.
        """
        begins = [lost.begin for lost in self._recorded_rewritten() if lost.begin < durable <= lost.end]
        return min(begins, default=None)

    def _rewritten_end(self) -> int:
        """Return the end of the last range of the log that was found rewritten; 0: there is none."""
        return max((lost.end for lost in self._recorded_rewritten()), default=0)

    def _end(
        self, state: End | None = None, *, caught_up: bool, torn: TornTail | None = None, losses: tuple[Loss, ...] = ()
    ) -> Batch:
        """Return the last batch of a round, which has no messages."""
        self._tail = torn
        caught_up = caught_up and (self._follow or not self._look_again(torn))
        # no pause if there may be more: a last message must be read a second time
        pause = 1.0 if caught_up or state is End.OPEN else 0.25 if state is End.TORN else 0.0
        return Batch(
            source=self.store.source,
            position=self.position or 0,
            losses=losses,
            state=state and state.value,
            torn=torn and torn.shown(),
            caught_up=caught_up,
            pause=pause,
        )

    def _round(self, segments: tuple[Segment, ...]) -> Generator[Batch, None, Batch]:
        """Yield the batches of one round; return the last batch."""
        begin = self.position
        until_s = self._now_s() + _ROUND_S
        torn: TornTail | None = None
        state: End | None = None
        has_losses = False
        if begin is not None and self._torn is not None and self._torn.begin == begin:
            torn = torn_tail(self.store, begin)
            if torn.seen and torn == self._torn and begin != self._damage_at:
                return self._end(End.TORN, torn=torn, caught_up=True)
        try:
            stable = self._stable_end(segments)
            for read in self._reader.batches(
                begin,
                skip_corrupt=self._skip_corrupt,
                skip_missing=self._skip_missing,
                hole_at=self._hole[0] if self._hole is not None else None,
                newest_ms=None if begin is not None and begin == self._damage_at else self._store_ms_of_last(),
                segments=segments,
            ):
                if stable == EVERYTHING and not self.store.is_closed:
                    stable = NOTHING  # a broker has started since
                batch, again = stable_part(self.store.commitlog, read, stable, self._last_read)
                # Check the log after the read: a batch that was read before a cut is put, and the next check finds it
                # changed
                if changed := self._check_log(self._reader.segments()):
                    return self._end(state, losses=changed, caught_up=False)
                yield self._remembered(batch)
                self._taken(batch)
                state, has_losses = batch.state, has_losses or bool(batch.skipped)
                self._last_read = again
                if batch.end < read.end:
                    torn = None if again is not None else torn_tail(self.store, batch.end)._replace(end=read.end)
                    return self._end(state, caught_up=again is None, torn=torn)
                enough = batch.end - (begin or 0) >= self._round_bytes or self._now_s() >= until_s or self._stopping()
                if batch.messages and enough and batch.state in (End.MORE, End.SEGMENT):
                    return self._end(state, caught_up=False)
                stable = self._stable_end(segments)
        except TieredIndexError as error:
            if self.position != begin or has_losses:
                # the next round finds the same error, or the finished bytes
                return self._end(state, caught_up=False)
            if not isinstance(error, MissingOffsets):
                raise
            if self.position is not None and error.begin < self.position:
                return self._end(losses=(self._rewritten(),), caught_up=False)
            behind: IndexBatch | None = None
            with contextlib.suppress(CorruptFile, StorageUnavailable):
                behind = next(iter(self._reader.batches(error.end)), None)
            count = self._messages_lost(error.begin, error.end, behind)
            known = f" (at least {count:,} messages, by their queues)" if count else ""
            problem = error.problem.partition(": commit log offsets")[0] + known
            raise MissingOffsets(error.file, problem, error.begin, error.end, is_between=error.is_between) from error
        self._torn = None
        if state is End.TORN and self.position is not None:
            # only a tail that was seen before the read counts: by now the message may be complete
            seen_before = torn is not None and torn.begin == self.position
            self._torn = torn if seen_before else TornTail(self.position, self.position)
            torn = torn or torn_tail(self.store, self.position)
        else:
            torn = None
        return self._end(state, torn=torn, caught_up=state is not End.OPEN or not self._may_be_hole())

    def _look_again(self, torn: TornTail | None) -> bool:
        """Return whether to read the log's end again: damage there must not be taken for the end."""
        before, self._ended_at = self._ended_at, None if torn is None else torn.begin
        if torn is None or before is None:
            return torn is not None
        if before != torn.begin or not self._call_damage():
            return False
        self._ended_at = None
        return True

    def _call_damage(self) -> bool:
        """Return whether a whole message follows the torn one at the position; the next round then reports damage.

        Only without `follow`: the broker may be writing a message where it truncated its log.
        """
        if self._torn is None or self._torn.begin != self.position or not is_followed(self.store, self._torn):
            return False
        self._damage_at = self.position
        return True

    def _may_be_hole(self) -> bool:
        """Return whether the zeros at the position may be a hole, read while the broker was writing."""
        position = self.position or 0
        looked, self._hole = self._hole, None
        end = self.store.log_end()
        behind = end.offset if end is not None else 0
        if behind <= position:
            self._looks += 1
            if self._looks % _LOOKS != 1 or not self.store.messages_named(position, _END_OF_LOG):
                return False
        if looked == (position, behind):
            self._no_hole = looked  # the search found nothing readable
        if self._no_hole == (position, behind):
            return False
        self._hole = position, behind
        return True

    def _stable_end(self, segments: tuple[Segment, ...]) -> StableEnd:
        if self.store.is_closed:
            return EVERYTHING
        return stable_end(segments, self.position or 0, self._reader.chunk_bytes)

    def _remembered(self, batch: IndexBatch) -> Batch:
        """Save a batch's fingerprints and return it for the index: everything durable must have a fingerprint."""
        before_ms = self._time_before()
        losses = tuple([self._loss(skipped, batch, before_ms) for skipped in batch.skipped])
        if is_new := bool(batch.messages or batch.end != self.position):
            durable = self._index.durable_position(self.store.source) or 0
            for fingerprint in fingerprints_of(batch):
                self.fingerprints.add(fingerprint, durable)
            self.fingerprints.queue_ends = self.fingerprints.queue_ends.after(batch)
            self.fingerprints.last_store_ms = batch.last_store_ms or before_ms
            if (greatest_ms := self.fingerprints.greatest_store_ms) is not None:
                self.fingerprints.greatest_store_ms = max(greatest_ms, batch.greatest_store_ms or 0)
            self.fingerprints.save()
        return Batch(
            source=self.store.source,
            position=batch.end,
            columns=batch.columns if is_new else None,
            losses=losses,
            **{name: getattr(batch, name) for name in ("messages", "hidden", "left_out", "replaced_keys")},
        )

    def _taken(self, batch: IndexBatch) -> None:
        """Move the position after a batch that was put."""
        if batch.end == self.position and not batch.messages:
            return
        if self._zeros is not None and self._zeros[1] == self.position and batch.messages and not batch.skipped:
            # a broker writes one message after the other
            self._passed_ms = self._zeros[0]
        self._zeros = None
        self.position, self._has_moved = batch.end, True
        if self._broker != (broker := self._broker_start()):  # a restarted broker may have rewritten the log
            self._broker, self._scrubber.compare_all = broker, True
        self._last_store_ms = batch.last_store_ms or self._last_store_ms

    def _time_before(self) -> int | None:
        """Return the store timestamp of the last message before the position; None: unknown."""
        return self._last_store_ms or self.fingerprints.last_store_ms

    def _loss(self, skipped: SkippedRange, batch: IndexBatch, before_ms: int | None) -> Loss:
        """Return the loss of a range that was skipped before a batch; messages around it bound its times."""
        count = self._messages_lost(skipped.begin, skipped.end, batch) if skipped.is_missing else None
        after_ms = store_ms_at(batch.data, int(batch.positions[0])) if batch.messages else None
        if before_ms is not None and after_ms is not None and after_ms < before_ms:
            before_ms, after_ms = after_ms, before_ms  # a clock was set back
        return Loss(
            "missing" if skipped.is_missing and not skipped.is_between else "corrupt",
            skipped.begin,
            skipped.end,
            count,
            skipped.problem,
            begin_ms=before_ms or 0,
            end_ms=after_ms,
            is_least=count is not None,
        )

    def _messages_lost(self, begin: int, end: int, behind: IndexBatch | None) -> int | None:
        """Return the least number of messages in [begin, end), which `behind` follows; None: not known."""
        by_offsets = None
        if behind is not None and len(behind.skipped) <= 1:
            by_offsets = self.fingerprints.queue_ends.lost_before(begin, behind)
        return max(self.store.messages_named(begin, end) or 0, by_offsets or 0) or None

    def _check_log(self, segments: tuple[Segment, ...]) -> tuple[Loss, ...]:
        """Compare the last put message with the log; if it differs, return the loss or raise `RewrittenOffsets`."""
        if self._has_read:
            self._begin_of_log(segments)
        elif self.store.has_lost_log:
            problem = problem_of(self.store, 0, gather(self.store), None)
            if problem is not None and dledger_log(self.store.folder) is not None:
                raise MissingMessages(str(self.store.commitlog), problem, 0)
            raise StorageUnavailable(
                f"{self.store.commitlog} is missing, but the store has other files of a broker: it was moved or is "
                f"not mounted, or the broker's storePathCommitLog is another folder: give it by `ingest --commitlog`"
            )
        if not self.position:
            return ()
        newest = self.fingerprints.ranges[-1:]
        changed = any(fingerprint.compare_last(segments) is Verdict.CHANGED for fingerprint in newest)
        return (self._rewritten(),) if changed or (not newest and self._ends_before(self.position)) else ()

    def _ends_before(self, position: int) -> bool:
        """Return whether the log's last message ends before a position, which another root has read."""
        end = self.store.log_end()
        if end is None or end.offset >= position:
            return False
        try:  # the estimate may be before messages with zeros
            return all(batch.end < position for batch in self._reader.batches(end.offset))
        except CorruptFile:
            return False

    def _begin_of_log(self, segments: tuple[Segment, ...]) -> int:
        """Return the first offset of the log. Raises `StorageUnavailable` without a segment: brokers always keep 1."""
        if not segments:
            read = max(self.position or 0, self._known or 0)
            state = "has no segment" if self.store.commitlog.is_dir() else "is not there"
            raise StorageUnavailable(
                f"{self.store.commitlog} {state}, and was read up to offset {read}: it was moved, or isn't mounted"
            )
        return segments[0].start

    @property
    def _has_read(self) -> bool:
        """Whether messages of the log were read. Brokers always keep a segment, so it must have one."""
        return bool(self.position or self._known)

    def _broker_start(self) -> tuple[int, ...]:
        """Return the times of two files that a broker writes when it starts."""
        times = []
        for name in ("abort", "lock"):
            with contextlib.suppress(OSError):
                times.append((self.store.folder / name).stat().st_mtime_ns)
        return tuple(times)

    def _rewritten(self) -> Loss:
        """Go back to the last unchanged message, or the log's begin. Raises `RewrittenOffsets` without
        `skip_missing`.
        """
        assert self.position is not None
        segments = self._reader.segments()
        same = self._last_same(segments, self.position)
        begin = self._begin_of_log(segments) if same is None else same.end
        count = self.fingerprints.messages_behind(begin) if self.fingerprints.ranges else None
        lost = RewrittenOffsets(str(self.store.commitlog), min(begin, self.position), self.position, count)
        if not self._skip_missing:
            if self.fingerprints.ranges:  # otherwise nothing shows where the log changed
                self._record_rewritten(lost.begin, lost.end, count)
            raise lost
        after = replace(self.fingerprints, continue_at=begin)
        self._note_rewritten(after, same, lost.end)
        after.cut(begin if same is not None else 0)
        after.save()  # if it fails, the next round finds the change again, and reports it
        self.fingerprints, self.position = after, begin
        self._scrubber.compare_all = False
        self._last_store_ms = None
        return self._loss_of_rewritten(lost.begin, lost.end, lost.messages)

    def _loss_of_rewritten(self, begin: int, end: int, messages: int | None) -> Loss:
        # not before the messages that were cut off, also if the broker's clock is ahead
        newest_ms = max(self._clock.now_ms(), self._time_before() or 0)
        return Loss("rewritten", begin, end, messages, _REWRITTEN, begin_ms=newest_ms, end_ms=newest_ms)

    def _record_rewritten(self, begin: int, end: int, messages: int | None) -> None:
        """Record a rewritten range that this run does not skip: entries of its messages are missing, not damaged.

        An unavailable storage is no error here: the next run finds the range again.
        """
        of_source = [lost.range for lost in self._index.log_state.lost.values() if lost.range is not None]
        if any(
            (lost.source, lost.kind, lost.begin, lost.end) == (self.store.source, "rewritten", begin, end)
            for lost in of_source
        ):
            return
        with contextlib.suppress(StorageUnavailable):
            loss = self._loss_of_rewritten(begin, end, messages)
            self._index.record_ranges([loss.recorded(self.store.source, self._clock.now_ms())])

    def _last_same(self, segments: tuple[Segment, ...], end: int) -> RangeFingerprint | None:
        return self.fingerprints.last_same(segments, max(last_two_bytes(segments, end), FAR_BYTES))

    def _note_rewritten(self, known: LogFingerprints, same: RangeFingerprint | None, end: int) -> None:
        """Note for the archiver that the offsets from the last unchanged message, `same`, up to `end` were rewritten.

        A cut leaves older messages. If there are none, the log may be another one: the archive keeps its copies.
        """
        if same is not None and same.end < end:
            # the clock may have gone back since a segment was archived
            archived_ms = self._index.segments().latest_ms
            known.add_rewritten(same.end, end, max(self._clock.now_ms(), archived_ms))

    def _settle(self) -> None:
        """After going back: note up to where the repeated part is durable, while the durable position is ahead."""
        position, again = self.position, self.fingerprints.continue_at
        if position is None or again is None or again == position:
            return
        try:
            self._index.flush()
            ahead = (self._index.durable_position(self.store.source) or 0) > position
            if not ahead:
                # the storage has the position from before: until the upload, another host would not read the part again
                self._index.seal()
        except BackPressure:
            return
        self.fingerprints.continue_at = position if ahead else None
        self.fingerprints.save()

    @property
    def settled_before(self) -> int:
        """Commit log offset before which everything is durable and need not be read again. Any thread."""
        position, again = self.position or 0, self.fingerprints.continue_at
        durable = self._index.durable_position(self.store.source) or 0
        return min(position, durable, position if again is None else again)

    def lacks(self, messages: int, hidden: int, left_out: int) -> list[str]:
        """Return why no message of a run has an entry; empty: all of them are RocketMQ's own."""
        selection = self._reader.selection
        if messages == left_out and not (selection.topics or selection.exclude):
            return []
        reasons = {
            f"of topics that are not selected ({selection})": left_out,
            "prepared or rolled back": hidden,
            "without a key": messages - hidden - left_out,
        }
        counted_reasons = ", ".join(f"{count:,} are {reason}" for reason, count in reasons.items() if count)
        return [f"of {messages:,} messages, {counted_reasons}"]

    def lag(self) -> Lag:
        """Return the bytes and seconds that the index is behind the log. Put messages count, also unflushed ones."""
        position = self.position or 0
        end = self.store.log_end()
        if end is None and self._has_read:
            return Lag(position, 0, None)
        if end is None or end.offset <= position:
            return Lag(position, 0, 0.0)
        newest, last = end.store_ms, self._store_ms_of_last()
        seconds = None if newest is None or last is None else max(0, newest - last) / 1000
        return Lag(end.offset, end.offset - position, seconds)

    def _store_ms_of_last(self) -> int | None:
        if self._last_store_ms is None:
            # the last one may be of a skipped range
            for fingerprint in self.fingerprints.ranges[: -_LAST_RANGES - 1 : -1]:
                with contextlib.suppress(CorruptFile):
                    self._last_store_ms = self._reader.read(fingerprint.offset, fingerprint.size).store_ms
                    break
        return self._last_store_ms
