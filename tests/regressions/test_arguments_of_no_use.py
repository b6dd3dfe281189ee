"""Arguments of a wrong type ended lookups with Python's own errors."""

from __future__ import annotations

import pytest

from tiered_index import Lookup
from tiered_index.errors import InvalidArgument

NOW_MS = 1_700_000_000_000
NESTED = [Lookup(topic=["t"], key="k")]
BAD_LOOKUPS = ([("t", 5)], [("t", "k", 5)], [Lookup(topic="t", key="k"), None], None, 5, NESTED, ["t"])


@pytest.fixture(params=["service", "reader"])
def index(request, open_index, open_reader):
    service = open_index()
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.flush()
    return service if request.param == "service" else open_reader("root")


def test_lookups_that_are_none_are_refused(index):
    for lookups in BAD_LOOKUPS:
        with pytest.raises(InvalidArgument):
            index.query_many(lookups)
    assert len(index.query("t", "k")) == 1


def test_a_source_that_is_no_text_is_refused(open_index):
    index = open_index()
    for source in ([], {}, None, 5):
        with pytest.raises(InvalidArgument):
            index.durable_position(source)
