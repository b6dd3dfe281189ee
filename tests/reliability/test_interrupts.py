"""A sample of the interrupts campaign: other lines of every call in every state with each seed."""

from __future__ import annotations

import pytest

from tests.reliability.interrupts import lines_to_strike, strike, strike_by_signals, strike_lines
from tests.reliability.tally import Tally

# what a strike leaves to the garbage collector tells so
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize(("stride", "share"), [(211, 11), pytest.param(23, 1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_loses_nothing(tmp_path, stride, share):
    tally = Tally("interrupts")
    strike_lines(tmp_path, 3, stride, tally, share=share)
    assert not tally.failures
    assert tally.tried["lines struck: interrupt"]
    assert tally.tried["lines struck: ours"] > 10


def test_every_line_at_which_a_caller_waits_for_a_flush_or_a_close(tmp_path):
    tally = Tally("interrupts")
    for call in ("flush", "close"):
        for line in lines_to_strike(strike(tmp_path / call, "half full", call, "interrupt", 0, tally), 1):
            strike(tmp_path / f"{call}-{line}", "half full", call, "interrupt", line, tally)
    assert not tally.failures
    assert tally.tried["lines struck: interrupt"] > 15


def test_a_real_signal_at_any_moment_loses_nothing(tmp_path):
    tally = Tally("interrupts")
    strike_by_signals(tmp_path, 3, 1.0, tally)
    assert not tally.failures
    assert tally.tried["signals"]
