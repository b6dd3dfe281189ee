"""Calls that may hang, made beside a test, and bounded waits for what other threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def until(met: Callable[[], object], *, within_s: float = 60, every_s: float = 0.001) -> None:
    """Wait until something holds."""
    end_s = time.monotonic() + within_s
    while not met():
        assert time.monotonic() < end_s
        time.sleep(every_s)


class Beside:
    """A call in a thread of its own: `ended` says whether it is over, `error` and `value` what it came to."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()

    def ended(self, timeout_s: float = 60.0) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __call__(self) -> Any:
        """Wait for the value, or for the error that was raised, and return it."""
        assert self.ended(120), "it hangs"
        return self.value if self.error is None else self.error

    def _run(self, act: Callable[[], Any]) -> None:
        try:
            self.value = act()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error


beside = Beside
