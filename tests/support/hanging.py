"""Calls that may hang, in a thread beside the test, and bounded waits for other threads."""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any


def until(met: Callable[[], object], *, within_s: float = 120, every_s: float = 0.001) -> None:
    """Wait until the condition is true."""
    end_s = time.monotonic() + within_s
    while not met():
        assert time.monotonic() < end_s
        time.sleep(every_s)


def stacks() -> str:
    """Return what each thread of the process does, to find out why a call hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame)[-14:])}" for ident, frame in frames)


class Beside:
    """A call in a thread of its own. `ended` says whether it has ended, `error` and `value` are its result."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()

    def ended(self, timeout_s: float = 60.0) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __call__(self) -> Any:
        """Wait for the call to end, and return its value or raise its error."""
        assert self.ended(120), f"it hangs: {stacks()}"
        return self.value if self.error is None else self.error

    def _run(self, act: Callable[[], Any]) -> None:
        try:
            self.value = act()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error


beside = Beside


class Crew:
    """Calls in threads of their own, until they end or `stop` is set. The first error sets it; `finish` raises it."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._workers: list[Beside] = []

    def begin(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run `work(*arguments)` in a thread."""

        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException:
                self.stop.set()
                raise

        self._workers.append(Beside(guarded))

    def finish(self) -> None:
        """Stop all threads and wait for them."""
        self.stop.set()
        for worker in self._workers:
            assert worker.ended(170), "it hangs"
        for error in (worker.error for worker in self._workers if worker.error is not None):
            raise error
