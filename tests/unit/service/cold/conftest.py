"""Filters that are read after misses."""

import pytest

from tiered_index.service.read.caches.store import Filters


@pytest.fixture
def large_filters(monkeypatch):
    """Let no filter be read together with its directory, as if it were larger than `coalesce_gap_bytes`."""
    monkeypatch.setattr(Filters, "wants", lambda *_: False)
