"""A proxy in front of an address. It cuts or delays answers in their middle, as a test scripts. Threads: any client."""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

_PIECE = 64 << 10


class Fault(NamedTuple):
    """A fault in the middle of the next piece of an answer: wait for this time, then cut the connection or continue."""

    hold_s: float = 0.0
    cut: bool = False


CUT = Fault(cut=True)


class CuttingProxy:
    """Passes bytes on. Each of `faults` acts on one piece of an answer to a client whose first bytes have its `name`.

    `spoiled` is the number of those pieces, and `passed` that of all answers' bytes.
    """

    def __init__(self, host: str, port: int, name: bytes = b"") -> None:
        self.faults: deque[Fault] = deque()
        self.spoiled = self.passed = 0
        self._name = name
        self._behind = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._connect, args=(self._listener.accept()[0],), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._behind) as broker:
            self._open |= (both := {client, broker})
            is_meant = self._name in client.recv(_PIECE, socket.MSG_PEEK)
            answers = threading.Thread(target=self._pass, args=(broker, client, is_meant, True), daemon=True)
            answers.start()
            self._pass(client, broker, False)
            answers.join()
            self._open -= both

    def _pass(self, source: socket.socket, target: socket.socket, is_spoiled: bool, is_answer: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                fault = self.faults.popleft() if is_spoiled and self.faults else Fault()
                target.sendall(data[: len(data) // 2])
                self._ended.wait(fault.hold_s)
                self.spoiled += fault != Fault()
                self.passed += len(data) if is_answer else 0
                if fault.cut:
                    break
                target.sendall(data[len(data) // 2 :])
        _end({source, target})

    def close(self) -> None:
        """Accept no more connections, and end the open ones."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        _end(set(self._open))


def _end(sockets: set[socket.socket]) -> None:
    for end in sockets:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cutting_proxy(address: str, name: bytes = b"") -> Iterator[CuttingProxy]:
    """Yield a proxy before ``host:port``, which ends with the context."""
    host, _, port = address.rpartition(":")
    with contextlib.closing(CuttingProxy(host, int(port), name)) as proxy:
        yield proxy
