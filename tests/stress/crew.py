"""Threads of one test: each works until it is done or `stop` is called. The first error stops all, and is raised at the
end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_PATIENCE_S = 170.0


class Crew:
    """Start workers by `begin`, and wait for them by `finish`. `stop` ends those that have no end of their own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.stop = threading.Event()
        self.troubles: list[tuple[str, BaseException]] = []
        self._threads: list[threading.Thread] = []

    def begin(self, name: str, work: Callable[..., Any], *arguments: Any) -> threading.Thread:
        """Run `work(*arguments)` in a thread."""
        thread = threading.Thread(
            target=self._guarded, args=(name, work, arguments), name=f"stress-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return thread

    def repeat(self, name: str, work: Callable[..., Any], *arguments: Any) -> threading.Thread:
        """Run `work(*arguments)` again and again until `stop`."""

        def again() -> None:
            while not self.stop.is_set():
                work(*arguments)

        return self.begin(name, again)

    def wait_for(self, threads: list[threading.Thread]) -> None:
        """Wait until these threads have ended."""
        for thread in threads:
            thread.join(_PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} hangs (seed {self.seed})"

    def finish(self) -> None:
        """Stop all threads and wait for them; raise the first error."""
        self.stop.set()
        self.wait_for(self._threads)
        if self.troubles:
            name, error = self.troubles[0]
            raise AssertionError(f"{name} (seed {self.seed}, {len(self.troubles)} in all): {error!r}") from error

    def _guarded(self, name: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised by `finish`
            self.troubles.append((name, error))
            self.stop.set()
