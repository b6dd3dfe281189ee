"""Ports of this host for servers that tests start."""

import random
import socket

# below those that the system gives to outgoing connections, which could take a port before the server listens on it
_PORTS = random.Random().sample(range(20_000, 32_000), 12_000)


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on. No two calls of a process return the same port."""
    ports: list[int] = []
    while len(ports) < count:
        if not _PORTS:
            raise OSError("no free port is left")
        if is_free(port := _PORTS.pop()):
            ports.append(port)
    return ports


def is_free(port: int) -> bool:
    """Return whether nothing listens on a port."""
    with socket.socket() as bound:
        try:
            bound.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
