"""Ending on request: the first SIGTERM or SIGINT sets an event, and the command ends in good order; a second one ends it at once.

    with Ending() as ending:
        while not ending.event.is_set(): ...
    return ending.exit_code

For the main thread only, as signal handlers are.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Ending"]

_INTERRUPTED = 130


class Ending:
    """`exit_code` is 0 unless SIGINT came."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.exit_code = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        self._before = {number: signal.signal(number, self._heard) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _heard(self, number: int, _: FrameType | None) -> None:
        self.exit_code = _INTERRUPTED if number == signal.SIGINT else 0
        self._restore()
        self.event.set()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
