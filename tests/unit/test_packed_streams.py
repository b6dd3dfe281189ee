"""Text of bzip2 and xz: it is that of the file, up to any damage, and its rows are read from the file's start."""

import bz2
import functools
import gzip
import io
import json
import lzma
import random
import zlib

import pytest
import zstandard

from tests.integration.cli.command_lines import run_here
from tests.support.counted_reads import counted_reads
from tiered_index import IndexReader
from tiered_index.connectors.files import linked
from tiered_index.connectors.files.rows import streams
from tiered_index.connectors.files.rows.streams import StreamedText

MIB = 1 << 20
ERRORS = OSError, EOFError, lzma.LZMAError


@functools.cache
def sample():
    """Return some MiB of lines. Workers collect all tests: only those that run make their text."""
    moments = random.Random(7)
    rows = ({"at": 1_700_000_000 + n, "n": n, "x": f"{moments.getrandbits(200):x}"} for n in range(20_000))
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


NOISE = random.Random(5).randbytes(300_000)


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


def in_streams(pack, size):
    return lambda text: b"".join(pack(text[at : at + size]) for at in range(0, len(text), size))


FILTERS = [{"id": lzma.FILTER_DELTA, "dist": 2}, {"id": lzma.FILTER_LZMA2, "preset": 1}]
# blocks of 100 kB
bzip2 = functools.partial(bz2.compress, compresslevel=1)


def text_of(packed, name, size=70_000):
    """Return the text, and the error after it; None: there is none."""
    text, pieces = StreamedText(io.BytesIO(packed), name), []
    try:
        while piece := text.read(size):
            pieces.append(piece)
    except ERRORS as error:
        return b"".join(pieces), error
    return b"".join(pieces), None


def read_all(packed, name):
    text, error = text_of(packed, name)
    if error is not None:
        raise error
    return text


@pytest.mark.parametrize(
    ("name", "pack", "between"),
    [
        pytest.param("bzip2", bzip2, b"", id="bzip2"),
        pytest.param("bzip2", in_streams(bzip2, 150_000), b"", id="pbzip2"),
        pytest.param("bzip2", in_streams(bz2.compress, 3_000), b"", id="bzip2 in small streams"),
        pytest.param("bzip2", bzip2, bytes(12 * MIB), id="zeros between"),
        pytest.param("xz", lzma.compress, b"", id="xz"),
        pytest.param("xz", in_streams(lzma.compress, 90_000), b"", id="xz in several streams"),
        pytest.param("xz", blocks_of_xz(90_000), NOISE, id="noise in blocks"),
        pytest.param("xz", blocks_of_xz(90_000, lzma.CHECK_NONE, FILTERS), b"", id="filters of xz"),
    ],
)
def test_the_text_is_that_of_all_streams(monkeypatch, name, pack, between):
    """What is behind the last stream is ignored, as by the programs."""
    monkeypatch.setattr(streams, "_PIECE_BYTES", 7001)
    whole = sample()[:400_000] + between + sample()[400_000:800_000]
    packed = pack(whole)
    for behind in (b"", bytes(9), b"garbage"):
        assert text_of(packed + behind, name) == (whole, None)


def test_a_piece_of_a_long_text_has_a_bound():
    for name, pack in (("bzip2", bz2.compress), ("xz", lzma.compress)):
        zeros = StreamedText(io.BytesIO(pack(bytes(3_000_000))), name)
        assert max(len(piece) for piece in iter(lambda zeros=zeros: zeros.read(1 << 30), b"")) <= MIB


@pytest.mark.parametrize("piece_bytes", [700, 16 << 10])
@pytest.mark.parametrize(
    ("name", "pack", "most_lost"),
    [
        pytest.param("bzip2", bzip2, 0, id="bzip2"),
        pytest.param("bzip2", in_streams(bzip2, 150_000), 0, id="pbzip2"),
        pytest.param("xz", lzma.compress, 65 << 10, id="xz"),
        pytest.param("xz", blocks_of_xz(90_000), 65 << 10, id="blocks of xz"),
    ],
)
def test_the_text_before_damage_is_read_and_no_other(monkeypatch, name, pack, most_lost, piece_bytes):
    """Of xz the text of some earlier bytes of the file is missing, too, because a chunk is right only as a whole."""
    monkeypatch.setattr(streams, "_PIECE_BYTES", piece_bytes)
    whole = sample()[:800_000]
    packed = pack(whole)
    moments, lengths = random.Random(3), set()
    for _ in range(12):
        at = moments.randrange(10, len(packed) - 60)
        damaged = packed[:at] + bytes(byte ^ 0x5A for byte in packed[at : at + 9]) + packed[at + 9 :]
        text, error = text_of(damaged, name)
        assert isinstance(error, ERRORS) and whole.startswith(text)
        cut, error = text_of(packed[: max(at - most_lost - 2 * piece_bytes, 0) if most_lost else at], name)
        assert whole.startswith(cut) and (len(cut) == len(text) if name == "bzip2" else len(cut) <= len(text))
        assert isinstance(error, EOFError) or not cut
        lengths.add(len(text))
    assert len(lengths) > 2 and text_of(b"garbage", name)[0] == b""


@pytest.mark.parametrize(("name", "pack"), [("bzip2", bzip2), ("xz", functools.partial(lzma.compress, preset=0))])
def test_a_damaged_stream_behind_others_is_an_error(tmp_path, where, name, pack):
    """pbzip2 writes a stream for each block: what is behind the last stream is ignored only if it is no stream."""
    parts = [pack(sample()[at : at + 100_000]) for at in range(0, 400_000, 100_000)]
    packed, begin, magic = b"".join(parts), len(parts[0]), streams._MAGICS[name]
    moments = random.Random(3)
    for _ in range(30):
        at = begin + moments.randrange(len(parts[1]))
        damaged = packed[:at] + bytes([packed[at] ^ 1 << moments.randrange(8)]) + packed[at + 1 :]
        assert isinstance(text_of(damaged, name)[1], ERRORS) is damaged[begin:].startswith(magic)
    for length in range(len(magic), 14):
        with pytest.raises(EOFError):
            read_all(parts[0] + parts[1][:length], name)
    (tmp_path / "0.log").write_bytes(parts[0] + parts[1][:60] + bytes(50) + parts[1][110:])
    done = run_here("ingest", tmp_path / "0.log", *BY_NUMBER, *where, "--json")
    assert done.code == 1 and f"damaged {name} file" in done.err
    assert done.document["rows"] == sample()[:100_000].count(b"\n")


def test_streams_behind_zeros_are_read_wherever_a_piece_of_the_file_ends():
    for name, pack in (("xz", lzma.compress), ("bzip2", bz2.compress)):
        packed = pack(b"a\n" * 9)
        for zeros in (8, *range((32 << 10) - 50, 32 << 10)):
            assert read_all(packed + bytes(zeros) + packed, name) == b"a\n" * 18


BY_NUMBER = ("--topic", "t", "--key", "n", "--time", "at")


@pytest.fixture
def where(tmp_path):
    return "--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects"


@pytest.mark.parametrize("archive", [False, True], ids=["from the file", "archived"])
@pytest.mark.parametrize("pack", [bzip2, blocks_of_xz(90_000)], ids=["bzip2", "xz"])
def test_a_row_is_read_from_the_start_of_its_file_or_from_the_archive(tmp_path, monkeypatch, where, pack, archive):
    read = counted_reads(monkeypatch, StreamedText)
    (tmp_path / "0.log").write_bytes(pack(sample()))
    assert run_here("ingest", tmp_path / "0.log", *BY_NUMBER, *where, "--wait", *["--archive"] * archive).code == 0
    with IndexReader.open(where[3]) as reader:
        assert not list(reader.segments().of("points:-/t/0"))
    lines = sample().splitlines(keepends=True)
    for number in (19_000, 123):
        read.clear()
        done = run_here("query", "t", str(number), "--messages", *where, "--body", "json", "--json")
        (message,) = done.document["messages"]
        assert message["message"]["body"] == json.loads(lines[number])
        before = sum(map(len, lines[:number]))
        assert (read == []) is archive and (archive or before < sum(read) < before + MIB)


def test_a_large_file_whose_rows_are_read_from_its_start_is_named(tmp_path, monkeypatch, where):
    monkeypatch.setattr(linked, "_ONE_PIECE_BYTES", MIB)
    in_frames = in_streams(zstandard.ZstdCompressor().compress, 900_000)
    for name, packed, is_named in (
        ("0.xz", lzma.compress(sample(), preset=0), True),
        ("1.zst", zstandard.ZstdCompressor().compress(sample()), True),
        ("2.bz2", bz2.compress(sample()), True),
        ("3.zst", in_frames(sample() * 5), False),
        ("4.gz", gzip.compress(sample()), False),
    ):
        (path := tmp_path / name).write_bytes(packed)
        done = run_here("ingest", path, *BY_NUMBER, *where, "--json")
        assert done.document["in_one_piece"] == ([path.as_uri()] if is_named else []), name
        told = (f"decompresses a row's file from its start: {path.as_uri()}", "--archive a row costs one ranged read")
        assert [each in done.err for each in told] == [is_named] * 2
    archived = "--root", tmp_path / "other", "--storage", f"file://{tmp_path}/archived"
    done = run_here("ingest", tmp_path / "2.bz2", *BY_NUMBER, *archived, "--archive", "--json")
    assert done.document["in_one_piece"] == [] and "from its start" not in done.err
