"""Queues from archived segments have the answers of a broker's store, except for facts that the archive does not
prove.
"""

import json
import shutil
from contextlib import contextmanager

import numpy as np
import pytest

from tests.rocketmq.archived_store import BEGIN_OF_LAST, delete_segments, index_log, log_of, open_index
from tests.rocketmq.messages import full, log, write_log
from tests.rocketmq.remoting_client import BEGIN, END, PULL, STATS, ask, ends, pull, pulled, records
from tests.support.changes import replace
from tests.support.damage import checked, flipped
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader, erase
from tiered_index.base.retention import Retention
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver, SegmentFacts, segment_facts
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.archive.repair import StoreSegments
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import TRANSACTION_COMMIT, TRANSACTION_PREPARED
from tiered_index.connectors.rocketmq.log.segments import list_segments
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.connectors.rocketmq.remoting.broker import ReadOnlyBroker
from tiered_index.connectors.rocketmq.remoting.queue_sources import message_at
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.segments.archived import PIECE_BYTES
from tiered_index.format.segments.queue_offsets import check_queues
from tiered_index.format.segments.segment import times_of
from tiered_index.service.jobs.copying import copy_index
from tiered_index.service.jobs.expiry import record_expiry
from tiered_index.service.jobs.lost import give_up
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.segments.catalogs import send_catalog
from tiered_index.service.log.records import LogRecord
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.opening import open_storage

BEGIN_MS, SEGMENT = 1_700_000_000_000, 4096


def in_queues(messages):
    queues = {}
    for message in messages:
        if message.is_visible:
            queues.setdefault((message.topic, message.queue_id), []).append(message)
    return queues


def archive(index, store, name="s", queues=True):
    return SegmentArchiver(index, name, store / "commitlog", queues=queues).run_once()


def take(index, store, **how):
    """Index a store and archive its closed segments; return all messages that a scan finds."""
    messages = index_log(index, store)
    archive(index, store, **how)
    return messages


def write_store(folder, puts):
    """Write a store whose messages are all in closed segments; return its messages."""
    with StoreWriter(folder, segment_bytes=SEGMENT) as writer:
        for n, fields in enumerate(puts):
            arguments = {"store_ms": BEGIN_MS + n * 1000, "keys": [f"k-{n}"], **fields}
            topic, queue_id = arguments.pop("topic", "orders"), arguments.pop("queue_id", 0)
            writer.put(topic, queue_id, arguments.pop("body", b"paid"), **arguments)
        last = writer.next_offset // writer.segment_bytes
        while writer.next_offset // writer.segment_bytes == last:
            writer.put("TBW102", 0, bytes(300), store_ms=BEGIN_MS + 10_000_000)
    return [m for m in CommitLogReader(folder / "commitlog").messages() if m.topic != "TBW102"]


@pytest.mark.parametrize("deleted", [None, 0, 16_384, BEGIN_OF_LAST - 16_384])
def test_every_queue_is_answered_whole_from_store_and_archive(index, store, deleted):
    """The test compares each page with a scan of the log: of the archive alone, or of a store whose first segments are
    deleted, beside it. Pages cross the place where the store begins, up to messages that are not archived.
    """
    messages = take(index, store)
    if deleted is None:
        messages = [m for m in messages if m.physical_offset < BEGIN_OF_LAST]
    else:
        delete_segments(store, deleted)
    broker = ReadOnlyBroker(index, store=None if deleted is None else store, name="b")
    indexed = {m.topic for m in messages if m.index_keys and m.is_visible}
    seen = 0
    for (topic, queue_id), queue in in_queues(messages).items():
        own = [m for m in queue if m.physical_offset >= (deleted or 0)]
        if topic not in indexed or not own:
            continue
        # a queue that the archive does not reach begins in the store
        begin = 0 if own[0].physical_offset < BEGIN_OF_LAST else queue.index(own[0])
        assert ends(broker, topic, queue_id) == (begin, len(queue))
        for most in (1, 5, 32):
            page, empty = pulled(broker, topic, queue_id, begin, len(queue), most)
            assert ([m.encode() for m in page], empty) == ([m.encode() for m in queue[begin:]], [])
        for at, code, remark, following in (
            (len(queue), 19, "OFFSET_OVERFLOW_ONE", len(queue)),
            (len(queue) + 1, 21, "OFFSET_OVERFLOW_BADLY", len(queue)),
            (begin - 1, 21, "OFFSET_TOO_SMALL", begin),
        ):
            answer = pull(broker, topic, queue_id, at)
            assert (answer.code, answer.remark, answer.fields["nextBeginOffset"]) == (code, remark, str(following))
            assert (answer.fields["minOffset"], answer.fields["maxOffset"]) == (str(begin), str(len(queue)))
        table = ask(broker, STATS, topic).body.decode()
        offsets = {"lastUpdateTimestamp": queue[-1].store_ms, "maxOffset": len(queue), "minOffset": begin}
        # RocketMQ's library writes a table whose names are objects in this way
        row = f'{{"brokerName":"b","queueId":{queue_id},"topic":"{topic}"}}:'
        assert row + json.dumps(offsets, separators=(",", ":")) in table
        seen += not begin
    assert seen > 3
    assert ends(broker, "TopicOrder", 4) == (0, 0) and pull(broker, "TopicOrder", 4, 0).code == 29
    assert ask(broker, 105, "TopicOrder").body.count(b'"readQueueNums":4') == 1


def test_an_archive_that_does_not_reach_the_store_is_left_alone(index, tmp_path):
    """The archive has another log, or a topic that was created again, whose messages are none of the store's."""
    messages = write_store(tmp_path / "s", [{} for _ in range(120)])
    write_store(tmp_path / "other", [{"body": b"other's"}] * 100)
    index_log(index, tmp_path / "s")
    archive(index, tmp_path / "other")
    delete_segments(tmp_path / "s", 8192)
    own = [m for m in messages if m.physical_offset >= 8192]
    broker = ReadOnlyBroker(index, store=tmp_path / "s")
    assert ends(broker, "orders", 0) == (own[0].queue_offset, 120)
    answer = pull(broker, "orders", 0, 0)
    assert (answer.code, answer.fields["nextBeginOffset"]) == (21, str(own[0].queue_offset))
    assert pulled(broker, "orders", 0, own[0].queue_offset, 120)[0] == own


def test_a_queue_without_messages_in_the_store_is_read_from_the_archive(index, tmp_path):
    """The broker has deleted all messages of a topic that gets no more, and keeps the queue's entries."""
    messages = write_store(tmp_path / "s", [{"topic": "idle" if n < 40 else "orders"} for n in range(200)])
    take(index, tmp_path / "s")
    idle = [m for m in messages if m.topic == "idle"]
    delete_segments(tmp_path / "s", (idle[-1].physical_offset // 4096 + 1) * 4096)
    broker = ReadOnlyBroker(index, store=tmp_path / "s")
    assert ends(broker, "idle", 0) == (0, 40)
    assert pulled(broker, "idle", 0, 0, 40) == (idle, [])
    assert pull(broker, "idle", 0, 40).code == 19
    last = b'{"lastUpdateTimestamp":%d,"maxOffset":40,"minOffset":0}' % idle[-1].store_ms
    assert last in ask(broker, STATS, "idle").body


@pytest.mark.parametrize("queues", [True, False])
def test_a_segment_states_the_number_of_its_messages_and_their_times_unless_it_is_damaged(index, store, queues):
    """The queue offsets of a damaged one would lack the messages after the damage."""
    messages = take(index, store, queues=queues)
    for segment in index.archived():
        times = [m.store_ms for m in messages if segment.start <= m.physical_offset < segment.end]
        assert (segment.rows, segment.times) == (len(times), (min(times), max(times)))
    # a time that no record can have is not stated
    assert times_of(np.array([1, 2**60])) is None
    assert times_of(np.array([-5, 7])) == (-5, 7)
    data = list_segments(store / "commitlog")[0].path.read_bytes()

    def facts(of):
        return segment_facts(0, len(of), lambda at, length: of[at : at + length], queues=queues)

    assert facts(data).rows and bool(facts(data).queues) == queues
    for bad in (*(flipped(data, at, 64) for at in range(4)), data[: len(data) // 2]):
        assert facts(bad) == SegmentFacts()


def test_segments_archived_without_queue_offsets_are_archived_again_with_them(index, tmp_path):
    """Without any, nothing is claimed. With some, offsets that may be in the others are unknown."""
    messages = write_store(tmp_path / "s", [{"queue_id": n % 2} for n in range(120)])
    index_log(index, tmp_path / "s")
    segments = list_segments(tmp_path / "s" / "commitlog")
    closed = archive(index, tmp_path / "s", queues=False)
    before = {s.name for s in index.archived()}
    for code in (END, BEGIN, STATS, PULL):
        answer = ask(ReadOnlyBroker(index), code, "orders")
        assert (answer.code, "--archive-queues" in answer.remark) == (3, True)
    first = segments[0].path.rename(tmp_path / "first")
    assert archive(index, tmp_path / "s") == closed - 1 >= 2
    first.rename(segments[0].path)
    broker = ReadOnlyBroker(index)
    for answer in (*(ask(broker, code, "orders") for code in (BEGIN, END, STATS)), pull(broker, "orders", 0, 0)):
        assert (answer.code, answer.body) == (1, b"")
        assert "is not known: segments were archived without queue offsets" in answer.remark
    assert [archive(index, tmp_path / "s") for _ in range(2)] == [1, 0]
    assert not before & {s.name for s in index.archived()}
    for (topic, queue_id), queue in in_queues(messages).items():
        assert ends(ReadOnlyBroker(index), topic, queue_id) == (0, 60)
        assert pulled(ReadOnlyBroker(index), topic, queue_id, 0, 60)[0] == queue


# erased, expired, damaged and lost


def archived_life(folder, puts):
    """The storage of a closed index, with its archive, and the messages of its store."""
    messages = write_store(folder / "s", puts)
    storage = LocalStorage(folder / "storage")
    with open_index(folder / "root", storage, local_keep_s=0) as index:
        index_log(index, folder / "s")
        assert archive(index, folder / "s") >= 2
        index.seal()
        index.run_lifecycle()
    return storage, messages


@pytest.fixture
def life(tmp_path):
    return archived_life(tmp_path, [{"queue_id": n % 2, "keys": [f"k-{n % 10}"]} for n in range(120)])


def segments_of(storage):
    return list(Segments(log_of(storage).state, storage))


@contextmanager
def reading(storage, **settings):
    with IndexReader.open(storage.uri, **settings) as reader:
        yield ReadOnlyBroker(reader)


@pytest.mark.parametrize(
    ("how", "now"), [("key", False), ("key", True), ("queue", False), ("queue", True), ("expired", False)]
)
def test_erased_and_expired_messages_are_skipped_with_or_without_their_bytes(life, how, now):
    storage, messages = life
    before_ms = BEGIN_MS + 50_000
    if how == "expired":
        record_expiry(log_of(storage), Retention(topics={"orders": 50}), BEGIN_MS + 120_000)
        before_ms = log_of(storage).state.expired.before_ms("orders")
        assert BEGIN_MS + 60_000 < before_ms < BEGIN_MS + 100_000
    else:
        selection = {"keys": "k-4"} if how == "key" else {"queue_id": 0, "before_ms": before_ms}
        done = erase(storage.uri, "orders", **selection, yes=True, now=now, grace_s=0)
        assert bool(done.messages_erased) == now

    def is_gone(m):
        return "k-4" in m.index_keys if how == "key" else m.store_ms < before_ms and (how, m.queue_id) != ("queue", 1)

    with reading(storage) as broker:
        for place, queue in in_queues(messages).items():
            remaining = [m for m in queue if not is_gone(m)]
            begin = 0 if how == "key" else 60 - len(remaining)
            assert ends(broker, *place) == (begin, 60)
            assert pulled(broker, *place, begin, 60, 1)[0] == remaining
            for m in [m for m in queue if is_gone(m)][:2]:
                answer = pull(broker, *place, m.queue_offset, 1)
                assert m.raw_body not in answer.body or records(answer.body)[0].queue_offset > m.queue_offset
            if begin:
                answer = pull(broker, *place, 0)
                assert (answer.code, answer.fields["nextBeginOffset"]) == (21, str(begin))


def test_only_erased_messages_in_reach_lead_on_to_the_next(tmp_path):
    storage, _ = archived_life(tmp_path, [{"keys": ["gone" if n < 820 else "kept"]} for n in range(840)])
    erase(storage.uri, "orders", keys="gone", yes=True, now=True, grace_s=0)
    with reading(storage) as broker:
        answer = pull(broker, "orders", 0, 0)
        answered = (answer.code, answer.remark, answer.fields["nextBeginOffset"], answer.body)
        assert answered == (20, "MESSAGE_WAS_REMOVING", "800", b"")


def test_a_flipped_bit_is_damage_and_never_another_answer(life):
    """The bit is in a message, in its queue offset, or in their directory. Pulls end before it, and fail at it."""
    storage, messages = life
    segment = segments_of(storage)[0]
    with IndexReader.open(storage.uri) as reader:
        runs = reader.segment_archive.queue_directory(segment).topics
    whole = storage.get(segment.name)
    queues = in_queues(messages)
    queue = queues["orders", 1]
    (run,) = [run_of_queue for run_of_queue in runs["orders"] if run_of_queue.queue_id == 1]
    behind = segment.size_bytes + segment.queues_bytes
    places = [queue[7].physical_offset + 30, segment.size_bytes + run.begin + 7 * 16, behind - 30]
    for place in places:
        storage.put(segment.name, flipped(whole, place))
        with reading(storage) as broker:
            answer = pull(broker, "orders", 1, 7)
            assert (answer.code, answer.body) == (1, b"")
            first = pull(broker, "orders", 1, 0)
            assert records(first.body) == queue[: len(records(first.body))]
            assert len(records(first.body)) <= 7
        assert {finding.file for finding in checked(storage).findings} == {segment.name}
    # damage of the messages hides none of their queue offsets, and the reverse
    storage.put(segment.name, flipped(flipped(whole, places[0]), places[1]))
    piece = places[0] // PIECE_BYTES
    in_parts = {finding.part: finding.offset for finding in checked(storage).findings}
    run_at = segment.size_bytes + run.begin
    assert in_parts == {f"piece {piece}": piece * PIECE_BYTES, "segment": None, "queue offsets": run_at}
    storage.put(segment.name, whole)


@pytest.mark.parametrize("which", ["segment", "first catalog", "middle catalog", "last catalog"])
def test_a_lost_segment_or_catalog_leaves_its_offsets_unknown_and_is_named(life, which):
    """The archive knows the queues on both sides of it, and not where they begin or end without it."""
    storage, messages = life
    segments, state = segments_of(storage), log_of(storage)
    at = {"first": 0, "last": len(segments) - 1}.get(which.split()[0], len(segments) // 2)
    gone, queue = segments[at], in_queues(messages)["orders", 0]
    lost = [m.queue_offset for m in queue if gone.start <= m.physical_offset < gone.end]
    name, said = gone.name, f"the message at offset {lost[0]} of queue 0 is not known: an archived segment was lost"
    if which != "segment":
        parts = [segments[at : at + 1], segments[:at], segments[at + 1 :]]
        catalogs = tuple(send_catalog(state, some)[0] for some in parts if some)
        removed = tuple(state.state.catalogs)
        state.append("test", None, lambda _: LogRecord(0, "archive", 0, "", 0, remove=removed, catalogs=catalogs))
        name, said = catalogs[0].name, f"{catalogs[0].name}, which listed"
    storage.delete_many([name])
    give_up(storage, state, [name])
    with reading(storage) as broker:
        for offset in (lost[0], lost[-1]):
            answer = pull(broker, "orders", 0, offset)
            assert (answer.code, answer.body) == (1, b"")
        assert said.replace(f"offset {lost[0]}", f"offset {lost[-1]}") in answer.remark
        if 0 < at < len(segments) - 1:
            assert ends(broker, "orders", 0) == (0, 60)
            assert pulled(broker, "orders", 0, 0, lost[0])[0] == queue[: lost[0]]
            assert pulled(broker, "orders", 0, lost[-1] + 1, 60)[0] == queue[lost[-1] + 1 :]
        if which != "middle catalog":
            assert ask(broker, STATS, "orders").code == 1


def test_queue_offsets_that_were_changed_are_damage(index, tmp_path):
    write_store(tmp_path / "s", [{"queue_id": n % 3} for n in range(40)])
    take(index, tmp_path / "s")
    archived = index.segment_archive
    (segment, *_) = archived.segments()
    data = archived.queue_offsets(segment)
    check_queues(data, segment.start, segment.size_bytes, "x")
    changed = [flipped(data, bit // 8, 1 << bit % 8) for bit in range(8 * len(data))]
    for bad in (*changed, *(data[:length] for length in range(0, len(data), 7))):
        with pytest.raises(CorruptFile):
            check_queues(bad, segment.start, segment.size_bytes, "x")
    with pytest.raises(CorruptFile, match="begins elsewhere"):
        check_queues(data, 1, segment.size_bytes, "x")
    with pytest.raises(CorruptFile, match="behind the segment"):
        check_queues(data, segment.start, 100, "x")
    # the size of the object in the log
    with pytest.raises(InvalidArgument):
        archived.read(segment, segment.size_bytes, 1)
    with pytest.raises(CorruptFile):
        archived.queue_directory(replace(segment, object_bytes=segment.object_bytes + 8))


# what a log does not prove


def numbered(folder, *queue_offsets):
    """Write a log of messages of one queue with these queue offsets, and begin a further segment; return them."""
    chosen, segments, start, made_of = iter(queue_offsets), {}, 0, []
    size = log(1)[0].size
    many = (SEGMENT - 8) // size
    while part := [m._replace(queue_offset=at) for m, at in zip(log(many, start, start), chosen, strict=False)]:
        segments[start] = full(part, SEGMENT)
        made_of += part
        start += SEGMENT
    segments[start] = log(1, start)[0]._replace(topic="other").encode()
    write_log(folder / "commitlog", SEGMENT, segments)
    (folder / "consumequeue").mkdir()
    return made_of


def test_a_topic_that_was_created_again_begins_at_0(index, tmp_path):
    """Brokers delete a topic's consume queues, and count from 0 again."""
    messages = numbered(tmp_path / "s", *range(40), *range(41))
    take(index, tmp_path / "s")
    broker = ReadOnlyBroker(index)
    assert ends(broker, "TopicA", 1) == (0, 41)
    assert pulled(broker, "TopicA", 1, 0, 41)[0] == messages[40:]


def test_a_queue_whose_offsets_decrease_in_the_log_is_unknown(index, tmp_path):
    """The log does not show which of these messages the broker's own queue has."""
    numbered(tmp_path / "s", *range(40), *range(7, 50))
    take(index, tmp_path / "s")
    broker = ReadOnlyBroker(index)
    for answer in (ask(broker, END, "TopicA", 1), pull(broker, "TopicA", 1, 0)):
        assert (answer.code, answer.body) == (1, b"")
        assert answer.remark.endswith("is not known: its offset 7 follows 39 in the log")


@pytest.mark.parametrize("is_archived", [False, True])
def test_a_store_that_was_changed_over_to_rocksdb_has_queues_by_its_log(tmp_path, index, is_archived):
    """It keeps the files of its old queues, which lack every later message."""
    store, old = tmp_path / "s", tmp_path / "old"
    puts = [{"queue_id": n % 2, "topic": ("orders", "payments")[n % 3 == 0]} for n in range(120)]
    write_store(store, puts[:60])
    shutil.copytree(store / "consumequeue", old)
    messages = write_store(store, puts[60:])
    assert len(messages) == 120
    if is_archived:
        # the archive ends after the old files, and before the log
        write_store(store, [{"queue_id": n % 2} for n in range(20)])
        messages = take(index, store)
        list_segments(store / "commitlog")[0].path.unlink()
    else:
        index_log(index, store)
    shutil.rmtree(store / "consumequeue")
    shutil.copytree(old, store / "consumequeue")
    broker = ReadOnlyBroker(index, store=store)
    expected = {queue: of_queue for queue, of_queue in in_queues(messages).items() if queue[0] != "TBW102"}
    assert ends(broker, "payments", 0)[1] < len(expected["payments", 0])
    (store / "consumequeue" / "CURRENT").write_text("MANIFEST-000005\n")
    broker = ReadOnlyBroker(index, store=store)
    assert len(expected) == 4
    for (topic, queue_id), of_queue in expected.items():
        assert ends(broker, topic, queue_id) == (0, len(of_queue))
        assert pulled(broker, topic, queue_id, 0, len(of_queue))[0] == of_queue
        fetched = message_at(RocketmqMessages(store, index.segment_archive), topic, queue_id, len(of_queue) - 1)
        assert (fetched.state, fetched.message) == ("local", of_queue[-1])


def test_prepared_messages_are_in_no_queue_and_messages_decide_tags(tmp_path, index):
    flags, tags = (0, TRANSACTION_PREPARED, TRANSACTION_COMMIT), {30: "Aa", 108: "BB"}
    puts = [{"sys_flag": flags[n % 3], "tags": tags.get(n, "other")} for n in range(120)]
    messages = write_store(tmp_path / "s", puts)
    take(index, tmp_path / "s")
    queue = in_queues(messages)["orders", 0]
    broker = ReadOnlyBroker(index)
    assert ends(broker, "orders", 0) == (0, 80)
    assert pulled(broker, "orders", 0, 0, 80)[0] == queue
    # the hash decides, as in a broker: "Aa" and "BB" have one
    tagged = [m for m in queue if m.tags in ("Aa", "BB")]
    assert records(pull(broker, "orders", 0, 0, subscription="Aa").body) == tagged
    assert pull(broker, "orders", 0, 0, subscription="none").code == 20


def test_logs_of_two_brokers_have_queues_of_their_own(index, tmp_path):
    for name in ("a", "b"):
        write_store(tmp_path / name, [{} for _ in range(40)])
        take(index, tmp_path / name, name=name)
    answer = ask(ReadOnlyBroker(index), END, "orders")
    assert (answer.code, "the logs of 2 brokers" in answer.remark) == (1, True)


def test_a_queue_without_messages_left_is_unknown(index, tmp_path):
    """It may have had messages before: 0 would be a guess."""
    messages = write_store(tmp_path / "s", [{"queue_id": 0 if n < 20 else 1} for n in range(80)])
    index_log(index, tmp_path / "s")
    first = list_segments(tmp_path / "s" / "commitlog")[0]
    first.path.unlink()
    archive(index, tmp_path / "s")
    broker = ReadOnlyBroker(index)
    remaining = [m for m in in_queues(messages)["orders", 1] if m.physical_offset >= first.end]
    assert ends(broker, "orders", 1) == (remaining[0].queue_offset, 60)
    answer = ask(broker, END, "orders", 0)
    assert (answer.code, "older segments are gone" in answer.remark) == (1, True)
    for queue_id in (0, 2):
        assert pull(broker, "orders", queue_id, 0).code == 1


# jobs beside lookups


def test_repairs_erasures_and_copies_keep_queue_offsets(life, tmp_path):
    """A repair from the store's file has none; the archiver adds them once it meets the file."""
    storage, messages = life
    queue = in_queues(messages)["orders", 0]
    with open_index(tmp_path / "root", storage) as index:
        storage.delete_many([segments_of(storage)[0].name])
        source = StoreSegments(storage, log_of(storage), StoreDirectory.open(tmp_path / "s", "s"))
        (done,) = Repairs(storage, log_of(storage), source=source).run(checked(storage), yes=True)
        assert done.action == "restore" and not checked(storage).findings
        with reading(storage) as broker:
            answer = ask(broker, BEGIN, "orders")
            assert (answer.code, "is not known" in answer.remark) == (1, True)
        assert archive(index, tmp_path / "s") == 1
    with reading(storage) as broker:
        assert pulled(broker, "orders", 0, 0, 60)[0] == queue
    erase(storage.uri, "orders", keys="k-4", yes=True, now=True, grace_s=0)
    copy_index(storage.uri, f"file://{tmp_path}/copied")
    with open_storage(f"file://{tmp_path}/copied") as copied, IndexReader.open(f"file://{tmp_path}/copied") as reader:
        assert not checked(copied).findings
        assert all(segment.queues_bytes for segment in reader.archived() if segment.source)
        assert pulled(ReadOnlyBroker(reader), "orders", 0, 0, 60)[0] == [m for m in queue if "k-4" not in m.index_keys]


def test_segments_that_are_replaced_meanwhile_are_looked_for_again(life):
    """An erasure removes objects that a reader's log named. The reader asks for a repeat, then answers right."""
    storage, messages = life
    queue = [m for m in in_queues(messages)["orders", 0] if "k-4" not in m.index_keys]
    with reading(storage, refresh_interval_s=3600) as broker:
        assert ends(broker, "orders", 0) == (0, 60)
        erase(storage.uri, "orders", keys="k-4", yes=True, now=True, grace_s=0)
        answers = [pull(broker, "orders", 0, 0) for _ in range(2)]
        assert answers[0].code in (0, 2)
        page = records(answers[1].body)
        assert page == queue[: len(page)] != []


def test_a_request_that_ends_too_soon_leaves_the_next_one_less_to_read(life):
    storage, _ = life
    for code, shown in ((END, b""), (105, b'"readQueueNums":2')):
        with IndexReader.open(storage.uri) as reader:
            segments = len(reader.archived())
            reader.topics()
            broker = ReadOnlyBroker(reader, max_requests=segments - 1)
            broker.topics("orders")
            answers = [ask(broker, code, "orders") for _ in range(segments + 1)]
        assert (answers[0].code, answers[-1].code) == (2, 0)
        assert shown in answers[-1].body
