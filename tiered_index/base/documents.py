"""Conversion of stored JSON documents to their declared types, by msgspec. Pure; any thread.

Unknown members are ignored. A number must be an integer, not a boolean or a float. A class that is neither a `Struct`
nor a dataclass needs a hook. An error names the member by its path, such as ``$.add[0].count``.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tiered_index.errors import ConfigError, CorruptFile

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A count, sequence, epoch, log number or position."""
Size = Annotated[int, Meta(ge=0, le=2**44)]
"""Bytes of a file or object, or a position in it: at most 16 TiB, more than the largest object of any storage."""
Place = Annotated[int, Meta(ge=0, le=2**62)]
"""A position in a log."""
Crc32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Seconds = Annotated[int, Meta(ge=-(2**42), le=2**42)]
"""Epoch seconds: sums and products with them fit 63 bits."""
Length = Annotated[int, Meta(ge=1, le=2**42)]
"""A number of seconds."""
Milliseconds = Annotated[int, Meta(ge=-(2**52), le=2**52)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
FileId = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z_-]{1,64}\Z")]
"""A file's id, which is part of paths and of objects' names."""
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]


Hook = Callable[[type, Any], Any] | None
"""The function that reads values of other classes by class and value, msgspec's `dec_hook`; None: there are none."""
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.RLock()
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


def decoder_of(kind: type[T], hook: Hook = None) -> msgspec.json.Decoder[T]:
    """Return the decoder of JSON documents of a declared type.

    Each class must be used here or in `typed` first: while msgspec learns a class, another thread or a forked child
    that used it would crash.
    """
    if (kind, hook) not in _decoders:
        with _making:
            if (kind, hook) not in _decoders:
                _decoders[kind, hook] = msgspec.json.Decoder(kind, dec_hook=hook)
    return _decoders[kind, hook]


def typed(document: Any, kind: type[T], hook: Hook = None) -> T:
    """Return a parsed document, or another value, as its declared type.

    Raises `msgspec.ValidationError` with the path, and the `ConfigError` of an impossible layout, schema or slot map.
    """
    return reader_of(kind, hook)(document)


def reader_of(kind: type[T], hook: Hook = None) -> Callable[[Any], T]:
    """Return the function `typed` for documents of a declared type. The checks of a class run in the caller's frame."""
    decoder_of(kind, hook)
    return partial(msgspec.convert, type=kind, dec_hook=hook)


def decoded(
    data: bytes | memoryview, kind: type[T], file: str, what: str, *, offset: int | None = None, hook: Hook = None
) -> T:
    """Return the document in `data` as its declared type.

    Raises `CorruptFile` naming the file and the member, if this version can't have written the document.
    """
    with checks(file, what, offset=offset):
        return decoder_of(kind, hook).decode(data)


@contextlib.contextmanager
def checks(file: str, what: str, *, offset: int | None = None) -> Iterator[None]:
    """Return a context manager that raises the `CorruptFile` of `decoded` for `ValueError` and `ConfigError`."""
    try:
        yield
    except (ValueError, ConfigError, RecursionError) as error:
        # the message must not quote stored text
        problem = re.sub(r"^Invalid enum value .*?(?= - at `\$|\Z)", "Unknown text", str(error), flags=re.DOTALL)
        raise CorruptFile(file, f"{what} is invalid: {problem}", offset=offset) from error


def parsed(data: bytes | memoryview, file: str, what: str) -> Any:
    """Return the JSON document in `data`. Raises `CorruptFile` if it is not JSON."""
    with checks(file, what):
        return msgspec.json.decode(data)


def encoded(document: Any, *, is_sorted: bool = False) -> bytes:
    """Return the compact JSON of a document to store, with its members in order of their names if `is_sorted`.

    Raises `UnicodeEncodeError` for text with half a surrogate pair.
    """
    return msgspec.json.encode(document, order="sorted" if is_sorted else None)


def unpacked(data: bytes, most_bytes: int, file: str, what: str) -> bytes:
    """Return the text that is compressed in `data`, at most `most_bytes`. Raises `CorruptFile`; `what` is for it."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data, most_bytes)
    except zlib.error as error:
        raise CorruptFile(file, f"{what} can't be decompressed: {error}") from error
    if not stream.eof or stream.unused_data:
        raise CorruptFile(file, f"{what} has another length when it is decompressed")
    return text
