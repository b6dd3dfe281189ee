"""After any merges every key has the same answers as before, and as the model. No entry is lost or doubled."""

import random

import pytest

import tiered_index
from tests.support.changes import replace
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_MS, HOUR_S, RegionItem
from tiered_index import IndexReader, MergeOptions, MergeReport
from tiered_index.errors import InvalidArgument, NotAnIndex
from tiered_index.format.metadata import Metadata
from tiered_index.service.read.cold_path import ColdPath
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

KINDS = {
    "native": {},
    "rocketmq": {"preset": "rocketmq"},
    "extended": {"item_type": RegionItem},
    "one slot": {"settings": {"slots": 1}},
    "many slots": {"settings": {"slots": 3000}},
}


def hours_of(day, seed, count=40, hours=(1, 9, 23)):
    """Return rows of files of some hours of a day: a key in all files, some keys in a few, and one in a single file."""
    rng = random.Random(seed)

    def row(start):
        return start + rng.randrange(HOUR_MS), rng.choice(["hot", f"k{rng.randrange(6)}", f"own-{start}"])

    return [[row(BASE_MS + day * DAY_MS + hour * HOUR_MS) for _ in range(count)] for hour in hours]


def fill(life, days=3, **more):
    for day in range(days):
        for rows in hours_of(day, seed=day, **more):
            life.put(rows)
            life.publish()


def test_one_call_merges_the_index_at_a_uri(merging, tmp_path):
    uri = f"file://{tmp_path}/stored"
    life = merging(storage=open_storage(uri))
    fill(life, days=1)
    life.later()
    report = tiered_index.merge(uri, window="1h", options=MergeOptions(min_age_s=60), clock=life.clock)
    assert (report.sources, report.tables, report.entries) == (3, 3, 120)
    assert tiered_index.merge(storage=uri, window=DAY_S, clock=life.clock).sources == 3
    assert tiered_index.merge(uri, clock=life.clock) == MergeReport()
    life.check()
    for window in ("1x", 0):
        with pytest.raises(InvalidArgument, match="a window is like 1h"):
            tiered_index.merge(uri, window=window)
    with pytest.raises(NotAnIndex):
        tiered_index.merge(f"file://{tmp_path}/nothing")


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_answers_alike_before_and_after_each_tier(merging, kind):
    life = merging(**KINDS[kind])
    fill(life)
    life.later()
    life.check()
    assert len(life.state.files) == 9
    report = life.merge(HOUR_S)
    assert (report.sources, report.entries) == (9, 360)
    hours = {(24 * day + hour, 1) for day in range(3) for hour in (1, 9, 23)}
    assert not life.state.files and set(life.windows()) == hours
    life.check()
    life.merge(DAY_S)
    assert life.windows() == [(0, 24), (24, 24), (48, 24)]
    life.check()
    report = life.merge(30 * DAY_S)
    assert (report.jobs, report.sources, report.tables) == (1, 3, 1)
    assert life.windows() == [(0, 720)]
    life.check()
    life.check(life.index)


@pytest.mark.parametrize("kind", ["native", "rocketmq", "extended"])
def test_files_that_straddle_windows(merging, kind):
    """Each entry is merged into the table of its window.

    Two files cross a border, and entries have the border's seconds.
    """
    life = merging(**KINDS[kind])
    for start in (-2 * HOUR_MS, -1000):
        life.put([(BASE_MS + DAY_MS + start + step * 1000 * 61, f"k{step % 3}") for step in range(200)])
        life.publish()
    life.put([(BASE_MS + DAY_MS + ms, "edge") for ms in (-1001, -1000, -1, 0, 999, 1000)])
    life.publish()
    life.later()
    assert life.merge().jobs == 1
    assert life.windows() == [(0, 24), (24, 24)]
    tables = life.state.tables.values()
    for shards in tables:
        assert shards[0].shard is not None
        begin_s = shards[0].shard.begin_s
        assert all(begin_s <= s.second_min <= s.second_max < begin_s + DAY_S for s in shards)
    life.check()


def test_late_entries_make_small_tables_that_are_folded_when_they_are_worth_it(life):
    fill(life, days=2, count=120)
    life.later()
    life.merge()
    assert life.windows() == [(0, 24), (24, 24)]
    life.put(hours_of(0, seed=7, count=10, hours=(5,))[0])
    life.publish()
    assert life.merge().sources == 1
    assert life.windows() == [(0, 24), (0, 24), (24, 24)]
    life.check()
    # a quarter of the table's size is worth the work
    life.put(hours_of(0, seed=8, count=120, hours=(6,))[0])
    life.publish()
    assert life.merge().sources == 3
    assert life.windows() == [(0, 24), (24, 24)]
    life.check()


def test_small_tables_are_folded_before_there_are_too_many(life):
    fill(life, days=1, count=500, hours=(3,))
    life.later()
    life.merge()
    most = 0
    for late in range(12):
        life.put(hours_of(0, seed=late, count=2, hours=(late,))[0])
        life.publish()
        life.merge()
        most = max(most, len(life.windows()))
    assert most == 8
    assert len(life.windows()) < 8
    life.check()


def test_a_late_file_under_a_longer_table(life):
    """Late entries of a month that is merged already become a day's table, then part of the month's table."""
    fill(life)
    life.later()
    life.merge(30 * DAY_S)
    life.put(hours_of(1, seed=5)[1])
    life.publish()
    life.merge(DAY_S)
    assert life.windows() == [(0, 720), (24, 24)]
    life.check()
    life.merge(30 * DAY_S)
    assert life.windows() in ([(0, 720)], [(0, 720), (0, 720)])
    life.check()


def test_quarantined_entries_are_merged_where_they_belong(merging):
    life = merging(settings={"max_late_s": DAY_S, "max_early_s": DAY_S})
    life.put([*hours_of(0, seed=1, hours=(1,))[0], (BASE_MS - 400 * DAY_MS, "hot"), (5000, "hot"), (5000, "k1")])
    life.publish()
    assert {stored.lane for stored in life.state.files.values()} == {"main", "quarantine"}
    life.later()
    report = life.merge()
    assert [reason for _, reason in report.left] and "windows" in report.left[0][1]
    assert {stored.lane for stored in life.state.files.values()} == {"quarantine"}
    life.check()
    life.put([(5000, "k2")])
    life.publish()
    report = life.merge()
    assert report.sources == 1
    assert (-BASE_MS // HOUR_MS, 24) in life.windows()
    life.check()


def test_a_file_over_400_windows_stays_and_is_reported(life):
    life.put([(BASE_MS, "k"), (BASE_MS + 400 * HOUR_MS, "k")])
    life.publish()
    life.put([(BASE_MS, "k"), (BASE_MS + 399 * HOUR_MS, "k")])
    life.publish()
    life.later()
    before = life.state.files
    report = life.merge(HOUR_S)
    assert report.left == ((next(iter(before)), "its entries span 401 windows"),)
    assert list(life.state.files) == [report.left[0][0]]
    assert life.windows() == [(0, 1), (399, 1)]
    life.check()
    assert life.merge(DAY_S).left == ()
    assert not life.state.files
    life.check()


def test_nothing_to_merge_and_merging_again(life):
    assert life.merge().jobs == 0
    fill(life, days=1)
    assert life.merge().jobs == 0, "its window is not over yet"
    life.later()
    assert life.merge(begin_s=(BASE_MS + 12 * HOUR_MS) // 1000).sources == 1
    assert life.merge().jobs == 1
    number = life.state.number
    again = life.merge()
    assert (again.jobs, again.left, life.state.number) == (0, (), number)


def test_a_window_is_merged_once_it_is_over_and_old_enough(life):
    fill(life, days=1)
    life.clock.advance(DAY_S - 1)
    assert [reason for _, reason in life.merge().left] == ["its window is not over yet"] * 3
    life.clock.advance(1 + 3599)
    assert life.merge(min_age_s=3600).jobs == 0
    life.clock.advance(1)
    assert life.merge(min_age_s=3600).jobs == 1


def test_the_range_of_a_merge(life):
    fill(life, hours=(1, 23))
    life.later()
    day = BASE_MS // 1000 + DAY_S
    assert life.merge(begin_s=day, end_s=day + DAY_S).sources == 2
    assert life.windows() == [(24, 24)]
    life.check()


def test_topic_ids_that_clash(merging):
    """Names decide if two names have one id, if one name has two ids, or if the new id is already taken."""
    for preset in ("native", "rocketmq"):
        life = merging(preset=preset)
        ids = [{"Aa": 5, "BB": 6}, {"BB": 5, "Aa": 7}, {"Aa": 6, "C#": 5, "x": 7}, {"x": 5}]
        ids += [{"y": 2**31 - 1}, {"Aa": 2**31 - 1}]
        for number, names in enumerate(ids):
            life.move(f"root{number}")  # one writer would refuse such ids
            for topic, topic_id in names.items():
                rows = [(BASE_MS + number * HOUR_MS + step * 1000, "k") for step in range(20)]
                life.put(rows, topic=topic, topic_id=topic_id)
            life.publish()
        life.later()
        life.check()
        assert life.merge().jobs == 1
        life.check()
        (shards,) = life.state.tables.values()
        with life.reader() as reader:
            assert {topic for topic, _ in life.questions} == {"Aa", "BB", "C#", "x", "y"}
            assert reader.query("Aa", "k", max_count=1).explain.requests <= 2
        assert sum(stored.count for stored in shards) == life.messages


def test_several_indexes_with_tables_are_read_as_one(merging):
    lives = [merging(storage=MemoryStorage(f"merged-indexes/{name}")) for name in "ab"]
    try:
        for number, life in enumerate(lives):
            life.messages = number * 1000
            fill(life, days=2)
            life.later()
        lives[0].merge()
        with IndexReader.open([f"memory://merged-indexes/{name}" for name in "ab"], clock=lives[0].clock) as reader:
            for key in ("hot", "k1", f"own-{BASE_MS + DAY_MS + 9 * HOUR_MS}"):
                found = reader.query("t", key, max_count=10**6)
                for life in lives:
                    mine = [item for item in found if item.source == life.storage.uri]
                    assert life.answers(mine) == life.model.query("t", key, max_count=None)
                assert len(found) == sum(len(life.model.query("t", key, max_count=None)) for life in lives)
    finally:
        for name in "ab":
            MemoryStorage.forget(f"merged-indexes/{name}")


COLLIDING = ("Aa", "BB")
"""Topics whose Java hash is the same."""


def publish_without_topics(life, patch):
    real = Metadata.encode
    with patch.context() as patched:
        patched.setattr(Metadata, "encode", lambda self: real(replace(self, topics=())))
        life.publish()


@pytest.mark.parametrize("preset", ["rocketmq", "native"])
def test_one_source_without_a_topic_table(merging, monkeypatch, preset):
    life = merging(preset=preset)
    for hour in range(4):
        for number, topic in enumerate(("orders", "payments")):
            # Keys that differ by topic. Without names, only hashes distinguish topics.
            rows = [(BASE_MS + hour * HOUR_MS + n * 1000, f"{topic}-{n % 5}") for n in range(20)]
            life.put(rows, topic, topic_id=10 + number)
        if hour == 2:
            publish_without_topics(life, monkeypatch)
        else:
            life.publish()
    life.later()
    life.check()
    report = life.merge()
    assert (report.sources, report.entries, report.tables) == (4, 160, 1)
    life.check()
    (shards,) = life.state.tables.values()
    cold = ColdPath(life.storage, keyed=preset == "native")
    try:
        assert {cold.trailer(stored).metadata.topics for stored in shards} == {()}
    finally:
        cold.close()


def test_topics_of_one_hash_share_answers_if_no_table_distinguishes_them(merging, monkeypatch):
    life = merging(preset="rocketmq")
    for hour, topic in enumerate(COLLIDING):
        life.put([(BASE_MS + hour * HOUR_MS, "k")], topic)
        if hour == 0:
            publish_without_topics(life, monkeypatch)
        else:
            life.publish()
    life.later()
    life.merge()
    with life.reader() as reader:
        for topic in COLLIDING:
            assert len(reader.query(topic, "k").items) == 2
        assert not reader.query("orders", "k").items
