"""A sample of the interrupts campaign."""

import pytest

from tests.reliability.interrupts import strike
from tests.reliability.tally import Tally


# the garbage collector warns about objects that an interrupt left open
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_loses_nothing(tmp_path):
    tally = Tally("interrupts")
    strike(tmp_path, 3, 150, tally)
    assert not tally.failures
    assert tally.tried["indexes that refused further calls"]
