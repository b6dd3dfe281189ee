"""An HTTP server of a test, in threads of this process."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers every request by `answer`. Connections stay open."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that refuses an answer closes the connection
            super().handle()

    def answer(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.answer()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815 - and for these

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class _ServerOfIpv6(_Server):
    address_family = socket.AF_INET6


@contextlib.contextmanager
def served(handler: type[Handler], host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve on a port that the system chose until the block ends; yield the URL."""
    with (_ServerOfIpv6 if ":" in host else _Server)((host, 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            shown = f"[{host}]" if ":" in host else host
            yield f"{'http' if tls is None else 'https'}://{shown}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
