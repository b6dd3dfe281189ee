"""Restart points of packed text: from each of them on it is that of the file, whatever its blocks and members are."""

import functools
import gzip
import io
import itertools
import json
import random
import zlib

import pytest
import zstandard

from tests.integration.cli.command_lines import run_here
from tests.support.counted_reads import counted_reads
from tiered_index import IndexReader
from tiered_index.connectors.files import linked
from tiered_index.connectors.files.rows import restart
from tiered_index.connectors.files.rows.restart import FramedText, PackedText, RestartedText
from tiered_index.connectors.files.rows.text import read_text
from tiered_index.errors import CorruptFile

MIB = 1 << 20


def lines(count, seed=7):
    moments = random.Random(seed)
    rows = (
        {"id": n % 500, "at": 1_700_000_000 + n, "n": n, "x": f"{moments.getrandbits(200):x}"} for n in range(count)
    )
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


@functools.cache
def sample():
    """Return some MiB of lines. Workers collect all tests: only those that run make their text."""
    return lines(40_000)


NOISE = random.Random(5).randbytes(3 * MIB)


def members(text, size):
    return b"".join(gzip.compress(text[at : at + size]) for at in range(0, len(text), size))


def flushed(text):
    """Return gzip whose blocks end at whole bytes, with blocks without text between, as pigz writes it."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    pieces = [
        packer.compress(text[at : at + 100_000]) + packer.flush(zlib.Z_SYNC_FLUSH)
        for at in range(0, len(text), 100_000)
    ]
    return b"".join(pieces) + packer.flush()


@pytest.fixture(autouse=True)
def near(monkeypatch):
    monkeypatch.setattr(restart, "SPACING_BYTES", MIB)


@pytest.fixture(params=["isal", "zlib"])
def library(request, monkeypatch):
    if request.param == "zlib":
        monkeypatch.setattr(restart, "inflater", lambda wbits: zlib.decompressobj(wbits))


def read_all(text, size=200_000):
    return b"".join(iter(lambda: text.read(size), b""))


@pytest.mark.parametrize(
    ("pack", "most_gap"),
    [
        pytest.param(lambda: gzip.compress(sample(), 1), 1.1 * MIB, id="quick"),
        pytest.param(lambda: gzip.compress(sample(), 6), 1.1 * MIB, id="usual"),
        pytest.param(lambda: gzip.compress(sample(), 9), 1.1 * MIB, id="small"),
        pytest.param(lambda: flushed(sample()), 1.1 * MIB, id="flushed"),
        pytest.param(lambda: members(sample(), 900_000), 1.1 * MIB, id="members"),
        pytest.param(lambda: members(sample(), 60_000), 0.7 * MIB, id="small members"),
        pytest.param(lambda: gzip.compress(sample()) + bytes(99), 1.1 * MIB, id="padded"),
        # blocks that are not compressed begin at whole bytes; there are no others to begin at
        pytest.param(lambda: gzip.compress(sample() + NOISE + sample()), 4.6 * MIB, id="noise between"),
        pytest.param(lambda: gzip.compress(sample() + bytes(9 * MIB) + sample()), 12 * MIB, id="zeros between"),
    ],
)
@pytest.mark.usefixtures("library")
def test_the_text_from_each_point_on_is_that_of_the_file(pack, most_gap):
    packed = pack()
    whole = gzip.decompress(packed)
    text = PackedText(io.BytesIO(packed))
    assert read_all(text) == whole
    positions = [0, *(point.position for point in text.points), len(whole)]
    assert len(positions) > 4
    assert all(begin < end <= begin + most_gap for begin, end in itertools.pairwise(positions))
    for point in text.points:
        again = RestartedText(io.BytesIO(packed), point, 100_000)
        assert read_all(again) == whole[point.position :]


def frames(text, size, skipped=b"", **options):
    packer = zstandard.ZstdCompressor(**options)
    begin = b"\x50\x2a\x4d\x18" + len(skipped).to_bytes(4, "little") + skipped if skipped else b""
    return b"".join(begin + packer.compress(text[at : at + size]) for at in range(0, len(text), size))


def streamed_frames(text, size):
    """Return frames that do not tell the length of their text."""
    packed = b""
    for at in range(0, len(text), size):
        part = zstandard.ZstdCompressor(write_content_size=False).compressobj()
        packed += part.compress(text[at : at + size]) + part.flush()
    return packed


@pytest.mark.parametrize(
    ("pack", "sample_text", "most_gap"),
    [
        pytest.param(lambda: frames(sample(), 900_000), sample, 1.9 * MIB, id="frames"),
        pytest.param(lambda: frames(sample(), 900_000, b"size", write_checksum=True), sample, 1.9 * MIB, id="pzstd"),
        pytest.param(lambda: frames(sample(), 3_000), sample, 0.9 * MIB, id="small"),
        pytest.param(lambda: streamed_frames(sample(), 900_000), sample, 1.9 * MIB, id="streamed"),
        pytest.param(
            lambda: frames(NOISE + bytes(NOISE), 900_000),
            lambda: NOISE + bytes(NOISE),
            3.6 * MIB,
            id="raw and repeated",
        ),
    ],
)
def test_frames_of_zstd_are_points_without_a_window(pack, sample_text, most_gap):
    packed, text = pack(), sample_text()
    behind = b"\x5e\x2a\x4d\x18\x05\0\0\0table"
    for data in (packed, packed + behind):
        framed = FramedText(io.BytesIO(data))
        assert read_all(framed, 70_000) == text
        positions = [0, *(point.position for point in framed.points), len(text)]
        assert len(positions) > 4 and not any(point.window for point in framed.points)
        assert all(begin < end <= begin + most_gap for begin, end in itertools.pairwise(positions))
        for point in framed.points:
            assert read_all(RestartedText(io.BytesIO(data), point, 100_000, "zstd")) == text[point.position :]


def test_one_frame_of_zstd_has_no_points_and_damage_is_an_error():
    packed = frames(sample(), len(sample()), write_checksum=True)
    framed = FramedText(io.BytesIO(packed))
    assert (read_all(framed), framed.points) == (sample(), [])
    several = frames(sample(), 900_000, write_checksum=True)
    damaged = [packed[:-9], packed[:3], packed[:5], packed[:-2] + b"xx", several[:-9], several + b"garbage"]
    damaged += [several[:50_000] + b"x" * 99 + several[50_099:]]
    for data in damaged:
        text = FramedText(io.BytesIO(data))
        with pytest.raises(CorruptFile, match="damaged zstd"):
            while read_text("f", text, "zstd", MIB):
                pass


@pytest.mark.usefixtures("library")
def test_damage_is_an_error():
    packed = gzip.compress(sample())
    # a few of these changes give more text than the file has before their damage shows
    changes = (random.Random(seed).randbytes(4000) for seed in range(1_000, 1_032))
    changed = [packed[:200_000] + change + packed[204_000:] for change in changes]
    for damaged in (packed[:-9], packed[:-6] + b"abcdef", packed + b"garbage", *changed):
        text = PackedText(io.BytesIO(damaged))
        with pytest.raises(CorruptFile, match="damaged gzip"):
            while read_text("f", text, "gzip", MIB):
                pass


BY_NUMBER = ("--topic", "t", "--key", "n", "--time", "at")


@pytest.fixture
def where(tmp_path):
    return "--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects"


def test_a_row_of_a_packed_file_costs_the_text_behind_the_point_before_it(tmp_path, monkeypatch, where):
    monkeypatch.setattr(linked, "MOST_POINTS", 2)
    for number, seed in enumerate((1, 2)):
        (tmp_path / f"{number}.gz").write_bytes(gzip.compress(lines(40_000, seed)))
    fields = "--topic", "t", "--key", "id", "--time", "at"
    done = run_here("ingest", tmp_path / "*.gz", *fields, *where, "--json")
    assert done.document["rows"] == 80_000, done.err
    read = counted_reads(monkeypatch, RestartedText)

    def rows_of(key):
        read.clear()
        done = run_here("query", "t", key, "--messages", "--all", *where, "--json")
        messages = [record for record in done.records if "state" in record]
        return [record["message"] and json.loads(record["message"]["body"])["n"] for record in messages], messages

    expected = sorted([*range(123, 40_000, 500)] * 2)
    numbers, messages = rows_of("123")
    assert sorted(numbers) == expected
    # rows in the first MiB of a file are read from its begin
    assert len(read) > 0 and sum(read) / len(expected) < 1.5 * MIB
    with IndexReader.open(where[3]) as reader:
        stored = list(reader.segments().of("points:-/t/0"))
    # points are no messages
    assert [segment.rows for segment in stored] == [None] * 4
    # a window has rows: no erasure leaves one
    erased = run_here("erase", "--topic", "t", "--key", "7", *where, "--yes", "--now", "--json")
    assert erased.document["segments"]["remaining"] == [], erased.err
    numbers, _ = rows_of("123")
    assert (sorted(numbers), read) == (expected, [])
    # a file that was changed is named, though its text is not packed as it was
    (tmp_path / "0.gz").write_bytes(gzip.compress(lines(40_000, 3)))
    numbers, messages = rows_of("123")
    assert len([record for record in messages if "has changed" in str(record["problem"])]) == 80


def test_a_changed_file_is_named_by_what_its_points_lead_to(tmp_path, where):
    (tmp_path / "0.gz").write_bytes(gzip.compress(lines(40_000, 1)))
    fields = "--topic", "t", "--key", "id", "--time", "at"
    assert run_here("ingest", tmp_path / "*.gz", *fields, *where, "--json").code == 0
    for packed in (gzip.compress(lines(40_000, 3)), gzip.compress(lines(9)), lines(40_000, 3), b""):
        (tmp_path / "0.gz").write_bytes(packed)
        done = run_here("query", "t", "499", "--messages", "--max", "3", *where, "--json")
        problems = [message["problem"] for message in done.document["messages"]]
        assert problems == [f"{(tmp_path / '0.gz').as_uri()} has changed since it was indexed"] * 3, done.err
