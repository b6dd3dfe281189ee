import pytest

from tiered_index.format import verify
from tiered_index.service.lifecycle import copying


@pytest.fixture
def small_windows(monkeypatch):
    """Copy objects in several parts."""
    for module in (copying, verify):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1 << 11)
