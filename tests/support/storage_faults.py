"""A storage with scripted faults, and one with a latency: the storage half of the fault layer.

    faulty = FaultStorage(MemoryStorage())
    faulty.fail("put_if_absent", nth=2, when="after")     # the second one acts, but its response is lost.
    faulty.corrupt("get_range", mode="wrong")             # the next one returns a flipped bit.
    hang = faulty.hang("put")                             # the next one waits. hang.entered, hang.release
    faulty.meanwhile("list", act)                         # others act before the next one

Operations are the names of `Storage`'s methods, or ``*`` for any. A stream's are `write`, and `put` for its end. `nth`
counts matching calls from now on (1: the next). `times` is the number of failures in a row (None: all from then on). A
listing is one call per page.

Threads: any number. Each script still acts on exactly `times` calls.
"""

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast

from tiered_index.errors import StorageUnavailable
from tiered_index.storage.base import Bytes, Storage, StorageRequest, WrapperStorage


@dataclass(slots=True)
class FaultTrigger:
    """Lets `skip` calls of an operation (``*``: any) pass, and acts on the next `times` (None: all from then on)."""

    operation: str
    skip: int
    times: int | None

    def strikes(self, operation: str) -> bool:
        """Count a call of `operation` if it matches. Return whether the script acts on it."""
        if self.operation not in {operation, "*"}:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is None:
            return True
        self.times -= 1
        return self.times >= 0


_T = TypeVar("_T")
_Trigger = TypeVar("_Trigger", bound=FaultTrigger)


class Faults(Generic[_Trigger]):
    """The scripts of a storage or a disk, and the number of calls of each operation. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._scripts: list[_Trigger] = []
        self._calls: Counter[str] = Counter()

    def clear(self) -> None:
        """Forget all scripts. Calls that hang continue to hang, and a crashed disk stays crashed."""
        with self._lock:
            self._scripts.clear()

    def calls(self, operation: str = "*") -> int:
        """Return the number of calls of `operation` so far, with and without faults."""
        with self._lock:
            return self._calls.total() if operation == "*" else self._calls[operation]

    def _add(self, script: _Trigger) -> None:
        if script.skip < 0:
            raise ValueError("nth counts from 1")
        with self._lock:
            self._scripts.append(script)


_LONGEST_HANG_S = 60.0


class Hang:
    """A delayed call. It sets `entered` when it arrives, and continues when `release` is set (or fails after 60 s)."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()


@dataclass(slots=True)
class _Script(FaultTrigger):
    name_prefix: str = ""
    before: Callable[[StorageRequest], None] | None = None
    after: Callable[[StorageRequest], None] | None = None
    mangle: Callable[[bytes], bytes] | None = None
    unconditional: bool = False


class FaultStorage(Faults[_Script], WrapperStorage):
    """`inner`, with scripted faults."""

    def __init__(self, inner: Storage) -> None:
        Faults.__init__(self)
        WrapperStorage.__init__(self, inner)

    def fail(
        self,
        operation: str,
        *,
        nth: int = 1,
        times: int | None = 1,
        when: Literal["before", "after"] = "before",
        error: Callable[[str], Exception] = StorageUnavailable,
        name_prefix: str = "",
    ) -> None:
        """Raise `error(text)` before the call acts, or after it (the response was lost)."""

        def strike(call: StorageRequest) -> None:
            raise error(f"scripted fault {when} {call.operation} of {call.name!r}")

        moments = (strike, None) if when == "before" else (None, strike)
        self._add(_Script(operation, nth - 1, times, name_prefix, *moments))

    def corrupt(
        self,
        operation: str,
        *,
        mode: Literal["short", "long", "wrong"] = "wrong",
        nth: int = 1,
        times: int | None = 1,
        name_prefix: str = "",
    ) -> None:
        """Let a read return one byte less, one byte more, or one flipped bit in its middle."""
        self._add(_Script(operation, nth - 1, times, name_prefix, mangle=_MANGLES[mode]))

    def hang(self, operation: str, *, nth: int = 1, times: int | None = 1, name_prefix: str = "") -> Hang:
        """Delay a call before it acts."""
        hang = Hang()

        def wait(call: StorageRequest) -> None:
            hang.entered.set()
            if not hang.release.wait(_LONGEST_HANG_S):
                raise StorageUnavailable(f"scripted hang of {call.operation} was never released")

        self._add(_Script(operation, nth - 1, times, name_prefix, before=wait))
        return hang

    def meanwhile(
        self,
        operation: str,
        act: Callable[[], object],
        *,
        nth: int = 1,
        times: int | None = 1,
        when: Literal["before", "after"] = "before",
        name_prefix: str = "",
    ) -> None:
        """Let `act` run before a call acts, or between it and its response."""

        def run(_: StorageRequest) -> None:
            act()

        moments = (run, None) if when == "before" else (None, run)
        self._add(_Script(operation, nth - 1, times, name_prefix, *moments))

    def ignore_put_if_absent(self) -> None:
        """Let put-if-absent overwrite the object and succeed, as on servers without the condition."""
        self._add(_Script("put_if_absent", 0, None, unconditional=True))

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Do as the inner storage does, unless a script ignores the condition."""

        def act(struck: list[_Script]) -> None:
            ignored = any(script.unconditional for script in struck)
            (self.inner.put if ignored else self.inner.put_if_absent)(name, data)

        self._strike(StorageRequest("put_if_absent", name, sent_bytes=memoryview(data).nbytes), act)

    def _around(self, call: StorageRequest, act: Callable[[], _T]) -> _T:
        return self._strike(call, lambda _: act())

    def _match(self, call: StorageRequest) -> list[_Script]:
        """Count a call, and return the scripts that act on it. A simulated client records them."""
        with self._lock:
            self._calls[call.operation] += 1
            scripts = [script for script in self._scripts if call.name.startswith(script.name_prefix)]
            return [script for script in scripts if script.strikes(call.operation)]

    def _strike(self, call: StorageRequest, act: Callable[[list[_Script]], _T]) -> _T:
        struck = self._match(call)
        for script in struck:
            if script.before:
                script.before(call)
        result = act(struck)
        for script in struck:
            if script.mangle:
                result = _mangled(result, script.mangle)
            if script.after:
                script.after(call)
        return result


def _mangled(result: _T, mangle: Callable[[bytes], bytes]) -> _T:
    if isinstance(result, bytes):
        return cast(_T, mangle(result))
    if isinstance(result, tuple) and result and isinstance(result[0], bytes):  # get_suffix
        return cast(_T, (mangle(result[0]), *result[1:]))
    raise TypeError(f"only reads of bytes can be corrupted, not an answer of {type(result).__name__}")


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :] if data else data


_MANGLES: dict[str, Callable[[bytes], bytes]] = {
    "short": lambda data: data[:-1],
    "long": lambda data: data + b"\0",
    "wrong": _flip,
}


class LateRecords(FaultStorage):
    """While `delayed`, a log record does not arrive, and its writer gets no answer. `held` is the last such record."""

    delayed = False
    held: tuple[str, bytes]

    def put_if_absent(self, name: str, data: Bytes) -> None:
        if self.delayed and name.startswith("log/"):
            self.held = name, bytes(data)
            raise StorageUnavailable("no answer")
        super().put_if_absent(name, data)

    def arrive(self) -> None:
        """Let the held record arrive."""
        self.inner.put_if_absent(*self.held)


class Lent(WrapperStorage):
    """`inner`, which stays open when one of its users closes it."""

    def close(self) -> None:
        """Leave it open."""


class Watched(WrapperStorage):
    """Calls `watch` with the operation before each call that changes the storage: a crash would leave this state."""

    watch: Callable[[str], object] | None = None

    def _around(self, call: StorageRequest, act: Callable[[], _T]) -> _T:
        if self.watch is not None and call.operation in ("put", "put_if_absent", "write", "delete_many"):
            self.watch(call.operation)
        return act()


class LatencyStorage(WrapperStorage):
    """Waits before each call that sends a request, for a lognormal time with median `median_ms` milliseconds.

    `sigma` is the standard deviation of the logarithm. `seed` decides the sequence of waits. `sleep` gets seconds.
    """

    def __init__(
        self, inner: Storage, seed: int, median_ms: float, sigma: float, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)
        self._mu = math.log(median_ms / 1000)
        self._sigma = sigma
        self._sleep = sleep
        self._lock = threading.Lock()

    def _around(self, call: StorageRequest, act: Callable[[], _T]) -> _T:
        if call.requests:
            with self._lock:
                wait_s = self._random.lognormvariate(self._mu, self._sigma)
            self._sleep(wait_s)
        return act()
