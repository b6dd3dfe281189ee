"""After any merges every key has the same answers as before, and as the model. No entry is lost or doubled.

A merge continues without objects that the storage lost. A window table may lack a shard.
"""

import pytest

from tests.support.changes import replace
from tests.support.damage import checked
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_MS, HOUR_S, RegionItem, small_shards
from tiered_index import Lookup, LostFile
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.keys.hashing import key_hash
from tiered_index.format.metadata import Metadata
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.lost import give_up

KINDS = {"native": {}, "rocketmq": {"preset": "rocketmq"}, "extended": {"item_type": RegionItem}}


@pytest.mark.parametrize("kind", KINDS)
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


def test_an_entry_of_a_topic_without_a_name_is_not_merged(merging, monkeypatch):
    life = merging()
    for topic_id, topic in ((10, "orders"), (11, "payments")):
        life.put([(BASE_MS + n * 1000, f"k{n}") for n in range(20)], topic, topic_id=topic_id)
    real = Metadata.encode

    def of_one_topic(meta):
        stats = [row for row in meta.more["topic_stats"] if row[0] == 10]
        return real(replace(meta, topics=((10, "orders"),), more={**meta.more, "topic_stats": stats}))

    with monkeypatch.context() as patched:
        patched.setattr(Metadata, "encode", of_one_topic)
        life.publish()
    life.later()
    names = {listed.name for listed in life.storage.list("data/")}
    with pytest.raises(InvalidArgument, match="restore the file that verify --deep names"):
        life.merge()
    assert {listed.name for listed in life.storage.list("data/")} == names and not life.state.tables


KEYS = [f"k{number}" for number in range(60)]


@pytest.fixture
def two_days(merging):
    """Two days of two files each."""
    two_days = merging(settings={"slots": 64})
    for hour in (0, 1, 30, 31):
        two_days.put((BASE_MS + hour * HOUR_MS + 1000 * number, key) for number, key in enumerate(KEYS))
        two_days.publish()
    two_days.later()
    return two_days


def test_a_merge_names_the_lost_object_or_merges_the_rest(two_days):
    gone = min(two_days.state.objects.values(), key=lambda stored: stored.second_min)
    two_days.storage.delete_many([gone.name])
    with pytest.raises(CorruptFile, match="--skip-lost"):
        two_days.merge()
    report = two_days.merge(skip_lost=True)
    assert report.left == ((gone.file_id, "the storage lacks one of its objects"),)
    assert set(two_days.state.files) == {gone.file_id} and two_days.windows() == [(0, 24), (24, 24)]


def test_a_table_that_lost_a_shard_answers_for_the_other_slots(two_days):
    with small_shards():
        two_days.merge()
    table, shards = min(two_days.state.tables.items(), key=lambda pair: pair[1][0].part.begin_s)
    assert len(shards) > 2
    gone = shards[1]
    slots = gone.part.slots
    touched = {key for key in KEYS if gone.part.slot_low <= slots.slot_of(key_hash("t", key)) < gone.part.slot_high}
    assert 0 < len(touched) < len(KEYS) / 2
    with two_days.reader(refresh_interval_s=10**6, cache_slot_groups=False) as reader:
        reader.query("t", KEYS[0])
        two_days.storage.delete_many([gone.name])
        (missing,) = checked(two_days.storage).missing
        assert (missing.object, missing.file, missing.entries) == (gone.name, table, gone.count)
        assert missing.topics == ("t",)
        give_up(two_days.storage, two_days.log(), [table])
        lost_file = LostFile(
            file=table, begin_ms=gone.second_min * 1000, end_ms=gone.second_max * 1000, entries=gone.count
        )
        many = reader.query_many([Lookup(topic="t", key=key) for key in KEYS])
        for key, batched in zip(KEYS, many, strict=True):
            for result in (reader.query("t", key), batched):
                expected = two_days.model.query("t", key, max_count=None)
                if key in touched:
                    expected = [answer for answer in expected if answer.timestamp_ms >= BASE_MS + DAY_MS]
                assert (two_days.answers(result), result.status) == (expected, "complete")
                assert result.lost == ((lost_file,) if key in touched else ())
    report = checked(two_days.storage)
    assert (report.status, [lost.object for lost in report.lost]) == ("ok", [gone.name])
    left = sum(stored.count for stored in two_days.state.objects.values())
    assert two_days.merge(30 * 86400).entries == left and checked(two_days.storage).status == "ok"


def test_an_erasure_leaves_a_table_that_lost_a_shard(two_days):
    with small_shards():
        two_days.merge()
    table, (gone, other, *_) = min(two_days.state.tables.items(), key=lambda pair: pair[1][0].part.begin_s)
    low, high, slots = other.part.slot_low, other.part.slot_high, other.part.slots
    key = next(key for key in KEYS if low <= slots.slot_of(key_hash("t", key)) < high)
    two_days.storage.delete_many([gone.name])

    def erased():
        request = EraseRequest("t", (key,))
        return erase(
            two_days.storage, two_days.log(), request, two_days.clock, yes=True, now=True, grace_s=0, threads=1
        )

    done = erased()
    # the table of the other day is written again
    assert (done.status, done.entries, done.entries_removed) == ("remains", 4, 2)
    assert set(done.remaining) == {gone.name, other.name}
    give_up(two_days.storage, two_days.log(), [table])
    done = erased()
    assert (done.status, done.remaining, done.entries_removed) == ("erased", (), 2)
