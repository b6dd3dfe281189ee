"""RocketMQ's own logs with random mutations: all errors are typed, and every loop ends. Other formats, as the classic
index, are in tests/reliability/mutations.

A reader of a mutated log must find exactly the messages that decode by themselves in their places, except those inside
damage.
"""

import struct
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.rocketmq import golden_store
from tiered_index.connectors.rocketmq.log.columns import decode_index_columns
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import MIN_MESSAGE_BYTES
from tiered_index.connectors.rocketmq.log.message import decode_message, decompress
from tiered_index.connectors.rocketmq.log.segments import End, segment_name, walk
from tiered_index.connectors.rocketmq.log.store import decode_entries
from tiered_index.errors import CorruptFile

SEGMENTS = golden_store.segments()
STARTS = [wanted["offset"] for wanted in golden_store.expected()]
LENGTHS = [0, 1, 8, 90, 91, 127, 128, 255, 256, 16_383, 16_384, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1]
MAGICS = [0xDAA320A7, 0xDAA320AB, 0xCBD43194]
WORDS = st.sampled_from([struct.pack(">I", number) for number in LENGTHS + MAGICS])
# positions of lengths, magics and flags in a message without IPv6 hosts
FIELD_POSITIONS = st.sampled_from([0, 4, 8, 12, 16, 28, 32, 36, 56, 84])


@st.composite
def mutations(draw, length=golden_store.SEGMENT_BYTES, fields=True):
    """Draw a list of (position, bytes): flipped bytes, special words at fields of messages, runs of zeros."""
    made = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.integers(0, 3 if fields else 2))
        if kind == 3:
            position = draw(st.sampled_from(STARTS)) % golden_store.SEGMENT_BYTES + draw(FIELD_POSITIONS)
        else:
            position = draw(st.integers(0, length - 1))
        value = (st.binary(min_size=1, max_size=1), st.just(b"\0" * 40), WORDS, WORDS)[kind]
        made.append((position, draw(value)))
    return made


def mutate(data: bytes, changes) -> bytes:
    changed = bytearray(data)
    for position, value in changes:
        changed[position : position + len(value)] = value[: max(len(changed) - position, 0)]
    return bytes(changed[: len(data)])


def readable(data: bytes, position: int, start: int) -> bool:
    try:
        decode_message(data, position, physical_offset=start + position)
    except CorruptFile:
        return False
    return True


@given(st.sampled_from(sorted(SEGMENTS)), mutations(), st.integers(0, golden_store.SEGMENT_BYTES))
def test_a_mutated_segment_is_decoded_to_its_first_damage(start, changes, cut):
    data = mutate(SEGMENTS[start], changes)[: cut or None]
    batch = decode_index_columns(data, start, segment_bytes=golden_store.SEGMENT_BYTES, check_crc=True)
    assert (batch.damage is not None) is (batch.state is End.DAMAGED)
    assert start <= batch.end <= start + golden_store.SEGMENT_BYTES
    position = 0
    for _ in range(batch.messages):
        message = decode_message(data, position, physical_offset=start + position)
        position += message.size
    assert position == batch.end - start
    assert not readable(data, position, start)
    assert batch.columns.num_rows <= len(data)


@given(st.sampled_from(STARTS), mutations(length=500, fields=False))
def test_a_mutated_message_is_one_or_damage(offset, changes):
    start = offset // golden_store.SEGMENT_BYTES * golden_store.SEGMENT_BYTES
    data = mutate(SEGMENTS[start][offset - start :], changes)
    try:
        message = decode_message(data, check_crc=False)
    except CorruptFile as error:
        assert error.offset == 0
        return
    assert message.encode() == data[: message.size]
    assert len(message.index_keys) <= message.size
    try:
        assert len(message.body(max_bytes=1 << 20)) <= 1 << 20
    except CorruptFile as error:
        assert "body" in error.problem or "compression" in error.problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_store.unpack(tmp_path_factory.mktemp("store"))


@settings(max_examples=settings().max_examples // 4)
@given(st.dictionaries(st.sampled_from(sorted(SEGMENTS)), mutations(), max_size=3), st.sampled_from([6_000, 1 << 20]))
@example({0: [(0, b"\xff")]}, 900)
@example({0: [(420, bytes(40))], 81_920: [(2_160, bytes(40))]}, 6_000)
def test_a_mutated_log_gives_every_message_in_its_own_place(folder, changes, chunk_bytes):
    made = {start: mutate(data, changes.get(start, [])) for start, data in SEGMENTS.items()}
    for start, data in made.items():
        (folder / "commitlog" / segment_name(start)).write_bytes(data)
    reader = CommitLogReader(folder / "commitlog", chunk_bytes=chunk_bytes, check_crc=True)
    batches = list(reader.batches(skip_corrupt=True))
    covered = [(batch.begin, batch.end) for batch in batches]
    assert covered == sorted(covered)
    skipped = [skipped_range for batch in batches for skipped_range in batch.skipped]
    read = {message.physical_offset for message in reader.messages(skip_corrupt=True, closed=True)}
    assert len(read) == sum(batch.messages for batch in batches)
    torn_at = batches[-1].end
    swallowed = [(skipped_range.begin, skipped_range.end) for skipped_range in skipped]
    for offset in STARTS:
        start = offset // golden_store.SEGMENT_BYTES * golden_store.SEGMENT_BYTES
        whole = readable(made[start], offset - start, start)
        if whole and offset < torn_at:
            # found, or inside a blank that a mutation made, or inside a skipped range that a false blank ended
            assert (
                offset in read
                or 0 <= made[start].find(bytes.fromhex("cbd43194")) < offset - start
                or any(a <= offset < b for a, b in swallowed)
            )
        if not whole:
            assert offset not in read


@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_bytes_at_all(data, extra):
    whole = len(data) + extra
    walked = walk(data, segment_bytes=whole)
    assert 0 <= walked.stop <= len(data)
    assert all(0 <= position <= len(data) - MIN_MESSAGE_BYTES for position in walked.positions.tolist())
    decode_index_columns(data, 0, segment_bytes=whole)
    assert decode_entries(data).size <= len(data) // 20
    for flag in (0x101, 0x201, 0x301):
        with pytest.raises(CorruptFile):
            decompress(data + b"\x99", flag, max_bytes=1000)
