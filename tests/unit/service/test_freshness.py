"""An answer says as of when it is, and which topics the files have. A reader says who writes the index."""

import os
from types import SimpleNamespace

import pytest

from tests.support.changes import replace
from tests.support.filled import merge_all
from tests.support.rounds import upload
from tests.support.storage_faults import FaultStorage
from tiered_index import Fetched, IndexReader, Lookup
from tiered_index.base.clock import ManualClock
from tiered_index.connectors.source import ReadTime
from tiered_index.errors import StorageMisconfigured, WriterFenced
from tiered_index.format.layout import SlotMap
from tiered_index.service.log.reads import read_name
from tiered_index.service.log.records import LostObject, TableShard
from tiered_index.service.log.state import LogState
from tiered_index.types import Freshness, LostFile, Provenance

# before the clock's time
T = 1_699_999_000_000


def publish(index, *offsets):
    for offset in offsets:
        index.put("t", 0, "k", offset, 1, T + offset * 1000, source="source", source_position=offset + 1)
    upload(index)


def test_a_clock_that_has_jumped_ahead_does_not_say_up_to_when_a_source_was_read(index, clock):
    time = ReadTime(index, "source")
    wrong_ms, right_ms = clock.now_ms() + 400 * 86_400_000, clock.now_ms()
    assert [*time.told(wrong_ms, is_due=True)] == []
    assert [batch.position for batch in time.told(right_ms, is_due=True)] == [right_ms]
    assert [*time.told(wrong_ms, is_due=True)] == []


def test_an_answer_from_the_storage_says_as_of_when(index, storage, clock):
    with IndexReader.open(storage_backend=storage, clock=clock, refresh_interval_s=10) as reader:
        nothing = reader.query("t", "k")
        assert (nothing.as_of_ms, len(nothing.freshness)) == (None, 1)
        publish(index, 1, 5)
        index.put("t", 0, "k", 9, 1, T + 9000)
        index.flush()
        assert reader.query("t", "k").as_of_ms is None  # the log was not read again
        clock.advance(11)
        answer = reader.query("t", "k")
        assert [item.offset for item in answer] == [5, 1]
        assert answer.as_of_ms == T + 5000
        [index_of] = answer.freshness
        assert (index_of.source, index_of.positions) == (reader.sources[0], {"source": 6})
        assert answer.to_dict()["freshness"] == [index_of.to_dict()]
        [batched] = reader.query_many([Lookup(topic="t", key="k")])
        assert batched.seen == answer.seen == reader.query_many([Lookup(topic="t", key="k")]).seen


def test_a_fast_clock_makes_no_answer_complete_up_to_the_future(open_index, storage, clock):
    """An entry is early, but not early enough for the quarantine. The writer's clock bounds it, also after a merge."""
    index = open_index("root", storage_backend=storage)
    put_ms = clock.now_ms()
    # the quarantine takes this one
    index.put("t", 0, "bad", 2, 1, T + 50 * 365 * 86_400_000)
    upload(index)
    with IndexReader.open(storage_backend=storage, clock=clock, refresh_interval_s=0) as reader:
        assert reader.query("t", "bad").as_of_ms == put_ms
        publish(index, 1)
        assert reader.query("t", "bad").as_of_ms == reader.query("t", "k").as_of_ms == T + 1000
        index.put("t", 0, "k", 1, 1, put_ms + 600_000)
        upload(index)
        assert reader.query("t", "k").as_of_ms == reader.topics().as_of_ms == put_ms
        clock.advance(120)
        assert reader.query("t", "none").as_of_ms == put_ms  # nothing was put since
        index.put("t", 0, "k", 2, 1, put_ms)
        upload(index)
        assert reader.query("t", "none").as_of_ms == put_ms + 120_000
        clock.advance(7200)
        merge_all(storage, clock)
        assert reader.query("t", "none").as_of_ms == put_ms + 120_000  # not the time of the merge
    state = LogState.decode(index.log_state.encode(), "checkpoint")
    assert state.put_before_ms == index.log_state.put_before_ms == put_ms + 120_000


def test_entries_that_wait_for_a_late_upload_bound_the_time_of_answers(open_index, storage, clock):
    """After an outage files are published one after the other. A fast clock must not hide the entries of later ones."""
    index = open_index("root", storage_backend=storage)
    put_ms = clock.now_ms()
    index.put("t", 0, "k", 1, 1, put_ms + 600_000)
    index.seal()
    clock.advance(60)
    index.put("t", 0, "k", 2, 1, put_ms + 60_000)
    index.flush()
    clock.advance(3600)
    index.run_lifecycle()
    with IndexReader.open(storage_backend=storage, clock=clock, refresh_interval_s=0) as reader:
        assert reader.query("t", "k").as_of_ms == put_ms + 60_000
        upload(index)
        assert reader.query("t", "k").as_of_ms == put_ms + 600_000


def tell(index, name, at_ms):
    columns = {name: [] for name in ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")}
    index.put_source_batch(columns, name, at_ms)


def as_of_each(lookups, *topics):
    """The times of single lookups of topics, which those of a batch must be; and the time of the batch."""
    alone = [lookups.query(topic, "k") for topic in topics]
    batch = lookups.query_many([Lookup(topic=topic, key="k") for topic in topics])
    assert [answer.seen for answer in batch] == [answer.seen for answer in alone]
    assert batch.seen.as_of_ms == min(
        [answer.as_of_ms for answer in alone if answer.as_of_ms is not None], default=None
    )
    assert batch.seen.freshness == batch.freshness
    assert lookups.topics().as_of_ms == batch.seen.as_of_ms
    return [answer.as_of_ms for answer in alone]


@pytest.mark.parametrize("is_local", [False, True])
def test_a_topic_is_complete_only_up_to_where_its_source_was_read(open_index, storage, clock, is_local):
    """Another topic is complete up to its newest entry. The source's time counts for the root's files, too."""
    index, source = open_index("root", storage_backend=storage, local_keep_s=3600 * is_local), "kafka:c"
    read, other = read_name(source, "behind"), read_name(source, "other")
    for topic in ("behind", "other", "plain"):
        index.put(topic, 0, "k", 1, 1, T + 9000)
    tell(index, read, T + 2500)
    tell(index, other, T + 60_000)
    upload(index)
    with (
        IndexReader.open(storage_backend=storage, clock=clock, refresh_interval_s=0) as stored,
        IndexReader.open(root=index.config.root, storage_backend=storage, clock=clock, refresh_interval_s=0) as rooted,
    ):
        for _ in range(2):
            assert as_of_each(stored, "behind", "other", "plain") == [T + 2000, T + 9000, T + 9000]
            for lookups in (index, rooted):
                assert as_of_each(lookups, "behind", "other", "plain") == [T + 2000, T + 60_000, None]
                assert lookups.query("behind", "none").as_of_ms == T + 2000
                assert lookups.query("plain", "none").freshness == ()
            merge_all(storage, clock)
        tell(index, read, T + 20_000)
        index.put("other", 0, "k", 2, 1, T + 10_000)
        index.flush()
        for lookups in (index, rooted):
            assert as_of_each(lookups, "behind", "other") == [T + 20_000, T + 60_000]
        assert as_of_each(stored, "behind", "other") == [T + 2000, T + 9000]
        upload(index)
        assert as_of_each(stored, "behind", "other") == [T + 10_000, T + 10_000]


@pytest.mark.parametrize("is_local", [False, True])
def test_the_time_of_a_source_is_for_all_topics_without_one_of_their_own(open_index, storage, clock, is_local):
    """Another source of a topic has another time, and the least one counts. A source may have slashes and percents."""
    index = open_index("root", storage_backend=storage, local_keep_s=3600 * is_local)
    topics = ["own", "both", "other/topic", "plain"]
    for topic in topics:
        index.put(topic, 0, "k", 1, 1, T + 90_000)
    tell(index, read_name("rocketmq:/a/b", ""), T + 5000)
    tell(index, read_name("rocketmq:/a/b", "own"), T + 8000)
    tell(index, read_name("kafka:c", "both"), T + 3000)
    tell(index, read_name("rocketmq:/a%2Fb", "other/topic"), T + 4000)
    upload(index)
    with (
        IndexReader.open(storage_backend=storage, clock=clock, refresh_interval_s=0) as stored,
        IndexReader.open(root=index.config.root, storage_backend=storage, clock=clock, refresh_interval_s=0) as rooted,
    ):
        for lookups in (index, rooted, stored):
            assert as_of_each(lookups, *topics) == [T + 8000, T + 3000, T + 4000, T + 5000]
            assert lookups.query("unknown", "k").as_of_ms == T + 5000
        tell(index, read_name("kafka:c", "both"), T + 7000)
        index.flush()
        for lookups in (index, rooted):
            assert as_of_each(lookups, *topics) == [T + 8000, T + 5000, T + 4000, T + 5000]


def test_a_topic_that_was_never_read_to_its_end_is_not_complete_up_to_any_time(open_index, tmp_path, clock):
    """A reader of several indexes answers by the index that knows least. Pages of an answer keep the earlier time."""
    uris = [f"file://{tmp_path}/{name}" for name in ("first", "second")]
    first, second = (open_index(storage_backend=None, storage=uri) for uri in uris)
    tell(first, read_name("kafka:c", "t"), 0)
    first.flush()
    assert first.query("t", "k").as_of_ms == 0
    publish(first, 1)
    publish(second, 3)
    with IndexReader.open(uris, clock=clock) as reader:
        answer = reader.query("t", "k")
        assert [freshness.as_of_ms for freshness in answer.freshness] == [0, T + 3000] and answer.as_of_ms == 0
        earlier = reader.query("u", "k").seen
        assert earlier.as_of_ms == T + 1000 and earlier.joined(answer.seen).as_of_ms == 0


def test_the_writer_and_a_reader_of_its_root_have_everything(open_index, storage, clock, tmp_path):
    index = open_index("root", storage_backend=storage)
    publish(index, 1)
    index.put("t", 0, "k", 5, 1, T + 5000)
    assert index.query("t", "k").freshness == ()
    assert index.health()["unpublished"] == {"files": 0, "entries": 1}
    index.flush()
    assert index.health()["unpublished"] == {"files": 1, "entries": 1}
    with IndexReader.open(root=tmp_path / "root", storage_backend=storage, clock=clock) as reader:
        answer = reader.query("t", "k")
        assert ([item.offset for item in answer], answer.as_of_ms) == ([5, 1], None)
        # if a file left the root, the reader finds it in the log, and counts the requests
        publish(index, 9)
        answer = reader.query("t", "k")
        assert [item.offset for item in answer] == [9, 5, 1]
        assert [report.requests > 0 for report in answer.explain.files if report.outcome == "refreshed"] == [True]


def test_a_fenced_writer_says_up_to_when_its_answers_are_complete(open_index, storage, clock):
    """It doesn't read the log again, so it never sees what the new writer publishes."""
    old = open_index("old", storage_backend=storage, refresh_interval_s=0)
    publish(old, 1)
    clock.advance(3600)
    new = open_index("new", storage_backend=storage)
    publish(new, 5)
    with pytest.raises(WriterFenced):
        old.run_lifecycle()
    publish(new, 9)
    for key in ("k", "no such key"):
        plain, [batched] = old.query("t", key), old.query_many([Lookup(topic="t", key=key)])
        for answer in (plain, batched):
            [seen] = answer.freshness
            assert (seen.source, answer.as_of_ms) == (storage.uri, T + 5000)
            assert "newer writer" in seen.not_asked
    assert [item.offset for item in old.query("t", "k")] == [5, 1]
    with pytest.raises(WriterFenced):
        old.export()


@pytest.mark.parametrize("may_write", [True, False])
def test_a_readers_wrong_clock_is_corrected_by_the_storages(open_index, storage, clock, may_write):
    """A storage may have to be written to tell its time, which a reader may not do."""
    publish(index := open_index("root", storage_backend=storage, lease_ttl_s=60), 1)
    faulty = FaultStorage(storage)
    if not may_write:
        faulty.fail("now_ms", times=None, error=StorageMisconfigured)
    corrected = "alive" if may_write else "gone"
    for skew_s, state in ((0, "alive"), (50, "alive"), (-50, "alive"), (3600, corrected), (-3600, corrected)):
        wrong, before = ManualClock(clock.now_ms() + skew_s * 1000), faulty.calls("now_ms")
        with IndexReader.open(storage_backend=faulty, clock=wrong) as reader:
            [writer] = reader.writers().values()
            assert (writer.state, writer.pid) == (state, os.getpid())
        assert bool(faulty.calls("now_ms") - before) == (abs(skew_s) > 60)
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        clock.advance(61)
        assert reader.writers()[reader.sources[0]].state == "gone"
        index.run_lifecycle()
        index.close()
        assert reader.writers()[reader.sources[0]].state == "closed"


def test_a_topic_that_no_file_has_is_said(index, storage, clock):
    wrong, right = Lookup(topic="x", key="k"), Lookup(topic="t", key="nobody")

    def unknown(of):
        alone = [of.query(q.topic, q.key).unknown_topics for q in (wrong, right)]
        assert [answer.unknown_topics for answer in of.query_many([wrong, right])] == alone
        return alone

    assert unknown(index) == [(), ()]  # an empty index has no file that lacks the topic
    index.put("t", 0, "k", 1, 1, T)
    assert unknown(index) == [("x",), ()]
    index.flush()
    assert unknown(index) == [("x",), ()]
    upload(index)
    assert unknown(index) == [("x",), ()]
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        assert reader.query("x", "k", max_requests=0, allow_partial=True).unknown_topics == ()
        assert unknown(reader) == [("x",), ()]
        assert reader.query("x", "k").to_dict()["unknown_topics"] == ["x"]
    index.put("fresh", 0, "k", 0, 1, T)
    assert [index.query(topic, "none").unknown_topics for topic in ("fresh", "x")] == [(), ("x",)]


def test_joined_answers_lack_everything_that_one_of_them_lacks():
    """The joined record has the first state seen, and everything that is unknown, lost or expired in any part."""
    first = Freshness(source="a", as_of_ms=T, positions={})
    later = Freshness(source="a", as_of_ms=T + 1, positions={}, not_asked="it is away")
    gone, other = (LostFile(file=name, begin_ms=0, end_ms=1, entries=1) for name in "xy")
    provenance = Provenance((first,), ("t",), (gone,), None)
    both = provenance.joined(Provenance((later,), ("t", "u"), (gone, other), 7))
    assert both == Provenance((replace(first, not_asked="it is away"),), ("t", "u"), (gone, other), 7)
    assert both.joined(provenance).expired_before_ms == 7
    assert both.to_dict()["as_of_ms"] == both.as_of_ms == T


def test_topics_of_files_in_every_state(open_index, storage, clock, tmp_path):
    index = open_index("root", storage_backend=storage)
    expected = {}

    def put(topic, offset, size):
        index.put(topic, 0, ["a", "b"], offset, size, T + offset * 1000)
        entries, total, begin, _ = expected.get(topic, (0, 0, T + offset * 1000, 0))
        expected[topic] = (entries + 2, total + 2 * size, min(begin, T + offset * 1000), T + offset * 1000)

    def listed(of, **more):
        return {t.topic: (t.entries, t.bytes_of_entries, t.begin_ms, t.end_ms) for t in of.topics(**more).topics}

    def check(of):
        assert listed(of) == expected
        assert set(listed(of, begin_ms=T + 3000)) == {topic for topic, row in expected.items() if row[3] >= T + 3000}
        assert set(listed(of, end_ms=T + 999)) == {"t"} & expected.keys()

    check(index)
    for number, topic in enumerate(["t", "u", "t", "v"]):
        put(topic, number, 10 + number)
        check(index)
        index.flush()
        check(index)
        with IndexReader.open(root=tmp_path / "root", storage_backend=storage, clock=clock) as reader:
            check(reader)
        upload(index)
        check(index)
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        answer = reader.topics()
        assert (answer.status, answer.explain.requests, answer.as_of_ms) == ("complete", 4, T + 3000)
        check(reader)
        # the directories are in memory
        assert reader.topics().explain.requests == 0
    clock.advance(7200)
    merge_all(storage, clock)
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        check(reader)


def test_a_lost_file_of_the_far_future_does_not_hide_that_nothing_is_published():
    """Its lane is not known."""
    far, day_s = LostObject("data/x/9.index", "x9", 0, 1 << 32, 1), 86_400
    state = LogState(lost={far.name: far})
    assert state.newest_ms == (1 << 32) * 1000
    shard = TableShard("t1", 0, day_s, SlotMap(64), 0, 3, "writer")
    table = LostObject("data/t1/1.index", "t1", 0, 7, 1, shard)
    assert LogState(lost={far.name: far, table.name: table}).newest_ms == 7000


def test_the_pages_of_one_lookup_of_messages_are_complete_up_to_the_time_of_the_first_one(index, storage, clock):
    def fetch(items, topic, key):
        is_first = items[0].offset == 5
        if is_first:
            publish(index, 9)
        return [Fetched(item=item, state="expired", carries_key=not is_first) for item in items]

    publish(index, 1, 5)
    with IndexReader.open(storage_backend=storage, clock=clock, refresh_interval_s=0) as reader:
        messages = reader.messages("t", "k", max_count=1, source=SimpleNamespace(fetch=fetch))
        assert (messages.collisions, messages.as_of_ms) == (1, T + 5000)
