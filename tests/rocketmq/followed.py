"""A store that a broker writes, the index that follows it, and the scan that gives the right answers, for tests of the
dispatcher.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rocketmq.messages import NOW_MS
from tests.support.model import Answer, ReferenceModel
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.base.clock import ManualClock
from tiered_index.connectors.rocketmq.follow.dispatcher import Dispatcher
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.segments import End, segment_name
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.connectors.source import Loss, Torn
from tiered_index.errors import TieredIndexError
from tiered_index.storage.memory import MemoryStorage

SEGMENT = 8_192
KEYS = 17


def scan(store: Path) -> ReferenceModel:
    """Return the right answers of a store's index: read every message of its commit log."""
    model = ReferenceModel()
    for message in CommitLogReader(store / "commitlog").messages(skip_corrupt=True, skip_missing=True):
        if message.is_visible and message.index_keys:
            place = message.physical_offset, message.size, message.store_ms
            model.put(message.topic, message.queue_id, message.index_keys, *place)
    return model


def names(model: ReferenceModel) -> set[tuple[str, str]]:
    """Return every (topic, key) of a model."""
    return {(entry.topic, entry.key) for entry in model.entries}


def by_key(model: ReferenceModel) -> dict[tuple[str, str], ReferenceModel]:
    """Return a model for each (topic, key), since a model of all entries reads them all for each lookup."""
    parts: dict[tuple[str, str], ReferenceModel] = {}
    for entry in model.entries:
        parts.setdefault((entry.topic, entry.key), ReferenceModel()).entries.append(entry)
    return parts


def check(index: IndexService | IndexReader, model: ReferenceModel) -> int:
    """Compare the answers for every key of the model with the model's; return their entries' count."""
    lookups = sorted(names(model) | {("nobody", "k"), ("orders", "absent")})
    answers = index.query_many([Lookup(topic=topic, key=key, max_count=100_000) for topic, key in lookups])
    count = 0
    parts = by_key(model)
    for (topic, key), entries in zip(lookups, answers, strict=True):
        assert entries.status == "complete"
        expected = parts[topic, key].query(topic, key, max_count=None) if (topic, key) in parts else []
        assert [Answer.of(item) for item in entries] == expected, (topic, key)
        count += len(entries)
    return count


def missing(followed: "Followed") -> set[tuple[str, str]]:
    """Return the topics and keys for which a scan finds more than the index."""
    parts = by_key(scan(followed.path))
    indexed = {name: {item.offset for item in followed.index.query(*name, max_count=10_000)} for name in parts}
    return {
        name
        for name, part in parts.items()
        if not {a.offset for a in part.query(*name, max_count=None)} <= indexed[name]
    }


def cut_log(store: Path, offset: int) -> None:
    """Truncate the commit log at an offset, as after a crash of the host: zeros follow, and no later segment."""
    folder = store / "commitlog"
    for path in folder.iterdir():
        start = int(path.name)
        if start > offset:
            path.unlink()
        elif start + SEGMENT > offset:
            os.truncate(path, offset - start)
            os.truncate(path, SEGMENT)


@dataclass(frozen=True)
class Round:
    """The totals of one round's batches."""

    begin: int
    end: int
    messages: int
    entries: int
    hidden: int
    left_out: int
    losses: tuple[Loss, ...]
    state: End | None
    torn: Torn | None
    caught_up: bool


class SteppedDispatcher(Dispatcher):
    """A dispatcher whose rounds a test runs one by one."""

    def run_once(self) -> Round:
        """Put one round. Raise an error only if nothing was put before it; otherwise the next round finds it again."""
        begin, batches, entries = self.position or 0, [], 0
        with contextlib.closing(self.batches()) as some:
            try:
                for batch in some:
                    if batch.columns is not None:
                        entries += self._index.put_source_batch(batch.columns, batch.source, batch.position)
                    batches.append(batch)
            except TieredIndexError:
                if not any(batch.columns is not None for batch in batches[:-1]):
                    raise
        last = batches[-1]
        return Round(
            begin,
            self.position or 0,
            sum(batch.messages for batch in batches),
            entries,
            *(sum(getattr(batch, n) for batch in batches) for n in ("hidden", "left_out")),
            tuple(loss for batch in batches for loss in batch.losses),
            None if last.state is None else End(last.state),
            last.torn,
            last.caught_up,
        )


class Followed:
    """One store, its writer, an index in memory storage and a dispatcher. If the broker or the follower dies, a test
    can open the folder again.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.path = folder / "store"
        self.storage = MemoryStorage()
        self.clock = ManualClock(NOW_MS + 10_000)
        self.settings = {"slots": 50, "items": 2_000, "background": False, "offset_space": "commitlog"} | settings
        self.number = 0
        self.writer = self.open_writer()
        self.index = self.open_index()

    # the broker

    def open_writer(self, cut: int | None = None) -> StoreWriter:
        return StoreWriter(self.path, segment_bytes=SEGMENT, queue_entries=50, cut=cut)

    def come_again(self, cut: int = 1 << 40) -> None:
        """Start the broker again. It truncates its log at the first incomplete message, or at `cut` if that is earlier.

        As a real broker does, it leaves the old bytes, and writes no zeros.
        """
        self.writer = self.open_writer(cut)
        self.number = max(self.number, 1_000)

    def overwrite(self, offset: int, data: bytes) -> None:
        with self.segment(offset // SEGMENT).open("r+b") as handle:
            handle.seek(offset % SEGMENT)
            handle.write(data)

    def write(self, count: int, *, flush: bool = True, only_topic: str | None = None, **fields: Any) -> list[int]:
        """Put messages of two topics; return their offsets. Each has one of 17 keys, its own key and a unique key."""
        offsets = []
        for number in range(self.number, self.number + count):
            arguments = {
                "body": b"b" * (number % 60),
                "keys": f"k{number % KEYS}  own-{number}",
                "uniq_key": f"U{number:030X}",
            } | fields
            topic = only_topic or ("orders" if number % 3 else "payments")
            offsets.append(self.writer.put(topic, number % 4, store_ms=NOW_MS + 20 * number, **arguments).offset)
        self.number += count
        if flush:
            self.writer.flush()
        return offsets

    def segment(self, number: int) -> Path:
        return self.path / "commitlog" / segment_name(number * SEGMENT)

    # the follower

    def open_index(self) -> IndexService:
        return IndexService.open(
            root=self.folder / "root",
            storage=self.storage.uri,
            storage_backend=self.storage,
            clock=self.clock,
            **self.settings,
        )

    def dispatcher(self, **options: Any) -> SteppedDispatcher:
        options.setdefault("now_s", lambda: 0.0)  # no round ends early on a slow machine
        return SteppedDispatcher(self.index, StoreDirectory.open(self.path, options.pop("store_name", None)), **options)

    def sharing(self, dispatcher: SteppedDispatcher, **options: Any) -> SteppedDispatcher:
        """Return a dispatcher with other options that has the place and the memory of another one."""
        made = self.dispatcher(**options)
        made.position, made.fingerprints = dispatcher.position, dispatcher.fingerprints
        return made

    def crash_index(self) -> None:
        """Kill the follower without a flush, and start it again."""
        self.index.abandon()
        self.index = self.open_index()

    def check(self) -> int:
        return check(self.index, scan(self.path))


def rounds(dispatcher: SteppedDispatcher) -> Iterator[Round]:
    """Yield a bounded number of rounds, up to the one that caught up."""
    for _ in range(1_000):
        done = dispatcher.run_once()
        yield done
        if done.caught_up:
            return
    raise AssertionError("no round caught up")
