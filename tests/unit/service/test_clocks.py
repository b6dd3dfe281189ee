"""A clock that is wrong once expires nothing, hides no later entry, and is named by `health`."""

import contextlib

import pytest

from tests.support.merging import BASE_MS, DAY_S, HOUR_MS
from tiered_index.base.clock import ManualClock, SteadyClock
from tiered_index.base.retention import Retention
from tiered_index.errors import ConfigError
from tiered_index.format.names import data_name
from tiered_index.service.jobs.expiry import expire
from tiered_index.service.log.expired import NOTHING
from tiered_index.storage.memory import MemoryStorage

RULE = Retention(age_s=30 * DAY_S)


class JumpingClock:
    """A clock `ahead_s` of another one, whose monotonic time never jumps."""

    def __init__(self, inner):
        self.inner, self.ahead_s, self.monotonic_s = inner, 0, inner.monotonic_s

    def now_ms(self):
        return self.inner.now_ms() + self.ahead_s * 1000


@pytest.fixture
def world(merging):
    """A writer with a rule of retention, whose clock and whose storage's clock can jump."""
    true = ManualClock(BASE_MS)
    host, of_storage = JumpingClock(true), JumpingClock(true)
    life = merging(storage=MemoryStorage(clock=of_storage), clock=host, settings={"retention": RULE})
    life.true, life.clocks = true, {"host": host, "storage": of_storage}
    return life


def publish(life):
    """Publish all entries. A refused expiry ends the round with its error, after all other steps."""
    with contextlib.suppress(ConfigError):
        life.publish()


def rounds(life):
    """Run the life cycle after a minute, when an expiry is due. Return the problems."""
    life.true.advance(61)
    publish(life)
    return [problem for problem in life.index.health()["problems"] if problem.startswith("expiry")]


def put_and_find(life, key):
    """Put an entry with the true time. Return whether the writer and a reader find it."""
    life.put([(life.true.now_ms(), key)])
    publish(life)
    with life.reader() as reader:
        return [len(opened.query("t", key)) for opened in (life.index, reader)]


@pytest.mark.parametrize(
    "jumps_s",
    [
        {"host": 400 * DAY_S},
        {"host": -400 * DAY_S},
        {"storage": 400 * DAY_S},
        {"storage": -400 * DAY_S},
        {"host": 400 * DAY_S, "storage": 400 * DAY_S},
        {"host": -400 * DAY_S, "storage": -400 * DAY_S},
        {"host": 400 * DAY_S, "storage": -400 * DAY_S},
        {"host": 2 * 3600, "storage": 2 * 3600},
    ],
    ids=str,
)
def test_a_jump_of_clocks_expires_nothing(world, jumps_s):
    # given an index that has expired entries by its rule
    life = world
    assert put_and_find(life, "old") == [1, 1]
    life.true.advance(31 * DAY_S)
    assert put_and_find(life, "k") == [1, 1]
    assert rounds(life) == []
    horizon_ms = life.state.expired.before_ms("t")
    assert horizon_ms > BASE_MS and len(life.index.query("t", "old")) == 0
    # when clocks are wrong for a while
    for name, ahead_s in jumps_s.items():
        life.clocks[name].ahead_s = ahead_s
    problems = rounds(life)
    # then nothing expires, `health` says why, and later entries are found
    assert len(problems) == 1
    assert put_and_find(life, "meanwhile") == [1, 1]
    for name in jumps_s:
        life.clocks[name].ahead_s = 0
    assert rounds(life) == []
    assert life.state.expired.before_ms("t") <= horizon_ms + HOUR_MS
    assert [len(life.index.query("t", key)) for key in ("k", "meanwhile")] == [1, 1]
    assert put_and_find(life, "later") == [1, 1]
    assert life.index.health()["quarantined_entries"] == 0


def test_a_command_expires_on_purpose_what_a_writer_refuses(world):
    life = world
    assert put_and_find(life, "k") == [1, 1]
    assert rounds(life) == []
    for clock in life.clocks.values():
        clock.ahead_s = 400 * DAY_S
    (problem,) = rounds(life)
    assert "expire --yes" in problem and "400d" in problem
    expire(life.storage, life.log(), RULE, life.clocks["host"], yes=True)
    life.index._lifecycle.refresh()
    assert rounds(life) == []
    assert life.state.expired.before_ms("t") == RULE.horizon(life.clocks["host"].now_ms()).before_ms


@pytest.mark.parametrize("ahead_s", [400 * DAY_S, -400 * DAY_S])
def test_an_index_that_begins_under_a_wrong_clock_hides_nothing(merging, ahead_s):
    true = ManualClock(BASE_MS)
    clock = JumpingClock(true)
    clock.ahead_s = ahead_s
    life = merging(storage=MemoryStorage(clock=clock), clock=clock, settings={"retention": RULE})
    life.true = true
    assert rounds(life) == []
    clock.ahead_s = 0
    assert put_and_find(life, "k") == [1, 1] and not life.state.expired.before_ms("t") > BASE_MS


def test_an_expiry_recorded_by_a_wrong_clock_is_named_once_clocks_are_right(world):
    life = world
    assert put_and_find(life, "k") == [1, 1]
    for clock in life.clocks.values():
        clock.ahead_s = 400 * DAY_S
    expire(life.storage, life.log(), RULE, life.clocks["host"], yes=True)
    for clock in life.clocks.values():
        clock.ahead_s = 0
    life.index._lifecycle.refresh()
    (problem,) = rounds(life)
    assert "the last expiry, 2024-11-23" in problem and "new index" in problem


def test_the_first_sweep_takes_no_new_object_for_an_orphan_because_of_a_jump(merging):
    """Without a rule of retention it is an hour after the opening. The object is another job's, which publishes it."""
    true = ManualClock(BASE_MS)
    clock = JumpingClock(true)
    life = merging(storage=MemoryStorage(clock=clock), clock=true)
    life.true = true
    assert put_and_find(life, "k") == [1, 1]
    name = data_name("001697760000000-590fbb5c4f83", "68cb878e6cd9e69a")
    life.storage.put(name, b"x")
    clock.ahead_s = 400 * DAY_S
    true.advance(3600)
    publish(life)
    assert any("no orphan is deleted now" in problem for problem in life.index.health()["problems"])
    assert life.storage.get(name) == b"x"


def test_a_command_refuses_clocks_that_differ(world):
    life = world
    life.clocks["storage"].ahead_s = 61
    with pytest.raises(ConfigError, match="clocks differ"):
        expire(life.storage, life.log(), RULE, life.true, yes=True)
    assert life.state.expired == NOTHING
    life.clocks["storage"].ahead_s = 60
    expire(life.storage, life.log(), RULE, life.true, yes=True)
    assert life.state.expired.before_ms("t")


@pytest.mark.parametrize(("pause_d", "is_trusted"), [(30, True), (32, False)])
def test_a_new_writer_trusts_clocks_for_a_month_after_the_last_publication(world, pause_d, is_trusted):
    life = world
    assert put_and_find(life, "k") == [1, 1]
    life.index.close()
    life.true.advance(pause_d * DAY_S)
    life.index = life.open()
    assert (rounds(life) == []) is is_trusted
    assert (life.state.expired.before_ms("t") > BASE_MS) is False
    assert len(life.index.query("t", "k")) == 1


def test_a_steady_clock_follows_slow_changes_and_no_jump():
    true = ManualClock(BASE_MS)
    wall = JumpingClock(true)
    steady = SteadyClock(wall)
    for ahead_s in (0, 30, 60, 10, -40):
        wall.ahead_s = ahead_s
        assert (steady.now_ms(), steady.jump_ms()) == (true.now_ms() + ahead_s * 1000, 0)
    for ahead_s in (400 * DAY_S, -400 * DAY_S):
        wall.ahead_s = ahead_s
        true.advance(DAY_S)
        assert steady.now_ms() == true.now_ms() - 40_000
        assert steady.jump_ms() == (ahead_s + 40) * 1000
    steady.trust()
    assert (steady.now_ms(), steady.jump_ms()) == (wall.now_ms(), 0)


def test_a_machine_that_was_suspended_gets_its_time_back(world):
    """Entries of its present time are put with the others, not in quarantine."""
    life = world
    assert put_and_find(life, "k") == [1, 1]
    for clock in life.clocks.values():
        clock.ahead_s = 5 * DAY_S
    rounds(life)
    life.put([(life.clocks["host"].now_ms(), "now")])
    publish(life)
    assert life.index.health()["quarantined_entries"] == 0
