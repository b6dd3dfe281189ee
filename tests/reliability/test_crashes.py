"""A sample of the crash campaigns. `python -m tests.reliability.crashes --all` tries every state."""

import logging

import pytest

from tests.reliability.crashes import CAMPAIGNS, Crashes
from tests.reliability.lives import LIVES
from tests.reliability.tally import Tally, fast_folder
from tests.reliability.world import World


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def strike(campaign, life, share, again_share):
    tally = Tally("crashes")
    with fast_folder() as folder:
        Crashes(folder, tally, share=share, again_share=again_share, stop=1).run(campaign, life)
    assert not tally.failures, "\n".join(tally.failures)
    return sum(tally.tried.values())


@pytest.mark.parametrize("life", LIVES)
def test_a_sample_of_crashes(life):
    assert strike("crash", life, 0.004, 0) > 0


@pytest.mark.parametrize(
    ("campaign", "life", "share"),
    [
        ("again", "lifecycle", 0.002),
        ("fault", "lifecycle", 0.001),
        ("fault", "erasing", 0.001),
        ("burst", "writing", 0.001),
        pytest.param("again", "reopening", 0.004, marks=pytest.mark.long),
        pytest.param("fault", "lifecycle", 0.006, marks=pytest.mark.long),
        pytest.param("burst", "writing", 0.006, marks=pytest.mark.long),
    ],
)
def test_a_sample_of_faults_and_of_second_crashes(campaign, life, share):
    assert strike(campaign, life, share, 0.002) > 0


@pytest.mark.slow
@pytest.mark.parametrize("life", LIVES)
def test_every_crash(life):
    assert strike("crash", life, 1.0, 0) > 100


@pytest.mark.slow
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("campaign", ["again", "fault", "burst"])
def test_many_faults_and_second_crashes(campaign, life):
    assert strike(campaign, life, 0.1, 0.02) > 100


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_a_failure_is_printed_and_found_again_by_its_name(campaign, monkeypatch):
    def forget(world, ask=None):
        raise AssertionError("durable entries are gone")

    monkeypatch.setattr(World, "check_answers", forget)
    first, again = Tally("crashes"), Tally("crashes")
    for tally, only in ((first, f"writing:{campaign}"), (again, "")):
        with fast_folder() as folder:
            Crashes(folder, tally, only=only or first.failures[0].split("--only ")[1], stop=1).run(campaign, "writing")
    assert first.failures[0] == again.failures[0]
    assert set(first.by_kind) == {"lost"}
