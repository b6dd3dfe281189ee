"""RocketMQ's own store: our reads have the same fields, and our writes the same bytes."""

import json
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.rocketmq import golden_store
from tests.support.store_writer import checkpoint_bytes, tags_code
from tiered_index.connectors.rocketmq.log.columns import decode_index_columns
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import decode_offset_msg_id
from tiered_index.connectors.rocketmq.log.message import decode_message
from tiered_index.connectors.rocketmq.log.segments import End
from tiered_index.connectors.rocketmq.log.store import ENTRY_BYTES, list_queues, offsets_named

# Java's name of a message's field: our name
NAMES = {"totalSize": "size", "bodyCrc": "body_crc", "queueId": "queue_id", "flag": "flag", "sysFlag": "sys_flag"}
NAMES |= {"decQueueOffset": "queue_offset", "physicOffset": "physical_offset", "bornTimestamp": "born_ms"}
NAMES |= {"storeTimestamp": "store_ms", "reconsumeTimes": "reconsume_times", "decMsgId": "offset_msg_id"}
NAMES |= {"decPreparedTransactionOffset": "prepared_offset", "topic": "topic", "properties": "properties"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_store.unpack(tmp_path_factory.mktemp("store"))


def _rows(batch):
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def test_messages_field_for_field():
    seen = set()
    for wanted in golden_store.expected():
        start = wanted["offset"] // golden_store.SEGMENT_BYTES * golden_store.SEGMENT_BYTES
        segment = golden_store.segments()[start]
        message = decode_message(segment, wanted["offset"] - start, physical_offset=wanted["offset"])
        assert f"0x{message.magic:X}" == wanted["magic"]
        assert message.raw_properties.decode() == wanted["propertiesString"]
        assert {name: getattr(message, ours) for name, ours in NAMES.items()} == {name: wanted[name] for name in NAMES}
        assert message.born_host == golden_store.host(wanted["bornHost"])
        assert message.store_host == golden_store.host(wanted["storeHost"])
        assert message.raw_body == golden_store.body(wanted)
        assert tags_code(message.topic, message.properties, message.store_ms) == wanted["dispatch"]["tagsCode"]
        assert list(message.index_keys) == golden_store.keys(wanted)
        assert message.is_visible is not golden_store.hidden(wanted)
        assert decode_offset_msg_id(wanted["msgId"]) == (message.store_host, wanted["offset"])
        # the golden line keeps the stored form of a compressed body, under both names
        assert message.compression == ("zlib" if wanted["kind"] == "zlib" else None)
        assert message.body() == (zlib.decompress(message.raw_body) if message.compression else message.raw_body)
        assert message.encode() == segment[wanted["offset"] - start :][: message.size]
        shown = message.to_dict("hex")
        for name, ours in (NAMES | {"decMsgId": "msg_id"}).items():
            assert shown[ours] == wanted[name]
        for name, theirs in (("born_host", "bornHost"), ("store_host", "storeHost")):
            assert shown[name] == str(golden_store.host(wanted[theirs]))
        for name, theirs in (("tags", "TAGS"), ("uniq_key", "UNIQ_KEY")):
            assert shown[name] == wanted["properties"].get(theirs)
        assert (shown["keys"], shown["body"]) == (golden_store.keys(wanted), message.body().hex())
        json.dumps(shown)
        seen.add(wanted["kind"])
    assert len(seen) == 17


def test_index_columns_equal_the_dispatch_requests():
    """The columns have every key of every visible message, once.

    RocketMQ's own index also has prepared messages and doubles; clients may not read prepared ones.
    """
    rows, messages, hidden = [], 0, 0
    for start, data in golden_store.segments().items():
        batch = decode_index_columns(data, start, check_crc=True)
        assert batch.damage is None
        assert batch.state is (End.OPEN if batch.end == golden_store.END else End.SEGMENT)
        rows += _rows(batch.columns)
        messages, hidden = messages + batch.messages, hidden + batch.hidden
    assert sorted(rows) == sorted(golden_store.rows())
    assert len(set(rows)) == len(rows)
    assert (messages, hidden) == (170, 20)


@pytest.mark.parametrize("chunk_bytes", [1, 400, 5_000, 1 << 24])
def test_a_reader_finds_all_messages_in_chunks_of_any_size(store, chunk_bytes):
    batches = list(CommitLogReader(store / "commitlog", chunk_bytes=chunk_bytes).batches())
    assert sorted(row for batch in batches for row in _rows(batch.columns)) == sorted(golden_store.rows())
    assert sum(batch.messages for batch in batches) == 170
    assert (batches[-1].end, batches[-1].state) == (golden_store.END, End.OPEN)
    assert not [batch for batch in batches if batch.skipped]
    offsets = [
        message.physical_offset for message in CommitLogReader(store / "commitlog", chunk_bytes=chunk_bytes).messages()
    ]
    assert offsets == [wanted["offset"] for wanted in golden_store.expected()]


def test_consume_queues_hold_every_dispatched_message(store):
    wanted = defaultdict(list)
    for message in golden_store.expected():
        if not golden_store.hidden(message):
            dispatch = message["dispatch"]
            queue = wanted[message["topic"], message["queueId"]]
            assert dispatch["consumeQueueOffset"] == len(queue)
            queue.append((message["offset"], dispatch["msgSize"], dispatch["tagsCode"]))
    queues = list_queues(store / "consumequeue")
    entries_of_queues = {}
    for queue in queues:
        start, entries = queue.read()
        assert start == 0
        entries_of_queues[queue.topic, queue.queue_id] = entries.tolist()
        assert queue.seek(0) == 0
        assert queue.seek(int(entries["offset"][-1])) == len(entries) - 1
        assert queue.seek(golden_store.END) == len(entries)
        file = (queue.folder / f"{0:020d}").read_bytes()
        assert not file[len(entries) * ENTRY_BYTES :].strip(b"\0")
    assert entries_of_queues == dict(wanted)
    assert len(queues) == 14
    known = offsets_named(store / "consumequeue", 0, golden_store.END)
    assert known.tolist() == sorted(offset for entries in wanted.values() for offset, _, _ in entries)
    part = offsets_named(store / "consumequeue", 20_000, 40_000)
    assert part.tolist() == known[(known >= 20_000) & (known < 40_000)].tolist()


def test_checkpoint(store):
    data = (store / "checkpoint").read_bytes()
    wanted = json.loads(golden_store.raw("meta.json"))["checkpoint"]
    names = ("physicMsgTimestamp", "logicsMsgTimestamp", "indexMsgTimestamp", "masterFlushedOffset", "confirmPhyOffset")
    assert data == checkpoint_bytes(*(wanted[name] for name in names))


def test_a_store_written_from_the_same_messages_has_the_same_bytes(store, tmp_path):
    writer = golden_store.write_again(tmp_path / "made")
    writer.close((store / "checkpoint").read_bytes())
    names = {str(path.relative_to(tmp_path / "made")) for path in (tmp_path / "made").rglob("*") if path.is_file()}
    assert names == set(golden_store.names())
    for name in golden_store.names():
        assert (tmp_path / "made" / name).read_bytes() == golden_store.raw(name), name
