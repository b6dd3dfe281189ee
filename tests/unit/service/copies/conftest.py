import pytest

from tiered_index.format import verify
from tiered_index.service.jobs import copying
from tiered_index.storage.memory import MemoryStorage


@pytest.fixture
def small_windows(monkeypatch):
    """Copy objects in several parts."""
    for module in (copying, verify):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1 << 11)


@pytest.fixture
def target(life):
    """An empty storage with the clock of `life`."""
    return MemoryStorage(clock=life.clock)


@pytest.fixture
def inner(target):
    """The same storage, for a test that wraps it."""
    return target
