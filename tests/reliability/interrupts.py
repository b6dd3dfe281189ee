"""Interrupts at every line of every public call, in many states of an index. No durable entry may be lost.

There are three ways:

- A trace function raises `KeyboardInterrupt` or `MemoryError` in the caller's thread, at line n of a call. It does so
  for every n, but at most twice for each line of code.
- It raises `MemoryError` at line n of the service's own threads, while they work for the call. (No signal handler runs
  in these threads, but memory may be exhausted.)
- A real timer signal interrupts calls at random moments, while background workers run.

After each interrupt the index must continue in the same process, close in a bounded time, and open again at once. Its
answers must have all durable entries, and only entries that were put.

examples:

- `python -m tests.reliability.interrupts --all`: every line of every call in every state
- `python -m tests.reliability.interrupts --stride 17`: every 17th line
- `python -m tests.reliability.interrupts --only flush/half full/engine/120`: the interrupt that a failure names
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import functools
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.reliability.tally import Tally, main
from tests.reliability.world import QUESTIONS, World
from tests.support.batches import columns_of
from tests.support.disk_faults import FaultDisk
from tiered_index import IndexReader, IndexService
from tiered_index.errors import TieredIndexError
from tiered_index.types import Lookup

HANG_S = 30.0
# each line of a loop is interrupted this often
_OFTEN = 2
# parts of the campaign; each process runs one at a time
_PARTS = 48
PACKAGE = str(Path(sys.modules["tiered_index"].__file__ or "").parent)
# modules that replace a real storage or clock
_STAND_INS = tuple(f"{PACKAGE}/{part}" for part in ("storage/memory.py", "clock.py"))


class Hang(BaseException):
    """A call took longer than its bound."""


@contextlib.contextmanager
def bounded(seconds: float = HANG_S) -> Iterator[None]:
    """Raise `Hang` in the main thread, which must be the caller's, if the block takes longer than `seconds`."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def never_struck(code: CodeType) -> frozenset[int]:
    """Return the offsets of the lines at which no exception can occur: ``try:``, and the end of a `with` block.

    Python runs no signal handler there and needs no memory. So code may rely on it: after the last instruction of a
    block without an error, the lock is released.
    """
    instructions = list(dis.get_instructions(code))
    found = {i.offset for i in instructions if i.opname == "NOP"}
    for at in range(len(instructions)):
        three = instructions[at : at + 3]
        if len(three) == 3 and all(i.opname == "LOAD_CONST" and i.argval is None for i in three):
            found.update(i.offset for i in three)
            if at and instructions[at - 1].opname == "SWAP":
                found.add(instructions[at - 1].offset)
    return frozenset(found)


class Striker:
    """Raises `error` at the n-th line of the package that runs, in the caller's thread or in the engine's (`ours`)."""

    def __init__(self, line: int, error: type[BaseException], *, ours: bool, everywhere: bool) -> None:
        self.target = line
        self.error = error
        self.ours, self.everywhere = ours, everywhere
        self.armed = False
        self.struck = ""
        self.seen: list[tuple[str, int]] = []

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not self.armed or not name.startswith(PACKAGE) or name.startswith(_STAND_INS):
            return None
        if self.ours and not threading.current_thread().name.startswith("tiered-index-"):
            return None
        if self.ours and name.endswith("/threads/__init__.py"):
            return None  # the loops of these threads need no memory
        return self.line

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event != "line" or not self.armed:
            return self.line
        if not self.everywhere and frame.f_lasti in never_struck(frame.f_code):
            return self.line
        self.seen.append((frame.f_code.co_filename, frame.f_lineno))
        if len(self.seen) == self.target:
            self.armed = False
            self.struck = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
            raise self.error("struck")
        return self.line

    @contextlib.contextmanager
    def striking(self) -> Iterator[None]:
        self.armed = True
        if not self.ours:
            sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)
            self.armed = False


class Life(World):
    """One index and its entries. `accepted` has the entries of puts that returned."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder)
        self.settings |= settings
        self.disk = FaultDisk()
        self.accepted: list[Any] = []

    def open(self) -> IndexService:
        return super().open(self.disk)

    def put(self, count: int = 1) -> None:
        for _ in range(count):
            before = len(self.model.entries)
            super().put(1)
            self.accepted += self.model.entries[before:]

    def put_batch(self) -> None:
        before, messages = len(self.model.entries), [self.message() for _ in range(3)]
        for message in messages:
            self.model.put(*message)
        rows = [(topic, queue_id, key, *more) for topic, queue_id, keys, *more in messages for key in keys]
        self.service.put_batch(columns_of(rows), source="log", source_position=self.number)
        self.accepted += self.model.entries[before:]

    def failing_flush(self) -> None:
        self.disk.fail("sync", times=4)
        with contextlib.suppress(TieredIndexError):
            self.flush()
        self.disk.clear()

    def confirm(self) -> None:
        self.durable.entries = list(self.accepted)

    def close(self) -> None:
        self.service.close()
        self.confirm()

    def reopen(self) -> None:
        self.close()
        self.service = None
        self.open()

    def archive(self) -> None:
        self.service.archive("store", 0, 4096, lambda position, length: bytes(length), modified_ms=1)

    def query(self) -> None:
        self.service.query("orders", "a", max_count=1000)

    def query_many(self) -> None:
        list(self.service.query_many([Lookup(topic=topic, key=key) for topic, key in QUESTIONS]))

    def look(self) -> None:
        it = self.service
        it.health(), it.files(), it.durable_positions(), it.durable_position("log"), it.archived()

    def reader(self) -> None:
        settings = {"query_threads": 2, "background": False}
        with IndexReader.open(root=self.root, storage_backend=self.storage, **settings) as reader:
            reader.refresh()
            reader.query("orders", "a", max_count=1000)


WRITING = ("put", "put_batch", "flush", "seal", "close", "run_lifecycle", "reopen", "abandon", "archive")
CALLS = (*WRITING, "query", "query_many", "look", "reader")
# the steps to each state
STATES = {
    "empty": "",
    "buffered": "4",
    "half full": "3 flush 2",
    "about to roll": "5 flush 8",
    "quarantined": "10 flush 1",
    "sealed": "4 seal 2",
    "uploaded": "9 seal run_lifecycle 3 flush",
    "failed": "2 flush 2 failing_flush",
}
WAYS = {
    # writing calls are interrupted at every line, also at those of `never_struck`
    "interrupt": (KeyboardInterrupt, False),
    "memory": (MemoryError, False),
    "engine": (MemoryError, True),
}


def strike(folder: Path, state: str, call: str, way: str, line: int, tally: Tally) -> list[tuple[str, int]]:
    """Use one index, with an interrupt at a line of the call (0: nowhere). Return the lines that ran before it."""
    error, ours = WAYS[way]
    life, where = Life(folder), f"{call}/{state}/{way}/{line}"
    striker = Striker(line, error, ours=ours, everywhere=not ours and call in WRITING)
    if ours:
        threading.settrace(striker.trace)
    try:
        with bounded():
            life.open()
            life.do(STATES[state])
            try:
                with striker.striking():
                    getattr(life, call)()
            except error:
                pass
            striker.armed = False
            if not striker.struck:
                return striker.seen
            tally.tried[f"interrupted lines: {way}"] += 1
            _go_on(life, call, told=ours)
    except Hang:
        tally.fail("hangs", f"{where} at {striker.struck}")
    except AssertionError as wrong:
        tally.fail(_kind(wrong), f"{wrong}; {where} at {striker.struck}")
    except BaseException as error:
        tally.fail("untyped", f"{type(error).__name__}: {error}; {where} at {striker.struck}")
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
        if life.service is not None:
            with contextlib.suppress(BaseException), bounded(5):
                life.service.abandon()
        shutil.rmtree(folder, ignore_errors=True)
    return striker.seen


def _kind(wrong: AssertionError) -> str:
    return "lost" if "are gone" in str(wrong) else "wrong"


def _go_on(life: Life, call: str, *, told: bool) -> None:
    """Continue after an interrupt, close, cut the power, and open again, with a check after each step.

    `told`: the call itself raised the error.
    """
    if life.service is not None and not life.service._closed:
        before = life.service.durable_position("log") or 0
        life.put(2)
        life.check_answers()
        life.flush()
        assert (life.service.durable_position("log") or 0) >= before, "a durable position went back"
        assert life.service.health()["buffered_entries"] == 0, "entries are left in the buffer"
        life.check_answers()
        life.seal()
        life.service.run_lifecycle()
        life.check_answers()
    if life.service is not None and told and life.service._closed:
        life.service.close()  # the call's error reported the entries that could not be flushed
    elif life.service is not None and call != "abandon":
        life.close()
    elif life.service is not None:
        life.service.abandon()
    life.disk.lose_unsynced()
    life.open()
    life.check_answers()
    life.accepted = list(life.durable.entries)  # entries that are not durable may be lost
    life.put(1)
    life.seal()
    life.service.run_lifecycle()
    life.check_answers()
    life.close()
    with IndexReader.open(storage_backend=life.storage, query_threads=2) as reader:
        life.check_answers(reader.query)


def lines_to_strike(seen: list[tuple[str, int]], often: int) -> list[int]:
    """Return the numbers of the lines of a call to interrupt: each line of code at most `often` times."""
    times: Counter[tuple[str, int]] = Counter()
    numbers = []
    for number, line in enumerate(seen, 1):
        times[line] += 1
        if times[line] <= often:
            numbers.append(number)
    return numbers


def strike_lines(
    folder: Path, first: int, stride: int, tally: Tally, calls: tuple[str, ...] = CALLS, share: int = 1
) -> None:
    """Interrupt every `stride`-th line of `lines_to_strike`, for one in `share` of the combinations.

    A combination is a call, a state and a way. Each starts at another line.
    """
    for number, (call, state, way) in enumerate(itertools.product(calls, STATES, WAYS)):
        if number % share != first % share:
            continue
        seen = strike(folder / f"{number}", state, call, way, 0, tally)
        for line in lines_to_strike(seen, _OFTEN)[(first + 7 * number) % stride :: stride]:
            strike(folder / f"{number}-{line}", state, call, way, line, tally)


def strike_by_signals(folder: Path, seed: int, signals: int, tally: Tally) -> None:
    """Interrupt calls at random moments by so many real timer signals (`signals`), while background workers run."""
    rng = random.Random(seed)
    life = Life(folder, background=True, flush_interval_s=0.003, lifecycle_interval_s=0.005, items=60)
    armed = False

    def ring(number: int, frame: FrameType | None) -> None:
        if armed:
            raise KeyboardInterrupt

    names = ["put", "put", "put", "put_batch", "flush", "seal", "run_lifecycle", "query", "query_many", "look"]
    most = tally.tried["signals"] + signals
    before = signal.signal(signal.SIGALRM, ring)
    try:
        while tally.tried["signals"] < most:
            if life.service is None or life.service._closed:
                if life.service is not None:
                    life.close()
                life.open()
                life.check_answers()
            name = rng.choice([*names, "close", "reopen"] if rng.random() < 0.2 else names)
            signal.setitimer(signal.ITIMER_REAL, rng.choice((1e-5, 1e-4, 1e-3)) * (0.1 + rng.random()))
            armed = True
            try:
                getattr(life, name)()
                armed = False
            except KeyboardInterrupt:
                armed = False
                tally.tried["signals"] += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            if name == "close":
                life.close()
        if life.service is not None:
            life.close()
        life.open()
        life.check_answers()
        life.close()
    except AssertionError as wrong:
        tally.fail(_kind(wrong), f"{wrong}; signals, seed {seed}")
    except Exception as error:  # noqa: BLE001 - every exception is a finding
        tally.fail("untyped", f"{type(error).__name__}: {error}; signals, seed {seed}")
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if life.service is not None:
            with contextlib.suppress(BaseException), bounded(5):
                life.service.abandon()


def run(options: argparse.Namespace) -> Tally:
    """Run the campaign with the options."""
    tally = Tally("interrupts")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        if options.only:
            call, state, way, line = options.only.split("/")
            strike(Path(folder) / "only", state, call, way, int(line), tally)
            return tally
        with multiprocessing.Pool(options.jobs) as pool:
            parts = [(options, Path(folder) / f"part-{number}", number) for number in range(_PARTS)]
            for part in pool.imap_unordered(_run_part, parts, chunksize=1):
                tally.add(part)
        for number in range(options.signal_lives):
            strike_by_signals(Path(folder) / f"signals-{number}", options.seed + number, options.signals, tally)
    return tally


def _run_part(part: tuple[argparse.Namespace, Path, int]) -> Tally:
    options, folder, number = part
    logging.disable(logging.CRITICAL)  # the engine logs each injected fault
    folder.mkdir()
    tally = Tally("interrupts")
    stride, first = 1 if options.all else options.stride, options.seed * _PARTS + number
    strike_lines(folder, first, stride, tally, tuple(options.calls.split(",")), _PARTS)
    print(f"part {number}: {sum(tally.found.values())} failures", file=sys.stderr, flush=True)
    return tally


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--all", action="store_true", help="every line")
    parser.add_argument("--stride", type=int, default=37, help="interrupt one line in so many")
    parser.add_argument("--seed", type=int, default=1, help="decides the first lines and the moments of signals")
    parser.add_argument("--calls", default=",".join(CALLS), help="names of calls, with commas between them")
    parser.add_argument("--only", default="", metavar="CALL/STATE/WAY/LINE", help="repeat one interrupt")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of parallel processes")
    parser.add_argument("--signal-lives", type=int, default=10, help="indexes that are interrupted by signals")
    parser.add_argument("--signals", type=int, default=2_000, help="signals for each index")


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run, add_arguments))
