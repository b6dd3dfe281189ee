"""The processes of the chaos campaign: a writer, a reader, a merger and an eraser.

`python -m tests.reliability.chaos_crew ROLE PARENT JSON`: PARENT is the campaign's process, and the document has the
fields of `Place`. The campaign stops, kills and restarts these processes. After a typed error a process continues. Any
other exception ends it. Then its traceback on stderr is a finding, also that of a background worker. If a step takes
longer than `HANG_S`, the process prints the stacks of its threads and ends. It ends when the campaign's process ends.
"""

import _thread
import contextlib
import ctypes
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.reliability.chaos_oracle import KEYS, QUEUES, Declared, Gone, Journal, Notes, batch, problem_with, seconds
from tests.support.log_records import open_log
from tiered_index import IndexReader, IndexService, Lookup, QueryResult
from tiered_index.base.clock import SystemClock
from tiered_index.base.retention import LEAST_GRACE_S, Retention
from tiered_index.errors import BackPressure, CorruptFile, InvalidArgument, TieredIndexError, WriterFenced
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.expiry import expire
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3.options import S3Options

HANG_S = 180.0
"""Much more than the sum of all timeouts of a step and of a stop by the campaign, also under load."""
LEASE_TTL_S = 4.0
IMPATIENT = S3Options(connect_timeout_s=2, read_timeout_s=4, max_attempts=2, backoff_s=0.05)
SETTINGS: dict[str, Any] = {"slots": 501, "query_threads": 4, "s3": IMPATIENT}
WRITERS = ("a", "b")
_PR_SET_PDEATHSIG = 1
# typed errors that no fault of this campaign can cause: it changes no byte, and makes no wrong call
_DEFECTS = (CorruptFile, InvalidArgument)


@dataclass(frozen=True)
class Place:
    """The folder, URI, name and seed of a member."""

    folder: str
    uri: str
    name: str
    seed: int

    def root(self, writer: str) -> Path:
        return Path(self.folder) / f"root-{writer}"

    def journal(self, writer: str) -> Path:
        return Path(self.folder) / f"journal-{writer}"

    def gone(self) -> Gone:
        """Return the erased and expired entries so far."""
        return Gone(Path(self.folder) / "journal-gone")


class Member:
    """Base of all roles: random numbers, notes, and the treatment of errors."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.random = random.Random(place.seed)
        self.notes = Notes(Path(place.folder) / f"notes-{place.name}")
        self.gone = place.gone()
        self.ending = threading.Event()
        # in a thread: this one may be in a method of the event, and have its lock
        signal.signal(signal.SIGTERM, lambda number, frame: _thread.start_new_thread(self.ending.set, ()))

    def run(self) -> None:
        """Work until SIGTERM."""
        while not self.ending.is_set():
            self.step()
            with self.trying("session"):
                self.session()
            self.ending.wait(0.2)

    def session(self) -> None:
        """Open the index, use it, and close it."""
        raise NotImplementedError

    def step(self) -> None:
        """Restart the clock of `HANG_S`."""
        faulthandler.dump_traceback_later(HANG_S, exit=True)

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Count a typed error of the block, and continue after it."""
        try:
            yield
        except TieredIndexError as error:
            self.notes.count(f"typed errors of a {what}")
            print(f"{time.time():.1f} {what}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if isinstance(error, _DEFECTS):
                self.notes.fail("wrong", f"{self.place.name}: {what}: {type(error).__name__}: {error}")


class Writer(Member):
    """Puts, flushes, and notes durable entries. If another root has the lease or fenced it, it tries again."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.topic = place.name.removeprefix("writer-")
        self.journal = Journal(place.journal(self.topic))
        self.declared = Declared(place.journal(self.topic))

    def session(self) -> None:
        self.declared.look()
        root, choice = self.place.root(self.topic), self.random.choice
        intervals = {"lease_ttl_s": LEASE_TTL_S, "flush_interval_s": 0.2, "lifecycle_interval_s": 0.1}
        chosen = {"items": choice((300, 3000, 30_000, 250_000)), "refresh_interval_s": choice((0.3, 5))}
        chosen["local_keep_s"] = choice((0, 5, 86400))
        index = IndexService.open(root=root, storage=self.place.uri, **intervals, **chosen, **SETTINGS)
        self.notes.count("sessions of writers")
        last = -1
        try:
            last = self._start(index)
            while not self.ending.is_set() and self.random.random() > 0.001:
                last = self._work(index, last)
        except WriterFenced:
            self.notes.count("writers fenced")
            raise
        finally:
            index.close()
            if last >= 0:
                self.journal.declare(last)  # closed without an error, so all entries are durable

    def _start(self, index: IndexService) -> int:
        """Return the number of the last durable message. It must not be less than a declared one."""
        known = not any(problem.startswith("log:") for problem in index.health()["problems"])
        position = index.durable_position(self.topic)
        last = -1 if position is None else position
        if known and last < self.declared.durable:
            self.notes.fail("lost", f"durable position {last} after {self.declared.durable} was declared")
        if last > self.declared.offered:
            self.notes.fail("wrong", f"durable position {last}, but only {self.declared.offered} was offered")
        return last

    def _work(self, index: IndexService, last: int) -> int:
        self.step()
        first, last = last + 1, last + self.random.choice((1, 5, 100, 400, 1000))
        self.journal.offer(first, last)
        self._put(index, first, last)
        chance = self.random.random()
        if chance < 0.3:
            with self.trying("flush"):
                index.flush()
                self.journal.declare(last)
        elif chance < 0.6:
            durable = index.durable_position(self.topic)
            if durable is not None:
                self.journal.declare(durable)
        elif chance < 0.63:
            with self.trying("seal"):
                index.seal()
                self.journal.declare(last)
        elif chance < 0.65:
            with self.trying("round of the life cycle"):
                index.run_lifecycle()
        elif chance < 0.7:
            with self.trying("lookup"):
                key, number = self.random.randrange(KEYS), index.log_state.number
                items = index.query(self.topic, f"key-{key}", max_count=10**6).items
                self.gone.look()
                problem = problem_with(items, self.topic, key, last, last, gone=self.gone, log_number=number)
                self.notes.count("answers checked")
                if problem is not None:
                    self.notes.fail(problem[0], f"{self.place.name} itself: {problem[1]}")
        time.sleep(self.random.uniform(0.0, 0.25))
        return last

    def _put(self, index: IndexService, first: int, last: int) -> None:
        while True:
            try:
                columns = batch(self.topic, first, last)
                if first == last:
                    row = {name: values[0] for name, values in columns.items()}  # type: ignore[index]
                    numbers = (int(row[name]) for name in ("offset", "size", "timestamp_ms"))
                    index.put(row["topic"], int(row["queue_id"]), row["key"], *numbers, self.topic, last)
                else:
                    index.put_batch(columns, self.topic, last)
                return
            except BackPressure:
                time.sleep(0.1)


class Reader(Member):
    """Looks up keys, in the storage only or also in a root, and checks each answer."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.declared = {name: Declared(place.journal(name)) for name in WRITERS}
        self.seen: dict[str, int] = {}

    def session(self) -> None:
        local = self.random.choice(WRITERS) if self.place.name == "reader-local" else None
        root = self.place.root(local) if local is not None else None
        if root is not None and not (root / "tiered_index.json").exists():
            return  # no writer has made the root yet
        interval_s, probes = self.random.choice((0, 0.2, 2)), self.random.choice((1, 8))
        settings = {**SETTINGS, "refresh_interval_s": interval_s, "filter_after_probes": probes}
        with IndexReader.open(self.place.uri, root=root, **settings) as reader:
            for _ in range(self.random.choice((5, 50, 200))):
                if self.ending.is_set():
                    return
                self.step()
                with self.trying("lookup"):
                    self._ask(reader, local)
                time.sleep(0.02)

    def _ask(self, reader: IndexReader, local: str | None) -> None:
        topic, key = self.random.choice(WRITERS), self.random.randrange(KEYS)
        durable = self._durable(reader, topic, local)
        begin_s, end_s = 0, 1 << 40
        if durable >= 0 and self.random.random() < 0.5:
            middle = int(seconds(np.array([self.random.randint(0, durable)]))[0])
            begin_s, end_s = middle - self.random.choice((0, 60, 7200)), middle + self.random.choice((0, 60, 7200))
        times = {"begin_ms": begin_s * 1000, "end_ms": min(end_s * 1000, 253_402_300_799_999)}
        question = {"topic": topic, "key": f"key-{key}", **times}
        timeout_s = self.random.choice((None, None, 1.0, 10.0))
        bounds = {"begin_s": begin_s, "end_s": end_s, "log_number": reader.log_state.number}
        chance = self.random.random()
        if chance < 0.2:
            keys = self.random.sample(range(KEYS), 5)
            lookups = [Lookup(topic=topic, key=f"key-{each}", max_count=10**6, **times) for each in keys]
            results = reader.query_many(lookups, timeout_s=timeout_s)
            for each, result in zip(keys, results, strict=True):
                self._check(result, topic, each, durable, **bounds)
        elif chance < 0.4:
            partial = reader.query(**question, max_count=10**6, allow_partial=True, timeout_s=timeout_s)
            if partial.status == "partial":
                if not partial.failed:
                    self.notes.fail("wrong", f"a partial answer that names no file: {question}")
                durable = -1  # its entries must still be right
                self.notes.count("partial answers")
            self._check(partial, topic, key, durable, partial=partial.status == "partial", **bounds)
        elif chance < 0.6:
            self._pages(reader, question, topic, key, durable, bounds)
        else:
            self._check(reader.query(**question, max_count=10**6, timeout_s=timeout_s), topic, key, durable, **bounds)

    def _durable(self, reader: IndexReader, topic: str, local: str | None) -> int:
        """Return the number of the message up to which a complete answer must have all messages."""
        position = reader.log_state.positions.get(topic, -1)
        if position < self.seen.get(topic, -1):
            self.notes.fail("wrong", f"the log's position of {topic} went back from {self.seen[topic]} to {position}")
        self.seen[topic] = position
        self.declared[topic].look()
        return max(position, self.declared[topic].durable) if topic == local else position

    def _pages(
        self, reader: IndexReader, question: dict[str, Any], topic: str, key: int, durable: int, bounds: dict[str, int]
    ) -> None:
        cursor, after, size = None, None, self.random.choice((3, 64, 1000))
        for _ in range(10):
            result = reader.query(**question, max_count=size, cursor=cursor)
            self._check(result, topic, key, durable, after=after, **bounds)
            cursor = result.cursor
            if cursor is None:
                return
            if result.items:
                last = result.items[-1]
                after = (last.timestamp_ms // 1000, last.offset, last.queue_id, ())

    def _check(
        self, result: QueryResult, topic: str, key: int, durable: int, *, partial: bool = False, **bounds: Any
    ) -> None:
        self.declared[topic].look()
        self.gone.look()
        if (result.status == "partial") != partial:
            self.notes.fail("wrong", f"{self.place.name}: {topic} key-{key} is {result.status}")
        offered, truncated = self.declared[topic].offered, result.status == "truncated"
        problem = problem_with(
            result.items, topic, key, durable, offered, truncated=truncated, gone=self.gone, **bounds
        )
        self.notes.count("answers checked")
        self.notes.count("entries in answers", len(result.items))
        if problem is not None:
            self.notes.fail(problem[0], f"{self.place.name}: {problem[1]}")


class Merger(Member):
    """Merges hours, days and months again and again."""

    def session(self) -> None:
        with open_storage(self.place.uri, options=IMPATIENT) as storage:
            log = open_log(storage, SystemClock())
            while not self.ending.is_set():
                self.step()
                with self.trying("merge"):
                    window_s = self.random.choice((3600, 86400, 30 * 86400))
                    shard_bytes = self.random.choice((1 << 20, 1 << 23, 1 << 30))
                    options = MergeOptions(window_s=window_s, min_age_s=0, shard_bytes=shard_bytes)
                    report = merge(storage, log, SystemClock(), options)
                    self.notes.count("merge jobs published", report.jobs)
                self.ending.wait(self.random.uniform(0, 2))


class Eraser(Member):
    """Erases keys and a queue, by hiding or also from the bytes, and expires old entries."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.declared = {name: Declared(place.journal(name)) for name in WRITERS}

    def session(self) -> None:
        with open_storage(self.place.uri, options=IMPATIENT) as storage:
            log = open_log(storage, SystemClock())
            while not self.ending.is_set():
                self.step()
                topic, said = self.random.choice(list(self.declared.items()))
                said.look()
                if said.durable >= 0:
                    with self.trying("erasure"):
                        self._erase(storage, log, topic, said.durable)
                self.ending.wait(self.random.uniform(0, 4))

    def _erase(self, storage: Storage, log: StorageLog, topic: str, durable: int) -> None:
        what = self.random.choice(("key", "key", "queue", "age"))
        newest = self.random.randint(0, durable if what == "key" else durable // 4)
        before_s, now, grace_s = int(seconds(np.array([newest]))[0]), self.random.random() < 0.5, LEAST_GRACE_S
        if what == "age":
            rule = Retention(topics={topic: time.time() - before_s}, grace_s=grace_s)
            self.gone.ask(topic, before_s)
            expire(storage, log, rule, SystemClock(), yes=True)
            before_s, target = log.state.expired.before_ms(topic) // 1000, {}
        else:
            # the other keys and queues are never erased
            target = {"key": self.random.randrange(KEYS - 9, KEYS)} if what == "key" else {"queue": QUEUES - 1}
            self.gone.ask(topic, before_s, **target)
            keys = (f"key-{target['key']}",) if "key" in target else ()
            request = EraseRequest(topic, keys, target.get("queue"), before_s * 1000)
            grace_s = self.random.choice((0.0, grace_s))
            erase(storage, log, request, SystemClock(), yes=True, now=now, grace_s=grace_s)
        self.gone.state(topic, before_s, log.state.number, **target)
        self.notes.count(f"erasures by {what}" if what != "age" else "expiries")


ROLES: dict[str, type[Member]] = {"writer": Writer, "reader": Reader, "merger": Merger, "eraser": Eraser}


def main(role: str, parent: str, document: str) -> None:
    """Work until SIGTERM, or until the campaign has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # the campaign ended before this process could ask for a signal at its end
    ROLES[role](Place(**json.loads(document))).run()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
