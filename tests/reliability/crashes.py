"""Crashes and faults at every call to the local disk and the storage. No durable entry may be lost.

Each scenario of `lives` is disturbed at every call to disk and storage. There are four campaigns:

- `crash`: before each call and in the middle of each write, the process is killed, or the power is cut.
- `fault`: one call fails, with each error that it can have. The scenario continues; then a crash comes at a later call.
- `burst`: two to eight calls fail: in a row, some of all calls, or some of one kind. The disk recovers, and the
  scenario continues; then a crash comes at a later call.
- `again`: as `crash`; then a second crash comes at each call of the recovery, or just after it.

After a power cut, unsynced bytes are kept in each way of `KEPT`. After each crash the campaign opens a reader on the
remaining files, then a writer and a reader beside it. Answers must have all durable entries, and only entries that were
put. The writer then continues, closes, and opens again. States with equal bytes are checked once. `--only NAME` repeats
the state of a name.
"""

import argparse
import contextlib
import errno
import hashlib
import logging
import multiprocessing
import random
import secrets
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sortedcontainers import SortedDict

from tests.reliability.lives import LIVES
from tests.reliability.tally import Hang, Tally, bounded, fast_folder, main
from tests.reliability.world import QUESTIONS, World
from tests.support.disk_faults import ERRORS, KEPT, FaultDisk, Kept
from tests.support.storage_faults import Watched
from tiered_index import IndexReader, Lookup, QueryResult
from tiered_index.base.clock import ManualClock
from tiered_index.errors import BackPressure, IndexClosed, StorageError
from tiered_index.service.read.lookups import Lookups
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.memory import MemoryStorage

CAMPAIGNS = ("crash", "fault", "burst", "again")
SHARES = {"crash": 1.0, "fault": 0.1, "burst": 0.03, "again": 0.005}
"""The shares that `--all` checks. All states would take some hours."""
_CAUSES = {"crash": "one crash", "fault": "fault, then crash", "burst": "burst, then crash"}
_HANG_S = 120


class Crashes:
    """The crash campaigns.

    - `share` is the share of states, or of failed calls, that are checked, and `again_share` that of second crashes.
    - `only` is the name of a state, or the start of several names.
    - `stop` is the number of failures that end the campaigns.
    """

    def __init__(
        self,
        folder: Path,
        tally: Tally,
        *,
        share: float = 1.0,
        again_share: float = 0.02,
        only: str = "",
        stop: int = 50,
    ) -> None:
        self.tally = tally
        self._folder = folder
        self._again_share = again_share
        self._share, self._only, self._stop = share, only, stop
        self._seen: set[int] = set()
        self._worlds = 0
        self._nested = False

    def run(self, campaign: str, life: str) -> None:
        name = f"{life}:{campaign}"
        if not self._is_chosen(name):
            return
        with _without_chance(name):
            if campaign in ("crash", "again"):
                self._crash(name, life, again=campaign == "again")
            else:
                self._fail(name, life, burst=campaign == "burst")

    # Campaigns

    def _crash(self, name: str, life: str, *, again: bool) -> None:
        """Check the state after a crash at each call of a scenario."""
        world, disk = self._world(), FaultDisk()
        number = 0

        def watch(operation: str) -> None:
            nonlocal number
            number += 1
            self._strike(f"{name}:{number}:{operation}", world, disk, share=self._share, again=again)

        disk.watch = watch
        world.storage.watch = watch  # type: ignore[attr-defined]
        self._live(name, world, disk, LIVES[life], struck=False)
        self._let_go(world)

    def _fail(self, name: str, life: str, *, burst: bool) -> None:
        """Let each call of a scenario fail in turn, and check some crash states after the failure."""
        for nth in range(1, 1000):
            for variant in range(3):
                case = f"{name}:{nth}:{variant}"
                if not self._is_chosen(case) or not (self._only or self._chance(case) < self._share):
                    continue
                if not self._fail_at(case, life, nth, variant, burst=burst):
                    return
                if self._is_over():
                    return

    def _fail_at(self, case: str, life: str, nth: int, variant: int, *, burst: bool) -> bool:
        rng = random.Random(case)
        world, disk = self._world(), FaultDisk(chance=rng if variant else None)
        times = rng.randint(2, 8) if burst else 1
        kinds = rng.choices((errno.EIO, errno.ENOSPC, errno.EROFS), k=times)
        called = rng.choice(("unlink", "create", "sync", "sync_folder", "rename", "pwrite"))
        goes_on = (lambda _: True, lambda _: rng.random() < 0.5, lambda operation: operation == called)[variant]

        def error(operation: str) -> int | None:
            if disk.struck >= times or (disk.struck and not goes_on(operation)):
                return None
            possible = ERRORS[operation]
            kind = kinds[disk.struck] if burst else possible[variant % len(possible)]
            return kind if kind in possible else possible[0]

        disk.fail("*", nth=nth, times=None, error=error, torn=rng.random() < 0.5)
        later, again = {rng.randint(1, 4), rng.randint(5, 60)}, {rng.randint(1, 60)}
        calls = 0

        def watch(operation: str) -> None:
            nonlocal calls
            if disk.struck:
                calls += 1
                if calls in later:
                    self._strike(f"{case}:{calls}:{operation}", world, disk, all_units=False)
                if calls in again:
                    self._strike(f"{case}:then:{calls}:{operation}", world, disk, again=True, all_units=False)

        disk.watch = watch
        with _without_chance(case), self._telling(case):
            self._live(case, world, disk, LIVES[life], struck=True)
            if not disk.struck:
                self._let_go(world)
                return False
            self.tally.tried["bursts" if burst else "faults"] += 1
            disk.watch = None
            disk.clear()
            self._strike(f"{case}:end", world, disk, all_units=False)
            self._strike(f"{case}:then:end", world, disk, again=True, all_units=False)
            if world.service is not None:
                _finish(world)
                world.open(disk)
                _check(world)
                world.tidy()
                world.service.close(timeout_s=600)
        self._let_go(world)
        return True

    def _live(self, name: str, world: World, disk: FaultDisk, life: Callable[..., Any], *, struck: bool) -> None:
        """Run a scenario. With `struck`, its steps may raise typed errors."""
        failures: tuple[type[BaseException], ...] = (BackPressure, IndexClosed, StorageError) if struck else ()
        steps = life(world, disk)
        step: Callable[[], object] | None = None

        def opened() -> None:
            if world.service is None:
                world.open(disk)
            if world.unsettled:
                world.check()
                world.settle()

        with self._telling(name):
            seen = 0
            step = next(steps)  # the first step sets the arguments of `World.open`
            while step is not None:
                for act in (opened, step):
                    with contextlib.suppress(*failures):
                        if act is opened or (world.service is not None and not world.unsettled):
                            act()
                if disk.struck > seen and world.service is not None:
                    seen = disk.struck
                    if any(problem.startswith("log: ") for problem in world.service.health()["problems"]):
                        # it started without its storage, and says so until its life cycle has claimed the index
                        with contextlib.suppress(*failures):
                            world.service.run_lifecycle()
                    _check(world)
                step = next(steps, None)
            if not struck and world.service is not None:
                world.check()
                world.service.close(timeout_s=600)
                world.tidy()
                world.confirm()

    # One state

    def _strike(
        self, name: str, world: World, disk: FaultDisk, *, share: float = 1, again: bool = False, all_units: bool = True
    ) -> None:
        """Check the states after a kill and after power cuts at this moment.

        `again`: check second crashes during the recovery instead.
        """
        if self._is_over() or not self._is_chosen(name):
            return
        kinds: list[Kept | None] = [None, *KEPT]
        if not all_units:
            kinds = [None, *random.Random(name).sample(KEPT, 2)]
        for unit in kinds:
            case = f"{name}:{unit or 'kill'}"
            if not self._is_over() and self._is_chosen(case) and (self._only or self._chance(case) < share):
                with _without_chance(case):
                    self._look(case, world, disk, unit, again=again)

    def _look(self, case: str, world: World, disk: FaultDisk, unit: Kept | None, *, again: bool) -> None:
        branch, branch_disk = self._branch(world, disk)
        try:
            if unit is not None:
                branch_disk.lose_unsynced(random.Random(case), unit)
            if not self._only and not self._is_new(branch, branch_disk):
                return
            if again and not self._nested:
                with _without_chance(case):
                    self._open_struck(case, branch, branch_disk)
                return
            life, campaign = case.split(":")[:2]
            self.tally.tried[f"by cause: {'double crash' if self._nested else _CAUSES[campaign]}"] += 1
            self.tally.tried[f"by scenario: {life}"] += 1
            with self._telling(case):
                _come_back(branch, branch_disk)
        finally:
            self._let_go(branch)

    def _open_struck(self, case: str, world: World, disk: FaultDisk) -> None:
        """Open the index after a crash, continue to write, and check a second crash at each call."""
        number = 0

        def watch(operation: str) -> None:
            nonlocal number
            number += 1
            self._strike(f"{case}:{number}:{operation}", world, disk, share=self._again_share, all_units=False)

        self._nested = True
        disk.watch = watch
        try:
            with self._telling(case):
                world.open(disk)
                watch("opened")
                _check(world)
                world.settle()
                world.put(3)
                world.flush()
                watch("flushed")
                world.seal()
                world.run_lifecycle()
                watch("ended")
        finally:
            self._nested = False

    def _branch(self, world: World, disk: FaultDisk) -> tuple[World, FaultDisk]:
        """Return a copy of the world as after a crash at this moment, with its own disk and storage."""
        self._worlds += 1
        folder = self._folder / str(self._worlds)
        branch_disk = disk.copy(world.root.parent, folder)
        branch = World(folder, _copied(world.storage))
        branch.clock = ManualClock(world.clock.now_ms())
        branch.settings, branch.wild = dict(world.settings), world.wild
        branch.rule, branch.erasures = world.rule, list(world.erasures)
        branch.number, branch.position = world.number, world.position
        branch.model.entries = list(world.model.entries)
        declared = world.service.durable_position("log") if world.service is not None else None
        branch.durable_position = max(filter(None, (declared, world.durable_position)), default=None)
        known = {id(entry) for entry in world.durable.entries}
        branch.durable.entries = [
            e for e in world.model.entries if id(e) in known or (declared is not None and e.offset <= declared)
        ]
        return branch, branch_disk

    def _world(self) -> World:
        self._worlds += 1
        folder = self._folder / str(self._worlds)
        folder.mkdir()
        world = World(folder)
        world.settings["query_threads"] = 1
        world.storage = Watched(world.storage)
        return world

    def _let_go(self, world: World) -> None:
        with contextlib.suppress(Exception):
            world.abandon()
        shutil.rmtree(world.root.parent, ignore_errors=True)

    def _is_new(self, world: World, disk: FaultDisk) -> bool:
        counts = (world.durable_position, len(world.durable.entries), len(world.model.entries))
        digest = zlib.crc32(repr(counts).encode())
        for path in sorted(world.root.rglob("*")):
            if path.is_file():
                digest = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(world.root)).encode(), digest))
        for name, (data, *_) in world.storage._shelf.objects.items():  # type: ignore[attr-defined]
            digest = zlib.crc32(data, zlib.crc32(name.encode(), digest))
        # after a kill, a later power cut may lose unsynced bytes: such states differ even if their bytes are equal
        key = hash((digest, disk.has_unsynced))
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _is_chosen(self, name: str) -> bool:
        return not self._only or name.startswith(self._only) or self._only.startswith(name + ":")

    def _chance(self, name: str) -> float:
        return int.from_bytes(hashlib.blake2b(f"0 {name}".encode(), digest_size=8).digest()) / 2**64

    def _is_over(self) -> bool:
        return len(self.tally.failures) >= self._stop

    @contextlib.contextmanager
    def _telling(self, case: str) -> Iterator[None]:
        """Count an exception in the body as a failure of `case`."""
        try:
            with bounded(_HANG_S):
                yield
        except (Exception, Hang) as error:  # noqa: BLE001 - every exception is a failure
            self.tally.fail_by(error, f"python -m tests.reliability.crashes --only {case}")


def _come_back(world: World, disk: FaultDisk) -> None:
    """Open the index after a crash, check it, continue to write, and check it again."""
    if world.durable.entries:
        _check_reader(world)
    world.open(disk)
    _check(world)
    _check_reader(world)
    world.settle()
    world.put(6)
    world.flush()
    world.service.seal()
    world.service.run_lifecycle()
    _check(world)
    _check_reader(world)
    world.service.close(timeout_s=600)
    world.confirm()
    world.open(disk)
    _check(world)
    world.tidy()
    world.service.close(timeout_s=600)


def _finish(world: World) -> None:
    """After the disk has recovered, make all entries durable and upload them; `health` must then have no problems."""
    world.flush()
    world.service.seal()
    for _ in range(3):
        world.service.run_lifecycle()
    world.clock.advance(1000)
    world.service.run_lifecycle()
    _check(world)
    _check_reader(world)
    problems = world.service.health()["problems"]
    assert problems == [], problems
    world.service.close(timeout_s=600)
    world.service = None


def _check(world: World) -> None:
    world.check(_at_once(world.service))


def _check_reader(world: World) -> None:
    with IndexReader.open(root=world.root, storage_backend=world.storage, clock=world.clock, query_threads=1) as reader:
        world.check_answers(_at_once(reader))


def _at_once(index: Lookups) -> Callable[..., QueryResult]:
    """Return a function that answers a question. One batch looks up all questions."""
    results = index.query_many([Lookup(topic=topic, key=key, max_count=1000) for topic, key in QUESTIONS])
    answers = dict(zip(QUESTIONS, results, strict=True))
    return lambda topic, key, max_count: answers[topic, key]


def _copied(storage: Any) -> MemoryStorage:
    """Return a new storage with the same objects."""
    inner = storage.inner if isinstance(storage, WrapperStorage) else storage
    copy = MemoryStorage(clock=ManualClock(inner._clock.now_ms()))
    copy.uri = inner.uri
    # without leases, because the copied root would wait for the lease of the crashed one
    shelf = inner._shelf
    copy._shelf.objects = SortedDict(
        (name, stored) for name, stored in shelf.objects.items() if not name.startswith("lease/")
    )
    return copy


@contextlib.contextmanager
def _without_chance(name: str) -> Iterator[None]:
    """Make random names in the body depend only on `name`, so that each run has the same states."""
    drawn = random.Random(name)
    before, secrets.token_hex = secrets.token_hex, lambda nbytes=32: drawn.randbytes(nbytes).hex()  # type: ignore[misc]
    try:
        yield
    finally:
        secrets.token_hex = before


def _run(options: argparse.Namespace) -> Tally:
    share = SHARES if options.all else dict.fromkeys(CAMPAIGNS, options.share)
    works = [(campaign, life, share[campaign], options.only) for campaign in CAMPAIGNS for life in LIVES]
    total = Tally("crashes")
    with multiprocessing.Pool() as pool:
        for name, tally in pool.imap(_run_one, works, chunksize=1):
            total.add(tally)
            print(f"{name} {sum(tally.by_kind.values())} failures", file=sys.stderr, flush=True)
    total.tried = Counter(dict(sorted(total.tried.items())))
    return total


def _run_one(work: tuple[str, str, float, str]) -> tuple[str, Tally]:
    campaign, life, share, only = work
    logging.disable(logging.CRITICAL)  # the engine logs each injected fault
    tally = Tally("crashes")
    with fast_folder() as folder:
        Crashes(folder, tally, share=share, only=only).run(campaign, life)
    return f"{life}:{campaign}", tally


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    shares = ", ".join(f"{share:.0%} of {campaign}" for campaign, share in SHARES.items())
    help_text = f"the shares of docs/reliability.md: {shares}".replace("%", "%%")
    parser.add_argument("--all", action="store_true", help=help_text)
    parser.add_argument("--share", type=float, default=0.02, help="the share of all states to check")
    parser.add_argument("--only", default="", help="the name of a state, or the start of several names")


if __name__ == "__main__":
    raise SystemExit(main(__doc__ or "", _run, _add_arguments))
