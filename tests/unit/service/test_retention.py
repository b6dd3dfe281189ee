"""A retention rule has a horizon. Horizons of several rules add up. Whole objects expire."""

import numpy as np
import pytest

from tests.support.cases import each
from tests.support.changes import replace
from tests.support.log_records import state_with
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_S
from tiered_index import IndexConfig
from tiered_index.base.retention import Horizon, Retention
from tiered_index.base.units import parse_bytes, parse_duration
from tiered_index.errors import ConfigError
from tiered_index.format.layout import SlotMap
from tiered_index.format.metadata import TopicStats
from tiered_index.service.jobs.expiry import SegmentTotals, plan_expiry, with_sums
from tiered_index.service.log.expired import NOTHING, Expired
from tiered_index.service.log.records import ArchivedSegment, StoredObject, TableShard
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import Segments

NOW_MS = BASE_MS + 100 * DAY_MS


def stored(number, first_day, last_day, size_bytes=1000):
    file_id = f"{number:015d}-0123456789ab"
    seconds = (BASE_MS // 1000 + first_day * DAY_S, BASE_MS // 1000 + last_day * DAY_S - 1)
    return StoredObject(f"data/{file_id}/x.index", file_id, "main", number, *seconds, 10, size_bytes, 500, 0, 0, 0, 0)


def state_of(*objects):
    return LogState(objects={index_object.name: index_object for index_object in objects})


def test_ages_of_topics_and_patterns():
    horizon = Retention(age_s=30 * DAY_S, topics={"debug-*": 7 * DAY_S, "debug-keep": 90 * DAY_S}).horizon(NOW_MS)
    days = {"orders": 30, "debug-x": 7, "debug-keep": 90, "Debug-x": 30}
    assert {topic: (NOW_MS - horizon.of_topic(topic)) / DAY_MS for topic in days} == days
    assert (horizon.of_all, horizon.latest) == (NOW_MS - 90 * DAY_MS, NOW_MS - 7 * DAY_MS)
    # a rule of topics alone keeps all others, and a name may look like a pattern
    horizon = Retention(topics={"audit[1]": 10 * DAY_S}).horizon(NOW_MS)
    assert horizon.of_topic("audit[1]") == horizon.of_topic("audit1") == NOW_MS - 10 * DAY_MS
    assert (horizon.of_topic("orders"), horizon.of_all) == (0, 0)


def test_a_horizon_moves_in_steps_and_never_too_far():
    for age_s in (1, 20, HOUR_S, DAY_S, 30 * DAY_S, 10**10):
        rule, before, moves = Retention(age_s=age_s), 0, 0
        for later_s in range(0, 2 * min(age_s, DAY_S), max(1, min(age_s, DAY_S) // 100)):
            now_ms = NOW_MS + later_s * 1000 + 500
            horizon = rule.horizon(now_ms).before_ms
            assert horizon % 1000 == 0 and before <= horizon <= max(0, now_ms - age_s * 1000)
            moves += horizon != before
            before = horizon
        assert moves <= 50


def test_what_has_expired_stays_so_whatever_a_later_rule_says():
    short, long = Horizon(10_000), Horizon(5_000, (("a*", 2_000),))
    for first, second in ((short, long), (long, short)):
        both = Expired((first,)).joined(Expired((second,)))
        assert [both.before_ms(topic) for topic in ("orders", "abc")] == [10_000, 10_000]
        assert both.horizons == (short,)


def test_rules_whose_patterns_overlap_do_not_add_up_to_more_than_each_says():
    first, other = Horizon(0, (("a*", 5_000), ("ab*", 1_000))), Horizon(0, (("a*", 1_000), ("ab*", 5_000)))
    both = Expired((first,)).joined(Expired((other,)))
    assert [both.before_ms(topic) for topic in ("abc", "ac", "b")] == [1_000, 5_000, 0]
    assert both.joined(Expired((first,))) is both
    later = Horizon(0, (("a*", 6_000), ("ab*", 6_000)))
    assert both.joined(Expired((later,))).horizons == (later,)


def test_only_whole_objects_expire_and_others_are_reported():
    old, astride, young = stored(1, 0, 70), stored(2, 60, 80), stored(3, 71, 90)
    plan = plan_expiry(Retention(age_s=30 * DAY_S), state_of(old, astride, young), NOW_MS)
    assert (plan.objects, plan.mixed, plan.entries, plan.size_bytes) == ((old,), (astride,), 10, 1000)
    assert plan.expired == Expired((Horizon(BASE_MS + 70 * DAY_MS),))
    last = replace(old, second_max=BASE_MS // 1000 + 70 * DAY_S)
    assert plan_expiry(Retention(age_s=30 * DAY_S), state_of(last), NOW_MS).objects == ()


def test_a_table_expires_with_its_last_shard():
    shards = [
        replace(stored(number, 0, last), shard=TableShard("table", 0, DAY_S, SlotMap(16, 1, 1), low, low + 8, "writer"))
        for number, (last, low) in enumerate(((60, 0), (75, 8)))
    ]
    state = state_of(*shards)
    assert plan_expiry(Retention(age_s=30 * DAY_S), state, NOW_MS).objects == ()
    assert plan_expiry(Retention(age_s=20 * DAY_S), state, NOW_MS).objects == tuple(shards)


def test_entries_older_than_the_epoch():
    seconds, ids = np.array([-5, 5, 15]), np.array([1, 2, 1])
    some = Expired((Horizon(0, (("debug", 10_000),)),))
    assert some.keeps({"topic_id": ids}, seconds, {1: "orders", 2: "debug"}).tolist() == [True, False, True]
    assert some.keeps({"topic_id": ids}, seconds, {}).tolist() == [True, True, True]
    assert NOTHING.keeps({"topic_id": ids}, seconds, {1: "orders"}).all()
    assert Expired((Horizon(10_000),)).keeps({"topic_id": ids}, seconds, {}).tolist() == [False, False, True]


def test_a_topic_of_a_longer_age_keeps_an_object():
    index_object = stored(1, 0, 10)
    rule = Retention(age_s=DAY_S, topics={"audit": 95 * DAY_S})
    assert plan_expiry(rule, state_of(index_object), NOW_MS).objects == ()

    def stats(*topics):
        of_topic = TopicStats(1, 5, 9, index_object.second_min, index_object.second_max)
        return {index_object.name: [(topic, of_topic) for topic in topics]}

    plan = plan_expiry(rule, state_of(index_object), NOW_MS, stats("orders", "audit"))
    assert (plan.objects, plan.mixed, plan.mixed_entries) == ((), (index_object,), 5)
    assert plan_expiry(rule, state_of(index_object), NOW_MS, stats("orders", "x")).objects == (index_object,)
    assert plan_expiry(rule, state_of(index_object), NOW_MS, {index_object.name: []}).objects == ()


def test_the_oldest_bytes_expire_up_to_a_horizon():
    objects = [stored(day, day, day + 1) for day in range(10)]
    plan = plan_expiry(Retention(max_bytes=3500), state_of(*objects), NOW_MS)
    assert plan.objects == tuple(objects[:7])
    assert plan.expired.of_all_ms == BASE_MS + 7 * DAY_MS
    again = plan_expiry(Retention(max_bytes=3500), state_of(*objects[7:]), NOW_MS)
    assert (again.objects, again.expired) == ((), NOTHING)


def test_bytes_of_a_future_time_do_not_expire_later_puts():
    of_a_fast_clock = replace(stored(1, 0, 1, 5000), second_max=250_000_000_000)
    plan = plan_expiry(Retention(max_bytes=3500), state_of(of_a_fast_clock), NOW_MS + 999)
    assert (plan.objects, plan.expired.latest_ms) == ((), NOW_MS)


def test_segments_expire_from_the_beginning_of_their_store():
    def segment(start, published_ms):
        return ArchivedSegment(f"segments/{start}", "log", start, 100, 0, 0, 150, published_ms)

    segments = [segment(0, 5), segment(100, NOW_MS), segment(200, 5)]
    state = state_with(segments)
    plan = plan_expiry(Retention(segments_age_s=DAY_S), state, NOW_MS)
    assert (plan.segments, plan.expired.segments) == ((segments[0],), {"log": 100})


@pytest.mark.parametrize(("newest_ms", "expires"), [(NOW_MS - 1, False), (NOW_MS + 1, True), (None, True)])
def test_a_segment_uploaded_by_a_clock_that_was_behind_does_not_expire_before_its_messages(newest_ms, expires):
    """One with messages of the future expires by its upload."""
    times = None if newest_ms is None else (5, newest_ms)
    segment = ArchivedSegment("segments/0", "log", 0, 100, 0, 0, 150, 5, rows=9, times=times)
    plan = plan_expiry(Retention(segments_age_s=DAY_S), state_with([segment]), NOW_MS)
    assert plan.expired.segments == ({"log": 100} if expires else {})


def test_a_plan_lists_the_first_segments_and_counts_all():
    segments = [ArchivedSegment(f"segments/{n}", "log", 100 * n, 100, 0, 0, 150, 5) for n in range(1500)]
    state = state_with(segments)
    plan = plan_expiry(Retention(segments_age_s=DAY_S), state, NOW_MS)
    assert plan.segments == tuple(segments[:1000])
    assert (plan.segments_expired, plan.size_bytes) == (SegmentTotals.of(segments), 1500 * 150)


def test_archived_segments_expire_by_the_age_of_their_topic():
    """A log of RocketMQ has messages of many topics, so its segments wait for the longest age."""

    def archived(store, *ages_days):
        return [
            ArchivedSegment(
                f"segments/{store}/{n}/x", store, 10 * n, 99, 0, 0, 150, NOW_MS - days * DAY_MS, None, (10, 8)
            )
            for n, days in enumerate(ages_days)
        ]

    audit, debug, other = (archived(f"kafka:cluster/{topic}/0", 40, 10) for topic in ("audit", "debug-x", "orders"))
    mixed = [replace(segment, columns=None, size_bytes=10) for segment in archived("commitlog", 80, 40)]
    state = state_with([*audit, *debug, *other, *mixed])
    topics = {"debug-*": 7 * DAY_S, "audit": 60 * DAY_S}
    rule = Retention(age_s=5 * DAY_S, segments_age_s=30 * DAY_S, segments_topics=topics)
    plan = plan_expiry(rule, state, NOW_MS)
    assert plan.segments == (mixed[0], *debug, other[0])
    summed = with_sums(plan, Segments(state))
    assert summed.segments_kept == summed.segments_of_age == SegmentTotals.of((mixed[1], *audit, other[1]))
    # without an age for all, only the named topics have one
    plan = plan_expiry(Retention(topics={"o*": 20 * DAY_S}, segments_topics=topics), state, NOW_MS)
    assert plan.segments == tuple(debug)
    # entries of orders expire, which a log of many topics may have, too
    assert with_sums(plan, Segments(state)).segments_of_age == SegmentTotals.of((*mixed, other[0]))


@pytest.mark.parametrize(
    "wrong",
    each(
        age_s=(0, float("nan"), "a week", 365, "365"),
        topics=({"x": -1}, {"": 10}, {"debug-*": 7}, {"audit": True}),
        segments_topics=({"x": -1}, {"": 10}, {"debug-*": 7}),
        max_bytes=(-1, "many"),
        segments_age_s=(0.5, 90.0),
        grace_s=(60, 7200),
        age=(7,),
    ),
)
def test_a_rule_that_can_not_be_right(wrong):
    with pytest.raises(ConfigError, match="retention"):
        IndexConfig(storage="memory://x", retention=wrong)


@pytest.mark.parametrize(
    "wrong", each(age_s=[[7]], topics=[{"a": None}], segments_age_s=[True], max_bytes=[b"1", True], grace_s=[None])
)
def test_the_class_takes_no_other_types(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"^{name}(\.a)? must be a .*, not "):
        Retention(**wrong)
    assert Retention(age_s=np.int64(7)).age_s == 7


def test_an_age_without_a_unit_is_named_in_every_source(tmp_path, monkeypatch):
    file = tmp_path / "index.toml"
    for text, problem in {
        "[retention]\nsegments_age_s = 90.0": "segments_age_s: '90' has no unit: give ",
        '[retention.topics]\n"a b" = 7': "topics.a b: '7' has no unit: give ",
        '[retention]\nage_s = "a week"': "age_s: 'a week' is not a duration",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            IndexConfig.load(file)
        assert str(caught.value).startswith(f"{file}: setting retention.{problem}")
    for age_s, hint in {365: " as text", "365": ""}.items():
        with pytest.raises(ConfigError, match=f"age_s: '365' has no unit: give 365d, 365h, 365m or 365s{hint}$"):
            IndexConfig(retention={"age_s": age_s})
    for name, value in {"RETENTION__AGE_S": "365", "RETENTION": '{"age_s": 365}', "RETENTION__TOPICS": "7d"}.items():
        problem = "topics must be a table, as JSON" if value == "7d" else "age_s: '365' has no unit: give 365d"
        with monkeypatch.context() as patched:
            patched.setenv(f"TIERED_INDEX_{name}", value)
            with pytest.raises(ConfigError, match=rf"{name}: setting retention\.{problem}"):
                IndexConfig.load()


@pytest.mark.parametrize("order", [1, -1])
def test_settings_from_file_and_environment(tmp_path, monkeypatch, order):
    file = tmp_path / "index.toml"
    file.write_text(
        'storage = "memory://x"\n[retention]\nage_s = "365d"\nmax_bytes = "100GiB"\n'
        '[retention.topics]\n"debug-*" = "7d"\naudit = "1000000s"\n'
    )
    monkeypatch.setenv("TIERED_INDEX_RETENTION__SEGMENTS_AGE_S", "90d")
    topics = {"debug-*": 7 * DAY_S, "audit": 10**6}
    expected = Retention(age_s=365 * DAY_S, topics=topics, max_bytes=100 << 30, segments_age_s=90 * DAY_S)
    assert IndexConfig.load(file).retention == expected
    # a variable of a topic beside one of its table, or of the whole rule
    table = '{"x": "1h", "y": "7d"}'
    for whole, value in (("RETENTION__TOPICS", table), ("RETENTION", f'{{"topics": {table}}}')):
        with monkeypatch.context() as patched:
            for name, text in list({whole: value, "RETENTION__TOPICS__x": "2h"}.items())[::order]:
                patched.setenv(f"TIERED_INDEX_{name}", text)
            assert IndexConfig.load(file).retention.topics == {"x": 2 * HOUR_S, "y": 7 * DAY_S}
            assert IndexConfig.load(file).retention.segments_age_s == 90 * DAY_S


def test_durations_and_sizes():
    assert [parse_duration(text) for text in ("7d", "12h", "30m", "90s", "0")] == [604_800, 43_200, 1_800, 90, 0]
    sizes = {"100GiB": 100 << 30, "1KiB": 1024, "2MiB": 2 << 20, "1TiB": 1 << 40, "17": 17}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "7 d", "GiB", "1GB", "-1", "1.5GiB", "١"):
        with pytest.raises(ValueError, match="not a size"):
            parse_bytes(text)


def test_an_age_has_one_spelling_everywhere(tmp_path, monkeypatch):
    """It was refused by `Retention` and by other settings than those of retention."""
    ages = {"age_s": "365d", "segments_age_s": "2h", "grace_s": "90m", "topics": {"debug-*": "7d"}}
    ages |= {"max_bytes": "1GiB"}
    seconds = {"age_s": 365 * DAY_S, "segments_age_s": 7200, "grace_s": 5400, "topics": {"debug-*": 7 * DAY_S}}
    seconds |= {"max_bytes": 1 << 30}
    assert Retention(**ages) == Retention(**seconds) == IndexConfig(retention=ages).retention
    with pytest.raises(ConfigError, match=r"^topics\.a: '7' has no unit: give 7d"):
        Retention(topics={"a": "7"})
    (file := tmp_path / "index.toml").write_text('local_keep_s = "7d"\nseal_after_s = 60')
    monkeypatch.setenv("TIERED_INDEX_LEASE_TTL_S", "2m")
    config = IndexConfig.load(file, max_late_s="36h", refresh_interval_s=1.5)
    assert (config.local_keep_s, config.seal_after_s, config.lease_ttl_s) == (7 * DAY_S, 60, 120)
    assert (config.max_late_s, config.refresh_interval_s) == (36 * 3600, 1.5)
    of_seconds = [name for name in IndexConfig.__struct_fields__ if name.endswith("_s")]
    assert {getattr(IndexConfig(**{name: "90s"}), name) for name in of_seconds} == {90.0}
    for name in of_seconds:
        with pytest.raises(ConfigError, match=rf"setting {name}: 'a few days' is not a duration|{name} = 'a few days'"):
            IndexConfig(**{name: "a few days"})
