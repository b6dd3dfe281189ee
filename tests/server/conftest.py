"""A service in this process: `serving(lookups, ...)` yields its client, `on_a_port(lookups, ...)` one over a socket."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tiered_index import IndexService
from tiered_index.connectors.read_again import MessageSources
from tiered_index.server.app import OPERATIONS, HttpService
from tiered_index.server.http import tokens as token_files
from tiered_index.server.http.listening import HttpListener, loop_in_thread, own_names
from tiered_index.server.http.operations import described
from tiered_index.server.http.served import Audit, Caps, Served, redaction_of
from tiered_index.server.http.tokens import Tokens

PATIENCE_S = 60.0
DESCRIPTION = described(OPERATIONS)
# The entries of the description's examples: topic, queue_id, key, offset, size, timestamp_ms.
ENTRIES = (
    ("orders", 0, "order-4711", 1024, 512, 1_762_000_000_000),
    ("orders", 3, "order-4711", 204_800, 498, 1_762_000_060_000),
    ("orders", 1, "order-4712", 65_536, 731, 1_762_000_061_000),
    ("payments", 0, "order-4711", 4096, 256, 1_762_000_090_000),
)


class InProcess(httpx.BaseTransport):
    """Gives requests to an application, which runs on an event loop in a thread."""

    def __init__(self, app: Any) -> None:
        self._asgi = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()

        async def answer() -> httpx.Response:
            response = await self._asgi.handle_async_request(request)
            body = httpx.ByteStream(await response.aread())
            return httpx.Response(response.status_code, headers=response.headers, stream=body)

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(PATIENCE_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def service_of(
    lookups: Any,
    *,
    tokens: Path | None = None,
    caps: Caps | None = None,
    audit: Path | None = None,
    store: Path | None = None,
    hosts: frozenset[str] | None = None,
    problems: Callable[[], list[str]] = list,
    gauges: Callable[[], dict[str, tuple[str, float]]] = dict,
    behind: Callable[[], str | None] = lambda: None,
    sources: MessageSources | None = None,
    **bounds: Any,
) -> Iterator[HttpService]:
    """Yield a service, which stops at the end of the block."""
    served = Served(
        lookups,
        sources or MessageSources(lookups, lookups.config, {"rocketmq": store}),
        caps or Caps(),
        redaction_of(lookups, store),
        Audit(audit),
        Tokens(tokens) if tokens is not None else None,
        problems,
        gauges,
        behind,
    )
    with HttpService(served, hosts=hosts, **bounds) as service:
        yield service
        served.stopping.set()


@contextlib.contextmanager
def serving(lookups: Any, *, host: str = "127.0.0.1", **parts: Any) -> Iterator[httpx.Client]:
    """Yield a client of a service without a socket. For the other arguments see `service_of`."""
    with service_of(lookups, hosts=own_names(host), **parts) as service:
        with httpx.Client(base_url=f"http://{host}", transport=InProcess(service.app)) as client:
            yield client


@contextlib.contextmanager
def on_a_port(lookups: Any, *, host: str = "127.0.0.1", **parts: Any) -> Iterator[httpx.Client]:
    """Yield a client of a service on a free port, for tests of connections and of programs that connect."""
    with (
        service_of(lookups, hosts=own_names(host), **parts) as service,
        loop_in_thread() as portal,
        portal.wrap_async_context_manager(HttpListener(service.app, host, 0, drain_s=5)) as listener,
    ):
        with httpx.Client(base_url=listener.url, timeout=PATIENCE_S, trust_env=False) as client:
            yield client


def instead_of_query(patch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    """Let `call` make each lookup of a writer, also those that memory could answer."""
    patch.setattr(IndexService, "query", call)
    patch.setattr(IndexService, "query_nowait", lambda *_: None)


def index_in(folder: Path, **settings: Any) -> IndexService:
    """Open a small index whose root and storage are in a folder."""
    small = {"storage": (folder / "storage").as_uri(), "slots": 100, "items": 1000, "background": False}
    return IndexService.open(root=folder / "root", **(small | settings))


def published(folder: Path) -> str:
    """Make an index with the entries of the examples in its storage; return the storage's URI."""
    with index_in(folder) as index:
        put_entries(index)
        index.seal()
        index.run_lifecycle()
    return (folder / "storage").as_uri()


def put_entries(index: IndexService) -> None:
    """Put the entries of the examples and make them durable."""
    for topic, queue_id, key, offset, size, timestamp_ms in ENTRIES:
        index.put(topic, queue_id, key, offset, size, timestamp_ms)
    index.flush()


@pytest.fixture(scope="package")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexService]:
    """A writer's index with the entries of the examples, all unsealed."""
    with index_in(tmp_path_factory.mktemp("served")) as index:
        put_entries(index)
        yield index


@pytest.fixture(scope="package")
def client(index: IndexService) -> Iterator[httpx.Client]:
    """A client of a service beside the writer."""
    with serving(index) as client:
        yield client


@pytest.fixture
def tokens_looked_at(monkeypatch):
    """A changed file of tokens is seen at once."""
    monkeypatch.setattr(token_files, "_LOOK_INTERVAL_S", 0.0)
