"""`tiered-index ingest STORE_DIR`: puts a RocketMQ store into an index, to its end or with --follow until stopped.

Runs beside the broker and only reads. One thread beside the index's own and the archiver's.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiered_index.cli.output import Output, counted, human_bytes, human_count, human_seconds, states
from tiered_index.cli.progress import (
    FIRST,
    Ending,
    PatientPut,
    Progress,
    Stopped,
    flushed,
    settle,
    what_waits,
    write_what_waits,
)
from tiered_index.cli.session import Session
from tiered_index.errors import BackPressure, StorageUnavailable
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.follow.dispatcher import Dispatched, Dispatcher, Loss, Start
from tiered_index.rocketmq.follow.tail import TornTail
from tiered_index.rocketmq.log.columns import Selection
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.segments import End
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.index import IndexService
from tiered_index.types import format_time


class Archiving:
    """One archiver and its thread: an upload takes seconds and must not keep new messages out of lookups.

    A storage that is down, or a skipped segment, is a `problem` and tried again; anything else ends the command.
    """

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
        """What kept the last round from its end, and which segments are skipped; None where all is archived."""
        losses = self._archiver.passed_over
        named = f"segments passed over: {len(losses):,}, the last {losses[-1].problem}" if losses else None
        return "; ".join(filter(None, (self._trouble, named))) or None

    def new_losses(self) -> list[Loss]:
        """Return the segments that were skipped since the last call."""
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


_STATUS_INTERVAL_S = 1.0
_LOSSES = 1_000


@dataclass(frozen=True)
class FollowOptions:
    """What the command line says; times in seconds."""

    store_name: str | None = None
    follow: bool = False
    wait: bool = False
    restart: bool = False
    skip_corrupt: bool = False
    skip_missing: bool = False
    start: Start = "begin"
    poll_s: float = 0.2
    patience_s: float = 60.0
    archive: bool = False
    check_bodies: bool = True
    selection: Selection = field(default_factory=Selection)


@dataclass
class Follower:
    """One dispatcher in a loop, and what came of it. `losses` is bounded, `loss_count` isn't."""

    session: Session
    index: IndexService
    dispatcher: Dispatcher
    options: FollowOptions
    ending: Ending
    archiving: Archiving | None = None
    messages: int = 0
    entries: int = 0
    hidden: int = 0
    left_out: int = 0
    replaced_keys: int = 0
    losses: list[Loss] = field(default_factory=list)
    loss_count: int = 0
    _tail: End | None = None
    _torn: TornTail | None = None
    # Whether what is no whole message at the end of the log was reported: it has to stay for two looks, for most are
    # being written.
    _torn_said: bool = False
    # Where a half message stood at the end of the log, at the last look of a command that doesn't follow.
    _ended_at: int | None = None
    _said: tuple[object, ...] = ()
    _said_s: float = 0.0
    _new_losses: list[Loss] = field(default_factory=list)

    def run(self, progress: Progress) -> None:
        """Dispatch to the end of the log, or until stopped. Raises as `Dispatcher.run_once` and the archiver do."""
        waiting_since: float | None = None
        while not self.ending.event.is_set():
            started_s = time.monotonic()
            try:
                done = self.dispatcher.run_once()
            except Stopped:
                return
            except BackPressure:  # also of what is remembered of the log, which no put waits for
                waiting_since = waiting_since or started_s
                if time.monotonic() - waiting_since > self.options.patience_s:
                    raise
                self.ending.event.wait(self.options.poll_s)
                continue
            waiting_since = None
            self._count(done)
            if self.archiving is not None:
                self.archiving.poll()
                self._lose(self.archiving.new_losses())
            if done.caught_up and not self.options.follow and not self._look_again(done):
                return
            self._say(progress)
            if done.caught_up or done.state is End.OPEN:
                self.ending.event.wait(self.options.poll_s)
            elif done.state is End.TORN:  # the second look at a message is for what is new now
                self.ending.event.wait(self.options.poll_s / 4)

    def _look_again(self, done: Dispatched) -> bool:
        """Return whether to read the log's end once more: without --follow, damage there must not pass for the end."""
        before, self._ended_at = self._ended_at, None if done.torn is None else done.torn.begin
        if done.torn is None or before is None:
            return done.torn is not None
        if before != done.torn.begin or not self.dispatcher.call_damage():
            return False
        self._ended_at = None
        return True

    def _count(self, done: Dispatched) -> None:
        self._tail = done.state or self._tail
        if done.torn is None or self._torn is None or done.torn[:2] != self._torn[:2]:
            self._torn_said = False
        elif not self._torn_said:
            self._torn_said = True
            self.session.out.note(_torn_words(done.torn))
        self._torn = done.torn
        self.messages += done.messages
        self.entries += done.entries
        self.hidden += done.hidden
        self.left_out += done.left_out
        self.replaced_keys += done.replaced_keys
        self._lose(done.losses)

    def finish_archiving(self) -> None:
        """Archive what is closed now."""
        assert self.archiving is not None
        try:
            self.archiving.finish()
        finally:
            self._lose(self.archiving.new_losses())

    def _lose(self, losses: Iterable[Loss]) -> None:
        for loss in losses:
            count = f", {human_count(loss.messages)} messages" if loss.messages is not None else ""
            self.session.out.note(f"{loss.kind}: commit log offsets {loss.begin} to {loss.end}{count}: {loss.problem}")
            self.loss_count += 1
            if len(self.losses) < _LOSSES:
                self.losses.append(loss)
                self._new_losses.append(loss)

    def _say(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < _STATUS_INTERVAL_S:
            return
        self._said_s = now_s
        # refused once another writer has taken over, also while there is nothing to put
        self.index.put_batch({name: [] for name in ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")})
        lag = self.dispatcher.lag()
        problems = [*self.index.health()["problems"], *problems_of(self)]
        seconds = f", {human_seconds(lag.seconds)}" if lag.seconds else ""
        detail = f"{human_count(self.entries)} entries, {human_bytes(lag.bytes)}{seconds} behind"
        progress.update(self.dispatcher.position or 0, "; ".join([detail, *problems]))
        archived = {"archived_segments": self.archiving.archived} if self.archiving is not None else {}
        torn = _range(self._torn) if self._torn_said else None
        state = (self.dispatcher.position, lag, self.loss_count, str(torn), *archived.values(), *problems)
        if not (self.options.follow and self.session.out.as_json) or state == self._said:
            return
        self._said = state
        self.session.out.record(
            {
                "status": "following",
                "position": self.dispatcher.position or 0,
                "messages": self.messages,
                "entries": self.entries,
                "lag": asdict(lag),
                "losses": [asdict(loss) for loss in self._new_losses],
                "problems": problems,
                "state": self._tail.value if self._tail is not None else None,
                "torn": torn,
                **archived,
            }
        )
        self._new_losses.clear()
        self.session.out.flush()

    def document(self, *, taken_s: float) -> dict[str, Any]:
        """Return everything that is to be said at the end."""
        dispatcher, store = self.dispatcher, self.dispatcher.store
        return {
            "status": "stopped" if self.ending.event.is_set() else "complete",
            "source": str(store.folder),
            "source_name": store.source,
            "resumed_from": dispatcher.resumed_from or 0,
            "position": dispatcher.position or 0,
            "unit": "bytes",
            "messages": self.messages,
            "entries": self.entries,
            "hidden": self.hidden,
            "left_out": self.left_out,
            "replaced_keys": self.replaced_keys,
            "tail": self._tail.value if self._tail is not None else None,
            "torn": _range(self._torn),
            "lag": asdict(dispatcher.lag()),
            "loss_count": self.loss_count,
            "losses": [asdict(loss) for loss in self.losses],
            **({"archived_segments": self.archiving.archived} if self.archiving is not None else {}),
            "ingest_s": round(taken_s, 3),
            "entries_per_s": round(self.entries / taken_s) if taken_s else None,
        }


def problems_of(follower: Follower, max_lag_s: float | None = None) -> list[str]:
    """Return what is amiss with a follower beside its index: what is not archived, and a lag beyond the bound."""
    archiving = follower.archiving
    found = [f"archive: {archiving.problem}"] if archiving is not None and archiving.problem is not None else []
    if max_lag_s is None:
        return found
    lag = follower.dispatcher.lag()
    if lag.seconds is None:
        return [*found, f"follow: {lag.bytes:,} bytes behind the store, and how many seconds is not known yet"]
    if lag.seconds > max_lag_s:
        found.append(f"follow: {lag.bytes:,} bytes and {lag.seconds:g} seconds behind the store")
    return found


def gauges_of(follower: Follower) -> dict[str, tuple[str, float]]:
    """Return how far a follower is: what each number means, and the number."""
    lag, position = follower.dispatcher.lag(), follower.dispatcher.position or 0
    seconds = math.nan if lag.seconds is None else lag.seconds
    return {
        "follow_position_bytes": ("Commit log offset up to which the store is indexed.", position),
        "follow_lag_bytes": ("Bytes behind the end of the store's log.", lag.bytes),
        "follow_lag_seconds": ("Seconds behind the newest message; NaN: not known.", seconds),
        "follow_messages_total": ("Messages that were read.", follower.messages),
        "follow_lost_ranges_total": ("Ranges of the log that were damaged or deleted unread.", follower.loss_count),
    }


def open_follower(
    session: Session, index: IndexService, store: StoreDirectory, options: FollowOptions, ending: Ending
) -> tuple[Follower, PatientPut]:
    """Return what follows a store for an index, and what it puts with. Raises as `Dispatcher`."""
    put = PatientPut(index, options.patience_s, ending.event)
    dispatcher = Dispatcher(
        index,
        store,
        put=put,
        skip_corrupt=options.skip_corrupt,
        skip_missing=options.skip_missing,
        restart=options.restart,
        start=options.start,
        stopping=ending.event.is_set,
        reader=CommitLogReader(store.commitlog, check_crc=options.check_bodies, selection=options.selection),
    )
    if dispatcher.selected_before is not None:
        session.out.note(
            f"from commit log offset {dispatcher.position} on {options.selection} is indexed, before it "
            f"{dispatcher.selected_before}: --restart takes the log from its beginning"
        )
    return Follower(session, index, dispatcher, options, ending), put


def archiving_of(follower: Follower) -> Archiving:
    """Return what archives the closed segments of the store that is followed."""
    dispatcher, store = follower.dispatcher, follower.dispatcher.store
    skip = follower.options.skip_corrupt
    return Archiving(
        SegmentArchiver(follower.index, store.name, store.commitlog, skip_corrupt=skip, dispatcher=dispatcher)
    )


def ingest_store(session: Session, path: Path, options: FollowOptions, **settings: Any) -> int:
    """Ingest the store in a folder; `settings` are the index's. Return the exit code."""
    store = StoreDirectory.open(path, options.store_name)
    config = session.config(offset_space="commitlog", **settings)
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        ending = Ending()
        index = stack.enter_context(IndexService.open(config))
        follower, put = open_follower(session, index, store, options, ending)
        if options.archive:
            follower.archiving = stack.enter_context(archiving_of(follower))
        end = None if options.follow else store.log_end()
        title, total = "following" if options.follow else "ingesting", end.offset if end is not None else None
        with flushed(index), session.progress(title, total) as progress:
            # without --follow a signal ends the command at once, as any other that is simply given again
            with ending if options.follow else contextlib.nullcontext():
                follower.run(progress)
        taken_s = time.monotonic() - started_s
        if follower.archiving is not None and (options.wait or not ending.event.is_set()):
            follower.finish_archiving()
        if options.wait and ending.exit_code == 0:
            settle(index, options.patience_s, session.progress)
        document = follower.document(taken_s=taken_s)
        document |= {
            "quarantined": index.health()["quarantined_entries"],
            "quarantined_first": [{**m, "where": f"commit log offset {m['offset']}"} for m in put.quarantined],
            "elapsed_s": round(time.monotonic() - started_s, 3),
            **what_waits(index),
        }
    session.out.answer(document, streamed=options.follow)
    write_ingested(session.out, document, what="store")
    return ending.exit_code


def _range(torn: TornTail | None) -> dict[str, int | str] | None:
    return None if torn is None else {"begin": torn.begin, "end": torn.end, "what": torn.what}


def _torn_words(torn: TornTail) -> str:
    why = (
        "the broker's recovery cuts it off"
        if torn.is_half
        else "the broker left them where it cut its log, and writes over them"
    )
    return f"torn: commit log offsets {torn.begin} to {torn.end}: {torn.what} at the end of the log; {why}"


# A number of milliseconds below this, in April 1970, is rather one of seconds.
_SECONDS_OF_TODAY = 10**10


def write_ingested(out: Output, document: dict[str, Any], *, what: str = "source") -> None:
    """Tell people what was ingested of a file or, with the fields that only it has, of a store."""
    resumed = f" (resumed from {human_count(document['resumed_from'])})" if document["resumed_from"] else ""
    lag_bytes, torn, losses = document.get("lag", {}).get("bytes"), document.get("torn"), document.get("loss_count")
    skipped, quarantined = document.get("skipped", 0), document["quarantined"]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in document.get("skipped_reasons", {}).items())
    for bad in document.get("skipped_first", ()):
        out.remark(f"skipped: {bad['where']}: {bad['problem']}")
    if skipped > FIRST:
        out.remark(f"skipped: {skipped - FIRST:,} more")
    for late in document["quarantined_first"]:
        seconds = "; seconds? timestamp_ms is milliseconds" if late["timestamp_ms"] < _SECONDS_OF_TODAY else ""
        out.remark(f"to quarantine: {late['where']}: {format_time(late['timestamp_ms'])}{seconds}")
    out.fields(
        {
            what: document["source"],
            "position": f"{human_count(document['position'])} {document['unit']}{resumed}",
            "behind": human_bytes(lag_bytes) if lag_bytes else None,
            "messages": document["messages"],
            "entries": document["entries"],
            "folded": f"{document['folded']:,} have topic, key, queue and offset of another one: the newest is answered"
            if document.get("folded")
            else None,
            "skipped": f"{skipped:,}: {reasons}" if skipped else None,
            "quarantined": f"{counted(quarantined, 'entry', 'entries')} with a time that can't be right"
            if quarantined
            else None,
            "hidden": f"{document['hidden']:,} prepared or rolled back" if document.get("hidden") else None,
            "left out": f"{document['left_out']:,} of other topics or RocketMQ's own"
            if document.get("left_out")
            else None,
            "lost": f"{losses:,} ranges of the commit log, named above" if losses else None,
            "torn": f"commit log offsets {torn['begin']} to {torn['end']}, {torn['what']} at the end of the log"
            if torn
            else None,
            "archived": f"{document['archived_segments']:,} segments" if "archived_segments" in document else None,
            "rate": f"{human_count(document['entries_per_s'])} entries/s" if document["entries_per_s"] else None,
            "time": human_seconds(document["elapsed_s"]),
            "files": states(document["files"]) or "none",
        }
    )
    write_what_waits(out, document)
