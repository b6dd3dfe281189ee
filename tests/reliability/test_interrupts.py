"""A sample of the interrupts campaign: each seed interrupts other lines of every call in every state."""

from __future__ import annotations

import pytest

from tests.reliability.interrupts import lines_to_strike, strike, strike_by_signals, strike_lines
from tests.reliability.tally import Tally

# the garbage collector warns about objects that an interrupt left open
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize(("stride", "share"), [(380, 11), pytest.param(23, 1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_loses_nothing(tmp_path, stride, share):
    tally = Tally("interrupts")
    strike_lines(tmp_path, 3, stride, tally, share=share)
    assert not tally.failures
    assert tally.tried["interrupted lines: interrupt"]
    assert tally.tried["interrupted lines: engine"] > 10


# short runs strike each line the first time that it runs
@pytest.mark.parametrize("often", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(("call", "module"), [("flush", ""), ("close", ""), ("put", "/writing/buffer.py")])
def test_every_line_at_which_a_caller_holds_a_lock_or_waits(tmp_path, call, module, often):
    tally = Tally("interrupts")
    seen = strike(tmp_path / call, "half full", call, "interrupt", 0, tally)
    for line in lines_to_strike(seen, often):
        if seen[line - 1][0].endswith(module):
            strike(tmp_path / f"{call}-{line}", "half full", call, "interrupt", line, tally)
    assert not tally.failures
    assert tally.tried["interrupted lines: interrupt"] > 7


def test_a_real_signal_at_any_moment_loses_nothing(tmp_path):
    tally = Tally("interrupts")
    strike_by_signals(tmp_path, 3, 200, tally)
    assert not tally.failures
