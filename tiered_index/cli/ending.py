"""The end of a command by a signal."""

from __future__ import annotations

import _thread
import signal
import threading
from types import FrameType
from typing import Any

from tiered_index.cli.exit_codes import DONE, INTERRUPTED


class Ending:
    """Handles signals: the first SIGTERM, SIGINT or SIGHUP sets `event`, a second one ends the command at once.

    SIGHUP that is ignored, as under `nohup`, stays ignored. Main thread only. `exit_code` is 130 after SIGINT, else 0.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.exit_code = DONE
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._heard) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _heard(self, number: int, _: FrameType | None) -> None:
        self.exit_code = INTERRUPTED if number == signal.SIGINT else DONE
        self._restore()
        # in a thread: this one may be in a method of the event, and have its lock
        _thread.start_new_thread(self.event.set, ())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
