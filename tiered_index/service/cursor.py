"""Cursors: where a page of answers ended, as text. Stateless: they survive compaction, upload, merge and restarts.

A cursor holds the order key of the last answer, a digest of the query it belongs to, and a CRC32 against tampering by accident.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib

from tiered_index.errors import InvalidCursor
from tiered_index.service.rows import OrderKey

__all__ = ["decode_cursor", "encode_cursor", "query_digest"]

_VERSION = 1


def query_digest(topic: str, key: str, second_min: int, second_max: int) -> str:
    """Return 16 hexadecimal digits that tell one query from another; `max_count` may change between pages."""
    text = json.dumps([topic, key, second_min, second_max])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def encode_cursor(after: OrderKey, digest: str) -> str:
    """Return the cursor for the page after `after`."""
    body = json.dumps([_VERSION, digest, *after], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode().rstrip("=")


def decode_cursor(cursor: str, digest: str, columns: int) -> OrderKey:
    """Return the order key (`columns` integers) in a cursor; raises `InvalidCursor` where it was altered or is another query's."""
    if not isinstance(cursor, str):
        raise InvalidCursor(f"a cursor is text, not {type(cursor).__name__}")
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        body = raw[4:]
        if zlib.crc32(body) != int.from_bytes(raw[:4], "big"):
            raise InvalidCursor(f"cursor {cursor[:40]!r} was altered: its checksum does not match")
        version, stored, *after = json.loads(body)
        canonical = encode_cursor(tuple(after), stored) == cursor
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise InvalidCursor(f"not a cursor: {cursor[:40]!r}") from error
    if version != _VERSION:
        raise InvalidCursor(f"cursor {cursor[:40]!r} is of version {version}, this reader knows version {_VERSION}")
    if stored != digest:
        raise InvalidCursor("this cursor belongs to another query: topic, key and range must be those it came with")
    if not canonical:
        raise InvalidCursor(f"cursor {cursor[:40]!r} was altered: it is not spelled as it was given out")
    if len(after) != columns or not all(type(value) is int and abs(value) < 2**64 for value in after):
        raise InvalidCursor(f"cursor {cursor[:40]!r} does not fit the index's schema")
    return tuple(after)
