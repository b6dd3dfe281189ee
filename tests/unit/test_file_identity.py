"""What a file is, compared with a known one: by its content alone, and by names only for copies."""

import gzip
import random
import zlib

import pytest

from tiered_index.connectors.files.identity import (
    Block,
    Cut,
    Grown,
    KnownFile,
    Other,
    Same,
    begins_with,
    crc32_of,
    names_before,
    what_is,
)
from tiered_index.connectors.files.listing import local_file
from tiered_index.format.segments.segment import LinkedSegment

BLOCK = 64
LINES = [b'{"n": %05d}\n' % n for n in range(40)]
TEXT = b"".join(LINES)
LINE = len(LINES[0])


def edited(number, line=b'{"n": other}\n'):
    return b"".join([*LINES[:number], line, *LINES[number + 1 :]])


def known_of(text, *, position=0, start=0, kind="ndjson", **more):
    sums = tuple(zlib.crc32(text[at : at + BLOCK]) for at in range(0, len(text), BLOCK))
    fields = {"rows": None, "times": None, "blocks": (BLOCK, sums)} | more
    return LinkedSegment("file:///a", "files:-/t/0", start, len(text), kind, len(text), "x", 0, position, **fields)


def cut_at(number, line=b'{"n": other}\n'):
    """Return the begin of the row in which the block of the first other byte begins."""
    pairs = zip(TEXT, edited(number, line), strict=False)
    same = next(at for at, (old, new) in enumerate(pairs) if old != new)
    return Cut(same // BLOCK * BLOCK // LINE * LINE)


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (TEXT, Same()),
        (TEXT + b"more\n", Grown(len(TEXT))),
        (gzip.compress(TEXT), Same()),
        (gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:]), Same()),
        (gzip.compress(TEXT) + gzip.compress(b"more\n"), Grown(len(TEXT))),
        (gzip.compress(TEXT + b"more\n"), Grown(len(TEXT))),
        (edited(0), Other()),
        (gzip.compress(edited(0)), Other()),
        (b"PAR1" + TEXT[4:], Other()),
        (TEXT[: BLOCK - 1], Other()),
        *((edited(number), cut_at(number)) for number in (6, 20, 39)),
        *((edited(number, b""), cut_at(number, b"")) for number in (6, 20, 38)),
        *((gzip.compress(edited(number)), cut_at(number)) for number in (6, 20, 39)),
        # a block that is known is wanting, and then only a part of one
        (TEXT[: 3 * BLOCK], Same(is_part=True)),
        (TEXT[: 3 * BLOCK + 5], Cut(3 * BLOCK // LINE * LINE)),
        # the reading says why
        (gzip.compress(TEXT)[:-4], Grown(len(TEXT))),
    ],
)
def test_a_text_is_what_its_blocks_say(tmp_path, data, verdict):
    (tmp_path / "a").write_bytes(data)
    assert what_is(local_file(tmp_path / "a"), KnownFile([known_of(TEXT)])) == verdict


@pytest.mark.parametrize(
    ("durable", "blocks", "data", "verdict"),
    [
        # nothing is durable
        (0, (BLOCK, (zlib.crc32(TEXT[:BLOCK]),)), edited(0), Grown(0)),
        # all that is durable is within the known block, or some of it behind
        (2 * LINE, (BLOCK, (zlib.crc32(TEXT[:BLOCK]),)), TEXT + b"more\n", Grown(2 * LINE)),
        (20 * LINE, (BLOCK, (zlib.crc32(TEXT[:BLOCK]),)), TEXT + b"more\n", Cut(BLOCK // LINE * LINE, is_known=True)),
        (20 * LINE, (BLOCK, (zlib.crc32(TEXT[:BLOCK]),)), edited(0), Other()),
        (20 * LINE, None, TEXT, Cut(0)),
    ],
)
def test_of_a_reading_that_was_interrupted_only_known_bytes_are_trusted(tmp_path, durable, blocks, data, verdict):
    (tmp_path / "a").write_bytes(data)
    known = KnownFile([known_of(TEXT, is_open=True, blocks=blocks)], durable)
    assert what_is(local_file(tmp_path / "a"), known) == verdict


def test_a_later_segment_counts_from_its_position_on_and_the_one_before_it_up_to_there(tmp_path):
    text = edited(20)
    cut = cut_at(20).position
    known = KnownFile([known_of(TEXT), known_of(text[cut:], position=cut, start=1000)])
    assert [end for _, end in known.parts()] == [cut, len(text)]
    old = known.offsets_from(cut - LINE)
    assert [(start, end) for start, end, _ in old] == [(cut - LINE, cut), (1000, 1000 + len(text) - cut)]
    for data, verdict in ((text, Same()), (text + b"more\n", Grown(len(text))), (TEXT, cut_at(20))):
        (tmp_path / "a").write_bytes(data)
        assert what_is(local_file(tmp_path / "a"), known) == verdict


@pytest.mark.parametrize("seed", range(5))
def test_the_checksums_of_blocks_give_that_of_the_text(seed):
    moments = random.Random(seed)
    text, blocks, at = moments.randbytes(5000), [], 0
    while at < len(text):
        length = min(moments.choice([1, 7, 64, 999]), len(text) - at)
        blocks.append(Block(at, length, zlib.crc32(text[at : at + length])))
        at += length
    assert crc32_of(blocks, len(text)) == zlib.crc32(text)
    assert crc32_of(blocks, len(text) + 1) is crc32_of(blocks[1:], len(text)) is None


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("app.log", []),
        ("app.log.1", ["app.log"]),
        ("app.log.1.gz", ["app.log.1", "app.log"]),
        ("app.log-20260102.zst", ["app.log-20260102", "app.log"]),
        ("app.log.2026-01-02", ["app.log"]),
        ("app.log-2026010203", ["app.log"]),
        ("app.log.old", ["app.log"]),
        ("app.log~", ["app.log"]),
        ("app.log.1.gz.1", ["app.log.1.gz", "app.log.1", "app.log"]),
        ("app.log.gz.bak~", ["app.log.gz.bak", "app.log.gz", "app.log"]),
        ("part-00001.ndjson", []),
        ("data.ndjson.gz", ["data.ndjson"]),
        (".1", []),
    ],
)
def test_the_names_that_a_file_had_before_it_was_rotated_or_packed(name, before):
    assert names_before(name) == before


@pytest.mark.parametrize(
    ("longer", "shorter", "is_so"),
    [
        (TEXT, TEXT, True), (TEXT, TEXT[:100], True), (TEXT[:100], TEXT, False), (TEXT, edited(39), False),
        (TEXT, gzip.compress(TEXT), True), (TEXT, gzip.compress(TEXT)[:-9], True), (TEXT, b"\x1f\x8b", False),
        (gzip.compress(TEXT), TEXT[:100], True), (b"PAR1", b"PAR1", True), (b"PAR1-", b"PAR1", False),
    ],
)  # fmt: skip
def test_a_copy_is_the_begin_of_another_text(tmp_path, longer, shorter, is_so):
    (tmp_path / "a").write_bytes(longer)
    (tmp_path / "b").write_bytes(shorter)
    assert begins_with(local_file(tmp_path / "a"), local_file(tmp_path / "b")) is is_so
