"""The campaign of kills and faults, in a sample and whole: nothing is lost, nothing is doubled."""

import pytest

from tests.kafka.campaign import run


@pytest.mark.parametrize(
    "records", [pytest.param(40_000, marks=pytest.mark.long), pytest.param(1_000_000, marks=pytest.mark.slow)]
)
def test_followers_that_are_killed_beside_brokers_that_fail(tmp_path, records):
    outcome = run(records, 20, 1, tmp_path)
    assert outcome.is_right(), outcome
    assert outcome.kills == 20
    assert outcome.faults.total() > 0
