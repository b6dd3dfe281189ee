"""The store writer: what it puts is read back, files roll as the broker's do, and a crash costs only what wasn't
flushed.
"""

from __future__ import annotations

import pytest

from tests.rocketmq import golden_store
from tests.support.classic_lookups import find
from tests.support.classic_writer import load_classic_index
from tests.support.store_writer import StoreWriter, index_name_of
from tiered_index.clock import ManualClock
from tiered_index.errors import InvalidArgument
from tiered_index.rocketmq.classic import Geometry
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.layout import BORN_V6, STORE_V6, TRANSACTION_PREPARED, Host
from tiered_index.rocketmq.log.message import compress
from tiered_index.rocketmq.log.segments import End
from tiered_index.rocketmq.log.store import decode_checkpoint, list_queues

SMALL = {"segment_bytes": 2_000, "queue_entries": 4}


def fill(writer: StoreWriter, count: int, first: int = 0) -> list[int]:
    return [
        writer.put(
            "T",
            number % 2,
            b"body",
            keys=f"k-{number} all",
            uniq_key=f"u-{number}",
            tags="TagA",
            store_ms=1000 + number,
        ).offset
        for number in range(first, first + count)
    ]


def read(root) -> list[tuple[int, int, int]]:
    return [(m.physical_offset, m.queue_id, m.queue_offset) for m in CommitLogReader(root / "commitlog").messages()]


def queue_offsets(root) -> list[int]:
    return sorted(
        offset for queue in list_queues(root / "consumequeue") for offset in queue.read()[1]["offset"].tolist()
    )


def test_what_is_put_is_read_back(tmp_path):
    clock = ManualClock(5_000)
    body, flag = compress(b"text" * 100, "zstd")
    with StoreWriter(tmp_path / "store", clock=clock, segment_bytes=10_000, store_host=Host("fe80::1", 7)) as writer:
        first = writer.put(
            "TopicA",
            3,
            body,
            keys=["a", "b"],
            tags="TagA",
            uniq_key="U",
            properties={"WAIT": "true"},
            sys_flag=flag,
            born_host=Host("::1", 9),
            flag=4,
        )
        hidden = writer.put("TopicA", 3, sys_flag=TRANSACTION_PREPARED, keys="x y", store_host=Host("10.0.0.1", 5))
        last = writer.put(
            "主题",
            0,
            properties="KEYS\x01only",
            born_ms=4,
            store_ms=6,
            reconsume_times=2,
            prepared_offset=hidden.offset,
        )
        assert (tmp_path / "store" / "abort").exists()
    one, two, three = CommitLogReader(tmp_path / "store" / "commitlog").messages()
    assert one.body() == b"text" * 100
    assert one.properties == {"KEYS": "a b", "UNIQ_KEY": "U", "WAIT": "true", "TAGS": "TagA"}
    assert (one.sys_flag, one.flag, one.store_host, one.born_host) == (
        flag | BORN_V6 | STORE_V6,
        4,
        Host("fe80::1", 7),
        Host("::1", 9),
    )
    assert (one.store_ms, one.born_ms, one.size, one.queue_offset) == (5_000, 5_000, first.size, 0)
    assert (two.physical_offset, two.index_keys, two.store_host) == (hidden.offset, ("x", "y"), Host("10.0.0.1", 5))
    assert (three.topic, three.born_ms, three.store_ms, three.reconsume_times, three.prepared_offset) == (
        "主题",
        4,
        6,
        2,
        hidden.offset,
    )
    assert three.raw_properties == b"KEYS\x01only"
    assert queue_offsets(tmp_path / "store") == [first.offset, last.offset]  # the prepared one is in no queue
    checkpoint = decode_checkpoint((tmp_path / "store" / "checkpoint").read_bytes())
    assert (checkpoint.commit_log_ms, checkpoint.consume_queue_ms, checkpoint.index_ms) == (5_000, 5_000, 0)
    assert not (tmp_path / "store" / "abort").exists()


def test_files_roll(tmp_path):
    with StoreWriter(tmp_path, **SMALL) as writer:
        offsets = fill(writer, 40)
    assert [offset for offset, _, _ in read(tmp_path)] == offsets == queue_offsets(tmp_path)
    segments = CommitLogReader(tmp_path / "commitlog").segments()
    assert len(segments) > 2
    assert {segment.file_size for segment in segments} == {2_000}
    assert all(len(list(queue.folder.iterdir())) == 5 for queue in list_queues(tmp_path / "consumequeue"))


def test_nothing_is_seen_before_a_flush(tmp_path):
    writer = StoreWriter(tmp_path, **SMALL)
    fill(writer, 3)
    assert read(tmp_path) == []
    writer.flush()
    assert len(read(tmp_path)) == len(queue_offsets(tmp_path)) == 3
    fill(writer, 2, 3)
    writer.close()
    assert len(read(tmp_path)) == 5


@pytest.mark.parametrize("torn", [0, 1, 60, 120])
def test_a_store_is_recovered(tmp_path, torn):
    """A writer that never closed left a torn message; the next one cuts it off and goes on, and the queues hold each
    message once.
    """
    index = Geometry(5, 12)
    writer = StoreWriter(tmp_path, **SMALL, index=index)
    offsets = fill(writer, 17)
    writer.flush()
    end = writer.next_offset
    segment = tmp_path / "commitlog" / f"{end // 2_000 * 2_000:020d}"
    with segment.open("rb+") as file:
        file.seek(end % 2_000)
        file.write((b"\0\0\0\xa0\xda\xa3\x20\xa7" + b"x" * 200)[:torn])
    again = StoreWriter(tmp_path, **SMALL, index=index)
    assert again.next_offset == end
    offsets += fill(again, 10, 17)
    again.close()
    assert [offset for offset, _, _ in read(tmp_path)] == offsets == queue_offsets(tmp_path)
    assert [queue_offset for _, queue_id, queue_offset in read(tmp_path) if queue_id == 0] == list(range(14))
    loaded = load_classic_index(tmp_path / "index", index)
    assert find(loaded, "T", "all") == offsets[::-1]
    assert all(find(loaded, "T", f"u-{number}") == [offset] for number, offset in enumerate(offsets))


@pytest.mark.parametrize("closed", [False, True])
def test_a_last_message_cut_within_its_properties_is_cut_off_unless_the_store_was_closed(tmp_path, closed):
    """Its body has its CRC and its lengths agree; only the zeros tell, which are the producer's where nobody died while
    writing.
    """
    writer = StoreWriter(tmp_path, **SMALL)
    fill(writer, 5)
    start = writer.put("T", 0, b"body", keys="first-key second-key", store_ms=1_700_000_000_000).offset
    end = writer.next_offset
    writer.close()
    segment = tmp_path / "commitlog" / f"{start // 2_000 * 2_000:020d}"
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"second-key", b"seco\0\0\0\0\0\0"))
    assert segment.read_bytes() != data
    if not closed:
        (tmp_path / "abort").touch()
    assert StoreWriter(tmp_path, **SMALL).next_offset == (end if closed else start)


def test_recovery_at_the_end_of_a_segment(tmp_path):
    writer = StoreWriter(tmp_path, **SMALL)
    offsets = fill(writer, 11)
    writer.flush()
    assert list(CommitLogReader(tmp_path / "commitlog").batches())[-1].state is End.OPEN
    for more in range(12, 60, 7):
        again = StoreWriter(tmp_path, **SMALL)
        offsets += fill(again, 7, more)
        again.flush()
        assert [offset for offset, _, _ in read(tmp_path)] == offsets == queue_offsets(tmp_path)


def test_the_golden_store_goes_on(tmp_path):
    """Recovery of RocketMQ's own files changes none of them."""
    store = golden_store.unpack(tmp_path / "store")
    options = {
        "segment_bytes": golden_store.SEGMENT_BYTES,
        "queue_entries": golden_store.QUEUE_ENTRIES,
        "index": golden_store.GEOMETRY,
    }
    writer = StoreWriter(store, **options)
    assert writer.next_offset == golden_store.END
    writer.flush()
    assert all((store / name).read_bytes() == golden_store.raw(name) for name in golden_store.names())


@pytest.mark.parametrize(
    "wrong",
    [
        {"topic": " "},
        {"topic": "a/b"},
        {"topic": ".."},
        {"topic": "a\0b"},
        {"queue_id": -1},
        {"store_ms": -1},
        {"body": b"x" * 1901},
        {"keys": ["k" * 40_000]},
        {"properties": "A\x01b\x02", "tags": "t"},
        {"born_host": Host("nowhere", 1)},
    ],
)
def test_what_does_not_fit_is_refused_whole(tmp_path, wrong):
    writer = StoreWriter(tmp_path, **SMALL)
    fill(writer, 2)
    before = writer.next_offset
    with pytest.raises(InvalidArgument):
        writer.put(**{"topic": "T", "queue_id": 0, **wrong})
    assert writer.next_offset == before
    fill(writer, 1, 2)
    writer.close()
    assert len(read(tmp_path)) == len(queue_offsets(tmp_path)) == 3
    with pytest.raises(InvalidArgument):
        StoreWriter(tmp_path / "other", segment_bytes=10)


def test_names_of_index_files():
    assert index_name_of(1_795_157_936_596) == "20261120065856596"
