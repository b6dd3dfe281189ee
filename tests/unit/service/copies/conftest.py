from collections.abc import Callable

import pytest

from tests.support.merging import Merging
from tiered_index.format import verify
from tiered_index.service.lifecycle import copying


@pytest.fixture
def life(merging: Callable[..., Merging]) -> Merging:
    return merging()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are copied in several parts."""
    for module in (copying, verify):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1 << 11)
