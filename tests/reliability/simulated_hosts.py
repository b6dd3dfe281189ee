"""The hosts of the simulation. Each has a root, a disk, a clock, and one process at a time that writes there."""

import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.reliability.scheduler import Process
from tests.reliability.simulated_seams import Client, HostClock, HostDisk
from tests.reliability.simulated_truth import KEYS, SOURCE, TOPICS, Lost
from tests.support.batches import columns_of
from tests.support.disk_faults import KEPT, SimulatedCrash
from tiered_index import IndexService
from tiered_index.errors import (
    BackPressure,
    ConfigError,
    DiskFull,
    IndexClosed,
    LockHeld,
    StorageError,
    TieredIndexError,
    WriterFenced,
)

NOW_MS = 1_700_000_000_000
SEGMENT_BYTES = 64
_IMPLAUSIBLE_MS = (0, NOW_MS + 10**9, 5_999)


class Host:
    """A machine: a root, a disk, a clock, at most one writing process, and its entries that are known to be durable."""

    def __init__(self, name: str, world: "Writers") -> None:
        self.name = name
        self.root = world.folder / name
        self.disk = HostDisk(world.scheduler, world.truth, random.Random(world.chance.random()))
        self.clock = HostClock(world.scheduler, world.clock)
        self.process: Process | None = None
        self.client: Client | None = None
        self.instance: IndexService | None = None  # perhaps not open yet
        self.service: IndexService | None = None
        self.lives = 0
        self.closing = False
        self.opened = False
        self.durable: set[int] = set()
        self.position: int | None = None
        self.accepted: set[int] = set()  # by this process
        self.seen: set[int] = set()  # by lookups of this process

    def must(self) -> set[int]:
        return self.durable | self.accepted | self.seen


class Writers:
    """The writers of a world. `simulation.World` has the rest."""

    def host(self, host: Host) -> None:
        """Run processes one after the other. Each is closed or killed."""
        chance = random.Random(self.chance.random())
        for _ in range(chance.choice([1, 1, 2, 3])):
            self.scheduler.sleep(chance.randrange(60))
            self.begin(host, chance)
            if "kill" in self.faults and chance.random() < 0.7:
                self.scheduler.sleep(chance.randrange(300))
                self.scheduler.kill(host.process)
                self.kills += 1
            self.scheduler.join(host.process)
            self.reap(host, chance)
        self.working -= 1

    def begin(self, host: Host, chance: random.Random) -> None:
        host.lives += 1
        host.closing = False
        host.accepted, host.seen = set(), set()
        host.client = self.client()
        host.process = Process(f"{host.name}{host.lives}", chance.choice([0.1, 1, 1, 4]))
        work = random.Random(chance.random())
        self.scheduler.start(host.process, "writer", lambda: self.write(host, work))

    def reap(self, host: Host, chance: random.Random) -> None:
        """Release the resources of an ended process, as the operating system would."""
        host.disk.clear()
        host.disk.crashed = True
        if host.instance is not None:
            with contextlib.suppress(SimulatedCrash, TieredIndexError):
                host.instance.abandon()  # in this thread, because the threads of the process have ended
            # a close that was killed may have left the files to the end of the process
            parts = getattr(host.instance, "_parts", None)
            for release in () if parts is None else parts.releases(0.0, keep_reserve=True):
                with contextlib.suppress(SimulatedCrash, TieredIndexError):
                    release()
        host.instance = host.service = None
        if "power" in self.faults and chance.random() < 0.5:
            self.scheduler.note(f"{host.name} loses its power")
            host.disk.lose_unsynced(random.Random(chance.random()), chance.choice(KEPT))
        host.disk.revive()

    def open(self, host: Host) -> bool:
        """Open the host's root. Return whether it was possible."""
        # some keys have different hashes by the two rules; each process of a host uses the other rule
        rule = ("abs", "mask")[host.lives % 2] if self.preset == "rocketmq" else None
        config = self.config(root=host.root, hash=rule, retention=self.rules[0])
        try:
            host.instance = IndexService.__new__(IndexService)
            host.instance.__init__(config, storage=host.client, clock=host.clock, disk=host.disk)
        except LockHeld:
            return False
        except TieredIndexError as error:
            self.excuse(error, host)
            return False
        host.service, host.opened = host.instance, True
        self.look_at_position(host)
        return True

    def write(self, host: Host, chance: random.Random) -> None:
        """Run a writer's process: this thread puts, its other threads flush, upload and look up."""
        if not self.open(host):
            return
        process, service = host.process, host.service
        workers = [("flusher", self.flush), ("life cycle", self.run_lifecycle), ("asker", self.ask_service)]
        if "merges" in self.has:
            workers.append(("merger", self.run_merge))
        for name, act in workers:
            if chance.random() < 0.7:
                self.scheduler.start(process, name, partial(self.repeat, host, act, random.Random(chance.random())))
        position = -1 if host.position is None else host.position
        acts = [self.put, self.put, self.put_batch, self.flush, self.seal, self.run_lifecycle, self.ask_service]
        if "archive" in self.has:
            acts.append(self.archive)
        if "merges" in self.has:
            acts.append(self.run_merge)
        for _ in range(chance.randrange(3, 12)):
            act = chance.choice(acts)
            if act in (self.put, self.put_batch):
                position = act(host, chance, position)
            else:
                self.attempt(host, partial(act, host, chance))
            self.look_at_position(host)
        if chance.random() < 0.7:
            host.closing = True
            held = set(host.accepted)
            if self.attempt(host, service.close):
                host.durable |= held
                if position >= 0:
                    host.position = max(position, -1 if host.position is None else host.position)
        host.closing = True

    def repeat(self, host: Host, act: Callable[[Host, random.Random], None], chance: random.Random) -> None:
        for _ in range(chance.randrange(1, 4)):
            if host.closing:
                return
            self.attempt(host, lambda: act(host, chance))
            self.scheduler.sleep(chance.randrange(80))

    def attempt(self, host: Host, act: Callable[[], object]) -> bool:
        """Call `act`, which may fail with a cause. Return whether it succeeded."""
        try:
            act()
        except TieredIndexError as error:
            self.excuse(error, host)
            return False
        return True

    # Calls of writers

    def message(self, position: int, chance: random.Random) -> tuple[Any, ...]:
        """Return the message at a position of the source. It is made if the source is shorter."""
        while len(self.truth.messages) <= position:
            n = len(self.truth.messages)
            keys = chance.sample(KEYS, chance.choice([1, 1, 2, 3]))
            offset = n if chance.random() < 0.7 else n // 4
            plausible = chance.random() < 0.9
            moment = self.clock.ms + 1000 * chance.randrange(-4, 5) if plausible else chance.choice(_IMPLAUSIBLE_MS)
            self.truth.make(chance.choice(TOPICS), keys, chance.randrange(2), offset, chance.randrange(3), moment)
        numbers = self.truth.messages[position]
        first = self.truth.entries[numbers[0]]
        keys = [self.truth.entries[n].key for n in numbers]
        return (first.topic, first.queue_id, keys, first.offset, first.size, first.second * 1000)

    def put(self, host: Host, chance: random.Random, position: int) -> int:
        for _ in range(chance.randrange(1, 5)):
            message = self.message(position + 1, chance)
            self.truth.begin(position + 1)
            if not self.attempt(host, partial(host.service.put, *message, source=SOURCE, source_position=position + 1)):
                return position
            position += 1
            host.accepted.update(self.truth.messages[position])
        return position

    def put_batch(self, host: Host, chance: random.Random, position: int) -> int:
        last = position + chance.randrange(1, 7)
        messages = [self.message(p, chance) for p in range(position + 1, last + 1)]
        for p in range(position + 1, last + 1):
            self.truth.begin(p)
        rows = [(topic, queue, key, *more) for topic, queue, keys, *more in messages for key in keys]
        put = partial(host.service.put_batch, columns_of(rows), source=SOURCE, source_position=last)
        if not self.attempt(host, put):
            return position
        for p in range(position + 1, last + 1):
            host.accepted.update(self.truth.messages[p])
        return last

    def flush(self, host: Host, chance: random.Random) -> None:
        self.make_durable(host, host.service.flush)

    def seal(self, host: Host, chance: random.Random) -> None:
        self.make_durable(host, host.service.seal)

    def make_durable(self, host: Host, act: Callable[[], None]) -> None:
        held = host.accepted | host.seen
        act()
        host.durable |= held

    def run_lifecycle(self, host: Host, chance: random.Random) -> None:
        host.service.run_lifecycle()

    def run_merge(self, host: Host, chance: random.Random) -> None:
        merger = host.service._parts.merger
        merger.min_age_s, merger._monotonic_s = 0, float
        merger._sleep = lambda _: self.scheduler.sleep(1)
        if chance.random() < 0.5:
            self.seal(host, chance)
            host.service.run_lifecycle()
        host.service.run_merge()

    def look_at_position(self, host: Host) -> None:
        """Check that the durable position does not decrease, and note its entries as durable."""
        position = host.service.durable_position(SOURCE)
        if not host.service._session.claimed:
            return  # opened without the storage, whose log may have a greater position
        if host.position is not None and (position is None or position < host.position):
            self.truth.fail(Lost(f"{host.name}: the durable position went back from {host.position} to {position}"))
        host.position = position
        host.durable |= self.truth.up_to(position)

    def archive(self, host: Host, chance: random.Random) -> None:
        number = chance.randrange(3)
        data = random.Random(number).randbytes(SEGMENT_BYTES)
        host.service.archive("store", number * SEGMENT_BYTES, SEGMENT_BYTES, lambda at, length: data[at : at + length])
        self.archived[number] = data

    def excuse(self, error: TieredIndexError, host: Host) -> None:
        """Raise an error of a writer unless it has a known cause."""
        self.scheduler.note(f"{type(error).__name__}: {error}".replace(str(self.folder), "")[:200])
        fenced = host.service is not None and host.service._session.epoch < self.truth.state.epoch
        if (
            (isinstance(error, IndexClosed) and host.closing)
            or (isinstance(error, WriterFenced) and (fenced or host.service is None))
            or isinstance(error, BackPressure)
            or (isinstance(error, LockHeld) and host.service is not None and not host.service._session.claimed)
            or (isinstance(error, DiskFull | StorageError) and host.disk.struck)
            or (isinstance(error, StorageError) and "hours ago" in str(error))
            # its clock differs from the storage's, or was set
            or (isinstance(error, ConfigError) and str(error).startswith(("nothing expires", "no orphan is deleted")))
        ):
            return
        self.excuse_client(error, host.client)
