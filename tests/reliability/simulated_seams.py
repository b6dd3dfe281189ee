"""The simulation's clock, disks and storage. At each call another thread may run, and a fault may occur.

The storage is one server, with a client for each process. If a process is killed, the server may or may not have its
last request, and the process may not have received the response.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sortedcontainers import SortedDict

from tests.reliability.scheduler import Scheduler
from tests.reliability.simulated_truth import Truth
from tests.support.disk_faults import FaultDisk
from tests.support.storage_faults import FaultStorage
from tiered_index.storage.base import Bytes, ObjectInfo, StorageRequest
from tiered_index.storage.memory import MemoryStorage

T = TypeVar("T")
# a stale listing lacks younger objects
_YOUNG_MS = 3_000


class WorldClock:
    """The true time, which is the storage's. It advances at every request, and when the simulation sets it."""

    def __init__(self, now_ms: int) -> None:
        self.ms = now_ms

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        return self.ms / 1000


class HostClock:
    """A host's clock. It differs from the true time by `skew_ms`."""

    def __init__(self, scheduler: Scheduler, world: WorldClock) -> None:
        self._scheduler = scheduler
        self._world = world
        self.skew_ms = 0

    def now_ms(self) -> int:
        self._scheduler.pause("clock")
        return self._world.ms + self.skew_ms

    def monotonic_s(self) -> float:
        self._scheduler.pause("clock")
        return self._world.ms / 1000


class HostDisk(FaultDisk):
    """A host's disk. Unsynced bytes survive the end of a process, but a power cut may lose them."""

    def __init__(self, scheduler: Scheduler, truth: Truth, chance: random.Random) -> None:
        super().__init__(chance=chance)
        self._scheduler = scheduler
        self._truth = truth

    @contextmanager
    def _strike(self, operation: str, **more: Callable[[], None] | None) -> Iterator[None]:
        self._scheduler.pause(operation)  # before the disk's lock is taken
        try:
            with super()._strike(operation, **more):
                yield
        except OSError as error:
            self._truth.may_double = True
            self._scheduler.note(f"{operation}: {error.strerror}")
            raise


class Server(MemoryStorage):
    """The storage itself, without faults. It reports its changes to `truth`."""

    def __init__(self, clock: WorldClock, truth: Truth) -> None:
        super().__init__(clock=clock)
        self.uri = "memory://simulation"  # messages have it
        self._truth = truth

    def put(self, name: str, data: Bytes) -> None:
        super().put(name, data)
        self._truth.stored(name, bytes(data))

    def put_if_absent(self, name: str, data: Bytes) -> None:
        super().put_if_absent(name, data)
        self._truth.stored(name, bytes(data))

    def delete_many(self, names: Iterable[str]) -> None:
        for name in names:
            super().delete_many([name])
            self._truth.deleted(name)

    def kept_state(self) -> Callable[[], None]:
        """Return a function that restores the present objects and their truth, as from a backup."""
        objects = SortedDict(self._shelf.objects)
        restore_truth = self._truth.kept_state()

        def restore() -> None:
            self._shelf.objects = objects
            restore_truth()

        return restore


class Client(FaultStorage):
    """The connection of one process to the server.

    `struck` counts faults, and `mangled` those that changed a response. `listings` is the fault of listings.
    """

    def __init__(self, scheduler: Scheduler, server: Server, clock: WorldClock, chance: random.Random) -> None:
        super().__init__(server)
        self._scheduler = scheduler
        self._clock = clock
        self._chance = chance
        self.struck = self.mangled = 0
        self.began = 0  # number of the last log record at the start
        self.listings: str | None = None

    def close(self) -> None:
        """Do nothing: other clients use the server."""

    def _strike(self, call: StorageRequest, act: Callable[[list[Any]], T]) -> T:
        self._scheduler.pause(f"{call.operation} {call.name}")
        self._clock.ms += self._chance.randrange(20)
        try:
            result = super()._strike(call, act)
        finally:
            if call.operation not in ("get", "get_range", "get_suffix", "list", "head"):
                self._scheduler.pause("answer")
        if call.operation == "list" and self.listings is not None:
            return self._wrong_listing(result)
        return result

    def _match(self, call: StorageRequest) -> list[Any]:
        scripts = super()._match(call)
        self.struck += len(scripts)
        self.mangled += sum(script.mangle is not None for script in scripts)
        if scripts:
            self._scheduler.note(f"{call.operation} {call.name}: struck")
        return scripts

    def _wrong_listing(self, page: Any) -> Any:
        page = tuple(page)
        wrong: tuple[ObjectInfo, ...] = page
        if self.listings == "stale":
            wrong = tuple(info for info in page if info.modified_ms < self._clock.ms - _YOUNG_MS)
        elif self.listings == "twice":
            wrong = tuple(info for info in page for _ in range(1 + (self._chance.random() < 0.3)))
        elif self.listings == "short":
            wrong = page[: len(page) // 2]
        if wrong != page:
            self.struck += 1
            self.mangled += 1
            self._scheduler.note(f"list: {self.listings}")
        return wrong
