"""Messages erased from archived segments: none of their bytes are left, all other messages are unchanged, and no
process restores the erased ones.
"""

import contextlib
import shutil
from functools import partial

import pytest

from tests.rocketmq.archived_store import log_of, open_index, put
from tests.support.damage import checked, flip, flip_object
from tests.support.log_records import segments_of
from tests.support.storage_faults import FaultStorage
from tests.support.store_writer import StoreWriter
from tests.support.stored_messages import compress
from tiered_index import IndexReader, erase
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.connectors.rocketmq.archive.archive import ArchivedLog, SegmentArchiver
from tiered_index.connectors.rocketmq.archive.erasure import MessagesToErase
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.archive.repair import StoreSegments
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.message import decode_message
from tiered_index.connectors.rocketmq.log.segments import segment_name
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import RootBehind, StorageUnavailable
from tiered_index.format.segments.archived import HEAD_BYTES
from tiered_index.service.jobs.copying import copy_index
from tiered_index.service.jobs.erase import EraseRequest
from tiered_index.service.jobs.erase import erase as erase_by
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.segments import erase_segments as segments
from tiered_index.service.jobs.segments import uploads
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage

SEGMENT = 2 * HEAD_BYTES + 513
BEGIN_MS = 1_700_000_000_000
WRITING = ("put", "put_if_absent", "write", "delete_many")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with StoreWriter(folder, segment_bytes=SEGMENT) as writer:
        for n in range(500):
            body = b"secret-%d." % n * (900 + 37 * (n % 30))
            topic = "orders" if n % 4 else "pay"
            flag = 0
            if n % 5 == 0:
                body, flag = compress(body, "zlib")
            keys = [f"k-{n % 9}", "all"]
            writer.put(topic, n % 3, body, keys=keys, store_ms=BEGIN_MS + n * 1000, sys_flag=flag)
    return folder


@pytest.fixture(scope="module")
def archived(store, tmp_path_factory):
    """The root and the storage of the store's index, whose first segments are archived, and the store's messages."""
    folder, messages = tmp_path_factory.mktemp("archived"), list(CommitLogReader(store / "commitlog").messages())
    with open_index(folder / "root", LocalStorage(folder / "storage"), local_keep_s=0) as index:
        for message in messages:
            put(index, message)
        assert SegmentArchiver(index, "a-store", store / "commitlog").run_once() >= 2
        index.seal()
        index.run_lifecycle()
    return folder, messages


@pytest.fixture
def life(archived, tmp_path):
    """The index of the store, its archive and its writer."""
    made, messages = archived
    for name in ("root", "storage"):
        shutil.copytree(made / name, tmp_path / name)
    marker = tmp_path / "root" / "tiered_index.json"
    marker.write_text(marker.read_text().replace(str(made), str(tmp_path)))
    storage = LocalStorage(tmp_path / "storage")
    with open_index(tmp_path / "root", storage, local_keep_s=0) as index:
        yield storage, index, messages


@pytest.fixture
def storage(life):
    return life[0]


def indexed(folder, **settings):
    """Index and archive the store in `folder`; return the storage."""
    storage, log = LocalStorage(folder / "storage"), folder / "store" / "commitlog"
    with open_index(folder / "root", storage, local_keep_s=0, **settings) as index:
        for message in CommitLogReader(log).messages(skip_corrupt=True):
            put(index, message)
        assert SegmentArchiver(index, "a-store", log).run_once() >= 1
        index.seal()
        index.run_lifecycle()
    return storage


def names(storage):
    return {info.name for info in storage.list("segments/")}


def archive_of(storage):
    state = log_of(storage).state
    return SegmentArchive(storage, lambda: state, lambda: state)


def read_all(storage, name=None):
    """Return the messages of all archived segments, or of one, by offset."""
    archive = archive_of(storage)
    messages = {}
    for segment in archive.segments():
        if name is not None and segment.name != name:
            continue
        for batch in ArchivedLog(archive, segment).batches():
            for place in batch.positions.tolist():
                message = decode_message(batch.data, place)
                messages[message.physical_offset] = message
    return messages


ASKED = {
    "key": ({"keys": "k-3"}, lambda m: "k-3" in m.index_keys),
    "queue": ({"queue_id": 1, "before_ms": BEGIN_MS + 300_000}, lambda m: m.queue_id == 1),
    "topic": ({"before_ms": BEGIN_MS + 200_000}, lambda m: True),
}


@pytest.mark.parametrize(("selection", "concerns"), ASKED.values(), ids=ASKED.keys())
def test_bodies_and_properties_go_and_everything_else_stays(store, life, selection, concerns, monkeypatch):
    """Also at the edges of the parts that are read and sent."""
    monkeypatch.setattr(uploads, "_READ_BYTES", HEAD_BYTES)
    storage, index, messages = life
    before = read_all(storage)
    until = selection.get("before_ms", 1 << 60)
    gone = {
        m.physical_offset
        for m in messages
        if m.topic == "orders" and m.store_ms < until and concerns(m) and m.physical_offset in before
    }
    done = erase(storage.uri, "orders", **selection, yes=True, now=True, grace_s=0)
    assert (done.status, done.messages_erased, done.pending) == ("erased", len(gone), ())
    assert 0 < done.segments_rewritten <= done.segments_read
    after = read_all(storage)
    assert after.keys() == before.keys()
    for offset, message in after.items():
        if offset not in gone:
            assert message == before[offset]
            continue
        assert message.is_erased and not message.index_keys and not message.properties
        assert set(message.raw_body) <= {0} and message.compression is None
        fields = ("topic", "queue_id", "queue_offset", "size", "store_ms", "physical_offset")
        assert [getattr(message, name) for name in fields] == [getattr(before[offset], name) for name in fields]
    stored = b"".join(map(storage.get, names(storage)))
    assert not [n for n in gone if before[n].compression is None and before[n].raw_body in stored]
    assert not checked(storage).findings
    # the follower has the source's own file, and accepts the rewritten segment as its copy
    index.run_lifecycle()
    rewritten = names(storage)
    assert SegmentArchiver(index, "a-store", store / "commitlog").run_once() == 0
    assert names(storage) == rewritten
    again = erase(storage.uri, "orders", **selection, yes=True, now=True, grace_s=0)
    assert (again.messages_erased, again.segments_rewritten) == (0, 0)


def test_a_reader_at_work_finds_neighbours_whose_segment_was_rewritten(life):
    """The reader read the log before the erasure without a grace period. It looks up one message, and many."""
    storage, _, messages = life
    neighbours = [m for m in messages if "k-3" not in m.index_keys and m.topic == "orders"]
    with IndexReader.open(storage.uri) as single, IndexReader.open(storage.uri) as many:
        before = many.query("orders", "all", max_count=1000)
        erase(storage.uri, "orders", keys="k-3", yes=True, now=True, grace_s=0)
        source = RocketmqMessages(None, single.segment_archive)
        assert source.at(neighbours[0].physical_offset).message == neighbours[0]
        archived = max(segment.end for segment in single.archived())
        fetched = RocketmqMessages(None, many.segment_archive).fetch(before.items, "orders", "all")
        states = {message.item.offset: message.state for message in fetched if message.item.offset < archived}
        expected = {m.physical_offset: "archived" if m in neighbours else "erased" for m in messages}
        assert len(states) > 100 and states.items() <= expected.items()
        erased = next(message for message in fetched if message.state == "erased")
        assert erased.message is None and "erased" in erased.problem
        assert source.at(erased.item.offset).state == "erased"
        assert len(many.messages("orders", "k-3", source=source)) == 0


@pytest.mark.parametrize("operation", ["put", "head"])
def test_an_interrupted_rewriting_deletes_its_uploads(storage, operation):
    """Ctrl-C comes while a segment is sent, and while it is read back."""
    faulty, before = FaultStorage(storage), names(storage)
    # the sender looks at the size first
    nth = 1 if operation == "put" else 2
    faulty.fail(operation, error=KeyboardInterrupt, name_prefix="segments/", nth=nth, when="after")
    with pytest.raises(KeyboardInterrupt):
        erase_by_key(faulty)
    assert names(storage) == before
    assert erase(storage.uri, "orders", keys="k-3", yes=True, now=True, grace_s=0).status == "erased"


def test_tombstones_and_overwritten_messages_are_of_one_moment(life):
    """The clock advances during the erasure."""

    class Running(ManualClock):
        def now_ms(self):
            self.advance(20)
            return super().now_ms()

    storage, _, messages = life
    archived = read_all(storage)
    done = erase(storage.uri, "orders", yes=True, now=True, clock=Running(BEGIN_MS + 50_500))
    until = done.tombstones[0].before_ms
    assert BEGIN_MS + 50_000 < until < BEGIN_MS + 400_000
    concerned = {m.physical_offset for m in messages if m.topic == "orders" and m.store_ms < until}
    assert {offset for offset, m in read_all(storage).items() if m.is_erased} == concerned & archived.keys()


def test_a_time_within_a_second_is_one_rule_for_entries_archive_and_certificate(tmp_path):
    """Entries have whole seconds, archived messages milliseconds: both are erased by the second in which they lie."""
    with StoreWriter(tmp_path / "store", segment_bytes=512) as writer:
        for ms in (*range(0, 3_000, 200), *range(60_000, 69_000, 200)):
            writer.put("orders", 0, b"b" * 100, keys=["k"], store_ms=BEGIN_MS + ms)
    storage = indexed(tmp_path)
    done = erase(storage.uri, "orders", before_ms=BEGIN_MS + 1_500, yes=True, now=True, grace_s=0)
    with IndexReader.open(storage.uri) as reader:
        left = reader.query("orders", "k", max_count=999).items
    assert [stone["before_ms"] for stone in done.to_dict()["tombstones"]] == [BEGIN_MS + 2_000]
    assert min(item.timestamp_ms for item in left) == BEGIN_MS + 2_000
    # as many entries as messages: those with 0 to 1,800 ms
    assert (done.entries_removed, done.messages_erased) == (10, 10)
    assert {m.store_ms - BEGIN_MS for m in read_all(storage).values() if m.is_erased} == set(range(0, 2_000, 200))


def test_only_messages_with_the_key_itself_are_overwritten(tmp_path):
    keys = ["order", "0x6f72646572", "0X6F72646572", "\x03b", "0x0362"]
    with StoreWriter(tmp_path / "store", segment_bytes=SEGMENT) as writer:
        for number, key in enumerate(keys * 20):
            writer.put("orders", 0, b"secret" * 9_000, keys=[key], store_ms=BEGIN_MS + number)
    storage = indexed(tmp_path)
    for key in ("0x6f72646572", "0x0362"):
        keys.remove(key)
        erase_by_key(storage, key)
        assert {key for message in read_all(storage).values() for key in message.index_keys} == {*keys}


def test_without_now_archived_messages_are_hidden_and_not_erased(storage):
    done = erase(storage.uri, "orders", keys="nobody's", yes=True)
    assert (done.status, done.remaining, done.pending) == ("hidden", (), ())
    assert erase(storage.uri, "orders", keys="nobody's", yes=True, now=True).status == "erased"


@pytest.mark.parametrize("is_there", [True, False], ids=["damaged", "lost"])
def test_a_segment_that_can_not_be_read_is_not_written_again_and_remains(storage, is_there):
    name = min(names(storage))
    if is_there:
        flip_object(storage, name, -100_000)
    else:
        storage.delete_many([name])
    done = erase(storage.uri, "orders", keys="k-3", yes=True, now=True, grace_s=0)
    assert done.status == "remains" and name in done.remaining
    assert any(name in said for said in done.unchecked)
    assert (name in names(storage)) == is_there


def erase_by_key(to, key="k-3"):
    request = EraseRequest("orders", (key,), before_ms=BEGIN_MS + 300_000)
    find = partial(MessagesToErase, request)
    return erase_by(to, log_of(to), request, SystemClock(), yes=True, now=True, grace_s=0, threads=1, messages=find)


# short runs fail every second call before it acts, and the others after they acted
@pytest.mark.parametrize(
    ("when", "first"),
    [
        *(("before", 1), ("after", 2)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("before", 2), ("after", 1))),
    ],
)
def test_a_storage_that_fails_at_any_call_leaves_each_message_as_it_was_or_erased(life, when, first):
    local, _, messages = life
    begun = {info.name: local.get(info.name) for info in local.list("")}
    before = read_all(local)
    gone = {
        m.physical_offset
        for m in messages
        if m.topic == "orders" and "k-3" in m.index_keys and m.store_ms < BEGIN_MS + 300_000
    }
    struck, nth = True, first - 2
    while struck:
        nth += 2
        storage = MemoryStorage()
        for name, data in begun.items():
            storage.put(name, data)
        faulty = FaultStorage(storage)
        for operation in WRITING:
            faulty.fail(operation, nth=nth, when=when)
        with contextlib.suppress(StorageUnavailable):
            erase_by_key(faulty)
        struck = any(faulty.calls(operation) >= nth for operation in WRITING)
        for done in (False, True):
            after = read_all(storage)
            assert after.keys() == before.keys()
            assert all(after[at] == before[at] or (at in gone and after[at].is_erased) for at in before)
            assert not done or all(after[at].is_erased for at in gone & after.keys())
            if not done:
                # a later erasure deletes an upload that no record names
                assert erase_by_key(storage).remaining == ()
    assert nth > 3


def test_of_two_that_rewrite_one_segment_at_once_the_second_goes_on_from_there(life):
    local, _, messages = life
    before = read_all(local)

    faulty, overtaking = FaultStorage(local), []
    overtake = partial(faulty.meanwhile, "put_if_absent", lambda: overtaking.append(erase_by_key(local, "k-4")))
    faulty.meanwhile("put", overtake, name_prefix="segments/")
    done = erase_by_key(faulty)
    assert (done.status, done.remaining, done.segment_problems) == ("erased", (), ())
    # each counts the segments of its own records, and each message once
    log = log_of(local)
    placed = [number for number in range(1, log.state.number + 1) if log.record(number).kind == "erase"]
    assert sum(bool(log.record(number).retire) for number in placed) == sum(
        certificate.segments_rewritten for certificate in (*overtaking, done)
    )
    concerned = [m for m in before.values() if m.topic == "orders" and m.store_ms < BEGIN_MS + 300_000]
    assert done.messages_erased == sum("k-3" in m.index_keys for m in concerned)
    after = read_all(local)
    for message in messages:
        gone = message.topic == "orders" and message.store_ms < BEGIN_MS + 300_000
        gone &= not {"k-3", "k-4"}.isdisjoint(message.index_keys)
        if message.physical_offset in before:
            present = after[message.physical_offset]
            assert present.is_erased if gone else present == before[message.physical_offset]


def test_a_starting_writer_leaves_what_is_about_to_be_named(life, store, tmp_path, monkeypatch):
    storage, index, _ = life
    index.close()
    check = segments.Publication.check

    def named_late(self):
        monkeypatch.setattr(segments.Publication, "check", check)
        with open_index(tmp_path / "root", storage, local_keep_s=0) as starting:
            SegmentArchiver(starting, "a-store", store / "commitlog").run_once()
        return check(self)

    monkeypatch.setattr(segments.Publication, "check", named_late)
    done = erase(storage.uri, "orders", keys="k-3", yes=True, now=True, grace_s=0)
    assert done.status == "erased" and done.messages_erased
    assert len(read_all(storage)) > 100
    erased = [segment.name.rpartition("/")[2] for segment in archive_of(storage).segments() if segment.source]
    assert erased and all(name.startswith("9" * 20) for name in erased)


def test_what_a_request_finds_is_told_by_the_real_key(life):
    storage, _, messages = life
    archive = archive_of(storage)
    segment = next(iter(archive.segments()))
    find = MessagesToErase(EraseRequest("orders", ("k-3",)), BEGIN_MS + 100_000)
    matched = find(archive, segment)
    assert matched.messages == sum(
        "k-3" in m.index_keys and m.topic == "orders" and m.store_ms < BEGIN_MS + 100_000 for m in messages
    )
    assert matched.messages > 0
    assert MessagesToErase(EraseRequest("orders", ("k-30",)), 1 << 60)(archive, segment).messages == 0


def damage(storage):
    """Damage the first segment and delete the second."""
    first, second, *_ = sorted(names(storage))
    flip_object(storage, first, 1000)
    storage.delete_many([second])


def repair(storage, store=None, standby=None, *, yes=True):
    """Return the repairs of damaged segments, and the report with its notes."""
    report = checked(storage)
    source = StoreDirectory.open(store, "a-store") if store is not None else None
    known = StoreSegments(storage, log_of(storage), source)
    return Repairs(storage, known.log, standby=standby, source=known).run(report, yes=yes), report


@pytest.mark.parametrize(
    ("selection", "origin"),
    [(None, "store"), ("key", "store"), ("key", "copy"), ("queue", "store"), ("topic", "store")],
)
def test_segments_are_put_back_without_what_was_erased(store, life, tmp_path, selection, origin):
    """The segments come from the source's file, or from a copy of the index made before the erasure."""
    storage, index, _ = life
    copy_index(storage.uri, f"file://{tmp_path}/standby")
    if selection is not None:
        erase(storage.uri, "orders", **ASKED[selection][0], yes=True, now=True, grace_s=0)
    before = read_all(storage)
    damage(storage)
    place = {"store": store} if origin == "store" else {"standby": LocalStorage(tmp_path / "standby")}
    plans, report = repair(storage, **place, yes=False)
    assert [plan.replaced_by for plan in plans] == [None, None] and len(report.findings) >= 2
    repairs, _ = repair(storage, **place)
    assert [done.action for done in repairs] == ["restore", "restore"]
    assert read_all(storage) == before and not repair(storage)[1].findings
    # the follower accepts the segment as a copy of the source's file
    index.run_lifecycle()
    assert SegmentArchiver(index, "a-store", store / "commitlog").run_once() == 0


@pytest.mark.parametrize("harm", [None, "damaged", "lost"])
def test_an_erased_segment_that_was_restored_gets_queue_offsets_again_and_none_of_its_messages(
    store, life, harm, monkeypatch
):
    """An older copy of a root is no damage of a segment."""
    storage, index, _ = life

    def refused(*record):
        raise RootBehind("log/9", "this root wrote it")

    erase(storage.uri, "orders", **ASKED["key"][0], yes=True, now=True, grace_s=0)
    damage(storage)
    assert len(repair(storage, store)[0]) == 2
    before, archiver = read_all(storage), SegmentArchiver(index, "a-store", store / "commitlog", queues=True)
    first, *_ = segments = list(archive_of(storage).segments())
    assert not any(segment.queues_bytes for segment in segments) and any(segment.source for segment in segments)
    if harm is not None:
        flip_object(storage, first.name, 1000) if harm == "damaged" else storage.delete_many([first.name])
    with monkeypatch.context() as behind, pytest.raises(RootBehind):
        behind.setattr(index._session.log, "append", refused)
        archiver.run_once()
    assert archiver.run_once() == len(segments) - (harm is not None)
    fresh = list(archive_of(storage).segments())
    assert [segment.queues_bytes > 0 for segment in fresh] == [
        not (harm and segment.place == first.place) for segment in fresh
    ]
    said = [(segment.place, segment.source, segment.published_ms, segment.crc32) for segment in segments]
    assert [
        (segment.place, segment.source, segment.published_ms, segment.crc32) for segment in fresh if segment.source
    ] == [row for row in said if row[1]]
    if harm is None:
        assert read_all(storage) == before and not checked(storage).findings
        assert archiver.run_once() == 0
        erased = erase(storage.uri, "orders", **ASKED["key"][0], yes=True, now=True, grace_s=0)
        assert (erased.messages_erased, erased.segments_remaining) == (0, ())


@pytest.mark.parametrize("first", ["k-3", "k-4"])
def test_messages_erased_only_in_answers_are_unchanged(store, storage, first):
    """One key is erased from the bytes. Another key is hidden, before or after."""
    for key in sorted(["k-3", "k-4"], key=lambda key: key != first):
        erase(storage.uri, "orders", keys=key, yes=True, now=key == "k-3", grace_s=0)
    before = read_all(storage)
    damage(storage)
    repairs, report = repair(storage, store)
    if first == "k-3":
        assert len(repairs) == 2 and read_all(storage) == before
    else:
        # the deleted segment: nothing shows which of the two keys was erased from its bytes
        assert len(repairs) == 1 and sum("is not restored from" in note for note in report.notes) == 1
        after = {at: message for name in names(storage) for at, message in read_all(storage, name).items()}
        assert after.items() <= before.items() and len(after) > 100


def test_a_copied_index_whose_log_does_not_tell_what_was_erased_proves_it_and_is_not_used_if_it_is_damaged(
    store, storage, tmp_path
):
    """Its log begins with segments from which another index had erased messages."""
    erase(storage.uri, "orders", keys="k-3", yes=True, now=True, grace_s=0)
    copy_index(storage.uri, f"file://{tmp_path}/standby")
    standby, before = LocalStorage(tmp_path / "standby"), read_all(storage)
    damage(standby)
    damage(storage)
    assert not repair(storage, None, standby)[0]
    for harmed in (storage, standby):
        assert len(repair(harmed, store, standby)[0]) == 2 and read_all(harmed) == before


def colliding(tmp_path, preset):
    """Return the storage of an index of keys ``Aa`` and ``BB``, which have one hash, and the store's folder."""
    with StoreWriter(tmp_path / "store", segment_bytes=4096) as writer:
        for n in range(60):
            writer.put("orders", 0, b"x" * 100, keys=[("Aa", "BB", "y")[n % 3]], store_ms=BEGIN_MS + n * 1000)
    return indexed(tmp_path, preset=preset, items=1000), tmp_path / "store"


@pytest.mark.parametrize("preset", ["native", "rocketmq"])
@pytest.mark.parametrize("harm", ["damaged", "lost"])
def test_entries_of_keys_that_collide_are_counted_and_their_messages_stay(tmp_path, preset, harm):
    """``Aa`` and ``BB`` have one hash, but different fingerprints. The log knows an erased key by its hash: a repair
    from the source keeps the other key's messages, or leaves the segment.
    """
    storage, folder = colliding(tmp_path, preset)
    archived = read_all(storage)
    of = {key: sum(key in m.index_keys for m in archived.values()) for key in ("Aa", "BB")}
    done = erase(storage.uri, "orders", keys="Aa", yes=True, now=True, grace_s=0)
    assert (done.messages_erased, done.collisions) == (of["Aa"], of["BB"] if preset == "rocketmq" else 0)
    assert done.to_dict()["collisions"] == done.collisions
    before, name = read_all(storage), min(names(storage))
    assert sum("BB" in m.index_keys for m in before.values()) == of["BB"] > 5
    flip_object(storage, name, 1000) if harm == "damaged" else storage.delete_many([name])
    repairs, report = repair(storage, folder)
    if harm == "damaged" or preset == "native":
        assert len(repairs) == 1 and read_all(storage) == before
    else:
        assert not repairs and any("is not restored from" in note for note in report.notes)
        assert name in {finding.file for finding in report.findings}
    assert erase(storage.uri, "orders", before_ms=0, yes=True, now=True).collisions is None


def test_a_damaged_piece_within_properties_was_not_searched(tmp_path):
    """Only the piece's CRC32 covers the keys: the message is valid otherwise."""
    with StoreWriter(tmp_path / "store", segment_bytes=1 << 17) as writer:
        for n in range(4):
            keys = ["y" * 20_000, "k-1", "z" * 12_000]
            writer.put("orders", 0, b"x" * 1_000, keys=keys, store_ms=BEGIN_MS + n)
    storage = indexed(tmp_path)
    find = MessagesToErase(EraseRequest("orders", ("k-1",)), 1 << 60)
    archive = archive_of(storage)
    (segment,) = archive.segments()
    whole = find(archive, segment)
    assert (whole.messages, whole.problem) == (3, None)
    flip_object(storage, segment.name, 20_000)
    matched = find(archive_of(storage), segment)
    assert matched.messages == 2
    assert matched.problem is not None and segment.name in matched.problem


def test_a_segment_of_a_damaged_log_is_restored_without_its_erased_messages(tmp_path):
    with StoreWriter(tmp_path / "store", segment_bytes=4096) as writer:
        places = [
            writer.put("orders", 0, b"x" * 100, keys=[f"k-{n % 3}"], store_ms=BEGIN_MS + n * 1000) for n in range(60)
        ]
    flip(tmp_path / "store" / "commitlog" / segment_name(0), places[4].offset + 5)  # in the magic
    storage = indexed(tmp_path, items=1000)
    erase(storage.uri, "orders", keys="k-1", yes=True, now=True, grace_s=0)
    name = min(segment.name for segment in segments_of(log_of(storage).state))
    whole = storage.get(name)
    flip_object(storage, name, 1000)
    (done,), _ = repair(storage, tmp_path / "store")
    assert storage.get(done.replaced_by) == whole
