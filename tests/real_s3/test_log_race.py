"""Writers that race for the same log numbers, on a real server."""

from __future__ import annotations

import pytest

from tests.fencing.races import LogRaceScenarios

pytestmark = pytest.mark.real_s3


class TestLogRace(LogRaceScenarios):
    """The races of every storage."""
