"""Objects in an S3 bucket (`s3://bucket/prefix`): Amazon's or any service that speaks its API.

The service must have put-if-absent (`If-None-Match: *`), reads that see earlier writes, and listings in order of UTF-8
bytes. obstore reads. boto3 writes: a process loads it when it first writes (docs/decisions/0085). boto3 also reads if
the URI says `client=boto3`, while moto's mock is active, and in a process that was forked after its parent used
obstore. Threads: any number; after a fork, open a new storage (readers do so themselves).
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from tiered_index.errors import ObjectNotFound, StorageMisconfigured
from tiered_index.storage.base import (
    BULK_DELETES,
    PROBE_PREFIX,
    RANGES,
    START_AFTER,
    Bytes,
    ObjectInfo,
    Writer,
    check_name,
)
from tiered_index.storage.buckets import BucketStorage, NotListable
from tiered_index.storage.faults import NO_S3, PROXIED
from tiered_index.storage.obstores import NOT_NAMED, OwnAuthority, epoch_ms, obstore
from tiered_index.storage.retry import RetryLoop
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.place import find_place
from tiered_index.storage.s3.reads import S3Reads

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from tiered_index.storage.s3.twin import Boto3Reads
    from tiered_index.storage.s3.writes import Writes

_T = TypeVar("_T")


class S3Storage(BucketStorage):
    """A bucket."""

    scheme = "s3"
    options_type = S3Options

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        options: S3Options | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Open the storage without a request. `sleep` and `uniform` make the waits before repeats."""
        options = options or S3Options()
        super().__init__(bucket, prefix, options)
        self._loop = partial(RetryLoop, self.uri, options.max_attempts, options.backoff_s, sleep, uniform)
        self._place = find_place(bucket, self.uri, options)
        self._lists_by_boto3 = False
        self._reads_by_boto3 = options.client is not None
        self._forget()

    def _forget(self) -> None:
        """Open the clients on use. In a forked child a thread of the parent may hold the parent's lock.

        Other threads may be about to use the clients: each takes a client from its attribute once.
        """
        self._lock = threading.RLock()
        # by the name of the method that opens it
        self._clients: dict[str, Any] = {}
        # last: from now on threads of a forked child use the clients
        self._pid = os.getpid()

    def _opened(self, make: Callable[[], _T]) -> _T:
        """Return a client, which `make` opens at the first use."""
        if self._pid != os.getpid():
            self._forget()
        clients = self._clients
        with self._lock:
            client: _T | None = clients.get(make.__name__)
            if client is None:
                client = clients[make.__name__] = make()
            return client

    @property
    def _reads(self) -> S3Reads | Boto3Reads:
        """The client that reads."""
        is_boto3s = self._reads_by_boto3 or _is_mocked() or obstore() is None
        make: Callable[[], S3Reads | Boto3Reads] = self._twin if is_boto3s else self._obstore
        return self._opened(make)

    @property
    def _writes(self) -> Writes:
        """The requests through boto3."""
        return self._opened(self._boto3)

    def _client_of(self, name: str) -> S3Reads | Boto3Reads:
        return self._opened(self._twin) if name and NOT_NAMED.search(self._base + name) else self._reads

    @property
    def _lister(self) -> S3Reads | Boto3Reads:
        return self._opened(self._twin) if self._lists_by_boto3 else self._reads

    def _listed(self, doing: str, prefix: str, start: str) -> Iterator[ObjectInfo]:
        """As `BucketStorage._listed`, by boto3 if obstore can't list all names, or if the service ignores start-after.

        obstore refuses some keys, strips slashes at the ends of others, and sees no end of a listing (`list_whole`).
        """
        self._lists_by_boto3 |= NOT_NAMED.search(f"{prefix}_") is not None
        last = start
        if self._lister.sees_ends:
            yield from super()._listed(doing, prefix, start)
            return
        with contextlib.suppress(NotListable):
            for listed in super()._listed(doing, prefix, start):
                if self.any_names and not prefix and last == start:
                    self._check_stripped(listed.name)
                last = listed.name
                yield listed
            if START_AFTER not in self._shortfalls:
                return
        self._lists_by_boto3 = True
        # from the start: a listing out of order would pass for one that ends early
        yield from (listed for listed in super()._listed(doing, prefix, start) if listed.name > last)

    def _check_stripped(self, key: str) -> None:
        """Raise `NotListable` if the first key of a bucket may be one whose slash at the start obstore has stripped."""
        if key <= "0":
            raise NotListable(f"{self.uri}: {key!r} may begin with a slash")
        try:
            self._head(key)
        except (ObjectNotFound, StorageMisconfigured) as error:
            raise NotListable(f"{self.uri}: {key!r} begins with a slash, or is gone") from error

    def _obstore(self) -> S3Reads:
        if self._place.is_proxied:
            raise StorageMisconfigured(f"{self.uri}: {PROXIED}")
        return S3Reads(self._place, self.bucket, self.uri, self._loop)

    def _twin(self) -> Boto3Reads:
        kind: type[Boto3Reads] = pkgutil.resolve_name("tiered_index.storage.s3.twin:Boto3Reads")
        return kind(self.client, self.bucket, self.uri, self._loop, partial(self._lacks, RANGES))

    def _boto3(self) -> Writes:
        client = pkgutil.resolve_name("tiered_index.storage.s3.boto:client_of")(self._place, self.uri)
        kind: type[Writes] = pkgutil.resolve_name("tiered_index.storage.s3.writes:Writes")
        return kind(client, self.bucket, self.uri, self.options, self._loop, partial(self._lacks, BULK_DELETES))

    @property
    def client(self) -> S3Client:
        """The boto3 client."""
        return self._writes.client

    def _read(self, doing: str, name: str, act: Callable[[Any], _T], client: Callable[[], Any] | None = None) -> _T:
        """As `BucketStorage._read`, and in the bucket's region if it is another one, or by boto3 if obstore refuses the
        server's certificate.
        """
        client = client or partial(self._client_of, name)
        # in this order: the client may know the region already, and the place may not
        place, reads = self._place, client()

        def attempt() -> _T:
            nonlocal place, reads
            try:
                return act(reads)
            except reads.errors as error:
                region = _region(reads) if reads.is_elsewhere(error) else None
                if region in (None, place.options.region):
                    raise
            with self._lock:
                # the response to a request of another thread may have told the region meanwhile
                if self._place.options.region != region:
                    moved = replace(self.options, region=region)
                    self._place = find_place(self.bucket, self.uri, moved)
                    self.close()
            place, reads = self._place, client()
            return act(reads)

        try:
            return reads.loop.run(doing, name, attempt)
        except OwnAuthority:
            self._reads_by_boto3 = True
        return self._read(doing, name, act, client)

    def put(self, name: str, data: Bytes) -> None:
        """Store `data` in one request, with a CRC32 that the service checks; at most 5 GiB."""
        self._writes.put(name, self._key(name), data)

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` if `name` does not exist. Raises `ObjectExists`, also if the response to an own successful
        request was lost and its repeat finds the object.
        """
        self._writes.put(name, self._key(name), data, IfNoneMatch="*")

    def _is_object(self, name: str) -> bool:
        """Return whether a listed name without bytes is an object: the mark of a folder, `name/`, is listed like it."""
        try:
            self._head(name)
        except ObjectNotFound:
            return False
        return True

    def _prove(self, doing: str) -> None:
        """Raise `StorageMisconfigured` if this is not an S3 service, or if it lacks the bucket.

        A listing without objects may be any web page. The answer for an object that does not exist tells.
        """
        if self._has_answered:
            return
        try:
            key = f"{self._base}{PROBE_PREFIX}nothing"
            self._read(doing, "nothing", lambda reads: reads.get(key, None, doing))
        except ObjectNotFound:
            self._has_answered = True
        except StorageMisconfigured as error:
            if NO_S3 in str(error) or "NoSuchBucket" in str(error):
                raise
        else:
            raise StorageMisconfigured(f"{doing} in {self.uri}: the response is not a listing: {NO_S3}")

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove objects, 1,000 a request. The first request with failures ends the call and names them.

        Once the service has refused such a request as unknown or without MD5, each object is a request.
        """
        self._writes.delete_many([self._key(name) for name in names])

    def open_writer(self, name: str) -> Writer:
        """As `Storage.open_writer`; an object of more than 8 MiB is sent in parts."""
        kind: Callable[..., Writer] = pkgutil.resolve_name("tiered_index.storage.s3.writes:S3Writer")
        return kind(check_name(name), self._key(name), lambda: self._writes)

    def purge(self, older_than_ms: int) -> tuple[str, ...]:
        """Drop unfinished uploads that began before `older_than_ms`, by the service's time; return the others."""
        left = []
        for key, upload_id, started_ms in self._writes.uploads(self._base):
            name = self._name(key)
            if name and started_ms < older_than_ms:
                self._writes.abort(name, key, upload_id)
            elif name:
                left.append(name)
        return tuple(left)

    def now_ms(self) -> int:
        """Return the service's time in whole seconds, from the date of an answer, or else as `Storage.now_ms`."""
        headers = self._read("asking for the time", "", lambda reads: reads.bucket_headers(self._base))
        with contextlib.suppress(TypeError, ValueError):
            return epoch_ms(pkgutil.resolve_name("email.utils:parsedate_to_datetime")(headers.get("date")))
        return super().now_ms()

    def close(self) -> None:
        """Close the clients' connections. The next call opens others."""
        writes = self._clients.get(self._boto3.__name__)
        if writes is not None and self._pid == os.getpid():
            writes.client.close()
        self._forget()


def _region(reads: S3Reads | Boto3Reads) -> str | None:
    """Return the bucket's region; None: the service does not tell it."""
    try:
        region: str = reads.bucket_headers("").get("x-amz-bucket-region", "")
    except OSError:
        return None
    return region if re.fullmatch(r"[a-z0-9-]+", region) else None


def _is_mocked() -> bool:
    """Return whether moto's mock is active."""
    moto = sys.modules.get("moto.core.models")
    return moto is not None and bool(moto.botocore_stubber.enabled)
