"""A live writer, builds, merges that fail and die, and sweeps on one storage, in threads, and readers that check all
the while.

Where the writer's setting is ``compaction = "spark"``, jobs compact what it stages, two at once, and fail and die, too.
The clock moves on meanwhile, so that it also compacts files itself.

What the readers are checked against are two `Moments`: `own` knows what the writer accepted, `stored` what was
published.
Times are all in one window of 30 days but for those of the build that replaces itself, which lie in the next. The clock
moves only while nothing is being uploaded, so that no sweep takes away what is about to be published.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.property.published import Published, mark
from tests.spark.in_process import planned, shards_of, written
from tests.stress.crew import Crew
from tests.stress.traffic import ALL, KEYS, NOW_MS, TOPICS, Source, look
from tests.support.model import Message, Moments
from tests.support.staging import Job
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.clock import ManualClock
from tiered_index.errors import StorageError
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.service.merge.run import MergeOptions, MergeOvertaken, merge
from tiered_index.spark.build.build import publish_tables
from tiered_index.storage.base import Bytes, ObjectInfo, Storage, UploadHandle, WrapperStorage
from tiered_index.types import Lookup

__all__ = ["DAY_MS", "MONTH_END_MS", "Beside", "Dated", "Died", "Spread", "as_table", "check_records"]

HOUR_S, DAY_S = 3_600, 86_400
DAY_MS = DAY_S * 1_000
# after each lookup, merge and sweep, so that those who write get on
_PAUSE_S = 0.03
_MONTH_MS = 30 * DAY_MS
MONTH_END_MS = (NOW_MS // _MONTH_MS + 1) * _MONTH_MS
"""Where the window of 30 days ends in which nearly everything lies."""


def check_records(log: StorageLog) -> None:
    """Each object was added once and removed once at most, each merge added what it removed, and the state is what is
    left.
    """
    counts: dict[str, int] = {}
    gone: set[str] = set()
    for number in range(1, log.refresh().number + 1):
        record = log.record(number)
        added = {stored.name: stored.count for stored in record.add}
        assert not added.keys() & counts.keys() and not gone & set(record.remove)
        assert set(record.remove) <= counts.keys()
        if record.kind == "merge":
            assert sum(added.values()) == sum(counts[name] for name in record.remove)
        counts |= added
        gone |= set(record.remove)
    assert counts.keys() - gone == set(log.refresh().objects)


class Died(BaseException):
    """The end of a job: the storage hears nothing more of it."""


class Spread(Source):
    """Messages half of which lie around `NOW_MS`, where lookups by range ask, and half on the days before."""

    def __init__(self, seed: int, number: int, begin_ms: int | None = None) -> None:
        super().__init__(seed, number, bad_clocks=False)
        self._begin_ms = begin_ms

    def message(self) -> Message:
        """Return the next one."""
        message = super().message()
        if self._begin_ms is not None:
            return replace(message, timestamp_ms=self._begin_ms + self.rng.randrange(2 * DAY_MS))
        if self.rng.random() < 0.5:
            return replace(message, timestamp_ms=NOW_MS - self.rng.randrange(2 * DAY_MS))
        return message


def as_table(messages: list[Message]) -> pa.Table:
    """Return messages as a build takes them, a row a key."""
    rows = [
        (m.topic, m.queue_id, key, m.offset, m.size, m.timestamp_ms) for m in messages for key in dict.fromkeys(m.keys)
    ]
    topic, queue_id, key, offset, size, timestamp_ms = map(list, zip(*rows, strict=True))
    return pa.table(
        {
            "topic": topic,
            "queue_id": pa.array(queue_id, pa.int32()),
            "key": key,
            "offset": offset,
            "size": pa.array(size, pa.int32()),
            "timestamp_ms": timestamp_ms,
        }
    )


class Dated(WrapperStorage):
    """A storage whose objects and uploads are as old as `clock` says; a large object is as old as the beginning of its
    upload.
    """

    def __init__(self, inner: Storage, clock: ManualClock) -> None:
        super().__init__(inner)
        self._clock = clock
        self._dates: dict[str, int] = {}

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def put(self, name: str, data: Bytes) -> None:
        """As the inner storage's."""
        self._dates[name] = self._clock.now_ms()
        super().put(name, data)

    def begin_upload(self, name: str) -> UploadHandle:
        """As the inner storage's."""
        self._dates[name] = self._clock.now_ms()
        return super().begin_upload(name)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """As the inner storage's."""
        for info in super().list(prefix, start_after=start_after):
            yield replace(info, modified_ms=self._dates.get(info.name, 0))

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """As the inner storage's."""
        for handle in super().list_uploads(prefix):
            if older_than_ms is None or self._dates[handle.name] < older_than_ms:
                yield handle

    def close(self) -> None:
        """Nothing: readers come and go, the storage stays."""


class _Uploads:
    """Any number of jobs may be uploading, or the clock moves."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy, self._moving = 0, False

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._moving)
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def none_under_way(self) -> Iterator[None]:
        with self._changed:
            self._moving = True
            self._changed.wait_for(lambda: not self._busy)
            try:
                yield
            finally:
                self._moving = False
                self._changed.notify_all()


@dataclass
class Beside:
    """All that goes on. `seen` counts each kind of work, and a run goes on until each count has reached its goal."""

    root: Path
    storage: Storage
    seed: int
    goals: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    clock: ManualClock = field(default_factory=lambda: ManualClock(MONTH_END_MS + 60 * DAY_MS))
    own: Moments = field(default_factory=Moments)
    stored: Moments = field(default_factory=Moments)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.storage = Dated(self.storage, self.clock)
        self.crew = Crew(self.seed)
        self._uploads = _Uploads()
        self.service = IndexService.open(
            root=self.root,
            storage_backend=self.storage,
            clock=self.clock,
            slots=64,
            items=60,
            background=False,
            query_threads=2,
            local_keep_s=0,
            max_late_s=10**10,
            max_early_s=10**10,
            refresh_interval_s=0,
            **self.settings,
        )

    def log(self, storage: Storage | None = None) -> StorageLog:
        """Return a view of the log of its own."""
        log = StorageLog(storage or self.storage, self.clock)
        log.open()
        return log

    def reached(self, *names: str) -> bool:
        """Return whether `seen` has reached the goals of these names, of all names where none is given."""
        return all(self.seen[name] >= self.goals.get(name, 0) for name in names or self.goals)

    # What goes on

    def write(self, source: Source, rounds: int) -> None:
        """Put messages, and publish every third round, for `rounds` rounds at least and until all goals are reached."""
        waiting: list[Message] = []
        for number in itertools.count():
            if self.crew.stop.is_set() or (number >= rounds and not waiting and self.reached()):
                return
            messages = source.messages(source.rng.randrange(1, 40))
            for moments in (self.own, self.stored):
                moments.offer(messages)
            for message in messages:
                self.service.put(*message.arguments)
            self.own.acknowledge(messages)
            waiting += messages
            if number % 3 == 2:
                self.publish()
                self.stored.acknowledge(waiting)
                waiting = []

    def publish(self) -> None:
        """Bring everything that was accepted to the storage, by whoever compacts it."""
        with self._uploads.under_way():
            self.service.seal()
            self._live()
            self._live()
        while any(handle.place == "unsealed" for handle in self.service.files()):
            # between rounds the clock may move
            if self.crew.stop.wait(_PAUSE_S):
                Job(self.storage, self.clock).run()
            with self._uploads.under_way():
                self._live()
        self.seen["published"] += 1

    def _live(self) -> None:
        done = self.service.run_lifecycle()
        for name in ("staged", "adopted", "uploaded"):
            self.seen[name] += getattr(done, name)

    def compact(self, rng: random.Random) -> None:
        """Compact and publish what the writer has staged."""
        storage = self._troubled(rng)
        with self._uploads.under_way():
            try:
                job = Job(storage, self.clock).look()
                if rng.random() < 0.3:
                    job.compact(*(ticket.file_id for ticket in job.tickets[::2]))
                else:
                    job.compact()
                self.seen["compacted"] += len(job.publish())
                self.seen["compaction in trouble"] += any(result.failed for result in job.results)
                self.seen["compacted in vain"] += sum(bool(r.left) and not r.failed for r in job.results)
            except (StorageError, Died):
                self.seen["compaction in trouble"] += 1
        self.crew.stop.wait(_PAUSE_S)

    def build(self, source: Source, builds: int, *, mode: str) -> None:
        """Build again and again, on a storage that fails now and then; with `replace` each build has what the one
        before had and more. Builds that append go on until their goal is reached.
        """
        messages: list[Message] = []
        for number in itertools.count():
            if number >= builds and (mode == "replace" or self.reached("build in trouble")):
                return
            fresh = source.messages(30)
            messages = [*messages, *fresh] if mode == "replace" else fresh
            for moments in (self.own, self.stored):
                moments.offer(fresh)
            while not self.crew.stop.is_set():
                with self._uploads.under_way():
                    if self._built(as_table(messages), source.rng, mode):
                        break
            else:
                return
            self.stored.acknowledge(fresh)
            self.seen[mode] += 1

    def _built(self, table: pa.Table, rng: random.Random, mode: str) -> bool:
        """Build on a storage in trouble and return whether it was published, which only the log knows."""
        storage = self._troubled(rng)
        shards = []
        try:
            log = self.log(storage)
            genesis = log.state.genesis
            assert genesis is not None
            plan = replace(planned(table), genesis=genesis)
            shards = shards_of(written(table, plan, storage, now_ms=self.clock.now_ms()))
            publish_tables(shards, mode, storage, log)
        except (StorageError, Died):
            self.seen["build in trouble"] += 1
        # a merge may have taken the tables already: then a record said what was removed
        names = {shard.stored.name for shard in shards}
        return bool(names) and any(names & added for added in self._ever_added(1))

    def _ever_added(self, first: int) -> Iterator[set[str]]:
        for record in self.records(first):
            yield {stored.name for stored in record.add}

    def records(self, first: int = 1) -> list[Any]:
        """Return all records of the log from number `first` on."""
        log = self.log()
        return [log.record(number) for number in range(first, log.state.number + 1)]

    def _troubled(self, rng: random.Random) -> FaultStorage:
        """Return the storage; in half of all cases it fails once, or is gone for good, at some call."""
        faulty = FaultStorage(self.storage)
        if rng.random() < 0.5:
            dies = rng.random() < 0.5
            more: dict[str, Any] = {"error": Died, "times": None} if dies else {}
            faulty.fail("*", nth=rng.randrange(1, 40), when=rng.choice(("before", "after")), **more)
        return faulty

    def merge(self, rng: random.Random) -> None:
        """Merge by hour, day or 30 days."""
        window_s = rng.choice((HOUR_S, DAY_S, DAY_S, 30 * DAY_S))
        # no table may be longer than those which the build replaces
        end_s = MONTH_END_MS // 1000 if window_s > DAY_S else 1 << 62
        storage = self._troubled(rng)
        with self._uploads.under_way():
            try:
                log = self.log(storage)
                options = MergeOptions(window_s=window_s, min_age_s=0, shard_bytes=1 << 20, end_s=end_s)
                report = merge(storage, log, self.clock, options, threads=2)
                self.seen["merged"] += report.jobs
            except MergeOvertaken:
                self.seen["overtaken"] += 1
            except (StorageError, Died):
                self.seen["merge in trouble"] += 1
        self.crew.stop.wait(_PAUSE_S)

    def sweep(self) -> None:
        """Let more than a day go by and delete what nobody names any more."""
        with self._uploads.none_under_way():
            self.clock.advance(30 * HOUR_S)
        found = find_orphans(self.storage, self.log())
        delete_orphans(self.storage, found)
        self.seen["swept"] += len(found.objects)
        self.seen["swept uploads"] += len(found.uploads)
        self.crew.stop.wait(_PAUSE_S)

    # Who looks

    def follow(self, reader: IndexReader, rng: random.Random) -> None:
        """Ask a reader that reads the log at every lookup."""
        look(reader, self.stored, rng, self.seen)
        self.crew.stop.wait(_PAUSE_S)

    def stand(self, rng: random.Random) -> None:
        """Ask a reader that reads the log only when it opens, and when objects that it knows are gone."""
        moments = {(topic, key): self.stored.moment(topic, key) for topic in TOPICS for key in KEYS}
        with self.reader(refresh_interval_s=10**9) as reader:
            for (topic, key), since in rng.sample(sorted(moments.items()), 6):
                lookup = Lookup(topic=topic, key=key, max_count=ALL)
                self.stored.check(lookup, reader.query(topic, key, max_count=ALL), since)
                self.seen["standing"] += 1
                self.crew.stop.wait(_PAUSE_S)

    def ask_the_writer(self, rng: random.Random) -> None:
        """Ask the writer itself, which must find at least what it accepted."""
        look(self.service, self.own, rng, self.seen)
        self.crew.stop.wait(_PAUSE_S)

    def reader(self, **more: Any) -> IndexReader:
        """Return a fresh reader of the storage without caches that would hide what is gone."""
        settings = {"block_cache_bytes": 0, "query_threads": 2, "refresh_interval_s": 0, **more}
        return IndexReader.open(storage_backend=self.storage, clock=self.clock, **settings)

    # The run and its end

    def run(self, *, rounds: int, builds: int) -> None:
        """Let all of it happen until writer and builds are done; raise the first trouble."""
        with self.reader() as reader:
            for number in range(2):
                self.crew.repeat(f"merge-{number}", self.merge, random.Random(self.seed + number))
            if self.service.config.compaction == "spark":
                for number in range(2):
                    self.crew.repeat(f"compact-{number}", self.compact, random.Random(self.seed + 20 + number))
            self.crew.repeat("sweep", self.sweep)
            self.crew.repeat("follow", self.follow, reader, random.Random(self.seed + 10))
            self.crew.repeat("stand", self.stand, random.Random(self.seed + 11))
            self.crew.repeat("ask the writer", self.ask_the_writer, random.Random(self.seed + 12))
            begins = MONTH_END_MS + DAY_MS
            done = [
                self.crew.begin("write", self.write, Spread(self.seed, 1), rounds),
                self.crew.begin("append", lambda: self.build(Spread(self.seed, 2), builds, mode="append")),
                self.crew.begin(
                    "replace", lambda: self.build(Spread(self.seed, 3, begins), builds // 2, mode="replace")
                ),
            ]
            self.crew.wait_for(done)
            self.crew.finish()

    def check_the_end(self) -> None:
        """Every entry is in the storage once, whether it is merged or not, and every key answers as the model does."""
        self.publish()
        self._check_everything()
        for window_s in (HOUR_S, DAY_S):
            merge(self.storage, self.log(), self.clock, MergeOptions(window_s=window_s, min_age_s=0))
        self._check_everything()
        state = self.log().state
        assert not state.files and {s.shard.window_s for s in state.objects.values() if s.shard} <= {DAY_S, 30 * DAY_S}
        self.sweep()
        self.service.run_lifecycle()
        assert {info.name for info in self.storage.list("data/")} == set(state.objects)
        assert not list(self.storage.list("staging/"))
        assert not list(self.storage.list_uploads())
        self._check_everything()
        check_records(self.log())

    def _check_everything(self) -> None:
        state = self.log().state
        assert sum(stored.count for stored in state.objects.values()) == len(self.stored.entries)
        published = Published(self.storage, KEYS, keyed=True)
        found = Counter(
            mark(entry, keyed=True) for stored in state.objects.values() for entry in published.entries(stored)
        )
        assert found == Counter(mark(entry, keyed=True) for entry in self.stored.entries)
        with self.reader() as reader:
            assert self.stored.check_whole(reader.query) == len(self.stored.entries)
        self.service.run_lifecycle()
        assert self.stored.check_whole(self.service.query) == len(self.stored.entries)
