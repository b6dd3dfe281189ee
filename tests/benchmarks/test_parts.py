"""The parts of the benchmark: goals, sections and profiles, and figures of synthetic suites."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from tests.benchmarks import command as benchmarks
from tests.benchmarks.machine.figures import Figure, MemoryWatch, Meter, Spec, at_least, at_most, percentiles_us
from tests.benchmarks.machine.reading import require_answers
from tests.benchmarks.machine.setting import Setting, require
from tests.benchmarks.running import print_report, run_suites
from tests.benchmarks.setting import SparkSetting
from tiered_index.cli.output import Output
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout

ALL_SUITES = list(benchmarks.SUITES.values())


@pytest.fixture
def setting():
    return SparkSetting(Layout(NATIVE, NATIVE.schema, 50, 1_000), 3, quick=True)


@pytest.mark.parametrize(("goal", "value", "met", "ratio"), [
    (at_least(4), 4, True, 1), (at_least(4), 2, False, 0.5), (at_most(4), 4, True, 1), (at_most(4), 16, False, 0.25),
    (at_most(4), 0, True, float("inf")),
])  # fmt: skip
def test_a_goal_and_how_far_it_is(goal, value, met, ratio):
    assert (goal.met(value), goal.ratio(value)) == (met, ratio)


def test_a_figure_is_the_median_of_its_rounds():
    figure = Figure("s", Spec("f", "us", at_most(3)), (9.0, 1.0, 4.0))
    document = figure.to_dict()
    assert (document["median"], document["min"], document["max"], document["rounds"], document["met"]) == (
        4.0,
        1.0,
        9.0,
        3,
        False,
    )
    assert document["goal"] == {"limit": 3, "is": "at most"}
    assert document["times_as_good_as_goal"] == 0.75
    assert Figure("s", Spec("f", "us"), (1.0,)).to_dict()["met"] is None


def test_a_section_counts_only_what_is_between_start_and_stop():
    section = Meter(1, lambda: None).section("s")
    with section:
        section.stop()
        stopped = section.elapsed_s, section.cpu_s
        sum(range(10_000))
    assert (section.elapsed_s, section.cpu_s) == stopped
    with section:
        sum(range(10_000))
    assert section.elapsed_s > stopped[0]


def test_percentiles_are_microseconds():
    assert percentiles_us([0.001, 0.002, 0.003], 0, 50, 100) == pytest.approx([1000, 2000, 3000])


def test_memory_that_is_taken_is_seen():
    with MemoryWatch() as memory:
        held = np.ones(8 << 20)  # 64 MiB
        deadline = threading.Event()
        for _ in range(6_000):
            # other memory can be freed meanwhile
            if memory.peak_mib >= 40 or deadline.wait(0.01):
                break
    assert memory.peak_mib >= 40, held.nbytes


def test_wrong_work_is_no_figure():
    require(1, 1, "answers")
    with pytest.raises(RuntimeError, match="answers: 1, not 2"):
        require(1, 2, "answers")


class MadeUp:
    """Figures of no real suite: one misses its goal by far, one meets it."""

    name = "made-up"
    passes = 2

    def __init__(self):
        self.rounds = []

    def specs(self, setting):
        return (
            Spec("far off", "s", at_most(1), ("work",)),
            Spec("kept", "s", at_most(1), ("rest",)),
            Spec("free", "count"),
        )

    def run(self, setting, folder, meter):
        assert list(folder.iterdir()) == []
        (folder / "left behind").touch()
        rounds = 0
        for _ in range(self.passes):
            for number in meter.rounds():
                rounds += 1
                if _ == 0:
                    with meter.section("work"):
                        spent_here()
                    meter.record("far off", 2 + number)
                    meter.record("kept", 1)
                    meter.record("free", number)
        self.rounds.append(rounds)


def spent_here():
    return sum(number * number for number in range(20_000))


def test_a_missed_goal_is_run_once_more_under_a_profile(setting, tmp_path):
    suite, ticks = MadeUp(), []
    far, kept, free = run_suites([suite], setting, tmp_path, ticks.append)
    assert far.values == (2, 3, 4) and (far.met, kept.met, free.met) == (False, True, None)
    assert 1 <= len(far.frames) <= 8 and "spent_here" in " ".join(frame.function for frame in far.frames)
    assert (kept.frames, free.frames) == ((), ())
    assert suite.rounds == [6, 2]
    assert ticks == ["made-up"] * 6
    assert list(tmp_path.iterdir()) == []


def test_the_report_names_missed_goals(setting, tmp_path, capsys):
    figures = list(run_suites([MadeUp()], setting, tmp_path, lambda _: None))
    print_report(Output(as_json=False), {"cores": 2}, setting, figures, 61.0)
    shown = capsys.readouterr().out
    assert "MISSED made-up: far off is 0.33 times as good as its goal" in shown
    assert "spent_here" in shown
    assert "50 slots and 1,000 items" in shown
    (row,) = [line for line in shown.splitlines() if line.strip().startswith("far off")]
    assert row.split() == ["far", "off", "3", "s", "2", "4", "<=", "1", "NO"]


@pytest.mark.parametrize("suite", ALL_SUITES, ids=lambda suite: suite.name)
def test_goals_of_whole_files_count_at_full_size_only(suite, setting):
    name, full = suite.name, SparkSetting(Layout(NATIVE, NATIVE.schema, 5_000_000, 20_000_000), 3, quick=False)
    small_goals, goals = ({s.name for s in suite.specs(at) if s.goal is not None} for at in (setting, full))
    extra = {"compact": 2, "recovery": 2, "cold": 6}.get(name, 0)
    assert len(goals) == len(small_goals) + extra
    if name != "spark":  # its goals limit requests and memory, which no profile of time explains
        assert all(s.sections for s in suite.specs(full) if s.goal is not None and s.unit != "MiB")


def test_keys_of_equal_hash_are_answered_together_only_without_fingerprints(setting):
    plain = Setting(Layout(ROCKETMQ, ROCKETMQ.schema, 50, 1_000), 3, quick=True)
    for found, expected, fits in (
        (9, 10, (False, False)),
        (10, 10, (True, True)),
        (11, 10, (False, True)),
        (1, 0, (False, True)),
    ):
        for at, fit in zip((setting, plain), fits, strict=True):
            with contextlib.nullcontext() if fit else pytest.raises(RuntimeError, match="answers"):
                require_answers(at, found, expected, "answers")
