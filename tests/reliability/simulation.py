"""A seeded simulation of two hosts that write one index in turn, with readers, jobs and faults of every kind.

    python -m tests.reliability.simulation --seeds 10000
    python -m tests.reliability.simulation --seed 4711 --trace

There are merges, jobs, expiry, erasures, copies and deletions of orphans. Roots and storages are restored from older
copies, at the end or during a run, which then continues. At the end an object is damaged or lost, and a repair restores
it from the copy.

A run has some hundred to some thousand steps. The seed decides the steps, their order (`scheduler`) and the faults. A
process is killed, or a host loses its power. A disk or the storage fails, is full, or responds wrongly or not at all.
Listings are stale, and clocks jump. During the run `simulated_truth` checks every answer, log record and durable
position. At the end all faults are over, and each host continues once more. Then the storage must have every entry that
ever was durable, except those that the log states as expired or erased.
"""

import argparse
import contextlib
import errno
import gc
import logging
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.reliability.scheduler import Process, Scheduler
from tests.reliability.simulated_hosts import NOW_MS, SEGMENT_BYTES, Host, Writers
from tests.reliability.simulated_seams import Client, HostClock, HostDisk, Server, WorldClock
from tests.reliability.simulated_truth import KEYS, SOURCE, TOPICS, Lost, Truth, Wrong, order_key_of
from tests.reliability.tally import Tally, fast_folder, main
from tests.support.disk_faults import ERRORS
from tests.support.log_records import open_log
from tiered_index import IndexConfig, IndexReader, IndexService, Lookup
from tiered_index.base.retention import LEAST_GRACE_S, Retention
from tiered_index.errors import (
    BudgetExceeded,
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    PartialAnswer,
    RootBehind,
    StorageBehind,
    StorageError,
    TieredIndexError,
)
from tiered_index.service.anew import begin_anew
from tiered_index.service.jobs.copying import COPY_OF, Copier
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.expiry import expire
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.rewriting.job import JobOvertaken
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import JobOverdue
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.disk import Disk
from tiered_index.storage.memory import MemoryStorage

ALL = 10_000
# imports at the first use would take locks in the first run only
pa.array(["pandas, where it is installed"])
np.random.default_rng()
"".encode("utf-16-le")
_PARTS = ("merges", "orphans", "archive", "second", "reader", "beside", "expiry", "erasures")
_FAULTS = ("kill", "power", "disk", "storage", "answers", "listings", "clocks")
_ROUNDS = 12
_JUMP_S = 3000
_DAY_MS = 86_400_000
# less than the time between the upload of an object and its deletion as an orphan
_SKEW_S = 600
_RULES = (
    Retention(),
    Retention(topics={"t": 10}, grace_s=LEAST_GRACE_S),
    Retention(age_s=20, topics={"o*": 10**9}, segments_age_s=50),
    Retention(age_s=2000),
    Retention(max_bytes=8_000),
)


class World(Writers):
    """The run of one seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.folder = folder
        self.chance = chance = random.Random(seed)
        stay, locks = chance.choice([0.2, 0.5, 0.8, 0.95]), chance.choice([0.0, 0.0, 0.3])
        self.scheduler = Scheduler(seed, stay=stay, locks=locks)
        self.preset = chance.choice(["native", "native", "rocketmq"])
        self.clock = WorldClock(NOW_MS)
        self.truth = Truth(keyed=self.preset == "native", now_ms=self.clock.now_ms)
        self.server = Server(self.clock, self.truth)
        self.hosts = [Host(name, self) for name in ("A", "B")]
        self.has = {what for what in _PARTS if chance.random() < 0.5}
        self.faults = {what for what in _FAULTS if chance.random() < 0.45}
        self.settings: dict[str, Any] = {
            "preset": self.preset,
            "slots": chance.choice([1, 7, 64]),
            "items": chance.choice([4, 12, 12, 60]),
            "local_keep_s": chance.choice([0, 0, 50]),
            "checkpoint_every": chance.choice([None, 1, 3]),
            "query_threads": chance.choice([1, 2]),
            "refresh_interval_s": chance.choice([0, 10]),
            "buffer_max_entries": chance.choice([12, 10_000]),
            "read_cache_bytes": chance.choice([0, 20_000, 1 << 24]),
            "cache_slot_groups": chance.random() < 0.7,
            "filter_after_probes": chance.choice([1, 8]),
            "merge": random.Random(f"the merges of {seed}").choice(["2s,1h", "1s,4s,1d"]),
        }
        self.kills = self.struck = 0
        self.oldest_ms = 1000 * (self.settings["refresh_interval_s"] + 30) + 1  # greatest age of an answer
        self.grace_s = chance.choice([0.0, LEAST_GRACE_S])
        self.truth.grace_s = max(0.0, self.grace_s - 2 * _SKEW_S)
        self.rules = chance.choices(_RULES, k=2) if "expiry" in self.has else [Retention()] * 2
        # the root and storage that are restored, and their backups
        self.past = random.Random(f"the past of {seed}")
        self.copying = random.Random(f"the copies of {seed}")
        if self.copying.random() < 0.5:
            self.has.add("copies")
        self.standby = MemoryStorage(clock=self.clock)
        self.goes_back = self.past.choice([None, None, "root", "storage", "both"])
        self.backups: dict[str, Callable[[], None]] = {}
        self.went_back = self.reported = self.went_on = 0
        self.archived: dict[int, bytes] = {}
        self.working = 0  # actors that have not ended
        self.clients: list[Client] = []

    # The run

    def live(self) -> None:
        """Run all actors in parallel, perhaps again after a restore. Then run the end."""
        self.go_on()
        if self.goes_back is not None and self.past.random() < 0.5:
            self.scheduler.note("the middle")
            self.go_back()
            if self.backups:
                self.standby = MemoryStorage(clock=self.clock)
            self.host_by_host()
            self.went_on += len(self.backups)
            self.backups.clear()
            self.go_on()
        self.in_the_end()

    def go_on(self) -> None:
        """Run all actors in parallel."""
        scheduler = self.scheduler
        everybody = Process("world")
        others = {
            "merges": self.merge,
            "orphans": self.sweep,
            "reader": self.read,
            "beside": self.read_beside,
            "expiry": self.expire,
            "erasures": self.erase,
            "copies": self.copy,
        }
        actors = [("host A", partial(self.host, self.hosts[0]))]
        if "second" in self.has:
            actors.append(("host B", partial(self.host, self.hosts[1])))
        actors += [(name, partial(self.again, name, act)) for name, act in others.items() if name in self.has]
        self.working = len(actors)
        for name, act in actors:
            scheduler.start(everybody, name, act)
        if self.faults:
            scheduler.start(everybody, "trouble", self.trouble)
        scheduler.join(everybody)

    # Restores

    def reap(self, host: Host, chance: random.Random) -> None:
        super().reap(host, chance)
        if self.goes_back in ("root", "both") and host.root.exists() and self.past.random() < 0.5:
            backup = self.folder / f"{host.name}.kept"
            shutil.rmtree(backup, ignore_errors=True)
            shutil.copytree(host.root, backup, symlinks=True)
            self.backups[host.name] = partial(self.restore_root, host, backup)
        if self.goes_back in ("storage", "both") and self.truth.state.number and self.past.random() < 0.5:
            self.backups["storage"] = self.server.kept_state()

    def restore_root(self, host: Host, backup: Path) -> None:
        shutil.rmtree(host.root)
        shutil.copytree(backup, host.root, symlinks=True)
        host.disk = HostDisk(self.scheduler, self.truth, random.Random(self.past.random()))

    def go_back(self) -> None:
        """Restore all backups, and set the hosts' clocks wrong by a day."""
        for name, restore in sorted(self.backups.items()):
            self.scheduler.note(f"{name} is restored to an earlier state")
            restore()
            self.went_back += 1
        if self.backups:
            self.truth.may_double = True
            for host in self.hosts:
                host.clock.skew_ms = self.past.choice([-_DAY_MS, 0, _DAY_MS])
                host.position = None

    def open_again(self, host: Host, config: IndexConfig) -> IndexService:
        """Open a host's root. If the open refuses it because of a restore, recover it by `begin_anew`."""
        opened: dict[str, Any] = {"storage": host.client, "clock": host.clock, "disk": host.disk}
        try:
            return IndexService(config, **opened)
        except (RootBehind, StorageBehind) as error:
            if not self.backups:
                raise
            self.scheduler.note(f"{type(error).__name__}: {error}".replace(str(self.folder), "")[:200])
            self.reported += 1
        # the simulated disk moves no folders
        done = begin_anew(config, **opened | {"disk": Disk()})
        self.scheduler.note(f"{host.name} starts again: {done}".replace(str(self.folder), ""))
        host.disk = HostDisk(self.scheduler, self.truth, random.Random(self.past.random()))
        return IndexService(config, **opened | {"disk": host.disk})

    def send_again(self, host: Host) -> None:
        """Put the messages of the source after the durable position."""
        position = host.service.durable_position(SOURCE)
        for at in range(0 if position is None else position + 1, len(self.truth.messages)):
            self.truth.begin(at)
            host.service.put(*self.message(at, self.past), source=SOURCE, source_position=at)
            host.service.flush()

    def again(self, name: str, act: Callable[[Process], None]) -> None:
        """Run an actor without state now and then, each time in a new process."""
        chance = random.Random(self.chance.random())
        for n in range(chance.randrange(1, 3)):
            self.scheduler.sleep(chance.randrange(300))
            process = Process(f"{name}{n}", chance.choice([0.1, 1, 1, 4]))
            self.scheduler.start(process, name, partial(act, process))
            if "kill" in self.faults and chance.random() < 0.15:
                self.scheduler.sleep(chance.randrange(120))
                self.scheduler.kill(process)
                self.kills += 1
            self.scheduler.join(process)
        self.working -= 1

    def client(self) -> Client:
        client = Client(self.scheduler, self.server, self.clock, random.Random(self.chance.random()))
        client.began = self.truth.state.number
        self.clients.append(client)
        return client

    # Lookups

    def ask_service(self, host: Host, chance: random.Random) -> None:
        self.ask(host.service, chance, host.must, host.seen)

    def ask(
        self, index: Any, chance: random.Random, must: Callable[[], set[int]], seen: set[int], *, exact: bool = False
    ) -> bool:
        """Look up a key, perhaps page by page. Return whether no answer was partial.

        With `exact`, the answer must have exactly the entries that `must` returns after the lookup.
        """
        topic, key = chance.choice(TOPICS), chance.choice(KEYS)
        moments = sorted(NOW_MS + 1000 * chance.randrange(-5, 40) for _ in range(2))
        limits = (moments[0], moments[1]) if chance.random() < 0.3 else (None, None)
        count = chance.choice([1, 2, 5, ALL])
        partial = chance.random() < 0.2
        many = chance.random() < 0.2
        cursor, after, pages = None, None, 0
        while True:
            before, since = (set[int](), None) if exact else (must(), index.log_state.number)
            lookup = Lookup(topic, key, *limits, count, cursor)
            if many:
                result = index.query_many([Lookup(topic, "none"), lookup], allow_partial=partial)[1]
            else:
                result = index.query(topic, key, *limits, count, cursor, allow_partial=partial)
            self.scheduler.note(f"answer {result.status} {[(i.queue_id, i.offset, i.size) for i in result]}")
            if exact:
                known, number = must(), index.log_state.number
                hits = self.truth.check(lookup, result, known, known, after, number, number)
            else:
                known, begun = before & must(), self.truth.begun
                hits = self.truth.check(lookup, result, known, begun, after, since)
            seen |= hits
            cursor, pages = result.cursor, pages + 1
            if cursor is None or pages == 3:
                return result.status != "partial"
            after = order_key_of(result, after)

    def read(self, process: Process) -> None:
        """Run a reader of only the storage. Its answers have the entries of its position in the log."""
        client = self.client()
        with self.working_on(client), self.reading(client) as (reader, chance):
            for _ in range(chance.randrange(1, 6)):
                if chance.random() < 0.3:
                    reader.refresh()
                known = self.truth.number_at(self.clock.ms - self.oldest_ms)
                whole = self.ask_storage(reader, chance)
                number = reader.log_state.number
                if whole and number < known and not client.mangled:
                    self.truth.fail(Wrong(f"a complete answer of record {number}, and {known} is older than may be"))
                self.scheduler.sleep(chance.randrange(60))

    def ask_storage(self, reader: IndexReader, chance: random.Random) -> bool:
        return self.ask(reader, chance, lambda: set(self.truth.named_by(reader.log_state)), set(), exact=True)

    def read_beside(self, process: Process) -> None:
        """Run a reader of a root. Its answers have the root's durable entries, and those of its position in the log.

        If a wrong listing hides the log's end, the reader may lack files that have left the root since.
        """
        client = self.client()
        host = self.hosts[0]
        if not host.opened:
            return

        def must() -> set[int]:
            return self.truth.named_by(reader.log_state) | (set() if client.mangled else host.durable)

        with self.working_on(client), self.reading(client, host.root) as (reader, chance):
            for _ in range(chance.randrange(1, 6)):
                self.ask(reader, chance, must, set())
                self.scheduler.sleep(chance.randrange(60))

    @contextlib.contextmanager
    def reading(self, client: Client, root: Path | None = None) -> Iterator[tuple[IndexReader, random.Random]]:
        chance = random.Random(self.chance.random())
        caches = root is None and chance.random() < 0.4
        config = self.config(root=root, cache_dir=self.folder / "cache" if caches else None)
        with IndexReader.open(config=config, clock=self.host_clock(), storage_backend=client) as reader:
            yield reader, chance

    # Jobs

    def merge(self, process: Process) -> None:
        client = self.client()
        chance = random.Random(self.chance.random())
        with self.working_on(client):
            clock = self.host_clock()
            clock.skew_ms = chance.choice([0, 60_000])  # by a fast clock more windows have ended
            log = open_log(client, clock)
            options = MergeOptions(window_s=chance.choice([1, 3600, 86_400]), min_age_s=0, shard_bytes=1 << 20)
            merge(client, log, clock, options, threads=chance.choice([1, 2]))

    def sweep(self, process: Process) -> None:
        client = self.client()
        with self.working_on(client):
            delete_orphans(client, find_orphans(client, open_log(client, self.host_clock())))

    def expire(self, process: Process) -> None:
        """Expire entries by the rule of a job, which is not the writer's rule."""
        client = self.client()
        with self.working_on(client):
            clock = self.host_clock()
            log = open_log(client, clock)
            try:
                expire(client, log, self.rules[1], clock, yes=True)
            except ConfigError as error:
                # a clock was set meanwhile
                if "nothing expires while clocks differ" not in str(error):
                    raise

    def erase(self, process: Process) -> None:
        client = self.client()
        chance = random.Random(self.chance.random())
        moment = NOW_MS + 1000 * chance.randrange(-5, 40)
        more: dict[str, Any] = chance.choice([{"keys": ("Aa",)}, {"keys": ("BB", "y")}, {"queue_id": 1}, {}])
        request = EraseRequest(chance.choice(TOPICS), before_ms=moment, **more)
        with self.working_on(client):
            clock = self.host_clock()
            log = open_log(client, clock)
            now, threads = chance.random() < 0.5, chance.choice([1, 2])
            done = erase(client, log, request, clock, yes=True, now=now, grace_s=self.grace_s, threads=threads)
            self.scheduler.note(f"erasure of {request}: {done.status}")
            left = self.truth.named_by(log.state)
            if not done.remaining and (held := left - self.truth.unexpired(left, Expired(tombstones=done.tombstones))):
                self.truth.fail(Wrong(f"nothing remains, says the certificate of {request}, but {held} does"))

    def copy(self, process: Process) -> None:
        """Run one round of a copy. The copy is then missing, or complete up to one record."""
        client = self.client()
        with self.working_on(client):
            copier = Copier(client, self.standby, self.host_clock(), threads=1)
            try:
                copier.open()
                copier.run_once()
            except InvalidArgument:
                if not client.mangled:  # a listing that hides the log's end shows another storage
                    raise
        self.check_copy()

    def check_copy(self) -> int:
        """Check all bytes of the copy. Return the record up to which it is complete; 0: there is no copy."""
        own, log = StorageLog(self.server, self.clock), StorageLog(self.standby, self.clock)
        try:
            copied, genesis = log.open(), own.open().genesis
        except NotAnIndex:
            return 0
        at = copied.positions[f"{COPY_OF}{genesis.index_id}"]
        source = LogState().replayed([(own.record(n), str(n)) for n in range(1, at + 1)])
        segments, others = list(Segments(copied, self.standby)), list(self.truth.segments(source))
        if (copied.objects, segments, copied.expired) != (source.objects, others, source.expired):
            names, missed = ([*state.objects, *more] for state, more in ((copied, segments), (source, others)))
            self.truth.fail(Wrong(f"a copy of record {at} names {names}, not {missed}"))
        catalogs = [stored.name for stored in copied.catalogs.values() if stored.data is None]
        for name in (*copied.objects, *catalogs, *(segment.name for segment in segments)):
            if self.standby.get(name) != self.truth.bytes_of(name):
                self.truth.fail(Lost(f"{name} has other bytes in the copy"))
        return at

    def repair(self) -> None:
        """Damage or delete an object that the log names, and restore it from the copy."""
        names = sorted(self.truth.state.objects)
        if self.went_back:
            self.standby = MemoryStorage(clock=self.clock)
        self.copy(Process("end"))
        if self.check_copy() != self.truth.state.number:
            self.truth.fail(Lost("the copy is not whole at the end"))
        if not names:
            return
        name = self.copying.choice(names)
        data = bytearray(self.server.get(name))
        # not by the server of the simulation, which would note a write or deletion
        if self.copying.random() < 0.5:
            MemoryStorage.delete_many(self.server, [name])
        else:
            data[len(data) // 2] ^= 1
            MemoryStorage.put(self.server, name, data)
        log, report = open_log(self.server, self.clock), Report()
        check_storage(self.server, {}, report, lambda *_: None, deep=True, threads=1)
        Repairs(self.server, log, standby=self.standby).run(report, yes=True)
        if name in self.truth.state.objects or self.truth.state.lost:
            self.truth.fail(Lost(f"{name} was not put back"))

    def host_clock(self) -> HostClock:
        return HostClock(self.scheduler, self.clock)

    @contextlib.contextmanager
    def working_on(self, client: Client) -> Iterator[None]:
        try:
            yield
        except (JobOvertaken, JobOverdue):
            pass
        except TieredIndexError as error:
            self.excuse_client(error, client)

    # Faults

    def trouble(self) -> None:
        """Inject one fault after the other, each for a time."""
        chance = random.Random(self.chance.random())
        kinds = sorted(self.faults - {"kill", "power"})
        while self.working and kinds:
            self.scheduler.sleep(chance.randrange(1, 30))
            kind = chance.choice(kinds)
            host = chance.choice(self.hosts if self.hosts[1].lives else self.hosts[:1])
            client = host.client if chance.random() < 0.5 or not self.clients else chance.choice(self.clients[-4:])
            if kind == "disk":
                error = chance.choice([errno.EIO, errno.ENOSPC, errno.EROFS])
                operation = chance.choice(["*", "*", "sync", "sync_folder", "unlink", "create", "pwrite", "rename"])
                times = chance.choice([1, 1, 2, 6, None])
                self.scheduler.note(f"disk of {host.name}: {operation} {errno.errorcode[error]} {times}")
                nth, torn = chance.randrange(1, 4), chance.random() < 0.5
                host.disk.fail(operation, nth=nth, times=times, error=partial(_as_told, error), torn=torn)
                disk = host.disk
                self.scheduler.sleep(chance.randrange(5, 80))
                disk.clear()
            elif kind == "clocks":
                if chance.random() < 0.5:
                    host.clock.skew_ms = 1000 * chance.randrange(-_SKEW_S, _SKEW_S)
                else:
                    seconds = chance.choice([2, 25, 100, _JUMP_S, 100_000])
                    if seconds <= _JUMP_S or not self.is_publishing():
                        self.clock.ms += seconds * 1000
                        self.scheduler.note(f"{seconds} s later")
            elif client is not None:
                self.strike(kind, client, chance)
                self.scheduler.sleep(chance.randrange(5, 80))
                client.clear()
                client.listings = None

    def strike(self, kind: str, client: Client, chance: random.Random) -> None:
        self.scheduler.note(f"trouble: {kind}")
        nth, times = chance.randrange(1, 4), chance.choice([1, 1, 2, None])
        if kind == "storage":
            operation = chance.choice(["*", "*", "put", "put_if_absent", "list", "get", "delete_many"])
            client.fail(operation, nth=nth, times=times, when=chance.choice(["before", "after"]))
        elif kind == "answers":
            operation = chance.choice(["get", "get_range", "get_suffix"])
            client.corrupt(operation, nth=nth, times=times, mode=chance.choice(["short", "long", "wrong"]))
        else:
            client.listings = chance.choice(["stale", "stale", "twice", "short"])

    def is_publishing(self) -> bool:
        """Return whether a thread is appending a log record.

        If an hour passes between its look at the clock and its record, the record may name a deleted orphan.
        """
        frames = sys._current_frames()
        for frame in frames.values():
            while frame is not None:
                if frame.f_code is StorageLog.append.__code__:
                    return True
                frame = frame.f_back
        return False

    def excuse_client(self, error: TieredIndexError, client: Client) -> None:
        if isinstance(error, NotAnIndex):
            has_cause = not client.began or client.mangled
        elif isinstance(error, CorruptFile):
            has_cause = client.mangled
        else:
            has_cause = isinstance(error, StorageError | PartialAnswer | BudgetExceeded) and client.struck
        if not has_cause:
            raise error

    # The end

    def in_the_end(self) -> None:
        """Run each host without faults. Then the storage must have all durable entries.

        A deletion of orphans must not delete any of them.
        """
        self.scheduler.note("the end")
        for client in self.clients:
            self.struck += client.struck
        self.struck += sum(host.disk.struck for host in self.hosts)
        self.go_back()
        self.host_by_host()
        durable = self.hosts[0].durable | self.hosts[1].durable
        missing = self.truth.unexpired(durable) - self.truth.named_by(self.truth.state)
        if missing:
            self.truth.fail(Lost(f"durable entries never came into the storage: {missing}"))
        self.clock.ms += 2 * 86_400_000
        if self.truth.state.number:
            self.sweep(Process("end"))
            if "merges" in self.has:
                self.merge(Process("end"))
            if "erasures" in self.has:
                self.erase(Process("end"))
            if "copies" in self.has:
                self.repair()
            with self.reading(self.client()) as (reader, chance):
                self.ask_all(reader, durable)
                for _ in range(6):
                    self.ask_storage(reader, chance)
                for number, data in self.archived.items():
                    if (number + 1) * SEGMENT_BYTES <= self.truth.state.expired.segments.get("store", 0):
                        continue
                    segment = self.truth.segments().at("store", number * SEGMENT_BYTES)
                    if segment is None and self.went_back:
                        continue  # the restored log does not name it yet: the source archives it again
                    if segment is None:
                        self.truth.fail(Lost(f"segment {number} was archived, and no record or catalog names it"))
                    if self.server.get_range(segment.name, 0, SEGMENT_BYTES) != data:
                        self.truth.fail(Lost(f"{segment.name} is not what was archived"))

    def host_by_host(self) -> None:
        """Let each host upload all its entries, one host after the other and without faults."""
        for host in self.hosts:
            host.disk.clear()
            if not self.backups:
                host.clock.skew_ms = 0
            # an opening that did not end may have written to the log: then its root must be recovered, too
            may_be_ahead = host.name in self.backups or ("storage" in self.backups and host.root.exists())
            if not (host.opened or may_be_ahead):
                continue
            self.clock.ms += 1_000_000  # all leases and waits have ended
            host.client, host.closing = self.client(), False
            host.accepted, host.seen = set(), set()
            config = self.config(root=host.root, retention=self.rules[0])
            host.service = self.open_again(host, config)
            if self.backups:
                host.clock.skew_ms = 0
                self.send_again(host)
            else:
                self.look_at_position(host)
                self.ask_all(host.service, host.must())
            for _ in range(_ROUNDS):
                host.service.seal()
                if not host.service.run_lifecycle().any():
                    break
                self.clock.ms += 100_000
            else:
                raise Wrong(f"{host.name}: the life cycle has something to do after {_ROUNDS} rounds")
            host.service.close()
            host.service = None

    def ask_all(self, index: Any, must: set[int]) -> None:
        lookups = [Lookup(topic=topic, key=key, max_count=ALL) for topic in TOPICS for key in KEYS]
        for lookup, result in zip(lookups, index.query_many(lookups), strict=True):
            self.truth.check(lookup, result, must, self.truth.begun, None, index.log_state.number)

    def config(self, **more: Any) -> IndexConfig:
        return _config(tuple(sorted(self.settings.items()))).changed(**more)


@cache
def _config(settings: tuple[tuple[str, Any], ...]) -> IndexConfig:
    return IndexConfig(background=False, **dict(settings))


def _as_told(error: int, operation: str) -> int | None:
    """Return the error if the call can fail with it."""
    return error if error in ERRORS[operation] else None


def simulate(seed: int) -> World:
    """Run one seed, and return its world. Raises the failure that it found."""
    logging.disable()
    try:
        with fast_folder() as folder:
            world = World(seed, folder)
            names = Disk.names

            def names_and_pause(disk: Disk, place: Path) -> list[str]:
                world.scheduler.pause(f"names {place.name}")
                return names(disk, place)

            try:
                with world.scheduler:
                    Disk.names = names_and_pause
                    world.scheduler.run(world.live)
            finally:
                Disk.names = names
            if world.truth.failure is not None:
                raise world.truth.failure
            return world
    except BaseException as error:
        error.world = world
        raise
    finally:
        logging.disable(logging.NOTSET)


def campaign(seeds: range, tally: Tally, most_failures: int = 20) -> list[str]:
    """Run many seeds, until so many have failed. Return their digests."""
    digests = []
    gc.collect()
    gc.freeze()
    try:
        for n, seed in enumerate(seeds):
            try:
                world = simulate(seed)
            except Exception as error:  # noqa: BLE001 - each failure has its seed
                tally.fail_by(error, f"python -m tests.reliability.simulation --seed {seed} --trace")
                world = error.world
            digests.append(world.scheduler.digest)
            tally.tried.update(
                {
                    "seeds": 1,
                    "steps": world.scheduler.steps,
                    "answers checked": world.truth.checked,
                    "faults injected": world.struck,
                    "kills": world.kills,
                    "restores of roots and storages": world.went_back,
                    "restores that an open reported": world.reported,
                    "restores during a run": world.went_on,
                    "records of expiry and erasure": world.truth.stated,
                }
            )
            if n % 20 == 19:
                gc.collect()
            if len(tally.failures) == most_failures:
                break
    finally:
        gc.unfreeze()
    return digests


def _run(options: argparse.Namespace) -> Tally:
    tally = Tally("simulation")
    if options.seed is None:
        campaign(range(options.first, options.first + options.seeds), tally)
        return tally
    try:
        world, failure = simulate(options.seed), None
    except BaseException as error:  # noqa: BLE001 - raised after the trace
        world, failure = error.world, error
    if options.trace:
        print("\n".join(world.scheduler.trace))
    made_of = f"{sorted(world.has)}, {sorted(world.faults)}"
    print(f"seed {options.seed}: {world.scheduler.steps} steps, digest {world.scheduler.digest}, {made_of}")
    if failure is not None:
        raise failure
    return tally


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=10_000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--trace", action="store_true", help="print each step")


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", _run, _arguments))
