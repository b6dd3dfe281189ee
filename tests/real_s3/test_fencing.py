"""One index, two roots, a real server: leases, takeover, and writers that continue too late."""

from __future__ import annotations

import pytest

from tests.fencing.scenarios import FencingScenarios

pytestmark = pytest.mark.real_s3


class TestFencing(FencingScenarios):
    """The scenarios of every storage."""
