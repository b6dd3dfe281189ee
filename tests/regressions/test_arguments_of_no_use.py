"""Arguments of a wrong kind ended lookups with errors of Python's own, and JSON nested too deeply ended the opening of
an index so.
"""

from __future__ import annotations

import zlib

import pytest

from tiered_index import Lookup
from tiered_index.errors import CorruptFile, InvalidArgument, NotAnIndex
from tiered_index.format.names import log_name

NOW_MS = 1_700_000_000_000
DEEP = b"[" * 100_000
BAD_LOOKUPS = {
    "pairs of others": [("t", 5)],
    "triples": [("t", "k", 5)],
    "None among them": [Lookup(topic="t", key="k"), None],
    "None": None,
    "a number": 5,
    "a list for a topic": [Lookup(topic=["t"], key="k")],
    "texts": ["t"],
}


@pytest.fixture(params=["service", "reader"])
def index(request, open_index, open_reader):
    service = open_index()
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.flush()
    return service if request.param == "service" else open_reader("root")


@pytest.mark.parametrize("lookups", BAD_LOOKUPS.values(), ids=BAD_LOOKUPS)
def test_lookups_that_are_none_are_refused(index, lookups):
    with pytest.raises(InvalidArgument):
        index.query_many(lookups)
    assert len(index.query("t", "k")) == 1


@pytest.mark.parametrize("source", [[], {}, None, 5])
def test_a_source_that_is_no_text_is_refused(open_index, source):
    with pytest.raises(InvalidArgument):
        open_index().durable_position(source)


@pytest.mark.parametrize(
    "body", [DEEP, b'{"version":1,"number":' + DEEP, b'{"a":' * 100_000], ids=["lists", "inner lists", "objects"]
)
def test_a_log_record_nested_deeply_is_damage(open_index, open_reader, storage, body):
    open_index().close()
    number = max(int(info.name[-20:]) for info in storage.list("log/")) + 1
    storage.put(log_name(number), body + b"\n#crc32 %08x\n" % zlib.crc32(body))
    with pytest.raises(CorruptFile, match=log_name(number)):
        open_reader()
    with pytest.raises(CorruptFile, match=log_name(number)):
        open_index()


@pytest.mark.parametrize(
    "body", [DEEP, b'{"tiered_index":' + DEEP, b'{"a":' * 100_000], ids=["lists", "inner lists", "objects"]
)
def test_a_marker_nested_deeply_is_none(open_index, open_reader, tmp_path, body):
    open_index().close()
    (tmp_path / "root" / "tiered_index.json").write_bytes(body)
    for opened in (open_reader, open_index):
        with pytest.raises(NotAnIndex):
            opened("root")
