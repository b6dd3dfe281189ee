"""The readers of rows: records of several lines, Arrow, files of other forms, and any damage, which is typed.

Times of rows that are read together are those of rows that are read one by one.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import random
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.memory import arrow_memory
from tiered_index.base.units import exact_time
from tiered_index.connectors.files.listing import local_file
from tiered_index.connectors.files.rows import parquet
from tiered_index.connectors.files.rows import table as rows_of_table
from tiered_index.connectors.files.rows import text as rows_of_text
from tiered_index.connectors.files.rows.arrow import ArrowTable
from tiered_index.connectors.files.rows.forms import is_growing_text, open_rows, rows_at
from tiered_index.connectors.files.rows.mapping import Dialect, RowMapping
from tiered_index.errors import CorruptFile, InvalidArgument, TieredIndexError

BEGIN_S = 1_700_000_000


def read(path, keys=("k",), time="at", start=0, dialect=None, unit="s"):
    """Return (position, size, key) of all entries, the bad rows, and the reading."""
    listed = local_file(path)
    opened = open_rows(listed.file, listed.size_bytes, listed.head(), dialect)
    reading = opened.reading(RowMapping(keys, time, unit), 0, max(1, opened.length_bound(0)))
    entries, bad = [], []
    for batch in reading.batches(start):
        row_numbers, of_keys = batch.by_entry()
        places = batch.positions[row_numbers].tolist(), batch.sizes[row_numbers].tolist()
        entries += zip(*places, of_keys.to_pylist(), strict=True)
        bad += batch.bad
    return entries, bad, reading


CELLS = st.text(st.sampled_from("ab,^;\"'\n\r "), max_size=6)
DIALECTS = [None, Dialect("^", "'"), Dialect(None, "'"), Dialect("|", '"'), Dialect("\x01", "'")]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(CELLS, CELLS), max_size=30),
    st.integers(20, 200),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(DIALECTS),
)
def test_records_of_several_lines_are_found_at_their_bytes(tmp_path, monkeypatch, cells, block_bytes, newline, dialect):
    """Also if the caller gives the delimiter and the quote."""
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", block_bytes)
    delimiter, quote = (dialect and dialect.delimiter) or ",", dialect.quote if dialect else '"'
    text, how = io.StringIO(), {"delimiter": delimiter, "quotechar": quote, "lineterminator": newline}
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, **how)
    writer.writerow(["k", "note", "other", "at"])
    for number, pair in enumerate(cells):
        writer.writerow([f"key-{number}", *pair, BEGIN_S + number])
    path = tmp_path / "a.csv"
    data = text.getvalue().encode()
    path.write_bytes(data)
    entries, bad, reading = read(path, dialect=dialect)
    assert not bad
    assert sorted(key for _, _, key in entries) == sorted(f"key-{number}" for number in range(len(cells)))
    for position, size, key in entries:
        number = int(key.removeprefix("key-"))
        [record] = csv.reader([data[position : position + size].decode().removesuffix("\r")], strict=True, **how)
        assert record == [key, *cells[number], str(BEGIN_S + number)]
    # the format says how a row is read again
    assert (Dialect.of(reading._text.format) or Dialect(",")) == Dialect(delimiter, quote)


@pytest.mark.parametrize("dialect", [("ab", '"'), ("é", '"'), ("\n", '"'), ("", '"'), (",", "''"), ("'", "'")])
def test_a_dialect_has_two_different_characters(dialect):
    with pytest.raises(InvalidArgument, match=r"--delimiter|--quote is one ASCII character"):
        Dialect(*dialect)


def test_a_quote_that_stays_open_takes_one_row(tmp_path):
    """A quoted cell has at most 1 MiB."""
    path = tmp_path / "a.csv"
    sound = "".join(f"k{n},{BEGIN_S},{'x' * 12_000}\n" for n in range(100))
    path.write_text(f'k,at,note\n{sound}bad,{BEGIN_S},"open\n{sound}inch,{BEGIN_S},a 5" disk\n{sound}')
    entries, bad, _ = read(path)
    assert [row.where.partition(" (")[0] for row in bad] == ["line 102"]
    assert (len(entries), sum(key == "inch" for _, _, key in entries)) == (301, 1)


BLANKS = b" \r\n", b"\n", b"\t\v \f\n"


@pytest.mark.parametrize("form", ["ndjson", "csv"])
@pytest.mark.parametrize("block_bytes", [900, 2 << 20])
def test_blank_lines_are_passed_over_together(tmp_path, monkeypatch, form, block_bytes):
    """1 MB of gzip with a billion newlines did not end within two minutes: each was a step of Python."""
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(rows_of_text, "_FEW_LINES", 3)
    rng, path = random.Random(form), tmp_path / "rows.gz"
    pieces, places = [b"" if form == "ndjson" else b"at,k\n"], []
    for number in range(60):
        pieces += [rng.choice(BLANKS) * rng.choice([0, 1, 2, 500])]
        bad = rng.random() < 0.1
        row = f'{{"at": {BEGIN_S}, "k": "{number}"}}' if form == "ndjson" else f"{BEGIN_S},{number}"
        places.append((None if bad else str(number), sum(map(len, pieces)), b"".join(pieces).count(b"\n") + 1))
        pieces += [
            b" " * rng.choice([0, 0, 2]) * (form == "ndjson"),
            row.encode()[: -3 if bad else None] or b"x",
            b"\n",
        ]
    path.write_bytes(gzip.compress(b"".join(pieces)))
    entries, bad_rows, reading = read(path)
    assert [(key, at) for at, _, key in entries] == [(key, at) for key, at, _ in places if key is not None]
    assert [bad.where for bad in bad_rows] == [
        f"line {line:,} (byte {at:,})" for key, at, line in places if key is None
    ]
    assert sum(reading.lines[1]) == b"".join(pieces).count(b"\n")
    text = open_rows(local_file(path).file, 1, path.read_bytes())
    for lines in (b"\n" * (1 << 20) + b'"x"\n', b'x"\n"x\n' + b" \n" * (1 << 20)):
        # a step for each row, and one for all blank lines
        assert len(list(text.split(lines))) <= 3 and b"".join(text.split(lines)) == lines


def test_a_text_that_is_far_longer_than_its_file_is_named(tmp_path):
    path = tmp_path / "rows.ndjson.bz2"
    path.write_bytes(bz2.compress(f'{{"at": {BEGIN_S}, "k": "a"}}\n'.encode() + b"\n" * (8 << 20)))
    _, bad, reading = read(path)
    assert "rows.ndjson.bz2: its text is more than 4,096 times as long as the file" in reading.damage.problem
    # checksums are those of the text up to there
    sums = reading.blocks[1]
    assert bad == [] and (reading.damage.position, len(sums)) == (reading.end, -(-reading.end // reading.blocks[0]))


def test_the_key_minus_zero_keeps_its_sign_among_integers(tmp_path):
    path = tmp_path / "a.ndjson"
    path.write_text("".join(f'{{"k": {key}, "at": {BEGIN_S}}}\n' for key in ("5", "-0", "0")))
    entries, bad, _ = read(path)
    assert ([key for _, _, key in entries], bad) == (["5", "-0", "0"], [])


def table(count):
    return pa.table(
        {
            "k": pa.array([f"k{n % 5}" for n in range(count)]).dictionary_encode(),
            "c": pa.array([{"id": n} for n in range(count)], pa.struct([("id", pa.int64())])),
            "at": [BEGIN_S + n for n in range(count)],
            "l": [[f"x{n}"] for n in range(count)],
        }
    )


def write_arrow(path, count=1000, form="file", compression=None, at_once=300):
    written = table(count)
    new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with new(path, written.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(written, max_chunksize=at_once)


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("form", ["file", "stream"])
def test_arrow_files_and_streams_are_read_from_any_row(tmp_path, form, compression):
    path = tmp_path / "a.arrow"
    write_arrow(path, form=form, compression=compression)
    for start in (0, 299, 300, 450, 999, 1000):
        entries, bad, reading = read(path, ("k", "c.id", "l"), start=start)
        assert not bad and reading.end == 1000
        assert sorted(entries) == sorted(
            (n, 0, key) for n in range(start, 1000) for key in (f"k{n % 5}", str(n), f"x{n}")
        )
    listed = local_file(path)
    opened = open_rows(listed.file, listed.size_bytes, listed.head())
    assert opened.row(777).to_pylist() == table(1000).slice(777, 1).to_pylist()
    assert (opened.format, opened.length_bound(400)) == ("arrow", 600)


def named_by_footer(data):
    """Return an Arrow file whose schema at the begin has no length: only the footer says where its messages are."""
    return data[:8] + struct.pack("<Ii", 4, -14) + data[16:]


def test_an_arrow_file_whose_messages_only_the_footer_names_is_read(tmp_path):
    # as Polars writes them: the schema at the begin has no length, and dictionaries may be behind the batches
    path = tmp_path / "a.arrow"
    written = table(1000).append_column("d", pa.array([f"d{n % 7}" for n in range(1000)]).dictionary_encode())
    with pa.ipc.new_file(path, written.schema) as writer:
        writer.write_table(written, max_chunksize=300)
    path.write_bytes(named_by_footer(path.read_bytes()))
    for start in (0, 299, 300, 999):
        entries, bad, _ = read(path, ("d", "c.id"), start=start)
        assert not bad and sorted(entries) == sorted(
            (n, 0, key) for n in range(start, 1000) for key in (f"d{n % 7}", str(n))
        )
    listed = local_file(path)
    assert open_rows(listed.file, listed.size_bytes, listed.head()).row(777).to_pylist() == (
        written.slice(777, 1).to_pylist()
    )
    for damaged in (path.read_bytes()[:-1], path.read_bytes()[:-10] + b"\xff\xff\xff\x7fARROW1"):
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match="there is no footer"):
            read(path)


@pytest.mark.parametrize("form", ["file", "stream"])
def test_an_arrow_file_that_is_cut_off_is_damaged(tmp_path, form):
    path = tmp_path / "a.arrow"
    write_arrow(path, 40, form, at_once=15)
    data = path.read_bytes()
    for size, rows in ((data.index(b"x0"), 0), (data.rindex(b"x14") + 500, 15), (data.rindex(b"x39") - 8, 30)):
        path.write_bytes(data[:size])
        if not rows:
            with pytest.raises(CorruptFile, match="cut off"):
                read(path)
        else:
            entries, bad, reading = read(path)
            assert (sorted(n for n, _, _ in entries), bad, reading.end) == ([*range(rows)], [], rows)
            assert isinstance(reading.damage.error, CorruptFile) and "cut off" in reading.damage.problem
            assert (reading.damage.position, reading.damage.where) == (rows, f"row {rows + 1}")
        with pytest.raises(CorruptFile, match="cut off"):
            rows_at(local_file(path).file)


def test_a_dictionary_may_grow_from_batch_to_batch(tmp_path):
    """As `DictionaryBatch` with `isDelta`, of a stream and of a file."""
    texts = [[f"k{n}" for n in range(3)], [f"k{n}" for n in range(5)], [f"k{n}" for n in range(5)]]
    for new in (pa.ipc.new_stream, pa.ipc.new_file):
        path = tmp_path / "a.arrow"
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        batches = [
            pa.record_batch({"k": pa.DictionaryArray.from_arrays([n, 0], each), "at": [BEGIN_S] * 2})
            for n, each in enumerate(texts, 2)
        ]
        with new(path, batches[0].schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        entries, bad, reading = read(path)
        assert (bad, reading.damage) == ([], None)
        assert [key for _, _, key in sorted(entries)] == ["k2", "k0", "k3", "k0", "k4", "k0"]


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file], ids=["stream", "file"])
def test_each_message_of_an_arrow_file_is_read_once(tmp_path, monkeypatch, new):
    """Each batch decoded the dictionary of all batches again."""
    path, of_texts = tmp_path / "a.arrow", pa.array([f"text {number}" for number in range(1000)])
    batches = [
        pa.record_batch({"at": [BEGIN_S] * 9, "k": pa.DictionaryArray.from_arrays(range(at, at + 9), of_texts)})
        for at in range(0, 90, 9)
    ]
    with new(path, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    positions, read_bytes = [], ArrowTable._bytes

    def counted(table, handle, position, size):
        positions.append(position)
        return read_bytes(table, handle, position, size)

    monkeypatch.setattr(ArrowTable, "_bytes", counted)
    entries, bad, reading = read(path)
    assert [key for _, _, key in sorted(entries)] == [f"text {number}" for number in range(90)]
    assert (bad, reading.damage) == ([], None)
    assert len(positions) == len({*positions}) == 11
    # from a batch on, with its dictionary
    positions.clear()
    assert [key for _, _, key in sorted(read(path, start=85)[0])] == [f"text {number}" for number in range(85, 90)]


def test_an_index_outside_a_dictionary_is_damage_of_its_batch_alone(tmp_path):
    path, of_texts, kind = tmp_path / "a.arrow", pa.array(["a", "b"]), pa.DictionaryArray
    columns = [
        kind.from_arrays(pa.array(places, pa.int32()), of_texts, safe=False)
        for places in ([0, 1], [1, 2], [-1, 0], [1, 0])
    ]
    batches = [pa.record_batch({"at": [BEGIN_S] * 2, "k": column}) for column in columns]
    with pa.ipc.new_file(path, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    entries, bad, reading = read(path)
    assert [(at, key) for at, _, key in sorted(entries)] == [(0, "a"), (1, "b"), (6, "b"), (7, "a")]
    assert not bad and reading.damage.position == 2 and "rows from 2 on" in reading.damage.problem


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_whole_rows_are_read_in_parts_whose_texts_are_small(tmp_path, monkeypatch, form):
    """Texts of 16,000 rows of 500 columns took 1 GiB of Python's values."""
    monkeypatch.setattr(rows_of_table, "_TEXTS_BYTES", 10_000)
    path, count = tmp_path / f"a.{form}", 3000
    table = pa.table(
        {"k": [str(number) for number in range(count)], "at": [BEGIN_S] * count, "a long name": range(count)}
    )
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    opened = open_rows(local_file(path).file, path.stat().st_size, path.read_bytes()[:100])
    for whole in (False, True):
        reading, end, texts = opened.reading(RowMapping(("k",), "at", "s"), 0, count, whole=whole), 0, []
        for batch in reading.batches(0):
            assert batch.positions.tolist() == [*range(end, batch.end)]
            end = batch.end
            if whole:
                texts += (part := batch.texts(batch.positions, batch.sizes))
                assert sum(map(len, part)) < 10_000
        assert end == count
    assert [json.loads(text)["a long name"] for text in texts] == [*range(count)]


def test_runs_of_equal_cells_are_read_in_small_batches(tmp_path, monkeypatch):
    """Each row of runs was a step of Python, and a batch of a text that all rows have took its bytes for each row."""
    count, path = 30_000, tmp_path / "runs.arrow"
    values = {"k": pa.array(["a", "b"]), "at": pa.array([BEGIN_S, BEGIN_S + 1]), "body": pa.array(["x" * 10_000, "y"])}
    columns = {
        name: pa.RunEndEncodedArray.from_arrays(pa.array([20_000, count], pa.int32()), of_runs)
        for name, of_runs in values.items()
    }
    batch = pa.record_batch([*columns.values()], [*columns])
    with pa.ipc.new_file(path, batch.schema) as writer:
        writer.write_batch(batch)
    monkeypatch.setattr(parquet, "TEXT_BYTES", 4 << 20)
    table, first = ArrowTable(local_file(path).file), 0
    with arrow_memory() as pool:
        for at, rows in table.read(["k", "at", "body"]):
            assert at == first and rows["body"][0].as_py() == ("x" * 10_000 if at < 20_000 else "y")
            first += len(rows)
            del rows
        assert first == count and pool.max_memory() < 30 << 20
    monkeypatch.setattr(rows_of_table, "python_values", None)  # no row is read by itself
    entries, bad, _ = read(path)
    assert not bad and [key for _, _, key in entries] == ["a"] * 20_000 + ["b"] * 10_000


def test_a_batch_that_needs_too_much_memory_is_refused_before_it_is_decoded(tmp_path):
    path = tmp_path / "a.arrow"
    written = pa.table({"k": [" " * (65 << 20)] * 2, "at": [BEGIN_S] * 2})
    with pa.ipc.new_file(path, written.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(written)
    assert path.stat().st_size < 1 << 20
    entries, bad, reading = read(path)
    assert (entries, bad, reading.end) == ([], [], 2)
    assert "write the file with smaller batches" in reading.damage.problem


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'[{"k": 1}]', "is a JSON array: write one object a line, for example with `jq -c '.[]' FILE > FILE.ndjson`"),
        (gzip.compress(b" [1]", mtime=0), "`gzip -dc < FILE | jq -c '.[]' > FILE.ndjson`"),
        (b'{\n  "k": 1\n}\n', "is JSON of several lines: write one object a line, for example with `jq -c '.' FILE"),
        (b"Obj\x01rest", "is an Avro file: convert it"),
        (b"PK\x03\x04,", "is a ZIP archive"),
        (b"\x04\x22\x4d\x18,", "is packed by LZ4"),
        (b"ORC\x0a\x00,", "is an ORC file"),
        (b"\x00\x01,\x02", "is neither NDJSON nor CSV, Parquet or Arrow"),
        (b"plain words\n", "is neither NDJSON nor CSV, Parquet or Arrow"),
        (lzma.compress(b'{"k":1}', lzma.FORMAT_ALONE), "by gzip, for example with `xz --format=lzma -dc FILE | gzip"),
        (
            b"\x28\xb5\x2f\xfd\x07\x58\xae\x38\x35",
            "needs a dictionary of zstd: pack it without one, for example with `zstd -dc -D DICTIONARY FILE",
        ),
        ("k,at\n1,2\n".encode("utf-16"), "is UTF-16: write UTF-8, for example with `iconv -f UTF-16 -t UTF-8 FILE >"),
        ('{"k":"\u4e2d"}\n'.encode("utf-16-le"), "`iconv -f UTF-16LE -t UTF-8 FILE > FILE.utf8`"),
        ("k,at\n1,2\n".encode("utf-16-be"), "`iconv -f UTF-16BE -t UTF-8 FILE > FILE.utf8`"),
        ("k,at\n".encode("utf-32"), "`iconv -f UTF-32 -t UTF-8 FILE > FILE.utf8`"),
        (gzip.compress("k,at\n".encode("utf-16"), mtime=0), "iconv -f UTF-16 -t UTF-8 <(gzip -dc < FILE) > FILE.utf8"),
    ],
)
def test_a_file_of_another_form_says_how_to_make_it_readable(tmp_path, data, problem):
    path = tmp_path / "a.log"
    path.write_bytes(data)
    with pytest.raises(InvalidArgument) as raised:
        read(path)
    assert str(raised.value).startswith(str(path)) and problem in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["ORCID", "ORC", "FEA1", "%PDF", "Obj"])
def test_a_header_may_begin_with_the_letters_of_another_form(tmp_path, name):
    path = tmp_path / "a.csv"
    path.write_text(f"{name},at\nv1,{BEGIN_S}\n")
    entries, bad, _ = read(path, (f'"{name}"',))
    assert ([key for _, _, key in entries], bad) == (["v1"], [])
    # so a last line may still be written
    assert is_growing_text(path.read_bytes())


def test_a_dictionary_of_xz_that_takes_much_memory_is_refused(tmp_path):
    large = {"id": lzma.FILTER_LZMA2, "dict_size": 256 << 20, "mode": lzma.MODE_FAST, "mf": lzma.MF_HC3}
    path = tmp_path / "a.log.xz"
    path.write_bytes(lzma.compress(LINES, filters=[large]))
    with pytest.raises(CorruptFile, match="its dictionary has more than 128 MiB: pack it again by `xz -9`"):
        read(path)


LINES = "".join(f"{json.dumps({'k': f'k{n}', 'at': BEGIN_S + n, 'c': {'id': n / 4}})}\n" for n in range(40)).encode()
CELL_LINES = ("k,at,note\n" + "".join(f'k{n},{BEGIN_S + n},"a\nb"\n' for n in range(40))).encode()


def sound_files(folder):
    """Yield the bytes of a sound file of each form."""
    yield from (LINES, CELL_LINES)
    for pack in (
        lambda data: gzip.compress(data, mtime=0),
        bz2.compress,
        lzma.compress,
        lambda data: pa.compress(data, "zstd", asbytes=True),
    ):
        yield pack(LINES)
    written = folder / "sound"
    for form, compression in (("file", None), ("stream", None), ("file", "zstd")):
        write_arrow(written, 40, form, compression, 15)
        yield written.read_bytes()
    write_arrow(written, 40, at_once=15)
    yield named_by_footer(written.read_bytes())
    pq.write_table(table(40), written, row_group_size=15, write_page_checksum=True)
    yield written.read_bytes()


class Files(list):
    """Sound files, which a report of a failure does not print."""

    def __repr__(self):
        return "the sound files"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return Files(sound_files(tmp_path_factory.mktemp("sound")))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10), st.integers(0, 2**32), st.sampled_from(["flip", "cut", "insert", "double", "zero", "none"]))
def test_any_damage_is_a_typed_error_or_a_bad_row(tmp_path, sound, form, seed, how):
    chance, data = random.Random(seed), bytearray(sound[form])
    for _ in range(chance.randint(1, 4)):
        at, size = chance.randrange(len(data) or 1), chance.randint(1, 40)
        if how == "flip" and data:
            data[at] ^= 1 << chance.randrange(8)
        elif how == "cut":
            del data[at:]
        elif how == "insert":
            data[at:at] = chance.randbytes(size)
        elif how == "double":
            data[at:at] = data[at : at + size]
        elif how == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
    path = tmp_path / "damaged"
    path.write_bytes(data)
    try:
        entries, bad, reading = read(path, ("k", "c.id", "l"))
    except TieredIndexError as error:
        assert isinstance(error, InvalidArgument | CorruptFile) and str(path) in str(error)
    else:
        assert all(row.problem for row in bad)
        assert all(key for _, _, key in entries) and reading.end >= 0
        assert how != "none" or len({position for position, _, _ in entries}) == 40


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([b'{"k":1,"at":5}', b'{"k":"\\ud800","at":5}', b"{}"])))
)
def test_any_lines_are_entries_or_bad_rows_at_their_place(tmp_path, parts):
    path = tmp_path / "a.ndjson"
    path.write_bytes(b'{"k":"first","at":5}\n' + b"\n".join(parts) + b"\n")
    entries, bad, _ = read(path)
    assert (0, 20, "first") in entries
    data = path.read_bytes()
    for position, size, key in entries:
        document = json.loads(data[position : position + size])
        assert key in (document["k"], str(document["k"]))
    for row in bad:
        number = int(row.where.split()[1].replace(",", ""))
        assert data.split(b"\n")[number - 1].strip()


UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
SECONDS = st.integers(631_152_000, 4_102_444_799)


@st.composite
def times(draw):
    """Times of one unit, as numbers or texts in any mixture."""
    unit = draw(st.sampled_from(sorted(UNITS)))
    per = UNITS[unit]
    integers = SECONDS.map(lambda second: second * per)
    decimals = st.builds(lambda second, part: str(second * per + part), SECONDS, st.floats(0, 0.999))
    kinds = [integers, integers.map(str), decimals, st.one_of(integers, decimals)]
    return unit, draw(st.lists(kinds[draw(st.integers(0, 3))], min_size=1, max_size=20))


@settings(max_examples=150)
@given(times())
def test_numbers_are_the_same_times_together_and_one_by_one(case):
    unit, values = case
    alone = RowMapping(("k",), "at", unit)
    together = RowMapping(("k",), "at", unit).times_ms(values)
    assert together is not None
    assert together.tolist() == [alone.time_ms(value) for value in values]


@settings(max_examples=100)
@given(st.lists(st.floats(631_152_000, 4_102_444_799), min_size=1, max_size=20))
def test_a_column_of_floats_has_the_times_of_its_floats(values):
    mapping = RowMapping(("k",), "at")
    converted = mapping.times_ms(pa.array(values, pa.float64()))
    assert converted is not None and mapping.unit == "s"
    assert converted.tolist() == [mapping.time_ms(value) for value in values]


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("29.11.2026", "2026-11-29T00:00:00Z"),
        ("1.9.2026", "2026-09-01T00:00:00Z"),
        (" 29.11.2026 14:05", "2026-11-29T14:05:00Z"),
        ("29.11.2026, 4:05:06", "2026-11-29T04:05:06Z"),
        ("29.11.2026 14:05:06,789", "2026-11-29T14:05:06.789Z"),
        ("29/Nov/2026:14:05:06 +0100", "2026-11-29T13:05:06Z"),
        ("01/Feb/2026:00:00:00", "2026-02-01T00:00:00Z"),
    ],
)
def test_times_of_shops_and_of_servers_have_one_meaning(text, time):
    mapping = RowMapping(("k",), "at")
    assert mapping.time_ms(text) == exact_time(time)
    assert mapping.times_ms([text, text]).tolist() == [exact_time(time)] * 2


@pytest.mark.parametrize(
    "text",
    [
        *("31.02.2026", "11.29.2026", "29.11.26", "11/29/2026", "29/Now/2026:14:05:06", "29.11.2026 14"),
        *("9.11.2026 25:00", "29/Nov/2026:14:05:06 +0160"),
    ],
)
def test_a_date_of_several_meanings_or_of_none_is_a_bad_time(text):
    mapping = RowMapping(("k",), "at")
    assert mapping.times_ms(["29.11.2026", text]) is None
    with pytest.raises(InvalidArgument, match="at is neither a number nor an ISO 8601 time, 29"):
        mapping.time_ms(text)


def test_a_float_that_is_no_number_is_a_bad_time():
    """Rows with a bad time are read one by one."""
    mapping = RowMapping(("k",), "at", "s")
    for value in (math.nan, math.inf, "1e999", "1" * 5000, -(10**400)):
        with pytest.raises(InvalidArgument):
            mapping.time_ms(value)
    for value in (None, "2024-01-01T00:00:00Z", "yesterday", math.nan, 10**30, "1" * 30, -5, 2**62):
        assert mapping.times_ms([type(value or 0)(1_700_000_000), value]) is None


@pytest.mark.parametrize("kind", [int, float, str])
@pytest.mark.parametrize(("first", "other"), [("s", "ms"), ("ms", "s"), ("us", "s"), ("ns", "us")])
def test_a_time_that_is_likely_only_in_another_unit_than_the_first_is_bad(first, other, kind):
    """Seconds among milliseconds would be times of 1970."""
    values = [kind(BEGIN_S * UNITS[first] + n) for n in range(5)]
    strange = kind(BEGIN_S * UNITS[other])
    guessed, told = RowMapping(("k",), "at"), RowMapping(("k",), "at", first)
    assert guessed.times_ms([*values, strange]) is None
    assert guessed.times_ms(values).tolist() == told.times_ms(values).tolist()
    assert guessed.times_ms([strange]) is None
    with pytest.raises(InvalidArgument, match=f"seems to be in {other}, but the first one was in {first}.*--time-unit"):
        guessed.time_ms(strange)
    # of a year before 1990 in any unit, and a unit that the caller gave
    assert guessed.time_ms(kind(1_000)) == told.time_ms(kind(1_000))
    assert told.time_ms(kind(BEGIN_S)) == BEGIN_S * 1000 // UNITS[first]


TIMES = (*map(pa.timestamp, UNITS), pa.timestamp("us", "Asia/Tokyo"), pa.date32(), pa.date64())
SECONDS_OF_ROWS = [BEGIN_S - BEGIN_S % 86_400, 86_400 * 365, None, 4_200_000_000 - 4_200_000_000 % 86_400]


@pytest.mark.parametrize("unit", [None, "s", "ns"])
@pytest.mark.parametrize("kind", TIMES)
def test_a_column_of_times_keeps_its_unit_if_a_row_has_none(tmp_path, kind, unit):
    """Times of any year count, and `--time-unit` is that of numbers only."""
    seconds = pa.array(SECONDS_OF_ROWS, pa.timestamp("s"))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"k": ["a", "b", "c", "d"], "at": seconds.cast(kind)}), path)
    listed = local_file(path)
    (batch,) = open_rows(listed.file, 1, listed.head()).reading(RowMapping(("k",), "at", unit), 0, 4).batches(0)
    assert (batch.by_entry()[1].to_pylist(), [row.where for row in batch.bad]) == (["a", "b", "d"], ["row 3"])
    assert batch.times_ms.tolist() == [second * 1000 for second in SECONDS_OF_ROWS if second is not None]
    entries, bad, _ = read(path, time="none || at")
    assert ([key for _, _, key in entries], [row.where for row in bad]) == (["a", "b", "d"], ["row 3"])


@pytest.mark.parametrize("unit", ["s", "us"])
def test_one_time_out_of_range_is_one_bad_row(tmp_path, unit):
    path, seconds = tmp_path / "a.arrow", [BEGIN_S, 2**62, BEGIN_S + 1]
    written = pa.table({"k": ["a", "b", "c"], "at": pa.array(seconds, pa.timestamp(unit))})
    with pa.ipc.new_file(path, written.schema) as writer:
        writer.write_table(written)
    entries, bad, _ = read(path)
    assert [key for _, _, key in entries] == ["a", "c"] and "out of range" in bad[0].problem


GOOD = {"ndjson": b'{"k": "a", "at": 1700000000}\n', "csv": b"a,1700000000,x\n"}
BAD_LINES = {
    "ndjson": [b"x\n", b"{}\n", b"\n", b" \n", b'{"at": "x"}\n', b"\0\n", b"]\r\n", b'{"k": "\xff", "at": 1}\n'],
    "csv": [b"x\n", b",,\n", b"\n", b"a,b,c,d\n", b'"a\nb",,\n', b'a"b\n', b'"\n', b"\0\n", b'"a"b,1,\n'],
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", GOOD)
def test_bad_lines_that_are_repeated_are_judged_once(tmp_path, monkeypatch, form, seed):
    """The batches are those of lines that are judged one by one. Only the first bad rows of a batch are named."""
    moments = random.Random(seed)
    choice = [b"x\n", *moments.sample(BAD_LINES[form], moments.randrange(2, 5)), GOOD[form]]
    text = b"".join(moments.choice(choice) * moments.choice([1, 2, 3000]) for _ in range(30))
    (tmp_path / f"a.{form}").write_bytes((b"k,at,n\n" if form == "csv" else b"") + GOOD[form] + text + GOOD[form])
    of_form = rows_of_text.NdjsonFile if form == "ndjson" else rows_of_text.CsvFile
    judged, members_of = [], of_form.members_of
    monkeypatch.setattr(of_form, "members_of", lambda *of_row: judged.append(of_row[1]) or members_of(*of_row))
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 20_000)
    entries, outcomes, counts, add = [], [], [], rows_of_text.KnownBadLines.add
    for of_run in (add, lambda *_: None):
        monkeypatch.setattr(rows_of_text.KnownBadLines, "add", of_run)
        judged.clear()
        listed = local_file(tmp_path / f"a.{form}")
        opened = open_rows(listed.file, listed.size_bytes, listed.head())
        batches = [*opened.reading(RowMapping(("k",), "at", "s"), 0, listed.size_bytes).batches(0)]
        outcomes.append([(batch.end, batch.rows, batch.bad_rows, batch.bad) for batch in batches])
        counts.append(judged.count(b"x"))
        entries.append(read(tmp_path / f"a.{form}")[0])
    assert counts[0] == 1 < counts[1]
    assert outcomes[0] == outcomes[1] and entries[0] == entries[1] and len(entries[0]) >= 2
    assert all(len(bad) == min(10, bad_rows) for _, _, bad_rows, bad in outcomes[0])
    assert sum(bad_rows for _, _, bad_rows, _ in outcomes[0]) > 0


def test_gigabytes_of_one_byte_get_no_restart_points(tmp_path):
    """To prove a place of them takes longer than to read them again."""
    path = tmp_path / "a.ndjson.gz"
    path.write_bytes(gzip.compress(GOOD["ndjson"] + bytes(40 << 20) + b"\n" + GOOD["ndjson"]))
    entries, bad, reading = read(path)
    assert (len(entries), sum(row.position for row in bad) > 0, reading.points) == (2, True, [])
    assert all("bytes that are 0" in row.problem for row in bad)
