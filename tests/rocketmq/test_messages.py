"""Messages as the answer, compared with a scan of the commit log: from the store, from archived segments, or with a reason why not."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.archived_store import delete_segments, index_log, open_index, put, questions, scan
from tests.rocketmq.messages import V6, full, keyed, log, message, write_log
from tiered_index import IndexReader
from tiered_index.errors import InvalidArgument, StorageMisconfigured, StorageUnavailable
from tiered_index.rocketmq import commitlog
from tiered_index.rocketmq.archive import SegmentArchiver
from tiered_index.rocketmq.bodies import compress
from tiered_index.rocketmq.found_message import FoundRocketmqMessage, show_body
from tiered_index.rocketmq.layout import STORE_V6
from tiered_index.rocketmq.message import Message
from tiered_index.rocketmq.message_source import RocketmqMessages
from tiered_index.rocketmq.segments import segment_name
from tiered_index.storage.memory import MemoryStorage
from tiered_index.testing.storage_faults import FaultStorage

BEGIN_OF_LAST = 81_920


@pytest.fixture
def storage() -> FaultStorage:
    return FaultStorage(MemoryStorage())


@pytest.fixture
def store(tmp_path) -> Path:
    return golden_store.unpack(tmp_path / "store")


@pytest.fixture
def index(tmp_path, storage):
    service = open_index(tmp_path / "root", storage)
    yield service
    service.abandon()


def settled(index, store):
    """Index the store, send every entry to the storage, archive what is closed; return all messages."""
    messages = index_log(index, store)
    index.seal()
    index.run_lifecycle()
    SegmentArchiver(index, "s", store / "commitlog").run_once()
    return messages


def source_of(index, store):
    return RocketmqMessages(store, index.segment_archive)


def stored_bytes(answer):
    return [fetched.message.encode() if fetched.message else None for fetched in answer.messages]


def same(fetched, wanted: Message):
    return isinstance(fetched.message, FoundRocketmqMessage) and fetched.message.encode() == wanted.encode()


# the golden store


def test_every_golden_message_field_for_field(index, store):
    messages = index_log(index, store)
    source = source_of(index, store)
    expected = {one["offset"]: one for one in golden_store.expected()}
    seen = set()
    for topic, key in questions(messages):
        answer = index.messages(topic, key, max_count=1000, source=source)
        assert (answer.status, answer.collisions) == ("complete", 0)
        assert stored_bytes(answer) == [m.encode() for m in scan(messages, topic, key)]
        assert {fetched.state for fetched in answer.messages} == {"local"}
        for fetched in answer.messages:
            shown = fetched.message.to_dict("hex")
            wanted = expected[shown["physical_offset"]]
            assert {name: shown[name] for name in ("topic", "queue_id", "queue_offset", "size", "flag", "sys_flag", "body_crc")} == {
                "topic": wanted["topic"], "queue_id": wanted["queueId"], "queue_offset": wanted["queueOffset"], "size": wanted["totalSize"],
                "flag": wanted["flag"], "sys_flag": wanted["sysFlag"], "body_crc": wanted["bodyCrc"],
            }  # fmt: skip
            assert (shown["born_ms"], shown["store_ms"]) == (wanted["bornTimestamp"], wanted["storeTimestamp"])
            assert (shown["reconsume_times"], shown["prepared_offset"]) == (wanted["reconsumeTimes"], wanted["preparedTransactionOffset"])
            assert shown["born_host"] == str(golden_store.host(wanted["bornHost"]))
            assert shown["store_host"] == str(golden_store.host(wanted["storeHost"]))
            assert (shown["properties"], shown["keys"]) == (wanted["properties"], golden_store.keys(wanted))
            assert (shown["tags"], shown["uniq_key"]) == (wanted["properties"].get("TAGS"), wanted["properties"].get("UNIQ_KEY"))
            assert shown["msg_id"] == wanted["msgId"]
            body = golden_store.body(wanted)
            assert shown["body"] == (zlib.decompress(body) if wanted["kind"] == "zlib" else body).hex()
            json.dumps(shown)
            seen.add(shown["physical_offset"])
    assert seen == {one["offset"] for one in golden_store.expected() if not golden_store.hidden(one) and golden_store.keys(one)}


def test_deleted_segments_answer_from_the_archive_with_one_request_a_message(index, store, storage):
    messages = settled(index, store)
    delete_segments(store, BEGIN_OF_LAST)
    with IndexReader.open(storage_backend=storage) as reader:
        source = RocketmqMessages(store, reader.segment_archive)
        archived = 0
        for topic, key in questions(messages):
            wanted = scan(messages, topic, key)
            cold = sum(m.physical_offset < BEGIN_OF_LAST for m in wanted)
            reader.query(topic, key)  # its directory is known from here on
            before = storage.calls("get_range")
            answer = reader.messages(topic, key, max_count=1000, source=source)
            assert stored_bytes(answer) == [m.encode() for m in wanted]
            states = ["archived" if m.physical_offset < BEGIN_OF_LAST else "local" for m in wanted]
            assert [fetched.state for fetched in answer.messages] == states
            # neighbours in one segment come by one request
            assert answer.message_requests <= cold
            assert storage.calls("get_range") - before == answer.explain.requests == 1 + answer.message_requests
            if cold == 1:
                assert answer.message_requests == 1
                assert answer.message_bytes == sum(m.size for m in wanted if m.physical_offset < BEGIN_OF_LAST)
                archived += 1
        assert archived > 100


def test_the_archive_alone_answers_without_a_store(index, store):
    messages = settled(index, store)
    source = RocketmqMessages(None, index.segment_archive)
    for topic, key in questions(messages):
        for fetched, wanted in zip(index.messages(topic, key, source=source).messages, scan(messages, topic, key), strict=True):
            if wanted.physical_offset < BEGIN_OF_LAST:
                assert fetched.state == "archived"
                assert same(fetched, wanted)
            else:
                assert (fetched.state, fetched.message) == ("missing", None)
                assert fetched.problem == "no archived segment holds it, and no store directory was given"


def test_what_the_broker_deleted_before_it_was_archived_is_expired(index, store):
    messages = index_log(index, store)
    delete_segments(store, 32_768)
    states = set()
    for source, said in ((source_of(index, store), "no archived segment holds it"), (RocketmqMessages(store), "no archive was given")):
        for topic, key in questions(messages):
            for fetched, wanted in zip(index.messages(topic, key, source=source).messages, scan(messages, topic, key), strict=True):
                if wanted.physical_offset < 32_768:
                    assert (fetched.state, fetched.message) == ("expired", None)
                    assert fetched.problem == f"the broker has deleted this part of its commit log, and {said}"
                else:
                    assert fetched.state == "local"
                    assert same(fetched, wanted)
                states.add(fetched.state)
    assert states == {"expired", "local"}


def test_a_gap_in_the_log_is_missing_not_expired(index, store):
    messages = index_log(index, store)
    (store / "commitlog" / segment_name(32_768)).unlink()
    lost = next(m for m in messages if m.physical_offset >= 32_768 and m.is_visible and m.uniq_key)
    (fetched,) = index.messages(lost.topic, lost.uniq_key, source=source_of(index, store)).messages
    assert fetched.state == "missing"
    assert "commit log offsets" in fetched.problem


def test_a_store_that_lost_its_log_is_missing(index, store):
    messages = index_log(index, store)
    shutil.rmtree(store / "commitlog")
    lost = next(m for m in messages if m.is_visible and m.uniq_key)
    (fetched,) = index.messages(lost.topic, lost.uniq_key, source=source_of(index, store)).messages
    assert fetched.state == "missing"
    assert "holds no segments" in fetched.problem


def test_a_store_that_is_not_there_is_bad_usage(tmp_path):
    with pytest.raises(InvalidArgument, match="nothing"):
        RocketmqMessages(tmp_path / "nothing")


# other messages and damage


def one_message(tmp_path, index, **fields):
    """A store of one finished segment with three messages, archived; returns the store and the message in the middle."""
    messages = log(3, **fields)
    store = tmp_path / "small"
    after = log(1, 2_000)
    write_log(store / "commitlog", 2_000, {0: full(messages, 2_000), 2_000: after[0].encode()})
    for one in messages:
        put(index, one)
    assert SegmentArchiver(index, "s", store / "commitlog").run_once() == 1
    return store, messages[1]


def damage(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def asked(index, wanted, source):
    (fetched,) = index.messages(wanted.topic, wanted.uniq_key, source=source).messages
    return fetched


def test_no_damaged_byte_ever_becomes_an_answer(tmp_path, index, storage):
    """Every byte of the message, in the store and in the archived segment: the body's CRC, or a field, tells."""
    store, wanted = one_message(tmp_path, index)
    path = store / "commitlog" / segment_name(0)
    (segment,) = index.archived()
    whole, object_bytes = path.read_bytes(), storage.get(segment.name)
    local, archive = RocketmqMessages(store), RocketmqMessages(None, index.segment_archive)
    unchecked = []
    for at in range(wanted.physical_offset, wanted.physical_offset + wanted.size):
        damage(path, at)
        changed = bytearray(object_bytes)
        changed[at] ^= 1
        storage.put(segment.name, bytes(changed))
        for source in (local, archive):
            answer = index.messages(wanted.topic, wanted.uniq_key, source=source)
            if answer.collisions:  # a topic or key that is another one now
                assert answer.messages == ()
                continue
            (fetched,) = answer.messages
            if fetched.message is not None:
                unchecked.append(at - wanted.physical_offset)
                assert wanted.uniq_key in fetched.message.index_keys
            else:
                assert fetched.state == "missing"
                assert fetched.problem
        path.write_bytes(whole)
    # what the format doesn't protect: flag, queue offset, sys flag, times below the second, hosts, counts, property values
    checked_always = {*range(4), *range(4, 8), *range(8, 12), *range(12, 16), *range(28, 36)}
    body = wanted.encode().index(wanted.raw_body)
    checked_always |= set(range(body - 4, body + len(wanted.raw_body)))
    assert not checked_always & set(unchecked)


def test_a_body_whose_crc_is_wrong_is_missing_locally_and_archived_where_the_copy_is_whole(tmp_path, index):
    store, wanted = one_message(tmp_path, index)
    damage(store / "commitlog" / segment_name(0), wanted.physical_offset + wanted.encode().index(b"body"))
    fetched = asked(index, wanted, RocketmqMessages(store))
    assert (fetched.state, fetched.message) == ("missing", None)
    assert "the body contradicts its CRC" in fetched.problem
    assert segment_name(0) in fetched.problem
    fetched = asked(index, wanted, source_of(index, store))
    assert fetched.state == "archived"
    assert same(fetched, wanted)
    assert "the body contradicts its CRC" in fetched.problem  # why it did not come from the store


def test_a_damaged_archived_segment_is_missing_with_its_reason(tmp_path, index, storage):
    store, wanted = one_message(tmp_path, index)
    (segment,) = index.archived()
    data = bytearray(storage.get(segment.name))
    data[wanted.physical_offset + wanted.encode().index(b"body")] ^= 4
    storage.put(segment.name, bytes(data))
    delete_segments(store, 2_000)
    fetched = asked(index, wanted, source_of(index, store))
    assert (fetched.state, fetched.message, fetched.read_from) == ("missing", None, segment.name)
    assert f"{segment.name}: the body contradicts its CRC" in fetched.problem


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_a_lost_archived_segment_is_missing_with_its_reason(tmp_path, index, storage, change):
    _store, wanted = one_message(tmp_path, index)
    (segment,) = index.archived()
    if change == "cut":
        storage.put(segment.name, storage.get(segment.name)[: wanted.physical_offset + 10])
    else:
        storage.delete(segment.name)
    fetched = asked(index, wanted, RocketmqMessages(None, index.segment_archive))
    assert (fetched.state, fetched.message) == ("missing", None)
    assert segment.name in fetched.problem


def test_a_segment_that_the_log_removed_is_not_archived_any_more(tmp_path, index, storage):
    store, wanted = one_message(tmp_path, index)
    (segment,) = index.archived()
    with IndexReader.open(storage_backend=storage) as reader:
        index._session.log.publish(index._session.epoch, (), remove=(segment.name,))
        storage.delete(segment.name)
        delete_segments(store, 2_000)
        source = RocketmqMessages(store, reader.segment_archive)
        item = index.query(wanted.topic, wanted.uniq_key).items[0]
        (fetched,) = source.fetch([item], wanted.topic, wanted.uniq_key)
        assert (fetched.state, fetched.requests) == ("expired", 1)


def test_a_reader_that_is_behind_the_log_reads_it_before_it_says_expired(index, store, storage):
    """Archived and then deleted by the broker, both since the reader last looked at the log."""
    messages = index_log(index, store)
    index.seal()
    index.run_lifecycle()
    wanted = next(m for m in messages if m.is_visible and m.uniq_key)
    with IndexReader.open(storage_backend=storage, refresh_interval_s=3600) as reader:
        source = RocketmqMessages(store, reader.segment_archive)
        assert asked(reader, wanted, source).state == "local"
        SegmentArchiver(index, "s", store / "commitlog").run_once()
        delete_segments(store, BEGIN_OF_LAST)
        assert reader.archived() == ()
        fetched = asked(reader, wanted, source)
        assert fetched.state == "archived"
        assert same(fetched, wanted)


def test_nothing_is_called_expired_while_the_log_can_not_be_read(index, store, storage):
    messages = index_log(index, store)
    delete_segments(store, BEGIN_OF_LAST)
    wanted = next(m for m in messages if m.is_visible and m.uniq_key)
    storage.fail("get", times=None, name_prefix="log/")
    with pytest.raises(StorageUnavailable):
        index.messages(wanted.topic, wanted.uniq_key, source=source_of(index, store))
    storage.clear()
    assert asked(index, wanted, source_of(index, store)).state == "expired"


@pytest.mark.parametrize("fields", [{"queue_id": 2}, {"body": b"bod"}, {"store_ms": golden_store.END}])
def test_a_log_that_was_written_anew_gives_no_wrong_message(tmp_path, index, fields):
    store, wanted = one_message(tmp_path, index)
    other = message(wanted.physical_offset, properties=wanted.raw_properties, **{"store_ms": wanted.store_ms, **fields})
    path = store / "commitlog" / segment_name(0)
    data = bytearray(path.read_bytes())
    data[wanted.physical_offset : wanted.physical_offset + other.size] = other.encode()
    path.write_bytes(data)
    fetched = asked(index, wanted, RocketmqMessages(store))
    assert (fetched.state, fetched.message) == ("missing", None)
    assert "another message" in fetched.problem
    assert asked(index, wanted, source_of(index, store)).state == "archived"


def test_keys_of_equal_hash_are_told_apart(tmp_path, storage):
    """Preset rocketmq has no fingerprint: every entry of the one key is found under the other, too."""
    store = tmp_path / "small"
    messages, offset = [], 0
    for number in range(40):
        key = ("Aa", "BB")[number % 4 == 3]
        one = message(offset, topic="T", properties=f"KEYS\x01order-{key}\x02".encode(), store_ms=1_700_000_000_000 + 1000 * number)
        messages.append(one)
        offset += one.size
    write_log(store / "commitlog", 20_000, {0: b"".join(m.encode() for m in messages)})
    with open_index(tmp_path / "root", storage, preset="rocketmq", items=1_000) as index:
        for one in messages:
            put(index, one)
        index.seal()
        index.run_lifecycle()
        source = source_of(index, store)
        assert len(index.query("T", "order-BB")) == 40
        answer = index.messages("T", "order-BB", source=source)
        assert stored_bytes(answer) == [m.encode() for m in scan(messages, "T", "order-BB")]
        assert (len(answer), answer.collisions, answer.status) == (10, 30, "complete")
        first = index.messages("T", "order-BB", max_count=3, source=source)
        assert stored_bytes(first) == [m.encode() for m in scan(messages, "T", "order-BB")[:3]]
        assert first.status == "truncated"
        rest = index.messages("T", "order-BB", cursor=first.cursor, source=source)
        assert stored_bytes(rest) == [m.encode() for m in scan(messages, "T", "order-BB")[3:]]
        assert index.messages("T", "order-Aa", source=source).collisions == 10


def test_an_entry_of_another_topic_is_a_collision(tmp_path, index):
    store, wanted = one_message(tmp_path, index)
    put(index, wanted, ["stray"])
    index.put("Other", wanted.queue_id, wanted.uniq_key, wanted.physical_offset, wanted.size, wanted.store_ms)
    for topic, key in ((wanted.topic, "stray"), ("Other", wanted.uniq_key)):
        for source in (source_of(index, store), RocketmqMessages(None, index.segment_archive)):
            answer = index.messages(topic, key, source=source)
            assert (answer.messages, answer.collisions, answer.status) == ((), 1, "complete")


# several stores


def test_two_stores_in_one_index_are_told_apart(tmp_path, index):
    stores = []
    for number in range(2):
        store = tmp_path / f"store{number}"
        messages = log(3, first=10 * number)
        write_log(store / "commitlog", 2_000, {0: full(messages, 2_000), 2_000: log(1, 2_000)[0].encode()})
        for one in messages:
            put(index, one)
        assert SegmentArchiver(index, f"broker-{number}", store / "commitlog").run_once() == 1
        stores.append((store, messages))
    for archive_of, (_store, messages) in enumerate(stores):
        for store, narrowed in ((None, None), (stores[0][0], None), (stores[1][0], None), (None, f"broker-{archive_of}")):
            source = RocketmqMessages(store, index.segment_archive, store_name=narrowed)
            for wanted in messages:
                answer = index.messages(wanted.topic, wanted.uniq_key, source=source)
                assert stored_bytes(answer) == [wanted.encode()]
                assert answer.collisions == 0
    other = RocketmqMessages(None, index.segment_archive, store_name="broker-1")
    wanted = stores[0][1][0]
    answer = index.messages(wanted.topic, wanted.uniq_key, source=other)
    assert all(fetched.message is None for fetched in answer.messages)


# storages that don't answer


def test_a_storage_that_is_down_is_an_error_or_named(index, store, storage):
    messages = settled(index, store)
    delete_segments(store, BEGIN_OF_LAST)
    wanted = next(m for m in messages if m.is_visible and m.uniq_key)
    storage.fail("get_range", times=None, name_prefix="segments/")
    with pytest.raises(StorageUnavailable):
        index.messages(wanted.topic, wanted.uniq_key, source=source_of(index, store))
    answer = index.messages(wanted.topic, wanted.uniq_key, allow_partial=True, source=source_of(index, store))
    assert answer.status == "partial"
    assert [report.file for report in answer.failed] == [index.archived()[0].name]
    assert [(fetched.state, fetched.message) for fetched in answer.messages] == [("missing", None)]
    storage.clear()
    assert asked(index, wanted, source_of(index, store)).state == "archived"


def test_a_store_that_can_not_be_read_is_an_error_unless_the_archive_has_it(index, store):
    messages = settled(index, store)
    wanted, late = (next(m for m in messages if m.physical_offset >= at and m.is_visible and m.uniq_key) for at in (0, BEGIN_OF_LAST))
    shutil.rmtree(store / "commitlog")
    (store / "commitlog").write_bytes(b"no folder")
    source = source_of(index, store)
    with pytest.raises(StorageMisconfigured, match="can't be read"):
        index.messages(late.topic, late.uniq_key, source=source)
    with pytest.raises(StorageMisconfigured):
        source.by_msg_id(late.offset_msg_id)
    fetched = asked(index, wanted, source)
    assert fetched.state == "archived"
    assert "can't be read" in fetched.problem


def test_the_folder_is_listed_once_for_all_messages_of_a_page(index, store, monkeypatch):
    """A broker's folder has hundreds of segments: listing them for each message would cost more than everything else."""
    messages = index_log(index, store)
    topic, key = max(questions(messages), key=lambda question: len(scan(messages, *question)))
    listing, looks = commitlog.list_segments, []
    monkeypatch.setattr(commitlog, "list_segments", lambda folder: looks.append(folder) or listing(folder))
    answer = index.messages(topic, key, source=source_of(index, store))
    assert len(answer) == len(scan(messages, topic, key)) > 5
    assert len(looks) == 1


def test_a_segment_deleted_between_two_looks_is_found_in_the_archive(index, store, monkeypatch):
    messages = settled(index, store)
    wanted = next(m for m in messages if m.is_visible and m.uniq_key)
    source = source_of(index, store)
    listing = commitlog.list_segments

    def then_deleted(folder):
        found = listing(folder)
        (folder / segment_name(0)).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(commitlog, "list_segments", then_deleted)
    fetched = asked(index, wanted, source)
    assert fetched.state == "archived"
    assert same(fetched, wanted)


# by place


def test_every_message_by_its_id_local_and_archived(index, store):
    messages = settled(index, store)
    for source, state in ((RocketmqMessages(store), "local"), (RocketmqMessages(None, index.segment_archive), "archived")):
        for wanted in messages:
            fetched = source.by_msg_id(wanted.offset_msg_id)
            if state == "archived" and wanted.physical_offset >= BEGIN_OF_LAST:
                assert (fetched.state, fetched.message) == ("missing", None)
                continue
            assert (fetched.state, fetched.item) == (state, None)
            assert same(fetched, wanted)
            assert same(source.at(wanted.physical_offset), wanted)
            assert same(source.at(wanted.physical_offset, wanted.size), wanted)


def test_a_large_archived_message_of_unknown_size_takes_two_requests(tmp_path, index, storage):
    store, wanted = one_message(tmp_path, index)
    big = message(0, body=bytes(100_000))
    write_log(tmp_path / "big", 200_000, {0: full([big, keyed(big.size, 1)], 200_000), 200_000: wanted.encode()})
    SegmentArchiver(index, "big", tmp_path / "big").run_once()
    source = RocketmqMessages(None, index.segment_archive, store_name="big")
    before = storage.calls("get_range")
    fetched = source.at(0)
    assert fetched.message.raw_body == bytes(100_000)
    assert storage.calls("get_range") - before == fetched.requests == 2
    assert source.at(big.size).requests == 1
    assert store.is_dir()


def test_ids_of_other_brokers_and_of_no_message(index, store):
    messages = settled(index, store)
    wanted = messages[3]
    source = source_of(index, store)
    other = message(wanted.physical_offset).offset_msg_id  # the same offset in another broker's log
    fetched = source.by_msg_id(other)
    assert fetched.state == "missing"
    assert "was stored by 127.0.0.1:10911, not by 10.1.2.3:10911" in fetched.problem
    inside = source.at(wanted.physical_offset + 1)
    assert (inside.state, inside.message) == ("missing", None)
    far = source.at(10**15)
    assert "behind the end of the log" in far.problem
    for bad in ("", "xyz", "7F00000100002A9F", "7F00000100002A9FFFFFFFFFFFFFFFFF"):
        with pytest.raises(InvalidArgument):
            source.by_msg_id(bad)
    with pytest.raises(InvalidArgument):
        source.at(-1)


def test_ids_of_ipv6_brokers(tmp_path):
    one = message(0, sys_flag=STORE_V6, properties=b"UNIQ_KEY\x01u\x02")
    write_log(tmp_path / "small" / "commitlog", 2_000, {0: one.encode()})
    fetched = RocketmqMessages(tmp_path / "small").by_msg_id(one.offset_msg_id)
    assert len(one.offset_msg_id) == 56
    assert same(fetched, one)
    assert fetched.message.to_dict()["store_host"] == f"[{V6.ip}]:{V6.port}"


# bodies


@pytest.mark.parametrize(
    ("body", "wanted", "shown"),
    [
        (b'{"a": [1, "\xc3\xa9"]}', "json", {"body": {"a": [1, "é"]}, "body_format": "json"}),
        (b'{"a": 1}', "text", {"body": '{"a": 1}', "body_format": "text"}),
        (b"plain", "json", {"body": "plain", "body_format": "text"}),
        (b"NaN", "json", {"body": "NaN", "body_format": "text"}),
        (b"[" * 100_000, "json", {"body": "[" * 100_000, "body_format": "text"}),
        (b"\xff\xfe", "json", {"body": "fffe", "body_format": "hex"}),
        (b"a\0b", "text", {"body": "610062", "body_format": "hex"}),
        (b"plain", "hex", {"body": "706c61696e", "body_format": "hex"}),
        (b"", "text", {"body": "", "body_format": "text"}),
        (b"plain", "none", {}),
    ],
)
def test_bodies_are_shown_as_asked_where_they_can_be(body, wanted, shown):
    assert show_body(message(body=body), wanted) == shown


@pytest.mark.parametrize("codec", ["zlib", "lz4", "zstd"])
def test_compressed_bodies_are_shown_plain(codec):
    packed, flag = compress(b"text " * 100, codec)
    one = FoundRocketmqMessage.of(message(body=packed, sys_flag=flag))
    assert (one.to_dict()["body"], one.to_dict()["compression"]) == ("text " * 100, codec)
    broken = show_body(message(body=packed[:-5], sys_flag=flag), "text")
    assert (broken["body"], broken["body_format"]) == (packed[:-5].hex(), "hex")
    assert broken["body_problem"]
