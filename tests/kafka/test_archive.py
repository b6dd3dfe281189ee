"""Records in the archive: every one once, found by its offset, whatever is killed or deleted meanwhile."""

import contextlib
import itertools
import random
from types import SimpleNamespace

import pytest

from tests.kafka.followed import archive, archived, ingest, places, source_of
from tests.support.archived_records import encode_records
from tests.support.hanging import until
from tests.support.kafka_cluster import PARTITIONS
from tests.support.log_records import segments_of
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexService
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.archive.columns import times_in
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.archive import KafkaArchiver
from tiered_index.connectors.kafka.client.broker import KafkaBroker, TopicRetention, kafka, record_of
from tiered_index.connectors.kafka.columns import RecordLists, records_of
from tiered_index.connectors.kafka.partitions import OldestTimes
from tiered_index.errors import StorageUnavailable
from tiered_index.format.segments.columnar import decode_columns
from tiered_index.storage.memory import MemoryStorage


def test_every_record_is_archived_as_it_is(index, servers, producing, topic):
    """They are more than the archiver takes of the client at a time. One log record names all objects of a round."""
    produced = [
        {
            "key": None if n % 7 == 0 else f"k{n}",
            "value": None if n % 5 == 0 else bytes([n % 256]) * (n % 50),
            "headers": [("a", b"\xff"), ("a", None)] if n % 3 == 0 else [],
            "partition": n % PARTITIONS,
            "timestamp": 1_700_000_000_000 + n,
        }
        for n in range(4_000)
    ]
    producing.send(topic, produced)
    before = index.segment_archive.refresh().number
    follower = archive(index, servers, topic)
    assert index.segment_archive.refresh().number == before + 1
    assert (follower.messages, follower.archiving.archived, follower.loss_count) == (4_000, PARTITIONS, 0)
    stored = {(record.partition, record.offset): record for record in archived(index)}
    assert len(stored) == 4_000
    for n, sent in enumerate(produced):
        record = stored[n % PARTITIONS, n // PARTITIONS]
        key = None if sent["key"] is None else sent["key"].encode()
        assert (record.topic, record.key, record.value, record.timestamp_ms) == (
            topic,
            key,
            sent["value"],
            sent["timestamp"],
        )
        assert list(record.headers) == sent["headers"]
    facts = sorted((segment.rows, segment.times) for segment in index.archived())
    of_partitions = ([line["timestamp"] for line in produced[number::PARTITIONS]] for number in range(PARTITIONS))
    assert facts == sorted((len(times), (times[0], times[-1])) for times in of_partitions)


def test_a_file_of_a_part_of_the_records_has_their_nulls_clocks_and_repeated_headers():
    """The client returns type 0 or time -1 for a record without a time."""
    parts = [
        (b"k", b"v", (1, 1_000), []),
        (None, None, (0, 0), [("a", None), ("a", b"\xff")]),
        (b"", b"", (2, 1_700_000_000_000_000), [("\u00e9", b"")]),
        (b"key", b"value", (1, -1), []),
        (b"k", b"v", (1, 5), [("a", b"1")]),
    ]
    messages = [
        kafka.Message(topic="t", partition=1, offset=2 * n, key=key, value=value, timestamp=time, headers=headers)
        for n, (key, value, time, headers) in enumerate(parts)
    ]
    lists = RecordLists()
    lists.add(messages[:2])
    lists.add(messages[2:])
    table = lists.table()
    assert (table["size"].to_pylist(), lists.size_bytes) == ([2, 3, 2, 8, 4], 19)
    rest = table[1:]
    assert records_of(decode_columns(encode_records(("t", 1), rest, ["key"]))) == list(map(record_of, messages[1:]))
    # a record without a time may be of any time
    of_parts = [times_in(of_some) for of_some in (table[4:], table[:1], rest, table[:0])]
    assert of_parts == [(5, 5), (1_000, 1_000), None, None]


def test_a_time_beyond_the_year_9999_is_the_last_second_before_it_and_kept_in_the_archive(
    index, servers, producing, topic
):
    microseconds = 1_700_000_000_000_000
    producing.send(topic, [{"key": "k", "partition": 0, "timestamp": microseconds}])
    archive(index, servers, topic)
    (item,) = index.query(topic, "k").items
    assert item.timestamp_ms == MAX_TIMESTAMP_MS // 1_000 * 1_000
    assert [record.timestamp_ms for record in archived(index)] == [microseconds]


@contextlib.contextmanager
def archiver_of(index, source):
    """Yield the archiver of a source whose records are put."""
    archiver = KafkaArchiver(source, every_s=3_600)
    with Follower(index, source, follow=False) as follower:
        follower.run()
        index.flush()
        yield archiver


def offsets(index):
    return sorted((record.partition, record.offset) for record in archived(index))


def packet(count, name="k", partition=0):
    return [{"key": f"{name}{n}", "value": "v" * 100, "partition": partition} for n in range(count)]


def lost(follower):
    return [(loss.kind, loss.begin, loss.end) for loss in follower.losses]


def test_records_that_are_not_due_wait_behind_those_that_are_archived(index, servers, producing, topic, monkeypatch):
    monkeypatch.setattr("tiered_index.connectors.kafka.archive._WORTH_RECORDS", 60)
    monkeypatch.setattr("tiered_index.connectors.kafka.client.broker.MOST_MESSAGES", 10)
    producing.send(topic, packet(100))
    with archiver_of(index, source_of(index, servers, topic)) as archiver:
        archiver.segment_bytes = 60 * 200
        assert archiver.run_once() == 1
        assert 50 < len(offsets(index)) < 70
        assert (archiver.run_once(), archiver.finish()) == (0, 1)
        assert offsets(index) == [(0, offset) for offset in range(100)]


def test_a_stop_ends_a_round_behind_the_present_file_and_the_next_run_goes_on(
    index, servers, producing, topic, monkeypatch
):
    monkeypatch.setattr("tiered_index.connectors.kafka.client.broker.MOST_MESSAGES", 10)
    producing.send(topic, packet(100))
    with archiver_of(index, source_of(index, servers, topic)) as archiver:
        archiver.segment_bytes = 2_000
        send = index.send_columns

        def send_and_stop(*arguments):
            archiver.stop()
            return send(*arguments)

        monkeypatch.setattr(index, "send_columns", send_and_stop)
        assert archiver.finish() == 1
    assert 0 < len(offsets(index)) < 20
    monkeypatch.undo()
    archive(index, servers, topic)
    assert offsets(index) == [(0, offset) for offset in range(100)]


def test_records_that_were_indexed_before_are_read_again_for_the_archive(index, servers, producing, topic):
    producing.send(topic, packet(30))
    ingest(index, servers, topic)
    later = archive(index, servers, topic)
    # and nothing is put twice
    assert (later.messages, later.entries, later.loss_count) == (0, 0, 0)
    assert offsets(index) == [(0, n) for n in range(30)]
    assert places(index, topic, "k7") == {(0, 7)}
    # and nothing is archived twice
    again = archive(index, servers, topic, restart=True)
    assert (again.messages, again.archiving.archived) == (30, 0)
    assert offsets(index) == [(0, n) for n in range(30)]


def test_records_that_were_deleted_before_they_were_indexed_are_no_loss_of_a_later_archive(
    index, cluster, servers, producing, topic
):
    producing.send(topic, packet(20))
    cluster.trim(topic, 0, 5)
    ingest(index, servers, topic)
    producing.send(topic, packet(20))
    cluster.trim(topic, 0, 12)
    assert lost(archive(index, servers, topic)) == [("missing", 5, 12)]
    assert offsets(index) == [(0, n) for n in range(12, 40)]


@pytest.mark.parametrize(("controllers", "restart"), [((1, 0), False), ((0, 1), True)])
def test_a_log_without_keys_is_not_archived_again_while_ids_are_not_known(
    index, cluster, servers, producing, topic, controllers, restart, monkeypatch
):
    monkeypatch.setattr("tiered_index.connectors.kafka.client.broker.STEP_S", 2.0)
    producing.send(topic, [{"value": "v", "partition": 0}] * 150)
    first, second = controllers
    cluster.control(first)
    archive(index, servers, topic)
    cluster.control(second)
    producing.send(topic, [{"value": "w", "partition": 0}] * 10)
    assert ingest(index, servers, topic, restart=restart).loss_count == 0
    cluster.control(1)
    archive(index, servers, topic)
    assert offsets(index) == [(0, n) for n in range(160)]


def test_the_begin_of_a_log_without_records_does_not_count_for_the_log_after_it(
    index, cluster, servers, producing, topic
):
    producing.send(topic, packet(40, "old"))
    cluster.trim(topic, 0, 40)
    assert ingest(index, servers, topic).messages == 0
    cluster.delete(topic)
    cluster.create(topic)
    producing.send(topic, packet(60, "new"))
    archive(index, servers, topic)
    assert offsets(index) == [(0, n) for n in range(60)]


@pytest.mark.parametrize("made_again", [False, True])
def test_a_new_root_goes_on_with_the_archive_of_a_lost_one_except_for_a_log_that_was_made_again(
    cluster, servers, producing, topic, tmp_path, made_again
):
    storage, settings = MemoryStorage(), {"slots": 97, "items": 5_000, "background": False}
    producing.send(topic, packet(20, "old"))
    lost_root = IndexService.open(root=tmp_path / "lost", storage_backend=storage, **settings)
    archive(lost_root, servers, topic)
    lost_root.abandon()
    if made_again:
        cluster.delete(topic)
        cluster.create(topic)
    producing.send(topic, packet(40, "new"))
    index = IndexService(IndexConfig(root=tmp_path / "root", **settings), storage=storage, takes_over=True)
    assert archive(index, servers, topic).messages == (40 if made_again else 60)
    keys = [record.key for record in archived(index)]
    assert sorted(keys) == sorted(f"{name}{n}".encode() for name, c in (("old", 20), ("new", 40)) for n in range(c))
    assert archive(index, servers, topic).archiving.archived == 0
    index.abandon()


def test_logs_that_were_never_archived_are_losses_each(index, cluster, servers, producing, topic):
    for count in (30, 20):
        producing.send(topic, packet(count))
        ingest(index, servers, topic)
        cluster.delete(topic)
        cluster.create(topic)
    producing.send(topic, packet(10))
    assert [loss[1:] for loss in lost(archive(index, servers, topic)) if loss[0] == "missing"] == [(0, 30), (0, 20)]


def test_a_log_that_is_made_again_while_it_is_archived_is_not_archived_as_the_one_before(
    index, cluster, servers, producing, topic, monkeypatch
):
    cluster.create(topic)
    producing.send(topic, packet(20, "old"))
    with archiver_of(index, source_of(index, servers, topic)) as archiver:
        read = KafkaBroker.messages

        def read_late(*arguments):
            cluster.delete(topic)
            cluster.create(topic)
            producing.send(topic, packet(20, "new"))
            return read(*arguments)

        monkeypatch.setattr(KafkaBroker, "messages", read_late)
        with pytest.raises(StorageUnavailable, match="its id is not"):
            archiver.finish()
    monkeypatch.undo()
    # nor while its id can't be asked for
    cluster.control(0)
    with monkeypatch.context() as patch, pytest.raises(StorageUnavailable, match="its id is not"):
        patch.setattr("tiered_index.connectors.kafka.client.broker.STEP_S", 2.0)
        archive(index, servers, topic)
    assert offsets(index) == []
    cluster.control(1)
    archive(index, servers, topic)
    assert {record.key[:3] for record in archived(index)} == {b"new"}


@pytest.mark.parametrize(
    ("retention", "records", "wait_s"),
    [
        (TopicRetention(None, None), 10, 3_600),
        (TopicRetention(40_000, None), 10, 10),
        (TopicRetention(None, 4 * 9 * 102), 10, 0),
        # records that are old already, by their own times
        (TopicRetention(86_400_000, None), 11, 15),
    ],
)
def test_records_are_archived_once_their_time_is_over_well_before_their_topic_deletes_them(
    index, servers, producing, topic, monkeypatch, retention, records, wait_s
):
    now_ms = SystemClock().now_ms()
    age_ms = 43_200_000 if records == 11 else 0
    producing.send(topic, [{**record, "timestamp": now_ms - age_ms} for record in packet(records)])
    monkeypatch.setattr(KafkaBroker, "retentions", lambda _, topics, *__: dict.fromkeys(topics, retention))
    source = source_of(index, servers, topic)
    source.clock = clock = ManualClock(now_ms)
    with archiver_of(index, source) as archiver:
        if wait_s:
            assert archiver.run_once() == 0
            clock.advance(wait_s - 1)
            assert archiver.run_once() == 0
            clock.advance(1)
        assert (archiver.run_once(), archiver.run_once()) == (1, 0)


def retain(monkeypatch, retentions):
    """Let the brokers tell the retention of each topic, and return the topics of each question."""
    questions = list[list[str]]()

    def asked(_, topics, *__):
        questions.append(list(topics))
        return {topic: retentions[topic] for topic in topics}

    monkeypatch.setattr(KafkaBroker, "retentions", asked)
    return questions


@contextlib.contextmanager
def followed_archiver(index, source):
    """Yield the archiver of a source that is followed, and a function that waits until so many records are put."""
    with Follower(index, source, poll_s=0.02) as follower:
        follower.in_background()

        def wait_for(count):
            until(lambda: follower.messages == count)
            index.flush()

        yield KafkaArchiver(source, every_s=3_600), wait_for


def test_the_oldest_record_that_waits_decides_by_its_own_time(index, servers, producing, topic, monkeypatch):
    """Old records beside current ones, before and behind them, are in segments that the broker deletes soon."""
    now_ms, day_ms = SystemClock().now_ms(), 86_400_000
    retain(monkeypatch, {topic: TopicRetention(7 * day_ms, None)})
    times_ms = now_ms, now_ms - 30 * day_ms
    current, old = ([{**line, "timestamp": time_ms} for line in packet(5)] for time_ms in times_ms)
    producing.send(topic, current + old + current)
    source = source_of(index, servers, topic, follow=True)
    source.clock = clock = ManualClock(now_ms)
    with followed_archiver(index, source) as (archiver, wait_for):
        wait_for(15)
        assert archiver.run_once() == 0
        clock.advance(15)
        assert (archiver.run_once(), offsets(index)) == (1, [(0, offset) for offset in range(15)])
        # archived ones count no longer
        producing.send(topic, current)
        wait_for(20)
        assert archiver.run_once() == 0
        clock.advance(60)
        assert archiver.run_once() == 0
        producing.send(topic, old + current)
        wait_for(30)
        assert archiver.run_once() == 1
        assert offsets(index) == [(0, offset) for offset in range(30)]


def test_the_oldest_time_of_many_batches_is_never_later_than_it_is():
    times, batches, chosen = OldestTimes(), [], random.Random(93)
    passed = 0
    for end in range(10, 30_000, 10):
        times_ms = chosen.choice([end, chosen.randrange(40_000), 5])
        times.add(end, times_ms)
        batches.append((end, times_ms))
        passed = max(passed, chosen.choice([0, 0, end - chosen.randrange(3_000)]))
        waiting = [at_ms for behind, at_ms in batches if behind > passed]
        oldest_ms = times.since(passed)
        assert (oldest_ms is None) is (not waiting)
        assert not waiting or oldest_ms <= min(waiting)
    assert times.since(30_000) is None


def test_few_batches_that_wait_have_their_exact_oldest_time():
    times = OldestTimes()
    for end, time_ms in [(10, 7), (20, 3), (30, 5), (40, 9)]:
        times.add(end, time_ms)
    assert [times.since(offset) for offset in (0, 10, 19, 20, 29, 30, 40)] == [3, 3, 3, 5, 5, 9, None]


def test_a_short_retention_is_asked_for_more_often_and_one_that_is_too_short_is_named(
    index, servers, producing, topic, monkeypatch
):
    names = [f"{topic}.{age_s:03}" for age_s in (59, 60, 599, 600)]
    for name in names:
        producing.send(name, packet(1))
    retentions = {name: TopicRetention(1_000 * int(name[-3:]), None) for name in names}
    questions, notes, now_s = retain(monkeypatch, retentions), list[str](), itertools.count(0, 10)
    source = source_of(index, servers, *names, note=notes.append, follow=True)
    with followed_archiver(index, source) as (archiver, wait_for), monkeypatch.context() as patch:
        wait_for(4)
        seconds = [0.0]
        patch.setattr("tiered_index.connectors.kafka.archive.time", SimpleNamespace(monotonic=lambda: seconds[0]))
        for _ in range(7):
            archiver.run_once()
            seconds[0] = next(now_s) + 10.0
        assert [len(question) for question in questions] == [4, 3, 3, 3, 3, 3, 4]
        assert questions[1] == names[:3]
        assert [note for note in notes if "no archive keeps up" in note] == [
            f"the broker may delete records of {names[0]} after less than 60 seconds, and no archive keeps up with "
            "that: set retention.ms, or local.retention.ms, to more"
        ]
        # it is named again if it was long enough meanwhile
        for age_s, count in ((60, 1), (10, 2)):
            retentions[names[0]] = TopicRetention(1_000 * age_s, None)
            seconds[0] += 10
            archiver.run_once()
            assert sum("no archive keeps up" in note for note in notes) == count


@pytest.mark.parametrize(
    "shorter", [TopicRetention(80_000_000, None), TopicRetention(None, 2**40)], ids=["age", "bytes"]
)
def test_what_waits_when_a_retention_becomes_shorter_is_archived_at_once(
    index, servers, producing, topic, monkeypatch, shorter
):
    retentions = {topic: TopicRetention(86_400_000, None)}
    questions = retain(monkeypatch, retentions)
    producing.send(topic, packet(10))
    with followed_archiver(index, source_of(index, servers, topic, follow=True)) as (archiver, wait_for):
        wait_for(10)
        monkeypatch.setattr("tiered_index.connectors.kafka.archive._ASK_S", 0.0)
        assert archiver.run_once() == 0
        retentions[topic] = shorter
        assert (archiver.run_once(), offsets(index)) == (1, [(0, offset) for offset in range(10)])
        # what comes later waits as long as it may
        producing.send(topic, packet(10))
        wait_for(20)
        asked_before = len(questions)
        assert (archiver.run_once(), archiver.run_once(), len(questions)) == (0, 0, asked_before + 2)


def test_records_that_an_earlier_run_left_are_archived_first(index, servers, producing, topic):
    """Their time does not begin again with the process."""
    producing.send(topic, packet(10))
    ingest(index, servers, topic)
    with archiver_of(index, source_of(index, servers, topic)) as archiver:
        assert archiver.run_once() == 1
        producing.send(topic, packet(10))
        ingest(index, servers, topic)
        assert archiver.run_once() == 0


def test_a_loss_is_told_while_topics_are_followed_and_once(index, cluster, servers, producing, topic, looking_often):
    cluster.create(topic)
    producing.send(topic, packet(30))
    source = source_of(index, servers, topic, follow=True)
    notes: list[str] = []
    with Follower(index, source, archiver=KafkaArchiver(source), note=notes.append, poll_s=0.02) as follower:
        follower.in_background()
        until(lambda: follower.messages == 30)
        index.flush()
        cluster.trim(topic, 0, 30)
        until(lambda: follower.losses)
        assert lost(follower) == [("missing", 0, 30)]
        assert follower.has_lost and follower.gauges()["follow_lost_ranges_total"][1] == 1
        until(lambda: follower.problems())
        assert (
            f"archive: skipped ranges: 1, the last one: not archived: {topic}/0: offset 0 is next"
            in follower.problems()[0]
        )
        producing.send(topic, packet(10))
        until(lambda: follower.messages == 40)
        index.flush()
        cluster.delete(topic)
        until(lambda: len(follower.losses) == 2)
        assert lost(follower)[1] == ("missing", 30, 40) and "its topic was deleted" in follower.losses[1].problem
        assert sum(note.startswith("missing: ") for note in notes) == 2
    index.flush()
    cluster.create(topic)
    assert [loss for loss in lost(archive(index, servers, topic)) if loss[0] == "missing"] == []


def test_a_partition_that_can_not_be_read_does_not_keep_others_out_of_the_archive(
    index, servers, producing, topic, monkeypatch
):
    producing.send(topic, [record for number in range(PARTITIONS) for record in packet(5, partition=number)])
    read, away = KafkaBroker.messages, {0}

    def read_or_fail(broker, place, *offsets, **more):
        if place[1] in away:
            raise StorageUnavailable(f"partition {place[1]} is away")
        return read(broker, place, *offsets, **more)

    monkeypatch.setattr(KafkaBroker, "messages", read_or_fail)
    with archiver_of(index, source_of(index, servers, topic)) as archiver:
        with pytest.raises(StorageUnavailable, match="partition 0 is away"):
            archiver.finish()
        assert offsets(index) == [(number, n) for number in range(1, PARTITIONS) for n in range(5)]
        away.clear()
        archiver.finish()
    assert offsets(index) == [(number, n) for number in range(PARTITIONS) for n in range(5)]


# short runs fail every fifth call, long runs each call
@pytest.mark.parametrize(
    ("again", "when", "first", "step"),
    [
        ("in the same process", "after", 1, 5),
        ("after a crash", "before", 2, 5),
        pytest.param("in the same process", "before", 1, 1, marks=pytest.mark.long),
        pytest.param("after a crash", "after", 1, 1, marks=pytest.mark.long),
    ],
)
def test_a_fault_at_any_step_neither_loses_nor_doubles_a_record(
    servers, producing, topic, tmp_path, when, again, first, step
):
    producing.send(topic, packet(40))
    settings = {"slots": 97, "items": 5_000, "background": False}
    soon = {"settings": {"fetch.wait.max.ms": "10"}}
    for nth in itertools.count(first, step):
        storage = FaultStorage(MemoryStorage())
        opened = {"root": tmp_path / f"{nth}", "storage_backend": storage, **settings}
        index = IndexService.open(**opened)
        source = source_of(index, servers, topic, **soon)
        struck = False
        with archiver_of(index, source) as archiver:
            calls = storage.calls()
            storage.fail("*", nth=nth, when=when)
            for _ in range(3):
                try:
                    archiver.finish()
                    break
                except StorageUnavailable:
                    struck = True
                    if again == "after a crash":
                        break
            took = storage.calls() - calls
            storage.clear()
        if again == "after a crash":
            index.abandon()
            index = IndexService.open(**opened)
        archive(index, servers, topic, **soon)
        assert offsets(index) == [(0, n) for n in range(40)], nth
        # leftovers of the fault are no part of the archive
        assert {segment.name for segment in segments_of(index.segment_archive.state())} <= {
            info.name for info in storage.list("segments/")
        }
        index.abandon()
        if took < nth:
            assert not struck
            assert nth > 3
            return


def test_a_clock_that_is_set_back_keeps_no_records_out_of_the_archive(index, servers, producing, topic):
    producing.send(topic, packet(10))
    archive(index, servers, topic)
    producing.send(topic, packet(10, "later"))
    source = source_of(index, servers, topic)
    now_ms = [SystemClock().now_ms()]
    source.clock = SimpleNamespace(now_ms=lambda: now_ms[0])
    with archiver_of(index, source) as archiver:
        assert archiver.run_once() == 0
        now_ms[0] -= 86_400_000
        assert archiver.run_once() == 1
    assert offsets(index) == [(0, n) for n in range(20)]
