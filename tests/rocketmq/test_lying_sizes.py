"""A false size costs at most a chunk of memory, both to detect it and to keep its error."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from tests.rocketmq.messages import joined, keyed, log, message, write_log
from tiered_index import IndexService
from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.rocketmq.log import segments
from tiered_index.rocketmq.log.columns import decode_index_columns
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.layout import STORE_V6
from tiered_index.rocketmq.log.message import MAX_MESSAGE_BYTES
from tiered_index.rocketmq.log.segments import End, pread, segment_name

SEGMENT = 160 << 20
CHUNK = 1 << 22
BEFORE = log(3)
AT = BEFORE[-1].physical_offset + BEFORE[-1].size


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes of each read of the commit log."""
    sizes: list[int] = []

    def counted(path: Path, size_bytes: int, position: int) -> bytes:
        sizes.append(size_bytes)
        return pread(path, size_bytes, position)

    monkeypatch.setattr(segments, "pread", counted)
    return sizes


def head(size: int, *, offset: int = AT, body: int | None = None, sys_flag: int = 0) -> bytes:
    """Return the first bytes of a message that claims a size, by default with a body of that size."""
    made = message(offset, sys_flag=sys_flag)
    data = bytearray(made.encode())
    data[:4] = struct.pack(">i", size)
    body_at = len(data) - len(made.raw_body) - 1 - len(made.topic) - 2
    data[body_at - 4 : body_at] = struct.pack(">i", size - (len(data) - len(made.raw_body)) if body is None else body)
    return bytes(data[:body_at])


def sparse(folder: Path, behind: bytes) -> CommitLogReader:
    """Return a log of one large segment: three messages and the bytes after them, and zeros elsewhere."""
    folder.mkdir(parents=True)
    path = folder / segment_name(0)
    path.write_bytes(joined(BEFORE) + behind)
    os.truncate(path, SEGMENT)
    return CommitLogReader(folder, chunk_bytes=CHUNK)


LIES = {
    "more than any message has": head(MAX_MESSAGE_BYTES + 1),
    "half written": head(100 << 20),
    "half written, IPv6": head(100 << 20, sys_flag=STORE_V6),
    "a body that doesn't match": head(100 << 20, body=17),
    "a negative body": head(100 << 20, body=-1),
    "another place": head(100 << 20, offset=AT + 1),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_the_size_in_a_head_causes_no_read(tmp_path: Path, asked: list[int], lie: bytes) -> None:
    reader = sparse(tmp_path / "log", lie)
    for _ in range(2):
        batches = list(reader.batches())
        assert [(batch.messages, batch.end, batch.state) for batch in batches][-1] == (0, AT, End.TORN)
        assert sum(batch.messages for batch in batches) == len(BEFORE)
    assert max(asked) <= CHUNK + 91
    asked.clear()
    for size in (None, 100 << 20):
        with pytest.raises(CorruptFile):
            reader.read(AT, size)
    assert sum(asked) < 1 << 19


@pytest.mark.parametrize("flags", [0, STORE_V6])
def test_a_message_longer_than_a_chunk_is_read(tmp_path: Path, flags: int) -> None:
    big = keyed(AT, 3, body=os.urandom(300_000), sys_flag=flags)
    write_log(tmp_path, 400_000, {0: joined([*BEFORE, big])})
    for chunk in (1, 92, 5_000, 1 << 20):
        reader = CommitLogReader(tmp_path, chunk_bytes=chunk)
        assert list(reader.messages()) == [*BEFORE, big]
        assert reader.read(AT) == reader.read(AT, big.size) == big


@pytest.mark.parametrize(
    ("patch", "said"), [(-3, "the topic's length is wrong"), (0, "lengths don't add up"), (2, "lengths don't add up")]
)
def test_a_long_message_with_a_false_end(tmp_path: Path, asked: list[int], patch: int, said: str) -> None:
    big = message(AT, body=bytes(300_000))
    data = bytearray(big.encode())
    if patch < 0:
        data[-3 - len(big.topic)] = 0x80
    else:
        data[-2:] = struct.pack(">h", patch - 1)
    write_log(tmp_path, 400_000, {0: joined(BEFORE) + bytes(data)})
    with pytest.raises(CorruptFile, match=said) as caught:
        CommitLogReader(tmp_path).read(AT)
    assert caught.value.offset == AT
    assert max(asked) < 1_000


def test_an_error_that_is_kept_keeps_no_bytes(tmp_path: Path) -> None:
    one = bytearray(message(0, body=bytes(1 << 20)).encode())
    one[28] = 1  # its queue offset shows that it belongs elsewhere
    batch = decode_index_columns(bytes(one), 0)
    assert batch.damage is not None
    assert batch.damage.__traceback__ is None
    write_log(tmp_path, 3 << 20, {0: bytes(one), 3 << 20: message(3 << 20).encode()})
    with pytest.raises(CorruptFile) as caught:
        list(CommitLogReader(tmp_path).batches())
    trace, frames, held = caught.value.__traceback__, 0, []
    while trace is not None:
        frames += 1
        held += [
            name for name, value in trace.tb_frame.f_locals.items() if isinstance(value, bytes) or value is caught.value
        ]
        trace = trace.tb_next
    assert frames > 1
    assert held == []


def archived(index: IndexService, folder: Path, first: bytes) -> RocketmqMessages:
    write_log(folder, 300_000, {0: first, 300_000: message(300_000).encode()})
    assert SegmentArchiver(index, "s", folder).run_once() == 1
    return RocketmqMessages(None, index.segment_archive)


@pytest.mark.parametrize("lie", [head(250_000, offset=0, body=9), head(250_000, offset=5), head(299_999_999, offset=0)])
def test_a_false_archived_head_takes_one_request_besides_its_table(tmp_path, index, storage, lie):
    source = archived(index, tmp_path / "log", lie)
    before = storage.calls("get_range")
    fetched = source.at(0)
    assert (fetched.state, fetched.message, fetched.requests) == ("missing", None, 2)
    assert storage.calls("get_range") - before == 1
    assert fetched.bytes <= (1 << 14) + 200
    assert "is wrong" in str(fetched.problem) or "elsewhere" in str(fetched.problem)
