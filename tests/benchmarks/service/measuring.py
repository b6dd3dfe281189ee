"""The measurements of a service: a separate process, filled and then loaded over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from tests.benchmarks.memory import memory_bytes, proc_lines, times
from tests.benchmarks.service.load import Request, SlowReader, drive
from tiered_index import IndexService
from tiered_index.client import IndexClient
from tiered_index.errors import BackPressure

_HERE = Path(__file__).parents[3]
_TOPIC, _PER_KEY, _BEGIN_MS = "orders", 4, 1_700_000_000_000
_BATCH_KEYS, _WRITTEN_PER_S, _WRITTEN_AT_ONCE = 1_000, 100_000, 5_000
# different requests of one connection, one after another
_BATCHES = 64
_CONNECTIONS, _MANY = 16, 1_000
_SLOW, _SLOW_PAUSE_S = 50, 0.2
# long enough that a slow reader reads the answer for a while
_HOT_KEY, _HOT_ENTRIES = "hottest", 50_000
_PUT_AT_ONCE = 100_000
_MARKER = b'"offset"'
# the place of the entries during the lookups
PLACES = ("hot", "cached", "cold")


def measure(
    folder: Path, entries: int, seconds: float, soak_s: float, connections: int = _MANY
) -> list[dict[str, Any]]:
    """Return the figures of each measurement, in their order. `connections` is the greatest number of connections."""
    rows = []
    uri = (folder / "storage").as_uri()
    with IndexService.open(
        root=folder / "stored", storage=uri, items=entries + _HOT_ENTRIES + 1, background=False
    ) as index:
        _fill(lambda columns: (index.put_batch(columns), index.flush()), entries)
        index.seal()
        index.run_lifecycle()
    for place in PLACES:
        options = ["--storage", uri]
        if place == "hot":
            options = ["--root", str(folder / "root"), "--storage", (folder / "hot").as_uri(), "--write"]
        with _service(options, cached=place != "cold") as (process, url):
            service = _Service(process, url, entries, seconds)
            if place == "hot":
                with IndexClient(url) as client:
                    _fill(client.put_batch, entries)
            keys = 200 if place == "cached" else entries // _PER_KEY
            rows.append(service.run(f"{place}: lookups", service.lookups, keys))
            lookups = rows[-1]
            for form, batches in (("JSON", service.batches), ("Arrow", service.arrow_batches)):
                name = f"{place}: batches of {_BATCH_KEYS:,} keys, {form}"
                row = service.run(name, batches, keys, connections=2)
                rows.append(row | {"keys_per_s": row["answers_per_s"] * _BATCH_KEYS})
            if place == "hot":
                # last, since new entries become files in other places
                with _writing(url) as written:
                    beside = service.run("hot: lookups beside writes", service.lookups, keys)
                rows.append(beside | {"written_per_s": written[0] / beside["elapsed_s"]})
            if place == "cached":
                # a quarter of the rate without pauses
                pause_s = connections / max(1.0, lookups["answers_per_s"] / 4)
                many = service.run(
                    f"{connections:,} connections", service.lookups, keys, connections=connections, pause_s=pause_s
                )
                rows += [many, service.beside_slow_readers(), service.soak(soak_s)]
    return rows


class _Service:
    """A service under measurement."""

    def __init__(self, process: subprocess.Popen[str], url: str, entries: int, seconds: float) -> None:
        self._process, self._entries, self._seconds = process, entries, seconds
        self._address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        self._host = f"Host: {urlsplit(url).netloc}\r\n".encode()

    def lookups(self, number: int, keys: int) -> Iterator[Request]:
        """Yield lookups of random keys. Every eighth key is absent."""
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
        accept = b"accept: application/vnd.apache.arrow.stream\r\n"
        return self._batches(number, keys, accept, b'"complete"', 1)

    def _batches(self, number: int, keys: int, accept: bytes, marker: bytes, count: int) -> Iterator[Request]:
        drawn, made = random.Random(number), list[Request]()
        # before the clock runs: a request takes the client longer to make than the service to read
        for _ in range(_BATCHES):
            asked = [{"topic": _TOPIC, "key": _key(drawn.randrange(keys))} for _ in range(_BATCH_KEYS)]
            body = json.dumps({"lookups": asked}).encode()
            head = b"POST /v1/query:batch HTTP/1.1\r\ncontent-type: application/json\r\n" + self._host + accept
            head += f"content-length: {len(body)}\r\n\r\n".encode()
            made.append(Request(head + body, marker, count))
        return itertools.cycle(made)

    def run(
        self,
        name: str,
        requests: Callable[[int, int], Iterator[Request]],
        keys: int,
        *,
        connections: int = _CONNECTIONS,
        pause_s: float = 0.0,
    ) -> dict[str, Any]:
        """Return the figures of one load."""
        print(name, file=sys.stderr, flush=True)
        before_s = times(self._process.pid)[1]
        seconds = max(self._seconds, 2 * pause_s)
        load = asyncio.run(
            drive(
                self._address,
                lambda number: requests(number, keys),
                connections=connections,
                seconds=seconds,
                pause_s=pause_s,
            )
        )
        figures = load.figures()
        if load.wrong:
            print(load.wrong[0], file=sys.stderr)
        cpu_us = (times(self._process.pid)[1] - before_s) / max(1, figures["answers"]) * 1e6
        return {"name": name, **figures, "cpu_us": cpu_us, "elapsed_s": load.elapsed_s, **self._resources()}

    def beside_slow_readers(self) -> dict[str, Any]:
        """Return the figures of lookups while other clients read long answers slowly."""
        name = f"cached: lookups beside {_SLOW} slow readers"
        print(name, file=sys.stderr, flush=True)
        head = f"GET /v1/query?topic={_TOPIC}&key={_HOT_KEY}&all=true HTTP/1.1\r\nAccept: application/x-ndjson\r\n"

        async def both() -> tuple[Any, int]:
            loop = asyncio.get_running_loop()
            readers = []
            for _ in range(_SLOW):
                one = socket.socket()
                # small, so that the service must wait for its reader
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.setblocking(False)
                await loop.sock_connect(one, self._address)
                data = head.encode() + self._host + b"\r\n"
                readers.append((await loop.create_connection(lambda d=data: SlowReader(d, _SLOW_PAUSE_S), sock=one))[1])
            load = await drive(
                self._address, lambda n: self.lookups(n, 200), connections=_CONNECTIONS, seconds=self._seconds
            )
            resources = self._resources()
            for reader in readers:
                reader.transport.abort()
            return load, resources

        load, resources = asyncio.run(both())
        return {"name": name, **load.figures(), "elapsed_s": load.elapsed_s, **resources}

    def soak(self, seconds: float) -> dict[str, Any]:
        """Return the figures of a long mixed load, with memory, threads and descriptors after a third of it and at its
        end.
        """
        mixed: list[Callable[[int, int], Iterator[Request]]] = [self.lookups, self.batches]

        def requests(number: int, keys: int) -> Iterator[Request]:
            return mixed[number % 8 == 7](number, keys)

        keys = self._entries // _PER_KEY
        steady, self._seconds = self._seconds, seconds / 3
        first = self.run("a third of the soak", requests, keys)
        self._seconds = seconds - seconds / 3
        last = self.run(f"soak of {seconds:g} s", requests, keys)
        self._seconds = steady
        return last | {f"{name}_before": first[name] for name in ("memory_mib", "threads", "descriptors")}

    def _resources(self) -> dict[str, int]:
        pid = self._process.pid
        return {
            "memory_mib": memory_bytes(pid, "VmRSS") >> 20,
            "threads": int(proc_lines(f"{pid}/status")["Threads"]),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        }


def _key(number: int) -> str:
    return f"order-{number:09d}"


def _columns(entries: int, start: int, stop: int) -> pa.Table:
    """Return entries. Those of a key are a quarter of all entries apart. After the last one, all have one key."""
    numbers = np.arange(start, stop)
    return pa.table(
        {
            "topic": pa.array([_TOPIC] * len(numbers)),
            "key": [_HOT_KEY if start >= entries else _key(n) for n in (numbers % (entries // _PER_KEY)).tolist()],
            "queue_id": (numbers % 8).astype(np.int32),
            "offset": numbers * 1000,
            "size": np.full(len(numbers), 256, np.int32),
            "timestamp_ms": _BEGIN_MS + numbers // 10,
        }
    )


def _fill(put: Callable[[pa.Table], Any], entries: int) -> None:
    bounds = [*range(0, entries, _PUT_AT_ONCE), entries, entries + _HOT_ENTRIES]
    for start, stop in itertools.pairwise(bounds):
        while True:
            try:
                put(_columns(entries, start, stop))
                break
            except BackPressure:
                time.sleep(0.05)


@contextlib.contextmanager
def _service(options: list[str], *, cached: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a service's process and its URL."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TIERED_INDEX_")}
    if not cached:
        own |= {"TIERED_INDEX_BLOCK_CACHE_BYTES": "0"}
    command = [sys.executable, "-m", "tiered_index", "serve", "--port", "0", "--json", "--quiet", *options]
    with subprocess.Popen(command, cwd=_HERE, env=own, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.communicate()


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
