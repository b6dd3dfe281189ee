"""A process that temporarily can't start threads."""

import threading

import pytest


class ThreadLimit:
    """Refuses to start threads of some name when asked, as the interpreter does at the process's limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._refusals: dict[str, int] = {}
        self.refused = 0
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            for prefix, left in self._refusals.items():
                if left and thread.name.startswith(prefix):
                    self._refusals[prefix] -= 1
                    self.refused += 1
                    raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)

    def refuse(self, prefix: str, times: int = 1) -> None:
        """Refuse the next threads whose names begin with this text."""
        self._refusals[prefix] = times
