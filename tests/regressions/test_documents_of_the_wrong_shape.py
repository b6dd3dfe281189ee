"""A stored document with a right checksum but invalid contents raised an untyped error. Such contents were infinite
numbers, very deep nesting and short lists.
"""

from __future__ import annotations

import json
import zlib

import pytest

from tests.reliability.resealed import journal_record
from tiered_index.errors import CorruptFile, NotAnIndex
from tiered_index.format.journal import Journal, encode_open, parse_journal
from tiered_index.format.layout import NATIVE, Layout
from tiered_index.service.log.records import LogRecord, encode_document
from tiered_index.service.root import Marker

_OPEN = encode_open(Journal("id", Layout(NATIVE, NATIVE.schema, 8, 8), 0, "main", 1, "custom", 1))
_START = _OPEN[:12]
_NESTED = b'{"kind":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def test_journals() -> None:
    with pytest.raises(CorruptFile, match="the-journal"):
        parse_journal(_START + journal_record(_NESTED), "the-journal")


def test_log_records() -> None:
    document = json.loads(LogRecord(1, "publish", 1, "a", 0).encode().splitlines()[0])
    del document["version"]
    with pytest.raises(CorruptFile, match="log/1"):
        LogRecord.decode(encode_document(document | {"epoch": float("inf")}), "log/1")
    nested = _NESTED + b"\n#crc32 " + f"{zlib.crc32(_NESTED):08x}\n".encode()
    with pytest.raises(CorruptFile, match="log/1"):
        LogRecord.decode(nested, "log/1")


@pytest.mark.parametrize("data", [_NESTED, b'{"tiered_index": Infinity}', b"[1]", b"\xff"])
def test_markers(data: bytes) -> None:
    with pytest.raises(NotAnIndex, match="the-marker"):
        Marker.decode(data, "the-marker")
