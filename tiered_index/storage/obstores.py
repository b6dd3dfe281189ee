"""Base of the backends that send requests through obstore, the binding of Rust's object_store.

obstore is loaded on use. Its threads do not survive a fork: a process that was forked after its parent used obstore
can't use it. Threads: any number.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import urljoin, urlsplit

from tiered_index.base.call import check_deadline, remaining_s, sending
from tiered_index.base.threads import start_thread
from tiered_index.errors import ObjectNotFound, StorageMisconfigured, TieredIndexError
from tiered_index.storage.base import PAGE, START_AFTER, ObjectInfo
from tiered_index.storage.buckets import WAYS_ROUND, Extent, Headers, NotListable, Reads, plain_etag
from tiered_index.storage.faults import NO_TLS, OWN_AUTHORITY, Refusal, of_certificate, of_refusal
from tiered_index.storage.retry import PassingFault, RetryLoop

# Objects of a listing that are checked at once: obstore goes on with a page that a service repeats
_CHUNK = 20
# Longest time until the next objects of a listing: obstore asks for the same page without objects again and again
_LONGEST_PAGE_S = 120.0
NOT_NAMED = re.compile(r"[\0-\x1f\x7f]|\A/|//|/\Z|(\A|/)\.{1,2}(/|\Z)")
"""Keys that obstore refuses, or whose slashes it strips."""
# `RetryLoop` repeats requests and counts them
NO_RETRIES = {"max_retries": 0}
# A proxy that can't exist: nothing listens on port 0. obstore follows redirects, and would send signatures and tokens
# to the other host.
NOWHERE = "127.0.0.1:0"
# Statuses of an answer to a request that has lost its signature
_UNSIGNED = {400, 401, 403}
# Endpoints that have answered this process without a redirect to another port
PROVEN: set[str] = set()
_ANSWERED = re.compile(r"status code: (\d{3})[^:]*: ?(.*?)(?:\n\nDebug source:|$)", re.DOTALL)
# Patterns are compiled when they are needed: each takes a part of a millisecond
_CODE, _MESSAGE = "<Code>([^<]*)</Code>", r"<Message>([^<\n]*)"
# in the description of an error's source
_CAUSE = r'(?:message|error): "([^"]+)"'
# Parts of obstore's messages, the class of the typed error, and the remedy, with those of the service
_TOLD: tuple[tuple[str, Callable[[str], TieredIndexError], str], ...] = (
    (f"redirect without LOCATION|{NOWHERE},", StorageMisconfigured, "{0.redirected}"),
    ("invalid path|parse path", NotListable, "obstore can't name this key: rename the object, or name others"),
    ("non-partial|missing from response|(?i:content.range)", StorageMisconfigured.lacking, "{0.odd}"),
    ("missing field", StorageMisconfigured.lacking, "the service leaves out what a listing needs"),
    ("Requested |body error|ill-formed", PassingFault, "the answer is not the one that was asked for"),
    ("invalid list response", StorageMisconfigured, "the response is not a listing: {0.wrong}"),
    ("InvalidContentType|WRONG_VERSION_NUMBER", StorageMisconfigured, NO_TLS),
    ("Received None|Access key is None|Secret key is None", StorageMisconfigured, "{0.no_credentials}"),
    ("kind: Timeout", PassingFault, "timeout"),
)
# obstore, and the process that loaded it
_loaded: tuple[Any, int] | None = None
# The loop of asyncio in which listings are awaited, because an awaited one can be ended
_loop: Any = None
_loop_lock = threading.Lock()


class OwnAuthority(StorageMisconfigured):
    """A server's certificate is its own authority (`openssl req -x509`). Rust's TLS refuses it, OpenSSL accepts it."""


def obstore() -> Any:
    """Return the module `obstore`; None in a process that was forked after its parent had called this."""
    global _loaded
    if _loaded is None:
        importlib.import_module("obstore.store")
        _loaded = importlib.import_module("obstore"), os.getpid()
        # a collection of the parent's garbage would wait for threads of obstore, which do not exist in a child
        os.register_at_fork(after_in_child=gc.freeze)
    module, loaded_by = _loaded
    return module if loaded_by == os.getpid() else None


def client_options(
    hosts: Iterable[str],
    connections: int,
    *,
    allow_http: bool,
    connect_timeout_s: float = 5.0,
    read_timeout_s: float = 30.0,
) -> dict[str, Any]:
    """Return obstore's `client_options`. Requests to hosts other than `hosts` fail without leaving this machine."""
    return {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=connect_timeout_s),
        # From the request on, also while its body is sent, and then from each part of the response to the next
        "read_timeout": timedelta(seconds=read_timeout_s),
        # Of a whole request: the body of a response may take any time
        "timeout": timedelta(days=1),
        "pool_max_idle_per_host": str(connections),
        "proxy_url": f"http://{NOWHERE}",
        "proxy_excludes": ",".join(hosts),
    }


class StoreReads(Reads):
    """Reads one bucket through obstore, which makes one attempt of each request.

    The subclass sets:

    - `_store`.
    - `_is_trusted`: the service is the provider's own, whose listings end, and which redirects to no other port.
    - `_shows_secrets`: a redirected request would have a secret.
    """

    # Whether each page of a listing is a listing of its own. obstore takes a page without the token of the next one
    # for the last, and not every service can begin a listing after a name.
    _lists_anew: ClassVar[bool]
    # In obstore's error for a failed request to a source of credentials
    _of_roles: ClassVar[str]
    # The start of a body that may be the service's
    _bodies: ClassVar[str] = r"\ufeff?\s*($|<\?xml|<Error)"
    _store: Any
    _is_trusted = False
    _shows_secrets = True

    def __init__(
        self,
        uri: str,
        loop: Callable[..., RetryLoop],
        bucket_url: str,
        certificates: str | None = None,
        connect_timeout_s: float = 5.0,
    ) -> None:
        """Read the bucket at `bucket_url`. `certificates` is a file of trusted ones; None: the system's."""
        self._uri, self._obstore = uri, obstore()
        self._url, self._certificates, self._timeout_s = bucket_url, certificates, connect_timeout_s
        # an assertion: a session without credentials
        self.errors = (self._obstore.exceptions.BaseError, OSError, ValueError, AssertionError)
        self.loop = loop(errors=self.errors, translate=self.translate)
        self._has_read = False

    def send(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """Send one request by a function of obstore, and count it. Raises `StorageMisconfigured` as `check_port`."""
        if self._shows_secrets:
            self.check_port()
        sending()
        return getattr(self._obstore, operation)(*arguments, **options)

    def check_port(self) -> None:
        """Raise `StorageMisconfigured` if the service redirects to another port of its host.

        obstore would follow: its options know no ports. It drops the signature, but not a session token, and gives the
        first address as the referrer. An unsigned HEAD asks once for all storages of the process.
        """
        url = urlsplit(self._url)
        if self._is_trusted or url.netloc in PROVEN:
            return
        # without an answer, the request itself will show the problem
        with contextlib.suppress(OSError):
            # a redirect to another host fails by itself
            target = urlsplit(urljoin(self._url, self._unsigned_headers().get("location", "")))
            if target.hostname == url.hostname and (target.scheme, target.netloc) != (url.scheme, url.netloc):
                problem = f"the endpoint redirects to {target.scheme}://{target.netloc}"
                raise StorageMisconfigured(f"{self._uri}: {problem}: name that address, or correct the endpoint's URL")
            PROVEN.add(url.netloc)

    def _unsigned_headers(self) -> Any:
        """Return the headers of the answer to an unsigned HEAD. Follows no redirect. Raises `OSError`."""
        check_deadline(f"sending HeadBucket to {self._uri}")
        sending()
        url, timeout_s = urlsplit(self._url), self._timeout_s
        if (left_s := remaining_s()) is not None:
            # the client interrupts a wait only by its own time; 0 would be no wait at all
            timeout_s = max(0.001, min(timeout_s, left_s))
        # to load it takes a fortieth of the time of boto3
        client = importlib.import_module("http.client")
        if url.scheme == "https":
            context = importlib.import_module("ssl").create_default_context(cafile=self._certificates)
            connection = client.HTTPSConnection(url.netloc, timeout=timeout_s, context=context)
        else:
            connection = client.HTTPConnection(url.netloc, timeout=timeout_s)
        try:
            connection.request("HEAD", url.path or "/")
            return connection.getresponse().headers
        except client.HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def get(self, key: str, extent: Extent, what: str) -> tuple[bytes, int]:
        length = extent[1] - extent[0] if extent else 0
        try:
            answer = self.send("get", self._store, key, options={"range": extent} if extent else {})
            size = int(answer.meta["size"])
            data = next(iter(answer.stream((length or size) + 1)), b"")
        except self.errors as error:
            if "body error" not in (text := str(error)):
                raise
            problem = f"{what}: the body broke off: {text.partition(chr(10))[0]}"
            raise PassingFault(problem, wasted_bytes=length) from error
        self._has_read = True
        return data, size

    def head(self, key: str) -> Headers | None:
        try:
            metadata = self.send("head", self._store, key)
        except self.errors as error:
            if "missing from response" in str(error):
                return None
            raise
        return int(metadata["size"]), epoch_ms(metadata["last_modified"]) or None, plain_etag(metadata["e_tag"])

    def pages(self, prefix: str, after: str) -> Iterator[Sequence[ObjectInfo]]:
        """As `Reads.pages`. A page that ends a listing counts as a request only if it has objects."""
        folder = prefix.rpartition("/")[0] or None
        start = "" if prefix.endswith("/") else prefix[:-1]
        listing: Any = None
        taken = 0
        while True:
            is_page = taken % PAGE == 0
            is_sent = listing is None or (is_page and self._lists_anew)
            if is_sent:
                # obstore strips slashes from the end
                offset = max(after, start).partition("//")[0].rstrip("/") or None
                listing = self.send("list", self._store, folder, offset=offset, chunk_size=min(_CHUNK, PAGE))
            objects = next(listing, ()) if self._is_trusted else self._awaited(listing)
            if objects and is_page and not is_sent:
                sending()
            page = [
                ObjectInfo(
                    str(listed["path"]),
                    int(listed["size"]),
                    epoch_ms(listed["last_modified"]),
                    plain_etag(listed["e_tag"]),
                )
                for listed in objects
            ]
            if taken and is_sent and page and page[0].name <= after:
                raise NotListable.lacking(f"{self._uri}: the service {WAYS_ROUND[START_AFTER]}: {self.service.odd}")
            yield page
            if len(page) < min(_CHUNK, PAGE):
                return
            after, taken = page[-1].name, taken + len(page)

    def _awaited(self, listing: Any) -> Sequence[Any]:
        """Return the next objects of a listing, none at its end. Raises `NotListable` if they don't come."""
        asyncio = importlib.import_module("asyncio")
        future = asyncio.run_coroutine_threadsafe(_next(listing), _running_loop(asyncio))
        left_s = remaining_s()
        try:
            objects: Sequence[Any] = future.result(_LONGEST_PAGE_S if left_s is None else min(left_s, _LONGEST_PAGE_S))
        except TimeoutError as error:
            if future.done():
                raise
            check_deadline(f"listing {self._uri}")
            problem = f"a listing has gone on for {_LONGEST_PAGE_S:g} s without a name"
            raise NotListable.lacking(f"{self._uri}: {problem}: {self.service.wrong}") from error
        finally:
            # also after an interrupt
            future.cancel()
        return objects

    def _refusal_of(self, text: str) -> Refusal | None:
        """Return the answer that obstore's error tells; None: there was no answer."""
        if (answered := _ANSWERED.search(text)) is None:
            return None
        status, body = int(answered[1]), answered[2]
        code, message = re.search(_CODE, body), re.search(_MESSAGE, body)
        # obstore does not give the response's headers
        kind = None if re.match(self._bodies, body) else "text/html" if "<html" in body else "text/plain"
        is_head = "performing HEAD " in text
        return Refusal(status, code[1] if code else "", message[1] if message else "", kind, is_head)

    def translate(self, error: Exception, *, doing: str, uri: str, name: str) -> TieredIndexError:
        text = str(error)
        if re.search(self._of_roles, text):
            unknown = f"{doing} in {uri}: {text.partition(chr(10))[0]}: {self.service.no_credentials}"
            return PassingFault(unknown) if self._has_read else StorageMisconfigured(unknown)
        if (refusal := self._refusal_of(text)) is not None:
            if refusal.status in _UNSIGNED or refusal.foreign_type is not None:
                self.check_port()
            return of_refusal(refusal, self.service, doing=doing, uri=uri, name=name)
        if "Object at location" in text and isinstance(error, FileNotFoundError):
            return ObjectNotFound(name, uri)
        said = f"{doing} in {uri}: {text.partition(chr(10))[0]}"
        for part, kind, remedy in _TOLD:
            if re.search(part, text):
                return kind(f"{said}: {remedy.format(self.service)}")
        if (remedy_of_certificate := of_certificate(text, self.service)) is not None:
            refused = OwnAuthority if OWN_AUTHORITY in text else StorageMisconfigured
            return refused(f"{said}: {remedy_of_certificate}")
        if "error sending request" in text or isinstance(error, OSError):
            cause = re.search(_CAUSE, text)
            return PassingFault(f"{said}: {cause[1]}" if cause else said)
        return StorageMisconfigured(said)


async def _next(listing: Any) -> Sequence[Any]:
    try:
        objects: Sequence[Any] = await anext(listing)
    except StopAsyncIteration:
        return ()
    return objects


def _run(loop: Any) -> None:
    """Run a loop until it is stopped."""
    with contextlib.closing(loop):
        loop.run_forever()


def _running_loop(asyncio: Any) -> Any:
    global _loop
    if _loop is None:
        loop = asyncio.new_event_loop()
        # without the lock: the new thread may run a finalizer that lists before it is started
        start_thread(threading.Thread(target=_run, args=(loop,), name="tiered-index-lists", daemon=True))
        with _loop_lock:
            if _loop is None:
                _loop = loop
        if _loop is not loop:
            loop.call_soon_threadsafe(loop.stop)
    return _loop


def epoch_ms(moment: Any) -> int:
    """Return a time in epoch milliseconds."""
    milliseconds: int = round(moment.timestamp() * 1000)
    return milliseconds
