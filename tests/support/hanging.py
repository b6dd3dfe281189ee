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


def beside(act: Callable[[], Any]) -> Callable[[], Any]:
    """Run a call in a thread of its own; return what waits for its value, or for the error that it raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def value() -> Any:
        thread.join(120)
        assert found, "it hangs"
        return found[0]

    return value
