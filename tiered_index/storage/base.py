"""The storage contract: named objects of bytes, and nothing about what is in them.

Names are non-empty strings of `/`-separated segments from ``[A-Za-z0-9._=+@-]``, at most 512 bytes, no segment ``.`` or ``..``.
An object appears whole or not at all: a reader never sees half a put, nor parts of an unfinished multipart upload.
`put_if_absent` is the only operation correctness is built on; everything else may be retried freely.

Every method may be called from any number of threads. Errors: `ObjectNotFound`, `ObjectExists`, `StorageUnavailable`
(retry later), `StorageMisconfigured` (fix the set-up), `InvalidArgument` (fix the call).
Source of the shape: zarr-python's `abc/store.py`; the multipart calls follow Amazon S3's.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tiered_index.errors import InvalidArgument

__all__ = [
    "MAX_NAME_BYTES",
    "NAME",
    "ByteRange",
    "Bytes",
    "ObjectInfo",
    "PartInfo",
    "Storage",
    "UploadHandle",
    "check_name",
    "check_prefix",
]

MAX_NAME_BYTES = 512
NAME = r"(?!\.{1,2}(/|$))[A-Za-z0-9._=+@-]+(/(?!\.{1,2}(/|$))[A-Za-z0-9._=+@-]+)*"
"""What an object's name is like."""
_NAME = re.compile(NAME)
_PREFIX = re.compile(r"[A-Za-z0-9._=+@/-]*")

Bytes: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes from `start` (0-based); both non-negative."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing or `head` tells of one object; `modified_ms` is epoch milliseconds by the backend's clock."""

    name: str
    size_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class PartInfo:
    """Receipt of one uploaded part; `number` counts from 1."""

    number: int
    etag: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UploadHandle:
    """An unfinished multipart upload; serialisable (`to_json`), valid in any process that opens the same storage."""

    name: str
    upload_id: str
    started_ms: int

    def to_json(self) -> dict[str, str | int]:
        """Return a JSON-ready dict that `from_json` takes."""
        return {"name": self.name, "upload_id": self.upload_id, "started_ms": self.started_ms}

    @classmethod
    def from_json(cls, document: dict[str, str | int]) -> UploadHandle:
        """Return the handle that `to_json` described."""
        return cls(str(document["name"]), str(document["upload_id"]), int(document["started_ms"]))


class Storage(ABC):
    """One place that holds objects. `uri` names it; `min_part_bytes` bounds every part but the last."""

    uri: str
    min_part_bytes: int = 1

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return the whole object. Raises `ObjectNotFound`."""

    @abstractmethod
    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`.

        Never a short answer: `InvalidArgument` for a range that reaches beyond the object's end or a negative number,
        `StorageUnavailable` for a backend that answers with fewer or more bytes than asked. Raises `ObjectNotFound`.
        `length` 0 returns ``b""`` without asking the backend.
        """

    def get_ranges(self, name: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in the order given; ranges may overlap. Errors as `get_range`."""
        return [self.get_range(name, r.start, r.length) for r in ranges]

    @abstractmethod
    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        """Return the last `length` bytes (the whole object where it is shorter) and the object's size in bytes."""

    @abstractmethod
    def put(self, name: str, data: Bytes) -> None:
        """Store `data` under `name`, replacing what was there, atomically and durably."""

    @abstractmethod
    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` where `name` does not exist; of racing callers exactly one succeeds. Raises `ObjectExists`.

        A backend that retries inside must not report its own first success as `ObjectExists` without the caller being able to tell:
        callers that need to know put an attempt id in `data` and read it back.
        """

    @abstractmethod
    def head(self, name: str) -> ObjectInfo:
        """Return the object's size and time. Raises `ObjectNotFound`."""

    @abstractmethod
    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects whose names start with `prefix` and sort after `start_after`, in ascending order of name (UTF-8 bytes).

        Lazy: pages are fetched as they are consumed. Unfinished uploads are never listed.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the object; removing what is not there is not an error."""

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove many objects in as few requests as the backend allows; every failure is raised, none swallowed."""
        for name in names:
            self.delete(name)

    @abstractmethod
    def begin_upload(self, name: str) -> UploadHandle:
        """Start a multipart upload; nothing is visible under `name` until `complete_upload`."""

    @abstractmethod
    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        """Store part `number` (1 to 10,000), in any order, from any thread or process; repeating a number replaces that part.

        Raises `ObjectNotFound` where the upload was aborted or completed.
        """

    @abstractmethod
    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """Publish the object: the parts in order of number. Parts not named are dropped; don't count on it (Ceph refuses them).

        Raises `InvalidArgument` for no parts, repeated numbers, a part that was not uploaded with that etag, or a part other
        than the last below `min_part_bytes`; `ObjectNotFound` where the upload is gone.
        """

    @abstractmethod
    def abort_upload(self, handle: UploadHandle) -> None:
        """Drop the upload and its parts; aborting what is gone is not an error."""

    @abstractmethod
    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """Yield unfinished uploads under `prefix`; with `older_than_ms` (epoch ms) only those started before it."""

    def abort_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> int:
        """Abort what `list_uploads` yields; return how many."""
        handles = list(self.list_uploads(prefix, older_than_ms=older_than_ms))
        for handle in handles:
            self.abort_upload(handle)
        return len(handles)

    def close(self) -> None:  # noqa: B027 - most backends hold nothing
        """Release connections; the storage can't be used afterwards. Idempotent."""

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_name(name: str) -> str:
    """Return `name` if it is a valid object name, else raise `InvalidArgument`."""
    if len(name) > MAX_NAME_BYTES or not _NAME.fullmatch(name):
        raise InvalidArgument(f"not a valid object name: {name[:80]!r}")
    return name


def check_prefix(prefix: str) -> str:
    """Return `prefix` if object names can start with it, else raise `InvalidArgument`."""
    if len(prefix) > MAX_NAME_BYTES or not _PREFIX.fullmatch(prefix) or ".." in prefix.split("/"):
        raise InvalidArgument(f"not a valid prefix: {prefix[:80]!r}")
    return prefix
