"""Base of the storages in a bucket of an object store: the checks and repeats of reads, which a `Reads` sends.

Object `name` has the key `prefix/name`. Other keys below the prefix are not objects, unless `any_names` is set.
Threads: any number.
"""

from __future__ import annotations

import contextlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self, TypeAlias, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlencode

from tiered_index.errors import ConfigError, InvalidArgument, ObjectNotFound, StorageMisconfigured, TieredIndexError
from tiered_index.storage.base import (
    BULK_DELETES,
    MAX_NAME_BYTES,
    RANGES,
    START_AFTER,
    ObjectInfo,
    Storage,
    check_name,
    check_prefix,
    check_range,
)
from tiered_index.storage.faults import Service
from tiered_index.storage.retry import PassingFault, RetryLoop

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}")
_MAX_KEY_BYTES = 1024
WAYS_ROUND = {
    RANGES: "answers ranges with whole objects: each read takes all bytes of the object before its range",
    START_AFTER: "ignores start-after: each listing takes a request for every 1,000 earlier objects",
    BULK_DELETES: "refuses bulk deletes: each object is deleted by its own request",
}
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# The first byte, and the one after the last; None: all bytes
Extent: TypeAlias = tuple[int, int] | None
# Size in bytes, time of change in epoch milliseconds, and etag; None: the answer lacks it
Headers: TypeAlias = tuple[int, int | None, str | None]


class NotListable(StorageMisconfigured):
    """A listing that the client can't read. Another client may."""


class Reads(ABC):
    """Sends the reads of one bucket. Each call is one attempt, which raises one of `errors`; `loop` repeats it.

    `sees_ends`: the client sees whether a page of a listing is the last one.
    """

    sees_ends: bool
    errors: tuple[type[Exception], ...]
    loop: RetryLoop
    service: Service

    @abstractmethod
    def get(self, key: str, extent: Extent, what: str) -> tuple[bytes, int]:
        """Return the bytes of an object that one GET delivers, and the object's size. `what` is for messages.

        Reads one byte more than was asked for: it shows a body that is too long.
        """

    @abstractmethod
    def head(self, key: str) -> Headers | None:
        """Return an object's size, time and etag; None: the answer has no size."""

    @abstractmethod
    def pages(self, prefix: str, after: str) -> Iterator[Sequence[ObjectInfo]]:
        """Yield the objects of the folder of `prefix` after the key `after`, by key, at most 1,000 at a time."""

    def is_elsewhere(self, error: Exception) -> bool:
        """Return whether the error is an answer that the bucket is in another region."""
        return False

    @abstractmethod
    def translate(self, error: Exception, *, doing: str, uri: str, name: str) -> TieredIndexError:
        """Return the typed error for one of `errors`, raised while `doing` something to `name` (may be empty)."""


class BucketStorage(Storage):
    """The objects of `bucket` whose keys start with `prefix` and a slash (no prefix: all objects)."""

    scheme: ClassVar[str]
    # The service's word for a bucket
    _kind: ClassVar[str] = "bucket"

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any) -> Self:
        """As `Storage.from_uri`."""
        return cls(uri.netloc, unquote(uri.path), options)

    def __init__(self, bucket: str, prefix: str, options: Any) -> None:
        """Set bucket and prefix without a request. Raises `ConfigError`."""
        prefix = prefix.strip("/")
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(
                f"{bucket!r} is not a {self._kind}'s name: write {self.scheme}://{self._kind}/prefix, and a name of 3 "
                "to 255 letters, digits, dots, dashes or underscores"
            )
        if prefix and any(part in {"", ".", ".."} for part in prefix.split("/")):
            raise ConfigError(f"a prefix has no empty, '.' or '..' part: {prefix!r}")
        if len(prefix.encode()) > _MAX_KEY_BYTES - MAX_NAME_BYTES - len("/"):
            raise ConfigError("the prefix is too long: with a name of 512 bytes a key has more than 1,024 bytes")
        self.bucket, self.options = bucket, options
        self._shortfalls: dict[str, str] = {}
        # Whether an answer has shown that this is such a service, and that the bucket exists
        self._has_answered = False
        self._base = f"{prefix}/" if prefix else ""
        named = {name: value for name in options.uri_parameters if (value := getattr(options, name)) is not None}
        folder = f"/{quote(prefix)}" if prefix else ""
        self.uri = f"{self.scheme}://{bucket}{folder}" + (f"?{urlencode(named, safe=':/')}" if named else "")

    def _key(self, name: str) -> str:
        return self._base + (name if self.any_names else check_name(name))

    def _name(self, key: str) -> str | None:
        """Return the object name of `key`; None if it is not a valid name."""
        name = key.removeprefix(self._base)
        try:
            return name if self.any_names else check_name(name)
        except InvalidArgument:
            return None

    @property
    @abstractmethod
    def _reads(self) -> Reads:
        """The client that reads."""

    def _client_of(self, name: str) -> Reads:
        """Return the client that reads an object; without a name, the usual one."""
        return self._reads

    @property
    def _lister(self) -> Reads:
        """The client that lists."""
        return self._reads

    @property
    def may_end_lists_early(self) -> bool:
        return not self._lister.sees_ends

    def _read(self, doing: str, name: str, act: Callable[[Any], _T], client: Callable[[], Reads] | None = None) -> _T:
        """Return `act(client)`, repeated as `RetryLoop` says. `client` is that of the object by default."""
        reads = self._client_of(name) if client is None else client()
        return reads.loop.run(doing, name, partial(act, reads))

    def _prove(self, doing: str) -> None:
        """Raise `StorageMisconfigured` if an empty listing, or a 404, does not come from the bucket."""

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        return self._get(f"reading {name!r}", name, None)[0]

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`, by one verified range GET."""
        end = start + length
        check_range(start, length)
        if not length:
            self._key(name)
            return b""
        return self._get(f"reading bytes {start}-{end - 1} of {name!r}", name, (start, end))[0]

    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        """Return the last `length` bytes and the object's size, by a HEAD and a GET."""
        check_range(length)
        what = f"reading the last {length} bytes of {name!r}"

        def act(_: Reads) -> tuple[bytes, int]:
            size = self.head(name).size_bytes
            extent = max(0, size - length), size
            with contextlib.suppress(InvalidArgument):
                data, size_now = self._get(what, name, extent) if size and length else (b"", size)
                if size_now == size:
                    return data, size
            raise PassingFault(f"{what} in {self.uri}: the object was replaced between two requests")

        return self._read(what, name, act)

    def _get(self, what: str, name: str, extent: Extent) -> tuple[bytes, int]:
        """Return the bytes of an extent, and the object's size."""
        key, said = self._key(name), f"{what} in {self.uri}"

        def act(reads: Reads) -> tuple[bytes, int]:
            data, size = reads.get(key, extent, said)
            self._has_answered = True
            start, end = extent or (0, size)
            if end > size:
                raise InvalidArgument(f"{said}: the object has {size} bytes")
            if len(data) != end - start:
                problem = f"{said}: a body of {len(data)} bytes instead of {end - start}"
                raise PassingFault(problem, wasted_bytes=end - start)
            return data, size

        return self._read(what, name, act)

    def head(self, name: str) -> ObjectInfo:
        headers = self._head(name)
        if headers is not None and headers[1] is not None:
            return ObjectInfo(name, headers[0], headers[1], headers[2])
        # some gateways leave these headers out: a listing has them, too
        key = self._key(name)
        for listed in self._listed(f"looking at {name!r}", key, ""):
            if listed.name == key:
                return replace(listed, name=name)
        raise ObjectNotFound(name, self.uri)

    def _head(self, name: str) -> Headers | None:
        """Return the object's size, time and etag; None: the answer lacks the size."""
        key, what = self._key(name), f"looking at {name!r}"
        try:
            headers: Headers | None = self._read(what, name, lambda reads: reads.head(key))
        except ObjectNotFound:
            # a HEAD's 404 does not say whether bucket or object is missing
            self._prove(what)
            raise
        self._has_answered = True
        return headers

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in order of name; one request for each 1,000."""
        if not self.any_names:
            check_prefix(prefix, start_after)
        start = self._base + start_after if start_after else ""
        for listed in self._listed(f"listing {prefix!r}", self._base + prefix, start):
            if (name := self._name(listed.name)) and (listed.size_bytes or self._is_object(name)):
                yield replace(listed, name=name)

    def _is_object(self, name: str) -> bool:
        """Return whether a listed name without bytes is an object."""
        return True

    def _listed(self, doing: str, prefix: str, start: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose keys begin with `prefix` and sort after `start`, by key, in order of key."""
        folder = prefix.rpartition("/")[0]
        last = after = start
        pages: Iterator[Sequence[ObjectInfo]] | None = None

        def page(reads: Reads) -> Sequence[ObjectInfo] | None:
            nonlocal after, pages
            turned, pages = pages, None
            if turned is None:
                # at the start, and after a fault
                after, turned = last, reads.pages(prefix, last)
            objects = next(turned, None)
            pages = turned
            return objects

        while (objects := self._read(doing, "", page, lambda: self._lister)) is not None:
            if not objects:
                self._prove(doing)
            for listed in objects:
                if (key := listed.name) == folder:
                    # the mark of the folder itself, `folder/`, whose slash obstore strips
                    continue
                # a foreign key would be taken for another object, and perhaps deleted
                if folder and not key.startswith(f"{folder}/"):
                    problem = f"the service lists {key!r}, which does not begin with {prefix!r}"
                    raise StorageMisconfigured(f"{self.uri}: {problem}: {self._reads.service.wrong}")
                if key <= after:
                    if key <= after.rstrip("/"):
                        self._lacks(START_AFTER)
                elif key > last:
                    last = key
                    if key.startswith(prefix):
                        yield listed
                    elif key > prefix:
                        return
                elif listed.size_bytes:
                    problem = f"the service lists {key!r} after {last!r}; the engine needs order of name"
                    raise NotListable(f"{self.uri}: {problem}")
            self._has_answered = True

    def shortfalls(self) -> Mapping[str, str]:
        return dict(self._shortfalls)

    def _lacks(self, ability: str) -> None:
        """Note, and log once, that the service lacks an ability, and the backend's way round."""
        if ability not in self._shortfalls:
            self._shortfalls[ability] = WAYS_ROUND[ability]
            _log.warning("%s: the service %s", self.uri, WAYS_ROUND[ability])


def plain_etag(text: str | None) -> str | None:
    """Return an etag without its quotes; None for a weak one, which other bytes may share, or none."""
    return None if text is None or text.startswith("W/") else text.strip('"') or None
