"""The scheduler of the simulation: it runs one thread at a time, in an order that the seed decides.

    with Scheduler(seed) as scheduler:
        scheduler.run(main)          # main may start(threads), which are scheduled like it

Threads are real, but only one runs. Another one may run next when this one calls `pause` (the simulated disks and
storages do), takes a lock, or waits. Locks, queues and threads that the engine and `concurrent.futures` create while
the scheduler is active belong to it, so all waits are here. Those of other threads stay as they were. A wait with a
time-out ends without success only if no other thread can run: time passes when all threads wait. A `Process` is a set
of threads that can be killed. Each then raises `SimulatedCrash` at its present call, and at each later wait or call of
a simulated part. The seed also decides random names.

So a run is a function of its seed. Nothing in it may depend on the real time, on addresses, or on the order of a set of
strings.
"""

import _thread
import concurrent.futures.thread
import contextlib
import dataclasses
import gc
import hashlib
import queue
import random
import re
import secrets
import sys
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.disk_faults import SimulatedCrash
from tiered_index.base.threads import NoThread
from tiered_index.service.read import poller

_MAX_STEPS = 50_000
_REAL_S = 120.0
_here = threading.local()
_RealThread = threading.Thread
_REAL: dict[str, Any] = {"Lock": threading.Lock, "RLock": threading.RLock, "SimpleQueue": queue.SimpleQueue}


class Stuck(AssertionError):
    """No thread can run, or the run does not end."""

    kind = "hangs"


class _Over(BaseException):
    """The run is over: waiting threads end."""


class Process:
    """Threads that are killed together. `weight` is the relative frequency with which they run."""

    def __init__(self, name: str, weight: float = 1.0) -> None:
        self.name = name
        self.weight = weight
        self.dead = False
        self.tasks: list[_Task] = []
        self.actors: list[threading.Thread] = []  # threads that the simulation has started, not the engine


class _Task:
    """One thread, and the condition that it waits for (None: it does not wait)."""

    __slots__ = ("done", "expired", "gate", "name", "process", "ready", "thread", "timed")

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.gate = _REAL["Lock"]()
        self.gate.acquire()
        self.ready: Callable[[], object] | None = None
        self.timed = self.expired = self.done = False
        self.thread: threading.Thread | None = None

    def can_go_on(self) -> bool:
        return self.ready is None or self.process.dead or bool(self.ready())


class Scheduler:
    """Runs threads. `trace` has one line per step. `stay` is the chance that a thread continues at a pause."""

    def __init__(self, seed: int, *, stay: float = 0.5, locks: float = 0.0) -> None:
        """`locks` is the chance that another thread may run before a lock is taken."""
        self._random = random.Random(seed)
        self._names = random.Random(seed + 1)
        self._stay, self._locks = stay, locks
        self._tasks: list[_Task] = []
        self._started = 0
        self._over = False
        self._finished = _REAL["Lock"]()
        self._undo = contextlib.ExitStack()
        self.steps = 0
        self.trace: list[str] = []
        self.crash: BaseException | None = None  # the first error that ended a thread of a living process
        self.nothing = Process("nobody's")

    # Called from outside the simulation

    def run(self, main: Callable[[], None]) -> None:
        """Run `main`, and return when all threads have ended. Raises the error that ended a thread, `Stuck`."""
        self._finished.acquire()
        _SimThread(self, "main", self.nothing, main).start()
        self._tasks[0].gate.release()
        if not self._finished.acquire(timeout=_REAL_S):
            self._stuck("a thread waits for something that the scheduler doesn't know")
            raise self.crash
        for task in self._tasks:
            if task.thread is not None:
                _RealThread.join(task.thread)
        if self.crash is not None:
            raise self.crash

    @property
    def digest(self) -> str:
        """A short hash of the trace. Two runs of one seed have the same."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=8).hexdigest()

    def __enter__(self) -> "Scheduler":
        """Replace locks, queues, threads, the poller and random names.

        Garbage collection is disabled, because its moments do not depend on the seed.
        """
        if gc.isenabled():
            self._undo.callback(gc.enable)
            gc.disable()

        def change(holder: Any, name: str, replacement: Any) -> None:
            self._undo.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, replacement)

        def ours(real: Any, sim: Callable[[Scheduler], Any]) -> Callable[..., Any]:
            return lambda *arguments: sim(self) if _task() is not None else real(*arguments)

        make = {"Lock": ours(_REAL["Lock"], _Lock), "RLock": ours(_REAL["RLock"], _RLock)}
        make["SimpleQueue"] = ours(_REAL["SimpleQueue"], _Queue)
        change(threading, "Lock", make["Lock"])
        change(threading, "RLock", make["RLock"])
        change(threading, "_allocate_lock", make["Lock"])
        change(queue, "SimpleQueue", make["SimpleQueue"])
        change(threading, "Thread", _ThreadOrSim)
        change(concurrent.futures.thread, "_global_shutdown_lock", _Lock(self))
        change(secrets, "token_hex", self._token_hex(secrets.token_hex))
        change(uuid, "uuid4", self._uuid4(uuid.uuid4))
        change(poller, "_poller", _NoPoller())
        for cell, real in _factories():  # dataclasses keep the factories of their declaration
            self._undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
            cell.cell_contents = make[real]
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    # Called by simulated threads

    def start(self, process: Process, name: str, act: Callable[[], None]) -> None:
        """Start a thread of `process` that runs `act`."""
        process.actors.append(thread := _SimThread(self, name, process, act))
        thread.start()

    def pause(self, what: str) -> None:
        """Note a step. Another thread may run then."""
        me = _task()
        if me is not None:
            self.note(what)
            self._give_way(me)

    def note(self, what: str) -> None:
        """Add a line to the trace."""
        me = _task()
        self.trace.append(f"{me.name if me is not None else '-'} {what}")

    def wait(self, ready: Callable[[], object], *, timed: bool = False) -> bool:
        """Wait until `ready`, and return True. With `timed`, return False if no thread can run."""
        me = _task()
        self._raise_if_ended(me)
        if ready():
            return True
        me.ready, me.timed, me.expired = ready, timed, False
        try:
            while not ready():
                self._hand_on(me)
                if me.expired:
                    return False
        finally:
            me.ready, me.timed = None, False
        return True

    def sleep(self, steps: int) -> None:
        """Wait until other threads have made so many steps, or can make none."""
        until = self.steps + steps
        self.wait(lambda: self.steps >= until, timed=True)

    def kill(self, process: Process) -> None:
        """Kill a process, and wait until its threads have ended."""
        self.note(f"{process.name} ends")
        process.dead = True
        self.wait(lambda: all(task.done for task in process.tasks))

    def join(self, process: Process) -> None:
        """Wait until the threads that `start` has started in a process have ended, then kill it."""
        self.wait(lambda: not any(thread.is_alive() for thread in process.actors))
        self.kill(process)

    # Internal

    def at_lock(self) -> None:
        me = _task()
        runs = self._locks and me is not None and not self._over and not me.process.dead
        if runs and self._random.random() < self._locks:
            self._give_way(me)

    def begin(self, task: _Task) -> None:
        self._tasks.append(task)
        task.process.tasks.append(task)

    def end(self, task: _Task, error: BaseException | None) -> None:
        """End the running thread."""
        if error is not None and not isinstance(error, _Over) and not task.process.dead and not self._over:
            error.add_note(f"in {task.name}, at step {self.steps}")
            self.crash, self._over = error, True
        task.done = True
        if task is self._tasks[0]:
            self._over = True
        following = self._next(None)
        if following is None:
            self._finished.release()
        else:
            following.gate.release()

    def _give_way(self, me: _Task) -> None:
        self._raise_if_ended(me)
        self.steps += 1
        if self.steps > _MAX_STEPS:
            self._stuck("it never ends")
        if self._random.random() >= self._stay:
            self._hand_on(me)

    def _hand_on(self, me: _Task) -> None:
        following = self._next(me)
        if following is not me:
            following.gate.release()
            me.gate.acquire()
        self._raise_if_ended(me)

    def _next(self, me: _Task | None) -> _Task | None:
        """Return the thread that runs next."""
        left = [task for task in self._tasks if not task.done]
        if not left:
            return None
        if self._over:
            return left[-1] if me is None or me.done else me
        able = [task for task in left if task.can_go_on()]
        if not able:
            able = [task for task in left if task.timed]
            if not able:
                self._stuck("nobody can go on")
                return me or left[-1]
            chosen = self._random.choice(able)
            chosen.expired = True
            return chosen
        if len(able) == 1:
            return able[0]
        dying = next((task for task in able if task.process.dead), None)
        return dying or self._random.choices(able, [task.process.weight for task in able])[0]

    def _stuck(self, why: str) -> None:
        frames = sys._current_frames()
        stacks = [
            f"{task.name}:\n{''.join(traceback.format_stack(frames[task.thread.ident])[-12:])}"
            for task in self._tasks
            if not task.done and task.thread is not None and task.thread.ident in frames
        ]
        self.crash, self._over = Stuck(f"after {self.steps} steps {why}\n{''.join(stacks)}"), True

    def _raise_if_ended(self, me: _Task) -> None:
        if self._over:
            raise _Over
        if me.process.dead:
            raise SimulatedCrash(f"{me.process.name} was killed")

    def _token_hex(self, real: Callable[[int | None], str]) -> Callable[[int | None], str]:
        return lambda size=None: self._names.randbytes(size or 32).hex() if _task() is not None else real(size)

    def _uuid4(self, real: Callable[[], uuid.UUID]) -> Callable[[], uuid.UUID]:
        return lambda: uuid.UUID(bytes=self._names.randbytes(16), version=4) if _task() is not None else real()


def _task() -> _Task | None:
    return getattr(_here, "task", None)


class _SimThread(_RealThread):
    """A thread that runs when the scheduler selects it."""

    def __init__(self, scheduler: Scheduler, name: str, process: Process, act: Callable[[], None]) -> None:
        scheduler._started += 1
        self._number = scheduler._started
        with _outside():  # the start of a thread uses real locks
            super().__init__(name=name, daemon=True)
        self._scheduler = scheduler
        self._sim_task = _Task(f"{process.name}/{name}.{scheduler._started}", process)
        self._act = act

    def __hash__(self) -> int:
        """Return a number, because an executor joins a set of threads, and the order must not depend on addresses."""
        return self._number

    def start(self) -> None:
        self._sim_task.thread = self
        with _outside():
            super().start()
        self._scheduler.begin(self._sim_task)

    def run(self) -> None:
        task = self._sim_task
        task.gate.acquire()
        _here.task = task
        ended: BaseException | None = None
        try:
            if not self._scheduler._over and not task.process.dead:
                self._act()
        except BaseException as error:  # noqa: BLE001 - `Scheduler.run` raises it
            ended = error
        _here.task = None
        self._scheduler.end(task, ended)

    def is_alive(self) -> bool:
        return not self._sim_task.done

    def join(self, timeout: float | None = None) -> None:
        if _task() is None:
            super().join(timeout)
        else:
            self._scheduler.wait(lambda: self._sim_task.done, timed=timeout is not None)


class _ThreadOrSim(_RealThread):
    """Replaces `threading.Thread` during the simulation."""

    def __new__(cls, *positional: Any, **more: Any) -> Any:
        me = _task()
        if me is None:
            return _RealThread(*positional, **more)
        assert not positional
        target, args, kwargs = more.get("target"), more.get("args", ()), more.get("kwargs") or {}
        scheduler: Scheduler = me.thread._scheduler
        # an executor without a name has a number that counts all executors of the real process
        name = re.sub(r"^ThreadPoolExecutor-\d+", "executor", more.get("name") or "thread")
        return _SimThread(scheduler, name, me.process, lambda: target(*args, **kwargs))


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Make real locks, queues and threads in the block."""
    task, _here.task = _task(), None
    try:
        yield
    finally:
        _here.task = task


class _NoPoller:
    """Replaces the poller of the process, which counts real time and may have a thread since before the simulation.

    Each lookup that needs a newer state reads it by itself.
    """

    def look_at(self, state: object, pause_s: float) -> None:
        raise NoThread("the simulation has no poller")

    def forget(self, state: object) -> None:
        pass


class _Lock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking:
            self._scheduler.at_lock()
        if self._held:
            if not blocking:
                return False
            if _task() is None:
                raise RuntimeError("a lock of the simulation is held, but the simulation does not run")
            if not self._scheduler.wait(lambda: not self._held, timed=timeout >= 0):
                return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._held = False


class _RLock(_Lock):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner == (me := _thread.get_ident()):
            self._depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        if self._owner != _thread.get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()

    # methods that a condition calls

    def _is_owned(self) -> bool:
        return self._owner == _thread.get_ident()

    def _release_save(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        super().release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        super().acquire()
        self._owner, self._depth = _thread.get_ident(), depth


class _Queue:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and not (block and self._scheduler.wait(lambda: self._items, timed=timeout is not None)):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


def _factories() -> list[tuple[Any, str]]:
    """Return the cells of the engine's dataclasses with factories of locks or queues, and the factories' names."""
    names = {id(real): name for name, real in _REAL.items()}
    cells = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("tiered_index."):
            for member in vars(module).values():
                if dataclasses.is_dataclass(member) and isinstance(member, type):
                    for cell in getattr(member.__init__, "__closure__", None) or ():
                        if id(cell.cell_contents) in names:
                            cells[id(cell)] = (cell, names[id(cell.cell_contents)])
    return list(cells.values())
