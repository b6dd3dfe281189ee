"""Fixtures for lookups with long timeouts over a log that answers late, and for filters that are read after misses."""

import pytest

from tiered_index.service import index as index_module
from tiered_index.service import reader as reader_module
from tiered_index.service.read import index_view as views
from tiered_index.service.read import polled
from tiered_index.service.read.caches import Filters
from tiered_index.storage.context import remaining_s


@pytest.fixture
def large_filters(monkeypatch):
    """Let no filter be read together with its directory, as if it were larger than `coalesce_gap_bytes`."""
    monkeypatch.setattr(Filters, "wants", lambda *_: False)


@pytest.fixture
def impatient(monkeypatch):
    """Limit the wait of a lookup with a timeout for the log to a moment."""

    def short_s():
        left_s = remaining_s()
        return None if left_s is None else min(left_s, 0.02)

    for module in (index_module, reader_module, polled, views):
        monkeypatch.setattr(module, "remaining_s", short_s)


@pytest.fixture
def log_readings():
    """The view of each reading of a log after the opening, even if a test undoes its own patches."""
    begun = []
    read = views.IndexView._read

    def counted(view, **how):
        begun.append(view)
        return read(view, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views.IndexView, "_read", counted)
        yield begun
