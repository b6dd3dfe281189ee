"""Clients of `tiered-index serve`: the library's lookups, arguments, answers and errors, over HTTP.

    with IndexClient("http://broker-a:8080", token=TOKEN) as client:
        answer = client.query("orders", "order-4711")

`AsyncIndexClient` defines each call. `IndexClient` has the same calls, whose connections wait in the caller's thread.
If the service does not answer or is overloaded, a client repeats a request that is safe to repeat, up to three times.
An incomplete response raises `StorageUnavailable`. Threads: every method of `IndexClient` from any thread. An
`AsyncIndexClient` is for one event loop.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar, Unpack
from urllib.parse import quote

import httpx

from tiered_index.base.encoding import ARROW, JSON
from tiered_index.client import answers
from tiered_index.errors import InvalidArgument, PartialAnswer, StorageUnavailable
from tiered_index.service.read.answers.budget import Limits
from tiered_index.service.read.answers.lookup_columns import check_lookups
from tiered_index.service.read.answers.messages import MessagesResult
from tiered_index.service.read.answers.rows import check_key, check_topic, once
from tiered_index.types import IndexItem, Lookup, QueryResult, TopicsResult

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
P = ParamSpec("P")
Decode: TypeAlias = Callable[[httpx.Response], T]
Lookups: TypeAlias = Iterable[Lookup | tuple[str, str]]
_Call: TypeAlias = Callable[Concatenate["AsyncIndexClient", P], T]
_TRIES = 4
_BACKOFF_S = 0.2
_RETRIED = frozenset({429, 502, 503})
_CONNECT_S = 10.0
# Longest wait that the client accepts from a Retry-After header
_MOST_WAIT_S = 10.0
# Time of a request in addition to its lookup's `timeout_s`
_MORE_S = 30.0
# without a login and parameters
_URL = re.compile(r"https?://([^]/?#@[\s]+|\[[\da-fA-F:.]+\](:\d+)?)(/[^?#@\s]*)?")
_TOKEN = re.compile("[!-~]+")


class Options(Limits, total=False):
    """The options of a call by name, and its bounds. The service may have lower bounds.

    - `begin_ms`, `end_ms`: the range, both included, in epoch milliseconds.
    - `max_count`: most entries of the answer, 64 by default; `cursor` continues the truncated answer that gave it.
    - `allow_partial`: answer from the files that can be read, and name the others in `failed`.
    - `explain`: the answer has a report of each file.
    - `body`: the form of messages' bodies: text (default), json, hex, none.
    """

    begin_ms: int | None
    end_ms: int | None
    max_count: int
    cursor: str | None
    allow_partial: bool
    explain: bool
    body: str
    max_cost_usd: float | None


class AsyncIndexClient(AbstractAsyncContextManager["AsyncIndexClient"]):
    """An `IndexClient` for asyncio, with the same arguments, answers and errors."""

    _kind: Any = httpx.AsyncClient
    _sleep: Any = staticmethod(asyncio.sleep)

    def __init__(self, url: str, *, token: str | None = None, ca_file: str | None = None, tries: int = _TRIES) -> None:
        """Accept the arguments of `IndexClient`."""
        if not _URL.fullmatch(url):
            # without the URL, which may hold a secret
            raise InvalidArgument("not the URL of a service: write http://host:8080, without login and parameters")
        if token is not None and not _TOKEN.fullmatch(token):
            raise InvalidArgument("invalid token: a token is one word of printable ASCII")
        self.url, self._tries = url.rstrip("/"), max(1, tries)
        headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        verify = ssl.create_default_context(cafile=ca_file) if url.startswith("https") else False
        self._opened = functools.partial(self._kind, headers=headers, verify=verify, trust_env=False)
        self._http, self._pid = self._opened(), os.getpid()

    async def _call(
        self, decode: Decode[T], path: str, parameters: Any, *, accept: str = JSON, idempotent: bool = True, **sent: Any
    ) -> T:
        """Send a request, perhaps several times, and return the decoded response. Raises the error of a problem.

        `parameters` are the parameters of the URL; `sent` is the body of a POST: `json`, or `content`, an Arrow stream.
        """
        if self._pid != os.getpid():
            # a forked child must not use its parent's connections
            self._http, self._pid = self._opened(), os.getpid()
        limit_s = {**parameters, **sent.get("json", {})}.get("timeout_s")
        try:
            request = self._http.build_request(
                "POST" if sent else "GET",
                f"{self.url}{path}",
                # a member of an enumeration may be formatted as another text
                params={n: str.__str__(v) if isinstance(v, str) else v for n, v in parameters.items() if v is not None},
                headers={"accept": accept} | ({"content-type": ARROW} if "content" in sent else {}),
                timeout=httpx.Timeout(float(limit_s) + _MORE_S if limit_s else 2 * _MORE_S, connect=_CONNECT_S),
                **sent,
            )
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"{error.object!r:.80} is not UTF-8: it has half a surrogate pair") from error
        for tried in range(1, self._tries + 1):
            may_repeat, after = idempotent and tried < self._tries, ""
            try:
                response: httpx.Response = await _ready(self._http.send(request))
                if not may_repeat or response.status_code not in _RETRIED:
                    break
                after = response.headers.get("retry-after", "")
            except httpx.TransportError as error:
                if not may_repeat:
                    text = f"{self.url} did not answer ({str(error) or type(error).__name__})"
                    raise StorageUnavailable(f"{text}: check the URL, and that the service runs") from error
            wait_s = float(after) if after.isdigit() else _BACKOFF_S * 2**tried * (tried > 1)
            await _ready(self._sleep(min(wait_s, _MOST_WAIT_S)))
        if response.status_code >= 300:
            problem = answers.decoded(answers.document_of, response) if response.content[:1] == b"{" else {}
            # other documents than problems may have a text as their status
            raise answers.error_of({**problem, "status": response.status_code})
        return answers.decoded(decode, response)

    async def query(self, topic: str, key: str, **options: Unpack[Options]) -> QueryResult:
        """Look up a key, as `IndexReader.query`.

        Raises as `IndexReader.query`, and `ConfigError` if the token does not allow it.
        """
        place = {"topic": check_topic(topic), "key": check_key(key)}
        return await self._call(answers.result_of, "/v1/query", {**place, **options})

    async def query_all(self, topic: str, key: str, **options: Unpack[Options]) -> AsyncIterator[QueryResult]:
        """Yield all answers of a lookup page by page (1,000 entries), no entry twice. Errors: see `query`."""
        seen, page_options = set[tuple[object, ...]](), Options(max_count=1000) | options
        while True:
            page = await self.query(topic, key, **page_options)
            yield once(page, seen)
            if page.cursor is None:
                return
            page_options["cursor"] = page.cursor

    async def stream(self, topic: str, key: str, **options: Unpack[Options]) -> AsyncIterator[IndexItem]:
        """Yield all entries of a key, newest first. A page (1,000 entries) that breaks off is requested again.

        Raises as `query`, and `PartialAnswer` after the last entry of a partial answer.
        """
        failed: dict[str, Any] = {}
        async for page in self.query_all(topic, key, **options):
            failed |= {report.file: report for report in page.failed}
            for item in page:
                yield item
        if failed:
            raise PartialAnswer(f"{len(failed)} files could not be read", failed=tuple(failed.values()))

    async def _batch(self, lookups: Lookups, parameters: dict[str, Any], decode: Decode[T], accept: str = JSON) -> T:
        rows = [vars(lookup) for lookup in check_lookups(lookups, parameters.pop("max_count", 64))]
        return await self._call(decode, "/v1/query:batch", {}, accept=accept, json={"lookups": rows, **parameters})

    async def query_many(self, lookups: Lookups, **options: Unpack[Options]) -> list[QueryResult]:
        """Answer many lookups by one request, as `IndexReader.query_many`. All share one explain and one freshness.

        `max_count` is for pairs of topic and key. Raises the same errors, and `InvalidArgument` beyond the service's
        limits (10,000 lookups, 100,000 entries together).
        """
        return await self._batch(lookups, {**options}, answers.results_of)

    async def query_many_arrow(
        self, lookups: Lookups, *, allow_spent: bool = False, **options: Unpack[Options]
    ) -> tuple[pa.Table, dict[str, Any]]:
        """Answer one or more lookups by one request. Return a pair: one Arrow table, and a dict about all lookups.

        The table has `lookup` (int32: the lookup's number, from 0) and the columns of `QueryResult.to_arrow`, by lookup
        and in answer order. The dict has ``status``, ``cursors``, ``partial``, ``failed``, ``explain`` and the other
        members of an answer. ``cursors`` has the cursors of truncated answers by the lookup's number as text,
        ``partial`` the numbers of partial lookups. At a bound the call raises `BudgetExceeded`; with `allow_spent` it
        returns the entries found so far, and ``exceeded`` names the bound.
        """
        return await self._batch(lookups, {"allow_spent": allow_spent, **options}, answers.table_of, ARROW)

    async def messages(self, topic: str, key: str, **options: Unpack[Options]) -> MessagesResult:
        """Look up a key and fetch its messages. `to_dict()` of each `message` is its document. Raises as `query`."""
        place = {"topic": check_topic(topic), "key": check_key(key)}
        return await self._call(answers.messages_of, "/v1/messages", {**place, **options})

    async def message(self, msg_id: str, topic: str | None = None, **options: Unpack[Options]) -> MessagesResult:
        """Return one message: by the id of its place, or with `topic` by its unique key.

        Raises `NotThere` if there is none.
        """
        # An id of dots alone would change the path
        path = f"/v1/messages/{quote(msg_id, safe='', errors='surrogatepass').replace('.', '%2E')}"
        return await self._call(answers.messages_of, path, {"topic": topic, **options})

    async def topics(self, **options: Unpack[Options]) -> TopicsResult:
        """List the topics that the token may see, as `IndexReader.topics`."""
        return await self._call(answers.topics_of, "/v1/topics", options)

    async def files(self) -> dict[str, Any]:
        """List all files of the index: the document of ``tiered-index files --json``."""
        return await self._call(answers.document_of, "/v1/files", {})

    async def du(self, by: str = "topic,day,state") -> dict[str, Any]:
        """Return stored entries, bytes and cost: the document of ``tiered-index topics --by BY --json``."""
        return await self._call(answers.document_of, "/v1/du", {"by": by})

    async def verify(self, *, deep: bool = False) -> dict[str, Any]:
        """Start a verification of all checksums of the index. Return the job; pass its ``id`` to `verification`."""
        return await self._call(answers.document_of, "/v1/verify", {}, idempotent=False, json={"deep": deep})

    async def verification(self, job_id: str) -> dict[str, Any]:
        """Return a job of `verify`: its ``state`` (running, done, failed), progress and, at its end, ``report``."""
        return await self._call(answers.document_of, f"/v1/verify/{quote(job_id, safe='')}", {})

    async def put_batch(
        self,
        columns: Any,
        source: str | None = None,
        position: int | None = None,
        *,
        after: int | None = None,
        durable: bool = False,
    ) -> dict[str, Any]:
        """Put the entries of an Arrow table or a dict of columns, as `IndexService.put_batch`.

        A column ``keys`` of lists of text may replace ``key``. With `source` and `position` the service puts a batch
        once, however often you send it. With `after` it refuses a gap. Raises `BackPressure` (repeat it later),
        `InvalidArgument`.
        """
        import pyarrow as pa

        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        with pa.BufferOutputStream() as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        parameters = {"source": source, "position": position, "after": after, "durable": durable}
        sent: Any = {"idempotent": source is not None, "content": sink.getvalue().to_pybytes()}
        return await self._call(answers.document_of, "/v1/entries", parameters, **sent)

    async def close(self) -> None:
        """Release connections."""
        await self._http.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _WaitingClient(AsyncIndexClient):
    """A client whose coroutines never suspend, because its connections wait in the caller's thread."""

    _kind, _sleep = httpx.Client, staticmethod(time.sleep)


async def _ready(value: Any) -> Any:
    """Return a value, or what an awaitable returns."""
    return await value if hasattr(value, "__await__") else value


def _ended(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a call of a waiting client suspended")


def _waited(method: _Call[P, Coroutine[Any, Any, T]]) -> Callable[Concatenate[IndexClient, P], T]:
    """Return the method of `IndexClient` for a coroutine function."""

    @functools.wraps(method)
    def call(self: IndexClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _ended(method(self._client, *args, **kwargs))

    return call


def _iterated(method: _Call[P, AsyncIterator[T]]) -> Callable[Concatenate[IndexClient, P], Iterator[T]]:
    """Return the method of `IndexClient` for an asynchronous generator."""

    @functools.wraps(method)
    def call(self: IndexClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = method(self._client, *args, **kwargs)
        while (item := _ended(anext(items, None))) is not None:
            yield item

    return call


class IndexClient(AbstractContextManager["IndexClient"]):
    """A client of one service.

    `url` is its address, like ``http://host:8080``; `token` its token; `ca_file` the PEM file of the CA that signed its
    certificate. A request is sent at most `tries` times. Any thread may call its methods. Raises `InvalidArgument` for
    an invalid URL or token.
    """

    def __init__(self, url: str, *, token: str | None = None, ca_file: str | None = None, tries: int = _TRIES) -> None:
        self._client = _WaitingClient(url, token=token, ca_file=ca_file, tries=tries)
        self.url = self._client.url

    query = _waited(AsyncIndexClient.query)
    query_many = _waited(AsyncIndexClient.query_many)
    query_many_arrow = _waited(AsyncIndexClient.query_many_arrow)
    messages = _waited(AsyncIndexClient.messages)
    message = _waited(AsyncIndexClient.message)
    topics = _waited(AsyncIndexClient.topics)
    files = _waited(AsyncIndexClient.files)
    du = _waited(AsyncIndexClient.du)
    verify = _waited(AsyncIndexClient.verify)
    verification = _waited(AsyncIndexClient.verification)
    put_batch = _waited(AsyncIndexClient.put_batch)
    query_all = _iterated(AsyncIndexClient.query_all)
    stream = _iterated(AsyncIndexClient.stream)

    def close(self) -> None:
        """Release connections."""
        self._client._http.close()

    def __exit__(self, *_: object) -> None:
        self.close()
