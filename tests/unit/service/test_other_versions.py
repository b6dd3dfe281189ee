"""A stored document of another version is refused by its name, and the error says what to do."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.log_records import GENESIS
from tests.unit.format import test_spec
from tests.unit.format.test_segments import segments_of, summed, written
from tiered_index.connectors.rocketmq.follow import fingerprints
from tiered_index.connectors.rocketmq.follow.fingerprints import LogFingerprints
from tiered_index.errors import UnsupportedVersion
from tiered_index.format import journal, trailer
from tiered_index.format.journal import Journal, encode_open, parse_journal
from tiered_index.format.segments import archived, catalog, ranges
from tiered_index.format.segments.archived import SegmentTable, segment_object_bytes
from tiered_index.format.segments.catalog import decode_end
from tiered_index.format.segments.ranges import decode_ranges, encode_ranges
from tiered_index.format.trailer import parse_trailer
from tiered_index.service import root
from tiered_index.service.log import checkpoint, records
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.state import LogState
from tiered_index.service.root import Marker
from tiered_index.storage.disk import Disk


class Document(NamedTuple):
    """A kind of document: the module's constant that has its version, its writer, and its reader."""

    name: str
    module: ModuleType
    constant: str
    write: Callable[[], bytes]
    read: Callable[[bytes], Any]


DOCUMENTS = [
    Document(
        "trailer",
        trailer,
        "FORMAT_VERSION",
        lambda: test_spec.written()[2],
        lambda data: parse_trailer(data, "f", len(data)),
    ),
    Document(
        "journal",
        journal,
        "JOURNAL_VERSION",
        lambda: encode_open(Journal("a", test_spec.LAYOUT, 0, "main", 1, "custom")),
        lambda data: parse_journal(data, "f"),
    ),
    Document(
        "root",
        root,
        "MARKER_VERSION",
        lambda: Marker("a", "b", test_spec.LAYOUT, "custom", "memory://x").encode(),
        lambda data: Marker.decode(data, "f"),
    ),
    Document(
        "log record",
        records,
        "LOG_VERSION",
        lambda: LogRecord(1, "create", 0, "a", 5, genesis=GENESIS).encode(),
        lambda data: LogRecord.decode(data, "f"),
    ),
    Document(
        "checkpoint",
        checkpoint,
        "CHECKPOINT_VERSION",
        lambda: LogState(1, 0, GENESIS, digest="a" * 32, chain="a" * 16).encode(),
        lambda data: LogState.decode(data, "f"),
    ),
    Document(
        "archived segment",
        archived,
        "SEGMENT_VERSION",
        lambda: summed(b"abc", []).table(5).encode(),
        lambda data: SegmentTable.decode(data, segment_object_bytes(3), "f"),
    ),
    Document(
        "catalog",
        catalog,
        "CATALOG_VERSION",
        lambda: bytes(written(segments_of(Random(0), 2), 4)[2]),
        lambda data: decode_end(data, "f"),
    ),
    Document(
        "table of ranges",
        ranges,
        "RANGES_VERSION",
        lambda: encode_ranges(np.zeros((1, ranges.COLUMNS), np.int64)),
        lambda data: decode_ranges(data, "f"),
    ),
]


def read_follower(data: bytes) -> LogFingerprints:
    with tempfile.TemporaryDirectory() as folder:
        memory = LogFingerprints.load(Path(folder), "s", Disk())
        memory.save()
        memory.path.write_bytes(data)
        return LogFingerprints.load(Path(folder), "s", Disk())


def written_follower() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        memory = LogFingerprints.load(Path(folder), "s", Disk())
        memory.save()
        return memory.path.read_bytes()


DOCUMENTS.append(Document("follower", fingerprints, "FOLLOWER_VERSION", written_follower, read_follower))


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_a_document_of_another_version_is_refused_by_name(monkeypatch, document, step):
    own = getattr(document.module, document.constant)
    assert document.read(document.write()) is not None
    with monkeypatch.context() as patched:
        patched.setattr(document.module, document.constant, own + step)
        data = document.write()
    told = f"{document.name} of version {own + step}, and this program reads version {own}: written by a development "
    with pytest.raises(UnsupportedVersion, match=f"{told}version: build the index again"):
        document.read(data)
