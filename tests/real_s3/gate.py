"""A gate between a client and an S3 server: forwards bytes, and stops at a request that a test is waiting for.

    gate.hold("PUT", r"partNumber=2")        the next such request is not let through: the server never sees it
    gate.hold("PUT", r"/log/", answer=True)  it is let through, and its answer is kept back: done, and nobody was told
    gate.wait()                              returns once it is held; then the client may be killed, stopped, or let go
                                             by `release`

It works on TCP, so signatures stay valid. A request is recognised by its first line, which clients send at the start of
a packet.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_PATIENCE_S = 60.0
_REQUEST = re.compile(rb"(GET|PUT|POST|DELETE|HEAD) (\S+) HTTP/1\.1\r\n")
_GO_ON = b"HTTP/1.1 100"
# what a server says to a client that waits with its body: not the answer
_BLOCK_BYTES = 1 << 18


@dataclass
class _Hold:
    method: str
    path: re.Pattern[str]
    answer: bool
    skip: int
    held: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)


class Gate:
    """Threads: one for each direction of each connection; the methods are for one test's thread."""

    def __init__(self, upstream_url: str) -> None:
        parts = urlsplit(upstream_url)
        assert parts.scheme == "http"
        assert parts.hostname
        self._upstream = (parts.hostname, parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._hold: _Hold | None = None
        self.requests: list[str] = []
        """First lines (method and path) in order of arrival."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def hold(self, method: str, path: str, *, answer: bool = False, skip: int = 0) -> None:
        """Hold the next request of `method` whose path matches `path`, after `skip` others; or its answer."""
        with self._lock:
            self._hold = _Hold(method, re.compile(path), answer, skip)

    def wait(self, timeout_s: float = _PATIENCE_S / 2) -> None:
        """Return when the request is held; fail where it does not come."""
        hold = self._hold
        assert hold is not None
        assert hold.held.wait(timeout_s), (
            f"no {hold.method} {hold.path.pattern} came; the last requests: {self.requests[-10:]}"
        )

    def release(self) -> None:
        """Let what is held go on (to nowhere, where its client is dead), and hold nothing more."""
        with self._lock:
            hold, self._hold = self._hold, None
        if hold is not None:
            hold.let_go.set()

    def close(self) -> None:
        self.release()
        self._listener.close()
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            _shut(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._upstream, timeout=_PATIENCE_S)
            except OSError:
                client.close()  # the server is down: so is the gate
                continue
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.settimeout(None)
            with self._lock:
                self._sockets |= {client, server}
            answer_gate: list[_Hold] = []
            threading.Thread(target=self._pump, args=(client, server, answer_gate, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, answer_gate, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, answer_gate: list[_Hold], is_client: bool) -> None:
        try:
            while block := source.recv(_BLOCK_BYTES):
                if is_client:
                    hold = self._recognise(block)
                    if hold is not None and hold.answer:
                        answer_gate.append(hold)
                    elif hold is not None:
                        self._stop_at(hold)
                elif answer_gate and not block.startswith(_GO_ON):
                    self._stop_at(answer_gate.pop())
                target.sendall(block)
        except OSError:
            pass  # one side is gone, and the other is told so below
        _shut(source)
        _shut(target)

    def _recognise(self, block: bytes) -> _Hold | None:
        match = _REQUEST.match(block)
        if match is None:
            return None
        method, path = match[1].decode(), match[2].decode()
        with self._lock:
            self.requests.append(f"{method} {path}")
            hold = self._hold
            if hold is None or hold.held.is_set() or method != hold.method or not hold.path.search(path):
                return None
            if hold.skip:
                hold.skip -= 1
                return None
            if hold.answer:
                # counted as met from here on, so that a second one passes; `held` is set when the answer is there
                self._hold = hold
            return hold

    def _stop_at(self, hold: _Hold) -> None:
        hold.held.set()
        hold.let_go.wait(_PATIENCE_S)


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


@contextlib.contextmanager
def gate(upstream_url: str) -> Iterator[Gate]:
    """Open a gate before a server and close it, with every connection, when the block ends."""
    opened = Gate(upstream_url)
    try:
        yield opened
    finally:
        opened.close()
