"""A gate between a client and an S3 server: a counting proxy that stops at a request for which a test waits.

- `gate.hold("PUT", r"partNumber=2")` stops the next such request: the server never receives it.
- `gate.hold("PUT", r"/log/", answer=True)` lets the request pass and keeps back the response. The server has done the
  work, but the client does not know.
- `gate.wait()` returns once the gate holds the request. Then the test may kill or stop the client, or call `release`.
"""

import contextlib
import re
import threading
from collections.abc import Iterator

from tests.support.counting_proxy import Action, CountingProxy, Request, counting_proxy

_PATIENCE_S = 60.0


class Gate:
    """Only one thread of a test may call the methods."""

    def __init__(self, proxy: CountingProxy) -> None:
        self.endpoint_url = proxy.endpoint_url
        self._wanted: tuple[str, str] | None = None
        self._requests: list[str] = []
        proxy.fault = self._look

    def hold(self, method: str, path: str, *, answer: bool = False, skip: int = 0) -> None:
        """Hold the next request of `method` whose path matches `path`, after `skip` others; or hold its response."""
        self._wanted, self._answer, self._skip = (method, path), answer, skip
        self._held, self._let_go, self._is_met = threading.Event(), threading.Event(), False

    def wait(self) -> None:
        """Return when the gate holds the request; fail if it does not come."""
        came = self._held.wait(_PATIENCE_S / 2)
        assert came, f"no {self._wanted} came; the last requests: {self._requests[-10:]}"

    def release(self) -> None:
        """Let the held request pass, and hold no more. If its client is dead, the response is dropped."""
        if self._wanted is not None:
            self._wanted = None
            self._let_go.set()

    def _look(self, request: Request) -> Action | None:
        self._requests.append(f"{request.method} {request.path}")
        if self._wanted is None or self._is_met:
            return None
        method, path = self._wanted
        if request.method != method or not re.search(path, request.path):
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._is_met, held, let_go = True, self._held, self._let_go

        def stop() -> None:
            held.set()
            let_go.wait(_PATIENCE_S)

        return Action(hold=stop) if self._answer else Action(before=stop)


@contextlib.contextmanager
def gate(upstream_url: str) -> Iterator[Gate]:
    """Open a gate before a server; all requests pass when the block ends."""
    with counting_proxy(upstream_url) as proxy:
        opened = Gate(proxy)
        try:
            yield opened
        finally:
            opened.release()
