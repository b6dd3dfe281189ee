"""A sample of the interrupts campaign: other lines of every call in every state with each seed."""

from __future__ import annotations

import pytest

from tests.reliability.interrupts import CALLS, WRITING, strike_by_signals, strike_lines
from tests.reliability.tally import Tally


@pytest.mark.parametrize("stride", [331, pytest.param(23, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_loses_nothing(tmp_path, stride):
    tally = Tally("interrupts")
    strike_lines(tmp_path, 3, stride, tally)
    assert not tally.failures
    assert tally.tried["lines struck: interrupt"] > len(CALLS)
    assert tally.tried["lines struck: ours"] > len(WRITING)


def test_a_real_signal_at_any_moment_loses_nothing(tmp_path):
    tally = Tally("interrupts")
    strike_by_signals(tmp_path, 3, 1.0, tally)
    assert not tally.failures
    assert tally.tried["signals"]
