"""Base of the storages in a bucket of an object store: object `name` is the key `prefix/name`. Pure.

Keys below the prefix that are no valid names are not objects of ours. Threads: any number.
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
# Beside lookups: the log, uploads, the lease
_SPARE_CONNECTIONS = 4


class BucketStorage(Storage):
    """The objects of `bucket` whose keys start with `prefix` and a slash (no prefix: all of it)."""

    scheme: ClassVar[str]
    # Bytes of a key beside prefix and name.
    _further_bytes: ClassVar[int] = 1

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any, disk: Disk | None, parallel_reads: int | None) -> Self:
        """Return the storage in a bucket; a URI's parameters are among the options."""
        connections = max(FEWEST_CONNECTIONS, (parallel_reads or 0) + _SPARE_CONNECTIONS)
        return cls(uri.netloc, unquote(uri.path), options, connections=connections)

    def __init__(self, bucket: str, prefix: str, options: Any, *, connections: int = FEWEST_CONNECTIONS) -> None:
        """Name the place; no request is sent. `connections` are kept open. Raises `ConfigError`."""
        prefix = prefix.strip("/")
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(
                f"{bucket!r} is no bucket's name: write {self.scheme}://bucket/prefix, and a name of 3 to 255 letters, "
                "digits, dots, dashes or underscores"
            )
        if prefix and any(part in {"", ".", ".."} for part in prefix.split("/")):
            raise ConfigError(f"a prefix has no empty, '.' or '..' part: {prefix!r}")
        if len(prefix.encode()) > _MAX_KEY_BYTES - MAX_NAME_BYTES - self._further_bytes:
            raise ConfigError("the prefix leaves no room for names within a key's 1,024 bytes")
        self.bucket, self.options, self.connections = bucket, options, connections
        self._base = f"{prefix}/" if prefix else ""
        named = {name: value for name in options.uri_parameters if (value := getattr(options, name)) is not None}
        folder = f"/{quote(prefix)}" if prefix else ""
        self.uri = f"{self.scheme}://{bucket}{folder}" + (f"?{urlencode(named, safe=':/')}" if named else "")

    def _key(self, name: str) -> str:
        return self._base + check_name(name)

    def _name(self, key: str) -> str | None:
        """Return the object name of `key`; None for a key that is no object of ours."""
        try:
            return check_name(key.removeprefix(self._base))
        except InvalidArgument:
            return None
