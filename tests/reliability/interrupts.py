"""Interrupts of calls at random moments. No durable entry may be lost, and no position may be ahead of its entries.

A timer's signal raises `KeyboardInterrupt` or `MemoryError` in the caller's thread, while background workers run. After
an interrupted lookup, merge or erasure the index must continue. After another interrupted call a further one either
succeeds or raises `IndexClosed` and says what to do. Then the index must close and end its threads within 10 seconds,
and open again at once. Its answers must have all durable entries, and only entries that were put.

example: `python -m tests.reliability.interrupts --lives 30 --interrupts 200`
"""

import argparse
import contextlib
import gc
import itertools
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tests.reliability.lives import merge_seconds
from tests.reliability.tally import Hang, Tally, fast_folder, main
from tests.reliability.world import NOW_MS, QUESTIONS, World
from tests.stress.census import begin_census, engine_threads
from tests.support import disk_faults
from tests.support.batches import columns_of
from tests.support.disk_faults import FaultDisk
from tiered_index import IndexReader
from tiered_index.errors import CloseTimeout, IndexClosed
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.log.log import StorageLog
from tiered_index.storage import memory
from tiered_index.types import Lookup

CLOSE_S = 10.0
_HANG_S = 60.0


class Life(World):
    """One index, its entries, and its calls."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.settings |= {"background": True, "flush_interval_s": 0.003, "lifecycle_interval_s": 0.005, "items": 60}
        self.settings["refresh_interval_s"] = 0
        self.disk = FaultDisk()
        self.are_interrupted = True

    def reopen(self) -> None:
        self.open(self.disk)

    def put(self, count: int = 1) -> None:
        for _ in range(count):
            with self.repeated():
                message = self.message()
                self.model.put(*message)
                self._count_position()
                self.service.put(*message, source="log", source_position=self.number)

    def put_batch(self) -> None:
        with self.repeated():
            messages = [self.message() for _ in range(3)]
            for message in messages:
                self.model.put(*message)
            self._count_position()
            rows = [(topic, queue_id, key, *more) for topic, queue_id, keys, *more in messages for key in keys]
            self.service.put_batch(columns_of(rows), source="log", source_position=self.number)

    def _count_position(self) -> None:
        # an interrupted batch may have been accepted, and is put again message by message
        self.position = max(self.position, self.number)

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """After an error, let the next call put the same messages again, as a source does."""
        number = self.number
        try:
            yield
        except BaseException:
            self.number = number
            raise

    def archive(self) -> None:
        self.service.archive("store", 0, 4096, lambda position, length: bytes(length), modified_ms=1)

    def merge(self) -> None:
        self.clock.advance(max(0, self.number + 5 - (self.clock.now_ms() - NOW_MS) / 1000))
        merge_seconds(self)

    def erase(self) -> None:
        request = EraseRequest("orders", ("a",), before_ms=NOW_MS + self.number // 2 * 1000)
        self.erasures.append(request)
        log = StorageLog(self.storage, self.clock)
        log.open()
        erase(self.storage, log, request, self.clock, yes=True, now=self.number % 2 == 0, grace_s=0, threads=1)

    def query(self) -> None:
        self.service.query("orders", "a", max_count=1000)

    def query_many(self) -> None:
        list(self.service.query_many([Lookup(topic=topic, key=key) for topic, key in QUESTIONS]))

    def look(self) -> None:
        service = self.service
        service.health(), service.files(), service.topics(), service.durable_positions(), service.archived()

    def reader(self) -> None:
        settings = {"query_threads": 2, "background": False}
        with IndexReader.open(root=self.root, storage_backend=self.storage, **settings) as reader:
            reader.query("orders", "a", max_count=1000)

    def close(self) -> None:
        # after an interrupt a close has two seconds, and on a busy machine its last threads need more
        with contextlib.suppress(CloseTimeout):
            self.service.close()


WRITING = ("put", "put", "put", "put_batch", "flush", "seal", "run_lifecycle", "archive")
JOBS = ("merge", "erase")
LOOKUPS = ("query", "query_many", "look", "reader")
_OTHER_SYSTEMS = (disk_faults.__file__, memory.__file__)


class Timer:
    """Raises an error in the main thread, which must be the caller's, at a random moment of a call."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._error: type[BaseException] | None = None
        # the last duration of each call
        self._took_s: defaultdict[str, float] = defaultdict(lambda: 0.001)

    def ring(self, number: int, frame: FrameType | None) -> None:
        if (error := self._error) is None:
            return
        caller = frame
        while caller is not None and caller.f_code.co_filename not in _OTHER_SYSTEMS:
            caller = caller.f_back
        if caller is not None:
            # the error's traceback would hold the lock of the simulated disk, and a server has processes of its own; a
            # shorter wait may end before this call does, and the next one again
            signal.setitimer(signal.ITIMER_REAL, 5e-4)
            return
        self._error = None
        raise error

    def interrupts(self, life: Life, call: str) -> bool:
        """Make a call of `life`, and return whether it was interrupted."""
        began_s = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-5, 1.2 * self._took_s[call] * self._rng.random()))
            self._error = self._rng.choice((KeyboardInterrupt, KeyboardInterrupt, MemoryError))
            getattr(life, call)()
            self._error = None
        except (KeyboardInterrupt, MemoryError):
            # longer calls are tried at later moments, too
            self._took_s[call] *= 1.5
            return True
        except (RuntimeError, KeyError) as error:
            # Python's own waits and starts of threads fail to clean up after an interrupt
            is_pythons = "lock" in str(error) or "Thread" in str(error)
            if not is_pythons or not isinstance(error.__context__, KeyboardInterrupt | MemoryError):
                raise
            return True
        finally:
            self._error = None
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._took_s[call] = time.monotonic() - began_s
        return False

    @contextlib.contextmanager
    def bounded(self, seconds: float) -> Iterator[None]:
        """Raise `Hang` if the block takes longer than `seconds`."""
        self._error = Hang
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            self._error = None
            signal.setitimer(signal.ITIMER_REAL, 0)


def strike(folder: Path, seed: int, interrupts: int, tally: Tally) -> None:
    """Use one index until so many of its calls were interrupted (`interrupts`)."""
    begin_census()
    # an interrupt of an import can leave Python's lock of imports held
    prepared = Life(folder / "prepared")
    for call in ("reopen", *dict.fromkeys(WRITING), *JOBS, *LOOKUPS, "close"):
        getattr(prepared, call)()
    rng = random.Random(seed)
    timer, life = Timer(rng), Life(folder)
    most = tally.tried.total() + interrupts
    before = signal.signal(signal.SIGALRM, timer.ring)
    try:
        while tally.tried.total() < most:
            _one_life(timer, life, rng, tally)
    except (Exception, Hang) as error:  # noqa: BLE001 - every exception is a finding
        tally.fail_by(error, f"seed {seed}")
    finally:
        signal.signal(signal.SIGALRM, before)
        if life.service is not None:
            life.service.abandon()


def _one_life(timer: Timer, life: Life, rng: random.Random, tally: Tally) -> None:
    """Open the index, make calls until one that writes is interrupted, and close it, with checks."""
    life.service = None
    while timer.interrupts(life, "reopen"):
        tally.tried["interrupted calls: open"] += 1
        life.service = None
    with timer.bounded(_HANG_S):
        life.check()
        life.settle()
    for _ in itertools.repeat(None, rng.randrange(1, 30)):
        call = rng.choice((*WRITING, *JOBS, *LOOKUPS))
        if not timer.interrupts(life, call):
            continue
        tally.tried[f"interrupted calls: {call}"] += 1
        with timer.bounded(_HANG_S):
            if call in JOBS + LOOKUPS:
                life.check_answers()
                continue
            try:
                life.put()
            except IndexClosed as error:
                assert str(error) == IndexClosed.INTERRUPTED, error
                tally.tried["indexes that refused further calls"] += 1
        break
    if timer.interrupts(life, "close"):
        tally.tried["interrupted calls: close"] += 1
    with timer.bounded(CLOSE_S):
        life.close()
        until_s = time.monotonic() + CLOSE_S
        while threads := engine_threads():
            # those of an interrupted opening end with its objects. A signal within this call would be lost
            gc.collect()
            time.sleep(0.001)
            if time.monotonic() > until_s:
                raise Hang(f"threads of a closed index go on: {', '.join(thread.name for thread in threads)}")
    life.disk.lose_unsynced()


def run(options: argparse.Namespace) -> Tally:
    tally = Tally("interrupts")
    with fast_folder() as folder:
        for number in range(options.lives):
            strike(folder / f"{number}", options.seed + number, options.interrupts, tally)
    return tally


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="decides the calls and, nearly, the moments of signals")
    parser.add_argument("--lives", type=int, default=10, help="number of indexes")
    parser.add_argument("--interrupts", type=int, default=1_000, help="interrupted calls of each index")


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run, add_arguments))
