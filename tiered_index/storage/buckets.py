"""Base of the storages in a bucket of an object store. Pure.

Object `name` has the key `prefix/name`. Other keys below the prefix are not objects, unless `any_names` is set.
Threads: any number.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Self
from urllib.parse import SplitResult, quote, unquote, urlencode

from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.storage.base import MAX_NAME_BYTES, Storage, check_name
from tiered_index.storage.disk import Disk

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}")
_MAX_KEY_BYTES = 1024
FEWEST_CONNECTIONS = 10
# Connections for the log, uploads and the lease, in addition to those of lookups
_SPARE_CONNECTIONS = 4


class BucketStorage(Storage):
    """The objects of `bucket` whose keys start with `prefix` and a slash (no prefix: all objects)."""

    scheme: ClassVar[str]
    # Most bytes of a key in addition to prefix and name
    _further_bytes: ClassVar[int] = 1

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any, disk: Disk | None, parallel_reads: int | None) -> Self:
        """As `Storage.from_uri`."""
        connections = max(FEWEST_CONNECTIONS, (parallel_reads or 0) + _SPARE_CONNECTIONS)
        return cls(uri.netloc, unquote(uri.path), options, connections=connections)

    def __init__(self, bucket: str, prefix: str, options: Any, *, connections: int = FEWEST_CONNECTIONS) -> None:
        """Set bucket and prefix without a request; keep `connections` open. Raises `ConfigError`."""
        prefix = prefix.strip("/")
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(
                f"{bucket!r} is not a bucket's name: write {self.scheme}://bucket/prefix, and a name of 3 to 255 "
                "letters, digits, dots, dashes or underscores"
            )
        if prefix and any(part in {"", ".", ".."} for part in prefix.split("/")):
            raise ConfigError(f"a prefix has no empty, '.' or '..' part: {prefix!r}")
        if len(prefix.encode()) > _MAX_KEY_BYTES - MAX_NAME_BYTES - self._further_bytes:
            raise ConfigError("the prefix is too long: with a name of 512 bytes a key has more than 1,024 bytes")
        self.bucket, self.options, self.connections = bucket, options, connections
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
