"""The journal's reader drops the damage that a crash can cause, and reports any other damage as corruption."""

import json
import struct
import zlib

import pytest

from tiered_index.errors import CorruptFile, InvalidArgument, UnsupportedVersion
from tiered_index.format import journal as journal_module
from tiered_index.format.journal import BatchRecord, Journal, encode_batch, encode_open, encode_seal, parse_journal
from tiered_index.format.layout import NATIVE, Layout

LAYOUT = Layout(NATIVE, NATIVE.schema, 10, 100)
OPEN = encode_open(Journal("id-1", LAYOUT, 1_700_000_000_000, "main", 7, "custom", 1_700_000_000_500))
RECORDS = [
    OPEN,
    encode_batch(BatchRecord(1, 3, 11, -5, 9, 1_700_000_000_001), {"a": 10}, [(1, "orders"), (2, "\U0001f600 {")]),
    encode_batch(BatchRecord(4, 0, 0, 0, 0, 0), {"a": 11, "b": 1}),
    encode_batch(BatchRecord(4, 2, 12, 1, 20, 1_700_000_000_900), {"b": 2}),
    encode_seal(),
]
WHOLE = b"".join(RECORDS)
BORDERS = [sum(map(len, RECORDS[:n])) for n in range(len(RECORDS) + 1)]


def record(document):
    payload = json.dumps(document).encode()
    length = struct.pack(">I", len(payload))
    return length + struct.pack(">I", zlib.crc32(length + payload)) + payload


def state(journal):
    return (journal.count, dict(journal.topics), dict(journal.positions), journal.sealed, journal.valid_length)


PREFIXES = [None] + [state(parse_journal(WHOLE[:end], "j")) for end in BORDERS[1:]]


def test_whole_journal():
    journal = parse_journal(WHOLE, "j")
    named = (journal.file_id, journal.layout, journal.begin_ms, journal.lane)
    assert named == ("id-1", LAYOUT, 1_700_000_000_000, "main")
    assert (journal.sequence, journal.offset_space, journal.created_ms) == (7, "custom", 1_700_000_000_500)
    assert state(journal) == (5, {1: "orders", 2: "\U0001f600 {"}, {"a": 11, "b": 2}, True, len(WHOLE))
    assert (journal.seconds, journal.end_ms) == ((-5, 20), 1_700_000_000_900)
    assert journal.batches[0] == BatchRecord(1, 3, 11, -5, 9, 1_700_000_000_001)
    fresh = parse_journal(OPEN, "j")
    assert (fresh.count, fresh.seconds, fresh.end_ms, fresh.sealed) == (0, None, 0, False)


def test_a_record_that_no_reader_takes_is_refused(monkeypatch):
    batch = BatchRecord(1, 1, 11, 0, 0, 0)
    longest = len(encode_batch(batch, {"a": 1})) - 8
    monkeypatch.setattr(journal_module, "_MAX_RECORD", longest)
    encode_batch(batch, {"a": 1})
    with pytest.raises(InvalidArgument, match="journal record"):
        encode_batch(batch, {"aa": 1})


def test_torn_at_every_byte_is_a_prefix_of_records():
    for length in range(len(WHOLE) + 1):
        whole_records = sum(border <= length for border in BORDERS[1:])
        journal = parse_journal(WHOLE[:length], "j")
        assert (journal and state(journal)) == PREFIXES[whole_records]
    # zeros behind the last record are a torn write, too
    for count in (1, 8, 4096):
        assert state(parse_journal(WHOLE + bytes(count), "j")) == PREFIXES[-1]
        assert parse_journal(bytes(count), "j") is None


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit(bit):
    """A flipped bit in the last record is a torn write, which the reader drops. A flipped bit before it is damage."""
    for at in range(len(WHOLE)):
        damaged = bytearray(WHOLE)
        damaged[at] ^= 1 << bit
        if at >= BORDERS[-2]:
            assert state(parse_journal(bytes(damaged), "j")) == PREFIXES[-2]
        else:
            with pytest.raises(CorruptFile) as caught:
                parse_journal(bytes(damaged), "j")
            assert isinstance(caught.value, UnsupportedVersion) is (8 <= at < 12)


def test_damaged_middle_names_where():
    damaged = bytearray(WHOLE)
    damaged[BORDERS[2] + 20] ^= 1
    with pytest.raises(CorruptFile, match="damaged record") as caught:
        parse_journal(bytes(damaged), "j")
    assert caught.value.offset == BORDERS[2]


def test_a_lost_record_is_noticed():
    with pytest.raises(CorruptFile, match="batches"):
        parse_journal(b"".join(RECORDS[:1] + RECORDS[3:]), "j")
    with pytest.raises(CorruptFile, match="open record"):
        parse_journal(OPEN[:12] + RECORDS[1], "j")


def test_entries_behind_the_seal():
    batch = encode_batch(BatchRecord(1, 1, 0, 0, 0, 0), {})
    sealed = OPEN + encode_seal() + encode_batch(BatchRecord(1, 0, 0, 0, 0, 0), {"s": 3})
    assert parse_journal(sealed, "j").positions == {"s": 3}
    with pytest.raises(CorruptFile, match="after the seal"):
        parse_journal(OPEN + encode_seal() + batch, "j")


BATCH = {"kind": "batch", "first": 1, "count": 1, "positions": {}}
BATCH |= dict.fromkeys(("crc32", "second_min", "second_max", "end_ms"), 0)
WRONG = (("count", -1), ("count", 100), ("positions", []))
IMPOSSIBLE = json.loads(OPEN[20:])
IMPOSSIBLE["layout"]["slots"] = 0


@pytest.mark.parametrize(
    ("data", "error", "problem"),
    [
        (OPEN[:8] + struct.pack(">I", 4) + OPEN[12:], UnsupportedVersion, "version 4"),
        (OPEN + record({"kind": "merge"}), UnsupportedVersion, "record 'merge'"),
        (b"something else entirely", CorruptFile, "not a journal"),
        *(
            (OPEN + record(wrong), CorruptFile, "^j: ")
            for wrong in ({}, {"kind": "batch"}, *(BATCH | {name: value} for name, value in WRONG))
        ),
        (OPEN[:12] + record(IMPOSSIBLE), CorruptFile, r"at `\$\.layout\.slots`"),
    ],
)
def test_the_future_and_what_is_no_journal_are_refused_by_name(data, error, problem):
    with pytest.raises(error, match=problem) as caught:
        parse_journal(data, "j")
    assert caught.value.file == "j"
