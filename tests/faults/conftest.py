"""A scripted life of an index, used by every fault test: puts, flushes, seals, life-cycle rounds, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.small_disk import Mounts, SmallDisk
from tiered_index import IndexService, QueryResult
from tiered_index.clock import ManualClock
from tiered_index.errors import TieredIndexError
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import TEMPORARY_PREFIX, Disk
from tiered_index.storage.memory import MemoryStorage
from tiered_index.testing.disk_faults import FaultDisk, SimulatedCrash
from tiered_index.testing.model import Answer, ReferenceModel

NOW_MS = 1_700_000_000_000
KEYS = ("a", "b", "c", "ключ")
QUESTIONS = [(topic, key) for topic in ("orders", "payments") for key in KEYS]


class World:
    """One root and one storage, and what was put to them. `durable` holds what a flush has confirmed, `maybe` what may be lost."""

    def __init__(self, folder: Path, storage: Storage | None = None) -> None:
        self.root = folder / "root"
        self.storage = storage or MemoryStorage()
        self.clock = ManualClock(NOW_MS)
        self.model = ReferenceModel()
        self.durable = ReferenceModel()
        self.service: IndexService | None = None
        self.settings = {"slots": 7, "items": 12, "local_keep_s": 0, "background": False, "query_threads": 2}
        self._numbers = itertools.count(1)
        self.position = 0
        self.durable_position: int | None = None

    def open(self, disk: Disk | None = None, storage: Storage | None = None, **settings: object) -> IndexService:
        chosen = {"root": self.root, **self.settings, **settings}
        self.service = IndexService.open(storage_backend=storage or self.storage, clock=self.clock, disk=disk or FaultDisk(), **chosen)
        return self.service

    def put(self, count: int) -> None:
        """Put `count` messages of one or two keys each, every tenth with a clock far off."""
        assert self.service is not None
        for _ in range(count):
            number = next(self._numbers)
            keys = [KEYS[number % 4], KEYS[number % 3]]
            timestamp_ms = 5_000 if number % 10 == 0 else NOW_MS + number * 1000
            message = ("orders" if number % 2 else "payments", number % 3, keys, number, 10, timestamp_ms)
            before = len(self.model.entries)
            self.model.put(*message)  # first: a lookup beside this call may see it already
            try:
                self.service.put(*message, source="log", source_position=number)
            except TieredIndexError:
                del self.model.entries[before:]
                raise
            self.position = number

    def flush(self) -> None:
        assert self.service is not None
        self.service.flush()
        self.confirm()

    def confirm(self) -> None:
        """Everything put so far is durable."""
        self.durable.entries = list(self.model.entries)
        self.durable_position = self.position

    def script(self) -> Iterator[Callable[[], object]]:
        """Yield the steps of the scenario."""
        service = self.service
        assert service is not None
        yield lambda: self.put(5)
        yield self.flush
        yield lambda: self.put(8)
        yield self.flush
        yield service.run_lifecycle
        yield lambda: self.put(3)
        yield lambda: (service.seal(), self.confirm())
        yield service.run_lifecycle
        yield service.run_lifecycle
        yield lambda: self.put(4)
        yield self.flush
        yield lambda: self.put(1)
        yield lambda: (service.seal(), self.confirm())
        yield lambda: self.put(2)
        yield self.flush
        yield service.run_lifecycle

    def abandon(self) -> None:
        """Let go of a service as a killed process would."""
        if self.service is not None:
            with contextlib.suppress(SimulatedCrash):
                self.service.abandon()
            self.service = None

    def answers(self, ask: Callable[..., QueryResult] | None = None) -> dict[tuple[str, str], list[Answer]]:
        """Return all answers by (topic, key), each complete."""
        assert self.service is not None
        found = {}
        for question in QUESTIONS:
            result = (ask or self.service.query)(*question, max_count=1000)
            assert result.status == "complete"
            found[question] = [Answer.of(item) for item in result]
        return found

    def check(self, ask: Callable[..., QueryResult] | None = None) -> None:
        """Every durable entry is found once, nothing is found that was not put, and positions are true."""
        assert self.service is not None
        found = self.answers(ask)
        position = self.service.durable_position("log")
        promised = ReferenceModel()
        promised.entries = [entry for entry in self.model.entries if position is not None and entry.offset <= position]
        for question in QUESTIONS:
            answers = found[question]
            assert len(answers) == len(set(answers))
            possible = self.model.query(*question, max_count=None)
            assert answers == [answer for answer in possible if answer in set(answers)]
            lost = set(self.durable.query(*question, max_count=None)) - set(answers)
            assert not lost, f"durable entries of {question} are gone: {lost}"
            ahead = set(promised.query(*question, max_count=None)) - set(answers)
            assert not ahead, f"durable_position {position} runs ahead of {ahead}"
        if self.durable_position:
            assert position is not None
            assert self.durable_position <= position <= self.position

    def settle(self) -> None:
        """After recovery: what was lost is lost, what was kept is durable."""
        found = {question: {(a.queue_id, a.offset) for a in answers} for question, answers in self.answers().items()}
        self.model.entries = [e for e in self.model.entries if (e.queue_id, e.offset) in found[e.topic, e.key]]
        self.durable.entries = list(self.model.entries)

    def tidy(self) -> None:
        """No half-made work is left, and every file is in one state."""
        states = ("unsealed", "compacted", "uploaded")
        names = [path.name for path in self.root.rglob("*")]
        assert not [name for name in names if name.startswith(TEMPORARY_PREFIX)]
        ids = [path.stem for state in states for path in (self.root / state).glob("*.index")]
        assert len(ids) == len(set(ids))


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []
    numbers = itertools.count()

    def make(storage: Storage | None = None, folder: Path | None = None) -> World:
        made.append(World((folder or tmp_path) / str(next(numbers)), storage))
        made[-1].root.parent.mkdir()
        return made[-1]

    yield make
    for world in made:
        world.abandon()


@pytest.fixture
def published(make_world: Callable[..., World]) -> World:
    """A world with several published files, and one local one."""
    world = make_world()
    world.open(checkpoint_every=3)
    for _ in range(3):
        world.put(6)
        world.service.seal()
        world.confirm()
        world.service.run_lifecycle()
    world.put(3)
    world.flush()
    return world


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system of a few MiB, a real one where possible."""
    folder = tmp_path / "small"
    folder.mkdir()
    with Mounts() as mounts:
        yield SmallDisk(folder, real=mounts.empty_over(folder, size="6m"))


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    with Mounts() as laid:
        yield laid


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Return a function that waits until a condition holds, and fails where it doesn't for a minute."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s, "it never came true"
            time.sleep(0.005)

    return wait
