"""`make bench SUITE=service`: lookups a second, latencies and memory of `tiered-index serve`, called over sockets.

Client and service share this machine. The CPU time of the service's process is its own cost. Every answer is checked: a
wrong one ends the run. The clients use one asyncio loop and no HTTP library. A connection sends one request, waits for
the whole answer, and sends the next one. A latency is the time from the first byte sent to the last byte received.

Hot lookups are compared with a plain Starlette route that returns the bytes of such an answer, on the same event loop
and HTTP parser, in turns. Without further arguments this module's process is that route.
"""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pyarrow as pa

from tests.benchmarks.memory import memory_bytes, times
from tests.benchmarks.report import TOP, finish, note, options, percentiles, require, scratch
from tests.support.object_store import unchunked
from tests.support.processes import without_settings
from tiered_index import IndexService
from tiered_index.base.encoding import JSON
from tiered_index.client import IndexClient
from tiered_index.errors import BackPressure

_TOPIC, _PER_KEY, _BEGIN_MS = "orders", 4, 1_700_000_000_000
_BATCH_KEYS, _WRITTEN_PER_S, _WRITTEN_AT_ONCE = 1_000, 100_000, 5_000
# different requests of one connection, one after another
_BATCHES = 64
_CONNECTIONS = 16
_PUT_AT_ONCE = 100_000
_MARKER = b'"offset"'
_STATUS = slice(9, 12)
# Hot lookups and the plain route are measured so many times, one after the other
_TURNS = 3
COLUMNS = ("answers/s", "of plain", "p50 ms", "p99 ms", "CPU us", "keys/s", "written/s", "refused", "MiB")


@dataclass(frozen=True, slots=True)
class Request:
    """The bytes of a whole request, and how often `marker` is in its answer's body."""

    data: bytes
    marker: bytes
    count: int


@dataclass
class Load:
    """The results: seconds of each answer, wrong answers, and answers with 503, of too many waiting requests."""

    latencies_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    memory_mib: int = 0

    def figures(self, name: str) -> dict[str, Any]:
        """Return the figures. Raises `RuntimeError` for a wrong answer."""
        require(self.wrong[:1], [], f"wrong answers of {name}")
        answers = len(self.latencies_s)
        p50, p99 = percentiles(self.latencies_s, 50, 99, unit=1e3)
        return {
            "name": name,
            "answers/s": answers / self.elapsed_s,
            "p50 ms": p50,
            "p99 ms": p99,
            "CPU us": self.cpu_s / answers * 1e6,
            "keys/s": answers / self.elapsed_s * _BATCH_KEYS if "batches" in name else None,
            "refused": self.refused,
            "MiB": self.memory_mib,
            "elapsed_s": self.elapsed_s,
        }


class Connection(asyncio.Protocol):
    """One connection, which sends `requests` until the load ends, at least one."""

    def __init__(self, load: Load, requests: Iterator[Request], until_s: float) -> None:
        self._load, self._requests, self._until_s = load, requests, until_s
        self._request: Request | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._ask()

    def _ask(self) -> None:
        is_over = self._request is not None and time.perf_counter() >= self._until_s
        if is_over or self._transport.is_closing():
            self._transport.close()
            return
        self._request, self._received = next(self._requests), bytearray()
        self._began_s = time.perf_counter()
        self._transport.write(self._request.data)

    def data_received(self, data: bytes) -> None:
        self._received += data
        body_at = self._received.find(b"\r\n\r\n") + 4
        if body_at < 4:
            return
        head = bytes(self._received[:body_at]).lower()
        at = head.find(b"content-length:") + 15
        if at < 15:  # a long answer comes in chunks
            if not self._received.endswith(b"\r\n0\r\n\r\n"):
                return
            self._received[body_at:] = unchunked(bytes(self._received[body_at:]))
        elif len(self._received) < body_at + int(head[at : head.index(b"\r", at)]):
            return
        if head[_STATUS] == b"503":
            self._load.refused += 1
        else:
            assert self._request is not None
            self._load.latencies_s.append(time.perf_counter() - self._began_s)
            marker_count = self._received.count(self._request.marker, body_at)
            if head[_STATUS] != b"200" or marker_count != self._request.count:
                self._load.wrong.append(f"{marker_count} of {self._request.count}: {bytes(self._received[:300])!r}")
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._load.wrong.append(f"a connection broke off: {exc!r}")
        if not self.ended.done():
            self.ended.set_result(None)


class Service:
    """A service under measurement: a separate process."""

    def __init__(self, process: subprocess.Popen[str], url: str, seconds: float) -> None:
        self._process, self._seconds = process, seconds
        self._address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        self._host = f"Host: {urlsplit(url).netloc}\r\n".encode()

    def lookups(self, number: int, keys: int) -> Iterator[Request]:
        """Yield lookups of random keys, for a connection with this number. Every eighth key is absent."""
        drawn = random.Random(number)
        for turn in itertools.count():
            absent = turn % 8 == 7
            key = f"absent-{drawn.randrange(10**9)}" if absent else _key(drawn.randrange(keys))
            head = f"GET /v1/query?topic={_TOPIC}&key={key} HTTP/1.1\r\n".encode()
            yield Request(head + self._host + b"\r\n", _MARKER, 0 if absent else _PER_KEY)

    def batches(self, number: int, keys: int) -> Iterator[Request]:
        """Yield lookups of many keys at once."""
        return self._batches(number, keys, b"", _MARKER, _BATCH_KEYS * _PER_KEY)

    def arrow_batches(self, number: int, keys: int) -> Iterator[Request]:
        """Yield lookups of many keys at once, answered as Arrow streams. Their metadata shows that they are whole."""
        return self._batches(number, keys, b"accept: application/vnd.apache.arrow.stream\r\n", b'"complete"', 1)

    def _batches(self, number: int, keys: int, accept: bytes, marker: bytes, count: int) -> Iterator[Request]:
        drawn, requests = random.Random(number), list[Request]()
        # before the clock runs: a request takes the client longer to make than the service to read
        for _ in range(_BATCHES):
            lookups = [{"topic": _TOPIC, "key": _key(drawn.randrange(keys))} for _ in range(_BATCH_KEYS)]
            body = json.dumps({"lookups": lookups}).encode()
            head = b"POST /v1/query:batch HTTP/1.1\r\ncontent-type: application/json\r\n" + self._host + accept
            head += f"content-length: {len(body)}\r\n\r\n".encode()
            requests.append(Request(head + body, marker, count))
        return itertools.cycle(requests)

    def run(
        self,
        name: str,
        requests: Callable[[int, int], Iterator[Request]],
        keys: int,
        *,
        connections: int = _CONNECTIONS,
    ) -> dict[str, Any]:
        """Return the figures of one load. Raises `RuntimeError` for a wrong answer."""
        note(name)
        load = Load()
        self.drive(load, requests, keys, connections)
        return load.figures(name)

    def drive(self, load: Load, requests: Any, keys: int, connections: int = _CONNECTIONS) -> None:
        """Send requests for the time of a load."""
        before_s = times(self._process.pid)[1]
        asyncio.run(self._drive(load, requests, keys, connections))
        load.cpu_s += times(self._process.pid)[1] - before_s
        load.memory_mib = memory_bytes(self._process.pid, "VmRSS") >> 20

    async def _drive(self, load: Load, requests: Any, keys: int, connections: int) -> None:
        of_connections = [requests(number, keys) for number in range(connections)]
        began_s = time.perf_counter()
        opened = [Connection(load, each, began_s + self._seconds) for each in of_connections]
        for connection in opened:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda connection=connection: connection, *self._address)
        await asyncio.gather(*(connection.ended for connection in opened))
        load.elapsed_s += time.perf_counter() - began_s


def measure(folder: Path, entries: int, seconds: float) -> list[dict[str, Any]]:
    """Return the figures of each load, with the entries in the writer's file, in caches, and in a storage."""
    rows, uri = [], (folder / "storage").as_uri()
    about: dict[str, Any] = {"items": entries + 1, "background": False}
    with IndexService.open(root=folder / "stored", storage=uri, **about) as index:
        _fill(lambda columns: (index.put_batch(columns), index.flush()), entries)
        index.seal()
        index.run_lifecycle()
    for place in ("hot", "cached", "cold"):
        where = ["--storage", uri]
        if place == "hot":
            where = ["--root", str(folder / "root"), "--storage", (folder / "hot").as_uri(), "--write"]
        with _serving(where, cached=place != "cold") as (process, url):
            service = Service(process, url, seconds)
            if place == "hot":
                with IndexClient(url) as client:
                    _fill(client.put_batch, entries)
            keys = 200 if place == "cached" else entries // _PER_KEY
            if place == "hot":
                rows += _beside_plain(service, url, entries, seconds)
            else:
                rows.append(service.run(f"{place}: lookups", service.lookups, keys))
            for form, batches in (("JSON", service.batches), ("Arrow", service.arrow_batches)):
                name = f"{place}: batches of {_BATCH_KEYS:,} keys, {form}"
                rows.append(service.run(name, batches, keys, connections=2))
            if place == "hot":
                # last, since new entries become files in other places
                with _writing(url) as written:
                    beside = service.run("hot: lookups beside writes", service.lookups, keys)
                rows.append(beside | {"written/s": written[0] / beside["elapsed_s"]})
    return rows


def _beside_plain(service: Service, url: str, entries: int, seconds: float) -> list[dict[str, Any]]:
    """Return the figures of hot lookups and of the plain route."""
    answers = [urlopen(f"{url}/v1/query?topic={_TOPIC}&key={key}").read().decode() for key in (_key(0), "absent-0")]
    loads, keys = {"hot: lookups": Load(), "a plain Starlette route": Load()}, entries // _PER_KEY
    with _process([sys.executable, "-m", __name__], answers) as (process, plain_url):
        services = [service, Service(process, plain_url, seconds)]
        note(" and ".join(loads))
        for _ in range(_TURNS):
            for each, load in zip(services, loads.values(), strict=True):
                each.drive(load, each.lookups, keys)
    rows = [load.figures(name) for name, load in loads.items()]
    rows[0]["of plain"] = rows[0]["answers/s"] / rows[1]["answers/s"]
    return rows


def _serve_plain() -> None:
    """Serve the two bodies of the standard input at the address of lookups, and print the URL."""
    # here, since the clients have no use for them
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    of_key, absent = json.loads(sys.stdin.readline())

    async def query(request: Any) -> Response:
        return Response(absent if request.query_params["key"].startswith("absent") else of_key, 200, None, JSON)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(json.dumps({"url": f"http://127.0.0.1:{listening.getsockname()[1]}"}), flush=True)
        app = Starlette(routes=[Route("/v1/query", query)])
        config = uvicorn.Config(app, loop="uvloop", http="httptools", access_log=False, log_config=None)
        uvicorn.Server(config).run([listening])


def _key(number: int) -> str:
    return f"order-{number:09d}"


def _columns(entries: int, start: int, stop: int) -> pa.Table:
    """Return entries. Those of a key are a quarter of all entries apart."""
    numbers = np.arange(start, stop)
    return pa.table(
        {
            "topic": pa.array([_TOPIC] * len(numbers)),
            "key": [_key(number) for number in (numbers % (entries // _PER_KEY)).tolist()],
            "queue_id": (numbers % 8).astype(np.int32),
            "offset": numbers * 1000,
            "size": np.full(len(numbers), 256, np.int32),
            "timestamp_ms": _BEGIN_MS + numbers // 10,
        }
    )


def _fill(put: Callable[[pa.Table], Any], entries: int) -> None:
    for start, stop in itertools.pairwise([*range(0, entries, _PUT_AT_ONCE), entries]):
        while True:
            with contextlib.suppress(BackPressure):
                put(_columns(entries, start, stop))
                break
            time.sleep(0.05)


@contextlib.contextmanager
def _serving(where: list[str], *, cached: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a service's process and its URL."""
    own = {} if cached else {"TIERED_INDEX_CACHE_SLOT_GROUPS": "false"}
    command = [sys.executable, "-m", "tiered_index", "serve", "--port", "0", "--json", "--quiet", *where]
    with _process(command, None, own) as served:
        yield served


@contextlib.contextmanager
def _process(
    command: list[str], told: Any, own: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that prints its URL, and the URL. `told` is its input, as a line of JSON."""
    piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=TOP, env=without_settings() | (own or {}), **piped) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.close()
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def _writing(url: str) -> Iterator[list[int]]:
    """Put entries in another process meanwhile. At the end the list has the number of puts."""
    spawn, written = multiprocessing.get_context("spawn"), list[int]()
    begun, end, count = spawn.Event(), spawn.Event(), spawn.Value("q", 0)
    writer = spawn.Process(target=_write, args=(url, begun, end, count))
    writer.start()
    begun.wait()
    before = count.value
    try:
        yield written
        while count.value == before and writer.is_alive():
            time.sleep(0.01)  # a short load ends before the next put
    finally:
        end.set()
        writer.join()
        written.append(count.value - before)


def _write(url: str, begun: Event, end: Event, count: Any) -> None:
    """Put entries of other keys at a steady rate."""
    first, began_s = 1 << 40, time.monotonic()
    with IndexClient(url) as client:
        while not end.is_set():
            client.put_batch(_columns(1 << 62, first + count.value, first + count.value + _WRITTEN_AT_ONCE))
            count.value += _WRITTEN_AT_ONCE
            begun.set()
            end.wait(max(0.0, began_s + count.value / _WRITTEN_PER_S - time.monotonic()))


def main(suite: str, arguments: list[str]) -> None:
    """Measure, and print the table."""
    parser = options(suite, __doc__)
    parser.add_argument("--entries", type=int, default=1_000_000, help="entries of the index, four per key")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each load")
    flags = parser.parse_args(arguments)
    with scratch(flags.root_dir) as folder:
        rows = measure(folder, flags.entries, flags.seconds)
    cells = [(row["name"], *(row.get(name) for name in COLUMNS)) for row in rows]
    finish(flags, {"rows": rows, "tables": {f"{flags.entries:,} entries": [("", *COLUMNS), *cells]}})


if __name__ == "__main__":
    _serve_plain()
