"""Lookups that have all the time they need, over a log for which nobody waits."""

from __future__ import annotations

import pytest

from tiered_index.service import reader as reader_module
from tiered_index.service.reading import views
from tiered_index.storage.context import remaining_s


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup held to a time waits a moment for the log, however long it may last itself."""

    def short_s() -> float | None:
        left_s = remaining_s()
        return None if left_s is None else min(left_s, 0.02)

    for module in (reader_module, views):
        monkeypatch.setattr(module, "remaining_s", short_s)
