"""A client of `tiered-index serve`: the library's lookups, arguments, answers and errors, over HTTP.

    with IndexClient("http://broker-a:8080", token=TOKEN) as client:
        answer = client.query("orders", "order-4711")

If the service does not answer or is overloaded, the client repeats a request that is safe to repeat, up to three times.
An incomplete response raises `StorageUnavailable`. Threads: every method from any thread. Use `AsyncIndexClient` with
asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import urllib3

from tiered_index.client.answers import (
    COLUMNS,
    decoded,
    error_of,
    item_of,
    item_type_of,
    messages_of,
    reports_of,
    result_of,
    results_of,
    table_of_stream,
    topics_of,
)
from tiered_index.errors import InvalidArgument, PartialAnswer, StorageUnavailable
from tiered_index.service.answers.asked import check_lookups
from tiered_index.service.answers.rows import once
from tiered_index.service.lookup.messages import MessagesResult
from tiered_index.types import IndexItem, Lookup, QueryResult, TopicsResult

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
JSON, NDJSON, ARROW = "application/json", "application/x-ndjson", "application/vnd.apache.arrow.stream"
# Half a surrogate pair is sent unchanged: the service refuses it, as in a batch
_HALVES = "surrogatepass"
_TRIES = 4
_BACKOFF_S = 0.2
_RETRIED = frozenset({429, 502, 503})
_CONNECT_S = 10.0
# Longest wait that the client accepts from a Retry-After header
_MOST_WAIT_S = 10.0
# Time for a request in addition to its lookup's `timeout_s`
_MORE_S = 30.0
_BLOCK_BYTES = 1 << 16
_TOKEN = re.compile("[!-~]+")


class IndexClient:
    """A client of one service.

    `url` is its address, like ``http://host:8080``; `token` its token; `ca_file` the PEM file of the CA that signed its
    certificate. A request is sent at most `tries` times. Any thread may call its methods. Raises `InvalidArgument` for
    an invalid URL or token.
    """

    def __init__(self, url: str, *, token: str | None = None, ca_file: str | None = None, tries: int = _TRIES) -> None:
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        more = "@" in parts.netloc or parts.query or parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or more:
            # without the URL, which may hold a secret
            raise InvalidArgument("not the URL of a service: write http://host:8080, without login and parameters")
        if token is not None and not _TOKEN.fullmatch(token):
            raise InvalidArgument("invalid token: a token is one word of printable ASCII")
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        self._ca_file = ca_file
        self._connect()
        self._tries = tries

    def _connect(self) -> None:
        self._pid = os.getpid()
        self._pool = urllib3.PoolManager(ca_certs=self._ca_file, maxsize=32)

    def query(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 64,
        cursor: str | None = None,
        allow_partial: bool = False,
        *,
        explain: bool = False,
        **limits: Any,
    ) -> QueryResult:
        """Look up a key, as `IndexReader.query`.

        `limits` are `max_requests`, `max_bytes`, `timeout_s` and `max_cost_usd`; the service may have lower ones. With
        `explain` the answer has a report of each file. Raises as `IndexReader.query`, and `ConfigError` if the token
        does not allow it.
        """
        lookup = Lookup(topic, key, begin_ms, end_ms, max_count, cursor)
        asked = _asked(lookup, allow_partial=allow_partial, explain=explain, **limits)
        return self._answer(result_of, "GET", "/v1/query", asked)

    def query_all(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 1000,
        allow_partial: bool = False,
        **limits: Any,
    ) -> Iterator[QueryResult]:
        """Yield all answers of a lookup page by page, no entry twice. Arguments and errors: see `query`."""
        seen: set[tuple[object, ...]] = set()
        cursor = None
        while True:
            page = self.query(topic, key, begin_ms, end_ms, max_count, cursor, allow_partial, **limits)
            yield once(page, seen)
            if (cursor := page.cursor) is None:
                return

    def stream(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        allow_partial: bool = False,
        **limits: Any,
    ) -> Iterator[IndexItem]:
        """Yield all entries of a key as they arrive, newest first, by one request.

        Raises as `query`; `StorageUnavailable` if the answer breaks off; `PartialAnswer` after the last entry of a
        partial answer.
        """
        asked = _asked(Lookup(topic, key, begin_ms, end_ms, 1000), allow_partial=allow_partial, all=True, **limits)
        response = self._ask("GET", "/v1/query", asked, accept=NDJSON, preload=False)
        item_type = item_type_of(response.headers.get(COLUMNS))
        try:
            status = None
            for line in _lines(response, self.url):
                document = _parsed(line, self.url)
                # Only entries have a topic_id. Their further columns may have any name, even "status".
                if "topic_id" in document:
                    yield decoded(partial(item_of, item_type=item_type), document)
                else:
                    status = document
        finally:
            response.release_conn()
        if status is None:
            raise StorageUnavailable(f"the answer of {self.url} broke off: repeat the request")
        if "error" in status:
            raise error_of(status["error"])
        if status["status"] == "partial":
            failed = reports_of(status["failed"])
            raise PartialAnswer(f"{len(failed)} files could not be read", failed=failed)

    def query_many(
        self,
        lookups: Iterable[Lookup | tuple[str, str]],
        allow_partial: bool = False,
        *,
        max_count: int = 64,
        **limits: Any,
    ) -> list[QueryResult]:
        """Answer many lookups by one request, as `IndexReader.query_many`. Explain and freshness apply to all of them.

        Raises the same errors, and `InvalidArgument` beyond the service's limits (10,000 lookups, a million entries
        together).
        """
        given = check_lookups(lookups, max_count)
        if not given:
            return []
        body = _batch_body(given, allow_partial, False, limits)
        return self._answer(results_of, "POST", "/v1/query:batch", {}, body, timeout_of=limits)

    def query_many_arrow(
        self,
        lookups: Iterable[Lookup | tuple[str, str]],
        allow_partial: bool = False,
        *,
        max_count: int = 64,
        explain: bool = False,
        allow_spent: bool = False,
        **limits: Any,
    ) -> tuple[pa.Table, dict[str, Any]]:
        """Answer one or more lookups by one request. Return a pair: one Arrow table, and a dict about all lookups.

        The table has `lookup` (int32: the lookup's number, from 0) and the columns of `QueryResult.to_arrow`, by lookup
        and in answer order. The dict has ``status``, ``cursors``, ``partial``, ``failed``, ``explain`` and the other
        members of an answer. ``cursors`` has the cursors of truncated answers by the lookup's number as text,
        ``partial`` the numbers of partial lookups. At a bound the call raises `BudgetExceeded`; with `allow_spent` it
        returns the entries found so far, and ``exceeded`` names the bound.
        """
        spent = {"allow_spent": True} if allow_spent else {}
        body = _batch_body(check_lookups(lookups, max_count), allow_partial, explain, limits | spent)
        data = self._ask("POST", "/v1/query:batch", {}, body, ARROW, timeout_of=limits).data
        return decoded(table_of_stream, data)

    def messages(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int = 64,
        cursor: str | None = None,
        allow_partial: bool = False,
        *,
        body: str = "text",
        explain: bool = False,
        **limits: Any,
    ) -> MessagesResult:
        """Look up a key and fetch its messages. `body` (text, json, hex, none) is the form of the bodies.

        `to_dict()` of each `message` is its document. Raises as `query`.
        """
        lookup = Lookup(topic, key, begin_ms, end_ms, max_count, cursor)
        asked = _asked(lookup, allow_partial=allow_partial, explain=explain, body=body, **limits)
        return self._answer(messages_of, "GET", "/v1/messages", asked)

    def message(self, msg_id: str, topic: str | None = None, *, body: str = "text", **limits: Any) -> MessagesResult:
        """Return one message: by the id of its place, or with `topic` by its unique key.

        Raises `NotThere` if there is none.
        """
        asked = _given({"topic": topic, "body": body, **limits})
        # An id of dots alone would change the path
        path = f"/v1/messages/{quote(msg_id, safe='', errors=_HALVES).replace('.', '%2E')}"
        return self._answer(messages_of, "GET", path, asked)

    def topics(
        self,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        allow_partial: bool = False,
        *,
        explain: bool = False,
        **limits: Any,
    ) -> TopicsResult:
        """List the topics that the token may see, as `IndexReader.topics`."""
        asked = {"begin_ms": begin_ms, "end_ms": end_ms, "allow_partial": allow_partial, "explain": explain}
        return decoded(topics_of, self._json("GET", "/v1/topics", _given(asked | limits)))

    def files(self) -> dict[str, Any]:
        """List all files of the index: the document of ``tiered-index files --json``."""
        return self._json("GET", "/v1/files", {})

    def du(self, by: str = "topic,day,state") -> dict[str, Any]:
        """Return stored entries, bytes and cost: the document of ``tiered-index du --json``."""
        return self._json("GET", "/v1/du", {"by": by})

    def verify(self, *, deep: bool = False) -> dict[str, Any]:
        """Start a verification of all checksums of the index. Return the job; pass its ``id`` to `verification`."""
        body = json.dumps({"deep": deep}).encode()
        return self._json("POST", "/v1/verify", {}, body, repeatable=False)

    def verification(self, job_id: str) -> dict[str, Any]:
        """Return a job of `verify`: its ``state`` (running, done, failed), progress and, at its end, ``report``."""
        return self._json("GET", f"/v1/verify/{quote(job_id, safe='')}", {})

    def put_batch(
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
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        asked = _given({"source": source, "position": position, "after": after, "durable": durable})
        body = sink.getvalue()
        return self._json("POST", "/v1/entries", asked, body, content_type=ARROW, repeatable=source is not None)

    def close(self) -> None:
        """Release connections."""
        self._pool.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, decode: Callable[[dict[str, Any], type[IndexItem] | None], T], *asked: Any, **how: Any) -> T:
        """Return the answer that a request of entries gets. The arguments after `decode` are those of `_ask`."""
        response = self._ask(*asked, **how)
        item_type = item_type_of(response.headers.get(COLUMNS))
        return decoded(lambda document: decode(document, item_type), _parsed(response.data, self.url))

    def _json(
        self, method: str, path: str, asked: Mapping[str, Any], body: bytes | None = None, **how: Any
    ) -> dict[str, Any]:
        return _parsed(self._ask(method, path, asked, body, **how).data, self.url)

    def _ask(
        self,
        method: str,
        path: str,
        asked: Mapping[str, Any],
        body: bytes | None = None,
        accept: str = JSON,
        content_type: str = JSON,
        repeatable: bool = True,
        preload: bool = True,
        timeout_of: Mapping[str, Any] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        headers = {**self._headers, "accept": accept} | ({"content-type": content_type} if body is not None else {})
        limit_s = (timeout_of or asked).get("timeout_s")
        retries = _Retry(
            total=self._tries - 1 if repeatable else 0,
            status_forcelist=_RETRIED,
            allowed_methods=None,
            backoff_factor=_BACKOFF_S,
            raise_on_status=False,
            redirect=0,
        )
        # `urlencode` would format a member of an enumeration, perhaps as another text
        plain = {name: str.__str__(value) if isinstance(value, str) else value for name, value in asked.items()}
        query = f"?{urlencode(plain, errors=_HALVES)}" if asked else ""
        if self._pid != os.getpid():
            # A forked child must not use its parent's connections
            self._connect()
        try:
            response = self._pool.request(
                method,
                self.url + path + query,
                body=body,
                headers=headers,
                retries=retries,
                preload_content=preload,
                timeout=urllib3.Timeout(_CONNECT_S, float(limit_s) + _MORE_S if limit_s else 2 * _MORE_S),
            )
        except urllib3.exceptions.HTTPError as error:
            raise StorageUnavailable(
                f"{self.url} did not answer ({_cause_of(error)}): check the URL, and that the service runs"
            ) from error
        if response.status >= 300:
            data = response.data
            response.release_conn()
            problem = _parsed(data, self.url) if data[:1] == b"{" else {}
            # other documents than problems may have a text as their status
            raise error_of({**problem, "status": response.status})
        return response


class _Retry(urllib3.Retry):
    """Repeats requests, and bounds the wait that the service asks for."""

    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        try:
            wait_s = super().get_retry_after(response)
        except urllib3.exceptions.InvalidHeader:
            return None
        return None if wait_s is None else min(wait_s, _MOST_WAIT_S)


def _awaited(method: Callable[..., T]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs a method of `IndexClient` in a thread."""

    @functools.wraps(method)
    async def call(self: AsyncIndexClient, /, *args: Any, **kwargs: Any) -> T:
        return await asyncio.to_thread(method, self.client, *args, **kwargs)

    return call


class AsyncIndexClient:
    """An `IndexClient` for asyncio, with the same arguments, answers and errors.

    Calls run in threads of the event loop.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of `IndexClient`."""
        self.client = IndexClient(*args, **kwargs)

    query = _awaited(IndexClient.query)
    query_many = _awaited(IndexClient.query_many)
    query_many_arrow = _awaited(IndexClient.query_many_arrow)
    messages = _awaited(IndexClient.messages)
    message = _awaited(IndexClient.message)
    topics = _awaited(IndexClient.topics)
    files = _awaited(IndexClient.files)
    du = _awaited(IndexClient.du)
    verify = _awaited(IndexClient.verify)
    verification = _awaited(IndexClient.verification)
    put_batch = _awaited(IndexClient.put_batch)
    close = _awaited(IndexClient.close)

    async def query_all(self, *args: Any, **kwargs: Any) -> AsyncIterator[QueryResult]:
        """Yield an answer page by page, as `IndexClient.query_all`."""
        pages = self.client.query_all(*args, **kwargs)
        while (page := await asyncio.to_thread(next, pages, None)) is not None:
            yield page

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _given(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are not None; flags as ``true`` and ``false``."""
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in asked.items()
        if value is not None
    }


def _batch_body(lookups: Iterable[Lookup], allow_partial: bool, explain: bool, limits: Mapping[str, Any]) -> bytes:
    rows = [{name: value for name, value in vars(one).items() if value is not None} for one in lookups]
    named = {name: value for name, value in limits.items() if value is not None}
    return json.dumps({"lookups": rows, "allow_partial": allow_partial, "explain": explain, **named}).encode()


def _asked(lookup: Lookup, **more: Any) -> dict[str, Any]:
    return _given(vars(lookup) | more)


def _cause_of(error: BaseException) -> str:
    """Return the text of an error's innermost cause, without the parts of urllib3 that passed it on."""
    while True:
        inner = (getattr(error, "reason", None), error.__cause__, *error.args)
        if (cause := next((one for one in inner if isinstance(one, BaseException)), None)) is None:
            break
        error = cause
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _lines(response: urllib3.BaseHTTPResponse, url: str) -> Iterator[bytes]:
    """Yield the complete lines of a body. Raises `StorageUnavailable` if the connection breaks."""
    rest = b""
    try:
        for block in response.stream(_BLOCK_BYTES):
            *whole, rest = (rest + block).split(b"\n")
            yield from whole
    except urllib3.exceptions.HTTPError as error:
        raise StorageUnavailable(f"the answer of {url} broke off: {_cause_of(error)}") from error


def _parsed(data: bytes, url: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(data)
        if isinstance(document, dict):
            return document
    # If a service fails within a document, it ends the document with a line that holds the error
    with contextlib.suppress(ValueError, RecursionError):
        last = json.loads(data.rstrip().rpartition(b"\n")[2])
        if isinstance(last, dict) and isinstance(last.get("error"), dict):
            raise error_of(last["error"])
    if data[:1] == b"{":
        raise StorageUnavailable(f"the answer of {url} broke off: repeat the request, or ask for less at once")
    raise StorageUnavailable(f"unexpected response from {url}: is this a tiered_index service?")
