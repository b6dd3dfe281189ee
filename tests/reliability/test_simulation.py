"""Ten runs of the simulation, 10,000 as a slow test. A run is a function of its seed."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.scheduler import Process, Scheduler, Stuck
from tests.reliability.simulation import campaign
from tests.reliability.tally import Tally
from tiered_index.service.jobs.copying import Copier, CopyReport

TOP = Path(__file__).parents[2]
AGAIN = 2
"""Number of seeds that run more than once."""

# the garbage collector closes the index of a killed host
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("seeds", [10, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_life_goes_wrong(seeds: int) -> None:
    tally = Tally("simulation")
    campaign(range(seeds), tally, most_failures=3)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.tried["seeds"] == seeds
    counted = ("answers checked", "faults injected", "kills", "records of expiry and erasure")
    assert min(tally.tried[what] for what in counted) > seeds // 10
    assert tally.tried["restores that an open reported"] > 0
    assert tally.tried["restores during a run"] > 0


def test_a_life_is_a_function_of_its_seed() -> None:
    """Run it here, and behind another life in a process with another order of sets of strings."""
    seeds = range(1000, 1000 + AGAIN)
    digests = campaign(seeds, Tally("simulation"))
    assert len(set(digests)) == AGAIN
    again = f"print(json.dumps(campaign({seeds[::-1]!r}, Tally('simulation'))[::-1]))"
    command = [sys.executable, "-c", f"import json; from tests.reliability.simulation import *; {again}"]
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    assert json.loads(subprocess.check_output(command, env=environment, cwd=TOP)) == digests


def test_a_copy_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(copier: Copier) -> CopyReport:
        done = copy(copier)
        for name in copier.copied.state.objects:
            copier.target.put(name, copier.target.get(name)[:-1])
        return done

    copy = Copier.run_once
    monkeypatch.setattr(Copier, "run_once", cut)
    tally = Tally("simulation")
    for seed in range(11, 17):
        if not tally.by_kind["lost"]:
            campaign(range(seed, seed + 1), tally)
    assert tally.by_kind["lost"]


def run(act: Callable[[Scheduler], None], seed: int = 0) -> Scheduler:
    with Scheduler(seed) as scheduler:
        scheduler.run(lambda: act(scheduler))
    return scheduler


def test_a_deadlock_of_threads_is_reported() -> None:
    def act(scheduler: Scheduler) -> None:
        first_lock, second_lock = threading.Lock(), threading.Lock()
        process = Process("p")

        def take(first: threading.Lock, second: threading.Lock) -> None:
            with first:
                scheduler.sleep(10)
                with second:
                    pass

        scheduler.start(process, "a", lambda: take(first_lock, second_lock))
        scheduler.start(process, "b", lambda: take(second_lock, first_lock))
        scheduler.join(process)

    with pytest.raises(Stuck, match="nobody can go on"):
        run(act)


def test_a_killed_process_does_nothing_more() -> None:
    done: list[str] = []

    def act(scheduler: Scheduler) -> None:
        process = Process("p")

        def for_ever() -> None:
            try:
                while True:
                    scheduler.pause("step")
            finally:
                scheduler.pause("after")
                done.append("after")

        scheduler.start(process, "a", for_ever)
        scheduler.sleep(20)
        scheduler.kill(process)
        done.append("killed")

    assert "p/a.2 after" in run(act).trace
    assert done == ["killed"]
