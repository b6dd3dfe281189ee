"""A few bytes of Parquet never need more memory than the bound, because their pages are measured before Arrow decodes.

Files of any coding are read unchanged.
"""

import itertools
import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.memory import arrow_memory
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.sources import pages, parquet
from tiered_index.sources.places import LocalFile, StoredFile
from tiered_index.storage.opening import open_storage

BOUND = 1 << 20
LONG = "x" * (1 << 18)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pages, parquet):
        monkeypatch.setattr(module, "DECODED_BYTES", BOUND)
    monkeypatch.setattr(pages, "_WHOLE_BYTES", BOUND // 4)


def written(path: Path, keys: Any, encoding: str = "PLAIN", **options: Any) -> Path:
    """Write one column `key` as one row group."""
    name = "key" if keys.type == pa.string() else "key.list.element"
    how = {"use_dictionary": False, "column_encoding": {name: encoding}, "write_statistics": False}
    pq.write_table(pa.table({"key": keys}), path, write_batch_size=1, **how, **options)
    return path


@pytest.mark.parametrize(
    ("encoding", "keys", "page_bytes"),
    [
        pytest.param("PLAIN", [LONG] * 100, 1 << 30, id="one page"),
        pytest.param("PLAIN", [[LONG] * 100], 1 << 30, id="one row of one page"),
        pytest.param("PLAIN", [[LONG] * 2] * 10 + [[LONG] * 100], 1 << 16, id="one row"),
        pytest.param("DELTA_LENGTH_BYTE_ARRAY", [LONG] * 100, 1 << 30, id="one page of lengths"),
        pytest.param("DELTA_BYTE_ARRAY", [LONG] * 100, 1 << 20, id="one page of prefixes"),
        pytest.param("DELTA_BYTE_ARRAY", [[LONG]] * 100, 1 << 20, id="lists of prefixes"),
    ],
)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_row_that_becomes_too_much_with_its_pages_is_refused_before_it_is_decoded(
    tmp_path, bounds, encoding, keys, page_bytes, version
):
    options = {"compression": "zstd", "data_page_size": page_bytes, "data_page_version": version}
    path = written(tmp_path / "m.parquet", pa.array(keys), encoding, **options)
    assert path.stat().st_size < 20_000
    problem = r"m\.parquet: row group 0 has a row whose pages become more than 1,048,576 bytes .* for column 'key'"
    with arrow_memory() as pool, pytest.raises((InvalidArgument, CorruptFile), match=problem):
        list(parquet.ParquetTable(LocalFile(path)).read(["key"]))
    assert pool.max_memory() < 4 * BOUND


def test_rows_of_unequal_size_are_read_as_few_at_once_as_the_bound_needs(tmp_path, bounds):
    """Nearly all rows are short, so the average would allow one read of all."""
    keys = pa.array(["k"] * 20_000 + [LONG] * 60)
    path = written(tmp_path / "m.parquet", keys, compression="zstd", data_page_size=1 << 16)
    sizes = [rows.nbytes for _, rows in parquet.ParquetTable(LocalFile(path)).read(["key"])]
    assert sum(sizes) > 60 * len(LONG) and max(sizes) <= BOUND


def test_more_values_than_the_footer_states_are_damage(tmp_path):
    path = written(tmp_path / "m.parquet", pa.array(["k"] * 100), compression="none")
    data = path.read_bytes()
    table = parquet.ParquetTable(LocalFile(path))
    # the page's header has the number of values, in zigzag form: field 1 of the struct in field 5
    header = bytes([0x15, 0xC8, 0x01])
    assert data.count(header) >= 1
    path.write_bytes(data.replace(header, bytes([0x15, 0xC8, 0x7F]), 1))
    with pytest.raises(CorruptFile, match=r"pages have 8,164 values of 'key', and the footer says 100"):
        list(table.read(["key"]))


@pytest.mark.parametrize(
    ("encoding", "compression"),
    [
        ("PLAIN", "lz4"),
        ("DELTA_LENGTH_BYTE_ARRAY", "none"),
        ("DELTA_BYTE_ARRAY", "snappy"),
        ("DELTA_BYTE_ARRAY", "gzip"),
        ("RLE_DICTIONARY", "brotli"),
        ("RLE_DICTIONARY", "zstd"),
    ],
)
def test_files_of_any_coding_are_read_whole(tmp_path, monkeypatch, encoding, compression):
    drawn = random.Random(f"{encoding}{compression}")
    texts = [f"{drawn.randrange(300):04}" * drawn.randrange(1, 40) for _ in range(1_000)]
    flat = [text if drawn.random() < 0.9 else None for text in texts]
    cuts = sorted({0, len(texts), *(drawn.randrange(len(texts)) for _ in range(400))})
    lists = [texts[begin:end] if drawn.random() < 0.9 else None for begin, end in itertools.pairwise(cuts)]
    lists += [[]] * 5
    for bound, whole in ((1 << 28, 1 << 28), (50_000, 1_000)):
        for module in (pages, parquet):
            monkeypatch.setattr(module, "DECODED_BYTES", bound)
        monkeypatch.setattr(pages, "_WHOLE_BYTES", whole)
        for keys, version in itertools.product((flat, lists), ("1.0", "2.0")):
            path, path_of_keys = tmp_path / "m.parquet", "key" if keys is flat else "key.list.element"
            options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {path_of_keys: encoding}}
            if encoding == "RLE_DICTIONARY":
                # pages without a dictionary follow a full dictionary
                options = {"use_dictionary": True, "dictionary_pagesize_limit": 5_000}
            options |= {"compression": compression, "data_page_version": version, "data_page_size": 4_000}
            pq.write_table(pa.table({"n": range(len(keys)), "key": keys}), path, write_batch_size=50, **options)
            storage, name = open_storage(f"memory://{tmp_path.name}"), f"{version}{encoding}{path_of_keys}{bound}"
            storage.put(name, path.read_bytes())
            for place in (LocalFile(path), StoredFile(name, storage, name, path.stat().st_size)):
                for shared in ([], ["key"] if keys is flat else []):
                    found = [rows for _, rows in parquet.ParquetTable(place).read_group(0, ["n", "key"], shared=shared)]
                    got = [value for rows in found for value in rows.column("key").to_pylist()]
                    assert got == keys
                    assert [n for rows in found for n in rows.column("n").to_pylist()] == list(range(len(keys)))


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("values", [[f"k{n}" for n in range(500)], [["a", f"k{n}"] for n in range(500)]], ids=type)
@pytest.mark.parametrize("frames", [0, 1])
def test_delta_encoded_text_in_hadoops_lz4(tmp_path, encoding, version, values, frames):
    """The codec is the old number 5, with Hadoop's frames (Spark's `lz4`) and without them."""
    compress = pa.Codec("lz4_raw").compress
    path = written(tmp_path / "m.parquet", pa.array(values), encoding, compression="lz4", data_page_version=version)
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    codecs = data[footer:].replace(bytes([0x15, 0x0E]), bytes([0x15, 0x0A]))
    path.write_bytes(data[:footer] + codecs)
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert column.compression not in ("LZ4", "LZ4_RAW")
    found = [rows for _, rows in parquet.ParquetTable(LocalFile(path)).read(["key"])]
    assert [value for rows in found for value in rows.column("key").to_pylist()] == values
    body = b"".join(str(value).encode() for value in values)
    parts = [body[at : at + 1000] for at in range(0, len(body), 1000)]
    packed = [compress(part, asbytes=True) for part in parts]
    framed = b"".join(struct.pack(">II", *map(len, both)) + both[1] for both in zip(parts, packed, strict=True))
    assert pages._of_hadoop(framed if frames else compress(body, asbytes=True), len(body)) == body
    with pytest.raises(OSError):
        pages._of_hadoop(framed[:-1], len(body))
