"""Arguments of a wrong type ended lookups with Python's own errors."""

from __future__ import annotations

import pytest

from tiered_index import Lookup
from tiered_index.errors import InvalidArgument

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
