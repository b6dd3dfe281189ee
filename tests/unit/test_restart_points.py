"""Restart points of packed text: from each of them on it is that of the file, whatever its blocks and members are."""

import bz2
import contextlib
import functools
import gzip
import io
import itertools
import json
import lzma
import os
import random
import zlib

import pytest
import zstandard

from tests.integration.cli.command_lines import run_here
from tiered_index import IndexReader
from tiered_index.errors import CorruptFile
from tiered_index.sources import blocks, linked, restart
from tiered_index.sources.blocks import BlockedText
from tiered_index.sources.restart import FramedText, PackedText, RestartedText
from tiered_index.sources.rows.text import read_text

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


@pytest.fixture
def early_points(monkeypatch):
    """Short texts have points of blocks."""
    monkeypatch.setattr(blocks, "_EARLY_BYTES", 0)


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


def blocks_of_xz(size, check=lzma.CHECK_CRC64, filters=None):
    """Return a function that packs text in one stream of xz, whose blocks have `size` bytes of text, as `xz -T`."""

    def pack(text):
        parts = [lzma.compress(text[at : at + size], check=check, filters=filters) for at in range(0, len(text), size)]
        index = bytes([0, *((len(parts) & 0x7F | 0x80, len(parts) >> 7) if len(parts) > 127 else (len(parts),))])
        packed = parts[0][:12]
        for part in parts:
            # an index has a zero, the number of blocks, their sizes, zeros, and a checksum
            index_bytes = int.from_bytes(part[-8:-4], "little") * 4 + 4
            packed += part[12 : -12 - index_bytes]
            index += part[-12 - index_bytes : -12][2:-4].rstrip(b"\0")
        index += bytes(-len(index) % 4)
        footer = (len(index) // 4).to_bytes(4, "little") + parts[0][6:8]
        return packed + b"".join([index, crc32(index), crc32(footer), footer, b"YZ"])

    return pack


def crc32(data):
    return zlib.crc32(data).to_bytes(4, "little")


def streams(pack, size):
    return lambda text: b"".join(pack(text[at : at + size]) for at in range(0, len(text), size))


def blocked(packed, name):
    return BlockedText(io.BytesIO(packed), name, 200_000)


FILTERS = [{"id": lzma.FILTER_DELTA, "dist": 2}, {"id": lzma.FILTER_LZMA2, "preset": 1}]
# blocks of 100 kB
bzip2 = functools.partial(bz2.compress, compresslevel=1)


@pytest.mark.parametrize(
    ("name", "pack", "between", "most_gap"),
    [
        pytest.param("bzip2", bzip2, b"", 0.3 * MIB, id="bzip2"),
        pytest.param("bzip2", streams(bzip2, 150_000), b"", 0.4 * MIB, id="pbzip2"),
        pytest.param("bzip2", streams(bz2.compress, 3_000), b"", 0.3 * MIB, id="bzip2 in small streams"),
        pytest.param("bzip2", bzip2, bytes(12 * MIB), 6 * MIB, id="zeros between"),
        pytest.param("xz", streams(lzma.compress, 90_000), b"", 0.4 * MIB, id="xz in several streams"),
        pytest.param("xz", blocks_of_xz(90_000), NOISE[:300_000], 0.4 * MIB, id="noise in blocks"),
        pytest.param("xz", blocks_of_xz(2_000, lzma.CHECK_CRC32), b"", 0.4 * MIB, id="small blocks of xz"),
        pytest.param(
            "xz", streams(blocks_of_xz(90_000, lzma.CHECK_SHA256), 300_000), b"", 0.4 * MIB, id="streams, blocks"
        ),
        pytest.param("xz", blocks_of_xz(90_000, lzma.CHECK_NONE, FILTERS), b"", 0.4 * MIB, id="filters of xz"),
    ],
)
@pytest.mark.usefixtures("early_points")
def test_blocks_of_bzip2_and_xz_are_points_without_a_window(monkeypatch, name, pack, between, most_gap):
    """What is behind the last stream is ignored, as by the programs."""
    monkeypatch.setattr(blocks, "_PIECE_BYTES", 7001)
    whole = sample()[:700_000] + between + sample()[700_000:1_400_000]
    packed = pack(whole)
    for behind in (b"", b"garbage"):
        text = blocked(packed + behind, name)
        assert read_all(text, 70_000) == whole
        positions = [0, *(point.position for point in text.points), len(whole)]
        assert len(positions) > 4
        assert all(begin < end <= begin + most_gap for begin, end in itertools.pairwise(positions))
        for point in text.points[::3]:
            again = RestartedText(io.BytesIO(packed + behind), point, 100_000, name)
            assert read_all(again) == whole[point.position :]


@pytest.mark.parametrize(("name", "pack"), [("bzip2", bzip2), ("xz", blocks_of_xz(90_000))])
@pytest.mark.usefixtures("early_points")
def test_damage_of_blocks_is_an_error(name, pack):
    packed = pack(sample()[:700_000])
    text = blocked(packed, name)
    assert len(read_all(text)) == 700_000
    half = packed[: len(packed) // 2]
    for damaged in (packed[:-20], packed[:50_000] + b"x" * 99 + packed[50_099:], b"garbage", half):
        with pytest.raises((OSError, EOFError, lzma.LZMAError)):
            read_all(blocked(damaged, name))
    with pytest.raises(EOFError):
        read_all(RestartedText(io.BytesIO(half), text.points[0], 100_000, name))
    zeros = blocked(pack(bytes(3_000_000)), name)
    assert max(len(piece) for piece in iter(lambda: zeros.read(1 << 30), b"")) <= MIB


@pytest.mark.parametrize(("name", "pack"), [("bzip2", bzip2), ("xz", functools.partial(lzma.compress, preset=0))])
def test_a_damaged_stream_behind_others_is_an_error(tmp_path, where, name, pack):
    """pbzip2 writes a stream for each block: what is behind the last stream is ignored only if it is no stream."""
    parts = [pack(sample()[at : at + 100_000]) for at in range(0, 400_000, 100_000)]
    packed, begin = b"".join(parts), len(parts[0])
    moments = random.Random(3)
    for _ in range(30):
        at = begin + moments.randrange(len(parts[1]))
        damaged = packed[:at] + bytes([packed[at] ^ 1 << moments.randrange(8)]) + packed[at + 1 :]
        is_stream = damaged[begin:].startswith(blocks._XZ if name == "xz" else b"BZh")
        with pytest.raises((OSError, EOFError, lzma.LZMAError)) if is_stream else contextlib.nullcontext():
            read_all(blocked(damaged, name))
    for length in range(len(blocks._XZ), 14):
        with pytest.raises(EOFError):
            read_all(blocked(parts[0] + parts[1][:length], name))
    (tmp_path / "0.log").write_bytes(parts[0] + parts[1][:60] + bytes(50) + parts[1][110:])
    done = run_here("ingest", tmp_path / "0.log", *BY_NUMBER, *where)
    assert done.code == 1 and f"damaged {name} file" in done.err and "1,014" in done.out


def test_streams_behind_zeros_are_read_wherever_a_piece_of_the_file_ends():
    for name, pack in (("xz", lzma.compress), ("bzip2", bz2.compress)):
        packed = pack(b"a\n" * 9)
        for zeros in (8, *range((32 << 10) - 50, 32 << 10)):
            assert read_all(blocked(packed + bytes(zeros) + packed, name)) == b"a\n" * 18


@pytest.mark.usefixtures("early_points")
def test_a_block_of_xz_whose_filters_are_unknown_is_read_from_the_begin_only():
    whole, filters = sample()[:700_000], [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 1}]
    packed = blocks_of_xz(90_000)(whole) + lzma.compress(whole, filters=filters)
    text = blocked(packed, "xz")
    assert read_all(text) == whole * 2
    with pytest.raises(lzma.LZMAError, match="unknown filters"):
        read_all(RestartedText(io.BytesIO(packed), text.points[-1], 100_000, "xz"))


@pytest.mark.usefixtures("early_points")
def test_a_magic_number_within_a_block_of_bzip2_is_no_begin_of_a_block(monkeypatch):
    """Bits of a block that look like the begin or the end of one are followed by no text of their own."""
    whole, split = sample()[:700_000], blocks._parts_of_bzip2
    packed = bzip2(whole)
    bits = [bit for _, bit, _ in split(iter([packed]), [(blocks._BLOCK, False)]) if bit is not None]

    def with_others(pieces, magics):
        for part, bit, is_end in split(pieces, magics):
            at = len(part) // 2
            yield part[:at], bits[0] + 99, False
            yield part[at : at + 9], bits[0] + 999, len(magics) > 1
            yield part[at + 9 :], bit, is_end

    monkeypatch.setattr(blocks, "_parts_of_bzip2", with_others)
    text = blocked(packed, "bzip2")
    assert read_all(text) == whole
    assert {point.bit for point in text.points} <= {*bits} and len(text.points) > 1
    point = text.points[-2]
    assert read_all(RestartedText(io.BytesIO(packed), point, 100_000, "bzip2")) == whole[point.position :]


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
        with pytest.raises(CorruptFile, match="damaged zstd"):
            while read_text("f", FramedText(io.BytesIO(data)), "zstd", len(sample()) + 1):
                pass


@pytest.mark.usefixtures("library")
def test_damage_is_an_error():
    packed = gzip.compress(sample())
    bytes_changed = packed[:200_000] + os.urandom(4000) + packed[204_000:]
    for damaged in (packed[:-9], packed[:-6] + b"abcdef", packed + b"garbage", bytes_changed):
        with pytest.raises(CorruptFile, match="damaged gzip"):
            while read_text("f", PackedText(io.BytesIO(damaged)), "gzip", len(sample()) + 1):
                pass


BY_NUMBER = ("--topic", "t", "--key", "n", "--time", "at")


@pytest.fixture
def where(tmp_path):
    return "--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects"


def counted_reads(monkeypatch, kind):
    """Return a list that gets the length of each read of a kind of text."""
    read, of_text = [], kind.read

    def counted(self, size):
        data = of_text(self, size)
        read.append(len(data))
        return data

    monkeypatch.setattr(kind, "read", counted)
    return read


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


@pytest.mark.parametrize("pack", [bzip2, blocks_of_xz(90_000)], ids=["bzip2", "xz"])
@pytest.mark.usefixtures("early_points")
def test_a_row_of_blocks_costs_the_text_behind_the_point_before_it(tmp_path, monkeypatch, where, pack):
    (tmp_path / "0.log").write_bytes(pack(sample()))
    assert run_here("ingest", tmp_path / "0.log", *BY_NUMBER, *where, "--wait").code == 0
    read = counted_reads(monkeypatch, BlockedText)
    for number in (39_000, 123):
        read.clear()
        done = run_here("query", "t", str(number), "--messages", *where, "--body", "json", "--json")
        (message,) = done.document["messages"]
        assert message["message"]["body"] == json.loads(sample().splitlines()[number])
        assert 0 < sum(read) < 1.5 * MIB


def test_a_large_file_in_one_piece_is_named_with_the_command_that_packs_it_in_many(tmp_path, monkeypatch, where):
    monkeypatch.setattr(linked, "_ONE_PIECE_BYTES", MIB)
    for name, packed, command in (
        ("0.xz", lzma.compress(sample(), preset=0), "`xz -dc FILE | xz --block-size=4MiB > NEW`"),
        ("1.zst", frames(sample(), len(sample())), "`zstd -dc FILE | pzstd -c > NEW`"),
        ("2.xz", blocks_of_xz(90_000)(sample()), None),
        ("3.zst", frames(sample(), 900_000), None),
        ("4.gz", gzip.compress(sample()), None),
    ):
        (path := tmp_path / name).write_bytes(packed)
        done = run_here("ingest", path, *BY_NUMBER, *where, "--json")
        assert (done.document["rows"], done.document["in_one_piece"]) == (40_000, [path.as_uri()] if command else [])
        assert command is None or ("packed in one piece" in done.err and command in done.err)
